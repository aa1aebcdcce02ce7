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
from offbeat.numerics.schedules import segments


@dataclass(frozen=True, kw_only=True)
class EqualShards:
    """One epoch's batches for every worker.

    Step s takes the next `workers * batch_size` samples of the epoch's order and gives each worker an equal
    part of them, so that training in lockstep equals training with the large batch. What is left at the end
    makes a smaller step; fewer samples than workers join the step before, whose batches then hold one more.

    Args:
        samples: samples in the data set, at least one a worker.
        batch_size: samples a worker and step.
    """

    samples: int
    workers: int
    batch_size: int
    seed: int
    epoch: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.samples < self.workers:
            raise ValueError(
                f"the data set has {self.samples} samples for {self.workers} workers: each needs at least one"
            )

    @property
    def steps(self) -> int:
        """Steps in the epoch, the same for all workers."""
        whole, left = divmod(self.samples, self.workers * self.batch_size)
        return whole + (left >= self.workers or not whole)

    def batches(self, worker: int) -> list[list[int]]:
        """The sample indices of each of the worker's batches, in order."""
        order = epoch_order(self.samples, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        stride = self.workers * self.batch_size
        dealt = []
        for step in range(self.steps):
            last = step == self.steps - 1
            taken = order[step * stride :] if last else order[step * stride : (step + 1) * stride]
            start, stop = segments(len(taken), self.workers)[worker]
            dealt.append(taken[start:stop].tolist())
        return dealt


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Which sample stands at each position of an epoch, int64 (samples,)."""
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(_mixed(seed, epoch))
    return torch.randperm(samples, generator=generator)


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
    taken = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"} & set(
        loader_options
    )
    if taken:
        raise OffbeatError(f"session.batches decides {sorted(taken)[0]!r} itself: leave it out")


def loader_generator(seed: tuple[int, ...]) -> torch.Generator:
    """From which a DataLoader's workers draw, instead of from the global one."""
    return torch.Generator().manual_seed(_mixed(*seed))
