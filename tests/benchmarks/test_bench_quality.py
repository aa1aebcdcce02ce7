"""The benchmark of detection counts correctly, and the rules of other systems match their names."""

import json

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.quality import (
    NOISES,
    RULES,
    SCENARIOS,
    RuleScore,
    above_fastest,
    above_median,
    classified,
    simulate,
    smoothed,
)


def test_rules_of_other_systems_give_the_flags_computed_by_hand():
    times = np.array([[1.0, 1.3, 1.4, 2.1], [1.0, 1.0, 1.6, 1.0], [1.0, 1.0, 1.6, 1.0], [1.0, 1.0, 1.6, 1.0]])
    assert above_fastest(times, 1.33)[0].tolist() == [False, False, True, True]
    assert above_median(times, 1.15)[0].tolist() == [False, False, False, True]  # the median is 1.35
    assert above_median(times, 2.0).sum() == 0
    assert above_median(times, 1.5, in_a_row=3)[:, 2].tolist() == [False, False, False, True]
    assert above_median(times, 1.5, in_a_row=3)[:, [0, 1, 3]].sum() == 0


def test_means_are_over_the_last_iterations():
    times = np.arange(1.0, 7.0)[:, None]
    assert smoothed(times, 3)[:, 0].tolist() == [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]


def test_the_classifier_judges_every_iteration():
    times = np.full((60, 4), 0.1)
    times[20:40, 2] = 0.5
    flags = classified(times)
    assert np.flatnonzero(flags[:, 2]).tolist() == list(range(29, 40))  # found in the 10th, back in the first
    assert flags[:, [0, 1, 3]].sum() == 0


def test_counts_are_of_alarms_episodes_delays_and_covered_steps():
    slow, flags = np.zeros((400, 3), dtype=bool), np.zeros((400, 3), dtype=bool)
    slow[10:20, 0] = slow[50:60, 0] = True
    flags[13:22, 0] = True  # found after 4 iterations, and missed the second time
    flags[300, 1] = True  # a false alarm, in one of the 5 worker-epochs without slowness
    score = RuleScore()
    score.add(slow, flags)
    assert score.row() == {
        "false_alarm_share": pytest.approx(1 / 5),
        "missed_share": 0.5,
        "delay_steps_p50": 4,
        "delay_steps_p99": 4,
        "covered_share": pytest.approx(7 / 20),
    }


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_match_their_names(scenario):
    case = simulate(scenario, "calm", seed=3)
    name, _, factor = scenario.partition(":")
    slow_workers = np.flatnonzero(case.slow_iw.any(axis=0))
    assert len(slow_workers) == (0 if name in ("none", "global") else 1)
    if name in ("constant", "from the start", "bursty"):
        fast = np.delete(case.times_iw, slow_workers, axis=1)
        assert case.times_iw[case.slow_iw].mean() == pytest.approx(float(factor) * fast.mean(), rel=0.03)
    if name == "from the start":
        assert case.slow_iw[:, slow_workers].all()
    if name == "global":
        assert case.times_iw[-1].mean() / case.times_iw[0].mean() == pytest.approx(3.0, rel=0.1)
    again = simulate(scenario, "calm", seed=3)
    assert (again.times_iw == case.times_iw).all()
    assert not (simulate(scenario, "calm", seed=4).times_iw == case.times_iw).all()


@pytest.mark.long
def test_every_rule_runs_in_every_scenario_and_ours_raise_no_alarm_under_calm_noise(tmp_path):
    path = tmp_path / "quality.json"
    assert main(["quality", "--runs", "1", "--seed", "7", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert (result["name"], result["kind"], result["seed"]) == ("quality", "simulated", 7)
    assert len(result["rows"]) == len(NOISES) * len(SCENARIOS) * len(RULES)
    figures = result["figures"]
    for rule in ("fixed", "gate", "auto", "auto_gate"):
        assert figures[f"false_alarm_share_calm_{rule}"] == 0.0
        assert figures[f"missed_share_3x_calm_{rule}"] == 0.0
    assert figures["missed_share_1_3x_calm_fixed"] == 1.0  # the grey zone
    assert figures["missed_share_1_3x_calm_gate"] == 0.0
    assert figures["delay_steps_p50_3x_calm_auto"] < figures["delay_steps_p50_3x_calm_fixed"] == 10
