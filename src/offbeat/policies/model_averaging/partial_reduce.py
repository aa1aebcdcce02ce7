"""Partial reduce: workers average their models in groups of those that are ready first."""

from __future__ import annotations

from typing import Literal

from offbeat.policies.model_averaging.averaging import GlobalEvery, ModelAveraging, check_seconds
from offbeat.policies.model_averaging.first_ready import FirstReadyGroups
from offbeat.policies.model_averaging.weights import (
    GROUP_WEIGHTS,
    MEAN_APPLICATIONS,
    GroupWeights,
    MeanApplication,
)


class PartialReduce(ModelAveraging):
    """Lets the first P workers that are ready average their models, again and again.

    With constant weights, 1/P, each averaging preserves the sum of the models; with P equal to the number of
    workers this is synchronous averaging of models. With dynamic weights, by which a model counts according
    to how many steps it is behind the newest one, the sum is not preserved.

    Source: Miao et al. 2021, "Heterogeneity-aware distributed machine learning training via partial reduce"
    (P-Reduce, constant and dynamic). Deviations: workers may train on meanwhile; workers join, leave and are
    lost; samples are assigned as they are needed; the last group has fewer members where fewer workers train;
    all models are averaged at the end, with equal weights; the default window grows with the slowest
    worker's time for a step.

    Args:
        world: number of workers at the start; their ids are 0 to `world` - 1.
        size: P, at least 2; None for 3, or 2 with fewer than 4 workers.
        weights: "constant" or "dynamic"; see `FirstReadyGroups`.
        apply: "common" gives the mean to all members; with "own_share" each keeps 1/P of its own model, see
            `mean_share`, except in groups that send a model to new workers. With constant weights these are
            the same.
        window, hold_timeout_s: see `FirstReadyGroups`.
        shards, overlap, global_every, detector, timeout_s: see `ModelAveraging`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        size: int | None = None,
        weights: GroupWeights = "constant",
        apply: MeanApplication = "common",
        window: int | None = None,
        hold_timeout_s: float = 60.0,
        shards: Literal["dynamic", "equal"] = "dynamic",
        overlap: bool = False,
        global_every: GlobalEvery = "epoch",
        detector: Literal["on", "off"] = "on",
        timeout_s: float = 600.0,
    ) -> None:
        if size is not None and size < 2:
            raise ValueError(f"expected groups of at least 2 workers, got {size}")
        if weights not in GROUP_WEIGHTS:
            raise ValueError(f"expected weights of {' or '.join(GROUP_WEIGHTS)}, got {weights!r}")
        if apply not in MEAN_APPLICATIONS:
            raise ValueError(f"expected apply of {' or '.join(MEAN_APPLICATIONS)}, got {apply!r}")
        if window is not None and window < 0:
            raise ValueError(f"expected a window of at least 0 groups, got {window}")
        check_seconds("hold_timeout_s", hold_timeout_s)
        size = (3 if world >= 4 else 2) if size is None else size
        super().__init__(
            world,
            FirstReadyGroups(size, window, hold_timeout_s, weights),
            shards=shards,
            overlap=overlap,
            global_every=global_every,
            detector=detector,
            timeout_s=timeout_s,
            keeps_own_share=apply == "own_share",
        )
