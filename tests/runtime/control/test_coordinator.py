"""Promises of a real coordinator: it accepts messages of the job's workers only, and ends with its job."""

import queue
import random
import socket
import time
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import LinkError, WorkerError
from offbeat.events import (
    AbortJob,
    Failed,
    Left,
    Lost,
    PeerList,
    PeerReachable,
    PeerUnreachable,
    Ready,
    RejectPeer,
    StepFinished,
    Tick,
)
from offbeat.runtime.control.channel import ControlChannel, SequenceAck, encode_sequence_ack
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.runtime.transport.framing import HEADER, MAGIC, VERSION, FrameKind
from offbeat.runtime.transport.handshake import DiallerHandshake
from offbeat.wire.codec import encode_events
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.coordinator_process import (
    DEADLINE_S,
    Peer,
    coordinator,
    goes_on,
    joined,
    open_client,
    ready,
    running_job,
)
from support.run_logs import entries_of, wait_for_entry, wait_until
from support.tcp_proxy import Line

MIB = 2**20


def begun(worker):
    return StepFinished(
        now_s=0.0,
        worker=worker,
        clock=None,
        parameter_version=0,
        epoch=0,
        step=0,
        compute_s=0.0,
        samples=0,
        loss=None,
        blocks=(),
    )


# Unreachable workers --------------------------------------------------------------------------------------


@contextmanager
def job_with_a_line(log, *, listens):
    """A coordinator with two workers; the second one connects over a proxy that tests can cut."""
    with coordinator(2, log) as process:
        host, _, port = process.addresses[-1].removeprefix("tcp://").rpartition(":")
        line = Line((host, int(port)))
        peers = [Peer("w0", process, worker=0), Peer("w1", process, worker=1, line=line, listens=listens)]
        try:
            for peer in peers:
                peer.join(2)
            for peer in peers:
                peer.receive_until(PeerList)
            yield process, peers, line
        finally:
            for peer in peers:
                peer.links.close()
            line.close()


def test_a_broken_connection_loses_no_worker(tmp_path):
    with job_with_a_line(tmp_path / "log", listens=True) as (process, peers, line):
        for round_ in range(5):
            line.reset()
            for peer in peers:
                peer.send(ready(peer.worker, round_))
        # A peer that leaves sends nothing again that was lost with a connection.
        wait_for_entry(
            tmp_path / "log",
            "the last Ready of worker 1",
            lambda entry: isinstance(entry, Ready) and (entry.worker, entry.round) == (1, 4),
        )
        for peer in peers:
            peer.leave(5)
        code, errors = process.ended()
        assert (code, errors) == (0, "")
    readys = [event.round for event in entries_of(tmp_path / "log", Ready) if event.worker == 1]
    assert readys == [*range(5)]
    assert not entries_of(tmp_path / "log", Lost)


