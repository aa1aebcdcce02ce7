"""Is leaving workers out worth more than their samples? Decided from measured times, at any factor.

Nothing here counts, waits or remembers; how long a worker must have been slow is the counter's affair
(`offbeat.policies.stragglers`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean


def break_even_factor(workers: int, margin: float = 0.0) -> float:
    """Return how many times as slow as all others one of `workers` must be before leaving it out gains.

    Leaving one of W out gives (W - 1) / T samples a second instead of W / (f T), which is more once
    f > W / (W - 1): 1.33 for 4 workers, 1.07 for 16. Infinite for a single worker.

    Args:
        workers: W, at least 1.
        margin: the gain that is asked for; 0.05 asks for 5 %.
    """
    return (1.0 + margin) * workers / (workers - 1) if workers > 1 else math.inf


class ThroughputGate:
    """Leaves out only where the rest, without waiting, does more samples a second than all with waiting.

    A group of m workers whose slowest takes T seconds does m / T batches a second; T is the mean, over the
    last iterations measured, of the slowest's time. Whoever is left out must make that more than (1 + margin)
    times what it was, so a predicted throughput never falls by leaving somebody out.

    Source: dynamic partial all-reduce (ICCE 2023) weighs the compute and the data lost with a slow worker
    against the time lost by waiting for it; only its abstract could be read. Deviation: the comparison is
    made precise here as samples a second, several workers may be left out at once (of two that are equally
    slow, neither alone is worth leaving out), and who is out already is not weighed again.

    Args:
        margin: the gain that is asked for, as a share, at least 0 (0.05).

    Raises:
        ValueError: a negative or infinite margin.
    """

    def __init__(self, margin: float = 0.05) -> None:
        if not (math.isfinite(margin) and margin >= 0):
            raise ValueError(f"expected a finite margin of at least 0 (0.05 asks for 5 % more), got {margin}")
        self._margin = margin

    def batches_per_s(self, last_s: Mapping[int, Sequence[float]], out: Collection[int]) -> float:
        """Return the predicted throughput of all but `out`, in batches a second; 0 where nobody is left.

        Args:
            last_s: how long each worker took for its last iterations, in seconds, at least 0, the newest
                last; a worker that has fewer counts in the newest only, one without any is not there.
            out: who is left out.
        """
        rest = [times_s for worker, times_s in last_s.items() if worker not in out and times_s]
        slowest_s: list[float] = []
        for times_s in rest:
            _slower(slowest_s, times_s)
        return _batches_per_s(len(rest), slowest_s)

    def choose(
        self, last_s: Mapping[int, Sequence[float]], *, out: Collection[int], suspects: Collection[int]
    ) -> frozenset[int]:
        """Return which of the suspects to leave out besides `out`: the best choice, or none.

        Whoever is slowest in the mean goes first, which is best for steady times; of equally good choices the
        smallest is taken. Somebody always stays.

        Args:
            last_s: as for `batches_per_s`; a suspect without any time stays.
            out: who is left out already.
            suspects: who may be left out.
        """
        suspected = sorted(
            (worker for worker in {*suspects} - {*out} if last_s.get(worker)),
            key=lambda worker: (fmean(last_s[worker]), -worker),
        )
        slowest_s: list[float] = []
        members = 0
        for worker, times_s in last_s.items():
            if times_s and worker not in out and worker not in suspected:
                _slower(slowest_s, times_s)
                members += 1
        # Suspects come back one by one, the fastest first, so that every time is looked at once.
        best, stay = _batches_per_s(members, slowest_s), 0
        after = best
        for back, worker in enumerate(suspected, start=1):
            _slower(slowest_s, last_s[worker])
            after = _batches_per_s(members + back, slowest_s)
            if after >= best:
                best, stay = after, back
        return frozenset(suspected[stay:]) if best > (1.0 + self._margin) * after else frozenset()


def _slower(slowest_s: list[float], times_s: Sequence[float]) -> None:
    """Take a worker's times into the slowest of each iteration, the newest first."""
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
