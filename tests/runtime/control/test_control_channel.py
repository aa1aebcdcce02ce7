"""Promises of the control path between a worker and a coordinator: each event and each action once, in order.

First the channel of a worker against a scripted coordinator, then a real coordinator that kills itself.
"""

import queue
import socket
import threading
from contextlib import contextmanager

import pytest

from offbeat.errors import ProtocolError
from offbeat.events import EndEpoch, Group, Left, PeerList, StepsTimed, Tick
from offbeat.runtime.control.channel import (
    SEQUENCE_ACK_INTERVAL,
    ControlChannel,
    SequenceAck,
    decode_sequence_ack,
    encode_sequence_ack,
)
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.wire.codec import decode_events, encode_actions
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.coordinator_process import coordinator, joined, ready
from support.endpoints import DEADLINE_S, Node, node
from support.round_events import times_of_step

__all__ = ["node"]


class Worker:
    """A worker's endpoint, its channel to the coordinator, and the actions that it has received."""

    def __init__(self, name, addresses, worker=0):
        self.received, self.gone = queue.SimpleQueue(), queue.SimpleQueue()
        self.worker = worker
        self.node = Node(
            name,
            on_message=lambda _, payload: self.receive(payload),
            on_lost=lambda error: self.line.on_connection_lost(error),
            on_left=lambda _: self.line.on_peer_closed(),
        )
        self.links = self.node.links
        self.name = self.links.name
        self.line = ControlChannel(self.links, COORDINATOR, addresses, on_coordinator_gone=self.gone.put)

    def receive(self, payload):
        for action in self.line.receive(payload):
            self.received.put(action)

    def action(self):
        return self.received.get(timeout=DEADLINE_S)

    def joins(self, world):
        self.line.send(joined(self, world, self.worker))
        return self

    def leaves(self, step):
        self.line.send(Left(now_s=0.0, worker=self.worker, step=step))
        self.line.wait_until_acked(DEADLINE_S)
        self.links.close()


class ScriptedCoordinator:
    """Sends the messages of a coordinator, from an address that outlives it."""

    def __init__(self, node):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self._node = node
        self.start()

    def start(self):
        listeners = [(self.listener.dup(), self.address)]
        self.node = self._node(COORDINATOR, listeners=listeners)

    def dies(self):
        self.node.links.call_soon(lambda: 1 / 0)
        assert isinstance(self.node.errors.get(timeout=DEADLINE_S), ZeroDivisionError)

    def receive(self):
        """The worker's next message: an acknowledgement, or the rounds of its Readys."""
        payload = self.node.message()[1]
        sequence_ack = decode_sequence_ack(payload)
        return (
            sequence_ack
            if sequence_ack is not None
            else [one.event.round for one in decode_events(payload, 0.0)]
        )

    def send_event(self, message):
        payload = (
            encode_sequence_ack(message) if isinstance(message, SequenceAck) else encode_actions(message)
        )
        self.node.links.send("w0", payload)


def actions(*epochs):
    return [EndEpoch(epoch=epoch, reason="") for epoch in epochs]


@pytest.fixture
def scripted(node):
    scripted = ScriptedCoordinator(node)
    worker = Worker("w0", [scripted.address])
    yield scripted, worker
    worker.links.close()
    scripted.listener.close()


def test_after_a_reconnect_a_worker_resends_only_unrecorded_events(scripted):
    other, worker = scripted
    worker.line.send(ready(0, 0), ready(0, 1))
    worker.line.send(ready(0, 2), ready(0, 3), ready(0, 4))
    worker.line.send(ready(0, 5))
    assert [other.receive() for _ in range(3)] == [[0, 1], [2, 3, 4], [5]]
    other.dies()
    other.start()
    assert other.receive() == SequenceAck(1, 0, 6)
    worker.line.send(ready(0, 6))
    other.send_event(SequenceAck(1, 3, 0))
    assert [other.receive() for _ in range(4)] == [[3, 4], [5], [6], SequenceAck(1, 0, 7)]


def test_a_worker_confirms_the_resync_after_it_has_received_and_answered_missed_actions(scripted):
    other, worker = scripted
    worker.line.send(ready(0, 0))
    assert other.receive() == [0]
    other.send_event(actions(0, 1))
    assert [worker.action().epoch for _ in range(2)] == [0, 1]
    other.dies()
    other.start()
    assert other.receive() == SequenceAck(1, 2, 1)
    other.send_event(SequenceAck(1, 1, 4))
    other.send_event(actions(2))
    assert worker.action().epoch == 2
    worker.line.send(ready(0, 1))
    other.send_event(actions(3))
    assert [other.receive() for _ in range(2)] == [[1], SequenceAck(1, 4, 2)]


