"""What the policy of workers that average their models requires of what forms the groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

CanMeet = Callable[[tuple[int, ...], int], bool]
"""(members, worker) -> whether the worker can exchange with all of the members."""


class GroupMaker(Protocol):
    """Forms groups of workers that are ready. It knows workers and times only."""

    @property
    def ready(self) -> set[int]:
        """The workers that are ready and in no group."""

    @property
    def waiting_since_s(self) -> float | None:
        """When the first of them was ready; None if there is none."""

    def add(self, worker: int, now_s: float) -> None:
        """Add a worker that is ready."""

    def discard(self, worker: int) -> None:
        """Remove a worker, if it is there."""

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

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of an object with the same arguments."""
