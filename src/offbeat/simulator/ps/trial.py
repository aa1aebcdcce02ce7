"""The trials of the simulated parameter server: their parameters, and the requests that clients make."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from offbeat.policies.ps.client import PsClient
from offbeat.policies.ps.failure_detector import SILENCE_TIMEOUT_S
from offbeat.policies.ps.hash_ring import NamespaceSpec


@dataclass(frozen=True, kw_only=True)
class PsTrial:
    """Parameters of a trial.

    Attributes:
        seed: seed of all random numbers.
        servers, clients: their numbers at the start.
        replicas: replicas of each block.
        pushes_per_client: pushes of each client, several of which are under way at once.
        keys: keys in a namespace.
        block_keys: keys in a block.
        virtual_nodes: virtual nodes of each server on the ring.
        faults: number of faults, including servers that join or leave.
        loss_share, duplicate_share: share of the packets, 0 to 1.
        request_interval_s_max: maximum time between two requests of a client.
        cut_s_max: maximum time for which nodes are separated.
        aggregates: whether there are namespaces that aggregate, and clients that die when masters change.
    """

    seed: int
    servers: int = 4
    clients: int = 3
    replicas: int = 2
    pushes_per_client: int = 40
    keys: int = 60
    block_keys: int = 5
    virtual_nodes: int = 3
    faults: int = 3
    loss_share: float = 0.0
    duplicate_share: float = 0.0
    request_interval_s_max: float = 0.01
    cut_s_max: float = 0.1
    aggregates: bool = False


def draw_trial(seed: int) -> PsTrial:
    """Draw the trial of a seed."""
    chance = random.Random(f"trial {seed}")
    is_lossy = chance.random() < 0.5
    trial = PsTrial(
        seed=seed,
        servers=chance.randint(1, 6),
        clients=chance.randint(1, 4),
        replicas=chance.randint(0, 3),
        pushes_per_client=chance.choice([10, 40]),
        block_keys=chance.choice([1, 5, 20]),
        virtual_nodes=chance.randint(1, 4),
        faults=chance.randint(0, 6),
        loss_share=chance.choice([0.02, 0.2]) if is_lossy else 0.0,
        duplicate_share=chance.choice([0.0, 0.2]) if is_lossy else 0.0,
        aggregates=chance.random() < 0.6,
    )
    if chance.random() < 0.5:  # cuts longer than a silence that counts as a death; clients work as long
        faults = trial.faults and trial.faults + 2
        trial = replace(trial, faults=faults, request_interval_s_max=1.0, cut_s_max=2 * SILENCE_TIMEOUT_S)
    if not trial.aggregates:
        return trial
    # Faults of sums need several clients, and pushes for as long as there are faults.
    return replace(
        trial,
        clients=max(2, trial.clients),
        pushes_per_client=40,
        faults=trial.faults and max(3, trial.faults),
    )


class Workload:
    """Chooses keys and times of requests; where pushes are summed, all clients push the same at one time.

    Args:
        trial: the trial.
        option_chance: random numbers for the steps of times.
    """

    def __init__(self, trial: PsTrial, option_chance: random.Random) -> None:
        self._trial, self._option_chance = trial, option_chance
        self._passed: Counter[tuple[str, int]] = Counter()  # times, by namespace and client

    def some_keys(self, chance: random.Random) -> tuple[int, int]:
        """Return a random range of keys."""
        first = chance.randrange(self._trial.keys)
        return first, chance.randrange(first, self._trial.keys) + 1

    def next_keys(self, client: PsClient, space: NamespaceSpec) -> tuple[int, int] | None:
        """Return the range that every client pushes next; None while this one does not know its time."""
        if self._pushes_all_keys(space):
            return 0, space.keys
        begins = client.first_time(space.name)
        if begins is None:
            return None
        time = begins + self._passed[space.name, client.client]
        return self.some_keys(random.Random(f"{self._trial.seed} {space.name} {time}"))

    def time_of(self, client: PsClient, space: NamespaceSpec) -> int | None:
        """Return the time that a client chooses for its next push; None for the time that comes next.

        Where all clients push the same ranges, none skips a time whose range does not come again.
        """
        begins = client.first_time(space.name) if space.aggregates else 1
        step = self._option_chance.choice((0, 1, 3))
        if space.aggregates and not self._pushes_all_keys(space):
            step = min(step, 1)
        passed = space.name, client.client
        if begins is None or not step:
            self._passed[passed] += 1
            return None
        self._passed[passed] += step
        return begins - 1 + self._passed[passed]

    def _pushes_all_keys(self, space: NamespaceSpec) -> bool:
        """Whether every push of a namespace has all keys: drawn from the seed, true for half of them."""
        return random.Random(f"{self._trial.seed} {space.name}").random() < 0.5