def test_messages_of_an_earlier_connection_are_ignored(scripted):
    other, worker = scripted
    worker.line.send(ready(0, 0), ready(0, 1))
    assert other.receive() == [0, 1]
    other.dies()
    other.start()
    assert other.receive() == SequenceAck(1, 0, 2)
    other.send_event(actions(0))
    other.send_event(SequenceAck(0, 2, 0))
    other.send_event(SequenceAck(1, 0, 1))
    other.send_event(actions(7))
    assert worker.action().epoch == 7
    assert [other.receive() for _ in range(2)] == [[0, 1], SequenceAck(1, 1, 2)]


def test_messages_of_any_thread_are_sent_in_the_order_in_which_they_were_queued(scripted):
    other, worker = scripted
    is_inside, continues = threading.Event(), threading.Event()
    worker.line.send(ready(0, 0))
    assert other.receive() == [0]  # a connection exists

    def in_a_callback():
        is_inside.set()
        assert continues.wait(DEADLINE_S)
        worker.line.send(ready(0, 2))

    worker.links.call_soon(in_a_callback)
    assert is_inside.wait(DEADLINE_S)
    worker.line.send(ready(0, 1))
    continues.set()
    assert [other.receive() for _ in range(2)] == [[1], [2]]


def test_no_event_is_sent_after_the_last_one_even_after_a_reconnect(scripted):
    other, worker = scripted
    worker.line.send(ready(0, 0), ready(0, 1), is_last=True)
    worker.line.send(ready(0, 2))
    assert other.receive() == [0, 1]
    other.dies()
    other.start()
    assert other.receive() == SequenceAck(1, 0, 2)
    worker.line.send(ready(0, 3), is_last=True)
    other.send_event(SequenceAck(1, 1, 0))
    assert [other.receive() for _ in range(2)] == [[1], SequenceAck(1, 0, 2)]


def test_an_impossible_recorded_count_is_a_protocol_error(scripted):
    _, worker = scripted
    worker.line.send(ready(0, 0))
    for received in (2, 10**6):
        with pytest.raises(ProtocolError, match="expected an acknowledgement of between 0 and 1 events"):
            worker.line.receive(encode_sequence_ack(SequenceAck(0, received, 0)))


def test_a_closed_coordinator_address_is_reported_once(scripted):
    other, worker = scripted
    worker.line.send(ready(0, 0))
    assert other.receive() == [0]
    other.listener.close()
    other.dies()
    gone = worker.gone.get(timeout=DEADLINE_S)
    assert gone.startswith(
        f"coordinator closed the connection, and nothing listens any more at {other.address}; its process has"
    )
    worker.line.wait_until_acked(DEADLINE_S)
    assert worker.gone.empty()


@contextmanager
def over(node):
    """The coordinator's process has ended, so that its address is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()[1]
    yield where


@contextmanager
def unresponsive(node):
    """The coordinator's host does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def of_another_job(node):
    """The coordinator of a later job has the same port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()[1]
        node(COORDINATOR, job="later", listeners=[(listener.dup(), f"tcp://127.0.0.1:{where}")])
        yield where


@contextmanager
def leaving(node):
    """The coordinator closes every connection with a goodbye."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()[1]
        listeners = [(listener.dup(), f"tcp://127.0.0.1:{where}")]
        one = node(
            COORDINATOR,
            listeners=listeners,
            on_message=lambda *_: threading.Thread(target=one.links.close).start(),
        )
        yield where


@pytest.mark.parametrize(
    ("coordinator", "words"),
    [
        (over, ["nothing listens any more at tcp://", "its process has ended", "see the output of rank 0"]),
        (unresponsive, ["within 0.5 s: no answer", "its process may be alive", "no firewall blocks it"]),
        (of_another_job, ["this is job later, not job job", "another process listens", "start it again"]),
        (leaving, ["it ended before the job did", "see the output of rank 0"]),
    ],
)
def test_each_cause_of_a_lost_coordinator_has_its_own_error_message(node, coordinator, words):
    gone = queue.SimpleQueue()
    with coordinator(node) as port:
        links = node(
            "worker",
            connect_s=0.5,
            on_lost=lambda error: line.on_connection_lost(error),
            on_left=lambda _: line.on_peer_closed(),
        ).links
        line = ControlChannel(links, COORDINATOR, [f"tcp://127.0.0.1:{port}"], on_coordinator_gone=gone.put)
        line.send(ready(0, 0))
        text = gone.get(timeout=DEADLINE_S)
    for one in words:
        assert one in text
    assert "?" not in text


