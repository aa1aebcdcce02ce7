"""Pure decisions: who waits for whom, who averages with whom, who is slow.

A policy has one method, `handle(event) -> list[Action]`, and `state_dict` / `load_state_dict` of plain data;
its constructor arguments are its whole configuration. Nothing here reads a clock, draws from a global
generator, logs, or imports anything but the standard library and `offbeat.events`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from offbeat.errors import ProtocolError
from offbeat.events import Action, Event, Joined, Refuse, Stop


class Policy(Protocol):
    """What the coordinator, the simulator and a replay drive alike."""

    def handle(self, event: Event) -> list[Action]:
        """Answers one event; raises ProtocolError for one that cannot be."""

    def state_dict(self) -> dict[str, Any]:
        """All that a policy with the same arguments needs to go on from here, as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""


def decide(policies: Sequence[Policy], event: Event) -> list[Action]:
    """Asks every policy about one event, in order; what the protocol does not allow stops the job.

    Whom one policy refuses has not come for those after it. The coordinator, the simulator and a replay all
    ask through this function, so that they agree.
    """
    actions: list[Action] = []
    try:
        for policy in policies:
            answers = policy.handle(event)
            actions += answers
            if isinstance(event, Joined) and any(isinstance(answer, Refuse) for answer in answers):
                break
    except ProtocolError as error:
        actions.append(Stop(worker=getattr(event, "worker", None), step=None, reason=str(error)))
    return actions
