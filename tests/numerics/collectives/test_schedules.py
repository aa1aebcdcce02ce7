"""Collectives as data, run by an executor in memory that also checks that the steps of all ranks fit."""

import math
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.collectives.schedules import (
    ALGORITHMS,
    Step,
    algorithm_for,
    all_gather,
    all_to_all,
    chain_broadcast,
    cut_segments,
    direct,
    hierarchical,
    rabenseifner,
    recursive_doubling,
    ring,
    schedule,
    segment_span,
    torus,
)

HIERARCHIES = [
    (f"{intra} in groups of {group}", partial(hierarchical, group=group, intra_group=intra))
    for intra in ("ring", "tree", "direct")
    for group in (1, 2, 3, 4, 17)
]


def torus_of_divisor(workers, rank, group):
    """A torus with groups of the largest common divisor."""
    return torus(workers, rank, math.gcd(workers, group))


ALL_REDUCES = dict(
    [
        *((name, partial(schedule, name)) for name in ALGORITHMS),
        ("far first", partial(recursive_doubling, far_first=True)),
        *HIERARCHIES,
        *((f"torus of {group}", partial(torus_of_divisor, group=group)) for group in (1, 4, 6, 17)),
    ]
)
all_algorithms = pytest.mark.parametrize("make", ALL_REDUCES.values(), ids=ALL_REDUCES.keys())


def execute(schedules, vectors):
    """Run all ranks in step; a step sends the values from before it."""
    vectors = [list(vector) for vector in vectors]
    length = len(vectors[0])
    bounds = cut_segments(length, schedules[0].segments)
    assert len({(len(schedule.steps), schedule.segments) for schedule in schedules}) == 1
    for steps in zip(*(one.steps for one in schedules), strict=True):
        posted = {}
        for rank, step in enumerate(steps):
            if step.send_to is not None:
                assert step.send_to != rank
                start, stop = segment_span(bounds, step.send_segment, step.send_count)
                key = (rank, step.send_to, step.send_segment, step.send_count)
                posted[key] = vectors[rank][start:stop]
        for rank, step in enumerate(steps):
            if step.recv_from is not None:
                start, stop = segment_span(bounds, step.recv_segment, step.recv_count)
                got = posted.pop((step.recv_from, rank, step.recv_segment, step.recv_count))
                own = vectors[rank][start:stop]
                vectors[rank][start:stop] = (
                    [a + b for a, b in zip(own, got, strict=True)] if step.op == "add" else got
                )
        assert not posted, "sent, but never received in the same step"
    return vectors


@given(st.integers(0, 1000), st.integers(1, 40))
def test_segments_are_neighbours_cover_all_and_differ_by_at_most_one(length, parts):
    cut = cut_segments(length, parts)
    assert [element for start, stop in cut for element in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in cut]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("length", "parts"), [(-1, 2), (3, 0), (3, -1)])
def test_segments_refuse_impossible_lengths_and_parts(length, parts):
    with pytest.raises(ValueError, match="expected a length of at least 0 and at least 1 part, got"):
        cut_segments(length, parts)


@all_algorithms
def test_every_all_reduce_equals_the_sum_on_every_rank(make):
    for workers in range(1, 18):
        schedules = [make(workers, rank) for rank in range(workers)]
        for length in [0, 1, 2, 17, 101]:
            draw = random.Random(f"{workers} {length}")
            vectors = [[draw.randrange(-(10**6), 10**6) for _ in range(length)] for _ in range(workers)]
            expected = [sum(column) for column in zip(*vectors, strict=True)]
            assert execute(schedules, vectors) == [expected] * workers, (workers, length)


@all_algorithms
def test_all_ranks_end_bit_identical_although_float_addition_is_not_associative(make):
    for workers in range(1, 18):
        draw = random.Random(workers)
        vectors = [
            [draw.uniform(-1, 1) * 10.0 ** draw.randrange(-8, 8) for _ in range(60)] for _ in range(workers)
        ]
        results = execute([make(workers, rank) for rank in range(workers)], vectors)
        bits = [[value.hex() for value in result] for result in results]
        assert bits == [bits[0]] * workers
        for value, column in zip(results[0], zip(*vectors, strict=True), strict=True):
            assert math.isclose(value, math.fsum(column), abs_tol=1e-6)


@all_algorithms
def test_a_copied_segment_holds_everything_that_its_receiver_has_sent_of_it(make):
    """So an executor may write it over the data that it has sent: every sender contributes to the copy."""
    for workers in range(1, 18):
        schedules = [make(workers, rank) for rank in range(workers)]
        cut = cut_segments(schedules[0].segments, schedules[0].segments)
        vectors = [[frozenset()] * len(cut) for _ in range(workers)]
        for number, steps in enumerate(zip(*(one.steps for one in schedules), strict=True)):
            before = [list(vector) for vector in vectors]
            for rank, step in enumerate(steps):
                for segment in range(*segment_span(cut, step.send_segment, step.send_count)):
                    vectors[rank][segment] |= {(rank, number)}
            for rank, step in enumerate(steps):
                for segment in range(*segment_span(cut, step.recv_segment, step.recv_count)):
                    received = before[step.recv_from][segment] | {(step.recv_from, number)}
                    if step.op == "copy":
                        own = {(sender, sent) for sender, sent in vectors[rank][segment] if sender == rank}
                        assert own <= received
                        vectors[rank][segment] = received
                    else:
                        vectors[rank][segment] |= received


