"""Bounded staleness as a table of clocks: which worker may start its next step. A part that a policy owns.

Nothing here knows what is computed, where parameters are, why a worker joins or leaves, or how the bound is
chosen (see `offbeat.policies.staleness.adaptive_bound`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from offbeat.errors import ProtocolError

ClockCounting: TypeAlias = Literal["own", "common"]


class OpenedStep(NamedTuple):
    """Permission for a worker to start its step.

    Attributes:
        clock: of the step.
        version: the least version of the parameters with which it must be computed.
        bound: how many clocks `version` may lie before `clock`; None for any number.
    """

    worker: int
    clock: int
    version: int
    bound: int | None


@dataclass(slots=True)
class _Running:
    clock: int  # of its step, which it computes or waits to start
    version: int | None = None  # the least that its step must be computed with; None while it waits


class ConsistencyGate:
    """Lets a worker at clock c start its step once c is at most s ahead of the least running clock.

    A clock belongs to a step, and is known as soon as the worker's previous step is done. Version v of the
    parameters holds all that was done at clocks up to v - 1: it is complete once no worker runs at a clock
    before v. So a step may be computed with any version from R = max(0, c - s) on, which is complete when the
    gate opens; the wait until the worker has such a version is not the gate's concern.

    Source: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    NIPS 2013, section 3; s = 0 is bulk-synchronous, no bound is asynchronous. Deviations:

    - A waiting worker may be s + 1 ahead: the bound holds for workers that have started.
    - Workers join and leave. A worker without anything to compute *rests*: no worker waits for it, it has
      done all that it will do at clocks before its own, and its clock moves with the version, so that it
      never returns at a clock that is complete. Where no worker runs, all that was done is complete: the
      version and the clocks of resting workers go on to the latest clock.
    - Clocks may be counted in another way (see `counts`).
    - *Stragglers* (named by the owner of the gate): their clocks hold other workers back only beyond `s_max`
      instead of s. R is then the version at the start, which is at least c - `s_max`.

    Args:
        s: the bound, at least 0; None for none.
        counts: "own": a worker's clock counts its own steps, as published. With lasting differences in speed
            any bound only delays the wait for the slowest. "common": a clock is as many steps as workers run,
            whichever worker takes them; a worker's next clock is the first that has room for one more step,
            so that a fast worker takes several steps at a clock and a slow one skips clocks, and workers wait
            only where a single step takes longer than s clocks of the other workers. For samples that are
            assigned as they are needed. With s = 0 both are bulk-synchronous.
        s_max: how far other workers may run ahead of a straggler, at least s; None where there are none.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, s: int | None, counts: ClockCounting = "own", s_max: int | None = None) -> None:
        if s is not None and s < 0:
            raise ValueError(f"expected a bound of at least 0 clocks, got {s}")
        if counts not in ("own", "common"):
            raise ValueError(f"expected counts own or common, got {counts!r}")
        if s_max is not None and (s is None or s_max < s):
            raise ValueError(f"expected s_max of at least s, {s}, got {s_max}")
        self._s, self._counts, self._s_max = s, counts, s_max
        self._running: dict[int, _Running] = {}
        self._running_at: dict[int, int] = {}  # by clock: workers that run at it
        self._resting: dict[int, int] = {}
        self._stragglers: frozenset[int] = frozenset()
        self._version = 0
        self._idle_end = 0  # workers that do not run have done nothing from this clock on
        self._first_free = 0  # the first clock that has room for a step
        self._steps_at: dict[int, int] = {}  # by clock, from there on: steps assigned to it
        self._waiting: set[int] = set()  # running workers that have not started
        self._unchecked: set[int] = set()  # those of them that `opened` has not checked yet
        self._recheck_all = False  # `opened` checks all waiting workers

    # Queries ---------------------------------------------------------------------------------------------

    def __contains__(self, worker: int) -> bool:
        """Whether the worker runs or rests."""
        return worker in self._running or worker in self._resting

    @property
    def s(self) -> int | None:
        """The current bound."""
        return self._s

    @property
    def version(self) -> int:
        """The last complete version: the least clock of a running worker. It never falls."""
        return self._version

    @property
    def latest_clock(self) -> int:
        """The latest clock of a running worker; -1 where none runs. O(clocks at which a worker runs)."""
        return max(self._running_at, default=-1)

    @property
    def waiting(self) -> frozenset[int]:
        """The running workers that may not start yet."""
        return frozenset(self._waiting)

    def is_running(self, worker: int) -> bool:
        """Whether the worker runs, so that others wait for it."""
        return worker in self._running

    def clock(self, worker: int) -> int:
        """Return the clock of a running worker's step, or of the next one of a resting worker.

        Raises:
            ProtocolError: the worker neither runs nor rests.
        """
        if worker in self._resting:
            return self._resting[worker]
        return self._get_running(worker).clock

    def required_version(self, worker: int) -> int | None:
        """Return the least version that a running worker's step needs; None before it may start.

        Raises:
            ProtocolError: the worker does not run.
        """
        return self._get_running(worker).version

    def blocking_workers(self) -> list[int]:
        """Return the workers that keep the first waiting worker from starting, ascending; O(workers)."""
        first = min((self._running[worker].clock for worker in self._waiting), default=None)
        if first is None or self._s is None:
            return []
        straggler_limit = first - (self._s if self._s_max is None else self._s_max)
        bound_limit, tolerated = first - self._s, self._tolerated()
        return [
            worker
            for worker, entry in sorted(self._running.items())
            if entry.clock < (straggler_limit if worker in tolerated else bound_limit)
        ]

    # Changes ---------------------------------------------------------------------------------------------

    def enter(self, worker: int, clock: int = 0) -> int:
        """Let a new or resting worker run.

        Args:
            worker: its id.
            clock: the first at which it can take a step.

        Returns:
            The clock of its step: not before `clock`, not complete, and where clocks are common, one that has
                room.

        Raises:
            ProtocolError: the worker runs already.
        """
        if worker in self._running:
            raise ProtocolError(f"expected a worker that does not run, got worker {worker}")
        least = max(clock, self._version, self._resting.pop(worker, 0))
        entry = self._running[worker] = _Running(least)
        self._wait_at(worker, entry, least)
        self._update_version()
        return entry.clock

    def advance(self, worker: int) -> int:
        """Record that a worker has done its step; return the clock of its next one.

        Raises:
            ProtocolError: the worker does not run, or was not permitted to start.
        """
        entry = self._get_running(worker)
        before = entry.clock
        if entry.version is None:
            raise ProtocolError(f"expected worker {worker} to wait at clock {before} until it may start")
        self._wait_at(worker, entry, before + (self._counts == "own"))
        self._leave_clock(before)
        return entry.clock

    def rest(self, worker: int) -> int:
        """Let a running worker rest, which has nothing to compute; return the clock of its next step.

        Raises:
            ProtocolError: the worker does not run.
        """
        self._get_running(worker)
        clock = self._resting[worker] = self._stop_running(worker)
        return clock

    def leave(self, worker: int) -> None:
        """Remove a worker that is gone or has finished.

        Raises:
            ProtocolError: the worker neither runs nor rests.
        """
        if self._resting.pop(worker, None) is None:
            self._get_running(worker)
            self._stop_running(worker)

    def set_bound(self, s: int) -> None:
        """Change the bound; steps that have started are not affected.

        Raises:
            ValueError: the bound is out of range.
        """
        if s < 0 or (self._s_max is not None and s > self._s_max):
            raise ValueError(f"expected a bound from 0 to {self._s_max}, got {s}")
        self._s, self._recheck_all = s, True

    def set_stragglers(self, stragglers: frozenset[int]) -> None:
        """Set which workers are stragglers.

        Raises:
            ProtocolError: there is no bound on how far other workers may run ahead of one.
        """
        if self._s_max is None:
            raise ProtocolError(
                "expected a bound s_max on how far other workers may run ahead of a straggler"
            )
        self._stragglers = stragglers

    def open_steps(self) -> list[OpenedStep]:
        """Return the workers that may start now and could not before, ascending by worker."""
        checked = sorted(self._waiting if self._recheck_all or self._stragglers else self._unchecked)
        self._unchecked.clear()
        self._recheck_all = False
        least = self._least_clock() if checked else 0
        opened = []
        for worker in checked:
            entry = self._running[worker]
            if self._may_start(entry.clock, least):
                entry.version, bound = self._required(entry.clock)
                self._waiting.discard(worker)
                opened.append(OpenedStep(worker, entry.clock, entry.version, bound))
        return opened

    def advance_resting(self) -> list[int]:
        """Move the clocks of resting workers with the version; return the workers concerned, ascending."""
        moved = sorted(worker for worker, clock in self._resting.items() if clock < self._version)
        for worker in moved:
            self._resting[worker] = self._version
        return moved

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes, as plain data."""
        return {
            "s": self._s,
            "running": [[worker, asdict(entry)] for worker, entry in self._running.items()],
            "resting": [list(entry) for entry in self._resting.items()],
            "stragglers": sorted(self._stragglers),
            "version": self._version,
            "idle_end": self._idle_end,
            "first_free": self._first_free,
            "steps_at": [list(entry) for entry in self._steps_at.items()],
            "waiting": sorted(self._waiting),
            "unchecked": sorted(self._unchecked),
            "recheck_all": self._recheck_all,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a gate with the same arguments."""
        self._s, self._version, self._idle_end = state["s"], state["version"], state["idle_end"]
        self._first_free = state["first_free"]
        self._running = {worker: _Running(**entry) for worker, entry in state["running"]}
        self._resting, self._steps_at = dict(state["resting"]), dict(state["steps_at"])
        self._stragglers = frozenset(state["stragglers"])
        self._waiting, self._unchecked = set(state["waiting"]), set(state["unchecked"])
        self._recheck_all = state["recheck_all"]
        self._running_at = {}
        for entry in self._running.values():
            self._running_at[entry.clock] = self._running_at.get(entry.clock, 0) + 1

    # The rule --------------------------------------------------------------------------------------------

    def _tolerated(self) -> frozenset[int]:
        """Stragglers, unless all running workers are stragglers: then they wait for one another."""
        return self._stragglers if self._running.keys() - self._stragglers else frozenset()

    def _least_clock(self) -> int:
        """Return the least clock of a running worker that is no straggler."""
        if not self._stragglers:
            return self._version
        tolerated = self._tolerated()
        return min(
            (entry.clock for worker, entry in self._running.items() if worker not in tolerated),
            default=self._version,
        )

    def _may_start(self, clock: int, least: int) -> bool:
        if self._s is None:
            return True
        s_max = self._s if self._s_max is None else self._s_max
        return clock - least <= self._s and clock - self._version <= s_max

    def _required(self, clock: int) -> tuple[int, int | None]:
        """R and the bound for a step that may start now."""
        if self._s is None:
            return 0, None
        if clock - self._s <= self._version:
            return max(0, clock - self._s), self._s
        return self._version, self._s_max

    # The table -------------------------------------------------------------------------------------------

    def _wait_at(self, worker: int, entry: _Running, least: int) -> None:
        """Give a running worker its next clock, at which it waits."""
        clock = self._assign_clock(least) if self._counts == "common" else least
        entry.clock, entry.version = clock, None
        self._running_at[clock] = self._running_at.get(clock, 0) + 1
        self._waiting.add(worker)
        self._unchecked.add(worker)

    def _assign_clock(self, least: int) -> int:
        if self._first_free < self._version:
            self._first_free = self._version
            self._steps_at = {
                clock: count for clock, count in self._steps_at.items() if clock >= self._first_free
            }
        room = len(self._running)
        while self._steps_at.get(self._first_free, 0) >= room:
            del self._steps_at[self._first_free]
            self._first_free += 1
        clock = max(least, self._first_free)
        while self._steps_at.get(clock, 0) >= room:
            clock += 1
        self._steps_at[clock] = self._steps_at.get(clock, 0) + 1
        return clock

    def _stop_running(self, worker: int) -> int:
        """Let the worker stop running; return the first clock at which it has done nothing."""
        clock = self._running.pop(worker).clock
        self._waiting.discard(worker)
        self._unchecked.discard(worker)
        self._idle_end = max(self._idle_end, clock + 1)  # it may have done a step at its clock already
        self._leave_clock(clock)
        return clock + 1

    def _leave_clock(self, clock: int) -> None:
        self._running_at[clock] -= 1
        if not self._running_at[clock]:
            del self._running_at[clock]
            self._update_version()

    def _update_version(self) -> None:
        """Raise the version after the table has changed."""
        version = min(self._running_at, default=self._idle_end)
        if version > self._version:
            self._version, self._recheck_all = version, True

    def _get_running(self, worker: int) -> _Running:
        entry = self._running.get(worker)
        if entry is None:
            raise ProtocolError(f"expected a worker that runs, got worker {worker}")
        return entry
