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
        call: what the workers called.
        awaited: workers whose values are missing.
        values: by worker.
    """

    call: str
    delivers_first: bool
    since_s: float
    awaited: set[int]
    values: dict[int, str] = field(default_factory=dict)


class ValueGathering:
    """Gathers a value of each worker of the job, and delivers them to all that have given one.

    The first value that belongs to no gathering begins one, of all workers that are in the job then. A worker
    that is lost, fails, leaves or has finished is not awaited any more, and its value is dropped. A worker
    that joins later takes part from the next gathering on.

    Args:
        timeout_s: how long a gathering waits for a worker, in seconds.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._present: set[int] = set()
        self._open: list[_Gathering] = []  # in the order in which they began

    def handle(self, event: Event) -> list[Action]:
        """See `Policy.handle`.

        Raises:
            ProtocolError: a value is too long, or its worker has given one already and waits.
        """
        match event:
            case Joined():
                self._present.add(event.worker)
            case ValueGiven():
                return self._place(event)
            case Lost() | Failed() | Left() | Finished():
                return self._remove(event.worker, type(event).__name__)
            case Tick():
                return self._end_overdue(event.now_s)
        return []

    def _place(self, event: ValueGiven) -> list[Action]:
        worker = event.worker
        if len(event.value) > VALUE_CHARACTERS_MAX:
            raise ProtocolError(
                f"expected a value of at most {VALUE_CHARACTERS_MAX} characters, got {len(event.value)} from "
                f"worker {worker}"
            )
        if any(worker in one.values for one in self._open):
            raise ProtocolError(
                f"worker {worker} gave a value to {event.call} before its last call had ended"
            )
        gathering = next((one for one in self._open if worker in one.awaited), None)
        if gathering is None:
            gathering = _Gathering(
                call=event.call,
                delivers_first=event.delivers_first,
                since_s=event.now_s,
                awaited=self._present | {worker},
            )
            self._open.append(gathering)
        gathering.awaited.discard(worker)
        if gathering.call != event.call:
            return self._end_unlike(gathering, event)
        gathering.values[worker] = event.value
        return self._end_if_complete(gathering, f"worker {worker} gave the last value")

    def _end_unlike(self, gathering: _Gathering, event: ValueGiven) -> list[Action]:
        first, *_ = gathering.values
        error = (
            f"worker {event.worker} called {event.call} where worker {first} called {gathering.call}: all "
            "workers have to make the same calls in the same order"
        )
        gathering.values[event.worker] = event.value
        return self._end_with_error(gathering, error)

    def _remove(self, worker: int, how: str) -> list[Action]:
        self._present.discard(worker)
        actions: list[Action] = []
        for gathering in [*self._open]:
            gathering.awaited.discard(worker)
            gathering.values.pop(worker, None)
            if gathering.values:
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
                    f"{self._timeout_s:g} s, and workers {sorted(gathering.values)} did"
                )
                actions += self._end_with_error(gathering, error)
        return actions

    def _end_if_complete(self, gathering: _Gathering, reason: str) -> list[Action]:
        if gathering.awaited:
            return []
        self._open.remove(gathering)
        members = tuple(sorted(gathering.values))
        sources = members[:1] if gathering.delivers_first else members
        return [
            *(
                DeliverValue(members=members, source=source, value=gathering.values[source])
                for source in sources
                if gathering.values[source]
            ),
            EndGathering(members=members, error="", reason=reason),
        ]

    def _end_with_error(self, gathering: _Gathering, error: str) -> list[Action]:
        self._open.remove(gathering)
        return [EndGathering(members=tuple(sorted(gathering.values)), error=error, reason=error)]

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "present": sorted(self._present),
            "open": [
                {
                    "call": one.call,
                    "delivers_first": one.delivers_first,
                    "since_s": one.since_s,
                    "awaited": sorted(one.awaited),
                    "values": [[worker, value] for worker, value in one.values.items()],
                }
                for one in self._open
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        self._present = set(state["present"])
        self._open = [
            _Gathering(
                call=one["call"],
                delivers_first=one["delivers_first"],
                since_s=one["since_s"],
                awaited=set(one["awaited"]),
                values=dict(one["values"]),
            )
            for one in state["open"]
        ]
