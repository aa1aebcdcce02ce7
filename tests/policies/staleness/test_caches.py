"""The directory of a process's caches, against a model that keeps everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.policies.staleness.caches import CacheDirectory, push_clock, push_time

STRETCHES = 3  # of the parameters, each on a server of its own


class Servers:
    """The servers' record of one process: its updates, stretch by stretch, with the time of the last."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, set[int]]] = []  # time, and the updates in it
        self.applied = [0] * STRETCHES  # how many pushes each has applied

    def row(self) -> list[tuple[int, set[int]]]:
        """Of each stretch: the time up to which it holds this process's pushes, and its updates."""
        found = []
        for count in self.applied:
            pushes = self.pushed[:count]
            found.append(
                (pushes[-1][0] if pushes else push_time(-1), set().union(*(one for _, one in pushes)))
            )
        return found


class Threads:
    """A process whose threads step in any order, with sets of updates where there are parameters."""

    def __init__(self, seed: int, threads: int, s: int, *, is_versioned: bool, clears_threads: bool) -> None:
        self.chance, self.s, self.is_versioned = random.Random(seed), s, is_versioned
        self.clears_threads = clears_threads
        self.directory = CacheDirectory(
            range(threads), is_versioned=is_versioned, clears_threads=clears_threads
        )
        self.directory.start_at(0, push_time(-1))
        self.servers = Servers()
        self.clocks = dict.fromkeys(range(threads), 0)
        self.waiting: dict[int, set[int]] = {}  # clock: updates that are not pushed yet
        self.process: list[tuple[int, set[int]]] | None = None
        self.process_version = -1
        self.has: dict[int, list[set[int]]] = {}
        self.has_version = dict.fromkeys(range(threads), -1)
        self.logs: dict[int, list[tuple[int, int]]] = {thread: [] for thread in self.clocks}
        self.own: dict[int, set[int]] = {thread: set() for thread in self.clocks}
        self.updates = 0
        self.pulls: dict[int, list[tuple[int, int]]] = {thread: [] for thread in self.clocks}

    def step(self, thread: int) -> None:
        clock = self.clocks[thread]
        self.read(thread, max(0, clock - self.s))
        update, self.updates = self.updates, self.updates + 1
        time = self.directory.add_gradient(thread, clock)
        self.own[thread].add(update)
        for stretch in self.has[thread]:
            stretch.add(update)
        self.directory.log_update(thread, time)
        self.logs[thread].append((time, update))
        if self.is_versioned:
            self.waiting.setdefault(clock, set()).add(update)
        else:
            self.servers.pushed.append((time, {update}))
        self.clocks[thread] = clock + self.chance.choice([1, 1, 1, 2])  # clocks may be skipped
        for complete in self.directory.finish_clocks(thread, self.clocks[thread]):
            assert self.is_versioned
            assert complete < min(self.clocks.values())
            self.servers.pushed.append((push_time(complete), self.waiting.pop(complete, set())))

    def read(self, thread: int, required: int) -> None:
        source = self.directory.read_source(thread, required)
        if self.has_version[thread] >= required and not self.clears_threads:
            assert source == "thread"
            return
        if self.process_version >= required:
            assert source == "process"
        else:
            assert source == "server"
            self.pull(thread, required)
        assert self.process is not None
        self.has[thread] = []
        for time, updates in self.process:
            replayed = [
                update for _, update in self.logs[thread][self.directory.count_included(thread, time) :]
            ]
            assert not updates & set(replayed)
            self.has[thread].append(updates | set(replayed))
        forgotten = self.directory.on_thread_copied(
            thread, self.process_version, min(time for time, _ in self.process)
        )
        del self.logs[thread][:forgotten]
        self.has_version[thread] = self.process_version

    def pull(self, thread: int, required: int) -> None:
        assert self.directory.has_pushed(required)
        while self.version() < required:
            self.apply()
        for _ in range(self.chance.randrange(3 * STRETCHES)):
            self.apply()
        self.process = self.servers.row()
        self.process_version = self.version() if self.is_versioned else required
        self.directory.on_pulled(self.process_version)
        self.pulls[thread].append((self.clocks[thread], self.process_version))

    def version(self) -> int:
        if not self.is_versioned:
            return 0 if min(self.servers.applied) < len(self.servers.pushed) else 2**31
        return min(push_clock(time) for time, _ in self.servers.row()) + 1

    def apply(self) -> None:
        behind = [
            place for place, count in enumerate(self.servers.applied) if count < len(self.servers.pushed)
        ]
        if behind:
            self.servers.applied[self.chance.choice(behind)] += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            least = min(self.clocks.values())
            may = [thread for thread, clock in self.clocks.items() if clock - least <= self.s]
            self.step(self.chance.choice(may))
            for _ in range(self.chance.randrange(3)):
                self.apply()
            for thread, stretches in self.has.items():  # own updates, each of them
                assert all(self.own[thread] <= one for one in stretches)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 4), st.booleans(), st.booleans())
