"""Nimble's stream assignment: its invariants on random graphs, by brute force on small ones."""

from __future__ import annotations

import itertools

import pytest

from offbeat.numerics.nimble.matching import maximum_matching
from offbeat.numerics.nimble.stream_assignment import (
    assign_one_stream,
    assign_streams,
    find_descendants,
    reduce_transitively,
    topological_order,
)
from support.random_graphs import a_graph, paths

SEEDS = range(240)
SMALL_SEEDS = range(60)


def streams_of(assignment):
    return {launch.node: launch.stream for launch in assignment.launches}


@pytest.mark.parametrize("seed", SEEDS)
def test_two_nodes_share_a_stream_only_if_a_path_joins_them(seed):
    graph = a_graph(seed)
    reached, streams = paths(graph), streams_of(assign_streams(graph))
    for one, other in itertools.combinations(range(len(graph)), 2):
        if streams[one] == streams[other]:
            assert other in reached[one] or one in reached[other]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_synchronizations_are_the_edges_of_the_reduction_without_the_matched_ones(seed):
    graph = a_graph(seed)
    assignment = assign_streams(graph)
    assert len(assignment.synchronizations) == len(assignment.edges) - len(assignment.matched)
    assert set(assignment.synchronizations) == assignment.edges - assignment.matched
    awaited = {node for node, _ in assignment.synchronizations}
    assert {launch.node for launch in assignment.launches if launch.is_awaited} == awaited


@pytest.mark.parametrize("seed", SEEDS)
def test_the_launch_order_is_topological_and_has_every_node_once(seed):
    graph = a_graph(seed)
    for assignment in (assign_streams(graph), assign_one_stream(graph)):
        place = {launch.node: place for place, launch in enumerate(assignment.launches)}
        assert sorted(place) == list(range(len(graph)))
        assert all(place[node] < place[to] for node, following in enumerate(graph) for to in following)
        assert {launch.stream for launch in assignment.launches} == set(range(assignment.stream_count))


@pytest.mark.parametrize("seed", SEEDS)
def test_stream_order_and_synchronizations_imply_every_dependency(seed):
    graph = a_graph(seed)
    assignment = assign_streams(graph)
    assert is_safe(graph, streams_of(assignment), assignment.synchronizations)


def is_safe(graph, streams, synchronizations):
    """Whether the order of each stream and the synchronizations imply all edges."""
    order = topological_order(graph)
    implied = [set() for _ in graph]
    for stream in set(streams.values()):
        for one, other in itertools.pairwise([node for node in order if streams[node] == stream]):
            implied[one].add(other)
    for one, other in synchronizations:
        implied[one].add(other)
    reached = paths(implied)
    return all(to in reached[node] for node, following in enumerate(graph) for to in following)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_transitive_reduction_keeps_all_paths_and_no_edge_too_many(seed):
    """By definition: without any one of its edges, a path is missing; brute force over all edges."""
    graph = a_graph(seed, nodes_max=16)
    order = topological_order(graph)
    reduced = [*map(set, reduce_transitively(graph, order, find_descendants(graph, order)))]
    expected = paths(graph)
    assert paths(reduced) == expected
    for node, following in enumerate(reduced):
        assert following <= graph[node]
        for to in following:
            fewer = [kept - {to} if one == node else kept for one, kept in enumerate(reduced)]
            assert paths(fewer) != expected


def partitions(nodes):
    """All partitions of a list."""
    if not nodes:
        yield []
        return
    first, *others = nodes
    for groups in partitions(others):
        yield [[first], *groups]
        for place, group in enumerate(groups):
            yield [*groups[:place], [first, *group], *groups[place + 1 :]]


def concurrent_assignments(graph):
    """All assignments in which only nodes that a path joins share a stream."""
    reached = paths(graph)
    for groups in partitions(list(range(len(graph)))):
        pairs = (pair for group in groups for pair in itertools.combinations(group, 2))
        if all(one in reached[other] or other in reached[one] for one, other in pairs):
            yield {node: stream for stream, group in enumerate(groups) for node in group}