# A real coordinator ---------------------------------------------------------------------------------------

DIES_AT = """
import os, signal
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.control.coordinator import Coordinator
send, at = Coordinator._send, {at}
def send_or_die(self, peer, payload):
    flag = os.open({flag!r}, os.O_RDWR | os.O_CREAT)
    {before}
    send(self, peer, payload)
    {after}
def count(flag):
    os.write(flag, b'.') if os.lseek(flag, 0, os.SEEK_END) <= at else None
    return os.lseek(flag, 0, os.SEEK_END)
def die(): os.kill(os.getpid(), signal.SIGKILL)
Coordinator._send = send_or_die
"""
TURN = "if count(flag) == at and not os.path.exists({done!r}): open({done!r}, 'w'); {extra}die()"


@contextmanager
def coordinator_that_dies(tmp_path, world, at, when, **options):
    """A coordinator that kills itself before or after it gives its message number `at` to the endpoint."""
    done = str(tmp_path / "done")
    wait = "self._endpoint._sessions.scheduler.pump(); " if when == "after" else ""
    turn = TURN.format(done=done, extra=wait)
    lines = {"before": "pass", "after": "pass"} | {when: turn}
    prelude = DIES_AT.format(at=at, flag=str(tmp_path / "flag"), **lines)
    with coordinator(world, tmp_path / "log", prelude=prelude, **options) as process:
        yield process


@pytest.mark.long(after=3)
@pytest.mark.parametrize("journal_events_max", [1, 10_000])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_coordinator_killed_while_it_sends_actions_delivers_each_action_once(
    at, when, journal_events_max, tmp_path
):
    """The join of the last of three workers is the reason for a PeerList and a Group to each of them."""
    with coordinator_that_dies(tmp_path, 3, at, when, journal_events_max=journal_events_max) as process:
        workers = [Worker(f"w{number}", process.addresses, number).joins(3) for number in range(3)]
        for worker in workers:
            assert isinstance(worker.action(), PeerList)
            assert isinstance(worker.action(), Group)
            worker.line.send(ready(worker.worker))
        for worker in workers:
            assert worker.gone.empty()
            worker.leaves(1)
            assert worker.received.empty()
        code, errors = process.ended()
        assert code == 0
        assert errors.count("it is started again") == 1
    log = read_log(tmp_path / "log")
    assert replay(log) is None
    assert sum(isinstance(entry, Left) for entry in log.entries) == 3


def test_no_tick_is_logged_until_all_workers_have_reconnected(tmp_path):
    with coordinator_that_dies(tmp_path, 2, 2, "after", tick_s=0.01) as process:
        workers = [Worker(f"w{number}", process.addresses, number) for number in range(2)]
        held, is_held = threading.Event(), threading.Event()
        report_back = workers[1].line._confirm_resync

        def hold_back():
            if workers[1].line._caught_up_at is not None and not held.is_set():
                is_held.set()
            else:
                report_back()

        workers[1].line._confirm_resync = hold_back
        for worker in workers:
            worker.joins(2)
        assert is_held.wait(DEADLINE_S)
        for number in range(200):
            workers[0].line.send(timed(number))
            workers[0].line.wait_until_acked(DEADLINE_S)
        held.set()
        workers[1].links.call_soon(report_back)
        for worker in workers:
            worker.leaves(0)
        assert process.ended()[0] == 0
    entries = read_log(tmp_path / "log").entries
    steps = [number for number, entry in enumerate(entries) if isinstance(entry, StepsTimed)]
    assert len(steps) == 200
    assert not any(isinstance(entry, Tick) for entry in entries[steps[0] : steps[-1]])
    assert entries[steps[-1]].now_s - entries[steps[0]].now_s > 2 * 0.01


def timed(step):
    return StepsTimed(now_s=0.0, worker=0, steps=(times_of_step(step, samples=0),))


def test_the_coordinator_drops_actions_for_a_worker_once_acknowledged(tmp_path):
    """Otherwise an acknowledgement that retracts received actions could not be rejected."""
    with coordinator(1, tmp_path / "log") as process:
        worker = Worker("w0", process.addresses).joins(1)
        assert isinstance(worker.action(), PeerList)
        assert isinstance(worker.action(), Group)
        for number in range(SEQUENCE_ACK_INTERVAL):
            worker.line.send(timed(number))
        worker.line.wait_until_acked(DEADLINE_S)
        worker.links.send(COORDINATOR, encode_sequence_ack(SequenceAck(0, 0, 0)))
        assert "expected an acknowledgement of between 2 and 2 actions, got 0" in worker.action().reason
        worker.links.close()
        assert process.ended()[0] == 0
