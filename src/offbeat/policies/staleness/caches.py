"""The cache directory of a process: which versions its caches hold, in numbers.

Theory of operation
-------------------

A process trains with one or more worker threads, and holds parameters in up to three places: on the servers,
in the process cache, and in a copy per thread. A `CacheDirectory` keeps for each cache only a number, its
*version*: version v holds all that was done at clocks up to v - 1, and -1 means older than any version. The
owner moves the parameters and reports here what it did.

Pushing. A thread adds each gradient with `add_gradient`, which returns the *time* of the push that carries
it. With versions (`is_versioned`), all gradients of one clock travel in one push per process, and the time of
a clock is `push_time(clock)`. A clock is pushed when no thread can add to it any more: `finish_clocks` and
`remove_thread` return the range of clocks for which this has just become true, empty clocks included, because
a version is complete only once every process has pushed. Each clock is returned once, in order. Without
versions every gradient is a push of its own, and times count these.

Reading, for a version v that the permit of the step requires:

1. `read_source` names the nearest place that has v or a later version: thread, process, or server;
2. before a pull from the servers, `has_pushed(v)` returns whether this process has contributed all that v
   needs; otherwise the pull would wait for the process's own threads;
3. `on_pulled` records the version of the process cache, `on_thread_copied` that of a thread's copy.

A thread's own latest updates may be missing from what it reads, because they are not pushed or not yet
applied. They are in its *log*, by the time of the push that carries them (`log_update`), ascending.
`count_included` returns the number of leading entries contained in values that hold this process's pushes up
to a time; the entries after them are replayed on those values. `on_thread_copied` forgets entries that every
later read contains.

Invariants: a thread never adds to a clock that it has passed (`ProtocolError`); clocks are pushed in order,
each once; an update is in the values that a thread reads or in its log. `invalidate` makes a thread's copy
too old for every read and keeps its log, because the log is replayed on the next copy.

The runtime's worker and the simulator's both use this object. Nothing here holds a parameter or a gradient,
decides whether a step may start, or waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from offbeat.errors import ProtocolError

ReadSource: TypeAlias = Literal["thread", "process", "server"]

_TIME_OF_CLOCK_0: Final = 2  # times of a namespace begin at 1, the push of the initial parameters


@dataclass(frozen=True, kw_only=True)
class PsOptions:
    """How a strategy uses the parameter server.

    Attributes:
        is_versioned: the gradients of a clock are applied together; otherwise each is a step on arrival.
        steps_per_process: together, they are one step per process, one after the other; otherwise one step
            with their mean.
        is_bounded: the coordinator bounds the staleness; otherwise parameters are pulled before every step.
        assigns_samples: samples are assigned as they are needed.
        push_every: number of steps whose gradients are pushed as one.
        fetch_every: number of steps after which parameters are fetched in the background; None fetches before
            a step that needs them, which then waits.
        applies_local_steps: a worker applies its own steps to its copy; not needed where, with a bound of 0,
            it reads the servers' result of its step again.
        clears_thread_cache: a thread's copy is read again at every clock, as in Petuum.
        timeout_s: how long other workers may keep this worker waiting, in seconds.
    """

    is_versioned: bool
    is_bounded: bool
    assigns_samples: bool
    steps_per_process: bool = False
    push_every: int = 1
    fetch_every: int | None = None
    applies_local_steps: bool = True
    clears_thread_cache: bool = False
    timeout_s: float = 600.0


def push_time(clock: int) -> int:
    """Return the time of a process's push of a clock, where gradients are summed clock by clock."""
    return clock + _TIME_OF_CLOCK_0


def push_clock(time: int) -> int:
    """Return the clock whose push has this time: the inverse of `push_time`."""
    return time - _TIME_OF_CLOCK_0


@dataclass(slots=True)
class _ThreadCache:
    clock: int = 0  # the first to which it can still add
    version: int = -1  # of its copy; -1 where that is too old for every read
    log: list[int] = field(default_factory=list)  # times of pushes that the copy may lack


