"""Collectives as data: which rank sends which segments to which rank in which step, and what it receives.

A vector is cut into `Schedule.segments` segments; a `Schedule` is one rank's list of steps over them. The
executor over links, the simulator and the cost model read the same schedule. Nothing here touches a tensor,
sends anything, or imports more than the standard library.

Every schedule of this module but `all_to_all` guarantees:

- Steps are numbered alike on all ranks: in step t, rank a sends some segments to b exactly if b in step t
  receives the same segments from a. The step's index can therefore serve as the message's tag, and a rank
  without work in a step has an idle `Step()` there.
- A step sends the values from before that step, even if it receives into the same segments.
- After the last step all ranks hold bit-identical values: all ranks that add the same segment in a step add
  the same two values, and floating-point addition of two values is commutative.
- A segment is copied to a rank only after everything that the rank sent of it has been received, so that the
  copy may overwrite the memory that was sent from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, TypeAlias

Operation: TypeAlias = Literal["add", "copy"]
IntraGroup: TypeAlias = Literal["ring", "tree", "direct"]

ALGORITHMS = ("ring", "recursive_doubling", "rabenseifner", "direct")
"""All-reduces that depend only on the number of ranks; see `schedule`."""

AUTO = "auto"
"""An all-reduce by the algorithm that `algorithm_for` chooses."""

_SHORT_BYTES, _MEDIUM_BYTES = 8 << 10, 128 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Data that one rank sends and receives at the same time; either may be missing, both in an idle step.

    Attributes:
        send_to: the rank to send to.
        send_segment: the first segment to send.
        send_count: number of contiguous segments to send, from `send_segment` on.
        recv_from: the rank to receive from.
        recv_segment: the first segment to receive.
        recv_count: number of contiguous segments to receive, from `recv_segment` on.
        op: how received segments are used: added to the rank's own, or copied over them.
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
        workers: number of ranks.
        rank: the rank of this part, 0 to `workers` - 1.
        segments: number of segments that the vector is cut into (by the function `cut_segments`).
        steps: in order; equally many on every rank.
    """

    workers: int
    rank: int
    segments: int
    steps: tuple[Step, ...]

    def elements_sent(self, length: int) -> int:
        """Return the number of elements that this rank sends for a vector of `length` elements."""
        bounds = cut_segments(length, self.segments)
        spans = [segment_span(bounds, step.send_segment, step.send_count) for step in self.steps]
        return sum(stop - start for start, stop in spans)

    def elements_received(self, length: int) -> int:
        """Return the number of elements that this rank receives for a vector of `length` elements."""
        bounds = cut_segments(length, self.segments)
        spans = [segment_span(bounds, step.recv_segment, step.recv_count) for step in self.steps]
        return sum(stop - start for start, stop in spans)


def cut_segments(length: int, parts: int) -> list[tuple[int, int]]:
    """Cut `length` elements into `parts` contiguous (start, stop) segments whose sizes differ by at most 1.

    The longer segments come first; with fewer elements than parts the last segments are empty.

    Raises:
        ValueError: `length` is negative or `parts` is less than 1.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"expected a length of at least 0 and at least 1 part, got {length} and {parts}")
    size, longer = divmod(length, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return list(pairwise(starts))


def segment_span(bounds: list[tuple[int, int]], segment: int | None, count: int) -> tuple[int, int]:
    """Return the (start, stop) elements of `count` contiguous segments; (0, 0) if `segment` is None."""
    return (0, 0) if segment is None else (bounds[segment][0], bounds[segment + count - 1][1])


def algorithm_for(nbytes: int, workers: int) -> str:
    """Return the all-reduce that takes least time for vectors of a size, on one host and on lines alike.

    Up to 8 KiB only the number of steps counts: recursive doubling. Up to 128 KiB `rabenseifner`, which sends
    no more than a ring does in fewer steps, if the number of ranks is a power of two; else a ring.

    Source: the three ranges are those of Thakur, Rabenseifner and Gropp 2005 (as in `recursive_doubling`),
    section 4.5. Deviation: their limits are 2 KB and, on networks where distant ranks share lines, 512 KB;
    these were measured by `python -m benchmarks allreduce`.

    Args:
        nbytes: of the vector on one rank.
        workers: number of ranks, at least 1.
    """
    if nbytes <= _SHORT_BYTES:
        return "recursive_doubling"
    is_power_of_two = not workers & (workers - 1)
    return "rabenseifner" if nbytes <= _MEDIUM_BYTES and is_power_of_two else "ring"


def schedule(algorithm: str, workers: int, rank: int) -> Schedule:
    """Return a rank's part in an all-reduce, by the algorithm's name.

    Args:
        algorithm: one of `ALGORITHMS`, or `hierarchical:G` or `torus:G` for groups of G ranks.
        workers: p, at least 1.
        rank: 0 to p-1.

    Raises:
        ValueError: unknown algorithm, or a count or rank is out of range.
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
        case "torus", ":", group if group.isdecimal():
            return torus(workers, rank, int(group))
    known = ", ".join(ALGORITHMS)
    raise ValueError(f"expected an algorithm of {known}, hierarchical:G or torus:G, got {algorithm!r}")


