"""The record: round trips are exact, malformed data are refused, and a log replays."""

import json
import math
import struct
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    Evaluated,
    Event,
    Failed,
    Joined,
    Lost,
    PeerList,
    Ready,
    StepFinished,
    Tick,
    ValidationFinished,
)
from offbeat.policies import dispatch_event
from offbeat.wire.record import (
    MESSAGE_BYTES_MAX,
    LogWriter,
    ReplayDifference,
    RunRecord,
    build_policy,
    decode_actions,
    decode_events,
    encode_actions,
    encode_events,
    from_plain,
    read_log,
    replay,
    split_actions,
    to_plain,
)
from support.every_event import ACTIONS, CLOCKED, EVENTS, EXAMPLES, GROUP, HEADER

UNKNOWN_TIME_S = 77.0


def kinds(things: list) -> set:
    return {type(thing) for thing in things}


def test_actions_that_are_too_long_for_one_message_take_several():
    one = ValidationFinished(
        worker=3,
        epoch=0,
        snapshot_owner=1,
        digest="ab",
        means={f"recall of class {number}": number / 7 for number in range(9000)},
        counts={},
        reason="r",
    )
    actions = [replace(one, epoch=epoch) for epoch in range(9)]
    messages = split_actions(actions)
    assert 1 < len(messages) < len(actions)
    assert all(len(message) <= MESSAGE_BYTES_MAX for message in messages)
    assert [action for message in messages for action in decode_actions(message)] == actions
    assert split_actions(actions[:1]) == [encode_actions(actions[:1])]


def test_the_examples_hold_every_event_and_action():
    assert kinds(EVENTS) == set(get_args(Event))
    assert kinds(ACTIONS) == set(get_args(Action))
    assert not {kind.__name__ for kind in get_args(Event)} & {kind.__name__ for kind in get_args(Action)}


@pytest.mark.parametrize("thing", EXAMPLES, ids=lambda thing: type(thing).__name__)
def test_plain_data_round_trip_exactly_also_through_json(thing):
    plain = to_plain(thing)
    assert plain["type"] == type(thing).__name__
    assert from_plain(plain) == thing
    back = from_plain(json.loads(json.dumps(plain)))
    assert back == thing
    assert type(back) is type(thing)
    assert hash(repr(back)) == hash(repr(thing))  # tuples are tuples again, floats floats


def test_a_message_of_events_gets_the_receivers_clock():
    back = decode_events(encode_events(EVENTS), UNKNOWN_TIME_S)
    assert {event.now_s for event in back} == {UNKNOWN_TIME_S}
    for event, sent in zip(back, EVENTS, strict=True):
        assert to_plain(event) == {**to_plain(sent), "now_s": UNKNOWN_TIME_S}


def test_the_senders_clock_is_not_on_the_wire():
    assert b"now_s" not in encode_events(EVENTS)
    with pytest.raises(ProtocolError, match="unknown field `now_s`"):
        decode_events(msgspec.msgpack.encode([to_plain(EVENTS[0])]), 0.0)


def test_a_message_of_actions_round_trips():
    assert decode_actions(encode_actions(ACTIONS)) == ACTIONS


def test_a_message_may_be_empty():
    assert decode_events(encode_events([]), 0.0) == []
    assert decode_actions(encode_actions([])) == []


def test_events_are_no_actions_and_actions_no_events():
    with pytest.raises(ProtocolError, match="expected a list of actions: Invalid value 'Joined'"):
        decode_actions(encode_events(EVENTS))
    with pytest.raises(ProtocolError, match="expected a list of events: Invalid value 'PeerList'"):
        decode_events(encode_actions(ACTIONS), 0.0)


@pytest.mark.parametrize("name", ["nan", "inf", "-inf"])
def test_a_diverged_metric_survives_wire_and_log(name, tmp_path):
    event = Evaluated(now_s=UNKNOWN_TIME_S, worker=0, epoch=0, metrics={"loss": float(name), "ok": 1.0})
    for back in through_wire_log_and_json(event, tmp_path / "log"):
        assert repr(back) == repr(event)
        assert isinstance(back, Evaluated)
        assert isinstance(back.metrics["loss"], float)


