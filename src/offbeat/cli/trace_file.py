"""Traces of workers as one file for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import OffbeatError
from offbeat.runtime.training.tracing import WorkerTrace

TRACE_FOLDER = "trace"


def read_traces(folder: Path) -> list[WorkerTrace]:
    """Read the traces that the workers have written, in the order of their ids.

    Raises:
        OffbeatError: there is none, or a file is no trace of a worker.
    """
    paths = sorted(folder.glob("worker-*.json"))
    if not paths:
        raise OffbeatError(
            f"there is no trace in {folder}: train with --trace STEP, or with OFFBEAT_TRACE=FOLDER:STEP, "
            "and for at least two steps more"
        )
    found = []
    for path in paths:
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=WorkerTrace))
        except (OSError, msgspec.DecodeError) as error:
            raise OffbeatError(f"cannot read {path}: {error}") from error
    return sorted(found, key=lambda traced: traced.worker)


def to_chrome_trace(traces: Sequence[WorkerTrace]) -> dict[str, Any]:
    """Return the traces as a Chrome trace: a process per worker, a track per thread.

    Times are relative to the first span. Workers on different hosts use the clocks of their hosts.

    Source: Google, "Trace Event Format" (2016): metadata, complete, instant and counter events, in
        microseconds.
    """
    first_s = min((span.begin_s for traced in traces for span in traced.spans), default=0.0)
    events = [event for traced in traces for event in _events(traced, first_s)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(traced: WorkerTrace, first_s: float) -> Iterator[dict[str, Any]]:
    worker = {"pid": traced.worker}
    yield {"ph": "M", "name": "process_name", "args": {"name": f"worker {traced.worker}"}, **worker}
    tracks = list(dict.fromkeys(["loop", *(span.track for span in traced.spans)]))
    for number, track in enumerate(tracks):
        yield {"ph": "M", "name": "thread_name", "tid": number, "args": {"name": track}, **worker}
    for span in traced.spans:
        what = {"name": span.name, "tid": tracks.index(span.track), "ts": 1e6 * (span.begin_s - first_s)}
        if span.end_s > span.begin_s:
            yield {"ph": "X", "dur": 1e6 * (span.end_s - span.begin_s), **what, **worker}
        else:
            yield {"ph": "i", "s": "t", **what, **worker}
    for (before_s, before), (at_s, sent) in zip(traced.bytes_sent, traced.bytes_sent[1:], strict=False):
        rate = (sent - before) / 1e6 / (at_s - before_s) if at_s > before_s else 0.0
        yield {
            "ph": "C",
            "name": "sent, MB/s",
            "ts": 1e6 * (before_s - first_s),
            "args": {"MB/s": rate},
            **worker,
        }
