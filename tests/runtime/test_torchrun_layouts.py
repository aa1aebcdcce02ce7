"""What docs/torchrun.md says of each layout: one of three workers is killed at step 40 under `partial`.

Each launcher is a real process: torchrun's agents, or `offbeat run`; three of them with one worker each stand
for three hosts. All workers are at a gate when one is killed.
"""

import signal

import pytest

from offbeat.events import Joined, Lost
from support.coordinator_service import service
from support.jobs import parent
from support.launchers import OFFBEAT_RUN, TORCHRUN, launchers
from support.newcomer_training import EPOCHS, GATE_STEP, Gate
from support.processes import find_free_port
from support.run_logs import wait_for_entry, wait_until
from support.sample_counting import SAMPLES

pytestmark = pytest.mark.long

BARRIER = "Waiting 300 seconds for other agents to finish"
KILLED = "was killed by SIGKILL (unless a person sent it: by the kernel, out of memory)"
ADVICE = "start the script with 'offbeat run' instead"


@pytest.fixture
def gate(tmp_path):
    with Gate(tmp_path) as gate:
        yield gate


def kill_at_the_gate(running, rank):
    running.wait_until_all_are_at_the_gate()
    running.kill(rank)


def wait_for_loss(running, rank):
    wait_for_entry(running.gate.log, "the loss", lambda one: isinstance(one, Lost) and one.worker == rank)


def one_agent_per_worker(running, *options):
    for node in range(3):
        running.start(
            *TORCHRUN, "--nnodes", "3", *(option.format(node=node, is_first=node == 0) for option in options)
        )


def static(port):
    return ("--node-rank", "{node}", "--master-addr", "127.0.0.1", "--master-port", str(port))


def c10d(port):
    """The first agent hosts the rendezvous."""
    return (
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "layout"),
        *("--rdzv-conf", "is_host={is_first}"),
    )


def assert_trained(found, workers):
    """Checks that just these workers left the job at its end, and that each sample was used once an epoch."""
    assert sorted(found) == list(workers)
    for one in found.values():
        assert not one["preempted"]
        assert one["uses"] == [float(EPOCHS)] * SAMPLES


# torchrun, one agent for all workers ------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_one_agent_ends_all_workers(tmp_path, gate, victim):
    """They get SIGTERM, may save a checkpoint, and leave."""
    with launchers(tmp_path, gate) as running:
        running.start(*TORCHRUN, "--standalone", "--nproc-per-node", "3")
        kill_at_the_gate(running, victim)
        others = {0, 1, 2} - {victim}
        wait_until(lambda: all((tmp_path / f"signalled-{rank}").exists() for rank in others), "SIGTERM")
        gate.open()
        assert running.code() == 1
    assert f"exitcode  : {-signal.SIGKILL}" in running.output()
    assert running.output().count(ADVICE) == 1
    found = running.results()
    assert set(found) == others
    assert {one["preempted"] for one in found.values()} == {True}


@pytest.mark.parametrize("victim", [0, 1])
def test_one_agent_with_restarts_starts_all_workers_again_from_the_checkpoint(tmp_path, gate, victim):
    with launchers(tmp_path, gate) as running:
        running.start(*TORCHRUN, "--standalone", "--nproc-per-node", "3", "--max-restarts", "3")
        kill_at_the_gate(running, victim)
        gate.open()
        assert running.code() == 0, running.output()
    found = running.results(attempt=1)
    assert_trained(found, [0, 1, 2])
    assert all(one["first"] >= GATE_STEP for one in found.values())


# torchrun, one agent for each worker ------------------------------------------------------------------------


def test_static_agents_of_the_others_wait_300_s_after_their_workers_are_done(tmp_path, gate):
    with launchers(tmp_path, gate, LOGLEVEL="INFO") as running:
        one_agent_per_worker(running, *static(find_free_port()))
        kill_at_the_gate(running, 1)
        assert running.code(1) == 1
        gate.open()
        for node in (0, 2):
            wait_until(lambda node=node: BARRIER in running.output(node), f"the barrier of node {node}")
        assert [running.processes[node].poll() for node in (0, 2)] == [None, None]
        for process in running.processes:
            process.kill()
    assert_trained(running.results(), [0, 2])
    assert ADVICE not in running.output(0)


