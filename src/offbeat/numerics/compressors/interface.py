"""Interface of compressors: they say what is to be exchanged among the members, and send nothing.

A compressor sums a vector over the members of a group approximately, with fewer bytes. It yields requests,
which its caller carries out. So the same compressor runs over real links, in a test without any, or in a
simulation that counts bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch


class Sum(NamedTuple):
    """Asks for the sum of a tensor over the members.

    Attributes:
        values: 1-D; unchanged until the compressor has the answer.
        is_last: no request follows. So a member that begins it owes the others nothing more.
    """

    values: torch.Tensor
    is_last: bool = False


class AllGather(NamedTuple):
    """Asks for the tensors of all members.

    The answer has one row for each member, in their order, the same on all members.

    Attributes:
        values: 1-D, equally long on all members; unchanged until the compressor has the answer.
        is_last: see `Sum`.
    """

    values: torch.Tensor
    is_last: bool = False


class AllToAll(NamedTuple):
    """Asks for what the members have for this one.

    The answer has one row for each member, in their order: the part that it has sent to this one.

    Attributes:
        values: 1-D, as many equal parts as there are members, for each of them, in their order; unchanged
            until the compressor has the answer.
        is_last: see `Sum`.
    """

    values: torch.Tensor
    is_last: bool = False


Requests: TypeAlias = Generator[Sum | AllGather | AllToAll, torch.Tensor, Any]
"""Yields what it asks for, the last one marked as such, gets the answers, and returns the next state."""


class Compressor(Protocol):
    """Sums vectors of one layout.

    All members make the same calls with vectors of the same layout, and get the same sums. A call changes
    nothing but `out` and `residual`: a round that is repeated repeats the call, and a round that succeeds
    keeps what the call has written and returned.

    Attributes:
        keeps_residual: what a sum lacks of this member's vector is to be added to its next vector.
    """

    keeps_residual: ClassVar[bool]

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
        """Sum a vector over the members.

        Args:
            vector: 1-D, this member's part; unchanged.
            out: receives the sum; of the same shape and dtype.
            residual: memory of the same shape and dtype, for `finish_residual`; empty if none is kept.
            state: what the last call that counts has returned, the same on all members; None in a new group.
                Numbers, tensors, and lists and tuples of them, so that `torch.load` reads it as it is.
            members: their number, at least 2.
            position: this member's index among them.
        """

    def finish_residual(
        self, vector: torch.Tensor, total: torch.Tensor, residual: torch.Tensor, *, share: float
    ) -> None:
        """Write what the sum lacks of this member's vector; zeros where any of it is not finite.

        Over all members the residuals are what the sum lacks of the sum of the vectors.

        Args:
            vector, residual: as they were passed to `sum`, which has ended.
            total: its `out`.
            share: of this member in the weight of all.
        """


class Encoder(Protocol):
    """Encodes vectors of one layout, so that each code can be decoded without any other.

    Tensors of fewer than two dimensions are part of a code, whole.
    """

    def encode(self, vector: torch.Tensor, number: int) -> torch.Tensor:
        """Return the code of a vector: 1-D, equally long for all vectors of the layout and a dtype.

        Args:
            vector: 1-D, float32 or float64, on the CPU; unchanged.
            number: of the round, on which random numbers depend.
        """

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """Write the vector that a code stands for: the same bits wherever the code is decoded.

        Args:
            code: of an encoder of the same method and layout, with any seed.
            out: receives the vector; 1-D, of the dtype of the one that was encoded.
        """

    def omega(self) -> float:
        """Return a lower bound of the contraction, more than 0 and at most 1.

        With Q(x) what the code of a vector x stands for, E||Q(x) - x||^2 <= (1 - omega) ||x||^2.
        """


class EncodingMethod(Protocol):
    """A method of which vectors can be encoded, with its options."""

    def encoder(self, shapes: Sequence[torch.Size], seed: int) -> Encoder:
        """Return the encoder of vectors that hold tensors of these shapes, one after another.

        Args:
            shapes: of the tensors.
            seed: of random numbers, at least 0; another one on each worker, so that their errors differ.
        """


class CompressionMethod(Protocol):
    """A method with its options."""

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> Compressor:
        """Return the compressor of vectors that hold tensors of these shapes, one after another.

        Args:
            shapes: of the tensors.
            seed: of random numbers, the same on all members.
        """


def keeps_residual(method: CompressionMethod | None) -> bool:
    """Whether what is not sent of a vector is added to the next one; not without a method."""
    return method is not None and method.compressor([], seed=0).keeps_residual
