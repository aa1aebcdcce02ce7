"""Streams as threads, and as a device's queues that run as late as they may: the order is kept."""

from __future__ import annotations

import threading

import pytest

from offbeat.errors import OffbeatError
from offbeat.numerics.nimble.stream_assignment import StreamAssignment, assign_streams
from offbeat.runtime.nimble.executors import queue_on_streams
from offbeat.runtime.nimble.stream_threads import StreamThreads
from support.random_graphs import LateStreams, a_graph, paths, predecessors, value_of, without

SEEDS = range(200)
FORK_AND_JOIN = [{1, 2}, {3}, {3}, set()]


def values_in_order(graph, assignment):
    earlier = predecessors(graph)
    values = {}
    for launch in assignment.launches:
        values[launch.node] = value_of(launch.node, [values[one] for one in earlier[launch.node]])
    return values


def changed(assignment, launches):
    return StreamAssignment(
        launches=launches,
        stream_count=assignment.stream_count,
        edges=assignment.edges,
        matched=assignment.matched,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_compute_every_value_from_the_values_before(seed):
    """An operation that ran too early would miss a value."""
    graph = a_graph(seed)
    assignment = assign_streams(graph)
    earlier = predecessors(graph)
    threads = StreamThreads(assignment)
    for _ in range(3):
        values, callers = {}, {}

        def call(node, values=values, callers=callers):
            values[node] = value_of(node, [values[one] for one in earlier[node]])
            callers[node] = threading.current_thread()

        threads.run(call)
        assert values == values_in_order(graph, assignment)
        for launch in assignment.launches:
            is_main = callers[launch.node] is threading.current_thread()
            assert is_main == (launch.stream == 0)
    threads.close()


def test_threads_without_a_synchronization_compute_a_wrong_value():
    """The operation that is not awaited goes on only once the one that should wait for it has run."""
    assignment = assign_streams(FORK_AND_JOIN)
    (left_out,) = (edge for edge in assignment.synchronizations if edge[1] == 3)
    threads = StreamThreads(changed(assignment, without(assignment.launches, left_out)))
    has_joined = threading.Event()
    seen = {}

    def call(node):
        if node == left_out[0]:
            assert has_joined.wait(60)
        seen[node] = set(seen)
        if node == 3:
            has_joined.set()

    threads.run(call)
    assert left_out[0] not in seen[3]
    threads.close()


def queued(assignment):
    """Late streams with all operations, after operation -1 and before operation -2 of stream 0."""
    streams = LateStreams(max(1, assignment.stream_count))
    with streams.use(0):
        streams.call(-1)
    queue_on_streams(assignment, streams, streams.call)
    with streams.use(0):
        streams.call(-2)
    return streams


def called_late(streams, held_back):
    order = []
    streams.run(held_back, order.append)
    return order


@pytest.mark.parametrize("seed", SEEDS)
def test_queued_on_streams_nothing_runs_before_what_it_depends_on_however_late_that_is(seed):
    graph = a_graph(seed)
    streams, reached = queued(assign_streams(graph)), paths(graph)
    for node in range(len(graph)):
        order = called_late(streams, node)
        assert sorted(order) == list(range(-2, len(graph)))
        assert not reached[node] & set(order[: order.index(node)])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_streams_begin_after_what_was_queued_before_and_end_before_what_is_queued_next(seed):
    streams = queued(assign_streams(a_graph(seed)))
    assert called_late(streams, -1)[0] == -1
    for node in range(len(streams.queues)):
        assert called_late(streams, node)[-1] == -2


@pytest.mark.parametrize("seed", SEEDS)
def test_each_synchronization_that_is_left_out_is_found(seed):
    assignment = assign_streams(a_graph(seed))
    for left_out in assignment.synchronizations:
        streams = queued(changed(assignment, without(assignment.launches, left_out)))
        order = called_late(streams, left_out[0])
        assert order.index(left_out[1]) < order.index(left_out[0])


def test_two_independent_operations_run_at_the_same_time():
    """Each waits for the other to begin."""
    threads = StreamThreads(assign_streams(FORK_AND_JOIN))
    both = threading.Barrier(2)
    threads.run(lambda node: both.wait(60) if node in (1, 2) else None)
    threads.close()


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_failure_is_raised_and_what_depends_on_it_does_not_run(failing):
    threads = StreamThreads(assign_streams(FORK_AND_JOIN))
    called = []

    def call(node):
        if node == failing:
            raise KeyError(node)
        called.append(node)

    with pytest.raises(KeyError):
        threads.run(call)
    assert not paths(FORK_AND_JOIN)[failing] & set(called)
    called.clear()
    threads.run(called.append)
    assert sorted(called) == [0, 1, 2, 3]
    threads.close()


def test_a_stream_does_not_wait_for_ever_and_names_what_for():
    assignment = assign_streams(FORK_AND_JOIN)
    other = next(launch.node for launch in assignment.launches if launch.stream == 1)
    threads = StreamThreads(assignment, timeout_s=0.05)
    may_end = threading.Event()
    with pytest.raises(OffbeatError, match=rf"stream 0 for operation {other} waited for longer than 0.05 s"):
        threads.run(lambda node: may_end.wait(60) if node == other else None)
    may_end.set()
    threads.close()


def test_closed_threads_end():
    before = set(threading.enumerate())
    threads = StreamThreads(assign_streams(FORK_AND_JOIN))
    (started,) = set(threading.enumerate()) - before
    threads.close()
    started.join(60)
    assert not started.is_alive()
