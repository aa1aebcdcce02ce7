"""Cost of an all-reduce: its schedule simulated with a latency per message and a time per byte.

The schedules are the ones that the executor runs. Nothing here touches a tensor or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from offbeat.numerics.collectives.schedules import cut_segments, schedule


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Transfer time of a message between two workers: `alpha_s` plus `beta_s` per byte.

    Attributes:
        alpha_s: latency of a message in seconds, including the work of both ends.
        beta_s: seconds per byte.
    """

    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and self.beta_s >= 0 and self.alpha_s + self.beta_s > 0):
            raise ValueError(
                f"expected a latency and a time per byte of at least 0 s, not both 0, got {self.alpha_s} s "
                f"and {self.beta_s} s"
            )


@dataclass(frozen=True, kw_only=True)
class AllReduceCost:
    """Cost of an all-reduce, independent of the vector's size and of the line.

    Attributes:
        rounds: messages on the critical path, each of which waits for the one before.
        volume: bytes on the critical path, as a multiple of the vector's size.
    """

    rounds: int
    volume: float

    def seconds(self, size_bytes: int, link: LinkModel) -> float:
        """Return the time for a vector of `size_bytes` on idle lines, an upper bound."""
        return self.rounds * link.alpha_s + self.volume * size_bytes * link.beta_s


@lru_cache(maxsize=256)
def all_reduce_cost(algorithm: str, workers: int) -> AllReduceCost:
    """Return the cost of an algorithm for a number of workers.

    Each worker has one outgoing and one incoming line, which carry one message at a time. A message starts
    when its data are available and both lines are free. `rounds` is the time of the last arrival if only
    latency takes time, `volume` if only bytes do.

    Source: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994): alpha and beta;
    appendix C of the specification for the values. No deviation.

    Args:
        algorithm: see `offbeat.numerics.collectives.schedules.schedule`.
        workers: p, at least 1.

    Raises:
        ValueError: unknown algorithm, or fewer than 1 worker.
    """
    return AllReduceCost(
        rounds=round(_last_arrival_s(algorithm, workers, alpha_s=1.0, vector_s=0.0)),
        volume=_last_arrival_s(algorithm, workers, alpha_s=0.0, vector_s=1.0),
    )


def _last_arrival_s(algorithm: str, workers: int, *, alpha_s: float, vector_s: float) -> float:
    schedules = [schedule(algorithm, workers, rank) for rank in range(workers)]
    count = schedules[0].segments
    segment_slices = cut_segments(count, count)
    segment_s = vector_s / count
    available_s = [[0.0] * len(segment_slices) for _ in schedules]
    out_s, in_s = [0.0] * workers, [0.0] * workers
    last_s = 0.0
    for steps in zip(*(one.steps for one in schedules), strict=True):
        arrivals: list[tuple[int, int, int, float]] = []
        for rank, step in enumerate(steps):
            if step.send_to is None or step.send_segment is None:
                continue
            run = range(step.send_segment, step.send_segment + step.send_count)
            begins_s = max(out_s[rank], in_s[step.send_to], *(available_s[rank][segment] for segment in run))
            ends_s = begins_s + step.send_count * segment_s
            out_s[rank] = in_s[step.send_to] = ends_s
            arrivals.append((step.send_to, run.start, run.stop, ends_s + alpha_s))
        for receiver, start, stop, at_s in arrivals:
            receiver_s = available_s[receiver]
            receiver_s[start:stop] = [max(at_s, earlier_s) for earlier_s in receiver_s[start:stop]]
            last_s = max(last_s, at_s)
    return last_s


def fit_link_model(samples: Sequence[tuple[AllReduceCost, int, float]]) -> LinkModel:
    """Return the line for which the costs fit measured times best.

    Least squares of the relative errors, so that the smallest messages, which determine alpha, weigh as much
    as the largest, which determine beta.

    Args:
        samples: for each measurement the cost, the size of the vector in bytes and the time in seconds.

    Raises:
        ValueError: fewer than two sizes, or times that are not positive.
    """
    if len({size for _, size, _ in samples}) < 2 or min(took_s for _, _, took_s in samples) <= 0:
        raise ValueError("expected the times of at least two sizes, all more than 0 s")
    # With x and y relative to the measured times, the fit minimises the squares of alpha x + beta y - 1.
    xx = xy = yy = x1 = y1 = 0.0
    for one, size, took_s in samples:
        x, y = one.rounds / took_s, one.volume * size / took_s
        xx, xy, yy, x1, y1 = xx + x * x, xy + x * y, yy + y * y, x1 + x, y1 + y
    determinant = xx * yy - xy * xy
    if determinant > 0:
        alpha_s, beta_s = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if alpha_s >= 0 and beta_s >= 0:
            return LinkModel(alpha_s=alpha_s, beta_s=beta_s)
    by_latency, by_bytes = x1 * x1 / xx if xx else 0.0, y1 * y1 / yy if yy else 0.0
    if by_latency >= by_bytes:
        return LinkModel(alpha_s=x1 / xx, beta_s=0.0)
    return LinkModel(alpha_s=0.0, beta_s=y1 / yy)