class CacheDirectory:
    """The directory of one process: versions of the process cache and of each thread's copy, logs and clocks.

    A read uses the nearest copy: the thread's own, if it has the required version or a later one, then the
    process cache, then the servers. A copy given to a thread lacks the thread's own latest updates; those are
    in its log, by the time of their push, and are replayed on it.

    Where gradients are summed clock by clock, the process pushes each clock once, empty ones included, when
    none of its threads can add to it any more; otherwise every gradient is a push, and times count these.

    Source: W. Dai et al., "High-performance distributed ML at scale through parameter server consistency
    models", AAAI 2015 (Petuum's process and thread caches); the DTSSP paper (Kim and Rhee 2019), figure 5.
    Deviations: a version is that of the whole model, not of single rows; a thread's copy is kept while it is
    fresh enough, and not for one clock (`clears_threads`); a row states up to which of the process's own
    pushes it holds which keys, so that replaying is right whatever happens between a push and a pull.

    Args:
        threads: the workers of the process.
        is_versioned: gradients are summed clock by clock.
        clears_threads: a thread's copy is read again at every read, as in Petuum.

    Attributes:
        is_versioned: as above.
    """

    def __init__(self, threads: Iterable[int], *, is_versioned: bool, clears_threads: bool = False) -> None:
        self.is_versioned, self._clears_threads = is_versioned, clears_threads
        self._threads = {thread: _ThreadCache() for thread in threads}
        self._active = set(self._threads)  # threads that have not left
        self._next = 0  # the first clock that has not been pushed
        self._end = 0  # one past the last clock with a gradient
        self._time = 0  # of the last push, where each gradient is one
        self._version = -1  # of the process cache

    # Pushing ---------------------------------------------------------------------------------------------

    @property
    def next_clock(self) -> int:
        """The first clock that has not been pushed."""
        return self._next

    def start_at(self, clock: int, time: int = 0) -> None:
        """Set where the process begins.

        Args:
            clock: the first to which its threads can add.
            time: of its last push so far, where each gradient is one.
        """
        self._next, self._time = clock, time
        for cache in self._threads.values():
            cache.clock = clock

    def add_gradient(self, thread: int, clock: int) -> int:
        """Record that a thread has a gradient; return the time of the push that carries it.

        Raises:
            ProtocolError: the thread has passed the clock.
        """
        if not self.is_versioned:
            self._time += 1
            return self._time
        if clock < self._threads[thread].clock:
            raise ProtocolError(f"expected thread {thread} to add to clocks it has not passed, got {clock}")
        self._end = max(self._end, clock + 1)
        return push_time(clock)

    def finish_clocks(self, thread: int, clock: int) -> range:
        """Record that a thread adds nothing more to clocks before this one; return the clocks to push now."""
        if thread in self._active:
            cache = self._threads[thread]
            cache.clock = max(cache.clock, clock)
        return self._complete()

    def remove_thread(self, thread: int) -> range:
        """Record that a thread adds nothing more at all; return the clocks to push now."""
        self._active.discard(thread)
        return self._complete()

    @property
    def all_threads_left(self) -> bool:
        """Whether all threads have left."""
        return not self._active

    def has_pushed(self, version: int) -> bool:
        """Whether this process has pushed all that this version needs of it."""
        return not self.is_versioned or self._next >= version

    def _complete(self) -> range:
        if not self.is_versioned:
            return range(0)
        end = min((self._threads[thread].clock for thread in self._active), default=self._end)
        clocks = range(self._next, max(self._next, end))
        self._next = clocks.stop
        return clocks

    # Reading ---------------------------------------------------------------------------------------------

    def read_source(self, thread: int, version: int) -> ReadSource:
        """Return the nearest place from which a thread can read this version or a later one."""
        if self._threads[thread].version >= version and not self._clears_threads:
            return "thread"
        return "process" if self.process_cache_has(version) else "server"

    def process_cache_has(self, version: int) -> bool:
        """Whether the process cache has this version or a later one."""
        return self._version >= version

    def on_pulled(self, version: int) -> None:
        """Record the version that the process cache has now."""
        self._version = version

    def version(self, thread: int) -> int:
        """Return the version of a thread's copy; -1 where it is too old for every read."""
        return self._threads[thread].version

    def log_update(self, thread: int, time: int) -> None:
        """Append a thread's own update to its log.

        Args:
            thread: the thread.
            time: of the push that carries the update, not before that of the previous entry.
        """
        self._threads[thread].log.append(time)

    def count_included(self, thread: int, time: int) -> int:
        """Return how many of the log's first updates are in values that hold this process's pushes to `time`.

        The other updates must be replayed on them.
        """
        return bisect_right(self._threads[thread].log, time)

    def on_thread_copied(self, thread: int, version: int, time: int) -> int:
        """Record a thread's new copy; return how many of the log's first updates to forget.

        The forgotten updates are contained in everything that the thread can read from now on.

        Args:
            thread: the thread.
            version: of the copy.
            time: the whole copy holds this process's pushes up to this time.
        """
        cache = self._threads[thread]
        cache.version = version
        count = self.count_included(thread, time)
        del cache.log[:count]
        return count

    def invalidate(self, thread: int) -> None:
        """Mark a thread's copy as too old for every read; its log stays, because it is replayed."""
        self._threads[thread].version = -1
