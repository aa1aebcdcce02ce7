"""Draws the papers' figures from results with rows: `python benchmarks/plot.py FOLDER`.

For each of straggler.json, straggler_real.json, detect.json, accuracy.json, race.json, staleness.json,
hybrid.json, hybrid_sweep.json, validate.json, validate_loaders.json, validate_repeated.json and
validate_gpu.json that exists in the folder it writes a PNG of the same name, with the paper's values where it
gives them. The predictions of hybrid_sweep.json are drawn together with the measurements of
hybrid_sweep_timed.json. Needs matplotlib, which is in the extra `dev`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

from matplotlib import pyplot as plt

# The first paper, figure 1 and its text: seconds of 90 epochs with 0 to 4 stragglers of 4, in lockstep.
PAPER_RUN_S = (990.97, 4650.11, 4693.09, 4684.54, 4698.86)
# Section 5, batches of 32 and 64: mean seconds until a straggler was excluded, and until it was readmitted;
# an iteration took 0.166 s in both.
PAPER_DETECT_S, PAPER_RECOVER_S, PAPER_ITERATION_S = (1.43, 1.44), (0.21, 0.30), 0.166
# The second paper's names of the parts of a thread's time, and ours.
PAPER_PARTS = {
    "BATCH": "batch",
    "COMPUTE_GRADS": "compute",
    "APPLY_GRADS": "apply",
    "PS_APPLY_GRADS": "push",
    "STEP": "report",
    "BARRIER": "wait",
    "PS_PARAM": "pull",
    "P_CACHE_PARAM": "process_cache",
    "T_CACHE_PARAM": "thread_cache",
    "other": "other",
}
# The third paper's ways of averaging, DDP, and those that the sweep adds.
SIDES = {
    "ddp": ("DDP", "0.6"),
    "sync_ring": ("ring, no overlap", "#c7b299"),
    "fifo_ring": ("ring, first in first out", "#d9822b"),
    "paper": ("the paper's text", "#8e6bb0"),
    "table4": ("the paper's table 4", "#c2506b"),
    "cost_model": ("cost model, by priority", "#2b6ca3"),
    "hierarchical": ("groups of 16, by priority", "#4a9a5b"),
}
# The fourth paper, figures 4 and 5: savings by overlap, by data, threads and baseline; figure 14: time of
# copying in percent of an epoch, with 6 and with 48 copies.
PAPER_SAVINGS = {
    "MNIST, 1 thread\nNumPy": 16.6,
    "MNIST, 1 thread\ntf.data": 11.6,
    "MNIST, 6 threads\ntf.data": 10.8,
    "1 GB, 6 threads\ntf.data": 22.4,
}
PAPER_COPY_PERCENT = {6: 0.01, 48: 0.41}
OVERLAPPED = {
    "overlap": ("in threads", "#2b6ca3"),
    "overlap_process": ("in processes", "#4a9a5b"),
    "overlap_prefetch": ("in threads, over a prefetching loader", "#8e6bb0"),
}
USES = {"cpu_use_percent": "use of all cores, in %", "gpu_use_percent": "use of the GPU, in %"}
GREY, BLUE, ORANGE, GREEN = "0.75", "#2b6ca3", "#d9822b", "#4a9a5b"


def straggler(result: dict[str, Any], path: Path) -> None:
    """Draw the slowdown of a step by the number of slow workers."""
    end = "" if result["kind"] == "timed" else "_real"
    figures = result["figures"]
    counts = [count for count in range(1, 5) if f"slowdown_bsp_{count}{end}" in figures]
    bars = [
        ("the paper, lockstep", GREY, [PAPER_RUN_S[count] / PAPER_RUN_S[0] for count in counts]),
        ("bsp", ORANGE, [figures[f"slowdown_bsp_{count}{end}"] for count in counts]),
        ("partial", BLUE, [figures[f"slowdown_partial_{count}{end}"] for count in counts]),
    ]
    _, axes = plt.subplots(figsize=(7, 4))
    _draw_bars(axes, bars, [f"{count}" for count in counts])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("slow workers of 4")
    axes.set_ylabel("time of a step / without slow workers")
    axes.set_title(f"One step, slow workers take 5 times as long ({result['kind']} compute)")
    _save(path)


def detect(result: dict[str, Any], path: Path) -> None:
    """Draw the steps until a straggler is excluded and readmitted, by batch size."""
    figures = result["figures"]
    _, both = plt.subplots(1, 2, figsize=(8, 4))
    parts = (
        ("detect", "excluded after", PAPER_DETECT_S),
        ("recover", "readmitted after", PAPER_RECOVER_S),
    )
    for axes, (name, title, paper_s) in zip(both, parts, strict=True):
        bars = [
            ("the paper, from its seconds", GREY, [time_s / PAPER_ITERATION_S for time_s in paper_s]),
            ("partial", BLUE, [figures.get(f"{name}_steps_mean_b{size}", 0.0) for size in (32, 64)]),
        ]
        _draw_bars(axes, bars, ["batches of 32", "batches of 64"])
        axes.set_title(title)
        axes.set_ylabel("steps, mean of 10 epochs")
    _save(path)


def accuracy(result: dict[str, Any], path: Path) -> None:
    """Draw test accuracy over time for every seed; the paper has no such figure."""
    _, axes = plt.subplots(figsize=(7, 4))
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        runs.setdefault((row["strategy"], row["seed"]), []).append(row)
    strategies = list(dict.fromkeys(strategy for strategy, _ in runs))
    for (strategy, seed), rows in runs.items():
        axes.plot(
            [row["time_s"] for row in rows],
            [100 * row["accuracy"] for row in rows],
            color=(ORANGE, BLUE, GREEN)[strategies.index(strategy) % 3],
            linewidth=1,
            label=strategy if seed == 0 else None,
        )
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy in %")
    axes.set_title("One worker of 4 takes 5 times as long, one line per seed")
    axes.legend(frameon=False, loc="lower right")
    _save(path)


def race(result: dict[str, Any], path: Path) -> None:
    """Draw accuracy and consensus distance over time, one column per case, one line per method and seed."""
    curves: dict[tuple[Any, ...], dict[tuple[str, int], list[dict[str, Any]]]] = {}
    for row in result["rows"]:
        if "time_s" in row:
            case = (row["workers"], row["slow"], row["line_mbit"])
            curves.setdefault(case, {}).setdefault((row["method"], row["seed"]), []).append(row)
    methods = list(dict.fromkeys(method for runs in curves.values() for method, _ in runs))
    colors = dict(zip(methods, plt.get_cmap("tab20").colors * len(methods), strict=False))
    _, all_axes = plt.subplots(2, len(curves), figsize=(5 * len(curves), 7), sharex="col", squeeze=False)
    for (accuracies, distances), ((workers, slow, line), runs) in zip(
        all_axes.T, curves.items(), strict=True
    ):
        for (method, seed), rows in runs.items():
            style = {"color": colors[method], "linewidth": 1, "label": method if seed == 0 else None}
            times_s = [row["time_s"] for row in rows]
            accuracies.plot(times_s, [100 * row["accuracy"] for row in rows], **style)
            distances.plot(times_s, [row["distance"] for row in rows], **style)
        accuracies.set_title(
            f"{workers} workers, {slow}, {'free lines' if line is None else f'{line} Mbit/s'}"
        )
        distances.set_xlabel("seconds of training")
    all_axes[0][0].set_ylabel("test accuracy of the mean model in %")
    all_axes[1][0].set_ylabel("consensus distance")
    all_axes[0][-1].legend(frameon=False, fontsize=8, loc="lower right")
    _save(path)


def staleness(result: dict[str, Any], path: Path) -> None:
    """Draw the second paper's nine parts of a thread's time, and the rest (its figures 9 and 10)."""
    groups: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for row in result["rows"]:
        if row["setting"] != "none":
            group = groups.setdefault((row["setting"], row["workers"]), {})
            group.setdefault(row["strategy"], []).append(row)
    _, all_axes = plt.subplots(1, len(groups), figsize=(3.2 * len(groups), 4.5), squeeze=False)
    for axes, ((setting, workers), runs) in zip(all_axes[0], groups.items(), strict=True):
        reached_s = dict.fromkeys(runs, 0.0)
        for (name, part), color in zip(PAPER_PARTS.items(), plt.get_cmap("tab10").colors, strict=True):
            spent_s = [sum(row[f"{part}_s"] for row in rows) / len(rows) for rows in runs.values()]
            axes.bar(list(runs), spent_s, bottom=list(reached_s.values()), color=color, label=name)
            reached_s = {run: reached_s[run] + own_s for run, own_s in zip(runs, spent_s, strict=True)}
        axes.set_title(f"{setting}, {workers} workers", fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
    all_axes[0][0].set_ylabel("seconds of a thread, mean")
    all_axes[0][0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.08), ncols=5)
    _save(path)


def hybrid(result: dict[str, Any], path: Path) -> None:
    """Draw a step's time relative to the floor, by its compute time."""
    rows = result["rows"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    sides = list(dict.fromkeys(row["side"] for row in rows))
    found = {(row["case"], row["side"]): row["ratio_to_floor"] for row in rows}
    bars = [(*SIDES[side], [found[case, side] for case in cases]) for side in sides]
    _, axes = plt.subplots(figsize=(1.5 * len(cases), 4))
    _draw_bars(axes, bars, [case.replace("_f", " %\nf = ").replace("c", "C/S = ") + " %" for case in cases])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("time of a step / floor")
    axes.set_title("AlexNet, 4 workers, lines of 1 Gbit/s; C: compute, f: share of it forward, S: transfer")
    _save(path)


def hybrid_sweep(result: dict[str, Any], path: Path) -> None:
    """Draw predicted and measured steps relative to DDP's, by number of workers and line rate."""
    timed = path.with_name("hybrid_sweep_timed.json")
    measured = json.loads(timed.read_text())["rows"] if timed.exists() else []
    rates = list(dict.fromkeys(row["rate_mbit"] for row in result["rows"]))
    _, all_axes = plt.subplots(1, len(rates), figsize=(4.5 * len(rates), 4), sharey=True, squeeze=False)
    for axes, rate in zip(all_axes[0], rates, strict=True):
        for side, (label, color) in SIDES.items():
            for rows, style in ((result["rows"], {"linewidth": 1.2}), (measured, {"marker": "o", "ls": ""})):
                points = _over_ddp(rows, rate, side)
                if points:
                    axes.plot(*zip(*points, strict=True), color=color, label=label, **style)
                    label = None
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("workers")
        axes.set_title(f"{rate / 1000:g} Gbit/s", fontsize=9)
    all_axes[0][0].set_ylabel("time of a step / DDP's")
    all_axes[0][0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=4)
    _save(path)


def validate(result: dict[str, Any], path: Path) -> None:
    """Draw savings by overlap, the cost of copying, and the use of the cores over time."""
    figures, rows = result["figures"], result["rows"]
    runs = [row for row in rows if "run_s" in row]
    cases = {(row["load"], row["threads"]): None for row in runs if row["side"] == "numpy"}
    _, (savings, copies, uses) = plt.subplots(3, 1, figsize=(11, 11))
    savings.bar(list(PAPER_SAVINGS), list(PAPER_SAVINGS.values()), 0.5, color=GREY, label="the paper")
    width = 0.8 / len(OVERLAPPED)
    for place, (side, (label, color)) in enumerate(OVERLAPPED.items()):
        found = {
            group: 100 * figures[f"saving_{load}_{threads}_{side}"]
            for group, (load, threads) in enumerate(cases, len(PAPER_SAVINGS))
            if f"saving_{load}_{threads}_{side}" in figures
        }
        at = [group + (place - (len(OVERLAPPED) - 1) / 2) * width for group in found]
        if found:
            bars = savings.bar(at, list(found.values()), width, label=label, color=color)
            savings.bar_label(bars, fmt="%.0f", fontsize=8)
    names = [*PAPER_SAVINGS, *(f"{load}\n{threads} threads" for load, threads in cases)]
    savings.set_xticks(range(len(names)), names, fontsize=8)
    savings.axhline(0, color="black", linewidth=0.8)
    savings.set_ylabel("saved, in % of validation in line")
    percents = {
        int(name.removeprefix("copy_share_")): 100 * share
        for name, share in figures.items()
        if name.startswith("copy_share_")
    }
    for label, color, line in (("the paper", GREY, PAPER_COPY_PERCENT), ("one snapshot", BLUE, percents)):
        if line:
            copies.plot(list(line), list(line.values()), "o-", color=color, label=label)
    copies.set_xlabel("threads that validate")
    copies.set_ylabel("copying, in % of an epoch")
    looks = [row for row in rows if "at_s" in row]
    load, threads = next((case for case in cases if case[0] == "files"), next(iter(cases)))
    for side, color in (("numpy", "0.5"), ("prefetch", ORANGE), ("overlap", BLUE)):
        line = [row for row in looks if (row["load"], row["threads"], row["side"]) == (load, threads, side)]
        if line:
            at_s, shares = [row["at_s"] for row in line], [100 * row["used_share"] for row in line]
            uses.plot(at_s, shares, color=color, label=side, linewidth=0.9)
    uses.set_xlabel(f"seconds of a run: {load}, {threads} threads")
    uses.set_ylabel("use of all cores, in %")
    for axes in (savings, copies, uses):
        axes.legend(frameon=False, fontsize=8)
    _save(path)


def validate_gpu(result: dict[str, Any], path: Path) -> None:
    """Draw the use of the cores and of the GPU over time (the fourth paper's figures 6 to 13)."""
    looks = [row for row in result["rows"] if "at_s" in row]
    cases = list(dict.fromkeys((row["load"], row["threads"]) for row in looks))
    _, all_axes = plt.subplots(len(cases), 2, figsize=(11, 2.6 * len(cases)), squeeze=False)
    for both, (load, threads) in zip(all_axes, cases, strict=True):
        for axes, (name, label) in zip(both, USES.items(), strict=True):
            for side, color in (("serial", "0.5"), ("overlapped", BLUE)):
                line = [
                    (row["at_s"], row[name])
                    for row in looks
                    if (row["load"], row["threads"], row["side"]) == (load, threads, side) and name in row
                ]
                if line:
                    axes.plot(*zip(*line, strict=True), color=color, label=side, linewidth=0.9)
                    axes.legend(frameon=False, fontsize=8)
            axes.set_ylim(0, 100)
            axes.set_ylabel(label)
            axes.set_xlabel(f"seconds of a run: {load}, {threads} threads")
    plt.tight_layout()
    _save(path)


def _over_ddp(rows: list[dict[str, Any]], rate: int, side: str) -> list[tuple[int, float]]:
    """Return pairs of number of workers and a side's step relative to DDP's in the same run."""
    step_s = {(row["workers"], row["side"]): row["step_s"] for row in rows if row["rate_mbit"] == rate}
    return [
        (workers, own_s / step_s[workers, "ddp"])
        for (workers, name), own_s in sorted(step_s.items())
        if name == side
    ]


def _draw_bars(axes: Any, bars: list[tuple[str, str, list[float]]], groups: list[str]) -> None:
    width = 0.8 / len(bars)
    for place, (label, color, heights) in enumerate(bars):
        at = [group + (place - (len(bars) - 1) / 2) * width for group in range(len(groups))]
        axes.bar_label(axes.bar(at, heights, width, label=label, color=color), fmt="%.3g", fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=len(bars))


def _save(path: Path) -> None:
    plt.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close("all")


FIGURES = {
    "straggler": straggler,
    "straggler_real": straggler,
    "detect": detect,
    "accuracy": accuracy,
    "race": race,
    "staleness": staleness,
    "hybrid": hybrid,
    "hybrid_sweep": hybrid_sweep,
    "validate": validate,
    "validate_loaders": validate,
    "validate_repeated": validate,
    "validate_gpu": validate_gpu,
}


def main(arguments: list[str]) -> int:
    """Draw a plot for each result in the folder, and print its path."""
    (folder,) = map(Path, arguments)
    for name, draw in FIGURES.items():
        source = folder / f"{name}.json"
        if source.exists():
            draw(json.loads(source.read_text()), folder / f"{name}.png")
            print(folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
