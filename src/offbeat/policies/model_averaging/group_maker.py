"""What the policy of workers that average their models requires of what forms the groups.

Components of policies. They know workers and times only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from offbeat.policies.model_averaging.weights import equal_weights

CanMeet = Callable[[tuple[int, ...], int], bool]
"""(members, worker) -> whether the worker can exchange with all of the members."""


class GroupMaker(Protocol):
    """Forms groups of workers that are ready."""

    @property
    def ready(self) -> set[int]:
        """The workers that are ready and in no group."""

    @property
    def waiting_since_s(self) -> float | None:
        """When the first of them was ready; None if there is none."""

    def on_joined(self, worker: int, host: str) -> None:
        """Note where a worker runs; `host` is empty if that is not known."""

    def on_step(self, worker: int, step_s: float) -> None:
        """Note that a worker has ended a step, and how long it trained for it, in seconds."""

    def add(self, worker: int, now_s: float) -> None:
        """Add a worker that is ready."""

    def discard(self, worker: int) -> None:
        """Forget a worker, which has finished or is gone."""

    def pop_group(self, expected: set[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """Remove the next group of workers that are ready and return it, ascending; None if there is none.

        Args:
            expected: the workers that are ready or will be.
            can_meet: whether a worker can exchange with others.
        """

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """Remove a group with the first worker that is ready, though no group is due, and return it.

        Called where all expected workers are ready: none of them may wait for another one.
        """

    def begin_group(self, group: tuple[int, ...], joining: tuple[int, ...]) -> tuple[float, ...]:
        """Note that a group averages its models; return the weights of its models, whose sum is 1.

        Args:
            group: the members that have a model.
            joining: the members that receive one from the group.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of an object with the same arguments."""


class ReadyWorkers:
    """The workers that are ready, in the order in which they were: a part of every `GroupMaker`."""

    def __init__(self) -> None:
        self._ready_s: dict[int, float] = {}

    @property
    def ready(self) -> set[int]:
        """See `GroupMaker.ready`."""
        return set(self._ready_s)

    @property
    def waiting_since_s(self) -> float | None:
        """See `GroupMaker.waiting_since_s`."""
        return next(iter(self._ready_s.values()), None)

    def on_joined(self, worker: int, host: str) -> None:
        """See `GroupMaker.on_joined`; where a worker runs does not matter."""

    def on_step(self, worker: int, step_s: float) -> None:
        """See `GroupMaker.on_step`; the paces of workers do not matter."""

    def add(self, worker: int, now_s: float) -> None:
        """See `GroupMaker.add`."""
        self._ready_s[worker] = now_s

    def discard(self, worker: int) -> None:
        """See `GroupMaker.discard`."""
        self._ready_s.pop(worker, None)

    def begin_group(self, group: tuple[int, ...], joining: tuple[int, ...]) -> tuple[float, ...]:
        """See `GroupMaker.begin_group`: equal weights."""
        return equal_weights(len(group))

    def _take(self, workers: Iterable[int]) -> tuple[int, ...]:
        """Remove workers, and return them, ascending."""
        group = tuple(sorted(workers))
        for worker in group:
            del self._ready_s[worker]
        return group
