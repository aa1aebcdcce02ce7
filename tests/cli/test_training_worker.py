"""Promises of the built-in training: the computation and reports of a worker, and the figures of its log."""

import json
import math
from statistics import mean

import pytest
import torch
from torch.utils.data import TensorDataset

from offbeat.cli import job, timesheet
from offbeat.cli.main import main
from offbeat.cli.timesheet import TimeSheet
from offbeat.cli.training_worker import OPTIMIZERS, TrainingSettings, accuracy, batch_loss
from offbeat.data import load_data_set
from offbeat.events import Evaluated, Left, NodeJoined, StepsTimed, Tick
from offbeat.models import build_model
from offbeat.runtime.data.equal_shards import EqualShards
from offbeat.wire import log_file
from offbeat.wire.job_view import TIME_PARTS
from support.round_events import times_of_step
from support.run_logs import step_times


def settings(**change):
    plain = {"model": "mlp", "data": "digits", "strategy": "bsp", "epochs": 2, "batch_size": 32}
    return TrainingSettings(**plain | {"lr": 0.1, "momentum": 0.9, "seed": 0} | change)


def step(worker=0, wall_s=1.0, wait_s=0.25, samples=10, number=0):
    parts_s = {"wait_s": wait_s, "compute_s": wall_s - wait_s}
    times = times_of_step(number, samples=samples, wall_s=wall_s, **parts_s)
    return StepsTimed(now_s=0.0, worker=worker, steps=(times,))


def ended(worker=0, epoch=0, **metrics):
    return Evaluated(now_s=0.0, worker=worker, epoch=epoch, metrics=metrics)


def sheet_of(*events):
    sheet = TimeSheet()
    for event in events:
        sheet.add(event)
    return sheet


@pytest.mark.parametrize("repeat", [2, 7])
def test_repeating_samples_leaves_loss_and_gradient_as_they_are(repeat):
    model = build_model("mlp", sample_shape=(1, 8, 8), classes=10, seed=0).double()
    inputs, labels = torch.randn(5, 1, 8, 8, dtype=torch.float64), torch.tensor([1, 2, 3, 4, 5])
    loss = batch_loss(model, inputs, labels)
    once = torch.autograd.grad(loss, list(model.parameters()))
    repeated = batch_loss(model, inputs, labels, repeat)

    torch.testing.assert_close(repeated, loss)
    for a, b in zip(torch.autograd.grad(repeated, list(model.parameters())), once, strict=True):
        torch.testing.assert_close(a, b)


def test_accuracy_is_the_part_of_samples_whose_highest_logit_is_their_label():
    logits = torch.eye(10).repeat(103, 1)  # more than one chunk, and no whole number of them
    labels = torch.arange(10).repeat(103)
    labels[:103] = (labels[:103] + 1) % 10

    assert accuracy(torch.nn.Identity(), TensorDataset(logits, labels)) == pytest.approx(0.9)


def test_an_epoch_ends_where_its_worker_reports():
    sheet = sheet_of(
        step(worker=0), step(worker=1, wall_s=2.0), step(worker=0), ended(worker=0, loss=1.0, accuracy=0.5)
    )
    assert sheet.epochs_finished(2) == 0
    assert sheet.steps_finished == {0: 2, 1: 1}
    sheet.add(step(worker=0))
    sheet.add(ended(worker=1, loss=4.0))

    assert sheet.epochs_finished(2) == 1
    first, second = sheet.epoch(0)
    assert (first.worker, first.steps, first.samples, first.wall_s) == (0, 2, 20, 2.0)
    assert (second.worker, second.steps, second.samples, second.wall_s) == (1, 1, 10, 2.0)
    assert first.share("wait") == 0.25
    assert timesheet.loss(sheet.epoch(0)) == 2.0  # weighted by samples
    assert timesheet.accuracy(sheet.epoch(0)) == 0.5
    assert timesheet.samples_per_s(sheet.epoch(0)) == 15.0


def test_totals_may_leave_out_the_first_epochs():
    sheet = sheet_of(
        step(wall_s=9.0), ended(epoch=0), step(wall_s=1.0), ended(epoch=1), step(wall_s=3.0), ended(epoch=2)
    )
    assert [entry.wall_s for entry in sheet.totals()] == [13.0]
    assert [(entry.wall_s, entry.steps) for entry in sheet.totals(1)] == [(4.0, 2)]


def test_a_diverged_loss_is_no_figure():
    sheet = sheet_of(step(), ended(loss=math.nan, accuracy=0.1), Left(now_s=0.0, worker=0, step=1))

    assert set(timesheet.figures(sheet)) == {"wall_s", "samples_per_s", "accuracy"}
    assert timesheet.entries_as_dicts(sheet)[0]["loss"] is None
    assert sheet.workers_left == {0}


def left(worker):
    return Left(now_s=0.0, worker=worker, step=1)


