"""What compressors share: which tensors of a vector are compressed, sums of the others, and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from offbeat.numerics.compressors.interface import Requests, Sum


class Span(NamedTuple):
    """A tensor in a vector: its elements `start` to `stop`."""

    start: int
    stop: int
    shape: torch.Size

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return self.stop - self.start

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return its elements in a vector, as a view."""
        return vector[self.start : self.stop]


def is_matrix(shape: torch.Size) -> bool:
    """Whether a tensor has at least two dimensions, as those with most of a model's elements have."""
    return len(shape) > 1


class Layout:
    """The tensors that a vector holds, one after another: those that are compressed, and the others.

    Args:
        shapes: of the tensors.
        is_compressed: whether a tensor of a shape is compressed.

    Attributes:
        compressed: the tensors that are compressed.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], is_compressed: Callable[[torch.Size], bool] = is_matrix
    ) -> None:
        self.compressed: list[Span] = []
        self._uncompressed: list[Span] = []
        start = 0
        for shape in shapes:
            span = Span(start, start + shape.numel(), shape)
            (self.compressed if is_compressed(shape) else self._uncompressed).append(span)
            start = span.stop

    def uncompressed(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the elements of a vector that are not compressed, one after another."""
        return torch.cat([vector[:0], *(span.of(vector) for span in self._uncompressed)])

    def write_uncompressed(self, values: torch.Tensor, out: torch.Tensor, residual: torch.Tensor) -> None:
        """Write the sums of these elements, which leave no residual.

        Args:
            values: the sums, as `uncompressed` returns elements.
            out, residual: see `Compressor.sum`.
        """
        self._write(values, out)
        for span in self._uncompressed:
            span.of(residual).zero_()

    def _write(self, values: torch.Tensor, out: torch.Tensor) -> None:
        pieces = values.split([span.elements for span in self._uncompressed])
        for span, piece in zip(self._uncompressed, pieces, strict=True):
            span.of(out).copy_(piece)

    def append_uncompressed(self, message: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Return a code: a message on the compressed tensors, followed by the elements of the others."""
        return torch.cat([message, self.uncompressed(vector).view(message.dtype)])

    def split_uncompressed(self, code: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the message that a code begins with; write the elements that follow it to a vector."""
        elements = sum(span.elements for span in self._uncompressed)
        length = len(code) - elements * out.element_size() // code.element_size()
        self._write(code[length:].clone().view(out.dtype), out)
        return code[:length]

    @property
    def has_uncompressed(self) -> bool:
        """Whether `sum_uncompressed` makes a request."""
        return bool(self._uncompressed)

    def sum_uncompressed(self, vector: torch.Tensor, out: torch.Tensor, residual: torch.Tensor) -> Requests:
        """Sum these elements, as the last request; see `Compressor.sum`. Without any, there is none."""
        if self._uncompressed:
            self.write_uncompressed((yield Sum(self.uncompressed(vector), is_last=True)), out, residual)


def sum_whole(vector: torch.Tensor, out: torch.Tensor, residual: torch.Tensor) -> Requests:
    """Sum a vector uncompressed, which leaves no residual; see `Compressor.sum`."""
    residual.zero_()
    out.copy_((yield Sum(vector, is_last=True)))


class WritesResidual:
    """Base of compressors whose `sum` writes the residual."""

    keeps_residual: ClassVar[bool] = True

    def finish_residual(
        self, vector: torch.Tensor, total: torch.Tensor, residual: torch.Tensor, *, share: float
    ) -> None:
        """See `Compressor.finish_residual`: `sum` has written it."""
        drop_if_not_finite(residual)


def drop_if_not_finite(residual: torch.Tensor) -> None:
    """Zero a residual that is not finite: the step is lost, and later ones shall not be."""
    if not residual.sum().isfinite():
        residual.zero_()


def check_ratio(ratio: float) -> None:
    """Check a fraction of the elements that are sent.

    Raises:
        ValueError: it is not more than 0 and at most 1.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"expected a ratio of more than 0 and at most 1, got {ratio}")


def elements_sent(span: Span, ratio: float) -> int:
    """Return how many elements of a tensor are sent, at least one."""
    return math.ceil(ratio * span.elements)


def least_fraction_sent(layout: Layout, ratio: float) -> float:
    """Return the least fraction of a tensor's elements that are sent."""
    return min([1.0, *(elements_sent(span, ratio) / span.elements for span in layout.compressed)])
