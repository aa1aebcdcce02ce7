"""Which nodes of a simulated cluster cannot hear each other, and what their transport makes of it.

A fault of the network stands between nodes for a while: between two, one way or both, or between some nodes
and all others. Three things follow, and all of them are here.

What is under way between nodes that cannot hear each other stands, and is sent again once the line is used
again: nothing is lost and nothing comes twice, for sessions outlive their connections. A mended line is used
at the latest `REDIALLED_S` after it was mended. Where only one way is cut, the other way works until the
connection is replaced by a fresh dial, which needs both ways.

A node that has received nothing for `UNREACHABLE_S` from a node with which it has a session reports it, and
reports as well when it receives something again. A worker has a session with every member of a group with
which it has begun an exchange or shared a state; the coordinator has one with every worker. A process that
is hung sends nothing; a hung node reports nothing.

A node of which the coordinator has received nothing for `lost_after_s` is lost, and a worker that has
received nothing from the coordinator for as long ends.

Nothing here decides who takes part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.events import PeerReachable, PeerUnreachable

if TYPE_CHECKING:
    from offbeat.simulator.training.cluster import Cluster

COORDINATOR = -1
UNREACHABLE_S = 1.25
REDIALLED_S = 3.0
_REPLACED_S = 2.0  # after which silence a connection gives way to a fresh dial
_CAUSE = f"nothing has been received from it for {UNREACHABLE_S:g} s"


@dataclass(eq=False, kw_only=True)
class Outage:
    """One fault of the network.

    Attributes:
        nodes: what these send is lost.
        peers: to whom; None for all others.
        is_one_way: what `peers` send is not lost.
        until_s: when the lines between them are used again.
        is_replaced: the connections have been given up, and fresh dials need both ways.
    """

    nodes: frozenset[int]
    peers: frozenset[int] | None
    is_one_way: bool
    until_s: float
    is_replaced: bool = False

    def stops(self, sender: int, receiver: int) -> bool:
        """Whether the receiver gets nothing that the sender sends."""
        if self._is_from(sender, receiver):
            return True
        return (self.is_replaced or not self.is_one_way) and self._is_from(receiver, sender)

    def is_between(self, one: int, other: int) -> bool:
        """Whether it keeps two nodes from an exchange, which needs both ways."""
        return self._is_from(one, other) or self._is_from(other, one)

    def splits(self, members: tuple[int, ...]) -> bool:
        """Whether it keeps these from an exchange."""
        inside = [member for member in members if member in self.nodes]
        if self.peers is None:
            return bool(inside) and len(inside) < len(members)
        return bool(inside) and any(member in self.peers for member in members)

    def _is_from(self, sender: int, receiver: int) -> bool:
        if sender not in self.nodes or receiver in self.nodes:
            return False
        return self.peers is None or receiver in self.peers


class Lines:
    """All lines of a cluster, as far as they are not as they should be.

    Args:
        cluster: whose.

    Attributes:
        outages: those under way.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.outages: list[Outage] = []
        self._silent_s: dict[tuple[int, int], float] = {}  # receiver, sender: since when
        self._reported: set[tuple[int, int]] = set()  # receiver, sender

    @property
    def are_calm(self) -> bool:
        """Whether every node hears every other one that is not hung, and has said so."""
        return not (self.outages or self._reported)

    def free_s(self, one: int, other: int) -> float:
        """Return when two nodes can hear each other; now if they can."""
        until_s = [outage.until_s for outage in self.outages if outage.is_between(one, other)]
        return max(until_s, default=self._cluster.engine.now_s)

    def is_silent(self, sender: int, receiver: int) -> bool:
        """Whether the receiver gets nothing from the sender, because of the line or because it hangs."""
        if sender != COORDINATOR and self._cluster.is_hung(sender):
            return True
        return any(outage.stops(sender, receiver) for outage in self.outages)

    def silence_s(self, sender: int, receiver: int) -> float:
        """Return for how long the receiver has got nothing from the sender."""
        now_s = self._cluster.engine.now_s
        return now_s - self._silent_s.get((receiver, sender), now_s)

    # What begins and ends --------------------------------------------------------------------------------

    def cut(
        self, nodes: frozenset[int], peers: frozenset[int] | None, length_s: float, *, is_one_way: bool
    ) -> None:
        """What these nodes send to their peers is lost for a while, and what these send, unless one-way."""
        used_s = self._cluster.chance.random() * min(length_s, REDIALLED_S)
        self._begin(nodes, peers, length_s + used_s, is_one_way=is_one_way)

    def reset(self, nodes: frozenset[int], peers: frozenset[int]) -> None:
        """Connections break; both ends know at once, dial, and send again what was under way."""
        self._begin(nodes, peers, 4 * self._cluster.network.latency_s, is_one_way=False)

    def _begin(
        self, nodes: frozenset[int], peers: frozenset[int] | None, length_s: float, *, is_one_way: bool
    ) -> None:
        cluster = self._cluster
        until_s = cluster.engine.now_s + length_s
        outage = Outage(nodes=nodes, peers=peers, is_one_way=is_one_way, until_s=until_s)
        self.outages.append(outage)
        for exchange in cluster.exchanges.values():
            present = tuple(one.worker for one in exchange.workers if one.exchange is exchange)
            if outage.splits(present):
                exchange.block(outage)
        self._delay(outage)
        if is_one_way and length_s > _REPLACED_S:
            cluster.engine.at(cluster.engine.now_s + _REPLACED_S, self._replace, outage)
        cluster.engine.at(until_s, self._mend, outage)
        self.look()

    def _replace(self, outage: Outage) -> None:
        outage.is_replaced = True
        self._delay(outage)
        self.look()

    def _delay(self, outage: Outage) -> None:
        """Control messages stand too."""
        for one in self._cluster.living():
            if outage.stops(one.worker, COORDINATOR):
                one.up_s = max(one.up_s, outage.until_s)
            if outage.stops(COORDINATOR, one.worker):
                one.down_s = max(one.down_s, outage.until_s)

    def _mend(self, outage: Outage) -> None:
        self.outages.remove(outage)
        for exchange in list(self._cluster.exchanges.values()):
            exchange.unblock(outage)
        self.look()
        self._cluster.engine.at(self._cluster.engine.now_s, self._cluster.welcome)

    # What nodes report -----------------------------------------------------------------------------------

    def look(self, _: object = None) -> None:
        """See who hears whom, after anything that may have changed it."""
        cluster, now_s = self._cluster, self._cluster.engine.now_s
        silent = set(self._silent())
        for pair in [pair for pair in self._silent_s if pair not in silent]:
            del self._silent_s[pair]
        for receiver, sender in sorted(silent - self._silent_s.keys()):
            self._silent_s[receiver, sender] = now_s
            since = (receiver, sender, now_s)
            if sender != COORDINATOR:
                cluster.engine.at(now_s + UNREACHABLE_S, self._report, since)
            if receiver == COORDINATOR:
                cluster.engine.at(now_s + cluster.setting.lost_after_s, self._lose, since)
            elif sender == COORDINATOR:
                notices_s = now_s + cluster.setting.lost_after_s + cluster.chance.random()
                cluster.engine.at(notices_s, self._end, since)
        for receiver, sender in sorted(self._reported - silent):
            is_over = not cluster.is_running(sender) or not (
                receiver == COORDINATOR or cluster.is_running(receiver)
            )
            if is_over:
                self._reported.discard((receiver, sender))
            elif cluster.is_observing(receiver):
                self._reported.discard((receiver, sender))
                cluster.observe(receiver, PeerReachable(now_s=0.0, worker=_worker(receiver), peer=sender))

    def _silent(self) -> Iterator[tuple[int, int]]:
        """Yield each receiver with each sender of which it gets nothing."""
        cluster = self._cluster
        running = [one.worker for one in cluster.living()]
        nodes = [COORDINATOR, *running]
        suspects: list[tuple[int, list[int]]] = [
            (worker, nodes) for worker in running if cluster.is_hung(worker)
        ]
        for outage in self.outages:
            for node in outage.nodes.intersection(nodes):
                suspects.append((node, nodes if outage.peers is None else sorted(outage.peers)))
        for node, others in suspects:
            for other in others:
                for receiver, sender in ((node, other), (other, node)):
                    if (
                        receiver != sender
                        and (sender == COORDINATOR or cluster.is_running(sender))
                        and cluster.is_observing(receiver)
                        and self.has_session(receiver, sender)
                        and self.is_silent(sender, receiver)
                    ):
                        yield receiver, sender

    def has_session(self, receiver: int, sender: int) -> bool:
        """Whether the receiver expects to hear of the sender."""
        if receiver == COORDINATOR:
            return self._cluster.is_present(sender)
        if sender == COORDINATOR:
            return self._cluster.is_present(receiver)
        for members in self._cluster.known_members(receiver):
            place = bisect_left(members, sender)
            if place < len(members) and members[place] == sender:
                return True
        return False

    def _is_so(self, since: tuple[int, int, float]) -> bool:
        receiver, sender, since_s = since
        return self._silent_s.get((receiver, sender)) == since_s

    def _report(self, since: tuple[int, int, float]) -> None:
        receiver, sender, _ = since
        if not self._is_so(since) or (receiver, sender) in self._reported:
            return
        self._reported.add((receiver, sender))
        unreachable = PeerUnreachable(now_s=0.0, worker=_worker(receiver), peer=sender, cause=_CAUSE)
        self._cluster.observe(receiver, unreachable)

    def _lose(self, pair: tuple[int, int, float]) -> None:
        if self._is_so(pair):
            self._cluster.lose(
                pair[1], f"nothing was heard of it for {self._cluster.setting.lost_after_s:g} s"
            )

    def _end(self, since: tuple[int, int, float]) -> None:
        if self._is_so(since):
            self._cluster.kill(since[0], 0.0, "it lost the coordinator")

    def restart(self, reported: set[int]) -> None:
        """Another coordinator observes from now on; its log says which workers are reported."""
        self._reported = {pair for pair in self._reported if pair[0] != COORDINATOR}
        self._reported |= {(COORDINATOR, worker) for worker in reported}
        for pair in [pair for pair in self._silent_s if pair[0] == COORDINATOR]:
            del self._silent_s[pair]
        self.look()

    def reports_of(self, worker: int) -> list[PeerUnreachable]:
        """Return what a worker reports as things are."""
        return [
            PeerUnreachable(now_s=0.0, worker=worker, peer=sender, cause=_CAUSE)
            for receiver, sender in sorted(self._reported)
            if receiver == worker
        ]


def _worker(node: int) -> int | None:
    return None if node == COORDINATOR else node
