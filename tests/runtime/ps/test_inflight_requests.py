"""Requests in flight between a client and a parameter server: bounded in bytes, without deadlock."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

import offbeat
from offbeat.errors import OffbeatError
from offbeat.numerics.ps.updates import Assign
from offbeat.runtime.ps.cluster import start_manager, start_server
from offbeat.runtime.ps.inflight_window import REQUEST_BYTES
from offbeat.runtime.ps.server import ServerConfiguration, ServerProcess
from support.run_logs import wait_until

COUNT = 25_000  # elements of a push
SMALL = np.ones(COUNT, np.float32)
SMALL_BYTES = SMALL.nbytes + REQUEST_BYTES
JOIN_S = 60.0


@pytest.fixture
def name(request):
    return request.node.name


@pytest.fixture(scope="module")
def ps():
    """A client that may have ten small requests in flight."""
    with offbeat.PS.local(servers=2) as ps:
        bound(ps, 10 * SMALL_BYTES)
        yield ps


@pytest.fixture
def stopped():
    """A client of one server, which is paused once the namespace exists."""
    with offbeat.PS.local(servers=1, silent_s=600.0) as ps:
        bound(ps, 10 * SMALL_BYTES)
        w = ps.namespace("w", keys=40 * COUNT)
        stop(ps.local_servers.processes[0])
        yield ps, w


def bound(ps, bytes_max):
    ps._requests._pushed.bytes_max = ps._requests._pulled.bytes_max = bytes_max


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # the process may have run a little longer


class RequestThread:
    """A thread that makes requests without waiting for them.

    Attributes:
        made: the futures of those whose calls have returned.
        error: the error that a call raised.
    """

    def __init__(self, *requests):
        self.made, self.error = [], None
        self._requests = requests
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self):
        try:
            for request in self._requests:
                self.made.append(request())
        except OffbeatError as error:
            self.error = error

    def end(self):
        """Waits until all requests are made and done; raises their error."""
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), f"only {len(self.made)} requests were made"
        if self.error is not None:
            raise self.error
        for one in self.made:
            one.result()


def held_back(ps, window, *requests):
    """Starts a thread that makes these requests; returns it once it waits for room."""
    asking = RequestThread(*requests)
    wait_until(lambda: getattr(ps._requests, window).has_held, "a request that waits for room")
    return asking


# The bound ----------------------------------------------------------------------------------------------


@pytest.mark.long(after=1)
@pytest.mark.parametrize("count", [COUNT, 10 * COUNT, 4 * COUNT], ids=["small", "large", "between"])
def test_pushes_without_waiting_are_held_back_at_the_bound_in_bytes(stopped, count):
    ps, w = stopped
    size_bytes = 4 * count + REQUEST_BYTES
    bound(ps, 40 * SMALL_BYTES)
    asking = held_back(ps, "_pushed", *[lambda: w.push(np.ones(count))] * 60)
    may_be = 40 * SMALL_BYTES // size_bytes
    assert len(asking.made) == may_be
    assert ps._requests._pushed.unacked_bytes == may_be * size_bytes
    ps.local_servers.processes[0].send_signal(signal.SIGCONT)
    asking.end()
    assert w.pull().result().sum() == 60 * count
    assert ps._requests._pushed.unacked_bytes == 0


@pytest.mark.long
def test_pushes_of_16_mb_wait_beyond_128_mib(name):
    with offbeat.PS.local(servers=1, silent_s=600.0) as ps:
        w = ps.namespace(name, keys=4_000_000)
        stop(ps.local_servers.processes[0])
        values = np.ones(4_000_000, np.float32)
        asking = held_back(ps, "_pushed", *[lambda: w.push(values)] * 400)
        assert len(asking.made) == 8


def test_the_bytes_in_flight_include_listed_keys_and_puts(stopped):
    ps, w = stopped
    w.push(SMALL, keys=np.arange(COUNT))
    listed_bytes = 3 * SMALL.nbytes + REQUEST_BYTES
    assert ps._requests._pushed.unacked_bytes == listed_bytes
    w.put(SMALL, states={})
    assert ps._requests._pushed.unacked_bytes == listed_bytes + SMALL_BYTES


def test_pulls_without_waiting_are_held_back_at_the_bound_in_bytes(stopped):
    ps, w = stopped
    asking = held_back(ps, "_pulled", *[lambda: w.pull(last=2 * COUNT)] * 20)
    assert len(asking.made) == 10 * SMALL_BYTES // (8 * COUNT + REQUEST_BYTES)
    assert w.push(SMALL) is not None  # pushes have room of their own
    ps.local_servers.processes[0].send_signal(signal.SIGCONT)
    asking.end()


def test_a_push_larger_than_the_bound_is_sent_alone(stopped):
    ps, w = stopped
    large = w.push(np.ones(20 * COUNT))
    asking = held_back(ps, "_pushed", lambda: w.push(SMALL))
    assert asking.made == []
    ps.local_servers.processes[0].send_signal(signal.SIGCONT)
    asking.end()
    assert large.is_done


def test_a_master_keeps_at_most_the_bound_when_a_replica_does_not_answer():
    cluster = start_manager(2, host="127.0.0.1", replicas=1, silent_s=600.0)
    with contextlib.ExitStack() as stack:
        replica = start_server(ServerConfiguration(cluster=cluster, host="127.0.0.1", server=1))
        stack.callback(replica.wait)
        stack.callback(replica.kill)
        master = ServerProcess(ServerConfiguration(cluster=cluster, host="127.0.0.1", server=0))
        stack.callback(master._node.close)
        ps = stack.enter_context(offbeat.PS(cluster, host="127.0.0.1"))
        bound(ps, 10 * SMALL_BYTES)
        w = of_master(ps, 0)
        stop(replica)
        asking = held_back(ps, "_pushed", *[lambda: w.push(SMALL)] * 60)
        wait_until(lambda: kept_bytes(master) == 10 * SMALL.nbytes, "all pushes on the master")
        assert len(asking.made) == 10
        replica.send_signal(signal.SIGCONT)
        asking.end()
        assert kept_bytes(master) == 0
        assert w.pull().result().sum() == 60 * COUNT


def of_master(ps, server):
    """A namespace of one block whose master is this server."""
    for number in range(100):
        w = ps.namespace(f"w{number}", keys=COUNT, block_keys=COUNT)
        (span,) = ps._cluster_state.latest.ring.spans(ps._cluster_state.space(w.name), 0, COUNT)
        if span.holders[0] == server:
            return w
    raise AssertionError("expected a namespace of each server")


def kept_bytes(server):
    """The bytes that a server keeps of pushes until its replicas have them."""
    found, is_found = [], threading.Event()

    def look():
        kept = server._core._unacked._in_flight.values()
        found.append(sum(one.operation.content.values.nbytes for one in kept))
        is_found.set()

    server._node.endpoint.call_soon(look)
    assert is_found.wait(JOIN_S)
    return found[0]


# End of a wait ------------------------------------------------------------------------------------------


@pytest.mark.long(after=1)
@pytest.mark.parametrize("what", ["push", "pull"])
def test_a_wait_for_room_that_times_out_names_the_server_that_has_not_answered_and_nothing_is_sent(what):
    with offbeat.PS.local(servers=2, replicas=0, silent_s=600.0) as ps:
        w = ps.namespace("w", keys=20 * COUNT)
        w.push(np.zeros(20 * COUNT)).result()
        stop(ps.local_servers.processes[0])
        bound(ps, SMALL_BYTES)
        ps._requests._room_timeout_s = 0.2
        ask = {"push": lambda: w.push(np.ones(20 * COUNT)), "pull": w.pull}[what]
        first = ask()
        wait_until(
            lambda: ps._requests._client.unanswered_servers("w", 0, w.keys) == [0], "server 1's answer"
        )
        text = rf"a {what} .* w was not sent: timed out after 0.2 s .* server 0 has not answered"
        with pytest.raises(OffbeatError, match=text) as raised:
            ask()
        assert "server 1" not in str(raised.value)
        ps.local_servers.processes[0].send_signal(signal.SIGCONT)
        first.result()
        ps._requests._room_timeout_s = JOIN_S
        assert (w.pull().result() == (what == "push")).all()


def test_a_wait_for_room_ends_when_the_client_is_closed(stopped):
    ps, w = stopped
    asking = held_back(ps, "_pushed", *[lambda: w.push(SMALL)] * 60)
    ps._requests.close()
    with pytest.raises(OffbeatError, match="this client was closed"):
        asking.end()


# No deadlock --------------------------------------------------------------------------------------------


def test_clients_that_push_to_sums_in_any_order_do_not_wait_for_each_other(ps, name):
    with offbeat.PS(ps.cluster) as other:
        bound(other, 10 * SMALL_BYTES)
        spaces = [
            [one.namespace(f"{name} {which}", keys=20 * COUNT, aggregate="sum") for which in "ab"]
            for one in (ps, other)
        ]
        for space in (*spaces[0], *spaces[1]):
            space.join_aggregation()
        values = np.ones(20 * COUNT)
        one = RequestThread(
            *[lambda space=space: space.push(values) for _ in range(3) for space in spaces[0]]
        )
        two = RequestThread(
            *[lambda space=space: space.push(values) for _ in range(3) for space in spaces[1][::-1]]
        )
        one.end()
        two.end()
        assert [space.pull().result()[0] for space in spaces[0]] == [6, 6]
        for space in (*spaces[0], *spaces[1]):
            space.leave_aggregation()


def test_a_push_that_waits_for_other_clients_does_not_block_other_namespaces(ps, name):
    with offbeat.PS(ps.cluster) as other:
        summed = [one.namespace(f"{name} sum", keys=20 * COUNT, aggregate="sum") for one in (ps, other)]
        for space in summed:
            space.join_aggregation()
        w = ps.namespace(name, keys=COUNT)
        waits = summed[0].push(np.ones(20 * COUNT))
        for _ in range(20):
            w.push(SMALL)
        assert w.pull().result()[0] == 20
        assert not waits.is_done
        summed[1].push(np.ones(20 * COUNT)).result()
        waits.result()
        for space in summed:
            space.leave_aggregation()


def test_pushes_of_a_later_iteration_take_no_room_from_earlier_iterations(ps, name):
    w = ps.namespace(name, keys=COUNT)
    is_open, may_push = threading.Event(), threading.Event()

    def first():
        with ps.iteration():
            is_open.set()
            assert may_push.wait(JOIN_S)
            for _ in range(30):
                pushed = w.push(SMALL)
        return pushed

    ps.tau = 0
    try:
        asking = RequestThread(first)
        assert is_open.wait(JOIN_S)
        with ps.iteration():
            later = [w.push(SMALL) for _ in range(30)]
        assert not any(one.is_done for one in later)
        may_push.set()
        asking.end()
        for one in later:
            one.result()
    finally:
        ps.tau = None
    assert w.pull().result()[0] == 60


def test_pushes_of_a_callback_do_not_wait_and_keep_their_order(ps, name):
    w = ps.namespace(name, keys=4 * COUNT, update=Assign())
    sizes = [4, 1, 3, 2, 4, 1]

    def push():
        return [w.push(np.full(size * COUNT, float(number))) for number, size in enumerate(sizes * 10)]

    for one in ps.when_done([], push).result():
        one.result()
    last = [max(at for at, size in enumerate(sizes * 10) if size > block) for block in range(4)]
    assert w.pull().result()[::COUNT].tolist() == last


def test_pushes_with_may_wait_false_are_queued_and_sent_in_the_order_of_their_times(stopped):
    ps, w = stopped
    sizes = [8, 1, 3, 1] * 5
    pushes = [w.push(np.ones(n * COUNT), time=at, may_wait=False) for at, n in enumerate(sizes, 1)]
    assert ps._requests._pushed.unacked_bytes <= 10 * SMALL_BYTES
    ps.local_servers.processes[0].send_signal(signal.SIGCONT)
    for one in pushes:
        one.result()
    assert w.pull().result()[0] == len(sizes)


@pytest.mark.long
def test_threads_that_push_and_pull_more_than_the_bound_all_finish(ps, name):
    w = ps.namespace(name, keys=8 * COUNT)

    def work(thread):
        def step():
            pushed = w.push(SMALL, first=(thread % 4) * COUNT)
            w.push(np.ones(8 * COUNT), after=[pushed])
            return w.pull(after=[pushed])

        return [step] * 20

    threads = [RequestThread(*work(number)) for number in range(6)]
    for one in threads:
        one.end()
    assert w.push([0.0]).result() is None
    ps.when_done([w.push(np.zeros(8 * COUNT))]).result()
    wait_until(lambda: ps._requests._pushed.unacked_bytes == 0, "all that was pushed is acknowledged")
    assert w.pull().result().sum() == 6 * 20 * 9 * COUNT
