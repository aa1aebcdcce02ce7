"""The benchmarks run, small, and report the promised figures; their values are not judged here."""

import json
import sys
from importlib import import_module
from inspect import signature
from typing import get_type_hints

import pytest
import torch

from benchmarks import allreduce, gpu, local_steps, memory, mpi, overhead, ray_chaos, slow_line, tls
from benchmarks.__main__ import main
from benchmarks.commands import (
    AllreduceOptions,
    GpuOptions,
    LocalStepsOptions,
    MemoryOptions,
    OverheadOptions,
    RayChaosOptions,
    SlowLineOptions,
    TlsOptions,
    bench,
    benchmarks,
)
from benchmarks.namespaces import missing
from offbeat.errors import OffbeatError

COMMANDS = [command for command in bench.registered_commands if command.name != "list"]


def test_the_list_names_each_benchmark_with_its_duration_and_what_it_needs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # so that no cell has several lines
    assert main(["list"]) == 0
    rows = {row.split()[1]: row for row in capsys.readouterr().out.splitlines() if len(row.split()) > 1}
    assert [row.name for row in benchmarks] == [command.name for command in COMMANDS]
    assert all(row.minutes > 0 for row in benchmarks)
    for benchmark in benchmarks:
        row = rows[benchmark.name]
        assert f"{benchmark.minutes:g}" in row.split()
        assert benchmark.needs in row


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_benchmark_takes_the_options_of_its_command(command):
    run = import_module(f"benchmarks.{command.name.replace('-', '_')}").run
    options = get_type_hints(run)["options"]
    names = [*signature(command.callback).parameters]
    assert names == [*options.__dataclass_fields__, "json"]
    assert command.help == options.__doc__


def test_ray_chaos_says_that_it_needs_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OffbeatError, match=r"this benchmark needs Ray, .* pip install 'offbeat\[ray\]'"):
        ray_chaos.run(RayChaosOptions(), command="test")


@pytest.mark.long
def test_overhead_gives_a_ratio_for_each_model():
    result = overhead.run(
        OverheadOptions(workers=2, batch_size=2, scale=0.01), command="test", models=["cnn2"]
    )
    assert list(result.figures) == ["step_ratio_p50_cnn2"]
    assert [(row["side"], row["steps"]) for row in result.rows] == [("ddp", 60), ("bsp", 60)]
    assert all(row["step_s_p50"] > 0 for row in result.rows)


@pytest.mark.long
def test_memory_counts_the_parameters_of_each_side():
    result = memory.run(MemoryOptions(workers=2, million_parameters=10), command="test")
    assert [row["side"] for row in result.rows] == ["ddp", "bsp"]
    for row in result.rows:
        # Parameters, gradients and what is sent, of 4 bytes each:
        assert row["mb"] - row["before_mb"] > 3 * 40
    assert result.figures["pss_ratio_to_ddp"] == result.rows[1]["mb"] / result.rows[0]["mb"]


def figures_of_gpu(suffix):
    return {
        *(
            f"{figure}_{name}{suffix}"
            for figure in ("ratio_to_ddp_gloo", "step_ms", "staging_share", "host_memory_ratio")
            for name in ("bsp", "partial", "hybrid")
        ),
        *(f"{figure}{suffix}" for figure in ("step_ms_ddp_gloo", "step_ms_compute", "staging_ms")),
    }


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch has an accelerator")
def test_gpu_says_that_it_needs_an_accelerator():
    with pytest.raises(OffbeatError, match="torch finds no accelerator here"):
        gpu.run(GpuOptions(), command="test")


