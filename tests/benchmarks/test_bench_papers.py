"""The papers' tables: the figures that follow from measurements, and each benchmark once, small.

Their measurements are not judged here.
"""

import json

import pytest

from benchmarks import accuracy, detect, straggler
from benchmarks.__main__ import main
from benchmarks.accuracy import Curve, Point, accuracy_after, time_to
from benchmarks.exclusions import Episode, Findings, GroupChange, GroupStep
from benchmarks.runs import slow_rules
from benchmarks.straggler import StragglerCase, StragglerRow
from offbeat.cli.result import Result

# Stragglers -------------------------------------------------------------------------------------------------


def row(strategy, stragglers, run_s, steps=100, samples=12_800, detect_steps=None):
    case = StragglerCase(strategy=strategy, stragglers=stragglers, is_alike=False)
    return StragglerRow(case=case, run_s=run_s, steps=steps, samples=samples, detect_steps=detect_steps)


ROWS = [
    row("bsp", 0, 10.0, steps=50, samples=6400),
    row("partial", 0, 20.0),
    row("bsp", 1, 47.0, steps=50, samples=6400),
    row("partial", 1, 41.6, steps=200, samples=19_968, detect_steps=14),
    row("partial:k=auto", 1, 30.0, detect_steps=8),
]


def test_a_slowdown_is_relative_to_a_step_of_the_same_strategy_without_slow_workers():
    found = straggler.figures(ROWS, "timed")
    assert found == pytest.approx(
        {
            "slowdown_bsp_1": 4.7,
            "slowdown_partial_1": 1.04,
            "slowdown_a_sample_partial_1": 1.04 * 12_800 / 9984,
            "detect_steps": 14,
        }
    )


def test_figures_of_real_compute_are_named_as_such():
    timed, real = straggler.figures(ROWS, "timed"), straggler.figures(ROWS, "real")
    assert list(real) == [f"{name}_real" for name in timed]
    Result(name="straggler", command="", kind="real", seed=0, figures=real)  # names with units


def test_every_number_of_stragglers_is_measured_with_both_strategies():
    found = [(case.strategy, case.stragglers) for case in straggler.cases(4, 4)]
    assert {(strategy, count) for strategy in ("bsp", "partial") for count in range(5)} < set(found)
    alike = [case for case in straggler.cases(4, 4) if case.is_alike and case.strategy == "partial"]
    assert [case.stragglers for case in alike] == [4]


def test_a_straggler_is_found_when_the_group_is_first_without_one():
    case = StragglerCase(strategy="partial", stragglers=2, is_alike=False)
    groups = [(0, {0, 1, 2, 3}), (5, {1, 2, 3}), (14, {0, 1, 2}), (15, {0, 1})]
    changes = [
        GroupChange(step=step, decided=step - 1, named_s=0.0, members=frozenset(workers))
        for step, workers in groups
    ]
    steps = [GroupStep(epoch=0, used=0, samples=8, ready_s=0.0)] * 20
    found = straggler.row(case, 3.0, changes, steps, 4)
    assert (found.detect_steps, found.steps, found.samples) == (14, 20, 160)
    assert straggler.row(case, 3.0, changes[:2], steps, 4).detect_steps is None


def test_the_first_worker_is_the_last_to_be_slow():
    assert slow_rules(4, 3, 5.0) == ("3:5", "2:5", "1:5")
    assert slow_rules(4, 0, 5.0) == ()


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan"), float("inf")])
def test_a_factor_that_slows_no_worker_or_is_infinite_is_refused(factor):
    with pytest.raises(ValueError, match=r"must be above 1|not understood"):
        slow_rules(4, 1, factor)


@pytest.mark.long
def test_stragglers_for_real(tmp_path):
    path = tmp_path / "result.json"
    line = "straggler --model mlp --workers 2 --stragglers 1 --epochs 2 --steps 3 --step-ms 5 --json"
    assert main([*line.split(), str(path)]) == 0
    result = json.loads(path.read_text())
    assert (result["name"], result["kind"]) == ("straggler", "timed")
    assert {"slowdown_bsp_1", "slowdown_partial_1"} < set(result["figures"])
    assert result["figures"]["slowdown_bsp_1"] > 0
    assert result["machine"]["timed_step_ms"] == pytest.approx(5.0)
    steps = [one["steps"] for one in result["rows"] if not one["strategy"].endswith("in turn")]
    lockstep = [one["steps"] for one in result["rows"] if one["strategy"] == "bsp"]
    assert (len(steps), min(steps), lockstep) == (5, 6, [6, 6])  # with one left out it is more


# Detection --------------------------------------------------------------------------------------------------


def episode(begins, ends, excluded_at, back):
    return Episode(
        worker=1,
        epoch=0,
        begins=begins,
        ends=ends,
        excluded_at=excluded_at,
        returned_at=back,
        detect_s=None if excluded_at is None else 1.0,
        recover_s=None if back is None else 0.5,
    )


def test_figures_of_detection_are_means_over_the_found_and_the_returned():
    findings = Findings(
        episodes=[episode(0, 20, 14, 22), episode(40, 60, 50, None), episode(80, 100, None, None)],
        false_alarms=2,
        early_recoveries=1,
    )
    assert detect.figures(findings, 32) == {
        "detect_steps_mean_b32": 12,
        "recover_steps_mean_b32": 2,
        "false_alarms_b32": 2,
        "missed_b32": 1,
        "early_recoveries_b32": 1,
        "recoveries_b32": 1,
    }
    assert [row["detect_steps"] for row in detect.plain_rows(findings, 32)] == [14, 10, None]
    assert [row["recover_steps"] for row in detect.plain_rows(findings, 32)] == [2, None, None]


