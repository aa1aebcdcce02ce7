"""Promises of the command line: one clear line and exit code 2 for bad input, before anything starts."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat
from offbeat.cli.main import main
from support.averaging_log import averaging_log
from support.full_disks import needs_disk, small_disk
from support.lockstep_log import lockstep_group, log_of

OFFBEAT = [sys.executable, "-m", "offbeat"]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*arguments):
    return subprocess.Popen(
        [*OFFBEAT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


BAD = {
    "train --strategy nosuch": "unknown strategy 'nosuch': expected one of",
    "train --strategy bsp:nosuch=1": "has no 'nosuch'",
    "train --strategy bsp:timeout_s=soon": "timeout_s",
    "train --strategy bsp:timeout_s=-1": "must be finite and more than 0 s, got -1",
    "train --strategy bsp:timeout_s": "expected key=value, got 'timeout_s'",
    "train --strategy bsp:": "expected key=value",
    "train --model nosuch": "unknown model 'nosuch': expected one of mlp",
    "train --data nosuch": "unknown data set 'nosuch': expected one of digits",
    "train --workers 0": "at least 1 worker, got 0",
    "train --workers -3": "at least 1 worker, got -3",
    "train --workers many": "Invalid value for '--workers'",
    "train --workers 1443": "the data set has 1442 samples for 1443 workers",
    "train --slow 1": "slowness '1' is not understood",
    "train --slow none": "slowness 'none' is not understood",
    "train --slow 4:5": "slowness names worker 4, but the workers are 0 to 3",
    "train --slow 1:0.5": "a finite factor of at least 1",
    "train --epochs 0": "epochs must be at least 1, got 0",
    "train --epochs 1.5": "Invalid value for '--epochs'",
    "train --batch-size 0": "batch_size must be at least 1, got 0",
    "train --repeat 0": "repeat must be at least 1, got 0",
    "train --lr 0": "the learning rate must be above 0",
    "train --lr nan": "the learning rate must be above 0",
    "train --lr inf": "the learning rate must be above 0",
    "train --momentum 1": "momentum must be at least 0 and below 1",
    "train --seed -1": "the seed must be from 0",
    "train --data mnist --data-dir nosuch": "the data folder nosuch does not exist",
    "train --data mnist --data-dir .": "MNIST is not in",
    "train --data-dir file": "the data folder file does not exist",
    "train --json .": "cannot write .: it is a directory",
    "train --json nosuch/result.json": "cannot write nosuch/result.json",
    "train --run-dir file/run": "cannot write to the run folder file/run",
    "train --run-dir old": "old holds the log of another run",
    "train extra": "extra",
    "train --nosuch": "--nosuch",
    "compare --slow none --slow none": "--slow none is given twice",
    "compare --strategy bsp --strategy bsp": "--strategy bsp is given twice",
    "compare --strategy nosuch": "unknown strategy 'nosuch'",
    "compare --slow none+1:5": "'none' stands alone",
    "compare --slow 1:5+": "slowness '' is not understood",
    "compare --slow 1:5+7:2": "slowness names worker 7",
    "compare --epochs 1": "epochs must be at least 2",
    "compare --workers 0": "at least 1 worker, got 0",
    "compare --json .": "cannot write .: it is a directory",
    "compare --run-dir file": "cannot write to the run folder file",
    "run": "expected a script to launch",
    "run --slow 1:5": "expected a script to launch",
    "run --slow nosuch script.py": "slowness 'nosuch' is not understood",
    "run --seed -1 script.py": "the seed must be from 0",
    "run --log-bytes-max 5 --run-dir run script.py": "expected a size limit of at least 1048576 bytes",
    "run --log-bytes-max 1048576 script.py": "name its folder with --run-dir",
    "run --seed x script.py": "Invalid value for '--seed'",
    "run --run-dir file/run script.py": "cannot write to the run folder file/run",
    "replay": "RUN",
    "replay nosuch": "cannot read nosuch: No such file or directory",
    "replay file": "file is not a run log",
    "replay .": "cannot read log.jsonl: No such file or directory",
    "top": "RUN",
    "top nosuch": "or HOST:PORT of a running job, got 'nosuch': there is no such file",
    "top file": "file is not a run log",
    "top .": "the folder . holds no run log, log.jsonl",
    "top 127.0.0.1:9": "127.0.0.1:9 does not answer as a job does: Connection refused",
    "nosuch": "nosuch",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_is_left(line, in_empty_folder, capsys):
    Path("file").write_text("no log\n")
    Path("old").mkdir()
    Path("old/log.jsonl").write_text("{}\n")
    before = sorted(in_empty_folder.rglob("*"))

    assert main(line.split()) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert BAD[line] in printed.err
    (complaint,) = printed.err.splitlines()
    assert complaint.startswith("offbeat: ")
    assert sorted(in_empty_folder.rglob("*")) == before


@pytest.mark.long(after=1)
@pytest.mark.parametrize("line", ["train --strategy nosuch", "run --slow nosuch script.py", "replay nosuch"])
def test_bad_input_ends_the_process_with_2_without_traceback(line):
    done = subprocess.run([*OFFBEAT, *line.split()], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_every_option_is_explained(capsys):
    for command in ("train", "compare", "run", "replay"):
        assert main([command, "--help"]) == 0
        printed = capsys.readouterr().out
        assert re.search(r"--help", printed)
        options = re.findall(r"^│ +(?:\* +)?(--[a-z-]+)(.*)", printed, re.MULTILINE)
        assert all(len(text.strip(" │")) > 10 for _, text in options), options


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "Usage: offbeat" in capsys.readouterr().out


def test_the_version_is_answered_without_torch_and_before_a_command_is_read():
    code = (
        "import sys\n"
        "from offbeat.cli.main import main\n"
        "assert main(['--version', 'nosuch']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"offbeat {offbeat.__version__}\n"


def test_replay_of_an_unchanged_log_is_identical(capsys):
    log_of("log.jsonl", lockstep_group())

    assert main(["replay", "."]) == 0
    assert capsys.readouterr().out == "identical: 3 events, 1 actions\n"


def test_replay_counts_the_averagings_of_models_and_those_that_moved_their_mean(capsys):
    averaging_log("log.jsonl")

    assert main(["replay", "log.jsonl"]) == 0
    assert "\naveragings of models: 1, of which 1 moved the mean of all models" in capsys.readouterr().out


def test_replay_reports_the_first_difference(capsys):
    log_of("log.jsonl", lockstep_group(step=3))

    assert main(["replay", "log.jsonl"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("entry 1 (line 2)")
    assert '"step":3' in printed
    assert '"step":0' in printed


@pytest.mark.long
@needs_disk
def test_in_a_read_only_folder_the_run_log_is_written_to_the_temporary_files(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    line = "train --workers 1 --epochs 1 --batch-size 512"
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=60)
        done = subprocess.run(
            [*OFFBEAT, *line.split()],
            cwd=disk,
            env=os.environ | {"TMPDIR": str(temporary), "COLUMNS": "300"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    (log,) = temporary.glob("offbeat-*/log.jsonl")
    printed = f"offbeat: cannot write to {disk}; the run log goes to {log.parent}"
    assert printed in done.stderr.splitlines()
    assert str(log) in done.stdout


def joined_pid(log, worker):
    for line in Path(log).read_text().splitlines():
        event = json.loads(line)
        if event.get("type") == "Joined" and event["worker"] == worker:
            return int(event["location"].rpartition(" ")[2])
    raise AssertionError(f"worker {worker} is not in the log")


@pytest.fixture
def endless_training():
    """A training of two workers that has ended its first epoch, and would continue for long."""
    process = start("train", "--workers", "2", "--epochs", "1000000", "--run-dir", "run")
    try:
        first = next(line for line in process.stderr if line.startswith(("epoch 1 ", "offbeat:")))
        assert first.startswith("epoch 1 "), first
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_a_killed_worker_ends_the_training_with_1_and_is_named(endless_training):
    process = endless_training
    os.kill(joined_pid("run/log.jsonl", 1), signal.SIGKILL)
    out, err = process.communicate(timeout=120)

    assert process.returncode == 1, err
    last = err.splitlines()[-1]
    assert last.startswith("offbeat: worker 1 was killed by SIGKILL")
    assert last.endswith("(full output of the workers: run/output.txt)")
    assert "Traceback" not in err
    assert out == ""
    assert "worker 1 was lost" in Path("run/output.txt").read_text()


@pytest.mark.long
def test_ctrl_c_ends_every_worker_and_exits_with_130(endless_training):
    process = endless_training
    pids = [joined_pid("run/log.jsonl", worker) for worker in (0, 1)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)

    assert process.returncode == 130
    assert "Traceback" not in err
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
