"""One all-reduce among simulated workers, with members that die or hang in the midst of it.

Nothing here knows of policies; it checks that all who take part mean the same exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from offbeat.events import Group

if TYPE_CHECKING:
    from offbeat.simulator.training.cluster import Cluster
    from offbeat.simulator.training.worker import SimulatedWorker

_ENDS_MAX = 8


class Exchange:
    """All members' gradients, once the last has come; members end one after the other.

    If a member dies or hangs meanwhile, who had all that it needed still ends, up to a moment that is drawn,
    and the rest do when it goes on.

    Attributes:
        mean: what every member gets, None before all have come.
        contributions: how many dealt blocks are in it of each member; none where no samples are dealt.
        begin_s: when the last one came.
        first: the member, by its place, from which on they end.
        last_s: when the last ones end.
    """

    def __init__(self, cluster: Cluster, group: Group, exchange_id: int, step: int, round: int) -> None:
        self.group, self.step, self.round = group, step, round
        self.exchange_id = exchange_id
        self.mean: Any = None
        self.contributions: Sequence[tuple[int, int]] = ()
        self._cluster = cluster
        self._workers: list[SimulatedWorker] = []
        self._blocked: set[Any] = set()
        self._blocked_s = 0.0
        self._ends_until_s = 0.0  # while blocked
        self.begin_s = self.last_s = 0.0
        self.first = 0
        self._ends: list[tuple[float, int, int]] = []  # when, and from which to which, counted from `first`
        self._held: list[tuple[float, list[SimulatedWorker]]] = []
        self._ended = 0

    @property
    def workers(self) -> list[SimulatedWorker]:
        """Who has come."""
        return self._workers

    def arrive(self, worker: SimulatedWorker) -> None:
        """A member begins."""
        follower, group = worker.follower, self.group
        if (
            (follower.group is not group and follower.group != group)
            or follower.step != self.step
            or follower.round != self.round
        ):
            self._cluster.violated(
                f"exchange {self.exchange_id} is of generation {group.generation}, step {self.step} and "
                f"round {self.round} for worker {self._workers[0].worker}, "
                f"of generation {follower.generation}, "
                f"step {follower.step} and round {follower.round} for worker {worker.worker}"
            )
        self._workers.append(worker)
        if len(self._workers) == len(group.members) and all(one.exchange is self for one in self._workers):
            self._begin()  # else somebody has abandoned it or is dead, and it never ends

    def block(self, what: Any) -> None:
        """Something keeps members from ending: one that hangs or is dead, or two that are cut apart."""
        cluster = self._cluster
        now_s = cluster.engine.now_s
        if not self._blocked:
            self._blocked_s = now_s
            self._ends_until_s = now_s + cluster.chance.random() * max(0.0, self.last_s - now_s)
        self._blocked.add(what)

    def unblock(self, what: Any) -> None:
        """It does so no more."""
        if what not in self._blocked:
            return
        self._blocked.discard(what)
        if self._blocked:
            return
        engine = self._cluster.engine
        for end_s, workers in self._held:
            engine.at(engine.now_s + max(0.0, end_s - self._blocked_s), self._end, (0.0, workers))
        self._held.clear()

    def _begin(self) -> None:
        cluster, workers = self._cluster, self._workers
        problem, weight_of = cluster.problem, dict(zip(self.group.members, self.group.weights, strict=True))
        state = workers[0].state
        for worker in workers:
            if worker.state is not state and not problem.same(worker.state, state):
                cluster.violated(
                    f"workers {workers[0].worker} and {worker.worker} have different states before step "
                    f"{self.step}"
                )
        workers.sort(key=_id)
        weights = [weight_of[worker.worker] * worker.weight for worker in workers]
        self.begin_with(workers, [worker.gradient for worker in workers], weights)
        if workers[0].loop is not None:
            self.contributions = [(worker.contributed, 0) for worker in workers]
        cluster.blocks_of(self)
        if self._blocked:
            self._blocked_s = self._ends_until_s = self.begin_s
        # Only after all that happens at this time: a member may be in the midst of what it hears.
        cluster.engine.at(self.begin_s, self._go_on)

    def _go_on(self, _: Any) -> None:
        if not self._cluster.cohort.takes(self):
            self.end_each()

    def begin_with(
        self, workers: list[SimulatedWorker], gradients: Sequence[Any], weights: Sequence[float]
    ) -> None:
        """Averages the gradients of all members, in the order of their ids, and draws when they end."""
        cluster = self._cluster
        self._workers = workers
        self.mean = cluster.problem.mean(gradients, weights, self.exchange_id)
        self.begin_s = now_s = cluster.engine.now_s
        count = len(workers)
        whole_s = cluster.network.all_reduce_s(cluster.size_bytes, count)
        spread_s = cluster.network.spread * whole_s
        ends = min(count, _ENDS_MAX)
        self.first = int(cluster.chance.random() * count)
        self.last_s = now_s + whole_s
        self._ends = [
            (
                self.last_s - spread_s * (ends - 1 - end) / ends,
                count * end // ends,
                count * (end + 1) // ends,
            )
            for end in range(ends)
        ]

    @property
    def ends_s(self) -> NDArray[np.float64]:
        """When each member ends, in the order of their ids."""
        ends_s = [end_s for end_s, _, _ in self._ends]
        return np.roll(np.repeat(ends_s, [last - first for _, first, last in self._ends]), self.first)

    def end_each(self) -> None:
        """Lets members end, each at its time."""
        ordered = self._workers[self.first :] + self._workers[: self.first]
        for end_s, first, last in self._ends:
            self._cluster.engine.at(end_s, self._end, (end_s, ordered[first:last]))

    def _end(self, ending: tuple[float, list[SimulatedWorker]]) -> None:
        end_s, workers = ending
        if self._blocked and self._cluster.engine.now_s > self._ends_until_s:
            self._held.append((max(end_s, self._blocked_s), workers))
            return
        for worker in workers:
            worker.end_exchange(self)
        self._ended += len(workers)
        if self._ended == len(self._workers):
            self._cluster.exchanges.pop(self.exchange_id, None)


def _id(worker: SimulatedWorker) -> int:
    return worker.worker
