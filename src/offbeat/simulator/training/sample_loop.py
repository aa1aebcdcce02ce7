"""The samples of a simulated worker: it asks for them, waits, takes them and ends epochs as the runtime does.

Nothing here decides who gets what; see `offbeat.runtime.dealt` for what this stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from offbeat.events import Block, Deal, Wants
from offbeat.policies.data.block_queue import Hand


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What all workers' loops go through.

    Attributes:
        count: samples in an epoch.
        batch_size: samples in a batch at most.
        epochs: after how many a loop is over, None for never.
        batches_per_round: how many batches a loop accumulates before its gradients are exchanged.
        breaks_off_after: with so many rounds the loop leaves every other epoch early; None for never.

    Raises:
        ValueError: a number below 1.
    """

    count: int
    batch_size: int
    epochs: int | None = None
    batches_per_round: int = 1
    breaks_off_after: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")


class Next(Enum):
    """What a loop goes on with."""

    BATCH = auto()  # gradients of what it was dealt, or of samples that count for nothing
    ROUND = auto()  # the exchange of what it has accumulated: the epoch is over
    WAIT = auto()  # nothing, until something is heard
    OVER = auto()  # nothing any more


class Taker(Protocol):
    """Who goes through the samples."""

    @property
    def worker(self) -> int:
        """Its id."""

    @property
    def round(self) -> int:
        """How many rounds it has finished."""

    @property
    def is_member(self) -> bool:
        """Whether what it computes counts."""


class Loop:
    """One worker's way through its epochs, batch by batch.

    Args:
        samples: of all workers.
        taker: whose way, a worker's `Follower` where there are groups.
        tell: says something to the coordinator, at once.

    Attributes:
        epoch: the worker's, from 0.
        epochs_ended: how many the group is done with, as far as is known.
        hand: what it was dealt.
        blocks: behind the gradients of the round under way.
    """

    def __init__(self, samples: Samples, taker: Taker, tell: Callable[[Wants], None]) -> None:
        self.samples = samples
        self.hand = Hand()
        self.epoch = self.epochs_ended = 0
        self.blocks: tuple[Block, ...] = ()
        self._taker, self._tell = taker, tell
        self._batches = 0  # of the round under way
        self._rounds = 0  # in this epoch
        self._blocks_per_round = 0
        self._is_inside = False  # the epoch has begun
        self._has_ended = self._has_asked = self._has_given_up = False

    @property
    def share(self) -> float:
        """How far the epoch is."""
        return self.hand.used / self.samples.count

    def hear(self, deal: Deal) -> None:
        """Takes a Deal up."""
        self.hand.hear(deal)

    def begin_at(self, epoch: int) -> None:
        """Enters the loop late, as one who has the state of others that are in `epoch`."""
        self.epoch = epoch

    def next(self) -> Next:
        """What to do now; a batch is taken, one that counts is in `blocks`."""
        while True:
            if not self._is_inside:
                if self.epoch == self.samples.epochs:
                    return Next.OVER
                self._enter()
            is_member, hand = self._taker.is_member, self.hand
            if self._has_ended or self._is_at_the_end():
                self._has_ended = True
                if self._batches:
                    return Next.ROUND
                self._leave()
            elif is_member and not len(hand) and not hand.is_awaited:
                self._ask()
                return Next.WAIT
            else:  # what it is dealt is for when it has the members' state
                self._take(hand.load() if is_member else None)
                return Next.BATCH

    def computed(self) -> bool:
        """Whether the batches taken make up a round."""
        return self._batches == self.samples.batches_per_round

    def contribute(self) -> tuple[int, ...]:
        """Ids of the blocks behind the gradients, as the worker names them when it is Ready."""
        ids = self.hand.contribute(self._taker.is_member)
        self._blocks_per_round = max(self._blocks_per_round, len(ids))
        return ids

    def end_round(self) -> None:
        """The round is over, for this worker."""
        self.blocks = ()
        self._batches = 0
        self._rounds += 1
        if self.epoch % 2 == 0 and self._rounds == self.samples.breaks_off_after and not self._has_ended:
            self._has_given_up = True
            self.hand.throw_away()
            self._leave()

    def _take(self, block: Block | None) -> None:
        hand = self.hand
        if block is None:
            hand.is_awaited = False
        else:
            hand.take(block.id)
            self.blocks += (block,)
        self._batches += 1
        self._has_asked = False

    def _is_at_the_end(self) -> bool:
        return self.hand.is_over or (not self._taker.is_member and self.epochs_ended > self.epoch)

    def _enter(self) -> None:
        self._is_inside, self._has_ended = True, False
        self.hand.begin(self.epoch)
        self._has_asked = False
        self._ask()

    def _leave(self) -> None:
        self._is_inside = False
        self._rounds = 0
        self.epoch += 1

    def _ask(self) -> None:
        if self._has_asked:
            return
        self._has_asked = True
        samples = self.samples
        together = self._blocks_per_round
        self._tell(
            Wants(
                now_s=0.0,
                worker=self._taker.worker,
                epoch=self.epoch,
                samples=samples.count,
                batch_size=samples.batch_size,
                is_last=samples.epochs is not None and self.epoch + 1 == samples.epochs,
                skips=self._has_given_up,
                ahead=together + 1 if together > 1 else 0,
                taken=self.hand.taken,
                round=self._taker.round,
                used=(),
            )
        )
        self._has_given_up = False
