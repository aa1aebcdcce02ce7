"""Who may start the next step: bounded staleness as a table of clocks; a part that a policy owns.

Nothing here knows what is computed, where parameters are, why a worker comes or goes, or how the bound is
chosen (see `offbeat.policies.learning`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from offbeat.errors import ProtocolError

Counts: TypeAlias = Literal["own", "common"]


class Opened(NamedTuple):
    """A worker may start its step.

    Attributes:
        clock: of the step.
        version: the least version of the parameters that it must be computed with.
        bound: how many clocks that may lie before `clock`; None for any number.
    """

    worker: int
    clock: int
    version: int
    bound: int | None


@dataclass(slots=True)
class _Running:
    clock: int  # of the step that it takes, or waits to take
    version: int | None = None  # the least that its step must be computed with; None while it waits


class ConsistencyGate:
    """Lets a worker at clock c start its step once c is at most s ahead of the least clock of who runs.

    A clock belongs to a step, and is known as soon as the worker's step before it is done. Version v of the
    parameters holds all that was done at clocks up to v - 1: it is complete once nobody runs at a clock
    before v. So a step may be computed with any version from R = max(0, c - s) on, which is complete when
    the gate opens; that the worker waits until it has such a version is not the gate's affair.

    Source: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    NIPS 2013, section 3; s = 0 is bulk-synchronous, no bound is asynchronous. Deviations:

    - Who waits may show s + 1: the bound holds for those who have started.
    - Workers come and go. One that has nothing to compute *rests*: nobody waits for it, it has done all that
      it will do at clocks before its own, and its clock moves along with the version, so that it never comes
      back at a clock that is complete. Where nobody runs, all that was done is complete: the version, and
      who rests, go on to the latest clock.
    - Clocks may be counted otherwise (see `counts`).
    - *Stragglers*, whoever owns the gate says who: their clocks do not hold back others up to s, only up to
      `s_max`. R is then the version at the start, which is at least c - `s_max`.

    Args:
        s: the bound, at least 0; None for none.
        counts: "own": a worker's clock counts its own steps, as published. With lasting differences in speed
            any bound only delays the wait for the slowest. "common": a clock is as many steps as workers run,
            whoever takes them; a worker's next clock is the first that has room for one more step, so that a
            fast one takes several steps at a clock and a slow one skips clocks, and others wait only where a
            single step takes longer than s clocks of the others. For work that is dealt as it is needed.
            With s = 0 both are bulk-synchronous.
        s_max: how far others may run ahead of a straggler, at least s; None where there are none.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, s: int | None, counts: Counts = "own", s_max: int | None = None) -> None:
        if s is not None and s < 0:
            raise ValueError(f"expected a bound of at least 0 clocks, got {s}")
        if counts not in ("own", "common"):
            raise ValueError(f"expected counts own or common, got {counts!r}")
        if s_max is not None and (s is None or s_max < s):
            raise ValueError(f"expected s_max of at least s, {s}, got {s_max}")
        self._s, self._counts, self._s_max = s, counts, s_max
        self._running: dict[int, _Running] = {}
        self._at: dict[int, int] = {}  # clock: how many run at it
        self._resting: dict[int, int] = {}
        self._stragglers: frozenset[int] = frozenset()
        self._version = 0
        self._latest = 0  # who does not run has done nothing at this clock or later
        self._first = 0  # the first clock that has room for a step
        self._places: dict[int, int] = {}  # from there on: steps that have been given this clock
        self._waiting: set[int] = set()  # who runs and has not started
        self._fresh: set[int] = set()  # those of them that have not been looked at
        self._is_stale = False  # look at all of them

    # Asking ----------------------------------------------------------------------------------------------

    def __contains__(self, worker: int) -> bool:
        """Whether the worker runs or rests."""
        return worker in self._running or worker in self._resting

    @property
    def s(self) -> int | None:
        """The bound now."""
        return self._s

    @property
    def version(self) -> int:
        """The last version that is complete: the least clock of who runs. It never falls."""
        return self._version

    @property
    def latest(self) -> int:
        """The latest clock of who runs; -1 where nobody does. Takes time O(clocks that somebody runs at)."""
        return max(self._at, default=-1)

    @property
    def waiting(self) -> frozenset[int]:
        """Who runs and may not start yet."""
        return frozenset(self._waiting)

    def runs(self, worker: int) -> bool:
        """Whether others wait for the worker."""
        return worker in self._running

    def clock(self, worker: int) -> int:
        """Return the clock of a worker's step, or of the next one of who rests.

        Raises:
            ProtocolError: it neither runs nor rests.
        """
        if worker in self._resting:
            return self._resting[worker]
        return self._known(worker).clock

    def required(self, worker: int) -> int | None:
        """Return the least version that the step of a worker that runs needs; None before it may start.

        Raises:
            ProtocolError: it does not run.
        """
        return self._known(worker).version

    def holding(self) -> list[int]:
        """Who keeps the first of those who wait from starting, ascending; takes time O(workers)."""
        first = min((self._running[worker].clock for worker in self._waiting), default=None)
        if first is None or self._s is None:
            return []
        far = first - (self._s if self._s_max is None else self._s_max)
        near, tolerated = first - self._s, self._tolerated()
        return [
            worker
            for worker, one in sorted(self._running.items())
            if one.clock < (far if worker in tolerated else near)
        ]

    # Telling ---------------------------------------------------------------------------------------------

    def enter(self, worker: int, clock: int = 0) -> int:
        """Say that a worker runs from now on, which is new or has rested.

        Args:
            worker: who.
            clock: the first at which it can take a step.

        Returns:
            The clock of its step: no earlier, none that is complete, and where clocks are common, one that
            has room.

        Raises:
            ProtocolError: it runs already.
        """
        if worker in self._running:
            raise ProtocolError(f"expected a worker that does not run, got worker {worker}")
        least = max(clock, self._version, self._resting.pop(worker, 0))
        one = self._running[worker] = _Running(least)
        self._place(worker, one, least)
        self._move()
        return one.clock

    def advance(self, worker: int) -> int:
        """Say that a worker has done its step; returns the clock of its next one.

        Raises:
            ProtocolError: it does not run, or might not start.
        """
        one = self._known(worker)
        before = one.clock
        if one.version is None:
            raise ProtocolError(f"expected worker {worker} to wait at clock {before} until it may start")
        self._place(worker, one, before + (self._counts == "own"))
        self._leave_clock(before)
        return one.clock

    def rest(self, worker: int) -> int:
        """Say that a worker that runs has nothing to compute; returns the clock that is its next by now.

        Raises:
            ProtocolError: it does not run.
        """
        self._known(worker)
        clock = self._resting[worker] = self._drop(worker)
        return clock

    def leave(self, worker: int) -> None:
        """Say that a worker is no more, or has finished.

        Raises:
            ProtocolError: it neither runs nor rests.
        """
        if self._resting.pop(worker, None) is None:
            self._known(worker)
            self._drop(worker)

    def set_bound(self, s: int) -> None:
        """Change the bound; nobody who has started is called back.

        Raises:
            ValueError: it is out of range.
        """
        if s < 0 or (self._s_max is not None and s > self._s_max):
            raise ValueError(f"expected a bound from 0 to {self._s_max}, got {s}")
        self._s, self._is_stale = s, True

    def set_stragglers(self, stragglers: frozenset[int]) -> None:
        """Say who is a straggler.

        Raises:
            ProtocolError: there is no bound on how far others may run ahead of one.
        """
        if self._s_max is None:
            raise ProtocolError("expected a bound s_max on how far others may run ahead of a straggler")
        self._stragglers = stragglers

    def opened(self) -> list[Opened]:
        """Say who may start now and might not before, ascending by worker."""
        seen = sorted(self._waiting if self._is_stale or self._stragglers else self._fresh)
        self._fresh.clear()
        self._is_stale = False
        least = self._least() if seen else 0
        opened = []
        for worker in seen:
            one = self._running[worker]
            if self._may_start(one.clock, least):
                one.version, bound = self._required(one.clock)
                self._waiting.discard(worker)
                opened.append(Opened(worker, one.clock, one.version, bound))
        return opened

    def moved(self) -> list[int]:
        """Say whose clock has moved along while it rests, ascending."""
        moved = sorted(worker for worker, clock in self._resting.items() if clock < self._version)
        for worker in moved:
            self._resting[worker] = self._version
        return moved

    # Remembering -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes, as plain data."""
        return {
            "s": self._s,
            "running": [[worker, asdict(one)] for worker, one in self._running.items()],
            "resting": [list(one) for one in self._resting.items()],
            "stragglers": sorted(self._stragglers),
            "version": self._version,
            "latest": self._latest,
            "first": self._first,
            "places": [list(one) for one in self._places.items()],
            "waiting": sorted(self._waiting),
            "fresh": sorted(self._fresh),
            "is_stale": self._is_stale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a gate with the same arguments."""
        self._s, self._version, self._latest = state["s"], state["version"], state["latest"]
        self._first = state["first"]
        self._running = {worker: _Running(**one) for worker, one in state["running"]}
        self._resting, self._places = dict(state["resting"]), dict(state["places"])
        self._stragglers = frozenset(state["stragglers"])
        self._waiting, self._fresh = set(state["waiting"]), set(state["fresh"])
        self._is_stale = state["is_stale"]
        self._at = {}
        for one in self._running.values():
            self._at[one.clock] = self._at.get(one.clock, 0) + 1

    # The rule --------------------------------------------------------------------------------------------

    def _tolerated(self) -> frozenset[int]:
        """Stragglers, unless nobody else runs: then they wait for one another as others do."""
        return self._stragglers if self._running.keys() - self._stragglers else frozenset()

    def _least(self) -> int:
        """The least clock of who runs and is no straggler."""
        if not self._stragglers:
            return self._version
        tolerated = self._tolerated()
        return min(
            (one.clock for worker, one in self._running.items() if worker not in tolerated),
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

    def _place(self, worker: int, one: _Running, least: int) -> None:
        """Give a worker that runs its next clock, and let it wait there."""
        clock = self._take_place(least) if self._counts == "common" else least
        one.clock, one.version = clock, None
        self._at[clock] = self._at.get(clock, 0) + 1
        self._waiting.add(worker)
        self._fresh.add(worker)

    def _take_place(self, least: int) -> int:
        if self._first < self._version:
            self._first = self._version
            self._places = {clock: count for clock, count in self._places.items() if clock >= self._first}
        room = len(self._running)
        while self._places.get(self._first, 0) >= room:
            del self._places[self._first]
            self._first += 1
        clock = max(least, self._first)
        while self._places.get(clock, 0) >= room:
            clock += 1
        self._places[clock] = self._places.get(clock, 0) + 1
        return clock

    def _drop(self, worker: int) -> int:
        """The worker runs no more; returns the first clock at which it has done nothing."""
        clock = self._running.pop(worker).clock
        self._waiting.discard(worker)
        self._fresh.discard(worker)
        self._latest = max(self._latest, clock + 1)  # it may have done a step at its clock already
        self._leave_clock(clock)
        return clock + 1

    def _leave_clock(self, clock: int) -> None:
        self._at[clock] -= 1
        if not self._at[clock]:
            del self._at[clock]
            self._move()

    def _move(self) -> None:
        """Nobody runs at some clock any more, or somebody runs: the version may be a later one."""
        version = min(self._at, default=self._latest)
        if version > self._version:
            self._version, self._is_stale = version, True

    def _known(self, worker: int) -> _Running:
        one = self._running.get(worker)
        if one is None:
            raise ProtocolError(f"expected a worker that runs, got worker {worker}")
        return one
