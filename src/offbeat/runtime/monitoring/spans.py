"""Spans of OpenTelemetry: steps of workers; and, without a duration, exclusions and losses of workers.

The parts of a step are its children, one after the other: a worker measures how long each part took in all,
not when. Workers send the times of several steps at once; these steps are placed one after the other, so that
the last one ends when its times arrived. Where spans go, how many are sampled and how many the exporter's
queue holds before it drops some, OpenTelemetry's own variables say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from offbeat.events import Failed, Group, Lost, RejectPeer, StepsTimed, StepTimes
from offbeat.runtime.monitoring.publisher import Entry
from offbeat.wire.job_status import JobStatus, JobWorker
from offbeat.wire.job_view import TIME_PARTS, JobView

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_FLUSH_MS: Final = 1500
_TROUBLES: Final = {"lost", "failed", "rejected"}  # states of workers


class SpanSink:
    """Makes spans of every Nth step, of all workers, and of what happens to workers.

    Args:
        every: N, at least 1.
        processor: takes the spans.

    Raises:
        ImportError: the SDK of OpenTelemetry is not installed.
    """

    def __init__(self, every: int, processor: SpanProcessor) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "offbeat"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("offbeat")
        self._in_span = trace.set_span_in_context
        self._every = every
        self._clock_offset_s = math.inf  # from the coordinator's clock to the time of day
        self._out: dict[int, str] = {}  # by worker, what has happened to it

    def update(self, view: JobView, entries: Sequence[Entry]) -> None:
        """See `Sink.update`."""
        may_be_out = False
        for event, actions in entries:
            # An entry is some tenths of a second old: the newest one is the nearest to the truth.
            self._clock_offset_s = min(self._clock_offset_s, time.time() - event.now_s)
            if isinstance(event, StepsTimed):
                self._add_steps(event)
            may_be_out |= isinstance(event, Lost | Failed)
            may_be_out |= any(isinstance(action, Group | RejectPeer) for action in actions)
        if may_be_out:
            self._add_troubles(view.status())

    def close(self) -> None:
        """See `Sink.close`."""
        self._provider.force_flush(_FLUSH_MS)

    def _add_steps(self, event: StepsTimed) -> None:
        start_s = event.now_s - sum(times.wall_s for times in event.steps)
        for times in event.steps:
            if times.step % self._every == 0:
                self._add_step(event.worker, times, start_s)
            start_s += times.wall_s

    def _add_step(self, worker: int, times: StepTimes, start_s: float) -> None:
        attributes = {"offbeat.worker": worker, "offbeat.step": times.step, "offbeat.samples": times.samples}
        step = self._tracer.start_span("step", start_time=self._time_ns(start_s), attributes=attributes)
        context, part_s = self._in_span(step), start_s
        for part in TIME_PARTS:
            spent_s = getattr(times, f"{part}_s")
            if spent_s:
                child = self._tracer.start_span(part, context, start_time=self._time_ns(part_s))
                part_s += spent_s
                child.end(self._time_ns(part_s))
        step.end(self._time_ns(start_s + times.wall_s))

    def _add_troubles(self, status: JobStatus) -> None:
        """Add a span for each worker that is out now, and was not before."""
        out = {worker.worker: trouble for worker in status.workers if (trouble := _trouble(worker))}
        for worker in status.workers:
            if worker.worker in out and out[worker.worker] != self._out.get(worker.worker):
                now_ns = self._time_ns(status.now_s)
                attributes = {"offbeat.worker": worker.worker, "offbeat.reason": worker.why}
                name = f"worker {out[worker.worker]}"
                self._tracer.start_span(name, start_time=now_ns, attributes=attributes).end(now_ns)
        self._out = out

    def _time_ns(self, now_s: float) -> int:
        return int((now_s + self._clock_offset_s) * 1e9)


def open_spans(every: int) -> SpanSink:
    """Return a sink whose spans go to where OpenTelemetry's variables say, by OTLP over HTTP.

    Raises:
        ImportError: the SDK of OpenTelemetry or its exporter is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return SpanSink(every, BatchSpanProcessor(OTLPSpanExporter()))


def _trouble(worker: JobWorker) -> str:
    if worker.state in _TROUBLES:
        return worker.state
    return "excluded" if worker.is_excluded else ""
