"""What the first rounds show about a model's layers, and the plan of buckets that follows from it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import nn

from offbeat.numerics.collectives.costs import LinkModel
from offbeat.numerics.collectives.plans import AlgorithmPolicy
from offbeat.runtime.hybrid.first_use import FirstUseTracker
from offbeat.runtime.hybrid.layer_layout import BucketPlan, plan_by_layer


class BucketPlanner:
    """Plans buckets by layer, from when a pass computes each gradient and when a layer needs it again.

    Args:
        model: the model.
        parameters: those whose gradients are averaged.
        workers, policy, fuse_bytes: see `offbeat.numerics.collectives.plans.plan_fused_buckets`.
        message_cost: the cost of a message, as measured at the start.

    Attributes:
        uses: observes the first use of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        workers: int,
        policy: AlgorithmPolicy,
        fuse_bytes: int | None,
        message_cost: LinkModel,
    ) -> None:
        self._parameters, self._workers = parameters, workers
        self._policy, self._fuse_bytes, self._message_cost = policy, fuse_bytes, message_cost
        self.uses = FirstUseTracker(model, parameters, time.perf_counter)
        # Of the pass under way and the one before:
        self._ready_s, self._ended_s = [0.0] * len(parameters), 0.0

    def on_gradient(self, entry: int) -> float:
        """Record that a gradient is computed; return the time, in seconds."""
        now_s = self._ready_s[entry] = time.perf_counter()
        return now_s

    def on_pass_ended(self) -> None:
        """Record that a backward pass has ended."""
        self._ended_s = time.perf_counter()

    def make_plan(self) -> BucketPlan:
        """Make the plan for all members from this worker's measurements."""
        return plan_by_layer(
            self._parameters,
            self.uses.use_order,
            self.uses.first_modules,
            [
                self._ended_s - ready_s + began_s
                for ready_s, began_s in zip(self._ready_s, self.uses.first_use_s, strict=True)
            ],
            workers=self._workers,
            line=self._message_cost,
            policy=self._policy,
            fuse_bytes=self._fuse_bytes,
        )
