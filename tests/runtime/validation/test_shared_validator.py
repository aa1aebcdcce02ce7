"""`session.validate`: the workers of a job divide the validation of each epoch among themselves."""

from __future__ import annotations

import math
import os
import signal
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.events import (
    EvaluatePart,
    Group,
    Joined,
    Lost,
    PartEvaluated,
    RolledBack,
    SendSnapshot,
    SnapshotTaken,
    ValidationFinished,
)
from offbeat.strategies import DPAR, SSP, AllReduce, Hybrid, PartialAllReduce, ServerBSP
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.group_training import compute
from support.jobs import job
from support.processes import run, values
from support.run_logs import entries_of, wait_until

STEADY = PartialAllReduce(limit=10**6)  # no worker is excluded as slow


class Samples(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, position):
        drawn = torch.Generator().manual_seed(position)
        return torch.rand(6, generator=drawn), position % 3


TRAINING, VALIDATION = Samples(64), Samples(50)


def evaluate(model, part):
    samples = [part[position] for position in range(len(part))]
    labels = torch.tensor([label for _, label in samples])
    logits = model(torch.stack([inputs for inputs, _ in samples]))
    return {"loss": F.cross_entropy(logits, labels), "right": int((logits.argmax(1) == labels).sum())}


def a_model(kind="plain"):
    torch.manual_seed(3)
    between = {"plain": [], "norm": [nn.BatchNorm1d(8)], "dropout": [nn.Dropout(0.5)]}[kind]
    return nn.Sequential(nn.Linear(6, 8), *between, nn.ReLU(), nn.Linear(8, 3))


def train_epoch(model, optimizer, session, compute_s=0.0):
    for inputs, labels in session.batches(TRAINING, batch_size=8):
        optimizer.zero_grad()
        compute(compute_s)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def state_of(model):
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


class Trained:
    """A worker's validation history, and its model's states at the ends of epochs."""

    def __init__(self, session, model, ends):
        validator = session.validator
        self.history, self.stopped, self.ends = validator.history, validator.stopped, ends
        self.last = state_of(model)
        self.best = None
        if validator.has_best:
            self.best = {name: value.numpy() for name, value in validator.best_state_dict().items()}


def train(
    rank, emit, strategy, epochs=3, kind="plain", judge=evaluate, compute_s=0.0, after_epoch=None, **options
):
    torch.set_num_threads(1)
    model, ends = a_model(kind), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "patience" in options:
        options["monitor"] = offbeat.EarlyStopping("loss", patience=options.pop("patience"))
    with offbeat.join(model, optimizer, strategy) as session:
        for epoch in session.epochs(epochs):
            train_epoch(model, optimizer, session, compute_s)
            session.validate(judge, VALIDATION, **options)
            ends[epoch] = state_of(model)
            if after_epoch is not None:
                after_epoch(epoch)
    return Trained(session, model, ends)


@torch.no_grad()
def evaluated(state, kind):
    model = a_model(kind)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
    metrics = evaluate(model.eval(), VALIDATION)
    return {"loss": pytest.approx(float(metrics["loss"]), abs=1e-6), "right": metrics["right"]}


STRATEGIES = {
    "bsp": AllReduce(),
    "hybrid": Hybrid(),
    "partial": STEADY,
    "dpar": DPAR(threshold_ms=1000.0),
    "ssp": SSP(s=2),
}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("kind", ["plain", "norm"])
@pytest.mark.parametrize("strategy", ["bsp", "hybrid", "partial", "dpar", "ssp", "server-bsp"])
def test_all_workers_receive_the_metrics_of_one_snapshot(strategy, kind, tmp_path):
    log = tmp_path / "log"
    chosen = STRATEGIES.get(strategy) or ServerBSP()
    ended = values(run(train, 3, chosen, 3, kind, env={"OFFBEAT_RUN_LOG": str(log)}))
    histories = [one.history for one in ended]
    assert list(histories[0]) == [0, 1, 2]
    assert histories[1:] == histories[:1] * 2
    over = {one.epoch: one for one in entries_of(log, ValidationFinished)}
    for epoch, metrics in histories[0].items():
        assert metrics == evaluated(ended[over[epoch].snapshot_owner].ends[epoch], kind)
        digests = {one.worker: one.digest for one in entries_of(log, SnapshotTaken) if one.epoch == epoch}
        same = [worker for worker in digests if digests[worker] == over[epoch].digest]
        for worker in same:
            assert metrics == evaluated(ended[worker].ends[epoch], kind)
        parts = [one for one in entries_of(log, EvaluatePart) if one.epoch == epoch]
        receivers = {one.receiver for one in entries_of(log, SendSnapshot) if one.epoch == epoch}
        assert {one.worker for one in parts} <= {*same, *receivers}
        assert not receivers & {*same}
    assert replay(read_log(log)) is None


