"""Where workers on several hosts can sum hierarchically."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.collectives.hosts import hierarchy_of
from offbeat.numerics.collectives.schedules import schedule


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aaaabbbb", "torus:4"),
        ("aabbcc", "torus:2"),
        ("", None),
        ("aaaa", None),  # one host
        ("abcd", None),  # no host with a second worker
        ("aaabb", None),
        ("aaab", None),
        ("abab", None),  # not consecutive
        ("aabbaacc", None),
    ],
)
def test_a_hierarchy_needs_equally_many_consecutive_workers_on_several_hosts(hosts, expected):
    assert hierarchy_of(hosts) == expected


@given(count=st.integers(2, 5), per_host=st.integers(2, 5))
def test_each_worker_sends_an_equal_part_of_the_vector_to_one_other_host(count, per_host):
    hosts = [f"host-{number}" for number in range(count) for _ in range(per_host)]
    algorithm = hierarchy_of(hosts)
    for rank, host in enumerate(hosts):
        plan = schedule(algorithm, len(hosts), rank)
        crossing = [s for s in plan.steps if s.send_to is not None and hosts[s.send_to] != host]
        assert {step.send_to for step in crossing} == {(rank + per_host) % len(hosts)}
        # In units of the vector a host sends 2 (M - 1) / M, its workers a G-th of that each.
        assert sum(step.send_count for step in crossing) / plan.segments == 2 * (count - 1) / len(hosts)
