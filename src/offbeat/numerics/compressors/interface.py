"""Interface of compressors: they say what is to be summed over the members, and do not send it.

A compressor sums a vector over the members of a group approximately, with fewer bytes. It yields tensors; its
caller has each of them summed over the members, and sends back the sum. So the same compressor runs over real
links, in a test without any, or in a simulation that counts bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Compressed(NamedTuple):
    """What is left when a vector has been summed.

    Attributes:
        residual: the part of this member's vector that is not in the sum, to be added to its next vector;
            None if the compressor keeps none.
        state: for the next call; the same on all members.
    """

    residual: torch.Tensor | None
    state: Any


SumRequests = Generator[torch.Tensor, torch.Tensor, Compressed]
"""Yields 1-D tensors to be summed, which the generator does not change afterwards; gets the sums."""


class Compressor(Protocol):
    """Sums vectors of one layout.

    All members make the same calls with vectors of the same layout, and get the same bits. A call changes
    nothing but `out`: a round that is repeated repeats the call, and a round that succeeds keeps what the
    call has returned.
    """

    def sum(self, vector: torch.Tensor, out: torch.Tensor, state: Any, *, members: int) -> SumRequests:
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
