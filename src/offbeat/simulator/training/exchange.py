"""Exchanges among simulated workers, which may die or hang during one.

Nothing here knows of policies; it checks that all members mean the same exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.events import Group
from offbeat.simulator.training.interface import Simulation
from offbeat.simulator.training.worker import SimulatedWorker

_ENDS_MAX = 8


class BlockableExchange(ABC):
    """An exchange: it starts when the last member arrives, and the members end at different times.

    If a member dies or hangs meanwhile, a member that had received all data before that still ends, up to a
    time drawn at random; the remaining ones end when the blocked member resumes.

    Args:
        cluster: the run.
        members: worker ids, ascending.
        exchange_id: a number that no other exchange has.

    Attributes:
        begin_s: when the last member arrived.
        first_member: index of the member that ends first; the rest follow in cyclic order.
        all_ended_s: when the last members end.
    """

    def __init__(self, cluster: Simulation, members: tuple[int, ...], exchange_id: int) -> None:
        self.members, self.exchange_id = members, exchange_id
        self._cluster = cluster
        self._workers: list[SimulatedWorker] = []
        self._blocked: set[Any] = set()
        self._blocked_s = 0.0
        self._ends_until_s = 0.0  # while blocked, members end up to this time
        self.begin_s = self.all_ended_s = 0.0
        self.first_member = 0
        self._ends: list[tuple[float, int, int]] = []  # time, and index range counted from `first`
        self._held_ends: list[tuple[float, list[SimulatedWorker]]] = []
        self._ended = 0

    @abstractmethod
    def check_member(self, worker: SimulatedWorker) -> None:
        """Check that a worker that arrives means this exchange."""

    @abstractmethod
    def combine(self) -> None:
        """Compute the result from what all members contribute."""

    @abstractmethod
    def deliver(self, worker: SimulatedWorker) -> None:
        """Give the result to a member."""

    @property
    def workers(self) -> list[SimulatedWorker]:
        """The members that have arrived."""
        return self._workers

    def arrive(self, worker: SimulatedWorker) -> None:
        """Add a member; the last one starts the exchange."""
        self.check_member(worker)
        self._workers.append(worker)
        if len(self._workers) == len(self.members) and all(
            member.exchange is self for member in self._workers
        ):
            self._begin()  # else a member has abandoned it or is dead, and it never ends

    def block(self, cause: Any) -> None:
        """Keep members from ending; `cause` is a worker that hangs or is dead, or an outage."""
        cluster = self._cluster
        now_s = cluster.engine.now_s
        if not self._blocked:
            self._blocked_s = now_s
            self._ends_until_s = now_s + cluster.chance.random() * max(0.0, self.all_ended_s - now_s)
        self._blocked.add(cause)

    def unblock(self, cause: Any) -> None:
        """Remove a cause; when none is left, the held members end."""
        if cause not in self._blocked:
            return
        self._blocked.discard(cause)
        if self._blocked:
            return
        engine = self._cluster.engine
        for end_s, workers in self._held_ends:
            engine.schedule(engine.now_s + max(0.0, end_s - self._blocked_s), self._end, (0.0, workers))
        self._held_ends.clear()

    def _begin(self) -> None:
        cluster = self._cluster
        self._workers.sort(key=_worker_id)
        self.combine()
        for what in cluster.blockers(self.members):
            self.block(what)
        if self._blocked:
            self._blocked_s = self._ends_until_s = self.begin_s
        # After all other calls of this time: a member may be in the middle of processing a message.
        cluster.engine.schedule(self.begin_s, self.on_begun)

    def on_begun(self, _: Any) -> None:
        """Finish: all members have arrived and the result is known."""
        self.schedule_ends()

    def draw_ends(self) -> None:
        """Draw the end time of each member, in an exchange that begins now."""
        cluster, count = self._cluster, len(self._workers)
        self.begin_s = now_s = cluster.engine.now_s
        members = [worker.worker for worker in self._workers]
        whole_s = cluster.network.all_reduce_s(cluster.setting.size_bytes, members)
        spread_s = cluster.network.spread * whole_s
        ends = min(count, _ENDS_MAX)
        self.first_member = int(cluster.chance.random() * count)
        self.all_ended_s = now_s + whole_s
        self._ends = [
            (
                self.all_ended_s - spread_s * (ends - 1 - end) / ends,
                count * end // ends,
                count * (end + 1) // ends,
            )
            for end in range(ends)
        ]

    def schedule_ends(self) -> None:
        """Schedule the end of each member at its time."""
        ordered = self._workers[self.first_member :] + self._workers[: self.first_member]
        for end_s, first, last in self._ends:
            self._cluster.engine.schedule(end_s, self._end, (end_s, ordered[first:last]))

    def _end(self, ending: tuple[float, list[SimulatedWorker]]) -> None:
        end_s, workers = ending
        if self._blocked and self._cluster.engine.now_s > self._ends_until_s:
            self._held_ends.append((max(end_s, self._blocked_s), workers))
            return
        for worker in workers:
            self.deliver(worker)
        self._ended += len(workers)
        if self._ended == len(self._workers):
            self._cluster.close_exchange(self.exchange_id)


class SimulatedExchange(BlockableExchange):
    """An all-reduce of gradients.

    Args:
        cluster: the run.
        group: the group that exchanges.
        exchange_id: a number that no other exchange has.
        step: steps that each member has finished.
        round: rounds that each member has finished.
        vectorize: lets a vectorized group take over the members if possible; returns whether it has.

    Attributes:
        mean: the result for every member; None before all have arrived.
        contributions: assigned blocks in the mean, per member; empty where no samples are assigned.
    """

    def __init__(
        self,
        cluster: Simulation,
        group: Group,
        exchange_id: int,
        step: int,
        round: int,
        vectorize: Callable[[SimulatedExchange], bool],
    ) -> None:
        super().__init__(cluster, group.members, exchange_id)
        self.group, self.step, self.round = group, step, round
        self.mean: Any = None
        self.contributions: Sequence[tuple[int, int]] = ()
        self._vectorize = vectorize

    def check_member(self, worker: SimulatedWorker) -> None:
        """See `BlockableExchange.check_member`."""
        membership, group = worker.membership, self.group
        if (
            (membership.group is not group and membership.group != group)
            or membership.step != self.step
            or membership.round != self.round
        ):
            self._cluster.fail_invariant(
                f"exchange {self.exchange_id} is of generation {group.generation}, step {self.step} and "
                f"round {self.round} for worker {self._workers[0].worker}, "
                f"of generation {membership.generation}, "
                f"step {membership.step} and round {membership.round} for worker {worker.worker}"
            )

    def combine(self) -> None:
        """See `BlockableExchange.combine`: all members have equal states, and average their gradients."""
        cluster, workers = self._cluster, self._workers
        problem, weight_of = cluster.problem, dict(zip(self.group.members, self.group.weights, strict=True))
        state = workers[0].latest_state
        for worker in workers:
            if worker.state is not state and not problem.states_equal(worker.latest_state, state):
                cluster.fail_invariant(
                    f"workers {workers[0].worker} and {worker.worker} have different states before step "
                    f"{self.step}"
                )
        weights = [weight_of[worker.worker] * worker.exchanged_weight for worker in workers]
        self.average(workers, [worker.gradient for worker in workers], weights)
        if workers[0].loop is not None:
            self.contributions = [(worker.exchanged_blocks, 0) for worker in workers]

    def deliver(self, worker: SimulatedWorker) -> None:
        """See `BlockableExchange.deliver`."""
        worker.on_mean(self)

    def on_begun(self, _: Any) -> None:
        """See `BlockableExchange.on_begun`: a vectorized group takes over if it can."""
        if not self._vectorize(self):
            self.schedule_ends()

    def average(
        self, workers: list[SimulatedWorker], gradients: Sequence[Any], weights: Sequence[float]
    ) -> None:
        """Average the gradients of all members, in the order of their ids, and draw the end times."""
        self._workers = workers
        self.mean = self._cluster.problem.mean(gradients, weights, self.exchange_id)
        self.draw_ends()

    @property
    def member_ends_s(self) -> NDArray[np.float64]:
        """The end time of each member, shape (members,), in the order of their ids."""
        ends_s = [end_s for end_s, _, _ in self._ends]
        return np.roll(np.repeat(ends_s, [last - first for _, first, last in self._ends]), self.first_member)


def _worker_id(worker: SimulatedWorker) -> int:
    return worker.worker
