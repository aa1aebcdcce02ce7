"""One epoch's batches of one worker, as the coordinator deals them.

Nothing here decides who gets what, nor computes with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from offbeat.events import Block, Wants
from offbeat.runtime.control.client import Member
from offbeat.runtime.data.equal_shards import check_options, loader_generator
from offbeat.runtime.data.late_gradients import LateGradients

_PARAMETERS_S = 10.0  # how long one that is left out waits for them before it computes to be timed
_PREFETCH = 2  # a DataLoader's own default, batches a process


class _Next(Enum):
    BLOCK = auto()
    BORROWED = auto()
    LENT = auto()
    END = auto()


class DealtBatches:
    """Yields (batch, samples) until nothing is left of the epoch for this worker.

    A worker that is left out computes what a member lends it, with the parameters that came along (see
    `LateGradients`). With 0 samples a batch is one that it had before, or the first of the data set: the
    worker is left out and computes only to be timed, or the others wait for it and it has nothing to give.

    A DataLoader's processes load what has been dealt before it is asked for. Since a loader cannot wait for
    samples without keeping back those that it has loaded, it is given nothing to load where nothing is dealt.

    Args:
        member: the control side.
        order: maps an epoch to the samples at its positions, int64.
        dataset: map-style.
        batch_size: samples in a batch at most.
        drop_last: samples in a batch, always; what does not fill one is left out.
        loader_options: for torch's DataLoader.
        seed: of the loader's processes.
        is_last: the loop has no epoch after this one.
        skips: the loop has left the epoch before early.
        used: positions of the epoch, as ranges, that the state that was loaded has used.
        late: what this worker is lent, and what others bring; None where nobody is ever left out.
        is_clear: whether no gradient has been computed since the last optimizer step.
        blocks_per_round: how many batches a round has had so far, at most.
        deadline_s: how long to wait for samples, in seconds.

    Raises:
        OffbeatError: an option is not the loop's to decide.
    """

    def __init__(
        self,
        member: Member,
        order: Callable[[int], Tensor],
        dataset: Dataset[Any],
        batch_size: int,
        *,
        drop_last: bool,
        epoch: int,
        loader_options: dict[str, Any],
        seed: tuple[int, ...],
        is_last: bool,
        skips: bool,
        used: tuple[tuple[int, int], ...],
        late: LateGradients | None,
        is_clear: Callable[[], bool],
        blocks_per_round: int,
        deadline_s: float,
    ) -> None:
        check_options(loader_options)
        self._member, self._hand, self._follower = member, member.hand, member.follower
        self._order = order
        self._orders: dict[int, Tensor] = {}
        self._batch_size, self._drop_last, self._epoch = batch_size, drop_last, epoch
        self._is_last, self._skips, self._used = is_last, skips, used
        self._late, self._is_clear = late, is_clear
        self._deadline_s = deadline_s
        options = dict(loader_options)
        processes = options.get("num_workers", 0)
        ahead = processes * (options.get("prefetch_factor") or _PREFETCH) + 1 if processes else 0
        self._ahead = max(ahead, blocks_per_round + 1 if blocks_per_round > 1 else 0)
        self._samples = len(dataset)  # type: ignore[arg-type]
        self._batches = _Batches(dataset, options.pop("collate_fn", None) or default_collate)
        self._seed, self._options = seed, options
        self._last: Any = None
        self._has_asked = False

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        with self._member.lock:
            self._hand.begin(self._epoch)
        self._ask()
        # A local, so that it ends with this generator: a DataLoader's processes that are left to the garbage
        # collector, in a cycle with what feeds them, miss their goodbye and are waited for 5 s each.
        loaded = iter(
            DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._to_load(),
                collate_fn=_as_it_is,
                generator=loader_generator(self._seed),
                **self._options,
            )
        )
        while (following := self._next()) is not _Next.END:
            if following is _Next.BORROWED:
                self._has_asked = False
                yield self._borrowed(), 0
                continue
            if following is _Next.LENT:
                assert self._late is not None
                block = self._late.begin()
                if block is not None:
                    _, samples, self._last = self._batches[block.id, self._samples_of(block)]
                    yield self._last, samples
                continue
            block_id, samples, batch = next(loaded)
            with self._member.lock:
                is_mine = block_id is not None and self._hand.take(block_id)
            if is_mine:
                self._has_asked = False
                self._last = batch
                yield batch, samples

    def _next(self) -> _Next:
        """Waits for samples, or for a reason to go on without."""
        following = self._what_is_next()
        if following is None and self._is_outside:
            limit_s = time.monotonic() + _PARAMETERS_S
            self._member.wait_for(
                lambda: self._what_is_next() is not None or time.monotonic() >= limit_s,
                2 * _PARAMETERS_S,
                "parameters",
            )
            following = self._what_is_next() or _Next.BORROWED
        if following is None:
            self._ask()
            what = f"samples of epoch {self._epoch}"
            self._member.wait_for(lambda: self._what_is_next() is not None, self._deadline_s, what)
            following = self._what_is_next()
            assert following is not None
        if following is _Next.BORROWED:
            self._hand.is_awaited = False
        return following

    @property
    def _is_outside(self) -> bool:
        return self._late is not None and not self._follower.is_member

    def _what_is_next(self) -> _Next | None:
        with self._member.lock:
            if self._late is not None and self._is_outside:  # it is dealt for when it has the members' state
                is_over = self._is_over() or self._member.epochs_ended > self._epoch
                if is_over or not self._is_clear():
                    return _Next.END if is_over else _Next.BORROWED
                if self._late.is_awaited:
                    return None
                return _Next.LENT if self._late.is_lent else _Next.BORROWED
            if len(self._hand):
                return _Next.BLOCK
            has_brought = self._late is not None and self._late.has_brought
            if has_brought and (self._is_last or not self._hand.is_over):
                return _Next.BORROWED
            if self._is_over():
                return _Next.END
            return _Next.BORROWED if self._hand.is_awaited else None

    def _is_over(self) -> bool:
        """Nothing more of the epoch will be dealt: it is used up, or everybody has finished without it."""
        return self._hand.is_over or self._member.is_dismissed

    def _ask(self) -> None:
        if self._has_asked:
            return
        self._has_asked = True
        with self._member.lock:
            taken, round_ = self._hand.taken, self._follower.round
            if self._late is not None and self._is_outside:
                self._late.ask()
        self._member.tell(
            Wants(
                now_s=0.0,
                worker=self._member.worker,
                epoch=self._epoch,
                samples=self._samples,
                batch_size=self._batch_size,
                is_last=self._is_last,
                skips=self._skips,
                ahead=self._ahead,
                taken=taken,
                round=round_,
                used=self._used,
                drop_last=self._drop_last,
            )
        )
        self._skips = False

    def _to_load(self) -> Iterator[tuple[int | None, list[int]]]:
        """Yields ids and samples of blocks, and nothing in their place where none are dealt."""
        while True:
            with self._member.lock:
                block = self._hand.load()
            if block is None:
                yield None, []
                continue
            yield block.id, self._samples_of(block)

    def _samples_of(self, block: Block) -> list[int]:
        order = self._orders.get(block.epoch)
        if order is None:
            order = self._orders[block.epoch] = self._order(block.epoch)
        parts = [order[start:stop] for start, stop in block.ranges]
        return torch.cat(parts).tolist()

    def _borrowed(self) -> Any:
        if self._last is None:
            _, _, self._last = self._batches[0, list(range(min(self._batch_size, self._samples)))]
        return self._last


class _Batches(Dataset[Any]):
    """A data set of whole batches."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, block: tuple[int | None, list[int]]) -> tuple[int | None, int, Any]:
        block_id, samples = block
        if block_id is None:
            return None, 0, None
        if type(self._dataset) is TensorDataset and self._collate is default_collate:
            return block_id, len(samples), self._dataset[samples]
        if hasattr(self._dataset, "__getitems__"):
            return block_id, len(samples), self._collate(self._dataset.__getitems__(samples))
        return block_id, len(samples), self._collate([self._dataset[sample] for sample in samples])


def _as_it_is(batch: Any) -> Any:
    return batch
