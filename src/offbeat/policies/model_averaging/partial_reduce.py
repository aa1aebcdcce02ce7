"""Partial reduce: workers average their models in groups of those that are ready first."""

from __future__ import annotations

import math
from typing import Literal

from offbeat.policies.model_averaging.averaging import GlobalEvery, ModelAveraging, check_seconds
from offbeat.policies.model_averaging.first_ready import FirstReadyGroups


class PartialReduce(ModelAveraging):
    """Lets the first P workers that are ready average their models, again and again.

    With P equal to the number of workers this is synchronous averaging of models. Weights are constant, 1/P:
    each averaging preserves the sum of the models.

    Source: Miao et al. 2021, "Heterogeneity-aware distributed machine learning training via partial reduce"
    (P-Reduce, constant). Deviations: workers may train on meanwhile; workers join, leave and are lost;
    samples are assigned as they are needed; the last group has fewer members where fewer workers train; all
    models are averaged at the end; the default window is twice the specification's, which costs a sixth of
    the time.

    Args:
        world: number of workers at the start; their ids are 0 to `world` - 1.
        size: P, at least 2; None for 3, or 2 with fewer than 4 workers.
        window: see `FirstReadyGroups`; None for four times the least that connects all workers.
        hold_timeout_s: see `FirstReadyGroups`.
        shards, overlap, global_every, timeout_s: see `ModelAveraging`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        size: int | None = None,
        window: int | None = None,
        hold_timeout_s: float = 60.0,
        shards: Literal["dynamic", "equal"] = "dynamic",
        overlap: bool = False,
        global_every: GlobalEvery = "epoch",
        timeout_s: float = 600.0,
    ) -> None:
        if size is not None and size < 2:
            raise ValueError(f"expected groups of at least 2 workers, got {size}")
        if window is not None and window < 0:
            raise ValueError(f"expected a window of at least 0 groups, got {window}")
        check_seconds("hold_timeout_s", hold_timeout_s)
        size = (3 if world >= 4 else 2) if size is None else size
        least = math.ceil((world - 1) / (size - 1))
        groups = FirstReadyGroups(size, 4 * least if window is None else window, hold_timeout_s)
        super().__init__(
            world, groups, shards=shards, overlap=overlap, global_every=global_every, timeout_s=timeout_s
        )
