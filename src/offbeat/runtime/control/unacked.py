"""The actions sent to one peer that it has not acknowledged, as the messages in which they were sent.

Peers that receive the same actions share the bytes of the message, in memory and in a snapshot: the list of
all workers, which every worker receives, would otherwise take space with the square of their number.

This module never sends a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.wire.codec import ActionMessage


class UnackedActions:
    """Counts the actions sent to a peer, and keeps the messages that it has not acknowledged, to send again.

    A peer processes a message as a whole, so it acknowledges whole messages.

    Attributes:
        sent: number of actions sent.
    """

    def __init__(self) -> None:
        self.sent = self._acked = 0
        # Not one queue of pairs: with a thousand peers, the garbage collector would go through 100,000 pairs.
        self._counts: deque[int] = deque()
        self._payloads: deque[bytes] = deque()

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the messages that are not acknowledged."""
        return iter(self._payloads)

    def add(self, messages: Sequence[ActionMessage]) -> None:
        """Add messages that are sent."""
        for count, payload in messages:
            self.sent += count
            self._counts.append(count)
            self._payloads.append(payload)

    def on_acked(self, received: int) -> None:
        """Forget the messages with the first `received` actions.

        Raises:
            ProtocolError: so many were not sent, fewer than before are acknowledged, or a message in part.
        """
        if not self._acked <= received <= self.sent:
            raise ProtocolError(
                f"expected an acknowledgement of between {self._acked} and {self.sent} actions, "
                f"got {received}"
            )
        while self._acked < received:
            count = self._counts[0]
            if self._acked + count > received:
                raise ProtocolError(
                    f"expected an acknowledgement of {self._acked} or {self._acked + count} actions, which "
                    f"were sent in one message, got {received}"
                )
            self._acked += count
            self._counts.popleft()
            self._payloads.popleft()

    def to_plain(self, numbers: dict[bytes, int]) -> dict[str, Any]:
        """Return the state as plain data, with numbers in place of the messages.

        Args:
            numbers: of the distinct messages of all peers so far, from 0; new ones are added.
        """
        messages = [numbers.setdefault(payload, len(numbers)) for payload in self._payloads]
        return {"sent": self.sent, "counts": [*self._counts], "messages": messages}

    @classmethod
    def from_plain(cls, plain: dict[str, Any], messages: Sequence[bytes]) -> UnackedActions:
        """Return what `to_plain` converted; `messages` are the distinct ones, in order."""
        unacked = cls()
        unacked.sent = plain["sent"]
        unacked._counts.extend(plain["counts"])
        unacked._payloads.extend(messages[number] for number in plain["messages"])
        unacked._acked = unacked.sent - sum(unacked._counts)
        return unacked
