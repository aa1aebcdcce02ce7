"""The record: what goes out comes back the same, what is malformed is refused, and a log replays."""

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
    AggregationJoined,
    AggregationLeft,
    AggregationPaused,
    AnnounceWorkerLost,
    AssignBlocks,
    AssignLateBlock,
    AssignRoundBatch,
    AssignTask,
    AverageModels,
    BatchesSkipped,
    Block,
    CancelAveraging,
    CheckpointQuery,
    CloseServers,
    ClusterView,
    ConsumedSamples,
    ContributionQuery,
    ContributionReport,
    EndEpoch,
    Evaluated,
    EvaluatePart,
    Event,
    Failed,
    Finished,
    ForgetClient,
    Group,
    Halt,
    Halted,
    JobComplete,
    Joined,
    LateGradientArrived,
    Left,
    Lost,
    LostArc,
    MergeStates,
    ModelsAveraged,
    Namespace,
    NamespaceRequested,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeResumed,
    NodeSilent,
    PartEvaluated,
    Participant,
    PassesEnded,
    Pause,
    Peer,
    PeerList,
    PeerReachable,
    PeerUnreachable,
    Preempt,
    Preempted,
    ProgressRequested,
    Ready,
    RejectNamespace,
    RejectPeer,
    ResolveLateBlock,
    RolledBack,
    SamplesRequested,
    SendSnapshot,
    ServerAddress,
    ServerReachable,
    ServerRemovalRequested,
    ServerTransfer,
    ServerTransferDone,
    ServerUnreachable,
    SnapshotTaken,
    StatesMerged,
    StepFinished,
    StepPermit,
    StepTimed,
    TaskDone,
    TaskRequested,
    TauSet,
    Tick,
    ValidationFinished,
    ValidationStarted,
    WorkerGroupJoined,
    WorkerGroupLeft,
    WorkerGroupMember,
    WorkerGroupRejected,
    WorkerGroupView,
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

HEADER = {
    "job": "test",
    "policies": [
        {"path": "offbeat.policies.membership.assembly:Assembly", "arguments": {"world": 2}},
        {"path": "offbeat.policies.membership.lockstep:Lockstep", "arguments": {"world": 2}},
    ],
}

GROUP = Group(
    generation=3,
    step=4,
    exchange_id=9,
    members=(0, 2),
    joining=(2,),
    weights=(0.25, 0.75),
    reason="r",
)

CLOCKED = StepFinished(
    now_s=1.0,
    worker=1,
    clock=7,
    parameter_version=4,
    epoch=2,
    step=9,
    compute_s=0.25,
    samples=32,
    loss=-0.5,
    blocks=(3, 7),
)

