"""The training loop of a simulated worker: it requests samples, waits, consumes them and ends epochs.

Nothing here decides which worker gets which samples; `offbeat.runtime.data.assigned_batches` is the original
of this model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from offbeat.events import Block, SamplesRequested
from offbeat.policies.data.block_queue import BlockQueue


@dataclass(frozen=True, kw_only=True)
class SampleSetting:
    """The samples of all workers' loops.

    Attributes:
        epoch_samples: samples in an epoch.
        batch_size: samples in a batch at most.
        epochs: epochs in a loop, None for no limit.
        batches_per_round: batches that a loop accumulates before its gradients are exchanged.
        break_after_rounds: rounds after which the loop leaves every other epoch early; None for never.
        rounds: rounds of the group after which the loop ends within an epoch; None for no limit.

    Raises:
        ValueError: a number below 1.
    """

    epoch_samples: int
    batch_size: int
    epochs: int | None = None
    batches_per_round: int = 1
    break_after_rounds: int | None = None
    rounds: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")


class LoopActivity(Enum):
    """The next activity of a loop."""

    BATCH = auto()  # gradients of an assigned block, or of samples that count for nothing
    ROUND = auto()  # the exchange of the accumulated gradients: the epoch is over
    EPOCH_END = auto()  # the mean of all models, where workers own theirs: the epoch is used up
    WAIT = auto()  # nothing, until a message arrives
    OVER = auto()  # nothing, the loop has ended


class SampleConsumer(Protocol):
    """The consumer of the samples."""

    @property
    def worker(self) -> int:
        """The worker's id."""

    @property
    def round(self) -> int:
        """Rounds that it has finished."""

    @property
    def is_member(self) -> bool:
        """Whether its gradients count."""


class SimulatedLoop:
    """One worker's progress through its epochs, batch by batch.

    Args:
        samples: the samples of all workers.
        block_queue: the assigned blocks; see `WorkerProtocol`.
        worker: the worker; its `GroupMembership` where there are groups.
        send_request: sends a request to the coordinator, at once.
        has_epoch_ends: an epoch's end is an activity.

    Attributes:
        epoch: the worker's, from 0.
        epochs_ended: epochs that the group has completed, as far as is known.
        blocks: the blocks behind the gradients of the round under way.
    """

    def __init__(
        self,
        samples: SampleSetting,
        block_queue: BlockQueue,
        worker: SampleConsumer,
        send_request: Callable[[SamplesRequested], None],
        *,
        has_epoch_ends: bool = False,
    ) -> None:
        self.samples, self.block_queue = samples, block_queue
        self.epoch = self.epochs_ended = 0
        self.blocks: tuple[Block, ...] = ()
        self._worker, self._send, self._has_epoch_ends = worker, send_request, has_epoch_ends
        self._batches = 0  # in the round under way
        self._rounds = 0  # in this epoch
        self._blocks_per_round = 0
        self._is_in_epoch = False  # the epoch has begun
        self._has_ended = self._has_asked = self._has_skipped = self._is_over = False

    @property
    def epoch_share(self) -> float:
        """The share of the epoch that is used, 0 to 1."""
        return self.block_queue.samples_used / self.samples.epoch_samples

    def enter_epoch(self, epoch: int) -> None:
        """Enter the loop late, with a state of members that are in `epoch`."""
        self.epoch = epoch

    def next_activity(self) -> LoopActivity:
        """Return the next activity; it consumes a batch, which is added to `blocks` if it counts."""
        while True:
            if not self._is_in_epoch:
                if self._is_over or self.epoch == self.samples.epochs:
                    return LoopActivity.OVER
                self._enter()
            is_member, queue = self._worker.is_member, self.block_queue
            if self._has_ended or self._is_at_the_end():
                self._has_ended = True
                if self._batches:
                    return LoopActivity.ROUND
                self._leave()
                if self._has_epoch_ends:
                    return LoopActivity.EPOCH_END
            elif is_member and not len(queue) and not queue.is_awaited:
                self._ask()
                return LoopActivity.WAIT
            else:  # a worker outside the group keeps its assigned blocks until it has the members' state
                self._consume(queue.next_to_load() if is_member else None)
                return LoopActivity.BATCH

    def is_round_complete(self) -> bool:
        """Whether the consumed batches make up a round."""
        return self._batches == self.samples.batches_per_round

    def contribute(self) -> tuple[int, ...]:
        """Return the ids of the blocks behind the gradients, for the worker's Ready."""
        ids = self.block_queue.pop_contribution(self._worker.is_member)
        self._blocks_per_round = max(self._blocks_per_round, len(ids))
        return ids

    def end_round(self) -> None:
        """End the round, for this worker."""
        self.blocks = ()
        self._batches = 0
        self._rounds += 1
        if self.samples.rounds is not None and self._worker.round >= self.samples.rounds:
            self._is_over = True
            self.block_queue.discard()
            self._leave()
        elif self.epoch % 2 == 0 and self._rounds == self.samples.break_after_rounds and not self._has_ended:
            self._has_skipped = True
            self.block_queue.discard()
            self._leave()

    def _consume(self, block: Block | None) -> None:
        queue = self.block_queue
        if block is None:
            queue.is_awaited = False
        else:
            queue.start(block.id)
            self.blocks += (block,)
        self._batches += 1
        self._has_asked = False

    def _is_at_the_end(self) -> bool:
        return self.block_queue.is_exhausted or (
            not self._worker.is_member and self.epochs_ended > self.epoch
        )

    def _enter(self) -> None:
        self._is_in_epoch, self._has_ended = True, False
        self.block_queue.begin_epoch(self.epoch)
        self._has_asked = False
        self._ask()

    def _leave(self) -> None:
        self._is_in_epoch = False
        self._rounds = 0
        self.epoch += 1

    def _ask(self) -> None:
        if self._has_asked:
            return
        self._has_asked = True
        samples = self.samples
        together = self._blocks_per_round
        self._send(
            SamplesRequested(
                now_s=0.0,
                worker=self._worker.worker,
                epoch=self.epoch,
                samples=samples.epoch_samples,
                batch_size=samples.batch_size,
                is_last=samples.epochs is not None and self.epoch + 1 == samples.epochs,
                abandons_previous=self._has_skipped,
                blocks_max=together + 1 if together > 1 else 0,
                started_blocks=self.block_queue.started,
                round=self._worker.round,
                consumed_ranges=(),
            )
        )
        self._has_skipped = False