@pytest.mark.long
def test_gpu_gives_the_ratios_on_one_host():
    """On the CPU: what an accelerator adds, `make bench-gpu` runs."""
    options = GpuOptions(model="cnn2", batch_size=2, blocks=1)
    result = gpu.run(options, command="test", device="cpu")
    slow = {"ratio_partial_to_bsp_one_slow", "step_ms_partial_one_slow"}
    assert set(result.figures) == figures_of_gpu("") | slow
    assert all(value > 0 for value in result.figures.values())
    assert result.machine["device"] == "cpu"


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_gpu_gives_the_ratios_on_lines_of_a_known_rate():
    options = GpuOptions(model="cnn2", batch_size=2, blocks=1, rate_mbit=[4000])
    result = gpu.run(options, command="test", device="cpu")
    assert set(result.figures) == figures_of_gpu("_4000mbit")
    assert {row["rate_mbit"] for row in result.rows} == {4000}
    # A contribution and a sum, which on the CPU becomes the gradients; or two sums, whose memory alternates.
    assert all(
        1.9 < result.figures[f"host_memory_ratio_{name}_4000mbit"] < 3.5 for name in ("bsp", "partial")
    )


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_tls_gives_throughput_and_processor_time_of_both_links():
    result = tls.run(TlsOptions(rate_mbit=4000, blocks=1), command="test")
    places = ["loopback", "line", "line_one_way"]
    assert set(result.figures) == {
        *(
            f"{figure}_{place}_{side}"
            for figure in ("mbit_per_s", "cpu_s_per_gb")
            for place in places
            for side in ("plain", "tls")
        ),
        *(f"tls_to_plain_ratio_{place}" for place in places),
    }
    assert all(value > 0 for value in result.figures.values())


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_slow_line_gives_the_pace_before_and_after():
    options = SlowLineOptions(workers=3, rate_mbit=1.0, kilobytes=50, steps=20, minutes=0.1)
    result = slow_line.run(options, command="test")
    paces = {"step_s_before", "step_s_slow", "step_s_after", "after_to_before_ratio"}
    counts = {"steps_until_left_out", "others_left_out_count", "tried_again_count"}
    assert set(result.figures) == paces | counts
    assert all(result.figures[pace] > 0 for pace in paces)


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_local_steps_gives_the_ratio_to_computing_of_each_strategy():
    options = LocalStepsOptions(
        model="mlp", workers=2, rate_mbit=1000, steps=8, step_ms=10, strategy=["localsgd:every=4", "bsp"]
    )
    result = local_steps.run(options, command="test")
    names = {"time_ratio_to_compute_localsgd_every_4", "time_ratio_to_compute_bsp"}
    assert result.figures.keys() == names
    assert all(ratio > 0.9 for ratio in result.figures.values())  # a step waits at least as long


SIZES = ["35KB", "600KB", "5MB", "67MB"]
TO_RING = [f"ratio_to_ring_{{}}_{name}" for name in ("recursive_doubling", "rabenseifner", "direct")]


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_allreduce_gives_the_ratios_for_each_size():
    result = allreduce.run(AllreduceOptions(workers=3, rate_mbit=4000, blocks=1), command="test")
    ratios = ("ratio_to_bound", "sockets_ratio_to_bound", "ratio_to_gloo", "ratio_to_sockets")
    of_size = ["links_ms_{}", *(f"{ratio}_{{}}" for ratio in ratios), *TO_RING]
    names = [name.format(size) for size in SIZES for name in of_size]
    names += [
        "hierarchical_to_flat_ratio_67MB",
        "hierarchical_to_flat_ratio_trial",
        "trial_duration_s",
    ]
    assert list(result.figures) == names
    assert result.machine["line_mbit_per_s"] == 4000
    assert all(result.figures[f"{side}ratio_to_bound_67MB"] > 1 for side in ("", "sockets_"))