@pytest.mark.parametrize(
    ("make", "workers", "steps", "sent"),
    [
        (ring, 4, 6, 152),
        (ring, 5, 8, 162),
        (ring, 8, 14, 178),
        (recursive_doubling, 4, 2, 202),
        (recursive_doubling, 5, 4, 303),
        (recursive_doubling, 8, 3, 303),
        (rabenseifner, 4, 4, 152),
        (rabenseifner, 5, 6, 253),
        (rabenseifner, 8, 6, 179),
        (partial(torus, group=2), 4, 4, 152),  # half of 101, two quarters, half
        (partial(torus, group=4), 8, 8, 178),
        (direct, 4, 6, 153),  # rank 0: three segments of 25, then its own of 26 to three
    ],
)
def test_a_vector_of_101_elements_takes_the_known_steps_and_elements(make, workers, steps, sent):
    schedules = [make(workers, rank) for rank in range(workers)]
    assert {len(one.steps) for one in schedules} == {steps}
    assert max(one.elements_sent(101) for one in schedules) == sent


def test_1024_workers_in_groups_of_16_take_the_papers_186_steps_and_a_flat_ring_2046():
    assert {len(hierarchical(1024, rank, 16).steps) for rank in (0, 1, 15, 16, 1023)} == {186}
    assert len(ring(1024, 5).steps) == 2046


@pytest.mark.parametrize(
    ("intra", "workers", "group", "steps"),
    [("tree", 16, 4, 2 * 2 + 2 * 3), ("tree", 10, 5, 2 * 3 + 2), ("direct", 16, 4, 2 * 3 + 2 * 3)],
)
def test_the_other_algorithms_inside_a_group_take_the_stated_steps(intra, workers, group, steps):
    assert {len(hierarchical(workers, rank, group, intra).steps) for rank in range(workers)} == {steps}


@given(workers=st.integers(1, 17), elements=st.integers(0, 50))
def test_all_ranks_of_a_power_of_two_send_the_bandwidth_bound_with_halving_and_doubling(workers, elements):
    largest = 1 << (workers.bit_length() - 1)
    for rank in range(largest):
        assert rabenseifner(largest, rank).elements_sent(elements * largest) == 2 * (largest - 1) * elements
        assert (
            recursive_doubling(largest, rank).elements_sent(elements) == (largest - 1).bit_length() * elements
        )
        assert direct(largest, rank).elements_sent(elements * largest) == 2 * (largest - 1) * elements


def test_the_butterfly_goes_to_partners_at_growing_or_shrinking_distance():
    assert [step.send_to for step in recursive_doubling(8, 5).steps] == [4, 7, 1]
    assert [step.send_to for step in recursive_doubling(8, 5, far_first=True).steps] == [1, 7, 4]
    # Of five, ranks 0 and 1 fold: 0 idles, and 2 is the second of the four that continue.
    assert [step.send_to for step in recursive_doubling(5, 0).steps] == [1, None, None, None]
    assert [step.send_to for step in recursive_doubling(5, 2).steps] == [None, 1, 4, None]


@pytest.mark.parametrize(
    "name", ["", "tree", "ring:2", "hierarchical", "hierarchical:", "hierarchical:x", "torus:0x1"]
)
def test_an_unknown_algorithm_is_refused_with_the_known_ones(name):
    with pytest.raises(
        ValueError, match="ring, recursive_doubling, rabenseifner, direct, hierarchical:G or torus:G"
    ):
        schedule(name, 4, 0)


@pytest.mark.parametrize(
    ("nbytes", "workers", "name"),
    [
        (0, 1, "recursive_doubling"),
        (8 << 10, 3, "recursive_doubling"),
        ((8 << 10) + 1, 3, "ring"),
        ((8 << 10) + 1, 4, "rabenseifner"),
        (128 << 10, 8, "rabenseifner"),
        (128 << 10, 6, "ring"),
        ((128 << 10) + 1, 4, "ring"),
    ],
)
def test_short_vectors_take_few_steps_and_long_ones_the_fewest_bytes(nbytes, workers, name):
    assert algorithm_for(nbytes, workers) == name


def test_groups_need_a_rank_and_a_known_algorithm():
    with pytest.raises(ValueError, match="groups of at least 1 rank, got 0"):
        hierarchical(4, 0, 0)
    with pytest.raises(ValueError, match="ring, tree, direct inside a group, got 'star'"):
        hierarchical(4, 0, 2, "star")


