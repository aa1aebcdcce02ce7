"""Where workers on several hosts can sum hierarchically."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.collectives.hosts import hierarchy_of
from offbeat.numerics.collectives.schedules import schedule


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aaaabbbb", "hierarchical:4"),
        ("aabbcc", "hierarchical:2"),
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
def test_each_worker_sends_to_another_host_only_if_it_is_the_first_of_its_own(count, per_host):
    hosts = [f"host-{number}" for number in range(count) for _ in range(per_host)]
    algorithm = hierarchy_of(hosts)
    for rank, host in enumerate(hosts):
        steps = schedule(algorithm, len(hosts), rank).steps
        crosses = any(step.send_to is not None and hosts[step.send_to] != host for step in steps)
        assert crosses == (rank % per_host == 0)