EXAMPLES = [
    Joined(
        now_s=0.5,
        worker=1,
        world=2,
        peer="worker-1",
        location="host process 7",
        addresses=("10.0.0.1:7000", "unix:/x"),
        model_signature=("weight float32 (10, 5)",),
        strategy="bsp",
    ),
    Ready(now_s=1.0, worker=0, generation=2, epoch=1, step=3, round=3, compute_s=0.25, samples=32, blocks=()),
    BatchesSkipped(now_s=1.0, worker=0, epoch=1, step=3, round=3, batches_fetched=7, skipped=2),
    LateGradientArrived(now_s=1.0, worker=0, late_worker=2, assignment=3, step=7),
    SamplesRequested(
        now_s=1.0,
        worker=1,
        epoch=2,
        samples=100,
        batch_size=4,
        is_last=True,
        abandons_previous=False,
        blocks_max=5,
        started_blocks=(3, 7),
        round=9,
        consumed_ranges=((0, 4), (8, 20)),
    ),
    CheckpointQuery(now_s=1.0, worker=1, round=9),
    ContributionReport(
        now_s=1.0, worker=1, lost_worker=2, first_round=3, end_round=9, contributions=((4, 2, 0), (6, 1, 1))
    ),
    CLOCKED,
    StepFinished(
        now_s=1.0,
        worker=1,
        clock=None,
        parameter_version=4,
        epoch=0,
        step=0,
        compute_s=0.0,
        samples=0,
        loss=None,
        blocks=(),
    ),
    Finished(now_s=1.5, worker=1, epoch=2, step=9),
    Halted(
        now_s=1.5,
        worker=1,
        generation=3,
        has_state=True,
        step=4,
        has_begun_exchange=True,
        round=4,
        exchange_id=9,
    ),
    StepTimed(
        now_s=1.0,
        worker=0,
        step=3,
        batch_s=0.1,
        compute_s=0.2,
        apply_s=0.1,
        communicate_s=0.3,
        wait_s=0.2,
        other_s=0.1,
        wall_s=1.0,
        samples=32,
    ),
    Preempted(now_s=2.0, worker=1, step=9, signal="SIGTERM"),
    Evaluated(now_s=2.0, worker=0, epoch=1, metrics={"loss": -0.5, "accuracy_percent": 91.5}),
    SnapshotTaken(
        now_s=2.0,
        worker=0,
        epoch=3,
        digest="0123456789abcdef",
        is_current=True,
        samples=100,
        evaluators=2,
        part_deadline_s=60.0,
        decision_rule="decision='lag'",
    ),
    RolledBack(now_s=2.0, worker=0, epoch=3),
    ModelsAveraged(now_s=2.0, worker=0, exchange_id=16, has_mean=True),
    PartEvaluated(
        now_s=2.0, worker=0, epoch=3, digest="ab", part=4, means={"loss": -0.5}, counts={"right": 7.0}
    ),
    PartEvaluated(
        now_s=2.0, worker=0, epoch=3, digest="ab", part=4, means={}, counts={}, states=(("f1", "x"),)
    ),
    StatesMerged(now_s=2.0, worker=0, epoch=3, digest="ab", means={"f1": 0.5}, counts={"right": 7.0}),
    Left(now_s=3.0, worker=0, step=10),
    Lost(now_s=3.0, worker=1, cause="the connection was closed\n“so”"),
    PeerUnreachable(now_s=3.0, worker=1, peer=2, cause="nothing was received for 1.25 s"),
    PeerUnreachable(now_s=3.0, worker=None, peer=2, cause="nothing was received for 1.25 s"),
    PeerReachable(now_s=3.5, worker=1, peer=2),
    PeerReachable(now_s=3.5, worker=None, peer=2),
    Failed(now_s=3.0, worker=1, step=10, error="ValueError: x"),
    Tick(now_s=0.0),
    PeerList(peers=(Peer(worker=0, name="worker-0", addresses=("a:1",)),), reason="all"),
    Halt(generation=3, abandon=True, reason="r"),
    ContributionQuery(worker=1, lost_worker=2, after_round=3, reason="r"),
    ConsumedSamples(
        worker=1,
        round=9,
        epoch=2,
        consumed=((2, ((0, 4), (8, 20))), (3, ())),
        is_current=True,
        reason="r",
    ),
    AssignBlocks(
        worker=1,
        epoch=2,
        replaces_queue=True,
        blocks=(Block(3, 2, ((0, 4),)), Block(7, 1, ((8, 9), (11, 14)))),
        is_last=False,
        is_awaited=True,
        consumed=17,
        reason="r",
    ),
    CloseServers(reason="r"),
    StepPermit(
        worker=1,
        clock=7,
        version_min=4,
        complete_version=5,
        staleness_bound=3,
        may_start=True,
        is_leader=True,
        reason="r",
    ),
    StepPermit(
        worker=1,
        clock=7,
        version_min=0,
        complete_version=2,
        staleness_bound=None,
        may_start=False,
        is_leader=False,
        reason="r",
    ),
    Preempt(worker=None, signalled_worker=1, reason="r"),
    Preempt(worker=2, signalled_worker=1, reason="r"),
    ValidationStarted(worker=None, epoch=3, reason="r"),
    SendSnapshot(worker=0, receiver=1, epoch=3, digest="ab", transfer=2, reason="r"),
    EvaluatePart(worker=0, epoch=3, digest="ab", part=4, start=40, stop=50, reason="r"),
    MergeStates(worker=0, epoch=3, digest="ab", part=4, parts=8, states=(("f1", "x"),), reason="r"),
    ValidationFinished(
        worker=2,
        epoch=3,
        snapshot_owner=0,
        digest="ab",
        means={"loss": 0.5},
        counts={"right": 7.0},
        reason="r",
    ),
    ValidationFinished(worker=None, epoch=3, snapshot_owner=None, digest="", means={}, counts={}, reason="r"),
    EndEpoch(epoch=2, reason="r"),
    AssignRoundBatch(worker=0, round=3, batch=5, reason="r"),
    JobComplete(reason="r"),
    GROUP,
    AbortJob(worker=None, step=None, reason="r"),
    AbortJob(worker=0, step=4, reason="r"),
    AssignBlocks(
        worker=1,
        epoch=1,
        replaces_queue=False,
        blocks=(Block(7, 1, ((0, 4), (8, 12))),),
        is_last=True,
        is_awaited=False,
        consumed=4,
        reason="r",
    ),
    AssignLateBlock(worker=2, assignment=3, proxy=0, block=Block(7, 1, ((0, 4), (8, 12))), reason="r"),
    ResolveLateBlock(worker=0, late_worker=2, assignment=3, is_contributed=True, reason="r"),
    AverageModels(
        exchange_id=16,
        members=(0, 2, 5),
        joining=(5,),
        weights=(0.5, 0.5, 0.0),
        includes_buffers=False,
        leader=0,
        reason="r",
    ),
    CancelAveraging(exchange_id=16, members=(0, 2, 5), reason="r"),
    RejectPeer(peer="late", reason="r"),
    AnnounceWorkerLost(worker=2, reason="r"),
    NodeJoined(now_s=1.0, node="server-3", addresses=("unix:/x",), functions=("mine:Clipped",)),
    NodeLeft(now_s=1.0, node="client-7"),
    NodeLost(now_s=1.0, node="server-3", cause="it was silent"),
    NodeSilent(now_s=1.0, node="server-3", silent_s=1.25),
    NodeResumed(now_s=1.0, node="server-3"),
    NamespaceRequested(
        now_s=1.0, node="client-7", name="w", keys=10, block_keys=3, spec="{}", function="", aggregates=True
    ),
    AggregationJoined(now_s=1.0, node="client-7", namespace="w"),
    AggregationPaused(now_s=1.0, node="client-7", namespace="w", pause_view=4, time=9),
    AggregationLeft(now_s=1.0, node="client-7", namespace="w"),
    ServerRemovalRequested(now_s=1.0, node="client-7", server=3),
    ServerTransferDone(now_s=1.0, node="server-3", view=4),
    ServerUnreachable(now_s=1.0, node="server-3", server=2, cause="refused"),
    ServerReachable(now_s=1.0, node="server-3", server=2),
    ClusterView(
        node="",
        version=4,
        epoch=3,
        ring=(0, 3),
        virtual_nodes=16,
        copies=2,
        next_ring=(0, 2, 3),
        transfers=(ServerTransfer(server=3, start=0, stop=2**62),),
        namespaces=(Namespace(name="w", keys=10, block_keys=3, spec="{}", aggregates=True),),
        participants=(Participant(namespace="w", client=7, first_time=10),),
        paused=(Pause(namespace="w", view=3),),
        servers=(ServerAddress(server=0, addresses=("unix:/x", "tcp://a:1")),),
        reason="r",
        lost=(LostArc(loss=1, namespace="w", start=5, stop=2**61, server=2),),
        lost_arcs_dropped=((5, 2**61),),
        silent_servers=(3,),
    ),
    ForgetClient(node="client-7", reason="r"),
    RejectNamespace(node="client-7", name="w", reason="r"),
    WorkerGroupJoined(
        now_s=1.0, node="client-7", group="train", shards=9, on_loss="replace", wait_timeout_s=30.0
    ),
    WorkerGroupLeft(now_s=1.0, node="client-7", group="train"),
    TaskRequested(now_s=1.0, node="client-7", group="train", passes_max=10, shards_max=2),
    TaskDone(now_s=1.0, node="client-7", group="train", task=4),
    TauSet(now_s=1.0, node="client-7", group="train", tau=None),
    ProgressRequested(now_s=1.0, node="client-7", group="train"),
    WorkerGroupView(
        node="",
        group="train",
        tau=2,
        passes=3,
        workers=(
            WorkerGroupMember(node="client-7", shards=((0, 4), (6, 6)), passes=3, shard_passes_done=20),
        ),
        unassigned=((5, 5),),
        lost=(),
        reason="r",
    ),
    AssignTask(node="client-7", group="train", task=4, pass_number=3, shards=(0, 6), reason="r"),
    PassesEnded(node="client-7", group="train", passes=10, reason="r"),
    WorkerGroupRejected(node="client-7", group="train", reason="r"),
]
EVENTS = [thing for thing in EXAMPLES if isinstance(thing, get_args(Event))]
ACTIONS = [thing for thing in EXAMPLES if isinstance(thing, get_args(Action))]
UNKNOWN_TIME_S = 77.0


