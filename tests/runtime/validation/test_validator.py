"""`Validator`: it does not affect the training, and metrics equal those of evaluating in line.

The overlapped validation paper, section on the proposed method; specification 4.1: the invariants.
"""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassF1Score

import offbeat
from offbeat.errors import OffbeatError
from offbeat.numerics.metrics import combine_parts
from offbeat.policies.validation.overlap import BackendChoice, OverlapChooser
from offbeat.policies.validation.throttle import MinimumRate
from offbeat.runtime.validation.isolation import GlobalRandomState
from offbeat.runtime.validation.throttle import ThreadThrottle
from offbeat.strategies import AllReduce, Hybrid
from support.open_files import few_files
from support.run_logs import wait_until

BACKENDS = ["inline", "thread", "process", "auto"]
CLASSES = 4


class Samples(Dataset):
    """A data set other than a TensorDataset."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, 6, generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, position):
        return self.inputs[position], self.labels[position]


def a_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


def evaluate(model, part):
    """Evaluates with a loader, which draws from the global generator in each iteration."""
    assert not model.training
    assert not torch.is_grad_enabled()
    loss = right = 0
    for inputs, labels in DataLoader(part, batch_size=7):
        logits = model(inputs)
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(1) == labels).sum())
    torch.rand(3)
    return {"loss": loss / len(part), "right": right}


def evaluate_with_python(model, part):
    random.random()
    np.random.rand()
    return evaluate(model, part)


def evaluate_and_set_threads(model, part):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return evaluate(model, part)


def train_epoch(model, optimizer, data):
    """Uses every global generator."""
    model.train()
    for inputs, labels in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        noise = 0.01 * (random.random() + np.random.rand()) * torch.randn_like(inputs)
        F.cross_entropy(model(inputs + noise), labels).backward()
        optimizer.step()


def seed_all():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def train(model, epochs, at_the_end=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seed_all()
    for _ in range(epochs):
        train_epoch(model, optimizer, Samples(64))
        at_the_end()


def same(one, other):
    assert one.keys() == other.keys()
    names = one.keys() - {"trained"}  # also counts discarded epochs
    assert all(torch.equal(one[name], other[name]) for name in names)


def part_by_loader(model, loader):
    return evaluate(model, loader.dataset)


# No effect on the training ------------------------------------------------------------------------------


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("backend", "judge", "data"),
    [
        ("inline", evaluate_with_python, "samples"),
        ("inline", evaluate_and_set_threads, "samples"),
        ("thread", evaluate, "samples"),
        ("thread", evaluate, "tensors"),
        ("thread", part_by_loader, "loader"),
        ("process", evaluate_with_python, "samples"),
        ("process", evaluate_and_set_threads, "tensors"),
        ("auto", evaluate_with_python, "tensors"),
        ("auto", part_by_loader, "loader"),
    ],
)
def test_training_is_bit_identical_without_validation_and_metrics_are_of_the_same_weights(
    backend, judge, data
):
    epochs, held_out, weights = 4, Samples(50), []
    given = {
        "samples": held_out,
        "tensors": TensorDataset(held_out.inputs, held_out.labels),
        "loader": DataLoader(held_out, batch_size=7),
    }[data]
    alone = a_model()
    train(alone, epochs, lambda: weights.append(copy.deepcopy(alone).eval()))
    threads, after_alone = torch.get_num_threads(), GlobalRandomState()

    model, results = a_model(), []
    with offbeat.Validator(model, judge, given, backend=backend, workers=2) as validator:
        train(model, epochs, lambda: results.append(validator.validate()))
        assert after_alone.changed_generators() == []
    assert torch.get_num_threads() == threads
    same(model.state_dict(), alone.state_dict())
    with torch.no_grad():
        serial = [evaluate(then, held_out) for then in weights]
    assert [result.epoch for result in results] == list(validator.history) == list(range(epochs))
    for result, expected in zip(results, serial, strict=True):
        assert result.result()["right"] == expected["right"]
        assert result.result()["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert validator.history[result.epoch] == result.result()


def evaluate_with_torchmetrics(model, part):
    macro = MulticlassF1Score(CLASSES, average="macro")  # not a mean of the values of parts
    mean = MeanMetric()
    for inputs, labels in DataLoader(part, batch_size=7):
        logits = model(inputs)
        macro.update(logits, labels)
        mean.update(F.cross_entropy(logits, labels, reduction="none"))
    return {"f1": macro, "loss": mean}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_metrics_of_torchmetrics_are_those_of_the_whole_set(backend):
    model = a_model()
    with torch.no_grad():
        whole = evaluate_with_torchmetrics(copy.deepcopy(model).eval(), Samples(50))
    with offbeat.Validator(
        model, evaluate_with_torchmetrics, Samples(50), backend=backend, workers=3
    ) as validator:
        found = validator.validate().result()
    assert found == {name: pytest.approx(float(metric.compute()), abs=1e-6) for name, metric in whole.items()}


@pytest.mark.parametrize(
    ("judge", "what"),
    [
        (evaluate_with_python, "Python's random module and numpy.random"),
        (evaluate_and_set_threads, "torch's number of threads"),
    ],
)
def test_threads_refuse_an_evaluate_that_changes_global_state_and_undo_the_change(judge, what):
    seed_all()
    before, threads = GlobalRandomState(), torch.get_num_threads()
    with offbeat.Validator(a_model(), judge, Samples(9), backend="thread") as validator:
        before = GlobalRandomState()
        with pytest.raises(OffbeatError, match=f"evaluate changes {what}, which all threads share"):
            validator.validate()
    assert before.changed_generators() == []
    assert torch.get_num_threads() == threads


def test_a_compiled_model_is_evaluated_and_stays_compiled():
    model = a_model()
    compiled = torch.compile(model, backend="eager")
    with offbeat.Validator(compiled, evaluate, Samples(20), backend="thread", workers=2) as validator:
        train(compiled, 2, validator.validate)
    with torch.no_grad():
        expected = evaluate(model.eval(), Samples(20))
    assert validator.history[1]["right"] == expected["right"]
    assert validator.history[1]["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def evaluate_whole(model, part):
    return {"samples": len(part), "is_whole": int(type(part) is Samples)}


@pytest.mark.parametrize("backend", ["inline", "thread", "auto"])
def test_a_single_worker_evaluates_the_whole_set_without_a_wrapper(backend):
    with offbeat.Validator(a_model(), evaluate_whole, Samples(50), backend=backend) as validator:
        validator.validate()
    assert validator.history[0] == {"samples": 50, "is_whole": 1}


@pytest.mark.parametrize("strategy", [AllReduce(), Hybrid()])
def test_a_model_in_a_session_is_validated(strategy):
    model, data = a_model(), Samples(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, strategy) as session:
        with offbeat.Validator(model, evaluate, Samples(50), backend="thread", workers=2) as validator:
            for _ in session.epochs(2):
                for inputs, labels in session.batches(data, batch_size=8):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                session.refresh()
                validator.validate()
    with torch.no_grad():
        expected = evaluate(model.eval(), Samples(50))
    assert validator.history[1]["right"] == expected["right"]
    assert validator.history[1]["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def evaluate_and_count(model, part):
    return {**evaluate(model, part), "samples": len(part), "parts": 1}


def test_more_workers_than_samples_evaluate_each_sample_once_in_a_part_of_its_own():
    model, data = a_model(), Samples(3)
    with torch.no_grad():
        whole = evaluate(copy.deepcopy(model).eval(), data)
    with offbeat.Validator(model, evaluate_and_count, data, backend="thread", workers=6) as validator:
        found = validator.validate().result()
    assert found == {
        "loss": pytest.approx(whole["loss"], abs=1e-6),
        "right": whole["right"],
        "samples": 3,
        "parts": 3,
    }


# Overlapping and back-pressure --------------------------------------------------------------------------


class Gate(Samples):
    """A set that returns no sample before the gate is opened."""

    def __init__(self, count):
        super().__init__(count)
        self.is_open, self.waiting = threading.Event(), threading.Semaphore(0)

    def __getitem__(self, position):
        if threading.current_thread() is not threading.main_thread():  # a rehearsal passes
            self.waiting.release()
            assert self.is_open.wait(60)
        return super().__getitem__(position)


def test_training_continues_while_an_epoch_is_validated():
    """If the second epoch waited for the metrics of the first, this test would never end."""
    gate = Gate(8)
    with offbeat.Validator(a_model(), evaluate, gate, backend="thread", workers=2) as validator:
        first = validator.validate()
        assert gate.waiting.acquire(timeout=60)
        second = validator.validate()
        assert not first.is_done
        with pytest.raises(
            OffbeatError, match=r"epoch 0 is not done after 0\.01 s: evaluating part 0, 1 has"
        ):
            first.result(0.01)
        gate.is_open.set()
        assert first.result() == second.result()
    assert list(validator.history) == [0, 1]


def test_with_when_full_skip_epochs_are_skipped_and_reported_in_order():
    gate = Gate(8)
    options = {"backend": "thread", "workers": 2, "max_pending": 1, "when_full": "skip"}
    with offbeat.Validator(a_model(), evaluate, gate, **options) as validator:
        results = [validator.validate() for _ in range(4)]
        with pytest.raises(
            OffbeatError, match="no metrics of epoch 2: it was skipped, because others were under"
        ):
            results[2].result()
        gate.is_open.set()
        results[0].wait()
        results[1].wait()
        results.append(validator.validate())
    assert [metrics is None for metrics in validator.history.values()] == [False, False, True, True, False]
    assert list(validator.history) == list(range(5))


def test_with_when_full_block_training_waits():
    gate = Gate(8)
    with offbeat.Validator(
        a_model(), evaluate, gate, backend="thread", workers=1, max_pending=0, timeout_s=0.2
    ) as validator:
        first = validator.validate()
        with pytest.raises(OffbeatError, match=r"epoch 0 is not done after 0\.2 s"):
            validator.validate()
        gate.is_open.set()
        first.wait(60)
        validator.validate().wait(60)
    assert list(validator.history) == [0, 2]


# Errors -------------------------------------------------------------------------------------------------


def evaluate_unless_marked(model, part):
    if int(model.marked) == 1 and int(part[0][1]) >= 0:
        raise ArithmeticError("as it must")
    if int(model.marked) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"samples": len(part)}


def a_marked_model(mark):
    model = a_model()
    model.register_buffer("marked", torch.tensor(mark))
    return model


def validate_to_the_end(validator):
    validator.validate()
    validator.finish()


@pytest.mark.long(after=2)
@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_an_error_is_raised_at_an_epochs_end_with_its_traceback_and_validation_continues(backend):
    model = a_marked_model(0)
    with offbeat.Validator(
        model, evaluate_unless_marked, Samples(9), backend=backend, workers=2
    ) as validator:
        validator.validate().wait()
        model.marked.fill_(1)
        with pytest.raises(ArithmeticError, match="as it must") as raised:
            validate_to_the_end(validator)
        assert "in evaluate_unless_marked" in "".join(traceback.format_exception(raised.value))
        model.marked.fill_(0)
        validator.validate()
    assert validator.history == {0: {"samples": 9}, 2: {"samples": 9}}


def test_of_several_errors_the_first_is_raised_with_notes_of_the_others():
    model, gate = a_marked_model(0), Gate(9)
    with offbeat.Validator(model, evaluate_unless_marked, gate, backend="thread", max_pending=2) as validator:
        gate.is_open.set()
        validator.validate().wait()
        model.marked.fill_(1)
        gate.is_open.clear()
        for _ in range(3):
            validator.validate()
        gate.is_open.set()
        with pytest.raises(ArithmeticError, match="as it must") as raised:
            validator.finish()
        assert raised.value.__notes__ == [
            f"the validation of epoch {epoch} failed, too: ArithmeticError: as it must" for epoch in (2, 3)
        ]
        validator.finish()


@pytest.mark.long
def test_a_killed_validation_process_is_named_and_replaced():
    model = a_marked_model(2)
    with offbeat.Validator(
        model, evaluate_unless_marked, Samples(8), backend="process", workers=1
    ) as validator:
        validation = validator.validate()
        text = r"validation process 0 \(\d+\) ended with signal SIGKILL when it was to evaluate part 0 of"
        with pytest.raises(OffbeatError, match=text):
            validation.result()
        with pytest.raises(OffbeatError, match=text):
            validator.finish()
        model.marked.fill_(0)
        assert validator.validate().result() == {"samples": 8}


class FailingMetric:
    def merge_state(self, incoming_state):
        pass

    def compute(self):
        raise ArithmeticError("only one class")


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_error_in_compute_of_a_metric_is_raised_and_validation_continues(backend):
    returned = {"auc": FailingMetric()}
    with offbeat.Validator(
        a_model(), lambda model, part: returned, Samples(9), backend=backend, workers=2, timeout_s=20
    ) as validator:
        with pytest.raises(ArithmeticError, match="only one class"):
            validate_to_the_end(validator)
        returned["auc"] = 1
        validator.validate().wait()
    assert validator.history[validator.epoch - 1]["auc"] >= 1


def test_infinite_means_of_parts_combine_like_those_of_the_whole_set():
    losses = iter([math.inf, -math.inf])
    with offbeat.Validator(
        a_model(), lambda model, part: {"loss": next(losses)}, Samples(80), backend="inline", workers=2
    ) as validator:
        validator.validate()
    assert validator.history[0]["loss"] == math.inf
    assert math.isnan(combine_parts([(1, {"loss": math.inf}), (1, {"loss": -math.inf})])["loss"])


def test_an_interrupt_in_line_leaves_no_pending_epoch():
    def interrupt(model, part):
        raise KeyboardInterrupt

    with offbeat.Validator(a_model(), interrupt, Samples(9), backend="inline", timeout_s=20) as validator:
        with pytest.raises(KeyboardInterrupt):
            validator.validate()
    assert validator.history == {}


class Noting(nn.Module):
    """Writes to a buffer when it is evaluated, and has a tensor that is not a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(64))
        self.scale = torch.tensor([2.0])

    def forward(self, inputs):
        self.seen[: len(inputs)] = inputs
        return self.seen[: len(inputs)] * self.weight * self.scale


