"""What the first rounds show about a model's layers, and the plan of buckets that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from offbeat.numerics.collectives.costs import LinkModel
from offbeat.numerics.collectives.plans import AlgorithmPolicy
from offbeat.runtime.devices.interface import Device
from offbeat.runtime.hybrid.first_use import FirstUseTracker, seconds_between
from offbeat.runtime.hybrid.layer_layout import BucketPlan, plan_by_layer


class BucketPlanner:
    """Plans buckets by layer, from when a pass computes each gradient and when a layer needs it again.

    Args:
        model: the model.
        parameters: those whose gradients are averaged.
        device: holds the model; times are those at which it computes, not those at which work is queued.
        workers, policy, fuse_bytes: see `offbeat.numerics.collectives.plans.plan_fused_buckets`.
        message_cost: the cost of a message, as measured at the start.

    Attributes:
        uses: observes the first use of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        device: Device,
        *,
        workers: int,
        policy: AlgorithmPolicy,
        fuse_bytes: int | None,
        message_cost: LinkModel,
    ) -> None:
        self._parameters, self._device, self._workers = parameters, device, workers
        self._policy, self._fuse_bytes, self._message_cost = policy, fuse_bytes, message_cost
        self.uses = FirstUseTracker(model, parameters, device)
        # Marks of the last pass:
        self._ready: list[Any] = [None] * len(parameters)
        self._ended: Any = None

    def on_gradient(self, entry: int) -> None:
        """Record that a gradient is computed."""
        self._ready[entry] = self._device.record_time()

    def on_pass_ended(self) -> None:
        """Record that a backward pass has ended."""
        self._ended = self._device.record_time()

    def make_plan(self) -> BucketPlan:
        """Make the plan for all members from this worker's measurements.

        The host does not wait: the device has reached all marks once a round that followed them is over.
        """
        return plan_by_layer(
            self._parameters,
            self.uses.use_order,
            self.uses.first_modules,
            [
                seconds_between(self._device, ready, self._ended) + to_first_use_s
                for ready, to_first_use_s in zip(self._ready, self.uses.seconds_to_first_use(), strict=True)
            ],
            workers=self._workers,
            line=self._message_cost,
            policy=self._policy,
            fuse_bytes=self._fuse_bytes,
        )
