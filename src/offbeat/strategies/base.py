"""What strategies share: how a job starts, how gradients are averaged in groups, and checks of arguments."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from offbeat.errors import OffbeatError
from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.numerics.compressors.momentum import MomentumCorrecting
from offbeat.numerics.compressors.registry import AUTO, parse_compression
from offbeat.policies.membership.group_protocol import GroupProtocol
from offbeat.runtime.averaging.compression_trial import CompressionTrial
from offbeat.runtime.averaging.gradient_averager import GradientAverager
from offbeat.runtime.averaging.group_binding import GroupBinding
from offbeat.runtime.averaging.interface import AveragerContext
from offbeat.runtime.averaging.sgd_momentum import SGDMomentum, check_momentum
from offbeat.runtime.averaging.skipped_rounds import SkippedRounds
from offbeat.runtime.averaging.synchronizer import GroupSynchronizer
from offbeat.runtime.control.configuration import PolicySpec
from offbeat.runtime.training.interface import TrainingLoop
from offbeat.runtime.training.trained import TrainingState


def assembly_spec(world: int, start_s: float, shards: Literal["dynamic", "equal"]) -> PolicySpec:
    """Return the policy that starts the job when all workers have joined.

    It fails if the last one does not join within `start_s` seconds of the first. With shards="dynamic",
    workers may also join while the job runs.
    """
    return PolicySpec(
        path="offbeat.policies.membership.assembly:Assembly",
        arguments={"world": world, "timeout_s": start_s, "accepts_late_joiners": shards == "dynamic"},
    )


def lockstep_specs(world: int, start_s: float, timeout_s: float) -> tuple[PolicySpec, ...]:
    """Return the policies of one group of all workers, in which the loss of a worker ends the job."""
    return (
        assembly_spec(world, start_s, "equal"),
        PolicySpec(
            path="offbeat.policies.membership.lockstep:Lockstep",
            arguments={"world": world, "timeout_s": timeout_s},
        ),
    )


def check_timeout(timeout_s: float) -> None:
    """Check that a timeout is finite and positive.

    Raises:
        ValueError: it is not finite, or not more than 0 s.
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be finite and more than 0 s, got {timeout_s}")


def check_compresses(compress: str | None, trained: TrainingState) -> None:
    """Check that the gradients of what is trained can be compressed.

    Raises:
        OffbeatError: compressed gradients of a model on an accelerator.
    """
    if compress is not None and trained.device.type != "cpu":
        raise OffbeatError(
            f"expected a model on the CPU with compress={compress}, got one on {trained.device}: "
            "leave compress out"
        )


def parse_plain_compression(compress: str | None) -> CompressionMethod | None:
    """Return the method of `compress`, which has no momentum correction; None for None.

    Raises:
        ValueError: it is no method, or one with momentum correction.
    """
    method = None if compress is None else parse_compression(compress)
    if isinstance(method, MomentumCorrecting):
        raise ValueError(
            f"expected compress without momentum correction, got {compress!r}: take topk, or the strategy bsp"
        )
    return method


class GroupAveraging:
    """Base of the strategies that average gradients over the workers of one group."""

    always_needs_coordinator: ClassVar[bool] = False
    trains_several_models: ClassVar[bool] = True
    survives_worker_loss: ClassVar[bool]

    shards: Literal["dynamic", "equal"]
    bucket_bytes: int
    timeout_s: float
    compress: str | None = None  # an argument where a strategy's dataclass has it as a field

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1 byte, got {self.bucket_bytes}")
        if self.compress not in (None, AUTO):
            parse_compression(self.compress)

    def make_worker_protocol(self, worker: int) -> GroupProtocol:
        """See `Strategy.make_worker_protocol`."""
        return GroupProtocol(worker)

    def _make_skipped_rounds(
        self, loop: TrainingLoop, trained: TrainingState, binding: GroupBinding, context: AveragerContext
    ) -> SkippedRounds | None:
        """Make what takes part in rounds that close without this worker; None where none do."""
        return None

    def make_synchronizer(self, loop: TrainingLoop, trained: TrainingState) -> GroupSynchronizer:
        """See `Strategy.make_synchronizer`.

        Raises:
            OffbeatError: compressed gradients of a model on an accelerator, or with momentum correction and
                another optimizer than SGD with momentum.
        """
        check_compresses(self.compress, trained)
        compression = None if self.compress in (None, AUTO) else parse_compression(self.compress)
        if isinstance(compression, MomentumCorrecting):
            check_momentum(trained)

        def averaging(binding: GroupBinding | None, context: AveragerContext) -> GradientAverager:
            return GradientAverager(
                trained.model,
                binding,
                context,
                workers=loop.world,
                bucket_bytes=self.bucket_bytes,
                timeout_s=self.timeout_s,
                skipped=None
                if binding is None
                else self._make_skipped_rounds(loop, trained, binding, context),
                compression=compression,
                trial=CompressionTrial() if self.compress == AUTO else None,
                momentum=SGDMomentum(trained, compression)
                if binding is not None and isinstance(compression, MomentumCorrecting)
                else None,
            )

        return GroupSynchronizer(
            loop,
            trained,
            make_averager=averaging,
            timeout_s=self.timeout_s,
            survives_worker_loss=self.survives_worker_loss,
            allows_nccl=not self.survives_worker_loss,
            assigns_samples=self.shards == "dynamic",
            allows_hierarchy=self.compress in (None, AUTO),
        )
