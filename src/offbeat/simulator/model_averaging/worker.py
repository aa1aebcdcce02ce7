"""A simulated worker that owns its model: a model of the runtime in virtual time.

It uses the same `ModelAveragingProtocol` as the runtime. Nothing here decides which workers average. See
`offbeat.runtime.model_averaging.synchronizer` for the original of this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from offbeat.events import (
    AbortJob,
    Action,
    AssignBlocks,
    AverageModels,
    CancelAveraging,
    EpochEnded,
    JobComplete,
    OuterStep,
    PeerList,
    RejectPeer,
)
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.policies.model_averaging.neighbour_pairs import Topology
from offbeat.policies.model_averaging.protocol import ModelAveragingProtocol
from offbeat.policies.model_averaging.weights import mean_share
from offbeat.simulator.core.times import ComputeTimeSource
from offbeat.simulator.model_averaging.gossip import SimulatedCopies
from offbeat.simulator.training.exchange import BlockableExchange
from offbeat.simulator.training.interface import Simulation
from offbeat.simulator.training.replicas import MomentumState
from offbeat.simulator.training.sample_loop import SimulatedLoop
from offbeat.simulator.training.worker import (
    COMPUTING,
    ENDED,
    EXCHANGING,
    FINISHED,
    JOINING,
    LEAVING,
    REQUESTING,
    WAITING,
    SimulatedWorker,
)

_EPOCH_ENDED: Final = "waiting for the mean after an epoch"


class ModelSimulation(Simulation, Protocol):
    """A simulated run, as far as a worker that owns its model needs it.

    Attributes:
        overlap: workers train on while their models are averaged.
        has_epoch_means: all models are averaged at the end of each epoch.
        fragments: parts of the parameters that the outer optimizer steps by themselves.
        delay: with `overlap`, steps from a snapshot until a worker takes the mean; None for when it is there.
        outer_optimizer: of workers that make local steps.
        mixing: the share of its own model that a worker keeps.
        topology: in compressed gossip, which workers are neighbours; None where groups average.
    """

    overlap: bool
    has_epoch_means: bool
    fragments: int
    delay: int | None
    outer_optimizer: OuterOptimizer
    mixing: float
    topology: Topology | None

    def enter_averaging(self, worker: AveragingWorker, averaging: AverageModels) -> None:
        """Enter a worker into an averaging."""


class AveragingWorker(SimulatedWorker):
    """One worker with a model of its own.

    Attributes:
        model: its state, None before it has received one; the velocity stays its own.
        snapshot: with overlap, its parameters at the end of the last step that ended in no averaging; None
            before the first.
        copies: in compressed gossip, its public copies.
    """

    cluster: ModelSimulation

    def __init__(
        self, cluster: ModelSimulation, worker: int, stopwatch: ComputeTimeSource, *, is_new: bool
    ) -> None:
        super().__init__(cluster, worker, stopwatch, is_new=is_new)
        self.protocol = self.averaging_protocol = ModelAveragingProtocol(worker)
        assert cluster.setting.samples is not None
        self.loop = SimulatedLoop(
            cluster.setting.samples,
            self.protocol.block_queue,
            self,
            self._send_request,
            has_epoch_ends=cluster.has_epoch_means,
        )
        self._activity_before = JOINING  # before the averaging under way
        self.snapshot: Any = None
        self._snapshot_steps = 0  # made before the snapshot or, where it waits, before the averaging
        # With overlap, the averaging that has ended, until its mean is added at the end of the step:
        self._ended: SimulatedAveraging | None = None
        self._has_given_up = False
        self.copies = None if cluster.topology is None else SimulatedCopies(worker, cluster.topology)
        self.outer_state: list[Any] = []  # anchor and buffers of the outer optimizer
        self.model: MomentumState | None = None if is_new or worker else cluster.problem.initial_state()
        if self.model is not None:
            self._begin_outer_state()

    @property
    def has_difference(self) -> bool:
        """Whether it has yet to add what an averaging has yielded."""
        return self._ended is not None

    @property
    def contribution(self) -> Any:
        """Its parameters in the averaging under way."""
        assert self.model is not None
        return self.model.parameters if self.snapshot is None else self.snapshot

    @property
    def round(self) -> int:
        """Averagings that it has ended, for its `SimulatedLoop`."""
        return self.averaging_protocol.round

    @property
    def is_member(self) -> bool:
        """Whether its samples count, for its `SimulatedLoop`: always."""
        return True

    def _apply_action(self, action: Action) -> None:
        match action:
            case AssignBlocks() | AverageModels() | CancelAveraging():  # first, as most actions are these
                if self.activity != LEAVING:  # it takes part in nothing any more
                    self._apply_to_protocol(action)
            case PeerList():
                self.has_started = True
            case JobComplete():
                self._send_left()
            case AbortJob() | RejectPeer():
                self.end()
            case _:
                self.answer(action)

    def _apply_to_protocol(self, action: Action) -> None:
        """See `SimulatedWorker`."""
        self.answer(action)
        match action:
            case AverageModels():
                self._open_sessions_with(action.members)
                if self.cluster.overlap and not action.makes_wait(self.worker):
                    self.cluster.enter_averaging(self, action)
                elif self.activity != COMPUTING and self.activity != REQUESTING:
                    self._take_part(action)
            case CancelAveraging() if self.averaging_protocol.is_cancelled:
                self._give_up()

    def _take_part(self, averaging: AverageModels) -> None:
        """Take part in an averaging, unless it is cancelled already, and wait for its end."""
        self._activity_before = self.activity
        self.activity = EXCHANGING
        if self.model is not None:
            self._take_snapshot()
        if self.averaging_protocol.is_cancelled:
            self._end_averaging(has_mean=False)
        else:
            self.cluster.enter_averaging(self, averaging)

    def _finish(self, epoch: int) -> None:
        """See `SimulatedWorker`: what an averaging yields is added at once from now on."""
        super()._finish(epoch)
        averaging = self.averaging_protocol.averaging
        if self._ended is not None or self._has_given_up:
            self._end_overlapped()
        elif averaging is not None and self.exchange is None:
            self._take_part(averaging)

    def _send_left(self) -> None:
        """See `SimulatedWorker`: the averaging under way ends without this worker."""
        if self.exchange is not None:
            self.exchange.block(self)
        self.exchange = self._ended = None
        super()._send_left()

    def _open_sessions_with(self, members: tuple[int, ...]) -> None:
        if members not in self.session_groups:
            self.session_groups.add(members)
            self.cluster.on_new_sessions()

    def _take_snapshot(self) -> None:
        assert self.model is not None
        self.snapshot, self._snapshot_steps = self.model.parameters, self.steps_taken

    def _give_up(self) -> None:
        if self.exchange is None:
            return
        self.exchange = None
        if self._trains_on:
            self._has_given_up = True
        else:
            self._end_averaging(has_mean=False)

    @property
    def _trains_on(self) -> bool:
        """Whether the end of a step follows, at which it adds what an averaging has yielded."""
        return self.cluster.overlap and self.activity in (COMPUTING, REQUESTING)

    def on_average(self, averaging: SimulatedAveraging) -> None:
        """Receive the mean or, in a worker that joins, a state."""
        if self.is_hung:
            self._queue.append((True, self.on_average, averaging))
            return
        if self.exchange is not averaging:
            return
        self.exchange = None
        if self._trains_on:
            self._ended = averaging
            return
        has_joined = self.model is None
        if has_joined:
            self.model = averaging.donor_model
            self.sample_loop.enter_epoch(averaging.epoch)
        self._add_difference(averaging)
        if has_joined:
            self._begin_outer_state()
        self._end_averaging(has_mean=True)

    def _begin_outer_state(self) -> None:
        assert self.model is not None
        parameters = self.model.parameters
        buffers = [np.zeros_like(parameters) for _ in range(self.cluster.outer_optimizer.buffers)]
        self.outer_state = [parameters.copy(), *buffers]

    def _add_difference(self, averaging: SimulatedAveraging) -> None:
        """Add the worker's share of what an averaging has yielded, less the snapshot in it, to the model."""
        assert self.model is not None
        if self.copies is not None and averaging.codes and self.worker in averaging.codes:
            moved = self.model.parameters + self.copies.renew(averaging.averaging, averaging.codes)
            self.model = MomentumState(moved, self.model.velocity)
            return
        parameters, new, before, part = self.model.parameters, averaging.mean, self.snapshot, None
        step = averaging.averaging.outer_step
        if step is not None and self.worker in averaging.averaging.group:
            part = fragment_of(step, self.cluster.fragments, len(parameters))
            new, before = self._step_anchor(averaging, step, part)
        share = mean_share(averaging.averaging, self.worker)
        is_new = step is not None and self.worker in step.behind
        if not is_new and not averaging.averaging.includes_buffers:
            share *= 1.0 - self.cluster.mixing
        is_replaced = before is None or (parameters is before and share == 1)
        changed = new if is_replaced else parameters + share * (new - before)
        if part is not None:
            changed, all_changed = parameters.copy(), changed
            changed[part] = all_changed[part]
        self.model = MomentumState(changed, self.model.velocity)
        if averaging.averaging.includes_buffers and self.outer_state:
            self.outer_state[0] = averaging.mean.copy()

    def _step_anchor(self, averaging: SimulatedAveraging, step: OuterStep, part: slice) -> tuple[Any, Any]:
        """Step the part of the anchor; return the anchor, and what the model moves from."""
        before = self.snapshot
        if self.worker in step.behind:
            before = self.outer_state[0].copy()
            for flat, received in zip(self.outer_state, averaging.donor_outer_state, strict=True):
                flat[part] = received[part]
        anchor, *buffers = (flat[part] for flat in self.outer_state)
        gradient = anchor - averaging.mean[part]
        stepped = self.cluster.outer_optimizer.step(anchor, gradient, tuple(buffers), step.number)
        for flat, values in zip(self.outer_state, stepped, strict=True):
            flat[part] = values
        averaging.check_anchor(self, self.outer_state[0][part])
        return self.outer_state[0], before

    @property
    def sample_loop(self) -> SimulatedLoop:
        """Its loop."""
        assert self.loop is not None
        return self.loop

    def _end_averaging(self, *, has_mean: bool) -> None:
        averaging = self.averaging_protocol.averaging
        is_common = averaging is not None and averaging.includes_buffers
        self._report_end(has_mean=has_mean)
        if self.model is None:
            self.activity = JOINING
        elif self.activity == FINISHED or self._activity_before == FINISHED:
            self.activity = FINISHED
        elif self.is_leaving:
            self._send_left()
        elif _EPOCH_ENDED in (self.activity, self._activity_before) and not (has_mean and is_common):
            self.activity = _EPOCH_ENDED
        else:
            self._compute()

    def _wait_for_epoch_mean(self, epoch: int) -> None:
        """See `SimulatedWorker`."""
        self.activity = _EPOCH_ENDED
        self._end_overlapped()
        self._send_epoch_ended(epoch, is_complete=True)
        if self.averaging_protocol.averaging is not None and self.exchange is None:
            self._take_part(self.averaging_protocol.averaging)

    def _send_epoch_ended(self, epoch: int, *, is_complete: bool) -> None:
        now_s = self.cluster.arrival_s(self.worker)
        self.cluster.send_event(
            self.worker, EpochEnded(now_s=now_s, worker=self.worker, epoch=epoch, is_complete=is_complete)
        )

    def _report_end(self, *, has_mean: bool) -> None:
        event = self.averaging_protocol.finish(
            model_steps=self._snapshot_steps, has_mean=has_mean, now_s=self.cluster.arrival_s(self.worker)
        )
        self.cluster.send_event(self.worker, event)

    def _send_ready(self) -> None:
        """Make the step with its own model, report it, and wait for an averaging, or train on."""
        cluster, loop, protocol = self.cluster, self.sample_loop, self.averaging_protocol
        assert self.model is not None
        gradient = cluster.problem.gradient(self.model, self.worker, self.gradients_computed - 1)
        self.model = cluster.problem.step(self.model, gradient)
        if cluster.delay is None:
            self._end_overlapped()
        keeps_snapshot = cluster.delay is not None and protocol.is_ready
        protocol.count_step()
        self.steps_taken += 1
        is_ready = protocol.is_ready
        if cluster.overlap and is_ready and not keeps_snapshot:
            self._take_snapshot()
        cluster.progress_s = self.active_s = cluster.engine.now_s
        samples = sum([block.samples for block in loop.blocks])
        compute_s, epoch, blocks = self._compute_s, loop.epoch, loop.contribute()
        self._compute_s = 0.0
        loop.end_round()
        self.activity = WAITING
        cluster.send_ready(
            self.worker, 0, epoch, self.steps_taken - 1, self.round, compute_s, samples, blocks
        )
        if cluster.has_epoch_means and loop.epoch != epoch:
            self._send_epoch_ended(epoch, is_complete=False)
        if not cluster.overlap and is_ready:
            return
        if self.is_leaving:
            self._send_left()
            return
        if self._is_due:
            self._end_overlapped()
            if protocol.is_ready or self.exchange is not None:
                self._activity_before = WAITING
                return
        averaging, has_ended = protocol.averaging, self.has_difference or self._has_given_up
        if averaging is not None and self.exchange is None and not has_ended:
            self._take_part(averaging)  # in which it has to wait
        else:
            self._compute()

    @property
    def _is_due(self) -> bool:
        """Whether it takes the mean of its snapshot now, or waits for it."""
        delay = self.cluster.delay
        return delay is not None and self.steps_taken >= self._snapshot_steps + delay

    def _end_overlapped(self) -> None:
        """At the end of a step, add what the averaging under way has yielded."""
        if self._ended is not None:
            self._add_difference(self._ended)
            self._report_end(has_mean=True)
        elif self._has_given_up:
            self._report_end(has_mean=False)
        self._ended, self._has_given_up = None, False


