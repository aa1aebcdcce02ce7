"""Which exchange and which algorithm carry gradients fastest, measured on all workers at the job's start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from offbeat.numerics.collectives.buckets import plan_buckets
from offbeat.numerics.collectives.schedules import AUTO
from offbeat.runtime.averaging.buckets import GradientBucket
from offbeat.runtime.averaging.staged_buckets import make_buckets
from offbeat.runtime.collectives.interface import Exchange, TensorMemory

_BYTES_MIN, _GROWTH, _BYTES_MAX = 1 << 16, 16, 1 << 24  # the time of more is in proportion
_BUDGET_S = 3.0  # for one size
_TENSOR_BYTES = _BUCKET_BYTES = 1 << 22
_REPETITIONS_MIN, _REPETITIONS_MAX = 2, 5
_GAIN_MIN = 0.1  # less is within the errors of the measurement


@dataclass(frozen=True)
class Candidate:
    """A way in which gradients may travel between all workers.

    Attributes:
        exchange: over all workers.
        algorithm: of its all-reduces; see `Exchange.all_reduce`.
    """

    exchange: Exchange
    algorithm: str = AUTO


@dataclass(frozen=True)
class ExchangeChoice:
    """The candidate that is used, and why.

    Attributes:
        name: of the candidate.
        size_bytes: of the gradients that were averaged.
        times_s: by candidate, the median time on the worker on which that was the longest.
    """

    name: str
    size_bytes: int
    times_s: Mapping[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{time_s * 1e3:.2f} ms by {name}" for name, time_s in self.times_s.items())
        return f"gradients travel by {self.name}: {self.size_bytes / 1e6:.1f} MB took {times}"


def choose_exchange(
    candidates: Mapping[str, Candidate],
    links: Exchange,
    memory: TensorMemory,
    model_bytes: int,
    *,
    next_exchange_id: Callable[[], int],
    timeout_s: float,
) -> ExchangeChoice:
    """Measure the candidates with ever more gradients, and choose as `choose_by_slowest` does by the most.

    All workers have to call it at once, with the same candidates in the same order, and get the same result.
    The size grows as `next_trial` says, up to the model's, at most 16 MiB.

    Args:
        candidates: by name, from the one that is preferred.
        links: an exchange over all workers, of tensors on the host; carries what the workers have measured.
        memory: allocates memory of the host, and knows the device of the model.
        model_bytes: the size of the gradients.
        next_exchange_id: returns an unused id, the same on all workers.
        timeout_s: the longest time that an exchange may take, in seconds.

    Raises:
        WorkerError: a worker was lost, or did not join an exchange in time.
    """
    size_bytes_max = min(model_bytes, _BYTES_MAX)
    measure = partial(
        _median_times_s,
        [*candidates.values()],
        memory,
        next_exchange_id=next_exchange_id,
        timeout_s=timeout_s,
    )
    size_bytes = min(size_bytes_max, _BYTES_MIN)
    measure(size_bytes, 1)  # makes connections
    trial: tuple[int, int] | None = (size_bytes, _REPETITIONS_MAX)
    while trial is not None:
        own_s = measure(*trial)
        workers_s = _gather(own_s, links, next_exchange_id(), timeout_s)
        choice = choose_by_slowest(trial[0], [dict(zip(candidates, one, strict=True)) for one in workers_s])
        trial = next_trial(choice, size_bytes_max)
    return choice


def next_trial(choice: ExchangeChoice, size_bytes_max: int) -> tuple[int, int] | None:
    """Return what to measure after a choice: sixteen times its size, and how often; None where it stays.

    A choice stays at the largest size, and where all candidates would take more than 3 s to average the next
    one twice, in proportion: slow lines do not delay the start.

    Args:
        choice: by what was measured last.
        size_bytes_max: the largest size.
    """
    repetitions = int(_BUDGET_S / (_GROWTH * sum(choice.times_s.values())))
    if choice.size_bytes == size_bytes_max or repetitions < _REPETITIONS_MIN:
        return None
    return min(_GROWTH * choice.size_bytes, size_bytes_max), min(repetitions, _REPETITIONS_MAX)


def choose_by_slowest(size_bytes: int, workers_s: Sequence[Mapping[str, float]]) -> ExchangeChoice:
    """Compare candidates by the worker on which they take longest.

    A candidate is chosen over those before it if it takes at most 0.9 of their time.

    Args:
        size_bytes: of the gradients that were averaged.
        workers_s: by worker, the time of each candidate, in seconds.
    """
    times_s = {name: max(one[name] for one in workers_s) for name in workers_s[0]}
    chosen = next(iter(times_s))
    for name, time_s in times_s.items():
        if time_s <= (1 - _GAIN_MIN) * times_s[chosen]:
            chosen = name
    return ExchangeChoice(chosen, size_bytes, times_s)


def _gather(own_s: Sequence[float], links: Exchange, exchange_id: int, timeout_s: float) -> list[list[float]]:
    """Return what each worker has measured, by worker and candidate."""
    times_s = torch.zeros(links.size, len(own_s), dtype=torch.float64, device="cpu")
    times_s[links.position] = torch.tensor(own_s, dtype=torch.float64, device="cpu")
    links.all_gather(times_s.view(-1), exchange_id=exchange_id).wait(timeout_s)
    gathered: list[list[float]] = times_s.tolist()
    return gathered


def _median_times_s(
    candidates: Sequence[Candidate],
    memory: TensorMemory,
    size_bytes: int,
    repetitions: int,
    *,
    next_exchange_id: Callable[[], int],
    timeout_s: float,
) -> list[float]:
    """Return by candidate how long gradients of that size take from the device to their means there."""
    buckets = [_make_trial_buckets(size_bytes, memory, one.exchange.device) for one in candidates]
    times_s: list[list[float]] = [[] for _ in candidates]
    for _ in range(repetitions):  # of all in turn, so that they meet the same load
        for number, candidate in enumerate(candidates):
            began_s = time.perf_counter()
            _average(candidate, buckets[number], next_exchange_id(), timeout_s)
            memory.device.synchronize()
            times_s[number].append(time.perf_counter() - began_s)
            for bucket in buckets[number]:
                bucket.end_round()
    return [median(one) for one in times_s]


def _make_trial_buckets(size_bytes: int, memory: TensorMemory, device: torch.device) -> list[GradientBucket]:
    elements, step = max(1, size_bytes // 4), _TENSOR_BYTES // 4
    sizes = [min(step, elements - start) for start in range(0, elements, step)] + [1]  # and a trailer
    plan = plan_buckets(sizes, [torch.float32] * len(sizes), bucket_bytes=_BUCKET_BYTES)
    shapes = [torch.Size([size]) for size in sizes]
    return make_buckets(plan, shapes, len(sizes) - 1, memory, device)


def _average(
    candidate: Candidate, buckets: Sequence[GradientBucket], exchange_id: int, timeout_s: float
) -> None:
    """Exchange the buckets as in a round."""
    for index, bucket in enumerate(buckets):
        for position in range(len(bucket.entries)):
            bucket.packing_view(position).zero_()
        bucket.pending = bucket.all_reduce(
            candidate.exchange, exchange_id=exchange_id, index=index, algorithm=candidate.algorithm
        )
    for bucket in buckets:
        assert bucket.pending is not None
        bucket.pending.wait(timeout_s)
        means = bucket.output.means()
        means.fetch()
        means.views()
