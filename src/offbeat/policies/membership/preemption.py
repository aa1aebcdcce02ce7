"""Broadcasts to all workers of a job that one of them is about to be preempted.

It does not decide at which step training ends: groups agree on that in their rounds, and with a parameter
server `BoundedStaleness` decides it.
"""

from __future__ import annotations

from typing import Any

from offbeat.events import Action, Event, Joined, Preempt, Preempted


class PreemptionBroadcast:
    """Announces the first preemption signal to all workers, and to every worker that joins later."""

    def __init__(self) -> None:
        self._first: dict[str, Any] | None = None  # arguments of the Preempt

    def handle(self, event: Event) -> list[Action]:
        """Return a Preempt for the first Preempted, and for every Joined after it."""
        match event:
            case Preempted() if self._first is None:
                reason = f"worker {event.worker} was sent {event.signal} after {event.step} steps"
                self._first = {"signalled_worker": event.worker, "reason": reason}
                return [Preempt(worker=None, **self._first)]
            case Joined() if self._first is not None:
                return [Preempt(worker=event.worker, **self._first)]
            case _:
                return []

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {"first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        self._first = state["first"]
