"""`offbeat run --check`: what workers measure of their connections, and what is said of it."""

import socket
import subprocess
import sys
from collections import Counter
from itertools import combinations

import pytest

from benchmarks.namespaces import block, hosts, missing, slow_down
from offbeat.cli.doctor import Finding
from offbeat.cli.job_check import (
    Connection,
    Report,
    choose_participants,
    connect_back,
    rounds_of_pairs,
    summarize_connections,
    summarize_machines,
)
from offbeat.cli.main import main
from offbeat.runtime.launch import find_free_port, launch
from offbeat.runtime.processes import child
from support.processes import unlaunched_environ

FAST, SLOW = 1e8, 1e7
WIDE = "400"  # columns, so that no row is broken


def report(worker, address="10.0.0.1", version="2.9", addresses=()):
    found = (
        Finding(check="versions", level="ok", found=f"torch {version}"),
        Finding(check="cores", level="ok", found="2"),
    )
    return Report(
        worker=worker,
        host=f"host{worker}",
        address=address,
        addresses=addresses,
        versions=("3.11", "0.1", version),
        findings=found,
    )


def reports(count):
    return [report(worker, f"10.0.0.{worker}") for worker in range(count)]


def connections(count, rate_of, **others):
    return [
        Connection(first=a, second=b, latency_s=1e-4, bytes_per_s=rate_of(a, b), **others)
        for a, b in combinations(range(count), 2)
    ]


@pytest.mark.parametrize("count", range(2, 9))
def test_each_pair_measures_once_and_no_worker_is_in_two_pairs_at_a_time(count):
    workers = [3 * number for number in range(count)]
    rounds = [*rounds_of_pairs(workers)]
    assert len(rounds) == count - 1 + count % 2
    assert all(max(Counter(worker for pair in pairs for worker in pair).values()) == 1 for pairs in rounds)
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(workers, 2)]


def test_of_several_hosts_the_first_worker_of_each_measures_and_of_one_host_a_few():
    assert choose_participants([report(worker, f"10.0.0.{worker // 3}") for worker in range(9)]) == [0, 3, 6]
    assert choose_participants([report(worker) for worker in range(9)]) == [0, 1, 2, 3]
    assert len(choose_participants(reports(100))) == 32


def test_a_worker_with_slow_connections_only_is_named():
    found = summarize_connections(reports(4), connections(4, lambda a, b: SLOW if 2 in (a, b) else FAST))
    summary, advice = found
    assert summary.level == "ok"
    assert "800 Mbit/s and 0.10 ms" not in summary.found  # half of the connections are slow
    assert "the slowest, of workers 0 and 2, 80 Mbit/s" in summary.found
    assert advice.level == "advice"
    assert advice.found.startswith(
        "worker 2 (host2, 10.0.0.2) is connected to no other by more than 80 Mbit/s"
    )


def test_equal_connections_are_only_summarized():
    (summary,) = summarize_connections(reports(3), connections(3, lambda a, b: FAST))
    assert summary.level == "ok"
    assert summary.found.startswith("800 Mbit/s and 0.10 ms at the median of 3;")


def test_a_connection_that_fails_is_a_problem_of_two_named_workers():
    broken = Connection(first=0, second=1, error="worker-1 cannot be reached")
    (problem,) = summarize_connections(reports(2), [broken])
    assert problem.level == "problem"
    expected = "worker 0 (host0, 10.0.0.0) and worker 1 (host1, 10.0.0.1): worker-1 cannot be reached"
    assert problem.found == expected


def test_clocks_that_differ_are_named():
    measured = connections(2, lambda a, b: FAST, clock_error_s=-3.0)
    _, clocks = summarize_connections(reports(2), measured)
    assert clocks.found.endswith("differ by 3.0 s")


def test_a_pair_that_fails_in_both_directions_is_one_problem():
    one_way = [Connection(first=1, second=0, error="refused")]
    both = [Connection(first=0, second=1, error="refused"), *one_way]
    assert [one.level for one in summarize_connections(reports(2), one_way)] == ["problem"]
    assert [one.level for one in summarize_connections(reports(2), both)] == ["problem"]