@pytest.mark.parametrize("seed", SMALL_SEEDS)
def test_no_assignment_of_the_same_concurrency_needs_fewer_synchronizations(seed):
    """Brute force over all assignments of at most 8 nodes, with the edges that each has to synchronize."""
    graph = a_graph(seed, nodes_max=8)
    assignment = assign_streams(graph)
    needed = [
        sum(streams[one] != streams[other] for one, other in assignment.edges)
        for streams in concurrent_assignments(graph)
    ]
    assert len(assignment.synchronizations) == min(needed)


@pytest.mark.parametrize("seed", SMALL_SEEDS)
def test_no_smaller_set_of_synchronizations_is_safe(seed):
    """Brute force over all sets of waits between nodes that a path joins, and all assignments of 5 nodes."""
    graph = a_graph(seed, nodes_max=5)
    count = len(assign_streams(graph).synchronizations)
    waits = [(node, to) for node, reached in enumerate(paths(graph)) for to in reached]
    for streams in concurrent_assignments(graph):
        for fewer in itertools.combinations(waits, count - 1) if count else ():
            assert not is_safe(graph, streams, fewer)


@pytest.mark.parametrize("seed", SMALL_SEEDS)
def test_chains_share_as_few_streams_as_possible_for_the_concurrency_of_the_graph(seed):
    """At least as many streams as nodes that can all run at once, and not one per chain."""
    graph = a_graph(seed, nodes_max=8)
    reached = paths(graph)
    assignment = assign_streams(graph)
    independent = max(
        len(nodes)
        for count in range(1, len(graph) + 1)
        for nodes in itertools.combinations(range(len(graph)), count)
        if not any(
            other in reached[one] or one in reached[other] for one, other in itertools.combinations(nodes, 2)
        )
    )
    chains = len(graph) - len(assignment.matched)
    assert independent <= assignment.stream_count <= chains


def test_branches_that_follow_one_another_share_streams():
    """Three blocks of two branches: a fork, two operations, a join; one stream more than a chain's."""
    graph = [{1, 2}, {3}, {3}, {4, 5}, {6}, {6}, {7, 8}, {9}, {9}, set()]
    assignment = assign_streams(graph)
    assert assignment.stream_count == 2
    assert len(assignment.synchronizations) == 6


def test_one_stream_needs_no_synchronization():
    assignment = assign_one_stream(a_graph(3))
    assert assignment.stream_count == 1
    assert not assignment.synchronizations


def test_a_graph_without_nodes_has_no_streams():
    assert assign_streams([]).stream_count == assign_one_stream([]).stream_count == 0


def test_a_circle_and_a_successor_that_is_no_node_are_refused():
    with pytest.raises(ValueError, match=r"without circles: nodes \[1, 2\] depend on one another"):
        assign_streams([{1}, {2}, {1}])
    with pytest.raises(ValueError, match="successors of node 1 from 0 to 1, got 2"):
        assign_streams([{1}, {2}])


@pytest.mark.parametrize("seed", SMALL_SEEDS)
def test_the_matching_is_one_and_no_larger_one_exists(seed):
    neighbours = [sorted(following) for following in a_graph(seed, nodes_max=7)]
    found = maximum_matching(neighbours, len(neighbours))
    assert all(right is None or right in neighbours[left] for left, right in enumerate(found))
    matched = [right for right in found if right is not None]
    assert len(matched) == len(set(matched))
    assert len(matched) == most_matched(neighbours, 0, frozenset())


def most_matched(neighbours, left, used):
    if left == len(neighbours):
        return 0
    others = [
        1 + most_matched(neighbours, left + 1, used | {one}) for one in neighbours[left] if one not in used
    ]
    return max([most_matched(neighbours, left + 1, used), *others])


def test_a_path_through_the_whole_graph_is_augmented_without_recursion():
    """2,000 vertices, each first matched with what the next one needs."""
    count = 2000
    neighbours = [[left + 1, left] if left + 1 < count else [left] for left in range(count)]
    neighbours[0] = [1]
    neighbours.append([count - 1])
    found = maximum_matching(neighbours, count)
    assert sum(right is not None for right in found) == count - 1