@pytest.mark.long
def test_a_silent_worker_is_reported_until_it_sends_again(tmp_path):
    log = tmp_path / "log"
    with job_with_a_line(log, listens=False) as (process, peers, line):
        for round_ in range(2):
            began_s = time.monotonic()
            line.cut(new_ones_too=True)
            peers[1].send(ready(1, round_))
            for kind in (PeerUnreachable, PeerReachable):
                wait_for_entry(
                    log,
                    f"{kind.__name__} {round_}",
                    lambda entry, kind=kind, began_s=began_s: (
                        isinstance(entry, kind) and entry.now_s > began_s
                    ),
                )
                line.mend()
            peers[0].send(ready(0, round_))
        for peer in peers:
            peer.leave(2)
        assert process.ended() == (0, "")
    found = [
        type(event)
        for event in entries_of(log, PeerUnreachable, PeerReachable, Ready)
        if (event.worker == 1 if isinstance(event, Ready) else event.peer == 1)
    ]
    reports = [kind for kind in found if kind is not Ready]
    assert reports == [PeerUnreachable, PeerReachable] * (len(reports) // 2)
    assert [before for before, kind in pairwise(found) if kind is Ready] == [PeerReachable] * 2


@pytest.mark.long
def test_a_worker_that_gave_up_its_connection_and_dials_again_is_not_lost(tmp_path):
    """The coordinator accepts the new connection, and both sides resend missed messages."""
    log = tmp_path / "log"
    with coordinator(1, log, silent_s=1000.0) as process, ExitStack() as stack:
        gone, received = queue.SimpleQueue(), queue.SimpleQueue()
        links = Endpoint(
            "w0",
            job="job",
            token="secret",
            on_message=lambda _, payload: [received.put(action) for action in control.receive(payload)],
            on_lost=lambda error: control.on_connection_lost(error),
            silent_s=3.0,
        )
        stack.callback(links.close)
        there, back = (line_to(addresses[-1], stack) for addresses in (process.addresses, links.addresses))
        control = ControlChannel(links, COORDINATOR, [there.address], on_coordinator_gone=gone.put)
        place = SimpleNamespace(name="w0", links=SimpleNamespace(addresses=(back.address,)))
        control.send(joined(place, 1, 0))
        assert isinstance(received.get(timeout=DEADLINE_S), PeerList)
        for line in (there, back):
            line.cut(new_ones_too=True)
        wait_until(lambda: not control.is_connected, "the worker to give the connection up")
        control.send(ready(0))
        there.reset()  # now the coordinator knows that the connection is broken, and cannot dial
        there.mend()
        wait_for_entry(
            log, "an event that was sent while disconnected", lambda entry: isinstance(entry, Ready)
        )
        control.send(Left(now_s=0.0, worker=0, step=1))
        control.wait_until_acked(DEADLINE_S)
        links.close()
        assert process.ended() == (0, "")
        assert gone.empty()
    assert not entries_of(log, Lost)


def line_to(address, stack):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    line = Line((host, int(port)))
    stack.callback(line.close)
    return line


def test_a_worker_must_not_send_events_that_only_the_coordinator_observes():
    with running_job(2) as (_, peers):
        peers[0].send(PeerUnreachable(now_s=0.0, worker=None, peer=1, cause="it is silent"))
        assert "must not send PeerUnreachable" in peers[1].receive_until(AbortJob).reason


# Authentication -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secrets", [{"token": "wrong"}, {"job": "another"}])
def test_a_coordinator_rejects_a_wrong_job_or_token(secrets, tmp_path):
    with running_job(2, tmp_path / "log") as (process, peers):
        stranger = Peer("w2", process, worker=1, **secrets)
        stranger.send(Left(now_s=0.0, worker=1, step=0))
        assert isinstance(stranger.receive(), LinkError)
        stranger.links.close()
        for peer in peers:
            peer.send(ready(peer.worker))
            peer.leave(1)
        assert process.ended()[0] == 0
        events = read_log(tmp_path / "log").entries
        assert sum(isinstance(event, Left) for event in events) == 2


@pytest.mark.long
def test_a_second_worker_of_the_same_name_does_not_replace_the_first():
    with running_job(2) as (process, peers):
        twin = Peer("w1", process, worker=1)
        twin.send(Left(now_s=0.0, worker=1, step=0))
        assert isinstance(twin.receive(), LinkError)  # after the coordinator has made it wait for 5 s
        twin.links.close()
        for peer in peers:
            peer.send(ready(peer.worker))
            peer.leave(1)
        assert process.ended()[0] == 0


def test_bytes_other_than_a_handshake_change_nothing():
    with running_job(2) as (process, peers):
        host, _, port = process.addresses[-1].removeprefix("tcp://").rpartition(":")
        for data in [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(10_000), random.Random(1).randbytes(10_000)]:
            with socket.create_connection((host, int(port)), DEADLINE_S) as sock:
                sock.sendall(data)
        for peer in peers:
            peer.send(ready(peer.worker))
            peer.leave(1)
        assert process.ended()[0] == 0


# Invalid messages -----------------------------------------------------------------------------------------

NONSENSE = {
    "random bytes": lambda peer: random.Random(0).randbytes(1000),
    "nothing": lambda peer: b"",
    "no list": lambda peer: msgspec.msgpack.encode({"type": "Left"}),
    "unknown event": lambda peer: msgspec.msgpack.encode([{"type": "Explode", "worker": 0}]),
    "a field too many": lambda peer: msgspec.msgpack.encode(
        [{"type": "Left", "worker": 1, "step": 0, "now_s": 1e9}]
    ),
    "a field too many and a long text": lambda peer: msgspec.msgpack.encode(
        [{"type": "Failed", "worker": 1, "step": 0, "error": "\n" * (MIB - 1000), "now_s": 1e9}]
    ),
    "a number out of range": lambda peer: msgspec.msgpack.encode([{"type": "Left", "worker": -1, "step": 0}]),
    "deep": lambda peer: b"\x91" * 100_000 + b"\xc0",
    "a megabyte": lambda peer: bytes(MIB),
    "a tick": lambda peer: encode_events([Tick(now_s=0.0)]),
    "another's event": lambda peer: encode_events([Left(now_s=0.0, worker=0, step=0)]),
    "a loss": lambda peer: encode_events([Lost(now_s=0.0, worker=peer.worker, cause="bored")]),
    "a loss of another": lambda peer: encode_events([Lost(now_s=0.0, worker=0, cause="envy")]),
    "a long text": lambda peer: encode_events(
        [Failed(now_s=0.0, worker=peer.worker, step=0, error="x" * (MIB - 1000))]
    ),
    "joined again": lambda peer: encode_events([joined(peer, 2, peer.worker)]),
    "joined as another": lambda peer: encode_events([joined(peer, 2, 0)]),
    "an acknowledgement of unsent actions": lambda peer: encode_sequence_ack(SequenceAck(0, 99, 0)),
    "an invalid acknowledgement": lambda peer: encode_sequence_ack(SequenceAck(0, 0, 0)) + b"!",
}
MISTAKES = {  # only a policy can detect these
    "a round ahead": lambda peer: encode_events([ready(peer.worker, 7)]),
}


@pytest.mark.long(after=3)
@pytest.mark.parametrize("what", NONSENSE)
def test_an_invalid_message_of_a_worker_loses_that_worker_and_never_reaches_a_policy(what, tmp_path):
    with running_job(2, tmp_path / "log") as (process, (good, bad)):
        bad.send_bytes(NONSENSE[what](bad))
        assert good.receive_until(AbortJob).worker == 1
        assert isinstance(bad.receive_until(RejectPeer), RejectPeer)
        bad.send(Failed(now_s=0.0, worker=1, step=0, error="not heard any more"))
        bad.links.flush(DEADLINE_S)
        bad.links.close()
        good.leave()
        assert process.ended() == (0, "")
    log = read_log(tmp_path / "log")
    assert replay(log) is None
    events = [event for event in log.entries if isinstance(event, Left | Lost | Failed | Tick)]
    reported = [event for event in events if not isinstance(event, Tick)]
    assert [(type(event), event.worker) for event in reported] == [(Lost, 1), (Left, 0)]
    assert reported[0].cause.startswith("it broke the protocol: ")


@pytest.mark.parametrize("what", MISTAKES)
def test_an_event_that_a_policy_rejects_aborts_the_job_and_names_the_worker(what):
    with running_job(2) as (process, peers):
        peers[1].send_bytes(MISTAKES[what](peers[1]))
        for peer in peers:
            assert peer.receive_until(AbortJob).worker == 1
            peer.links.close()
        assert process.ended() == (0, "")


@pytest.mark.long(after=3)
@pytest.mark.parametrize("what", [*NONSENSE, "an event before joining"])
def test_an_invalid_message_of_a_stranger_changes_nothing(what, tmp_path):
    nonsense = NONSENSE | {
        "an event before joining": lambda peer: encode_events(
            [Failed(now_s=0.0, worker=1, step=0, error="no")]
        ),
        "joined again": lambda peer: encode_events([joined(peer, 3, 1)] * 2),
        "joined as another": lambda peer: encode_events(
            [joined(peer, 3, 0), Left(now_s=0.0, worker=0, step=0)]
        ),
        "another's event": lambda peer: encode_events(
            [joined(peer, 3, 1), Failed(now_s=0.0, worker=1, step=0, error="no")]
        ),
    }
    with running_job(2, tmp_path / "log") as (process, peers):
        bad = Peer("stranger", process, worker=1)
        bad.send_bytes(nonsense[what](bad))
        assert isinstance(bad.receive(), RejectPeer)
        bad.send(Left(now_s=0.0, worker=1, step=0))
        bad.links.flush(DEADLINE_S)
        bad.links.close()
        goes_on(peers, process)
    log = read_log(tmp_path / "log")
    assert replay(log) is None
    assert not any(isinstance(entry, Lost | Failed | AbortJob) for entry in log.entries)
    assert sum(isinstance(entry, Left) for entry in log.entries) == 2


def test_a_message_above_the_size_limit_closes_the_connection():
    with running_job(2) as (process, peers):
        host, _, port = process.addresses[-1].removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), DEADLINE_S) as sock:
            greeting = DiallerHandshake(job="job", token="secret", node="stranger", peer=COORDINATOR)
            sock.sendall(greeting.hello())
            sock.sendall(HEADER.pack(MAGIC, VERSION, FrameKind.MESSAGE, 2**31 - 1, 0, 0, 0))
            while sock.recv(4096):
                pass
        for peer in peers:
            peer.send(ready(peer.worker))
            peer.leave(1)
        assert process.ended()[0] == 0


