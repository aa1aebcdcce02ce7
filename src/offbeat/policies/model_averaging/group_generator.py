"""Prague's group generator: groups that are decided ahead, and begin in one order.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Final, Literal, TypeAlias

from offbeat.policies.model_averaging.group_maker import CanMeet, ReadyWorkers, choose_meeting

GroupMode: TypeAlias = Literal["static", "random", "smart"]
GROUP_MODES: Final = ("static", "random", "smart")


class GroupGenerator(ReadyWorkers):
    """Groups that are numbered in the order of their decision; see `GroupMaker`.

    A worker that is ready and in no decided group has new groups decided. A group begins when all its members
    are ready and in no decided group of a lower number. So groups with common members begin one after the
    other, in the same order for each of them; the group of the lowest number is the next one of all its
    members, which excludes deadlock.

    A straggler is in a decided group only if it has asked for it, so that no other worker waits for it.

    - `random`: one group is decided, of the worker and others that are drawn.
    - `smart`: all workers that are in no decided group are shuffled and divided into groups (*global
      division*), so that these groups have no common members. With a *slowdown filter*, workers take part
      only if they have been ready at most `lag` - 1 times less often than the worker that asks.
    - `static`: all workers are divided into blocks of the ring of their ids, which is shifted each time.

    Where several hosts have several workers each, `smart` and `static` divide by host, in turn between hosts
    and within: one worker of each host, its head, form a group (*inter*), and the others of each host groups
    of their own; then all workers of each host form groups (*intra*). So only heads send across the network.
    Under `smart` heads are drawn; under `static` they are the first workers of all hosts and, two divisions
    later, the last ones, and the workers of a host form a single group.

    Source: Luo et al. 2020, "Prague: high-performance heterogeneity-aware asynchronous decentralized
    training". Deviations: workers that wait for samples, are lost or cannot reach the others are left out of
    groups that are decided already; the static schedule is not a function that each worker computes by
    itself, and its groups are rebuilt from the paper's idea.

    Args:
        mode: how groups are decided.
        size: workers in a group, about, at least 2.
        lag: see `smart`; None for no filter.
        seed: of the draws.
    """

    def __init__(self, mode: GroupMode, size: int, lag: int | None, seed: int = 0) -> None:
        super().__init__()
        self._mode, self._size, self._lag, self._seed = mode, size, lag, seed
        self._host_of: dict[int, str] = {}
        self._requests: dict[int, int] = {}  # by worker, how often it was ready
        self._decided: dict[int, list[int]] = {}  # members by number, ascending
        self._next_number = 0
        self._decisions = 0
        self._host_divisions = 0  # of `_decisions`, those by host
        # Derived from the decided groups and the calls, and not part of the state:
        self._numbers_of: dict[int, list[int]] = {}  # by worker, its decided groups, ascending
        self._ring: list[int] = []  # the expected workers that are no stragglers, ascending
        self._place_of: dict[int, int] = {}  # in it
        self._free: set[int] = set()  # expected workers in no decided group
        self._asking: set[int] = set()  # workers that may be ready and in no decided group
        self._changed: set[int] = set()  # decided groups that may begin now

    def on_joined(self, worker: int, host: str) -> None:
        """See `GroupMaker.on_joined`."""
        self._host_of[worker] = host

    def add(self, worker: int, now_s: float) -> None:
        """See `GroupMaker.add`; a new worker counts as the one that was ready most often."""
        super().add(worker, now_s)
        if worker not in self._requests:
            self._requests[worker] = max(self._requests.values(), default=1) - 1
        self._requests[worker] += 1
        self._look_at(worker)

    def discard(self, worker: int) -> None:
        """See `GroupMaker.discard`."""
        super().discard(worker)
        self._requests.pop(worker, None)
        self._host_of.pop(worker, None)
        self._leave_groups(worker)

    def pop_group(self, expected: frozenset[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`; a worker for which there is no other one is a group of its own."""
        if self._has_new_arguments(expected, can_meet):
            absent = self._stragglers - self._ready_s.keys()
            for worker in (self._numbers_of.keys() - expected) | (self._numbers_of.keys() & absent):
                self._leave_groups(worker)
            self._ring = sorted(expected - self._stragglers)
            self._place_of = {worker: place for place, worker in enumerate(self._ring)}
            self._free = set(expected - self._numbers_of.keys())
            self._asking = set(self._ready_s)
            self._changed = set(self._decided)
        for worker in self._in_order(self._asking):
            if worker in expected and worker not in self._numbers_of:
                self._decide(worker, expected)
        self._asking.clear()
        for number in sorted(self._changed):
            self._changed.discard(number)
            members = self._decided[number]
            if all(one in self._ready_s and self._numbers_of[one][0] == number for one in members):
                self._end_group(number)
                group = self.take(choose_meeting(self._in_order(members), can_meet))  # others stay ready
                for worker in members:
                    self._look_at(worker)
                return group
        return None

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: alone."""
        worker = next(worker for worker in self._ready_s if can_meet((), worker))
        self._leave_groups(worker)
        return self.take([worker])

    def _look_at(self, worker: int) -> None:
        """Note that a worker may ask for a decision now, or be the last one that its next group waits for."""
        if worker in self._numbers_of:
            self._changed.add(self._numbers_of[worker][0])
        elif worker in self._ready_s:
            self._asking.add(worker)

    def _add_groups(self, groups: Iterable[list[int]]) -> None:
        """Give groups their numbers, in the order of their decision."""
        for members in groups:
            number, self._next_number = self._next_number, self._next_number + 1
            self._decided[number] = sorted(members)
            for worker in members:
                self._numbers_of.setdefault(worker, []).append(number)
            self._free.difference_update(members)
            self._changed.add(number)

    def _end_group(self, number: int) -> None:
        """Remove a group."""
        for worker in self._decided.pop(number):
            self._remove_number(worker, number)
        self._changed.discard(number)

    def _remove_number(self, worker: int, number: int) -> None:
        """Note that a worker is not in a group any more."""
        numbers = self._numbers_of[worker]
        numbers.remove(number)
        if not numbers:
            del self._numbers_of[worker]
            if self._arguments is not None and worker in self._arguments[0]:
                self._free.add(worker)

    def _leave_groups(self, worker: int) -> None:
        for number in self._numbers_of.get(worker, [])[:]:
            members = self._decided[number]
            if len(members) == 1:
                self._end_group(number)
                continue
            members.remove(worker)
            self._remove_number(worker, number)
            self._changed.add(number)

    # Deciding --------------------------------------------------------------------------------------------

    def _decide(self, worker: int, expected: frozenset[int]) -> None:
        chance = random.Random(f"{self._seed} {self._decisions}")
        self._decisions += 1
        place = self._place_of.get(worker)  # None for a straggler
        if self._mode == "static":
            groups = self._scheduled(self._ring if place is not None else sorted([*self._ring, worker]))
        elif self._mode == "random":
            # A sample of the others, without a list of them all:
            others = len(self._ring) - (place is not None)
            drawn = chance.sample(range(others), min(self._size - 1, others))
            groups = [[worker, *(self._ring[one + (place is not None and one >= place)] for one in drawn)]]
        else:
            free = [one for one in sorted(self._free) if self._may_join(one, worker)]
            chance.shuffle(free)
            groups = self._divide(free, expected)
        self._add_groups(groups)

    def _scheduled(self, workers: list[int]) -> list[list[int]]:
        """Return the groups of a division of the static schedule, whose period is 4 with several hosts."""
        if not self._divides_by_host(workers):
            return self._shifted_blocks(workers)
        hosts, phase = self._by_host(workers), self._host_divisions % 4
        self._host_divisions += 1
        if phase % 2:
            return hosts
        return _split_heads(hosts, at=0 if phase == 0 else -1)

    def _divide(self, free: list[int], expected: frozenset[int]) -> list[list[int]]:
        """Return the groups of a global division of shuffled workers."""
        if not self._divides_by_host(expected):
            return _cut(free, self._size)
        groups = self._by_host(free)
        heads: list[int] = []
        if len(groups) > 1:
            if not self._host_divisions % 2:
                heads, *groups = _split_heads(groups, at=0)
            self._host_divisions += 1
        parts = [part for group in groups for part in _cut(group, self._size)]
        return [heads, *parts] if heads else parts

    def _by_host(self, workers: Iterable[int]) -> list[list[int]]:
        """Return the workers of each host, each in the order that was given."""
        hosts: dict[str, list[int]] = {}
        for worker in workers:
            hosts.setdefault(self._host_of.get(worker, ""), []).append(worker)
        return [*hosts.values()]

    def _divides_by_host(self, expected: Iterable[int]) -> bool:
        """Whether several hosts have several of these workers."""
        return sum(len(workers) > 1 for workers in self._by_host(expected)) > 1

    def _may_join(self, worker: int, asking: int) -> bool:
        """Whether a worker takes part in a division that another one, or it, asks for."""
        if worker in self._stragglers:
            return worker == asking
        behind = self._requests[asking] - self._requests.get(worker, self._requests[asking])
        return self._lag is None or behind < self._lag

    def _shifted_blocks(self, ring: list[int]) -> list[list[int]]:
        shift = (self._decisions - 1) * max(1, self._size // 2) % len(ring)
        return _cut(ring[shift:] + ring[:shift], self._size)

    def state_dict(self) -> dict[str, Any]:
        """See `GroupMaker.state_dict`."""
        return {
            "ready_s": [list(entry) for entry in self._ready_s.items()],
            "host_of": [list(entry) for entry in self._host_of.items()],
            "requests": [list(entry) for entry in self._requests.items()],
            "decided": [[number, list(members)] for number, members in self._decided.items()],
            "next_number": self._next_number,
            "decisions": self._decisions,
            "host_divisions": self._host_divisions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GroupMaker.load_state_dict`."""
        self._restore_ready(state["ready_s"])
        self._requests = dict(state["requests"])
        self._decided = {number: list(members) for number, members in state["decided"]}
        self._host_of = dict(state["host_of"])
        self._next_number, self._decisions = state["next_number"], state["decisions"]
        self._host_divisions = state["host_divisions"]
        self._numbers_of = {}
        for number, members in self._decided.items():
            for worker in members:
                self._numbers_of.setdefault(worker, []).append(number)


def _split_heads(hosts: list[list[int]], *, at: int) -> list[list[int]]:
    """Return the group of one worker of each host, by its place there, and the others of each host."""
    heads = [host.pop(at) for host in hosts]
    return [heads, *(host for host in hosts if host)]


def _cut(workers: list[int], size: int) -> list[list[int]]:
    """Cut a list into groups of about `size` workers, whose sizes differ by at most one."""
    count = max(1, round(len(workers) / size))
    return [workers[len(workers) * one // count : len(workers) * (one + 1) // count] for one in range(count)]