def evaluate_noting(model, part):
    (values,) = part.tensors
    wrong = sum(int((model(value[None]) != 2 * value).sum()) for value in values)
    return {"wrong": wrong}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_buffers_that_evaluation_writes_to_are_neither_shared_nor_kept(backend):
    data = TensorDataset(torch.arange(1.0, 41.0))
    with offbeat.Validator(
        Noting(), evaluate_noting, data, backend=backend, workers=2, monitor=offbeat.EarlyStopping("wrong")
    ) as validator:
        validator.validate()
    assert validator.history[0] == {"wrong": 0}
    assert not validator.best_state_dict()["seen"].any()


def test_a_model_whose_copy_computes_with_the_original_is_refused():
    model = nn.Linear(6, CLASSES)
    forward = model.forward
    model.forward = lambda inputs: forward(inputs)
    with offbeat.Validator(model, evaluate, Samples(9), backend="thread") as validator:
        with pytest.raises(OffbeatError, match="computes with the model itself, which trains meanwhile"):
            validator.validate()
    with offbeat.Validator(model, evaluate, Samples(9), backend="inline") as validator:
        validator.validate()
    assert list(validator.history) == [0]


def test_an_evaluate_that_returns_no_metrics_is_refused_at_once():
    with offbeat.Validator(a_model(), lambda model, part: 0.5, Samples(9), backend="thread") as validator:
        with pytest.raises(OffbeatError, match="a mapping from names to numbers"):
            validator.validate()


