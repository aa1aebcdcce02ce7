"""Delayed block proximal gradient with a worker that is slow in bursts, by delay.

Gradients are real; but a task takes at least as long as it is told to, so that a few cores stand for as many
machines, and the slow worker's bursts as many times longer. The larger the bound of the delay, the less
workers wait for it, and the more passes they may need.

Each of `VARIANTS` is a set of filters: all of them with every delay; the others, in which one is switched off
each, or all, with the first delay only. Fixed point is a filter of pushes only, for weights that are zero
have to come as zero.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.children import Child, Lines
from offbeat.cli.result import Result
from offbeat.libsvm import read_libsvm
from offbeat.numerics.logistic import BlockProximal, BlockWorker, PassSchedule
from offbeat.numerics.powerlaw import power_law_blocks
from offbeat.numerics.ps.spaces import FilterSpec
from offbeat.numerics.ps.updates import Assign
from offbeat.numerics.sparse import SignedColumns, SparseRows, concatenate_rows
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
_LISTS = 256  # of keys that each end remembers, as of those that pulls list; a pass has fewer
_SERVERS = 2
_RUN_LIMIT_S = 3600.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        path: of a file in LIBSVM's format; "" for made-up rows.
        rows, features: of the made-up ones.
        slow: rules of slowness, whose steps are tasks and whose epochs are passes.
        task_ms: how long a task takes at least.
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


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has to say of its run.

    Attributes:
        passes: objective, non-zero weights and seconds since the beginning, after each pass.
        busy_s: computing, or seeming to; the slow worker's slowness included.
        waiting_s: for servers, and so for other workers.
        pushed_keys: in all tasks.
    """

    passes: list[tuple[float, int, float]]
    busy_s: float
    waiting_s: float
    pushed_keys: int
    traffic_bytes: int


def run(*, command: str, setting: Setting, taus: Sequence[int], gap: float) -> Result:
    """Run all variants.

    Args:
        command: the command line that does it again.
        setting: of all runs, but for delay and filters.
        taus: bounds of the delay; the first is that of all variants.
        gap: how close to the best objective of all runs counts as having found it, as a share of it.

    Raises:
        OffbeatError: something did not go on.
    """
    keys, height = _extent(setting)
    found: dict[tuple[str, int], list[Told]] = {}
    for variant, filters in VARIANTS.items():
        for tau in taus if variant == "all" else taus[:1]:
            print(f"filters: {variant}, tau {tau}", file=sys.stderr, flush=True)
            one = msgspec.structs.replace(setting, tau=tau, filters=filters)
            told = found[variant, tau] = _one(one, keys, height)
            print(f"  {len(told[0].passes)} passes, objective {told[0].passes[-1][0]:.9g}", file=sys.stderr)
    best = min(objective for told in found.values() for objective, _, _ in told[0].passes)
    rows = [_row(variant, tau, told, best * (1 + gap)) for (variant, tau), told in found.items()]
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


def _row(variant: str, tau: int, told: Sequence[Told], target: float) -> dict[str, Any]:
    reached = [
        (number, at_s) for number, (objective, _, at_s) in enumerate(told[0].passes, 1) if objective <= target
    ]
    busy_s, waiting_s = sum(one.busy_s for one in told), sum(one.waiting_s for one in told)
    passes = len(told[0].passes)
    return {
        "filters": variant,
        "tau": tau,
        "passes": passes,
        "found_after_passes": reached[0][0] if reached else None,
        "found_s": reached[0][1] if reached else None,
        "waiting_share": waiting_s / (busy_s + waiting_s),
        "busy_s_a_pass": busy_s / passes,
        "waiting_s_a_pass": waiting_s / passes,
        "pushed_keys": sum(one.pushed_keys for one in told),
        "traffic_mb": sum(one.traffic_bytes for one in told) / 1e6,
        "objective": told[0].passes[-1][0],
        "nonzeros": told[0].passes[-1][1],
    }


def _one(setting: Setting, keys: int, height: int) -> list[Told]:
    with ExitStack() as stack:
        ps = stack.enter_context(PS.local(_SERVERS))
        children = [
            stack.enter_context(Child("benchmarks.sparse_lr", name=f"worker {rank}"))
            for rank in range(setting.workers)
        ]
        for rank, child in enumerate(children):
            told = {"cluster": ps.cluster, "rank": rank, "keys": keys, "height": height, "setting": setting}
            child.lines.tell(msgspec.to_builtins(told))
        return [msgspec.convert(child.lines.hear(_RUN_LIMIT_S), Told) for child in children]


def _extent(setting: Setting) -> tuple[int, int]:
    """How many keys and rows there are."""
    if not setting.path:
        return setting.features, setting.rows
    rows = read_libsvm(Path(setting.path))
    return int(rows.keys.max()) + 1, len(rows)


def _share(setting: Setting, rank: int) -> SparseRows:
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


