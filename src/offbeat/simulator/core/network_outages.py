"""Which nodes of a simulated cluster cannot receive from each other, and what their transport does about it.

A fault of the network separates nodes for a while: two nodes, in one direction or both, or some nodes and all
remaining ones. It has three consequences, all implemented here.

Messages under way between separated nodes stall, and are sent again once the connection is used again: none
is lost and none arrives twice, because sessions outlive connections. A repaired connection is used at the
latest `REDIAL_S_MAX` after its repair. Where only one direction is cut, the other one works until the
connection is replaced by a fresh dial, which needs both.

A node that has received nothing for `UNREACHABLE_S` from a node with which it has a session reports it, and
reports again when it receives something. A worker has a session with every member of a group with which it
has begun an exchange or shared a state; the coordinator has one with every worker. A hung process sends
nothing and reports nothing.

A node from which the coordinator has received nothing for `lost_after_s` is lost, and a worker that has
received nothing from the coordinator for as long ends.

Nothing here decides on membership.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.events import PeerReachable, PeerUnreachable
from offbeat.simulator.core.engine import Engine
from offbeat.simulator.core.network import NetworkCosts

COORDINATOR = -1
UNREACHABLE_S = 1.25
REDIAL_S_MAX = 3.0
_REDIAL_AFTER_S = 2.0  # a connection that is silent for so long is replaced by a fresh dial
_CAUSE = f"nothing has been received from it for {UNREACHABLE_S:g} s"


@dataclass(eq=False, kw_only=True)
class Outage:
    """One fault of the network.

    Attributes:
        nodes: the nodes whose messages are lost.
        peers: the receivers of these messages; None for all remaining nodes.
        is_one_way: messages of `peers` are not lost.
        until_s: when their connections are used again.
        is_replaced: the connections have been given up, and fresh dials need both directions.
    """

    nodes: frozenset[int]
    peers: frozenset[int] | None
    is_one_way: bool
    until_s: float
    is_replaced: bool = False

    def drops_messages(self, sender: int, receiver: int) -> bool:
        """Whether the receiver gets nothing that the sender sends."""
        if self._is_from(sender, receiver):
            return True
        return (self.is_replaced or not self.is_one_way) and self._is_from(receiver, sender)

    def separates(self, one: int, other: int) -> bool:
        """Whether it prevents an exchange between two nodes, which needs both directions."""
        return self._is_from(one, other) or self._is_from(other, one)

    def separates_members(self, members: tuple[int, ...]) -> bool:
        """Whether it prevents an exchange among these members."""
        inside = [member for member in members if member in self.nodes]
        if self.peers is None:
            return bool(inside) and len(inside) < len(members)
        return bool(inside) and any(member in self.peers for member in members)

    def _is_from(self, sender: int, receiver: int) -> bool:
        if sender not in self.nodes or receiver in self.nodes:
            return False
        return self.peers is None or receiver in self.peers


class ConnectedWorker(Protocol):
    """What control connections require of a worker.

    Attributes:
        worker: its id.
        uplink_s: when its last message to the coordinator arrives.
        downlink_s: when the coordinator's last message to it arrives.
    """

    worker: int
    uplink_s: float
    downlink_s: float


class ConnectedCluster(Protocol):
    """What connections require of a cluster.

    Attributes:
        engine: the calendar.
        chance: a generator of random numbers.
        network: cost of messages.
    """

    engine: Engine
    chance: random.Random
    network: NetworkCosts

    def running_workers(self) -> Sequence[ConnectedWorker]:
        """Return all running workers, hung ones included, in the order of their ids."""

    def is_running(self, worker: int) -> bool:
        """Whether the worker runs; a hung one does."""

    def is_hung(self, worker: int) -> bool:
        """Whether the worker hangs and sends nothing."""

    def is_present(self, worker: int) -> bool:
        """Whether the coordinator has a connection to the worker."""

    def is_observing(self, node: int) -> bool:
        """Whether a worker or the coordinator is able to notice events now."""

    def session_groups(self, worker: int) -> set[tuple[int, ...]]:
        """Return the member tuples of all groups in which a worker has exchanged anything."""

    def block_exchanges(self, outage: Outage) -> None:
        """Block the exchanges that an outage prevents."""

    def unblock_exchanges(self, outage: Outage) -> None:
        """Let the exchanges continue that an outage has blocked."""

    def report_reachability(self, node: int, event: PeerUnreachable | PeerReachable) -> None:
        """Pass a node's report on reachability to the policies."""

    def reconnect_reachable(self, _: object = None) -> None:
        """Reconnect workers that the coordinator reaches again."""

    def give_up_worker(self, worker: int, cause: str) -> None:
        """Let the coordinator give up a worker."""

    def kill_worker(self, worker: int, after_s: float, cause: str) -> None:
        """End a worker; the coordinator learns of it after `after_s`."""