def validation_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("offbeat validation")]


@pytest.mark.long
def test_leaving_by_an_error_does_not_wait_for_pending_validations():
    gate = Gate(8)
    validator = offbeat.Validator(a_model(), evaluate, gate, backend="thread", workers=1)
    validation = validator.validate()
    assert gate.waiting.acquire(timeout=60)

    def interrupt():
        with validator:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pytest.warns(RuntimeWarning, match="did not end within 5 s"):
        interrupt()
    with pytest.raises(OffbeatError, match="no metrics of epoch 0: the validator was closed"):
        validation.result()
    with pytest.raises(OffbeatError, match="is closed: make another one"):
        validator.validate()
    gate.is_open.set()
    wait_until(lambda: not validation_threads(), "the thread to end with its next forward pass")


def test_an_unreferenced_validator_ends_its_threads():
    model = a_model()
    validator = offbeat.Validator(model, evaluate, Samples(8), backend="thread", workers=2)
    validator.validate().result()
    reference = weakref.ref(validator)
    del validator
    gc.collect()
    assert reference() is None
    assert not validation_threads()


SCRIPT = """
import os, sys, threading, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import offbeat

def evaluate(model, part):
    if len(part) >= 40:  # a rehearsal has fewer
        os.write(1, f"evaluating {os.getpid()}\\n".encode())  # at once, whatever other threads write
        open(os.path.join(sys.argv[3], f"{os.getpid()} {threading.get_ident()}"), "w").close()
        square = torch.eye(200)
        while sys.argv[2] == "end":
            square = (square @ square).tanh()
        time.sleep(600)
    return {"loss": 0.0}

if __name__ == "__main__":
    model, data = nn.Linear(1, 1), TensorDataset(torch.zeros(80, 1))
    workers = int(sys.argv[4])
    validator = offbeat.Validator(model, evaluate, data, backend=sys.argv[1], workers=workers, max_pending=0)
    validator.validate()
    while len(os.listdir(sys.argv[3])) < workers:
        time.sleep(0.01)
    if sys.argv[2] == "end":
        sys.exit(3)
    with validator:
        validator.validate()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def started(script, backend, what, workers=2):
    seen = script.parent / "seen"
    seen.mkdir()
    command = [sys.executable, str(script), backend, what, str(seen), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_program_may_end_during_a_validation(script, backend):
    with started(script, backend, "end") as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 3, errors
    assert output.count("evaluating") == 2


@pytest.mark.long
@pytest.mark.parametrize(("backend", "workers"), [("thread", 1), ("process", 2)])
def test_a_program_may_be_interrupted_while_it_waits_for_a_validation(script, backend, workers):
    """With threads only one: a second thread would rest as long as the first one does not call torch."""
    with started(script, backend, "wait", workers) as process:
        for _ in range(workers):
            assert process.stdout.readline().startswith("evaluating")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode in (1, -signal.SIGINT, 128 + signal.SIGINT)
    assert "KeyboardInterrupt" in errors


@pytest.mark.long
def test_validation_processes_end_with_a_killed_parent(script):
    with started(script, "process", "wait") as process:
        pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
        process.kill()
        process.wait(60)
        for pid in pids:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}/exe").exists(), f"process {pid} to end")


# Decisions on late metrics ------------------------------------------------------------------------------

LOSSES = [3.0, 2.0, 1.0, 1.5, 1.6, 0.5, 0.4, 0.3]


class Counting(nn.Module):
    """Counts the epochs for which it was trained, without and with discarded ones."""

    def __init__(self):
        super().__init__()
        self.inner = a_model()
        self.register_buffer("epochs", torch.tensor(-1))
        self.register_buffer("trained", torch.tensor(0))

    def forward(self, inputs):
        return self.inner(inputs)


class Run:
    """A training whose validations end when the next epoch has been trained, never before, unless in line.

    None of the last `holds` epochs and the one before ends before the last one has begun.
    """

    def __init__(self, decision, backend, *, losses=LOSSES, plateau=None, patience=2, holds=0):
        self.model = Counting()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.trained: list[int] = []
        self.ends: dict[int, dict] = {}
        self.may_end = threading.Condition()
        self.ends_until = 0.0  # validations of a model trained for at most so many epochs may end
        self.monitor = offbeat.EarlyStopping("loss", patience=patience)
        scheduler = (
            torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=plateau)
            if plateau is not None
            else None
        )

        def judge(model, part):
            if threading.current_thread() is not threading.main_thread():
                with self.may_end:
                    assert self.may_end.wait_for(lambda: int(model.trained) <= self.ends_until, timeout=60)
            return {"loss": losses[int(model.epochs)]}

        seed_all()
        last = None
        with offbeat.Validator(
            self.model,
            judge,
            Samples(8),
            backend=backend,
            workers=1,
            decision=decision,
            max_pending=max(2, holds),
            monitor=self.monitor,
            plateau=scheduler,
            restores=[self.optimizer, *([] if scheduler is None else [scheduler])],
        ) as self.validator:
            for epoch in self.validator.epochs(len(losses)):
                is_last = epoch == len(losses) - 1
                self.trained.append(epoch)
                self.model.epochs += 1
                self.model.trained.fill_(len(self.trained))
                train_epoch(self.model, self.optimizer, Samples(32))
                if last is not None and epoch < len(losses) - holds:
                    self.let_end(len(self.trained) - 1)
                    last.wait()
                self.ends[epoch] = copy.deepcopy(self.model.state_dict())
                last = self.validator.validate()
                if is_last:
                    self.let_end(math.inf)
            self.let_end(math.inf)
        self.rate = self.optimizer.param_groups[0]["lr"]

    def let_end(self, trained):
        with self.may_end:
            self.ends_until = max(self.ends_until, trained)
            self.may_end.notify_all()


def test_with_decision_sync_training_stops_when_the_patience_ends():
    run = Run("sync", "inline")
    assert run.trained == [0, 1, 2, 3, 4]
    assert run.validator.stopped
    same(run.model.state_dict(), run.ends[4])
    same(run.validator.best_state_dict(), run.ends[2])


def test_rollback_ends_with_exactly_the_weights_of_decision_sync():
    in_step, late = Run("sync", "inline"), Run("rollback", "thread")
    assert late.trained == [0, 1, 2, 3, 4, 5]  # the last one is discarded
    same(late.model.state_dict(), in_step.model.state_dict())
    same(late.validator.best_state_dict(), in_step.validator.best_state_dict())
    assert late.validator.history == in_step.validator.history
    momentum = [state["momentum_buffer"] for state in late.optimizer.state.values()]
    expected = [state["momentum_buffer"] for state in in_step.optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(momentum, expected, strict=True))


def test_with_decision_lag_training_stops_an_epoch_later_and_keeps_the_best_snapshot():
    late = Run("lag", "thread")
    assert late.trained == [0, 1, 2, 3, 4, 5]
    assert late.validator.stopped
    same(late.model.state_dict(), late.ends[5])
    same(late.validator.best_state_dict(), late.ends[5])  # the epoch with the smallest loss
    assert late.monitor.best_epoch == 5


def test_rollback_repeats_the_epoch_that_a_lower_learning_rate_would_have_changed():
    in_step = Run("sync", "inline", plateau=0, patience=None)
    late = Run("rollback", "thread", plateau=0, patience=None)
    assert in_step.trained == list(range(8))
    assert late.trained == [0, 1, 2, 3, 4, 4, 5, 5, 6, 7]
    assert late.rate == in_step.rate == 0.025
    same(late.model.state_dict(), in_step.model.state_dict())
    assert late.validator.history == in_step.validator.history


def test_a_plateau_keeps_its_state_in_a_rollback():
    options = {"losses": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "plateau": 1, "patience": None, "holds": 6}
    in_step, late = Run("sync", "inline", **options), Run("rollback", "thread", **options)
    assert late.rate == in_step.rate == 0.025
    same(late.model.state_dict(), in_step.model.state_dict())


def test_the_last_epoch_may_be_rolled_back_too():
    """Its metrics arrive when the training has finished."""
    options = {"losses": [1.0, 2.0, 0.5], "plateau": 0, "patience": None, "holds": 1}
    in_step, late = Run("sync", "inline", **options), Run("rollback", "thread", **options)
    assert late.trained == [0, 1, 2, 2]
    same(late.model.state_dict(), in_step.model.state_dict())


def test_there_is_no_best_snapshot_without_a_monitor_or_an_epoch():
    with offbeat.Validator(a_model(), evaluate, Samples(8), backend="inline") as validator:
        with pytest.raises(OffbeatError, match="expected a monitor"):
            validator.best_state_dict()
    with offbeat.Validator(
        a_model(), evaluate, Samples(8), backend="inline", monitor=offbeat.EarlyStopping("loss")
    ) as validator:
        with pytest.raises(OffbeatError, match="no epoch has been validated yet"):
            validator.best_state_dict()


def test_a_missing_monitored_metric_is_named():
    with offbeat.Validator(
        a_model(), evaluate, Samples(8), backend="inline", monitor=offbeat.EarlyStopping("f1")
    ) as validator:
        with pytest.raises(
            OffbeatError, match="expected evaluate to return 'f1', which is watched, got loss"
        ):
            validator.validate()


# Rejected input -----------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (Stream(), r"a length and samples by position \(a map-style data set\), got Stream"),
        (Samples(0), "is empty: expected at least one sample"),
        (DataLoader(Samples(9), shuffle=True), "in order, got one with RandomSampler: pass shuffle=False"),
        (DataLoader(Samples(9), sampler=SequentialSampler(range(4))), "in order, got one with Sequential"),
        (DataLoader(Samples(9), batch_sampler=[[1, 2]]), "in order, got one with list"),
        (DataLoader(Samples(9), batch_size=2, drop_last=True), "keeps the last batch: pass drop_last=False"),
    ],
)
def test_data_sets_that_cannot_be_divided_are_refused(data, text):
    with pytest.raises(OffbeatError, match=text):
        offbeat.Validator(a_model(), evaluate, data)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "fork"}, "a backend of auto, inline, thread, process, stream, got 'fork'"),
        ({"decision": "late"}, "a decision of sync, lag, rollback, got 'late'"),
        ({"workers": 0}, "at least 1 sample and 1 part, got 9 and 0"),
        ({"max_pending": -1}, "max_pending to be at least 0"),
        ({"when_full": "drop"}, "block or skip"),
        ({"timeout_s": 0.0}, "a finite timeout above 0 s"),
        ({"timeout_s": math.inf}, "a finite timeout above 0 s, got inf"),
        ({"timeout_s": math.nan}, "a finite timeout above 0 s, got nan"),
    ],
)
def test_bad_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        offbeat.Validator(a_model(), evaluate, Samples(9), **options)


def test_a_plateau_without_a_monitor_is_refused():
    optimizer = torch.optim.SGD(a_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="a monitor together with plateau"):
        offbeat.Validator(
            a_model(),
            evaluate,
            Samples(9),
            plateau=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        )


def test_streams_need_a_gpu():
    with pytest.raises(OffbeatError, match=r"on an accelerator .* for backend='stream', got one on the CPU"):
        offbeat.Validator(a_model(), evaluate, Samples(9), backend="stream")


def batches(model, loader):
    return {"batches": len(list(loader)), "samples": sum(len(labels) for _, labels in loader)}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_with_its_own_batches_is_divided_by_batches(workers):
    data = Samples(16)
    loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=False))
    with offbeat.Validator(a_model(), batches, loader, backend="thread", workers=workers) as validator:
        validator.validate()
    assert validator.history[0] == {"batches": 4, "samples": 16}


def test_an_evaluate_that_cannot_be_sent_to_a_process_is_refused():
    with pytest.raises(OffbeatError, match=r"cannot be sent to another process .*top level of a module"):
        offbeat.Validator(a_model(), lambda model, part: {}, Samples(9), backend="process", workers=1)


def test_a_process_that_cannot_start_for_lack_of_files_raises_an_error():
    for free in range(8):
        with few_files(free), pytest.raises(OffbeatError) as refused:
            offbeat.Validator(a_model(), evaluate, Samples(9), backend="process", workers=1)
        assert "offbeat validation 0 did not start: too many open files: raise `ulimit -n`" in str(
            refused.value
        )


class SentOnce(Samples):
    """Cannot be sent to a second process."""

    def __init__(self, count):
        super().__init__(count)
        self.is_sent = False

    def __getstate__(self):
        if self.is_sent:
            raise TypeError("it has been sent already")
        self.is_sent = True
        return vars(self)


def test_processes_end_if_another_one_cannot_be_started():
    with pytest.raises(OffbeatError, match="it has been sent already"):
        offbeat.Validator(a_model(), evaluate, SentOnce(9), backend="process", workers=3)
    assert [one.name for one in multiprocessing.active_children() if "validation" in one.name] == []


# Decisions of `auto` ------------------------------------------------------------------------------------


def test_auto_measures_the_first_epoch_in_line_and_gives_the_reason():
    with offbeat.Validator(a_model(), evaluate, Samples(9)) as validator:
        assert (validator.backend, validator.reason) == ("inline", "the first epoch is measured")
        assert validator.validate().is_done
        assert "training took" in validator.reason


def evaluate_count(model, part):
    return {"loss": 1 / (2 + int(model.epochs))}


@pytest.mark.long
def test_auto_may_switch_to_processes_with_shared_memory():
    """`auto` would choose processes only after minutes of gain, so that the test sets the choice."""
    model = Counting()
    monitor = offbeat.EarlyStopping(
        "loss"
    )  # each epoch is better, so that the previous snapshot's memory is freed
    with offbeat.Validator(model, evaluate_count, Samples(50), workers=2, monitor=monitor) as validator:
        for epoch in validator.epochs(4):
            model.epochs += 1
            validator.validate().wait()
            if epoch == 0:
                validator._backend._apply_choice(BackendChoice(backend="process", reason="set by the test"))
                validator._backend._chooser = None  # no further choice
            assert validator.backend == "process"
    losses = [metrics["loss"] for metrics in validator.history.values()]
    assert losses == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])


def evaluate_with_processes(model, part):
    """Starts processes of its own, which a validation process cannot do."""
    loader = torch.utils.data.DataLoader(part, batch_size=10, num_workers=1)
    return {"loss": float(sum(map(len, loader))) + int(model.epochs)}


@pytest.mark.long
def test_auto_stays_in_line_if_evaluate_fails_in_a_process():
    model = Counting()
    with offbeat.Validator(model, evaluate_with_processes, Samples(50), backend="auto") as validator:
        for epoch in validator.epochs(3):
            model.epochs += 1
            validator.validate()
            if epoch == 0:
                validator._backend._apply_choice(BackendChoice(backend="process", reason="set by the test"))
            assert validator.backend == "inline"
            if epoch == 0:
                assert "evaluate fails in a process of its own (AssertionError: daemonic" in validator.reason
    assert validator.history == {epoch: {"loss": 10.0 + epoch} for epoch in range(3)}


def slow_in_threads(model, part):
    """Begins slower in a thread, with the same result."""
    total = torch.zeros(())
    for call in range(2000):
        if call < 50 and threading.current_thread() is not threading.main_thread():
            threading.Event().wait(0.002)
        total = total + 1
    return {"loss": float(total) + int(model.epochs)}


@pytest.mark.parametrize("waits", ["", "for the result", "and looks whether it is there"])
def test_auto_pauses_slow_threads_until_the_training_waits(waits):
    model = Counting()
    with offbeat.Validator(model, slow_in_threads, Samples(50)) as validator:
        validator._backend._chooser = OverlapChooser(("thread",), cores=10**6, start_s=0.0)
        for _ in validator.epochs(5):
            model.epochs += 1
            threading.Event().wait(0.05)  # trains
            validation = validator.validate()
            if waits == "and looks whether it is there":
                wait_until(lambda validation=validation: validation.is_done, "the result")
            if waits:
                assert validation.result() == {"loss": 2000.0 + int(model.epochs)}
        if not waits:
            assert validator.backend == "inline"
            assert "during training, evaluating is more than 2 times as slow" in validator.reason
    assert validator.history == {epoch: {"loss": 2000.0 + epoch} for epoch in range(5)}


def test_a_thread_that_is_too_slow_rests_until_the_training_waits():
    throttle = ThreadThrottle(1, MinimumRate(check_after_s=1e-6, calls_per_s_min=1e9, rest_s=60.0))
    is_through = threading.Event()

    def evaluate():
        with throttle.evaluating_part() as called:
            while not throttle.is_slow:
                called()
            called()
            is_through.set()

    thread = threading.Thread(target=evaluate)
    thread.start()
    wait_until(lambda: throttle.is_slow, "a thread that is too slow")
    assert not is_through.is_set()
    with throttle.training_waits():
        assert is_through.wait(60)
    thread.join(60)


def one_after_the_other(throttle, threads, end):
    """Have so many threads evaluate; return the number of parts in progress at the start of each."""
    lock = threading.Lock()
    under_way, seen = [], []

    def evaluate():
        with throttle.evaluating_part() as called:
            with lock:
                under_way.append(1)
                seen.append(len(under_way))
            called()
            end(called)
            with lock:
                under_way.pop()

    started = [threading.Thread(target=evaluate, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()
    return seen


def test_one_thread_evaluates_until_rates_are_known_and_the_next_when_it_ends():
    throttle, seen = ThreadThrottle(4, None), []
    rest = threading.Thread(target=lambda: seen.extend(one_after_the_other(throttle, 3, lambda called: None)))
    with throttle.evaluating_part():
        rest.start()
        wait_until(lambda: len(throttle._throttle._turns) == 4, "three that rest")
        turns = [*throttle._throttle._turns]
        assert [turn.may_run for turn in turns] == [True, False, False, False]
    rest.join(60)
    assert seen == [1, 1, 1]
    assert not any(turn.is_forced for turn in turns), "the threads were resumed, and did not time out"


def test_no_thread_rests_after_lift_limit():
    throttle, all_of_them = ThreadThrottle(3, None), threading.Barrier(3)
    throttle.lift_limit()
    assert max(one_after_the_other(throttle, 3, lambda called: all_of_them.wait(60))) == 3


def test_a_failed_thread_lets_the_next_one_run():
    throttle = ThreadThrottle(2, None)

    def fail():
        with throttle.evaluating_part() as called:
            called()
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert not throttle._throttle._turns, "the failed thread still counts as one that evaluates"


def test_a_resting_thread_resumes_after_its_maximum_rest_and_does_not_rest_again():
    throttle = ThreadThrottle(1, MinimumRate(check_after_s=1e-6, calls_per_s_min=1e9, rest_s=0.01))
    states = queue.SimpleQueue()

    def evaluate():
        with throttle.evaluating_part() as called:
            (turn,) = throttle._throttle._turns
            states.put((turn.may_run, turn.is_forced))
            while not throttle.is_slow:
                called()  # the last one rests, and nothing but the time limit ends that
            states.put((turn.may_run, turn.is_forced))
            with throttle.training_waits():
                called()
            states.put((turn.may_run, turn.is_forced))  # the training no longer waits

    threading.Thread(target=evaluate, daemon=True).start()
    assert [states.get(timeout=60) for _ in range(3)] == [(True, False), (True, True), (True, True)]


def test_auto_with_decision_sync_stays_in_line():
    with offbeat.Validator(a_model(), evaluate, Samples(9), decision="sync") as validator:
        assert validator.backend == "inline"
        assert validator.reason == "training waits for the metrics anyway"
