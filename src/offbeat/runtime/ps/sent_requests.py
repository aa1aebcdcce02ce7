"""The requests of a parameter server's client that have been sent: their answers, and how they end.

Nothing here sends, or decides when a request is answered: see `policies.ps.client`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.errors import OffbeatError
from offbeat.numerics.ps.entries import Entries
from offbeat.policies.ps.client import RequestDone, RequestFailed
from offbeat.policies.ps.messages import PullResult
from offbeat.policies.ps.server_node import SendMessage
from offbeat.runtime.ps.future import Future
from offbeat.runtime.ps.inflight_window import RequestWindow
from offbeat.runtime.ps.iterations import Iteration
from offbeat.runtime.ps.packing import Array
from offbeat.runtime.ps.pull_buffer import PullBuffer


class Room(NamedTuple):
    """What a request occupies of a window; see `RequestWindow`."""

    window: RequestWindow
    account: str
    size_bytes: int


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that has not been sent, or that travels with a push.

    Attributes:
        make: creates it in the client; None if there is nothing to send.
        finish: returns the result of the future if there is nothing to send.
        before: futures that have to be done before, including the beginning of its iteration.
        buffer: of a pull.
        part: content of a push that may be merged with others.
        room: that it needs; None if there is nothing to send.
        is_admitted: it has its room.
        is_held: it waits for nothing but its room.
        wait_ended: done once it does not wait for room; None if no thread waits for that.
    """

    make: Callable[[], tuple[int, list[SendMessage | RequestDone | RequestFailed]]] | None
    future: Future
    iteration: Iteration | None
    before: list[Future]
    buffer: PullBuffer | None = None
    part: Entries | None = None
    finish: Callable[[], Any] = lambda: None
    room: Room | None = None
    is_admitted: bool = False
    is_held: bool = False
    wait_ended: Future | None = None


class SentRequest(NamedTuple):
    """A request that has been sent and not completely answered.

    Attributes:
        futures: that it completes.
        room: that it occupies, for each future.
        buffer: of a pull, or of a push that wants values.
        behind: pushes that a pull's result contains; they have to be done before it is.
        pulls: that are answered with parts of the values of a push.
    """

    futures: Sequence[Future]
    room: Room
    buffer: PullBuffer | None = None
    behind: Sequence[Future] = ()
    pulls: Sequence[QueuedRequest] = ()


class SentRequests:
    """Every request that was sent gives back its room once, and its futures end with its result or error.

    Methods are called in the I/O thread.

    Args:
        release: gives back the room of so many requests.
    """

    def __init__(self, release: Callable[[Room, int], None]) -> None:
        self._release = release
        self._sent: dict[int, SentRequest] = {}  # by the client's number

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, number: int, sent: SentRequest) -> None:
        """Add a request under the client's number."""
        self._sent[number] = sent

    def describe_first(self, *, is_push: bool) -> str:
        """Return what the oldest push or pull waits for, as the end of an error; empty if there is none."""
        futures = (sent.futures[0] for sent in self._sent.values())
        first = next((one for one in futures if one.is_sent_push == is_push), None)
        return "" if first is None else f"; the first is {first.label}: {first.describe_waiting()}"

    def place_for(self, peer: str, message: Any, coming: Array) -> Array | None:
        """Return the memory into which pulled rows are to be received, and note it in the message."""
        if not isinstance(message, PullResult) or not isinstance(message.content, Entries):
            return None
        sent = self._sent.get(message.request)
        if sent is None or sent.buffer is None:
            return None
        place = sent.buffer.place_for(message.first, message.last, coming)
        if place is not None:
            message.content = Entries(message.first, place, None, message.content.meta)
        return place

    def on_received(self, result: PullResult) -> bool:
        """Note rows that were received; return False if they are a duplicate."""
        sent = self._sent.get(result.request)
        if sent is None or sent.buffer is None:
            return False
        sent.buffer.on_received(result.first, result.last, result.content.values)
        return True

    def complete(self, done: RequestDone) -> None:
        """Complete a request that has been answered."""
        futures, room, buffer, behind, pulls = self._sent.pop(done.request)
        self._release(room, len(futures))
        if buffer is None or pulls:
            for future in futures:
                future.set_result(None)
        if pulls and buffer is not None:
            rows = buffer.rows(done.parts)
            for pull in pulls:
                assert pull.room is not None
                assert pull.future.span is not None
                self._release(pull.room, 1)
                _, first, last = pull.future.span
                self._complete_behind(pull.future, buffer.rows_of(rows, first, last), pull.before)
        elif buffer is not None:
            self._complete_behind(futures[0], buffer.result(done.parts, done.times), behind)

    def fail(self, failed: RequestFailed) -> Sequence[QueuedRequest]:
        """Fail a request; return the pulls that travelled with it, which may be sent alone."""
        sent = self._sent.pop(failed.request)
        self._release(sent.room, len(sent.futures))
        for future in sent.futures:
            refused = OffbeatError(f"{future.label} was refused: {failed.reason}")
            future.set_result(None, failed.error or refused)
        return sent.pulls

    def take_futures(self) -> list[Future]:
        """Remove all requests; return their futures, which are not done."""
        sent = list(self._sent.values())
        self._sent.clear()
        futures = [future for one in sent for future in one.futures]
        return [*futures, *(pull.future for one in sent for pull in one.pulls)]

    def _complete_behind(self, future: Future, value: Any, behind: Sequence[Future]) -> None:
        """Complete a pull that has been answered, once the pushes sent before it are done."""
        for push in behind:
            if not push.is_done:
                push.callbacks.append(lambda: self._complete_behind(future, value, behind))
                return
            if push.error is not None:
                future.set_result(None, push.error)
                return
        future.set_result(value)
