"""The third paper's system: every layer's all-reduce hidden behind the backward and the next forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from offbeat.numerics.collectives.plans import POLICIES, Policy
from offbeat.runtime.averaging.gradient_averager import GradientAverager
from offbeat.runtime.averaging.group_binding import Grouping
from offbeat.runtime.averaging.interface import Averager, Host
from offbeat.runtime.averaging.synchronizer import GroupSynchronizer
from offbeat.runtime.control.coordinator import PolicySpec
from offbeat.runtime.hybrid.layer_averager import LayerAverager, Overlap
from offbeat.runtime.hybrid.layer_layout import Order
from offbeat.runtime.training.interface import Loop
from offbeat.runtime.training.trained import Trained
from offbeat.strategies.base import check_deadline, lockstep


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Layer-overlapping hybrid all-reduce: gradients on their way are waited for where they are needed.

    A layer's gradients leave when the backward pass has them; the next forward pass waits for their mean when
    it comes to the layer. The optimizer's step for that layer is taken there, or by a thread before that, if
    the mean has come and the pass is on its way. What it needs first overtakes the rest. Training is the same
    as with `AllReduce`, but for the order in which numbers are added. After `optimizer.step()` parameters are
    those of the step before until they are used: `session.refresh()`, `state_dict()`, `eval()` and leaving
    the session bring them up to date.

    What looks at gradients between `backward()` and `step()` (clipping by a norm, a gradient scaler) waits
    for all of them, and so does an optimizer that is not one of torch's: then only the backward pass is
    overlapped.

    Source: the layer-overlapping hybrid all-reduce paper; Sergeev and Del Balso 2018 for tensor fusion; Sun
    et al. 2019 for one pool of gradients. Deviations: the paper sends in the order in which gradients appear
    (`order="fifo"`), by which a first layer's wait for all others'; its assignment of algorithms is
    `policy="conv_butterfly_fc_ring"`, or as its table 4 has it, `table4`. What is fused is planned once, by
    size, so that all workers send the same parcels without asking each other: a parcel leaves with the last
    of its gradients, or with the end of the backward pass, and no timer sends a part of it. Gradients of a
    pool are views of it, to which autograd adds, which costs more than copying them; from 128 KB on they are
    sent from where they lie, and smaller ones are copied.

    Args:
        policy: which all-reduce for which layers: `cost_model`, `conv_butterfly_fc_ring`, `table4` or `ring`;
            see `offbeat.numerics.plans.plan`.
        order: `priority`: what is needed first overtakes; `fifo`: first come, first served.
        overlap: `forward`: with both passes; `backward`: with that alone; `none`.
        fuse_bytes: neighbours of so many bytes at most travel together; by default, as long as a message
            waits longer for latency on the busy line than for its bytes; 0: none do.
        deadline_s: how long a live worker may keep the others waiting, in seconds.
    """

    name: ClassVar[str] = "hybrid"
    survives: ClassVar[bool] = False
    takes_back: ClassVar[bool] = False
    needs_coordinator: ClassVar[bool] = False
    shards = "equal"  # without an annotation, which would make it an argument

    policy: Policy = "cost_model"
    order: Order = "priority"
    overlap: Overlap = "forward"
    fuse_bytes: int | None = None
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        for what, chosen, known in (
            ("policy", self.policy, POLICIES),
            ("order", self.order, get_args(Order)),
            ("overlap", self.overlap, get_args(Overlap)),
        ):
            if chosen not in known:
                raise ValueError(f"expected {what} to be one of {', '.join(known)}, got {chosen!r}")
        if self.fuse_bytes is not None and self.fuse_bytes < 0:
            raise ValueError(f"fuse_bytes must be at least 0 bytes, got {self.fuse_bytes}")
        check_deadline(self.deadline_s)

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return lockstep(world, start_s, self.deadline_s)

    def synchronizer(self, loop: Loop, trained: Trained) -> GroupSynchronizer:
        """See `Strategy.synchronizer`."""

        def averaging(grouping: Grouping | None, host: Host) -> Averager:
            if grouping is None:  # alone, there is nothing to wait for
                return GradientAverager(
                    trained.model, None, host, workers=1, bucket_bytes=1, deadline_s=self.deadline_s
                )
            return LayerAverager(
                trained.model,
                trained.optimizers,
                grouping,
                host,
                workers=loop.world,
                policy=self.policy,
                fuse_bytes=self.fuse_bytes,
                order=self.order,
                overlap=self.overlap,
                deadline_s=self.deadline_s,
            )

        return GroupSynchronizer(
            loop,
            trained,
            averaging=averaging,
            deadline_s=self.deadline_s,
            survives=False,
            is_dealt=False,
        )
