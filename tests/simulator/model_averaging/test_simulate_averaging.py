"""`offbeat simulate` with the strategies whose workers own their models."""

import json

import pytest

from offbeat.cli.main import main


@pytest.mark.parametrize(
    "strategy",
    [
        "preduce:P=2",
        "adpsgd",
        "prague:size=2",
        "localsgd:every=8",
        "diloco:every=8,mixing=0.25",
        "choco:every=4",
    ],
)
def test_a_slow_worker_makes_fewer_steps_and_all_samples_are_used(strategy, tmp_path):
    path = tmp_path / "result.json"
    options = ["--workers", "4", "--slow", "1:5", "--steps", "100", "--json", str(path)]
    assert main(["simulate", "--strategy", strategy, *options]) == 0
    result = json.loads(path.read_text())
    steps = {row["worker"]: row["steps"] for row in result["rows"]}
    assert sum(steps.values()) == result["figures"]["steps_count"] == 400
    assert steps[1] < min(steps[worker] for worker in (0, 2, 3)) / 3
    assert result["figures"]["averagings_count"] > 5


def test_a_campaign_under_such_a_strategy_is_of_averaged_models(capsys):
    assert main(["simulate", "--strategy", "adpsgd", "--seeds", "3"]) == 0
    assert "faults_count" in capsys.readouterr().out
