"""Pure decisions: which workers wait for which, which average together, which are slow.

A policy has one method, `handle(event) -> list[Action]`, and `state_dict` / `load_state_dict` of plain data;
its constructor arguments are its whole configuration. It is the coordinator's side of a strategy; the
worker's side is a `WorkerProtocol`. A policy ignores events that it does not need; an action that the
worker's side does not know is an error. Both read no clock, draw from no global generator, do not log, and
import nothing but the standard library and `offbeat.events`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from offbeat.errors import ProtocolError
from offbeat.events import AbortJob, Action, Event, Joined, RejectPeer
from offbeat.policies.data.block_queue import BlockQueue


class Policy(Protocol):
    """Interface of a policy, as driven by the coordinator, the simulator and a replay."""

    def handle(self, event: Event) -> list[Action]:
        """Return the actions for one event; raise ProtocolError for an impossible one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which a policy with the same arguments can continue, as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""


@runtime_checkable
class WatchesRejections(Protocol):
    """A policy that has to know of peers that another policy rejects after they have joined."""

    def on_peer_rejected(self, peer: str) -> list[Action]:
        """Return the actions that follow; the peer may have been rejected before it joined."""


class WorkerProtocol(Protocol):
    """A worker's side of a strategy: what the actions that the worker has received allow it to do.

    The runtime's client of the coordinator and the simulated workers drive it, each with its own strategy's;
    it sends nothing, waits for nothing and reads no clock.

    Attributes:
        block_queue: the blocks of samples that are assigned to the worker.
    """

    block_queue: BlockQueue

    @property
    def round(self) -> int:
        """Number of exchanges that the worker has finished; 0 where there are none."""

    def handle(self, action: Action) -> list[Event]:
        """Apply an action; return the events that answer it, whose time the coordinator sets.

        Raises:
            ProtocolError: the strategy has no such action.
        """


def unexpected_action(protocol: WorkerProtocol, action: Action) -> ProtocolError:
    """Return the error of a worker protocol that receives an action which its strategy does not have."""
    return ProtocolError(f"{type(protocol).__name__} does not handle the action {type(action).__name__}")


def dispatch_event(policies: Sequence[Policy], event: Event) -> list[Action]:
    """Pass one event to every policy, in order, and return all actions.

    A policy that raises ProtocolError ends this: the last action is then an AbortJob with the error's text.
    A RejectPeer in answer to a Joined ends it too: the policies after that one do not get the event. Policies
    that watch rejections learn of every one.

    The coordinator, the simulator and a replay all use this function, so that they agree.
    """
    actions: list[Action] = []
    try:
        for policy in policies:
            answers = policy.handle(event)
            if not answers:
                continue
            actions += answers
            if isinstance(event, Joined) and any(isinstance(answer, RejectPeer) for answer in answers):
                break
        # Not isinstance, which takes several times as long for a class with an abstract base.
        for rejected in [action.peer for action in actions if type(action) is RejectPeer]:
            for policy in policies:
                if isinstance(policy, WatchesRejections):
                    actions += policy.on_peer_rejected(rejected)
    except ProtocolError as error:
        actions.append(AbortJob(worker=getattr(event, "worker", None), step=None, reason=str(error)))
    return actions