def test_static_agents_of_the_others_end_at_once_where_rank_0_was_killed(tmp_path, gate):
    """Its agent has the store at which the others would meet."""
    with launchers(tmp_path, gate) as running:
        one_agent_per_worker(running, *static(find_free_port()))
        kill_at_the_gate(running, 0)
        assert running.code(0) == 1
        gate.open()
        assert [running.code(node) for node in (1, 2)] == [0, 0]
    assert_trained(running.results(), [1, 2])


def test_a_static_agent_with_restarts_starts_a_worker_of_a_new_attempt_that_finds_no_job(tmp_path, gate):
    with launchers(tmp_path, gate, OFFBEAT_START_S="10") as running:
        one_agent_per_worker(running, *static(find_free_port()), "--max-restarts", "1")
        kill_at_the_gate(running, 1)
        assert running.code(1) == 1
        gate.open()
        wait_until(lambda: set(running.results()) == {0, 2}, "the end of the others")
        for process in running.processes:
            process.kill()
    assert "rank 0 has not opened the job" in running.output(1)
    assert_trained(running.results(), [0, 2])


@pytest.mark.parametrize("victim", [0, 1])
def test_static_agents_with_restarts_replace_single_workers_of_one_attempt(tmp_path, gate, victim):
    """With OFFBEAT_ATTEMPT the worker that is started again is of the running job's attempt."""
    with launchers(tmp_path, gate, OFFBEAT_ATTEMPT="0") as running:
        one_agent_per_worker(running, *static(find_free_port()), "--max-restarts", "1")
        kill_at_the_gate(running, victim)
        gate.open_for(3)
        assert [running.code(node) for node in range(3)] == [0, 0, 0]
    assert_trained(running.results(), sorted({0, 1, 2, 3} - {victim}))


def worker_of(running, node):
    """The rank of an agent's worker, which c10d draws."""
    agent = running.processes[node].pid
    (rank,) = (rank for rank in range(3) if any(parent(pid) == agent for pid in running.started(rank)))
    return rank


def test_c10d_agents_of_the_others_wait_300_s_after_their_workers_are_done(tmp_path, gate):
    with launchers(tmp_path, gate, LOGLEVEL="INFO") as running:
        one_agent_per_worker(running, *c10d(find_free_port()))
        running.wait_until_all_are_at_the_gate()
        victim = worker_of(running, 1)
        running.kill(victim)
        assert running.code(1) == 1
        gate.open()
        for node in (0, 2):
            wait_until(lambda node=node: BARRIER in running.output(node), f"the barrier of node {node}")
        for process in running.processes:
            process.kill()
    assert_trained(running.results(), sorted({0, 1, 2} - {victim}))


def test_c10d_agents_of_the_others_end_their_workers_where_that_of_the_rendezvous_ends(tmp_path, gate):
    with launchers(tmp_path, gate) as running:
        one_agent_per_worker(running, *c10d(find_free_port()))
        running.wait_until_all_are_at_the_gate()
        victim = worker_of(running, 0)
        running.kill(victim)
        assert running.code(0) == 1
        others = {0, 1, 2} - {victim}
        wait_until(lambda: all((tmp_path / f"signalled-{rank}").exists() for rank in others), "SIGTERM")
        gate.open()
        assert [running.code(node) for node in (1, 2)] == [1, 1]
    assert {one["preempted"] for one in running.results().values()} == {True}


# offbeat run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_offbeat_run_goes_on_with_the_others(tmp_path, gate, victim):
    with launchers(tmp_path, gate) as running:
        running.start(*OFFBEAT_RUN, "--nproc-per-node", "3")
        kill_at_the_gate(running, victim)
        wait_for_loss(running, victim)
        gate.open()
        assert running.code() == 0, running.output()
    assert running.output().splitlines()[-1] == f"offbeat: 2 workers ended well; worker {victim} {KILLED}"
    assert ADVICE not in running.output()
    assert_trained(running.results(), sorted({0, 1, 2} - {victim}))


