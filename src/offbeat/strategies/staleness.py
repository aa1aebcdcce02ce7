"""The second paper's systems: workers on a parameter server whose staleness is bounded, or is not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from offbeat.policies.staleness.adaptive_bound import Signal
from offbeat.policies.staleness.bounded_staleness import BoundedStaleness
from offbeat.policies.staleness.caches import Terms
from offbeat.runtime.control.coordinator import PolicySpec
from offbeat.runtime.staleness.synchronizer import ServerSynchronizer
from offbeat.runtime.training.interface import Loop
from offbeat.runtime.training.trained import Trained
from offbeat.strategies.base import assembly


@dataclass(frozen=True, kw_only=True)
class OnServers(ABC):
    """What all have in common: the servers, and the policy that lets a worker start a step."""

    survives: ClassVar[bool] = True
    takes_back: ClassVar[bool] = False
    needs_coordinator: ClassVar[bool] = True

    shards: Literal["dynamic", "equal"] = "dynamic"
    copies: int = 2
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if self.copies < 0:
            raise ValueError(f"expected at least 0 replicas, got {self.copies}")
        BoundedStaleness(1, **self.staleness())

    def policies(self, world: int, start_s: float, servers: int) -> tuple[PolicySpec, ...]:
        """See `Strategy.policies`."""
        return (
            assembly(world, start_s, self.shards),
            PolicySpec(
                path="offbeat.policies.staleness.bounded_staleness:BoundedStaleness",
                arguments={"world": world, **self.staleness()},
            ),
            PolicySpec(
                path="offbeat.policies.ps.manager:Manager",
                arguments={"servers": servers, "copies": self.copies},
            ),
        )

    def synchronizer(self, loop: Loop, trained: Trained) -> ServerSynchronizer:
        """See `Strategy.synchronizer`."""
        return ServerSynchronizer(loop, trained, terms=self.terms())

    def staleness(self) -> dict[str, Any]:
        """Arguments of `BoundedStaleness`, but for the world."""
        return {
            "s": self._bound(),
            "counts": "common" if self.shards == "dynamic" else "own",
            "deadline_s": self.deadline_s,
            "shards": self.shards,
        }

    @abstractmethod
    def _bound(self) -> int | None: ...

    def terms(self) -> Terms:
        """How it uses the parameter server."""
        return Terms(
            is_versioned=True,
            is_bounded=True,
            steps_locally=False,
            is_dealt=self.shards == "dynamic",
            deadline_s=self.deadline_s,
        )


@dataclass(frozen=True, kw_only=True)
class _Clocked(OnServers):
    """What those have in common that count clocks: how the gradients of one are applied."""

    server_step: Literal["mean", "sequential"] = "mean"

    def __post_init__(self) -> None:
        if self.server_step not in ("mean", "sequential"):
            raise ValueError(f"expected server_step to be mean or sequential, got {self.server_step!r}")
        super().__post_init__()

    def terms(self) -> Terms:
        """How it uses the parameter server."""
        return replace(super().terms(), is_sequential=self.server_step == "sequential")


@dataclass(frozen=True, kw_only=True)
class ServerBSP(_Clocked):
    """Bulk-synchronous training on a parameter server: everybody reads what all have made of the last clock.

    Training equals training in one process with the workers' batches joined, whatever the order in which
    gradients come, but for how sums are rounded.

    Source: the second paper, section 2 (BSP); specification 2.2. Deviation: by default the gradients of a
    clock are one step of the optimizer, of their mean.

    Args:
        server_step: "mean": the gradients of a clock are one step of the optimizer, of their mean;
            "sequential": each is a step, in the order of the workers, as the paper says. What the threads of
            a process have at a clock, and where samples are dealt a worker in several steps, is one gradient,
            their mean.
        shards: "dynamic" deals samples as they are needed; "equal" shares them out before, as in the paper.
        copies: replicas that all parameters have, as far as there are servers.
        deadline_s: how long a live worker may keep the others waiting before it has to go, in seconds.

    Raises:
        ValueError: an argument out of range.
    """

    name: ClassVar[str] = "ps-bsp"

    def _bound(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class _Cached(_Clocked):
    """What those with a bound above 0 take besides."""

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
                "expected apply=versioned with server_step=sequential, for eager steps have no order"
            )
        super().__post_init__()

    def _bound(self) -> int:
        return self.s

    @property
    def _may_lag(self) -> bool:
        """Whether the bound is ever above 0."""
        return self.s > 0

    def terms(self) -> Terms:
        """How it uses the parameter server."""
        return replace(
            super().terms(),
            is_versioned=self.apply == "versioned",
            steps_locally=self.apply == "eager" or self._may_lag,
            clears_thread_cache=self.thread_cache == "per_clock",
        )


@dataclass(frozen=True, kw_only=True)
class SSP(_Cached):
    """Stale-synchronous training: a worker may be up to `s` clocks ahead of the slowest one.

    What it reads at clock c holds all gradients of clocks up to c - s - 1, and all its own.

    Source: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    NIPS 2013, section 3; the second paper's caches; specification 2.4. Deviations: see `ConsistencyGate`,
    `ServedModel` and `ServerSynchronizer`.

    Args:
        s: the bound, in clocks; 0 is bulk-synchronous.
        apply: "versioned": the gradients of a clock are applied, as `server_step` says, once the slowest
            worker has passed it. "eager": each is a step by itself, on arrival, as in Petuum.
        thread_cache: "keep": a worker thread's parameters are used for as long as they are fresh enough;
            "per_clock": they are taken anew at every clock, as in Petuum.
        shards: "dynamic" deals samples as they are needed, and clocks count the work that all have done;
            "equal" shares them out before, and clocks count each worker's steps, as in the papers.
        server_step: see `ServerBSP`.
        copies: replicas that all parameters have, as far as there are servers.
        deadline_s: how long a live worker may keep the others waiting before it has to go, in seconds.

    Raises:
        ValueError: an argument out of range.
    """

    name: ClassVar[str] = "ssp"


@dataclass(frozen=True, kw_only=True)
class DTSSP(_Cached):
    """SSP whose bound follows the training loss, which the loop says with `session.observe`.

    Where the loss of a clock is lower than that of the one before it by more than `limit` percent, the bound
    grows by `step`; where it is higher by more, it shrinks by as much.

    Source: the second paper, section 3 (DTSSP); specification 2.5. Deviation: the learning-progress rate's
    formula is this project's, for the paper's is lost.

    Args:
        s: the bound at first, in clocks.
        s_min, s_max: it stays between these.
        limit: percent, at least 0; infinite for a bound that stays.
        step: by how much the bound changes at once.
        signal: "loss"; or "accuracy", where the loop says that with `session.observe`.
        beta: compares the losses' moving average, which keeps so much of the past, above 0 and below 1; None
            for losses as they are.
        window: compares the means of so many clocks' losses; 1 for losses as they are.
        detector: "on": workers that are classed as stragglers hold the others back only beyond `s_max`.
        apply, thread_cache, server_step, shards, copies, deadline_s: see `SSP`.

    Raises:
        ValueError: an argument out of range.
    """

    name: ClassVar[str] = "dtssp"

    s_min: int = 3
    s_max: int = 10
    limit: float = 5.0
    step: int = 1
    signal: Signal = "loss"
    beta: float | None = None
    window: int = 1
    detector: Literal["on", "off"] = "off"

    @property
    def _may_lag(self) -> bool:
        return self.s_max > 0

    def staleness(self) -> dict[str, Any]:
        """Arguments of `BoundedStaleness`, but for the world."""
        return {
            **super().staleness(),
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
class _Unbounded(OnServers):
    """What those have in common in which nobody waits for anybody."""

    def _bound(self) -> None:
        return None

    def terms(self) -> Terms:
        """How it uses the parameter server."""
        return replace(super().terms(), is_versioned=False, is_bounded=False, steps_locally=True)


@dataclass(frozen=True, kw_only=True)
class ASP(_Unbounded):
    """Asynchronous training: nobody waits for anybody; parameters are pulled before every step.

    Every gradient is a step of the servers' optimizer, on arrival.

    Source: the second paper, section 2 (ASP); specification 2.3.

    Args:
        shards, copies, deadline_s: see `ServerBSP`.

    Raises:
        ValueError: an argument out of range.
    """

    name: ClassVar[str] = "asp"


@dataclass(frozen=True, kw_only=True)
class Downpour(_Unbounded):
    """Downpour SGD: workers step by themselves, push every few steps, and fetch in the background.

    Source: J. Dean et al., "Large scale distributed deep networks", NIPS 2012, section 4.1; specification
    2.3. Deviation: the servers' optimizer is the user's own, which in the paper is Adagrad.

    Args:
        n_fetch: steps after which parameters are fetched; they are used once they have come.
        n_push: steps whose gradients are pushed as one sum.
        warm_start: so many steps the first worker takes alone; the others begin with what comes of them.
        shards, copies, deadline_s: see `ServerBSP`.

    Raises:
        ValueError: an argument out of range.
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

    def staleness(self) -> dict[str, Any]:
        """Arguments of `BoundedStaleness`, but for the world."""
        return {**super().staleness(), "warm_start": self.warm_start}

    def terms(self) -> Terms:
        """How it uses the parameter server."""
        return replace(super().terms(), push_every=self.n_push, fetch_every=self.n_fetch)
