"""What one worker's links know of the others, and what they report to the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from offbeat.errors import LinkError
from offbeat.events import Event, Peer, PeerReachable, PeerUnreachable
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.control.peers import WorkerPeers
from support import endpoints
from support.endpoints import Node

node = endpoints.node


def joined(at: Node, sent: list[Event]) -> WorkerPeers:
    """The peers of worker 0 after worker 1 has joined; nothing listens at its address."""
    peers = WorkerPeers(at.links, 0, sent.append, lambda: 7, silent_s=10.0)
    known = ((0, at.links.name, at.links.addresses), (1, "one", ("tcp://127.0.0.1:1",)))
    peers.add(tuple(Peer(worker=worker, name=name, addresses=places) for worker, name, places in known))
    return peers


def test_an_outage_of_a_worker_is_reported_once_and_so_is_its_end(node: Callable[..., Node]) -> None:
    sent: list[Event] = []
    peers = joined(node("zero"), sent)
    peers.on_unreachable("one", "silence")
    peers.on_lost(LinkError("one", "it broke"))
    peers.on_unreachable(COORDINATOR, "silence")
    peers.on_reachable("one")
    peers.on_reachable("one")
    assert sent == [
        PeerUnreachable(now_s=0.0, worker=0, peer=1, cause="silence, in step 7"),
        PeerReachable(now_s=0.0, worker=0, peer=1),
    ]


def test_nothing_is_reported_of_a_worker_that_has_left(node: Callable[..., Node]) -> None:
    sent: list[Event] = []
    peers = joined(node("zero"), sent)
    peers.on_unreachable("one", "silence")
    peers.forget_worker(1)
    peers.on_reachable("one")
    peers.on_unreachable("one", "silence")
    peers.on_lost(LinkError("one", "it broke"))
    assert [type(event) for event in sent] == [PeerUnreachable]
    assert (peers.worker_of("one"), peers.link_name(1)) == (1, "one")  # its messages can still be named


def test_a_worker_that_leaves_logs_no_more_outages(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Event] = []
    at = node("zero")
    peers = joined(at, sent)
    peers.stop()
    with caplog.at_level(logging.WARNING):
        peers.on_unreachable("one", "silence")
        at.links.call_later(0.5, lambda: at.messages.put(("", b"")))  # after the line would be written
        at.message()
    assert not caplog.records
    assert len(sent) == 1
