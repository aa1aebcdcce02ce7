"""PowerSGD: gradients of layers as products of two thin matrices, found by one step of power iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offbeat.numerics.compressors.interface import Requests, Sum
from offbeat.numerics.compressors.layout import Layout, drop_if_not_finite, is_matrix

_RATE_MIN = 2  # a matrix is compressed if that saves more than half of its elements


@dataclass(frozen=True)
class PowerSGD:
    """Approximates each matrix by one of this rank; the error is added to the next gradient.

    Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD: practical low-rank gradient compression for
    distributed optimization", algorithms 1 and 2, with warm start. As in torch's `powerSGD_hook`, a member's
    part of the sum is its share by weight, so its residual is the difference from the mean; the residuals'
    sum is that of the paper. Deviation: columns are made orthonormal by a QR decomposition, which
    gives the same approximation and stays finite for matrices of lower rank.

    Args:
        rank: of the approximation, at least 1.

    Raises:
        ValueError: the rank is less than 1.
    """

    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"expected a rank of at least 1, got {self.rank}")

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> PowerSGDCompressor:
        """See `CompressionMethod.compressor`."""
        return PowerSGDCompressor(shapes, self.rank, seed)


class PowerSGDCompressor:
    """Sums tensors with at least two dimensions as matrices, and those that would not shrink unchanged.

    A tensor's first dimension gives the rows of its matrix. Two sums are requested: of the products with the
    right factors, followed by what is not compressed, and of the products with the left ones.

    Args:
        shapes: of the tensors that a vector holds.
        rank: of the approximation.
        seed: of the first right factors.
    """

    keeps_residual: ClassVar[bool] = True

    def __init__(self, shapes: Sequence[torch.Size], rank: int, seed: int) -> None:
        self._rank, self._seed = rank, seed
        self._layout = Layout(shapes, self._pays)

    def sum(
        self,
        vector: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor,
        state: Any,
        *,
        members: int,
        position: int,
    ) -> Requests:
        """See `Compressor.sum`; the state is the right factors."""
        right = self._first_right(vector) if state is None else state
        parts = [m @ q for m, q in zip(self._as_matrices(vector), right, strict=True)]
        uncompressed = self._layout.uncompressed(vector)
        values = torch.cat([*(part.flatten() for part in parts), uncompressed])
        first = yield Sum(values, is_last=not parts)
        *pieces, summed = first.split([*(part.numel() for part in parts), len(uncompressed)])
        self._layout.write_uncompressed(summed, out, residual)
        if not parts:
            return []
        left = [torch.linalg.qr(piece.view_as(part)).Q for piece, part in zip(pieces, parts, strict=True)]
        parts = [m.T @ p for m, p in zip(self._as_matrices(vector), left, strict=True)]
        second = yield Sum(torch.cat([part.flatten() for part in parts]), is_last=True)
        right = [
            piece.view_as(part)
            for piece, part in zip(second.split([part.numel() for part in parts]), parts, strict=True)
        ]
        for p, q, product in zip(left, right, self._as_matrices(out), strict=True):
            torch.matmul(p, q.T, out=product)
        return right if second.isfinite().all() else None  # the step is lost, and later ones shall not be

    def finish_residual(
        self, vector: torch.Tensor, total: torch.Tensor, residual: torch.Tensor, *, share: float
    ) -> None:
        """See `Compressor.finish_residual`: this member's part of the sum is its share."""
        for span in self._layout.compressed:
            torch.sub(span.of(vector), span.of(total), alpha=share, out=span.of(residual))
        drop_if_not_finite(residual)

    def _pays(self, shape: torch.Size) -> bool:
        if not is_matrix(shape):
            return False
        return (shape[0] + math.prod(shape[1:])) * self._rank * _RATE_MIN < shape.numel()

    def _as_matrices(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [span.of(vector).view(span.shape[0], -1) for span in self._layout.compressed]

    def _first_right(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return random right factors, the same on all members."""
        generator = torch.Generator(device="cpu").manual_seed(self._seed)
        return [
            torch.randn(math.prod(span.shape[1:]), self._rank, generator=generator, dtype=vector.dtype)
            for span in self._layout.compressed
        ]