@settings(max_examples=30, deadline=None)
@given(messages=st.lists(st.binary(max_size=200), max_size=5))
def test_arbitrary_bytes_of_a_stranger_do_not_end_the_coordinator(whole_job, messages):
    process, peers = whole_job
    stranger = Peer(f"s{random.randrange(2**60)}", process, worker=0)
    for data in messages:
        stranger.send_bytes(data)
    stranger.links.flush(DEADLINE_S)
    stranger.links.close()
    assert process.process.poll() is None
    for peer in peers:
        assert peer.inbox.empty() or not isinstance(peer.inbox.get(), AbortJob | LinkError)


@pytest.fixture(scope="module")
def whole_job():
    with running_job(2) as (process, peers):
        yield process, peers
        goes_on(peers, process)


# Late joiners ---------------------------------------------------------------------------------------------


def test_a_permit_is_sent_only_to_its_worker(tmp_path):
    with running_job(2, tmp_path / "log", policy="staleness.bounded_staleness:BoundedStaleness") as (
        process,
        peers,
    ):
        for peer in peers:
            peer.send(begun(peer.worker))
        for peer in peers:
            while not (permit := peer.receive()).may_start:
                assert permit.worker == peer.worker
            assert permit.worker == peer.worker
            peer.leave()
        assert process.ended() == (0, "")
    assert replay(read_log(tmp_path / "log")) is None


