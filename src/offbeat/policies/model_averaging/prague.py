"""Prague: groups that a generator decides ahead average their models while all train on."""

from __future__ import annotations

from typing import Literal

from offbeat.policies.model_averaging.averaging import GlobalEvery, ModelAveraging
from offbeat.policies.model_averaging.group_generator import GROUP_MODES, GroupGenerator, GroupMode


class PragueAveraging(ModelAveraging):
    """Lets groups that are decided ahead average their models, again and again.

    Each averaging preserves the sum of the models.

    Source: see `GroupGenerator`.

    Args:
        world: number of workers at the start; their ids are 0 to `world` - 1.
        mode, size, lag, seed: see `GroupGenerator`.
        shards, overlap, global_every, detector, timeout_s: see `ModelAveraging`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        world: int,
        *,
        mode: GroupMode = "smart",
        size: int = 3,
        lag: int | None = 4,
        seed: int = 0,
        shards: Literal["dynamic", "equal"] = "dynamic",
        overlap: bool = False,
        global_every: GlobalEvery = "epoch",
        detector: Literal["on", "off"] = "on",
        timeout_s: float = 600.0,
    ) -> None:
        if mode not in GROUP_MODES:
            raise ValueError(f"expected a mode of {', '.join(GROUP_MODES)}, got {mode!r}")
        if size < 2:
            raise ValueError(f"expected groups of at least 2 workers, got {size}")
        if lag is not None and lag < 1:
            raise ValueError(f"expected a lag of at least 1, got {lag}")
        groups = GroupGenerator(mode, size, lag, seed)
        super().__init__(
            world,
            groups,
            shards=shards,
            overlap=overlap,
            global_every=global_every,
            detector=detector,
            timeout_s=timeout_s,
        )
