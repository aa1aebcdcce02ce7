"""What a client has asked a parameter server for and is not done: kept in order, sent, answered, failed.

Who gets which part of a request, and when it is done, `policies.client` decides. Of a namespace, this module
knows the name and in which pieces its rows travel; it does not check which keys and rows the namespace has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.events import ClientEnlists, ClientPaused, ClientWithdraws, Event, GroupAction
from offbeat.numerics.ps.entries import Entries, Keys, places_of
from offbeat.policies.ps.client import Client, Done, Failed
from offbeat.policies.ps.messages import Enlist, Pulled, Reached, View, Withdraw
from offbeat.policies.ps.server_node import MANAGER, Send
from offbeat.policies.ps.task_graph import IterationScheduler, Run, TaskGraph, Told
from offbeat.runtime.ps.cluster_state import Views
from offbeat.runtime.ps.future import TIMEOUT_S, Future, Span
from offbeat.runtime.ps.inflight_window import REQUEST_BYTES, Window
from offbeat.runtime.ps.node import Cluster, Node
from offbeat.runtime.ps.packing import Array
from offbeat.runtime.ps.pull_buffer import Answer
from offbeat.runtime.ps.push_coalescer import Combiner
from offbeat.runtime.transport.buffer_pool import Buffers

# Neighbouring rows travel in pieces. What is pulled is copied twice, and of little, more is still in a cache
# then; of pushes, there is more to do for each piece. Over shared memory, with pieces of 4 and 2 MiB: 72 and
# 85 pulls of 64 MB a second, 126 and 112 pushes.
_PUSHED_BYTES: Final = 4 * 1024 * 1024
_PULLED_BYTES: Final = 2 * 1024 * 1024
_HALVED_MIN: Final = 32  # small pushes that go out in two halves
_CALLEE: Final = "servers"
# Of pushes that are not acknowledged, and of answers to pulls that have not come. A node is told of 8 MiB
# beside letters at a time, so this keeps a chain of servers busy, and servers keep no more for a client.
_UNACKED_BYTES_MAX: Final = 128 * 1024 * 1024
_PLAIN: Final = ""  # the account of what waits for no other client


@dataclass(slots=True, eq=False)
class _Iteration:
    """Requests that belong together, and wait for the iterations before them.

    Attributes:
        begins: done when it may run.
        open_count: the requests that are not done, and one while there may be more.
    """

    begins: Future
    open_count: int = 1
    number: int = -1


class _Room(NamedTuple):
    """What a request takes of a window; see `Window`."""

    window: Window
    account: str
    size_bytes: int


@dataclass(slots=True, eq=False)
class _Request:
    """A request that was not sent yet.

    Attributes:
        make: makes it, in the client; None where there is nothing to send.
        finish: what the future comes to, where there is nothing to send.
        before: what has to be done before; the beginning of its iteration, too.
        answer: what is put together of a pull.
        part: content of a push that may go out as one with others.
        room: that it needs; None where there is nothing to send.
        is_admitted: it has it.
        is_held: it waits for nothing but that.
        no_wait: done when it does not, or no more; None where no thread waits for that.
    """

    make: Callable[[], tuple[int, list[Send | Done | Failed]]] | None
    future: Future
    iteration: _Iteration | None
    before: list[Future]
    answer: Answer | None = None
    part: Entries | None = None
    finish: Callable[[], Any] = lambda: None
    room: _Room | None = None
    is_admitted: bool = False
    is_held: bool = False
    no_wait: Future | None = None


class _Current(threading.local):
    """To which iteration belongs what a thread asks for."""

    iteration: _Iteration | None = None


class _Sent(NamedTuple):
    """A request that was sent, and of which something has not been answered.

    Attributes:
        futures: of those who wait for it.
        room: that all of them have.
        answer: what is put together of a pull, or of what a push brings.
        behind: pushes that are in what a pull brings, and have to be done before it is.
        pulls: of parts of what a push brings.
    """

    futures: Sequence[Future]
    room: _Room
    answer: Answer | None = None
    behind: Sequence[Future] = ()
    pulls: Sequence[_Request] = ()


class Requests:
    """All requests of one client, and the node through which they go.

    Methods may be called by any thread.

    Args:
        number: the client's.
        cluster, host: see `Node`.
        start_s: for how many seconds to wait for the cluster's servers.
        on_group: the manager has said something of a group of workers; in the links' thread.
        on_end: this client is out of the parameter server, with the cause; called once, before requests fail
            for it.

    Attributes:
        number: as given.
        node: its links and its line to the manager.
        views: what the manager has told it.
        tau: as `set_tau` has set it last; None at first.

    Raises:
        OffbeatError: the cluster cannot be reached, or has not got all its servers within `start_s`.
    """

    def __init__(
        self,
        number: int,
        cluster: Cluster,
        *,
        host: str,
        start_s: float,
        on_group: Callable[[GroupAction], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.number, self._on_end = number, on_end
        self.views = Views()
        self._client = Client(number, _cut, self._pieces)
        self._piece_keys: dict[str, tuple[int, int]] = {}  # by namespace: of a piece, pushed and pulled
        self._asked: dict[int, _Sent] = {}  # by the client's number
        self._buffers = Buffers()  # for what is pulled: a program that is through with it gives it back
        self._combined = Combiner(lambda shape, dtype: self.node.empty(shape, dtype))
        self._behind_combined: list[_Request] = []  # to be sent right after what is combined
        self._waiting: set[Future] = set()  # for others, for their iteration, or for room
        self._pushed, self._pulled = Window(_UNACKED_BYTES_MAX), Window(_UNACKED_BYTES_MAX)
        self._room_s = TIMEOUT_S  # for which a caller waits for room
        self._graph = TaskGraph()
        self.tau: int | None = None
        self._scheduler = IterationScheduler(self._graph, None)
        self._iterations: dict[int, _Iteration] = {}  # by their task's number
        self._current = _Current()
        self.node = Node(
            f"client-{number}",
            cluster,
            host=host,
            on_view=self._see,
            on_message=self._hear,
            on_gone=self._end,
            on_refused=self.views.refuse,
            on_group=on_group,
            place=self._place,
            gather=self._send_some,
        )
        self._call, self._run_until = self.node.endpoint.call, self.node.endpoint.run_until
        self.node.join()
        try:
            views = self.views
            views.wait_for(lambda: views.latest is not None, "all servers that it is to begin with", start_s)
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

        While too much that was pushed is not acknowledged, this waits for room; but not in the links' thread,
        nor for requests before it.

        Args:
            what: it is, as errors say it.
            name: of the namespace.
            content: must not change until it is done.
            first, last: all keys of `content` are among these.
            time: that it is to have; None for the next one.
            after: requests that have to be done before it is sent.
            may_combine: it may go out as one with others; it is of all these keys, and `time` is None.
            may_wait: else it is kept here until there is room.

        Raises:
            OffbeatError: this client is out of the parameter server; there was no room in time, and nothing
                was pushed. Says which servers have not answered.
        """
        space = self.views.space(name)
        account = name if space is not None and space.aggregates else _PLAIN
        return self._request(
            lambda: self._client.push(name, content, first, last, time),
            what,
            (name, first, last),
            after,
            _Room(self._pushed, account, _size_bytes(content) + REQUEST_BYTES),
            part=content if may_combine else None,
            may_wait=may_wait,
        )

    def push_at_once(self, what: str, name: str, content: Entries) -> Future:
        """What `push` comes to where it may combine and comes after nothing, for less: these are many.

        Raises:
            OffbeatError: as for `push`.
        """
        if self.views.failure is not None:
            raise OffbeatError(f"{what} cannot be: {self.views.failure}")
        first = content.first
        last = first + len(content.values)
        size_bytes = content.values.nbytes + REQUEST_BYTES
        if self.node.endpoint.inside or not self._pushed.admit(_PLAIN, size_bytes):
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

        It waits for room as `push` does, while too much of what was pulled has not come.

        Args:
            what: it is, as errors say it.
            name: of the namespace.
            first, last, keys: those that are listed are (K,), ascending, each once; None for all.
            after: requests that have to be done before it is sent.
            shape, dtype: of a row, and of its numbers.
            states, times: see `Answer`.
            size_bytes: of what is to come.

        Returns:
            A future of what `Answer.result` returns.

        Raises:
            OffbeatError: as for `push`.
        """
        return self._request(
            lambda: self._client.pull(name, first, last, keys, states=states, times=times),
            what,
            (name, first, last),
            after,
            _Room(self._pulled, _PLAIN, size_bytes + REQUEST_BYTES),
            Answer(first, last, keys, shape, dtype, self._buffers, states=states, times=times),
        )

    def set_row_bytes(self, name: str, row_bytes: int) -> None:
        """Let neighbouring rows of a namespace, of so many bytes each, travel in pieces."""
        self._piece_keys[name] = max(1, _PUSHED_BYTES // row_bytes), max(1, _PULLED_BYTES // row_bytes)

    def enlist(self, name: str) -> Future:
        """Take part in a namespace that aggregates; the future is done once the manager is told."""
        return self.when_done([], lambda: self._take_up(self._client.enlist(name)))

    def withdraw(self, name: str, after: Iterable[Future] = ()) -> Future:
        """Take part in it no more, once these requests are done; the future fails if pushes to it are not."""
        return self.when_done(after, lambda: self._take_up(self._client.withdraw(name)))

    def when_done(self, requests: Iterable[Future], function: Callable[[], Any] = lambda: None) -> Future:
        """Return a future of what a function returns that is called when all these requests are done.

        Args:
            requests: if one of them fails, so does the future, and the function is not called.
            function: must not wait for anything, for it is called in the thread that all requests go through.
        """
        before = list(requests)

        def first_of_them() -> str:
            first = next((one for one in before if not one.is_done), None)
            return "all of them are done" if first is None else f"{first.what} is not: {first.waits_for()}"

        future = Future("what follows other requests", first_of_them, self._run_until)
        self._call(self._admit, _Request(None, future, None, before, finish=function))
        return future

    def in_order(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns in the links' thread, after what was asked for before.

        Args:
            function: must not wait for anything.

        Raises:
            OffbeatError: this client is out of the parameter server; the function was not called in time.
            Exception: whatever the function raises.
        """
        return self.when_done([], function).result()

    def set_tau(self, tau: int | None) -> None:
        """Bound the delay of iterations that begin later, as `PS.tau` says.

        Raises:
            ValueError: it is negative.
        """
        if tau is not None and tau < 0:
            raise ValueError(f"expected a tau of at least 0, or None for no bound, got {tau}")
        self.tau = tau
        self._call(self._scheduler.set_tau, tau)

    @contextmanager
    def iteration(self) -> Iterator[Future]:
        """Let all requests that this thread makes in the block be one iteration, as `PS.iteration` says."""
        begins = Future("an iteration", lambda: "others before it are not finished", self._run_until)
        iteration = _Iteration(begins)
        self._call(self._issue_iteration, iteration)
        self._current.iteration = iteration
        try:
            yield iteration.begins
        finally:
            self._current.iteration = None
            self._call(self._finish_one, iteration)

    @property
    def is_in_iteration(self) -> bool:
        """Whether what the calling thread asks for belongs to an iteration."""
        return self._iteration is not None

    def close(self) -> None:
        """Leave; requests that are not done fail."""
        self.node.close()
        self._end("this client was closed")

    def _unanswered(self, name: str, first: int, last: int) -> str:
        """Return which servers have not answered for keys `first` to `last` - 1, as errors say it."""
        servers = self._client.waits_for(name, first, last)
        return self.views.unanswered(servers) if servers else self.views.masters(name, first, last)

    @property
    def _iteration(self) -> _Iteration | None:
        """To which what the calling thread asks for belongs."""
        iteration = self._current.iteration
        if iteration is not None and self.node.endpoint.inside:
            return None  # a thread that waits within it has been lent for what others have asked for
        return iteration

    def _request(
        self,
        make: Callable[[], tuple[int, list[Send | Done | Failed]]],
        what: str,
        span: Span,
        after: Iterable[Future],
        room: _Room,
        answer: Answer | None = None,
        part: Entries | None = None,
        *,
        may_wait: bool = True,
    ) -> Future:
        if self.views.failure is not None:
            raise OffbeatError(f"{what} cannot be: {self.views.failure}")
        future = Future(what, self._unanswered, self._run_until, span)
        iteration = self._iteration
        before = list(after) if iteration is None else [*after, iteration.begins]
        request = _Request(make, future, iteration, before, answer, part, room=room)
        if may_wait and not self.node.endpoint.inside:  # else, there might be some before it without room
            window, account, size_bytes = room
            if all(one.is_done for one in before) and window.admit(account, size_bytes):
                request.is_admitted = True
            elif not window.has_room(account, size_bytes):
                self._wait_for_room(request)
                return future
        self._call(self._admit, request)
        return future

    def _wait_for_room(self, request: _Request) -> None:
        """Hand a request over, and wait until it has room, or waits for something else.

        Raises:
            OffbeatError: there was no room in time; the request will not be sent.
        """
        request.no_wait = no_wait = Future(f"room for {request.future.what}", lambda: "", self._run_until)
        request.future.followers.append(partial(no_wait.finish, None))
        self._call(self._admit, request)
        try:
            no_wait.result(self._room_s)
        except OffbeatError:
            error = self.in_order(partial(self._give_up, request))
            if error is not None:
                raise error from None
        except BaseException:
            self._call(self._give_up, request)
            raise

    # In the links' thread --------------------------------------------------------------------------------

    def _admit(self, request: _Request) -> None:
        iteration = request.iteration
        if iteration is not None:
            iteration.open_count += 1
            request.future.followers.append(lambda: self._finish_one(iteration))
        if self.views.failure is not None:
            request.future.finish(None, OffbeatError(self.views.failure))
        else:
            self._advance(request)
        if request.no_wait is not None and not request.is_held:
            request.no_wait.finish(None)

    def _release(self, room: _Room, count: int = 1) -> None:
        """Give back the room of requests that have been answered, or will not be sent."""
        room.window.release(room.account, room.size_bytes, count)
        if room.window.holds:
            self._call(self._admit_held, room.window)

    def _admit_held(self, window: Window) -> None:
        """Send what there is room for now."""
        for request in window.admit_held():
            request.is_held, request.is_admitted = False, True
            if request.no_wait is not None:
                request.no_wait.finish(None)
            self._advance(request)

    def _give_up(self, request: _Request) -> OffbeatError | None:
        """Drop a request that waits for room, if it still does; return the error then."""
        assert request.room is not None
        window, account, _ = request.room
        if not window.drop(account, request):
            return None
        self._call(self._admit_held, window)
        self._waiting.discard(request.future)
        error = OffbeatError(
            f"{request.future.what} was not sent: for {self._room_s:g} s there was no room for it, as of "
            f"{window.bytes_max} bytes that may be under way, {self._unacked(window)}"
        )
        request.future.finish(None, error)
        return error

    def _unacked(self, window: Window) -> str:
        """What is under way, and whom the first of it waits for, as errors say it."""
        is_push = window is self._pushed
        futures = (sent.futures[0] for sent in self._asked.values())
        first = next((one for one in futures if one.is_sent_push == is_push), None)
        text = f"{window.unacked_bytes} {'are not acknowledged' if is_push else 'have not come'}"
        return text if first is None else f"{text}; the first is {first.what}: {first.waits_for()}"

    def _admit_part(self, content: Entries, future: Future) -> None:
        if self.views.failure is not None:
            future.finish(None, OffbeatError(self.views.failure))
        else:
            self._combine(content, future)

    def _advance(self, request: _Request) -> None:
        """Send a request, once what has to be done before it is done.

        A pull need not wait for pushes that are under way to its keys: what this client sends, a master of
        keys takes in that order, whatever becomes of masters. So it goes out behind them, and holds them.
        """
        future = request.future
        self._waiting.discard(future)
        if future.is_done:
            return
        behind = []
        for one in request.before:
            if not one.is_done:
                if self._holds(request, one):
                    behind.append(one)
                    continue
                self._waiting.add(future)
                one.followers.append(lambda: self._advance(request))
                return
            if one.error is not None:
                self._fail(request, one.error)
                return
        if request.make is None:
            try:
                future.finish(request.finish())
            except Exception as error:
                future.finish(None, error)
            return
        if not request.is_admitted and not self._has_room(request):
            return
        if request.part is not None:
            self._combine(request.part, future)
            return
        if behind and len(self._combined):
            self._waiting.add(future)
            self._behind_combined.append(request)
            return
        self._send_combined()
        try:
            number, said = request.make()
        except (ProtocolError, ValueError) as error:  # it has withdrawn, or the time has been
            self._fail(request, error)
            return
        future.is_sent_push = request.answer is None
        assert request.room is not None
        self._asked[number] = _Sent((future,), request.room, request.answer, behind)
        self._take_up(said)

    def _fail(self, request: _Request, error: Exception) -> None:
        """Fail a request that was not sent."""
        if request.room is not None and request.is_admitted:
            self._release(request.room)
        request.future.finish(None, error)

    def _has_room(self, request: _Request) -> bool:
        """Admit a request that is to be sent now, if there is room for it; else keep it until there is."""
        assert request.room is not None
        window, account, size_bytes = request.room
        if window.admit(account, size_bytes):
            request.is_admitted = True
            return True
        window.hold(account, size_bytes, request)
        request.is_held = True
        self._waiting.add(request.future)
        return False

    def _holds(self, request: _Request, push: Future) -> bool:
        """Whether what a request brings holds a push that is not done, if it is sent now."""
        if request.answer is None or not push.is_sent_push:
            return False
        assert request.future.span is not None
        assert push.span is not None
        (name, first, last), (of, begin, end) = request.future.span, push.span
        space = self.views.space(name)
        return of == name and begin <= first and last <= end and space is not None and not space.aggregates

    def _combine(self, content: Entries, future: Future) -> None:
        """Let a push go out as one with others; those with which it does not go before it."""
        future.is_sent_push = True
        if not self._combined.take(content, future):
            self._send_combined()
            self._combined.take(content, future)
        self.node.post.write_soon()

    def _send_some(self) -> None:
        """Send what waits to go out as one; half of it first, if nothing is under way: so both have work."""
        count = len(self._combined)
        if not self._asked and count >= _HALVED_MIN:
            self._call(self._send_combined)
            count //= 2
        self._send_combined(count)

    def _send_combined(self, count: int | None = None) -> None:
        """Send what waits to go out as one, or so many of it; it brings what pulls behind it want."""
        if not len(self._combined):  # it has gone already
            return
        name, content, last, futures = self._combined.give(count)
        behind, self._behind_combined = self._behind_combined, []
        pulls, others = _tiles((name, content.first, last), behind)
        self._waiting.difference_update(pull.future for pull in pulls)
        answer = _whole(pulls, content.first, last) if pulls else None
        number, said = self._client.push(name, content, content.first, last, wants_values=bool(pulls))
        room = _Room(self._pushed, _PLAIN, content.values.nbytes + len(futures) * REQUEST_BYTES)
        self._asked[number] = _Sent(futures, room, answer, pulls=pulls)
        self._take_up(said)
        for request in others:
            self._advance(request)

    def _pieces(
        self, name: str, content: Entries | Keys | None, first: int, last: int
    ) -> Iterable[tuple[int, int]]:
        """Neighbouring keys travel in pieces that a server takes up while the next one comes."""
        steps = self._piece_keys.get(name)
        step = last if steps is None else steps[content is None]
        if (
            last - first <= step
            or isinstance(content, np.ndarray)
            or getattr(content, "keys", None) is not None
        ):
            return ((first, last),)
        return [(begin, min(begin + step, last)) for begin in range(first, last, step)]

    def _take_up(self, said: Iterable[Send | Done | Failed]) -> None:
        for one in said:
            if isinstance(one, Done):
                self._finish(self._asked.pop(one.number), one)
            elif isinstance(one, Failed):
                sent = self._asked.pop(one.number)
                self._release(sent.room, len(sent.futures))
                for future in sent.futures:
                    refused = OffbeatError(f"{future.what} was refused: {one.reason}")
                    future.finish(None, one.error or refused)
                for pull in sent.pulls:  # fails for that, or goes out alone
                    self._advance(pull)
            elif one.to == MANAGER:
                self.node.tell(self._told(one.message))
            else:
                self.node.send(one.to, one.message)

    def _finish(self, sent: _Sent, done: Done) -> None:
        """A request has been answered."""
        futures, room, answer, behind, pulls = sent
        self._release(room, len(futures))
        if answer is None or pulls:
            for future in futures:
                future.finish(None)
        if pulls and answer is not None:
            rows = answer.rows(done.parts)
            for pull in pulls:
                assert pull.room is not None
                assert pull.future.span is not None
                self._release(pull.room)
                _, first, last = pull.future.span
                self._finish_behind(pull.future, answer.part(rows, first, last), pull.before)
        elif answer is not None:
            self._finish_behind(futures[0], answer.result(done.parts, done.times), behind)

    def _finish_behind(self, future: Future, value: Any, behind: Sequence[Future]) -> None:
        """A request has been answered: it is done, once the pushes that went before it are."""
        for push in behind:
            if not push.is_done:
                push.followers.append(lambda: self._finish_behind(future, value, behind))
                return
            if push.error is not None:
                future.finish(None, push.error)
                return
        future.finish(value)

    def _told(self, message: object) -> Event:
        """What this client has to say to the manager."""
        node = self.node.name
        match message:
            case Enlist():
                return ClientEnlists(now_s=0.0, node=node, namespace=message.namespace)
            case Reached():
                return ClientPaused(
                    now_s=0.0, node=node, namespace=message.namespace, pause=message.pause, time=message.time
                )
            case Withdraw():
                return ClientWithdraws(now_s=0.0, node=node, namespace=message.namespace)
        raise AssertionError(f"a client says no {type(message).__name__} to the manager")

    def _see(self, view: View) -> None:
        self._take_up(self._client.see(view))
        self.views.see(view)

    def _hear(self, peer: str, message: Any) -> None:
        message = self.node.filtering.decoded(peer, message)
        if isinstance(message, Pulled):
            sent = self._asked.get(message.number)
            if sent is not None and sent.answer is not None:  # else it has come before
                sent.answer.came(message.first, message.last, message.content.values)
                self.node.filtering.observe(message)
        self._take_up(self._client.hear(message))

    def _place(self, peer: str, message: Any, coming: Array) -> Array | None:
        """Where rows that were pulled belong."""
        if not isinstance(message, Pulled) or not isinstance(message.content, Entries):
            return None
        sent = self._asked.get(message.number)
        if sent is None or sent.answer is None:
            return None
        place = sent.answer.place(message.first, message.last, coming)
        if place is not None:
            message.content = Entries(message.first, place, None, message.content.terms)
        return place

    def _end(self, cause: str) -> None:
        if not self.views.end(cause):
            return
        self._on_end(cause)
        error = OffbeatError(f"this client is out of the parameter server: {cause}")
        asked = self._asked.values()
        waiting = [*chain.from_iterable(sent.futures for sent in asked), *self._waiting]
        waiting += (pull.future for sent in asked for pull in sent.pulls)
        if len(self._combined):
            waiting += self._combined.give()[-1]
        self._asked.clear()
        self._waiting.clear()
        for future in waiting:
            future.finish(None, error)

    def _issue_iteration(self, iteration: _Iteration) -> None:
        if self.views.failure is not None:
            iteration.begins.finish(None, OffbeatError(self.views.failure))
            return
        self._waiting.add(iteration.begins)
        iteration.number, told = self._scheduler.issue([_CALLEE])
        self._iterations[iteration.number] = iteration
        self._run(told)

    def _finish_one(self, iteration: _Iteration) -> None:
        iteration.open_count -= 1
        if not iteration.open_count and iteration.begins.is_done and self.views.failure is None:
            self._finish_iteration(iteration)

    def _finish_iteration(self, iteration: _Iteration) -> None:
        self._run(self._graph.returned(iteration.number, _CALLEE))

    def _run(self, told: list[Told]) -> None:
        for one in told:
            if isinstance(one, Run):
                iteration = self._iterations.pop(one.number)
                self._graph.started(one.number, _CALLEE)
                self._waiting.discard(iteration.begins)
                iteration.begins.finish(None)
                if not iteration.open_count:
                    self._finish_iteration(iteration)


