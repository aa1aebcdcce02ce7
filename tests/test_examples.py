"""The examples run, those with torchrun under it, are short, and behave as their docstrings describe."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.apps.sparse_lr.libsvm import write_libsvm
from offbeat.apps.sparse_lr.powerlaw import power_law_blocks
from offbeat.apps.sparse_lr.sparse import concatenate_rows

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(name, *options, workers=2, slow=""):
    done = subprocess.run(
        [*TORCHRUN, str(workers), str(EXAMPLES / name), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OFFBEAT_SLOW": slow},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_alone(name, *options):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_have_at_most_80_lines(path):
    assert len(path.read_text().splitlines()) <= 80


def test_mnist_on_digits():
    printed = run("mnist.py", "--data", "digits", "--epochs", "2", "--limit", "400")

    assert re.findall(r"^epoch (\d): test accuracy ", printed, re.MULTILINE) == ["1", "2"]


def test_mnist_reports_missing_data_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "mnist.py")],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("MNIST is not in ")
    assert len(done.stderr.splitlines()) == 1


def test_own_loop_continues_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path):
    checkpoint = str(tmp_path / "checkpoint.pt")
    whole = run("own_loop.py", "--epochs", "2").splitlines()
    begun = run("own_loop.py", "--epochs", "1", "--checkpoint", checkpoint).splitlines()
    resumed = run("own_loop.py", "--epochs", "2", "--checkpoint", checkpoint).splitlines()

    assert len(whole) == 2
    assert begun + resumed == whole


def accuracies_percent(printed):
    """As printed, one after the other: lines of several workers may be joined."""
    return [float(found) for found in re.findall(r"test accuracy ([\d.]+)%", printed)]


def test_hybrid_learns():
    printed = run("hybrid.py", "--epochs", "2")

    assert re.findall(r"^epoch (\d): norm ", printed, re.MULTILINE) == ["1", "2"]
    assert accuracies_percent(printed)[-1] > 80


def test_partial_continues_without_a_slow_worker_and_gives_it_the_same_model():
    printed = run("partial.py", "--epochs", "3", workers=3, slow="2:20")

    groups = re.findall(r"^epoch \d: workers (.*) of 3$", printed, re.MULTILINE)
    assert len(groups) == 3
    assert "0, 1" in groups
    found = accuracies_percent(printed)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert found[0] > 80


def test_workers_that_average_models_end_with_one_though_one_of_them_is_slow():
    printed = run("model_averaging.py", "--epochs", "2", workers=3, slow="2:10")

    steps = {int(worker): int(steps) for worker, steps in re.findall(r"worker (\d): (\d+) steps", printed)}
    found = accuracies_percent(printed)
    assert len(found) == len(steps) == 3
    assert len(set(found)) == 1
    assert found[0] > 80


def test_workers_that_make_local_steps_learn():
    printed = run("local_steps.py", "--epochs", "3", workers=3, slow="2:10")

    assert re.findall(r"^epoch (\d): test accuracy", printed, re.MULTILINE) == ["0", "1", "2"]
    assert accuracies_percent(printed)[-1] > 80
    assert len(re.findall(r"worker \d: \d+ steps", printed)) == 3


@pytest.mark.parametrize("strategy", ["dtssp:s_min=1,s=2", "downpour:n_push=2"])
def test_workers_of_a_parameter_server_end_with_one_model(strategy):
    found = accuracies_percent(run("bounded_staleness.py", "--strategy", strategy))

    assert len(found) == 2
    assert len(set(found)) == 1
    assert found[0] > 80


@pytest.mark.parametrize("options", [(), ("--tau", "0", "--no-kkt")], ids=" ".join)
def test_sparse_logistic_regression_of_generated_rows_finds_the_optimum(options):
    printed = run_alone("sparse_logistic_regression.py", *options)

    *passes, last = printed.splitlines()
    assert [int(one.split()[1].rstrip(":")) for one in passes] == list(range(1, len(passes) + 1))
    gap, differ = re.fullmatch(r"relative gap .*: (.*); weights that .*: (.*)", last).groups()
    assert abs(float(gap)) < 1e-6
    assert differ == "0"


def test_worker_group_finds_the_weights_though_a_worker_is_killed():
    killed, found = run_alone("worker_group.py").splitlines()

    assert killed == "worker 0 was killed, and another takes its place"
    assert float(found.removeprefix("the largest error of a weight is ")) < 1e-6


def test_sparse_logistic_regression_of_a_file(tmp_path):
    rows = concatenate_rows(list(power_law_blocks(300, 50, 1, draws=6, exponent=0.5)))
    write_libsvm(tmp_path / "rows", rows)
    printed = run_alone("sparse_logistic_regression.py", str(tmp_path / "rows"), "--l1", "3", "--blocks", "5")

    assert abs(float(re.search(r"relative gap .*: (.*); ", printed)[1])) < 1e-6


def test_validation_stops_with_the_same_epochs_however_it_is_done():
    printed = {
        how: run_alone("validation.py", "--epochs", "12", "--backend", how[0], "--decision", how[1])
        for how in (("inline", "sync"), ("thread", "rollback"))
    }
    epochs = [re.findall(r"^epoch \d+: .*, accuracy (.*)%$", text, re.MULTILINE) for text in printed.values()]
    assert epochs[0] == epochs[1]
    assert float(epochs[0][-1]) > 90
    assert all(re.search(r"^best: epoch \d+; validated", text, re.MULTILINE) for text in printed.values())
