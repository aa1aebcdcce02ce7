"""Facts that the chaos benchmark reads from a job, and its counting model."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.chaos import (
    ChaosSettings,
    ChaosTrial,
    Counts,
    Fault,
    _Job,
    _Process,
    compare_trials,
    count_once,
    current_epoch,
)
from benchmarks.commands import ChaosOptions
from offbeat.errors import OffbeatError
from offbeat.events import AssignBlocks, Block, Joined, Lost, Ready
from offbeat.wire.log_file import LogWriter

SETTINGS = ChaosSettings(strategy="partial", step_ms=1.0, batch_size=2, samples=8, epochs=2, seed=0)


def joined(worker, now_s):
    return Joined(
        now_s=now_s,
        worker=worker,
        world=2,
        peer=f"worker-{worker}",
        location="",
        addresses=(),
        model_signature=(),
        strategy="",
    )


def ready(worker, now_s, round_, epoch=0):
    return Ready(
        now_s=now_s,
        worker=worker,
        generation=0,
        epoch=epoch,
        step=round_,
        round=round_,
        compute_s=0.1,
        samples=2,
        blocks=(),
    )


@pytest.fixture
def ended(tmp_path):
    """A job of 2 workers: one is killed 4 s after the first round, a third one joins 2 s later."""
    log = LogWriter(tmp_path / "log.jsonl", {"job": "1", "policies": []})
    log.add_event(joined(0, 0.0))
    log.add_event(joined(1, 5.0))
    for second in range(5):
        log.add_event(ready(0, 10.0 + second, second))
        log.add_event(ready(1, 10.0 + second, second))
    log.add_event(Lost(now_s=14.5, worker=1, cause="it was killed"))
    log.add_event(ready(0, 15.0, 5))
    log.add_event(ready(0, 16.0, 6))
    log.add_event(joined(2, 16.5))
    for second in range(7, 11):
        log.add_event(ready(0, 10.0 + second, second, epoch=1))
    log.close()
    job = _Job(SETTINGS, 2, tmp_path)
    job._processes = [_Process(worker, None, tmp_path / f"{worker}.json") for worker in range(3)]
    for worker in (0, 2):
        (tmp_path / f"{worker}.json").write_text(json.dumps([2.0] * 8))
    return job


def test_a_job_is_read_from_its_log_and_its_answers(ended):
    ended.faults = [
        Fault(kind="kill", worker=1, at_s=14.4, until_s=14.4),
        Fault(kind="stop", worker=0, at_s=17.5, until_s=18.5),
        Fault(kind="kill", worker=0, at_s=99.0, until_s=99.0),  # after the end
    ]
    trial = ended.trial()
    assert (trial.began_s, trial.ended_s) == (10.0, 20.0)
    assert trial.alive_s == pytest.approx(10 + 4.5 + 3.5 - 1.0)
    assert trial.recover_s == pytest.approx([16.0 - 14.4, 19.0 - 17.5])
    assert trial.uses == [[2.0] * 8] * 2


def test_the_progress_of_a_job_is_read_from_its_log(ended, tmp_path):
    log = tmp_path / "log.jsonl"
    assert current_epoch(log) == 1
    log.unlink()
    assert current_epoch(log) == -1


def test_replicas_that_differ_are_an_error(ended):
    from benchmarks.chaos import _used

    (ended.folder / "2.json").write_text(json.dumps([2.0] * 7 + [1.0]))
    with pytest.raises(OffbeatError, match="differ"):
        _used(ended.trial())


def assigned(worker, *blocks):
    return AssignBlocks(
        worker=worker,
        epoch=0,
        replaces_queue=False,
        blocks=tuple(Block(id=id_, epoch=0, ranges=ranges) for id_, ranges in blocks),
        is_last=False,
        is_awaited=False,
        consumed=0,
        reason="next samples",
    )


def test_where_models_are_averaged_a_sample_counts_once_for_each_step_that_names_its_block(tmp_path):
    log = LogWriter(tmp_path / "log.jsonl", {"job": "1", "policies": []})
    log.add_event(joined(0, 0.0))
    log.add_event(joined(1, 0.0))
    log.add_actions([assigned(0, (0, ((0, 2),)), (1, ((2, 4),))), assigned(1, (2, ((4, 5), (6, 8))))])
    log.add_event(replace(ready(0, 1.0, 0), blocks=(0,)))
    log.add_event(Lost(now_s=1.5, worker=0, cause="it was killed"))  # with block 1, which is assigned again
    log.add_actions([assigned(1, (3, ((2, 4),)))])
    log.add_event(replace(ready(1, 2.0, 0), blocks=(2, 3)))
    log.close()
    job = _Job(replace(SETTINGS, strategy="diloco"), 2, tmp_path)
    job._processes = [_Process(worker, None, tmp_path / f"{worker}.json") for worker in range(2)]
    (tmp_path / "1.json").write_text(json.dumps([0.5] * 8))
    assert job.trial().uses == [[1, 1, 1, 1, 1, 0, 1, 1]]
    (tmp_path / "0.json").write_text(json.dumps([0.25] * 8))
    with pytest.raises(OffbeatError, match="differ"):
        job.trial()


def test_a_job_that_ends_before_its_first_fault_is_an_error():
    def trial(settings, chance):
        uses = [[float(settings.epochs)] * settings.samples] * 2
        return ChaosTrial(uses=uses, began_s=0.0, ended_s=10.0, alive_s=20.0, faults=[], recover_s=[])

    with pytest.raises(
        OffbeatError, match=r"no fault .* in 0\.1 minutes: .*--minutes or a smaller --every-s"
    ):
        compare_trials("chaos", ChaosOptions(minutes=0.1), trial, command="test")


@pytest.mark.long
def test_each_use_of_a_sample_counts_for_one_in_any_batch():
    model = Counts(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for numbers in ([0, 1, 2], [2, 2], [5]):
        optimizer.zero_grad()
        model(torch.tensor(numbers)).backward()
        count_once(model)
        optimizer.step()
    assert model.uses_N.tolist() == [1, 1, 2, 0, 0, 1]
