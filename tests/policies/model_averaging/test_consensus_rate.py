"""Without updates the models converge to their first mean, no slower than the topology's matrix says.

Workers end their steps at random times, in no averaging sooner than they may; their models are numbers here.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from offbeat.events import AverageModels, ModelsAveraged
from offbeat.policies.model_averaging.neighbour_pairs import neighbours_of
from offbeat.policies.model_averaging.pair_averaging import PairAveraging
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.prague import PragueAveraging
from support.model_replay import mixing_matrix
from support.round_events import joined, ready

WORKERS, AVERAGINGS = 8, 200
MODELS = 4  # independent ones, averaged by the same matrices


class Schedule:
    """Workers without updates, whose steps end at random times, and with overlap their averagings, too.

    Attributes:
        matrices: of all averagings of several workers but the first one, in their order.
        models: shape (workers, models), before the first and after each averaging.
    """

    def __init__(self, policy, seed, *, overlap):
        self._policy, self._overlap = policy, overlap
        self._random, self._now_s = random.Random(seed), 0.0
        self._averaging_of = {}
        self.matrices = []
        self.models = [np.random.default_rng(seed).normal(size=(WORKERS, MODELS))]
        for worker in range(WORKERS):
            self._handle(joined(worker, WORKERS))
        for worker in range(WORKERS):
            self._report(worker)  # that it has received the state

    def _handle(self, event):
        for action in self._policy.handle(event):
            assert isinstance(action, AverageModels), action
            self._averaging_of |= dict.fromkeys(action.members, action)
            if not action.joining and len(action.members) > 1:
                self.matrices.append(mixing_matrix(action.members, action.weights, action.members, WORKERS))
                self.models.append(self.matrices[-1] @ self.models[-1])

    def _report(self, worker):
        averaging = self._averaging_of.pop(worker)
        self._handle(
            ModelsAveraged(
                now_s=self._now_s,
                worker=worker,
                exchange_id=averaging.exchange_id,
                model_steps=0,
                has_mean=True,
            )
        )

    def run(self):
        """Lets one worker after the other end a step, until there have been enough averagings."""
        for _ in range(100 * AVERAGINGS):
            if len(self.matrices) >= AVERAGINGS:
                return
            worker = self._random.randrange(WORKERS)
            self._now_s += 0.1
            if worker in self._averaging_of:
                self._report(worker)
                if not self._overlap:
                    continue
            elif not self._overlap and worker in self._ready_workers:
                continue
            self._handle(replace(ready(worker, 0), now_s=self._now_s))
        raise AssertionError(f"{len(self.matrices)} averagings in so many steps")

    @property
    def _ready_workers(self):
        return {worker for worker, _ in self._policy.state_dict()["groups"]["ready_s"]}


def groups_of_any(size):
    return [*itertools.combinations(range(WORKERS), size)]


def edges_of(topology):
    ring = list(range(WORKERS))
    return [
        (active, passive)
        for active in range(1, WORKERS, 2)
        for passive in neighbours_of(ring, active, topology)
    ]


def second_eigenvalue(groups):
    """The second largest eigenvalue of the expected matrix, where all of these groups are equally probable.

    A group's matrix is symmetric and its own square, so this is the factor by which the expected squared
    distance to the mean shrinks in an averaging.
    """
    matrix = np.zeros((WORKERS, WORKERS))
    for group in groups:
        weights = [1 / len(group)] * len(group)
        matrix += mixing_matrix(group, weights, group, WORKERS) / len(groups)
    return float(np.linalg.eigvalsh(matrix)[-2])


def name_of(argument):
    if isinstance(argument, dict):
        return " ".join(map(str, argument.values()))
    return argument.__name__ if isinstance(argument, type) else ""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("policy", "arguments", "groups"),
    [
        (PartialReduce, {"size": 2}, groups_of_any(2)),
        (PartialReduce, {"size": 3}, groups_of_any(3)),
        (PairAveraging, {"topology": "ring"}, edges_of("ring")),
        (PairAveraging, {"topology": "exponential"}, edges_of("exponential")),
        (PairAveraging, {"topology": "complete"}, edges_of("complete")),
        (PragueAveraging, {"mode": "random", "size": 3}, groups_of_any(3)),
        # A division is often of the members of the group before: it is slower than groups of any 3 workers.
        (PragueAveraging, {"mode": "smart", "size": 3, "lag": None}, edges_of("ring")),
        (PragueAveraging, {"mode": "static", "size": 3}, groups_of_any(3)),
    ],
    ids=name_of,
)
def test_without_updates_models_converge_to_their_mean_at_the_topologys_rate(
    policy, arguments, groups, overlap
):
    eigenvalue = second_eigenvalue(groups)
    for seed in range(5):
        schedule = Schedule(
            policy(WORKERS, shards="equal", overlap=overlap, **arguments), seed, overlap=overlap
        )
        schedule.run()
        first = schedule.models[0]
        for models in schedule.models:
            np.testing.assert_allclose(models.sum(0), first.sum(0), rtol=0, atol=1e-12)
        spread = [np.square(models - first.mean(0)).sum() for models in schedule.models]
        count = next((number for number, one in enumerate(spread) if one < 1e-20), AVERAGINGS)
        rate = (spread[count] / spread[0]) ** (1 / count)
        assert rate <= eigenvalue, f"{count} averagings, seed {seed}"
