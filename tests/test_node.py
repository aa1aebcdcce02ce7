"""Servers, clients and their manager as real processes: who is stopped, killed, kept out or hostile."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

import nodes
from jobs import MARK, coordinator, marked
from nodes import DEADLINE_S
from offbeat.errors import LinkError, OffbeatError
from offbeat.events import NodeLost
from offbeat.numerics.entries import Entries
from offbeat.policies.clocks import Piece
from offbeat.policies.parcels import (
    Chunk,
    ChunkTaken,
    Copied,
    Copy,
    Fetch,
    FillEnd,
    Handed,
    Mark,
    Operation,
    Pull,
    Pulled,
    Push,
    Resent,
    View,
)
from offbeat.runtime import node as node_module
from offbeat.runtime.cluster import start_cluster
from offbeat.runtime.node import Cluster, Node
from offbeat.runtime.ps import PS
from runlogs import wait_for_entry, wait_until

node = nodes.node  # the fixture
KEYS = 20


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Tells the processes of this test from all others; none of them outlives it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class ByHand:
    """A node that notes what it hears."""

    def __init__(self, name: str, cluster: Cluster, **options: Any) -> None:
        self.views: queue.SimpleQueue[View] = queue.SimpleQueue()
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.node = Node(
            name,
            cluster,
            host="127.0.0.1",
            on_view=self.views.put,
            on_message=lambda _, message: self.messages.put(message),
            on_gone=self.gone.put,
            **options,
        )

    def view(self) -> View:
        return self.views.get(timeout=DEADLINE_S)

    def answer_to(self, number: int) -> Any:
        """The answer to a request, with what else was said before it left out."""
        while (answer := self.messages.get(timeout=DEADLINE_S)).number != number:
            pass
        return answer

    def say(self, to: str, message: Any) -> None:
        self.node.endpoint.call(self.node.post.send, to, message)


@pytest.fixture
def by_hand() -> Iterator[Callable[..., ByHand]]:
    made: list[ByHand] = []

    def make(*args: Any, **options: Any) -> ByHand:
        made.append(ByHand(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.node.endpoint.close()


# Coming


def test_nobody_is_there_before_it_joins(mark, by_hand):
    """So whatever is called back finds the node made."""
    cluster = start_cluster(1, host="127.0.0.1")
    early, late = by_hand("server-0", cluster), by_hand("server-1", cluster)
    late.node.join()
    assert late.view().ring.servers == (1,)
    assert early.views.empty()
    early.node.join()
    view = late.view()
    assert view.target is not None
    assert view.target.servers == (0, 1)


def test_a_wrong_token_is_told_in_one_line(mark):
    cluster = start_cluster(1, host="127.0.0.1")
    with pytest.raises(OffbeatError, match="token") as caught:
        PS(msgspec.structs.replace(cluster, token="a guess"))
    assert "\n" not in str(caught.value)
    assert "coordinator" in str(caught.value)


def test_a_cluster_whose_servers_do_not_all_come_says_so_in_time(mark, by_hand):
    cluster = start_cluster(2, host="127.0.0.1")
    by_hand("server-0", cluster).node.join()
    with pytest.raises(OffbeatError, match=r"waited 0.5 s for all servers that it is to begin with"):
        PS(cluster, start_s=0.5)


# Stopped and killed


def test_a_server_that_was_stopped_is_lost_nothing_is_and_it_hears_that_it_is_out(mark, capfd):
    with PS.local(servers=3) as ps:
        w = ps.namespace("w", keys=KEYS)
        ones = np.ones(KEYS, np.float32)
        w.push(ones).result()
        stopped = ps.local_servers.processes[1]
        stopped.send_signal(signal.SIGSTOP)
        pushed = [w.push(ones) for _ in range(20)]
        wait_until(lambda: ps.servers == [0, 2], "a ring without who was stopped")
        for push in pushed:
            push.result()
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(DEADLINE_S) == 1
        assert w.pull().result().tolist() == [21.0] * KEYS
        assert ps.servers == [0, 2]
    said = capfd.readouterr().err
    assert "offbeat: server 1 is out of the cluster: server-1 was lost: server-1 has been silent" in said


def test_a_manager_that_is_killed_costs_no_request_and_takes_in_who_comes(mark):
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
from offbeat.runtime.node import Cluster
from offbeat.runtime.ps import PS
ps = PS(msgspec.json.decode(sys.argv[1], type=Cluster))
w = ps.namespace("w", keys=20)
waiting = []
for number in range(1, 10**6):
    waiting.append(w.push([float(number)] * 20))
    if len(waiting) == 8:
        waiting.pop(0).result()
        print(number - 7, flush=True)
"""


def test_what_a_killed_client_was_told_is_done_is_there_and_others_go_on(mark, tmp_path):
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