def test_without_a_found_episode_there_are_no_means():
    found = detect.figures(Findings(episodes=[episode(0, 5, None, None)]), 64)
    assert found == {
        "false_alarms_b64": 0,
        "missed_b64": 1,
        "early_recoveries_b64": 0,
        "recoveries_b64": 0,
    }


@pytest.mark.long
def test_detection_for_real(tmp_path):
    path = tmp_path / "result.json"
    line = "detect --model mlp --workers 2 --epochs 1 --steps 8 --step-ms 5 --strategy partial:limit=2"
    assert main([*line.split(), "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert (result["name"], result["kind"]) == ("detect", "timed")
    assert {"missed_b32", "missed_b64"} < set(result["figures"])
    assert result["machine"]["timed_step_ms_b32"] == pytest.approx(5.0)
    assert [row["slow_from_step"] for row in result["rows"]] == [0, 0]


# Accuracy ---------------------------------------------------------------------------------------------------


def points(*measured):
    return tuple(Point(time_s=time_s, samples=samples, accuracy=found) for time_s, samples, found in measured)


LINE = points((10.0, 100, 0.5), (20.0, 200, 0.7), (30.0, 300, 0.65), (40.0, 400, 0.8))


@pytest.mark.parametrize(
    ("target", "time_s"), [(0.5, 10.0), (0.6, 15.0), (0.7, 20.0), (0.75, 30 + 10 * 0.1 / 0.15), (0.9, None)]
)
def test_a_time_to_an_accuracy_is_when_the_line_first_reaches_it(target, time_s):
    assert time_to(LINE, target) == pytest.approx(time_s)


def test_a_target_below_the_first_measurement_is_reached_at_it():
    assert time_to(LINE, 0.1) == 10.0


@pytest.mark.parametrize(
    ("samples", "expected"), [(50, 0.5), (100, 0.5), (250, 0.675), (400, 0.8), (999, 0.8)]
)
def test_the_accuracy_after_so_many_samples_lies_on_the_line(samples, expected):
    assert accuracy_after(LINE, samples) == pytest.approx(expected)


def curve(strategy, seed, *measured):
    return Curve(strategy=strategy, seed=seed, points=points(*measured), late_share=0.0)


def test_figures_of_accuracy_are_means_over_the_seeds():
    curves = [
        curve("bsp", 0, (50.0, 100, 0.5), (100.0, 200, 0.8)),
        curve("bsp", 1, (50.0, 100, 0.5), (100.0, 200, 0.9)),
        curve("partial", 0, (10.0, 100, 0.5), (20.0, 200, 0.8)),
        curve("partial", 1, (10.0, 100, 0.5), (20.0, 200, 0.85), (40.0, 400, 0.95)),
    ]
    assert accuracy.figures(curves) == pytest.approx(
        {
            "final_accuracy_bsp": 0.85,
            "time_ratio_to_bsp_accuracy_drop": (0.2 + 0.3) / 2,
            "below_bsp_percent_drop": 2.5,
            "below_bsp_percent_max_drop": 5.0,
        }
    )


def test_an_accuracy_that_one_seed_does_not_reach_has_no_time():
    curves = [curve("bsp", 0, (50.0, 100, 0.5)), curve("partial", 0, (10.0, 100, 0.4))]
    assert "time_ratio_to_bsp_accuracy_drop" not in accuracy.figures(curves)
    assert accuracy.figures(curves)["below_bsp_percent_drop"] == pytest.approx(10.0)


@pytest.mark.long
def test_accuracy_for_real(tmp_path):
    path = tmp_path / "result.json"
    line = f"accuracy --data digits --workers 2 --epochs 1 --step-ms 4 --seeds 1 --json {path}"
    assert main(line.split()) == 0
    result = json.loads(path.read_text())
    assert (result["name"], result["kind"]) == ("accuracy", "real")
    assert {row["strategy"] for row in result["rows"]} == {"bsp", "partial", "partial:late=join"}
    assert 0.1 < result["figures"]["final_accuracy_bsp"] <= 1
    last = [row for row in result["rows"] if row["strategy"] == "bsp"][-1]
    assert 1000 < last["samples"] <= 1442  # of digits, up to the last copy


# Bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("straggler --compute guessed", "expected --compute timed or real, got 'guessed'"),
        ("straggler --model none", "unknown model 'none'"),
        ("straggler --factor 1", "factor must be above 1"),
        ("straggler --workers 1", "--workers"),
        ("straggler --stragglers 5", "0 to 4 stragglers"),
        ("detect --strategy none", "unknown strategy 'none'"),
        ("detect --step-ms 0", "--step-ms"),
        ("accuracy --data none", "unknown data set 'none'"),
        ("accuracy --data digits --lr 0", "learning rate must be above 0"),
        ("accuracy --data mnist --data-dir nowhere", "MNIST is not in"),
        ("straggler --json /proc/no/such", "cannot write /proc/no/such"),
    ],
)
def test_bad_input_ends_with_one_line_before_anything_is_measured(line, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*line.split()]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("offbeat: ")
    assert printed.count("\n") == 1
    assert words in printed
