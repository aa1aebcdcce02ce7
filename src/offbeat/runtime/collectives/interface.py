"""What a worker asks of whatever sums tensors over the members of a group, and the memory that suits it.

There are two that do: `LinkExchange` runs schedules over links, `TorchExchange` hands the tensors to
`torch.distributed`. Both work in the background: a call returns a `Pending` at once. This module imports
neither, sums and sends nothing, and never decides who takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from offbeat.errors import WorkerError
from offbeat.runtime.collectives.contribution import Part
from offbeat.runtime.transport.endpoint import Endpoint


class Pending(Protocol):
    """One exchange under way.

    Attributes:
        ended_s: when it was over, by the performance counter; None before, or where nobody saw it.
    """

    ended_s: float | None

    def wait(self, deadline_s: float) -> None:
        """Blocks until the result is in the tensor and its memory may be written again.

        Raises:
            WorkerError: the exchange was abandoned, or it was not done within `deadline_s` seconds.
        """


class Exchange(Protocol):
    """Collectives over a fixed group; all members make the same calls with the same ids."""

    def all_reduce(
        self,
        flat: torch.Tensor,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = "ring",
        priority: int = 0,
        parts: Sequence[Part] = (),
    ) -> Pending:
        """Sums the 1-D tensor `flat` over the members, into another one like it.

        `flat` is only read, so that the same values can be summed again should this not succeed; but where
        `parts` of it lie elsewhere, it is written as far as has to be sent.

        Args:
            exchange_id: never used twice, 0 <= exchange_id < 2**32; larger is later.
            index: tells apart the tensors of one exchange id, less than 2**20.
            algorithm: as `offbeat.numerics.schedules.schedule` knows it; the same on all members. Torch has
                its own.
            priority: what has a lower number overtakes what is under way. Torch keeps the order of the calls.

        Raises:
            ValueError: a member may still read `into` (`TensorMemory.is_read`), or an unknown algorithm.
        """

    def prepare(
        self, into: torch.Tensor, *, exchange_id: int, index: int = 0, algorithm: str = "ring"
    ) -> None:
        """Says that an `all_reduce` into this tensor will come with this id, index and algorithm.

        What faster members send for it then has a place to go to; without, it is kept and copied later.
        """

    def broadcast(self, flat: torch.Tensor, *, root: int, exchange_id: int, index: int = 0) -> Pending:
        """Copies the 1-D tensor `flat` of member number `root` to the others, in place."""

    def abandon(self, error: WorkerError) -> None:
        """Ends every pending exchange, and every later one, with `error`. Any thread may call it."""


class TensorMemory:
    """Memory from which a worker's tensors are sent best, in whatever exchange.

    Args:
        endpoint: this worker's links, every other worker on this host introduced.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def zeros(self, elements: int, dtype: torch.dtype, *, device: torch.device) -> torch.Tensor:
        """A new 1-D tensor of zeros; on the CPU, workers on this host read it where it lies."""
        if device.type != "cpu" or not elements:
            return torch.zeros(elements, dtype=dtype, device=device)
        return torch.frombuffer(self._endpoint.allocate(elements * dtype.itemsize), dtype=dtype)

    def is_read(self, flat: torch.Tensor) -> bool:
        """Whether another worker may still read this tensor, on account of an exchange that was abandoned.

        Then it must not be written any more: take another in its place.
        """
        return flat.device.type == "cpu" and self._endpoint.is_read(bytes_of(flat))


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous 1-D tensor on the CPU; what is written there, it holds."""
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)
