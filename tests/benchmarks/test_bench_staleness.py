"""Figures that follow from measurements, and the benchmark once each way, small.

Its measurements are not judged here.
"""

import json
import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import served, staleness
from benchmarks.__main__ import main
from benchmarks.commands import StalenessOptions
from benchmarks.served import ServedResult
from benchmarks.staleness import PARTS, StalenessPlan, StalenessRow, bursts, lasting
from offbeat.cli.result import Result
from offbeat.errors import WorkerError
from offbeat.events import Evaluated, StepFinished, StepPermit, StepsTimed
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule
from support.jobs import MARK, command, gone, marked
from support.round_events import times_of_step
from support.run_logs import wait_until


def found(run_s, *, waited_s=1.0, pulled_bytes=100.0, processes=4):
    return ServedResult(
        run_s=run_s,
        parts_s={process: {"compute": 9.0, "wait": waited_s} for process in range(processes)},
        traffic={process: {"pulled_bytes": pulled_bytes} for process in range(processes)},
        staleness={0: 3},
        bound_mean=3.0,
    )


def row(strategy, run_s, *, setting="bursts", threads=1, **more):
    return StalenessRow(
        strategy=strategy, setting=setting, threads=threads, steps=10, found=found(run_s, **more)
    )


def test_times_and_pulls_are_ratios_in_the_same_setting_and_with_as_many_workers():
    rows = [
        row("bsp", 10.0, waited_s=9.0),
        row("ssp3", 8.0),
        row("ssp10", 5.0),
        row("dtssp", 6.0, waited_s=3.0, pulled_bytes=25.0),
        row("bsp", 40.0, threads=2),
        row("dtssp", 10.0, threads=2),
        row("bsp", 3.0, setting="lasting_equal"),
        row("dtssp", 3.0, setting="lasting_equal"),
    ]
    got = staleness.figures(rows, 100.0)
    expected = {
        "time_ratio_dtssp_to_bsp_bursts": 0.6,
        "time_ratio_dtssp_to_ssp3_bursts": 0.75,
        "time_ratio_dtssp_to_ssp10_bursts": 1.2,
        "time_ratio_ssp3_to_bsp_bursts": 0.8,
        "time_ratio_dtssp_to_bsp_bursts_8_workers": 0.25,
        "time_ratio_dtssp_to_bsp_lasting_equal": 1.0,
        "barrier_share_bsp_bursts": 0.5,
        "barrier_share_dtssp_bursts": 0.25,
        "pulled_ratio_dtssp_to_bsp_bursts": 0.25,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)
    assert "time_ratio_dtssp_to_ssp3_lasting_equal" not in got
    Result(name="staleness", command="", kind="timed", seed=0, figures=got)  # names with units


def test_the_time_of_a_clock_besides_computing_is_that_without_slow_workers():
    rows = [row("bsp", 1.5, setting="none"), row("bsp", 2.5, setting="none", threads=2)]
    assert staleness.figures(rows, 100.0) == pytest.approx(
        {"besides_computing_ms": 50.0, "besides_computing_ms_8_workers": 50.0}
    )


def test_accuracies_are_means_over_seeds_and_compared_seed_by_seed():
    got = staleness.accuracy_figures({"bsp": [0.5, 0.6], "dtssp": [0.48, 0.61]})
    assert got == pytest.approx(
        {"accuracy_bsp": 0.55, "accuracy_dtssp": 0.545, "below_bsp_percent_dtssp": 0.5}
    )


@pytest.mark.parametrize(("steps", "burst", "calm"), [(96, 12, 0), (97, 7, 5), (33, 4, 4), (10, 20, 0)])
def test_bursts_hit_processes_in_turn_and_never_two_at_once(steps, burst, calm):
    rules = [parse_slow_rule(rule) for rule in bursts(3, 5.0, steps, burst, calm)]
    slowness = InjectedSlowness(rules, workers=3, seed=0)
    for step in range(steps):
        factors = [slowness.factor(worker, 0, step, steps, step) for worker in range(3)]
        turn, place = divmod(step, burst + calm)
        expected = [5.0 if place < burst and worker == turn % 3 else 1.0 for worker in range(3)]
        assert factors == expected


def test_lasting_slowness_is_that_of_the_last_two():
    assert lasting(4) == ("2:2", "3:3")


def test_all_settings_are_measured_with_the_first_number_of_threads_and_one_with_more():
    cases = list(StalenessPlan(threads=[1, 4], strategy=["bsp", "dtssp"]).cases())
    assert cases[0] == (1, "none", "bsp")
    assert [case for case in cases if case[0] == 4] == [
        (4, "none", "bsp"),
        (4, "bursts", "bsp"),
        (4, "bursts", "dtssp"),
    ]
    assert {setting for threads, setting, _ in cases if threads == 1} == {"none", *staleness.SETTINGS}


def test_settings_but_the_first_have_half_the_steps():
    plan = StalenessPlan(steps=40)
    assert {setting: plan.steps_in(setting) for setting in ("none", *staleness.SETTINGS)} == {
        "none": 24,
        "bursts": 40,
        "bursts_dynamic": 20,
        "lasting_equal": 20,
        "lasting_dynamic": 20,
    }


# Results of a run log ---------------------------------------------------------------------------------------


def clocked(now_s, worker, clock, version, *, loss=None, samples=8):
    return StepFinished(
        now_s=now_s,
        worker=worker,
        clock=clock,
        parameter_version=version,
        epoch=0,
        step=0,
        compute_s=0.0,
        samples=samples,
        loss=loss,
        blocks=(),
    )


