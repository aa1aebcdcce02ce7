"""Real servers that are killed, join and leave while clients push: every push counts once."""

import random
import signal

import numpy as np
import pytest

import offbeat
from offbeat.numerics.ps.spaces import FilterSpec
from support.processes import start
from support.run_logs import wait_until

KEYS, SPARSE_KEYS = 48, 5000
WINDOW = 8  # pushes of a client in flight


def pusher(rank, emit, cluster, stop):
    """Pushes ones until the file `stop` exists; returns the number of pushes to each key.

    The values pulled with each dense push contain it and earlier ones.
    """
    chance = np.random.default_rng(rank)
    dense, sparse = np.zeros(KEYS), np.zeros(SPARSE_KEYS)
    with offbeat.PS(cluster) as ps:
        one = ps.namespace("dense", keys=KEYS, block_keys=5)
        other = ps.namespace("sparse", keys=SPARSE_KEYS, width=2)
        under_way = []
        emit("pushing")
        while not stop.exists():
            keys = np.flatnonzero(chance.random(SPARSE_KEYS) < 0.02)
            dense += 1
            sparse[keys] += 1
            pushed = one.push(np.ones(KEYS))
            pulled = one.pull(after=[pushed]), dense[0]
            under_way += [(pushed, None), pulled, (other.push(np.ones((len(keys), 2)), keys=keys), None)]
            while len(under_way) > WINDOW or (stop.exists() and under_way):
                future, least = under_way.pop(0)
                values = future.result()
                assert least is None or (values >= least).all(), (
                    f"expected values of at least {least} pushes, got {values}"
                )
    return dense, sparse


@pytest.fixture
def running(tmp_path):
    """Four servers with two replicas of everything, and three clients that push."""
    stop = tmp_path / "stop"
    with (
        offbeat.PS.local(servers=4, replicas=2, run_log=str(tmp_path / "log.jsonl"), silent_s=4.0) as ps,
        start(pusher, 3, ps.cluster, stop) as clients,
    ):
        for rank in range(3):
            assert clients.receive(rank) == "pushing"
        yield ps, clients, stop


def check(ps, clients, stop):
    """Lets the clients end and checks that the servers hold all their pushes."""
    stop.touch()
    pushed = [one.value for one in clients.ends()]
    dense, sparse = np.sum([one[0] for one in pushed], 0), np.sum([one[1] for one in pushed], 0)
    assert np.array_equal(ps.namespace("dense", keys=KEYS, block_keys=5).pull().result(), dense)
    found = ps.namespace("sparse", keys=SPARSE_KEYS, width=2).pull().result()
    assert np.array_equal(found, np.stack([sparse, sparse], 1))


def progress(ps, least):
    """Waits until at least `least` more pushes have been applied."""
    one = ps.namespace("dense", keys=KEYS, block_keys=5)
    before = one.pull(keys=[0]).result()[0]
    wait_until(lambda: one.pull(keys=[0]).result()[0] >= before + least, "any progress")


def kill(ps, *servers, number=signal.SIGKILL):
    for server in servers:
        ps.local_servers.processes[server].send_signal(number)


@pytest.mark.long
def test_servers_die_join_and_leave_under_load_and_every_push_counts_once(running):
    ps, clients, stop = running
    progress(ps, 20)
    kill(ps, 1)
    ps.wait_until_rebalanced([0, 2, 3])
    ps.local_servers.start(4)
    ps.wait_until_rebalanced([0, 2, 3, 4])
    progress(ps, 20)
    kill(ps, 0, 3)  # as many as there are replicas, at the same time
    ps.wait_until_rebalanced([2, 4])
    for server in (5, 6):
        ps.local_servers.start(server)
    ps.wait_until_rebalanced([2, 4, 5, 6])
    ps.remove_server(2)
    ps.wait_until_rebalanced([4, 5, 6])
    progress(ps, 20)
    check(ps, clients, stop)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_every_push_counts_once_under_random_changes_of_servers(running, seed):
    """Changes do not wait for the completion of earlier ones; never more than two failures unrepaired."""
    ps, clients, stop = running
    chance = random.Random(f"cluster {seed}")
    alive, fresh, unhealed = [0, 1, 2, 3], 4, 0
    for _ in range(6):
        progress(ps, chance.randrange(5))
        what = chance.choice(["kill", "come", "leave", "hang"])
        if what in ("kill", "hang") and (unhealed == 2 or len(alive) <= 2):
            ps.wait_until_rebalanced(alive)
            unhealed = 0
        if what == "come":
            ps.local_servers.start(fresh)
            alive.append(fresh)
            fresh += 1
        elif len(alive) > 2:
            server = alive.pop(chance.randrange(len(alive)))
            unhealed += what != "leave"
            if what == "leave":
                ps.remove_server(server)
            else:
                kill(ps, server, number=signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    ps.wait_until_rebalanced(alive)
    progress(ps, 5)
    check(ps, clients, stop)


@pytest.mark.long
def test_pulled_values_stay_within_the_threshold_when_servers_change():
    """Each server remembers the rows that it sent, and the client those that it received from each."""
    chance, keys = np.random.default_rng(1), np.arange(0, 3000, 3)
    values = np.zeros(3000)
    remembering = [FilterSpec("SignificantlyModified", {"threshold": 0.5})]
    with offbeat.PS.local(servers=3, replicas=2) as ps:
        w = ps.namespace("w", keys=3000, dtype="float64", pull_filters=remembering)
        changes = (
            lambda: None,
            lambda: kill(ps, 1),
            lambda: ps.wait_until_rebalanced([0, 2]),
            lambda: ps.local_servers.start(3),
            lambda: ps.wait_until_rebalanced([0, 2, 3]),
            lambda: ps.remove_server(0),
        )
        for change in changes:
            change()
            for _ in range(4):
                moved = chance.normal(0, 0.3, 3000)
                values += moved
                pushed = w.push(moved)
                assert np.abs(w.pull(after=[pushed]).result() - values).max() <= 0.5
                assert np.abs(w.pull(keys=keys, after=[pushed]).result() - values[keys]).max() <= 0.5
        received = w.filter_report()["pull received"]["significantly modified"]
        assert received.in_bytes < 0.6 * received.out_bytes