class SimulatedAveraging(BlockableExchange):
    """An averaging of models, and the transfer of the state to members that join.

    Args:
        cluster: the run.
        averaging: the action that names it.

    Attributes:
        mean: the parameters of every member; None before all have arrived.
        donor_model: the state that joining members receive.
        epoch: of the worker that sends it.
        donor_outer_state: anchor and buffers before the outer step, for members that are behind.
        codes: in a round of compressed gossip, what each worker of the group has sent.
    """

    def __init__(self, cluster: Simulation, averaging: AverageModels) -> None:
        super().__init__(cluster, averaging.members, averaging.exchange_id)
        self.averaging = averaging
        self.mean: Any = None
        self.donor_model: MomentumState | None = None
        self.epoch = 0
        self.donor_outer_state: list[Any] = []
        self.codes: dict[int, Any] = {}
        self._anchor: Any = None  # the part of it that a member has stepped

    def check_anchor(self, worker: SimulatedWorker, anchor: Any) -> None:
        """Check that the outer step of a member yields the same anchor as that of all others."""
        if self._anchor is None:
            self._anchor = anchor.copy()
        if not np.array_equal(anchor, self._anchor):
            self._cluster.fail_invariant(
                f"worker {worker.worker} has another anchor than others after averaging {self.exchange_id}"
            )

    def check_member(self, worker: SimulatedWorker) -> None:
        """See `BlockableExchange.check_member`."""
        assert isinstance(worker, AveragingWorker)
        if worker.has_difference:
            self._cluster.fail_invariant(
                f"worker {worker.worker} enters averaging {self.exchange_id} before it has added the last "
                "difference"
            )
        is_joining = worker.worker in self.averaging.joining
        averaging = worker.averaging_protocol.averaging
        is_another = averaging is not self.averaging and averaging != self.averaging
        if is_another or (worker.model is None) != is_joining:
            self._cluster.fail_invariant(
                f"worker {worker.worker} enters averaging {self.exchange_id}, which it is not to be in so"
            )

    def combine(self) -> None:
        """See `BlockableExchange.combine`."""
        weights = dict(zip(self.averaging.members, self.averaging.weights, strict=True))
        group = [worker for worker in _own_models(self._workers) if worker.model is not None]
        self.mean = sum([weights[worker.worker] * worker.contribution for worker in group])
        if (step := self.averaging.outer_step) is not None:
            donor = next(worker for worker in group if worker.worker not in step.behind)
            self.donor_outer_state = [flat.copy() for flat in donor.outer_state]
        if len(group) > 1 and not self.averaging.includes_buffers:
            self._encode({worker.worker: worker for worker in group})
        self.donor_model, self.epoch = group[0].model, group[0].sample_loop.epoch
        self.draw_ends()

    def _encode(self, group: dict[int, AveragingWorker]) -> None:
        """In compressed gossip, note what each worker sends; check its public copies."""
        copies = {number: worker.copies for number, worker in group.items() if worker.copies is not None}
        if self.averaging.continues:
            self._check_copies(copies)
        for number, own in copies.items():
            self.codes[number] = own.code(self.averaging, group[number].contribution)

    def _check_copies(self, copies: dict[int, SimulatedCopies]) -> None:
        named = f"gossip {self.exchange_id}"
        rounds = {own.round_id for own in copies.values()}
        if len(rounds) > 1:
            self._cluster.fail_invariant(f"{named} continues different rounds: {sorted(map(str, rounds))}")
        for number, own in copies.items():
            weights = own.weights(self.averaging)
            known = sum([weight * copies[worker].copy for worker, weight in weights.items()])
            if np.abs(known - own.weighted_sum).max() > 1e-9:
                self._cluster.fail_invariant(f"{named}: worker {number} has other copies than its neighbours")

    def deliver(self, worker: SimulatedWorker) -> None:
        """See `BlockableExchange.deliver`."""
        assert isinstance(worker, AveragingWorker)
        if worker.activity != ENDED:
            worker.on_average(self)


def _own_models(workers: Sequence[SimulatedWorker]) -> list[AveragingWorker]:
    return [worker for worker in workers if isinstance(worker, AveragingWorker)]


def fragment_of(step: OuterStep, fragments: int, parameters: int) -> slice:
    """Return the part of the parameters that is stepped."""
    return slice(parameters * step.fragment // fragments, parameters * (step.fragment + 1) // fragments)
