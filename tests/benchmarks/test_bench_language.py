"""The language benchmark: its text and model, what it refuses, and once for real."""

import json

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.language import Gpt, read_windows


def test_windows_cover_the_text_and_the_last_tenth_is_for_validation(tmp_path):
    (tmp_path / "text").write_text("abcdefghij" * 10)
    train, validation, vocabulary = read_windows(tmp_path / "text", 3)
    assert vocabulary == 10
    assert train[:3].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert train[-1].tolist() == [4, 5, 6, 7]  # a last window, from 87 on, would end in the last tenth
    assert validation.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_a_character_is_predicted_from_earlier_ones_only():
    torch.manual_seed(0)
    model = Gpt(vocabulary=5, tokens=6, width=8, layers=2)
    first = torch.tensor([[0, 1, 2, 3, 4, 0]])
    second = first.clone()
    second[0, 3] = 1
    with torch.no_grad():
        changed = (model(first) - model(second)).abs().amax(2)[0]
    assert (changed[:3] == 0).all()
    assert (changed[3:] > 0).all()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--strategy none", "unknown strategy 'none'"),
        ("", "cannot read tinyshakespeare.txt: save https://"),
    ],
)
def test_bad_input_ends_with_one_line(words, reason, tmp_path, capsys):
    assert main(["language", "--data-dir", str(tmp_path), *words.split()]) != 0
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert reason in printed


@pytest.mark.long
def test_the_losses_for_real(tmp_path):
    (tmp_path / "tinyshakespeare.txt").write_text("to be or not to be, that is the question; " * 100)
    path = tmp_path / "result.json"
    words = (
        "language --strategy diloco:every=16 --workers 2 --tokens 8 --width 8 --layers 1 --batch-size 8 "
        f"--epochs 2 --json {path}"
    )
    assert main([*words.split(), "--data-dir", str(tmp_path)]) == 0
    result = json.loads(path.read_text())
    figures = result["figures"]
    assert figures.keys() == {
        "loss_bsp",
        "loss_diloco_every_16",
        "loss_above_bsp_percent_diloco_every_16",
    }
    losses = figures["loss_bsp"], figures["loss_diloco_every_16"]
    assert figures["loss_above_bsp_percent_diloco_every_16"] == pytest.approx(
        100 * (losses[1] / losses[0] - 1)
    )
    assert [row["strategy"] for row in result["rows"]] == ["bsp", "diloco:every=16"]
