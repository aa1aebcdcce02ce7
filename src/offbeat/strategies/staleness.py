"""BSP, SSP, DTSSP, ASP and Downpour: training on a parameter server with bounded or unbounded staleness."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from offbeat.policies.staleness.adaptive_bound import ProgressSignal
from offbeat.policies.staleness.bounded_staleness import BoundedStaleness
from offbeat.policies.staleness.caches import PsOptions
from offbeat.policies.staleness.clock_protocol import ClockProtocol
from offbeat.runtime.control.configuration import PARAMETER_SERVER_PATH, PolicySpec
from offbeat.runtime.staleness.synchronizer import ServerSynchronizer
from offbeat.runtime.training.interface import TrainingLoop
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies.base import assembly_spec


@dataclass(frozen=True, kw_only=True)
class ServerStrategy(ABC):
    """Common part of the strategies on a parameter server; a policy permits each step of a worker."""

    survives_worker_loss: ClassVar[bool] = True
    readmits_workers: ClassVar[bool] = False
    always_needs_coordinator: ClassVar[bool] = True
    trains_several_models: ClassVar[bool] = False

    shards: Literal["dynamic", "equal"] = "dynamic"
    replicas: int = 2
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ValueError(f"expected at least 0 replicas, got {self.replicas}")
        BoundedStaleness(1, **self.staleness_arguments())

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return (
            assembly_spec(world, start_s, self.shards),
            PolicySpec(
                path="offbeat.policies.staleness.bounded_staleness:BoundedStaleness",
                arguments={"world": world, **self.staleness_arguments()},
            ),
            PolicySpec(
                path=PARAMETER_SERVER_PATH,
                arguments={"servers": servers, "replicas": self.replicas},
            ),
        )

    def make_worker_protocol(self, worker: int) -> ClockProtocol:
        """See `Strategy.make_worker_protocol`."""
        return ClockProtocol()

    def make_synchronizer(self, loop: TrainingLoop, trained: TrainingState) -> ServerSynchronizer:
        """See `Strategy.make_synchronizer`."""
        return ServerSynchronizer(loop, trained, options=self.ps_options())

    def staleness_arguments(self) -> dict[str, Any]:
        """Return the arguments of `BoundedStaleness` except the number of workers."""
        return {
            "s": self._bound(),
            "counts": "common" if self.shards == "dynamic" else "own",
            "timeout_s": self.timeout_s,
            "shards": self.shards,
        }

    @abstractmethod
    def _bound(self) -> int | None: ...

    def ps_options(self) -> PsOptions:
        """Return how the strategy uses the parameter server."""
        return PsOptions(
            is_versioned=True,
            is_bounded=True,
            applies_local_steps=False,
            assigns_samples=self.shards == "dynamic",
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class _Clocked(ServerStrategy):
    """Common part of the strategies that count clocks: how the gradients of a clock are applied."""

    server_step: Literal["mean", "sequential"] = "mean"

    def __post_init__(self) -> None:
        if self.server_step not in ("mean", "sequential"):
            raise ValueError(f"expected server_step to be mean or sequential, got {self.server_step!r}")
        super().__post_init__()

    def ps_options(self) -> PsOptions:
        """Return how the strategy uses the parameter server."""
        return replace(super().ps_options(), steps_per_process=self.server_step == "sequential")


@dataclass(frozen=True, kw_only=True)
class ServerBSP(_Clocked):
    """Bulk-synchronous training on a parameter server: each step reads the result of all workers' last clock.

    Training equals training in one process on the workers' concatenated batches, in whatever order gradients
    arrive, except for the rounding of sums.

    Source: the DTSSP paper, section 2 (BSP). Deviation: by default the gradients of a
    clock are applied as one optimizer step with their mean.

    Args:
        server_step: "mean": the gradients of a clock are one optimizer step, with their mean; "sequential":
            each is a step, in the order of the workers, as in the paper. The gradients of the threads of one
            process in a clock, and those of several steps of a worker where samples are assigned dynamically,
            count as one gradient, their mean.
        shards: "dynamic" assigns samples as they are needed; "equal" splits them in advance, as in the paper.
        replicas: replicas of each parameter, as far as there are servers.
        timeout_s: how long a live worker may keep the others waiting before it is excluded, in seconds.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "ps-bsp"

    def _bound(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class _Cached(_Clocked):
    """Common part of the strategies with a staleness bound above 0."""

    s: int = 3
    apply: Literal["versioned", "eager"] = "versioned"
    thread_cache: Literal["keep", "per_clock"] = "keep"

    def __post_init__(self) -> None:
        if self.apply not in ("versioned", "eager"):
            raise ValueError(f"expected apply to be versioned or eager, got {self.apply!r}")
        if self.thread_cache not in ("keep", "per_clock"):
            raise ValueError(f"expected thread_cache to be keep or per_clock, got {self.thread_cache!r}")
        if self.apply == "eager" and self.server_step != "mean":
            raise ValueError(
                "expected apply=versioned with server_step=sequential: eager steps have no order"
            )
        super().__post_init__()

    def _bound(self) -> int:
        return self.s

    @property
    def _may_lag(self) -> bool:
        """Whether the bound is ever above 0."""
        return self.s > 0

    def ps_options(self) -> PsOptions:
        """Return how the strategy uses the parameter server."""
        return replace(
            super().ps_options(),
            is_versioned=self.apply == "versioned",
            applies_local_steps=self.apply == "eager" or self._may_lag,
            clears_thread_cache=self.thread_cache == "per_clock",
        )


@dataclass(frozen=True, kw_only=True)
class SSP(_Cached):
    """Stale-synchronous training: a worker may be up to `s` clocks ahead of the slowest one.

    The parameters that a worker reads at clock c contain all gradients of the clocks up to c - s - 1, and all
    of its own.

    Source: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    NIPS 2013, section 3; the DTSSP paper's caches. Deviations: see `ConsistencyGate`,
    `SharedModel` and `ServerSynchronizer`.

    Args:
        s: staleness bound, in clocks; 0 is bulk-synchronous.
        apply: "versioned": the gradients of a clock are applied, as `server_step` says, once the slowest
            worker has passed it. "eager": each is a step of its own, on arrival, as in Petuum.
        thread_cache: "keep": a worker thread uses its cached parameters for as long as they are fresh enough;
            "per_clock": it fetches them again at every clock, as in Petuum.
        shards: "dynamic" assigns samples as they are needed, and a clock is a unit of the work of all
            workers; "equal" splits them in advance, and clocks count each worker's steps, as in the papers.
        server_step: see `ServerBSP`.
        replicas: replicas of each parameter, as far as there are servers.
        timeout_s: how long a live worker may keep the others waiting before it is excluded, in seconds.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "ssp"


@dataclass(frozen=True, kw_only=True)
class DTSSP(_Cached):
    """SSP with a dynamic bound that follows the training loss, which the loop passes to `session.observe`.

    If the loss of a clock is more than `limit` percent below that of the previous clock, the bound grows by
    `step`; if it is more than `limit` percent above, the bound shrinks by `step`.

    Source: Kim and Rhee 2019, "Distributed and parallel deep learning architecture exploiting dynamic stale
    synchronous parallel method" (the DTSSP paper), section 3. Deviation: the formula of
    the learning progress rate is this project's, since the paper's is lost.

    Args:
        s: initial bound, in clocks.
        s_min, s_max: limits of the bound, in clocks.
        limit: threshold in percent, at least 0; infinite for a constant bound.
        step: change of the bound at a time, in clocks.
        signal: "loss", or "accuracy" if the loop passes that to `session.observe`.
        beta: smoothing factor, above 0 and below 1: compares exponential moving averages of the losses, each
            of which keeps this share of the last one; None compares the losses themselves.
        window: compares means over this many clocks; 1 compares the losses themselves.
        detector: "on": workers that are classed as stragglers hold up the others only beyond `s_max`.
        apply, thread_cache, server_step, shards, replicas, timeout_s: see `SSP`.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "dtssp"

    s_min: int = 3
    s_max: int = 10
    limit: float = 5.0
    step: int = 1
    signal: ProgressSignal = "loss"
    beta: float | None = None
    window: int = 1
    detector: Literal["on", "off"] = "off"

    @property
    def _may_lag(self) -> bool:
        return self.s_max > 0

    def staleness_arguments(self) -> dict[str, Any]:
        """Return the arguments of `BoundedStaleness` except the number of workers."""
        return {
            **super().staleness_arguments(),
            "dynamic": {
                "s_min": self.s_min,
                "s_max": self.s_max,
                "limit": None if math.isinf(self.limit) else self.limit,
                "step": self.step,
                "signal": self.signal,
                "beta": self.beta,
                "window": self.window,
            },
            "detector": {} if self.detector == "on" else None,
        }


@dataclass(frozen=True, kw_only=True)
class _Unbounded(ServerStrategy):
    """Common part of the strategies without a bound: no worker waits for another."""

    def _bound(self) -> None:
        return None

    def ps_options(self) -> PsOptions:
        """Return how the strategy uses the parameter server."""
        return replace(super().ps_options(), is_versioned=False, is_bounded=False, applies_local_steps=True)


@dataclass(frozen=True, kw_only=True)
class ASP(_Unbounded):
    """Asynchronous training: no worker waits for another; parameters are pulled before every step.

    Each gradient is one step of the servers' optimizer, on arrival.

    Source: the DTSSP paper, section 2 (ASP).

    Args:
        shards, replicas, timeout_s: see `ServerBSP`.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "asp"


@dataclass(frozen=True, kw_only=True)
class Downpour(_Unbounded):
    """Downpour SGD: workers take local steps, push every few steps, and fetch parameters in the background.

    Source: J. Dean et al., "Large scale distributed deep networks", NIPS 2012, section 4.1; specification
    2.3. Deviation: the servers' optimizer is the one that the user passes; the paper's is Adagrad.

    Args:
        n_fetch: steps between fetches of the parameters, which are used once they have arrived.
        n_push: steps whose gradients are pushed as one sum.
        warm_start: steps that the first worker takes alone; the other workers start from their result.
        shards, replicas, timeout_s: see `ServerBSP`.

    Raises:
        ValueError: an argument is out of range.
    """

    name: ClassVar[str] = "downpour"

    n_fetch: int = 1
    n_push: int = 1
    warm_start: int = 0

    def __post_init__(self) -> None:
        for name, least in (("n_fetch", 1), ("n_push", 1), ("warm_start", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} of at least {least} steps, got {getattr(self, name)}")
        super().__post_init__()

    def staleness_arguments(self) -> dict[str, Any]:
        """Return the arguments of `BoundedStaleness` except the number of workers."""
        return {**super().staleness_arguments(), "warm_start": self.warm_start}

    def ps_options(self) -> PsOptions:
        """Return how the strategy uses the parameter server."""
        return replace(super().ps_options(), push_every=self.n_push, fetch_every=self.n_fetch)
