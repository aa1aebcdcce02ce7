"""`offbeat run --check`: what workers measure of their connections, and what is said of it."""

import os
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
    rounds_of_pairs,
    summarize_connections,
    summarize_machines,
)
from offbeat.cli.main import main
from offbeat.runtime.launch import find_free_port, launch
from offbeat.runtime.processes import child

FAST, SLOW = 1e8, 1e7
WIDE = "400"  # columns, so that no row is broken


def report(worker, address="10.0.0.1", version="torch 2"):
    found = (
        Finding(check="versions", level="ok", found=version),
        Finding(check="cores", level="ok", found="2"),
    )
    return Report(worker=worker, host=f"host{worker}", address=address, addresses=(), findings=found)


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


def test_equal_findings_are_one_and_different_versions_a_problem():
    merged = summarize_machines([report(0), report(1), report(2, version="torch 3")])
    assert [one.found for one in merged] == [
        "torch 2 (workers 0, 1)",
        "torch 3 (workers 2)",
        "2",
        "2 different ones",
    ]
    assert [one.level for one in merged] == ["ok", "ok", "ok", "problem"]


def run(*command, **variables):
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": WIDE} | variables,
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


def check_between(places):
    """The exit codes and the lines of rank 0, one worker at each place."""
    lines = []
    with launch(
        child.module_command("offbeat.cli.job_check"),
        len(places),
        prefix=[host.prefix for host in places],
        master_addr=places[0].address,
        env={"COLUMNS": WIDE},
        on_output=lambda rank, line: lines.append(line) if rank == 0 else None,
        timeout_s=300,
    ) as running:
        outcomes = running.wait()
    return [outcome.returncode for outcome in outcomes], "\n".join(lines)


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_the_host_with_the_slow_line_is_named():
    with hosts(3) as places:
        slow_down(places[2], 20_000_000)
        codes, shown = check_between(places)
    assert codes == [0, 0, 0]
    (named,) = [line for line in shown.splitlines() if "is connected to no other by more than" in line]
    assert "worker 2 (" in named
    assert places[2].address in named


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_two_hosts_that_a_firewall_keeps_apart_are_named():
    with hosts(3) as places:
        block(places[1], places[2])
        codes, shown = check_between(places)
    assert codes == [1, 0, 0]
    (named,) = [line for line in shown.splitlines() if "problem" in line]
    assert places[1].address in named
    assert places[2].address in named
