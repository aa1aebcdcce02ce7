"""The actions sent to one peer that it has not acknowledged, as the messages in which they were sent.

Peers that receive the same actions share the bytes of the message, in memory and in a snapshot: the list of
all workers, which every worker receives, would otherwise take space with the square of their number.

This module never sends a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from offbeat.errors import ProtocolError
from offbeat.wire.codec import ActionMessage


class UnackedActions:
    """Counts the actions sent to a peer, and keeps the messages that it has not acknowledged, to send again.

    A peer processes a message as a whole, so it acknowledges whole messages.

    Attributes:
        sent: number of actions sent.
    """

    def __init__(self, sent: int = 0, messages: Iterable[ActionMessage] = ()) -> None:
        self.sent = sent
        self._messages = deque(messages)
        self._acked = sent - sum(message.actions for message in self._messages)

    def __iter__(self) -> Iterator[ActionMessage]:
        return iter(self._messages)

    def add(self, messages: Sequence[ActionMessage]) -> None:
        """Add messages that are sent."""
        for message in messages:
            self.sent += message.actions
            self._messages.append(message)

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
            count = self._messages[0].actions
            if self._acked + count > received:
                raise ProtocolError(
                    f"expected an acknowledgement of {self._acked} or {self._acked + count} actions, which "
                    f"were sent in one message, got {received}"
                )
            self._acked += count
            self._messages.popleft()

    def to_plain(self, payloads: dict[bytes, int]) -> list[int]:
        """Return the state as plain data: how many actions were sent, then two numbers for each message.

        These are its count of actions, and the number of its payload.

        Args:
            payloads: the distinct payloads of all peers so far, numbered from 0; new ones are added.
        """
        numbered = [(count, payloads.setdefault(payload, len(payloads))) for count, payload in self._messages]
        return [self.sent, *chain.from_iterable(numbered)]

    @classmethod
    def from_plain(cls, plain: Sequence[int], payloads: Sequence[bytes]) -> UnackedActions:
        """Return what `to_plain` converted; `payloads` are the distinct ones, in order."""
        messages = zip(plain[1::2], plain[2::2], strict=True)
        return cls(plain[0], [ActionMessage(count, payloads[number]) for count, number in messages])
