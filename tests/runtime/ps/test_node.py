"""Servers, clients and their manager as real processes: paused, killed, rejected or hostile nodes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

import offbeat
from offbeat.errors import LinkError, LostKeysError, OffbeatError
from offbeat.events import NodeLost, ServerReachable, ServerUnreachable
from offbeat.numerics.ps.entries import Entries, PushMeta
from offbeat.numerics.ps.filters import FilterChain, FilterMessage
from offbeat.numerics.ps.spaces import FilterSpec
from offbeat.policies.ps.messages import (
    HandoffOperations,
    HandoffReplayed,
    Operation,
    PlacementView,
    Pull,
    PullResult,
    Push,
    PushAck,
    PushStamp,
    Rejected,
    Replicate,
    ReplicateAck,
    TransferAck,
    TransferChunk,
    TransferDone,
    TransferRequest,
    WrongMaster,
)
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.cluster import start_manager
from offbeat.runtime.ps.node import ClusterFile, PsNode
from offbeat.runtime.ps.packing import EncodedValues
from offbeat.runtime.ps.server import ServerConfiguration, ServerProcess
from support import endpoints
from support.endpoints import DEADLINE_S
from support.jobs import MARK, coordinator, marked
from support.run_logs import wait_for_entry, wait_until

node = endpoints.node  # the fixture
KEYS = 20


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks the processes of this test; none of them outlives the test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class RecordingNode:
    """A node that records received messages."""

    def __init__(self, name: str, cluster: ClusterFile, **options: Any) -> None:
        self.views: queue.SimpleQueue[PlacementView] = queue.SimpleQueue()
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.node = PsNode(
            name,
            cluster,
            host="127.0.0.1",
            on_view=self.views.put,
            on_message=lambda _, message: self.messages.put(message),
            on_gone=self.gone.put,
            **options,
        )

    def view(self) -> PlacementView:
        return self.views.get(timeout=DEADLINE_S)

    def answer_to(self, number: int) -> Any:
        """The answer to a request; skips answers of servers that are not the master."""
        while (answer := self.messages.get(timeout=DEADLINE_S)).request != number:
            assert isinstance(
                answer, WrongMaster
            )  # from a server that has not checked the request any further
        return answer

    def send_message(self, to: str, message: Any) -> None:
        self.node.endpoint.call_soon(self.node.messenger.send, to, message)


@pytest.fixture
def recording_node() -> Iterator[Callable[..., RecordingNode]]:
    made: list[RecordingNode] = []

    def make(*args: Any, **options: Any) -> RecordingNode:
        made.append(RecordingNode(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.node.endpoint.close()


# Joining


def test_a_node_is_not_in_the_cluster_before_it_joins(mark, recording_node):
    """So callbacks run only after the node is constructed."""
    cluster = start_manager(1, host="127.0.0.1")
    early, late = recording_node("server-0", cluster), recording_node("server-1", cluster)
    late.node.join()
    assert late.view().ring.servers == (1,)
    assert early.views.empty()
    early.node.join()
    view = late.view()
    assert view.target is not None
    assert view.target.servers == (0, 1)


def test_a_wrong_token_is_reported_in_one_line(mark):
    cluster = start_manager(1, host="127.0.0.1")
    with pytest.raises(OffbeatError, match="token") as caught:
        PS(msgspec.structs.replace(cluster, token="a guess"))
    assert "\n" not in str(caught.value)
    assert "coordinator" in str(caught.value)


def test_missing_initial_servers_are_reported_after_the_start_timeout(mark, recording_node):
    cluster = start_manager(2, host="127.0.0.1")
    recording_node("server-0", cluster).node.join()
    with pytest.raises(OffbeatError, match=r"timed out after 0.5 s waiting for all initial servers"):
        PS(cluster, start_s=0.5)


def test_the_process_of_a_removed_server_ends_without_an_error(mark):
    with PS.local(servers=3) as ps:
        w = ps.namespace("w", keys=KEYS)
        w.push(np.ones(KEYS, np.float32)).result()
        ps.remove_server(1)
        assert ps.local_servers.processes[1].wait(DEADLINE_S) == 0
        assert w.pull().result().tolist() == [1.0] * KEYS


# Paused and killed nodes


@pytest.mark.long
def test_a_paused_server_is_removed_without_lost_pushes_and_ends_when_it_resumes(mark, capfd):
    with PS.local(servers=3, silent_s=4.0) as ps:
        w = ps.namespace("w", keys=KEYS)
        ones = np.ones(KEYS, np.float32)
        w.push(ones).result()
        stopped = ps.local_servers.processes[1]
        stopped.send_signal(signal.SIGSTOP)
        pushed = [w.push(ones) for _ in range(20)]
        wait_until(lambda: ps.servers == [0, 2], "a ring without the paused server")
        for push in pushed:
            push.result()
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(DEADLINE_S) == 1
        assert w.pull().result().tolist() == [21.0] * KEYS
        assert ps.servers == [0, 2]
    errors = capfd.readouterr().err
    assert (
        "offbeat: server 1 is out of the cluster: server-1 was lost: nothing was received from it for 4"
        in errors
    )


def test_a_killed_server_is_no_longer_reported_as_unreachable(mark, tmp_path):
    log = tmp_path / "log"

    def wait_for_report(kind):
        wait_for_entry(
            log,
            f"a client's {kind.__name__}",
            lambda entry: isinstance(entry, kind) and entry.node.startswith("client-"),
        )

    with PS.local(servers=3, silent_s=1000.0, run_log=str(log)) as ps:
        ps.namespace("w", keys=KEYS).push(np.ones(KEYS, np.float32)).result()
        stopped = ps.local_servers.processes[1]
        stopped.send_signal(signal.SIGSTOP)
        wait_for_report(ServerUnreachable)
        stopped.kill()
        wait_for_report(ServerReachable)


def test_keys_without_a_living_server_raise_an_error_until_they_are_reset(mark):
    with PS.local(servers=2, replicas=1) as ps:
        w = ps.namespace("w", keys=KEYS)
        ones = np.ones(KEYS, np.float32)
        w.push(ones).result()
        for process in ps.local_servers.processes.values():
            process.kill()
        ps.local_servers.start(7)
        wait_until(lambda: ps.servers == [7], "a ring of the newcomer")
        with pytest.raises(LostKeysError, match=r"keys 0 to 19 of w are lost: .*, server [01] last"):
            w.pull().result()
        with pytest.raises(LostKeysError):
            w.push(ones).result()
        with PS(ps.cluster) as other, pytest.raises(offbeat.LostKeysError, match="keys 0 to 19 of w"):
            other.namespace("w", keys=KEYS).pull(keys=[3]).result()
        again = ps.namespace("w", keys=KEYS, on_loss="reset")
        assert again.pull().result().tolist() == [0.0] * KEYS
        w.push(ones).result()
        assert w.pull().result().tolist() == [1.0] * KEYS


@pytest.mark.long
def test_a_request_that_times_out_names_only_the_server_that_has_not_answered(mark):
    with PS.local(servers=3, replicas=0) as ps:
        w = ps.namespace("w", keys=KEYS, block_keys=1)
        w.push(np.ones(KEYS, np.float32)).result()
        ps.local_servers.processes[1].send_signal(signal.SIGSTOP)
        pull = w.pull()

        def only_server_1_is_named():
            with pytest.raises(OffbeatError, match=r"not done after 0\.1 s: server.* not answered$") as late:
                pull.result(timeout_s=0.1)
            return str(late.value).endswith(": server 1 has not answered")

        wait_until(only_server_1_is_named, "the answers of servers 0 and 2")


@pytest.mark.long
def test_a_client_logs_the_outage_of_a_server_and_its_end(mark, caplog):
    with PS.local(servers=3, replicas=0) as ps:
        w = ps.namespace("w", keys=KEYS, block_keys=1)
        w.push(np.ones(KEYS, np.float32)).result()
        server = ps.local_servers.processes[1]
        server.send_signal(signal.SIGSTOP)
        cannot = "cannot reach server-1: nothing was received from it for 1.25 s; it keeps trying"
        wait_until(lambda: any(cannot in line for line in caplog.messages), "the line about the outage")
        server.send_signal(signal.SIGCONT)
        again = "can reach server-1 again"
        wait_until(lambda: any(again in line for line in caplog.messages), "the line about its end")


@pytest.mark.parametrize("silent_s", [2.0, -1.0, float("nan")])
def test_a_silence_limit_below_two_heartbeats_is_rejected(silent_s):
    with pytest.raises(ValueError, match="expected silent_s to be more than 2 s, got"):
        PS.local(silent_s=silent_s)


def test_a_killed_manager_loses_no_request_and_its_successor_accepts_new_nodes(mark):
    with PS.local(servers=2) as ps:
        w = ps.namespace("w", keys=KEYS)
        ones = np.ones(KEYS, np.float32)
        pushed, killed = [], set()
        for time in range(3):
            pid = coordinator(mark)[0]
            assert pid not in killed
            killed.add(pid)
            pushed += [w.push(ones) for _ in range(10)]
            os.kill(pid, signal.SIGKILL)
            pushed += [w.push(ones) for _ in range(10)]
            ps.namespace(f"v{time}", keys=time + 1).push([1.0]).result()
            wait_until(lambda: coordinator(mark)[0] not in killed, "another manager")
        os.kill(coordinator(mark)[0], signal.SIGKILL)
        ps.local_servers.start(7)
        ps.wait_for_servers(3)
        for push in pushed:
            push.result()
        assert w.pull().result().tolist() == [60.0] * KEYS
        with PS(ps.cluster) as other:
            assert other.namespace("w", keys=KEYS).pull().result().tolist() == [60.0] * KEYS


PUSHES = """
import sys
import msgspec
from offbeat.runtime.ps.node import ClusterFile
from offbeat.runtime.ps.client import PS
ps = PS(msgspec.json.decode(sys.argv[1], type=ClusterFile))
w = ps.namespace("w", keys=20)
waiting = []
for number in range(1, 10**6):
    waiting.append(w.push([float(number)] * 20))
    if len(waiting) == 8:
        waiting.pop(0).result()
        print(number - 7, flush=True)
