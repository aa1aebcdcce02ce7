"""Compressed gradients: figures, the methods that are compared, and a small run."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks import compression, runs
from benchmarks.__main__ import main
from benchmarks.commands import CompressionOptions
from benchmarks.compression import figures, hook_like, real_gradients
from benchmarks.namespaces import missing


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


def test_without_dense_gradients_and_hooks_only_times_are_figures():
    assert figures([row("bsp:compress=powersgd:2", "free", 1.0, 0.5)]) == {
        "step_s_bsp_compress_powersgd_2_free": 0.5
    }


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
    methods = ["bsp", "ddp", "ddp:fp16", "ddp:powersgd:2"]
    options = CompressionOptions(
        method=methods, model="mlp", workers=2, rate_mbit=["free"], batch_size=2, steps=3, step_ms=5
    )
    result = compression.run(options, command="test")
    assert result.figures.keys() == {
        *(f"bytes_ratio_dense_to_{name}_2w" for name in ("ddp", "ddp_fp16", "ddp_powersgd_2")),
        *(f"step_s_{name}_free" for name in ("bsp", "ddp", "ddp_fp16", "ddp_powersgd_2")),
        "step_ratio_to_torch_hook_bsp_free",
    }
    assert all(row["step_s"] > 0.005 for row in result.rows)  # each waits for a step
    sent = {row["method"]: row["bytes_per_step"] for row in result.rows}
    all_bytes = sum(one.nbytes for one in runs.network("mlp", None, 0).parameters())
    # A ring of two sends a half to be summed, and half of the sum.
    assert 1 < sent["bsp"] / all_bytes < 1.2
    assert 1 < sent["ddp"] / all_bytes < 1.2
    assert 0.5 < sent["ddp:fp16"] / all_bytes < 0.6
    assert sent["ddp:powersgd:2"] / all_bytes < 0.1
