"""Finds members whose line is slow, from how long their neighbours' and their own data were on the way.

A component of group policies, like the classifier of compute times: they pass it the line times that
members measure, and act on its verdicts. It excludes no one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.events import Ready
from offbeat.policies.stragglers.classifier import ClassChange

_MEMBERS_MIN: Final = 3  # of two members it is not known whose line is slow
_ROUNDS_KEPT: Final = 8  # over a slow line the Readys of a round may come long after the others'
RETRY_FIRST_S: Final = 60.0
_RETRY_MAX_S: Final = 600.0


@dataclass(slots=True)
class _Line:
    """What is known of one worker's line.

    Attributes:
        count: slow rounds more than others, from 0 to the limit.
        is_slow: the worker is classed.
        retry_s: how long it stays classed, the next time.
        until_s: until when it stays classed.
    """

    count: int = 0
    is_slow: bool = False
    retry_s: float = RETRY_FIRST_S
    until_s: float = 0.0


@dataclass(slots=True)
class _Round:
    """What the members have reported with their Readys for one round.

    Attributes:
        compute_s: of each member.
        times_s: of each connection, a pair of members: the longest time, in seconds.
    """

    compute_s: dict[int, float] = field(default_factory=dict)
    times_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, event: Ready) -> None:
        self.compute_s[event.worker] = event.compute_s
        for peer, time_s in event.line_s:
            pair = (min(event.worker, peer), max(event.worker, peer))
            self.times_s[pair] = max(time_s, self.times_s.get(pair, 0.0))


class LineMonitor:
    """Classes members as stragglers by their lines, once a round of the group.

    A *connection* joins two neighbours of a round's collective, which measure how long the last bytes of each
    message were on the way until the sender knew that the other had them (`Ready.line_s`). Where connections
    are equally fast, these times are; bytes that come in slowly from elsewhere and go on at once do not
    count. Data and their receipts share a line, so one that is slow in one direction is slow for both
    neighbours, unless its queue lets receipts pass. A round is
    *slow* on a connection if computing and that time took more than `k` times as long as computing and the
    time of the fastest connection. The line of a member is slow if all of its connections are, and one of
    these leads to a member that has another connection which is not: so the cause is not there. Where two
    members could be the cause, neither is classed, and a slow connection between two groups of hosts is no
    member's.

    A slow round raises the member's counter by 1, any other lowers it by 1. At `limit` the member is a
    straggler. Outside the group nothing is measured, so it is normal again after `RETRY_FIRST_S`, and, each
    time that it is found again, after twice as long as before, 600 s at most. The first slow round then
    classes it again.

    Source: an addition to dynamic worker classification, which judges compute times only.

    Args:
        k: a round is slow above this multiple, above 1.
        limit: slow rounds from counter 0 until a member is classed, at least 1.
    """

    def __init__(self, *, k: float, limit: int) -> None:
        self._k, self._limit = k, limit
        self._lines: dict[int, _Line] = {}
        self._members: frozenset[int] = frozenset()
        self._rounds: dict[int, _Round] = {}  # the last ones of the group, by number

    @property
    def stragglers(self) -> frozenset[int]:
        """The members that are classed."""
        return frozenset(worker for worker, line in self._lines.items() if line.is_slow)

    @property
    def longest_s(self) -> float:
        """The longest time on a connection in the last rounds of the group, in seconds."""
        return max((time_s for one in self._rounds.values() for time_s in one.times_s.values()), default=0.0)

    def set_members(self, members: Iterable[int]) -> None:
        """Set the members of a new group, whose neighbours are others, and forget the rounds before."""
        self._members = frozenset(members)
        self._rounds.clear()

    def remove(self, worker: int) -> None:
        """Forget a worker."""
        self._lines.pop(worker, None)

    def observe_member(self, event: Ready) -> list[ClassChange]:
        """Note a member's line times; judge the round with the last member that is Ready for it."""
        if event.worker not in self._members:
            return []
        if event.round not in self._rounds:
            self._rounds = {
                round_: one for round_, one in self._rounds.items() if round_ > event.round - _ROUNDS_KEPT
            }
            self._rounds[event.round] = _Round()
        current = self._rounds[event.round]
        current.add(event)
        if len(current.compute_s) < len(self._members):
            return []
        return self._judge(event, max(current.compute_s.values()), current.times_s)

    def observe(self, event: Ready) -> list[ClassChange]:
        """Process a Ready of a worker outside the group: it may be normal again."""
        line = self._lines.get(event.worker)
        if line is None or not line.is_slow or event.now_s < line.until_s:
            return []
        line.is_slow, line.count = False, self._limit - 1
        reason = f"its line was slow for long enough to be tried again, after {line.retry_s / 2:.3g} s"
        return [_change(event.worker, event, reason, is_straggler=False)]

    def _judge(
        self, event: Ready, compute_s: float, times_s: dict[tuple[int, int], float]
    ) -> list[ClassChange]:
        if len(self._members) < _MEMBERS_MIN or not times_s:
            return []
        fastest_s = min(times_s.values())
        limit_s = self._k * (compute_s + fastest_s) - compute_s
        slow = {pair for pair, time_s in times_s.items() if time_s > limit_s}
        fast_ends = {member for pair in times_s.keys() - slow for member in pair}
        found: list[ClassChange] = []
        for member in sorted(self._members):
            line = self._lines.setdefault(member, _Line())
            blamed_s = [
                times_s[pair]
                for pair in slow
                if member in pair and member not in fast_ends and not fast_ends.isdisjoint(pair)
            ]
            line.count = min(line.count + 1, self._limit) if blamed_s else max(line.count - 1, 0)
            if line.count == self._limit and not line.is_slow:
                line.is_slow, line.until_s = True, event.now_s + line.retry_s
                line.retry_s = min(2 * line.retry_s, _RETRY_MAX_S)
                reason = (
                    f"its line is slow: data were on the way for {max(blamed_s):.3g} s, elsewhere for "
                    f"{fastest_s:.3g} s, where computing takes {compute_s:.3g} s, in {self._limit} more "
                    "rounds than not"
                )
                found.append(_change(member, event, reason, is_straggler=True))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "lines": [
                [worker, line.count, line.is_slow, line.retry_s, line.until_s]
                for worker, line in self._lines.items()
            ],
            "members": sorted(self._members),
            "rounds": [
                [
                    round_,
                    [*map(list, one.compute_s.items())],
                    [[*pair, time_s] for pair, time_s in one.times_s.items()],
                ]
                for round_, one in self._rounds.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a monitor with the same arguments."""
        self._lines = {worker: _Line(*entry) for worker, *entry in state["lines"]}
        self._members = frozenset(state["members"])
        self._rounds = {
            round_: _Round(dict(compute_s), {(first, second): time_s for first, second, time_s in times_s})
            for round_, compute_s, times_s in state["rounds"]
        }


def _change(worker: int, event: Ready, reason: str, *, is_straggler: bool) -> ClassChange:
    return ClassChange(
        worker=worker, is_straggler=is_straggler, epoch=event.epoch, iteration=event.step, reason=reason
    )
