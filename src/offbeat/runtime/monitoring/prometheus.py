"""The state of a job in the text format of Prometheus, version 0.0.4.

Counters begin at 0 again when the coordinator is restarted, as Prometheus expects of counters. What is not
known has no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, TypeAlias, get_args

from offbeat.wire.job_status import ExclusionCause, JobStatus, JobWorker, WorkerState

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

_Kind: TypeAlias = Literal["counter", "gauge", "summary"]
_Sample: TypeAlias = tuple[str, float]  # the metric's suffix and labels, and the value


def to_prometheus(status: JobStatus, *, dropped: int) -> str:
    """Return the metrics of a job.

    Args:
        status: the state of the job.
        dropped: number of events that the state lacks, because they came too fast.
    """
    return "".join(line for family in _families(status, dropped) for line in family)


def _families(status: JobStatus, dropped: int) -> Iterator[Iterable[str]]:
    states = Counter(worker.state for worker in status.workers)

    def of_workers(value: Callable[[JobWorker], float | None]) -> list[_Sample]:
        known = ((worker.worker, value(worker)) for worker in status.workers)
        return [(_labels(worker=worker), number) for worker, number in known if number is not None]

    yield _family("offbeat_job_info", "gauge", "Always 1.", [(_labels(strategy=status.strategy), 1)])
    yield _family("offbeat_job_step", "gauge", "Optimizer steps of the foremost worker.", [("", status.step)])
    yield _family("offbeat_job_epoch", "gauge", "Epoch of the foremost worker, from 0.", [("", status.epoch)])
    yield _family(
        "offbeat_members",
        "gauge",
        "Workers, by state.",
        [(_labels(state=state), states[state]) for state in get_args(WorkerState)],
    )
    yield _family(
        "offbeat_exclusions_total",
        "counter",
        "Exclusions of workers from the group, by reason.",
        [(_labels(reason=cause), status.exclusions.get(cause, 0)) for cause in get_args(ExclusionCause)],
    )
    yield _family(
        "offbeat_workers_lost_total",
        "counter",
        "Workers that were lost, failed or were rejected.",
        [("", status.deaths)],
    )
    yield _family(
        "offbeat_newcomers_total",
        "counter",
        "Workers that joined while the job ran.",
        [("", status.newcomers)],
    )
    yield _family(
        "offbeat_worker_seconds_total",
        "counter",
        "Wall time of a worker's steps, by part.",
        [
            (_labels(worker=worker.worker, part=part), time_s)
            for worker in status.workers
            for part, time_s in worker.parts_s.items()
        ],
    )
    yield _family(
        "offbeat_step_seconds",
        "summary",
        "Wall time of a worker's steps.",
        [
            sample
            for worker in status.workers
            for sample in (
                ("_sum" + _labels(worker=worker.worker), sum(worker.parts_s.values())),
                ("_count" + _labels(worker=worker.worker), worker.steps),
            )
        ],
    )
    yield _family(
        "offbeat_worker_samples_total",
        "counter",
        "Samples behind a worker's steps.",
        of_workers(lambda worker: worker.samples),
    )
    yield _family(
        "offbeat_worker_skipped_rounds_total",
        "counter",
        "Rounds that had their quorum and were closed without a worker.",
        of_workers(lambda worker: worker.skipped_rounds),
    )
    yield _family(
        "offbeat_worker_score",
        "gauge",
        "The fastest worker's compute time over a worker's, 0 to 1; medians of the last rounds.",
        of_workers(lambda worker: worker.score),
    )
    yield _family(
        "offbeat_worker_compute_seconds",
        "gauge",
        "Time of forward and backward of a round, median of the last ones.",
        of_workers(lambda worker: worker.compute_s),
    )
    yield _family(
        "offbeat_worker_line_seconds",
        "gauge",
        "How long the last bytes of a message are on the way on a worker's best connection.",
        of_workers(lambda worker: worker.line_s),
    )
    yield _family(
        "offbeat_events_dropped_total",
        "counter",
        "Events that these metrics lack, because they came too fast.",
        [("", dropped)],
    )


def _family(name: str, kind: _Kind, description: str, samples: Iterable[_Sample]) -> Iterator[str]:
    yield f"# HELP {name} {description}\n# TYPE {name} {kind}\n"
    for suffix, value in samples:
        yield f"{name}{suffix} {value!r}\n"


def _labels(**labels: object) -> str:
    pairs = (f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"
