"""Strategies whose workers own their models and average them in groups."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from offbeat.errors import OffbeatError
from offbeat.numerics.compressors.interface import keeps_residual
from offbeat.numerics.compressors.registry import parse_encoding
from offbeat.numerics.gossip import mixing_weights
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.policies.model_averaging.averaging import GlobalEvery, ModelAveraging
from offbeat.policies.model_averaging.group_generator import GroupMode
from offbeat.policies.model_averaging.local_steps import LocalSteps
from offbeat.policies.model_averaging.neighbour_gossip import NeighbourGossip
from offbeat.policies.model_averaging.neighbour_pairs import Topology
from offbeat.policies.model_averaging.pair_averaging import PairAveraging
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.prague import PragueAveraging
from offbeat.policies.model_averaging.protocol import ModelAveragingProtocol
from offbeat.policies.model_averaging.weights import GroupWeights, MeanApplication
from offbeat.runtime.control.configuration import PolicySpec
from offbeat.runtime.model_averaging.public_copies import Gamma
from offbeat.runtime.model_averaging.synchronizer import ModelAveragingSynchronizer
from offbeat.runtime.training.interface import TrainingLoop
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies.base import (
    assembly_spec,
    check_compresses,
    check_timeout,
    parse_plain_compression,
)


@dataclass(frozen=True, kw_only=True)
class AveragesModels:
    """What all strategies have whose workers own their models; the policy gets their arguments."""

    survives_worker_loss: ClassVar[bool] = True
    readmits_workers: ClassVar[bool] = False
    always_needs_coordinator: ClassVar[bool] = False
    trains_several_models: ClassVar[bool] = True
    _policy: ClassVar[type[ModelAveraging]]

    shards: Literal["dynamic", "equal"] = "dynamic"
    overlap: bool = True
    global_every: GlobalEvery = "epoch"
    detector: Literal["on", "off"] = "on"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        self._policy(1, **self._policy_arguments())

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return (
            assembly_spec(world, start_s, self.shards),
            PolicySpec(
                path=f"{self._policy.__module__}:{self._policy.__name__}",
                arguments={"world": world, **self._policy_arguments()},
            ),
        )

    def make_worker_protocol(self, worker: int) -> ModelAveragingProtocol:
        """See `Strategy.make_worker_protocol`."""
        return ModelAveragingProtocol(worker)

    def make_synchronizer(self, loop: TrainingLoop, trained: TrainingState) -> ModelAveragingSynchronizer:
        """See `Strategy.make_synchronizer`."""
        return ModelAveragingSynchronizer(
            loop,
            trained,
            timeout_s=self.timeout_s,
            assigns_samples=self.shards == "dynamic",
            **self.worker_arguments(),
            **self._compression_arguments(),
        )

    def worker_arguments(self) -> dict[str, Any]:
        """Return what a worker has to know in addition to its actions: in a job, and simulated."""
        return {"overlap": self.overlap, "has_epoch_means": self.global_every == "epoch"}

    def _compression_arguments(self) -> dict[str, Any]:
        """Return how what a worker sends is compressed."""
        return {}

    def _policy_arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class PReduce(AveragesModels):
    """Partial reduce: the first P workers that have ended a step average their models.

    A worker steps its own model with the gradients of its own batch, so a learning rate is that of one
    worker. No worker waits for a slow one: it is averaged when it is ready, and takes fewer steps. Models
    differ while workers train. When all have used up an epoch, and when all have finished, all models and
    their buffers are averaged, so that every worker has the same. At any other time the model of the worker
    where `session.is_leader` is true stands for all of them in validation and checkpoints. Optimizer state is
    not averaged. A worker that is lost leaves its group; the others go on.

    Source: Miao et al. 2021, "Heterogeneity-aware distributed machine learning training via partial reduce"
    (constant and dynamic partial reduce). Deviations: those of `PartialReduce`.

    Args:
        P: workers in a group, at least 2; by default 3, or 2 with fewer than 4 workers.
        weights: "constant" makes the mean of equal parts, which preserves the sum of all models. "dynamic"
            weighs models by how many steps they are behind the newest one of the group, which does not.
        apply: "common" gives the mean to all members. With "own_share" each keeps 1/P of its own model, and
            takes the rest from the others by their weights; with constant weights this is the same.
        window: consecutive groups that connect all workers, so that no models drift apart; 0 for no such
            rule. By default four times the least possible window, and more where a worker is very slow.
        shards: "dynamic" assigns samples as they are needed, each once an epoch; "equal" splits them in
            advance, so that fast workers finish early.
        overlap: train on while the model is averaged: the mean of the group's models as they were at the end
            of a step, less this worker's, is added to its model at the end of a later step.
        global_every: when all models are averaged: "epoch" for the end of each epoch of `session.batches`,
            where workers wait for each other, buffers included; a number for each time that workers have made
            as many steps on average; None for the end of the training only.
        detector: "on" classes workers as stragglers by their compute times, and by how long averagings with
            them take: no group waits for one, and one with a slow line averages less often.
        timeout_s: how long a live worker may keep others waiting before it is rejected, in seconds.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "preduce"
    _policy: ClassVar[type[ModelAveraging]] = PartialReduce

    P: int | None = None
    weights: GroupWeights = "constant"
    apply: MeanApplication = "common"
    window: int | None = None

    def _policy_arguments(self) -> dict[str, Any]:
        arguments = super()._policy_arguments()
        return {"size": arguments.pop("P"), **arguments}


