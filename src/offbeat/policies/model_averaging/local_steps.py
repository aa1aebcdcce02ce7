"""Local steps: workers train for several steps, and then all average their models."""

from __future__ import annotations

import math
from typing import Literal

from offbeat.policies.membership.quorum import check_quorum
from offbeat.policies.model_averaging.averaging import GlobalEvery, ModelAveraging
from offbeat.policies.model_averaging.local_rounds import LocalRounds


class LocalSteps(ModelAveraging):
    """Lets all workers average their models each time that they have made several steps.

    Source: see `LocalRounds`.

    Args:
        world: number of workers at the start; their ids are 0 to `world` - 1.
        every, quorum, grace_s, by_pace, fragments, delay: see `LocalRounds`; a delay needs `overlap`, and is
            shorter than a round.
        shards, overlap, global_every, detector, timeout_s, keeps_copies: see `ModelAveraging`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        every: int,
        quorum: int | str | None = None,
        grace_s: float | None = None,
        by_pace: bool = True,
        fragments: int = 0,
        delay: int | None = None,
        shards: Literal["dynamic", "equal"] = "dynamic",
        overlap: bool = False,
        global_every: GlobalEvery = "epoch",
        detector: Literal["on", "off"] = "on",
        timeout_s: float = 600.0,
        keeps_copies: bool = False,
    ) -> None:
        if every < 1:
            raise ValueError(f"expected rounds of at least 1 step, got {every}")
        if quorum is not None:
            check_quorum(quorum)
        if grace_s is not None and not 0 <= grace_s < math.inf:
            raise ValueError(f"expected a finite time of grace of at least 0 s, got {grace_s}")
        if isinstance(global_every, int):
            raise ValueError(
                f"expected global_every to be epoch or None, since each round is of all, got {global_every}"
            )
        if not 0 <= fragments <= every:
            raise ValueError(f"expected from 0 to {every} fragments, one step each at least, got {fragments}")
        if delay is not None and not overlap:
            raise ValueError(f"expected overlap with a delay, got one of {delay} steps without overlap")
        shortest = every // max(1, fragments)
        if delay is not None and not 1 <= delay < shortest:
            raise ValueError(
                f"expected a delay of at least 1 step and fewer than the {shortest} of a round, got {delay}"
            )
        groups = LocalRounds(
            every, quorum, grace_s, by_pace=by_pace, fragments=fragments, delay=0 if delay is None else delay
        )
        super().__init__(
            world,
            groups,
            shards=shards,
            overlap=overlap,
            global_every=global_every,
            detector=detector,
            timeout_s=timeout_s,
            has_delay=delay is not None,
            keeps_copies=keeps_copies,
        )