def permit(bound, *, may_start=True):
    return StepPermit(
        worker=0,
        clock=0,
        version_min=0,
        staleness_bound=bound,
        may_start=may_start,
        complete_version=0,
        is_leader=False,
        reason="as it was granted",
    )


def timed(worker, step, wait_s):
    times = times_of_step(step, wait_s=wait_s, wall_s=wait_s, samples=8)
    return StepsTimed(now_s=0.0, worker=worker, steps=(times,))


LOG = [
    clocked(1.0, 0, None, 0),
    clocked(2.0, 1, None, 0),
    permit(3),
    permit(3, may_start=False),
    clocked(4.0, 1, 0, 0, loss=2.5),
    permit(5),
    clocked(5.0, 0, 0, 0, loss=2.0),
    clocked(7.0, 1, 1, 0, loss=1.5, samples=4),
    clocked(7.5, 1, 2, 0, loss=1.0),
    timed(0, 0, 100.0),
    timed(0, 1, 1.0),
    timed(1, 1, 2.0),
    Evaluated(now_s=8.0, worker=1, epoch=0, metrics={"pulls_count": 7.0}),
]


def test_a_run_lasts_from_the_last_begin_to_the_last_step():
    assert served.result_from_log(LOG, 1).run_s == 5.5


def test_times_are_sums_over_a_process_without_first_steps():
    assert served.result_from_log(LOG, 2).parts_s[0]["wait"] == 3.0
    assert {process: parts["wait"] for process, parts in served.result_from_log(LOG, 1).parts_s.items()} == {
        0: 1,
        1: 2,
    }
    assert served.result_from_log(LOG, 1).traffic == {1: {"pulls_count": 7.0}}


def test_staleness_is_the_lead_of_steps_over_their_parameters_and_only_under_a_bound():
    assert served.result_from_log(LOG, 1).staleness == {0: 2, 1: 1, 2: 1}
    assert served.result_from_log(LOG, 1).bound_mean == 4.0
    unbounded = [permit(None) if isinstance(one, StepPermit) else one for one in LOG]
    assert (
        served.result_from_log(unbounded, 1).staleness,
        served.result_from_log(unbounded, 1).bound_mean,
    ) == ({}, None)


def test_losses_are_ordered_by_clock_and_worker_and_are_of_whole_batches_only():
    assert served.losses_of(LOG, 8) == (2.0, 2.5, 1.0)


# For real ---------------------------------------------------------------------------------------------------

SMALL = "staleness --data digits --model mlp --workers 2 --threads 1 --batch-size 16 --burst 2 --lr 0.001"


@pytest.mark.long
def test_times_for_real(tmp_path):
    path = tmp_path / "result.json"
    line = f"{SMALL} --strategy dtssp --setting bursts --steps 8 --step-ms 5 --json {path}"
    assert main(line.split()) == 0
    result = json.loads(path.read_text())
    assert (result["name"], result["kind"]) == ("staleness", "timed")
    assert {"besides_computing_ms", "barrier_share_dtssp_bursts", "server_step_ms"} == set(result["figures"])
    even, slow = result["rows"][:2], result["rows"][2:]
    assert [one["setting"] for one in even + slow] == ["none"] * 2 + ["bursts"] * 2
    assert {one["pulls_count"] for one in even} == {8}  # in lockstep, before every step
    assert all(1 <= one["pulls_count"] <= 8 for one in slow)
    for one in slow:
        assert sum(map(int, one["staleness_of_all"].split("/"))) == 16
        assert one["compute_s"] > 0.005 * (3 + 4 * 5 - 5)  # without the first step: some slow, some not
        assert set(one) > {f"{part}_s" for part in PARTS}
    assert slow[0]["bound_mean"] >= 3


@pytest.mark.long
def test_accuracies_for_real(tmp_path):
    path = tmp_path / "result.json"
    assert main(f"{SMALL} --compute real --strategy bsp --epochs 1 --json {path}".split()) == 0
    result = json.loads(path.read_text())
    assert (result["name"], result["kind"]) == ("staleness", "real")
    assert 0.1 < result["figures"]["accuracy_bsp"] <= 1
    assert [(one["strategy"], one["staleness_max"]) for one in result["rows"]] == [("bsp", 0)]


@pytest.mark.long
def test_the_end_of_one_training_ends_all_with_its_cause(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    options = StalenessOptions(
        compute="real",
        strategy=["bsp", "ssp3"],
        data="digits",
        model="mlp",
        workers=2,
        batch_size=16,
        epochs=10_000,
    )

    def workers_of(strategy):
        return [
            pid
            for pid in marked(mark)
            if "'offbeat.cli.training_worker'" in (line := command(pid)) and strategy in line
        ]

    def kill_one():
        try:
            wait_until(lambda: len(workers_of("ps-bsp")) == len(workers_of("ssp:s=3")) == 2, "both to train")
        except AssertionError:  # else they would train for as long as they are to
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
            raise
        os.kill(workers_of("ssp:s=3")[0], signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_one)
        with pytest.raises(WorkerError, match="SIGKILL"):
            staleness.run(options, command="")
        killing.result()
    gone(mark)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--strategy none", "unknown strategy 'none'"),
        ("--setting none", "unknown setting 'none'"),
        ("--compute guessed", "expected --compute timed or real"),
        ("--factor 0.5", "at least 1"),
        ("--lr 0", "learning rate must be above 0"),
        ("--data digits --batch-size 1000 --model mlp", "expected a batch of 1000 for each of 4 workers"),
        ("--threads 0", "--threads"),
    ],
)
def test_bad_input_ends_with_one_line(line, words, capsys):
    assert main(["staleness", *line.split()]) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.startswith("offbeat: ")
    assert printed.count("\n") == 0
    assert words in printed
