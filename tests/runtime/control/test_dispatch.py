"""Promises of the coordinator's dispatch: who receives which action, and what a snapshot holds of it."""

import math
import random
from contextlib import contextmanager

from offbeat.events import Joined, Left, Lost, NodeJoined, Recipient, RejectPeer
from offbeat.runtime.control.configuration import CoordinatorConfiguration, PolicySpec
from offbeat.runtime.control.coordinator import Coordinator
from offbeat.wire.codec import decode_actions, encode_events
from support.every_event import ACTIONS
from support.round_events import ready

NODES = ("server-0", "server-1", "client-0", "client-7")


@contextmanager
def job(workers, nodes=(), *, joins=True):
    """A coordinator that sends nothing, with these workers and nodes."""
    names = ("membership.assembly:Assembly", "membership.lockstep:Lockstep")
    coordinator = Coordinator(
        CoordinatorConfiguration(
            job="job",
            token="secret",
            host="127.0.0.1",
            policies=tuple(
                PolicySpec(path=f"offbeat.policies.{name}", arguments={"world": workers}) for name in names
            ),
        )
    )
    try:
        for worker in range(workers if joins else 0):
            coordinator._handle(joined(worker, workers), f"worker-{worker}")
        for node in nodes:
            coordinator._handle(NodeJoined(now_s=1.0, node=node, addresses=(), functions=()), node)
        yield coordinator
    finally:
        for listener, _ in coordinator._listeners:
            listener.close()


def joined(worker, world):
    return Joined(
        now_s=1.0,
        worker=worker,
        world=world,
        peer=f"worker-{worker}",
        location="here",
        addresses=(f"tcp://host-of-worker-{worker}:1",),
        model_signature=(),
        strategy="bsp",
    )


def received(coordinator, peer):
    """The actions sent to a peer so far."""
    messages = coordinator._peers[peer].actions
    return [action for message in messages for action in decode_actions(message)]


def test_a_peer_that_reconnects_and_has_much_to_send_is_not_lost_meanwhile():
    with job(2) as coordinator:
        coordinator._last_tick_s = -math.inf
        coordinator._reconnecting = dict.fromkeys(("worker-0", "worker-1"), -math.inf)
        coordinator._process_message("worker-0", encode_events([ready(0, 0)]))
        lost = [event for event, _ in coordinator._tick() if isinstance(event, Lost)]
        assert [event.worker for event in lost] == [1]


def test_each_peer_receives_the_actions_that_are_for_it_in_their_order():
    generator = random.Random(0)
    for _ in range(20):
        with job(4, NODES) as coordinator:
            coordinator._handle(Left(now_s=2.0, worker=3, step=0), "worker-3")
            before = {peer: len(received(coordinator, peer)) for peer in coordinator._peers}
            actions = generator.sample([one for one in ACTIONS if not isinstance(one, RejectPeer)], 12)
            coordinator._dispatch(actions)
            for peer, record in coordinator._peers.items():
                recipient = Recipient(peer, record.sender)
                expected = [action for action in actions if record.is_present and action.is_for(recipient)]
                assert received(coordinator, peer)[before[peer] :] == expected
                assert record.actions.sent == before[peer] + len(expected)


def test_of_two_workers_that_claim_an_id_only_the_one_that_takes_part_receives_what_is_for_it():
    with job(2) as coordinator:
        coordinator._handle(joined(1, 3), "twin")
        (rejected,) = received(coordinator, "twin")
        assert isinstance(rejected, RejectPeer)
        for_worker_1 = [one for one in ACTIONS if one.named_recipients == (1,)]
        before = len(received(coordinator, "worker-1"))
        coordinator._dispatch(for_worker_1)
        assert received(coordinator, "twin") == [rejected]
        assert received(coordinator, "worker-1")[before:] == for_worker_1


def test_what_all_receive_is_kept_once_in_memory_and_in_a_snapshot():
    with job(50) as coordinator:
        sent = [[*record.actions] for record in coordinator._peers.values()]
        assert {id(message) for messages in sent for message in messages} == {*map(id, sent[0])}
        coordinator._compact()
        snapshot, _ = coordinator.journal.read()
        # In the PeerList, in the record of the worker and in the state of Assembly.
        assert snapshot.count(b"tcp://host-of-worker-7:1") == 3


def test_a_successor_sends_again_what_the_snapshot_of_its_predecessor_holds():
    with job(3, NODES) as coordinator, job(3, joins=False) as successor:
        coordinator._dispatch([one for one in ACTIONS if not isinstance(one, RejectPeer)])
        coordinator._compact()
        successor._load(coordinator.journal.read()[0], has_log_ended=False)
        for peer, record in coordinator._peers.items():
            assert [*successor._peers[peer].actions] == [*record.actions]
            assert successor._peers[peer].sender == record.sender
        successor._dispatch([one for one in ACTIONS if one.named_recipients == (1,)])
        assert len(received(successor, "worker-1")) > len(received(coordinator, "worker-1"))
