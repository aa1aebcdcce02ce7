"""Splitting a validation set into parts that can be evaluated separately."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset, TensorDataset

from offbeat.errors import OffbeatError


class IndexedSamples(Protocol):
    """Samples by position, from 0 on."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, position: int, /) -> Any:
        """Return the sample at a position."""


ValidationData: TypeAlias = "IndexedSamples | Dataset[Any] | DataLoader[Any]"


def count_samples(data: ValidationData) -> int:
    """Return the number of samples in a set.

    Raises:
        OffbeatError: there are none, or the number is unknown; or it is a loader whose parts would have other
            batches.
    """
    if isinstance(data, DataLoader):
        _check_loader(data)
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise OffbeatError(
            "expected a validation set with a length and samples by position (a map-style data set), got "
            f"{type(dataset).__name__}"
        )
    if len(dataset) == 0:
        raise OffbeatError("the validation set is empty: expected at least one sample")
    return len(dataset)


def _check_loader(loader: DataLoader[Any]) -> None:
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else batches or loader.sampler
    is_whole = type(sampler) is SequentialSampler and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if not is_whole:
        raise OffbeatError(
            "expected a loader that reads the whole validation set in order, got one with "
            f"{type(sampler).__name__}: pass shuffle=False and no sampler, or the data set itself"
        )
    if type(batches) is BatchSampler and batches.drop_last:
        raise OffbeatError("expected a loader that keeps the last batch: pass drop_last=False")


def slice_data(data: ValidationData, positions: range, seed: int = 0) -> ValidationData:
    """Return the samples of a contiguous range of positions: a loader of them where `data` is one.

    Args:
        data: as in `count_samples`.
        positions: within 0 to the number of samples.
        seed: of the random numbers that a loader draws.
    """
    if isinstance(data, DataLoader):
        return _make_loader(data, slice_data(data.dataset, positions), seed)
    if len(positions) == count_samples(data):
        return data
    if type(data) is TensorDataset:
        return TensorDataset(*(tensor[positions.start : positions.stop] for tensor in data.tensors))
    return Subset(data, positions)  # type: ignore[arg-type]  # needs only positions


def _make_loader(whole: DataLoader[Any], part: Any, seed: int) -> DataLoader[Any]:
    """Return a loader of a part with the options of the loader of the whole set."""
    batches = whole.batch_sampler
    return DataLoader(
        part,
        batch_size=batches.batch_size if isinstance(batches, BatchSampler) else None,
        num_workers=whole.num_workers,
        collate_fn=whole.collate_fn,
        pin_memory=whole.pin_memory,
        timeout=whole.timeout,
        worker_init_fn=whole.worker_init_fn,
        multiprocessing_context=whole.multiprocessing_context,
        generator=torch.Generator().manual_seed(seed),
        prefetch_factor=whole.prefetch_factor,
    )
