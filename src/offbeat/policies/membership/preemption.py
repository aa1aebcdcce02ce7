"""Tells all workers of a job that one of them is about to be taken away (preempted).

Nothing here decides at which step training ends: groups agree on that in their rounds, and on a parameter
server `BoundedStaleness` does.
"""

from __future__ import annotations

from typing import Any

from offbeat.events import Action, Event, Joined, Preempt, Preempted


class Preemption:
    """Tells every worker of the first preemption signal, and each that joins later of the same one."""

    def __init__(self) -> None:
        self._first: dict[str, Any] | None = None  # arguments of the Preempt

    def handle(self, event: Event) -> list[Action]:
        """Answer the first Preempted, and every Joined after it, with a Preempt."""
        match event:
            case Preempted() if self._first is None:
                reason = f"worker {event.worker} was sent {event.signal} after {event.step} steps"
                self._first = {"by": event.worker, "reason": reason}
                return [Preempt(worker=None, **self._first)]
            case Joined() if self._first is not None:
                return [Preempt(worker=event.worker, **self._first)]
            case _:
                return []

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {"first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a policy with the same arguments."""
        self._first = state["first"]
