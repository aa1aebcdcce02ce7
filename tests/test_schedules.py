"""Collectives as data, run by an executor in memory that also checks that the steps of all ranks fit."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.schedules import Schedule, Step, chain_broadcast, ring, segments, span


def execute(schedules: list[Schedule], vectors: list[list]) -> list[list]:
    """Run all ranks in step; what is sent in a step is taken from before it."""
    vectors = [list(vector) for vector in vectors]
    length = len(vectors[0])
    bounds = segments(length, schedules[0].segments)
    assert len({(len(schedule.steps), schedule.segments) for schedule in schedules}) == 1
    for steps in zip(*(schedule.steps for schedule in schedules), strict=True):
        posted = {}
        for rank, step in enumerate(steps):
            if step.send_to is not None:
                assert step.send_to != rank
                start, stop = span(bounds, step.send_segment, step.send_count)
                key = (rank, step.send_to, step.send_segment, step.send_count)
                posted[key] = vectors[rank][start:stop]
        for rank, step in enumerate(steps):
            if step.recv_from is not None:
                start, stop = span(bounds, step.recv_segment, step.recv_count)
                got = posted.pop((step.recv_from, rank, step.recv_segment, step.recv_count))
                own = vectors[rank][start:stop]
                vectors[rank][start:stop] = (
                    [a + b for a, b in zip(own, got, strict=True)] if step.op == "add" else got
                )
        assert not posted, "sent, but never received in the same step"
    return vectors


@given(st.integers(0, 1000), st.integers(1, 40))
def test_segments_are_neighbours_cover_all_and_differ_by_at_most_one(length, parts):
    cut = segments(length, parts)
    assert [element for start, stop in cut for element in range(start, stop)] == list(range(length))
    sizes = [stop - start for start, stop in cut]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("length", "parts"), [(-1, 2), (3, 0), (3, -1)])
def test_segments_refuse_what_cannot_be_cut(length, parts):
    with pytest.raises(ValueError, match="expected a length of at least 0 and at least 1 part, got"):
        segments(length, parts)


@pytest.mark.parametrize("workers", range(1, 18))
@pytest.mark.parametrize("length", [0, 1, 2, 3, 16, 17, 18, 101])
def test_ring_equals_the_sum_on_every_rank(workers, length):
    draw = random.Random(f"{workers} {length}")
    vectors = [[draw.randrange(-(10**6), 10**6) for _ in range(length)] for _ in range(workers)]
    expected = [sum(column) for column in zip(*vectors, strict=True)]
    assert execute([ring(workers, rank) for rank in range(workers)], vectors) == [expected] * workers


@given(st.integers(1, 17), st.integers(0, 60), st.integers())
def test_all_ranks_end_bit_identical_although_float_addition_is_not_associative(workers, length, seed):
    draw = random.Random(seed)
    vectors = [
        [draw.uniform(-1, 1) * 10.0 ** draw.randrange(-8, 8) for _ in range(length)] for _ in range(workers)
    ]
    results = execute([ring(workers, rank) for rank in range(workers)], vectors)
    assert all(
        [value.hex() for value in result] == [value.hex() for value in results[0]] for result in results
    )
    for value, column in zip(results[0], zip(*vectors, strict=True), strict=True):
        assert math.isclose(value, math.fsum(column), abs_tol=1e-6)


@pytest.mark.parametrize(("workers", "steps", "sent"), [(4, 6, 152), (5, 8, 162), (8, 14, 178)])
def test_ring_of_101_elements_takes_the_known_steps_and_elements(workers, steps, sent):
    schedules = [ring(workers, rank) for rank in range(workers)]
    assert {len(schedule.steps) for schedule in schedules} == {steps}
    assert max(schedule.sent(101) for schedule in schedules) == sent


@given(st.integers(1, 17), st.integers(0, 1000))
def test_ring_takes_the_bandwidth_bound_to_within_a_segment_a_step(workers, length):
    schedules = [ring(workers, rank) for rank in range(workers)]
    for schedule in schedules:
        assert len(schedule.steps) == 2 * (workers - 1)
        assert schedule.sent(length) <= 2 * (workers - 1) * -(-length // workers)
    assert sum(schedule.sent(length) for schedule in schedules) == 2 * (workers - 1) * length
    assert sum(schedule.received(length) for schedule in schedules) == 2 * (workers - 1) * length


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
    for rank, schedule in enumerate(schedules):
        assert schedule.sent(length) == (0 if rank == last else length)
        assert schedule.received(length) == (0 if rank == root else length)


def test_an_idle_rank_keeps_its_steps():
    # The last of four in a chain of one segment waits two steps for it.
    assert chain_broadcast(4, 3, root=0, parts=1).steps == (
        Step(),
        Step(),
        Step(recv_from=2, recv_segment=0),
    )


@pytest.mark.parametrize("make", [ring, lambda p, rank: chain_broadcast(p, rank, 0)])
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


def recursive_doubling_of_3(rank: int) -> Schedule:
    """Rank 0 folds into 1; 1 and 2 exchange whole vectors; 1 gives the result back."""
    whole = {"send_segment": 0, "recv_segment": 0}
    steps = {
        0: (Step(send_to=1, send_segment=0), Step(), Step(recv_from=1, recv_segment=0)),
        1: (
            Step(recv_from=0, recv_segment=0, op="add"),
            Step(send_to=2, recv_from=2, op="add", **whole),
            Step(send_to=0, send_segment=0),
        ),
        2: (Step(), Step(send_to=1, recv_from=1, op="add", **whole), Step()),
    }
    return Schedule(workers=3, rank=rank, segments=1, steps=steps[rank])


def halving_doubling_of_4(rank: int) -> Schedule:
    """Recursive halving, then recursive doubling, over runs of four segments."""
    low, near, far = rank // 2 * 2, rank ^ 1, rank ^ 2
    mine, theirs = {"recv_segment": low, "recv_count": 2}, {"send_segment": low ^ 2, "send_count": 2}
    back, forth = {"recv_segment": low ^ 2, "recv_count": 2}, {"send_segment": low, "send_count": 2}
    return Schedule(
        workers=4,
        rank=rank,
        segments=4,
        steps=(
            Step(send_to=far, recv_from=far, op="add", **mine, **theirs),
            Step(send_to=near, send_segment=near, recv_from=near, recv_segment=rank, op="add"),
            Step(send_to=near, send_segment=rank, recv_from=near, recv_segment=near),
            Step(send_to=far, recv_from=far, **back, **forth),
        ),
    )


@pytest.mark.parametrize("length", [0, 1, 3, 101])
@pytest.mark.parametrize(("make", "workers"), [(recursive_doubling_of_3, 3), (halving_doubling_of_4, 4)])
def test_the_type_holds_other_collectives_as_well(make, workers, length):
    vectors = [[rank * 1000 + element for element in range(length)] for rank in range(workers)]
    expected = [sum(column) for column in zip(*vectors, strict=True)]
    assert execute([make(rank) for rank in range(workers)], vectors) == [expected] * workers


def test_counts_of_other_collectives():
    # The known figures for Rabenseifner's algorithm: 101 elements, 4 workers, 4 steps, 152 elements.
    schedules = [halving_doubling_of_4(rank) for rank in range(4)]
    assert (len(schedules[0].steps), max(schedule.sent(101) for schedule in schedules)) == (4, 152)
