"""Progress of the rounds of a group: late members, and whether none responds; a component of group policies.

It excludes no one.
"""

from __future__ import annotations

import math
from typing import Any

from offbeat.events import ExchangeUnderWay, Ready
from offbeat.policies.membership.current_group import CurrentGroup
from offbeat.policies.membership.worker_table import WorkerStatus, WorkerTable

MOST_SILENT_S = 2.0  # silence of most members may be an outage that is not reported yet, up to this time
# Silence after which members are probed, in multiples of the patience: the first and the largest value.
_PROBE_FIRST, _PROBE_MAX = 2, 32
_UNKNOWN = -1  # step


class RoundMonitor:
    """Finds members that others wait for, members in different steps, and silences that call for a probe.

    A round is open from the first Ready of a member until all members are Ready for it. A member is late when
    it is not Ready for the last round while another one has waited for longer than the patience. A joining
    one is late when it is not Ready `join_timeout_s` after its Group. A member that has reported within the
    patience that it is still in an exchange is not late. While all members are Ready and the exchange hangs,
    no event comes at all: then a probe is due, after twice the usual time, and after twice as long again each
    time.

    Args:
        workers: the workers, of which it sets `round`.
        group: the group.
        patience_min_s: the least patience, in seconds.
        join_timeout_s: time that a joining member has to become Ready, in seconds.
        timeout_s: the patience while it is not known how long a slow member takes, in seconds.
    """

    def __init__(
        self,
        workers: WorkerTable,
        group: CurrentGroup,
        *,
        patience_min_s: float,
        join_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self._workers, self._group = workers, group
        self._patience_s, self._join_s, self._timeout_s = patience_min_s, join_timeout_s, timeout_s
        # Rounds for which not all members are Ready: time of the first Ready, count of Readys, step.
        self._open_rounds: dict[int, tuple[float, int, int]] = {}
        self._round = -1  # the last round for which a member was Ready
        self._group_sent_s = 0.0  # when the last Group was sent
        self._last_received_s = 0.0  # when a member was last Ready, or was probed
        self._ready_s = 0.0  # when a member was last Ready
        self._silence_s = 0.0  # longest recent time without a Ready between two rounds
        self._probe_after = _PROBE_FIRST  # multiple of the patience, doubled by each probe
        self._last_finished_s: float | None = None
        self._exchanging_s: dict[int, float] = {}  # when a worker last reported to be in an exchange

    def start(self, now_s: float) -> None:
        """Note that the first Group is sent."""
        self._group_sent_s = self._last_received_s = self._ready_s = now_s

    def on_ready(self, event: Ready, status: WorkerStatus) -> bool:
        """Process a Ready for a later round than the worker's last.

        Returns:
            Whether its step is that of all other members in the same round.
        """
        before, round_ = status.round, event.round
        status.round = round_
        if round_ > self._round:
            if self._round >= 0:  # before the first round, a model may be compiled
                self._silence_s = max(event.now_s - self._ready_s, self._silence_s / 2)
            self._round = round_
        self._ready_s = self._last_received_s = event.now_s
        self._probe_after = _PROBE_FIRST
        return event.worker not in self._group.member_set or self._count_ready(before, event)

    @property
    def last_round(self) -> tuple[int, int] | None:
        """The last round for which a member is Ready, and how many are; None once all members are."""
        entry = self._open_rounds.get(self._round)
        return None if entry is None else (self._round, entry[1])

    def _count_ready(self, before: int, event: Ready) -> bool:
        """Count a member as Ready for all rounds after `before`; close a round with all members Ready."""
        round_, members = event.round, self._group.members
        is_open, is_in_step = False, True
        for other in tuple(self._open_rounds):
            if before < other <= round_:
                since_s, count, step = self._open_rounds[other]
                if other == round_:
                    is_open, is_in_step = True, step in (_UNKNOWN, event.step)
                    step = event.step
                if count + 1 == len(members):
                    del self._open_rounds[other]
                else:
                    self._open_rounds[other] = (since_s if count else event.now_s, count + 1, step)
        if not is_open:
            self._open_round(round_, event.now_s, event.step)
        return is_in_step

    def _open_round(self, round_: int, now_s: float, step: int = _UNKNOWN) -> None:
        statuses, members = self._workers.statuses, self._group.members
        count = sum(statuses[member].round >= round_ for member in members if member in statuses)
        if count < len(members):
            self._open_rounds[round_] = (now_s, count, step)

    def on_exchange_under_way(self, event: ExchangeUnderWay) -> None:
        """Note that a member is still in an exchange, and no probe is needed as long as data flow."""
        if event.worker in self._group.member_set:
            self._exchanging_s[event.worker] = event.now_s
            if event.has_moved:
                self._last_received_s = event.now_s

    def on_group_changed(self, first: int, now_s: float) -> None:
        """Open the rounds of a new group; no member of the one before has finished the round `first`."""
        self._group_sent_s = self._last_received_s = now_s
        self._open_rounds.clear()
        self._exchanging_s.clear()
        rounds = {self._workers.statuses[member].round for member in self._group.members}
        for round_ in sorted({first, *(round_ for round_ in rounds if round_ > first)}):
            self._open_round(round_, now_s)

    def on_finished(self, now_s: float) -> None:
        """Note that a worker has finished."""
        self._last_finished_s = now_s

    def restart_timeouts(self, now_s: float) -> None:
        """Let all timeouts begin now."""
        self._group_sent_s = self._last_received_s = now_s
        self._open_rounds = {
            round_: (now_s, count, step) for round_, (_, count, step) in self._open_rounds.items()
        }
        if self._last_finished_s is not None:
            self._last_finished_s = now_s

    def late_workers(self, now_s: float, slow_s: float | None) -> list[int]:
        """Return the members that are late, else workers that do not finish in time after all members have.

        Args:
            now_s: the time.
            slow_s: how long the group waits for a slow member until it is classed; None if it is unknown.
        """
        return self._overdue(now_s, slow_s) or self._never_finishing(now_s)

    def _overdue(self, now_s: float, slow_s: float | None) -> list[int]:
        statuses, group = self._workers.statuses, self._group
        late = []
        if now_s - self._group_sent_s > self._join_s:
            late += [member for member in sorted(group.joining) if member in statuses]
        if self._open_rounds:
            round_ = max(self._open_rounds)
            since_s, count, _ = self._open_rounds[round_]
            patience_s = self._timeout_s if slow_s is None else max(self._patience_s, slow_s / 2)
            if count and now_s - since_s > patience_s:
                behind = [
                    member
                    for member in group.members
                    if member in statuses
                    and member not in group.joining
                    and not statuses[member].has_finished
                    and statuses[member].round < round_
                    and now_s - self._exchanging_s.get(member, -math.inf) > patience_s
                ]
                if not self._workers.are_most_of(behind, group.members) or now_s - since_s > MOST_SILENT_S:
                    late += behind
        return late

    def _never_finishing(self, now_s: float) -> list[int]:
        if self._last_finished_s is None or now_s - self._last_finished_s <= self._join_s:
            return []
        working = [worker for worker, status in self._workers.statuses.items() if not status.has_finished]
        return [] if set(working) & self._group.member_set else working

    def begin_probe(self, now_s: float, slow_s: float | None) -> float | None:
        """Return the length of a silence for which a probe is to be sent now, in seconds; else None."""
        # A joining member has its own deadline; a probe would interrupt its joining.
        is_calm = bool(self._group.members) and not self._group.joining and self._last_finished_s is None
        usual_s = max(self._patience_s, (slow_s or 0.0) / 2, self._silence_s)
        silent_s = now_s - self._last_received_s
        if not is_calm or silent_s <= self._probe_after * usual_s:
            return None
        self._last_received_s, self._probe_after = now_s, min(2 * self._probe_after, _PROBE_MAX)
        return silent_s

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, without that of workers and group."""
        return {
            "open_rounds": [[round_, *entry] for round_, entry in self._open_rounds.items()],
            "round": self._round,
            "group_sent_s": self._group_sent_s,
            "last_received_s": self._last_received_s,
            "ready_s": self._ready_s,
            "silence_s": self._silence_s,
            "probe_after": self._probe_after,
            "last_finished_s": self._last_finished_s,
            "exchanging_s": [list(entry) for entry in self._exchanging_s.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._open_rounds = {
            round_: (since_s, count, step) for round_, since_s, count, step in state["open_rounds"]
        }
        self._round, self._group_sent_s = state["round"], state["group_sent_s"]
        self._last_received_s, self._ready_s = state["last_received_s"], state["ready_s"]
        self._silence_s, self._probe_after = state["silence_s"], state["probe_after"]
        self._last_finished_s = state["last_finished_s"]
        self._exchanging_s = dict(state["exchanging_s"])