def train_only(rank, emit, strategy, epochs, kind):
    torch.set_num_threads(1)
    model = a_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(epochs):
            train_epoch(model, optimizer, session)
    return state_of(model)


@pytest.mark.parametrize("strategy", ["bsp", "hybrid"])
def test_training_is_bit_identical_to_training_without_validation(strategy):
    chosen, slow = STRATEGIES[strategy], {"OFFBEAT_SLOW": "1:3"}
    without = values(run(train_only, 2, chosen, 3, "dropout"))
    for one, expected in zip(values(run(train, 2, chosen, 3, "dropout", env=slow)), without, strict=True):
        assert one.last.keys() == expected.keys()
        assert all((one.last[name] == expected[name]).all() for name in expected)


def test_a_worker_may_evaluate_several_parts_at_once(tmp_path):
    log = tmp_path / "log"
    ended = values(run(with_options, 2, AllReduce(), {"workers": 2}, env={"OFFBEAT_RUN_LOG": str(log)}))
    for one in ended:
        assert one.history == {epoch: evaluated(ended[0].ends[epoch], "plain") for epoch in (0, 1)}
    assert {one.evaluators for one in entries_of(log, SnapshotTaken)} == {2}


@pytest.mark.long
def test_workers_may_evaluate_in_processes(tmp_path):
    options = {"backend": "process", "workers": 1}
    for one in values(run(with_options, 2, AllReduce(), options)):
        assert list(one.history) == [0, 1]
        assert one.history[1] == evaluated(one.ends[1], "plain")


def with_options(rank, emit, strategy, options, **more):
    return train(rank, emit, strategy, 2, **options, **more)


# Merged metrics -----------------------------------------------------------------------------------------


def evaluate_with_torchmetrics(model, part):
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score  # a slow import

    f1, curve = MulticlassF1Score(3, average="macro"), MulticlassAUROC(3)  # not a mean of the values of parts
    for position in range(len(part)):
        inputs, label = part[position]
        logits = model(inputs[None])
        f1.update(logits, torch.tensor([label]))
        curve.update(logits, torch.tensor([label]))
    return {**evaluate(model, part), "f1": f1, "auroc": curve}


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"backend": "process", "workers": 2}])
def test_metrics_of_torchmetrics_are_those_of_the_whole_set(options):
    ended = values(run(with_options, 2, AllReduce(), options | {"judge": evaluate_with_torchmetrics}))
    for epoch in (0, 1):
        model = a_model()
        model.load_state_dict({name: torch.as_tensor(of) for name, of in ended[0].ends[epoch].items()})
        with torch.no_grad():
            whole = evaluate_with_torchmetrics(model.eval(), VALIDATION)
        merged = {name: pytest.approx(float(whole[name].compute()), abs=1e-6) for name in ("f1", "auroc")}
        expected = evaluated(ended[0].ends[epoch], "plain") | merged
        assert [one.history[epoch] for one in ended] == [expected] * 2


def test_a_metric_of_a_single_part_is_computed_from_that_part():
    (one,) = values(run(with_options, 1, AllReduce(), {"judge": counts_classes}))
    assert one.history == {0: {"first": 17}, 1: {"first": 17}}


class Classes:
    """Counts the samples of each class; a metric with the interface of torchmetrics."""

    device = torch.device("cpu")

    def __init__(self, part):
        labels = torch.tensor([part[position][1] for position in range(len(part))])
        self.metric_state = {"counts": torch.bincount(labels, minlength=3)}

    def merge_state(self, state):
        self.metric_state = {"counts": self.metric_state["counts"] + state["counts"]}

    def compute(self):
        return self.metric_state["counts"][0]


def counts_classes(model, part):
    return {"first": Classes(part)}


