"""A policy of workers that average models, driven event by event."""

from __future__ import annotations

from dataclasses import replace

from offbeat.events import (
    AverageModels,
    CancelAveraging,
    EpochEnded,
    Finished,
    Lost,
    OuterStateLoaded,
    Ready,
)
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.protocol import ModelAveragingProtocol
from support.round_events import joined


class Job:
    """A policy and the worker's side of each of its workers; actions arrive at once."""

    def __init__(self, world, *, policy=PartialReduce, **options):
        self.policy = policy(world, **{"shards": "equal"} | options)
        self.workers = {}
        self.averagings = []
        self.actions = []
        self.now_s = 0.0
        for worker in range(world):
            self.join(worker, world)

    def emit(self, event):
        actions = self.policy.handle(event)
        for action in actions:
            if isinstance(action, AverageModels):
                self.averagings.append(action)
            if isinstance(action, AverageModels | CancelAveraging):
                for member in action.members:
                    if member in self.workers:
                        self.workers[member].handle(action)
        self.actions += actions
        return actions

    def join(self, worker, world):
        self.workers[worker] = ModelAveragingProtocol(worker)
        return self.emit(replace(joined(worker, world), now_s=self.now_s))

    def ready(self, worker, **values):
        fields = {"generation": 0, "epoch": 0, "step": 0, "round": 0, "compute_s": 0.1, "samples": 0}
        return self.emit(Ready(now_s=self.now_s, worker=worker, blocks=(), **fields | values))

    def averaged(self, worker, *, has_mean=True):
        ended = self.workers[worker].finish(model_steps=1, has_mean=has_mean)
        return self.emit(replace(ended, now_s=self.now_s))

    def load_outer_state(self, worker, rounds):
        return self.emit(OuterStateLoaded(now_s=self.now_s, worker=worker, rounds=rounds))

    def end_all(self):
        """All members of all averagings have the mean."""
        return [
            action
            for worker, protocol in sorted(self.workers.items())
            if protocol.averaging is not None
            for action in self.averaged(worker)
        ]

    def begin(self):
        self.end_all()
        self.averagings.clear()
        self.actions.clear()
        return self

    def finished(self, worker):
        return self.emit(Finished(now_s=self.now_s, worker=worker, epoch=0, step=1))

    def end_epoch(self, worker, epoch=0, *, is_complete=True):
        return self.emit(EpochEnded(now_s=self.now_s, worker=worker, epoch=epoch, is_complete=is_complete))

    def lost(self, worker):
        self.workers.pop(worker)
        return self.emit(Lost(now_s=self.now_s, worker=worker, cause="it died"))


def members(actions):
    return [action.members for action in actions if isinstance(action, AverageModels)]
