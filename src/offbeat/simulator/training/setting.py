"""The parameters of a simulated run.

Nothing is simulated here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from offbeat.policies.stragglers.injection import SlowRule
from offbeat.simulator.core.faults import Fault, check_faults
from offbeat.simulator.core.network import NetworkCosts
from offbeat.simulator.core.times import ComputeTimes, ConstantTimes
from offbeat.simulator.training.sample_loop import SampleSetting

_NEVER = 10**18


@dataclass(frozen=True, kw_only=True)
class SimulationSetting:
    """Parameters of a simulated run, except for its policies.

    Attributes:
        world: workers at the start.
        hosts: hosts on which the workers run, in turn by their ids; the network is the same between them.
        steps: steps after which each worker leaves; None for no limit.
        until_s: the virtual time at which the run ends at the latest.
        counts_group_steps: a loop ends after `steps` steps of the group, as one that reads `session.step`
            does, instead of its own: a worker outside never ends by itself.
        steps_per_epoch: steps in an epoch of each worker; not used where samples are assigned.
        samples: the samples that are assigned to the workers; None to simulate time only.
        rounds_per_step: exchanges in a step (gradient accumulation).
        times: the model of compute time.
        slow: slowdown rules, on top of `times`.
        network: cost of messages.
        size_bytes: size of the gradients in an exchange; a state is three times as large.
        apply_s: duration of an optimizer step.
        faults: faults to inject.
        tick_s: interval at which policies receive a Tick.
        detect_s: delay after which the coordinator learns of a death.
        lost_after_s: silence after which a node counts as lost.
        stuck_after_s: time without a finished step after which the run counts as stuck.
        seed: seed of all random numbers.
    """

    world: int = 4
    hosts: int = 1
    steps: int | None = None
    until_s: float = math.inf
    counts_group_steps: bool = False
    steps_per_epoch: int = 100
    samples: SampleSetting | None = None
    rounds_per_step: int = 1
    times: ComputeTimes = field(default_factory=ConstantTimes)
    slow: tuple[SlowRule, ...] = ()
    network: NetworkCosts = field(default_factory=NetworkCosts)
    size_bytes: int = 4_000_000
    apply_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    tick_s: float = 0.5
    detect_s: float = 0.005
    lost_after_s: float = 10.0
    stuck_after_s: float = 900.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("world", "hosts", "steps_per_epoch", "rounds_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"expected at least 1 step, got {self.steps}")
        if self.samples is not None and (self.steps is not None or self.rounds_per_step > 1):
            raise ValueError(
                "expected epochs instead of steps, and one round a step where samples are assigned in blocks"
            )
        has_end = self.steps is not None or (self.samples is not None and self.samples.epochs is not None)
        if not has_end and self.until_s == math.inf:
            raise ValueError("expected steps or until_s, got neither: the run would not end")
        if self.size_bytes < 0:
            raise ValueError(f"expected a size of at least 0 bytes, got {self.size_bytes}")
        check_faults(self.faults, self.world)

    @cached_property
    def steps_max(self) -> int:
        """Steps after which each worker leaves; without a limit, more than a run has."""
        return _NEVER if self.steps is None else self.steps

    @cached_property
    def epoch_steps(self) -> int:
        """Steps in an epoch of each worker; with assigned samples, as many as hold them all."""
        samples = self.samples
        if samples is None:
            return self.steps_per_epoch
        return -(-samples.epoch_samples // (samples.batch_size * self.world))
