"""Which pushes each sum holds, compared with a list for every key, and changes of participants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offbeat.policies.ps.aggregation import Aggregation, PushRequest
from offbeat.policies.ps.messages import Push


def request(client, time, first, last, number=0):
    push = Push(
        client=client,
        request=number,
        epoch=0,
        namespace="w",
        first=first,
        last=last,
        time=time,
        previous_times=(),
        content=None,
    )
    return PushRequest(push)


def of(begins):
    aggregation = Aggregation()
    aggregation.set_participants({"w": begins})
    return aggregation


def add(aggregation, client, time, first=0, last=10):
    """The sums that a push completes: time, range and clients of each."""
    found = aggregation.add(request(client, time, first, last), first, last)
    return [(one.time, one.first, one.last, *clients_of(one)) for one in found]


def clients_of(one):
    return [requests[0].push.client for requests in one.requests]


def test_a_sum_is_complete_with_its_last_push_and_is_in_the_order_of_clients():
    aggregation = of({0: 1, 1: 1, 2: 1})
    assert add(aggregation, 2, 1) == []
    assert add(aggregation, 0, 1) == []
    assert add(aggregation, 1, 1) == [(1, 0, 10, 0, 1, 2)]


def test_several_times_wait_at_once_and_complete_in_order():
    aggregation = of({0: 1, 1: 1})
    assert add(aggregation, 0, 1) == add(aggregation, 0, 2) == add(aggregation, 0, 3) == []
    assert add(aggregation, 1, 1) == [(1, 0, 10, 0, 1)]
    assert add(aggregation, 1, 2) == [(2, 0, 10, 0, 1)]


def test_ranges_that_are_cut_differently_are_summed_piece_by_piece():
    aggregation = of({0: 1, 1: 1})
    assert add(aggregation, 0, 1, 0, 10) == []
    assert add(aggregation, 1, 1, 4, 6) == [(1, 4, 6, 0, 1)]
    assert add(aggregation, 1, 1, 0, 4) == [(1, 0, 4, 0, 1)]
    assert add(aggregation, 1, 1, 6, 20) == [(1, 6, 10, 0, 1)]
    assert add(aggregation, 0, 1, 10, 20) == [(1, 10, 20, 0, 1)]


def test_a_cut_does_not_make_two_sums_of_one():
    aggregation = of({0: 1, 1: 1})
    add(aggregation, 0, 1, 0, 10)
    add(aggregation, 0, 2, 0, 5)
    assert add(aggregation, 1, 1, 0, 10) == [(1, 0, 10, 0, 1)]


def test_a_client_that_begins_later_is_not_waited_for():
    aggregation = of({0: 1, 1: 3})
    assert add(aggregation, 0, 2) == [(2, 0, 10, 0)]
    assert add(aggregation, 0, 3) == []
    assert add(aggregation, 1, 3) == [(3, 0, 10, 0, 1)]


def test_a_client_that_skips_a_range_is_waited_for_until_its_later_push_there():
    aggregation = of({0: 1, 1: 1})
    assert add(aggregation, 0, 1) == []
    assert add(aggregation, 1, 2) == [(1, 0, 10, 0)]
    assert add(aggregation, 0, 2) == [(2, 0, 10, 0, 1)]


def test_a_repeated_push_counts_once_and_the_sum_names_both_requests():
    aggregation = of({0: 1, 1: 1})
    first, again, other = request(0, 1, 0, 10), request(0, 1, 0, 10), request(1, 1, 0, 10)
    assert aggregation.add(first, 0, 10) == aggregation.add(again, 0, 10) == []
    (one,) = aggregation.add(other, 0, 10)
    assert one.requests == ((first, again), (other,))


def test_a_push_of_a_client_that_takes_no_part_is_dropped():
    aggregation = of({0: 1})
    assert add(aggregation, 7, 1) == []
    assert add(aggregation, 0, 1) == [(1, 0, 10, 0)]


def test_a_new_view_returns_the_waiting_pushes_in_order():
    aggregation = of({0: 1, 1: 1, 2: 1})
    add(aggregation, 1, 2)
    add(aggregation, 0, 1)
    add(aggregation, 0, 2)
    add(aggregation, 1, 1)
    waiting = aggregation.set_participants({"w": {0: 1, 1: 1}})
    assert [(push.client, push.time) for push in waiting] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert aggregation.set_participants({"w": {0: 1, 1: 1}}) == []
    assert [add(aggregation, push.client, push.time) for push in waiting] == [
        [],
        [(1, 0, 10, 0, 1)],
        [],
        [(2, 0, 10, 0, 1)],
    ]


KEYS = 12


def sums_of_a_key(begins, pushes):
    """Sums of one key as `Aggregation` promises; `pushes` are clients and times in order of arrival."""
    sums, waiting, latest = [], [], dict.fromkeys(begins, 0)
    for client, time in pushes:
        waiting.append((time, client))
        latest[client] = time
        while waiting:
            least = min(waiting)[0]
            if any(latest[one] < least for one, begin in begins.items() if begin <= least):
                break
            sums.append((least, tuple(sorted(one for at, one in waiting if at == least))))
            waiting = [one for one in waiting if one[0] != least]
    return sums


@given(st.data())
def test_every_key_is_in_the_sums_that_it_alone_would_be_in(data):
    begins = data.draw(st.dictionaries(st.integers(0, 3), st.integers(1, 3), min_size=1))
    times = {client: begin - 1 for client, begin in begins.items()}
    aggregation = of(begins)
    pushes = [[] for _ in range(KEYS)]
    sums = [[] for _ in range(KEYS)]
    for _ in range(data.draw(st.integers(0, 30))):
        client = data.draw(st.sampled_from(sorted(begins)))
        first = data.draw(st.integers(0, KEYS - 1))
        last = data.draw(st.integers(first + 1, KEYS))
        times[client] += 1
        for key in range(first, last):
            pushes[key].append((client, times[client]))
        for one in aggregation.add(request(client, times[client], first, last), first, last):
            for key in range(one.first, one.last):
                sums[key].append((one.time, tuple(clients_of(one))))
    assert sums == [sums_of_a_key(begins, of_key) for of_key in pushes]