def test_a_log_is_read_as_it_grows_and_only_whole_lines_of_it(tmp_path):
    whole = log_file.LogWriter(tmp_path / "whole", {})
    for event in (step(), ended(loss=math.inf), Tick(now_s=1.0), left(0), left(1)):
        whole.add_event(event)
    whole.close()
    data = (tmp_path / "whole").read_bytes()
    grown, sheet = tmp_path / "log.jsonl", TimeSheet()
    reader = job.RunLogReader(grown)
    reader.read_new_lines(sheet)  # there is no file yet

    for byte in range(0, len(data), 7):
        grown.write_bytes(data[:byte])
        reader.read_new_lines(sheet)
    assert len(sheet.entries) == 1
    assert sheet.workers_left == {0}
    assert reader.read_until_all_left(sheet, 2, limit_s=0.0) == [1]
    grown.write_bytes(data)
    assert reader.read_until_all_left(sheet, 2, limit_s=0.0) == []
    assert sheet.workers_left == {0, 1}
    assert sheet.entries[0].metrics == {"loss": math.inf}


def test_repetition_makes_a_step_as_long_as_requested_but_at_least_one_pass():
    digits = load_data_set("digits")
    assert job.calibrate_repeat(settings(), digits, step_s=1e-9) == 1
    assert job.calibrate_repeat(settings(), digits, step_s=5e-3) > 1


@pytest.mark.long
@pytest.mark.parametrize("decays", [True, False])
def test_the_learning_rate_falls_by_the_same_amount_from_epoch_to_epoch(decays, tmp_path):
    chosen = settings(epochs=3, momentum=0.0, batch_size=512, decays_lr=decays)
    sheet = job.run_job(job.Job(settings=chosen, workers=1), job.open_run_dir(tmp_path / "run"))
    model, train = (
        build_model("mlp", sample_shape=(1, 8, 8), classes=10, seed=0),
        load_data_set("digits").train,
    )
    for epoch, lr in enumerate([0.1, 0.1 * 2 / 3, 0.1 / 3] if decays else [0.1] * 3):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        losses = []
        shards = EqualShards(samples=len(train), workers=1, batch_size=512, seed=0, epoch=epoch, shuffle=True)
        for indices in shards.batches(0):
            optimizer.zero_grad()
            loss = batch_loss(model, *train[indices])
            loss.backward()
            optimizer.step()
            losses += [float(loss.detach())] * len(indices)
    assert timesheet.figures(sheet)["loss"] == pytest.approx(mean(losses), rel=1e-4)


def test_momentum_is_the_first_of_adams_betas():
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    for name in ("adam", "adamw"):
        (group,) = OPTIMIZERS[name](parameters, settings(momentum=0.3)).param_groups
        assert group["betas"] == (0.3, 0.999)


@pytest.mark.long
def test_two_workers_train_and_the_log_accounts_for_every_sample_and_second(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "train --workers 2 --epochs 2 --batch-size 64 --json result.json --run-dir run"
    assert main(line.split()) == 0

    printed = capsys.readouterr()
    assert [text for text in printed.err.splitlines() if text.startswith("epoch 2  loss ")]
    assert all(
        name in printed.out
        for name in ("compute", "communicate", "apply", "wall time", "samples/s", "test accuracy")
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"name", "machine", "command", "figures", "rows"} <= set(result)
    assert result["figures"]["accuracy"] > 0.6
    rows = result["rows"]
    assert sorted((row["worker"], row["epoch"]) for row in rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sum(row["samples"] for row in rows if row["epoch"] == 1) == 1442  # each once an epoch
    for row in rows:
        assert sum(row[f"{part}_s"] for part in TIME_PARTS) == pytest.approx(row["wall_s"], abs=1e-6)
        assert (row["accuracy"] is not None) == (row["worker"] == 0)

    assert main(["replay", "run"]) == 0
    times = step_times(log_file.read_log(tmp_path / "run/log.jsonl").entries)
    assert capsys.readouterr().out.startswith("identical: ")
    assert len(times) == sum(row["steps"] for row in rows) == 2 * 2 * 12


@pytest.mark.long
def test_two_workers_learn_the_same_as_one_with_the_large_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for workers, batch in ((1, 64), (2, 32)):
        line = f"train --workers {workers} --epochs 1 --batch-size {batch} --json {workers}.json"
        assert main([*line.split(), "--run-dir", str(workers)]) == 0
    alone, together = (json.loads((tmp_path / f"{n}.json").read_text())["figures"] for n in (1, 2))

    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert together["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
    capsys.readouterr()


@pytest.mark.long
def test_threads_and_servers_of_the_command_line_reach_the_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = (
        "train --strategy ssp:s=3 --optimizer adam --lr 0.01 --workers 2 --threads-per-worker 2 --servers 2"
    )
    assert main(f"{line} --epochs 1 --batch-size 64 --run-dir run".split()) == 0
    entries = log_file.read_log(tmp_path / "run" / job.LOG_NAME).entries
    assert {one.worker for one in entries if isinstance(one, Left)} == {0, 1, 2, 3}
    nodes = {one.node for one in entries if isinstance(one, NodeJoined)}
    assert nodes == {
        "client-0",
        "client-2",
        "server-0",
        "server-1",
    }  # a client a process, whatever its threads
