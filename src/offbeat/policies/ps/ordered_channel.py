"""Ordered, exactly-once delivery between two nodes over a network that loses, duplicates and reorders.

Nothing here inspects messages, sends anything, or reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ProtocolError

_EARLY_MAX = 4096  # packets that are kept until those before them arrive


@dataclass(kw_only=True, slots=True)  # not frozen: one is created for every message
class Packet:
    """One message, with a cumulative acknowledgement.

    Attributes:
        number: the message's sequence number from the sender to this receiver, from 0; -1 without a message.
        ack: how many messages the sender of this packet has received from its receiver, in order.
    """

    number: int
    ack: int
    message: Any = None


class ReliableChannel:
    """One node's end of the exchange of messages with another node.

    Sent messages are kept until the peer acknowledges them. They are sent again after `resend_s` without an
    acknowledgement, then after twice as long each time, up to `resend_max_s`. Received messages are delivered
    once, in the order in which they were sent. Over a connection that keeps order, only messages that a
    broken connection may have lost are ever sent twice.

    Source: sliding windows with cumulative acknowledgement, as in TCP (RFC 9293); for its recovery from
    losses, not in place of its flow control.

    Args:
        resend_s: the usual upper bound of the time until an acknowledgement, in seconds.
        resend_max_s: the longest wait between two attempts, in seconds.

    Attributes:
        received_count: how many of the peer's messages were delivered.

    Raises:
        ValueError: times that are not positive or not in this order.
    """

    def __init__(self, *, resend_s: float = 0.2, resend_max_s: float = 2.0) -> None:
        if not 0 < resend_s <= resend_max_s:
            raise ValueError(f"expected 0 < resend_s <= resend_max_s, got {resend_s} and {resend_max_s}")
        self._resend_s, self._resend_max_s = resend_s, resend_max_s
        self._wait_s = resend_s
        self._sent: deque[Any] = deque()  # messages that are not acknowledged
        self._first = 0  # the number of the first of these
        self._due_s: float | None = None  # when they are sent again
        self.received_count = 0
        self._early: dict[int, Any] = {}

    @property
    def due_s(self) -> float | None:
        """When `on_tick` has something to resend; None while everything is acknowledged."""
        return self._due_s

    def send(self, messages: Iterable[Any], now_s: float) -> list[Packet]:
        """Return the packets to send for these messages."""
        number = self._first + len(self._sent)
        new = list(messages)
        self._sent += new
        if new and self._due_s is None:
            self._due_s = now_s + self._wait_s
        return self._packets(number, new)

    def on_packet(self, packet: Packet, now_s: float) -> tuple[list[Any], list[Packet]]:
        """Process a packet; return the messages to deliver now, in order, and the packets to send in reply.

        Raises:
            ProtocolError: it acknowledges messages that were never sent.
        """
        self.acknowledge(packet.ack, now_s)
        if packet.number < 0:
            return [], []
        return self.accept(packet.number, packet.message), [Packet(number=-1, ack=self.received_count)]

    def acknowledge(self, received: int, now_s: float) -> None:
        """Process an acknowledgement: the peer has received so many messages.

        Raises:
            ProtocolError: fewer were sent.
        """
        sent = self._first + len(self._sent)
        if received > sent:
            raise ProtocolError(f"expected an acknowledgement of at most {sent} messages, got {received}")
        if received > self._first:
            for _ in range(received - self._first):
                self._sent.popleft()
            self._first = received
            self._wait_s = self._resend_s
            self._due_s = now_s + self._wait_s if self._sent else None

    def accept(self, number: int, message: Any) -> list[Any]:
        """Accept the peer's message of this number; return the messages to deliver now, in order."""
        if number == self.received_count and not self._early:  # nearly always
            self.received_count += 1
            return [message]
        if number == self.received_count or (number > self.received_count and len(self._early) < _EARLY_MAX):
            self._early[number] = message
        due: list[Any] = []
        while self.received_count in self._early:
            due.append(self._early.pop(self.received_count))
            self.received_count += 1
        return due

    def on_tick(self, now_s: float) -> list[Packet]:
        """Return the packets to send again, if it is time."""
        if self._due_s is None or now_s < self._due_s:
            return []
        self._wait_s = min(2 * self._wait_s, self._resend_max_s)
        self._due_s = now_s + self._wait_s
        return self._packets(self._first, self._sent)

    def on_reconnected(self, now_s: float) -> list[Packet]:
        """Return all packets that may have been lost with a connection that broke."""
        self._wait_s = self._resend_s
        self._due_s = now_s + self._wait_s if self._sent else None
        return self._packets(self._first, self._sent)

    def _packets(self, first: int, messages: Iterable[Any]) -> list[Packet]:
        return [
            Packet(number=number, ack=self.received_count, message=message)
            for number, message in enumerate(messages, first)
        ]
