"""Table of the workers of a job with groups: what is known of each; a component of group policies.

It decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_NAMED_MAX = 8  # workers named in a reason


@dataclass(kw_only=True, slots=True)
class WorkerStatus:
    """State of a worker that has joined and is not gone.

    Attributes:
        can_join: it is outside the group, works, and can receive a state.
        is_hung: it has not answered a Halt in time.
        is_late: the group has waited for it for too long, and it has not been Ready since.
        has_finished: its training loop has ended.
        is_new: it joined while the job ran and has had no state yet; the end of the job does not wait for it.
        is_silent_since_exclusion: it was excluded as unreachable, and has sent nothing since.
        round: of its last Ready as a member.
        epoch: of its last Ready.
        iteration: Readys in that epoch while it was outside the group.
    """

    can_join: bool = False
    is_hung: bool = False
    is_late: bool = False
    has_finished: bool = False
    is_new: bool = False
    is_silent_since_exclusion: bool = False
    round: int = -1
    epoch: int = -1
    iteration: int = 0


class WorkerTable:
    """The living workers: whether each keeps up, and why that last changed.

    Attributes:
        statuses: of all workers that have joined and are not gone.
        unreachable: workers excluded because they cannot reach the members.
    """

    def __init__(self) -> None:
        self.statuses: dict[int, WorkerStatus] = {}
        self.unreachable: set[int] = set()
        self._gone: set[int] = set()
        self._reasons: dict[int, str] = {}  # worker: reason of its last change of membership
        self._working_worker = -1  # cached id of a worker that has not finished; -1: none

    def is_gone(self, worker: int) -> bool:
        """Whether a worker was here and is not any more."""
        return worker in self._gone

    def remove(self, worker: int) -> None:
        """Remove a worker that is gone."""
        del self.statuses[worker]
        self._gone.add(worker)

    def keeps_up(self, worker: int) -> bool:
        """Whether a worker is here, responds in time, and can reach the members."""
        status = self.statuses.get(worker)
        return (
            status is not None and not (status.is_hung or status.is_late) and worker not in self.unreachable
        )

    def is_working(self, worker: int) -> bool:
        """Whether a worker responds in time and will do further steps."""
        status = self.statuses.get(worker)
        return status is not None and not (
            status.is_hung or status.is_late or status.has_finished or status.is_new
        )

    def all_have_finished(self) -> bool:
        """Whether no worker does further steps."""
        if self.is_working(self._working_worker):
            return False
        working = [worker for worker in self.statuses if self.is_working(worker)]
        self._working_worker = working[len(working) // 2] if working else -1  # hardly the next to finish
        return not working

    def are_most_of(self, some: Collection[int], members: Iterable[int]) -> bool:
        """Whether these are more than half of the members that are here.

        When so many are silent at once, the coordinator itself may be isolated.
        """
        return 2 * len(some) > sum(member in self.statuses for member in members)

    def set_unreachable(self, workers: set[int], reasons: Mapping[int, str]) -> bool:
        """Set the unreachable workers; return whether they have changed."""
        if workers == self.unreachable:
            return False
        for worker in workers - self.unreachable:
            self._reasons[worker] = reasons[worker]
        for worker in self.unreachable - workers:
            self._reasons[worker] = f"worker {worker} can reach all members again"
        self.unreachable = workers
        return True

    def note(self, worker: int, reason: str) -> None:
        """Note why the membership of a worker changes."""
        self._reasons[worker] = reason

    def reason(self, workers: Iterable[int], *, names_all: bool = False) -> str:
        """Return why these workers changed; with `names_all`, also the names of those without a reason."""
        named = sorted(workers)[:_NAMED_MAX]
        if not names_all:
            named = [worker for worker in named if worker in self._reasons]
        return "; ".join(self._reasons.get(worker, f"worker {worker}") for worker in named)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "statuses": [[worker, asdict(status)] for worker, status in self.statuses.items()],
            "unreachable": sorted(self.unreachable),
            "gone": sorted(self._gone),
            "reasons": [list(entry) for entry in self._reasons.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.statuses = {worker: WorkerStatus(**status) for worker, status in state["statuses"]}
        self.unreachable, self._gone = set(state["unreachable"]), set(state["gone"])
        self._reasons = dict(state["reasons"])
