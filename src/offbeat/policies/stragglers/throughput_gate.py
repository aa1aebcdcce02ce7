"""Decides from measured times whether excluding workers raises throughput more than their samples are worth.

It keeps no state; the counter of `offbeat.policies.stragglers.classifier` decides how long a worker must have
been slow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean


def break_even_factor(workers: int, margin: float = 0.0) -> float:
    """Return the factor of slowness from which excluding one of `workers` raises throughput.

    Without one of W workers there are (W - 1) / T samples a second instead of W / (f T), which is more once
    f > W / (W - 1): 1.33 for 4 workers, 1.07 for 16. Infinite for a single worker.

    Args:
        workers: W, at least 1.
        margin: the required gain as a share; 0.05 requires 5 %.
    """
    return (1.0 + margin) * workers / (workers - 1) if workers > 1 else math.inf


class ThroughputGate:
    """Excludes workers only if the rest does more samples a second than all workers do with waiting.

    A group of m workers whose slowest takes T seconds does m / T batches a second; T is the mean, over the
    last iterations measured, of the slowest worker's time. An exclusion must raise this to more than
    (1 + margin) times the value before, so the predicted throughput never falls by an exclusion.

    Source: dynamic partial all-reduce (ICCE 2023) weighs the compute and the data lost with a slow worker
    against the time lost by waiting for it; only its abstract could be read. Deviation: the comparison is
    made precise here as samples a second, several workers may be excluded at once (of two that are equally
    slow, neither alone is worth excluding), and workers already excluded are not weighed again.

    Args:
        margin: the required gain, as a share, at least 0 (0.05).

    Raises:
        ValueError: a negative or infinite margin.
    """

    def __init__(self, margin: float = 0.05) -> None:
        if not (math.isfinite(margin) and margin >= 0):
            raise ValueError(f"expected a finite margin of at least 0 (0.05 requires 5 % more), got {margin}")
        self._margin = margin

    def batches_per_s(
        self, recent_compute_s: Mapping[int, Sequence[float]], excluded: Collection[int]
    ) -> float:
        """Return the predicted throughput of all but `excluded`, in batches a second; 0 if no worker is left.

        Args:
            recent_compute_s: each worker's times of its last iterations, in seconds, at least 0, the newest
                last; a worker with fewer times counts in the newest iterations only, one without any is
                ignored.
            excluded: the excluded workers.
        """
        rest = [times_s for worker, times_s in recent_compute_s.items() if worker not in excluded and times_s]
        slowest_s: list[float] = []
        for times_s in rest:
            _update_slowest(slowest_s, times_s)
        return _batches_per_s(len(rest), slowest_s)

    def workers_to_exclude(
        self,
        recent_compute_s: Mapping[int, Sequence[float]],
        *,
        excluded: Collection[int],
        candidates: Collection[int],
    ) -> frozenset[int]:
        """Return which of `candidates` to exclude in addition to `excluded`: the best choice, or none.

        The worker with the highest mean time is excluded first, which is best for steady times; of equally
        good choices the smallest is used. At least one worker always stays.

        Args:
            recent_compute_s: as for `batches_per_s`; a suspect without any time stays.
            excluded: workers already excluded.
            candidates: workers that may be excluded.
        """
        suspected = sorted(
            (worker for worker in {*candidates} - {*excluded} if recent_compute_s.get(worker)),
            key=lambda worker: (fmean(recent_compute_s[worker]), -worker),
        )
        slowest_s: list[float] = []
        members = 0
        for worker, times_s in recent_compute_s.items():
            if times_s and worker not in excluded and worker not in suspected:
                _update_slowest(slowest_s, times_s)
                members += 1
        # Suspects are added back one by one, the fastest first, so that every time is visited once.
        best, stay = _batches_per_s(members, slowest_s), 0
        after = best
        for back, worker in enumerate(suspected, start=1):
            _update_slowest(slowest_s, recent_compute_s[worker])
            after = _batches_per_s(members + back, slowest_s)
            if after >= best:
                best, stay = after, back
        return frozenset(suspected[stay:]) if best > (1.0 + self._margin) * after else frozenset()


def _update_slowest(slowest_s: list[float], times_s: Sequence[float]) -> None:
    """Update the slowest time of each iteration, the newest first, with a worker's times."""
    for back, time_s in enumerate(reversed(times_s)):
        if back == len(slowest_s):
            slowest_s.append(time_s)
        elif time_s > slowest_s[back]:
            slowest_s[back] = time_s


def _batches_per_s(members: int, slowest_s: Sequence[float]) -> float:
    if not members:
        return 0.0
    mean_s = fmean(slowest_s)
    return members / mean_s if mean_s > 0 else math.inf