def test_a_late_joiner_is_rejected_and_the_job_continues(tmp_path):
    with running_job(2, tmp_path / "log") as (process, peers):
        for claim in (0, 1, 2, 77):
            late = Peer(f"late{claim}", process, worker=claim).join(3)
            refusal = late.receive()
            assert refusal.peer == late.name
            assert "the job has started without it" in refusal.reason
            late.send(Failed(now_s=0.0, worker=claim, step=0, error="then nobody shall train"))
            late.links.flush(DEADLINE_S)
            late.links.close()
        goes_on(peers, process)
    assert replay(read_log(tmp_path / "log")) is None


# Start and end --------------------------------------------------------------------------------------------


def test_a_coordinator_never_imports_torch(tmp_path):
    """Checks the modules that its process has imported when it ends."""
    out = tmp_path / "modules"
    prelude = (
        f"import atexit, sys\natexit.register(lambda: open({str(out)!r}, 'w').write(' '.join(sys.modules)))"
    )
    with running_job(2, prelude=prelude) as (process, peers):
        goes_on(peers, process)
    modules = out.read_text().split()
    assert "offbeat.policies.membership.lockstep" in modules
    assert not {"torch", "numpy", "pickle"} & set(modules)


def test_a_coordinator_ends_when_all_workers_have_left():
    with running_job(3) as (process, peers):
        for peer in peers[:2]:
            peer.leave()
        assert process.process.poll() is None
        peers[2].leave()
        assert process.ended() == (0, "")


def test_a_coordinator_ends_when_all_workers_are_lost():
    with running_job(2) as (process, peers):
        for peer in peers:
            peer.links.call_soon(lambda: 1 / 0)  # the endpoint fails without a goodbye
        assert process.ended()[0] == 0


def test_a_coordinator_ends_when_no_worker_ever_joins():
    with coordinator(2, linger_s=0.2) as process:
        assert process.ended() == (0, "")


def test_a_coordinator_does_not_wait_for_missing_workers_once_the_others_have_left():
    with coordinator(2, linger_s=0.2) as process:
        peer = Peer("w0", process, worker=0).join(2)
        peer.leave()
        assert process.ended() == (0, "")


