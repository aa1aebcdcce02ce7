"""Promises of Prague's group generator: groups in one order, that exclude deadlock and slow workers."""

import heapq
import random
from statistics import median

import numpy as np
import pytest

from offbeat.policies.model_averaging.group_generator import GROUP_MODES, GroupGenerator
from offbeat.policies.model_averaging.prague import PragueAveraging


def accept_any(group, worker):
    return True


def make_all_ready(groups, workers, now_s=0.0):
    for worker in sorted(set(workers) - groups.ready):
        groups.add(worker, now_s)


def pop_all(groups, expected, can_meet=accept_any):
    popped = []
    while (group := groups.pop_group(set(expected), 0.0, can_meet)) is not None:
        popped.append(group)
    return popped


# Deciding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "sizes"), [(2, [2]), (4, [4]), (5, [2, 3]), (9, [3, 3, 3]), (8, [2, 3, 3])]
)
@pytest.mark.parametrize("mode", ["smart", "static"])
def test_a_division_has_every_worker_once_in_groups_of_about_the_size(mode, workers, sizes):
    groups = GroupGenerator(mode, 3, None)
    make_all_ready(groups, range(workers))
    popped = pop_all(groups, range(workers))
    assert sorted(map(len, popped)) == sizes
    assert sorted(worker for group in popped for worker in group) == [*range(workers)]


def test_a_random_group_is_of_the_worker_that_asks_and_of_others_that_are_drawn():
    partners = set()
    for seed in range(40):
        groups = GroupGenerator("random", 3, None, seed)
        groups.add(5, 0.0)
        assert groups.pop_group(set(range(8)), 0.0, accept_any) is None  # until the others are ready
        make_all_ready(groups, range(8))
        drawn = next(group for group in pop_all(groups, range(8)) if 5 in group)
        assert len(drawn) == 3
        partners |= {*drawn}
    assert partners == {*range(8)}


def test_only_workers_in_no_decided_group_are_divided():
    groups = GroupGenerator("smart", 2, None)
    groups.add(0, 0.0)
    assert groups.pop_group({0, 1}, 0.0, accept_any) is None  # 0 and 1 are a group now
    groups.add(2, 0.0)
    groups.add(3, 0.0)
    assert groups.pop_group({0, 1, 2, 3}, 0.0, accept_any) == (2, 3)
    groups.add(1, 1.0)
    assert groups.pop_group({0, 1, 2, 3}, 1.0, accept_any) == (0, 1)


def test_the_static_schedule_connects_all_workers():
    groups, parts = GroupGenerator("static", 3, None), [{worker} for worker in range(12)]
    for now_s in range(8):
        make_all_ready(groups, range(12), now_s)
        for group in pop_all(groups, range(12)):
            joined = [part for part in parts if part & {*group}]
            parts = [part for part in parts if part not in joined] + [set().union(*joined)]
    assert len(parts) == 1


# Hosts ----------------------------------------------------------------------------------------------------


def generator_on(hosts, mode, size=3):
    """Of workers 0, 1, ... on hosts of so many, which are in turn as far as there is room."""
    groups, host_of = GroupGenerator(mode, size, None), {}
    places = [host for at in range(max(hosts)) for host, count in enumerate(hosts) if at < count]
    for worker, host in enumerate(places):
        host_of[worker] = host
        groups.on_joined(worker, f"host-{host}")
    return groups, host_of


def divisions(groups, workers, count):
    """The groups of so many divisions of workers that are all ready each time."""
    divided = []
    for now_s in range(count):
        make_all_ready(groups, range(workers), now_s)
        divided.append(pop_all(groups, range(workers)))
    return divided


def workers_by_host(host_of):
    return [
        [worker for worker, host in host_of.items() if host == one] for one in sorted({*host_of.values()})
    ]


