"""The workers and nodes that have joined a coordinator, and which of them an action is for.

This module never sends a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from offbeat.events import Action, Recipient, RejectPeer
from offbeat.runtime.control.unacked import UnackedActions


@dataclass
class PeerRecord:
    """A peer that has joined, whether it still takes part or not.

    Attributes:
        sender: id of the worker, or name of the node, that this peer is.
        addresses: where it listens.
        is_present: it has neither left, failed, been lost nor been refused.
        is_refused: its messages are ignored.
        is_silent: the policies have been informed that nothing is received from it.
        recorded: number of events recorded from it.
        actions: those sent to it.
    """

    sender: int | str
    addresses: tuple[str, ...]
    is_present: bool = True
    is_refused: bool = False
    is_silent: bool = False
    recorded: int = 0
    actions: UnackedActions = field(default_factory=UnackedActions)


class PeerTable(dict[str, PeerRecord]):
    """The peers that have joined, by link name; `add` adds one.

    Attributes:
        present: link names of those that take part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.present: set[str] = set()
        # Link names by worker or node: more than one where several have claimed an id.
        self._names: dict[int | str, list[str]] = {}

    def add(self, peer: str, record: PeerRecord) -> None:
        """Add a peer."""
        self[peer] = record
        self._names.setdefault(record.sender, []).append(peer)
        if record.is_present:
            self.present.add(peer)

    def mark_gone(self, peer: str) -> None:
        """Note that a peer does not take part any more."""
        self[peer].is_present = False
        self.present.discard(peer)

    def recipients(self, action: Action) -> list[str]:
        """Return the peers to which an action is sent, in no order.

        A peer that is not present receives nothing but its own rejection.
        """
        named = action.named_recipients
        if named is not None:
            return [peer for one in named for peer in self._names.get(one, ()) if peer in self.present]
        if isinstance(action, RejectPeer):
            return [action.peer] if action.peer in self else []
        return [peer for peer in self.present if action.is_for(Recipient(peer, self[peer].sender))]

    def to_plain(self) -> dict[str, Any]:
        """Return all peers as plain data, and the distinct messages that they have not acknowledged."""
        numbers: dict[bytes, int] = {}
        peers = [
            {**vars(record), "peer": peer, "actions": record.actions.to_plain(numbers)}
            for peer, record in self.items()
        ]
        return {"peers": peers, "messages": [*numbers]}

    def load_plain(self, plain: dict[str, Any]) -> None:
        """Add the peers that `to_plain` converted."""
        for entry in plain["peers"]:
            peer, addresses, actions = entry.pop("peer"), entry.pop("addresses"), entry.pop("actions")
            unacked = UnackedActions.from_plain(actions, plain["messages"])
            self.add(peer, PeerRecord(addresses=tuple(addresses), actions=unacked, **entry))
