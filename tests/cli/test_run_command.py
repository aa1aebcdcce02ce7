"""Promises of `offbeat run`: torchrun with slowness, a seed and a run log, and torchrun's exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.events import AbortJob, Left, StepTimed
from offbeat.wire import log_file, replay

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
def test_options_reach_torchrun_and_the_environment_reaches_the_script(tmp_path):
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
    done = run(tmp_path, "--nproc-per-node=1", "--standalone", "show.py")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "printed-0").read_text() == "0|1|-|-|-|-"


@pytest.mark.long
def test_a_script_that_trains_leaves_a_log_that_can_be_replayed(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(tmp_path, "--run-dir", "run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr

    log = log_file.read_log(tmp_path / "run/log.jsonl")
    assert sum(isinstance(entry, StepTimed) for entry in log.entries) == 2 * 2 * 2
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
@pytest.mark.parametrize("ours", [[], ["--replace", "1"]], ids=["torchrun", "launcher"])
def test_with_tls_all_workers_have_the_same_certificates_which_are_gone_at_the_end(tmp_path, ours):
    (tmp_path / "train.py").write_text(SHOW_TLS + TRAIN)
    done = run(tmp_path, "--tls", *ours, "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr

    (paths, modes), (others, _) = [json.loads((tmp_path / f"tls-{rank}.json").read_text()) for rank in (0, 1)]
    assert paths == others
    assert modes == [0o600] * 3
    assert not any(Path(path).parent.exists() for path in paths)


@pytest.mark.long
def test_tls_on_several_hosts_is_refused(tmp_path):
    done = run(tmp_path, "--tls", "--nnodes", "2", "train.py")
    assert done.returncode != 0
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
    assert done.stderr.splitlines()[-1].startswith("offbeat: rank 1 failed with exit code 3")
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("option", ["--nosuch", "--nproc-per-node"])
def test_a_bad_torchrun_option_is_torchruns_to_refuse(tmp_path, option):
    assert run(tmp_path, option).returncode == 2
