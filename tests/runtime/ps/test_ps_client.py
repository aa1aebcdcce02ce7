"""Promises of a parameter server to the programs that use it, with real servers."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import offbeat
from offbeat.errors import OffbeatError
from offbeat.numerics.ps.block_proximal import BlockProximal
from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.spaces import FilterSpec, UserFunction
from offbeat.numerics.ps.updates import SGD, Adagrad, Assign
from offbeat.policies.ps.messages import Pull, PullResult, Rejected
from offbeat.runtime.transport.shared_memory import HAS_SHARED_MEMORY
from support.run_logs import wait_until

OFFBEAT = [sys.executable, "-m", "offbeat"]
MINE = "support.user_updates:Clipped"
PICKY, MEDDLER = "support.user_updates:Picky", "support.user_updates:Meddler"


@pytest.fixture(scope="module")
def ps():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [before])])
    try:
        with offbeat.PS.local(servers=2, functions=[MINE, PICKY, MEDDLER]) as ps:
            yield ps
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture
def name(request):
    return request.node.name


# Push and pull ------------------------------------------------------------------------------------------


def test_pushed_values_are_added_and_other_keys_are_zero(ps, name):
    w = ps.namespace(name, keys=1000)
    w.push([1.0, 2.0], keys=[3, 500])
    w.push(np.full(4, 10.0), first=2)
    w.push(torch.ones(1000)).result()
    expected = np.ones(1000, np.float32)
    expected[[3, 500]] += [1, 2]
    expected[2:6] += 10
    assert np.array_equal(w.pull().result(), expected)
    assert np.array_equal(w.pull(first=2, last=7).result(), expected[2:7])
    assert w.pull(keys=[3, 4, 999]).result().tolist() == [12, 11, 1]
    assert w.pull().result().dtype == np.float32


def test_keys_and_values_may_be_tensors(ps, name):
    w = ps.namespace(name, keys=10, dtype="float64")
    some = torch.tensor([3, 4])
    w.put(torch.ones(10, requires_grad=True)).result()
    w.push(torch.tensor([1.0, 2.0], requires_grad=True), keys=some).result()
    assert w.pull(keys=some).result().tolist() == [2, 3]
    assert w.pull(keys=some.to(torch.int32)).result().tolist() == [2, 3]
    for request in (lambda: w.pull(keys=some.float()), lambda: w.push(torch.ones(2), keys=some.float())):
        with pytest.raises(ValueError, match="expected integers as keys, got float32"):
            request()
    with pytest.raises(ValueError, match="expected values as an array or a tensor on the CPU"):
        w.push(torch.ones(2, dtype=torch.bfloat16), keys=some)


def test_rows_have_the_width_of_the_namespace(ps, name):
    w = ps.namespace(name, keys=50, width=3, dtype="float64")
    w.push([[1, 2, 3], [4, 5, 6]], keys=[7, 49]).result()
    assert w.pull(keys=[7, 8, 49]).result().tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 6]]
    assert w.pull().result().shape == (50, 3)
    assert w.pull(keys=[]).result().shape == (0, 3)
    assert w.push(np.zeros((0, 3)), keys=[]).result() is None


def test_an_empty_request_waits_for_its_dependencies_and_fails_with_them(ps, name):
    w = ps.namespace(name, keys=10)
    before = w.push(np.ones(10))
    assert w.pull(keys=[], after=[before]).result().shape == (0,)
    assert before.is_done

    def fail():
        raise ValueError("no")

    broken = ps.when_done([], fail)
    for future in (w.pull(keys=[], after=[broken]), w.push([], keys=[], after=[broken])):
        with pytest.raises(ValueError, match="no"):
            future.result()


def test_the_range_of_a_push_may_contain_unlisted_keys(ps, name):
    w = ps.namespace(name, keys=20, block_keys=3)
    w.push([1.0, 2.0], keys=[4, 8], first=2, last=15).result()
    w.push([], keys=[], first=2, last=15).result()
    w.push([3.0], first=5, last=6).result()
    assert np.flatnonzero(w.pull().result()).tolist() == [4, 5, 8]
    for keys, last in ([1, 8], 15), ([4, 8], 8):
        with pytest.raises(ValueError, match=f"expected keys from 2 to below {last}"):
            w.push([1.0, 2.0], keys=keys, first=2, last=last)
    with pytest.raises(ValueError, match="expected values of 3 keys, got 2"):
        w.push([1.0, 2.0], first=2, last=5)


def test_traffic_counts_sent_and_received_bytes(ps, name):
    w = ps.namespace(name, keys=100_000)
    before = ps.traffic_bytes
    w.push(np.ones(100_000)).result()
    pushed = ps.traffic_bytes
    w.pull().result()
    assert pushed - before > 400_000
    assert ps.traffic_bytes - pushed > 400_000


def test_arrays_larger_than_a_message_batch_arrive_whole(ps, name):
    rng = np.random.default_rng(0)
    w = ps.namespace(name, keys=3_000_000, block_keys=100_000)
    values = rng.standard_normal(3_000_000, np.float32)
    w.push(values)
    keys = np.flatnonzero(rng.random(3_000_000) < 0.2)
    w.push(values[keys], keys=keys).result()
    values[keys] *= 2
    assert np.array_equal(w.pull().result(), values)
    assert np.array_equal(w.pull(keys=keys).result(), values[keys])


def test_small_pushes_of_neighbouring_keys_are_sent_together_and_each_is_done(ps, name):
    w = ps.namespace(name, keys=64_000)
    w.push([1.0]).result()
    sent = ps._node.endpoint.frames_received
    ranges = [*range(0, 64_000, 100), *range(63_900, -100, -100)]
    pushes = [w.push(np.full(100, count), first=first) for count, first in enumerate(ranges)]
    w.push(np.ones(64_000), after=pushes).result()
    assert all(one.is_done for one in pushes)
    expected = np.ones(64_000, np.float32)
    for count, first in enumerate(ranges):
        expected[first : first + 100] += count
    expected[0] += 1
    assert np.array_equal(w.pull().result(), expected)
    assert ps._node.endpoint.frames_received - sent < len(ranges) / 2


@pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="memory is not shared on this system")
def test_merged_pushes_are_built_in_memory_that_a_server_on_this_host_reads(name):
    with offbeat.PS.local(servers=1) as own:
        w = own.namespace(name, keys=150_000)
        w.push([1.0]).result()  # the nodes know that they are on the same host
        for count in range(1, 4):  # later rounds reuse the memory
            parts = [np.full(50_000, 10.0**count, np.float32)] * 3
            pushes = own._requests.call_in_order(
                lambda parts=parts: [w.push(part, first=50_000 * i) for i, part in enumerate(parts)]
            )
            assert [one.result() for one in pushes] == [None] * 3
        expected = np.full(150_000, 1110.0, np.float32)
        expected[0] += 1
        assert np.array_equal(w.pull().result(), expected)
        staging = own._node.messenger._staging
        assert own._requests.call_in_order(lambda: (staging._free_slabs, staging._slabs_in_use)) == ([], {})


def test_a_pull_is_handled_after_earlier_pushes(ps, name):
    w = ps.namespace(name, keys=1000)
    for count in range(1, 50):
        pushes = [w.push(np.ones(10), first=first) for first in range(0, 1000, 10)]
        pulled = w.pull()
        w.push(np.zeros(10))
        assert (pulled.result() == count).all()
        assert all(one.result() is None for one in pushes)


def test_a_pull_after_a_push_is_sent_with_it(name):
    with offbeat.PS.local(servers=1) as own:
        w = own.namespace(name, keys=10)
        w.push(np.ones(10)).result()
        received = own._node.endpoint.frames_received
        for count in range(100):
            pushed = w.push(np.ones(10))
            assert w.pull(after=[pushed]).result().tolist() == [count + 2.0] * 10
            assert pushed.is_done
        assert own._node.endpoint.frames_received - received < 150  # one answer for both requests


@pytest.fixture(scope="module")
def alone():
    """A client of one server."""
    with offbeat.PS.local(servers=1) as own:
        yield own


def requests_of(ps, ask):
    """Calls a function, queues its requests at once; returns its result and the number of sent requests."""
    number = ps._requests.call_in_order(lambda: ps._requests._client._number)
    asked = ps._requests.call_in_order(ask)
    for one in (future for futures in asked for future in futures):
        with contextlib.suppress(OffbeatError):
            one.result()
    return asked, ps._requests._client._number - number


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 3, 0)], ids=str)
def test_small_pushes_return_the_rows_of_pulls_after_them(alone, name, order):
    w = alone.namespace(name, keys=40_000)
    w.push(np.arange(40_000)).result()

    def ask():
        pushes = [w.push(np.full(10_000, 1.0 + part), first=10_000 * part) for part in order]
        pulls = [
            w.pull(first=10_000 * part, last=10_000 * (part + 1), after=[push])
            for part, push in reversed([*zip(order, pushes, strict=True)])
        ]
        return pushes, pulls

    for count in range(1, 4):
        (pushes, pulls), sent = requests_of(alone, ask)
        assert sent == 1
        assert [one.result() for one in pushes] == [None] * 4
        for part, pull in zip(reversed(order), pulls, strict=True):
            expected = np.arange(10_000 * part, 10_000 * (part + 1)) + count * (1.0 + part)
            assert np.array_equal(pull.result(), expected)
            pull.result()[:] = -1  # the program owns these rows


@pytest.mark.parametrize("keys", [100_000, 3_000_000], ids=["one piece", "several"])
def test_each_large_push_returns_the_rows_of_the_pull_after_it(alone, name, keys):
    w = alone.namespace(name, keys=2 * keys)
    w.push(np.arange(2 * keys)).result()

    def ask():
        pushes, pulls = [], []
        for first in (0, keys):
            pushes.append(w.push(np.ones(keys), first=first))
            pulls.append(w.pull(first=first, last=first + keys, after=pushes[-1:]))
        return pushes, pulls

    for count in range(1, 4):
        (pushes, pulls), sent = requests_of(alone, ask)
        assert sent == 2
        assert [one.result() for one in pushes] == [None] * 2
        for first, pull in zip((0, keys), pulls, strict=True):
            assert np.array_equal(pull.result(), np.arange(first, first + keys) + count)
            pull.result()[:] = -1  # the program owns these rows


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([{"first": 0, "last": 10}, {"first": 0, "last": 10}], 3),
        ([{"first": 0, "last": 10}], 2),
        ([{"first": 0, "last": 10}, {"first": 10, "last": 20, "times": True}], 3),
        ([{"first": 0, "last": 10}, {"keys": range(10, 20)}], 3),
    ],
    ids=["the same twice", "some of it", "times, too", "listed keys"],
)
def test_pulls_that_pushes_cannot_answer_are_sent_separately(alone, name, wanted, expected):
    w = alone.namespace(name, keys=100)
    w.push(np.arange(100)).result()

    def ask():
        pushes = [w.push(np.ones(10), first=first) for first in (0, 10)]
        return pushes, [w.pull(**one, after=[pushes[one.get("first", 10) // 10]]) for one in wanted]

    (_, pulls), sent = requests_of(alone, ask)
    assert sent == expected
    for options, pull in zip(wanted, pulls, strict=True):
        rows = pull.result()[0] if "times" in options else pull.result()
        first = 10 if "keys" in options else options["first"]
        assert rows.tolist() == [1.0 + key for key in range(first, first + 10)]
        rows[:] = -1  # the program owns these rows


@pytest.mark.parametrize("is_after_it", [False, True])
def test_a_pull_sent_with_a_rejected_push_fails_only_if_it_depends_on_it(is_after_it):
    with offbeat.PS.local(servers=1) as own:
        w, requests = own.namespace("w", keys=10), own._requests
        server = own.local_servers.processes[0]
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)

        def ask():
            first, second = w.push(np.ones(10)), w.push(np.ones(10))
            return first, second, w.pull(after=[first, second] if is_after_it else [first])

        def refuse():  # in place of the server
            pushes_with_pulls = [number for number, sent in requests._sent._sent.items() if sent.pulls]
            for number in pushes_with_pulls:
                refused = Rejected(request=number, first=0, last=10, reason="too much")
                requests._emit(requests._client.on_message(refused))
            return pushes_with_pulls

        first, second, pulled = requests.call_in_order(ask)
        wait_until(lambda: requests.call_in_order(refuse), "a push that returns values")
        with pytest.raises(OffbeatError, match="a push to w was refused: too much"):
            second.result()
        server.send_signal(signal.SIGCONT)
        assert first.result() is None
        if is_after_it:
            with pytest.raises(OffbeatError, match="a push to w was refused: too much"):
                pulled.result()
        else:
            assert pulled.result().tolist() == [2.0] * 10


def test_a_pull_that_depends_on_a_rejected_push_fails_with_it(ps, name):
    w = ps.namespace(name, keys=10, update=UserFunction(PICKY))
    for keys in (None, [3, 5]):
        good = w.push(np.ones(10))
        bad = w.push(np.full(10 if keys is None else 2, -9.0), keys=keys)
        with pytest.raises(OffbeatError, match=r"a push to .* was refused: .*what is below zero"):
            w.pull(after=[good, bad]).result()
        assert good.result() is None
    assert w.pull(after=[good]).result().tolist() == [2.0] * 10


def test_large_answers_stay_unchanged_while_others_arrive(ps, name):
    w = ps.namespace(name, keys=5_000_000)
    listed = np.arange(0, 5_000_000, 7)
    answers = []
    for _ in range(6):
        pushed = w.push(np.ones(5_000_000), after=answers[-1] if answers else ())
        answers.append((w.pull(after=[pushed]), w.pull(keys=listed, after=[pushed])))
    for count, (all_of_it, some) in enumerate(answers, 1):
        assert (all_of_it.result() == count).all()
        assert (some.result() == count).all()


def test_a_namespace_of_quintillions_of_keys_stores_only_pushed_keys(ps, name):
    w = ps.namespace(name, keys=2**63 - 1)
    w.push([1.0, 2.0], keys=[5, 2**63 - 2]).result()
    assert w.pull(keys=[5, 6, 2**63 - 2]).result().tolist() == [1, 0, 2]


def test_servers_apply_optimizer_steps_to_pushed_gradients(ps, name):
    w = ps.namespace(name, keys=10, update=SGD(lr=0.5, momentum=0.9, nesterov=True), dtype="float64")
    g = ps.namespace(f"{name} of Adagrad", keys=10, update=Adagrad(lr=0.5), dtype="float64")
    here = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    there = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([here], lr=0.5, momentum=0.9, nesterov=True)
    adagrad = torch.optim.Adagrad([there], lr=0.5)
    for step in range(3):
        gradient = torch.arange(10, dtype=torch.float64) - step
        w.push(gradient), g.push(gradient)
        here.grad, there.grad = gradient.clone(), gradient.clone()
        sgd.step(), adagrad.step()
    assert np.allclose(w.pull().result(), here.detach(), rtol=1e-12)
    assert np.allclose(g.pull().result(), there.detach(), rtol=1e-9)


def test_a_user_function_is_found_by_the_path_given_to_the_servers(ps, name):
    w = ps.namespace(name, keys=4, update=UserFunction(MINE, {"limit": 2.5}))
    for _ in range(3):
        w.push([1.0, -1.0, 0.5, 0.0])
    assert w.pull().result().tolist() == [2.5, -2.5, 1.5, 0.0]
    with pytest.raises(OffbeatError, match=r"started without the function support\.user_updates:Other"):
        ps.namespace(f"{name}, another", keys=4, update=UserFunction("support.user_updates:Other"))


def test_a_push_that_a_user_function_rejects_is_an_error_and_changes_nothing(ps, name):
    """Neither its own keys, nor replicas, nor pushes before or after it, nor the servers."""
    with offbeat.PS.local(servers=2, functions=[PICKY]) as own:
        w = own.namespace(name, keys=100, update=UserFunction(PICKY), block_keys=10)
        v = own.namespace(f"{name}, another", keys=100)
        w.push(np.full(100, 3.0))
        bad = w.push(np.full(5, -5.0), first=2)
        listed = w.push([-9.0, 9.0], keys=[11, 13])
        good, others = w.push(np.full(100, 1.0)), v.push(np.ones(100))
        for one in (bad, listed):
            with pytest.raises(OffbeatError, match=r"a push to .* was refused: .*what is below zero"):
                one.result()
        good.result(), others.result()
        assert w.pull().result().tolist() == [4.0] * 100
        own.local_servers.processes[0].kill()
        wait_until(lambda: own.servers == [1], "a ring of the other server")
        assert w.pull().result().tolist() == [4.0] * 100
        assert v.pull().result().tolist() == [1.0] * 100
        w.push(np.full(100, -4.0)).result()
        assert w.pull().result().tolist() == [0.0] * 100


def test_a_user_function_that_modifies_the_pushed_values_is_rejected(ps, name):
    w = ps.namespace(name, keys=10, update=UserFunction(MEDDLER))
    for keys in (None, range(10)):
        with pytest.raises(OffbeatError, match=r"was refused: .*read-only"):
            w.push(np.ones(10), keys=keys).result()
    assert w.pull().result().tolist() == [0.0] * 10


def test_a_sum_that_a_user_function_rejects_is_an_error_for_all_clients(ps, name):
    with offbeat.PS(ps.cluster) as other:
        spaces = [
            one.namespace(name, keys=10, update=UserFunction(PICKY), aggregate="sum") for one in (ps, other)
        ]
        joining = threading.Thread(target=spaces[0].join_aggregation, args=(2,))
        joining.start()
        spaces[1].join_aggregation(2)
        joining.join()
        for value in (2.0, -5.0, 1.0):
            pushes = [space.push(np.full(10, value)) for space in spaces]
            for push in pushes:
                if value > 0:
                    push.result()
                else:
                    with pytest.raises(OffbeatError, match=r"was refused: .*what is below zero"):
                        push.result()
        assert spaces[0].pull().result().tolist() == [6.0] * 10
        for space in spaces:
            space.leave_aggregation()


def test_clients_share_a_namespace_and_each_push_counts_once(ps, name):
    def push(cluster, times):
        with offbeat.PS(cluster) as own:
            w = own.namespace(name, keys=100)
            for future in [w.push(np.ones(100)) for _ in range(times)]:
                future.result()

    threads = [threading.Thread(target=push, args=(ps.cluster, times)) for times in (10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ps.namespace(name, keys=100).pull().result().tolist() == [60.0] * 100


# Dependencies -------------------------------------------------------------------------------------------


def test_a_request_waits_for_its_dependencies_and_fails_with_them(ps, name):
    w = ps.namespace(name, keys=10)
    pushes = [w.push(np.ones(10), first=0) for _ in range(5)]
    assert w.pull(after=pushes).result().tolist() == [5.0] * 10
    late = offbeat.PS(ps.cluster)
    own = late.namespace(name, keys=10)
    late.tau = 0
    _, finish = begun_in_another_thread(late, own)
    with late.iteration():
        held = own.pull()
    after = own.pull(after=[held])
    late.close()
    finish()
    for one in (held, after):
        with pytest.raises(OffbeatError, match="this client was closed"):
            one.result()


def begun_in_another_thread(ps, namespace):
    """Begins an iteration with one request; returns the request and a function that ends the iteration."""
    made, end, ended = threading.Event(), threading.Event(), threading.Event()
    requests = []

    def work():
        with ps.iteration():
            requests.append(namespace.push(np.ones(namespace.keys)))
            made.set()
            end.wait(60)
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert made.wait(60)

    def finish():
        end.set()
        assert ended.wait(60)

    return requests[0], finish


@pytest.mark.parametrize(("tau", "is_held"), [(0, True), (1, False), (None, False)])
def test_an_iteration_waits_for_iterations_more_than_tau_before_it(ps, name, tau, is_held):
    w = ps.namespace(name, keys=10)
    ps.tau = tau
    first, finish = begun_in_another_thread(ps, w)
    first.result()
    with ps.iteration():
        second = w.pull()
    if not is_held:
        second.result()
    w.pull().result()  # a request outside iterations is sent at once, after all earlier requests
    assert second.is_done == (not is_held)
    finish()
    assert second.result().tolist() == [1.0] * 10
    ps.tau = None


def test_tau_may_change_while_iterations_run(ps, name):
    w = ps.namespace(name, keys=10)
    ps.tau = 1
    first, finish_first = begun_in_another_thread(ps, w)
    second, finish_second = begun_in_another_thread(ps, w)
    first.result(), second.result()
    ps.tau = 0
    with ps.iteration():
        third = w.pull()
    finish_first()
    w.pull().result()
    assert not third.is_done
    finish_second()
    assert third.result().tolist() == [2.0] * 10
    with pytest.raises(ValueError, match="at least 0"):
        ps.tau = -1
    ps.tau = None


def test_waiting_for_the_start_of_an_iteration_makes_earlier_pulls_available(ps, name):
    w = ps.namespace(name, keys=10)
    ps.tau = 0
    seen = []
    for _ in range(20):
        with ps.iteration() as begins:
            begins.result()
            assert all(one.is_done for one in seen)
            pushed = w.push(np.ones(10) + (seen[-1].result() if seen else 0))
            seen.append(w.pull(after=[pushed]))
    assert [one.result()[0] for one in seen] == [2**turn - 1 for turn in range(1, 21)]
    ps.tau = None


def test_requests_of_a_when_done_callback_belong_to_no_iteration(ps, name):
    """Although a thread that waits in an iteration may call it."""
    w, found = ps.namespace(name, keys=10), []

    def ask():
        found.append((threading.get_ident(), ps._requests.iterations.current is not None))

    with ps.iteration():
        for _ in range(50):
            ps.when_done([w.push(np.ones(10))], ask).result()
            assert ps._requests.iterations.current is not None
    assert (threading.get_ident(), False) in found
    assert not any(is_in_iteration for _, is_in_iteration in found)


def test_iterations_of_a_closed_client_never_begin(ps, name):
    late = offbeat.PS(ps.cluster)
    own = late.namespace(name, keys=10)
    late.tau = 0
    _, finish = begun_in_another_thread(late, own)
    with late.iteration() as begins:
        pass
    assert not begins.is_done
    late.close()
    finish()
    with pytest.raises(OffbeatError, match="this client was closed"):
        begins.result()


def test_requests_of_an_iteration_that_never_begins_are_not_sent(ps, name):
    late = offbeat.PS(ps.cluster)
    own = late.namespace(name, keys=10)
    late.tau = 0
    _, finish = begun_in_another_thread(late, own)
    with late.iteration():
        pushes = [own.push(np.ones(10), keys=np.arange(10)) for _ in range(20)]
    late.close()
    finish()
    for push in pushes:
        with pytest.raises(OffbeatError, match="this client was closed"):
            push.result()
    assert not late._requests._sent


# Invalid input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "text"),
    [
        ([1, 2], {"keys": [5, 4]}, "ascending"),
        ([1, 2], {"keys": [4, 4]}, "each once"),
        ([1, 2], {"keys": [4]}, "got 1 keys and 2 rows"),
        ([1, 2], {"keys": [4, 100]}, "got 4 to 100"),
        ([1, 2], {"keys": [-1, 4]}, "got -1 to 4"),
        ([1, 2], {"keys": [0.5, 4]}, "expected integers"),
        ([1, 2], {"first": 99}, "got 99 to 100"),
        ([[1, 2]], {}, r"rows of shape \(\)"),
    ],
)
def test_invalid_keys_and_values_are_rejected_at_once(ps, values, options, text):
    w = ps.namespace("what does not fit", keys=100)
    with pytest.raises(ValueError, match=text):
        w.push(values, **options)


def test_an_unknown_aggregation_is_rejected_and_the_name_stays_free(ps, name):
    with pytest.raises(ValueError, match="aggregate to be sum, mean or each, got 'avg'"):
        ps.namespace(name, keys=10, aggregate="avg")
    ps.namespace(name, keys=10, aggregate="mean")


def test_a_request_above_the_size_limit_of_a_message_is_rejected_at_once(ps, name):
    """The arrays use no memory, because they are never read."""
    w = ps.namespace(name, keys=2**40)
    with pytest.raises(
        ValueError, match=f"at most {2**31} bytes .* got {2**31 + 8}; push or pull smaller ranges"
    ):
        w.push(np.zeros(2**28 + 1, np.float32), keys=np.zeros(2**28 + 1, np.int64))
    with pytest.raises(ValueError, match="push or pull smaller ranges of keys"):
        w.pull(keys=np.zeros(2**28 + 1, np.int64))
    wide = ps.namespace(f"{name}, wide", keys=10, width=2**27)
    with pytest.raises(ValueError, match="push or pull smaller ranges of keys"):
        wide.push(np.zeros((5, 2**27), np.float32), keys=range(5))
    with pytest.raises(ValueError, match="push or pull smaller ranges of keys"):
        wide.pull(keys=range(5))
    wider = ps.namespace(f"{name}, wider", keys=10, width=2**30)
    with pytest.raises(ValueError, match=f"at most {2**31} bytes .* got {2**32}"):
        wider.push(np.zeros((1, 2**30), np.float32))
    with pytest.raises(ValueError, match=f"at most {2**31} bytes .* got {2**32}"):
        wider.pull()


def test_blocks_never_exceed_the_size_limit_of_a_message(ps, name):
    with pytest.raises(ValueError, match=f"blocks of up to {2**31} bytes, here 1024 keys, got 1025"):
        ps.namespace(name, keys=10_000, width=2**19, block_keys=1025)
    wide = ps.namespace(name, keys=10_000_000, width=2**19)
    wide.push(np.ones((1, 2**19)), first=9_999_999).result()
    assert ps._cluster_state.space(name).block_keys == 2**31 // 2**21
    assert ps.namespace(f"{name}, short", keys=640).keys == 640
    assert ps._cluster_state.space(f"{name}, short").block_keys == 10


def test_all_clients_must_open_a_namespace_with_the_same_settings(ps, name):
    ps.namespace(name, keys=10)
    ps.namespace(name, keys=10).push(np.ones(10)).result()
    with pytest.raises(
        OffbeatError, match=f"{name} cannot be opened: expected the namespace .* as it was opened"
    ):
        ps.namespace(name, keys=11)
    with pytest.raises(ValueError, match="2\\*\\*63"):
        ps.namespace(name, keys=2**63)
    with pytest.raises(ValueError, match="one of the updates"):
        ps.namespace(name, keys=10, update=object())


def test_a_wait_that_times_out_names_the_server():
    with offbeat.PS.local(servers=1) as ps:
        w = ps.namespace("w", keys=10)
        server = ps.local_servers.processes[0]
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)  # the process may have run a little longer
        pushed = w.push(np.ones(10))
        pulled = w.pull(after=[pushed])
        late = r"not done after 0\.2 s: server 0 has not answered"
        with pytest.raises(OffbeatError, match=f"a push to w is {late}"):
            pushed.result(timeout_s=0.2)
        with pytest.raises(OffbeatError, match=f"a pull from w is {late}"):
            pulled.result(timeout_s=0.2)
        late = r"not done after 0\.2 s: a push to w is not: server 0 has not answered"
        with pytest.raises(OffbeatError, match=late):
            ps.when_done([pushed]).result(timeout_s=0.2)
    for one in (pushed, pulled):
        with pytest.raises(OffbeatError, match="this client was closed"):
            one.result(timeout_s=0)


def test_a_closed_client_rejects_requests_and_leaves_no_process():
    ps = offbeat.PS.local(servers=2)
    w = ps.namespace("w", keys=10)
    processes = list(ps.local_servers.processes.values())
    ps.close()
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(OffbeatError, match="this client was closed"):
        w.push(np.ones(10))
    ps.close()


# A cluster from a file ----------------------------------------------------------------------------------


def serve(*arguments):
    return subprocess.Popen([*OFFBEAT, "serve", *map(str, arguments)], stderr=subprocess.PIPE, text=True)


def test_servers_join_and_leave_with_a_cluster_file(tmp_path):
    path = tmp_path / "ps.json"
    first = serve("--new", 1, path)
    try:
        assert first.stderr.readline().startswith("server ")
        assert path.stat().st_mode & 0o777 == 0o600
        with offbeat.PS(path) as ps:
            w = ps.namespace("w", keys=1000)
            w.push(np.arange(1000)).result()
            second = serve(path)
            ps.wait_for_servers(2)
            first.send_signal(signal.SIGTERM)
            assert first.wait(60) == 0
            wait_until(lambda: len(ps.servers) == 1, "the first server has left")
            w.push(np.ones(1000)).result()
            assert np.array_equal(w.pull().result(), np.arange(1000) + 1)
        second.send_signal(signal.SIGINT)
        assert second.wait(90) == 0
    finally:
        first.kill()
        first.wait()


def test_an_invalid_or_missing_cluster_file_is_reported(tmp_path):
    path = tmp_path / "ps.json"
    path.write_text("{}")
    with pytest.raises(OffbeatError, match="expected a cluster file"):
        offbeat.PS(path)
    with pytest.raises(FileNotFoundError):
        offbeat.PS(tmp_path / "none")


# Dense tensors ------------------------------------------------------------------------------------------


def test_a_model_is_trained_on_servers_by_the_names_of_its_parameters(ps, name):
    torch.manual_seed(0)
    there, here = torch.nn.Linear(7, 3), torch.nn.Linear(7, 3)
    here.load_state_dict(there.state_dict())
    theirs = ps.tensors(name, there.named_parameters(), update=SGD(lr=0.1, momentum=0.9))
    start = {
        key: -10 * value.detach() for key, value in there.named_parameters()
    }  # the first step leads to the present values
    theirs.push(start).result()
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(5, 7)
    parameters = dict(there.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
    theirs.pull(parameters).result()
    assert all(torch.allclose(parameters[key], value) for key, value in here.named_parameters())
    for value in here.parameters():  # the first step on the servers left this momentum
        optimizer.state[value]["momentum_buffer"] = -10 * value.detach().clone()
    for _ in range(3):
        there.zero_grad(), here.zero_grad()
        there(x).square().sum().backward(), here(x).square().sum().backward()
        theirs.push({key: value.grad for key, value in parameters.items()})
        optimizer.step()
        theirs.pull(parameters).result()
    assert all(torch.allclose(parameters[key], value, atol=1e-5) for key, value in here.named_parameters())


def test_some_tensors_can_be_pushed_and_pulled_without_the_others(ps, name):
    shapes = {"a": (2, 3), "b": (4,), "c": (0,), "d": (5,)}
    ones = {key: torch.ones(shape) for key, shape in shapes.items()}
    theirs = ps.tensors(name, ones.items())
    theirs.push({"a": ones["a"], "d": ones["d"]}).result()
    found = {key: torch.full(shape, 7.0) for key, shape in shapes.items()}
    theirs.pull({key: found[key] for key in ("b", "d")}).result()
    assert found["a"].tolist() == [[7.0] * 3] * 2
    assert found["b"].tolist() == [0.0] * 4
    assert found["d"].tolist() == [1.0] * 5
    with pytest.raises(ValueError, match="expected one of the names a, b, c, d, got 'e'"):
        theirs.push({"e": torch.ones(2)})
    with pytest.raises(ValueError, match="shape"):
        theirs.pull({"b": torch.ones(5)})
    with pytest.raises(ValueError, match="at least one tensor"):
        theirs.push({"c": ones["c"]})
    with pytest.raises(OffbeatError, match="cannot be opened"):
        ps.tensors(name, [("a", torch.ones(3, 2)), ("b", torch.ones(4)), ("d", torch.ones(5))])


def test_a_when_done_callback_runs_when_all_requests_are_done(ps, name):
    w = ps.namespace(name, keys=10)
    pushes = [w.push(np.ones(10)) for _ in range(3)]
    assert ps.when_done(pushes, lambda: sum(one.is_done for one in pushes)).result() == 3

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        ps.when_done(pushes, fail).result()


# Aggregation --------------------------------------------------------------------------------------------


def take_turns(cluster, name, rank, clients, times, results):
    with offbeat.PS(cluster) as ps:
        w = ps.namespace(name, keys=100, update=SGD(lr=1.0), aggregate="mean", dtype="float64")
        w.join_aggregation(clients)
        seen = []
        for time in range(times):
            w.push(np.full(100, float(rank + 10 * time))).result()
            seen.append(w.pull(keys=[0]).result()[0])
        w.leave_aggregation()
        results[rank] = seen


def push_own_keys(cluster, name, rank, clients, results):
    with offbeat.PS(cluster) as ps:
        w = ps.namespace(name, keys=60, aggregate="sum", dtype="float64", block_keys=7)
        w.join_aggregation(clients)
        for _ in range(3):
            keys = np.arange(rank, 50, clients) if rank else np.zeros(0, np.int64)
            pushed = w.push(np.full(len(keys), float(rank)), keys=keys, first=0, last=50)
            results[rank] = w.pull(after=[pushed]).result()


def test_a_push_counts_for_its_whole_range_whatever_keys_it_lists(ps, name):
    clients, results = 3, {}
    threads = [
        threading.Thread(target=push_own_keys, args=(ps.cluster, name, rank, clients, results))
        for rank in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = np.zeros(60)
    expected[1:50:3], expected[2:50:3] = 3, 6
    assert len(results) == clients
    for found in results.values():
        assert np.array_equal(found, expected)


def test_pushes_of_all_clients_at_one_time_are_one_step_of_the_mean(ps, name):
    clients, times, results = 3, 4, {}
    threads = [
        threading.Thread(target=take_turns, args=(ps.cluster, name, rank, clients, times, results))
        for rank in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    steps = -np.cumsum([1 + 10 * time for time in range(times)])  # the mean of ranks 0, 1 and 2 is 1
    for seen in results.values():
        assert all(value in steps for value in seen)
        assert seen[-1] == steps[-1]
    assert len(results) == clients
    late = ps.namespace(name, keys=100, update=SGD(lr=1.0), aggregate="mean", dtype="float64")
    late.push(np.ones(100)).result()  # no other client takes part any more
    assert late.pull().result().tolist() == [steps[-1] - 1] * 100
    late.leave_aggregation()
    with pytest.raises(OffbeatError, match="this client has not left"):
        late.push(np.ones(100)).result()
    with pytest.raises(OffbeatError, match="expected a namespace that aggregates"):
        ps.namespace(f"{name}, but not so", keys=10).join_aggregation()


# Filters ------------------------------------------------------------------------------------------------


def spec(kind, **arguments):
    return FilterSpec(kind, arguments)


def test_lossless_filters_change_only_the_number_of_bytes(ps, name):
    rng = np.random.default_rng(1)
    both = (spec("KeyCaching", entries=16), spec("Compression", level=1))
    w = ps.namespace(name, keys=10_000, push_filters=both, pull_filters=both)
    plain = ps.namespace(f"{name}, without", keys=10_000)
    keys = np.flatnonzero(rng.random(10_000) < 0.1)
    for _ in range(4):
        values = np.where(rng.random(len(keys)) < 0.1, rng.standard_normal(len(keys)), 0).astype(np.float32)
        for one in (w, plain):
            one.push(values, keys=keys).result()
        assert np.array_equal(w.pull(keys=keys).result(), plain.pull(keys=keys).result())
    assert np.array_equal(w.pull().result(), plain.pull().result())
    passed = w.filter_report()["push"]
    assert (
        passed["key caching"].out_bytes < 0.6 * passed["key caching"].in_bytes
    )  # the list of keys is sent once, not four times
    assert passed["compression"].out_bytes < 0.7 * passed["compression"].in_bytes
    assert (
        w.filter_report()["pull received"]["compression"].out_bytes
        > w.filter_report()["pull received"]["compression"].in_bytes
    )
    assert plain.filter_report() == {}


@pytest.mark.long
def test_random_filters_are_unbiased(ps, name):
    filters = (
        spec("RandomSkip", probability=0.5),
        spec("KeyCaching", entries=4),
        spec("FixedPoint", bytes_per_value=2),
    )
    w = ps.namespace(name, keys=1000, push_filters=filters)
    for future in [w.push(np.linspace(0.5, 1.5, 1000)) for _ in range(200)]:
        future.result()
    found = w.pull().result()
    assert abs(found.mean() - 200) < 5  # the standard deviation is 0.5
    assert len(np.unique(found)) > 100


def test_insignificant_changes_are_not_sent(ps, name):
    w = ps.namespace(
        name, keys=100, update=Assign(), push_filters=[spec("SignificantlyModified", threshold=0.5)]
    )
    values = np.arange(100.0)
    w.push(values).result()
    values[:50] += 0.4
    values[50:] += 0.6
    w.push(values).result()
    expected = np.arange(100.0)
    expected[50:] += 0.6
    assert np.allclose(w.pull().result(), expected)


def test_insignificant_changes_are_not_pulled(ps, name):
    remembering = [spec("SignificantlyModified", threshold=0.5), spec("KeyCaching", entries=4)]
    w = ps.namespace(name, keys=1000, dtype="float64", pull_filters=remembering)
    keys, values, chance = np.arange(0, 1000, 3), np.zeros(1000), np.random.default_rng(1)
    pulled = []
    for step in range(12):
        change = chance.normal(0, 0.3, 1000)
        pushed = w.push(change, after=pulled)
        values += change
        ranges = {"keys": keys} if step % 3 == 0 else {"first": 10 * step, "last": 900}
        one, other = [w.pull(**ranges, after=[pushed]) for _ in range(2)]
        for found in (one.result(), other.result()):
            held = values[keys] if step % 3 == 0 else values[10 * step : 900]
            assert np.abs(found - held).max() <= 0.5
            found[:] = 99  # the program owns these rows
        pulled = [one, other]
    received = w.filter_report()["pull received"]["significantly modified"]
    assert received.in_bytes < 0.4 * received.out_bytes


def test_weights_that_kkt_conditions_hold_at_zero_are_not_pushed(ps, name):
    """Gradients below l1 leave weights at zero; the server reports them in rows of weight and gradient."""
    update = BlockProximal(l1=1.0, rate=0.5)
    filters = [spec("KKT", l1=1.0), spec("KeyCaching", entries=4)]
    w = ps.namespace(name, 100, update=update, width=2, dtype="float64", push_filters=filters)
    keys = np.arange(0, 100, 5)
    gradients = np.where(keys < 50, 0.5, 3.0)

    def step():
        pushed = w.push(np.stack([gradients, np.ones(20)], 1), keys=keys)
        return w.pull(keys=keys, after=[pushed]).result()

    def passed():
        return w.filter_report()["push"]["KKT"]

    assert np.array_equal(step()[:, 1], gradients)
    assert w.is_active(keys).all()
    w.set_margin(0.1)
    assert np.array_equal(step()[:, 0] == 0, keys < 50)
    assert w.is_active(keys).tolist() == (keys >= 50).tolist()
    before = passed()
    gradients[:] = 3.0
    found = step()
    assert passed().in_bytes - before.in_bytes == 2 * (passed().out_bytes - before.out_bytes) == 20 * 24
    assert np.array_equal(found[:, 1] == 3.0, keys >= 50)  # the pushes to other keys were skipped
    w.set_margin(math.inf)
    assert w.is_active(keys).all()
    assert (step()[:, 0] != 0).all()


def test_an_answer_repeated_after_its_pull_is_done_skips_no_keys(ps, name):
    """It may arrive late, when another margin holds; other clients do not get it."""
    update, keys = BlockProximal(l1=1.0, rate=0.5), np.arange(3)
    filters = [spec("KKT", l1=1.0)]
    w = ps.namespace(name, 3, update=update, width=2, dtype="float64", push_filters=filters)
    w.set_margin(0.1)
    server, ranges = f"server-{ps.servers[0]}", {"namespace": name, "first": 0, "last": 3}
    asked = Pull(client=1, request=10**9, epoch=0, keys=keys, **ranges)
    rows = PullResult(request=10**9, content=Entries(0, np.zeros((3, 2))), **ranges)

    def receive():
        ps._node.filtering.encode(server, asked)
        ps._requests._on_message(server, rows)

    ps.when_done([], receive).result()
    assert w.is_active(keys).all()
    w.pull(keys=keys).result()
    assert not w.is_active(keys).any()


def test_only_a_namespace_with_a_kkt_filter_has_a_margin(ps, name):
    w = ps.namespace(name, keys=10)
    for ask in (lambda: w.set_margin(0.1), lambda: w.is_active([1])):
        with pytest.raises(ValueError, match="expected a namespace with a KKT filter"):
            ask()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"push_filters": [spec("KKT", l1=1.0)]}, "KKT with update=BlockProximal"),
        ({"push_filters": [spec("RandomSkip", probability=0.5)], "update": Assign()}, "no RandomSkip"),
        ({"push_filters": [spec("SignificantlyModified", threshold=1)]}, "SignificantlyModified"),
        (
            {"push_filters": [spec("Compression"), spec("FixedPoint", bytes_per_value=1)]},
            "behind compression",
        ),
        ({"pull_filters": [spec("RandomSkip", probability=0.5)]}, "pulls among .*, got RandomSkip"),
    ],
)
def test_invalid_filters_are_rejected(ps, options, text):
    with pytest.raises(ValueError, match=text):
        ps.namespace("filters that make no sense", keys=10, **options)
    with pytest.raises(ValueError, match="expected one of the filters"):
        spec("Nonsense")
    with pytest.raises(ValueError, match="valid arguments of KeyCaching"):
        spec("KeyCaching", size=4)
