"""A model's parameters on the parameter server, as the worker threads of one process share them.

The servers hold the authoritative state. A process keeps the parameters that it pulled last in its *process
cache*, a row; every thread trains a separate model, its *thread cache*. Nothing here decides whether a step
may start, or how old parameters may be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.errors import OffbeatError, WorkerError
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.policies.staleness.caches import CacheDirectory, push_clock, push_time
from offbeat.runtime.processes.waiting import SignalSafeCondition
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.future import Future
from offbeat.runtime.ps.tensors import PsTensors

Array = NDArray[Any]

_T = TypeVar("_T")

_POLL_S: Final = 0.25
_CLOCK_MAX: Final = 2**62  # later than every clock


@dataclass(frozen=True, slots=True)
class GroupGradient:
    """One thread's gradient at one clock for a group of parameters that was stepped.

    Attributes:
        weight: number of whole batches that it stands for.
        values: gradients times weight, flat; zero where there are none. On the host in a `SharedModel`; on
            the device of the model before.
        absent: the ranges (first, last + 1) of the values of each parameter without a gradient. Such a
            parameter is not stepped unless another thread or process has a gradient for it; this weight is
            counted all the same.
        settings: the optimizer's current hyperparameters.
    """

    weight: float
    values: torch.Tensor
    absent: frozenset[tuple[int, int]]
    settings: Mapping[str, Any]

    def add(self, other: GroupGradient) -> GroupGradient:
        """Return the sum of both, in the memory of this one."""
        return GroupGradient(
            self.weight + other.weight,
            self.values.add_(other.values),
            self.absent & other.absent,
            self.settings,
        )

    def present_keys(self) -> Array | None:
        """Return the indices of the values of parameters that have a gradient; None where all have one."""
        if not self.absent:
            return None
        counts = np.ones(len(self.values), bool)
        for first, last in self.absent:
            counts[first:last] = False
        return np.flatnonzero(counts)


@dataclass(frozen=True, slots=True)
class WorkerGradient:
    """One thread's gradient at one clock, by group of parameters; None for a group that was not stepped."""

    groups: Sequence[GroupGradient | None]

    @property
    def values(self) -> list[torch.Tensor]:
        """The values of the groups that were stepped."""
        return [group.values for group in self.groups if group is not None]

    def with_values(self, values: Iterable[torch.Tensor]) -> WorkerGradient:
        """Return the same gradient with its `values` elsewhere."""
        left = iter(values)
        return WorkerGradient([group and replace(group, values=next(left)) for group in self.groups])

    def add(self, other: WorkerGradient) -> WorkerGradient:
        """Return the sum of both, in the memory of either."""
        pairs = zip(self.groups, other.groups, strict=True)
        return WorkerGradient([entry.add(more) if entry and more else entry or more for entry, more in pairs])


@dataclass(frozen=True, slots=True)
class PulledParameters:
    """Parameters as the servers had them.

    Attributes:
        version: all gradients of earlier clocks are in it.
        values: of each group, flat; read-only.
        applied_times: of each group: key ranges, each with the time up to which this process's own pushes are
            in these values; 0 where there are none.
    """

    version: int
    values: Sequence[Array]
    applied_times: Sequence[Sequence[ClockRange]]


