"""Workers at the end of an epoch, which wait for the mean of all models.

A component of policies. It knows workers, epochs and times only.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any


class EpochMeans:
    """The workers that have used up an epoch and wait, and which others they wait for.

    Attributes:
        waiting: by worker, the epoch that it has used up.
        waiting_since_s: when the first of them began to wait; None if none waits.
        absent: workers that have left an epoch early, and made no step since.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        self.waiting_since_s: float | None = None
        self.absent: set[int] = set()
        self._left: dict[int, int] = {}  # by worker, the last epoch that it has left

    def end_epoch(self, worker: int, epoch: int, now_s: float, *, is_complete: bool) -> None:
        """Note that a worker has left an epoch; with `is_complete` it has used it up, and waits."""
        self._left[worker] = max(epoch, self._left.get(worker, epoch))
        if is_complete:
            self.wait_again(worker, now_s)
        else:
            self.absent.add(worker)

    def wait_again(self, worker: int, now_s: float) -> None:
        """Note that a worker waits for the mean of the last epoch that it has left."""
        self.waiting[worker] = self._left[worker]
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s

    def observe_step(self, worker: int, epoch: int) -> None:
        """Note that a worker has made a step in an epoch."""
        self.absent.discard(worker)
        self._left[worker] = max(epoch - 1, self._left.get(worker, epoch - 1))

    def due(self, training: Set[int], silent: Set[int]) -> list[int]:
        """Return the workers that wait for the mean of the earliest epoch, ascending; none if others come.

        Args:
            training: the workers that may still end it.
            silent: of all, those that cannot take part now; no worker waits for them.
        """
        waiting = {worker: epoch for worker, epoch in self.waiting.items() if worker not in silent}
        if not waiting:
            return []
        first = min(waiting.values())
        if any(self._left.get(worker, -1) < first for worker in training - silent):
            return []
        return sorted(worker for worker, epoch in waiting.items() if epoch == first)

    def release(self, worker: int) -> None:
        """Note that a worker waits no longer: the mean is under way, or the worker is gone."""
        if self.waiting.pop(worker, None) is not None and not self.waiting:
            self.waiting_since_s = None

    def forget(self, worker: int) -> None:
        """Remove a worker that has finished or is gone."""
        self.release(worker)
        self.absent.discard(worker)
        self._left.pop(worker, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "waiting": [list(entry) for entry in self.waiting.items()],
            "waiting_since_s": self.waiting_since_s,
            "absent": sorted(self.absent),
            "left": [list(entry) for entry in self._left.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.waiting, self.waiting_since_s = dict(state["waiting"]), state["waiting_since_s"]
        self.absent, self._left = set(state["absent"]), dict(state["left"])