def on_three_nodes(running, *options):
    place = ("--node-rank", "{node}", *options)
    for node in range(3):
        running.start(*OFFBEAT_RUN, "--nnodes", "3", *(option.format(node=node) for option in place))


def at(port):
    return ("--master-addr", "127.0.0.1", "--master-port", str(port))


@pytest.mark.parametrize("victim", [0, 1])
def test_offbeat_run_on_several_nodes_goes_on_on_the_others(tmp_path, gate, victim):
    """The launcher that has no worker left says so; that of node 0 takes the store along."""
    with launchers(tmp_path, gate) as running:
        on_three_nodes(running, *at(find_free_port()))
        kill_at_the_gate(running, victim)
        assert running.code(victim) == 1
        assert running.output(victim).splitlines()[-1] == f"offbeat: worker {victim} {KILLED}"
        gate.open()
        others = sorted({0, 1, 2} - {victim})
        assert [running.code(node) for node in others] == [0, 0]
    assert_trained(running.results(), others)


@pytest.mark.parametrize("victim", [0, 2])
def test_offbeat_run_replaces_the_workers_of_its_node(tmp_path, gate, victim):
    with launchers(tmp_path, gate) as running:
        on_three_nodes(running, *at(find_free_port()), "--replace", "1")
        kill_at_the_gate(running, victim)
        gate.open_for(3)
        assert [running.code(node) for node in range(3)] == [0, 0, 0]
    assert_trained(running.results(), sorted({0, 1, 2, 3} - {victim}))
    assert running.output(victim).splitlines()[-1] == (
        f"offbeat: 1 worker ended well; worker {victim} {KILLED} and was started again"
    )


def test_a_node_whose_store_is_gone_replaces_no_worker_and_the_others_go_on(tmp_path, gate):
    """The launcher of node 0 is killed, and with it its worker; the coordinator lives on."""
    with launchers(tmp_path, gate) as running:
        on_three_nodes(running, *at(find_free_port()), "--replace", "1")
        running.wait_until_all_are_at_the_gate()
        running.processes[0].kill()
        wait_for_loss(running, 0)
        running.kill(1)
        assert running.code(1) == 1
        gate.open()
        assert running.code(2) == 0
    assert len(running.started(1)) == 1
    assert_trained(running.results(), [2])


@pytest.mark.parametrize("victim", [0, 1])
def test_with_a_coordinator_apart_any_launcher_may_be_killed_and_started_again(tmp_path, gate, victim):
    (tmp_path / "service").mkdir()
    with service(tmp_path / "service", log=gate.log) as coordinator:
        with launchers(tmp_path, gate, **coordinator.env) as running:
            on_three_nodes(running, "--replace", "1")
            running.wait_until_all_are_at_the_gate()
            running.processes[victim].kill()
            wait_for_loss(running, victim)
            running.start(*OFFBEAT_RUN, "--nnodes", "3", "--node-rank", str(victim))
            gate.open_for(3)
            assert [running.code(node) for node in sorted({0, 1, 2, 3} - {victim})] == [0, 0, 0]
        assert coordinator.ended()[0] == 0
    assert_trained(running.results(), sorted({0, 1, 2, 3} - {victim}))


def test_with_a_coordinator_apart_a_killed_worker_is_replaced(tmp_path, gate):
    (tmp_path / "service").mkdir()
    with service(tmp_path / "service", log=gate.log) as coordinator:
        with launchers(tmp_path, gate, **coordinator.env) as running:
            running.start(*OFFBEAT_RUN, "--nproc-per-node", "3", "--replace", "1")
            kill_at_the_gate(running, 0)
            wait_for_entry(gate.log, "a newcomer", lambda one: isinstance(one, Joined) and one.worker == 3)
            gate.open()
            assert running.code() == 0, running.output()
    assert_trained(running.results(), [1, 2, 3])