@pytest.mark.parametrize("group", [0, 3, 5])
def test_a_torus_needs_groups_of_equal_size(group):
    with pytest.raises(ValueError, match=f"groups of equal size of 4 ranks, got groups of {group}"):
        torus(4, 0, group)


def test_two_levels_are_spelled_with_the_size_of_their_groups():
    assert schedule("hierarchical:2", 4, 1) == hierarchical(4, 1, 2)
    assert schedule("torus:2", 4, 1) == torus(4, 1, 2)


@given(st.integers(1, 17), st.integers(0, 1000))
def test_ring_takes_the_bandwidth_bound_to_within_a_segment_a_step(workers, length):
    schedules = [ring(workers, rank) for rank in range(workers)]
    for one in schedules:
        assert len(one.steps) == 2 * (workers - 1)
        assert one.elements_sent(length) <= 2 * (workers - 1) * -(-length // workers)
    assert sum(one.elements_sent(length) for one in schedules) == 2 * (workers - 1) * length
    assert sum(one.elements_received(length) for one in schedules) == 2 * (workers - 1) * length


def test_ring_follows_the_paper_step_by_step():
    # Rank j of p sends segment j-t and adds j-t-1, then sends j+1-t and copies j-t.
    assert ring(3, 1).steps == (
        Step(send_to=2, send_segment=1, recv_from=0, recv_segment=0, op="add"),
        Step(send_to=2, send_segment=0, recv_from=0, recv_segment=2, op="add"),
        Step(send_to=2, send_segment=2, recv_from=0, recv_segment=1, op="copy"),
        Step(send_to=2, send_segment=1, recv_from=0, recv_segment=0, op="copy"),
    )


@given(st.data(), st.integers(1, 17), st.integers(0, 60), st.integers(1, 20))
def test_chain_broadcast_copies_the_roots_vector(data, workers, length, parts):
    root = data.draw(st.integers(0, workers - 1))
    vectors = [[(rank, element) for element in range(length)] for rank in range(workers)]
    schedules = [chain_broadcast(workers, rank, root, parts) for rank in range(workers)]
    assert execute(schedules, vectors) == [vectors[root]] * workers
    assert len(schedules[0].steps) == (parts + workers - 2 if workers > 1 else 0)
    last = (root - 1) % workers
    for rank, one in enumerate(schedules):
        assert one.elements_sent(length) == (0 if rank == last else length)
        assert one.elements_received(length) == (0 if rank == root else length)


@given(st.integers(1, 17), st.integers(0, 6))
def test_all_gather_copies_each_ranks_segment_to_all(workers, elements):
    vectors = [[(rank, element) for element in range(workers * elements)] for rank in range(workers)]
    schedules = [all_gather(workers, rank) for rank in range(workers)]
    gathered = [(element // elements, element) for element in range(workers * elements)]
    assert execute(schedules, vectors) == [gathered] * workers
    for one in schedules:
        assert one.elements_sent(workers * elements) == (workers - 1) * elements


@given(st.integers(1, 17), st.integers(0, 6))
def test_all_to_all_sends_each_rank_its_segment_of_every_other_rank(workers, elements):
    """In each step, each rank sends to one other rank and receives what another one sends to it."""
    schedules = [all_to_all(workers, rank) for rank in range(workers)]
    received = [set() for _ in schedules]
    for steps in zip(*(one.steps for one in schedules), strict=True):
        assert sorted(step.send_to for step in steps) == [*range(workers)]
        for rank, step in enumerate(steps):
            assert (step.recv_segment, step.send_count, step.recv_count) == (workers + step.recv_from, 1, 1)
            assert steps[step.recv_from].send_to == steps[step.recv_from].send_segment == rank
            received[rank].add(step.recv_from)
    for rank, one in enumerate(schedules):
        assert received[rank] == {*range(workers)} - {rank}
        assert one.elements_sent(2 * workers * elements) == (workers - 1) * elements
        assert one.elements_received(2 * workers * elements) == (workers - 1) * elements


def test_an_idle_rank_keeps_its_steps():
    # The last of four in a chain of one segment waits two steps for it.
    assert chain_broadcast(4, 3, root=0, parts=1).steps == (
        Step(),
        Step(),
        Step(recv_from=2, recv_segment=0),
    )


@pytest.mark.parametrize(
    "make", [*ALL_REDUCES.values(), partial(chain_broadcast, root=0), all_gather, all_to_all]
)
@pytest.mark.parametrize(
    ("workers", "rank", "text"), [(0, 0, "1 worker"), (4, 4, "0 to 3"), (4, -1, "0 to 3")]
)
def test_ranks_out_of_range_are_refused(make, workers, rank, text):
    with pytest.raises(ValueError, match=text):
        make(workers, rank)


def test_a_chain_needs_a_root_in_range_and_a_part():
    with pytest.raises(ValueError, match="expected a root from 0 to 3, got 4"):
        chain_broadcast(4, 0, root=4)
    with pytest.raises(ValueError, match="expected at least 1 part, got 0"):
        chain_broadcast(4, 0, root=0, parts=0)