@dataclass(frozen=True, kw_only=True)
class ADPSGD(AveragesModels):
    """AD-PSGD: pairs of neighbours on a graph average their models, while all train on.

    All else is as under `PReduce`: models, learning rates, what validation and checkpoints see, the end, and
    lost workers.

    Source: Lian et al. 2018, "Asynchronous decentralized parallel stochastic gradient descent". Deviations:
    those of `NeighbourPairs`.

    Args:
        topology: "ring", "exponential" or "complete": which workers may form a pair. All are bipartite:
            every second worker, in the order of their ids, asks one of the others that has ended a step.
        seed: of the choice among several.
        shards, overlap, global_every, detector, timeout_s: see `PReduce`.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "adpsgd"
    _policy: ClassVar[type[ModelAveraging]] = PairAveraging

    topology: Topology = "ring"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Prague(AveragesModels):
    """Prague: groups that are decided ahead average their models, while all train on.

    All else is as under `PReduce`: models, learning rates, what validation and checkpoints see, the end, and
    lost workers.

    Source: Luo et al. 2020, "Prague: high-performance heterogeneity-aware asynchronous decentralized
    training". Deviations: those of `GroupGenerator`.

    Args:
        mode: how groups are decided: "smart" divides all workers that are in no group, "random" draws one
            group, "static" takes shifted blocks of the workers' ids. Where several hosts have several
            workers each, "smart" and "static" divide by host, in turn between hosts and within.
        size: workers in a group, about, at least 2.
        lag: under "smart", a worker that asks leaves out those that were ready `lag` times less often: a fast
            worker chooses no slow one, and a slow one may choose fast ones. None for no such filter.
        seed: of the draws.
        shards, overlap, global_every, detector, timeout_s: see `PReduce`.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "prague"
    _policy: ClassVar[type[ModelAveraging]] = PragueAveraging

    mode: GroupMode = "smart"
    size: int = 3
    lag: int | None = 4
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalSGD(AveragesModels):
    """Local SGD: workers make several steps each, and then all average their models.

    The fastest worker makes `every` steps between two averagings, and a slower one as many as it can in the
    same time, so that no worker waits for another. Models are weighted by the samples that they have learnt
    from. An averaging begins without those that are late; they take part in the next one. Less is sent than
    under `PReduce`: each averaging sends as much as a step of `AllReduce`. Models have no common past from
    which differences could be compressed: `DiLoCo` has one, and, with an outer rate of 1 and no momentum, the
    mean as here.

    All else is as under `PReduce`: models, learning rates, what validation and checkpoints see, the end, and
    lost workers.

    Source: Stich 2019, "Local SGD converges fast and communicates little"; for steps by pace, and averagings
    without those that are late, see `LocalRounds`.

    Args:
        every: optimizer steps of the fastest worker between two averagings, at least 1.
        quorum: how many workers may begin an averaging, though others are late: a number, or "n-1", "n-2", …
            for all but one, two, …; by default more than half.
        grace: how long it is put off for the others, in seconds; by default a quarter of the time since the
            last one.
        by_pace: slower workers make fewer steps; else all make `every`.
        shards, overlap, global_every, detector, timeout_s: see `PReduce`.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "localsgd"
    _policy: ClassVar[type[ModelAveraging]] = LocalSteps

    every: int = 16
    quorum: int | str | None = None
    grace: float | None = None
    by_pace: bool = True

    def _policy_arguments(self) -> dict[str, Any]:
        arguments = super()._policy_arguments()
        return {"grace_s": arguments.pop("grace"), **arguments}


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """DiLoCo: local steps, after which an outer optimizer steps the common model with Nesterov momentum.

    As under `LocalSGD`, workers make several steps each and then average. An outer optimizer takes the common
    model before these steps less the mean for its gradient, and steps that common model. This allows for many
    more steps in between. With `fragments` a part of the model at a time is averaged, so that less is sent at
    once. At the end of an epoch and of the training workers get the mean of their models, as under `PReduce`.

    A checkpoint holds the common model and the outer optimizer's momentum. After a resume the next averaging
    follows a whole round of steps later. From a checkpoint of another strategy the momentum begins at zero.

    With `compress` workers send the common model less their own, compressed, and add what they did not send
    to what they send next (SparseLoCo). Averagings of all models, at the ends of epochs, are not compressed.

    Source: Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models";
    Douillard et al. 2025, "Streaming DiLoCo with overlapping communication" (fragments, overlap, delay,
    mixing); Sarfi et al. 2025, "Communication efficient LLM pre-training with SparseLoCo" (compress); for
    delayed momentum see `OuterOptimizer`, for steps by pace and quorum `LocalRounds`. Deviations: with
    `overlap` a worker keeps what it has learnt while a mean was under way; fragments are equal parts of all
    parameters in their order, not layers; for those with `compress` see `PseudoGradients`.

    Args:
        every: optimizer steps of the fastest worker between two averagings of the same parameters.
        fragments: parts of the model, each averaged and stepped by itself, from 1 to `every`.
        delay: with `overlap`, optimizer steps from when a worker's part is sent until it takes the common
            one, for which it waits if it is not there yet; at least 1, and fewer than the steps between two
            averagings. With None it takes it at the end of the step in which it is there.
        outer_rate, outer_momentum: see `OuterOptimizer`; by default 0.7 and 0.9. With a `compress` but "bf16"
            and "fp16" by default 1 and 0: what was not sent before takes the place of the momentum.
        momentum_every: see `OuterOptimizer`.
        mixing: the share of its own model that a worker keeps where it takes the common one, from 0 up to
            below 1.
        compress: how what is sent is compressed, see `AllReduce`; it needs a model on the CPU.
        residual_decay: the share of what was not sent in a round that is added in the next, from 0 to 1.
        quorum, grace, by_pace: see `LocalSGD`.
        shards, overlap, global_every, detector, timeout_s: see `PReduce`.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "diloco"

    every: int = 64
    fragments: int = 1
    delay: int | None = None
    outer_rate: float | None = None
    outer_momentum: float | None = None
    momentum_every: int = 1
    mixing: float = 0.0
    compress: str | None = None
    residual_decay: float = 0.95

    def __post_init__(self) -> None:
        if self.fragments < 1:
            raise ValueError(f"expected at least 1 fragment, got {self.fragments}")
        if not 0 <= self.mixing < 1:
            raise ValueError(f"expected mixing from 0 up to below 1, got {self.mixing}")
        if not 0 <= self.residual_decay <= 1:
            raise ValueError(f"expected residual_decay from 0 to 1, got {self.residual_decay}")
        if self.mixing and self._keeps_residual:
            raise ValueError(
                f"expected mixing 0 with compress={self.compress}, got {self.mixing}: a worker would keep a "
                "part of what it did not send in its model, and send it later as well"
            )
        self._outer_optimizer()
        super().__post_init__()

    @property
    def _keeps_residual(self) -> bool:
        """Whether what is not sent in a round is added to what is sent in the next."""
        return keeps_residual(parse_plain_compression(self.compress))

    def _outer_optimizer(self) -> OuterOptimizer:
        rate, momentum = (1.0, 0.0) if self._keeps_residual else (0.7, 0.9)
        return OuterOptimizer(
            rate=rate if self.outer_rate is None else self.outer_rate,
            momentum=momentum if self.outer_momentum is None else self.outer_momentum,
            momentum_every=self.momentum_every,
        )

    def make_synchronizer(self, loop: TrainingLoop, trained: TrainingState) -> ModelAveragingSynchronizer:
        """See `Strategy.make_synchronizer`.

        Raises:
            OffbeatError: `compress` with a model on an accelerator.
        """
        check_compresses(self.compress, trained)
        return super().make_synchronizer(loop, trained)

    def _compression_arguments(self) -> dict[str, Any]:
        return {
            "compression": parse_plain_compression(self.compress),
            "residual_decay": self.residual_decay,
        }

    def worker_arguments(self) -> dict[str, Any]:
        """See `AveragesModels.worker_arguments`."""
        return {
            **super().worker_arguments(),
            "outer_optimizer": self._outer_optimizer(),
            "fragments": self.fragments,
            "delay": self.delay,
            "mixing": self.mixing,
        }

    def _policy_arguments(self) -> dict[str, Any]:
        arguments = super()._policy_arguments()
        for name in (
            "outer_rate",
            "outer_momentum",
            "momentum_every",
            "mixing",
            "compress",
            "residual_decay",
        ):
            del arguments[name]
        return arguments


