"""What the policy of workers that average their models requires of what forms the groups.

Components of policies. They know workers and times only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any, Protocol

from offbeat.events import OuterStep
from offbeat.policies.model_averaging.weights import equal_weights

CanMeet = Callable[[tuple[int, ...], int], bool]
"""(members, worker) -> whether the worker can exchange with all of the members."""


def choose_meeting(workers: Iterable[int], can_meet: CanMeet) -> tuple[int, ...]:
    """Return those of the workers that can meet the first one, and each other; in their order."""
    chosen: tuple[int, ...] = ()
    for worker in workers:
        if can_meet(chosen, worker):
            chosen = (*chosen, worker)
    return chosen


class GroupMaker(Protocol):
    """Forms groups of workers that are ready."""

    @property
    def ready(self) -> Set[int]:
        """The workers that are ready and in no group: a view that changes with them."""

    @property
    def waiting_since_s(self) -> float | None:
        """When the first of them was ready; None if there is none."""

    def on_joined(self, worker: int, host: str) -> None:
        """Note where a worker runs; `host` is empty if that is not known."""

    def observe_step(self, worker: int, now_s: float, *, samples: int, step_s: float) -> None:
        """Note an optimizer step that a worker has ended.

        Args:
            samples: of its batch; 0 where that is not known.
            step_s: how long it took, data and computing, in seconds.
        """

    def set_stragglers(self, stragglers: frozenset[int]) -> None:
        """Set the workers that no group waits for: they are in groups when they are ready.

        A call with the same object as before is fast.
        """

    def add(self, worker: int, now_s: float) -> None:
        """Add a worker that is ready."""

    def begin_mean_of_all(self, workers: Iterable[int]) -> None:
        """Note that all models are averaged on these workers, buffers included, as after an epoch."""

    def end_averaging(self, worker: int, *, has_mean: bool) -> None:
        """Note the end of an averaging, for a worker."""

    def discard(self, worker: int) -> None:
        """Remove a worker, if it is there."""

    def take(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Remove these workers, which are ready, for a group that is formed elsewhere; ascending."""

    def pop_group(self, expected: frozenset[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """Remove the next group of workers that are ready and return it, ascending; None if there is none.

        A call with the same objects as the one before is fast: it looks only at workers that were added since
        then, however many others there are.

        Args:
            expected: the workers that are ready or will be.
            can_meet: whether a worker can exchange with others; the same object has the same answers.
        """

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """Remove a group with the first worker that is ready, though no group is due, and return it.

        Called where all expected workers are ready: none of them may wait for another one.
        """

    def weights(self, group: tuple[int, ...]) -> tuple[float, ...]:
        """Return the weights of the models of the group removed last: not negative, sum 1."""

    def outer_step(self, group: tuple[int, ...]) -> OuterStep | None:
        """Return the outer optimizer's step that follows the mean of the group removed last, or None.

        Called once for each group, after `weights`.
        """

    def add_newcomer(self, worker: int) -> None:
        """Note that a worker joins with the state of another one, not with that of the start."""

    def continue_after(self, rounds: int) -> None:
        """Note that the outer optimizer has made its steps of so many rounds before this job."""

    def steps(self, worker: int) -> int:
        """Return how many optimizer steps a worker makes until it is ready for its next averaging."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of an object with the same arguments."""


class ReadyWorkers:
    """The workers that are ready, in the order in which they were: a part of every `GroupMaker`.

    Each worker is ready after each of its steps, and all models of a group have the same weight.
    """

    def __init__(self) -> None:
        self._ready_s: dict[int, float] = {}
        self._stragglers: frozenset[int] = frozenset()  # the policy sets them again after a restart
        # Derived from the calls, and not part of the state:
        self._arrivals: dict[int, int] = {}  # by worker that is ready, an ascending number
        self._next_arrival = 0
        self._arguments: tuple[frozenset[int], CanMeet] | None = None  # of the last pop_group

    @property
    def ready(self) -> Set[int]:
        """See `GroupMaker.ready`."""
        return self._ready_s.keys()

    @property
    def waiting_since_s(self) -> float | None:
        """See `GroupMaker.waiting_since_s`."""
        return next(iter(self._ready_s.values()), None)

    def on_joined(self, worker: int, host: str) -> None:
        """See `GroupMaker.on_joined`."""

    def observe_step(self, worker: int, now_s: float, *, samples: int, step_s: float) -> None:
        """See `GroupMaker.observe_step`."""

    def set_stragglers(self, stragglers: frozenset[int]) -> None:
        """See `GroupMaker.set_stragglers`."""
        if stragglers is not self._stragglers:
            self._stragglers = stragglers
            self._arguments = None

    def add(self, worker: int, now_s: float) -> None:
        """See `GroupMaker.add`."""
        self._ready_s[worker] = now_s
        if worker not in self._arrivals:
            self._arrivals[worker] = self._next_arrival
            self._next_arrival += 1

    def begin_mean_of_all(self, workers: Iterable[int]) -> None:
        """See `GroupMaker.begin_mean_of_all`."""

    def end_averaging(self, worker: int, *, has_mean: bool) -> None:
        """See `GroupMaker.end_averaging`."""

    def discard(self, worker: int) -> None:
        """See `GroupMaker.discard`."""
        self._ready_s.pop(worker, None)
        self._arrivals.pop(worker, None)

    def weights(self, group: tuple[int, ...]) -> tuple[float, ...]:
        """See `GroupMaker.weights`."""
        return equal_weights(len(group))

    def outer_step(self, group: tuple[int, ...]) -> OuterStep | None:
        """See `GroupMaker.outer_step`."""
        return None

    def add_newcomer(self, worker: int) -> None:
        """See `GroupMaker.add_newcomer`."""

    def continue_after(self, rounds: int) -> None:
        """See `GroupMaker.continue_after`."""

    def steps(self, worker: int) -> int:
        """See `GroupMaker.steps`."""
        return 1

    def take(self, workers: Iterable[int]) -> tuple[int, ...]:
        """See `GroupMaker.take`."""
        group = tuple(sorted(workers))
        for worker in group:
            del self._ready_s[worker], self._arrivals[worker]
        return group

    def _has_new_arguments(self, expected: frozenset[int], can_meet: CanMeet) -> bool:
        """Whether `pop_group` has other arguments than in its last call, so that it looks at all workers."""
        before, self._arguments = self._arguments, (expected, can_meet)
        return before is None or before[0] is not expected or before[1] is not can_meet

    def _in_order(self, workers: Iterable[int]) -> list[int]:
        """Return those of the workers that are ready, in the order in which they were."""
        ready = [worker for worker in workers if worker in self._ready_s]
        return sorted(ready, key=self._arrivals.__getitem__) if len(ready) > 1 else ready

    def _restore_ready(self, entries: Iterable[tuple[int, float]]) -> None:
        """Restore the workers that are ready, from the entries of `_ready_s`."""
        self._ready_s = dict(entries)
        self._arrivals = {worker: number for number, worker in enumerate(self._ready_s)}
        self._next_arrival = len(self._arrivals)
        self._arguments = None
