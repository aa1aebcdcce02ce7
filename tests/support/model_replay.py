"""Models of workers that average them, computed again from the run log and the workers' own updates.

Each averaging is a matrix: its row of a member that has received the mean holds the members' weights, all
other rows are those of the identity. After some, each member makes a step of the default `OuterOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from offbeat.events import AssignBlocks, AverageModels, Block, ModelsAveraged, Ready
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.strategies import Choco
from support.gossip_replay import GossipReplay


def mixing_matrix(
    members: Sequence[int], weights: Sequence[float], receivers: Iterable[int], workers: int
) -> Any:
    """The matrix of an averaging, shape (workers, workers).

    Args:
        receivers: members that have received the mean.
    """
    matrix = np.eye(workers)
    for receiver in receivers:
        matrix[receiver] = 0.0
        matrix[receiver, list(members)] = weights
    return matrix


def matrices_of(entries: Sequence[Any], workers: int) -> list[Any]:
    """The matrices of all averagings of workers that all have a model, in the order of the log.

    Averagings with common members are in the order in which these were in them.
    """
    receivers: dict[int, list[int]] = {}
    for entry in entries:
        if isinstance(entry, ModelsAveraged) and entry.has_mean:
            receivers.setdefault(entry.exchange_id, []).append(entry.worker)
    return [
        mixing_matrix(entry.members, entry.weights, receivers.get(entry.exchange_id, ()), workers)
        for entry in entries
        if isinstance(entry, AverageModels) and not entry.joining
    ]


class ModelReplay:
    """Replays the models of all workers, each worker's events in its own order.

    A worker's model changes by its own update where it reports a step (`Ready`). Where it reports the end of
    an averaging with the mean, the mean less its contribution is added: that is its model after
    `ModelsAveraged.model_steps` steps or, where all models are averaged, its model as it is.

    Args:
        entries: of the run log.
        starts: by worker, the model that it had when it began to train, where that is not what it received.
        updates: by worker, what it added to its model in each step.
        steps_of_lost: by exchange and worker, the steps that its model had made; for workers that were lost
            before they reported them.
        strategy: of the job.
        shapes: of the tensors of a model.

    Attributes:
        models: by worker, its model at the end.
        after_step: by worker and step, its model after it has reported the step, and after each averaging
            that it has reported before the next one: it may have waited for that.
    """

    def __init__(
        self,
        entries: Sequence[Any],
        starts: Mapping[int, Any],
        updates: Mapping[int, Sequence[Any]],
        steps_of_lost: Mapping[tuple[int, int], int],
        strategy: Any,
        shapes: Sequence[torch.Size],
    ) -> None:
        self._starts, self._updates, self._optimizer = starts, updates, OuterOptimizer()
        self.models: dict[int, Any] = {}
        self.after_step: dict[tuple[int, int], list[Any]] = {}
        self._step_of: dict[int, int] = {}  # by worker, the last that it has reported
        self._outer: dict[int, list[Any]] = {}  # by worker, anchor and buffers
        self._outer_before: dict[int, list[Any]] = {}  # by exchange, those of members that are not behind
        self._begin(0, starts[0])
        self._averagings = {one.exchange_id: one for one in entries if isinstance(one, AverageModels)}
        self._events: dict[int, list[Any]] = {}
        for entry in entries:
            if isinstance(entry, Ready | ModelsAveraged):
                self._events.setdefault(entry.worker, []).append(entry)
        self._snapshots: dict[tuple[int, int], Any] = {(0, 0): starts[0]}  # worker, steps
        self._after: dict[tuple[int, int], Any] = {}  # exchange, worker
        self._contributions: dict[tuple[int, int], Any] = {}  # exchange, worker
        self._steps_of = dict(steps_of_lost) | {
            (event.exchange_id, event.worker): event.model_steps
            for events in self._events.values()
            for event in events
            if isinstance(event, ModelsAveraged)
        }
        self._gossip = None
        if isinstance(strategy, Choco):
            self._gossip = GossipReplay(entries, strategy, shapes, self._contribution)
        while any(self._advance(worker) for worker in self._events):
            pass
        left = {worker: events[0] for worker, events in self._events.items() if events}
        assert not left, f"these ends of averagings need contributions that the log does not hold: {left}"

    def _begin(self, worker: int, model: Any) -> None:
        self.models[worker] = model
        self._outer[worker] = [model, *[np.zeros_like(model)] * self._optimizer.buffers]

    def _advance(self, worker: int) -> bool:
        """Replay what can be replayed of a worker's events; return whether anything was."""
        events, has_advanced = self._events[worker], False
        while events and self._replay(worker, events[0]):
            event = events.pop(0)
            if isinstance(event, Ready):
                self._step_of[worker] = event.step
            if worker in self._step_of:
                states = self.after_step.setdefault((worker, self._step_of[worker]), [])
                states.append(self.models[worker])
            has_advanced = True
        return has_advanced

    def _replay(self, worker: int, event: Ready | ModelsAveraged) -> bool:
        if isinstance(event, Ready):
            self.models[worker] = self.models[worker] + self._updates[worker][event.step]
            self._snapshots[worker, event.step + 1] = self.models[worker]
            return True
        averaging = self._averagings[event.exchange_id]
        self._note_contribution(worker, averaging)
        if not event.has_mean:
            return True
        if worker in averaging.joining:
            received = self._after.get((averaging.exchange_id, averaging.group[0]))
            if received is None:
                return False
            self._begin(worker, self._starts.get(worker, received))
            return True
        if any(self._contribution(other, averaging) is None for other in averaging.group):
            return False
        if self._gossip is not None and not averaging.includes_buffers and len(averaging.group) > 1:
            correction = self._gossip.correction(worker, averaging)
            if correction is None:
                return False
            self.models[worker] = self.models[worker] + correction
            self._after[averaging.exchange_id, worker] = self.models[worker]
            return True
        weights = dict(zip(averaging.members, averaging.weights, strict=True))
        mean = sum(weights[other] * self._contribution(other, averaging) for other in averaging.group)
        if averaging.outer_step is not None:
            return self._step_outer(worker, averaging, mean)
        if averaging.includes_buffers:
            self._outer[worker] = [mean, *self._outer[worker][1:]]
        if len(averaging.group) > 1:
            self.models[worker] = self.models[worker] + (mean - self._contribution(worker, averaging))
        self._after[averaging.exchange_id, worker] = self.models[worker]
        return True

    def _step_outer(self, worker: int, averaging: AverageModels, mean: Any) -> bool:
        """Step a worker's anchor, and move its model; return whether that is possible yet."""
        step = averaging.outer_step
        assert step is not None
        before, state = self._contribution(worker, averaging), self._outer[worker]
        if worker in step.behind:
            root = next(other for other in averaging.group if other not in step.behind)
            received = self._outer_before.get(averaging.exchange_id)
            if received is None and self._events.get(root):
                return False
            before, state = state[0], self._outer[root] if received is None else received
        anchor, *buffers = self._optimizer.step(state[0], state[0] - mean, tuple(state[1:]), step.number)
        self._outer[worker] = [anchor, *buffers]
        self.models[worker] = self.models[worker] + (anchor - before)
        self._after[averaging.exchange_id, worker] = self.models[worker]
        return True

    def _note_contribution(self, worker: int, averaging: AverageModels) -> None:
        step = averaging.outer_step
        if step is not None and worker in averaging.group and worker not in step.behind:
            self._outer_before.setdefault(averaging.exchange_id, self._outer[worker])
        if worker in averaging.group and (averaging.includes_buffers or len(averaging.group) == 1):
            self._contributions.setdefault((averaging.exchange_id, worker), self.models[worker])

    def _contribution(self, worker: int, averaging: AverageModels) -> Any:
        key = averaging.exchange_id, worker
        if key in self._contributions:
            return self._contributions[key]
        if averaging.includes_buffers and self._events.get(worker):
            return None  # it has not come that far
        if averaging.includes_buffers:
            return self.models[worker]  # it was lost in this averaging
        return self._snapshots.get((worker, self._steps_of.get(key, -1)))


def uses_of(entries: Sequence[Any]) -> dict[int, list[tuple[int, int]]]:
    """By worker, the epoch and position of each sample of the steps that it has reported."""
    blocks: dict[int, Block] = {}
    uses: dict[int, list[tuple[int, int]]] = {}
    for entry in entries:
        if isinstance(entry, AssignBlocks):
            blocks |= {block.id: block for block in entry.blocks}
        elif isinstance(entry, Ready):
            for block_id in entry.blocks:
                block = blocks[block_id]
                uses.setdefault(entry.worker, []).extend(
                    (block.epoch, position) for start, stop in block.ranges for position in range(start, stop)
                )
    return uses