def ring(workers: int, rank: int) -> Schedule:
    """Sum a vector over all ranks in 2(p-1) steps; each sends at most 2(p-1) segments of ceil(n/p) elements.

    Reduce-scatter: in step t of p-1, rank j sends segment j-t to j+1 and adds segment j-t-1 from j-1 to its
    own. Then all-gather: in step t of p-1, rank j sends segment j+1-t, by now complete, and copies j-t.
    Every segment is summed along one chain of ranks and then copied, so that all ranks end bit-identical.

    Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69 (2009), section 4. No deviation; lengths that p does not
    divide, which the paper leaves out, are cut by `cut_segments`.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: j, 0 to p-1.

    Raises:
        ValueError: a count or rank is out of range.
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
    steps = (*reduce_scatter, *_ring_gather(workers, rank, own=rank + 1))
    return Schedule(workers=workers, rank=rank, segments=workers, steps=steps)


def all_gather(workers: int, rank: int) -> Schedule:
    """Copy segment j of rank j to all ranks, in p-1 steps: the second half of `ring`.

    Source: see `ring`.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: j, 0 to p-1.

    Raises:
        ValueError: a count or rank is out of range.
    """
    _check_rank("rank", rank, workers)
    steps = tuple(_ring_gather(workers, rank, own=rank))
    return Schedule(workers=workers, rank=rank, segments=workers, steps=steps)


def all_to_all(workers: int, rank: int) -> Schedule:
    """Send segment k of each rank j to rank k, which receives it as segment p+j.

    A vector has 2p segments: p to send, and room for those that are received. The segment of a rank for
    itself is not copied. In step t of p-1, rank j sends to j+t and receives what j-t sends in that step.

    Source: textbook (personalised exchange).

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: j, 0 to p-1.

    Raises:
        ValueError: a count or rank is out of range.
    """
    _check_rank("rank", rank, workers)
    steps = []
    for distance in range(1, workers):
        after, before = (rank + distance) % workers, (rank - distance) % workers
        steps.append(Step(send_to=after, send_segment=after, recv_from=before, recv_segment=workers + before))
    return Schedule(workers=workers, rank=rank, segments=2 * workers, steps=tuple(steps))


def _ring_gather(workers: int, rank: int, own: int) -> list[Step]:
    """Return the steps in which each rank sends on what it has: in the first one its own segment."""
    return [
        Step(
            send_to=(rank + 1) % workers,
            send_segment=(own - t) % workers,
            recv_from=(rank - 1) % workers,
            recv_segment=(own - t - 1) % workers,
            op="copy",
        )
        for t in range(workers - 1)
    ]


def recursive_doubling(workers: int, rank: int, *, far_first: bool = False) -> Schedule:
    """Sum a vector over all ranks in log2 p steps, of the whole vector each: the butterfly.

    With q the largest power of two of at most p ranks, the first 2(p-q) ranks fold in pairs: the even rank
    sends its vector to the odd one and idles until it receives the sum. The remaining q ranks exchange whole
    vectors with partners at distance 1, 2, 4, …, q/2, or in the reverse order.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. of High Performance Computing Applications 19 (2005), section 4.5. No deviation.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: 0 to p-1.
        far_first: exchange with partners at distance q/2 first. Sums may differ in their last bits.

    Raises:
        ValueError: a count or rank is out of range.
    """
    _check_rank("rank", rank, workers)
    masks = _masks(workers)
    index = _folded_index(workers, rank)
    whole = {"send_segment": 0, "recv_segment": 0}
    steps = [Step() for _ in masks]
    if index is not None:
        partners = [_rank_of(workers, index ^ mask) for mask in (masks[::-1] if far_first else masks)]
        steps = [Step(send_to=one, recv_from=one, op="add", **whole) for one in partners]
    return Schedule(workers=workers, rank=rank, segments=1, steps=_add_folds(workers, rank, 1, steps))


def rabenseifner(workers: int, rank: int) -> Schedule:
    """Sum a vector over all ranks in 2 log2 p steps that send 2(p-1)/p of it, if p is a power of two.

    Folded to q ranks as in `recursive_doubling`. Reduce-scatter by recursive halving: with partners at
    distance q/2, …, 2, 1, a rank sends the half that the partner continues with and adds the half that it
    receives to its own. Then all-gather by recursive doubling, in the reverse order.

    Source: Thakur, Rabenseifner and Gropp 2005 (as in `recursive_doubling`), section 4.5. Deviation: with
    fewer than q elements MPICH uses recursive doubling; here some segments are empty then.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: 0 to p-1.

    Raises:
        ValueError: a count or rank is out of range.
    """
    _check_rank("rank", rank, workers)
    masks = _masks(workers)
    count = 1 << len(masks)
    index = _folded_index(workers, rank)
    steps = [Step() for _ in 2 * masks]
    if index is not None:
        halving, doubling = [], []
        for mask in reversed(masks):
            partner = _rank_of(workers, index ^ mask)
            own, partners = index & -mask, (index ^ mask) & -mask
            both = {"send_to": partner, "send_count": mask, "recv_from": partner, "recv_count": mask}
            halving.append(Step(send_segment=partners, recv_segment=own, op="add", **both))
            doubling.append(Step(send_segment=own, recv_segment=partners, op="copy", **both))
        steps = halving + doubling[::-1]
    return Schedule(workers=workers, rank=rank, segments=count, steps=_add_folds(workers, rank, count, steps))


def direct(workers: int, rank: int) -> Schedule:
    """Sum a vector over all ranks with 2 messages to each other rank and a latency of only 2 steps.

    Every rank sends to each other rank the segment that the other one sums, all at once; then it sends the
    sum of its own segment to all. As many bytes as in `ring`, and the latency of 2 steps instead of 2(p-1),
    if ranks can send to and receive from many ranks at once. Segment j is summed on rank j: its own, then
    j-1, …

    Source: textbook (reduce-scatter and all-gather by personalised exchange).

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: j, 0 to p-1.

    Raises:
        ValueError: a count or rank is out of range.
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


