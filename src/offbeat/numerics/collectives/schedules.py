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
- A segment is copied to a rank only once everything that the rank sent of it has been received, so that what
  is copied may be written over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, TypeAlias

Operation: TypeAlias = Literal["add", "copy"]
Intra: TypeAlias = Literal["ring", "tree", "direct"]

ALGORITHMS = ("ring", "recursive_doubling", "rabenseifner", "direct")
"""All-reduces that need to know nothing but how many ranks there are; see `schedule`."""


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


def schedule(algorithm: str, workers: int, rank: int) -> Schedule:
    """Return a rank's part in an all-reduce, by the name of its algorithm.

    Args:
        algorithm: one of `ALGORITHMS`, or `hierarchical:G` for groups of G ranks.
        workers: p, at least 1.
        rank: 0 to p-1.

    Raises:
        ValueError: an unknown algorithm, or a count or rank out of range.
    """
    match algorithm.partition(":"):
        case "ring", "", "":
            return ring(workers, rank)
        case "recursive_doubling", "", "":
            return recursive_doubling(workers, rank)
        case "rabenseifner", "", "":
            return rabenseifner(workers, rank)
        case "direct", "", "":
            return direct(workers, rank)
        case "hierarchical", ":", group if group.isdecimal():
            return hierarchical(workers, rank, int(group))
    known = ", ".join(ALGORITHMS)
    raise ValueError(f"expected an algorithm of {known} or hierarchical:G, got {algorithm!r}")


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


def recursive_doubling(workers: int, rank: int, *, far_first: bool = False) -> Schedule:
    """Sum a vector over all ranks in log2 p steps, of the whole vector each: the butterfly.

    With q the largest power of two of at most p ranks, the first 2(p-q) ranks fold in pairs: the even one
    gives its vector to the odd one and idles until it gets the sum back. The q ranks that are left exchange
    whole vectors with partners at distance 1, 2, 4, …, q/2, or the other way round.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. of High Performance Computing Applications 19 (2005), section 4.5. No deviation.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: 0 to p-1.
        far_first: partners at distance q/2 first. Sums may differ in their last bits.

    Raises:
        ValueError: a count or rank out of range.
    """
    _check_rank("rank", rank, workers)
    masks = _masks(workers)
    place = _folded(workers, rank)
    whole = {"send_segment": 0, "recv_segment": 0}
    steps = [Step() for _ in masks]
    if place is not None:
        partners = [_unfolded(workers, place ^ mask) for mask in (masks[::-1] if far_first else masks)]
        steps = [Step(send_to=one, recv_from=one, op="add", **whole) for one in partners]
    return Schedule(workers=workers, rank=rank, segments=1, steps=_with_folds(workers, rank, 1, steps))


def rabenseifner(workers: int, rank: int) -> Schedule:
    """Sum a vector over all ranks in 2 log2 p steps, of 2(p-1)/p of it in all where p is a power of two.

    Folded to q ranks as in `recursive_doubling`. Reduce-scatter by recursive halving: with partners at
    distance q/2, …, 2, 1, a rank gives away the half that the partner goes on with and adds what it gets to
    the other one. Then all-gather by recursive doubling, the same way back.

    Source: Thakur, Rabenseifner and Gropp 2005 (as in `recursive_doubling`), section 4.5. Deviation: with
    fewer than q elements MPICH turns to recursive doubling; here some segments are then empty.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: 0 to p-1.

    Raises:
        ValueError: a count or rank out of range.
    """
    _check_rank("rank", rank, workers)
    masks = _masks(workers)
    count = 1 << len(masks)
    place = _folded(workers, rank)
    steps = [Step() for _ in 2 * masks]
    if place is not None:
        halving, doubling = [], []
        for mask in reversed(masks):
            partner = _unfolded(workers, place ^ mask)
            mine, theirs = place & -mask, (place ^ mask) & -mask
            both = {"send_to": partner, "send_count": mask, "recv_from": partner, "recv_count": mask}
            halving.append(Step(send_segment=theirs, recv_segment=mine, op="add", **both))
            doubling.append(Step(send_segment=mine, recv_segment=theirs, op="copy", **both))
        steps = halving + doubling[::-1]
    return Schedule(
        workers=workers, rank=rank, segments=count, steps=_with_folds(workers, rank, count, steps)
    )