def test_a_client_that_comes_back_is_not_forgotten_for_an_earlier_loss(mark, by_hand, node):
    """What it missed of the time for which a lost client is kept does not count when it is lost again."""
    server = by_hand("server-0", start_cluster(1, host="127.0.0.1"))
    server.node.join()
    endpoint = server.node.endpoint
    kept_s, node_module._GONE_CLIENT_S = node_module._GONE_CLIENT_S, 0.2
    over = threading.Event()

    def lose_twice():
        server.node._lost(LinkError("client-1", "the first time"))
        server.node._hear("client-1", msgspec.msgpack.encode([0, 0, 0, 0, 0, []]))
        node_module._GONE_CLIENT_S = kept_s
        server.node._lost(LinkError("client-1", "the second time"))
        endpoint.later(0.3, over.set)

    try:
        endpoint.call(lose_twice)
        assert over.wait(DEADLINE_S)
        assert "client-1" in server.node.post._known
    finally:
        node_module._GONE_CLIENT_S = kept_s


# A client that means harm

EVIL = 666
ROWS = np.ones(4, np.float32)


def push(content: Any, **different: Any) -> Push:
    fields = {
        "client": EVIL,
        "number": 1,
        "epoch": 1,
        "namespace": "w",
        "first": 0,
        "last": 4,
        "time": 1,
        "after": (),
        "content": content,
    }
    return Push(**(fields | different))


def pull(keys: Any = None, **different: Any) -> Pull:
    fields = {"client": EVIL, "number": 1, "epoch": 1, "namespace": "w", "first": 0, "last": 4, "keys": keys}
    return Pull(**(fields | different))


def listed(*keys: Any, dtype: Any = np.int64) -> Entries:
    return Entries(0, np.ones(len(keys), np.float32), np.array(keys, dtype))


OPERATION = Operation(
    namespace="w", first=0, last=4, marks=(Mark(client=1, time=9, after=()),), content=Entries(0, ROWS)
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
    "a copy": Copy(view=1, master=0, serial=1, operation=OPERATION, route=()),
    "a copy that has come": Copied(view=1, master=0, serial=1),
    "operations of another view": Handed(view=1, chain=(0,), operations=(OPERATION,)),
    "the end of them": Resent(view=1, chain=(0,), of=0),
    "a wish to be filled": Fetch(view=1, have=()),
    "a block": Chunk(
        view=1, namespace="w", block=0, content={"values": ROWS}, clocks={1: [Piece(0, 4, 9)]}, pending=()
    ),
    "a block taken": ChunkTaken(view=1),
    "the end of the blocks": FillEnd(view=1),
}


def test_a_node_whose_name_is_no_servers_may_not_speak_as_one(mark, by_hand):
    with PS.local(servers=1) as ps:
        w = ps.namespace("w", keys=KEYS)
        evil = by_hand("server-evil", ps.cluster)
        evil.node.endpoint.introduce("server-0", server_addresses(ps), lasting=True)
        evil.say("server-0", Fetch(view=1, have=()))
        evil.say("server-0", pull())
        evil.node.join()
        assert "expected a name such as server-3, got server-evil" in evil.gone.get(timeout=DEADLINE_S)
        w.push(np.ones(KEYS, np.float32)).result()
        assert w.pull().result().tolist() == [1.0] * KEYS


def server_addresses(ps: PS) -> tuple[str, ...]:
    return ps._node._addresses["server-0"]


def test_a_hostile_client_changes_nothing_and_hurts_nobody_but_itself(mark, by_hand):
    """After each misdeed it asks for something, and is answered: what it sent before has been heard."""
    with PS.local(servers=2) as ps:
        w = ps.namespace("w", keys=KEYS, block_keys=4)
        values = np.arange(KEYS, dtype=np.float32)
        w.push(values).result()
        evil = by_hand(f"client-{EVIL}", ps.cluster)
        evil.node.join()
        view = evil.view()
        assert view.epoch == 1
        assert view.number == 1
        for number, (what, message) in enumerate(HOSTILE.items(), 2):
            for server in (0, 1):
                evil.say(f"server-{server}", message)
            master = f"server-{view.ring.holders(view.spaces['w'], 0)[0]}"
            evil.say(master, pull(number=number))
            answer = evil.answer_to(number)
            assert isinstance(answer, Pulled), what
            assert answer.content.values.tolist() == values[:4].tolist(), what
            assert w.pull().result().tolist() == values.tolist(), what
        w.push(values).result()
        ps.local_servers.processes[int(master[7:])].kill()  # what replicas have is as it was, too
        wait_until(lambda: len(ps.servers) == 1, "a ring of the other server")
        assert w.pull().result().tolist() == (2 * values).tolist()
        assert evil.gone.empty()
