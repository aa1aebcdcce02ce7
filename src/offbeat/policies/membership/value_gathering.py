"""Which workers' values belong together where programs exchange small values, and when all are there.

Nothing here looks into a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    DeliverValue,
    EndGathering,
    Event,
    Failed,
    Finished,
    Joined,
    Left,
    Lost,
    Tick,
    ValueGiven,
)

VALUE_CHARACTERS_MAX: Final = 2**17


@dataclass(kw_only=True)
class _Gathering:
    """Values that belong together.

    Attributes:
        number: how many gatherings began before this one.
        call: what the workers called.
        awaited: workers whose values are missing.
        given: by worker, the number of its value (see `ValueGiven`) and the value.
    """

    number: int
    call: str
    delivers_first: bool
    since_s: float
    awaited: set[int]
    given: dict[int, tuple[int, str]] = field(default_factory=dict)

    def take(self, event: ValueGiven) -> None:
        self.awaited.discard(event.worker)
        self.given[event.worker] = event.number, event.value

    def drop(self, worker: int) -> None:
        self.awaited.discard(worker)
        self.given.pop(worker, None)


class ValueGathering:
    """Gathers a value of each worker of the job, and delivers them to all that have given one.

    The first value that belongs to no gathering begins one, of all workers that are in the job then. A worker
    that is lost, rejected, fails, leaves or has finished is not awaited any more, and its value is dropped. A
    worker that joins later takes part from the next gathering on. The value of a worker that has given one
    already, because its program did not wait to the end, replaces that one.

    Args:
        timeout_s: how long a gathering waits for a worker, in seconds.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._peers: dict[str, int] = {}  # the workers in the job, by their link names
        self._begun = 0  # number of gatherings
        self._open: list[_Gathering] = []  # in the order in which they began

    def handle(self, event: Event) -> list[Action]:
        """See `Policy.handle`.

        Raises:
            ProtocolError: a value is too long.
        """
        match event:
            case Joined():
                self._peers[event.peer] = event.worker
            case ValueGiven():
                return self._place(event)
            case Lost() | Failed() | Left() | Finished():
                return self._remove(event.worker, type(event).__name__)
            case Tick():
                return self._end_overdue(event.now_s)
        return []

    def on_peer_rejected(self, peer: str) -> list[Action]:
        """See `WatchesRejections.on_peer_rejected`."""
        worker = self._peers.get(peer)
        return [] if worker is None else self._remove(worker, "rejected")

    def _place(self, event: ValueGiven) -> list[Action]:
        worker = event.worker
        if len(event.value) > VALUE_CHARACTERS_MAX:
            raise ProtocolError(
                f"expected a value of at most {VALUE_CHARACTERS_MAX} characters, got {len(event.value)} from "
                f"worker {worker}"
            )
        mine = (one for one in self._open if worker in one.awaited or worker in one.given)
        gathering = next(mine, None)
        if gathering is None:
            gathering = _Gathering(
                number=self._begun,
                call=event.call,
                delivers_first=event.delivers_first,
                since_s=event.now_s,
                awaited={*self._peers.values(), worker},
            )
            self._begun += 1
            self._open.append(gathering)
        others = [one for one in gathering.given if one != worker]
        if gathering.call != event.call and others:
            return self._end_unlike(gathering, event, others[0])
        gathering.call, gathering.delivers_first = event.call, event.delivers_first
        gathering.take(event)
        return self._end_if_complete(gathering, f"worker {worker} gave the last value")

    def _end_unlike(self, gathering: _Gathering, event: ValueGiven, other: int) -> list[Action]:
        error = (
            f"worker {event.worker} called {event.call} where worker {other} called {gathering.call}: all "
            "workers have to make the same calls in the same order"
        )
        gathering.take(event)
        return self._end_with_error(gathering, error)

    def _remove(self, worker: int, how: str) -> list[Action]:
        self._peers = {peer: one for peer, one in self._peers.items() if one != worker}
        actions: list[Action] = []
        for gathering in [*self._open]:
            gathering.drop(worker)
            if gathering.given:
                actions += self._end_if_complete(gathering, f"worker {worker} is not awaited: {how}")
            else:
                self._open.remove(gathering)
        return actions

    def _end_overdue(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for gathering in [*self._open]:
            if now_s - gathering.since_s > self._timeout_s:
                error = (
                    f"workers {sorted(gathering.awaited)} did not call {gathering.call} within "
                    f"{self._timeout_s:g} s, and workers {sorted(gathering.given)} did"
                )
                actions += self._end_with_error(gathering, error)
        return actions

    def _end_if_complete(self, gathering: _Gathering, reason: str) -> list[Action]:
        if gathering.awaited:
            return []
        members = tuple(sorted(gathering.given))
        sources = members[:1] if gathering.delivers_first else members
        values = [
            DeliverValue(members=members, gathering=gathering.number, source=source, value=value)
            for source in sources
            if (value := gathering.given[source][1])
        ]
        return [*values, self._end(gathering, "", reason)]

    def _end_with_error(self, gathering: _Gathering, error: str) -> list[Action]:
        return [self._end(gathering, error, error)]

    def _end(self, gathering: _Gathering, error: str, reason: str) -> EndGathering:
        self._open.remove(gathering)
        members = tuple(sorted(gathering.given))
        return EndGathering(
            members=members,
            numbers=tuple(gathering.given[member][0] for member in members),
            gathering=gathering.number,
            error=error,
            reason=reason,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "peers": dict(self._peers),
            "begun": self._begun,
            "open": [
                {
                    "number": one.number,
                    "call": one.call,
                    "delivers_first": one.delivers_first,
                    "since_s": one.since_s,
                    "awaited": sorted(one.awaited),
                    "given": [[worker, *given] for worker, given in one.given.items()],
                }
                for one in self._open
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        self._peers, self._begun = dict(state["peers"]), state["begun"]
        self._open = [
            _Gathering(
                number=one["number"],
                call=one["call"],
                delivers_first=one["delivers_first"],
                since_s=one["since_s"],
                awaited=set(one["awaited"]),
                given={worker: (number, value) for worker, number, value in one["given"]},
            )
            for one in state["open"]
        ]
