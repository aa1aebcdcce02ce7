"""Closes a round without its late members, once enough members are Ready; a component of group policies.

It excludes no one: a member that skips a round stays a member.
"""

from __future__ import annotations

import statistics
from typing import Any

from offbeat.events import Ready, SkipRound
from offbeat.policies.membership.current_group import CurrentGroup
from offbeat.policies.membership.quorum import check_quorum, workers_needed
from offbeat.policies.membership.worker_table import WorkerTable

GRACE_SHARE = 0.25  # of the members' median compute time


class RoundQuorum:
    """Lets late members skip the round that the others are Ready for.

    A member that is not Ready when the quorum is has the grace to become Ready, and else takes part with
    weight 0 (see `SkipRound`). A member that has skipped the round before is still computing, so it gets no
    grace. Its gradients join the first round that it does not skip. No member skips so many rounds that its
    gradients would be too old then: the others wait for it instead. They wait, too, while the group changes
    or a member has finished.

    Source: Douillard et al. 2026, "Decoupled DiLoCo": a quorum, and a grace window after it.
    Deviations: its rounds are of local steps; here each step's gradients are averaged, and late ones join.

    Args:
        workers: the workers.
        group: the group.
        size: members that have to be Ready: a number, which a smaller group meets with all its members, or
            "n-1", "n-2", … for all but one, two, … members, and at least one.
        grace_s: how long the late members have, in seconds; None for a quarter of the median, over the
            members, of their last compute times.
        staleness_steps_max: the largest age of the parameters of gradients that join late, in steps, up to
            and including the step that applies them.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        workers: WorkerTable,
        group: CurrentGroup,
        *,
        size: int | str,
        grace_s: float | None = None,
        staleness_steps_max: int = 8,
    ) -> None:
        check_quorum(size)
        if grace_s is not None and grace_s < 0:
            raise ValueError(f"expected a grace of at least 0 s, got {grace_s}")
        if staleness_steps_max < 2:
            raise ValueError(
                f"expected staleness_steps_max of at least 2 steps, got {staleness_steps_max}: gradients "
                "that join the next round are 2 steps old"
            )
        self._workers, self._group = workers, group
        self._size, self._grace_s, self._staleness_steps_max = size, grace_s, staleness_steps_max
        self._compute_s: dict[int, float] = {}  # of each worker's last round
        self._asked: set[int] = set()  # members that were asked to skip the round under way
        self._asked_in = (-1, -1)  # its generation and number

    def on_ready(self, event: Ready) -> None:
        """Note how long a member has computed."""
        self._compute_s[event.worker] = event.compute_s

    def remove(self, worker: int) -> None:
        """Remove a worker that is gone."""
        self._compute_s.pop(worker, None)

    def late_members(self, round_: int, ready: int) -> list[SkipRound]:
        """Let the late members of a round skip it, if it has its quorum; each is asked once.

        Args:
            round_: the last round for which a member is Ready.
            ready: how many members are.
        """
        members, group = self._group.members, self._group
        if not workers_needed(self._size, len(members)) <= ready < len(members):
            return []
        if group.previous_members or group.joining or group.ended_after:
            return []
        if self._asked_in != (group.generation, round_):
            self._asked_in, self._asked = (group.generation, round_), set()
        statuses = self._workers.statuses
        late = {member: statuses[member] for member in members if member in statuses}
        late = {member: status for member, status in late.items() if status.round < round_}
        if any(
            status.round < 0 or round_ - status.round >= self._staleness_steps_max or status.has_finished
            for status in late.values()
        ):
            return []
        asked = [member for member in late if member not in self._asked]
        self._asked.update(asked)
        return [
            SkipRound(
                worker=member,
                generation=group.generation,
                round=round_,
                grace_s=0.0 if late[member].round < round_ - 1 else self._current_grace_s(),
                reason=f"{ready} of {len(members)} members are ready for round {round_}",
            )
            for member in asked
        ]

    def _current_grace_s(self) -> float:
        if self._grace_s is not None:
            return self._grace_s
        known_s = [self._compute_s[one] for one in self._group.members if one in self._compute_s]
        return GRACE_SHARE * statistics.median(known_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, without that of workers and group."""
        return {
            "compute_s": [list(entry) for entry in sorted(self._compute_s.items())],
            "asked": sorted(self._asked),
            "asked_in": list(self._asked_in),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._compute_s = dict(state["compute_s"])
        self._asked = set(state["asked"])
        generation, round_ = state["asked_in"]
        self._asked_in = generation, round_
