"""The members of a group while nothing goes wrong: all at once, instead of one after the other.

Nothing here is another model of what workers do. A cohort knows what a calm round comes to; as soon as
anything else happens, its members live the round under way once more, each on its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.events import Ready
from offbeat.simulator.core.engine import Engine

if TYPE_CHECKING:
    from offbeat.simulator.core.times import Stopwatch
    from offbeat.simulator.training.cluster import Cluster
    from offbeat.simulator.training.exchange import Exchange
    from offbeat.simulator.training.worker import SimulatedWorker

_ROUNDS_AHEAD = 64
_new, _set = object.__new__, object.__setattr__


class Cohort:
    """Workers that exchange, apply and compute in step, known by when each is to be Ready.

    Between two exchanges a member does nothing that depends on another one, and it is heard with nothing but
    its Ready. So a round is worked out when its exchange begins: when members get the mean, when each has
    computed, and in which order they are heard; the coordinator is asked about each Ready as ever. The
    members themselves stay as they were when the cohort was formed. `dissolve` brings them up to date: as
    they stood when the last exchange began, and from there through their own code, up to now.

    The run is the same with and without: same times, same chance, same answers
    (`test_simulator.py::test_a_cohort_does_what_its_members_would`). Only of what is heard at the very same
    time, a member's Ready may come after another's that it would have come before.

    Args:
        cluster: whose workers.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._exchange: Exchange | None = None  # the last that has begun; None while there is no cohort
        self._members: list[SimulatedWorker] = []
        self._ids = np.zeros(0, np.int64)
        self._workers: list[int] = []  # their ids
        self._id_set: frozenset[int] = frozenset()
        self._computed: list[int] = []  # how many gradients each had computed when the cohort was formed
        self._rounds = 0  # since then
        self._uneven: list[tuple[int, Stopwatch]] = []  # who is slowed on top, with their places
        self._ahead_s = np.zeros((0, 0))  # how long members compute, a row a round
        self._row = 0
        self._state: Any = None
        self._gradients: list[Any] = []
        # Each member's computation before the exchange under way, and the one after it.
        self._was_done_s = self._took_s = np.zeros(0)
        self._done_s = self._takes_s = np.zeros(0)
        # The Readys of the round in the order in which they are heard.
        self._ready_s: list[float] = []
        self._worker: list[int] = []
        self._compute_s: list[float] = []
        self._heard = 0  # how many of them have been
        self._alike: dict[str, Any] = {}  # what all of them say
        self._alike_before: dict[str, Any] = {}

    def __contains__(self, worker: int) -> bool:
        return self._exchange is not None and worker in self._id_set

    @property
    def step(self) -> int:
        """How many steps its members have finished at least; 0 while there is none."""
        return 0 if self._exchange is None else self._exchange.step

    def takes(self, exchange: Exchange) -> bool:
        """Says whether this exchange's members are a cohort from now on."""
        members = exchange.workers
        if not self._cluster.is_calm or not all(one.is_steady(exchange) for one in members):
            return False
        self.dissolve()  # of another group, if there is one
        self._members = members
        self._workers = [one.worker for one in members]
        self._ids, self._id_set = np.array(self._workers), frozenset(self._workers)
        self._computed = [one.computed for one in members]
        self._rounds = 0
        self._uneven = [
            (index, one.stopwatch) for index, one in enumerate(members) if not one.stopwatch.is_even
        ]
        self._look_ahead()
        self._state = members[0].state
        self._work_out(exchange)
        return True

    def dissolve(self) -> None:
        """Brings every member up to date; from now on each is on its own."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        self._skip(self._row - 1)  # in the present round, each asks for itself
        self._catch_up(exchange)
        cluster = self._cluster
        now, past = cluster.engine, Engine(exchange.begin_s)
        cluster.engine, cluster.heard = past, frozenset(self._worker[: self._heard])
        exchange.end_each()
        past.run(math.nextafter(now.now_s, 0.0))
        cluster.engine, cluster.heard = now, frozenset()
        for at_s, call, argument in past.asked():
            now.at(at_s, call, argument)

    def _catch_up(self, exchange: Exchange) -> None:
        """Puts members where they were when this exchange began."""
        if not self._rounds:
            return  # where they are
        latency_s = self._cluster.network.latency_s
        for index, one in enumerate(self._members):
            done_s = float(self._was_done_s[index])
            one.catch_up(
                exchange,
                rounds=self._rounds,
                state=self._state,
                gradient=self._gradients[index],
                done_s=done_s,
                ready=self._ready(
                    self._alike_before, done_s + latency_s, one.worker, float(self._took_s[index])
                ),
            )

    def _look_ahead(self) -> None:
        rows_s = [one.stopwatch.ahead_s(_ROUNDS_AHEAD) for one in self._members]
        self._ahead_s, self._row = np.ascontiguousarray(np.transpose(rows_s)), 0

    def _skip(self, count: int) -> None:
        for one in self._members:
            one.stopwatch.skip(count)

    def _work_out(self, exchange: Exchange) -> None:
        """Works out what happens until the next exchange."""
        cluster, members = self._cluster, self._members
        self._exchange = exchange
        self._was_done_s, self._took_s, self._alike_before = self._done_s, self._takes_s, self._alike
        step = exchange.step + 1
        epoch, step_in_epoch = divmod(step, cluster.steps_per_epoch)
        if self._row == _ROUNDS_AHEAD:
            self._skip(_ROUNDS_AHEAD)
            self._look_ahead()
        self._takes_s = self._ahead_s[self._row]
        self._row += 1
        for index, stopwatch in self._uneven:
            self._takes_s[index] *= stopwatch.factor(epoch, step_in_epoch, cluster.steps_per_epoch, step)
        self._done_s = exchange.ends_s + self._takes_s
        # Of those who are done at one time, who had the mean first is first.
        order = np.argsort(np.roll(self._done_s, -exchange.first), kind="stable")
        order = (order + exchange.first) % len(members)
        self._ready_s = (self._done_s[order] + cluster.network.latency_s).tolist()
        self._worker = self._ids[order].tolist()
        self._compute_s = self._takes_s[order].tolist()
        self._heard = 0
        ready = Ready(
            now_s=0.0,
            worker=0,
            generation=exchange.group.generation,
            epoch=epoch,
            step=step,
            round=exchange.round + 1,
            compute_s=0.0,
            samples=0,
            blocks=(),
        )
        self._alike = vars(ready)
        cluster.engine.at(self._ready_s[0], self._be_heard, exchange)
        cluster.engine.at(float(self._done_s[order[-1]]), self._begin, exchange)

    def _be_heard(self, exchange: Exchange) -> None:
        """Lets the coordinator hear one Ready after the other, until something else is to happen."""
        if exchange is not self._exchange:
            return
        cluster, engine, alike = self._cluster, self._cluster.engine, self._alike
        ready_s, workers, compute_s = self._ready_s, self._worker, self._compute_s
        at, count = self._heard, len(workers)
        free_until_s = engine.free_until_s
        while True:
            engine.now_s = at_s = ready_s[at]
            ready = self._ready(alike, at_s, workers[at], compute_s[at])
            self._heard = at = at + 1
            if cluster.ask(ready):
                if self._exchange is not exchange:
                    return
                free_until_s = engine.free_until_s
            if at == count:
                return
            if ready_s[at] >= free_until_s:
                engine.at(ready_s[at], self._be_heard, exchange)
                return

    def _ready(self, alike: dict[str, Any], at_s: float, worker: int, compute_s: float) -> Ready:
        said = alike.copy()
        said["now_s"], said["worker"], said["compute_s"] = at_s - self._cluster.behind_s, worker, compute_s
        ready: Ready = _new(Ready)  # a third of what the frozen dataclass's constructor takes
        _set(ready, "__dict__", said)
        return ready

    def _begin(self, exchange: Exchange) -> None:
        """Begins the next exchange: the last member has computed."""
        if exchange is not self._exchange:
            return
        cluster, problem = self._cluster, self._cluster.problem
        cluster.progress_s = exchange.last_s
        for at in range(self._heard, len(self._members)):  # on their way yet
            worker, at_s = self._worker[at], self._ready_s[at]
            cluster.bring(worker, self._ready(self._alike, at_s, worker, self._compute_s[at]), at_s)
        self._state = state = problem.step(self._state, exchange.mean)
        iterations = (computed + self._rounds for computed in self._computed)
        self._gradients = problem.gradients(state, self._workers, iterations)
        self._rounds += 1
        following = cluster.open_exchange(
            exchange.group, exchange.exchange_id + 1, exchange.step + 1, exchange.round + 1
        )
        following.begin_with(self._members, self._gradients, exchange.group.weights)
        del cluster.exchanges[exchange.exchange_id]
        if following.step + 1 < cluster.steps:
            self._work_out(following)
            return
        self._exchange = None
        self._skip(self._row)
        self._was_done_s, self._took_s, self._alike_before = self._done_s, self._takes_s, self._alike
        self._catch_up(following)
        following.end_each()