def hierarchical(workers: int, rank: int, group: int, intra_group: IntraGroup = "ring") -> Schedule:
    """Sum a vector over all ranks: inside groups to their masters, over the masters in a ring, and back.

    A group is `group` adjacent ranks, fewer in the last one; its first rank is its master. Inside a group the
    algorithms are

    - `ring`: to the master by a reduce-scatter along a ring and then segment by segment; back in reverse.
      With G ranks per group and M groups this takes 4(G-1) + 2(M-1) steps.
    - `tree`: whole vectors along a binomial tree, 2 ceil(log2 G) + 2(M-1) steps.
    - `direct`: whole vectors from all ranks to the master and back, 2(G-1) + 2(M-1) steps; apart from those
      of the masters' ring, they wait for each other only twice.

    Source: X. Jia et al., "Highly scalable deep learning training system with mixed-precision: training
    ImageNet in four minutes", arXiv 1807.11205 (2018), section 3.3; `ring` takes the number of steps given
    there. How a ring reduces to a master is not described there; this is ours.

    Args:
        workers: p, at least 1.
        rank: 0 to p-1.
        group: G, at least 1; with 1, or with p or more, one of the levels is empty.
        intra_group: the algorithm inside a group.

    Raises:
        ValueError: a count or rank is out of range, or an unknown algorithm.
    """
    _check_rank("rank", rank, workers)
    if group < 1:
        raise ValueError(f"expected groups of at least 1 rank, got {group}")
    if intra_group not in _INTRA_STEPS:
        raise ValueError(f"expected one of {', '.join(_INTRA_STEPS)} inside a group, got {intra_group!r}")
    group = min(group, workers)
    masters = -(-workers // group)
    fine = group * masters  # segments of both levels are unions of these
    master = rank // group * group
    size = min(group, workers - master)
    reduce, broadcast = _INTRA_STEPS[intra_group]
    idle = [Step()] * (len(reduce(group, 0)) - len(reduce(size, 0)))  # for a smaller last group
    runs = cut_segments(fine, size if intra_group == "ring" else 1)
    steps = [_map_step(step, master, 1, runs) for step in reduce(size, rank - master)] + idle
    if rank == master:
        runs_across = cut_segments(fine, masters)
        steps += [_map_step(step, 0, group, runs_across) for step in ring(masters, rank // group).steps]
    else:
        steps += [Step()] * (2 * (masters - 1))
    steps += [_map_step(step, master, 1, runs) for step in broadcast(size, rank - master)] + idle
    return Schedule(workers=workers, rank=rank, segments=fine, steps=tuple(steps))


def torus(workers: int, rank: int, group: int) -> Schedule:
    """Sum a vector over all ranks in two levels: each rank sums one part of it over all groups.

    A group is G adjacent ranks. A reduce-scatter along its ring leaves each rank with the group's sum of one
    of G parts. The M ranks that have the same part sum it in a ring of their own, and an all-gather along
    the ring of the group follows. So in 2(G-1) + 2(M-1) steps a group sends 2(M-1)/M of the vector to other
    groups, as in `hierarchical`, but from all of its ranks at once.

    Source: H. Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", arXiv
    1811.05233 (2018), section 2.2 (2D-torus all-reduce). No deviation.

    Args:
        workers: p, at least 1.
        rank: 0 to p-1.
        group: G, a divisor of p; with 1 or p, one of the levels is empty.

    Raises:
        ValueError: a count or rank is out of range, or G does not divide p.
    """
    _check_rank("rank", rank, workers)
    if group < 1 or workers % group:
        raise ValueError(f"expected groups of equal size of {workers} ranks, got groups of {group}")
    first, groups = rank // group * group, workers // group
    parts = cut_segments(workers, group)
    inside = [_map_step(step, first, 1, parts) for step in ring(group, rank - first).steps]
    start, _ = parts[(rank - first + 1) % group]  # of the part that the reduce-scatter leaves here
    pieces = [(start + piece, start + piece + 1) for piece in range(groups)]
    between = [_map_step(step, rank - first, group, pieces) for step in ring(groups, rank // group).steps]
    steps = (*inside[: group - 1], *between, *inside[group - 1 :])
    return Schedule(workers=workers, rank=rank, segments=workers, steps=steps)


def chain_broadcast(workers: int, rank: int, root: int, parts: int = 16) -> Schedule:
    """Copy the root's vector to all ranks along the chain root, root+1, … in parts+p-2 steps.

    The vector is sent as `parts` segments, one per step, so that all links of the chain are busy at once: in
    step t, the rank q places after the root forwards segment t-q and receives segment t-q+1.

    Source: E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory,
    practice, and experience", Concurrency and Computation 19 (2007), on pipelined broadcast. No deviation.

    Args:
        workers: p, at least 1; a world of one has no steps.
        rank: 0 to p-1.
        root: the rank that has the vector, 0 to p-1.
        parts: at least 1; more parts fill the pipeline sooner (p-2 segments) and cost one message each.

    Raises:
        ValueError: a count or rank is out of range.
    """
    _check_rank("rank", rank, workers)
    _check_rank("root", root, workers)
    if parts < 1:
        raise ValueError(f"expected at least 1 part, got {parts}")
    if workers == 1:
        return Schedule(workers=1, rank=0, segments=parts, steps=())
    index = (rank - root) % workers
    after = (rank + 1) % workers if index < workers - 1 else None
    before = (rank - 1) % workers if index > 0 else None
    steps = []
    for t in range(parts + workers - 2):
        sends = after is not None and 0 <= t - index < parts
        receives = before is not None and 0 <= t - index + 1 < parts
        steps.append(
            Step(
                send_to=after if sends else None,
                send_segment=t - index if sends else None,
                recv_from=before if receives else None,
                recv_segment=t - index + 1 if receives else None,
            )
        )
    return Schedule(workers=workers, rank=rank, segments=parts, steps=tuple(steps))


def _masks(workers: int) -> list[int]:
    """Return the distances 1, 2, 4, … below the largest power of two of at most `workers`."""
    return [1 << bit for bit in range(workers.bit_length() - 1)]


def _folded_index(workers: int, rank: int) -> int | None:
    """Return a rank's index among the ranks that continue after folding; None for one that idles."""
    extra = workers - (1 << (workers.bit_length() - 1))
    if rank >= 2 * extra:
        return rank - extra
    return rank // 2 if rank % 2 else None


def _rank_of(workers: int, index: int) -> int:
    extra = workers - (1 << (workers.bit_length() - 1))
    return 2 * index + 1 if index < extra else index + extra


def _add_folds(workers: int, rank: int, count: int, steps: list[Step]) -> tuple[Step, ...]:
    """Add a step before and one after, in which the idle ranks send their vectors and receive the sums."""
    extra = workers - (1 << (workers.bit_length() - 1))
    if not extra:
        return tuple(steps)
    fold, unfold = Step(), Step()
    if rank < 2 * extra and rank % 2:
        fold = Step(recv_from=rank - 1, recv_segment=0, recv_count=count, op="add")
        unfold = _reverse_step(fold)
    elif rank < 2 * extra:
        fold = Step(send_to=rank + 1, send_segment=0, send_count=count)
        unfold = _reverse_step(fold)
    return fold, *steps, unfold


_StepsOf: TypeAlias = Callable[[int, int], list["Step"]]


def _ring_reduce(size: int, rank: int) -> list[Step]:
    """Sum to rank 0: a reduce-scatter along the ring, after which rank j has the sum of segment j+1."""
    steps = [*ring(size, rank).steps[: size - 1]]
    for sender in range(1, size):
        segment = (sender + 1) % size
        if rank == sender:
            steps.append(Step(send_to=0, send_segment=segment))
        else:
            steps.append(Step(recv_from=sender, recv_segment=segment) if rank == 0 else Step())
    return steps


def _ring_broadcast(size: int, rank: int) -> list[Step]:
    """Copy from rank 0: segment j+1 to each rank j, then along the ring except to rank 0."""
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


def _tree_reduce(size: int, rank: int) -> list[Step]:
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


def _tree_broadcast(size: int, rank: int) -> list[Step]:
    return [_reverse_step(step) for step in reversed(_tree_reduce(size, rank))]


def _direct_reduce(size: int, rank: int) -> list[Step]:
    steps = []
    for sender in range(1, size):
        if rank == sender:
            steps.append(Step(send_to=0, send_segment=0))
        else:
            steps.append(Step(recv_from=sender, recv_segment=0, op="add") if rank == 0 else Step())
    return steps


def _direct_broadcast(size: int, rank: int) -> list[Step]:
    return [_reverse_step(step) for step in _direct_reduce(size, rank)]


_INTRA_STEPS: Mapping[str, tuple[_StepsOf, _StepsOf]] = MappingProxyType(
    {
        "ring": (_ring_reduce, _ring_broadcast),
        "tree": (_tree_reduce, _tree_broadcast),
        "direct": (_direct_reduce, _direct_broadcast),
    }
)


def _reverse_step(step: Step) -> Step:
    """Return the step that copies back what this step sends or receives."""
    return Step(
        send_to=step.recv_from,
        send_segment=step.recv_segment,
        send_count=step.recv_count,
        recv_from=step.send_to,
        recv_segment=step.send_segment,
        recv_count=step.send_count,
    )


def _map_step(step: Step, first: int, stride: int, runs: list[tuple[int, int]]) -> Step:
    """Map a step to the ranks first, first + stride, …, with segments that are runs of finer ones."""
    mapped = Step(op=step.op)
    if step.send_to is not None:
        start, stop = segment_span(runs, step.send_segment, step.send_count)
        mapped = replace(
            mapped, send_to=first + step.send_to * stride, send_segment=start, send_count=stop - start
        )
    if step.recv_from is not None:
        start, stop = segment_span(runs, step.recv_segment, step.recv_count)
        mapped = replace(
            mapped, recv_from=first + step.recv_from * stride, recv_segment=start, recv_count=stop - start
        )
    return mapped


def _check_rank(name: str, rank: int, workers: int) -> None:
    if workers < 1:
        raise ValueError(f"expected at least 1 worker, got {workers}")
    if not 0 <= rank < workers:
        raise ValueError(f"expected a {name} from 0 to {workers - 1}, got {rank}")
