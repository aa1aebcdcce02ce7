"""Layer-wise all-reduce that overlaps the backward pass and the next forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from offbeat.numerics.collectives.plans import ALGORITHM_POLICIES, AlgorithmPolicy
from offbeat.policies.membership.group_protocol import GroupProtocol
from offbeat.runtime.averaging.gradient_averager import GradientAverager
from offbeat.runtime.averaging.group_binding import GroupBinding
from offbeat.runtime.averaging.interface import Averager, AveragerContext
from offbeat.runtime.averaging.synchronizer import GroupSynchronizer
from offbeat.runtime.control.configuration import PolicySpec
from offbeat.runtime.hybrid.layer_averager import LayerAverager, Overlap
from offbeat.runtime.hybrid.layer_layout import SendOrder
from offbeat.runtime.training.interface import TrainingLoop
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies.base import check_compresses, check_timeout, lockstep_specs, parse_plain_compression


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Layer-overlapping hybrid all-reduce: a layer waits for its averaged gradient only when it is next used.

    The gradients of a layer are sent as soon as the backward pass has computed them. The next forward pass
    waits for their mean when it reaches the layer, and applies the optimizer to that layer then; a thread
    does so earlier if the mean has arrived while the pass is under way. Gradients of the layers that the pass
    needs first are sent before others. Training equals that of `AllReduce` up to the order of summation.
    After `optimizer.step()` parameters keep the values of the previous step until they are used:
    `session.refresh()`, `state_dict()`, `eval()` and leaving the session bring them up to date.

    Code that reads gradients between `backward()` and `step()` (clipping by a norm, a gradient scaler) waits
    for all of them, and so does an optimizer that is not one of torch's; then only the backward pass is
    overlapped.

    Source: the layer-overlapping hybrid all-reduce paper; Sergeev and Del Balso 2018 for tensor fusion; Sun
    et al. 2019 for one gradient pool. Deviations: the paper sends gradients in the order in which they are
    computed (`order="fifo"`), so that the first layer's wait for those of all other layers; its assignment of
    algorithms is `policy="conv_butterfly_fc_ring"`, or, as in its table 4, `policy="table4"`. Fused buckets
    are planned once, by size, so that all workers send the same ones without negotiation: a bucket is sent
    with the last of its gradients or at the end of the backward pass, and never in parts after a timeout.
    Gradients in the pool are views of it, and autograd adds to them, which costs more than copying them;
    gradients of 128 KB or more are sent from where they are, smaller ones are copied.

    Args:
        policy: how an all-reduce algorithm is chosen for a layer: `cost_model`, `conv_butterfly_fc_ring`,
            `table4` or `ring`; see `offbeat.numerics.collectives.plans.plan_fused_buckets`.
        order: `priority`: the gradients that are needed first are sent first; `fifo`: in the order in which
            they are computed.
        overlap: `forward`: communication overlaps both passes; `backward`: the backward pass only; `none`.
        fuse_bytes: adjacent layers of at most this many bytes in all are sent together; 0: none are. By
            default, as long as a message costs more for latency on the busy line than for its bytes.
        timeout_s: how long the other workers wait for a live worker before the job fails, in seconds.
        compress: what is sent of gradients; see `AllReduce`, without dgc, csc and auto. Buckets and
            algorithms are planned by uncompressed bytes. Of several sums, as PowerSGD has, only the last one
            overlaps the next forward pass; the others end before `backward()` does.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "hybrid"
    survives_worker_loss: ClassVar[bool] = False
    readmits_workers: ClassVar[bool] = False
    always_needs_coordinator: ClassVar[bool] = False
    trains_several_models: ClassVar[bool] = False
    shards: ClassVar[Literal["equal"]] = "equal"

    policy: AlgorithmPolicy = "cost_model"
    order: SendOrder = "priority"
    overlap: Overlap = "forward"
    fuse_bytes: int | None = None
    timeout_s: float = 600.0
    compress: str | None = None

    def __post_init__(self) -> None:
        for what, chosen, known in (
            ("policy", self.policy, ALGORITHM_POLICIES),
            ("order", self.order, get_args(SendOrder)),
            ("overlap", self.overlap, get_args(Overlap)),
        ):
            if chosen not in known:
                raise ValueError(f"expected {what} to be one of {', '.join(known)}, got {chosen!r}")
        if self.fuse_bytes is not None and self.fuse_bytes < 0:
            raise ValueError(f"fuse_bytes must be at least 0 bytes, got {self.fuse_bytes}")
        check_timeout(self.timeout_s)
        parse_plain_compression(self.compress)

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return lockstep_specs(world, start_s, self.timeout_s)

    def make_worker_protocol(self, worker: int) -> GroupProtocol:
        """See `Strategy.make_worker_protocol`."""
        return GroupProtocol(worker)

    def make_synchronizer(self, loop: TrainingLoop, trained: TrainingState) -> GroupSynchronizer:
        """See `Strategy.make_synchronizer`.

        Raises:
            OffbeatError: compressed gradients of a model on an accelerator.
        """
        check_compresses(self.compress, trained)

        def averaging(binding: GroupBinding | None, context: AveragerContext) -> Averager:
            if binding is None:  # a single worker has nothing to overlap
                return GradientAverager(
                    trained.model, None, context, workers=1, bucket_bytes=1, timeout_s=self.timeout_s
                )
            return LayerAverager(
                trained.model,
                trained.optimizers,
                binding,
                context,
                workers=loop.world,
                policy=self.policy,
                fuse_bytes=self.fuse_bytes,
                order=self.order,
                overlap=self.overlap,
                timeout_s=self.timeout_s,
                compression=parse_plain_compression(self.compress),
            )

        return GroupSynchronizer(
            loop,
            trained,
            make_averager=averaging,
            timeout_s=self.timeout_s,
            survives_worker_loss=False,
            allows_nccl=False,
            assigns_samples=False,
            allows_hierarchy=False,
        )
