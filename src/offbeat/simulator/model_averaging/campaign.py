"""Fault campaigns of model averaging: random clusters with random faults, one for each seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.policies import Policy
from offbeat.policies.membership.assembly import Assembly
from offbeat.policies.model_averaging.averaging import ModelAveraging
from offbeat.policies.model_averaging.group_generator import GROUP_MODES
from offbeat.policies.model_averaging.local_steps import LocalSteps
from offbeat.policies.model_averaging.neighbour_gossip import NeighbourGossip
from offbeat.policies.model_averaging.neighbour_pairs import TOPOLOGIES
from offbeat.policies.model_averaging.pair_averaging import PairAveraging
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.prague import PragueAveraging
from offbeat.policies.model_averaging.weights import GROUP_WEIGHTS, MEAN_APPLICATIONS
from offbeat.simulator.core.faults import format_fault
from offbeat.simulator.core.network import Line
from offbeat.simulator.model_averaging.cluster import SimulatedModelCluster
from offbeat.simulator.training import campaign as gradient_campaign
from offbeat.simulator.training.cluster import ViolationError
from offbeat.simulator.training.sample_loop import SampleSetting
from offbeat.simulator.training.setting import SimulationSetting

_UNTIL_S = 2000.0
_STUCK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ModelFaultCase:
    """The cluster of one seed.

    Attributes:
        setting: the cluster and its faults.
        policy: which workers average with each other.
        arguments: of the policy.
    """

    setting: SimulationSetting
    policy: type[ModelAveraging]
    arguments: dict[str, Any]

    def build_policies(self) -> list[Policy]:
        """Return new policies."""
        world = self.setting.world
        return [Assembly(world, accepts_late_joiners=True), self.policy(world, **self.arguments)]

    def __str__(self) -> str:
        faults = " ".join(format_fault(fault) for fault in self.setting.faults) or "no faults"
        workers = f"{self.setting.world} workers on {self.setting.hosts} hosts"
        return f"{workers}, {self.policy.__name__} {self.arguments}, {faults}"


def draw_case(seed: int) -> ModelFaultCase:
    """Draw a cluster; deterministic for a seed. Its faults are those of the campaign of gradient groups.

    In some clusters a worker has a slow line.
    """
    chance = random.Random(f"model averaging {seed}")
    setting = gradient_campaign.draw_case(seed).setting
    batch_size = chance.randint(1, 6)
    samples = SampleSetting(
        epoch_samples=chance.randint(1, 40 * setting.world) * batch_size + chance.randrange(batch_size),
        batch_size=batch_size,
        epochs=chance.randint(1, 4),
        batches_per_round=chance.choice([1, 1, 1, 2]),
    )
    policy, arguments = _draw_policy(chance, seed)
    common = {
        "timeout_s": 100.0,
        "overlap": chance.random() < 0.5,
        "global_every": chance.choice(["epoch", "epoch", None if policy is LocalSteps else 3, None]),
        "detector": chance.choice(["on", "on", "off"]),
    }
    if policy is LocalSteps and common["overlap"]:
        arguments["delay"] = _draw_delay(random.Random(f"delay {seed}"), **arguments)
    network = setting.network
    if chance.random() < 0.3:
        slow = Line(latency_s=network.latency_s, bytes_per_s=network.bytes_per_s / chance.choice([20, 500]))
        network = replace(network, lines={chance.randrange(setting.world): slow})
    return ModelFaultCase(
        policy=policy,
        setting=replace(
            setting,
            hosts=chance.choice([1, 1, 2, 3]),
            network=network,
            samples=samples,
            steps=None,
            rounds_per_step=1,
            apply_s=0.0,
            until_s=_UNTIL_S,
            stuck_after_s=_STUCK_S,
        ),
        arguments=arguments | common,
    )


def draw_gossip_case(seed: int) -> ModelFaultCase:
    """Draw a cluster in which workers gossip: that of `draw_case`, with this policy."""
    case, chance = draw_case(seed), random.Random(f"gossip {seed}")
    kept = ("timeout_s", "overlap", "detector")
    arguments = {name: case.arguments[name] for name in kept} | {
        "every": chance.choice([1, 1, 2, 5]),
        "by_pace": chance.random() < 0.7,
        "global_every": chance.choice(["epoch", None]),
    }
    return replace(case, policy=NeighbourGossip, arguments=arguments)


def _draw_policy(chance: random.Random, seed: int) -> tuple[type[ModelAveraging], dict[str, Any]]:
    """Draw a policy and the arguments that only it has."""
    policy: type[ModelAveraging] = chance.choice([PartialReduce, PairAveraging, PragueAveraging, LocalSteps])
    if policy is PartialReduce:
        return policy, {
            "size": chance.choice([None, 2, 3, 4]),
            "weights": chance.choice(GROUP_WEIGHTS),
            "apply": chance.choice(MEAN_APPLICATIONS),
            "window": chance.choice([None, 0, 3, 10]),
            "hold_timeout_s": chance.choice([0.5, 5.0]),
        }
    if policy is PairAveraging:
        return policy, {"topology": chance.choice(TOPOLOGIES), "seed": seed}
    if policy is LocalSteps:
        return policy, {
            "every": chance.choice([4, 5, 16]),
            "quorum": chance.choice([None, 1, "n-1", 100]),
            "grace_s": chance.choice([None, 0.0, 2.0]),
            "by_pace": chance.random() < 0.7,
            "fragments": chance.choice([0, 1, 1, 4]),
        }
    return policy, {
        "mode": chance.choice(GROUP_MODES),
        "size": chance.choice([2, 3, 4]),
        "lag": chance.choice([None, 1, 4]),
        "seed": seed,
    }


def _draw_delay(chance: random.Random, *, every: int, fragments: int, **_: Any) -> int | None:
    longest = every // max(1, fragments) - 1
    return chance.choice([None, 1, longest]) if longest else None


def run_case(
    seed: int,
    build: Callable[[ModelFaultCase], list[Policy]] = ModelFaultCase.build_policies,
    make_cluster: type[SimulatedModelCluster] = SimulatedModelCluster,
    draw: Callable[[int], ModelFaultCase] = draw_case,
) -> SimulatedModelCluster:
    """Run the case of a seed.

    Args:
        seed: of `draw`.
        build: builds the policies of a case.
        make_cluster: the simulation.
        draw: draws the case.

    Raises:
        ViolationError: an invariant was violated; the text names the seed and the case.
    """
    case = draw(seed)
    cluster = make_cluster(
        case.setting,
        lambda: build(case),
        overlap=case.arguments["overlap"],
        has_epoch_means=case.arguments["global_every"] == "epoch",
        fragments=max(1, case.arguments.get("fragments", 0)),
        delay=case.arguments.get("delay"),
        outer_optimizer=OuterOptimizer(momentum_every=1 + seed % 3),
        topology=TOPOLOGIES[seed % len(TOPOLOGIES)] if case.policy is NeighbourGossip else None,
    )
    try:
        cluster.run()
    except ViolationError as error:
        raise ViolationError(f"{error} (seed {seed}: {case})") from None
    return cluster
