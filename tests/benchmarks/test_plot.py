"""`benchmarks/plot.py` draws every figure of the papers from a result as the benchmarks write it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.expected import SIDES
from benchmarks.hybrid_sweep import HIERARCHICAL
from benchmarks.staleness import PARTS
from benchmarks.validate import COPY_THREADS
from benchmarks.validate import SIDES as VALIDATE_SIDES

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.long

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plot.py"
OVERLAPPED = [side for side in VALIDATE_SIDES if side.startswith("overlap")]
STRAGGLER = {f"slowdown_{side}_{count}": 2.0 for side in ("bsp", "partial") for count in range(1, 5)}
RESULTS = {
    "straggler": {"kind": "timed", "figures": STRAGGLER, "rows": []},
    "straggler_real": {
        "kind": "real",
        "figures": {"slowdown_bsp_1_real": 2.0, "slowdown_partial_1_real": 1.0},
        "rows": [],
    },
    "detect": {
        "kind": "timed",
        "figures": {"detect_steps_mean_b32": 10.0, "recover_steps_mean_b32": 3.0},
        "rows": [],
    },
    "accuracy": {
        "kind": "real",
        "figures": {},
        "rows": [
            {"strategy": strategy, "seed": seed, "time_s": time_s, "samples": 1, "accuracy": 0.5}
            for strategy in ("bsp", "partial")
            for seed in (0, 1)
            for time_s in (1.0, 2.0)
        ],
    },
    "race": {
        "kind": "real",
        "figures": {},
        "rows": [
            {"method": method, "workers": 4, "slow": slow, "line_mbit": line, "seed": seed} | part
            for slow, line in (("none", None), ("one5x", 1000))
            for method in ("bsp", "adpsgd", "peer_ddp")
            for seed in (0, 1)
            for part in (
                {"time_ratio": 0.3, "run_s": 2.0},
                {"time_s": 0.0, "accuracy": 0.1, "distance": 0.0},
                {"time_s": 2.0, "accuracy": 0.9, "distance": 0.5},
            )
        ],
    },
    "staleness": {
        "kind": "timed",
        "figures": {},
        "rows": [
            {"strategy": strategy, "setting": setting, "workers": 4, "process": process}
            | {f"{part}_s": 1.0 for part in PARTS}
            for setting in ("none", "bursts", "lasting_equal")
            for strategy in ("bsp", "dtssp")
            for process in (0, 1)
        ],
    },
    "hybrid": {
        "kind": "timed",
        "figures": {},
        "rows": [
            {"case": case, "side": side, "ratio_to_floor": 1.1}
            for case in ("c25_f33", "c100_f50")
            for side in SIDES
        ],
    },
    "hybrid_sweep": {
        "kind": "simulated",
        "figures": {},
        "rows": [
            {"rate_mbit": rate, "workers": workers, "side": side, "step_s": 1.0}
            for rate in (100, 1000)
            for workers in (2, 64)
            for side in (*SIDES, HIERARCHICAL)
        ],
    },
    "validate": {
        "kind": "timed",
        "figures": {
            **{f"saving_{load}_1_{side}": 0.2 for load in ("memory", "files") for side in OVERLAPPED},
            **{f"copy_share_{threads}": 0.001 for threads in COPY_THREADS},
        },
        "rows": [
            {"load": load, "threads": 1, "side": side} | part
            for load in ("memory", "files")
            for side in VALIDATE_SIDES
            for part in ({"run_s": 1.0}, {"at_s": 0.25, "used_share": 0.5})
        ],
    },
    "validate_loaders": {
        "kind": "timed",
        "figures": {"saving_memory_6_overlap_prefetch": 0.1},
        "rows": [{"load": "memory", "threads": 6, "side": "numpy", "run_s": 1.0}],
    },
    "validate_repeated": {
        "kind": "timed",
        "figures": {"saving_repeated_6_overlap": 0.2},
        "rows": [{"load": "repeated", "threads": 6, "side": "numpy", "run_s": 1.0}],
    },
    "validate_gpu": {
        "kind": "real",
        "figures": {},
        "rows": [
            {"load": "memory", "threads": threads, "side": side, "at_s": at_s}
            | {"cpu_use_percent": 30.0, "gpu_use_percent": 10.0 * at_s}
            for threads in (1, 6)
            for side in ("serial", "overlapped")
            for at_s in (0.25, 0.5)
        ],
    },
}


def plotted(folder):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "MPLCONFIGDIR": str(folder / "matplotlib")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_each_result_has_a_picture(tmp_path):
    for name, result in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert plotted(tmp_path) == [str(tmp_path / f"{name}.png") for name in RESULTS]
    for name in RESULTS:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_measured_points_are_drawn_next_to_the_predicted_ones(tmp_path):
    result = RESULTS["hybrid_sweep"]
    (tmp_path / "hybrid_sweep.json").write_text(json.dumps(result))
    assert plotted(tmp_path) == [str(tmp_path / "hybrid_sweep.png")]
    alone = (tmp_path / "hybrid_sweep.png").read_bytes()
    points = [{**row, "step_s": 1.0 + len(row["side"])} for row in result["rows"]]
    (tmp_path / "hybrid_sweep_timed.json").write_text(json.dumps({**result, "kind": "timed", "rows": points}))
    plotted(tmp_path)
    assert (tmp_path / "hybrid_sweep.png").read_bytes() != alone


def test_missing_results_are_not_drawn(tmp_path):
    (tmp_path / "detect.json").write_text(json.dumps(RESULTS["detect"]))
    assert plotted(tmp_path) == [str(tmp_path / "detect.png")]
