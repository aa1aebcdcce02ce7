"""A network that loses, repeats, reorders and cuts, and what has become of the nodes in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.policies.ps.ordered_channel import Packet, ReliableChannel
from offbeat.policies.ps.server_node import MANAGER
from offbeat.simulator.core.engine import Engine
from offbeat.simulator.ps.trial import PsTrial

_RESEND_S: Final = 0.02  # where a client waits 0.01 s between two requests
_RESEND_MAX_S: Final = 0.1


@dataclass(eq=False, slots=True)
class NodeStates:
    """What has become of the nodes.

    Attributes:
        joined: nodes that the manager has admitted.
        dead: nodes that do nothing any more.
        vanished: servers whose hosts are dead.
        doomed, doomed_clients: servers and clients that are dead or will be declared dead.
        leaving: servers that were asked to leave.
        forgotten: nodes that are dead, declared dead, or gone, according to the manager.
        ignored: by node, the nodes with which it no longer communicates.
    """

    joined: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    vanished: set[int] = field(default_factory=set)
    doomed: set[int] = field(default_factory=set)
    doomed_clients: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)
    ignored: dict[str, set[str]] = field(default_factory=dict)

    def may_send(self, sender: str, to: str) -> bool:
        """Whether a node may send anything to another one."""
        if sender in self.dead or (sender == MANAGER and to in self.forgotten):
            return False
        return to not in self.ignored.get(sender, ())

    def may_receive(self, sender: str, to: str) -> bool:
        """Whether a node accepts anything from another one."""
        if to in self.dead or sender in self.ignored.get(to, ()):
            return False
        return to != MANAGER or sender not in self.forgotten


class PacketNetwork:
    """Delivers each message once and in order over packets that are lost, repeated, reordered or cut off.

    Args:
        engine: the virtual time.
        trial: shares of lost and repeated packets.
        chance: random numbers.
        states: which nodes may communicate.
        deliver: receives the receiver, the sender and a message.

    Attributes:
        cut_s: by sender and receiver, when their latest cut begins and ends.
    """

    def __init__(
        self,
        engine: Engine,
        trial: PsTrial,
        chance: random.Random,
        states: NodeStates,
        deliver: Callable[[str, str, Any], None],
    ) -> None:
        self.cut_s: dict[tuple[str, str], tuple[float, float]] = {}
        self._engine, self._trial, self._chance = engine, trial, chance
        self._states, self._deliver = states, deliver
        self._channels: dict[tuple[str, str], ReliableChannel] = {}  # by the node that holds it, and its peer
        self._reset_s: dict[frozenset[str], float] = {}  # when all packets under way between two were lost

    def send(self, sender: str, to: str, messages: Sequence[Any]) -> None:
        """Send messages, unless the sender may not."""
        if self._states.may_send(sender, to):
            self._transmit(sender, to, self._channel(sender, to).send(messages, self._engine.now_s))

    def cut(self, pair: tuple[str, str], length_s: float) -> float:
        """Lose the packets from the first of a pair to the second for a while; return when that ends."""
        now_s = self._engine.now_s
        from_s, until_s = self.cut_s.get(pair, (now_s, now_s))
        until_s = max(until_s, now_s + length_s)
        self.cut_s[pair] = from_s if from_s <= now_s < until_s else now_s, until_s
        return until_s

    def is_cut(self, sender: str, to: str) -> bool:
        """Whether packets from a node to another one are lost now."""
        return self._engine.now_s < self.cut_s.get((sender, to), (0.0, 0.0))[1]

    def reset(self, one: str, other: str) -> None:
        """Lose all packets that are under way between two nodes."""
        self._reset_s[frozenset((one, other))] = self._engine.now_s

    def drop_channel(self, node: str, other: str) -> None:
        """Resend nothing from a node to another one."""
        self._channels.pop((node, other), None)

    def _channel(self, name: str, to: str) -> ReliableChannel:
        channel = self._channels.get((name, to))
        if channel is None:
            slower = min(self._trial.request_interval_s_max / 0.01, 5)
            channel = ReliableChannel(resend_s=slower * _RESEND_S, resend_max_s=slower * _RESEND_MAX_S)
            self._channels[name, to] = channel
        return channel

    def _transmit(self, sender: str, to: str, packets: list[Packet]) -> None:
        """Transmit packets, which arrive in any order, once, twice or not at all."""
        chance, trial, now_s = self._chance, self._trial, self._engine.now_s
        for packet in packets:
            if self.is_cut(sender, to):
                continue
            for _ in range((chance.random() >= trial.loss_share) + (chance.random() < trial.duplicate_share)):
                arrives_s = now_s + 0.0001 + chance.random() * 0.003
                self._engine.schedule(arrives_s, self._arrive, (sender, to, packet, now_s))
        due_s = self._channel(sender, to).due_s
        if due_s is not None:
            self._engine.schedule(due_s, self._resend, (sender, to))

    def _resend(self, pair: tuple[str, str]) -> None:
        if pair in self._channels and self._states.dead.isdisjoint(pair):
            again = self._channels[pair].on_tick(self._engine.now_s)
            if again:
                self._transmit(*pair, again)

    def _arrive(self, what: tuple[str, str, Packet, float]) -> None:
        sender, to, packet, sent_s = what
        if not self._states.may_receive(sender, to):
            return
        was_reset = sent_s < self._reset_s.get(frozenset((sender, to)), 0.0)
        if was_reset or self.is_cut(sender, to):
            return
        messages, answer = self._channel(to, sender).on_packet(packet, self._engine.now_s)
        self._transmit(to, sender, answer)
        for message in messages:
            self._deliver(to, sender, message)
