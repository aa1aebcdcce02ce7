"""The state of a job as scalars in TensorBoard's event files, at most one point a second."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from offbeat.runtime.monitoring.publisher import Entry
from offbeat.wire.job_status import JobStatus
from offbeat.wire.job_view import JobView

_PERIOD_S: Final = 1.0


class TensorBoardSink:
    """Writes `to_scalars` of the job's state, by its foremost worker's step; the folder may have other files.

    Args:
        folder: of the event files.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str) -> None:
        # Of torch.utils.tensorboard, which would import torch, the part that writes.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(folder, flush_secs=int(10 * _PERIOD_S))
        self._view = JobView()
        self._next_s = -math.inf
        self._step = 0  # of the last point

    def update(self, view: JobView, entries: Sequence[Entry]) -> None:
        """See `Sink.update`; adds a point if there was none for a second."""
        self._view = view
        if entries and time.monotonic() >= self._next_s:
            self._write()

    def close(self) -> None:
        """See `Sink.close`; adds a last point."""
        self._write()
        self._writer.close()

    def _write(self) -> None:
        """Add a point, unless the job is at the step of the last one."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        status = self._view.status()
        if status.step <= self._step:
            return
        self._step, self._next_s = status.step, time.monotonic() + _PERIOD_S
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in to_scalars(status).items()]
        self._writer.add_event(Event(wall_time=time.time(), step=status.step, summary=Summary(value=values)))


def to_scalars(status: JobStatus) -> dict[str, float]:
    """Return the figures of a job by tag; what is before the slash is a group of charts."""
    states = Counter(worker.state for worker in status.workers)
    figures: dict[str, float | None] = {
        "offbeat/step_s": status.step_s,
        "offbeat/samples_per_s": status.samples_per_s,
        "offbeat/excluded_workers": states["excluded"],
        "offbeat/exclusions": sum(status.exclusions.values()),
        "offbeat/lost_workers": status.deaths,
        "offbeat/newcomers": status.newcomers,
    }
    for worker in status.workers:
        name = f"worker {worker.worker}"
        figures |= {
            f"offbeat score/{name}": worker.score,
            f"offbeat compute_s/{name}": worker.compute_s,
            f"offbeat step_s/{name}": worker.step_s,
            f"offbeat wait_share/{name}": worker.wait_share,
        }
    return {tag: value for tag, value in figures.items() if value is not None}
