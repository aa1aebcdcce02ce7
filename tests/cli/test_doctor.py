"""What `offbeat doctor` finds on real machines that lack something, and in the variables of launchers."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.namespaces import missing
from offbeat.cli.doctor import check_accelerators, check_machine
from offbeat.cli.main import main
from support.processes import unlaunched_environ

CHECKS = [
    "versions",
    "settings",
    "cores",
    "accelerators",
    "open files",
    "shared memory",
    "/dev/shm",
    "temporary files",
    "data sets",
    "network",
    "host name",
    "ports",
]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1"}
WIDE = "400"  # columns, so that no row is broken
needs_namespaces = pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")


def findings(environ=()):
    return {one.check: one for one in check_machine(dict(environ))}


def doctor(*prefix, **variables):
    """The exit code and the output in a process of its own."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "offbeat", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        env=unlaunched_environ(COLUMNS=WIDE, **variables),
    )
    return done.returncode, done.stdout + done.stderr


def test_each_check_has_a_row_and_only_what_needs_something_has_advice(capsys, monkeypatch):
    environ = unlaunched_environ(COLUMNS=WIDE)
    for name in {*os.environ} - {*environ}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", WIDE)
    found = findings(environ)
    assert list(found) == CHECKS
    assert all(bool(one.advice) == (one.level != "ok") for one in found.values())
    assert main(["doctor"]) == int(any(one.level == "problem" for one in found.values()))
    shown = capsys.readouterr().out
    assert all(check in shown for check in CHECKS)


def test_too_few_files_are_a_problem_and_the_command_fails():
    code, shown = doctor("bash", "-c", 'ulimit -Sn 18; "$0" "$@"')
    assert code == 1
    assert "more files and connections to be allowed, got " in shown
    assert "raise `ulimit -n`" in shown


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        ({"OFFBEAT_SEEDS": "1"}, "advice", "no such variable (is OFFBEAT_SEED meant?)"),
        ({"OFFBEAT_SEED": "x"}, "problem", "OFFBEAT_SEED must be a whole number, got 'x'"),
        ({"OFFBEAT_METRICS": "x"}, "problem", "OFFBEAT_METRICS must be [HOST:]PORT"),
        ({"OFFBEAT_METRICS": "9400", "OFFBEAT_TENSORBOARD": "x"}, "ok", "OFFBEAT_TENSORBOARD"),
        ({"RANK": "1"}, "problem", "RANK is set and WORLD_SIZE is not"),
        ({"OFFBEAT_TLS_CA": "/no/such"}, "problem", "OFFBEAT_TLS_CERT and OFFBEAT_TLS_KEY are not set"),
        ({"OFFBEAT_TOKEN_FILE": "/no/such"}, "problem", "cannot read the job's secret from /no/such"),
        ({"OFFBEAT_SEED": "1", "PATH": "/bin"}, "ok", "OFFBEAT_SEED"),
    ],
)
def test_a_variable_that_offbeat_does_not_know_or_cannot_use_is_named(environ, level, words):
    found = findings(environ)["settings"]
    assert found.level == level
    assert words in found.found


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "advice", "ends all workers of a host when one of them dies"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "ok", "torchrun"),
        ({"SLURM_STEP_ID": "0", "SLURM_KILL_BAD_EXIT": "1"}, "advice", "ends all tasks when one of them"),
        ({"SLURM_STEP_ID": "0"}, "ok", "Slurm"),
    ],
)
def test_a_launcher_that_ends_survivors_is_named(environ, level, words):
    found = findings(environ)["launcher"]
    assert found.level == level
    assert words in found.found


def test_a_large_job_needs_more_files_of_rank_0():
    job = {"RANK": "0", "WORLD_SIZE": "1000", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    script = (
        "import os, resource; from offbeat.cli.doctor import check_machine\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "print([one.level for one in check_machine(dict(os.environ)) if one.check == 'open files'])"
    )

    def level(**variables):
        return subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env=unlaunched_environ(**variables),
        ).stdout.strip()

    assert level(**job) == "['problem']"
    assert level(**job | {"RANK": "1"}) == "['advice']"


def test_a_driver_without_a_torch_that_can_use_it_is_named(tmp_path):
    there = tmp_path / "version"
    there.touch()
    for drivers, level in (({"NVIDIA": there}, "advice"), ({"NVIDIA": tmp_path / "none"}, "ok")):
        found = check_accelerators(drivers)
        assert found.level == ("ok" if torch.accelerator.is_available() else level)


def test_a_folder_for_temporary_files_that_python_would_not_use_is_named():
    found = findings({"TMPDIR": "/no/such"})["temporary files"]
    assert found.level == "advice"
    assert found.found == "/no/such does not exist"


def test_the_port_of_the_store_is_among_those_that_hosts_must_allow():
    assert "on MASTER_PORT, 29400," in findings({"MASTER_PORT": "29400"})["ports"].found


@needs_namespaces
def test_a_container_with_little_shared_memory_and_no_network_is_described():
    script = 'mount -t tmpfs -o size=1m none /dev/shm && ip link set lo up && "$0" "$@"'
    code, shown = doctor("unshare", "--mount", "--net", "bash", "-c", script)
    assert "1 MiB free of 1 MiB" in shown
    assert "--shm-size" in shown
    assert "; no default route" in shown
    assert code == 0


@needs_namespaces
def test_a_host_on_which_no_connection_works_is_a_problem():
    code, shown = doctor("unshare", "--net")  # even its loopback interface is down
    assert "a connection to a free port of 127.0.0.1 fails" in shown
    assert code == 1