def _filters(setting: Setting) -> tuple[list[FilterSpec], list[FilterSpec]]:
    """Those of pushes, and those of pulls."""
    specs = {
        _KKT: FilterSpec("KKT", {"l1": setting.l1}),
        _KEY_CACHING: FilterSpec("KeyCaching", {"entries": _LISTS}),
        _FIXED_POINT: FilterSpec("FixedPoint", {"bytes_per_value": 3}),
        _COMPRESSION: FilterSpec("Compression"),
    }
    push = [specs[one] for one in specs if one in setting.filters]
    return push, [spec for spec in push if spec.kind in ("KeyCaching", "Compression")]


class _Worker:
    """One worker, and where its time goes."""

    def __init__(
        self, ps: PS, setting: Setting, columns: SignedColumns, rank: int, keys: int, height: int
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
        self.told = ps.namespace(
            "told", setting.workers, update=Assign(), aggregate="sum", width=3, dtype="float64"
        )
        holders = ps.namespace("holders", keys, aggregate="sum")
        for namespace in (self.w, self.told, holders):
            namespace.join_aggregation(setting.workers)
        self.holders_D = self._holders(holders)

    def _holders(self, holders: Namespace) -> np.ndarray[Any, Any]:
        """How many workers have each of this one's keys; each counts a share of what there is once."""
        mine = self.worker.columns.keys
        pushed = holders.push(np.ones(len(mine)), keys=mine, first=0, last=holders.keys)
        counts: np.ndarray[Any, Any] = holders.pull(keys=mine, after=[pushed]).result()
        return counts.astype(np.float64)

    def run(self) -> Told:
        seen: list[tuple[float, int, float]] = []
        begun_s = time.monotonic()
        for blocks in self.passes:
            if self.is_skipping:
                self.w.set_margin(self.passes.kkt_margin)
            self.worker.violation = 0.0
            self._one_pass(blocks)
            objective, nonzeros, violation = self._together()
            self.passes.end_pass(objective, violation)
            seen.append((objective, round(nonzeros), time.monotonic() - begun_s))
        return Told(
            passes=seen,
            busy_s=self.busy_s,
            waiting_s=self.waiting_s,
            pushed_keys=self.pushed_keys,
            traffic_bytes=self.ps.traffic_bytes,
        )

    def _one_pass(self, blocks: Sequence[tuple[int, int]]) -> None:
        under_way: deque[tuple[Any, Any]] = deque()
        for number, (first, last) in enumerate(blocks, 1):
            begun_s = time.monotonic()
            block = self.worker.compute_push(first, last, self.w.active_keys if self.is_skipping else None)
            self._seem_slow(begun_s, number - 1, len(blocks))
            pushed = self.w.push(block.rows, keys=block.keys, first=first, last=last)
            under_way.append((block.keys, self.w.pull(keys=block.keys, after=[pushed])))
            self.pushed_keys += len(block.keys)
            for keys, rows in self._arrived(under_way, self.setting.tau if number < len(blocks) else 0):
                begun_s = time.monotonic()
                self.worker.apply_pull(keys, *rows.T)
                self.busy_s += time.monotonic() - begun_s

    def _arrived(self, under_way: deque[tuple[Any, Any]], tau: int) -> Iterator[tuple[Any, Any]]:
        """Yield what has come, and wait until at most `tau` tasks have not."""
        while under_way and (len(under_way) > tau or under_way[0][1].is_done):
            keys, pulled = under_way.popleft()
            begun_s = time.monotonic()
            rows = pulled.result()
            self.waiting_s += time.monotonic() - begun_s
            yield keys, rows

    def _seem_slow(self, begun_s: float, task: int, tasks: int) -> None:
        """Let a task of a pass take as long as it is to."""
        factor = self.slowness.factor(self.rank, self.passes.passes_ended, task, tasks, self.tasks)
        self.tasks += 1
        task_s = max(self.setting.task_ms / 1000, time.monotonic() - begun_s) * factor
        time.sleep(max(0.0, begun_s + task_s - time.monotonic()))
        self.busy_s += time.monotonic() - begun_s

    def _together(self) -> tuple[float, float, float]:
        """Objective, non-zero weights and largest violation of all workers."""
        worker = self.worker
        penalty = self.setting.l1 * float((np.abs(worker.weights_D) / self.holders_D).sum())
        nonzeros = float(((worker.weights_D != 0) / self.holders_D).sum())
        row = worker.loss + penalty, nonzeros, worker.violation
        begun_s = time.monotonic()
        pushed = self.told.push([row], keys=[self.rank], first=0, last=self.setting.workers)
        rows = self.told.pull(after=[pushed]).result()
        self.waiting_s += time.monotonic() - begun_s
        return float(rows[:, 0].sum()), float(rows[:, 1].sum()), float(rows[:, 2].max())


def main() -> None:
    """One worker."""
    lines = Lines.to_parent()
    place = lines.hear()
    setting = msgspec.convert(place["setting"], Setting)
    columns = SignedColumns.from_rows(_share(setting, place["rank"]))
    with PS(msgspec.convert(place["cluster"], ClusterFile), host="127.0.0.1") as ps:
        worker = _Worker(ps, setting, columns, place["rank"], place["keys"], place["height"])
        lines.tell(msgspec.to_builtins(worker.run()))
        lines.hear(_RUN_LIMIT_S)


if __name__ == "__main__":
    main()
