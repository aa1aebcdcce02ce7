"""Pure decisions: which workers wait for which, which average together, which are slow.

A policy has one method, `handle(event) -> list[Action]`, and `state_dict` / `load_state_dict` of plain data;
its constructor arguments are its whole configuration. A policy reads no clock, draws from no global
generator, does not log, and imports nothing but the standard library and `offbeat.events`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from offbeat.errors import ProtocolError
from offbeat.events import AbortJob, Action, Event, Joined, RejectPeer


class Policy(Protocol):
    """Interface of a policy, as driven by the coordinator, the simulator and a replay."""

    def handle(self, event: Event) -> list[Action]:
        """Returns the actions for one event; raises ProtocolError for an impossible one."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, from which a policy with the same arguments can continue, as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict`."""


def dispatch_event(policies: Sequence[Policy], event: Event) -> list[Action]:
    """Passes one event to every policy, in order, and returns all actions.

    A policy that raises ProtocolError ends this: the last action is then an AbortJob with the error's text.
    A RejectPeer in answer to a Joined ends it too: the policies after that one do not get the event.

    The coordinator, the simulator and a replay all use this function, so that they agree.
    """
    actions: list[Action] = []
    try:
        for policy in policies:
            answers = policy.handle(event)
            actions += answers
            if isinstance(event, Joined) and any(isinstance(answer, RejectPeer) for answer in answers):
                break
    except ProtocolError as error:
        actions.append(AbortJob(worker=getattr(event, "worker", None), step=None, reason=str(error)))
    return actions