@pytest.mark.parametrize("loss", [0.5, 3.0, -1.0, None, math.nan, math.inf, -math.inf])
def test_a_loss_survives_wire_and_log_also_a_diverged_one_or_none(loss, tmp_path):
    event = replace(CLOCKED, now_s=UNKNOWN_TIME_S, loss=loss)
    for back in through_wire_log_and_json(event, tmp_path / "log"):
        assert repr(back) == repr(event)
        assert isinstance(back, StepFinished)
        assert type(back.loss) is type(loss)


def through_wire_log_and_json(event: Event, path: Path) -> list:
    writer = LogWriter(path, HEADER)
    writer.add_event(event)
    writer.close()
    return [
        *decode_events(encode_events([event]), UNKNOWN_TIME_S),
        *read_log(path).entries,
        from_plain(json.loads(json.dumps(to_plain(event)))),
    ]


DURATIONS = [
    (thing, name)
    for thing in EVENTS
    for name, value in to_plain(thing).items()
    if isinstance(value, float) and name.endswith("_s")
]
COUNTS = [
    (thing, name) for thing in EXAMPLES for name, value in to_plain(thing).items() if type(value) is int
]


@pytest.mark.long(after=100)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, "1", None, True])
@pytest.mark.parametrize(("thing", "name"), DURATIONS)
def test_a_duration_is_finite_and_not_negative(thing, name, value):
    with pytest.raises(ProtocolError, match=name):
        from_plain({**to_plain(thing), name: value})


@pytest.mark.long(after=200)
@pytest.mark.parametrize("value", [-1, 1.5, 2**63, "1", True, [1]])
@pytest.mark.parametrize(("thing", "name"), COUNTS)
def test_a_count_is_a_whole_number_of_64_bits_and_not_negative(thing, name, value):
    with pytest.raises(ProtocolError, match=name):
        from_plain({**to_plain(thing), name: value})


@pytest.mark.parametrize("weights", [[math.nan], [-0.5], [math.inf], ["1"]])
def test_weights_are_finite_and_not_negative(weights):
    with pytest.raises(ProtocolError, match="weights"):
        from_plain({**to_plain(GROUP), "weights": weights})


@pytest.mark.parametrize("thing", EXAMPLES, ids=lambda thing: type(thing).__name__)
def test_a_field_too_many_or_too_few_is_refused(thing):
    plain = to_plain(thing)
    with pytest.raises(ProtocolError, match="unknown field `more`"):
        from_plain({**plain, "more": 1})
    for name in plain.keys() - {field.name for field in fields(thing) if field.default is not MISSING}:
        with pytest.raises(ProtocolError, match=f"missing required field `{name}`"):
            from_plain({key: value for key, value in plain.items() if key != name})


@pytest.mark.parametrize(
    "plain",
    [{}, {"type": "Peer"}, {"type": "Nobody"}, {"type": 3}, {"type": None}, {3: 4}, [], "Tick", None, 3],
)
def test_malformed_events_and_actions_are_refused(plain):
    with pytest.raises(ProtocolError, match="expected an event or action as plain data"):
        from_plain(plain)


def test_metrics_are_numbers():
    for metrics in ({"loss": "high"}, {"loss": None}, {"loss": [1.0]}, {1: 1.0}, [1.0]):
        with pytest.raises(ProtocolError):
            from_plain({"type": "Evaluated", "now_s": 0.0, "worker": 0, "epoch": 0, "metrics": metrics})


def test_a_nan_duration_on_the_wire_is_refused():
    data = bytearray(
        encode_events(
            [
                Ready(
                    now_s=0.0,
                    worker=0,
                    generation=0,
                    epoch=0,
                    step=0,
                    round=0,
                    compute_s=0.25,
                    samples=1,
                    blocks=(),
                )
            ]
        )
    )
    place = data.index(struct.pack(">d", 0.25))
    for value in (math.nan, math.inf, -1.0):
        data[place : place + 8] = struct.pack(">d", value)
        with pytest.raises(ProtocolError, match="compute_s"):
            decode_events(bytes(data), 0.0)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data):
    for decode in (lambda: decode_events(data, 0.0), lambda: decode_actions(data)):
        with suppress(ProtocolError):
            decode()


@given(st.data())
def test_a_message_damaged_anywhere_is_a_message_or_a_protocol_error(draws):
    data = bytearray(encode_events(EVENTS))
    for _ in range(draws.draw(st.integers(1, 3))):
        data[draws.draw(st.integers(0, len(data) - 1))] = draws.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        assert kinds(decode_events(bytes(data), 0.0)) <= set(get_args(Event))


