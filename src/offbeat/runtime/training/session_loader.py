"""A program's own DataLoader, whose samples a session shares out among the workers.

This module decides neither who gets which samples nor when an epoch is over: that is the `BatchSource`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from offbeat.errors import OffbeatError
from offbeat.runtime.data.equal_shards import count_steps
from offbeat.runtime.data.taken_ahead import TakenAhead
from offbeat.runtime.training.batch_source import BatchSource

_DEFAULTS: Final[dict[str, Any]] = {
    "num_workers": 0,
    "collate_fn": default_collate,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "prefetch_factor": None,
}
_END: Final = object()


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """What `Session.batches` needs to yield the batches of a DataLoader."""

    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool
    drop_last: bool
    loader_options: dict[str, Any]


class SessionLoader:
    """This worker's batches, epoch by epoch, for programs that iterate over a DataLoader.

    Each iteration yields what is left of the epoch's batches: the next one goes on where one was broken off,
    and so does a second iterator. A batch that was taken and not used counts as skipped. When the epoch's
    batches are used up, the next iteration begins the next epoch. Where `session.epochs` or `set_epoch`
    begins it, what is left is dropped.

    Args:
        source: of the session.
        loader: says which samples, and how they are loaded.
        world: number of workers with which the job has started.
        takes_ahead: the program takes batches before it has used the ones before them, and calls
            `begin_batch` for each, in the same order, before its forward pass.

    Raises:
        OffbeatError: the samples cannot be shared out; says which kind of DataLoader can be used.
    """

    def __init__(
        self, source: BatchSource, loader: DataLoader[Any], world: int, *, takes_ahead: bool = False
    ) -> None:
        self._source, self._world, self._takes_ahead = source, world, takes_ahead
        self._arguments = _arguments_of(loader)
        self._taken: TakenAhead | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._takes_ahead:
            yield from self._take_ahead()
            return
        batches = self._source.rest_of_epoch(self, **vars(self._arguments))
        while True:
            batch = _END
            try:
                batch = next(batches, _END)
            finally:
                if batch is _END:
                    self._source.forget_rest(batches)
            if batch is _END:
                return
            yield batch

    def _take_ahead(self) -> Iterator[Any]:
        taken = self._taken = self._source.rest_taken_ahead(self, **vars(self._arguments))
        while (batch := next(taken, _END)) is not _END:
            yield batch

    def begin_batch(self) -> None:
        """Begin with the first batch that has been taken and has not begun; only with `takes_ahead`.

        Raises:
            OffbeatError: there is none, or the one before had no backward pass.
        """
        if self._taken is None:
            raise OffbeatError("begin_batch needs a loader with takes_ahead=True, and a batch taken from it")
        self._taken.begin_batch()

    def __len__(self) -> int:
        """Return the number of batches in an epoch, of an equal share of the samples.

        Where the strategy assigns samples on demand, a fast worker gets more, and a slow one fewer.
        """
        given = self._arguments
        return count_steps(
            len(given.dataset),  # type: ignore[arg-type]
            self._world,
            given.batch_size,
            drop_last=given.drop_last,
        )

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun: what is left of the one before is dropped.

        Raises:
            OffbeatError: it is over.
        """
        self._source.go_to_epoch(epoch)

    @property
    def sampler(self) -> SessionLoader:
        """This object, for programs that call `loader.sampler.set_epoch`."""
        return self

    @property
    def dataset(self) -> Dataset[Any]:
        """The samples of all workers."""
        return self._arguments.dataset

    @property
    def batch_size(self) -> int:
        """Samples in a batch of this worker."""
        return self._arguments.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether samples that do not fill a batch are dropped."""
        return self._arguments.drop_last

    @property
    def num_workers(self) -> int:
        """Processes that load this worker's batches."""
        count: int = self._arguments.loader_options.get("num_workers", 0)
        return count


def _arguments_of(loader: DataLoader[Any]) -> _Arguments:
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise OffbeatError(
            f"session.loader needs a torch DataLoader with its own iterator, got a {type(loader).__name__}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise OffbeatError(
            "session.loader shares out samples by number, got an IterableDataset: iterate over your own "
            "loader, with the same number of batches on every worker"
        )
    if loader.batch_size is None:
        raise OffbeatError(
            "session.loader puts batches together itself: expected a DataLoader with a batch_size, got one "
            "with a batch_sampler or with batch_size=None"
        )
    dataset, shuffle = _samples_of(loader)
    options = {name: getattr(loader, name) for name in _DEFAULTS}
    return _Arguments(
        dataset=dataset,
        batch_size=loader.batch_size,
        shuffle=shuffle,
        drop_last=loader.drop_last,
        loader_options={name: value for name, value in options.items() if value != _DEFAULTS[name]},
    )


def _samples_of(loader: DataLoader[Any]) -> tuple[Dataset[Any], bool]:
    """Return the samples of an epoch, and whether each epoch has an order of its own."""
    sampler: Any = loader.sampler
    dataset = loader.dataset
    kind, samples = type(sampler), len(dataset)  # type: ignore[arg-type]
    # Subclasses may draw other samples, and a sampler may be one of other data.
    if kind is SequentialSampler and len(sampler.data_source) == samples:
        return dataset, False
    if kind is DistributedSampler and len(sampler.dataset) == samples:
        return dataset, sampler.shuffle
    if kind is SubsetRandomSampler:
        return Subset(dataset, list(sampler.indices)), True
    if (
        kind is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == samples
    ):
        return dataset, True
    raise OffbeatError(
        "session.loader draws each sample once in an epoch: expected shuffle=True or False, a "
        f"SubsetRandomSampler or a DistributedSampler, got a {kind.__name__}; with another sampler "
        "iterate over your own loader, with the same number of batches on every worker"
    )
