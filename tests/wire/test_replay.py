"""The replay: new policies give the recorded answers, or the first other one is reported."""

from typing import get_args

import pytest

from offbeat.events import (
    AbortJob,
    Action,
    PeerList,
)
from offbeat.wire.log_file import RunRecord
from offbeat.wire.replay import ReplayDifference, build_policy, replay
from support.recorded_run import recorded_run


def test_replay_reports_the_first_changed_action_with_its_line():
    log = recorded_run()
    place = next(index for index, entry in enumerate(log.entries) if isinstance(entry, AbortJob))
    changed = AbortJob(worker=0, step=3, reason="r")
    difference = replay(
        RunRecord(header=log.header, entries=[*log.entries[:place], changed, *log.entries[place + 1 :]])
    )
    assert difference == ReplayDifference(
        entry=place,
        event=log.entries[place - 1],
        expected=(changed,),
        got=(log.entries[place],),
    )
    text = str(difference)
    assert f"entry {place} (line {place + 1}): to " in text
    assert '{"type":"Lost","now_s":9.0,"worker":1,"cause":"closed"}' in text
    assert 'the log has the answer {"type":"AbortJob","worker":0,"step":3,"reason":"r"}' in text
    assert 'the policies now give  {"type":"AbortJob","worker":1,"step":2,' in text


def test_replay_sees_every_action_that_is_missing_added_or_moved():
    log = recorded_run()
    places = [index for index, entry in enumerate(log.entries) if isinstance(entry, get_args(Action))]
    assert len(places) == 3
    for place in places:
        without = log.entries[:place] + log.entries[place + 1 :]
        twice = log.entries[: place + 1] + log.entries[place:]
        later = [*without, log.entries[place]]
        for entries in (without, twice, later):
            assert replay(RunRecord(header=log.header, entries=entries)) is not None
    assert "the policies now give  nothing" in str(
        replay(RunRecord(header=log.header, entries=[*log.entries, log.entries[places[0]]]))
    )


def test_replay_sees_every_event_that_matters_and_is_missing():
    log = recorded_run()
    for place in range(2):
        entries = log.entries[:place] + log.entries[place + 1 :]
        assert replay(RunRecord(header=log.header, entries=entries)) is not None


def test_only_the_last_event_of_a_log_that_was_cut_off_may_lack_actions():
    log = recorded_run()
    place = next(index for index, entry in enumerate(log.entries) if isinstance(entry, PeerList))
    cut = RunRecord(header=log.header, entries=log.entries[:place], is_truncated=True)
    assert replay(cut) is None
    assert replay(RunRecord(header=log.header, entries=log.entries[:place])) is not None
    for earlier in (place, place + 1):
        entries = log.entries[:earlier] + log.entries[earlier + 1 :]
        assert replay(RunRecord(header=log.header, entries=entries, is_truncated=True)) is not None


def test_replay_builds_fresh_policies_every_time():
    log = recorded_run()
    assert [replay(log), replay(log)] == [None, None]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("os:system", "expected a policy as 'offbeat.policies.MODULE:Class', got 'os:system'"),
        ("offbeat.wire.log_file:LogWriter", "expected a policy as"),
        ("offbeat.policies:Policy", "expected a policy as"),
        ("offbeat.policies.membership.lockstep", "expected a policy as"),
        ("offbeat.policies.membership.lockstep:Lockstep.handle", "expected a policy as"),
        ("offbeat.policies..lockstep:Lockstep", "expected a policy as"),
        ("offbeat.policies.membership.lockstep:Lockstep\n", "expected a policy as"),
        ("offbeat.policies.nothing:Lockstep", "there is no such module"),
        ("offbeat.policies.membership.lockstep:Nothing", "has no such policy"),
        ("offbeat.policies.membership.lockstep:Joined", "has no such policy"),
        ("offbeat.policies.stragglers.injection:SlowRule", "has no such policy"),
        ("offbeat.policies.membership.lockstep:Any", "has no such policy"),
    ],
)
def test_a_log_names_policies_and_nothing_else(path, words):
    header = {"policies": [{"path": path, "arguments": {"world": 2}}]}
    with pytest.raises(ValueError) as caught:
        replay(RunRecord(header=header, entries=[]))
    assert words in str(caught.value)


@pytest.mark.parametrize("arguments", [{}, {"world": 0}, {"world": "x"}, {"world": 2, "more": 1}])
def test_a_policy_that_does_not_take_the_arguments_is_named(arguments):
    with pytest.raises(
        ValueError, match=r"the policy offbeat\.policies\.membership\.lockstep:Lockstep cannot be built with"
    ):
        build_policy("offbeat.policies.membership.lockstep:Lockstep", arguments)


@pytest.mark.parametrize("policies", [None, {}, "x", [1], [{"arguments": {}}], [{"path": 3}]])
def test_a_header_without_a_list_of_policies_cannot_be_replayed(policies):
    with pytest.raises(ValueError, match="expected the log's header to list its policies"):
        replay(RunRecord(header={"policies": policies}, entries=[]))
    with pytest.raises(ValueError, match="expected the log's header to list its policies"):
        replay(RunRecord(header={}, entries=[]))