@given(st.integers(0, len(encode_events(EVENTS)) - 1))
def test_a_message_cut_short_is_a_protocol_error(length):
    with pytest.raises(ProtocolError):
        decode_events(encode_events(EVENTS)[:length], 0.0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,  # lists in lists
        b"\xdd\xff\xff\xff\xff",  # a list that claims four billion entries
        b"\x91\x82\xa4type\xa6Joined\xa5model\xdd\xff\xff\xff\xff",
        b"\x91\x82\xa4type\xa4Lost\xa5cause\xdb\xff\xff\xff\xff",
        b"\x91\x82\xa4type\xa4Lost\xa5cause\xa1\xff",  # not UTF-8
        b"\x91\x81" + b"\x91" * 100_000,
    ],
)
def test_hostile_messages_cost_nothing_and_are_refused(data):
    with pytest.raises(ProtocolError):
        decode_events(data, 0.0)


def test_a_message_that_is_too_long_is_refused_unread():
    with pytest.raises(
        ProtocolError, match=f"in at most {MESSAGE_BYTES_MAX} bytes, got {MESSAGE_BYTES_MAX + 1}"
    ):
        decode_events(bytes(MESSAGE_BYTES_MAX + 1), 0.0)


def test_text_that_utf8_cannot_carry_is_escaped_on_the_wire_and_in_the_log(tmp_path):
    event = Failed(now_s=0.0, worker=0, step=0, error="no file 'caf\udce9'")
    writer = LogWriter(tmp_path / "log", HEADER)
    writer.add_event(event)
    writer.close()
    for (back,) in (decode_events(encode_events([event]), 0.0), read_log(tmp_path / "log").entries):
        assert back == Failed(now_s=0.0, worker=0, step=0, error="no file 'caf\\udce9'")


def a_run() -> RunRecord:
    """Two workers train three rounds, then one is lost; entries as the coordinator records them."""
    policies = [build_policy(policy["path"], policy["arguments"]) for policy in HEADER["policies"]]
    events = [
        Joined(
            now_s=float(worker),
            worker=worker,
            world=2,
            peer=f"worker-{worker}",
            location="host",
            addresses=("a:1",),
            model_signature=("weight",),
            strategy="bsp",
        )
        for worker in (0, 1)
    ]
    events += [
        Ready(
            now_s=2.0 + round_,
            worker=worker,
            generation=0,
            epoch=0,
            step=round_,
            round=round_,
            compute_s=0.1,
            samples=1,
            blocks=(),
        )
        for round_ in range(3)
        for worker in (1, 0)
    ]
    events += [Lost(now_s=9.0, worker=1, cause="closed"), Tick(now_s=10.0)]
    entries = [thing for event in events for thing in (event, *dispatch_event(policies, event))]
    return RunRecord(header={"offbeat_log": 3, **HEADER}, entries=entries)


def write(log: RunRecord, path) -> None:
    writer = LogWriter(path, log.header)
    for entry in log.entries:
        if isinstance(entry, get_args(Event)):
            writer.add_event(entry)
        else:
            writer.add_actions([entry])
    writer.close()


def test_a_log_round_trips_and_replays(tmp_path):
    write(a_run(), tmp_path / "log")
    log = read_log(str(tmp_path / "log"))
    assert log == a_run()
    assert replay(log) is None


