"""Which of several exchanges over the same workers carries gradients fastest, measured at the job's start."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from offbeat.numerics.collectives.buckets import plan_buckets
from offbeat.runtime.averaging.staged_buckets import make_buckets
from offbeat.runtime.collectives.interface import Exchange, TensorMemory

_BYTES_MAX = 1 << 24  # a quarter of a second at 1 Gbit/s; the time of more is in proportion
_TENSOR_BYTES = _BUCKET_BYTES = 1 << 22
_REPETITIONS = 5


@dataclass(frozen=True)
class ExchangeChoice:
    """The exchange that is used, and why.

    Attributes:
        name: the fastest exchange.
        size_bytes: of the gradients that were averaged.
        times_s: by exchange, the median time on the worker on which that was the longest.
    """

    name: str
    size_bytes: int
    times_s: Mapping[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{time_s * 1e3:.2f} ms by {name}" for name, time_s in self.times_s.items())
        return f"gradients travel by {self.name}: {self.size_bytes / 1e6:.1f} MB took {times}"


def choose_exchange(
    exchanges: Mapping[str, Exchange],
    memory: TensorMemory,
    model_bytes: int,
    *,
    next_exchange_id: Callable[[], int],
    gather: Callable[[str], list[str]],
    timeout_s: float,
) -> ExchangeChoice:
    """Measure exchanges, and return the one that is fastest on the worker on which it is slowest.

    All workers have to call it at once, with the same exchanges in the same order, and get the same result.

    Args:
        exchanges: by name, over all workers.
        memory: allocates memory of the host, and knows the device of the model.
        model_bytes: the size of the gradients.
        next_exchange_id: returns an unused id, the same on all workers.
        gather: returns what the workers have given, in their order.
        timeout_s: the longest time that an exchange may take, in seconds.

    Raises:
        WorkerError: a worker was lost, or did not join an exchange in time.
    """
    size_bytes = min(model_bytes, _BYTES_MAX)
    own_s = {
        name: _median_s(exchange, memory, size_bytes, next_exchange_id, timeout_s)
        for name, exchange in exchanges.items()
    }
    return choose_by_slowest(size_bytes, [json.loads(text) for text in gather(json.dumps(own_s))])


def choose_by_slowest(size_bytes: int, workers_s: list[dict[str, float]]) -> ExchangeChoice:
    """Return the exchange whose longest time of all workers is the shortest.

    Args:
        size_bytes: of the gradients that were averaged.
        workers_s: by worker, the time of each exchange.
    """
    times_s = {name: max(one[name] for one in workers_s) for name in workers_s[0]}
    return ExchangeChoice(min(times_s, key=lambda name: times_s[name]), size_bytes, times_s)


def _median_s(
    exchange: Exchange,
    memory: TensorMemory,
    size_bytes: int,
    next_exchange_id: Callable[[], int],
    timeout_s: float,
) -> float:
    """Return how long gradients of that size take from the device to their means there, in seconds."""
    elements, step = max(1, size_bytes // 4), _TENSOR_BYTES // 4
    sizes = [min(step, elements - start) for start in range(0, elements, step)] + [1]  # and a trailer
    plan = plan_buckets(sizes, [torch.float32] * len(sizes), bucket_bytes=_BUCKET_BYTES)
    shapes = [torch.Size([size]) for size in sizes]
    buckets = make_buckets(plan, shapes, len(sizes) - 1, memory, exchange.device)
    times_s = []
    for _ in range(1 + _REPETITIONS):
        exchange_id, began_s = next_exchange_id(), time.perf_counter()
        for index, bucket in enumerate(buckets):
            for position in range(len(bucket.entries)):
                bucket.packing_view(position).zero_()
            bucket.pending = bucket.all_reduce(exchange, exchange_id=exchange_id, index=index)
        for bucket in buckets:
            assert bucket.pending is not None
            bucket.pending.wait(timeout_s)
            means = bucket.output.means()
            means.fetch()
            means.views()
        memory.device.synchronize()
        times_s.append(time.perf_counter() - began_s)
        for bucket in buckets:
            bucket.end_round()
    return median(times_s[1:])  # the first one makes connections
