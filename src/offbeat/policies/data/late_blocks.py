"""Lends blocks to workers outside the group, each on behalf of a member; a part that group policies own.

Nothing here moves a gradient, nor knows how blocks are cut (see `offbeat.policies.work`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from offbeat.events import Action, Brought, Lend, Settle
from offbeat.policies.data.block_scheduler import WorkScheduler


class _Loan(NamedTuple):
    number: int
    patron: int
    block: int
    epoch: int


class Lending:
    """Says who outside the group computes what, and whether a gradient that has come late counts.

    A worker that no group counts on computes one block at a time for a member, its *patron*. The block stays
    the worker's until the patron has the whole gradient and says so: then, in this one moment, it becomes the
    patron's, who contributes it with its next round as it does its own; so whatever happens to a round or to
    the patron from then on, happens to the block as to any other. Before that moment a loan may be called in
    at any time, and what comes of it later does not count. Nobody ever waits for a loan.

    Args:
        scheduler: to deal of.
        staleness_steps_max: how many steps may have begun since a late gradient's parameters were current,
            the one that takes it in counted.
    """

    def __init__(self, scheduler: WorkScheduler, staleness_steps_max: int) -> None:
        self._scheduler = scheduler
        self._staleness_steps_max = staleness_steps_max
        self._loans: dict[int, _Loan] = {}  # by who computes
        self._numbers: Counter[int] = Counter()  # the next loan's
        self._patrons: frozenset[int] = frozenset()  # members that hold the state and go on
        self._wishing: set[int] = set()  # who is outside and has nothing to compute
        self._freed: set[int] = set()  # whose loans have ended since `lend` was asked
        self._said: list[Action] = []

    def __contains__(self, worker: int) -> bool:
        """Whether a worker outside has a loan."""
        return worker in self._loans

    def wishes(self, worker: int) -> None:
        """A worker knows that no group counts on it, and goes on computing."""
        if worker not in self._loans:
            self._wishing.add(worker)

    def move(self, members: Iterable[int], joining: Iterable[int]) -> None:
        """There is another group: loans of who is in it end, and those for who is not."""
        members = frozenset(members)
        self._patrons = members.difference(joining)
        for worker, loan in list(self._loans.items()):
            if worker in members:
                self.void(worker, f"worker {worker} joins the group")
            elif loan.patron not in self._patrons:
                self.void(worker, f"worker {loan.patron} is no member any more")
        self._wishing -= members

    def ends(self, worker: int) -> None:
        """A worker is gone, or its loop is over."""
        self._patrons -= {worker}
        for late, loan in list(self._loans.items()):
            if worker in (late, loan.patron):
                self.void(late, f"worker {worker} takes no part any more")
        self._wishing.discard(worker)
        self._freed.discard(worker)

    def void(self, worker: int, reason: str) -> None:
        """What a worker was lent, if anything, is for others."""
        loan = self._loans.pop(worker, None)
        if loan is None:
            return
        self._scheduler.revoke(worker)
        self._wishing.add(worker)
        self._freed.add(worker)
        self._settle(worker, loan, counts=False, reason=reason)

    def call_in(self, epoch: int | None) -> bool:
        """Call in what was lent of epochs before this one, of all with None; whether there was anything.

        An epoch must not be held up at the end of the next one, when who accumulates gradients over batches
        may have nothing left to contribute a block with.
        """
        due = [worker for worker, loan in self._loans.items() if epoch is None or loan.epoch < epoch]
        for worker in due:
            self.void(worker, "the others wait for the block" if epoch is None else "its epoch is long over")
            self._wishing.discard(worker)  # it may hang; if not, it is heard of soon
        return bool(due)

    def brought(self, event: Brought, step: int) -> None:
        """A patron has a late gradient.

        Args:
            event: says so.
            step: the last that a member has begun.
        """
        loan = self._loans.get(event.late)
        if loan is None or (loan.number, loan.patron) != (event.number, event.worker):
            return  # it was settled before this was heard
        age = step + 1 - event.step
        if age > self._staleness_steps_max:
            self.void(event.late, f"its parameters are {age} steps old")
            return
        if self._scheduler.adopt(event.worker, loan.block, event.late):
            del self._loans[event.late]
            self._wishing.add(event.late)
            self._freed.add(event.late)
            reason = f"its parameters are {age} of at most {self._staleness_steps_max} steps old"
            self._settle(event.late, loan, counts=True, reason=reason)
        else:
            self.void(event.late, "the block is not its own any more")

    def lend(self) -> tuple[list[Action], set[int]]:
        """Lend what can be lent; returns what there is to say, and whose loans ended without another."""
        load = Counter(loan.patron for loan in self._loans.values())
        for worker in sorted(self._wishing):
            if not self._patrons or worker not in self._scheduler:
                continue
            block = self._scheduler.lend(worker)
            if block is None:
                continue
            patron = min(self._patrons, key=lambda member: (load[member], member))
            load[patron] += 1
            number = self._numbers[worker]
            self._numbers[worker] += 1
            self._loans[worker] = _Loan(number, patron, block.id, block.epoch)
            self._freed.discard(worker)
            reason = f"worker {worker} is outside, worker {patron} has the fewest to look after"
            self._said.append(Lend(worker=worker, number=number, patron=patron, block=block, reason=reason))
        self._wishing.clear()  # until they have something to say
        said, self._said = self._said, []
        freed, self._freed = self._freed, set()
        return said, freed

    def state_dict(self) -> dict[str, Any]:
        """Return all that is left between two events, as plain data."""
        return {
            "loans": [[worker, *loan] for worker, loan in self._loans.items()],
            "numbers": sorted(self._numbers.items()),
            "patrons": sorted(self._patrons),
            "wishing": sorted(self._wishing),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._loans = {worker: _Loan(*loan) for worker, *loan in state["loans"]}
        self._numbers = Counter(dict(state["numbers"]))
        self._patrons, self._wishing = frozenset(state["patrons"]), set(state["wishing"])

    def _settle(self, late: int, loan: _Loan, *, counts: bool, reason: str) -> None:
        self._said.append(
            Settle(worker=loan.patron, late=late, number=loan.number, counts=counts, reason=reason)
        )
