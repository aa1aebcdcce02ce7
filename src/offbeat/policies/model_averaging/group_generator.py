"""Prague's group generator: groups that are decided ahead, and begin in one order.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

import random
from typing import Any, Final, Literal, TypeAlias

from offbeat.policies.model_averaging.group_maker import CanMeet, ReadyWorkers

GroupMode: TypeAlias = Literal["static", "random", "smart"]
GROUP_MODES: Final = ("static", "random", "smart")


class GroupGenerator(ReadyWorkers):
    """Groups that are numbered in the order of their decision; see `GroupMaker`.

    A worker that is ready and in no decided group has new groups decided. A group begins when all its members
    are ready and in no decided group of a lower number. So groups with common members begin one after the
    other, in the same order for each of them; the group of the lowest number is the next one of all its
    members, which excludes deadlock.

    - `random`: one group is decided, of the worker and others that are drawn.
    - `smart`: all workers that are in no decided group are shuffled and divided into groups (*global
      division*), so that these groups have no common members. With a *slowdown filter*, workers take part
      only if they have been ready at most `lag` - 1 times less often than the worker that asks.
    - `static`: all workers are divided into blocks of the ring of their ids, which is shifted each time.

    Source: Luo et al. 2020, "Prague: high-performance heterogeneity-aware asynchronous decentralized
    training". Deviations: workers that wait for samples, are lost or cannot reach the others are left out of
    groups that are decided already; the static schedule is not a function that each worker computes by
    itself; groups do not depend on which workers share a host.

    Args:
        mode: how groups are decided.
        size: workers in a group, about, at least 2.
        lag: see `smart`; None for no filter.
        seed: of the draws.
    """

    def __init__(self, mode: GroupMode, size: int, lag: int | None, seed: int = 0) -> None:
        super().__init__()
        self._mode, self._size, self._lag, self._seed = mode, size, lag, seed
        self._requests: dict[int, int] = {}  # by worker, how often it was ready
        self._decided: dict[int, list[int]] = {}  # members by number, ascending
        self._next_number = 0
        self._decisions = 0

    def add(self, worker: int, now_s: float) -> None:
        """See `GroupMaker.add`; a new worker counts as one that has never been late."""
        super().add(worker, now_s)
        before = self._requests.get(worker, max(self._requests.values(), default=0))
        self._requests[worker] = before + 1

    def discard(self, worker: int) -> None:
        """See `GroupMaker.discard`."""
        super().discard(worker)
        self._requests.pop(worker, None)
        self._leave_groups(worker)

    def pop_group(self, expected: set[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`; a worker for which there is no other one is a group of its own."""
        for worker in {one for members in self._decided.values() for one in members} - expected:
            self._leave_groups(worker)
        for worker in self._ready_s:
            if worker in expected and self._next_of(worker) is None:
                self._decide(worker, expected)
        for number, members in self._decided.items():
            if all(one in self._ready_s and self._next_of(one) == number for one in members):
                del self._decided[number]
                return self.take(self._meeting(members, can_meet))
        return None

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: alone."""
        worker = next(worker for worker in self._ready_s if can_meet((), worker))
        self._leave_groups(worker)
        return self.take([worker])

    def _next_of(self, worker: int) -> int | None:
        """Return the number of the next group of a worker; None if none is decided."""
        return next((number for number, members in self._decided.items() if worker in members), None)

    def _meeting(self, members: list[int], can_meet: CanMeet) -> list[int]:
        """Return those that can meet the first one to be ready, and each other; the others stay ready."""
        chosen: list[int] = []
        for worker in [one for one in self._ready_s if one in members]:
            if can_meet(tuple(chosen), worker):
                chosen.append(worker)
        return chosen

    def _leave_groups(self, worker: int) -> None:
        for number, members in [*self._decided.items()]:
            if worker in members:
                members.remove(worker)
                if not members:
                    del self._decided[number]

    # Deciding --------------------------------------------------------------------------------------------

    def _decide(self, worker: int, expected: set[int]) -> None:
        chance = random.Random(f"{self._seed} {self._decisions}")
        self._decisions += 1
        if self._mode == "static":
            groups = self._shifted_blocks(sorted(expected))
        elif self._mode == "random":
            others = sorted(expected - {worker})
            groups = [[worker, *chance.sample(others, min(self._size - 1, len(others)))]]
        else:
            free = [one for one in sorted(expected) if self._next_of(one) is None]
            free = [one for one in free if self._keeps_up(one, worker)]
            chance.shuffle(free)
            groups = _cut(free, self._size)
        for members in groups:
            self._decided[self._next_number] = sorted(members)
            self._next_number += 1

    def _keeps_up(self, worker: int, asking: int) -> bool:
        behind = self._requests[asking] - self._requests.get(worker, self._requests[asking])
        return self._lag is None or behind < self._lag

    def _shifted_blocks(self, ring: list[int]) -> list[list[int]]:
        shift = (self._decisions - 1) * max(1, self._size // 2) % len(ring)
        return _cut(ring[shift:] + ring[:shift], self._size)

    def state_dict(self) -> dict[str, Any]:
        """See `GroupMaker.state_dict`."""
        return {
            "ready_s": [list(entry) for entry in self._ready_s.items()],
            "requests": [list(entry) for entry in self._requests.items()],
            "decided": [[number, list(members)] for number, members in self._decided.items()],
            "next_number": self._next_number,
            "decisions": self._decisions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GroupMaker.load_state_dict`."""
        self._ready_s, self._requests = dict(state["ready_s"]), dict(state["requests"])
        self._decided = {number: list(members) for number, members in state["decided"]}
        self._next_number, self._decisions = state["next_number"], state["decisions"]


def _cut(workers: list[int], size: int) -> list[list[int]]:
    """Cut a list into groups of about `size` workers, whose sizes differ by at most one."""
    count = max(1, round(len(workers) / size))
    return [workers[len(workers) * one // count : len(workers) * (one + 1) // count] for one in range(count)]
