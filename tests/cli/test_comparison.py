"""Promises of `offbeat compare`: the cases, the figures and their summary."""

import json

import pytest

from offbeat.cli import comparison
from offbeat.cli.comparison import ComparisonCase
from offbeat.cli.main import main
from support.comparison_rows import row, sheet_of_three_epochs


def test_each_slow_is_a_case_and_plus_joins_rules():
    found = comparison.comparison_cases(["a", "b"], ["none", "1:5+2:3@burst=20/100"])

    assert [(case.strategy, case.slow) for case in found] == [
        ("a", ()),
        ("a", ("1:5", "2:3@burst=20/100")),
        ("b", ()),
        ("b", ("1:5", "2:3@burst=20/100")),
    ]


def test_labels_of_different_spellings_differ():
    slows = [("1:5",), ("1:5.5",), ("15:5",), ("1:5", "5:1"), ("1:5@0.0-0.5",), ("1:5@burst=20/100",), ()]
    labels = [ComparisonCase(strategy="bsp", slow=slow).label for slow in slows]

    assert labels[0] == "bsp_1_5"
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ((), "no worker is slowed"),
        (("1:5",), "worker 1 takes 5x as long"),
        (("1:2.5@0.0-0.5",), "worker 1 takes 2.5x as long from 0% to 50% of every epoch"),
        (("1:5@burst=20/100",), "worker 1 takes 5x as long in 20 of every 100 steps"),
        (("1:5@p=0.05",), "worker 1 takes 5x as long in each step with probability 0.05"),
        (("random:3", "0:2"), "a worker drawn every epoch takes 3x as long; worker 0 takes 2x as long"),
    ],
)
def test_slowness_is_described_in_words(slow, words):
    assert comparison.describe_slowness(slow) == words


@pytest.mark.parametrize(
    ("slow", "wait_share"),
    [((), 0.3), (("1:5",), 0.45), (("1:5", "0:2@0.0-0.5"), 0.6), (("2:3", "0:2"), 0.0), (("random:2",), 0.3)],
)
def test_a_row_leaves_out_the_first_epoch_and_the_waiting_of_slowed_workers(slow, wait_share):
    waits = [0.3, 0.0, 0.6]
    found = comparison.comparison_row(
        ComparisonCase(strategy="bsp", slow=slow), 3, sheet_of_three_epochs(waits)
    )

    assert found.epoch_s == 3.0
    assert found.accuracy == 0.7
    assert found.wait_share == pytest.approx(wait_share)


def test_slowdowns_are_relative_to_bsp_without_slowed_workers():
    rows = [row("other", epoch_s=2.0), row("bsp", epoch_s=4.0), row("bsp", ("1:5",), epoch_s=18.0)]
    found = comparison.figures(rows)

    assert found["slowdown_bsp_1_5_ratio"] == 4.5
    assert found["slowdown_other_none_ratio"] == 0.5
    assert found["epoch_bsp_1_5_s"] == 18.0
    assert found["wait_bsp_1_5_share"] == 0.1
    assert found["bsp_1_5_accuracy"] == 0.9


def test_without_an_unslowed_case_there_are_no_slowdowns():
    rows = [row(slow=("1:5",))]

    assert comparison.baseline(rows) is None
    assert "slowdown_bsp_1_5_ratio" not in comparison.figures(rows)
    assert comparison.rows_as_dicts(rows)[0]["slowdown_ratio"] is None
    assert comparison.summary_sentences(rows) == []


def test_the_sentence_follows_from_the_figures():
    rows = [row(epoch_s=2.0), row(slow=("1:5",), epoch_s=9.2, wait_share=0.76)]
    assert comparison.summary_sentences(rows) == [
        "In lockstep (bsp), one slow worker of four made every worker 4.6 times slower: "
        "the other workers spent 76% of their time waiting."
    ]
    rows = [row(epoch_s=2.0), row(slow=("1:5", "2:5"), epoch_s=2.04)]
    assert comparison.summary_sentences(rows) == [
        "In lockstep (bsp), two slow workers of four made no difference beyond noise (1.02 times as long)."
    ]


def test_strategies_are_compared_under_the_same_slowness():
    rows = [row("bsp", ("1:5",), epoch_s=9.0), row("partial", ("1:5",), epoch_s=3.0)]

    assert comparison.summary_sentences(rows) == [
        "Where worker 1 takes 5x as long, partial was 3.0 times as fast as bsp."
    ]


@pytest.mark.long
def test_a_real_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    line = "compare --workers 2 --strategy bsp --slow none --slow 1:5 --epochs 2 --json result.json"
    assert main([*line.split(), "--batch-size", "128", "--run-dir", "runs"]) == 0

    printed = capsys.readouterr().out
    assert "no worker is slowed" in printed
    assert "worker 1 takes 5x as long" in printed
    assert "In lockstep (bsp), one slow worker of two" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["name"], result["kind"], result["seed"]) == ("compare", "real", 0)
    assert {"machine", "command"} <= set(result)
    free, slowed = result["rows"]
    assert (free["slow"], slowed["slow"]) == ("none", "1:5")
    assert slowed["wait_share"] > free["wait_share"] + 0.2  # worker 0 waits for worker 1
    assert slowed["accuracy"] == pytest.approx(free["accuracy"], abs=0.02)  # the same steps, only later
    figures = result["figures"]
    assert figures["slowdown_bsp_none_ratio"] == 1.0
    assert figures["slowdown_bsp_1_5_ratio"] == slowed["slowdown_ratio"]

    for case in ("bsp_none", "bsp_1_5"):
        assert main(["replay", f"runs/{case}"]) == 0
        assert capsys.readouterr().out.startswith("identical: ")
