"""Interface of compressors: they say what is to be summed or gathered over the members, and send nothing.

A compressor sums a vector over the members of a group approximately, with fewer bytes. It yields requests,
which its caller carries out. So the same compressor runs over real links, in a test without any, or in a
simulation that counts bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch


class Sum(NamedTuple):
    """Asks for the sum of a tensor over the members.

    Attributes:
        values: 1-D; the compressor does not change it afterwards.
    """

    values: torch.Tensor


class Gather(NamedTuple):
    """Asks for the tensors of all members.

    The answer has one row for each member, in their order, the same on all members.

    Attributes:
        values: 1-D, equally long on all members; the compressor does not change it afterwards.
    """

    values: torch.Tensor


class Compressed(NamedTuple):
    """What is left when a vector has been summed.

    Attributes:
        residual: the part of this member's vector that is not in the sum, to be added to its next vector;
            None if nothing is left.
        state: for the next call; the same on all members.
    """

    residual: torch.Tensor | None
    state: Any


Requests: TypeAlias = Generator[Sum | Gather, torch.Tensor, Compressed]
"""Yields what it asks for, gets the answers, and returns what is left."""


class Compressor(Protocol):
    """Sums vectors of one layout.

    All members make the same calls with vectors of the same layout, and get the same bits. A call changes
    nothing but `out`: a round that is repeated repeats the call, and a round that succeeds keeps what the
    call has returned.
    """

    def sum(self, vector: torch.Tensor, out: torch.Tensor, state: Any, *, members: int) -> Requests:
        """Sum a vector over the members.

        Args:
            vector: 1-D, this member's part; unchanged.
            out: receives the sum; of the same shape and dtype.
            state: from the last call that counts; None in a new group.
            members: their number.
        """


class CompressionMethod(Protocol):
    """A method with its options."""

    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> Compressor:
        """Return the compressor of vectors that hold tensors of these shapes, one after another.

        Args:
            shapes: of the tensors.
            seed: of random numbers, the same on all members.
        """
