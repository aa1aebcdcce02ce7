"""Outages between workers and servers: which worker is the least connected, and when it counts."""

from __future__ import annotations

import json

from offbeat.policies.staleness.server_outages import ServerOutages


def reported(*pairs: tuple[int, int]) -> ServerOutages:
    outages = ServerOutages()
    for worker, server in pairs:
        outages.on_unreachable(worker, server, 1.0)
    return outages


def test_the_worker_that_misses_most_servers_is_found_and_of_two_the_last():
    assert reported((0, 0), (0, 1), (1, 1)).least_connected(16.5, {0, 1}, 4) == (0, [0, 1])
    assert reported((0, 0), (1, 1)).least_connected(16.5, {0, 1}, 4) == (1, [1])
    assert reported((0, 0), (1, 1)).least_connected(16.5, {0}, 4) == (0, [0])


def test_an_outage_counts_after_15_s_unless_it_is_withdrawn_or_restarted():
    outages = reported((0, 0))
    assert outages.least_connected(16.0, {0}, 4) is None
    outages.restart_timers(10.0)
    assert outages.least_connected(25.0, {0}, 4) is None
    assert outages.least_connected(25.1, {0}, 4) == (0, [0])
    outages.on_reachable(0, 0)
    assert outages.least_connected(25.1, {0}, 4) is None


def test_a_server_that_most_processes_miss_counts_against_none():
    assert reported((0, 0), (1, 0)).least_connected(16.5, {0, 1}, 3) is None
    assert reported((0, 0), (1, 0)).least_connected(16.5, {0, 1}, 4) == (1, [0])


def test_outages_of_workers_that_are_gone_are_dropped_and_the_rest_is_restored():
    outages, other = reported((0, 0), (1, 1)), ServerOutages()
    outages.forget(1)
    other.load_state_dict(json.loads(json.dumps(outages.state_dict())))
    assert other.least_connected(16.5, {0, 1}, 4) == (0, [0])
