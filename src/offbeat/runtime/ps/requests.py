"""The requests of a parameter server's client that are not done: queued, sent, completed, failed.

`offbeat.policies.ps.client` decides which server receives which part of a request, and when it is done. Of a
namespace, this module knows the name and the size of the pieces in which its rows travel; it does not check
keys or rows against the namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final

import numpy as np

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.events import WorkerGroupAction
from offbeat.numerics.ps.entries import Entries, Keys, key_slice
from offbeat.policies.ps.client import PsClient, RequestDone, RequestFailed
from offbeat.policies.ps.manager import event_from_message
from offbeat.policies.ps.messages import (
    PlacementView,
    PullResult,
)
from offbeat.policies.ps.server_node import MANAGER, SendMessage
from offbeat.runtime.ps.cluster_state import ClusterState
from offbeat.runtime.ps.future import TIMEOUT_S, Future, NamespaceRange
from offbeat.runtime.ps.inflight_window import REQUEST_BYTES, RequestWindow
from offbeat.runtime.ps.iterations import Iterations
from offbeat.runtime.ps.node import ClusterFile, PsNode
from offbeat.runtime.ps.pull_buffer import PullBuffer
from offbeat.runtime.ps.push_coalescer import PushCoalescer
from offbeat.runtime.ps.row_pieces import RowPieces
from offbeat.runtime.ps.sent_requests import QueuedRequest, Room, SentRequest, SentRequests
from offbeat.runtime.transport.buffer_pool import BufferPool

_SMALL_PUSHES_TO_HALVE_MIN: Final = 32  # small pushes that are sent in two halves
# Of pushes that are not acknowledged, and of answers to pulls that have not arrived. `Messenger`
# announces 8 MiB of arrays to a node at a time, so this keeps a chain of servers busy, and servers keep no
# more for a client.
_UNACKED_BYTES_MAX: Final = 128 * 1024 * 1024
_SHARED_ACCOUNT: Final = ""  # the account of requests that wait for no other client


class InflightRequests:
    """All requests of one client, and the node that sends them.

    Methods may be called by any thread.

    Args:
        client_id: the client's.
        cluster, host: see `PsNode`.
        start_s: how many seconds to wait for the cluster's servers.
        on_group: the manager has sent an action for a group of workers; called in the I/O thread.
        on_end: this client is disconnected from the parameter server, with the cause; called once, before
            its requests fail.

    Attributes:
        client_id: as given.
        node: its links and its control connection to the manager.
        cluster_state: what the manager has published.
        row_pieces: how neighbouring rows travel.
        iterations: of its requests.

    Raises:
        OffbeatError: the cluster cannot be reached, or does not have all its servers within `start_s`.
    """

    def __init__(
        self,
        client_id: int,
        cluster: ClusterFile,
        *,
        host: str,
        start_s: float,
        on_group: Callable[[WorkerGroupAction], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.client_id, self._on_end = client_id, on_end
        self.cluster_state = ClusterState()
        self.row_pieces = RowPieces()
        self._client = PsClient(client_id, _cut, self.row_pieces.split)
        self._sent = SentRequests(self._release)
        self._buffers = BufferPool()  # for pulled rows; reused once the program has released them
        self._coalescer = PushCoalescer(lambda shape, dtype: self.node.empty(shape, dtype))
        self._pulls_behind: list[QueuedRequest] = []  # to be sent right after the combined pushes
        self._waiting: set[Future] = set()  # for other requests, their iteration, or room
        self._pushed, self._pulled = RequestWindow(_UNACKED_BYTES_MAX), RequestWindow(_UNACKED_BYTES_MAX)
        self._room_timeout_s = TIMEOUT_S  # how long a caller waits for room
        self.node = PsNode(
            f"client-{client_id}",
            cluster,
            host=host,
            on_view=self._on_view,
            on_message=self._on_message,
            on_gone=self._on_gone,
            on_refused=self.cluster_state.set_refusal,
            on_group=on_group,
            place=self._sent.place_for,
            gather=self._send_some,
        )
        self._call, self._run_until = self.node.endpoint.call_soon, self.node.endpoint.run_until
        self.iterations = Iterations(self.node.endpoint, self.cluster_state, self._waiting)
        self.node.join()
        try:
            views = self.cluster_state
            views.wait_for(lambda: views.latest is not None, "all initial servers", start_s)
        except BaseException:
            self.node.close()
            raise

    def push(
        self,
        what: str,
        name: str,
        content: Entries,
        first: int,
        last: int,
        time: int | None,
        after: Iterable[Future],
        *,
        may_combine: bool,
        may_wait: bool = True,
    ) -> Future:
        """Push what `content` has for keys `first` to `last` - 1 of a namespace.

        While too many pushed bytes are not acknowledged, this waits for room; but not in the I/O thread,
        nor for the requests in `after`.

        Args:
            what: description of the push, for errors.
            name: of the namespace.
            content: must not change until the push is done.
            first, last: the range, which includes all keys of `content`.
            time: of the push; None for the next one.
            after: requests that have to be done before it is sent.
            may_combine: it may be merged with other pushes; `content` is then of all these keys, and `time`
                is None.
            may_wait: wait for room; otherwise the push is queued here until there is room.

        Raises:
            OffbeatError: this client is disconnected from the parameter server; or there was no room in time,
                and nothing was pushed. Names the servers that have not answered.
        """
        space = self.cluster_state.space(name)
        account = name if space is not None and space.aggregates else _SHARED_ACCOUNT
        return self._request(
            lambda: self._client.push(name, content, first, last, time),
            what,
            (name, first, last),
            after,
            Room(self._pushed, account, _size_bytes(content) + REQUEST_BYTES),
            part=content if may_combine else None,
            may_wait=may_wait,
        )

    def push_fast(self, what: str, name: str, content: Entries) -> Future:
        """Push as `push` does with `may_combine` and without `after`, at a lower cost: such pushes are many.

        Raises:
            OffbeatError: as for `push`.
        """
        if self.cluster_state.failure is not None:
            raise OffbeatError(f"{what} failed: {self.cluster_state.failure}")
        first = content.first
        last = first + len(content.values)
        size_bytes = content.values.nbytes + REQUEST_BYTES
        if self.node.endpoint.is_io_thread or not self._pushed.admit(_SHARED_ACCOUNT, size_bytes):
            return self.push(what, name, content, first, last, None, (), may_combine=True)
        future = Future(what, self._unanswered, self._run_until, (name, first, last))
        self._call(self._admit_part, content, future)
        return future

    def pull(
        self,
        what: str,
        name: str,
        first: int,
        last: int,
        keys: Keys | None,
        after: Iterable[Future],
        *,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        states: bool,
        times: bool,
        size_bytes: int,
    ) -> Future:
        """Pull the rows of keys `first` to `last` - 1 of a namespace, or of those of them that `keys` lists.

        It waits for room as `push` does, while too many requested bytes have not arrived.

        Args:
            what: description of the pull, for errors.
            name: of the namespace.
            first, last, keys: listed keys are (K,), ascending, without duplicates; None for all of the range.
            after: requests that have to be done before it is sent.
            shape, dtype: of a row, and of its numbers.
            states, times: see `PullBuffer`.
            size_bytes: of the expected result.

        Returns:
            A future of the value of `PullBuffer.result`.

        Raises:
            OffbeatError: as for `push`.
        """
        return self._request(
            lambda: self._client.pull(name, first, last, keys, states=states, times=times),
            what,
            (name, first, last),
            after,
            Room(self._pulled, _SHARED_ACCOUNT, size_bytes + REQUEST_BYTES),
            PullBuffer(first, last, keys, shape, dtype, self._buffers, states=states, times=times),
        )

    def join_aggregation(self, name: str) -> Future:
        """Take part in a namespace that aggregates; the future is done once the manager was asked."""
        return self.when_done([], lambda: self._emit(self._client.join_aggregation(name)))

    def leave_aggregation(self, name: str, after: Iterable[Future] = ()) -> Future:
        """Stop taking part once these requests are done; the future fails if pushes are not done."""
        return self.when_done(after, lambda: self._emit(self._client.leave_aggregation(name)))

    def when_done(self, requests: Iterable[Future], function: Callable[[], Any] = lambda: None) -> Future:
        """Return a future of the result of a function that is called when all these requests are done.

        Args:
            requests: if one of them fails, the future fails too and the function is not called.
            function: must not block, as it is called in the thread that processes all requests.
        """
        before = list(requests)
        future = Future("what follows other requests", partial(_describe_first, before), self._run_until)
        self._call(self._admit, QueuedRequest(None, future, None, before, finish=function))
        return future

    def call_in_order(self, function: Callable[[], Any]) -> Any:
        """Call a function in the I/O thread, after all requests made before; return its result.

        Args:
            function: must not block.

        Raises:
            OffbeatError: this client is disconnected from the parameter server; the function was not called
                in time.
            Exception: any that the function raises.
        """
        return self.when_done([], function).result()

    def close(self) -> None:
        """Leave the parameter server; requests that are not done fail."""
        self.node.close()
        self._on_gone("this client was closed")

    def _unanswered(self, name: str, first: int, last: int) -> str:
        """Return which servers have not answered for keys `first` to `last` - 1, as text for errors."""
        servers = self._client.unanswered_servers(name, first, last)
        return (
            self.cluster_state.describe_unanswered(servers)
            if servers
            else self.cluster_state.describe_masters(name, first, last)
        )

    def _request(
        self,
        make: Callable[[], tuple[int, list[SendMessage | RequestDone | RequestFailed]]],
        what: str,
        span: NamespaceRange,
        after: Iterable[Future],
        room: Room,
        buffer: PullBuffer | None = None,
        part: Entries | None = None,
        *,
        may_wait: bool = True,
    ) -> Future:
        if self.cluster_state.failure is not None:
            raise OffbeatError(f"{what} failed: {self.cluster_state.failure}")
        future = Future(what, self._unanswered, self._run_until, span)
        iteration = self.iterations.current
        before = list(after) if iteration is None else [*after, iteration.begins]
        request = QueuedRequest(make, future, iteration, before, buffer, part, room=room)
        if may_wait and not self.node.endpoint.is_io_thread:
            window, account, size_bytes = room  # else, it might overtake one that waits for room
            if all(one.is_done for one in before) and window.admit(account, size_bytes):
                request.is_admitted = True
            elif not window.has_room(account, size_bytes):
                self._wait_for_room(request)
                return future
        self._call(self._admit, request)
        return future

    def _wait_for_room(self, request: QueuedRequest) -> None:
        """Queue a request, and wait until it has room or waits for something else.

        Raises:
            OffbeatError: there was no room in time; the request will not be sent.
        """
        wait_ended = Future(f"room for {request.future.label}", lambda: "", self._run_until)
        request.wait_ended = wait_ended
        request.future.callbacks.append(partial(wait_ended.set_result, None))
        self._call(self._admit, request)
        try:
            wait_ended.result(self._room_timeout_s)
        except OffbeatError:
            error = self.call_in_order(partial(self._give_up, request))
            if error is not None:
                raise error from None
        except BaseException:
            self._call(self._give_up, request)
            raise

    # In the I/O thread --------------------------------------------------------------------------------

    def _admit(self, request: QueuedRequest) -> None:
        iteration = request.iteration
        if iteration is not None:
            self.iterations.add(iteration, request.future)
        if self.cluster_state.failure is not None:
            request.future.set_result(None, OffbeatError(self.cluster_state.failure))
        else:
            self._advance(request)
        if request.wait_ended is not None and not request.is_held:
            request.wait_ended.set_result(None)

    def _release(self, room: Room, count: int = 1) -> None:
        """Release the room of requests that have been answered, or will not be sent."""
        room.window.release(room.account, room.size_bytes, count)
        if room.window.has_held:
            self._call(self._admit_held, room.window)

    def _admit_held(self, window: RequestWindow) -> None:
        """Send the requests for which there is room now."""
        for request in window.admit_held():
            request.is_held, request.is_admitted = False, True
            if request.wait_ended is not None:
                request.wait_ended.set_result(None)
            self._advance(request)

    def _give_up(self, request: QueuedRequest) -> OffbeatError | None:
        """Drop a request if it still waits for room; return the error in that case."""
        assert request.room is not None
        window, account, _ = request.room
        if not window.drop(account, request):
            return None
        self._call(self._admit_held, window)
        self._waiting.discard(request.future)
        is_push = window is self._pushed
        error = OffbeatError(
            f"{request.future.label} was not sent: timed out after {self._room_timeout_s:g} s waiting for "
            f"room; of {window.bytes_max} bytes that may be in flight, {window.unacked_bytes} "
            f"{'are not acknowledged' if is_push else 'have not arrived'}"
            f"{self._sent.describe_first(is_push=is_push)}"
        )
        request.future.set_result(None, error)
        return error

    def _admit_part(self, content: Entries, future: Future) -> None:
        if self.cluster_state.failure is not None:
            future.set_result(None, OffbeatError(self.cluster_state.failure))
        else:
            self._combine(content, future)

    def _advance(self, request: QueuedRequest) -> None:
        """Send a request once the requests in `before` are done.

        A pull need not wait for pushes to its keys that are in flight: a master processes the messages of one
        client in the order in which they were sent, even if the master changes. So the pull is sent after
        them, and its result contains them.
        """
        future = request.future
        self._waiting.discard(future)
        if future.is_done:
            return
        behind = []
        for one in request.before:
            if not one.is_done:
                if _would_contain(request, one, self.cluster_state):
                    behind.append(one)
                    continue
                self._waiting.add(future)
                one.callbacks.append(lambda: self._advance(request))
                return
            if one.error is not None:
                self._fail(request, one.error)
                return
        if request.make is None:
            try:
                future.set_result(request.finish())
            except Exception as error:
                future.set_result(None, error)
            return
        if not request.is_admitted and not self._has_room(request):
            return
        if request.part is not None:
            self._combine(request.part, future)
            return
        if behind and len(self._coalescer):
            self._waiting.add(future)
            self._pulls_behind.append(request)
            return
        self._send_combined()
        try:
            number, actions = request.make()
        except (ProtocolError, ValueError) as error:  # the client has left, or the time is over
            self._fail(request, error)
            return
        future.is_sent_push = request.buffer is None
        assert request.room is not None
        self._sent.add(number, SentRequest((future,), request.room, request.buffer, behind))
        self._emit(actions)

    def _fail(self, request: QueuedRequest, error: Exception) -> None:
        """Fail a request that has not been sent."""
        if request.room is not None and request.is_admitted:
            self._release(request.room)
        request.future.set_result(None, error)

    def _has_room(self, request: QueuedRequest) -> bool:
        """Admit a request that is to be sent now if there is room for it; else hold it until there is."""
        assert request.room is not None
        window, account, size_bytes = request.room
        if window.admit(account, size_bytes):
            request.is_admitted = True
            return True
        window.hold(account, size_bytes, request)
        request.is_held = True
        self._waiting.add(request.future)
        return False

    def _combine(self, content: Entries, future: Future) -> None:
        """Queue a push to be merged with adjacent ones; if it cannot be, send those queued first."""
        future.is_sent_push = True
        if not self._coalescer.try_add(content, future):
            self._send_combined()
            self._coalescer.try_add(content, future)
        self.node.messenger.write_soon()

    def _send_some(self) -> None:
        """Send the combined pushes; in two halves if nothing is in flight, so that sending overlaps."""
        count = len(self._coalescer)
        if not self._sent and count >= _SMALL_PUSHES_TO_HALVE_MIN:
            self._call(self._send_combined)
            count //= 2
        self._send_combined(count)

    def _send_combined(self, count: int | None = None) -> None:
        """Send the combined pushes, or the first `count`; their values answer the pulls that follow them."""
        if not len(self._coalescer):  # they were sent already
            return
        name, content, last, futures = self._coalescer.pop_merged(count)
        behind, self._pulls_behind = self._pulls_behind, []
        pulls, rest = _split_covering((name, content.first, last), behind)
        self._waiting.difference_update(pull.future for pull in pulls)
        buffer = _buffer_for(pulls, content.first, last) if pulls else None
        number, actions = self._client.push(name, content, content.first, last, wants_values=bool(pulls))
        room = Room(self._pushed, _SHARED_ACCOUNT, content.values.nbytes + len(futures) * REQUEST_BYTES)
        self._sent.add(number, SentRequest(futures, room, buffer, pulls=pulls))
        self._emit(actions)
        for request in rest:
            self._advance(request)

    def _emit(self, actions: Iterable[SendMessage | RequestDone | RequestFailed]) -> None:
        for action in actions:
            if isinstance(action, RequestDone):
                self._sent.complete(action)
            elif isinstance(action, RequestFailed):
                for pull in self._sent.fail(action):  # it fails for the same reason, or is sent alone
                    self._advance(pull)
            elif action.to == MANAGER:
                self.node.send_event(event_from_message(self.node.name, action.message))
            else:
                self.node.send(action.to, action.message)

    def _on_view(self, view: PlacementView) -> None:
        self._emit(self._client.on_view(view))
        self.cluster_state.set_view(view)

    def _on_message(self, peer: str, message: Any) -> None:
        message = self.node.filtering.decode(peer, message)
        if isinstance(message, PullResult) and self._sent.on_received(message):
            self.node.filtering.update_kkt(message)
        self._emit(self._client.on_message(message))

    def _on_gone(self, cause: str) -> None:
        if not self.cluster_state.set_failure(cause):
            return
        self._on_end(cause)
        error = OffbeatError(f"this client is out of the parameter server: {cause}")
        waiting = [*self._sent.take_futures(), *self._waiting]
        if len(self._coalescer):
            waiting += self._coalescer.pop_merged()[-1]
        self._waiting.clear()
        for future in waiting:
            future.set_result(None, error)


def _describe_first(requests: Sequence[Future]) -> str:
    """Return what the first of these that is not done waits for, as text for errors."""
    first = next((one for one in requests if not one.is_done), None)
    return "all of them are done" if first is None else f"{first.label} is not: {first.describe_waiting()}"


def _would_contain(request: QueuedRequest, push: Future, state: ClusterState) -> bool:
    """Whether the result of a request, if it is sent now, contains a push that is not done."""
    if request.buffer is None or not push.is_sent_push:
        return False
    assert request.future.span is not None
    assert push.span is not None
    (name, first, last), (of, begin, end) = request.future.span, push.span
    space = state.space(name)
    return of == name and begin <= first and last <= end and space is not None and not space.aggregates


def _split_covering(
    span: NamespaceRange, requests: list[QueuedRequest]
) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
    """Split requests: pulls, ascending, that cover each key of a span exactly once, and all the rest.

    If the pulls within the span do not cover it exactly once, no pull is returned as covering.
    """
    name, end, last = span
    inside: list[tuple[int, int, QueuedRequest]] = []
    rest: list[QueuedRequest] = []
    for request in requests:
        if request.future.span is not None and request.buffer is not None and request.buffer.is_whole_range:
            of, begin, stop = request.future.span
            if of == name and end <= begin and stop <= last:
                inside.append((begin, stop, request))
                continue
        rest.append(request)
    inside.sort(key=itemgetter(0))
    for begin, stop, _ in inside:
        if begin != end:
            return [], requests
        end = stop
    return ([pull for _, _, pull in inside], rest) if end == last else ([], requests)


def _buffer_for(pulls: list[QueuedRequest], first: int, last: int) -> PullBuffer:
    """Return the buffer for the rows of pulls that cover these keys: a lone pull's own, or one for all."""
    buffer = pulls[0].buffer
    assert buffer is not None
    return buffer if len(pulls) == 1 else buffer.for_range(first, last)


def _cut(content: Entries | Keys, first: int, last: int) -> Entries | Keys:
    return (
        content.key_range(first, last)
        if isinstance(content, Entries)
        else content[key_slice(content, first, last)]
    )


def _size_bytes(content: Entries) -> int:
    """Return the bytes of the keys, rows and states of a push."""
    states = {} if content.meta is None else content.meta.states or {}
    arrays = [content.values, *states.values()] if content.keys is None else [content.values, content.keys]
    return sum(array.nbytes for array in arrays)
