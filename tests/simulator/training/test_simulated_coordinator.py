"""The coordinator of a simulated job: what its log holds after it was killed."""

import pytest

from offbeat.events import Lost, PeerReachable, PeerUnreachable, Tick
from offbeat.policies.membership.assembly import Assembly
from offbeat.simulator.training.coordinator import SimulatedCoordinator


class InvariantError(Exception):
    pass


def fail(what: str):
    raise InvariantError(what)


def test_a_killed_coordinator_loses_what_came_after_the_last_sync():
    coordinator = SimulatedCoordinator(lambda: [Assembly(2)], keeps_log=True, fail_invariant=fail)
    coordinator.handle(Tick(now_s=1.0))
    coordinator.sync()
    coordinator.handle(PeerUnreachable(now_s=2.0, worker=0, peer=1, cause="silence"))
    assert coordinator.unreachable_peers(0) == {1}
    coordinator.kill()
    coordinator.restart(5.0)
    assert [event for event, _ in coordinator.log] == [Tick(now_s=1.0)]
    assert coordinator.unreachable_peers(0) == set()
    assert (coordinator.clock_lag_s, coordinator.incarnation) == (4.0, 1)


def test_a_replay_that_gives_other_actions_is_found():
    coordinator = SimulatedCoordinator(lambda: [Assembly(2)], keeps_log=True, fail_invariant=fail)
    coordinator.log.append((Lost(now_s=1.0, worker=0, cause="end"), ("another action",)))
    with pytest.raises(InvariantError, match="a replay of the log gives other actions"):
        coordinator.restart(2.0)


def test_a_peer_is_unreachable_for_its_observer_until_it_is_reachable_again():
    coordinator = SimulatedCoordinator(lambda: [Assembly(2)], keeps_log=True, fail_invariant=fail)
    coordinator.handle(PeerUnreachable(now_s=1.0, worker=None, peer=1, cause="silence"))
    assert (coordinator.unreachable_peers(None), coordinator.unreachable_peers(0)) == ({1}, set())
    coordinator.handle(PeerReachable(now_s=2.0, worker=None, peer=1))
    assert coordinator.unreachable_peers(None) == set()
