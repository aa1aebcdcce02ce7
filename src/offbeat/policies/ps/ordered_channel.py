"""Messages of one node to another, in order and each once, over a network that loses, repeats and reorders.

Nothing here knows what a message says, sends anything, or looks at a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ProtocolError

_EARLY_MAX = 4096  # packets that are kept for those before them


@dataclass(kw_only=True, slots=True)  # not frozen: it is made for every message
class Packet:
    """One message, and how many of the other side's have come.

    Attributes:
        number: of the message among the sender's to this receiver, from 0; -1 where there is none.
        received: how many messages the sender has taken from the receiver of this packet.
    """

    number: int
    received: int
    message: Any = None


class Channel:
    """One node's end of what it and another say to each other.

    What is sent is kept until the other side says that it has come, and is sent again if that takes longer
    than `resend_s`, then twice as long, up to `resend_max_s`. What comes is handed out in the order in which
    it was sent, once. Where the network is a connection that keeps order, nothing is ever sent twice but what
    a broken connection may have lost.

    Source: sliding windows with cumulative acknowledgement, as in TCP (RFC 9293); for its failures, not in
    place of its flow control.

    Args:
        resend_s: how long an answer usually takes at most, in seconds.
        resend_max_s: the longest wait between two attempts, in seconds.

    Attributes:
        received: how many of the other side's messages were handed out.

    Raises:
        ValueError: times that are not positive or not in this order.
    """

    def __init__(self, *, resend_s: float = 0.2, resend_max_s: float = 2.0) -> None:
        if not 0 < resend_s <= resend_max_s:
            raise ValueError(f"expected 0 < resend_s <= resend_max_s, got {resend_s} and {resend_max_s}")
        self._resend_s, self._resend_max_s = resend_s, resend_max_s
        self._wait_s = resend_s
        self._sent: deque[Any] = deque()  # what is not known to have come
        self._first = 0  # the number of the first of these
        self._due_s: float | None = None  # when these are sent again
        self.received = 0
        self._early: dict[int, Any] = {}

    @property
    def due_s(self) -> float | None:
        """When `tick` has something to do; None while nothing waits for an answer."""
        return self._due_s

    def send(self, messages: Iterable[Any], now_s: float) -> list[Packet]:
        """Return what is to be sent for these messages."""
        number = self._first + len(self._sent)
        fresh = list(messages)
        self._sent += fresh
        if fresh and self._due_s is None:
            self._due_s = now_s + self._wait_s
        return self._packets(number, fresh)

    def hear(self, packet: Packet, now_s: float) -> tuple[list[Any], list[Packet]]:
        """Take a packet; return the messages that are due now, in order, and what is to be sent in answer.

        Raises:
            ProtocolError: it speaks of messages that were never sent.
        """
        self.acknowledge(packet.received, now_s)
        if packet.number < 0:
            return [], []
        return self.take(packet.number, packet.message), [Packet(number=-1, received=self.received)]

    def acknowledge(self, received: int, now_s: float) -> None:
        """The other side has got so many messages from here.

        Raises:
            ProtocolError: so many were never sent.
        """
        said = self._first + len(self._sent)
        if received > said:
            raise ProtocolError(f"expected at most {said} messages to have come, got {received}")
        if received > self._first:
            for _ in range(received - self._first):
                self._sent.popleft()
            self._first = received
            self._wait_s = self._resend_s
            self._due_s = now_s + self._wait_s if self._sent else None

    def take(self, number: int, message: Any) -> list[Any]:
        """Take the other side's message of this number; return the messages that are due now, in order."""
        if number == self.received and not self._early:  # nearly always
            self.received += 1
            return [message]
        if number == self.received or (number > self.received and len(self._early) < _EARLY_MAX):
            self._early[number] = message
        due: list[Any] = []
        while self.received in self._early:
            due.append(self._early.pop(self.received))
            self.received += 1
        return due

    def tick(self, now_s: float) -> list[Packet]:
        """Return what is to be sent again, if it is time."""
        if self._due_s is None or now_s < self._due_s:
            return []
        self._wait_s = min(2 * self._wait_s, self._resend_max_s)
        self._due_s = now_s + self._wait_s
        return self._packets(self._first, self._sent)

    def again(self, now_s: float) -> list[Packet]:
        """Return all that may have been lost with a connection that broke."""
        self._wait_s = self._resend_s
        self._due_s = now_s + self._wait_s if self._sent else None
        return self._packets(self._first, self._sent)

    def _packets(self, first: int, messages: Iterable[Any]) -> list[Packet]:
        return [
            Packet(number=number, received=self.received, message=message)
            for number, message in enumerate(messages, first)
        ]