def _tiles(span: Span, requests: list[_Request]) -> tuple[list[_Request], list[_Request]]:
    """Return the pulls, ascending, that have each key of a span once, and all other requests.

    If those within the span do not, none are returned as such.
    """
    name, end, last = span
    inside: list[tuple[int, int, _Request]] = []
    others: list[_Request] = []
    for request in requests:
        if request.future.span is not None and request.answer is not None and request.answer.is_plain:
            of, begin, until = request.future.span
            if of == name and end <= begin and until <= last:
                inside.append((begin, until, request))
                continue
        others.append(request)
    inside.sort(key=itemgetter(0))
    for begin, until, _ in inside:
        if begin != end:
            return [], requests
        end = until
    return ([pull for _, _, pull in inside], others) if end == last else ([], requests)


def _whole(pulls: list[_Request], first: int, last: int) -> Answer:
    """What is put together for pulls that have each of these keys once."""
    answer = pulls[0].answer
    assert answer is not None
    return answer if len(pulls) == 1 else answer.like(first, last)


def _cut(content: Entries | Keys, first: int, last: int) -> Entries | Keys:
    return (
        content.cut(first, last) if isinstance(content, Entries) else content[places_of(content, first, last)]
    )


def _size_bytes(content: Entries) -> int:
    """What is pushed of keys, rows and states."""
    states = {} if content.terms is None else content.terms.states or {}
    arrays = [content.values, *states.values()] if content.keys is None else [content.values, content.keys]
    return sum(array.nbytes for array in arrays)
