"""One epoch's batches of one worker, from the blocks that the coordinator assigns to it.

Theory of operation: the life of a block, as a worker sees it. A block is one batch: positions in the order of
an epoch, with an id that is never used again.

1. Requested. `_request` sends SamplesRequested: the epoch, how many blocks this worker can hold at once, and
   the ids that it has started since it last announced a contribution. It is sent as the epoch begins, and
   when there is nothing to yield; once, until a batch has been yielded.
2. Assigned. An AssignBlocks appends blocks to the `BlockQueue`, in the I/O thread. If its `replaces_queue`
   is set, the blocks queued before are not this worker's any more.
3. Loaded. The sampler of a DataLoader fetches the next block that is not being loaded yet and turns its
   positions into samples. The loader's processes work ahead of the loop. A loader cannot wait for samples
   without holding back those that it has loaded, so where no block is queued it gets an empty item.
4. Started. The loaded batch is yielded if its block still heads the queue, else dropped: it was withdrawn
   while it was loading. The id is now among those started.
5. Contributed. When a gradient is ready, the synchronizer calls `BlockQueue.pop_contribution` and sends the
   ids to the coordinator, which counts the blocks as used once the contribution is final. If the worker is
   lost before that, the positions go to another worker, as a block with another id.

What is yielded where no block is queued, by `_choose`:
- A placeholder, with 0 samples: the batch yielded last, or the first of the data set. This worker is excluded
  from the group and computes only to be timed; or others wait for its part in a round; or only a round of
  its own can count a gradient that another worker has computed for it.
- A late block: this worker is excluded, and computes with a member's parameters and block on that member's
  behalf (see `LateGradients`).
- The end: nothing is left of the epoch for this worker, or all workers have finished; for an excluded one,
  the group has finished the epoch.
Else the worker waits, for a limited time, until an AssignBlocks changes that.

A loop that leaves its epoch early discards its queue, and ignores assignments until one has `replaces_queue`
set; the next SamplesRequested has `abandons_previous` set.

Nothing here decides which worker gets which samples, nor computes with them. `BlockQueue` is used under the
lock of the `CoordinatorClient` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from offbeat.events import Block, SamplesRequested
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.data.equal_shards import check_loader_options, loader_generator
from offbeat.runtime.data.late_gradients import LateGradients

_PARAMETERS_S = 10.0  # how long an excluded worker waits for parameters before it computes to be timed
_PREFETCH = 2  # a DataLoader's own default, in batches per process


class _Source(Enum):
    BLOCK = auto()
    PLACEHOLDER = auto()
    LATE_BLOCK = auto()
    END = auto()


class AssignedBatches:
    """Yields (batch, samples) until nothing is left of the epoch for this worker.

    With 0 samples the batch is a placeholder and has weight 0. The samples of a late block (see
    `LateGradients`) do count.

    Args:
        client: this worker's client of the coordinator.
        order: maps an epoch to the samples at its positions, int64.
        dataset: map-style.
        batch_size: most samples in a batch.
        drop_last: every batch holds `batch_size` samples; what does not fill one is dropped.
        loader_options: for torch's DataLoader.
        seed: of the loader's processes.
        is_last: the loop has no epoch after this one.
        has_left_epoch_early: the loop has left the epoch before early.
        consumed: positions of the epoch, as ranges, that the loaded state has consumed.
        late_gradients: blocks to compute on behalf of members, and gradients computed on this worker's
            behalf; None where no worker is ever excluded.
        has_no_pending_gradient: whether no gradient has been computed since the last optimizer step.
        blocks_per_round: most batches that a round has had so far.
        timeout_s: how long to wait for samples, in seconds.

    Raises:
        OffbeatError: a loader option is one that the session sets itself.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        order: Callable[[int], Tensor],
        dataset: Dataset[Any],
        batch_size: int,
        *,
        drop_last: bool,
        epoch: int,
        loader_options: dict[str, Any],
        seed: tuple[int, ...],
        is_last: bool,
        has_left_epoch_early: bool,
        consumed: tuple[tuple[int, int], ...],
        late_gradients: LateGradients | None,
        has_no_pending_gradient: Callable[[], bool],
        blocks_per_round: int,
        timeout_s: float,
    ) -> None:
        check_loader_options(loader_options)
        self._client, self._block_queue = client, client.protocol.block_queue
        self._order = order
        self._orders: dict[int, Tensor] = {}
        self._batch_size, self._drop_last, self._epoch = batch_size, drop_last, epoch
        self._is_last, self._skips, self._used = is_last, has_left_epoch_early, consumed
        self._late, self._is_clear = late_gradients, has_no_pending_gradient
        self._timeout_s = timeout_s
        options = dict(loader_options)
        processes = options.get("num_workers", 0)
        ahead = processes * (options.get("prefetch_factor") or _PREFETCH) + 1 if processes else 0
        self._ahead = max(ahead, blocks_per_round + 1 if blocks_per_round > 1 else 0)
        self._samples = len(dataset)  # type: ignore[arg-type]
        self._dataset = _BatchDataset(dataset, options.pop("collate_fn", None) or default_collate)
        self._seed, self._options = seed, options
        self._last_batch: Any = None
        self._has_requested = False

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        with self._client.lock:
            self._block_queue.begin_epoch(self._epoch)
        self._request()
        # A local, so that it ends with this generator: processes of a DataLoader that the garbage collector
        # has to end, in a cycle with their sampler, do not get its message to stop; each then costs 5 s.
        loaded = iter(
            DataLoader(
                self._dataset,
                batch_size=None,
                sampler=self._blocks_to_load(),
                collate_fn=_identity,
                generator=loader_generator(self._seed),
                **self._options,
            )
        )
        while (source := self._wait_for_next()) is not _Source.END:
            if source is _Source.PLACEHOLDER:
                self._has_requested = False
                yield self._placeholder(), 0
                continue
            if source is _Source.LATE_BLOCK:
                assert self._late is not None
                block = self._late.begin_block()
                if block is not None:
                    _, samples, self._last_batch = self._dataset[block.id, self._samples_of(block)]
                    yield self._last_batch, samples
                continue
            block_id, samples, batch = next(loaded)
            with self._client.lock:
                is_mine = block_id is not None and self._block_queue.start(block_id)
            if is_mine:
                self._has_requested = False
                self._last_batch = batch
                yield batch, samples

    def _wait_for_next(self) -> _Source:
        """Wait until there is something to yield, or nothing is left; return which."""
        source = self._choose()
        if source is None and self._is_excluded:
            limit_s = time.monotonic() + _PARAMETERS_S
            self._client.wait_for(
                lambda: self._choose() is not None or time.monotonic() >= limit_s,
                2 * _PARAMETERS_S,
                "parameters",
            )
            source = self._choose() or _Source.PLACEHOLDER
        if source is None:
            self._request()
            what = f"samples of epoch {self._epoch}"
            self._client.wait_for(lambda: self._choose() is not None, self._timeout_s, what)
            source = self._choose()
            assert source is not None
        if source is _Source.PLACEHOLDER:
            self._block_queue.is_awaited = False
        return source

    @property
    def _is_excluded(self) -> bool:
        return self._late is not None and self._late.is_excluded

    def _choose(self) -> _Source | None:
        with self._client.lock:
            if (
                self._late is not None and self._is_excluded
            ):  # blocks of its own follow once it has the members' state
                is_over = self._is_over() or self._client.epochs_ended > self._epoch
                if is_over or not self._is_clear():
                    return _Source.END if is_over else _Source.PLACEHOLDER
                if self._late.is_expecting:
                    return None
                return _Source.LATE_BLOCK if self._late.has_block else _Source.PLACEHOLDER
            if len(self._block_queue):
                return _Source.BLOCK
            has_late_gradient = self._late is not None and self._late.has_accepted
            if has_late_gradient and (self._is_last or not self._block_queue.is_exhausted):
                return _Source.PLACEHOLDER
            if self._is_over():
                return _Source.END
            return _Source.PLACEHOLDER if self._block_queue.is_awaited else None

    def _is_over(self) -> bool:
        """Whether no more of the epoch will be assigned: it is used up, or all workers have finished."""
        return self._block_queue.is_exhausted or self._client.is_job_complete

    def _request(self) -> None:
        """Request blocks of the epoch, unless a request is open: nothing has been yielded since.

        Called at the epoch's beginning, and when there is nothing to yield.
        """
        if self._has_requested:
            return
        self._has_requested = True
        with self._client.lock:
            started, round_ = self._block_queue.started, self._client.protocol.round
            if self._late is not None and self._is_excluded:
                self._late.on_samples_requested()
        self._client.send_event(
            SamplesRequested(
                now_s=0.0,
                worker=self._client.worker,
                epoch=self._epoch,
                samples=self._samples,
                batch_size=self._batch_size,
                is_last=self._is_last,
                abandons_previous=self._skips,
                blocks_max=self._ahead,
                started_blocks=started,
                round=round_,
                consumed_ranges=self._used,
                drop_last=self._drop_last,
            )
        )
        self._skips = False

    def _blocks_to_load(self) -> Iterator[tuple[int | None, list[int]]]:
        """Yield ids and samples of blocks, and (None, []) where no block is assigned."""
        while True:
            with self._client.lock:
                block = self._block_queue.next_to_load()
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

    def _placeholder(self) -> Any:
        if self._last_batch is None:
            _, _, self._last_batch = self._dataset[0, list(range(min(self._batch_size, self._samples)))]
        return self._last_batch


class _BatchDataset(Dataset[Any]):
    """A data set whose items are whole batches."""

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


def _identity(batch: Any) -> Any:
    return batch