def test_a_worker_that_joins_after_a_failed_start_is_informed_of_the_reason():
    with coordinator(3) as process:
        first = Peer("w0", process, worker=0).join(3)
        odd = Peer("w1", process, worker=1).join(5)
        for peer in (first, odd):
            assert "expects a world of 5 workers" in peer.receive_until(AbortJob | RejectPeer).reason
            peer.links.close()
        for worker in (2, 3, 4):  # the odd worker expects five in all
            late = Peer(f"w{worker}", process, worker=worker).join(3)
            assert "expects a world of 5 workers" in late.receive_until(RejectPeer).reason
            late.links.close()
        assert process.ended() == (0, "")


def test_a_coordinator_that_fails_sends_the_reason_to_the_workers(tmp_path):
    prelude = (
        "from offbeat.policies.membership.lockstep import Lockstep\n"
        "def fail(self, event): raise KeyError('no such worker')\n"
        "Lockstep._handle_left = fail"
    )
    with running_job(2, tmp_path / "log", prelude=prelude) as (process, peers):
        peers[0].send(Left(now_s=0.0, worker=0, step=0))
        assert "the coordinator failed: KeyError: 'no such worker'" in peers[1].receive_until(AbortJob).reason
        assert peers[1].receive() == "coordinator left"
        code, errors = process.ended()
        assert code != 0
        assert "KeyError" in errors


def test_what_was_received_before_the_links_failed_is_recorded(tmp_path):
    """The links' thread fails before it has passed on the message that it has just received."""
    prelude = (
        "from offbeat.runtime.control.coordinator import Coordinator\n"
        "receive = Coordinator._on_received\n"
        "def receive_and_fail(self, item):\n"
        "    receive(self, item)\n"
        "    if b'Left' in getattr(item, 'payload', b''):\n"
        "        raise KeyError('a fault of the links')\n"
        "Coordinator._on_received = receive_and_fail"
    )
    with running_job(2, tmp_path / "log", prelude=prelude) as (process, peers):
        peers[0].send(Left(now_s=0.0, worker=0, step=0))
        code, errors = process.ended()
        assert code != 0
        assert "KeyError: 'a fault of the links'" in errors
    assert [event.worker for event in entries_of(tmp_path / "log", Left)] == [0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"log": "/no such folder/log"}, "No such file or directory"),
        ({"world": 0}, "expected a world of at least 1 worker, got 0"),
    ],
)
def test_a_bad_configuration_is_reported_in_the_answer(change, text):
    with coordinator(**({"world": 2} | change)) as process:
        assert text in process.answer["error"]
        assert process.ended() == (1, "")


def test_a_coordinator_that_leaves_before_the_workers_is_reported_as_lost():
    received = queue.SimpleQueue()
    links = Endpoint(COORDINATOR, job="job", token="secret", on_message=lambda *_: None, on_lost=print)
    member = open_client(links.addresses, 1, received.put, world=2)
    try:
        member.send_event(ready(1))
        assert member.endpoint.flush(DEADLINE_S)
        links.close()
        assert "worker 1 lost the coordinator: it ended before the job" in str(
            received.get(timeout=DEADLINE_S)
        )
        with pytest.raises(WorkerError, match="lost the coordinator"):
            member.raise_if_failed()
    finally:
        member.close()


def test_an_action_that_the_strategy_does_not_have_fails_the_job():
    failures = queue.SimpleQueue()
    with coordinator(1, policy="staleness.bounded_staleness:BoundedStaleness") as process:
        client = open_client(process.addresses, 0, failures.put, world=1, start_s=DEADLINE_S)
        try:
            client.join(world=1, location="here", model=("weight",), strategy="bsp")
            client.send_event(begun(0))
            assert str(failures.get(timeout=DEADLINE_S)) == (
                "worker 0 cannot use a message of the coordinator: "
                "GroupProtocol does not handle the action StepPermit"
            )
            with pytest.raises(WorkerError, match="does not handle the action StepPermit"):
                client.raise_if_failed()
        finally:
            client.close()


def test_events_without_an_action_are_logged_within_a_tick(tmp_path):
    log = tmp_path / "log"
    with running_job(2, log, tick_s=0.05) as (_, peers):
        peers[0].send(ready(0))
        wait_until(lambda: b'"Ready"' in log.read_bytes(), "a log with the received event")
