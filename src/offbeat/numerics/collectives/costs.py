"""What an all-reduce costs: its schedule walked through with a line's latency and its time a byte.

The schedules are those that the executor runs. Nothing here touches a tensor or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from offbeat.numerics.collectives.schedules import schedule, segments


@dataclass(frozen=True, kw_only=True)
class Line:
    """How long a message takes from one worker to another: `alpha_s` plus `beta_s` a byte.

    Attributes:
        alpha_s: latency of a message, in seconds, with what both sides do for it.
        beta_s: seconds a byte.
    """

    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and self.beta_s >= 0 and self.alpha_s + self.beta_s > 0):
            raise ValueError(
                f"expected a latency and a time a byte of at least 0 s, not both 0, got {self.alpha_s} s "
                f"and {self.beta_s} s"
            )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an all-reduce needs of the lines.

    Attributes:
        rounds: messages that wait for each other, one after the other.
        volume: how often the whole vector passes the busiest line, one after the other.
    """

    rounds: int
    volume: float

    def seconds(self, size_bytes: int, line: Line) -> float:
        """Return how long it takes for a vector of so many bytes, at most, where the lines are idle."""
        return self.rounds * line.alpha_s + self.volume * size_bytes * line.beta_s


@lru_cache(maxsize=256)
def cost(algorithm: str, workers: int) -> Cost:
    """Return what an algorithm costs among so many workers.

    Every worker has a line out and a line in, each of which carries one message at a time. A message begins
    when what it carries is there and both lines are free. `rounds` is the time of the last arrival where only
    latency takes time, and `volume` where only bytes do.

    Source: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994): alpha and beta;
    appendix C of the specification for the figures. No deviation.

    Args:
        algorithm: see `offbeat.numerics.schedules.schedule`.
        workers: p, at least 1.

    Raises:
        ValueError: an unknown algorithm, or fewer than 1 worker.
    """
    return Cost(
        rounds=round(_last_arrival_s(algorithm, workers, alpha_s=1.0, vector_s=0.0)),
        volume=_last_arrival_s(algorithm, workers, alpha_s=0.0, vector_s=1.0),
    )


def _last_arrival_s(algorithm: str, workers: int, *, alpha_s: float, vector_s: float) -> float:
    schedules = [schedule(algorithm, workers, rank) for rank in range(workers)]
    count = schedules[0].segments
    cut = segments(count, count)
    segment_s = vector_s / count
    there_s = [[0.0] * len(cut) for _ in schedules]
    out_s, in_s = [0.0] * workers, [0.0] * workers
    last_s = 0.0
    for steps in zip(*(one.steps for one in schedules), strict=True):
        arrivals: list[tuple[int, int, int, float]] = []
        for rank, step in enumerate(steps):
            if step.send_to is None or step.send_segment is None:
                continue
            run = range(step.send_segment, step.send_segment + step.send_count)
            begins_s = max(out_s[rank], in_s[step.send_to], *(there_s[rank][segment] for segment in run))
            ends_s = begins_s + step.send_count * segment_s
            out_s[rank] = in_s[step.send_to] = ends_s
            arrivals.append((step.send_to, run.start, run.stop, ends_s + alpha_s))
        for receiver, start, stop, at_s in arrivals:
            there = there_s[receiver]
            there[start:stop] = [max(at_s, earlier_s) for earlier_s in there[start:stop]]
            last_s = max(last_s, at_s)
    return last_s


def fit_line(samples: Sequence[tuple[Cost, int, float]]) -> Line:
    """Return the line on which all-reduces took as long as they did.

    Least squares of the relative errors, so that the smallest messages, which tell alpha, count as much as
    the largest, which tell beta.

    Args:
        samples: what each cost, the bytes of its vector and how long it took, in seconds.

    Raises:
        ValueError: fewer than two sizes, or times that are not positive.
    """
    if len({size for _, size, _ in samples}) < 2 or min(took_s for _, _, took_s in samples) <= 0:
        raise ValueError("expected the times of at least two sizes, all more than 0 s")
    # With x and y relative to what was measured, alpha x + beta y = 1 in the mean of squares.
    xx = xy = yy = x1 = y1 = 0.0
    for one, size, took_s in samples:
        x, y = one.rounds / took_s, one.volume * size / took_s
        xx, xy, yy, x1, y1 = xx + x * x, xy + x * y, yy + y * y, x1 + x, y1 + y
    determinant = xx * yy - xy * xy
    if determinant > 0:
        alpha_s, beta_s = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if alpha_s >= 0 and beta_s >= 0:
            return Line(alpha_s=alpha_s, beta_s=beta_s)
    by_latency, by_bytes = x1 * x1 / xx if xx else 0.0, y1 * y1 / yy if yy else 0.0
    if by_latency >= by_bytes:
        return Line(alpha_s=x1 / xx, beta_s=0.0)
    return Line(alpha_s=0.0, beta_s=y1 / yy)
