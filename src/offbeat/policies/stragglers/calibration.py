"""Calibrates threshold and limit from measured times, so that normal workers are hardly ever called slow.

The guarantee is a bound on the probability that a worker whose times are distributed like those measured is
classed a straggler within an epoch. Workers and classes are handled in
`offbeat.policies.stragglers.classifier`.

**The counter.** A time above the threshold has probability p and moves the counter up, any other down, and
the class changes at the limit L. With odds q = (1 - p) / p, an excursion that has just left 0 reaches L
before it returns with probability h = (q - 1) / (q^L - 1) (gambler's ruin). A worker that is judged J times
an epoch leaves 0 at most J times, each time with probability p, so the false alarm has a probability of at
most J p h. This holds for every epoch, also one that begins with a counter above 0: started from 0 long ago,
the chain enters L at each step with at most its stationary probability, which is below p h.

**The tail.** p is not known; M times were measured. Let the threshold be the r-th largest of them. Whatever
the (continuous) distribution, the probability that a further time exceeds it is a Beta(r, M - r + 1)
variable. So, over the chance in the measurements and in what follows,

    P(false alarm) <= E[min(1, J p h(p, L))],  p ~ Beta(r, M - r + 1),

without any assumption about the shape of the tail, and including the uncertainty of few measurements: with
20 of them the limit has to be higher than with 500. Ties only lower p.

**The choice.** A worker that is above the threshold from now on is found after L judgements. So the choice is
the smallest L for which the bound holds at a threshold of at most `k_max` times the pace of the fast workers
(all that the paper's k = 2 finds must be found), and for that L the largest r, that is the lowest threshold.
But never below `k_min`: excluding a worker that is hardly slower costs more than waiting for it. If the
measured times have so long a tail that no limit up to 64 suffices, the threshold rises above `k_max`.

The bound assumes judgements that are independent given the threshold (a worker that is delayed for many
consecutive iterations *is* slow, and is found), and measured times that are exchangeable with those judged.
The second is exact for one profiling window, and nearly so where r is not fixed beforehand but is the first
rank below `k_max`. Times of earlier epochs are pooled relative to their epoch's pace; the pace of a new epoch
is known from a few iterations only, so its threshold is raised by three standard errors of that pace
(`pace_margin_factor`). Without that, twice to four times as many false alarms as promised were seen in
simulation; with it, and in first epochs, fewer than promised (`test_calibration.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from statistics import fmean, stdev

LIMIT_MAX = 64
STANDARD_ERRORS = 3.0
_POINTS = 400
_PROFILE_ITERATIONS = range(3, 21)


@dataclass(frozen=True, kw_only=True)
class CalibratedThreshold:
    """A calibrated threshold and limit.

    Attributes:
        k: the threshold as a multiple of the pace of the fast workers.
        limit: the counter's limit.
    """

    k: float
    limit: int


def excursion_probability(slow_probability: float, limit: int) -> float:
    """Return the probability that a counter at 1 reaches `limit` before 0, for a given chance to rise.

    (q - 1) / (q^L - 1) with q = (1 - p) / p: gambler's ruin.

    Args:
        slow_probability: p, above 0 and below 1; judgements are independent.
        limit: L, at least 1.
    """
    odds = (1.0 - slow_probability) / slow_probability
    if abs(odds - 1.0) < 1e-9:
        return 1.0 / limit
    if odds > 1.0 and limit * math.log(odds) > 700.0:
        return 0.0
    return (odds - 1.0) / (odds**limit - 1.0)


@lru_cache(maxsize=4096)
def false_alarm_bound(*, samples: int, rank: int, limit: int, judged: int) -> float:
    """Bound the probability that a normal worker is classed as slow within one epoch.

    E[min(1, J p h(p, L))] over p ~ Beta(r, M - r + 1); see the module.

    Args:
        samples: M, the number of measured times.
        rank: r, the threshold is the r-th largest of them; 1 to M.
        limit: L, at least 1.
        judged: J, the number of judged iterations in the epoch.
    """
    log_scale = math.lgamma(samples + 1) - math.lgamma(rank) - math.lgamma(samples - rank + 1)
    total = 0.0
    for point in range(_POINTS):  # midpoints in u, p = u^2: dense where p is small
        u = (point + 0.5) / _POINTS
        p = u * u
        density = math.exp(log_scale + (rank - 1) * math.log(p) + (samples - rank) * math.log1p(-p))
        alarm = 1.0 if p >= 0.5 else min(1.0, judged * p * excursion_probability(p, limit))
        total += density * alarm * 2.0 * u / _POINTS
    return total


@lru_cache(maxsize=4096)
def smallest_limit(*, samples: int, rank: int, judged: int, bound: float) -> int | None:
    """Return the smallest limit that keeps false alarms within `bound`; None if none up to 64 does."""
    low, high = 1, LIMIT_MAX
    if false_alarm_bound(samples=samples, rank=rank, limit=high, judged=judged) > bound:
        return None
    while low < high:
        middle = (low + high) // 2
        if false_alarm_bound(samples=samples, rank=rank, limit=middle, judged=judged) <= bound:
            high = middle
        else:
            low = middle + 1
    return low


@lru_cache(maxsize=256)
def profile_iterations(*, workers: int, judged: int, bound: float) -> int:
    """Return the profile length, in iterations, with which a worker slow from the start is found earliest.

    More iterations of `workers` workers give more times and so a lower limit; a worker that is slow from the
    epoch's start is found n - 1 + L iterations after it. The result is at least 3, so that one slow time
    does not make a worker look slow in its profile.
    """

    def found_after(profiled: int) -> float:
        limit = smallest_limit(samples=profiled * workers, rank=1, judged=judged, bound=bound)
        return math.inf if limit is None else profiled - 1 + limit

    return min(_PROFILE_ITERATIONS, key=lambda profiled: (found_after(profiled), profiled))


def pace_margin_factor(minima_s: Sequence[float]) -> float:
    """Return the factor by which a pace may exceed the mean of a window's minima: 3 standard errors.

    Args:
        minima_s: the fastest worker's time in each iteration of the window, in seconds.
    """
    mean_s = fmean(minima_s)
    if len(minima_s) < 2 or mean_s <= 0:
        return 1.0
    return 1.0 + STANDARD_ERRORS * stdev(minima_s) / math.sqrt(len(minima_s)) / mean_s


def drop_slow_workers(ratios: Sequence[Sequence[float]], *, k_min: float, k_max: float) -> list[float]:
    """Return the times of a profile without those of workers that are clearly slow in all of it.

    Clearly slow: all times above `k_max`; or all above `k_min` and above every time of at least half of the
    workers, none of which is clearly slow. Of W alike workers and n iterations, one satisfies the second with
    probability 1 / C(n W, n) whatever the distribution, 1 in 15504 for W = 4 and n = 5, so this hardly
    removes a tail. (Dropping every worker above `k_min` in all iterations does: 7 % false alarms where 5 %
    were allowed.)

    Args:
        ratios: each worker's times, as multiples of the pace of the fast ones; none of them empty.
        k_min: the least threshold.
        k_max: the highest threshold.
    """
    ascending = sorted(ratios, key=min)
    for kept in range((len(ascending) + 1) // 2, len(ascending)):
        rest_max = max(max(times) for times in ascending[:kept])
        if min(ascending[kept]) > max(rest_max, k_min):
            ascending = ascending[:kept]
            break
    return [ratio for times in ascending if min(times) <= max(k_min, k_max) for ratio in times]


def choose_threshold(
    ratios: Sequence[float], *, judged: int, bound: float, k_min: float, k_max: float
) -> CalibratedThreshold | None:
    """Choose threshold and limit from measured times; None if there are too few for any bound.

    Args:
        ratios: measured times of normal workers, as multiples of the pace of the fast ones.
        judged: J, the number of judged iterations in an epoch.
        bound: the highest allowed false-alarm probability, per worker and epoch.
        k_min: the least threshold.
        k_max: the highest threshold, unless no limit satisfies the bound then; at least `k_min` is used.
    """
    from_the_top = sorted(ratios, reverse=True)
    samples = len(from_the_top)
    k_max = max(k_min, k_max)
    first = next((rank for rank in range(1, samples + 1) if from_the_top[rank - 1] <= k_max), samples)
    for rank in range(first, 0, -1):
        limit = smallest_limit(samples=samples, rank=rank, judged=judged, bound=bound)
        if limit is not None:
            break
    else:
        return None
    for lower in count(rank):
        if lower == samples or from_the_top[lower - 1] <= k_min:
            break
        if false_alarm_bound(samples=samples, rank=lower + 1, limit=limit, judged=judged) > bound:
            break
    return CalibratedThreshold(k=max(k_min, from_the_top[lower - 1]), limit=limit)