@pytest.mark.long
def test_allreduce_on_one_host_has_open_mpi_beside_it_where_that_is_installed():
    result = allreduce.run(AllreduceOptions(workers=2, one_host=True, blocks=1), command="test")
    others = ["gloo", *(["mpi"] if mpi.is_installed() else []), "sockets"]
    of_size = ["links_ms_{}", *(f"ratio_to_{other}_{{}}" for other in others), *TO_RING]
    assert list(result.figures) == [name.format(size) for size in SIZES for name in of_size]


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_hybrid_gives_the_ratios_of_each_side_and_case(tmp_path):
    path = tmp_path / "result.json"
    options = ["--workers", "2", "--steps", "1", "--compute", "1", "--compute", "8", "--forward-share", "0.5"]
    sides = ["--side", "ddp", "--side", "cost_model"]
    assert main(["hybrid", "--model", "cnn2", *options, *sides, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    figures = result["figures"]
    assert {
        "time_ratio_to_ddp_cnn2_c100_f50_cost_model",
        "share_of_possible_saving_cnn2_c100_f50_cost_model",
    } < {*figures}
    # Where the backward pass alone covers the communication there is nothing to save.
    assert "share_of_possible_saving_cnn2_c800_f50_cost_model" not in figures
    assert figures["time_ratio_to_ddp_best"] <= figures["time_ratio_to_ddp_worst"]
    assert figures["ratio_to_floor_cnn2_cost_model"] > 0.9
    assert len(result["rows"]) == 4
    assert all(row["step_s"] > 0 and row["cpu_s"] > 0 for row in result["rows"])


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
@pytest.mark.parametrize(("kind", "batch"), [("timed", "--timed-batch"), ("real", "--real-batch")])
def test_hybrid_takes_batches_as_they_are(tmp_path, kind, batch):
    path = tmp_path / "result.json"
    options = ["--model", "cnn2", "--workers", "2", "--steps", "1", "--side", "ddp", "--side", "cost_model"]
    assert main(["hybrid", *options, batch, "2", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["kind"] == kind
    assert [row["case"] for row in result["rows"]] == [f"{kind}2"] * 2
    assert result["figures"]["time_ratio_to_ddp_best"] > 0
    assert ("ratio_to_floor_cnn2_cost_model" in result["figures"]) == (kind == "timed")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--side", "best"], "unknown strategy 'best'"),
        (["--compute", "0"], "a ratio above 0"),
        (["--forward-share", "1"], "a share between 0 and 1"),
        (["--model", "nosuch"], "nosuch"),
        (["--timed-batch", "0"], "at least 1 sample"),
        (["--real-batch", "2", "--compute", "1"], "without cases and timed batches"),
    ],
)
def test_hybrid_refuses_impossible_measurements(options, text, capsys):
    assert main(["hybrid", *options]) == 2
    assert text in capsys.readouterr().err


def test_the_hybrid_sweep_reports_the_fastest_side_of_each_case(tmp_path):
    path = tmp_path / "result.json"
    options = ["--model", "cnn2", "--rate-mbit", "100", "--rate-mbit", "10000"]
    workers = ["--workers", "2", "--workers", "64"]
    assert main(["hybrid-sweep", *options, *workers, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["kind"] == "simulated"
    assert sum(row["side"] == "hierarchical" for row in result["rows"]) == 2  # with 64 workers
    assert min(row["ratio_to_best"] for row in result["rows"]) == 1
    assert result["figures"]["cost_model_to_best_ratio_max"] < 1.2
    slow = [row for row in result["rows"] if row["rate_mbit"] == 100 and row["workers"] == 2]
    took_s = {row["side"]: row["step_s"] for row in slow}
    assert took_s["cost_model"] < took_s["fifo_ring"] <= took_s["sync_ring"]


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"needs network namespaces: {missing()}")
def test_a_measured_sweep_has_the_predictions_next_to_it(tmp_path):
    path = tmp_path / "result.json"
    options = ["--model", "cnn2", "--timed", "--rate-mbit", "1000", "--workers", "2", "--steps", "1"]
    sides = ["--side", "ddp", "--side", "cost_model"]
    assert main(["hybrid-sweep", *options, *sides, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["kind"] == "timed"
    assert all(row["predicted_s"] > 0 and row["step_s"] > 0 for row in result["rows"])
    assert result["figures"]["measured_to_predicted_ratio_p50"] > 0.5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--side", "best"], "expected sides of ddp"),
        (["--compute", "-1"], "a ratio above 0"),
        (["--rate-mbit", "0"], "rate"),
    ],
)
def test_the_hybrid_sweep_refuses_impossible_comparisons(options, text, capsys):
    assert main(["hybrid-sweep", *options]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.long
def test_log_counts_the_processor_time_of_recording(tmp_path):
    path = tmp_path / "result.json"
    assert main(["log", "--workers", "2", "--blocks", "1", "--steps", "3", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["name"] == "log"
    assert result["figures"]["recording_share_of_step"] >= 0
    assert result["figures"]["log_bytes_a_step"] > 100
    assert [row["way"] for row in result["rows"]] == ["recorded", "plain"]


def test_an_unwritable_result_is_refused_before_anything_is_measured(capsys):
    assert main(["allreduce", "--json", "/proc/no/such"]) == 2
    assert capsys.readouterr().err.startswith("offbeat: cannot write /proc/no/such")
