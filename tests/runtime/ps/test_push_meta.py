"""Weights, settings, states and times of pushes and pulls, with real servers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import offbeat
from offbeat.errors import OffbeatError
from offbeat.numerics.ps.spaces import FilterSpec, UserFunction
from offbeat.numerics.ps.updates import SGD, Adam, Sum
from offbeat.runtime.ps.namespace import Namespace


@pytest.fixture(scope="module")
def ps():
    with offbeat.PS.local(servers=2) as ps:
        yield ps


@pytest.fixture
def name(request):
    return request.node.name


def in_threads(*functions):
    """Runs the functions at the same time and returns their results."""
    found = [None] * len(functions)

    def run(place, function):
        found[place] = function()

    threads = [threading.Thread(target=run, args=one) for one in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def as_clients(ps, *programs, numbers=None):
    """Runs the programs at the same time, each with its own client, and returns their results."""

    def of(program, number):
        def run():
            with offbeat.PS(ps.cluster, client_id=number) as client:
                return program(client)

        return run

    return in_threads(*map(of, programs, numbers or [None] * len(programs)))


# Weights -----------------------------------------------------------------------------------------------


LOSSLESS = [FilterSpec("KeyCaching", {"entries": 4}), FilterSpec("Compression")]


def weighing(name, filters, *pushes, keys=100):
    """A program that pushes, at each time, one value for all keys with a weight, or None for nothing."""

    def program(client):
        w = client.namespace(
            name,
            keys=keys,
            update=SGD(1.0, momentum=0.5),
            aggregate="mean",
            dtype="float64",
            block_keys=9,
            push_filters=filters,
        )
        w.join_aggregation(2)
        for one in pushes:
            if one is None:
                nothing = np.empty(0, np.int64)
                w.push(np.empty(0), keys=nothing, first=0, last=keys, weight=0).result()
            else:
                w.push(np.full(keys, one[0]), weight=one[1]).result()
        values = w.pull().result()
        w.leave_aggregation()
        return values

    return program


@pytest.mark.parametrize("filters", [[], LOSSLESS], ids=["no filters", "filters"])
def test_a_mean_weights_each_push_by_its_weight(ps, name, filters):
    found = as_clients(
        ps,
        weighing(name, filters, (6.0, 3.0), None, None, (2.0, 1)),
        weighing(name, filters, (2.0, 1.0), (8.0, 4), None, None),
    )
    # Means of 2, 2, nothing (no step of the momentum either) and 2.
    velocity = value = 0.0
    for mean in (2.0, 2.0, 2.0):
        velocity = 0.5 * velocity + mean
        value -= velocity
    assert [values.tolist() for values in found] == [[value] * 100] * 2


def test_with_aggregate_each_pushes_are_applied_in_client_order_on_all_replicas(name):
    """Gradients of different signs are two steps of Adam, in the order of the client ids."""

    def pushing(sign):
        def program(client):
            w = client.namespace(
                name, keys=60, update=Adam(0.1), aggregate="each", block_keys=7, dtype="float64"
            )
            w.join_aggregation(2)
            for step in range(1, 4):
                w.push(np.full(60, float(sign * step)), settings={"lr": 0.1 * step}).result()
            w.leave_aggregation()
            return client.client_id, sign

        return program

    with offbeat.PS.local(servers=2, replicas=1) as own:
        signs = [sign for _, sign in sorted(as_clients(own, pushing(1), pushing(-2)))]
        expected, states = np.zeros(60), {state: np.zeros(60) for state in Adam(0.1).states}
        for step in range(1, 4):
            for sign in signs:
                Adam(0.1 * step).apply(expected, states, np.full(60, float(sign * step)))
        w = own.namespace(name, keys=60, update=Adam(0.1), aggregate="each", block_keys=7, dtype="float64")
        assert np.array_equal(w.pull().result(), expected)
        own.remove_server(own.servers[0])
        kept = w.pull(states=True).result()
        assert np.array_equal(kept["values"], expected)
        assert all(np.array_equal(kept[state], rows) for state, rows in states.items())


def test_a_user_function_with_aggregate_each_is_rejected(ps, name):
    with pytest.raises(ValueError, match="expected aggregate to be sum or mean with a function of your own"):
        ps.namespace(name, keys=10, update=UserFunction("a.module:function"), aggregate="each")


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_an_invalid_weight_is_rejected(ps, name, weight):
    w = ps.namespace("weights", keys=10, aggregate="mean")
    with pytest.raises(ValueError, match=f"expected a finite weight of at least 0, got {weight}"):
        w.push(np.ones(10), weight=weight)
    alone = ps.namespace("no weights", keys=10, update=Sum())
    with pytest.raises(ValueError, match="expected no weight where pushes are not aggregated, got 2"):
        alone.push(np.ones(10), weight=2)


# Settings ----------------------------------------------------------------------------------------------


def test_settings_apply_to_one_push_and_equally_on_replicas(ps, name):
    """A schedule of learning rates: values and states equal those of Adam with these rates in turn."""
    with offbeat.PS.local(servers=2, replicas=1) as own:
        w = own.namespace(name, keys=50, update=Adam(0.1), dtype="float64", block_keys=7)
        expected = np.zeros(50)
        states = {state: np.zeros(50) for state in Adam(0.1).states}
        rng = np.random.default_rng(0)
        for lr in (0.5, 0.25, None):
            gradients = rng.normal(size=50)
            w.push(gradients, settings=None if lr is None else {"lr": lr, "betas": (0.8, 0.9)}).result()
            Adam(lr or 0.1, (0.8, 0.9) if lr else (0.9, 0.999)).apply(expected, states, gradients)
        assert np.array_equal(w.pull().result(), expected)
        own.remove_server(own.servers[0])  # so that only replicas and copies are left
        assert np.array_equal(w.pull().result(), expected)


def test_aggregated_pushes_use_the_settings_of_the_first_client_with_a_weight(ps, name):
    def pushing(weight, lr):
        def program(client):
            w = client.namespace(name, keys=10, update=SGD(1.0), aggregate="sum", dtype="float64")
            w.join_aggregation(3)
            w.push(np.ones(10) * weight, weight=weight, settings={"lr": lr}).result()
            number = client.client_id
            value = w.pull().result()[0]
            w.leave_aggregation()
            return number, weight, lr, value

        return program

    found = as_clients(ps, pushing(0, 7.0), pushing(1, 0.5), pushing(2, 0.25))
    _, _, lr, _ = min(one for one in found if one[1])
    assert {value for *_, value in found} == {-3 * lr}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": 1.0}, "settings of SGD among lr, momentum, weight_decay, got rate"),
        ({"lr": "1"}, "a number as lr, got '1'"),
        ({"lr": -1.0}, "lr of at least 0"),
    ],
)
def test_invalid_settings_are_rejected(ps, settings, words):
    w = ps.namespace("settings", keys=10, update=SGD(1.0))
    with pytest.raises(ValueError, match=f"expected {words}"):
        w.push(np.ones(10), settings=settings)


def test_a_function_takes_no_settings(ps):
    w = ps.namespace("no settings", keys=10)
    mine = Namespace(
        ps._requests,
        ps._cluster_state.space(w.name),
        UserFunction("a:b"),
        width=0,
        dtype="float32",
        combines=False,
    )
    with pytest.raises(ValueError, match="expected no settings for a user-defined function"):
        mine.push(np.ones(10), settings={"lr": 1.0})


# Whole rows --------------------------------------------------------------------------------------------


def test_a_put_is_applied_between_earlier_and_later_pushes_on_every_replica(ps, name):
    with offbeat.PS.local(servers=2, replicas=1) as own:
        update = SGD(1.0, momentum=0.5)
        w = own.namespace(name, keys=50, update=update, width=2, block_keys=7)
        rows = np.arange(60, dtype=np.float32).reshape(30, 2)
        w.push(np.ones((50, 2)))
        w.put(rows, first=10, states={"momentum": rows * 4})
        w.put(np.zeros((5, 2)), first=35)
        w.push(np.ones((50, 2))).result()
        expected = np.full((50, 2), -2.5)
        expected[10:40] = rows - (rows * 4 * 0.5 + 1)
        expected[35:40] = -1
        assert np.array_equal(w.pull().result(), expected)
        own.remove_server(own.servers[0])
        assert np.array_equal(w.pull().result(), expected)


def test_a_put_larger_than_a_piece_arrives_whole(ps, name):
    w = ps.namespace(name, keys=2_500_000, update=Adam(1.0), block_keys=600_000)
    rows = np.arange(2_500_000, dtype=np.float32)
    w.put(rows, states={"mean": -rows}).result()
    assert np.array_equal(w.pull().result(), rows)


def test_where_pushes_are_aggregated_the_put_of_the_first_client_is_used(ps, name):
    def putting(value):
        def program(client):
            w = client.namespace(name, keys=30, update=SGD(1.0), aggregate="mean", block_keys=4)
            w.join_aggregation(3)
            w.push(np.ones(30)).result()
            if value is None:
                nothing = np.empty(0, np.int64)
                w.push(np.empty(0), keys=nothing, first=0, last=30, weight=0).result()
            else:
                w.put(np.full(30, value)).result()
            after = w.pull().result().tolist()
            w.push(np.ones(30)).result()
            w.leave_aggregation()
            return client.client_id, value, after

        return program

    found = as_clients(ps, putting(None), putting(5.0), putting(7.0))
    _, value, _ = min(one for one in found if one[1])
    assert [after for *_, after in found] == [[value] * 30] * 3


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        (np.ones(5), {"first": 8}, "keys from 0 to 9, got 8 to 12"),
        (np.ones((5, 1)), {}, "rows of shape"),
        (np.ones(5), {"states": {"momentum": np.ones(4)}}, r"momentum of shape \(5,\).* got \(4,\)"),
        (np.ones(5), {"states": {"mean": np.ones(5)}}, "states of SGD among momentum, got mean"),
    ],
)
def test_an_invalid_put_is_rejected(ps, values, options, words):
    w = ps.namespace("to be put", keys=10, update=SGD(1.0, momentum=0.5))
    with pytest.raises(ValueError, match=f"expected {words}"):
        w.put(values, **options)
    assert w.put([]).result() is None


# Contents of pulls -------------------------------------------------------------------------------------


def test_all_states_can_be_pulled_and_put_back(ps, name):
    w = ps.namespace(name, keys=50_000, update=Adam(0.1), width=2, block_keys=7_001)
    for _ in range(2):
        w.push(np.ones((50_000, 2))).result()
    kept = w.pull(states=True).result()
    assert list(kept) == ["values", "mean", "squares", "steps"]
    assert np.array_equal(kept["values"], w.pull().result())
    assert (kept["steps"] == 2).all()
    part = w.pull(first=10, last=13, states=True).result()
    assert all(np.array_equal(rows, kept[name][10:13]) for name, rows in part.items())
    listed = w.pull(keys=[3, 49_000], states=True).result()
    assert all(np.array_equal(rows, kept[name][[3, 49_000]]) for name, rows in listed.items())
    empty = w.pull(keys=[], states=True).result()
    assert {name: rows.shape for name, rows in empty.items()} == dict.fromkeys(kept, (0, 2))
    w.push(np.ones((50_000, 2))).result()
    further = w.pull(states=True).result()
    values = kept.pop("values")
    w.put(values, states=kept)
    w.push(np.ones((50_000, 2))).result()
    assert all(np.array_equal(rows, further[name]) for name, rows in w.pull(states=True).result().items())


def test_the_times_of_pulled_rows_name_the_clients_own_pushes_in_them(ps, name):
    """While pushes are in flight and another client pushes, too."""
    keys, pushes = 200_000, 12
    w = ps.namespace(name, keys=keys, block_keys=3_001)

    def meddle(client):
        other = client.namespace(name, keys=keys, block_keys=3_001)
        for _ in range(pushes):
            other.push(np.full(keys, 1000.0)).result()

    def work(client):
        own, found = client.namespace(name, keys=keys, block_keys=3_001), []
        for time in range(1, pushes + 1):
            own.push(np.ones(keys // 2), first=keys // 4 - time)
            found.append((own.pull(times=True), time))
        return [(future.result(), time) for future, time in found]

    found, _ = as_clients(ps, work, meddle)
    for (rows, pieces), time in found:
        assert list(pieces) == sorted(pieces)
        reported = np.zeros(keys)
        for piece in pieces:
            assert 0 < piece.time <= time
            # Of the first `piece.time` pushes, those that have had these keys.
            for at in range(1, piece.time + 1):
                first, last = keys // 4 - at, keys // 4 - at + keys // 2
                reported[max(first, piece.start) : min(last, piece.stop)] += 1
        assert np.array_equal(rows % 1000, reported)
    assert w.pull(times=True).result()[1] == ()
    assert w.pull(keys=[], times=True).result()[1] == ()


def test_states_and_times_can_be_pulled_together(ps, name):
    w = ps.namespace(name, keys=10, update=Adam(0.1))
    w.push(np.ones(3), first=2)
    w.push(np.ones(2), first=4).result()
    kept, pieces = w.pull(states=True, times=True).result()
    assert kept["steps"].tolist() == [0, 0, 1, 1, 2, 1, 0, 0, 0, 0]
    assert pieces == ((2, 4, 1), (4, 6, 2))


# Times and client ids ----------------------------------------------------------------------------------


def test_pushes_at_one_clock_are_one_step(ps, name):
    """A client without a push at a clock sends nothing for it, or pushes at a later clock."""

    def program(*clocks):
        def run(client):
            w = client.namespace(name, keys=1000, update=SGD(1.0), aggregate="mean", dtype="float64")
            assert w.join_aggregation(2) == 1
            pushed = [w.push(np.full(1000, float(clock)), time=clock) for clock in clocks]
            for one in pushed:
                one.result()
            rows, pieces = w.pull(times=True).result()
            w.leave_aggregation()
            return rows, pieces

        return run

    found = as_clients(ps, program(2, 3, 5, 8), program(3, 8))
    for rows, pieces in found:
        assert rows.tolist() == [-2.0 - 3 - 5 - 8] * 1000
        assert pieces == ((0, 1000, 8),)


def test_a_newcomer_receives_its_first_time(ps, name):
    w = ps.namespace(name, keys=10, aggregate="sum")
    w.push(np.ones(10), time=41).result()
    with offbeat.PS(ps.cluster) as client:
        later = client.namespace(name, keys=10, aggregate="sum")
        assert later.join_aggregation() == 42
        with pytest.raises(OffbeatError, match="expected time 42 or a later one"):
            later.push(np.ones(10), time=41).result()
        with pytest.raises(ValueError, match="later than 41, got 40"):
            later.push(np.ones(10), time=40).result()
        later.leave_aggregation()
    w.leave_aggregation()


def test_sums_are_bit_identical_in_any_order_of_arrival(ps, name):
    """Pushes are added in the order of the client ids."""
    rng = np.random.default_rng(1)
    clients, keys, steps = 3, 5000, 3
    gradients = rng.normal(size=(steps, clients, keys)).astype(np.float32)

    def in_turn(turns, run):
        """Client `rank` pushes when the clients before it in `turns` have sent their pushes."""
        may_push = [[threading.Event() for _ in range(clients)] for _ in range(steps)]

        def of(rank):
            def program(client):
                w = client.namespace(f"{name} {run}", keys=keys, update=Adam(0.1), aggregate="mean")
                w.join_aggregation(clients)
                for step in range(steps):
                    place = turns.index(rank)
                    assert not place or may_push[step][turns[place - 1]].wait(30)
                    pushed = w.push(gradients[step, rank])
                    client._requests.call_in_order(lambda: None)  # the push has been sent
                    may_push[step][rank].set()
                    pushed.result()
                values = w.pull().result()
                w.leave_aggregation()
                return values.tobytes()

            return program

        return as_clients(ps, *map(of, range(clients)), numbers=[10 * run + rank for rank in range(clients)])

    first, second = in_turn([0, 1, 2], 1), in_turn([2, 1, 0], 2)
    assert len({*first, *second}) == 1
    backwards = gradients[:, ::-1]
    assert (sum(backwards[0]) != sum(gradients[0])).any()  # else the order would not matter


@pytest.mark.parametrize("time", [0, -1, 2**63])
def test_an_invalid_time_is_rejected(ps, time):
    w = ps.namespace("times", keys=10)
    for make in (w.push, w.put):
        with pytest.raises(ValueError, match="expected a time of 1 to 2\\*\\*63 - 1"):
            make(np.ones(10), time=time)


def test_a_time_that_is_not_later_is_rejected(ps, name):
    w = ps.namespace(name, keys=10)
    w.push(np.ones(10), time=5).result()
    with pytest.raises(ValueError, match="later than 5, got 5"):
        w.push(np.ones(10), time=5).result()
    w.push(np.ones(5), time=np.int64(9)).result()
    w.put(np.ones(5), first=3, time=10).result()
    assert w.pull(times=True).result()[1] == ((0, 3, 9), (3, 8, 10), (8, 10, 5))


@pytest.mark.parametrize("number", [-1, 2**62])
def test_an_invalid_client_id_is_rejected(ps, number):
    with pytest.raises(ValueError, match="expected a client_id from 0 to"):
        offbeat.PS(ps.cluster, client_id=number)
