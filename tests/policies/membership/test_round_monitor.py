"""Progress of rounds: who is late, steps that differ within a round, and silences that call for a probe."""

from __future__ import annotations

from offbeat.events import ExchangeUnderWay, Ready
from offbeat.policies.membership.current_group import CurrentGroup
from offbeat.policies.membership.round_monitor import RoundMonitor
from offbeat.policies.membership.worker_table import WorkerStatus, WorkerTable


class Rounds:
    """A monitor of a group of three workers, whose patience is 1 s."""

    def __init__(self) -> None:
        self.workers, self.group = WorkerTable(), CurrentGroup()
        self.workers.statuses = {worker: WorkerStatus() for worker in range(3)}
        self.group.change((0, 1, 2), reason="")
        self.monitor = RoundMonitor(
            self.workers, self.group, patience_min_s=1.0, join_timeout_s=5.0, timeout_s=9.0
        )
        self.monitor.start(0.0)

    def ready(self, worker: int, round_: int, now_s: float, *, step: int | None = None) -> bool:
        event = Ready(
            now_s=now_s,
            worker=worker,
            generation=0,
            epoch=0,
            step=round_ if step is None else step,
            round=round_,
            compute_s=0.1,
            samples=0,
            blocks=(),
        )
        return self.monitor.on_ready(event, self.workers.statuses[worker])


def test_a_member_is_late_once_another_one_has_waited_for_longer_than_the_patience():
    rounds = Rounds()
    assert rounds.ready(0, 0, 1.0)
    assert rounds.ready(2, 0, 1.5)
    assert rounds.monitor.late_workers(2.0, 0.2) == []
    assert rounds.monitor.late_workers(2.1, 0.2) == [1]
    assert rounds.monitor.late_workers(2.1, 4.0) == []  # half the time of a slow member is longer
    assert rounds.ready(1, 0, 2.2)
    assert rounds.monitor.late_workers(9.0, 0.2) == []


def under_way(worker: int, now_s: float, *, has_moved: bool = True) -> ExchangeUnderWay:
    return ExchangeUnderWay(now_s=now_s, worker=worker, round=0, has_moved=has_moved)


def test_a_member_that_is_still_in_an_exchange_is_not_late():
    rounds = Rounds()
    rounds.ready(0, 0, 1.0)
    rounds.ready(2, 0, 1.0)
    rounds.monitor.on_exchange_under_way(under_way(1, 2.0, has_moved=False))
    assert rounds.monitor.late_workers(3.0, 0.2) == []
    assert rounds.monitor.late_workers(3.1, 0.2) == [1]  # nothing more was heard of it


def test_no_probe_is_due_as_long_as_data_flow():
    rounds = Rounds()
    for worker in range(3):
        rounds.ready(worker, 0, 1.0)
    rounds.monitor.on_exchange_under_way(under_way(1, 3.0))
    rounds.monitor.on_exchange_under_way(under_way(1, 4.0, has_moved=False))
    assert [rounds.monitor.begin_probe(now_s, None) for now_s in (5.0, 5.5)] == [None, 2.5]


def test_most_members_are_late_only_after_their_silence_would_be_known():
    rounds = Rounds()
    rounds.ready(0, 0, 1.0)
    assert rounds.monitor.late_workers(3.0, 0.2) == []
    assert rounds.monitor.late_workers(3.1, 0.2) == [1, 2]


def test_another_step_in_the_same_round_is_found():
    rounds = Rounds()
    assert rounds.ready(0, 0, 1.0, step=0)
    assert not rounds.ready(1, 0, 1.0, step=1)


def test_a_probe_is_due_after_twice_the_patience_and_then_after_twice_as_long():
    rounds = Rounds()
    for worker in range(3):
        rounds.ready(worker, 0, 1.0)
    assert [rounds.monitor.begin_probe(now_s, None) for now_s in (3.0, 3.5)] == [None, 2.5]
    assert [rounds.monitor.begin_probe(now_s, None) for now_s in (7.5, 8.0)] == [None, 4.5]
    rounds.ready(0, 1, 9.0)
    assert rounds.monitor.begin_probe(9.1 + 2 * 8.0, None) is not None  # the last silence was 8 s


def test_a_restored_monitor_goes_on_where_it_was():
    rounds, later = Rounds(), Rounds()
    rounds.ready(0, 0, 1.0)
    rounds.monitor.on_exchange_under_way(under_way(2, 2.5))
    later.workers.load_state_dict(rounds.workers.state_dict())
    later.monitor.load_state_dict(rounds.monitor.state_dict())
    assert later.monitor.late_workers(3.1, 0.2) == rounds.monitor.late_workers(3.1, 0.2) == [1]
