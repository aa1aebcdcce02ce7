"""Buckets whose gradients are summed by a compressor.

Theory of operation
-------------------

A compressor says what is to be summed or gathered, one tensor after another; each is an exchange of its own.
The first begins when the bucket is full, during the backward pass; the next ones begin when the loop waits
for the bucket, in the loop's thread, since computing them would compete with the backward pass anyway.
Buffers and the trailer are summed as they are.

A residual is what this worker has contributed and no sum contains yet. `BucketSet` packs it with the next
gradient. It changes only when a round's means are used: a round that is abandoned and repeated begins with
the same residual, and a round without samples leaves it. Therefore a bucket has memory for two. A worker
whose model was replaced drops its residual, which belongs to other gradients. The compressor's state is the
same on all members, so each group begins without one.

Residuals are scaled as contributions are, and kept by entry, as buckets are replaced when a group grows. This
module decides nothing about rounds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from offbeat.numerics.collectives.buckets import Bucket
from offbeat.numerics.compressors.interface import CompressionMethod, Gather, Requests
from offbeat.runtime.averaging.buckets import GradientBucket, ZerosFactory
from offbeat.runtime.collectives.contribution import ExternalElements
from offbeat.runtime.collectives.interface import Exchange, PendingExchange

_REQUESTS_MAX = 8  # exchanges of one bucket: the compressor's, and that of entries that are no gradients


class CompressedBucket(GradientBucket):
    """A bucket on the CPU whose gradients are compressed.

    Args:
        bucket, shapes, parameters, zeros: see `GradientBucket`.
        method: makes the compressor.
        seed: of the compressor, the same on all workers.
        residuals: by entry; changed here.
    """

    allows_external: ClassVar[bool] = False

    def __init__(
        self,
        bucket: Bucket,
        shapes: Sequence[torch.Size],
        parameters: int,
        zeros: ZerosFactory,
        *,
        method: CompressionMethod,
        seed: int,
        residuals: dict[int, torch.Tensor],
    ) -> None:
        super().__init__(bucket, shapes, parameters, zeros)
        gradients = [shapes[entry] for entry in bucket.entries[: self.gradient_count]]
        self._compressor = method.compressor(gradients, seed)
        self._exchange: Exchange | None = None  # over the members that share `_state`
        self._state: Any = None
        self._residuals = residuals
        self._next_residual, self._spare_residual = self._make_residual(), self._make_residual()
        self._sums: _CompressedSums | None = None  # of the round under way

    def _make_residual(self) -> torch.Tensor | None:
        own = self.contribution.flat[: self.gradient_elements]
        return torch.zeros_like(own) if self._compressor.keeps_residual else None

    def all_reduce(
        self,
        exchange: Exchange,
        *,
        exchange_id: int,
        index: int,
        algorithm: str = "ring",
        priority: int = 0,
        external: Sequence[ExternalElements] = (),
    ) -> PendingExchange:
        """See `GradientBucket.all_reduce`."""
        if exchange is not self._exchange:
            self._exchange, self._state = exchange, None
        self._sums = _CompressedSums(exchange, exchange_id, index * _REQUESTS_MAX, algorithm, priority)
        own, total, split = self.contribution.flat, self.output.flat, self.gradient_elements
        if split < len(own):
            self._sums.add(own[split:], total[split:])
        if split:
            requests = self._compressor.sum(
                own[:split], total[:split], self._next_residual, self._state, members=exchange.size
            )
            self._sums.begin(requests)
        return self._sums

    def carry_on(self, timeout_s: float) -> bool:
        """See `GradientBucket.carry_on`."""
        return self._sums is not None and self._sums.carry_on(timeout_s)

    def prepare(self, exchange: Exchange, *, exchange_id: int, index: int, algorithm: str = "ring") -> None:
        """See `GradientBucket.prepare`: nothing, as no sum arrives in this bucket's memory."""

    def hand_over_means(self) -> None:
        """See `GradientBucket.hand_over_means`; the residual is what the means lack."""
        super().hand_over_means()
        if self._sums is None or not self.gradient_elements:
            return
        self._state = self._sums.state
        if (residual := self._next_residual) is not None:
            ends = [*self.offsets[1 : self.gradient_count], self.gradient_elements]
            for entry, start, stop in zip(self.entries, self.offsets, ends, strict=False):
                self._residuals[entry] = residual[start:stop]
            self._next_residual, self._spare_residual = self._spare_residual, residual

    def end_round(self) -> None:
        """See `GradientBucket.end_round`."""
        super().end_round()
        self._sums = None


class _CompressedSums:
    """The sums of one bucket in one round, which `wait` carries on.

    Args:
        exchange: over the group's members.
        exchange_id, algorithm, priority: of all requests; see `Exchange.all_reduce`.
        index: of the first request.

    Attributes:
        state: what the compressor has returned.
        ended_s: see `PendingExchange`.
    """

    def __init__(
        self, exchange: Exchange, exchange_id: int, index: int, algorithm: str, priority: int
    ) -> None:
        self._exchange, self._exchange_id, self._next_index = exchange, exchange_id, index
        self._algorithm, self._priority = algorithm, priority
        self._others: list[PendingExchange] = []  # sums that the compressor does not wait for
        self._requests: Requests | None = None
        self._answer = torch.empty(0, device="cpu")  # to the request under way
        self._pending: PendingExchange | None = None
        self.state: Any = None
        self.ended_s: float | None = None

    def add(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Begin a sum beside those of the compressor."""
        self._others.append(self._all_reduce(values, into))

    def begin(self, requests: Requests) -> None:
        """Begin the compressor's first request."""
        self._requests = requests
        self._request_next(None)

    def wait(self, timeout_s: float) -> None:
        """See `PendingExchange.wait`: carries on to the end."""
        deadline_s = time.monotonic() + timeout_s
        while self.carry_on(max(0.0, deadline_s - time.monotonic())):
            pass
        for other in self._others:
            other.wait(max(0.0, deadline_s - time.monotonic()))
        self.ended_s = time.perf_counter()

    def carry_on(self, timeout_s: float) -> bool:
        """Wait for the answer to the request under way; return whether another one has been begun then.

        Raises:
            WorkerError: see `PendingExchange.wait`.
        """
        if self._pending is not None:
            self._pending.wait(timeout_s)
            self._request_next(self._answer)
        return self._pending is not None

    @torch.no_grad()
    def _request_next(self, answer: torch.Tensor | None) -> None:
        assert self._requests is not None
        try:
            request = next(self._requests) if answer is None else self._requests.send(answer)
        except StopIteration as end:
            self.state, self._pending = end.value, None
            return
        if isinstance(request, Gather):
            self._answer = request.values.new_empty(self._exchange.size, len(request.values))
            self._answer[self._exchange.position] = request.values
            self._pending = self._exchange.gather(
                self._answer.view(-1), exchange_id=self._exchange_id, index=self._take_index()
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
        self._next_index += 1
        return self._next_index - 1
