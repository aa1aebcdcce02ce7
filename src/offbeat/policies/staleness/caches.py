"""What a process and its worker threads have of the parameters, in numbers.

The runtime's worker and the simulator's both ask this object. Nothing here holds a parameter or a gradient,
knows who may start a step, or waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from offbeat.errors import ProtocolError

Source: TypeAlias = Literal["thread", "process", "server"]

_BEFORE_CLOCK_0: Final = 2  # times of a namespace begin at 1, and that is the first worker's parameters


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a strategy uses the parameter server.

    Attributes:
        is_versioned: the gradients of a clock are applied together; else each is a step, on arrival.
        is_sequential: together, they are a step for each process, one after the other; else one, of the mean.
        is_bounded: the coordinator bounds the staleness; else parameters are pulled before every step.
        is_dealt: samples are dealt as they are needed.
        push_every: steps whose gradients are pushed as one.
        fetch_every: steps after which parameters are fetched, in the background; None for before a step that
            needs them, and then waited for.
        steps_locally: a worker makes a step of its own on what it has; needless where it reads anew, with a
            bound of 0, what the servers have made of its step.
        clears_thread_cache: what a thread has is taken anew at every clock, as in Petuum.
        deadline_s: how long others may keep this worker waiting, in seconds.
    """

    is_versioned: bool
    is_bounded: bool
    is_dealt: bool
    is_sequential: bool = False
    push_every: int = 1
    fetch_every: int | None = None
    steps_locally: bool = True
    clears_thread_cache: bool = False
    deadline_s: float = 600.0


def time_of(clock: int) -> int:
    """Return the time of a process's push of a clock, where gradients are summed clock by clock."""
    return clock + _BEFORE_CLOCK_0


def clock_of(time: int) -> int:
    """Return the clock whose push has this time: the opposite of `time_of`."""
    return time - _BEFORE_CLOCK_0


@dataclass(slots=True)
class _Thread:
    clock: int = 0  # the first to which it can still add
    version: int = -1  # of what it has; -1 where that is too old for everything
    log: list[int] = field(default_factory=list)  # times of pushes that what it was read from may lack


class CacheDirectory:
    """One process's directory: the process cache, each worker thread's cache and log, and clocks.

    A read takes what is nearest: the thread's own copy, if it is of the version that is required or a later
    one, then the process's, then the servers'. What is copied to a thread lacks the thread's own latest
    updates; those are in its log, by the time of the push that they are in, and are replayed on it.

    Where gradients are summed clock by clock, the process pushes each clock once, when none of its threads
    can add to it any more, empty ones too; else every gradient is a push, and times count these.

    Source: W. Dai et al., "High-performance distributed ML at scale through parameter server consistency
    models", AAAI 2015 (Petuum's process and thread caches); the second paper's figure 5; specification 2.4.
    Deviations: a version is that of the whole model, not of single rows; a thread's copy is kept while it is
    fresh enough, and not for one clock (`clears_threads`); a row says up to which of the process's own pushes
    it holds which keys, so that replaying is right whatever happens between a push and a pull.

    Args:
        threads: the workers of the process.
        is_versioned: gradients are summed clock by clock.
        clears_threads: a thread takes anew what it has at every read, as in Petuum.

    Attributes:
        is_versioned: as above.
    """

    def __init__(self, threads: Iterable[int], *, is_versioned: bool, clears_threads: bool = False) -> None:
        self.is_versioned, self._clears_threads = is_versioned, clears_threads
        self._threads = {thread: _Thread() for thread in threads}
        self._active = set(self._threads)  # who has not left
        self._next = 0  # the first clock that was not pushed
        self._end = 0  # after the last clock to which anything was given
        self._time = 0  # of the last push, where each gradient is one
        self._version = -1  # of the process cache

    # Pushing ---------------------------------------------------------------------------------------------

    @property
    def next_clock(self) -> int:
        """The first clock that was not pushed."""
        return self._next

    def begin(self, clock: int, time: int = 0) -> None:
        """Say what the process begins with.

        Args:
            clock: the first to which its threads can add.
            time: of its last push so far, where each gradient is one.
        """
        self._next, self._time = clock, time
        for one in self._threads.values():
            one.clock = clock

    def give(self, thread: int, clock: int) -> int:
        """Take note that a thread has a gradient; return the time of the push that it is or will be in.

        Raises:
            ProtocolError: the clock was pushed already.
        """
        if not self.is_versioned:
            self._time += 1
            return self._time
        if clock < self._threads[thread].clock:
            raise ProtocolError(f"expected thread {thread} to add to clocks it has not passed, got {clock}")
        self._end = max(self._end, clock + 1)
        return time_of(clock)

    def passed(self, thread: int, clock: int) -> range:
        """Take note that a thread adds nothing more to clocks before this; return which to push now."""
        if thread in self._active:
            one = self._threads[thread]
            one.clock = max(one.clock, clock)
        return self._complete()

    def leave(self, thread: int) -> range:
        """Take note that a thread adds nothing more at all; return the clocks that are to be pushed now."""
        self._active.discard(thread)
        return self._complete()

    @property
    def is_empty(self) -> bool:
        """Whether all threads have left."""
        return not self._active

    def has_pushed(self, version: int) -> bool:
        """Whether all that this version needs of this process was pushed."""
        return not self.is_versioned or self._next >= version

    def _complete(self) -> range:
        if not self.is_versioned:
            return range(0)
        end = min((self._threads[thread].clock for thread in self._active), default=self._end)
        clocks = range(self._next, max(self._next, end))
        self._next = clocks.stop
        return clocks

    # Reading ---------------------------------------------------------------------------------------------

    def read(self, thread: int, version: int) -> Source:
        """Say from where a thread takes parameters of this version or a later one."""
        if self._threads[thread].version >= version and not self._clears_threads:
            return "thread"
        return "process" if self.holds(version) else "server"

    def holds(self, version: int) -> bool:
        """Whether what is in the process cache is of this version or a later one."""
        return self._version >= version

    def pulled(self, version: int) -> None:
        """Take note of the version of what is now in the process cache."""
        self._version = version

    def version(self, thread: int) -> int:
        """Return the version of what a thread has; -1 where that is too old for everything."""
        return self._threads[thread].version

    def log(self, thread: int, time: int) -> None:
        """Append a thread's own update to its log.

        Args:
            thread: whose.
            time: of the push that it is in, not before that of the one before.
        """
        self._threads[thread].log.append(time)

    def held(self, thread: int, time: int) -> int:
        """Return how many of the log's first updates are in values that hold this process's pushes to `time`.

        The others are to be replayed on them.
        """
        return bisect_right(self._threads[thread].log, time)

    def installed(self, thread: int, version: int, time: int) -> int:
        """Take note of what a thread has taken; return how many of the log's first updates to forget.

        What is forgotten is in all that the thread can read from now on.

        Args:
            thread: which one.
            version: of what it has taken.
            time: all of that holds this process's pushes up to this time.
        """
        one = self._threads[thread]
        one.version = version
        count = self.held(thread, time)
        del one.log[:count]
        return count

    def drop(self, thread: int) -> None:
        """Take note that what a thread has is of no version any more; its log stays, for it is replayed."""
        self._threads[thread].version = -1
