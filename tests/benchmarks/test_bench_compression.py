"""Compressed gradients: figures, the methods that are compared, and a small run."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks import compression, compression_accuracy, runs
from benchmarks.__main__ import main
from benchmarks.commands import CompressionOptions
from benchmarks.compression import figures, real_gradients
from benchmarks.ddp_hooks import AUTO, METHODS, check_method, hook_like, is_ddp
from benchmarks.namespaces import missing
from offbeat.cli.result import figure_part


def row(method, line, bytes_per_step, step_s):
    return {
        "method": method,
        "line": line,
        "workers": 4,
        "bytes_per_step": bytes_per_step,
        "step_s": step_s,
    }


@pytest.mark.parametrize(
    ("strategy", "hook"),
    [
        ("bsp", "ddp"),
        ("partial:shards=equal", "ddp"),
        ("bsp:compress=bf16", "ddp:fp16"),
        ("partial:shards=equal,compress=fp16", "ddp:fp16"),
        ("bsp:compress=powersgd:2,timeout_s=9", "ddp:powersgd:2"),
        ("bsp:compress=powersgd:4", "ddp:powersgd:4"),
        ("bsp:compress=sign", None),
    ],
)
def test_a_strategy_is_compared_with_the_hook_that_compresses_as_it_does(strategy, hook):
    assert hook_like(strategy) == hook


def test_each_strategy_is_beside_its_hook_in_what_runs_by_default():
    for method in METHODS:
        check_method(method)
    strategies = [method for method in METHODS if not is_ddp(method) and method != AUTO]
    assert {hook_like(strategy) for strategy in strategies} == {*METHODS} - {*strategies, AUTO}


def test_figures_are_bytes_relative_to_dense_ones_and_times_on_each_line():
    rows = [
        row("bsp", "100mbit", 1000.0, 8.0),
        row("bsp:compress=fp16", "100mbit", 600.0, 5.0),
        row("ddp:fp16", "100mbit", 500.0, 4.0),
        row("bsp", "free", 1200.0, 0.2),
        row("bsp:compress=fp16", "free", 400.0, 0.3),
        row("ddp:fp16", "free", 500.0, 0.6),
    ]
    assert figures(rows) == pytest.approx(
        {
            "bytes_ratio_dense_to_bsp_compress_fp16_4w": 2.2,
            "bytes_ratio_dense_to_ddp_fp16_4w": 2.2,
            "step_s_bsp_100mbit": 8.0,
            "step_s_bsp_compress_fp16_100mbit": 5.0,
            "step_ratio_to_torch_hook_bsp_compress_fp16_100mbit": 1.25,
            "step_s_ddp_fp16_100mbit": 4.0,
            "step_s_bsp_free": 0.2,
            "step_s_bsp_compress_fp16_free": 0.3,
            "step_ratio_to_torch_hook_bsp_compress_fp16_free": 0.5,
            "step_s_ddp_fp16_free": 0.6,
        }
    )


def test_the_automatic_choice_is_compared_with_the_fastest_strategy_on_each_line():
    rows = [
        row("bsp", "100mbit", 1.0, 8.0),
        row("bsp:compress=bf16", "100mbit", 1.0, 4.0),
        row("ddp", "100mbit", 1.0, 2.0),
        row("bsp:compress=auto", "100mbit", 1.0, 5.0),
        row("bsp", "free", 1.0, 0.2),
        row("bsp:compress=bf16", "free", 1.0, 0.4),
        row("bsp:compress=auto", "free", 1.0, 0.21),
    ]
    found = figures(rows)
    assert found["auto_to_best_ratio_max"] == pytest.approx(1.25)
    assert found["auto_to_dense_ratio_max"] == pytest.approx(1.05)


def test_without_dense_gradients_and_hooks_only_times_are_figures():
    assert figures([row("bsp:compress=powersgd:2", "free", 1.0, 0.5)]) == {
        "step_s_bsp_compress_powersgd_2_free": 0.5
    }


def test_an_accuracy_is_compared_in_points_over_the_seeds():
    accuracies = {"bsp": (0.5, 0.7), "bsp:compress=bf16": (0.6, 0.5), "ddp": (0.8, 0.6)}
    rows = [
        {"method": method, "seed": seed, "accuracy": value}
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    below = {"accuracy_below_dense_percent_bsp_compress_bf16": 5.0, "accuracy_below_dense_percent_ddp": -10.0}
    means = {"accuracy_bsp": 0.6, "accuracy_bsp_compress_bf16": 0.55, "accuracy_ddp": 0.7}
    assert compression_accuracy.figures(rows) == pytest.approx(means | below)
    assert compression_accuracy.figures(rows[2:4]) == pytest.approx({"accuracy_bsp_compress_bf16": 0.55})


def test_the_gradients_of_each_worker_are_those_of_a_batch_of_its_own():
    found, again, other = (real_gradients("mlp", 2, 3, rank) for rank in (1, 1, 0))
    model = runs.network("mlp", None, 3)
    x, y = runs.batch(2, 3001, timed=False)
    F.cross_entropy(model(x), y).backward()
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.grad)
        assert torch.equal(found[name], again[name])
    assert not all(torch.equal(found[name], other[name]) for name in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "none"], "unknown strategy 'none'"),
        (["--method", "ddp:int8"], "expected ddp, ddp:fp16 or ddp:powersgd:RANK, got 'ddp:int8'"),
        (["--method", "ddp:powersgd:0"], "got 'ddp:powersgd:0'"),
        (["--method", "bsp", "--rate-mbit", "fast"], "a line's rate in Mbit/s or free, got 'fast'"),
        (["--method", "bsp", "--model", "none"], "none"),
        (["--accuracy", "--data", "digits", "--samples", "99"], "expected at least 128 samples for one step"),
    ],
)
def test_bad_input_ends_with_one_line_before_anything_is_measured(options, words, capsys):
    assert main(["compression", *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("offbeat: ")
    assert printed.count("\n") == 1
    assert words in printed


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_compression_counts_the_bytes_of_each_method_and_times_its_steps():
    options = CompressionOptions(
        model="mlp", workers=2, rate_mbit=["free"], batch_size=2, blocks=2, steps=2, step_ms=5
    )
    result = compression.run(options, command="test")
    names = {method: figure_part(method) for method in METHODS}
    strategies = [method for method in METHODS if not is_ddp(method) and method != AUTO]
    assert result.figures.keys() == {
        *(f"bytes_ratio_dense_to_{name}_2w" for method, name in names.items() if method != "bsp"),
        *(f"step_s_{name}_free" for name in names.values()),
        *(f"step_ratio_to_torch_hook_{names[method]}_free" for method in strategies),
        *("auto_to_best_ratio_max", "auto_to_dense_ratio_max"),
    }
    assert all(row["step_s"] > 0.005 for row in result.rows)  # each waits for a step
    all_bytes = sum(one.nbytes for one in runs.network("mlp", None, 0).parameters())
    for row in result.rows:
        # A ring of two sends a half to be summed, and half of the sum.
        share = row["bytes_per_step"] / all_bytes
        if row["method"] == AUTO:
            assert share < 1.2  # whatever it has chosen
        elif "powersgd" in row["method"]:
            assert share < 0.1
        elif "16" in row["method"]:
            assert 0.5 < share < 0.6
        else:
            assert 1 < share < 1.2


@pytest.mark.long
def test_all_methods_are_trained_with_the_same_samples_from_the_same_weights():
    methods = ["bsp", "ddp", "bsp:compress=powersgd:2", "ddp:powersgd:2"]
    options = CompressionOptions(
        accuracy=True,
        method=methods,
        model="mlp",
        workers=2,
        data="digits",
        samples=1000,
        batch_size=16,
        epochs=4,
        lr=0.05,
        seeds=1,
    )
    result = compression.run(options, command="test")
    assert result.kind == "real"
    assert [row["method"] for row in result.rows] == methods
    assert all(row["accuracy"] > 0.8 for row in result.rows)
    names = ("ddp", "bsp_compress_powersgd_2", "ddp_powersgd_2")
    assert all(abs(result.figures[f"accuracy_below_dense_percent_{name}"]) < 10 for name in names)