HOSTS = [(2, 2), (2, 2, 2), (3, 3), (4, 4), (8, 8), (2, 2, 2, 2), (4, 4, 4), (2, 3), (5, 1, 2)]


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_static_schedule_has_a_period_of_four_divisions_between_hosts_and_within(hosts):
    groups, host_of = generator_on(hosts, "static")
    workers = workers_by_host(host_of)
    first, inside, last, inside_again, *again = divisions(groups, sum(hosts), 8)
    assert {*inside} == {*inside_again} == {tuple(one) for one in workers}
    for division, at in ((first, 0), (last, -1)):
        heads = [one[at] for one in workers]
        others = [tuple(one for one in host if one not in heads) for host in workers]
        assert {*division} == {tuple(sorted(heads)), *(one for one in others if one)}
    assert [{*one} for one in again] == [{*one} for one in (first, inside, last, inside_again)]


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_static_schedule_mixes_all_models_within_its_period(hosts):
    """The groups of a division are disjoint and hold all; the product of a period's matrices is primitive."""
    count = sum(hosts)
    product = np.eye(count)
    for division in divisions(generator_on(hosts, "static")[0], count, 4):
        assert sorted(worker for group in division for worker in group) == [*range(count)]
        for group in division:
            product[list(group)] = product[list(group)].mean(0)
    assert (np.linalg.matrix_power(product, count) > 0).all()


@pytest.mark.parametrize("hosts", HOSTS)
def test_smart_divisions_are_in_turn_between_hosts_and_within(hosts):
    groups, host_of = generator_on(hosts, "smart", size=2)
    heads_drawn = set()
    for number, division in enumerate(divisions(groups, sum(hosts), 40)):
        assert sorted(worker for group in division for worker in group) == [*host_of]
        across = [group for group in division if len({host_of[worker] for worker in group}) > 1]
        assert len(across) == (number + 1) % 2
        for group in across:
            assert sorted(host_of[worker] for worker in group) == [*range(len(hosts))]
            heads_drawn |= {*group}
        assert all(len(group) <= 3 for group in division if group not in across)
    assert heads_drawn == {*host_of}


def test_workers_of_a_single_host_that_are_free_do_not_use_up_a_division_between_hosts():
    groups, host_of = generator_on((3, 3), "smart")
    assert {host_of[worker] for worker in (0, 2, 4)} == {0}
    groups.load_state_dict(groups.state_dict() | {"decided": [[90, [0, 2, 4]]], "next_number": 91})
    make_all_ready(groups, (1, 3, 5))
    assert pop_all(groups, range(6)) == [(1, 3, 5)]  # all on the other host
    assert groups.state_dict()["host_divisions"] == 0


@pytest.mark.parametrize("mode", ["smart", "static"])
@pytest.mark.parametrize("hosts", [(6,), (1, 1, 1, 1, 1, 1), (5, 1)])
def test_without_several_workers_on_several_hosts_hosts_do_not_matter(mode, hosts):
    groups, _ = generator_on(hosts, mode)
    assert divisions(groups, 6, 6) == divisions(GroupGenerator(mode, 3, None), 6, 6)


# Order ----------------------------------------------------------------------------------------------------


def test_groups_with_common_members_begin_in_the_order_of_their_decision():
    groups = GroupGenerator("random", 2, None)
    state = groups.state_dict() | {"decided": [[4, [0, 1]], [7, [1, 2]], [9, [3, 4]]], "next_number": 10}
    groups.load_state_dict(state)
    everybody = {0, 1, 2, 3, 4}
    for worker in (1, 2, 3, 4):
        groups.add(worker, 0.0)
    assert groups.pop_group(everybody, 0.0, accept_any) == (3, 4)
    assert groups.pop_group(everybody, 0.0, accept_any) is None  # 1 is in a group of a lower number
    groups.add(0, 1.0)
    assert groups.pop_group(everybody, 1.0, accept_any) == (0, 1)
    groups.add(1, 2.0)
    assert groups.pop_group(everybody, 2.0, accept_any) == (1, 2)


@pytest.mark.parametrize("mode", GROUP_MODES)
@pytest.mark.parametrize("seed", range(25))
def test_under_random_delays_and_losses_there_is_no_deadlock_and_groups_are_disjoint(mode, seed):
    chance = random.Random(f"{mode} {seed}")
    groups = GroupGenerator(mode, chance.choice([2, 3, 4]), chance.choice([None, 1, 4]), seed)
    here, running = set(range(chance.randint(2, 9))), []
    for _ in range(300):
        idle = here - groups.ready - {worker for group in running for worker in group}
        choice = chance.random()
        if choice < 0.02 and len(here) > 2:
            gone = chance.choice(sorted(here))
            here.discard(gone)
            groups.discard(gone)
            running = [tuple(one for one in group if one != gone) for group in running]
        elif choice < 0.5 and running:
            running.pop(chance.randrange(len(running)))
        elif idle:
            groups.add(chance.choice(sorted(idle)), 0.0)
        running += pop_all(groups, here)
        busy = [worker for group in running for worker in group]
        assert len(busy) == len(set(busy))
        assert here > groups.ready, "all workers wait"


