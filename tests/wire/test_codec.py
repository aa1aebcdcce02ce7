"""The codec: round trips are exact, malformed data are refused."""

import json
import math
import struct
from contextlib import suppress
from dataclasses import MISSING, fields, replace
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
    Ready,
    StepFinished,
    ValidationFinished,
)
from offbeat.wire.codec import (
    ACTION_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    append_json,
    decode_actions,
    decode_events,
    decode_json,
    encode_action,
    encode_actions,
    encode_events,
    encode_record,
    from_plain,
    join_actions,
    split_actions,
    to_plain,
)
from offbeat.wire.log_file import LogWriter, read_log
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
    messages = split_actions([encode_action(to_plain(action)) for action in actions])
    assert 1 < len(messages) < len(actions)
    assert all(len(message.payload) <= MESSAGE_BYTES_MAX for message in messages)
    decoded = [decode_actions(message.payload) for message in messages]
    assert [action for part in decoded for action in part] == actions
    assert [message.actions for message in messages] == [len(part) for part in decoded]
    assert split_actions([encode_action(to_plain(one))]) == [(1, encode_actions([one]))]


@pytest.mark.parametrize("letter", ["r", "\udcff"])
def test_an_action_that_no_message_can_hold_is_refused_with_its_longest_field(letter):
    one = next(action for action in ACTIONS if isinstance(action, AbortJob))
    rest = len(encode_action(to_plain(replace(one, reason="r" * 2**16)))) - 2**16
    longest = replace(one, reason="r" * (ACTION_BYTES_MAX - rest))
    (message,) = split_actions([encode_action(to_plain(longest))])
    assert len(message.payload) == MESSAGE_BYTES_MAX
    too_long = to_plain(replace(longest, reason=longest.reason + letter))
    expected = rf"at most {ACTION_BYTES_MAX} bytes, .* got AbortJob of \d+ bytes, \d+ of them in 'reason'"
    with pytest.raises(ValueError, match=expected):
        encode_action(too_long)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_actions_encoded_one_by_one_join_to_the_same_message(count):
    actions = [ACTIONS[number % len(ACTIONS)] for number in range(count)]
    assert join_actions([encode_action(to_plain(action)) for action in actions]) == encode_actions(actions)


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
    back = [one.event for one in decode_events(encode_events(EVENTS), UNKNOWN_TIME_S)]
    assert {event.now_s for event in back} == {UNKNOWN_TIME_S}
    for event, sent in zip(back, EVENTS, strict=True):
        assert to_plain(event) == {**to_plain(sent), "now_s": UNKNOWN_TIME_S}


def test_a_received_event_is_recorded_without_its_dataclass_and_is_the_same():
    diverged = replace(CLOCKED, loss=math.nan)
    for event, received in decode_events(encode_events([*EVENTS, diverged]), UNKNOWN_TIME_S):
        line = bytearray()
        append_json(received, line)
        _, plain, answers = msgspec.msgpack.decode(encode_record("a peer", received, b"answers"))
        assert answers == b"answers"
        for back in (decode_json(bytes(line)), from_plain(plain)):
            assert repr(back) == repr(event)


def test_the_senders_clock_is_not_on_the_wire():
    assert b"now_s" not in encode_events(EVENTS)
    with pytest.raises(ProtocolError, match="expected events without now_s"):
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
        *(one.event for one in decode_events(encode_events([event]), UNKNOWN_TIME_S)),
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
        assert kinds(one.event for one in decode_events(bytes(data), 0.0)) <= set(get_args(Event))


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
    received = [one.event for one in decode_events(encode_events([event]), 0.0)]
    for (back,) in (received, read_log(tmp_path / "log").entries):
        assert back == Failed(now_s=0.0, worker=0, step=0, error="no file 'caf\\udce9'")