"""


def test_acknowledged_pushes_of_a_killed_client_survive_and_other_clients_continue(mark, tmp_path):
    log = tmp_path / "log"
    with PS.local(servers=2, run_log=str(log)) as ps:
        w = ps.namespace("w", keys=KEYS, update=None)
        cluster = msgspec.json.encode(ps.cluster).decode()
        with subprocess.Popen([sys.executable, "-c", PUSHES, cluster], stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            for _ in range(30):
                done = int(client.stdout.readline())
            client.kill()
            done = max([done, *map(int, client.stdout.read().split())])
        sums = {count * (count + 1) / 2 for count in range(done, done + 9)}
        found = w.pull().result()
        assert set(found.tolist()) <= sums
        wait_for_entry(log, "the loss of a client", lambda entry: isinstance(entry, NodeLost))
        found = w.pull().result()
        w.push(np.ones(KEYS, np.float32)).result()
        assert w.pull().result().tolist() == (found + 1).tolist()


def test_a_server_keeps_a_clients_session_until_the_manager_reports_the_client_lost(mark, recording_node):
    """However long their connection is broken: the next connection has to continue the session."""
    cluster = start_manager(1, host="127.0.0.1")
    server, client = recording_node("server-0", cluster), recording_node(f"client-{EVIL}", cluster)
    server.node.join()
    client.node.join()
    client.view()
    client.send_message("server-0", pull())
    assert isinstance(server.messages.get(timeout=DEADLINE_S), Pull)
    kept: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def lose() -> None:
        server.node._on_lost(LinkError(client.node.name, "by hand"))
        kept.put(client.node.name in server.node.messenger._peers)

    server.node.endpoint.call_soon(lose)
    assert kept.get(timeout=DEADLINE_S)
    client.node.close()
    wait_until(lambda: client.node.name not in server.node.messenger._peers, "that the client is forgotten")


# A hostile client

EVIL = 666
ROWS = np.ones(4, np.float32)


def push(content: Any, **different: Any) -> Push:
    fields = {
        "client": EVIL,
        "request": 1,
        "epoch": 2,
        "namespace": "w",
        "first": 0,
        "last": 4,
        "time": 1,
        "previous_times": (),
        "content": content,
    }
    return Push(**(fields | different))


def pull(keys: Any = None, **different: Any) -> Pull:
    fields = {"client": EVIL, "request": 1, "epoch": 2, "namespace": "w", "first": 0, "last": 4, "keys": keys}
    return Pull(**(fields | different))


def listed(*keys: Any, dtype: Any = np.int64) -> Entries:
    return Entries(0, np.ones(len(keys), np.float32), np.array(keys, dtype))


def with_meta(*fields: Any) -> Entries:
    return Entries(0, ROWS, None, PushMeta(*fields))


OPERATION = Operation(
    namespace="w",
    first=0,
    last=4,
    stamps=(PushStamp(client=1, time=9, previous_times=()),),
    content=Entries(0, ROWS),
)
HOSTILE: dict[str, Any] = {
    "rows of another type": push(Entries(0, ROWS.astype(np.float64))),
    "rows of whole numbers": push(Entries(0, ROWS.astype(np.int32))),
    "rows that are too wide": push(Entries(0, np.ones((4, 2), np.float32))),
    "too few rows": push(Entries(0, ROWS[:3])),
    "rows of other keys": push(Entries(1, ROWS)),
    "large rows of another type": push(Entries(0, np.ones(10**5))),
    "keys that are too large": push(listed(1, 2, 4)),
    "keys that are too small": push(listed(-1, 2)),
    "keys that do not ascend": push(listed(2, 1)),
    "a key twice": push(listed(1, 1)),
    "keys that are no whole numbers": push(listed(1, 2, dtype=np.float64)),
    "keys in two dimensions": push(listed([1, 2], [2, 3])),
    "more keys than rows": push(Entries(0, ROWS[:1], np.array([1, 2]))),
    "no entries": push(None),
    "a text": push("rows"),
    "an array without keys": push(ROWS),
    "an unknown namespace": push(Entries(0, ROWS), namespace="x"),
    "a weight below 0": push(with_meta(-1.0)),
    "a weight that is no number": push(with_meta(float("nan"))),
    "settings that the update has not": push(with_meta(1.0, {"lr": 1.0})),
    "states of other keys": push(with_meta(1.0, None, {"mean": ROWS[:3]})),
    "states of another type": push(with_meta(1.0, None, {"mean": ROWS.astype(np.float64)})),
    "a range below": push(Entries(-1, ROWS), first=-1, last=3),
    "a range beyond": push(Entries(KEYS - 3, ROWS), first=KEYS - 3, last=KEYS + 1),
    "an empty range": push(Entries(2, ROWS[:0]), first=2, last=2),
    "a range backwards": push(Entries(2, ROWS), first=3, last=2),
    "a range of several masters": push(Entries(0, np.ones(KEYS, np.float32)), last=KEYS),
    "another client's push": push(Entries(0, ROWS), client=EVIL + 1),
    "another client's pull": pull(client=-EVIL),
    "a pull of nonsense": pull("keys"),
    "a pull of keys that do not ascend": pull(np.array([2, 1])),
    "a pull of keys that are too large": pull(np.array([2, 2**62])),
    "a pull of keys that are no whole numbers": pull(np.array([1.0, 2.0])),
    "a pull from an unknown namespace": pull(namespace="x"),
    "a copy": Replicate(view=1, master=0, serial=1, operation=OPERATION, route=()),
    "an acknowledged copy": ReplicateAck(view=1, master=0, serial=1),
    "operations of another view": HandoffOperations(view=1, chain=(0,), operations=(OPERATION,)),
    "the end of them": HandoffReplayed(view=1, chain=(0,), holder=0),
    "a wish to be filled": TransferRequest(view=1, present_blocks=()),
    "a block": TransferChunk(
        view=1,
        namespace="w",
        block=0,
        content={"values": ROWS},
        clocks={1: [ClockRange(0, 4, 9)]},
        pending=(),
    ),
    "an acknowledged block": TransferAck(view=1),
    "the end of the blocks": TransferDone(view=1),
}


FILTERS = (
    FilterSpec("KeyCaching", {"entries": 4}),
    FilterSpec("FixedPoint", {"bytes_per_value": 1}),
    FilterSpec("Compression", {"size_bytes_max": 2**20}),
)
BOMB = (
    FilterChain([FILTERS[-1].build(0)])
    .encode(FilterMessage.from_entries("f", 0, 2**17, Entries(0, np.ones(2**17))))
    .body
)
SIGNED = {"key caching": {"signature": b"0" * 16}}


def made_by_filters(**different: Any) -> EncodedValues:
    """Four rows as encoded by the filters, with these fields replaced."""
    chain = FilterChain([spec.build(0) for spec in FILTERS])
    message = chain.encode(FilterMessage.from_entries("f", 0, 4, Entries(0, ROWS, np.arange(4))))
    fields = {"keys": message.keys, "values": None, "body": message.body, "notes": dict(message.notes)}
    return EncodedValues(**(fields | different))


def noted(name: str, **different: Any) -> EncodedValues:
    """Four rows as encoded by the filters, with these entries in the notes of one filter."""
    good = made_by_filters()
    return made_by_filters(notes={**good.notes, name: {**good.notes.get(name, {}), **different}})


ENCODED: dict[str, EncodedValues] = {
    "nothing at all": EncodedValues(None, None, None, {}),
    "values without notes": EncodedValues(None, ROWS, None, {}),
    "notes alone": made_by_filters(keys=None, body=None),
    "no notes": made_by_filters(notes={}),
    "notes of another filter": noted("random skip", probability=0.5),
    "unknown keys": made_by_filters(keys=None, notes={**made_by_filters().notes, **SIGNED}),
    "keys of another signature": made_by_filters(keys=np.arange(1, 5)),
    "keys beyond the range": made_by_filters(keys=np.arange(2**60, 2**60 + 4)),
    "keys that are floats": made_by_filters(keys=np.arange(4.0)),
    "keys in rows": made_by_filters(keys=np.zeros((2, 2), np.int64)),
    "fewer keys": made_by_filters(keys=np.arange(3)),
    "a signature that is none": noted("key caching", signature=b"short"),
    "a signature that is a text": noted("key caching", signature="0" * 16),
    "no zstd": made_by_filters(body=b"garbage"),
    "an end that is missing": made_by_filters(body=made_by_filters().body[:-4]),
    "a bomb": made_by_filters(body=BOMB),
    "an algorithm that no node has": noted("compression", algorithm="lz4"),
    "more rows than there are": noted("compression", shape=[2**20, 1]),
    "more than is unpacked": noted("compression", shape=[2**62, 2**62]),
    "a shape that is none": noted("compression", shape=[-4, 1]),
    "a type that is none": noted("compression", dtype="object"),
    "floats where bytes are due": noted("compression", dtype="float32", shape=[1]),
    "no range": noted("fixed point", low=1.0, high=0.0),
    "a range without end": noted("fixed point", low=-1e308, high=1e308),
    "a range that is no number": noted("fixed point", low=float("nan")),
    "a negative width": noted("fixed point", width=-1),
    "rows of another type": noted("fixed point", dtype="float64"),
    "a width that is too large": noted("fixed point", width=2**62),
}
NOT_READ: dict[str, EncodedValues] = {
    "keys as a text": made_by_filters(keys="keys"),
    "values as a list": made_by_filters(values=[1, 2]),
    "values in values": made_by_filters(values=made_by_filters()),
    "a shape of lists": noted("compression", shape=[[4], [1]]),
}
OF_KEYS = (
    "unknown keys",
    "keys of another signature",
    "fewer keys",
    "a signature that is none",
    "a signature that is a text",
)
HOSTILE |= {
    f"{what}, pushed": push(content, namespace="f")
    for what, content in ENCODED.items()
    if what != "values without notes"
}
HOSTILE |= {
    f"{what}, without filters": push(content)
    for what, content in ENCODED.items()
    if what != "values without notes"
}
HOSTILE |= {f"{what}, pulled": pull(ENCODED[what], namespace="f") for what in OF_KEYS}
HOSTILE |= {
    "filters in an unknown namespace": push(made_by_filters(), namespace="x"),
    "filters in a pull without them": pull(made_by_filters()),
    "filters in a copy": Replicate(
        view=2,
        master=0,
        serial=1,
        operation=replace(OPERATION, namespace="f", content=made_by_filters()),
        route=(),
    ),
}


def test_a_node_with_an_invalid_name_cannot_send_messages_of_a_server(mark, recording_node):
    with PS.local(servers=1) as ps:
        w = ps.namespace("w", keys=KEYS)
        evil = recording_node("server-evil", ps.cluster)
        evil.node.endpoint.add_peer("server-0", server_addresses(ps), has_fixed_addresses=True)
        evil.send_message("server-0", TransferRequest(view=1, present_blocks=()))
        evil.send_message("server-0", pull())
        evil.node.join()
        assert "expected a name such as server-3 or client-7, got server-evil" in evil.gone.get(
            timeout=DEADLINE_S
        )
        w.push(np.ones(KEYS, np.float32)).result()
        assert w.pull().result().tolist() == [1.0] * KEYS


def server_addresses(ps: PS) -> tuple[str, ...]:
    return ps._node._addresses["server-0"]


def test_a_hostile_client_changes_no_values_and_affects_no_other_client(mark, recording_node):
    """After each hostile message the client pulls; the answer shows that the message was processed."""
    with PS.local(servers=2) as ps:
        w = ps.namespace("w", keys=KEYS, block_keys=4)
        values = np.arange(KEYS, dtype=np.float32)
        w.push(values).result()
        f = ps.namespace("f", keys=KEYS, block_keys=4, push_filters=FILTERS, pull_filters=FILTERS[::2])
        f.push(values[4:8], first=4).result()
        rows = f.pull().result().tolist()
        evil = recording_node(f"client-{EVIL}", ps.cluster)
        evil.node.join()
        view = evil.view()
        assert view.epoch == 2
        assert view.version == 2
        for number, (what, message) in enumerate(HOSTILE.items(), 2):
            for server in (0, 1):
                evil.send_message(f"server-{server}", message)
            master = f"server-{view.ring.holders(view.spaces['w'], 0)[0]}"
            evil.send_message(master, pull(request=number))
            answer = evil.answer_to(number)
            assert isinstance(answer, PullResult), what
            assert answer.content.values.tolist() == values[:4].tolist(), what
            assert w.pull().result().tolist() == values.tolist(), what
            assert f.pull(keys=np.arange(KEYS)).result().tolist() == rows, what
        w.push(values).result()
        ps.local_servers.processes[int(master[7:])].kill()  # the replicas are unchanged, too
        wait_until(lambda: len(ps.servers) == 1, "a ring of the other server")
        assert w.pull().result().tolist() == (2 * values).tolist()
        assert f.pull().result().tolist() == rows
        assert evil.gone.empty()


def broken(node: PsNode) -> int:
    """The number of broken connections to the first server."""
    known = node.messenger._peers.get("server-0")
    return 0 if known is None else known.connection


def test_an_undecodable_message_loses_only_its_sender(mark, recording_node):
    with PS.local(servers=1) as ps:
        f = ps.namespace("f", keys=KEYS, push_filters=FILTERS, pull_filters=FILTERS[::2])
        f.push(np.ones(KEYS)).result()
        for client, (what, content) in enumerate(NOT_READ.items(), EVIL):
            evil = recording_node(f"client-{client}", ps.cluster)
            evil.node.join()
            evil.view()
            evil.send_message("server-0", push(content, client=client, namespace="f"))
            wait_until(lambda evil=evil: broken(evil.node), f"the loss of the client that sent {what}")
            assert f.pull().result().tolist() == [1.0] * KEYS, what
            assert evil.messages.empty()
            evil.node.endpoint.close()
        assert not broken(ps._node)


@pytest.fixture
def cluster(mark) -> ClusterFile:
    return start_manager(1, host="127.0.0.1")


@pytest.fixture
def server(cluster) -> Iterator[ServerProcess]:
    """The only server of its cluster, in this process."""
    server = ServerProcess(ServerConfiguration(cluster=cluster, host="127.0.0.1", server=0))
    yield server
    server._node.close()


def test_a_server_that_is_out_of_the_cluster_ends_with_the_cause(server, cluster, recording_node):
    """The manager refuses a second server with the id of one that has left."""
    client = recording_node("client-1", cluster)  # without any node the manager ends
    client.node.join()
    client.view()
    server._node.close()
    returned = ServerProcess(ServerConfiguration(cluster=cluster, host="127.0.0.1", server=0))
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(returned.serve)
        try:
            with pytest.raises(OffbeatError) as ended:
                served.result(DEADLINE_S)
        finally:
            returned._on_close()  # ends a server that was not refused
    cause = "expected Joined or NodeJoined, once, as its first event, got NodeJoined from server-0"
    assert str(ended.value) == f"server 0 is out of the cluster: {cause}"


def test_encoded_messages_wait_for_the_announcement_of_their_namespace(server, cluster, recording_node):
    """A client may receive the announcement of a namespace before a server does."""
    with PS(cluster) as ps:
        early = recording_node("client-1", ps.cluster)
        early.node.join()
        number = early.view().version
        then = {"client": 1, "epoch": number + 1, "namespace": "f"}
        early.send_message("server-0", push(made_by_filters(), request=1, **then))
        early.send_message("server-0", push(made_by_filters(keys=None), request=2, time=2, **then))
        early.send_message("server-0", push(made_by_filters(body=b"garbage"), request=3, time=3, **then))
        early.send_message("server-0", pull(None, request=4, **then))
        wait_until(
            lambda: len(server._early_messages.get("client-1", ())) == 4, "messages that wait for a namespace"
        )
        f = ps.namespace("f", keys=KEYS, push_filters=FILTERS)
        answers = [early.messages.get(timeout=DEADLINE_S) for _ in range(4)]
        assert [(type(one), one.request) for one in answers] == [
            (PushAck, 1),
            (PushAck, 2),
            (Rejected, 3),
            (PullResult, 4),
        ]
        assert "zstd" in answers[2].reason
        assert answers[3].content.values.tolist() == [2.0] * 4
        assert f.pull().result().tolist() == [2.0] * 4 + [0.0] * (KEYS - 4)
        assert not server._early_messages
        assert not broken(early.node)
