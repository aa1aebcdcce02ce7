"""Buckets whose gradients are summed by a compressor.

Theory of operation
-------------------

A compressor requests what is to be exchanged, one request after another; each is an exchange of its own.
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

With momentum correction the same holds for this worker's momentum, which `MomentumCorrection` keeps. It needs
no second memory: what was packed contains it, and it is computed from that when the means are used.

This module decides nothing about rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from offbeat.numerics.collectives.buckets import Bucket
from offbeat.numerics.collectives.schedules import AUTO
from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.numerics.compressors.momentum import MomentumCompressor, MomentumCorrection
from offbeat.runtime.averaging.buckets import GradientBucket, ZerosFactory
from offbeat.runtime.collectives.compressed_sum import CompressedSum
from offbeat.runtime.collectives.contribution import ExternalElements
from offbeat.runtime.collectives.interface import Exchange, PendingExchange


class CompressedBucket(GradientBucket):
    """A bucket on the CPU whose gradients are compressed.

    Args:
        bucket, shapes, parameters, zeros: see `GradientBucket`.
        method: makes the compressor.
        seed: of the compressor, the same on all workers.
        residuals: by entry; changed here.
        momentum: of a method with momentum correction; changed here.
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
        momentum: MomentumCorrection | None = None,
    ) -> None:
        super().__init__(bucket, shapes, parameters, zeros)
        gradients = [shapes[entry] for entry in bucket.entries[: self.gradient_count]]
        self._compressor = method.compressor(gradients, seed)
        self._exchange: Exchange | None = None  # over the members that share `_state`
        self._state: Any = None
        self._residuals, self._momentum = residuals, momentum
        residual_elements = self.gradient_elements if self._compressor.keeps_residual else 0
        own = self.contribution.flat
        self._next_residual, self._spare_residual = (own.new_zeros(residual_elements) for _ in range(2))
        self._sums: CompressedSum | None = None  # until `commit`
        self._total = own.new_empty(0)  # the memory of their result, which `output` no longer is after a swap

    def all_reduce(
        self,
        exchange: Exchange,
        *,
        exchange_id: int,
        index: int,
        algorithm: str = AUTO,
        priority: int = 0,
        external: Sequence[ExternalElements] = (),
    ) -> PendingExchange:
        """See `GradientBucket.all_reduce`; as many indices as a `CompressedSum` takes are its.

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
        self._sums = CompressedSum(exchange, exchange_id, index, algorithm, priority)
        self._total = total[:split]
        if split < len(own):
            self._sums.add(own[split:], total[split:])
        if split:
            requests = self._compressor.sum(
                own[:split],
                total[:split],
                self._next_residual,
                self._state,
                members=exchange.size,
                position=exchange.position,
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

    def prepare(self, exchange: Exchange, *, exchange_id: int, index: int, algorithm: str = AUTO) -> None:
        """See `GradientBucket.prepare`: nothing, as compressed sums do not arrive in this bucket's memory."""

    def commit(self, *, own_weight: float, weight: float, used: Sequence[float]) -> None:
        """See `GradientBucket.commit`: keeps the compressor's state, and new residuals."""
        masked = self._masks_momentum()
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
        spans = zip(self.entries[:count], self.offsets[:count], ends, masked, strict=True)
        for entry, start, stop, is_masked in spans:
            if used[entry]:
                if self._momentum is not None:
                    self._momentum.advance(
                        entry,
                        self.contribution.flat[start:stop],
                        weight=own_weight,
                        residual=self._residuals.get(entry),
                        next_residual=residual[start:stop],
                        is_masked=is_masked,
                    )
                self._residuals[entry] = residual[start:stop]
            elif entry in self._residuals:
                self._residuals[entry] = residual[start:stop].copy_(self._residuals[entry])
        self._next_residual, self._spare_residual = self._spare_residual, residual

    def _masks_momentum(self) -> Sequence[bool]:
        """Return by gradient whether the momentum of what this round sends is dropped."""
        if self._sums is None or not isinstance(self._compressor, MomentumCompressor):
            return [False] * self.gradient_count
        assert self._exchange is not None
        return self._compressor.masks_momentum(self._state, members=self._exchange.size)

    @property
    def keeps_residuals(self) -> bool:
        """See `GradientBucket.keeps_residuals`."""
        return self._compressor.keeps_residual

    @property
    def state(self) -> Any:
        """The compressor's state, the same on all members; None before a round counts."""
        return self._state

    def load_state(self, state: Any, exchange: Exchange) -> None:
        """Go on with a compressor's state, which all members of this exchange load."""
        self._state, self._exchange = state, exchange


def make_compressed_buckets(
    plan: Sequence[Bucket],
    shapes: Sequence[torch.Size],
    parameters: int,
    zeros: ZerosFactory,
    *,
    method: CompressionMethod,
    residuals: dict[int, torch.Tensor],
    momentum: MomentumCorrection | None = None,
) -> list[GradientBucket]:
    """Return the buckets of a plan, of which those with gradients of real numbers are compressed.

    Args:
        plan, shapes, parameters, zeros: see `GradientBucket`.
        method, residuals, momentum: see `CompressedBucket`.
    """
    return [
        CompressedBucket(
            bucket,
            shapes,
            parameters,
            zeros,
            method=method,
            seed=index,
            residuals=residuals,
            momentum=momentum,
        )
        if bucket.dtype.is_floating_point and bucket.entries[0] < parameters
        else GradientBucket(bucket, shapes, parameters, zeros)
        for index, bucket in enumerate(plan)
    ]
