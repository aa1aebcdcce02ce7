"""Buckets whose gradients are summed by a compressor.

Theory of operation
-------------------

A compressor says what is to be summed or gathered, one tensor after another; each is an exchange of its own.
The first begins when the bucket is full, during the backward pass; the next ones begin in the loop's thread,
when the averager calls `advance`, since computing them would compete with the backward pass anyway. A sum
arrives only when all members have begun its last exchange. So that no two members wait for each other,
`advance` is called for all buckets, in the same order on all members, before any sum is waited for. After the
last exchange each member works alone: the first thread that waits for the sum computes it. Buffers and the
trailer are summed as they are.

A residual is what no sum contains yet of this worker's gradients. It is packed with the next gradient (error
feedback), and kept as a gradient is, without the worker's weight, so that a round with fewer samples
gives it no other weight than its gradients. It changes only when a round's means are used: a round that is
abandoned and repeated begins with the same residual, and a round leaves it where this worker has weight 0 or
no member has a gradient. Therefore a bucket has memory for two. A worker whose model was replaced drops its
residuals, which belong to other gradients. Residuals are kept by entry, as buckets are replaced when a group
grows. The compressor's state is the same on all members, so each group begins without one.

This module decides nothing about rounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from offbeat.numerics.collectives.buckets import Bucket
from offbeat.numerics.compressors.interface import CompressionMethod, Gather, Requests
from offbeat.runtime.averaging.buckets import GradientBucket, ZerosFactory
from offbeat.runtime.collectives.contribution import ExternalElements
from offbeat.runtime.collectives.interface import Exchange, PendingExchange
from offbeat.runtime.training.partial_step import optimizer_step_mode

EXCHANGES_MAX = 8
"""Exchanges of one bucket in a round: the compressor's, and that of the entries that are no gradients."""


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
        residual_elements = self.gradient_elements if self._compressor.keeps_residual else 0
        own = self.contribution.flat
        self._next_residual, self._spare_residual = (own.new_zeros(residual_elements) for _ in range(2))
        self._sums: _CompressedSums | None = None  # until `commit`
        self._total = own.new_empty(0)  # the memory of their result, which `output` no longer is after a swap

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
        """See `GradientBucket.all_reduce`; the next `EXCHANGES_MAX` indices are this bucket's.

        A single member has nothing to send, and compresses nothing.
        """
        self._sums = None
        if exchange.size == 1:
            return super().all_reduce(
                exchange, exchange_id=exchange_id, index=index, algorithm=algorithm, priority=priority
            )
        if exchange is not self._exchange:
            self._exchange, self._state = exchange, None
        own, total, split = self.contribution.flat, self.output.flat, self.gradient_elements
        self._sums = _CompressedSums(exchange, exchange_id, index, algorithm, priority)
        self._total = total[:split]
        if split < len(own):
            self._sums.add(own[split:], total[split:])
        if split:
            requests = self._compressor.sum(
                own[:split], total[:split], self._next_residual, self._state, members=exchange.size
            )
            self._sums.begin(requests)
        return self._sums

    @property
    def can_advance(self) -> bool:
        """See `GradientBucket.can_advance`."""
        sums = self._sums
        return sums is not None and sums.can_advance

    def advance(self, timeout_s: float) -> bool:
        """See `GradientBucket.advance`."""
        return self._sums is not None and self._sums.advance(timeout_s)

    def prepare(self, exchange: Exchange, *, exchange_id: int, index: int, algorithm: str = "ring") -> None:
        """See `GradientBucket.prepare`: nothing, as compressed sums do not arrive in this bucket's memory."""

    def commit(self, *, own_weight: float, weight: float, used: Sequence[float]) -> None:
        """See `GradientBucket.commit`: keeps the compressor's state, and new residuals."""
        sums, total = self._sums, self._total
        self._sums, self._total = None, total.new_empty(0)
        if sums is not None:
            self._state = sums.state
        if not len(self._next_residual) or not own_weight:
            return
        residual = self._next_residual
        if sums is None:
            residual.zero_()
        else:
            own = self.contribution.flat[: self.gradient_elements]
            self._compressor.finish_residual(own, total, residual, share=own_weight / weight)
            residual.div_(own_weight)
        count = self.gradient_count
        ends = [*self.offsets[1:count], self.gradient_elements]
        for entry, start, stop in zip(self.entries[:count], self.offsets[:count], ends, strict=True):
            if used[entry]:
                self._residuals[entry] = residual[start:stop]
            elif entry in self._residuals:
                self._residuals[entry] = residual[start:stop].copy_(self._residuals[entry])
        self._next_residual, self._spare_residual = self._spare_residual, residual


def make_compressed_buckets(
    plan: Sequence[Bucket],
    shapes: Sequence[torch.Size],
    parameters: int,
    zeros: ZerosFactory,
    *,
    method: CompressionMethod,
    residuals: dict[int, torch.Tensor],
) -> list[GradientBucket]:
    """Return the buckets of a plan, of which those with gradients of real numbers are compressed.

    Args:
        plan, shapes, parameters, zeros: see `GradientBucket`.
        method, residuals: see `CompressedBucket`.
    """
    return [
        CompressedBucket(bucket, shapes, parameters, zeros, method=method, seed=index, residuals=residuals)
        if bucket.dtype.is_floating_point and bucket.entries[0] < parameters
        else GradientBucket(bucket, shapes, parameters, zeros)
        for index, bucket in enumerate(plan)
    ]


class _CompressedSums:
    """The sums of one bucket in one round, which `advance` carries on, one request after another.

    Several threads may wait for them.

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
        """See `GradientBucket.can_advance`."""
        pending = self._pending
        return pending is not None and pending.ended_s is not None and not self._is_last

    def advance(self, timeout_s: float) -> bool:
        """See `GradientBucket.advance`."""
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

    @optimizer_step_mode()  # whichever modes the program waits in
    def _request_next(self, answer: torch.Tensor | None) -> None:
        assert self._requests is not None
        try:
            request = next(self._requests) if answer is None else self._requests.send(answer)
        except StopIteration as end:
            self.state, self._pending = end.value, None
            return
        self._is_last = request.is_last
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
        assert self._next_index < self._end_index, "a compressor makes fewer than EXCHANGES_MAX requests"
        self._next_index += 1
        return self._next_index - 1
