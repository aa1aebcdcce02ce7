"""A model's parameters on the parameter server, as the worker threads of one process share them.

The servers' state is the one that counts. What a process has of it lies in its *process cache*, the row that
was pulled last; every thread trains a model of its own, its *thread cache*. Nothing here decides who may
start, or how old what is read may be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError, WorkerError
from offbeat.policies.ps.range_clock import Piece
from offbeat.policies.staleness.caches import CacheDirectory, clock_of, time_of
from offbeat.runtime.processes.waiting import Condition
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.future import Future
from offbeat.runtime.ps.tensors import Tensors

Array = NDArray[Any]

_T = TypeVar("_T")

_LOOK_S: Final = 0.25
_NEVER: Final = 2**62  # a clock


@dataclass(frozen=True, slots=True)
class GroupGradient:
    """What one thread gives at one clock to a group of parameters that was stepped.

    Attributes:
        weight: of how many whole batches.
        values: gradients times weight, flat; zero where there are none.
        absent: first and last + 1 of the values of each parameter without a gradient. It is not stepped,
            unless another thread or process has one; this weight counts all the same.
        settings: the optimizer's numbers as of now.
    """

    weight: float
    values: Array
    absent: frozenset[tuple[int, int]]
    settings: Mapping[str, Any]

    def plus(self, other: GroupGradient) -> GroupGradient:
        """The sum of both."""
        return GroupGradient(
            self.weight + other.weight,
            self.values + other.values,
            self.absent & other.absent,
            self.settings,
        )

    def keys(self) -> Array | None:
        """Which of the values count; None where all do."""
        if not self.absent:
            return None
        counts = np.ones(len(self.values), bool)
        for first, last in self.absent:
            counts[first:last] = False
        return np.flatnonzero(counts)


@dataclass(frozen=True, slots=True)
class Gradient:
    """What one thread gives at one clock, by group of parameters; None of one that was not stepped."""

    groups: Sequence[GroupGradient | None]

    def plus(self, other: Gradient) -> Gradient:
        """The sum of both."""
        pairs = zip(self.groups, other.groups, strict=True)
        return Gradient([one.plus(more) if one and more else one or more for one, more in pairs])


@dataclass(frozen=True, slots=True)
class Row:
    """Parameters as servers had them.

    Attributes:
        version: all gradients of earlier clocks are in it.
        values: of each group, flat; not to be changed.
        pieces: of each group: up to which time this process's own pushes are in which of its values; 0 where
            there are none.
    """

    version: int
    values: Sequence[Array]
    pieces: Sequence[Sequence[Piece]]


class ServedModel:
    """What the threads of a process push and pull together.

    Pushes carry times. Where gradients are summed clock by clock (`is_versioned`), the time is the clock, so
    that all gradients of a clock are one step of the optimizer; a process pushes once a clock, the sum of
    its threads' gradients, when none of them can have another one; where they had none, it says so. Else
    each gradient is a push and a step by itself, and times count a process's pushes.

    Source: the second paper's figure 5, and Petuum's process and thread caches (specification 2.4).
    Deviation: a version is that of the whole model, not of single rows.

    Args:
        ps: this process's client.
        groups: the parameters of each of the optimizer's groups.
        directory: what may be read and pushed; only this object tells it of pushes and pulls.
        deadline_s: how long servers, and other workers' gradients, may take, in seconds.
    """

    def __init__(
        self,
        ps: PS,
        groups: Sequence[Tensors],
        directory: CacheDirectory,
        *,
        deadline_s: float,
    ) -> None:
        self._ps = ps
        self._namespaces = [group.namespace for group in groups]
        self._is_versioned, self._deadline_s = directory.is_versioned, deadline_s
        self._lock = Condition()
        self._pulling = threading.Lock()
        self.directory = directory
        self._given: dict[int, dict[int, Gradient]] = {}  # by clock and thread, until it is pushed
        self._pushes: dict[int, Future] = {}  # by time, those that are not known to be done
        self._has_begun = False
        self._row: Row | None = None
        self.bytes_pulled = 0
        self.pulls = 0

    # Beginning -------------------------------------------------------------------------------------------

    def begin(
        self,
        initial: Sequence[Mapping[str, Array]] | None,
        check: Callable[[], None],
        *,
        is_newcomer: bool = False,
    ) -> int:
        """Take part, with the parameters that one worker puts there; one thread of a process calls it.

        The one who puts them does so before all others call this, and nobody pushes a gradient before all
        have who are no newcomers.

        Args:
            initial: of each group, "values" and the optimizer's state by name, of the one who puts them.
            check: raises if the job has failed.
            is_newcomer: others train already.

        Returns:
            The first clock to which this process can add.
        """
        begins = [1 for _ in self._namespaces]
        if self._is_versioned:
            begins = [namespace.take_part(1, self._deadline_s) for namespace in self._namespaces]
        done: list[Future] = []
        time = max(begins) if initial is not None or is_newcomer else time_of(-1)
        for group, (namespace, first) in enumerate(zip(self._namespaces, begins, strict=True)):
            if initial is not None:
                states = dict(initial[group])
                done.append(namespace.put(states.pop("values"), states=states, time=first))
            elif self._is_versioned:  # once this is in, all is that others have pushed before
                done += [self._nothing(group, at) for at in range(first, time + 1)]
        self.wait_for(self._ps.when_done(done), "the first parameters", check)
        first_clock = clock_of(time) + 1 if self._is_versioned else 0
        with self._lock:
            self.directory.begin(first_clock, time)
            self._has_begun = True
            self._lock.notify_all()
        return first_clock

    def wait_until_begun(self, check: Callable[[], None]) -> int:
        """Wait until another thread of this process has begun; return the first clock."""
        with self._lock:
            self._wait_until(lambda: self._has_begun, "another thread of this process to begin", check)
            return self.directory.next_clock

    # Giving ----------------------------------------------------------------------------------------------

    def give(self, worker: int, clock: int, gradient: Gradient) -> tuple[int, Future | None]:
        """Add what a thread has computed at a clock.

        Returns:
            The time of the push that it is or will be in, and the push if that is under way already.
        """
        with self._lock:
            time = self.directory.give(worker, clock)
            if not self._is_versioned:
                return time, self._push(time, gradient)
            given = self._given.setdefault(clock, {})
            given[worker] = given[worker].plus(gradient) if worker in given else gradient
            return time, None

    def passed(self, worker: int, clock: int) -> None:
        """A thread adds nothing more to clocks before this one; push what is complete by that."""
        with self._lock:
            self._push_clocks(self.directory.passed(worker, clock))

    def leave(self, worker: int, check: Callable[[], None]) -> None:
        """A thread adds nothing more at all; the last one waits until all is done that was pushed.

        Raises:
            WorkerError: that took too long.
        """
        with self._lock:
            self._push_clocks(self.directory.leave(worker))
            is_last = self.directory.is_empty
            under_way = list(self._pushes.values())
        if is_last:
            self.wait_for(self._ps.when_done(under_way), "the last gradients to be applied", check)
            if self._is_versioned:
                for namespace in self._namespaces:
                    namespace.withdraw(self._deadline_s)

    def give_up(self, worker: int) -> None:
        """A thread has failed, perhaps, and adds nothing more: nobody waits for it, nor it for anything."""
        with self._lock:
            had_left = self.directory.is_empty
            self._push_clocks(self.directory.leave(worker))
            is_last = self.directory.is_empty and not had_left
            under_way = list(self._pushes.values())
        if is_last and self._is_versioned:
            for namespace in self._namespaces:
                namespace.withdraw_after(under_way)

    def _push_clocks(self, clocks: range) -> None:
        for clock in clocks:
            self._push(time_of(clock), self._sum(self._given.pop(clock, {})))
        self._lock.notify_all()

    def _sum(self, given: dict[int, Gradient]) -> Gradient | None:
        total: Gradient | None = None
        for _, gradient in sorted(given.items()):
            total = gradient if total is None else total.plus(gradient)
        return total

    def _push(self, at: int, gradient: Gradient | None) -> Future:
        groups = [None] * len(self._namespaces) if gradient is None else gradient.groups
        try:
            pushed = [
                self._nothing(number, at) if one is None else self._push_group(number, at, one)
                for number, one in enumerate(groups)
            ]
        except OffbeatError as error:
            raise self._out("pushes gradients", error) from error
        done = self._ps.when_done(pushed)
        self._pushes = {time: one for time, one in self._pushes.items() if not one.is_done}
        self._pushes[at] = done
        return done

    def _push_group(self, number: int, at: int, gradient: GroupGradient) -> Future:
        namespace, keys = self._namespaces[number], gradient.keys()
        return namespace.push(
            gradient.values if keys is None else gradient.values[keys],
            keys=keys,
            first=0,
            last=namespace.keys,
            weight=gradient.weight if self._is_versioned else 1.0,
            settings=gradient.settings or None,
            time=at,
            may_wait=False,
        )

    def _nothing(self, group: int, at: int) -> Future:
        """Say that this process has no gradient at a time."""
        namespace = self._namespaces[group]
        none = np.empty(0, np.int64)
        return namespace.push(
            none.astype(np.float64),
            keys=none,
            first=0,
            last=namespace.keys,
            weight=0.0 if self._is_versioned else 1.0,
            time=at,
            may_wait=False,
        )

    # Reading ---------------------------------------------------------------------------------------------

    @property
    def row(self) -> Row:
        """What is in the process cache; only where the directory says that it is to be read."""
        assert self._row is not None
        return self._row

    def pull(self, version: int, check: Callable[[], None], *, complete: int = 0, fresh: bool = False) -> Row:
        """Return parameters of this version or a later one, from the servers.

        Where gradients are not summed by clocks, it is the one that was `complete` before. Where another
        thread has pulled meanwhile, what it has got is enough, unless they have to be `fresh`.

        Raises:
            WorkerError: that took too long; names the servers.
        """
        with self._pulling:
            if not fresh and self.directory.holds(version):
                return self.row
            self.wait_for_version(version, check)
            pulls = self._pulled()
            found = [self.wait_for(pull, "the parameters", check) for pull in pulls]
            values, pieces = self._parts(found)
            if self._is_versioned:
                complete = self._version_of(pieces)
            version = max(version, complete)
            self.pulls += 1
            self.bytes_pulled += sum(one.nbytes for one in values)
            self._row = Row(version, values, pieces)
            self.directory.pulled(version)
            return self._row

    def wait_for_version(self, version: int, check: Callable[[], None]) -> None:
        """Wait until the servers have a version, where those are counted, or a later one.

        What all processes have pushed at a clock is one sum, so it is there when this process's part is; and
        that may still lack what another thread has, which has not heard yet that the clock is complete.

        Raises:
            WorkerError: that took too long.
        """
        if not self._is_versioned:
            return
        what = f"version {version} of the parameters"
        with self._lock:
            self._wait_until(
                lambda: self.directory.has_pushed(version), f"{what}, for which a thread is behind", check
            )
            awaited = self._pushes.get(time_of(version - 1))
        if awaited is not None:
            self.wait_for(awaited, what, check)

    @property
    def traffic(self) -> dict[str, float]:
        """See `Session.traffic`."""
        return {
            "pulls_count": self.pulls,
            "pulled_bytes": self.bytes_pulled,
            "traffic_bytes": self._ps.traffic_bytes,
        }

    def fetch(self) -> Future:
        """Return a future of a row, of whatever version."""
        pulls = self._pulled()

        def row() -> Row:
            return Row(0, *self._parts([pull.result(0.0) for pull in pulls]))

        return self._ps.when_done(pulls, row)

    def _pulled(self, *, states: bool = False) -> list[Future]:
        """Return a pull of each group's parameters, with the times of its pieces.

        Raises:
            WorkerError: this process is out.
        """
        try:
            return [namespace.pull(states=states, times=True) for namespace in self._namespaces]
        except OffbeatError as error:
            raise self._out("pulls the parameters", error) from error

    def _out(self, what: str, error: OffbeatError) -> WorkerError:
        """Return the error of a worker whose process is out, or whose request has failed."""
        return WorkerError(f"worker {self._ps.number}, or its process, {what}: {error}")

    def _parts(self, found: Sequence[tuple[_T, Sequence[Piece]]]) -> tuple[list[_T], list[list[Piece]]]:
        """What was pulled of each group, and the pieces of all its keys."""
        keys = [namespace.keys for namespace in self._namespaces]
        return (
            [values for values, _ in found],
            [_whole(pieces, count) for (_, pieces), count in zip(found, keys, strict=True)],
        )

    def states(self, check: Callable[[], None]) -> tuple[int, list[dict[str, Array]]]:
        """Return all that the servers keep of each group: "values", and the optimizer's state by name.

        Returns:
            The clock before which all gradients are in it, and the states. Where gradients are not summed by
            clocks, it is one that nobody reaches.

        Raises:
            WorkerError: that took too long.
        """
        pulls = self._pulled(states=True)
        found = [self.wait_for(pull, "the parameters and their state", check) for pull in pulls]
        states, pieces = self._parts(found)
        return self._version_of(pieces) if self._is_versioned else _NEVER, states

    @staticmethod
    def _version_of(pieces: Sequence[Sequence[Piece]]) -> int:
        return clock_of(min(piece.time for some in pieces for piece in some)) + 1

    def wait_until_alone(self, check: Callable[[], None]) -> None:
        """Wait until everybody has left, and all that they have pushed is applied.

        Raises:
            WorkerError: that took too long; names who has not.
        """
        if not self._is_versioned:
            return
        limit_s = time.monotonic() + self._deadline_s
        for namespace in self._namespaces:
            while namespace.participants:
                check()
                try:
                    namespace.wait_until_left(_LOOK_S)
                except OffbeatError as error:
                    if time.monotonic() > limit_s:
                        raise WorkerError(f"waited {self._deadline_s:g} s: {error}") from error

    def _wait_until(self, condition: Callable[[], bool], what: str, check: Callable[[], None]) -> None:
        """Wait, with the lock, for what other threads of this process do.

        Raises:
            WorkerError: that took too long.
        """
        limit_s = time.monotonic() + self._deadline_s
        while not condition():
            check()
            if time.monotonic() > limit_s:
                raise WorkerError(f"waited {self._deadline_s:g} s for {what}")
            self._lock.wait(_LOOK_S)

    def wait_for(self, future: Future, what: str, check: Callable[[], None]) -> Any:
        """Wait for a request, for as long as the job goes on; return what it came to.

        Raises:
            WorkerError: it failed or took too long; names the servers.
        """
        try:
            return future.result_while(check, self._deadline_s)
        except WorkerError:
            raise
        except OffbeatError as error:
            check()
            raise self._out(f"waited for {what}", error) from error


def _whole(pieces: Sequence[Piece], keys: int) -> list[Piece]:
    """Pieces of all keys: time 0 where none are told."""
    whole, at = [], 0
    for piece in pieces:
        if at < piece.first:
            whole.append(Piece(at, piece.first, 0))
        whole.append(piece)
        at = piece.last
    return [*whole, Piece(at, keys, 0)] if at < keys else whole