class DiesOnCompute(Classes):
    """Kills the first worker that computes it."""

    def compute(self):
        try:
            os.close(os.open(os.environ["FIRST_TO_MERGE"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super().compute()
        return os.kill(os.getpid(), signal.SIGKILL)


def dies_when_merging(model, part):
    return {"first": DiesOnCompute(part)}


def test_metrics_that_a_killed_worker_had_to_merge_are_merged_by_another(tmp_path):
    env = {"FIRST_TO_MERGE": str(tmp_path / "first")}
    with job(train, 3, STEADY, 3, "plain", dies_when_merging, env=env, hosts_store=True) as running:
        ended = running.ends()
    alive = [one for one in ended if one.exitcode != -signal.SIGKILL]
    assert len(alive) == 2
    assert [one.history for one in values(alive)] == [{epoch: {"first": 17} for epoch in range(3)}] * 2


class Unmergeable(Classes):
    def merge_state(self, state):
        raise RuntimeError("it cannot be merged")


def returns_what_cannot_be_merged(model, part):
    return {"first": Unmergeable(part)}


def test_an_error_in_merging_ends_the_job_and_names_the_worker():
    ended = run(train, 2, AllReduce(), 3, "plain", returns_what_cannot_be_merged)
    errors = {one.error_type: one for one in ended}
    assert errors["RuntimeError"].error == "it cannot be merged"
    assert f"worker {errors['RuntimeError'].rank} " in errors["WorkerError"].error


# Slow, hanging, killed and new workers ------------------------------------------------------------------


def is_worker(rank):
    return os.environ["RANK"] == str(rank) and threading.current_thread() is not threading.main_thread()


def stuck_on_one(model, part):
    """On worker 2, the first part takes until the epoch is finished without it."""
    log = Path(os.environ["OFFBEAT_RUN_LOG"])
    if is_worker(2) and not entries_of(log, ValidationFinished):
        wait_until(lambda: bool(entries_of(log, ValidationFinished)), "a finished epoch")
    return evaluate(model, part)


def test_a_worker_that_hangs_in_evaluate_does_not_delay_the_others(tmp_path):
    log = tmp_path / "log"
    ended = values(run(train, 3, AllReduce(), 3, "plain", stuck_on_one, env={"OFFBEAT_RUN_LOG": str(log)}))
    for one in ended:
        assert one.history == ended[0].history
        assert one.history[0] == evaluated(ended[0].ends[0], "plain")
    share = Counter(one.worker for one in entries_of(log, PartEvaluated) if one.epoch == 0)
    assert (
        share[2] <= 1 < share[0] + share[1]
    )  # one of these may evaluate all parts before the other one starts


def dies_at_once(model, part):
    if is_worker(1):
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(model, part)


def test_parts_that_a_killed_worker_had_to_evaluate_are_evaluated_by_others(tmp_path):
    log = tmp_path / "log"
    ended = run(train, 3, STEADY, 3, "plain", dies_at_once, env={"OFFBEAT_RUN_LOG": str(log)})
    assert ended[1].exitcode == -signal.SIGKILL
    first, other = values([ended[0], ended[2]])
    assert first.history == other.history
    assert list(first.history) == [0, 1, 2]
    assert first.history[2] == evaluated(first.ends[2], "plain")
    assert any(isinstance(one, Lost) for one in entries_of(log))


def test_an_excluded_worker_receives_the_metrics_too(tmp_path):
    log = tmp_path / "log"
    env = {"OFFBEAT_RUN_LOG": str(log), "OFFBEAT_SLOW": "2:20"}
    ended = values(run(train, 3, PartialAllReduce(limit=3, n_profile=2), 6, "plain", evaluate, 0.01, env=env))
    assert any(2 not in group.members for group in entries_of(log, Group))
    assert [list(one.history) for one in ended] == [list(range(6))] * 3
    assert ended[0].history == ended[1].history == ended[2].history


def joins_late(rank, emit, log):
    wait_until(lambda: bool(entries_of(log, ValidationFinished)), "a finished epoch")
    return train(rank, emit, STEADY, 8)


def trains_until_the_newcomer_joins(rank, emit, log):
    def wait_for_newcomer(model, part):
        if threading.current_thread() is not threading.main_thread() and entries_of(log, ValidationFinished):
            wait_until(
                lambda: any(one.worker == 3 for one in entries_of(log, SnapshotTaken, Joined)),
                "the newcomer",
            )
        return evaluate(model, part)

    return train(rank, emit, STEADY, 8, judge=wait_for_newcomer)


def test_a_newcomer_receives_the_metrics_of_earlier_epochs(tmp_path):
    log = tmp_path / "log"
    env = {"OFFBEAT_RUN_LOG": str(log)}
    with job(trains_until_the_newcomer_joins, 3, log, env=env) as running:
        running.add(joins_late, log)
        *_, first, newcomer = values(running.ends())
    assert newcomer.history == first.history
    assert list(newcomer.history) == list(range(8))
    assert min(newcomer.ends) > 0


def lowers_its_rate(rank, emit, strategy, log, is_new):
    """Each epoch halves the rate; the others do not end before the newcomer has joined."""
    torch.set_num_threads(1)
    if is_new:
        wait_until(lambda: len(entries_of(log, ValidationFinished)) > 3, "four epochs")
    model, rates = a_model(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    monitor = offbeat.EarlyStopping("loss")
    with offbeat.join(model, optimizer, strategy) as session:
        for epoch in session.epochs(12):
            if epoch == 5:
                wait_until(lambda: any(one.worker == 2 for one in entries_of(log, Joined)), "the newcomer")
            train_epoch(model, optimizer, session, 0.005)
            session.validate(never_better, VALIDATION, monitor=monitor, plateau=plateau, decision="sync")
            rates[epoch] = optimizer.param_groups[0]["lr"]
    return rates


def never_better(model, part):
    return {"loss": 1.0}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", ["partial", "ssp"])
def test_a_newcomer_continues_with_the_learning_rate_of_the_others(strategy, tmp_path):
    log = tmp_path / "log"
    of = (STRATEGIES[strategy], log)
    with job(lowers_its_rate, 2, *of, False, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.add(lowers_its_rate, *of, True)
        first, _, newcomer = values(running.ends())
    assert first == {epoch: 0.5**epoch for epoch in range(12)}
    assert min(newcomer) > 2
    if strategy == "ssp":
        assert newcomer == {epoch: first[epoch] for epoch in newcomer}
    else:  # the last exchange may contain a rate that was lowered already, and is lowered again
        assert all(rate >= first[epoch] / 2 for epoch, rate in newcomer.items())


def stops_before_the_newcomer_takes_part(rank, emit, strategy, log, is_new):
    torch.set_num_threads(1)
    if is_new:
        wait_until(lambda: len(entries_of(log, ValidationFinished)) > 2, "three epochs")
    model, ends = a_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = offbeat.EarlyStopping("loss", patience=2)
    with offbeat.join(model, optimizer, strategy) as session:
        for epoch in [session.epoch] if is_new else session.epochs(10):
            train_epoch(model, optimizer, session)
            session.validate(never_better, VALIDATION, monitor=monitor, decision="sync")
            ends.append(epoch)
        if rank == 1:
            wait_until(lambda: any(one.worker == 2 for one in entries_of(log, Joined)), "the newcomer")
    return ends, list(session.validator.history), state_of(model)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", ["partial", "ssp"])
def test_a_newcomer_ends_where_early_stopping_ended_the_others(strategy, tmp_path):
    """The newcomer always begins an epoch; an epoch that the others have not begun has no samples."""
    log = tmp_path / "log"
    of = (STRATEGIES[strategy], log)
    with job(
        stops_before_the_newcomer_takes_part, 2, *of, False, env={"OFFBEAT_RUN_LOG": str(log)}
    ) as running:
        running.add(stops_before_the_newcomer_takes_part, *of, True)
        (ends, history, last), _, newcomer = values(running.ends())
    assert ends == history == [0, 1, 2]
    assert newcomer[:2] == ([2] if strategy == "ssp" else [3], [0, 1, 2])
    assert strategy == "ssp" or same(newcomer[2], last)


def emits_when_it_validates(rank, emit, log, loss):
    has_metrics = threading.Event()

    def judge(model, part):
        if is_worker(0) and has_metrics.is_set():
            emit("evaluating, and the coordinator has sent metrics before")
        return {"loss": loss}

    def after_epoch(epoch):
        if epoch == 1 and rank == 0:
            wait_until(lambda: bool(entries_of(log, ValidationFinished)), "metrics in the log")
            has_metrics.set()

    return train(rank, emit, AllReduce(), 4, judge=judge, after_epoch=after_epoch)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("loss", [0.5, math.nan])
def test_validation_continues_when_the_coordinator_is_killed(loss, tmp_path):
    log = tmp_path / "log"
    with job(emits_when_it_validates, 2, log, loss, env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        running.receive(0)
        os.kill(running.coordinator(), signal.SIGKILL)
        ended = values(running.ends())
    expected = {"loss": pytest.approx(loss, nan_ok=True)}
    assert [one.history for one in ended] == [dict.fromkeys(range(4), expected)] * 2


# Decisions ----------------------------------------------------------------------------------------------

LOSSES = [3.0, 2.0, 1.0, 1.5, 1.6, 0.5, 0.4, 0.3]


class Counting(nn.Module):
    """Counts the epochs for which it was trained."""

    def __init__(self):
        super().__init__()
        self.inner = a_model()
        self.register_buffer("epochs", torch.tensor(-1))

    def forward(self, inputs):
        return self.inner(inputs)


def judge_epoch(model, part):
    return {"loss": LOSSES[int(model.epochs)]}


def stops_early(rank, emit, strategy, decision, max_pending, judge=judge_epoch):
    torch.set_num_threads(1)
    model, ends = Counting(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = offbeat.EarlyStopping("loss", patience=2)
    with offbeat.join(model, optimizer, strategy) as session:
        for epoch in session.epochs(len(LOSSES)):
            model.epochs += 1
            train_epoch(model, optimizer, session)
            ends[epoch] = state_of(model)
            session.validate(
                judge,
                VALIDATION,
                monitor=monitor,
                decision=decision,
                max_pending=max_pending,
                restores=[optimizer],
            )
    return Trained(session, model, ends)


def same(state, other):
    return state.keys() == other.keys() and all((state[name] == other[name]).all() for name in state)


def stopped_early(strategy, decision, max_pending=0):
    ended = values(run(stops_early, 3, strategy, decision, max_pending, env={"OFFBEAT_SLOW": "1:3"}))
    assert all(one.stopped for one in ended)
    assert all(list(one.ends) == list(ended[0].ends) for one in ended), "not all stopped at the same point"
    assert all(one.history == ended[0].history for one in ended)
    return ended


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", ["bsp", "partial"])
def test_with_decision_sync_all_workers_stop_when_the_patience_ends(strategy):
    ended = stopped_early(STRATEGIES[strategy], "sync")
    assert all(list(one.ends) == [0, 1, 2, 3, 4] for one in ended)
    have_best = [one for one in ended if one.best is not None]
    assert (
        have_best if strategy == "partial" else have_best == ended
    )  # a worker may end an epoch a round earlier
    assert all(same(one.best, one.ends[2]) for one in have_best)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("max_pending", [0, 2])
@pytest.mark.parametrize("strategy", ["bsp", "ssp"])
def test_with_decision_lag_all_workers_stop_max_pending_plus_one_epochs_later(strategy, max_pending):
    for one in stopped_early(STRATEGIES[strategy], "lag", max_pending):
        assert list(one.ends) == list(range(6 + max_pending))
        assert list(one.history) == list(one.ends)


@pytest.mark.long
def test_rollback_ends_with_the_weights_of_decision_sync():
    in_step = stopped_early(AllReduce(), "sync")
    for one, expected in zip(stopped_early(AllReduce(), "rollback"), in_step, strict=True):
        assert list(one.ends) == [0, 1, 2, 3, 4, 5]  # the last one is discarded
        assert same(one.last, expected.last)
        assert same(one.best, expected.best)


def waits_to_be_dropped(model, part):
    """Validations of discarded epochs are pending until the training has gone back."""
    if int(model.epochs) > 4 and threading.current_thread() is not threading.main_thread():
        log = Path(os.environ["OFFBEAT_RUN_LOG"])
        wait_until(lambda: bool(entries_of(log, RolledBack)), "a rollback")
    return judge_epoch(model, part)


def test_validations_of_discarded_epochs_are_not_waited_for(tmp_path):
    log = tmp_path / "log"
    env = {"OFFBEAT_RUN_LOG": str(log)}
    ended = values(run(stops_early, 2, AllReduce(), "rollback", 2, waits_to_be_dropped, env=env))
    assert [list(one.history) for one in ended] == [[0, 1, 2, 3, 4]] * 2
    discarded = [one for one in entries_of(log, ValidationFinished) if one.epoch > 4]
    assert {one.epoch for one in discarded} >= {5, 6}
    assert {(one.snapshot_owner, one.reason) for one in discarded} == {
        (None, "training went back to the end of epoch 4")
    }


def waits_within_training(rank, emit):
    torch.set_num_threads(1)
    model, is_informed = a_model(), threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_informed.set()

    def judge(model, part):
        if threading.current_thread() is not threading.main_thread() and not is_informed.wait(30.0):
            raise AssertionError("validate waited for an evaluation that waits for validate to return")
        return evaluate(model, part)

    with offbeat.join(model, optimizer, AllReduce()) as session:
        for epoch in session.epochs(4):
            train_epoch(model, optimizer, session)
            if epoch == 2:
                session.validator.finish()
                is_informed.clear()
            session.validate(judge, VALIDATION, max_pending=3)
        is_informed.set()
    return list(session.validator.history)


def test_finish_in_the_middle_of_training_does_not_make_later_epochs_wait():
    assert values(run(waits_within_training, 2)) == [[0, 1, 2, 3]] * 2


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", ["bsp", "ssp"])
def test_workers_that_evaluated_the_best_epoch_hold_the_evaluated_snapshot(strategy, tmp_path):
    log = tmp_path / "log"
    env = {"OFFBEAT_RUN_LOG": str(log)}
    ended = values(run(with_options, 3, STRATEGIES[strategy], {"patience": 100}, env=env))
    best = min(ended[0].history, key=lambda epoch: ended[0].history[epoch]["loss"])
    (owner,) = [one.snapshot_owner for one in entries_of(log, ValidationFinished) if one.epoch == best]
    evaluators = {one.worker for one in entries_of(log, PartEvaluated) if one.epoch == best}
    assert evaluators <= {rank for rank, one in enumerate(ended) if one.best is not None}
    assert all(same(one.best, ended[owner].ends[best]) for one in ended if one.best is not None)


def ends_last(rank, emit, log):
    torch.set_num_threads(1)
    model = a_model()
    model.register_buffer("last", torch.tensor(False))  # the last worker's snapshot differs from all others
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, SSP(s=2)) as session:
        train_epoch(model, optimizer, session)
        if rank == 2:
            wait_until(lambda: bool(entries_of(log, ValidationFinished)), "a finished epoch")
            model.last.fill_(True)
        session.validate(evaluate, VALIDATION, monitor=offbeat.EarlyStopping("loss"))
    try:
        session.validator.best_state_dict()
    except OffbeatError as error:
        return session.validator.has_best, str(error)
    return session.validator.has_best, None


def test_a_worker_without_the_best_snapshot_names_its_owner(tmp_path):
    log = tmp_path / "log"
    *_, late = values(run(ends_last, 3, log, env={"OFFBEAT_RUN_LOG": str(log)}))
    (owner,) = [one.snapshot_owner for one in entries_of(log, ValidationFinished)]
    assert late[0] is False
    assert late[1].startswith(f"the best snapshot is worker {owner}'s, and this is worker 2")


def two_loops(rank, emit):
    def loop(thread):
        model = a_model("dropout")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.join(model, optimizer, SSP(s=2), thread=thread, threads=2) as session:
            for _ in session.epochs(3):
                train_epoch(model, optimizer, session)
                session.validate(evaluate, VALIDATION)
        return session.validator.history

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(loop, range(2)))


def test_threads_that_train_in_one_process_validate_together():
    histories = [history for of_one in values(run(two_loops, 2)) for history in of_one]
    assert list(histories[0]) == [0, 1, 2]
    assert histories == histories[:1] * 4


# Errors -------------------------------------------------------------------------------------------------


def fails_on_one(model, part):
    if is_worker(1):
        raise ZeroDivisionError("no samples of this class")
    return evaluate(model, part)


def test_an_error_in_evaluate_ends_the_job_and_names_the_worker():
    ended = run(train, 2, AllReduce(), 5, "plain", fails_on_one)
    assert (ended[1].error_type, ended[1].error) == ("ZeroDivisionError", "no samples of this class")
    assert "fails_on_one" in ended[1].trace
    assert ended[0].error_type == "WorkerError"
    assert "worker 1 failed" in ended[0].error
    assert "ZeroDivisionError" in ended[0].error


def fails_after_the_epoch(rank, emit, begun):
    """Worker 1 begins to evaluate a part before worker 0 has finished any, and fails after all are done."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def judge(model, part):
        if is_worker(1):
            begun.touch()
            wait_until(lambda: bool(session.validator.history), "the metrics")
            raise ZeroDivisionError("no samples of this class")
        if is_worker(0):
            wait_until(begun.exists, "a part for worker 1")
        return evaluate(model, part)

    with warnings.catch_warnings(record=True) as noted:
        with offbeat.join(model, optimizer, AllReduce()) as session:
            train_epoch(model, optimizer, session)
            session.validate(judge, VALIDATION)
    return list(session.validator.history), [str(one.message) for one in noted]


def test_an_error_in_a_part_that_another_worker_has_evaluated_is_a_warning(tmp_path):
    ended = values(run(fails_after_the_epoch, 2, tmp_path / "begun"))
    assert [history for history, _ in ended] == [[0], [0]]
    (text,) = [text for text in ended[1][1] if "failed on worker 1" in text]
    assert "ZeroDivisionError: no samples of this class" in text


def has_another_patience(rank, emit):
    return train(rank, emit, AllReduce(), 6, judge=never_better, patience=1 + rank, decision="sync")


def test_other_options_on_another_worker_are_refused():
    for one in run(has_another_patience, 2):
        assert one.error_type == "WorkerError"
        assert "expected the same decisions on metrics on every worker" in one.error
        assert "patience=1" in one.error
        assert "patience=2" in one.error


class Merging:
    def merge_state(self, other):
        raise AssertionError

    def compute(self):
        raise AssertionError


def returns_a_metric(model, part):
    return {"f1": Merging()}


def returns_a_large_count(model, part):
    return {"pixels": 2**53 + 1}


def returns_many(model, part):
    return {f"recall of class {number:09}": 0.5 for number in range(20_000)}


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("judge", "text"),
    [
        (returns_a_metric, "expected the metric 'f1' to be a mean, a count, or a metric with a metric_state"),
        (returns_a_large_count, "expected the count 'pixels' to be at most 2**53, got 9007199254740993"),
        (returns_many, "expected metrics that take at most 524288 bytes, names included, got 20000 metrics"),
    ],
)
def test_metrics_that_cannot_be_sent_are_refused(judge, text):
    ended = run(train, 2, AllReduce(), 2, "plain", judge)
    errors = {one.error_type: one.error for one in ended}
    assert text in errors["OffbeatError"]


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("strategy", "options", "text"),
    [
        (
            "bsp",
            {"backend": "inline"},
            "a backend of thread, process or stream with several workers, got 'in",
        ),
        ("bsp", {"when_full": "skip"}, "expected when_full='block' with several workers, got 'skip'"),
        ("partial", {"decision": "rollback"}, "a decision of sync or lag with this strategy, got 'rollback'"),
        ("ssp", {"decision": "rollback"}, "a decision of sync or lag with this strategy, got 'rollback'"),
        ("bsp", {"decision": "rollback", "plateau": 3}, "sync or lag with a plateau in a session"),
    ],
)
def test_options_that_several_workers_do_not_support_are_refused(strategy, options, text):
    for one in run(with_options, 2, STRATEGIES[strategy], options):
        assert one.error_type in ("ValueError", "WorkerError")
        assert text in one.error


def test_another_set_or_evaluate_is_refused():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        for epoch in session.epochs(2):
            train_epoch(model, optimizer, session)
            if epoch == 0:
                session.validate(lambda model, part: {"loss": 0.0}, VALIDATION)
                continue
            with pytest.raises(OffbeatError, match="the same evaluate, data set and options at every epoch"):
                session.validate(lambda model, part: {"loss": 0.0}, VALIDATION)


def test_a_single_worker_validates_like_a_validator_also_not_every_epoch():
    model, ends = a_model(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        for epoch in session.epochs(5):
            train_epoch(model, optimizer, session)
            if epoch % 2:
                session.validate(evaluate, VALIDATION, backend="thread")
                ends[epoch] = state_of(model)
    assert session.validator.history == {epoch: evaluated(ends[epoch], "plain") for epoch in (1, 3)}


def test_with_a_single_worker_a_monitor_ends_the_epochs():
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = offbeat.EarlyStopping("loss", patience=2)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        for _ in session.epochs(len(LOSSES)):
            model.epochs += 1
            train_epoch(model, optimizer, session)
            session.validate(judge_epoch, VALIDATION, monitor=monitor, decision="sync")
    assert session.epoch == 5
