"""Time sheet of a run: the events of its log, summed to one entry per worker and epoch.

Pure sums over events in the order of the log; nothing here reads a file or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.events import Action, Evaluated, Event, Left, StepsTimed, StepTimes
from offbeat.wire.job_view import TIME_PARTS, sum_parts


@dataclass(frozen=True, kw_only=True)
class TimeSheetEntry:
    """One worker's work in one epoch, or in several.

    Attributes:
        steps: optimizer steps.
        samples: samples behind them.
        wall_s: their total duration in seconds.
        parts_s: its parts in seconds: a key of `TIME_PARTS` each, summing to `wall_s`.
        metrics: the metrics that the worker reported at the end.
    """

    worker: int
    epoch: int
    steps: int
    samples: int
    wall_s: float
    parts_s: dict[str, float]
    metrics: dict[str, float]

    def share(self, part: str) -> float:
        """Return the part's share of the wall time, 0 to 1."""
        return self.parts_s[part] / self.wall_s if self.wall_s else 0.0


class TimeSheet:
    """Sums up the events of one run as they arrive.

    A worker's epoch ends with its `Evaluated` event.

    Attributes:
        entries: one per worker and finished epoch, in the order of the log.
        workers_left: workers that have left in order.
        steps_finished: by worker.
    """

    def __init__(self) -> None:
        self.entries: list[TimeSheetEntry] = []
        self.workers_left: set[int] = set()
        self.steps_finished: dict[int, int] = {}
        self._unassigned: dict[int, list[StepTimes]] = {}

    def add(self, event: Event | Action) -> None:
        """Add the next entry of the log."""
        match event:
            case StepsTimed():
                self._unassigned.setdefault(event.worker, []).extend(event.steps)
                before = self.steps_finished.get(event.worker, 0)
                self.steps_finished[event.worker] = before + len(event.steps)
            case Evaluated():
                self.entries.append(_entry(event, self._unassigned.pop(event.worker, [])))
            case Left():
                self.workers_left.add(event.worker)
            case _:
                pass

    def epoch(self, epoch: int) -> list[TimeSheetEntry]:
        """Return the entries of one epoch, by worker."""
        return sorted((e for e in self.entries if e.epoch == epoch), key=lambda entry: entry.worker)

    def epochs_finished(self, workers: int) -> int:
        """Return how many epochs have been ended by all of the first `workers` workers."""
        ended = [sum(entry.worker == worker for entry in self.entries) for worker in range(workers)]
        return min(ended, default=0)

    def totals(self, first_epoch: int = 0) -> list[TimeSheetEntry]:
        """Return one entry per worker over all epochs from `first_epoch` on, with its last metrics."""
        chosen = [entry for entry in self.entries if entry.epoch >= first_epoch]
        workers = sorted({entry.worker for entry in chosen})
        return [_sum([entry for entry in chosen if entry.worker == worker]) for worker in workers]


def wall_s(entries: Iterable[TimeSheetEntry]) -> float:
    """Return the wall time of the slowest worker, in seconds."""
    return max((entry.wall_s for entry in entries), default=0.0)


def samples_per_s(entries: Sequence[TimeSheetEntry]) -> float:
    """Return the throughput: the samples of all workers per second of the slowest worker's wall time."""
    took_s = wall_s(entries)
    return sum(entry.samples for entry in entries) / took_s if took_s else 0.0


def loss(entries: Sequence[TimeSheetEntry]) -> float | None:
    """Return the mean training loss over all workers' samples; None if no worker reported one."""
    reported = [entry for entry in entries if "loss" in entry.metrics and entry.samples]
    samples = sum(entry.samples for entry in reported)
    return sum(entry.metrics["loss"] * entry.samples for entry in reported) / samples if reported else None


def accuracy(entries: Sequence[TimeSheetEntry]) -> float | None:
    """Return the test accuracy; None if no worker reported one."""
    return next((entry.metrics["accuracy"] for entry in entries if "accuracy" in entry.metrics), None)


def figures(sheet: TimeSheet) -> dict[str, float]:
    """Return the results of a whole run as numbers by name, with the unit last; unmeasured ones are omitted.

    `accuracy` and `loss` are those of the last epoch.
    """
    totals = sheet.totals()
    last = sheet.epoch(max((entry.epoch for entry in sheet.entries), default=0))
    found = {
        "wall_s": wall_s(totals),
        "samples_per_s": samples_per_s(totals),
        "accuracy": accuracy(last),
        "loss": loss(last),
    }
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def entries_as_dicts(sheet: TimeSheet) -> list[dict[str, Any]]:
    """Return the entries as flat dicts; a number that diverged is None."""
    return [
        {
            "worker": entry.worker,
            "epoch": entry.epoch,
            "steps": entry.steps,
            "samples": entry.samples,
            "wall_s": entry.wall_s,
            **{f"{part}_s": spent_s for part, spent_s in entry.parts_s.items()},
            **{name: _finite(entry.metrics.get(name)) for name in ("loss", "accuracy")},
        }
        for entry in sheet.entries
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _entry(end: Evaluated, steps: Sequence[StepTimes]) -> TimeSheetEntry:
    return TimeSheetEntry(
        worker=end.worker,
        epoch=end.epoch,
        steps=len(steps),
        samples=sum(step.samples for step in steps),
        wall_s=sum(step.wall_s for step in steps),
        parts_s=sum_parts(steps),
        metrics=end.metrics,
    )


def _sum(entries: Sequence[TimeSheetEntry]) -> TimeSheetEntry:
    last = entries[-1]
    return TimeSheetEntry(
        worker=last.worker,
        epoch=last.epoch,
        steps=sum(entry.steps for entry in entries),
        samples=sum(entry.samples for entry in entries),
        wall_s=sum(entry.wall_s for entry in entries),
        parts_s={part: sum(entry.parts_s[part] for entry in entries) for part in TIME_PARTS},
        metrics=last.metrics,
    )
