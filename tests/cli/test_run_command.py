"""Promises of `offbeat run`: its options and signals reach the workers, and how they ended comes back."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.cli.main import main
from offbeat.events import AbortJob, Left
from offbeat.wire import log_file, replay
from support.run_logs import step_times, wait_until

LIMIT_S = 60.0

OFFBEAT = [sys.executable, "-m", "offbeat"]
SHOW = """
import os, sys
names = ("RANK", "WORLD_SIZE", "OFFBEAT_SLOW", "OFFBEAT_SEED", "OFFBEAT_RUN_LOG", "OFFBEAT_RUN_LOG_BYTES_MAX")
printed = [*(os.environ.get(name, "-") for name in names), *sys.argv[1:]]
open(f"printed-{os.environ['RANK']}", "w").write("|".join(printed))
"""
TRAIN = """
import offbeat, torch
from offbeat.strategies import AllReduce
from torch.utils.data import TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.join(model, optimizer, AllReduce()) as session:
    for _ in session.epochs(2):
        for (x,) in session.batches(TensorDataset(torch.randn(8, 4)), 2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
"""


def run(folder, *arguments):
    command = [*OFFBEAT, "run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.long
def test_options_reach_the_script_by_its_environment_and_the_rest_is_the_scripts(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    ours = ["--slow", "1:5", "--slow", "random:2@0.0-0.5", "--seed", "7", "--run-dir", "run"]
    ours += ["--log-bytes-max", "2000000"]
    done = run(
        tmp_path, *ours, "--standalone", "--nproc-per-node", "2", "show.py", "--seed", "8", "--slow", "x"
    )

    assert done.returncode == 0, done.stderr
    log = tmp_path / "run/log.jsonl"
    for rank in (0, 1):
        printed = (tmp_path / f"printed-{rank}").read_text()
        assert printed == f"{rank}|2|1:5;random:2@0.0-0.5|7|{log}|2000000|--seed|8|--slow|x"


@pytest.mark.long
def test_without_options_of_ours_the_environment_stays_as_it_is(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    done = run(tmp_path, "--nproc_per_node=1", "show.py")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "printed-0").read_text() == "0|1|-|-|-|-"


@pytest.mark.long
def test_a_script_that_trains_leaves_a_log_that_can_be_replayed(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(tmp_path, "--run-dir", "run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr

    log = log_file.read_log(tmp_path / "run/log.jsonl")
    assert len(step_times(log.entries)) == 2 * 2 * 2
    assert {entry.worker for entry in log.entries if isinstance(entry, Left)} == {0, 1}
    assert replay.replay(log) is None


SHOW_TLS = """
import json, os, stat
from offbeat.runtime.control.environment import TLS_VARIABLES, load_tls
assert load_tls() is not None
paths = [os.environ[name] for name in TLS_VARIABLES]
modes = [stat.S_IMODE(os.stat(path).st_mode) for path in paths]
json.dump([paths, modes], open(f"tls-{os.environ['RANK']}.json", "w"))
"""


@pytest.mark.long
def test_with_tls_all_workers_have_the_same_certificates_which_are_gone_at_the_end(tmp_path):
    (tmp_path / "train.py").write_text(SHOW_TLS + TRAIN)
    done = run(tmp_path, "--tls", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr

    (paths, modes), (others, _) = [json.loads((tmp_path / f"tls-{rank}.json").read_text()) for rank in (0, 1)]
    assert paths == others
    assert modes == [0o600] * 3
    assert not any(Path(path).parent.exists() for path in paths)


def test_tls_on_several_hosts_is_refused(tmp_path):
    done = run(tmp_path, "--tls", "--nnodes", "2", "--master-addr", "127.0.0.1", "train.py")
    assert done.returncode == 2
    assert "--tls is for jobs on one host, got --nnodes 2" in done.stderr


@pytest.mark.long
def test_a_worker_that_fails_ends_the_job_and_its_coordinator(tmp_path):
    failing = TRAIN + "            if session.worker == 1: raise RuntimeError('out of luck')\n"
    (tmp_path / "train.py").write_text(failing)
    done = run(tmp_path, "--run-dir", "run", "--standalone", "--nproc-per-node", "2", "train.py")

    # `run` returns once no process holds standard error open any more, the coordinator included.
    assert done.returncode == 1
    stops = [e for e in log_file.read_log(tmp_path / "run/log.jsonl").entries if isinstance(e, AbortJob)]
    assert [(stop.worker, stop.step) for stop in stops] == [(1, 1)]
    assert "out of luck" in stops[0].reason


def test_a_script_that_fails_is_named_with_its_rank_and_exit_code_1(tmp_path):
    (tmp_path / "fail.py").write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    done = run(tmp_path, "--standalone", "--nproc-per-node", "2", "fail.py")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "offbeat: worker 1 failed with exit code 3"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a script to launch"),
        (["--nosuch", "show.py"], "offbeat run has no option --nosuch: see offbeat run --help"),
        (["--max_restarts=3", "show.py"], "--max_restarts: to start single workers again use --replace"),
        (["--rdzv-backend", "c10d", "show.py"], "name the host of node 0 with --master-addr"),
        (["--nproc-per-node"], "'--nproc-per-node' requires an argument"),
        (["--nproc-per-node", "0", "show.py"], "expected at least 1 worker per node, got 0"),
        (["--nnodes", "1:4", "show.py"], "--nnodes must be the number of hosts, got '1:4'"),
        (["--nnodes", "2", "show.py"], "expected --master-addr, the address of node 0"),
        (["--nnodes", "2", "--node-rank", "2", "show.py"], "expected a node rank from 0 to 1, got 2"),
        (["--seed", "-1", "show.py"], "the seed must be from 0 to"),
        (["--log-bytes-max", "2000000", "show.py"], "name its folder with --run-dir"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_a_worker_starts(
    tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show.py").write_text(SHOW)
    assert main(["run", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not list(tmp_path.glob("printed-*"))


def test_with_a_coordinator_apart_a_folder_for_the_log_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OFFBEAT_COORDINATOR", "127.0.0.1:1")
    assert main(["run", "--run-dir", str(tmp_path / "run"), "show.py"]) == 2
    assert "start it with OFFBEAT_RUN_LOG, and leave --run-dir out" in capsys.readouterr().err


SIGNALLED = """
import os, signal, sys
from pathlib import Path
def note(number, frame):
    Path(f"signal-{number}-{os.environ['RANK']}").touch()
    if number == signal.SIGTERM: sys.exit(0)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGUSR1, note)
