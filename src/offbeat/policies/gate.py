"""Is leaving workers out worth more than their samples? Decided from measured times, at any factor.

Nothing here counts, waits or remembers; how long a worker must have been slow is the counter's affair
(`offbeat.policies.stragglers`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


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

    A group of m workers whose slowest takes T seconds does m / T batches a second. Whoever is left out must
    make that more than (1 + margin) times what it was, so a predicted throughput never falls by leaving
    somebody out.

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

    def batches_per_s(self, times_s: Mapping[int, float], out: Collection[int]) -> float:
        """Return the predicted throughput of all but `out`, in batches a second; 0 where nobody is left.

        Args:
            times_s: how long each worker computes a batch, in seconds, at least 0.
            out: who is left out.
        """
        rest = [time_s for worker, time_s in times_s.items() if worker not in out]
        if not rest:
            return 0.0
        return len(rest) / max(rest) if max(rest) > 0 else math.inf

    def choose(
        self, times_s: Mapping[int, float], *, out: Collection[int], suspects: Collection[int]
    ) -> frozenset[int]:
        """Return which of the suspects to leave out besides `out`: the best choice, or none.

        The slowest go first, which is best for any number of them; of equally good choices the smallest is
        taken. Somebody always stays.

        Args:
            times_s: how long each worker computes a batch, in seconds; a suspect without a time stays.
            out: who is left out already.
            suspects: who may be left out.
        """
        before = best = self.batches_per_s(times_s, out)
        chosen: frozenset[int] = frozenset()
        tried: frozenset[int] = frozenset()
        known = [worker for worker in suspects if worker in times_s and worker not in out]
        for worker in sorted(known, key=lambda worker: (-times_s[worker], worker)):
            tried |= {worker}
            after = self.batches_per_s(times_s, {*out, *tried})
            if after > best:
                best, chosen = after, tried
        return chosen if best > (1.0 + self._margin) * before else frozenset()
