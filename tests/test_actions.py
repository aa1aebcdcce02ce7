"""Every action has its recipients, and a worker that cannot use an action reports that."""

from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_origin, get_type_hints

import pytest

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    AssignLateBlock,
    Block,
    CloseServers,
    ForgetClient,
    Group,
    Recipient,
    RejectPeer,
    SendSnapshot,
    StepPermit,
    ToAllWorkers,
    WorkerGroupView,
)
from offbeat.events.recipients import Addressed
from offbeat.policies.membership.group_protocol import GroupProtocol
from offbeat.policies.staleness.clock_protocol import ClockProtocol
from support.every_event import ACTIONS as EXAMPLES

WORKERS = [Recipient(f"worker-{worker}.abcd", worker) for worker in range(3)]
NODES = [Recipient(name, name) for name in ("server-0", "server-1", "client-0", "client-1")]
ALL_RECIPIENTS = WORKERS + NODES
ACTIONS = get_args(Action)


def value_of(hint):
    """The plainest value of a field's type."""
    if hint in (int, float, str, bool):
        return hint()
    if get_origin(hint) is tuple:
        return ()
    if is_dataclass(hint):
        return make(hint)
    return {} if get_origin(hint) is dict else None


def make(kind, **given):
    hints = get_type_hints(kind)
    plain = {field.name: value_of(hints[field.name]) for field in fields(kind) if field.default is MISSING}
    return kind(**plain | given)


def recipients(action):
    return {one.sender for one in ALL_RECIPIENTS if action.is_for(one)}


@pytest.mark.parametrize("kind", [kind for kind in ACTIONS if issubclass(kind, ToAllWorkers)])
def test_an_action_for_all_workers_reaches_each_of_them(kind):
    assert {0, 1, 2} <= recipients(make(kind))
    assert (kind is AbortJob) == ("server-0" in recipients(make(kind)))


@pytest.mark.parametrize(
    "kind",
    [kind for kind in ACTIONS if "worker" in get_type_hints(kind) and not issubclass(kind, ToAllWorkers)],
)
def test_an_action_that_names_a_worker_reaches_it_and_no_node(kind):
    others = {AssignLateBlock: {"proxy": 1}, SendSnapshot: {"receiver": 1}}.get(kind, {})
    assert recipients(make(kind, worker=1, **others)) == {1}


@pytest.mark.parametrize("kind", [kind for kind in ACTIONS if "node" in get_type_hints(kind)])
def test_an_action_that_names_a_node_reaches_it_and_no_worker(kind):
    if kind is not ForgetClient:
        assert recipients(make(kind, node="client-1")) == {"client-1"}


def test_two_workers_share_a_late_block_and_a_snapshot():
    block = make(Block)
    assert recipients(make(AssignLateBlock, worker=0, proxy=2, block=block)) == {0, 2}
    assert recipients(make(SendSnapshot, worker=2, receiver=1)) == {1, 2}


def test_servers_alone_forget_a_client_and_all_nodes_receive_the_closing():
    assert recipients(make(ForgetClient, node="client-1")) == {"server-0", "server-1"}
    assert recipients(make(CloseServers)) == {one.sender for one in NODES}


def test_the_members_of_a_worker_group_receive_its_view():
    (member_kind,) = [
        get_args(hint)[0] for name, hint in get_type_hints(WorkerGroupView).items() if name == "workers"
    ]
    members = (make(member_kind, node="client-0"),)
    assert recipients(make(WorkerGroupView, workers=members)) == {"client-0"}
    assert recipients(make(WorkerGroupView, node="client-1", workers=members)) == {"client-1"}


def test_a_rejection_is_sent_to_a_link_and_not_to_an_id():
    assert [one for one in ALL_RECIPIENTS if make(RejectPeer, peer="worker-1.abcd").is_for(one)] == [
        WORKERS[1]
    ]
    assert not make(RejectPeer, peer="worker-1.ffff").is_for(WORKERS[1])


@pytest.mark.parametrize("action", EXAMPLES, ids=lambda action: type(action).__name__)
def test_an_action_that_names_its_recipients_is_for_them_alone(action):
    named = action.named_recipients
    if named is not None:
        known = {one.sender for one in ALL_RECIPIENTS}
        assert recipients(action) == known & {*named}


def test_an_action_without_recipients_cannot_be_defined():
    with pytest.raises(TypeError, match=r"Forgotten .* is_for"):

        class Forgotten(Addressed):
            pass


@pytest.mark.parametrize(
    ("protocol", "action"), [(GroupProtocol(0), make(StepPermit)), (ClockProtocol(), make(Group))]
)
def test_a_worker_names_the_action_that_it_cannot_use(protocol, action):
    with pytest.raises(
        ProtocolError, match=f"{type(protocol).__name__} does not handle the action {type(action).__name__}"
    ):
        protocol.handle(action)
