"""Sums in half precision: half the bytes of float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from offbeat.numerics.compressors.interface import Requests, Sum


@dataclass(frozen=True)
class Cast:
    """Rounds what is sent, and each partial sum, to a floating-point dtype of 16 bits.

    bfloat16 has the range of float32 and a relative error of at most 2**-8 in each rounding; float16 has
    2**-11, overflows above 65,504, and loses precision below 6e-5. No residual is kept.

    Source: torch's `bf16_compress_hook` and `fp16_compress_hook`.

    Args:
        dtype: bfloat16 or float16.
    """

    keeps_residual: ClassVar[bool] = False

    dtype: torch.dtype

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> Cast:
        """See `CompressionMethod.compressor`: the same for all layouts."""
        return self

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
        """See `Compressor.sum`."""
        out.copy_((yield Sum(vector.to(self.dtype), is_last=True)))

    def finish_residual(
        self, vector: torch.Tensor, total: torch.Tensor, residual: torch.Tensor, *, share: float
    ) -> None:
        """See `Compressor.finish_residual`: none is kept."""