def direct(workers: int, rank: int) -> Schedule:
    """Sum a vector over all ranks with 2 messages to each other rank, which wait for each other only once.

    Every rank sends every other one the segment that is the other's to sum, all at once; then everybody the
    sum of its own. As many bytes as in `ring`, and the latency of 2 steps instead of 2(p-1), where ranks can
    send to many and hear from many at once. Segment j is summed on rank j: its own, then j-1, j-2, …

    Source: textbook (reduce-scatter and all-gather by personalised exchange).

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: j, 0 to p-1.

    Raises:
        ValueError: a count or rank out of range.
    """
    _check_rank("rank", rank, workers)
    steps: list[Step] = []
    for distance in range(1, workers):
        after, before = (rank + distance) % workers, (rank - distance) % workers
        steps.append(Step(send_to=after, send_segment=after, recv_from=before, recv_segment=rank, op="add"))
    for distance in range(1, workers):
        after, before = (rank + distance) % workers, (rank - distance) % workers
        steps.append(Step(send_to=after, send_segment=rank, recv_from=before, recv_segment=before))
    return Schedule(workers=workers, rank=rank, segments=workers, steps=tuple(steps))


def hierarchical(workers: int, rank: int, group: int, intra: Intra = "ring") -> Schedule:
    """Sum a vector over all ranks: inside groups to their masters, over the masters in a ring, and back.

    Groups are `group` neighbouring ranks, fewer in the last one; the first of each is its master. Inside a
    group the ways are

    - `ring`: to the master by a reduce-scatter along a ring and then segment by segment; back likewise. With
      G ranks a group and M groups that makes 4(G-1) + 2(M-1) steps.
    - `tree`: whole vectors along a binomial tree, 2 ceil(log2 G) + 2(M-1) steps.
    - `direct`: whole vectors from everybody to the master and back, 2(G-1) + 2(M-1) steps that wait for each
      other only twice but for the ring's.

    Source: X. Jia et al., "Highly scalable deep learning training system with mixed-precision: training
    ImageNet in four minutes", arXiv 1807.11205 (2018), section 3.3; `ring` takes as many steps as they count.
    How a ring reduces to a master is not said there; this is ours.

    Args:
        workers: p, at least 1.
        rank: 0 to p-1.
        group: G, at least 1; with 1, or with p or more, one of the levels is empty.
        intra: the way inside a group.

    Raises:
        ValueError: a count or rank out of range, or an unknown way.
    """
    _check_rank("rank", rank, workers)
    if group < 1:
        raise ValueError(f"expected groups of at least 1 rank, got {group}")
    if intra not in _WAYS:
        raise ValueError(f"expected a way of {', '.join(_WAYS)} inside a group, got {intra!r}")
    group = min(group, workers)
    masters = -(-workers // group)
    fine = group * masters  # of which both levels are made up
    master = rank // group * group
    size = min(group, workers - master)
    gather, spread = _WAYS[intra]
    idle = [Step()] * (len(gather(group, 0)) - len(gather(size, 0)))  # where the last group is smaller
    runs = segments(fine, size if intra == "ring" else 1)
    steps = [_mapped(step, master, 1, runs) for step in gather(size, rank - master)] + idle
    if rank == master:
        runs_across = segments(fine, masters)
        steps += [_mapped(step, 0, group, runs_across) for step in ring(masters, rank // group).steps]
    else:
        steps += [Step()] * (2 * (masters - 1))
    steps += [_mapped(step, master, 1, runs) for step in spread(size, rank - master)] + idle
    return Schedule(workers=workers, rank=rank, segments=fine, steps=tuple(steps))


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


def _masks(workers: int) -> list[int]:
    """The distances 1, 2, 4, … below the largest power of two of at most `workers`."""
    return [1 << bit for bit in range(workers.bit_length() - 1)]


def _folded(workers: int, rank: int) -> int | None:
    """Where a rank stands among those that go on after folding; None for one that idles."""
    extra = workers - (1 << (workers.bit_length() - 1))
    if rank >= 2 * extra:
        return rank - extra
    return rank // 2 if rank % 2 else None


def _unfolded(workers: int, place: int) -> int:
    extra = workers - (1 << (workers.bit_length() - 1))
    return 2 * place + 1 if place < extra else place + extra


def _with_folds(workers: int, rank: int, count: int, steps: list[Step]) -> tuple[Step, ...]:
    """Puts before and after what the folded ranks do what the others give them and get from them."""
    extra = workers - (1 << (workers.bit_length() - 1))
    if not extra:
        return tuple(steps)
    fold, unfold = Step(), Step()
    if rank < 2 * extra and rank % 2:
        fold = Step(recv_from=rank - 1, recv_segment=0, recv_count=count, op="add")
        unfold = _turned(fold)
    elif rank < 2 * extra:
        fold = Step(send_to=rank + 1, send_segment=0, send_count=count)
        unfold = _turned(fold)
    return fold, *steps, unfold


_Way: TypeAlias = Callable[[int, int], list["Step"]]


def _ring_gather(size: int, rank: int) -> list[Step]:
    """Sums to rank 0: a reduce-scatter along the ring, after which rank j has the sum of segment j+1."""
    steps = [*ring(size, rank).steps[: size - 1]]
    for sender in range(1, size):
        segment = (sender + 1) % size
        if rank == sender:
            steps.append(Step(send_to=0, send_segment=segment))
        else:
            steps.append(Step(recv_from=sender, recv_segment=segment) if rank == 0 else Step())
    return steps


def _ring_spread(size: int, rank: int) -> list[Step]:
    """Copies from rank 0: to each rank j segment j+1, and then along the ring but for rank 0."""
    steps = []
    for receiver in range(1, size):
        segment = (receiver + 1) % size
        if rank == receiver:
            steps.append(Step(recv_from=0, recv_segment=segment))
        else:
            steps.append(Step(send_to=receiver, send_segment=segment) if rank == 0 else Step())
    for step in ring(size, rank).steps[size - 1 :]:
        if rank == 0:
            step = replace(step, recv_from=None, recv_segment=None)
        if step.send_to == 0:
            step = replace(step, send_to=None, send_segment=None)
        steps.append(step)
    return steps


def _tree_gather(size: int, rank: int) -> list[Step]:
    steps = []
    for bit in range((size - 1).bit_length()):
        mask = 1 << bit
        if rank % mask:
            steps.append(Step())
        elif rank & mask:
            steps.append(Step(send_to=rank - mask, send_segment=0))
        else:
            child = {"recv_from": rank + mask, "recv_segment": 0}
            steps.append(Step(op="add", **child) if rank + mask < size else Step())
    return steps


def _tree_spread(size: int, rank: int) -> list[Step]:
    return [_turned(step) for step in reversed(_tree_gather(size, rank))]


def _direct_gather(size: int, rank: int) -> list[Step]:
    steps = []
    for sender in range(1, size):
        if rank == sender:
            steps.append(Step(send_to=0, send_segment=0))
        else:
            steps.append(Step(recv_from=sender, recv_segment=0, op="add") if rank == 0 else Step())
    return steps


def _direct_spread(size: int, rank: int) -> list[Step]:
    return [_turned(step) for step in _direct_gather(size, rank)]


_WAYS: Mapping[str, tuple[_Way, _Way]] = MappingProxyType(
    {
        "ring": (_ring_gather, _ring_spread),
        "tree": (_tree_gather, _tree_spread),
        "direct": (_direct_gather, _direct_spread),
    }
)


def _turned(step: Step) -> Step:
    """The copy back of what a step sums."""
    return Step(
        send_to=step.recv_from,
        send_segment=step.recv_segment,
        send_count=step.recv_count,
        recv_from=step.send_to,
        recv_segment=step.send_segment,
        recv_count=step.send_count,
    )


def _mapped(step: Step, first: int, stride: int, runs: list[tuple[int, int]]) -> Step:
    """A step among ranks first, first + stride, … whose segments are runs of finer ones."""
    found = Step(op=step.op)
    if step.send_to is not None:
        start, stop = span(runs, step.send_segment, step.send_count)
        found = replace(
            found, send_to=first + step.send_to * stride, send_segment=start, send_count=stop - start
        )
    if step.recv_from is not None:
        start, stop = span(runs, step.recv_segment, step.recv_count)
        found = replace(
            found, recv_from=first + step.recv_from * stride, recv_segment=start, recv_count=stop - start
        )
    return found


def _check_rank(name: str, rank: int, workers: int) -> None:
    if workers < 1:
        raise ValueError(f"expected at least 1 worker, got {workers}")
    if not 0 <= rank < workers:
        raise ValueError(f"expected a {name} from 0 to {workers - 1}, got {rank}")