def kinds(things: list) -> set:
    return {type(thing) for thing in things}


def test_what_is_too_long_for_one_message_takes_several():
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
def test_plain_data_come_back_the_same_also_through_json(thing):
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


def test_a_message_of_actions_comes_back_the_same():
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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, "1", None, True])
@pytest.mark.parametrize(("thing", "name"), DURATIONS)
def test_a_duration_is_finite_and_not_negative(thing, name, value):
    with pytest.raises(ProtocolError, match=name):
        from_plain({**to_plain(thing), name: value})


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
def test_what_is_no_event_or_action_is_refused(plain):
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
    return RunRecord(header={"offbeat_log": 2, **HEADER}, entries=entries)


def write(log: RunRecord, path) -> None:
    writer = LogWriter(path, log.header)
    for entry in log.entries:
        if isinstance(entry, get_args(Event)):
            writer.add_event(entry)
        else:
            writer.add_actions([entry])
    writer.close()


def test_a_log_comes_back_the_same_and_replays(tmp_path):
    write(a_run(), tmp_path / "log")
    log = read_log(str(tmp_path / "log"))
    assert log == a_run()
    assert replay(log) is None


def test_the_log_is_json_lines_with_the_header_first(tmp_path):
    write(a_run(), tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    assert json.loads(lines[0]) == {"offbeat_log": 2, **HEADER}
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


def test_what_waits_is_bounded_and_an_event_is_never_parted_from_its_actions(tmp_path):
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
        (b'{"offbeat_log": 1}\n', "is a run log of version 1, expected version 2: read it with"),
        (b'{"offbeat_log": 3}\n', "is a run log of version 3, expected version 2: read it with"),
        (b'{"offbeat_log": 2}\nx\n', "line 2: expected an event or action: JSON is malformed"),
        (b'{"offbeat_log": 2}\n\n', "line 2: expected an event or action"),
        (
            b'{"offbeat_log": 2}\n{"type":"Tick","now_s":1}\n{"type":"Tack"}\n',
            "line 3: .*Invalid value 'Tack'",
        ),
        (b'{"offbeat_log": 2}\n{"type":"Tick","now_s":-1}\n', "line 2: .*now_s"),
        (b'{"offbeat_log": 2}\n{"type":"Lost","now_s":1,"worker":0,"cause":"\xff"}\n', "line 2: expected"),
        (
            b'{"offbeat_log": 2}\n{"type":"AbortJob","worker":null,"step":null,"reason":"r"}\n',
            "line 2: expected an event before the first action",
        ),
    ],
)
def test_what_is_no_log_is_refused_with_file_and_line(content, words, tmp_path):
    (tmp_path / "some.log").write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        read_log(tmp_path / "some.log")
    assert "some.log" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.log"):
        read_log(tmp_path / "nothing.log")


def test_replay_reports_the_first_changed_action_in_words():
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