class SharedModel:
    """Pushes and pulls the parameters for all threads of a process.

    Pushes carry times. Where gradients are summed clock by clock (`is_versioned`), the time is the clock, so
    that all gradients of a clock are one step of the optimizer; a process pushes once per clock, the sum of
    its threads' gradients, when none of them can add another one; where they had none, the push is empty.
    Otherwise each gradient is a push and a step by itself, and times count a process's pushes.

    Source: the DTSSP paper (Kim and Rhee 2019), figure 5, and Petuum's process and thread caches.
    Deviation: a version is that of the whole model, not of single rows.

    Args:
        ps: this process's client.
        groups: the parameters of each of the optimizer's groups.
        directory: what may be read and pushed; only this object reports pushes and pulls to it.
        timeout_s: how long servers, and other workers' gradients, may take, in seconds.
    """

    def __init__(
        self,
        ps: PS,
        groups: Sequence[PsTensors],
        directory: CacheDirectory,
        *,
        timeout_s: float,
    ) -> None:
        self._ps = ps
        self._namespaces = [group.namespace for group in groups]
        self._is_versioned, self._timeout_s = directory.is_versioned, timeout_s
        self._lock = SignalSafeCondition()
        self._pulling = threading.Lock()
        self.directory = directory
        self._gradients: dict[
            int, dict[int, WorkerGradient]
        ] = {}  # by clock and thread, until they are pushed
        self._pushes: dict[int, Future] = {}  # by time, those not known to be done
        self._has_begun = False
        self._row: PulledParameters | None = None
        self.bytes_pulled = 0
        self.pulls = 0

    # Joining ---------------------------------------------------------------------------------------------

    def begin(
        self,
        initial: Sequence[Mapping[str, Array]] | None,
        check: Callable[[], None],
        *,
        is_newcomer: bool = False,
    ) -> int:
        """Join, with the initial parameters of one worker; one thread of a process calls it.

        The worker with the initial parameters calls it before all others, and no worker pushes a gradient
        before all workers that are not newcomers have called it.

        Args:
            initial: of each group, "values" and the optimizer's state by name, on the worker that provides
                them.
            check: raises if the job has failed.
            is_newcomer: other workers train already.

        Returns:
            The first clock to which this process can add.
        """
        begins = [1 for _ in self._namespaces]
        if self._is_versioned:
            begins = [namespace.join_aggregation(1, self._timeout_s) for namespace in self._namespaces]
        done: list[Future] = []
        time = max(begins) if initial is not None or is_newcomer else push_time(-1)
        for group, (namespace, first) in enumerate(zip(self._namespaces, begins, strict=True)):
            if initial is not None:
                states = dict(initial[group])
                done.append(namespace.put(states.pop("values"), states=states, time=first))
            elif self._is_versioned:  # once this is applied, so are the earlier pushes of all
                done += [self._push_nothing(group, at) for at in range(first, time + 1)]
        self.wait_for(self._ps.when_done(done), "the first parameters", check)
        first_clock = push_clock(time) + 1 if self._is_versioned else 0
        with self._lock:
            self.directory.start_at(first_clock, time)
            self._has_begun = True
            self._lock.notify_all()
        return first_clock

    def wait_until_begun(self, check: Callable[[], None]) -> int:
        """Wait until another thread of this process has begun; return the first clock."""
        with self._lock:
            self._wait_until(lambda: self._has_begun, "another thread of this process to begin", check)
            return self.directory.next_clock

    # Pushing ---------------------------------------------------------------------------------------------

    def add_gradient(self, worker: int, clock: int, gradient: WorkerGradient) -> tuple[int, Future | None]:
        """Add the gradient that a thread has computed at a clock.

        Returns:
            The time of the push that carries it, and the push itself if it is under way already.
        """
        with self._lock:
            time = self.directory.add_gradient(worker, clock)
            if not self._is_versioned:
                return time, self._push(time, gradient)
            gradients = self._gradients.setdefault(clock, {})
            gradients[worker] = gradients[worker].add(gradient) if worker in gradients else gradient
            return time, None

    def finish_clocks(self, worker: int, clock: int) -> None:
        """Record that a thread adds nothing more to clocks before this one; push complete clocks."""
        with self._lock:
            self._push_complete_clocks(self.directory.finish_clocks(worker, clock))

    def leave(self, worker: int, check: Callable[[], None]) -> None:
        """Remove a thread that adds nothing more; the last one waits until all pushes are applied.

        Raises:
            WorkerError: it took too long.
        """
        with self._lock:
            self._push_complete_clocks(self.directory.remove_thread(worker))
            is_last = self.directory.all_threads_left
            under_way = list(self._pushes.values())
        if is_last:
            self.wait_for(self._ps.when_done(under_way), "the last gradients to be applied", check)
            if self._is_versioned:
                for namespace in self._namespaces:
                    namespace.leave_aggregation(self._timeout_s)

    def remove_failed(self, worker: int) -> None:
        """Remove a thread that may have failed, without waiting; no other thread waits for it any more."""
        with self._lock:
            had_left = self.directory.all_threads_left
            self._push_complete_clocks(self.directory.remove_thread(worker))
            is_last = self.directory.all_threads_left and not had_left
            under_way = list(self._pushes.values())
        if is_last and self._is_versioned:
            for namespace in self._namespaces:
                namespace.leave_aggregation_after(under_way)

    def _push_complete_clocks(self, clocks: range) -> None:
        for clock in clocks:
            self._push(push_time(clock), self._sum(self._gradients.pop(clock, {})))
        self._lock.notify_all()

    def _sum(self, gradients: dict[int, WorkerGradient]) -> WorkerGradient | None:
        total: WorkerGradient | None = None
        for _, gradient in sorted(gradients.items()):
            total = gradient if total is None else total.add(gradient)
        return total

    def _push(self, at: int, gradient: WorkerGradient | None) -> Future:
        groups = [None] * len(self._namespaces) if gradient is None else gradient.groups
        try:
            pushed = [
                self._push_nothing(number, at) if entry is None else self._push_group(number, at, entry)
                for number, entry in enumerate(groups)
            ]
        except OffbeatError as error:
            raise self._request_error("pushing gradients", error) from error
        done = self._ps.when_done(pushed)
        self._pushes = {time: entry for time, entry in self._pushes.items() if not entry.is_done}
        self._pushes[at] = done
        return done

    def _push_group(self, number: int, at: int, gradient: GroupGradient) -> Future:
        namespace, keys = self._namespaces[number], gradient.present_keys()
        values: Array = gradient.values.numpy()
        return namespace.push(
            values if keys is None else values[keys],
            keys=keys,
            first=0,
            last=namespace.keys,
            weight=gradient.weight if self._is_versioned else 1.0,
            settings=gradient.settings or None,
            time=at,
            may_wait=False,
        )

    def _push_nothing(self, group: int, at: int) -> Future:
        """Push that this process has no gradient at a time."""
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
    def process_cache(self) -> PulledParameters:
        """The content of the process cache; valid only where the directory says that it can be read."""
        assert self._row is not None
        return self._row

    def pull(
        self, version: int, check: Callable[[], None], *, complete: int = 0, fresh: bool = False
    ) -> PulledParameters:
        """Return parameters of this version or a later one, from the servers.

        Where gradients are not summed by clocks, the result has the version that was `complete` before. Where
        another thread has pulled meanwhile, its result is used, unless `fresh` is set.

        Raises:
            WorkerError: it took too long; the message names the servers.
        """
        with self._pulling:
            if not fresh and self.directory.process_cache_has(version):
                return self.process_cache
            self.wait_for_version(version, check)
            pulls = self._start_pulls()
            pulled = [self.wait_for(pull, "the parameters", check) for pull in pulls]
            values, pieces = self._separate_pieces(pulled)
            if self._is_versioned:
                complete = self._version_of(pieces)
            version = max(version, complete)
            self.pulls += 1
            self.bytes_pulled += sum(entry.nbytes for entry in values)
            self._row = PulledParameters(version, values, pieces)
            self.directory.on_pulled(version)
            return self._row

    def wait_for_version(self, version: int, check: Callable[[], None]) -> None:
        """Wait until the servers have this version or a later one, where versions are counted.

        The pushes of all processes at a clock are one sum, so it is there when this process's part is; and
        that part may still lack the gradient of another thread, which does not know yet that the clock is
        complete.

        Raises:
            WorkerError: it took too long.
        """
        if not self._is_versioned:
            return
        what = f"version {version} of the parameters"
        with self._lock:
            self._wait_until(
                lambda: self.directory.has_pushed(version), f"{what}, for which a thread is behind", check
            )
            awaited = self._pushes.get(push_time(version - 1))
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

    def start_fetch(self) -> Future:
        """Return a future of a row, of any version."""
        pulls = self._start_pulls()

        def row() -> PulledParameters:
            return PulledParameters(0, *self._separate_pieces([pull.result(0.0) for pull in pulls]))

        return self._ps.when_done(pulls, row)

    def _start_pulls(self, *, states: bool = False) -> list[Future]:
        """Start a pull of each group's parameters, with the times of its pieces.

        Raises:
            WorkerError: this process is no longer part of the job.
        """
        try:
            return [namespace.pull(states=states, times=True) for namespace in self._namespaces]
        except OffbeatError as error:
            raise self._request_error("pulling the parameters", error) from error

    def _request_error(self, what: str, error: OffbeatError) -> WorkerError:
        """Return the error of a worker whose process is out, or whose request has failed."""
        return WorkerError(f"worker {self._ps.client_id}, or its process, failed when {what}: {error}")

    def _separate_pieces(
        self, pulled: Sequence[tuple[_T, Sequence[ClockRange]]]
    ) -> tuple[list[_T], list[list[ClockRange]]]:
        """Return the pulled values of each group, and pieces that cover all its keys."""
        keys = [namespace.keys for namespace in self._namespaces]
        return (
            [values for values, _ in pulled],
            [_cover(pieces, count) for (_, pieces), count in zip(pulled, keys, strict=True)],
        )

    def pull_states(self, check: Callable[[], None]) -> tuple[int, list[dict[str, Array]]]:
        """Return all that the servers keep of each group: "values", and the optimizer's state by name.

        Returns:
            The clock before which all gradients are in it, and the states. Where gradients are not summed by
            clocks, it is later than any clock.

        Raises:
            WorkerError: it took too long.
        """
        pulls = self._start_pulls(states=True)
        pulled = [self.wait_for(pull, "the parameters and their state", check) for pull in pulls]
        states, pieces = self._separate_pieces(pulled)
        return self._version_of(pieces) if self._is_versioned else _CLOCK_MAX, states

    @staticmethod
    def _version_of(pieces: Sequence[Sequence[ClockRange]]) -> int:
        return push_clock(min(piece.time for some in pieces for piece in some)) + 1

    def wait_until_alone(self, check: Callable[[], None]) -> None:
        """Wait until all participants have left, and all their pushes are applied.

        Raises:
            WorkerError: it took too long; the message names the participants that have not left.
        """
        if not self._is_versioned:
            return
        end_s = time.monotonic() + self._timeout_s
        for namespace in self._namespaces:
            while namespace.participants:
                check()
                try:
                    namespace.wait_for_all_left(_POLL_S)
                except OffbeatError as error:
                    if time.monotonic() > end_s:
                        raise WorkerError(f"timed out after {self._timeout_s:g} s: {error}") from error

    def _wait_until(self, condition: Callable[[], bool], what: str, check: Callable[[], None]) -> None:
        """Wait, with the lock held, for other threads of this process.

        Raises:
            WorkerError: it took too long.
        """
        end_s = time.monotonic() + self._timeout_s
        while not condition():
            check()
            if time.monotonic() > end_s:
                raise WorkerError(f"timed out after {self._timeout_s:g} s waiting for {what}")
            self._lock.wait(_POLL_S)

    def wait_for(self, future: Future, what: str, check: Callable[[], None]) -> Any:
        """Wait for a request while the job goes on; return its result.

        Raises:
            WorkerError: it failed or took too long; the message names the servers.
        """
        try:
            return future.result_while(check, self._timeout_s)
        except WorkerError:
            raise
        except OffbeatError as error:
            check()
            raise self._request_error(f"waiting for {what}", error) from error


def _cover(pieces: Sequence[ClockRange], keys: int) -> list[ClockRange]:
    """Return pieces that cover all keys, with time 0 for keys without one."""
    covered, at = [], 0
    for piece in pieces:
        if at < piece.start:
            covered.append(ClockRange(at, piece.start, 0))
        covered.append(piece)
        at = piece.stop
    return [*covered, ClockRange(at, keys, 0)] if at < keys else covered