def test_the_log_is_json_lines_with_the_header_first(tmp_path):
    write(a_run(), tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    assert json.loads(lines[0]) == {"offbeat_log": 3, **HEADER}
    assert [json.loads(line)["type"] for line in lines[1:6]] == [
        "Joined",
        "Joined",
        "PeerList",
        "Group",
        "Ready",
    ]


def test_the_header_is_in_the_file_before_anything_happens(tmp_path):
    writer = LogWriter(tmp_path / "log", HEADER)
    assert read_log(tmp_path / "log").entries == []
    writer.add_event(EXAMPLES[1])
    assert read_log(tmp_path / "log").entries == []
    writer.flush()
    assert read_log(tmp_path / "log").entries == [EXAMPLES[1]]
    writer.close()
    writer.close()


def test_the_write_buffer_is_bounded_and_an_event_stays_with_its_actions(tmp_path):
    path = tmp_path / "log"
    writer = LogWriter(path, HEADER)
    stop = AbortJob(worker=0, step=0, reason="x" * 1000)
    sizes = {path.stat().st_size}
    for _ in range(300):
        writer.add_event(Tick(now_s=0.0))
        writer.add_actions([stop, stop])
        if path.stat().st_size not in sizes:
            sizes.add(path.stat().st_size)
            assert len(path.read_bytes().splitlines()) % 3 == 1  # the header and whole threes
    writer.close()
    sizes.add(path.stat().st_size)
    steps = sorted(sizes)
    assert max(after - before for before, after in pairwise(steps)) < 64 * 1024 + 3000
    assert len(read_log(path).entries) == 900


def test_a_killed_run_leaves_a_log_that_reads_and_replays_wherever_it_was_cut(tmp_path):
    path = tmp_path / "log"
    write(a_run(), path)
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for length in range(header, len(whole)):
        path.write_bytes(whole[:length])
        log = read_log(path)
        assert log.entries == a_run().entries[: len(log.entries)]
        whole_lines = whole[:length].count(b"\n") - 1
        assert len(log.entries) == whole_lines + (whole[length : length + 1] == b"\n")
        assert log.is_truncated != whole[:length].endswith(b"\n")
        if log.is_truncated:
            assert replay(log) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: expected a run log"),
        (b"hello\n", "is not a run log: expected a run log"),
        (b"\x89PNG\r\n\x1a\n", "is not a run log"),
        (b"[1]\n", "is not a run log"),
        (b'{"a": 1}\n', "is not a run log"),
        (b'{"offbeat_log": "1"}\n', "is not a run log"),
        (b'{"offbeat_log": true}\n', "is not a run log"),
        (b'{"offbeat_log": 0}\n', "is not a run log"),
        (b'{"offbeat_log": 1', "is not a run log"),
        (b"[" * 100_000, "is not a run log"),
        (b'{"offbeat_log": 2}\n', "is a run log of version 2, expected version 3: read it with"),
        (b'{"offbeat_log": 4}\n', "is a run log of version 4, expected version 3: read it with"),
        (b'{"offbeat_log": 3}\nx\n', "line 2: expected an event or action: JSON is malformed"),
        (b'{"offbeat_log": 3}\n\n', "line 2: expected an event or action"),
        (
            b'{"offbeat_log": 3}\n{"type":"Tick","now_s":1}\n{"type":"Tack"}\n',
            "line 3: .*Invalid value 'Tack'",
        ),
        (b'{"offbeat_log": 3}\n{"type":"Tick","now_s":-1}\n', "line 2: .*now_s"),
        (b'{"offbeat_log": 3}\n{"type":"Lost","now_s":1,"worker":0,"cause":"\xff"}\n', "line 2: expected"),
        (
            b'{"offbeat_log": 3}\n{"type":"AbortJob","worker":null,"step":null,"reason":"r"}\n',
            "line 2: expected an event before the first action",
        ),
    ],
)
def test_a_file_that_is_no_log_is_refused_with_file_and_line(content, words, tmp_path):
    (tmp_path / "some.log").write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_log(tmp_path / "some.log")
    assert "some.log" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.log"):
        read_log(tmp_path / "nothing.log")


def test_replay_reports_the_first_changed_action_with_its_line():
    log = a_run()
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
    log = a_run()
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
    log = a_run()
    for place in range(2):
        entries = log.entries[:place] + log.entries[place + 1 :]
        assert replay(RunRecord(header=log.header, entries=entries)) is not None


def test_only_the_last_event_of_a_log_that_was_cut_off_may_lack_actions():
    log = a_run()
    place = next(index for index, entry in enumerate(log.entries) if isinstance(entry, PeerList))
    cut = RunRecord(header=log.header, entries=log.entries[:place], is_truncated=True)
    assert replay(cut) is None
    assert replay(RunRecord(header=log.header, entries=log.entries[:place])) is not None
    for earlier in (place, place + 1):
        entries = log.entries[:earlier] + log.entries[earlier + 1 :]
        assert replay(RunRecord(header=log.header, entries=entries, is_truncated=True)) is not None


def test_replay_builds_fresh_policies_every_time():
    log = a_run()
    assert [replay(log), replay(log)] == [None, None]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("os:system", "expected a policy as 'offbeat.policies.MODULE:Class', got 'os:system'"),
        ("offbeat.wire.record:LogWriter", "expected a policy as"),
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
