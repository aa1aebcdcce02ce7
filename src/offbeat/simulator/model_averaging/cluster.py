"""A simulated job whose workers own their models; see `SimulatedCluster` for the simulation itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from offbeat.events import (
    AbortJob,
    Action,
    AssignBlocks,
    AverageModels,
    Block,
    Event,
    Left,
    Lost,
    ModelsAveraged,
    Ready,
)
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.policies import Policy
from offbeat.policies.model_averaging.neighbour_pairs import Topology
from offbeat.simulator.core.times import ComputeTimeSource
from offbeat.simulator.model_averaging.sample_uses import SampleUses
from offbeat.simulator.model_averaging.worker import AveragingWorker, SimulatedAveraging
from offbeat.simulator.training.cluster import SimulatedCluster
from offbeat.simulator.training.replicas import QuadraticProblem, TrainingProblem
from offbeat.simulator.training.setting import SimulationSetting
from offbeat.simulator.training.worker import SimulatedWorker


class SimulatedModelCluster(SimulatedCluster):
    """One simulated run in which workers average models.

    Checked invariants: a worker is in at most one averaging until it has reported the end, and the ids of its
    averagings ascend; members are present, and weights sum to 1 over those with a model; a worker that joins
    has no model, and all others have one; each sample is used once, by a step that was reported; the job is
    stopped only where no worker has a model; and it ends with equal models of all workers. In compressed
    gossip, workers know each other's public copies in each round that continues another.

    Args:
        setting: parameters of the run, with samples.
        policies: builds the coordinator's policies; called again for each restarted coordinator.
        overlap: workers train on while their models are averaged.
        has_epoch_means: all models are averaged at the end of each epoch.
        fragments, delay, outer_optimizer, mixing, topology: see `ModelSimulation`.
        problem: the training problem, whose states are `MomentumState`s.

    Attributes:
        averagings: the members of all averagings, in order.
    """

    def __init__(
        self,
        setting: SimulationSetting,
        policies: Callable[[], Sequence[Policy]],
        *,
        overlap: bool,
        has_epoch_means: bool,
        fragments: int = 1,
        delay: int | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        mixing: float = 0.0,
        topology: Topology | None = None,
        problem: TrainingProblem | None = None,
    ) -> None:
        super().__init__(setting, policies, one_by_one=True)
        self.overlap, self.has_epoch_means = overlap, has_epoch_means
        self.fragments, self.delay, self.mixing, self.topology = fragments, delay, mixing, topology
        self.outer_optimizer = outer_optimizer or OuterOptimizer()
        self.problem = problem or QuadraticProblem(setting.seed)
        self.averagings: list[tuple[int, ...]] = []
        self._last_exchange_id = -1
        self._averaging_of: dict[int, int] = {}  # by member, until it has reported the end
        self._blocks: dict[int, Block] = {}  # assigned and not used, by id
        self._uses = SampleUses()

    @property
    def step(self) -> int:
        """Steps of the worker that has made most."""
        return max(worker.steps_taken for worker in self._workers.values())

    def _make(self, worker: int, stopwatch: ComputeTimeSource, is_new: bool) -> SimulatedWorker:
        return AveragingWorker(self, worker, stopwatch, is_new=is_new)

    def enter_averaging(self, worker: AveragingWorker, averaging: AverageModels) -> None:
        """Enter a worker into an averaging."""
        exchange = self.exchanges.get(averaging.exchange_id)
        if exchange is None:
            exchange = self.exchanges[averaging.exchange_id] = SimulatedAveraging(self, averaging)
        worker.exchange = exchange
        exchange.arrive(worker)

    def handle_event(self, event: Event) -> bool:
        """See `SimulatedCluster.handle_event`."""
        self._note_event(event)
        return super().handle_event(event)

    def _restart_coordinator(self, _: Any) -> None:
        """See `SimulatedCluster`: what the killed coordinator has not logged did not happen."""
        self._uses, self._blocks = SampleUses(), {}
        self._averaging_of.clear()
        for event, actions in self.log:
            self._note_event(event)
            for action in actions:
                self._note_action(action)
        super()._restart_coordinator(_)

    def _note_event(self, event: Event) -> None:
        match event:
            case Ready():
                for block_id in event.blocks:
                    self._note_use(event.worker, block_id)
            case ModelsAveraged() | Lost() | Left():
                self._averaging_of.pop(event.worker, None)

    def _note_use(self, worker: int, block_id: int) -> None:
        block = self._blocks.pop(block_id, None)
        if block is None:
            self.fail_invariant(f"worker {worker} uses block {block_id}, which is used or was not assigned")
        again = self._uses.add(block)
        if again is not None:
            self.fail_invariant(f"worker {worker} uses a sample again: {(block.epoch, again)}")

    def _note_action(self, action: Action) -> None:
        match action:
            case AssignBlocks():
                for block in action.blocks:
                    self._blocks[block.id] = block
            case AverageModels():
                self._averaging_of.update(dict.fromkeys(action.members, action.exchange_id))

    def _check_action(self, action: Action) -> None:
        match action:
            case AssignBlocks():
                pass
            case AverageModels():
                self._check_averaging(action)
                self.averagings.append(action.members)
                self._last_exchange_id = action.exchange_id
            case _:
                super()._check_action(action)
        self._note_action(action)

    def _check_averaging(self, averaging: AverageModels) -> None:
        members, named = averaging.members, f"averaging {averaging.exchange_id}"
        if tuple(sorted(set(members))) != members or not set(members) <= self.coordinator.joined:
            self.fail_invariant(f"{named} has the members {members}, of {sorted(self.coordinator.joined)}")
        if averaging.exchange_id <= self._last_exchange_id:
            self.fail_invariant(f"{named} follows {self._last_exchange_id}")
        busy = self._averaging_of.keys() & set(members)
        if busy:
            self.fail_invariant(f"{named} has members that are in another one: {sorted(busy)}")
        weights = dict(zip(members, averaging.weights, strict=True))
        own = [weights[member] for member in members if member not in averaging.joining]
        if not own or abs(sum(own) - 1) > 1e-9 or any(weights[member] for member in averaging.joining):
            self.fail_invariant(f"{named} has the weights {averaging.weights}, joining {averaging.joining}")
        if averaging.keeps_own_share and (averaging.includes_buffers or averaging.joining):
            self.fail_invariant(
                f"{named} leaves its members with different models, and was to make them equal"
            )

    def _check_stop(self, stop: AbortJob) -> None:
        for worker in sorted(self.coordinator.joined):
            simulated = cast(AveragingWorker, self._workers[worker])
            if simulated.is_alive and not simulated.is_leaving and simulated.model is not None:
                self.fail_invariant(f"the job was stopped though worker {worker} has a model: {stop.reason}")

    def _check_end(self) -> None:
        assert self.setting.samples is not None
        if self.stopped is not None:
            return
        workers = [cast(AveragingWorker, worker) for worker in self._workers.values()]
        if not self.is_job_complete:
            alive = [f"{worker.worker} {worker.activity}" for worker in workers if worker.is_alive]
            if alive:
                self.fail_invariant(f"the job does not end: {', '.join(alive)}")
            return
        epochs, samples = self.setting.samples.epochs, self.setting.samples.epoch_samples
        if epochs is not None and self._uses.count != epochs * samples:
            self.fail_invariant(f"{self._uses.count} samples were used in {epochs} epochs of {samples}")
        final = [worker for worker in workers if worker.has_left and not worker.is_leaving]
        for worker in final:
            assert worker.model is not None
            assert final[0].model is not None
            if not np.array_equal(worker.model.parameters, final[0].model.parameters):
                self.fail_invariant(
                    f"workers {final[0].worker} and {worker.worker} ended with different models"
                )
