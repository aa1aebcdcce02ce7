"""Gossip in rounds of all workers, each of which exchanges with its neighbours."""

from __future__ import annotations

from typing import Final, Literal

from offbeat.policies.model_averaging.averaging import GlobalEvery, ModelAveraging
from offbeat.policies.model_averaging.local_rounds import LocalRounds

_ALL: Final = 1 << 30  # a quorum of more workers than there are: all of them


class NeighbourGossip(ModelAveraging):
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
        shards, overlap, global_every, detector, timeout_s: see `ModelAveraging`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        every: int = 1,
        by_pace: bool = True,
        shards: Literal["dynamic", "equal"] = "dynamic",
        overlap: bool = False,
        global_every: GlobalEvery = "epoch",
        detector: Literal["on", "off"] = "on",
        timeout_s: float = 600.0,
    ) -> None:
        if every < 1:
            raise ValueError(f"expected rounds of at least 1 step, got {every}")
        if isinstance(global_every, int):
            raise ValueError(
                f"expected global_every to be epoch or None, since each round is of all, got {global_every}"
            )
        groups = LocalRounds(every, _ALL, 0.0, by_pace=by_pace)
        super().__init__(
            world,
            groups,
            shards=shards,
            overlap=overlap,
            global_every=global_every,
            detector=detector,
            timeout_s=timeout_s,
            keeps_copies=True,
        )
