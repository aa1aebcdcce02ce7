"""Input pipelines for comparison: one sample at a time, parallel with prefetching, and torch's.

The overlapped validation paper compares its method with NumPy (`serial`) and tf.data (`prefetched`); torch's
DataLoader (`torch_loader`) is added here. All yield the same batches in the same order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch: TypeAlias = "tuple[Tensor, Tensor]"
_AHEAD: Final = 4  # batches; tf.data.AUTOTUNE chooses its own number
_DEADLINE_S: Final = 600.0


class Samples(Protocol):
    """A set of samples with labels."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, position: int) -> tuple[np.ndarray[Any, Any], int]:
        """Load and prepare one sample, float32, and its label."""


def stacked(samples: Sequence[tuple[np.ndarray[Any, Any], int]]) -> Batch:
    """Return samples as one batch: inputs (B, ...), labels int64 (B,)."""
    inputs = torch.from_numpy(np.stack([array for array, _ in samples]))
    return inputs, torch.tensor([label for _, label in samples])


def _batches(order: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def serial(samples: Samples, order: Sequence[int], batch_size: int, threads: int) -> Iterator[Batch]:
    """Yield batches, each loaded on demand, sample by sample; `threads` is ignored."""
    for positions in _batches(order, batch_size):
        yield stacked([samples[position] for position in positions])


def prefetched(samples: Samples, order: Sequence[int], batch_size: int, threads: int) -> Iterator[Batch]:
    """Yield batches; `threads` threads load their samples some batches ahead of the consumer.

    As tf.data's `map(num_parallel_calls=threads).batch(batch_size).prefetch(…)`.
    """
    ahead: queue.Queue[Batch | BaseException | None] = queue.Queue(_AHEAD)
    is_left = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not is_left.is_set():
            try:
                ahead.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def load() -> None:
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="offbeat loader") as pool:
                for positions in _batches(order, batch_size):
                    if is_left.is_set():
                        return
                    put(stacked(list(pool.map(samples.__getitem__, positions))))
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=load, name="offbeat loader", daemon=True)
    thread.start()
    try:
        while (item := ahead.get(timeout=_DEADLINE_S)) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_left.set()
        thread.join(_DEADLINE_S)


def torch_loader(samples: Samples, order: Sequence[int], batch_size: int, threads: int) -> Iterator[Batch]:
    """Yield the batches of torch's DataLoader with `threads` worker processes."""
    dataset: Dataset[Any] = samples  # type: ignore[assignment]
    yield from DataLoader(
        dataset,
        batch_sampler=[list(positions) for positions in _batches(order, batch_size)],
        num_workers=threads,
        collate_fn=stacked,
        generator=torch.Generator().manual_seed(0),
    )


Loader: TypeAlias = Callable[[Samples, Sequence[int], int, int], Iterator[Batch]]
LOADERS: Final[Mapping[str, Loader]] = {
    "numpy": serial,
    "prefetch": prefetched,
    "dataloader": torch_loader,
}