def test_a_connection_back_to_a_port_that_refuses_it_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert not connect_back(3, report(1, addresses=(place,)))
    (failed,) = connect_back(3, report(1, addresses=(place,)))
    assert (failed.first, failed.second) == (3, 1)
    assert failed.error == f"{place} cannot be reached from worker 3: [Errno 111] Connection refused"


def test_equal_findings_are_one_and_different_versions_are_advice():
    merged = summarize_machines([report(0), report(1), report(2, version="2.10")])
    assert [one.found for one in merged] == [
        "torch 2.9 (workers 0, 1)",
        "torch 2.10 (workers 2)",
        "2",
        "2 different combinations of Python, offbeat and torch",
    ]
    assert [one.level for one in merged] == ["ok", "ok", "ok", "advice"]


def run(*command, **variables):
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env=unlaunched_environ(COLUMNS=WIDE, **variables),
    )


@pytest.mark.parametrize(
    "command",
    [
        ["offbeat", "run", "--check", "--nproc-per-node", "3"],
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "offbeat", "doctor"],
    ],
    ids=["offbeat run", "torchrun"],
)
def test_workers_of_a_host_measure_all_their_connections(command):
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ms at the median of 3; the slowest, of workers ") == 1
    assert ("ends all workers of a host" in done.stdout) == (command[0] != "offbeat")


def test_two_checks_in_the_same_workers_are_two():
    both = '"$0" -m offbeat doctor && "$0" -m offbeat doctor'
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = run(*torchrun, "bash", "-c", both, sys.executable)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ms at the median of 1; the slowest, of workers ") == 2


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        (["bash", "-c", 'ulimit -Sn 18; exec "$0" "$@"'], "more files and connections to be allowed, got "),
        (["env", "OFFBEAT_TLS_CA=/no/such"], "OFFBEAT_TLS_CERT and OFFBEAT_TLS_KEY are not set"),
    ],
    ids=["open files", "TLS"],
)
def test_a_problem_of_one_worker_is_in_the_table_and_all_workers_end_with_1(prefix, words):
    codes, lines = check([[], prefix], "127.0.0.1")
    assert codes == [1, 1]
    (named,) = [line for line in lines if words in line]
    assert "problem" in named
    assert "(workers 1)" in named


def test_a_worker_that_does_not_come_is_named_in_time():
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OFFBEAT_START_S": "5"}
    variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    done = run("offbeat", "doctor", **variables, MASTER_PORT=str(find_free_port()))
    assert done.returncode == 1
    assert "worker 0 waited 5 s for the arrival of workers [1]" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "script.py"], "--check looks at the job and starts no script, got script.py"),
        (["--check"], "--check needs at least 2 workers"),
    ],
)
def test_a_check_without_a_job_is_refused(arguments, words, capsys):
    assert main(["run", *arguments]) == 2
    assert words in capsys.readouterr().err


def check(prefixes, master_addr, **variables):
    """The exit codes and the lines of rank 0, with a worker for each prefix of the command."""
    lines = []
    with launch(
        child.module_command("offbeat.cli.job_check"),
        len(prefixes),
        prefix=prefixes,
        master_addr=master_addr,
        env={"COLUMNS": WIDE} | variables,
        on_output=lambda rank, line: lines.append(line) if rank == 0 else None,
        timeout_s=300,
    ) as running:
        outcomes = running.wait()
    return [outcome.returncode for outcome in outcomes], lines


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_the_host_with_the_slow_line_is_named():
    with hosts(3) as places:
        slow_down(places[2], 20_000_000)
        codes, lines = check([host.prefix for host in places], places[0].address)
    assert codes == [0, 0, 0]
    (named,) = [line for line in lines if "is connected to no other by more than" in line]
    assert "worker 2 (" in named
    assert places[2].address in named


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_two_hosts_that_a_firewall_keeps_apart_are_named():
    with hosts(3) as places:
        block(places[1], places[2])
        prefixes = [host.prefix for host in places]
        codes, lines = check(prefixes, places[0].address, OFFBEAT_START_S="8")
    assert codes == [1, 1, 1]
    (named,) = [line for line in lines if "problem" in line]
    assert places[1].address in named
    assert places[2].address in named
