"""The coordinator benchmark runs, small, and its workers report what real ones do."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.protocol_workers import ProtocolWorkers, Settings
from offbeat.errors import OffbeatError
from offbeat.events import Ready
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import replay
from support.coordinator_process import coordinator
from support.run_logs import entries_of

# Of each step: the events that its worker reports, and the actions with which the coordinator answers.
PER_STEP = {"bsp": (1.1, 0), "partial": (1.1, 1), "ssp": (1.1, 2)}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", PER_STEP)
def test_each_case_has_its_figures(strategy, tmp_path):
    path = tmp_path / "result.json"
    options = ["--strategy", strategy, "--workers", "3", "--steps", "60", "--real", "0"]
    assert main(["coordinator", *options, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    names = (
        "coordinator_us_a_worker_step",
        "log_bytes_a_worker_step",
        "journal_bytes_a_worker_step",
        "snapshot_bytes",
        "memory_mb",
    )
    assert [*result["figures"]] == [*(f"{name}_{strategy}_3" for name in names), "start_s_3"]
    (row,) = result["rows"]
    assert (row["strategy"], row["workers"], row["steps"]) == (strategy, 3, 20)
    assert row["events_a_worker_step"] == pytest.approx(PER_STEP[strategy][0])
    assert row["actions_a_worker_step"] == pytest.approx(PER_STEP[strategy][1], abs=0.1)
    assert 150 < row["journal_bytes_a_worker_step"] < 2000
    assert row["memory_mb"] > 5
    assert row["start_s"] > 0


@pytest.mark.long
def test_the_start_of_real_workers_is_next_to_that_of_ddp(tmp_path):
    path = tmp_path / "result.json"
    options = ["--strategy", "bsp", "--workers", "2", "--steps", "2", "--real", "2"]
    assert main(["coordinator", *options, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    for side in ("bsp", "ddp"):
        assert 0 < figures[f"{side}_join_s_2"] < figures[f"{side}_start_s_2"]
    assert figures["start_ratio_to_ddp_2"] == figures["bsp_start_s_2"] / figures["ddp_start_s_2"]


def test_an_unknown_strategy_is_refused_before_anything_is_measured(capsys):
    assert main(["coordinator", "--strategy", "best"]) == 2
    assert "unknown strategy 'best'" in capsys.readouterr().err


def test_a_job_that_the_coordinator_stops_is_an_error(tmp_path):
    with coordinator(3, tmp_path / "log") as process:  # it expects one worker more
        workers = ProtocolWorkers(
            Settings(job="job", token="secret", addresses=process.addresses, strategy="bsp", workers=2)
        )
        with pytest.raises(OffbeatError, match=r"got AbortJob: worker \d .* this job has 3"):
            workers.start()


def test_the_log_of_such_workers_replays_and_has_every_step(tmp_path):
    with coordinator(2, tmp_path / "log") as process:
        workers = ProtocolWorkers(
            Settings(job="job", token="secret", addresses=process.addresses, strategy="bsp", workers=2)
        )
        workers.start()
        workers.step(200)  # more than the events of one SequenceAck
        workers.leave()
        assert process.ended() == (0, "")
    assert replay(read_log(tmp_path / "log")) is None
    readys = entries_of(tmp_path / "log", Ready)
    for worker in range(2):
        assert [event.round for event in readys if event.worker == worker] == [*range(200)]