def test_a_read_is_fresh_enough_and_holds_all_own_updates_once(
    seed, threads, s, is_versioned, clears_threads
):
    """Specification 2.4 (ii) and (iii): versions of at least c - s, and read-my-writes, exactly once."""
    job = Threads(seed, threads, s, is_versioned=is_versioned, clears_threads=clears_threads)
    job.run(60)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 4))
def test_every_clock_is_pushed_once_in_order_when_all_threads_have_passed_it(seed, threads, s):
    job = Threads(seed, threads, s, is_versioned=True, clears_threads=False)
    job.run(40)
    for thread in sorted(job.clocks):
        for clock in job.directory.remove_thread(thread):
            job.servers.pushed.append((push_time(clock), job.waiting.pop(clock, set())))
    times = [time for time, _ in job.servers.pushed]
    assert times == list(range(push_time(0), push_time(len(times))))
    assert not job.waiting
    assert job.directory.all_threads_left
    all_updates = [update for _, updates in job.servers.pushed for update in sorted(updates)]
    assert sorted(all_updates) == list(range(job.updates))


@pytest.mark.parametrize("s", [0, 1, 3, 10])
def test_after_a_read_of_a_version_the_next_pull_is_at_that_plus_s_plus_1(s):
    """Specification 2.4 (viii): current rows last s + 1 clocks; at the gate every clock needs a pull."""
    slow, fast = (CacheDirectory([0], is_versioned=True) for _ in range(2))
    pulls: list[list[int]] = [[], []]
    for clock in range(40):
        for directory, version, at in ((slow, clock, pulls[0]), (fast, clock - s, pulls[1])):
            if directory.read_source(0, max(0, clock - s)) == "server":
                directory.on_pulled(max(0, version))
                directory.on_thread_copied(0, max(0, version), push_time(version - 1))
                at.append(clock)
    assert pulls[0] == list(range(0, 40, s + 1))
    assert pulls[1] == [0, *range(s + 1, 40)]


def test_the_log_is_replayed_as_long_as_a_stretch_lacks_it():
    directory = CacheDirectory([0], is_versioned=True)
    for clock in range(3):
        directory.log_update(0, directory.add_gradient(0, clock))
    assert [directory.count_included(0, push_time(clock)) for clock in (-1, 0, 1, 2, 3)] == [0, 1, 2, 3, 3]
    assert directory.on_thread_copied(0, 1, push_time(0)) == 1
    assert [directory.count_included(0, push_time(clock)) for clock in (0, 1, 2)] == [0, 1, 2]


def test_an_invalidated_thread_copy_is_read_again_and_its_log_is_replayed():
    directory = CacheDirectory([0], is_versioned=True)
    directory.on_pulled(0)
    directory.on_thread_copied(0, 0, push_time(-1))
    directory.log_update(0, directory.add_gradient(0, 0))
    assert (directory.read_source(0, 0), directory.version(0)) == ("thread", 0)
    directory.invalidate(0)
    assert (directory.read_source(0, 0), directory.version(0)) == ("process", -1)
    assert directory.count_included(0, push_time(-1)) == 0


def test_a_version_is_not_available_before_this_process_has_pushed_for_it():
    directory = CacheDirectory([0, 1], is_versioned=True)
    directory.start_at(5)
    assert list(directory.finish_clocks(0, 7)) == []
    assert not directory.has_pushed(6)
    assert list(directory.finish_clocks(1, 6)) == [5]
    assert directory.has_pushed(6)
    assert not directory.has_pushed(7)
    assert CacheDirectory([0], is_versioned=False).has_pushed(7)


def test_a_gradient_of_a_finished_clock_is_refused():
    directory = CacheDirectory([0], is_versioned=True)
    directory.finish_clocks(0, 3)
    with pytest.raises(ProtocolError, match="thread 0 to add to clocks it has not passed, got 2"):
        directory.add_gradient(0, 2)