class NetworkOutages:
    """The state of all connections of a cluster: current outages and reported silences.

    Args:
        cluster: the cluster.
        lost_after_s: silence after which a node counts as lost.

    Attributes:
        outages: the current ones.
    """

    def __init__(self, cluster: ConnectedCluster, *, lost_after_s: float) -> None:
        self._cluster, self._lost_after_s = cluster, lost_after_s
        self.outages: list[Outage] = []
        self._silent_s: dict[tuple[int, int], float] = {}  # by receiver and sender: begin of the silence
        self._reported: set[tuple[int, int]] = set()  # receiver, sender

    @property
    def has_no_outages(self) -> bool:
        """Whether there is no outage and no silence is reported."""
        return not (self.outages or self._reported)

    def reachable_s(self, one: int, other: int) -> float:
        """Return when two nodes receive from each other again; now if they do."""
        until_s = [outage.until_s for outage in self.outages if outage.separates(one, other)]
        return max(until_s, default=self._cluster.engine.now_s)

    def is_silent(self, sender: int, receiver: int) -> bool:
        """Whether the receiver gets nothing from the sender, because of an outage or because it hangs."""
        if sender != COORDINATOR and self._cluster.is_hung(sender):
            return True
        return any(outage.drops_messages(sender, receiver) for outage in self.outages)

    def silence_s(self, sender: int, receiver: int) -> float:
        """Return for how long the receiver has received nothing from the sender, in seconds."""
        now_s = self._cluster.engine.now_s
        return now_s - self._silent_s.get((receiver, sender), now_s)

    # What begins and ends --------------------------------------------------------------------------------

    def cut(
        self, nodes: frozenset[int], peers: frozenset[int] | None, length_s: float, *, is_one_way: bool
    ) -> None:
        """Cut the messages of these nodes to their peers for a while, and unless one-way, the reverse."""
        used_s = self._cluster.chance.random() * min(length_s, REDIAL_S_MAX)
        self._begin(nodes, peers, length_s + used_s, is_one_way=is_one_way)

    def reset(self, nodes: frozenset[int], peers: frozenset[int]) -> None:
        """Break connections; both ends notice at once, dial, and send again what was under way."""
        self._begin(nodes, peers, 4 * self._cluster.network.latency_s, is_one_way=False)

    def _begin(
        self, nodes: frozenset[int], peers: frozenset[int] | None, length_s: float, *, is_one_way: bool
    ) -> None:
        cluster = self._cluster
        until_s = cluster.engine.now_s + length_s
        outage = Outage(nodes=nodes, peers=peers, is_one_way=is_one_way, until_s=until_s)
        self.outages.append(outage)
        cluster.block_exchanges(outage)
        self._delay(outage)
        if is_one_way and length_s > _REDIAL_AFTER_S:
            cluster.engine.schedule(cluster.engine.now_s + _REDIAL_AFTER_S, self._replace, outage)
        cluster.engine.schedule(until_s, self._mend, outage)
        self.update_silences()

    def _replace(self, outage: Outage) -> None:
        outage.is_replaced = True
        self._delay(outage)
        self.update_silences()

    def _delay(self, outage: Outage) -> None:
        """Delay the control messages that an outage stops."""
        for worker in self._cluster.running_workers():
            if outage.drops_messages(worker.worker, COORDINATOR):
                worker.uplink_s = max(worker.uplink_s, outage.until_s)
            if outage.drops_messages(COORDINATOR, worker.worker):
                worker.downlink_s = max(worker.downlink_s, outage.until_s)

    def _mend(self, outage: Outage) -> None:
        self.outages.remove(outage)
        self._cluster.unblock_exchanges(outage)
        self.update_silences()
        self._cluster.engine.schedule(self._cluster.engine.now_s, self._cluster.reconnect_reachable)

    # What nodes report -----------------------------------------------------------------------------------

    def update_silences(self, _: object = None) -> None:
        """Update silences and reports; to be called after any event that may have changed them."""
        cluster, now_s = self._cluster, self._cluster.engine.now_s
        silent = set(self._silent_pairs())
        for pair in [pair for pair in self._silent_s if pair not in silent]:
            del self._silent_s[pair]
        for receiver, sender in sorted(silent - self._silent_s.keys()):
            self._silent_s[receiver, sender] = now_s
            since = (receiver, sender, now_s)
            if sender != COORDINATOR:
                cluster.engine.schedule(now_s + UNREACHABLE_S, self._report, since)
            if receiver == COORDINATOR:
                cluster.engine.schedule(now_s + self._lost_after_s, self._lose, since)
            elif sender == COORDINATOR:
                notices_s = now_s + self._lost_after_s + cluster.chance.random()
                cluster.engine.schedule(notices_s, self._end_orphan, since)
        for receiver, sender in sorted(self._reported - silent):
            is_over = not cluster.is_running(sender) or not (
                receiver == COORDINATOR or cluster.is_running(receiver)
            )
            if is_over:
                self._reported.discard((receiver, sender))
            elif cluster.is_observing(receiver):
                self._reported.discard((receiver, sender))
                cluster.report_reachability(
                    receiver, PeerReachable(now_s=0.0, worker=_worker(receiver), peer=sender)
                )

    def _silent_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield each (receiver, sender) of which the receiver gets nothing."""
        cluster = self._cluster
        running = [worker.worker for worker in cluster.running_workers()]
        nodes = [COORDINATOR, *running]
        suspects: list[tuple[int, list[int]]] = [
            (worker, nodes) for worker in running if cluster.is_hung(worker)
        ]
        for outage in self.outages:
            for node in outage.nodes.intersection(nodes):
                suspects.append((node, nodes if outage.peers is None else sorted(outage.peers)))
        for node, counterparts in suspects:
            for counterpart in counterparts:
                for receiver, sender in ((node, counterpart), (counterpart, node)):
                    if (
                        receiver != sender
                        and (sender == COORDINATOR or cluster.is_running(sender))
                        and cluster.is_observing(receiver)
                        and self.has_session(receiver, sender)
                        and self.is_silent(sender, receiver)
                    ):
                        yield receiver, sender

    def has_session(self, receiver: int, sender: int) -> bool:
        """Whether the receiver expects messages from the sender."""
        if receiver == COORDINATOR:
            return self._cluster.is_present(sender)
        if sender == COORDINATOR:
            return self._cluster.is_present(receiver)
        for members in self._cluster.session_groups(receiver):
            place = bisect_left(members, sender)
            if place < len(members) and members[place] == sender:
                return True
        return False

    def _is_still_silent(self, since: tuple[int, int, float]) -> bool:
        receiver, sender, since_s = since
        return self._silent_s.get((receiver, sender)) == since_s

    def _report(self, since: tuple[int, int, float]) -> None:
        receiver, sender, _ = since
        if not self._is_still_silent(since) or (receiver, sender) in self._reported:
            return
        self._reported.add((receiver, sender))
        unreachable = PeerUnreachable(now_s=0.0, worker=_worker(receiver), peer=sender, cause=_CAUSE)
        self._cluster.report_reachability(receiver, unreachable)

    def _lose(self, pair: tuple[int, int, float]) -> None:
        if self._is_still_silent(pair):
            self._cluster.give_up_worker(
                pair[1], f"nothing was received from it for {self._lost_after_s:g} s"
            )

    def _end_orphan(self, since: tuple[int, int, float]) -> None:
        if self._is_still_silent(since):
            self._cluster.kill_worker(since[0], 0.0, "it lost the coordinator")

    def adopt_reports(self, reported: set[int]) -> None:
        """Continue with the observations of a new coordinator, whose log has these workers as reported."""
        self._reported = {pair for pair in self._reported if pair[0] != COORDINATOR}
        self._reported |= {(COORDINATOR, worker) for worker in reported}
        for pair in [pair for pair in self._silent_s if pair[0] == COORDINATOR]:
            del self._silent_s[pair]
        self.update_silences()

    def open_reports(self, worker: int) -> list[PeerUnreachable]:
        """Return the open reports of a worker."""
        return [
            PeerUnreachable(now_s=0.0, worker=worker, peer=sender, cause=_CAUSE)
            for receiver, sender in sorted(self._reported)
            if receiver == worker
        ]


def _worker(node: int) -> int | None:
    return None if node == COORDINATOR else node
