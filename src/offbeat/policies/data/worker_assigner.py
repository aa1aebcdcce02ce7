"""Deals samples to workers that are in no group: what each has computed is used at once.

A part that a policy owns. Nothing here knows when a worker may compute, nor how an epoch is cut into blocks
(see `offbeat.policies.work`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from offbeat.errors import ProtocolError
from offbeat.events import Action, Block, Wants
from offbeat.policies.data.assigner import Dealer
from offbeat.policies.data.block_scheduler import blocks_of, plain_of

_LATELY: Final = 32  # clocks


class SoloDealing(Dealer):
    """Says who gets which samples, so that each is used once, while workers come and go.

    No step is repeated once a worker has said that it is done, so its blocks count as used then. What a
    worker has that is lost goes to others. With no group, nobody waits for a worker that has no samples; but
    one that waits for more in the midst of a step is told to do without (`Deal.is_awaited`), for others may
    wait for the blocks that it has taken. Who saves says up to which clock its state holds everybody's steps
    (`Saving.round`), and is told what was used at those.
    """

    _why_awaited: ClassVar[str] = "others wait for what it has begun"

    def __init__(self) -> None:
        super().__init__()
        self._members: set[int] = set()
        self._waiting: set[int] = set()  # who has nothing to compute with, and its epoch is not over
        self._steps = 0  # with samples; each is a round of its own for the scheduler
        self._recent: list[tuple[int, Block, int]] = []  # clock, what was used at it, positions of its epoch

    @property
    def waiting(self) -> frozenset[int]:
        """Who waits for samples."""
        return frozenset(self._waiting)

    def may_compute(self, worker: int) -> bool:
        """Whether the worker has samples, or none are dealt to it because it has never wanted any."""
        return worker not in self._in or bool(self._scheduler.held(worker))

    def holders(self) -> set[int]:
        """Who has blocks for which others wait, since their epochs end only when these are used."""
        latest = max((self._in[worker][0] for worker in self._waiting), default=-1)
        epochs = [epoch for epoch in self._scheduler.unfinished() if epoch <= latest]
        return {worker for epoch in epochs for worker in self._scheduler.holders(epoch)}

    def joined(self, worker: int) -> None:
        """A worker is here."""
        self._members.add(worker)
        self._scheduler.set_members(self._members)

    def wants(self, event: Wants) -> None:
        """A worker is in an epoch, and has nothing to compute with.

        Raises:
            ProtocolError: an epoch, sizes or blocks that cannot be.
        """
        if self._begin(event):
            self._waiting.add(event.worker)

    def stepped(self, worker: int, clock: int, blocks: tuple[int, ...]) -> None:
        """A worker has finished a step at a clock with these blocks.

        Raises:
            ProtocolError: they are not its own.
        """
        if not blocks:
            return
        if not self._scheduler.contributed(worker, self._steps, blocks):
            raise ProtocolError(f"blocks {list(blocks)} are not worker {worker}'s any more")
        _, samples = self._in[worker]
        contributed = self._scheduler.contribution(worker, self._steps)
        self._recent += [(clock, block, samples) for block in contributed]
        self._scheduler.completed(self._steps)
        self._steps += 1

    def passed(self, version: int) -> None:
        """All is in the parameters that was done at clocks before this one.

        Who rests may have fetched them a little earlier, and ask now what they hold.
        """
        if any(clock < version - _LATELY for clock, *_ in self._recent[:1]):
            self._recent = [one for one in self._recent if one[0] >= version - _LATELY]

    def finished(self, worker: int) -> None:
        """The worker's loop is over; what it had is nobody's."""
        if worker in self._in:
            self._scheduler.retired(worker)
        self._forget(worker)
        self._scheduler.set_members(self._members)

    def gone(self, worker: int) -> None:
        """The worker is no more; what it had is for others."""
        self._forget(worker)
        if worker in self._scheduler:
            self._scheduler.lost(worker)

    def _forget(self, worker: int) -> None:
        self._members.discard(worker)
        self._waiting.discard(worker)
        self._anew.discard(worker)
        self._in.pop(worker, None)
        self._saving.pop(worker, None)

    def deals(self) -> list[Action]:
        """What there is to tell now, ascending by worker."""
        dealt = {worker: (blocks, over) for worker, blocks, over in self._scheduler.deal()}
        self._waiting -= {worker for worker, (blocks, over) in dealt.items() if blocks or over}
        awaited = {worker for worker in self._waiting if self._scheduler.taken_count(worker)}
        self._waiting -= awaited
        said: list[Action] = [
            self._deal(worker, *dealt.get(worker, ((), False)), is_awaited=worker in awaited)
            for worker in sorted({*dealt, *awaited, *self._anew})
        ]
        self._anew.clear()
        return said + self._saved()

    def _saved(self) -> list[Action]:
        """Tell who saves what has been used at the clocks that its state holds."""
        said: list[Action] = []
        for worker, clock in sorted(self._saving.items()):
            later = [(block, samples) for at, block, samples in self._recent if at >= clock]
            said.append(self._used(worker, clock, self._scheduler.used_before(self._steps, later)))
        self._saving.clear()
        return said

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as plain data."""
        return {
            "scheduler": self._scheduler.state_dict(),
            "members": sorted(self._members),
            "in": [[worker, *one] for worker, one in self._in.items()],
            "waiting": sorted(self._waiting),
            "steps": self._steps,
            "recent": [[clock, plain_of([block]), samples] for clock, block, samples in self._recent],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, which was taken when everything had been told."""
        self._scheduler.load_state_dict(state["scheduler"])
        self._members = set(state["members"])
        self._in = {worker: (epoch, samples) for worker, epoch, samples in state["in"]}
        self._waiting, self._steps = set(state["waiting"]), state["steps"]
        self._recent = [
            (clock, block, samples)
            for clock, plain, samples in state["recent"]
            for block in blocks_of(plain).values()
        ]
        self._anew, self._saving = set(), {}
