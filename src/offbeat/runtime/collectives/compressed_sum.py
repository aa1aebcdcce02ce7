"""Sums over a group's members that a compressor makes of several exchanges, one after another.

The loop's thread begins each exchange: what a compressor computes would keep the links' thread from its
links. This module decides nothing.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from offbeat.errors import WorkerError
from offbeat.numerics.compressors.interface import AllGather, AllToAll, Requests
from offbeat.runtime.collectives.interface import Exchange, PendingExchange

EXCHANGES_MAX = 8
"""Exchanges of one `CompressedSum`: the compressor's, and those that it does not wait for."""


class CompressedSum:
    """The sum of vectors by a compressor, and sums next to it, which `advance` carries on request by request.

    Several threads may wait for it.

    Args:
        exchange: over the group's members.
        exchange_id: of all requests; see `Exchange.all_reduce`.
        algorithm, priority: of sums.
        index: of the first request; the next `EXCHANGES_MAX` indices are this sum's.

    Attributes:
        state: what the compressor has returned.
        ended_s: see `PendingExchange`.
    """

    def __init__(
        self, exchange: Exchange, exchange_id: int, index: int, algorithm: str, priority: int
    ) -> None:
        self._exchange, self._exchange_id, self._next_index = exchange, exchange_id, index
        self._end_index = index + EXCHANGES_MAX
        self._algorithm, self._priority = algorithm, priority
        self._others: list[PendingExchange] = []  # sums that the compressor does not wait for
        self._requests: Requests | None = None
        self._answer = torch.empty(0, device="cpu")  # to the request under way
        self._pending: PendingExchange | None = None
        self._is_last = False  # the request under way
        self._lock = threading.Lock()  # held by the thread that runs the compressor
        self.state: Any = None
        self.ended_s: float | None = None

    def add(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Begin a sum that the compressor does not wait for."""
        self._others.append(self._all_reduce(values, into))

    def begin(self, requests: Requests) -> None:
        """Begin the compressor's first request."""
        self._requests = requests
        self._request_next(None)

    def wait(self, timeout_s: float) -> None:
        """See `PendingExchange.wait`: to the end."""
        deadline_s = time.monotonic() + timeout_s
        while self._pending is not None:
            self._answer_request(max(0.0, deadline_s - time.monotonic()))
        for other in self._others:
            other.wait(max(0.0, deadline_s - time.monotonic()))
        self.ended_s = time.perf_counter()

    @property
    def can_advance(self) -> bool:
        """Whether `advance` would begin an exchange without waiting."""
        pending = self._pending
        return pending is not None and pending.ended_s is not None and not self._is_last

    def advance(self, timeout_s: float) -> bool:
        """Wait for one of several requests and begin the next; return whether there is yet another one.

        The last one is left to `wait`.

        Raises:
            WorkerError: see `PendingExchange.wait`.
        """
        if not self._is_last:
            self._answer_request(timeout_s)
        return self._pending is not None and not self._is_last

    def _answer_request(self, timeout_s: float) -> None:
        """Wait for the answer to the request under way, and begin the next one."""
        pending = self._pending
        if pending is not None:
            pending.wait(timeout_s)
            with self._lock:
                if self._pending is pending:  # no other thread has done it
                    self._request_next(self._answer)

    def advance_if_ended(self, timeout_s: float) -> None:
        """Begin each request whose predecessor has ended, without a wait for one that has not.

        `ended_s` is set once all have ended, or one has failed: then `wait` raises.

        Args:
            timeout_s: how long what ends an exchange may take to return, in seconds.
        """
        try:
            while self._pending is not None and self._pending.ended_s is not None:
                self._answer_request(timeout_s)
        except WorkerError:
            self.ended_s = time.perf_counter()
        if self._pending is None and all(other.ended_s is not None for other in self._others):
            self.ended_s = time.perf_counter()

    def _request_next(self, answer: torch.Tensor | None) -> None:
        # The program may wait in any mode.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            self._run_compressor(answer)

    def _run_compressor(self, answer: torch.Tensor | None) -> None:
        assert self._requests is not None
        try:
            request = next(self._requests) if answer is None else self._requests.send(answer)
        except StopIteration as end:
            self.state, self._pending = end.value, None
            return
        self._is_last = request.is_last
        if isinstance(request, AllGather):
            self._answer = request.values.new_empty(self._exchange.size, len(request.values))
            self._answer[self._exchange.position] = request.values
            self._pending = self._exchange.all_gather(
                self._answer.view(-1), exchange_id=self._exchange_id, index=self._take_index()
            )
        elif isinstance(request, AllToAll):
            members = self._exchange.size
            self._answer = torch.empty_like(request.values).view(members, len(request.values) // members)
            self._pending = self._exchange.all_to_all(
                request.values,
                self._answer.view(-1),
                exchange_id=self._exchange_id,
                index=self._take_index(),
            )
        else:
            self._answer = torch.empty_like(request.values)
            self._pending = self._all_reduce(request.values, self._answer)

    def _all_reduce(self, values: torch.Tensor, into: torch.Tensor) -> PendingExchange:
        return self._exchange.all_reduce(
            values,
            into,
            exchange_id=self._exchange_id,
            index=self._take_index(),
            algorithm=self._algorithm,
            priority=self._priority,
        )

    def _take_index(self) -> int:
        assert self._next_index < self._end_index, "a compressor makes fewer than EXCHANGES_MAX requests"
        self._next_index += 1
        return self._next_index - 1
