"""Collectives as data: who sends which segments to whom in which step, and what the receiver does with them.

A vector is cut into `Schedule.segments` segments; a `Schedule` is one rank's list of steps over them. An
executor over links, the simulator and a cost model read the same schedule. Nothing here touches a tensor,
sends anything, or imports more than the standard library.

What every schedule of this module promises:

- Steps are numbered alike on all ranks: in step t, rank a sends some segments to b exactly if b in step t
  receives the same segments from a. So the step's index can serve as the message's tag, and a rank that has
  nothing to do in a step holds an idle `Step()` in its place.
- What a step sends are the values from before that step, also where it receives into the same segments.
- After the last step all ranks hold bit-identical values: whoever adds the same segment at once in a step
  adds the same two values, and floating-point addition of two values does not depend on their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

Operation: TypeAlias = Literal["add", "copy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one rank sends and receives at the same time; either may be missing, and both where it idles.

    Attributes:
        send_to: the rank that gets something.
        send_segment: the first segment sent.
        send_count: how many segments are sent, neighbours in the vector from `send_segment` on.
        recv_from: the rank from which something comes.
        recv_segment: the first segment received.
        recv_count: how many segments are received, neighbours in the vector from `recv_segment` on.
        op: what becomes of what came: added to the rank's own segments, or copied to their place.
    """

    send_to: int | None = None
    send_segment: int | None = None
    send_count: int = 1
    recv_from: int | None = None
    recv_segment: int | None = None
    recv_count: int = 1
    op: Operation = "copy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One rank's part in a collective.

    Attributes:
        workers: how many ranks take part.
        rank: the rank whose part this is, 0 to `workers` - 1.
        segments: how many segments the vector is cut into (by the function `segments`).
        steps: in order; as many on every rank.
    """

    workers: int
    rank: int
    segments: int
    steps: tuple[Step, ...]

    def sent(self, length: int) -> int:
        """Return how many elements this rank sends for a vector of `length` elements."""
        bounds = segments(length, self.segments)
        spans = [span(bounds, step.send_segment, step.send_count) for step in self.steps]
        return sum(stop - start for start, stop in spans)

    def received(self, length: int) -> int:
        """Return how many elements this rank receives for a vector of `length` elements."""
        bounds = segments(length, self.segments)
        spans = [span(bounds, step.recv_segment, step.recv_count) for step in self.steps]
        return sum(stop - start for start, stop in spans)


def segments(length: int, parts: int) -> list[tuple[int, int]]:
    """Cut `length` elements into `parts` neighbouring (start, stop) segments whose sizes differ by at most 1.

    The longer segments come first; with fewer elements than parts the last segments are empty.

    Raises:
        ValueError: `length` is negative or `parts` is less than 1.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"expected a length of at least 0 and at least 1 part, got {length} and {parts}")
    size, longer = divmod(length, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return list(pairwise(starts))


def span(bounds: list[tuple[int, int]], segment: int | None, count: int) -> tuple[int, int]:
    """Return the (start, stop) elements of `count` neighbouring segments; (0, 0) where `segment` is None."""
    return (0, 0) if segment is None else (bounds[segment][0], bounds[segment + count - 1][1])


def ring(workers: int, rank: int) -> Schedule:
    """Sum a vector over all ranks in 2(p-1) steps; each sends at most 2(p-1) segments of ceil(n/p) elements.

    Reduce-scatter: in step t of p-1, rank j sends segment j-t to j+1 and adds segment j-t-1 from j-1 to its
    own. Then all-gather: in step t of p-1, rank j sends segment j+1-t, by now a whole sum, and copies j-t.
    Every segment is summed along one chain of ranks and then copied, so all ranks end bit-identical.

    Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69 (2009), section 4. No deviation; lengths that p does not
    divide, which the paper sets aside, are cut by `segments`.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: j, 0 to p-1.

    Raises:
        ValueError: a count or rank out of range.
    """
    _check_rank("rank", rank, workers)
    after, before = (rank + 1) % workers, (rank - 1) % workers
    reduce_scatter = [
        Step(
            send_to=after,
            send_segment=(rank - t) % workers,
            recv_from=before,
            recv_segment=(rank - t - 1) % workers,
            op="add",
        )
        for t in range(workers - 1)
    ]
    all_gather = [
        Step(
            send_to=after,
            send_segment=(rank + 1 - t) % workers,
            recv_from=before,
            recv_segment=(rank - t) % workers,
            op="copy",
        )
        for t in range(workers - 1)
    ]
    return Schedule(workers=workers, rank=rank, segments=workers, steps=(*reduce_scatter, *all_gather))


def chain_broadcast(workers: int, rank: int, root: int, parts: int = 16) -> Schedule:
    """Copy the root's vector to all ranks along the chain root, root+1, … in parts+p-2 steps.

    The vector travels as `parts` segments, one a step, so that every link of the chain is busy at once: in
    step t, the rank that stands q places after the root sends segment t-q on and receives segment t-q+1.

    Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
    practice, and experience", Concurrency and Computation 19 (2007), on pipelined broadcast. No deviation.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: 0 to p-1.
        root: the rank that has the vector, 0 to p-1.
        parts: at least 1; more parts shorten the fill of the pipeline (p-2 segments) and cost a message each.

    Raises:
        ValueError: a count or rank out of range.
    """
    _check_rank("rank", rank, workers)
    _check_rank("root", root, workers)
    if parts < 1:
        raise ValueError(f"expected at least 1 part, got {parts}")
    if workers == 1:
        return Schedule(workers=1, rank=0, segments=parts, steps=())
    place = (rank - root) % workers
    after = (rank + 1) % workers if place < workers - 1 else None
    before = (rank - 1) % workers if place > 0 else None
    steps = []
    for t in range(parts + workers - 2):
        sends = after is not None and 0 <= t - place < parts
        receives = before is not None and 0 <= t - place + 1 < parts
        steps.append(
            Step(
                send_to=after if sends else None,
                send_segment=t - place if sends else None,
                recv_from=before if receives else None,
                recv_segment=t - place + 1 if receives else None,
            )
        )
    return Schedule(workers=workers, rank=rank, segments=parts, steps=tuple(steps))


def _check_rank(name: str, rank: int, workers: int) -> None:
    if workers < 1:
        raise ValueError(f"expected at least 1 worker, got {workers}")
    if not 0 <= rank < workers:
        raise ValueError(f"expected a {name} from 0 to {workers - 1}, got {rank}")