Path(f"ready-{os.environ['RANK']}").touch()
while True: signal.pause()
"""
IGNORING = """
import os, signal
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: Path(f"signal-{os.environ['RANK']}").touch())
Path(f"ready-{os.environ['RANK']}").touch()
while True: signal.pause()
"""


@contextmanager
def running(folder, script, *options):
    """`offbeat run` with two workers that have installed their handlers."""
    (folder / "script.py").write_text(script)
    process = subprocess.Popen(
        [*OFFBEAT, "run", *options, "--nproc-per-node", "2", "script.py"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_both(folder, "ready")
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_both(folder, name):
    wait_until(lambda: all((folder / f"{name}-{rank}").exists() for rank in range(2)), f"{name} of both")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_may_end_in_order_after_a_signal_to_the_launcher(tmp_path, number):
    """Both become SIGTERM for the workers, which `session.preempted` shows."""
    with running(tmp_path, SIGNALLED) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    wait_for_both(tmp_path, f"signal-{signal.SIGTERM}")
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == f"offbeat: ended by {number.name}; 2 of 2 workers ended well"


def test_sigusr1_reaches_the_workers_and_ends_nothing(tmp_path):
    with running(tmp_path, SIGNALLED) as process:
        process.send_signal(signal.SIGUSR1)
        wait_for_both(tmp_path, f"signal-{signal.SIGUSR1}")
        assert process.poll() is None


def test_a_second_signal_kills_workers_that_ignore_the_first(tmp_path):
    with running(tmp_path, IGNORING, "--shutdown-timeout", "1000") as process:
        process.send_signal(signal.SIGTERM)
        wait_for_both(tmp_path, "signal")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1] == "offbeat: ended by SIGTERM; 0 of 2 workers ended well"


def test_workers_that_ignore_a_signal_are_killed_after_the_shutdown_timeout(tmp_path):
    with running(tmp_path, IGNORING, "--shutdown-timeout", "0.1") as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_job_succeeds_without_a_worker_that_was_killed_and_names_it(tmp_path):
    (tmp_path / "die.py").write_text(
        "import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\nprint('done')"
    )
    done = run(tmp_path, "--nproc-per-node", "3", "die.py")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[2] done"]
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("offbeat: 2 workers ended well; worker 1 was killed by SIGKILL")


def test_the_job_fails_if_all_workers_were_killed(tmp_path):
    (tmp_path / "die.py").write_text("import os; os.kill(os.getpid(), 9)")
    done = run(tmp_path, "--nproc-per-node", "2", "die.py")
    assert done.returncode == 1


@pytest.mark.long
def test_in_lockstep_a_killed_worker_ends_the_job_with_the_others_errors(tmp_path):
    dying = TRAIN + "            if session.worker == 1: os.kill(os.getpid(), 9)\n"
    (tmp_path / "train.py").write_text("import os\n" + dying)
    done = run(tmp_path, "--nproc-per-node", "3", "train.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("offbeat: worker 1 was killed by SIGKILL")
    for rank in (0, 2):
        assert f"[{rank}] offbeat.errors.WorkerError: worker 1 was lost" in done.stdout
