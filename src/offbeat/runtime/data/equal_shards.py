"""Splits a data set among the workers: each sample once per epoch, the same number of steps for each worker.

The order depends on (seed, epoch) alone and draws nothing from the global generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.schedules import cut_segments


@dataclass(frozen=True, kw_only=True)
class EqualShards:
    """One epoch's batches for every worker.

    Step s splits the next `workers * batch_size` samples of the epoch's order equally among the workers, so
    that training in lockstep equals training with the large batch. The remainder at the end makes a smaller
    step. Where that would leave a worker one sample or none, the last two steps share their samples equally,
    since layers that normalise over a batch need two; where batches of 3 or less are too small for that, the
    remainder is added to the step before, whose batches then hold up to two more.

    Args:
        samples: samples in the data set, at least one per worker; with `drop_last`, a full batch per worker.
        batch_size: samples per worker and step.
        drop_last: drop the remainder that does not fill a batch of every worker.
    """

    samples: int
    workers: int
    batch_size: int
    seed: int
    epoch: int
    shuffle: bool
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.samples < self.workers:
            raise ValueError(
                f"the data set has {self.samples} samples for {self.workers} workers: each needs at least one"
            )
        if self.drop_last and self.samples < self.workers * self.batch_size:
            raise ValueError(
                f"drop_last leaves nothing of {self.samples} samples: {self.workers} workers need "
                f"{self.workers * self.batch_size} for batches of {self.batch_size}: use a smaller "
                "batch_size, or omit drop_last"
            )

    @property
    def steps(self) -> int:
        """Number of steps in the epoch, the same for all workers."""
        return len(self._sizes())

    def batches(self, worker: int) -> list[list[int]]:
        """Return the sample indices of each of the worker's batches, in order."""
        order = epoch_order(self.samples, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        sizes = self._sizes()
        batches = []
        for step in order[: sum(sizes)].split(sizes):
            start, stop = cut_segments(len(step), self.workers)[worker]
            batches.append(step[start:stop].tolist())
        return batches

    def _sizes(self) -> list[int]:
        """Return the samples of all workers together, per step."""
        stride, least = self.workers * self.batch_size, self.workers * min(2, self.batch_size)
        whole, left = divmod(self.samples, stride)
        if self.drop_last or not left:
            return [stride] * whole
        if left >= least or not whole:
            return [stride] * whole + [left]
        last = cut_segments(stride + left, 2 if stride + left >= 2 * least else 1)
        return [stride] * (whole - 1) + [stop - start for start, stop in last]


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Return the sample at each position of an epoch, int64 (samples,)."""
    if not shuffle:
        return torch.arange(samples, device="cpu")
    generator = torch.Generator().manual_seed(_mixed(seed, epoch))
    return torch.randperm(samples, generator=generator, device="cpu")


def _mixed(*numbers: int) -> int:
    """Combine several numbers into one seed."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number) % 2**63
    return mixed


def load_batches(
    dataset: Dataset[Any], batches: list[list[int]], *, seed: tuple[int, ...], loader_options: dict[str, Any]
) -> Iterator[Any]:
    """Yield the batches of `dataset` at the given indices.

    A TensorDataset without loader options is indexed directly; anything else is loaded by a torch DataLoader
    with the given options (`num_workers`, `collate_fn`, `pin_memory`, …), whose processes are seeded by
    `seed`.

    Raises:
        OffbeatError: an option is one that the session sets itself.
    """
    check_loader_options(loader_options)
    if type(dataset) is TensorDataset and not loader_options:
        for batch in batches:
            yield dataset[batch]
        return
    yield from DataLoader(dataset, batch_sampler=batches, generator=loader_generator(seed), **loader_options)


def check_loader_options(loader_options: dict[str, Any]) -> None:
    """Refuse options of a DataLoader that the session sets itself.

    Raises:
        OffbeatError: names such an option.
    """
    reserved = {"batch_size", "shuffle", "sampler", "batch_sampler", "generator"} & set(loader_options)
    if reserved:
        raise OffbeatError(f"session.batches sets {sorted(reserved)[0]!r} itself: omit it")


def loader_generator(seed: tuple[int, ...]) -> torch.Generator:
    """Return the generator that seeds a DataLoader's processes, instead of the global one."""
    return torch.Generator().manual_seed(_mixed(*seed))


def count_steps(samples: int, workers: int, batch_size: int, *, drop_last: bool) -> int:
    """Return how many batches an epoch has on each worker; see `EqualShards`."""
    shards = EqualShards(
        samples=samples,
        workers=workers,
        batch_size=batch_size,
        seed=0,
        epoch=0,
        shuffle=False,
        drop_last=drop_last,
    )
    return shards.steps
