"""Gossip in rounds of all workers, each of which exchanges with its neighbours."""

from __future__ import annotations

from typing import Any, Final

from offbeat.policies.model_averaging.local_steps import LocalSteps

_ALL: Final = 1 << 30  # a quorum of more workers than there are: all of them


class NeighbourGossip(LocalSteps):
    """Lets all workers exchange with their neighbours each time that they have made `every` steps.

    A round is of all workers, and begins when the last one is ready; with `overlap` the others train on until
    then. Each keeps copies of models from round to round, so a round without one of the workers would void
    them: where some do not come, as at the end of an epoch, the others go on alone until the mean of all.

    Source: Koloskova, Stich and Jaggi 2019, "Decentralized stochastic optimization and gossip algorithms with
    compressed communication" (CHOCO-SGD), for rounds of all workers. Deviations: several steps between two
    rounds, by pace, as in `LocalRounds`; the mean of all models after an epoch.

    Args:
        world: number of workers at the start; their ids are 0 to `world` - 1.
        every, by_pace: see `LocalRounds`.
        common: shards, overlap, global_every, detector and timeout_s, see `LocalSteps`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, world: int, *, every: int = 1, by_pace: bool = True, **common: Any) -> None:
        super().__init__(
            world, every=every, quorum=_ALL, grace_s=0.0, by_pace=by_pace, keeps_copies=True, **common
        )