@dataclass(frozen=True, kw_only=True)
class Choco(AveragesModels):
    """CHOCO-SGD: each worker moves its model towards those of its neighbours, by compressed differences.

    Neighbours keep public copies of each other's models. In a round a worker sends them the difference of its
    model from its public copy, compressed, which brings the copy closer to the model, and moves its model
    towards the mean of its neighbours' copies. What is not sent is in later differences. So a round has few
    bytes, and models come together slowly, the slower the more is left out. With a fixed gamma, a round that
    all workers end leaves the mean of all models as it is.

    A round is of all workers, and begins when the slowest one is ready; with `overlap` the others train on
    until then. In the first round, and in that after an epoch or the loss or arrival of a worker, whole
    models are sent. A worker whose model, or a neighbour's, is not finite leaves out the round, and whole
    models follow. It needs a model on the CPU.

    All else is as under `PReduce`: models, learning rates, what validation and checkpoints see, the end, and
    lost workers.

    Source: Koloskova, Stich and Jaggi 2019, "Decentralized stochastic optimization and gossip algorithms with
    compressed communication"; Koloskova, Lin, Stich and Jaggi 2020, "Decentralized deep learning with
    arbitrary communication compression". Deviations: those of `NeighbourGossip`; tensors of one dimension are
    sent whole.

    Args:
        topology: "ring", "exponential" or "complete": which workers are neighbours.
        compress: "topk:RATIO", "randomk:RATIO", "sign" or "qsgd:LEVELS", see `AllReduce`; None sends whole
            models.
        gamma: the consensus step, more than 0 and at most 1: how much of what a worker's public copy differs
            from the weighted mean of its neighbours' and its own is added to its model in a round. "adaptive"
            measures how much compression leaves out (see `offbeat.numerics.gossip.AdaptiveStep`); "theory" is
            the step that is proven to converge, a very short one.
        every: optimizer steps of the fastest worker between two rounds, at least 1.
        by_pace: see `LocalSGD`.
        global_every: "epoch" or None, see `PReduce`.
        detector: "on" lets a worker with a slow line make more steps between two rounds, and so all others.
        shards, overlap, timeout_s: see `PReduce`.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "choco"
    _policy: ClassVar[type[ModelAveraging]] = NeighbourGossip

    topology: Topology = "ring"
    compress: str | None = "topk:0.01"
    gamma: Gamma = "adaptive"
    every: int = 1
    by_pace: bool = True

    def __post_init__(self) -> None:
        mixing_weights(self.topology, 1, 0)
        parse_encoding(self.compress)
        if isinstance(self.gamma, str):
            if self.gamma not in ("adaptive", "theory"):
                raise ValueError(f"expected gamma to be adaptive, theory or a number, got {self.gamma!r}")
        elif not 0 < self.gamma <= 1:
            raise ValueError(f"expected gamma of more than 0 and at most 1, got {self.gamma}")
        super().__post_init__()

    def make_synchronizer(self, loop: TrainingLoop, trained: TrainingState) -> ModelAveragingSynchronizer:
        """See `Strategy.make_synchronizer`.

        Raises:
            OffbeatError: a model on an accelerator.
        """
        if trained.device.type != "cpu":
            raise OffbeatError(
                f"expected a model on the CPU under choco, got one on {trained.device}: take adpsgd, which "
                "sends whole models"
            )
        return super().make_synchronizer(loop, trained)

    def _compression_arguments(self) -> dict[str, Any]:
        return {"encoding": parse_encoding(self.compress), "gamma": self.gamma}

    def worker_arguments(self) -> dict[str, Any]:
        """See `AveragesModels.worker_arguments`."""
        return {**super().worker_arguments(), "topology": self.topology}

    def _policy_arguments(self) -> dict[str, Any]:
        arguments = super()._policy_arguments()
        for name in ("topology", "compress", "gamma"):
            del arguments[name]
        return arguments
