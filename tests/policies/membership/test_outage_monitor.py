"""Which workers are marked as unreachable, and when; how to choose them: `test_reachability.py`."""

from __future__ import annotations

from offbeat.events import PeerReachable, PeerUnreachable
from offbeat.policies.membership.current_group import CurrentGroup
from offbeat.policies.membership.outage_monitor import OutageMonitor
from offbeat.policies.membership.worker_table import WorkerStatus, WorkerTable


def monitored(workers: int) -> tuple[OutageMonitor, WorkerTable]:
    """A group of all but the last worker, all of which have been Ready."""
    table, group = WorkerTable(), CurrentGroup()
    table.statuses = {worker: WorkerStatus(round=0) for worker in range(workers)}
    group.change(tuple(range(workers - 1)), reason="")
    return OutageMonitor(table, group), table


def report(monitor: OutageMonitor, worker: int | None, peer: int, now_s: float = 1.0) -> bool:
    monitor.on_report(PeerUnreachable(now_s=now_s, worker=worker, peer=peer, cause="it is silent"))
    return monitor.update()


def test_reports_are_gathered_before_a_member_is_excluded():
    monitor, table = monitored(5)
    assert not report(monitor, 0, 1)
    assert not monitor.is_exclusion_due(1.2)
    assert monitor.is_exclusion_due(1.25)
    assert monitor.exclude()
    assert (table.unreachable, table.statuses[1].is_silent_since_exclusion) == ({1}, True)
    monitor.on_report(PeerReachable(now_s=2.0, worker=0, peer=1))
    assert monitor.update()
    assert table.unreachable == set()


def test_a_worker_outside_the_group_is_excluded_at_once():
    monitor, table = monitored(5)
    assert report(monitor, 0, 4)
    assert table.unreachable == {4}


def test_nothing_is_decided_while_most_members_are_silent():
    monitor, table = monitored(5)
    for worker in (1, 2, 3):
        report(monitor, None, worker)
    assert (monitor.is_isolated, table.unreachable) == (True, set())
    monitor.on_report(PeerReachable(now_s=2.0, worker=None, peer=3))
    monitor.update()
    assert not monitor.is_isolated


def test_a_report_of_a_worker_that_is_gone_is_dropped():
    monitor, table = monitored(5)
    table.remove(1)
    assert not monitor.on_report(PeerUnreachable(now_s=1.0, worker=0, peer=1, cause=""))
    assert not monitor.is_exclusion_due(9.0)
