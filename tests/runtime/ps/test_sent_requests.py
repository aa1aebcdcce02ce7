"""How requests end that have been sent: with values, refused, or with the client."""

from __future__ import annotations

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.numerics.ps.entries import Entries
from offbeat.policies.ps.client import RequestDone, RequestFailed
from offbeat.policies.ps.messages import PullResult
from offbeat.runtime.ps.future import Future
from offbeat.runtime.ps.inflight_window import RequestWindow
from offbeat.runtime.ps.pull_buffer import PullBuffer
from offbeat.runtime.ps.sent_requests import QueuedRequest, Room, SentRequest, SentRequests
from offbeat.runtime.transport.buffer_pool import BufferPool

ROOM = Room(RequestWindow(100), "", 10)


def future(label, first=0, last=4):
    return Future(label, lambda *_: "no server", lambda *_: None, ("w", first, last))


def buffer(first, last):
    return PullBuffer(first, last, None, (), np.dtype("float32"), BufferPool(), states=False, times=False)


class Sent(SentRequests):
    """Notes how much room is given back."""

    def __init__(self):
        self.released = []
        super().__init__(lambda room, count: self.released.append((room.size_bytes, count)))


def with_pull(sent, last=4):
    """A push of two futures, and a pull of its first keys that travels with it."""
    pushes, pull = [future("a push"), future("another")], future("a pull", 0, last)
    request = QueuedRequest(None, pull, None, pushes, buffer(0, last), room=ROOM)
    sent.add(7, SentRequest(pushes, ROOM, buffer(0, 4), pulls=[request]))
    return pushes, pull, request


def test_a_push_completes_the_pull_that_travels_with_it_and_gives_back_the_room_of_both():
    sent = Sent()
    pushes, pull, _ = with_pull(sent, last=2)
    rows = np.arange(4, dtype=np.float32)
    result = PullResult(request=7, namespace="w", first=0, last=4, content=Entries(0, rows))
    assert sent.on_received(result)
    sent.complete(RequestDone(7, ((0, 4, result.content),)))
    assert [one.is_done and one.error is None for one in pushes] == [True, True]
    assert pull.result().tolist() == [0, 1]
    assert sent.released == [(10, 2), (10, 1)]
    assert not sent.on_received(result)  # a duplicate
    assert len(sent) == 0


def test_a_pull_is_completed_after_the_pushes_that_its_rows_contain_and_fails_with_them():
    sent = Sent()
    push, pull = future("a push"), future("a pull")
    sent.add(8, SentRequest([pull], ROOM, buffer(0, 4), behind=[push]))
    sent.complete(RequestDone(8, ((0, 4, Entries(0, np.ones(4, np.float32))),)))
    assert not pull.is_done
    push.set_result(None, OffbeatError("refused"))
    assert str(pull.error) == "refused"


def test_a_refused_push_fails_and_its_pull_remains_to_be_sent():
    sent = Sent()
    pushes, pull, request = with_pull(sent)
    assert sent.fail(RequestFailed(7, "too large")) == [request]
    assert [str(one.error) for one in pushes] == [
        "a push was refused: too large",
        "another was refused: too large",
    ]
    assert not pull.is_done
    assert sent.released == [(10, 2)]


def test_the_futures_of_all_requests_are_taken_at_the_end():
    sent = Sent()
    pushes, pull, _ = with_pull(sent)
    pushes[0].is_sent_push = True
    assert sent.describe_first(is_push=True).startswith("; the first is a push: ")
    assert sent.describe_first(is_push=False) == ""
    assert sent.take_futures() == [*pushes, pull]
    assert len(sent) == 0
