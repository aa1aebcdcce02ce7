"""Promises of AD-PSGD's pairs: neighbours on a bipartite graph, whoever is there and ready."""

import itertools
import random

import pytest

from offbeat.policies.model_averaging.neighbour_pairs import TOPOLOGIES, NeighbourPairs, neighbours_of
from offbeat.policies.model_averaging.pair_averaging import PairAveraging


def accept_any(group, worker):
    return True


def edges_of(workers, topology):
    return {
        tuple(sorted((worker, other)))
        for place, worker in enumerate(workers)
        for other in neighbours_of(workers, place, topology)
    }


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", range(2, 20))
def test_the_graph_is_connected_and_its_edges_join_active_to_passive_workers(topology, size):
    workers = [3 * place + 1 for place in range(size)]
    edges = edges_of(workers, topology)
    for one, other in edges:
        assert (workers.index(one) + workers.index(other)) % 2
    reached = {workers[0]}
    for _ in workers:
        reached |= {worker for edge in edges if reached & set(edge) for worker in edge}
    assert reached == set(workers)


def test_the_edges_of_each_topology():
    assert edges_of([0, 1, 2, 3, 4, 5], "ring") == {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5)}
    assert edges_of([0, 1, 2], "ring") == {(0, 1), (1, 2)}  # 2 and 0 are both passive
    assert neighbours_of([*range(16)], 1, "exponential") == [0, 2, 4, 6, 8, 10, 12, 14]
    assert neighbours_of([*range(32)], 1, "exponential") == [0, 2, 4, 6, 10, 16, 18, 24, 28, 30]
    assert edges_of([0, 1, 2, 3], "complete") == {(0, 1), (0, 3), (1, 2), (2, 3)}


def test_an_active_worker_meets_a_neighbour_that_is_ready():
    pairs = NeighbourPairs("ring")
    for worker in (3, 1, 5):
        pairs.add(worker, 0.0)
    everybody = set(range(6))
    assert pairs.pop_group(everybody, 0.0, accept_any) is None  # all of them are active
    pairs.add(4, 1.0)
    assert pairs.pop_group(everybody, 1.0, accept_any) == (3, 4)  # 3 was ready before 5
    assert pairs.pop_group(everybody, 1.0, accept_any) is None
    assert pairs.ready == {1, 5}


@pytest.mark.parametrize("seed", range(10))
def test_workers_that_cannot_meet_are_no_pair(seed):
    pairs = NeighbourPairs("ring", seed)
    for worker in (0, 1, 2):
        pairs.add(worker, 0.0)
    assert pairs.pop_group({0, 1, 2}, 0.0, lambda group, worker: {*group, worker} != {0, 1}) == (1, 2)


def test_the_ring_closes_where_a_worker_is_gone():
    pairs = NeighbourPairs("ring")
    for worker in (2, 0):
        pairs.add(worker, 0.0)
    assert pairs.pop_group({0, 1, 2, 3}, 0.0, accept_any) is None
    assert pairs.pop_group({0, 2}, 0.0, accept_any) == (0, 2)


def test_a_worker_that_no_other_one_is_expected_with_is_alone():
    pairs = NeighbourPairs("complete")
    assert pairs.pop_group({4}, 0.0, accept_any) is None
    pairs.add(4, 0.0)
    assert pairs.pop_group({4}, 0.0, accept_any) == (4,)


def drawn(seed, count=300):
    """The passive partners of worker 1 of 4 that are all ready, again and again."""
    pairs = NeighbourPairs("complete", seed)
    partners = []
    for now_s in range(count):
        for worker in (1, 0, 2):
            pairs.discard(worker)
            pairs.add(worker, now_s)
        one, other = pairs.pop_group({0, 1, 2, 3}, now_s, accept_any)
        partners.append(one if other == 1 else other)
    return partners


def test_neighbours_are_drawn_with_equal_probability_and_as_before_with_the_same_seed():
    partners = drawn(seed=0)
    assert 110 < partners.count(0) < 190  # of 300: 4.6 standard deviations
    assert drawn(seed=0) == partners
    assert drawn(seed=1) != partners


def test_a_saved_state_goes_on_alike():
    chance, pairs = random.Random(0), NeighbourPairs("exponential", seed=3)
    for now_s in range(200):
        again = NeighbourPairs("exponential", seed=3)
        again.load_state_dict(pairs.state_dict())
        worker = chance.randrange(9)
        for one in (pairs, again):
            if worker not in one.ready:
                one.add(worker, now_s)
        assert again.pop_group(set(range(9)), now_s, accept_any) == pairs.pop_group(
            set(range(9)), now_s, accept_any
        )
        assert again.state_dict() == pairs.state_dict()


def test_the_mean_of_all_models_is_kept_and_they_come_close_to_it():
    """Without training, averaging alone: geometrically, on each graph."""
    for topology in TOPOLOGIES:
        models = dict(enumerate([8.0, -3.0, 5.0, 1.0, 0.0, 7.0]))
        mean = sum(models.values()) / len(models)
        pairs = NeighbourPairs(topology)
        for now_s in range(400):
            for worker in models.keys() - pairs.ready:
                pairs.add(worker, now_s)
            one, other = pairs.pop_group(set(models), now_s, accept_any)
            models[one] = models[other] = (models[one] + models[other]) / 2
        assert sum(models.values()) / len(models) == pytest.approx(mean, rel=1e-12)
        assert max(abs(one - other) for one, other in itertools.pairwise(models.values())) < 1e-6


def test_an_unknown_topology_is_refused():
    with pytest.raises(ValueError, match="expected a topology of ring, exponential, complete, got 'star'"):
        PairAveraging(4, topology="star")
