"""Delayed block proximal gradient with a worker that is slow in bursts, by delay bound.

Gradients are real, but a task has a minimum duration, so that a few cores can stand for as many machines; the
slow worker's tasks take longer by a factor. A larger bound of the delay reduces waiting between workers, and
may increase the number of passes.

Each of `VARIANTS` is a set of filters. "all" runs with every delay; the others, without one of the filters
or without any, run with the first delay only. The fixed point filter applies to pushes only, because zero
weights must be pulled as exact zeros.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.children import Child, Lines
from benchmarks.commands import SparseLrOptions
from benchmarks.workers import print_progress
from offbeat.apps.sparse_lr.libsvm import read_libsvm
from offbeat.apps.sparse_lr.logistic import BlockWorker, PassSchedule
from offbeat.apps.sparse_lr.powerlaw import power_law_blocks
from offbeat.apps.sparse_lr.sparse import SignedColumns, SparseRows, concatenate_rows
from offbeat.cli.result import Result
from offbeat.numerics.ps.block_proximal import BlockProximal
from offbeat.numerics.ps.spaces import FilterSpec
from offbeat.numerics.ps.updates import Assign
from offbeat.policies.stragglers.injection import InjectedSlowness, parse_slow_rule
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.namespace import Namespace
from offbeat.runtime.ps.node import ClusterFile

_KKT, _KEY_CACHING, _FIXED_POINT, _COMPRESSION = "kkt", "key_caching", "fixed_point", "compression"
_ALL: Final = (_KKT, _KEY_CACHING, _FIXED_POINT, _COMPRESSION)
VARIANTS: Final[Mapping[str, tuple[str, ...]]] = {
    "all": _ALL,
    **{f"no_{one}": tuple(other for other in _ALL if other != one) for one in _ALL},
    "none": (),
}
_LISTS = 256  # remembered key lists at each end; a pass pulls fewer
_SERVERS = 2
_RUN_LIMIT_S = 3600.0


class SparseLrSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one run.

    Attributes:
        path: of a file in LIBSVM's format; "" for generated rows.
        rows, features: of generated rows.
        slow: slowness rules; their steps are tasks and their epochs are passes.
        task_ms: minimum duration of a task.
        filters: of `VARIANTS`.
    """

    path: str
    rows: int
    features: int
    seed: int
    workers: int
    blocks: int
    l1: float
    rate: float
    epsilon: float
    passes_max: int
    slow: tuple[str, ...]
    task_ms: float
    tau: int = 0
    filters: tuple[str, ...] = ()


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one worker.

    Attributes:
        passes: objective, non-zero weights and seconds since the start, after each pass.
        busy_s: time in tasks, minimum duration and slowness included.
        waiting_s: time waiting for servers, and so for other workers.
        pushed_keys: in all tasks.
    """

    passes: list[tuple[float, int, float]]
    busy_s: float
    waiting_s: float
    pushed_keys: int
    traffic_bytes: int


def run(options: SparseLrOptions, *, command: str) -> Result:
    """Run all variants; those other than "all" use the first bound of the delay.

    Raises:
        OffbeatError: a process failed, or a wait timed out.
    """
    taus = options.tau or [0, 1, 2, 4, 8, 16]
    setting = SparseLrSettings(
        path="" if options.path is None else str(options.path),
        rows=options.rows,
        features=options.features,
        seed=options.seed,
        workers=options.workers,
        blocks=options.blocks,
        l1=options.l1,
        rate=options.rate,
        epsilon=options.epsilon,
        passes_max=options.passes,
        slow=tuple(options.slow or ["1:10@burst=8/64"]),
        task_ms=options.task_ms,
    )
    keys, height = _extent(setting)
    found: dict[tuple[str, int], list[WorkerReport]] = {}
    for variant, filters in VARIANTS.items():
        for tau in taus if variant == "all" else taus[:1]:
            print_progress(f"filters: {variant}, tau {tau}")
            one = msgspec.structs.replace(setting, tau=tau, filters=filters)
            reports = found[variant, tau] = _run_once(one, keys, height)
            passes = reports[0].passes
            print_progress(f"  {len(passes)} passes, objective {passes[-1][0]:.9g}")
    best = min(objective for reports in found.values() for objective, _, _ in reports[0].passes)
    target = best * (1 + options.gap)
    rows = [_row(variant, tau, reports, target) for (variant, tau), reports in found.items()]
    figures: dict[str, float] = {}
    for row in rows:
        name = f"{row['filters']}_tau{row['tau']}"
        if row["filters"] == "all":
            figures[f"waiting_share_{name}"] = row["waiting_share"]
        figures[f"traffic_mb_{name}"] = row["traffic_mb"]
        if row["found_s"] is not None:
            figures[f"found_s_{name}"] = row["found_s"]
    return Result(
        name="sparse-lr", command=command, kind="timed", seed=setting.seed, figures=figures, rows=rows
    )


def _row(variant: str, tau: int, reports: Sequence[WorkerReport], target: float) -> dict[str, Any]:
    reached = [
        (number, at_s)
        for number, (objective, _, at_s) in enumerate(reports[0].passes, 1)
        if objective <= target
    ]
    busy_s, waiting_s = sum(one.busy_s for one in reports), sum(one.waiting_s for one in reports)
    passes = len(reports[0].passes)
    return {
        "filters": variant,
        "tau": tau,
        "passes": passes,
        "found_after_passes": reached[0][0] if reached else None,
        "found_s": reached[0][1] if reached else None,
        "waiting_share": waiting_s / (busy_s + waiting_s),
        "busy_s_a_pass": busy_s / passes,
        "waiting_s_a_pass": waiting_s / passes,
        "pushed_keys": sum(one.pushed_keys for one in reports),
        "traffic_mb": sum(one.traffic_bytes for one in reports) / 1e6,
        "objective": reports[0].passes[-1][0],
        "nonzeros": reports[0].passes[-1][1],
    }


def _run_once(setting: SparseLrSettings, keys: int, height: int) -> list[WorkerReport]:
    with ExitStack() as stack:
        ps = stack.enter_context(PS.local(_SERVERS))
        children = [
            stack.enter_context(Child("benchmarks.sparse_lr", name=f"worker {rank}"))
            for rank in range(setting.workers)
        ]
        for rank, child in enumerate(children):
            settings = {
                "cluster": ps.cluster,
                "rank": rank,
                "keys": keys,
                "height": height,
                "setting": setting,
            }
            child.lines.send(msgspec.to_builtins(settings))
        return [msgspec.convert(child.lines.receive(_RUN_LIMIT_S), WorkerReport) for child in children]


def _extent(setting: SparseLrSettings) -> tuple[int, int]:
    """Return the numbers of keys and of rows."""
    if not setting.path:
        return setting.features, setting.rows
    rows = read_libsvm(Path(setting.path))
    return int(rows.keys.max()) + 1, len(rows)


def _share(setting: SparseLrSettings, rank: int) -> SparseRows:
    if setting.path:
        return read_libsvm(Path(setting.path)).shard(rank, setting.workers)
    block = max(1, min(4096, setting.rows // setting.workers))
    return concatenate_rows(
        list(
            power_law_blocks(
                setting.rows,
                setting.features,
                setting.seed,
                rows_per_block=block,
                part=rank,
                parts=setting.workers,
            )
        )
    )


def _filters(setting: SparseLrSettings) -> tuple[list[FilterSpec], list[FilterSpec]]:
    """Return the filters of pushes, and those of pulls."""
    specs = {
        _KKT: FilterSpec("KKT", {"l1": setting.l1}),
        _KEY_CACHING: FilterSpec("KeyCaching", {"entries": _LISTS}),
        _FIXED_POINT: FilterSpec("FixedPoint", {"bytes_per_value": 3}),
        _COMPRESSION: FilterSpec("Compression"),
    }
    push = [specs[one] for one in specs if one in setting.filters]
    return push, [spec for spec in push if spec.kind in ("KeyCaching", "Compression")]


class _Worker:
    """One worker, with its times."""

    def __init__(
        self, ps: PS, setting: SparseLrSettings, columns: SignedColumns, rank: int, keys: int, height: int
    ) -> None:
        self.ps, self.setting, self.rank = ps, setting, rank
        self.worker = BlockWorker(columns, setting.l1)
        self.passes = PassSchedule(
            keys,
            setting.blocks,
            height,
            setting.epsilon,
            passes_max=setting.passes_max,
            filtered=_KKT in setting.filters,
            seed=setting.seed,
        )
        rules = [parse_slow_rule(rule) for rule in setting.slow]
        self.slowness = InjectedSlowness(rules, workers=setting.workers, seed=setting.seed)
        self.tasks = self.pushed_keys = 0
        self.busy_s = self.waiting_s = 0.0
        update = BlockProximal(l1=setting.l1, rate=setting.rate)
        push, pull = _filters(setting)
        self.is_skipping = _KKT in setting.filters
        self.w = ps.namespace(
            "w",
            keys,
            update=update,
            aggregate="sum",
            width=2,
            dtype="float64",
            push_filters=push,
            pull_filters=pull,
        )
        self.totals = ps.namespace(
            "totals", setting.workers, update=Assign(), aggregate="sum", width=3, dtype="float64"
        )
        holders = ps.namespace("holders", keys, aggregate="sum")
        for namespace in (self.w, self.totals, holders):
            namespace.join_aggregation(setting.workers)
        self.holders_D = self._holders(holders)

    def _holders(self, holders: Namespace) -> np.ndarray[Any, Any]:
        """Return how many workers have each of this one's keys, so that shared weights count once in all."""
        own_keys = self.worker.columns.keys
        pushed = holders.push(np.ones(len(own_keys)), keys=own_keys, first=0, last=holders.keys)
        counts: np.ndarray[Any, Any] = holders.pull(keys=own_keys, after=[pushed]).result()
        return counts.astype(np.float64)

    def run(self) -> WorkerReport:
        passes: list[tuple[float, int, float]] = []
        begun_s = time.monotonic()
        for blocks in self.passes:
            if self.is_skipping:
                self.w.set_margin(self.passes.kkt_margin)
            self.worker.violation = 0.0
            self._one_pass(blocks)
            objective, nonzeros, violation = self._reduce_totals()
            self.passes.end_pass(objective, violation)
            passes.append((objective, round(nonzeros), time.monotonic() - begun_s))
        return WorkerReport(
            passes=passes,
            busy_s=self.busy_s,
            waiting_s=self.waiting_s,
            pushed_keys=self.pushed_keys,
            traffic_bytes=self.ps.traffic_bytes,
        )

    def _one_pass(self, blocks: Sequence[tuple[int, int]]) -> None:
        in_flight: deque[tuple[Any, Any]] = deque()
        for number, (first, last) in enumerate(blocks, 1):
            begun_s = time.monotonic()
            block = self.worker.compute_push(first, last, self.w.is_active if self.is_skipping else None)
            self._extend_task(begun_s, number - 1, len(blocks))
            pushed = self.w.push(block.rows, keys=block.keys, first=first, last=last)
            in_flight.append((block.keys, self.w.pull(keys=block.keys, after=[pushed])))
            self.pushed_keys += len(block.keys)
            for keys, rows in self._arrived(in_flight, self.setting.tau if number < len(blocks) else 0):
                begun_s = time.monotonic()
                self.worker.apply_pull(keys, *rows.T)
                self.busy_s += time.monotonic() - begun_s

    def _arrived(self, in_flight: deque[tuple[Any, Any]], tau: int) -> Iterator[tuple[Any, Any]]:
        """Yield pulled weights, and wait until at most `tau` tasks are in flight."""
        while in_flight and (len(in_flight) > tau or in_flight[0][1].is_done):
            keys, pulled = in_flight.popleft()
            begun_s = time.monotonic()
            rows = pulled.result()
            self.waiting_s += time.monotonic() - begun_s
            yield keys, rows

    def _extend_task(self, begun_s: float, task: int, tasks: int) -> None:
        """Extend a task of a pass to its duration."""
        factor = self.slowness.factor(self.rank, self.passes.passes_ended, task, tasks, self.tasks)
        self.tasks += 1
        task_s = max(self.setting.task_ms / 1000, time.monotonic() - begun_s) * factor
        time.sleep(max(0.0, begun_s + task_s - time.monotonic()))
        self.busy_s += time.monotonic() - begun_s

    def _reduce_totals(self) -> tuple[float, float, float]:
        """Return objective, non-zero weights and largest violation, over all workers."""
        worker = self.worker
        penalty = self.setting.l1 * float((np.abs(worker.weights_D) / self.holders_D).sum())
        nonzeros = float(((worker.weights_D != 0) / self.holders_D).sum())
        row = worker.loss + penalty, nonzeros, worker.violation
        begun_s = time.monotonic()
        pushed = self.totals.push([row], keys=[self.rank], first=0, last=self.setting.workers)
        rows = self.totals.pull(after=[pushed]).result()
        self.waiting_s += time.monotonic() - begun_s
        return float(rows[:, 0].sum()), float(rows[:, 1].sum()), float(rows[:, 2].max())


def main() -> None:
    """Run one worker."""
    lines = Lines.to_parent()
    settings = lines.receive()
    setting = msgspec.convert(settings["setting"], SparseLrSettings)
    columns = SignedColumns.from_rows(_share(setting, settings["rank"]))
    with PS(msgspec.convert(settings["cluster"], ClusterFile), host="127.0.0.1") as ps:
        worker = _Worker(ps, setting, columns, settings["rank"], settings["keys"], settings["height"])
        lines.send(msgspec.to_builtins(worker.run()))
        lines.receive(_RUN_LIMIT_S)


if __name__ == "__main__":
    main()
