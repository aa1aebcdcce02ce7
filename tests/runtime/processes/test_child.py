"""Child processes inherit this process's path, and neither its working directory nor its warnings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.wire import log_file
from support.full_disks import needs_disk

SHADOWING = ("queue.py", "types.py", "selectors.py", "random.py", "msgspec.py", "offbeat/__init__.py")
SERVED = """
with offbeat.PS.local(servers=1) as ps:
    w = ps.namespace("w", keys=3)
    w.push([1.0, 2.0, 3.0]).result()
    print(w.pull().result().tolist())
"""
INSERTED = f"import sys; sys.path[:0] = {sys.path!r}\nimport offbeat\n"
TRAINED = """
import torch, offbeat
from offbeat.strategies import AllReduce
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.join(model, optimizer, AllReduce()):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""
VALIDATED = """
import torch, offbeat
def evaluate(model, part):
    print("evaluating", flush=True)
    return {"seen": len(part)}
if __name__ == "__main__":
    tensors = torch.utils.data.TensorDataset(torch.ones(6, 100, 100))
    model = torch.nn.Linear(1000, 1000)
    for data in ([1.0] * 6, tensors):
        with offbeat.Validator(model, evaluate, data, workers=1, backend="process") as validator:
            validator.validate()
        print(validator.history[0]["seen"], flush=True)
"""


def program(folder: Path, text: str, name: str | bytes = "program.py") -> str:
    """A script in a folder of its own; `name` may contain further folders."""
    path = os.path.join(folder / "app", os.fsdecode(name))
    Path(path).parent.mkdir(parents=True)
    Path(path).write_text(text)
    return path


def run(
    *command: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=90, check=False, errors="replace"
    )


def shadows(folder: Path) -> Path:
    """A folder with files that are named like modules and end the process that imports them."""
    for name in SHADOWING:
        path = folder / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('imported by mistake')\n")
    return folder / "work"


def test_children_do_not_import_files_of_the_working_directory(tmp_path):
    script = program(tmp_path, f"import offbeat\n{SERVED}")
    done = run(sys.executable, script, cwd=shadows(tmp_path))
    assert done.stdout == "[1.0, 2.0, 3.0]\n", done.stderr


def test_children_import_the_standard_library_of_this_process(tmp_path):
    (tmp_path / "late").mkdir()
    (tmp_path / "late/queue.py").write_text("raise SystemExit('imported by mistake')\n")
    script = program(
        tmp_path, f"import queue, sys, offbeat\nsys.path.insert(0, {str(tmp_path / 'late')!r})\n{SERVED}"
    )
    done = run(sys.executable, script)
    assert done.stdout == "[1.0, 2.0, 3.0]\n", done.stderr


def test_children_find_a_package_on_an_inserted_path(tmp_path):
    script = program(tmp_path, INSERTED + SERVED)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = run(os.path.realpath(sys.executable), "-S", script, env=env)
    assert done.stdout == "[1.0, 2.0, 3.0]\n", done.stderr


def test_children_ignore_environment_variables_that_this_process_ignores(tmp_path):
    script = program(tmp_path, INSERTED + SERVED)
    done = run(sys.executable, "-I", script, env={**os.environ, "PYTHONHOME": str(tmp_path / "no Python")})
    assert done.stdout == "[1.0, 2.0, 3.0]\n", done.stderr


def test_without_standard_error_children_get_the_null_device(tmp_path):
    script = program(
        tmp_path,
        "import os, socket, offbeat\nos.close(2)\nsocket.socket()\n"
        "with offbeat.PS.local(servers=1) as ps:\n"
        "    print(os.readlink(f'/proc/{ps.local_servers.processes[0].pid}/fd/2'))\n",
    )
    assert run(sys.executable, script).stdout == "/dev/null\n"


@pytest.mark.long
def test_names_that_are_not_valid_utf_8_are_accepted(tmp_path):
    log = os.path.join(tmp_path, os.fsdecode(b"log \xe9.jsonl"))
    script = program(tmp_path, TRAINED, b'caf\xe9/train_\xe9\n"it\'s".py')
    done = run(sys.executable, script, env={**os.environ, "OFFBEAT_RUN_LOG": log, "OFFBEAT_JOB": "\udce9"})
    assert done.returncode == 0, done.stderr
    assert log_file.read_log(log).header["command"] == 'train_\\udce9\n"it\'s".py'


@pytest.mark.long
@needs_disk
def test_evaluation_processes_need_neither_the_working_directory_nor_dev_shm(tmp_path):
    script = program(tmp_path, VALIDATED)
    mount = "mount -t tmpfs tmpfs /dev/shm && mount -o remount,ro /dev/shm"
    begin = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    done = run(*begin, sys.executable, script, cwd=shadows(tmp_path))
    assert done.stdout == "evaluating\n6\n", done.stderr  # the list only; the tensors could not be shared
    last = done.stderr.splitlines()[-1]
    assert "OffbeatError: the validation set cannot be shared with another process" in last
    assert "docker run --shm-size" in last