def test_a_worker_that_is_not_expected_any_more_is_left_out_of_what_was_decided():
    groups = GroupGenerator("static", 3, None)
    for worker in (0, 1):
        groups.add(worker, 0.0)
    assert groups.pop_group({0, 1, 2}, 0.0, accept_any) is None
    assert groups.pop_group({0, 1}, 0.0, accept_any) == (0, 1)


def test_a_worker_that_cannot_meet_the_others_of_its_group_is_ready_still():
    groups = GroupGenerator("static", 3, None)
    make_all_ready(groups, range(3))
    assert groups.pop_group({0, 1, 2}, 0.0, lambda group, worker: {0, 2} - {*group, worker}) == (0, 1)
    assert groups.ready == {2}


@pytest.mark.parametrize("mode", GROUP_MODES)
@pytest.mark.parametrize(("workers", "size"), [(2, 2), (3, 3), (4, 3), (6, 3)])
def test_workers_that_cannot_meet_take_turns(mode, workers, size):
    """The first and the last one cannot."""
    groups, rounds = GroupGenerator(mode, size, 4), dict.fromkeys(range(workers), 0)
    for now_s in range(200):
        make_all_ready(groups, rounds, now_s)
        popped = pop_all(groups, rounds, lambda group, worker: {0, workers - 1} - {*group, worker})
        for group in popped:
            assert not {0, workers - 1} <= {*group}
            for worker in group:
                rounds[worker] += 1
    assert min(rounds.values()) > 60


def test_a_saved_state_goes_on_alike():
    chance, groups = random.Random(1), GroupGenerator("smart", 3, 4, seed=2)
    for worker in range(9):
        groups.on_joined(worker, f"host-{worker % 3}")
    for now_s in range(200):
        again = GroupGenerator("smart", 3, 4, seed=2)
        again.load_state_dict(groups.state_dict())
        worker = chance.randrange(9)
        for one in (groups, again):
            if worker not in one.ready:
                one.add(worker, now_s)
        assert pop_all(again, range(9)) == pop_all(groups, range(9))
        assert again.state_dict() == groups.state_dict()


# Slow workers ---------------------------------------------------------------------------------------------


def steps_of_the_median_worker(lag, *, slow, mode="smart", until_s=400.0):
    """Of 16 workers that wait for their groups, of 4; with `slow`, one of them takes five times as long."""
    chance, groups = random.Random(0), GroupGenerator(mode, 4, lag)
    steps = dict.fromkeys(range(16), 0)
    events = [(chance.uniform(0.9, 1.1), worker) for worker in steps]
    heapq.heapify(events)
    while events[0][0] < until_s:
        now_s, worker = heapq.heappop(events)
        steps[worker] += 1
        groups.add(worker, now_s)
        while (group := groups.pop_group(set(steps), now_s, accept_any)) is not None:
            for member in group:
                factor = 5 if slow and member == 3 else 1
                heapq.heappush(events, (now_s + factor * chance.uniform(0.9, 1.1), member))
    return median(steps.values())


def test_with_the_slowdown_filter_a_slow_worker_does_not_hold_up_the_others():
    """The paper's case: within 2 percent of the steps without a slow worker."""
    healthy = steps_of_the_median_worker(4, slow=False)
    assert steps_of_the_median_worker(4, slow=True) > 0.98 * healthy
    assert steps_of_the_median_worker(None, slow=True) < 0.9 * healthy
    assert steps_of_the_median_worker(None, slow=True, mode="random") < 0.7 * healthy


def test_workers_that_are_equally_fast_are_not_filtered():
    """Whichever was ready first: the first step makes none of them one that lags."""
    filtered = steps_of_the_median_worker(2, slow=False)
    assert filtered == steps_of_the_median_worker(None, slow=False)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="expected a mode of static, random, smart, got 'fast'"):
        PragueAveraging(4, mode="fast")
    with pytest.raises(ValueError, match="groups of at least 2 workers, got 1"):
        PragueAveraging(4, size=1)
    with pytest.raises(ValueError, match="a lag of at least 1, got 0"):
        PragueAveraging(4, lag=0)
