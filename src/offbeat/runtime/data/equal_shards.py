"""Deals a data set out to the workers: every sample once an epoch, the same number of steps for everybody.

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
from offbeat.numerics.collectives.schedules import segments


@dataclass(frozen=True, kw_only=True)
class EqualShards:
    """One epoch's batches for every worker.

    Step s takes the next `workers * batch_size` samples of the epoch's order and gives each worker an equal
    part of them, so that training in lockstep equals training with the large batch. What is left at the end
    makes a smaller step. Where that would give a worker one sample or none, the last two steps share what
    they have equally, since layers that normalise over a batch need two; where batches of 3 or less are too
    small for that, it joins the step before, whose batches then hold up to two more.

    Args:
        samples: samples in the data set, at least one a worker; with `drop_last`, a whole batch a worker.
        batch_size: samples a worker and step.
        drop_last: what does not fill a batch of every worker is left out.
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
                f"drop_last leaves nothing of {self.samples} samples for {self.workers} workers, which fill "
                f"{self.workers * self.batch_size} with batches of {self.batch_size}: give a smaller "
                "batch_size, or leave drop_last out"
            )

    @property
    def steps(self) -> int:
        """Steps in the epoch, the same for all workers."""
        return len(self._sizes())

    def batches(self, worker: int) -> list[list[int]]:
        """The sample indices of each of the worker's batches, in order."""
        order = epoch_order(self.samples, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        sizes = self._sizes()
        dealt = []
        for taken in order[: sum(sizes)].split(sizes):
            start, stop = segments(len(taken), self.workers)[worker]
            dealt.append(taken[start:stop].tolist())
        return dealt

    def _sizes(self) -> list[int]:
        """Samples of all workers together, step by step."""
        stride, least = self.workers * self.batch_size, self.workers * min(2, self.batch_size)
        whole, left = divmod(self.samples, stride)
        if self.drop_last or not left:
            return [stride] * whole
        if left >= least or not whole:
            return [stride] * whole + [left]
        last = segments(stride + left, 2 if stride + left >= 2 * least else 1)
        return [stride] * (whole - 1) + [stop - start for start, stop in last]


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Which sample stands at each position of an epoch, int64 (samples,)."""
    if not shuffle:
        return torch.arange(samples, device="cpu")
    generator = torch.Generator().manual_seed(_mixed(seed, epoch))
    return torch.randperm(samples, generator=generator, device="cpu")


def _mixed(*numbers: int) -> int:
    """One seed of several numbers."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number) % 2**63
    return mixed


def load_batches(
    dataset: Dataset[Any], batches: list[list[int]], *, seed: tuple[int, ...], loader_options: dict[str, Any]
) -> Iterator[Any]:
    """Yields the batches of `dataset` at the given indices.

    A TensorDataset is indexed directly; anything else goes through a torch DataLoader, with options passed
    on (`num_workers`, `collate_fn`, `pin_memory`, …), whose workers draw from `seed`.

    Raises:
        OffbeatError: an option contradicts what the session decides itself.
    """
    check_options(loader_options)
    if type(dataset) is TensorDataset and not loader_options:
        for batch in batches:
            yield dataset[batch]
        return
    yield from DataLoader(dataset, batch_sampler=batches, generator=loader_generator(seed), **loader_options)


def check_options(loader_options: dict[str, Any]) -> None:
    """Sees that a DataLoader's options leave to the session what it decides itself.

    Raises:
        OffbeatError: one does not.
    """
    taken = {"batch_size", "shuffle", "sampler", "batch_sampler", "generator"} & set(loader_options)
    if taken:
        raise OffbeatError(f"session.batches decides {sorted(taken)[0]!r} itself: leave it out")


def loader_generator(seed: tuple[int, ...]) -> torch.Generator:
    """From which a DataLoader's workers draw, instead of from the global one."""
    return torch.Generator().manual_seed(_mixed(*seed))
