"""A vectorized group: the members' rounds computed together while nothing goes wrong.

This is no second model of a worker. It computes the outcome of an undisturbed round; as soon as anything else
happens, the members replay the round under way, each through its own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from offbeat.events import Group, Ready
from offbeat.simulator.core.engine import Engine
from offbeat.simulator.core.times import ComputeTimeSource
from offbeat.simulator.training.exchange import SimulatedExchange
from offbeat.simulator.training.interface import Simulation
from offbeat.simulator.training.worker import SimulatedWorker

_ROUNDS_AHEAD = 64  # compute times drawn at a time
_new, _set = object.__new__, object.__setattr__


class VectorizedGroup:
    """Workers that exchange, apply and compute in step, reduced to the times at which they are Ready.

    Between two exchanges a member does nothing that depends on another one, and sends nothing but its Ready.
    So a round is computed when its exchange begins: when members get the mean, when each has computed, and in
    which order their Readys arrive; the coordinator processes each Ready as usual. The member objects stay as
    they were when the group was formed. `dissolve` brings them up to date: it restores their state at the
    beginning of the last exchange and runs their own code from there up to now.

    The run is the same with and without a vectorized group: same times, same random numbers, same actions
    (`test_simulator.py::test_a_vectorized_group_acts_as_its_members_would`). Only among messages that
    arrive at the very same time the order may differ: a member's Ready may follow one that it would have
    preceded.

    Args:
        cluster: the run.
        open_exchange: makes the exchange of a group with this id, step and round.
    """

    def __init__(
        self, cluster: Simulation, open_exchange: Callable[[Group, int, int, int], SimulatedExchange]
    ) -> None:
        self._cluster, self._open_exchange = cluster, open_exchange
        self._exchange: SimulatedExchange | None = None  # the last that has begun; None at first
        self._members: list[SimulatedWorker] = []
        self._ids = np.zeros(0, np.int64)
        self._workers: list[int] = []  # the members' ids
        self._id_set: frozenset[int] = frozenset()
        self._computed: list[int] = []  # gradients each had computed when the group was formed
        self._rounds = 0  # rounds since the group was formed
        self._slowed: list[tuple[int, ComputeTimeSource]] = []  # members with slowdown rules, by index
        self._ahead_s = np.zeros((0, 0))  # compute times, shape (rounds, members)
        self._row = 0
        self._state: Any = None
        self._gradients: list[Any] = []
        # Each member's computation before the exchange under way, and the one after it: end and duration.
        self._was_done_s = self._took_s = np.zeros(0)
        self._done_s = self._takes_s = np.zeros(0)
        # The Readys of the round in the order of their arrival.
        self._ready_s: list[float] = []
        self._ready_workers: list[int] = []
        self._compute_s: list[float] = []
        self._emitted = 0  # Readys of the round that the coordinator has processed
        self._fields: dict[str, Any] = {}  # fields that are equal in all Readys of the round
        self._fields_before: dict[str, Any] = {}

    def __contains__(self, worker: int) -> bool:
        return self._exchange is not None and worker in self._id_set

    @property
    def is_formed(self) -> bool:
        """Whether it computes rounds now."""
        return self._exchange is not None

    @property
    def step(self) -> int:
        """Steps that all its members have finished; 0 without a vectorized group."""
        return 0 if self._exchange is None else self._exchange.step

    def form(self, exchange: SimulatedExchange) -> bool:
        """Form a vectorized group of this exchange's members if possible; return whether it was."""
        members = exchange.workers
        if not self._cluster.is_undisturbed or not all(member.can_vectorize(exchange) for member in members):
            return False
        self.dissolve()  # the vectorized group of an earlier one, if any
        self._members = members
        self._workers = [member.worker for member in members]
        self._ids, self._id_set = np.array(self._workers), frozenset(self._workers)
        self._computed = [member.gradients_computed for member in members]
        self._rounds = 0
        self._slowed = [
            (index, member.stopwatch)
            for index, member in enumerate(members)
            if not member.stopwatch.is_never_slowed
        ]
        self._draw_ahead()
        self._state = members[0].state
        self._plan_round(exchange)
        return True

    def dissolve(self) -> None:
        """Bring every member up to date; from now on each is simulated individually."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        self._skip(self._row - 1)  # each member draws the time of the current round itself
        self._restore_members(exchange)
        cluster = self._cluster
        now, past = cluster.engine, Engine(exchange.begin_s)
        cluster.engine, cluster.received_early = past, frozenset(self._ready_workers[: self._emitted])
        exchange.schedule_ends()
        past.run(math.nextafter(now.now_s, 0.0))
        cluster.engine, cluster.received_early = now, frozenset()
        for at_s, call, argument in past.pending_calls():
            now.schedule(at_s, call, argument)

    def _restore_members(self, exchange: SimulatedExchange) -> None:
        """Restore the members' state at the beginning of this exchange."""
        if not self._rounds:
            return  # it is their state already
        latency_s = self._cluster.network.latency_s
        for index, member in enumerate(self._members):
            done_s = float(self._was_done_s[index])
            member.fast_forward(
                exchange,
                rounds=self._rounds,
                state=self._state,
                gradient=self._gradients[index],
                done_s=done_s,
                ready=self._ready(
                    self._fields_before, done_s + latency_s, member.worker, float(self._took_s[index])
                ),
            )

    def _draw_ahead(self) -> None:
        rows_s = [member.stopwatch.peek_s(_ROUNDS_AHEAD) for member in self._members]
        self._ahead_s, self._row = np.ascontiguousarray(np.transpose(rows_s)), 0

    def _skip(self, count: int) -> None:
        for member in self._members:
            member.stopwatch.skip(count)

    def _plan_round(self, exchange: SimulatedExchange) -> None:
        """Compute everything up to the next exchange, and schedule it."""
        cluster, members = self._cluster, self._members
        self._exchange = exchange
        self._was_done_s, self._took_s, self._fields_before = self._done_s, self._takes_s, self._fields
        step = exchange.step + 1
        epoch_steps = cluster.setting.epoch_steps
        epoch, step_in_epoch = divmod(step, epoch_steps)
        if self._row == _ROUNDS_AHEAD:
            self._skip(_ROUNDS_AHEAD)
            self._draw_ahead()
        self._takes_s = self._ahead_s[self._row]
        self._row += 1
        for index, stopwatch in self._slowed:
            self._takes_s[index] *= stopwatch.slowdown(
                epoch, step_in_epoch, cluster.setting.epoch_steps, step
            )
        self._done_s = exchange.member_ends_s + self._takes_s
        # Among members that are done at the same time, the one that got the mean first comes first.
        order = np.argsort(np.roll(self._done_s, -exchange.first_member), kind="stable")
        order = (order + exchange.first_member) % len(members)
        self._ready_s = (self._done_s[order] + cluster.network.latency_s).tolist()
        self._ready_workers = self._ids[order].tolist()
        self._compute_s = self._takes_s[order].tolist()
        self._emitted = 0
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
        self._fields = vars(ready)
        cluster.engine.schedule(self._ready_s[0], self._emit_readys, exchange)
        cluster.engine.schedule(float(self._done_s[order[-1]]), self._begin_next, exchange)

    def _emit_readys(self, exchange: SimulatedExchange) -> None:
        """Pass the Readys to the coordinator one by one, until another call is due."""
        if exchange is not self._exchange:
            return
        cluster, engine, fields = self._cluster, self._cluster.engine, self._fields
        ready_s, workers, compute_s = self._ready_s, self._ready_workers, self._compute_s
        at, count = self._emitted, len(workers)
        free_until_s = engine.next_call_s
        while True:
            engine.now_s = at_s = ready_s[at]
            ready = self._ready(fields, at_s, workers[at], compute_s[at])
            self._emitted = at = at + 1
            if cluster.handle_event(ready):
                if self._exchange is not exchange:
                    return
                free_until_s = engine.next_call_s
            if at == count:
                return
            if ready_s[at] >= free_until_s:
                engine.schedule(ready_s[at], self._emit_readys, exchange)
                return

    def _ready(self, fields: dict[str, Any], at_s: float, worker: int, compute_s: float) -> Ready:
        own = fields.copy()
        own["now_s"], own["worker"], own["compute_s"] = at_s - self._cluster.clock_lag_s, worker, compute_s
        ready: Ready = _new(Ready)  # three times as fast as the frozen dataclass's constructor
        _set(ready, "__dict__", own)
        return ready

    def _begin_next(self, exchange: SimulatedExchange) -> None:
        """Begin the next exchange, after the last member has computed."""
        if exchange is not self._exchange:
            return
        cluster, problem = self._cluster, self._cluster.problem
        cluster.progress_s = exchange.all_ended_s
        for at in range(self._emitted, len(self._members)):  # those still on their way
            worker, at_s = self._ready_workers[at], self._ready_s[at]
            cluster.schedule_arrival(
                worker, self._ready(self._fields, at_s, worker, self._compute_s[at]), at_s
            )
        self._state = state = problem.step(self._state, exchange.mean)
        iterations = (computed + self._rounds for computed in self._computed)
        self._gradients = problem.gradients(state, self._workers, iterations)
        self._rounds += 1
        following = self._open_exchange(
            exchange.group, exchange.exchange_id + 1, exchange.step + 1, exchange.round + 1
        )
        following.average(self._members, self._gradients, exchange.group.weights)
        cluster.close_exchange(exchange.exchange_id)
        if following.step + 1 < cluster.setting.steps_max:
            self._plan_round(following)
            return
        self._exchange = None
        self._skip(self._row)
        self._was_done_s, self._took_s, self._fields_before = self._done_s, self._takes_s, self._fields
        self._restore_members(following)
        following.schedule_ends()
