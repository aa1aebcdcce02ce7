"""Sums tensors over links: runs the schedules of `offbeat.numerics.schedules`, piece by piece.

`LinkExchange` is called from a worker's threads, and what a schedule does runs in the links' own thread.
Nothing here decides who takes part, nor by which algorithm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from offbeat.errors import LinkError, ProtocolError, WorkerError
from offbeat.numerics.collectives.schedules import Schedule, chain_broadcast, schedule, segments, span
from offbeat.runtime.collectives.contribution import Contribution, Part
from offbeat.runtime.collectives.interface import Pending, bytes_of
from offbeat.runtime.processes.waiting import Flag
from offbeat.runtime.transport.endpoint import Endpoint

_STEP_BITS = 12
_ID_SHIFT = _STEP_BITS + 20
_SETTLED_BYTES = 1 << 21  # at once, about a millisecond's work for the links' thread


class LinkExchange:
    """Collectives over links, run piece by piece in the links' own thread.

    A segment's pieces are sent onward as they arrive, so that receiving, adding and sending overlap and
    the line is never idle between two steps of a schedule.

    Args:
        endpoint: this worker's links, every member introduced.
        names: the link names of the members, in the group's order.
        position: this worker's place in `names`.
    """

    def __init__(self, endpoint: Endpoint, names: Sequence[str], position: int) -> None:
        self._endpoint = endpoint
        self._names = tuple(names)
        self._position = position
        self._first_unused_tag = 0
        self._plans: dict[tuple[str | int, int], _Plan] = {}
        self._prepared: dict[int, _ScheduleRun] = {}
        self._pending: set[_LinkPending] = set()
        self._error: WorkerError | None = None
        self._lock = threading.Lock()

    def all_reduce(
        self,
        flat: torch.Tensor,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = "ring",
        priority: int = 0,
        parts: Sequence[Part] = (),
    ) -> Pending:
        """See `Exchange.all_reduce`."""
        run = self._prepared.pop(_tag(exchange_id, index), None)
        if run is None:
            run = self._run(into, algorithm, exchange_id, index)
        return self._begin(run, Contribution(flat, parts), priority)

    def prepare(
        self, into: torch.Tensor, *, exchange_id: int, index: int = 0, algorithm: str = "ring"
    ) -> None:
        """See `Exchange.prepare`."""
        if self._error is None:
            run = self._prepared[_tag(exchange_id, index)] = self._run(into, algorithm, exchange_id, index)
            self._endpoint.call(run.prepare)

    def broadcast(self, flat: torch.Tensor, *, root: int, exchange_id: int, index: int = 0) -> Pending:
        """See `Exchange.broadcast`: pieces hop along a chain that begins at the root."""
        return self._begin(self._run(flat, root, exchange_id, index), Contribution(flat), 0)

    def abandon(self, error: WorkerError) -> None:
        """See `Exchange.abandon`."""
        with self._lock:
            self._error = self._error or error
            pending, self._pending = self._pending, set()
        for one in pending:
            one.is_abandoned = True
        with suppress(LinkError):  # the links may have ended already
            self._endpoint.forget(0, self._first_unused_tag)
        for one in pending:
            one.fail(self._error)

    def _plan(self, what: str | int, length: int) -> _Plan:
        """The plan of an all-reduce by its algorithm, or of a broadcast by its root."""
        plan = self._plans.get((what, length))
        if plan is None:
            members, position = len(self._names), self._position
            found = (
                schedule(what, members, position)
                if isinstance(what, str)
                else chain_broadcast(members, position, what)
            )
            if len(found.steps) > 1 << _STEP_BITS:
                raise ValueError(
                    f"expected at most {1 << _STEP_BITS} steps, got {len(found.steps)}: too many members"
                )
            plan = self._plans[what, length] = _Plan(found, length)
        return plan

    def _run(self, into: torch.Tensor, what: str | int, exchange_id: int, index: int) -> _ScheduleRun:
        if what != self._position and self._endpoint.is_read(bytes_of(into)):
            raise ValueError("expected memory to write into, got some that a member may still read")
        self._first_unused_tag = max(self._first_unused_tag, _tag(exchange_id + 1, 0))
        plan = self._plan(what, into.numel())
        return _ScheduleRun(self._endpoint, self._names, plan, into, _tag(exchange_id, index))

    def _begin(self, run: _ScheduleRun, own: Contribution, priority: int) -> Pending:
        pending = _LinkPending(self._ended)
        with self._lock:
            if self._error is None:
                self._pending.add(pending)
        if self._error is not None:
            pending.fail(self._error)
        else:
            self._endpoint.call(partial(run.begin, own, priority, pending))
        return pending

    def _ended(self, pending: _LinkPending) -> None:
        with self._lock:
            self._pending.discard(pending)


class _LinkPending:
    """Done once all was received and all that has to be sent was handed to the kernel.

    Attributes:
        is_abandoned: it is about to fail, and nothing more may be sent or written for it.
    """

    def __init__(self, on_end: Callable[[_LinkPending], None]) -> None:
        self._on_end = on_end
        self.is_abandoned = False
        self.ended_s: float | None = None
        self._done = Flag()
        self._error: WorkerError | None = None

    def wait(self, deadline_s: float) -> None:
        if not self._done.wait(deadline_s):
            raise WorkerError(
                f"an exchange was not finished within {deadline_s:g} s although no worker was reported "
                "lost; look for a worker that is stuck"
            )
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        self.ended_s = time.perf_counter()
        self._on_end(self)
        self._done.set()

    def fail(self, error: WorkerError) -> None:
        self._error = error
        self.finish()


@dataclass(frozen=True)
class _Forward:
    """Elements `start` to `stop` of the vector, sent in step `step` from place `offset` of its message."""

    step: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class _Addend:
    """To elements `start` to `stop` of what step `step` receives is added what they were before it.

    Attributes:
        before: the step that received them last; None where they are still this worker's own part.
    """

    step: int
    before: int | None
    start: int
    stop: int


class _Plan:
    """A schedule worked out for one length: what may be sent at once, and what each receive sets free.

    A step that sends a segment which an earlier step received depends on that step, piece by piece; a
    step that sends what no earlier step received may begin at once. The same holds of a step that adds.

    What comes goes to its place in the result, and what it is to be added to is added there. Where a later
    step adds in its turn, it comes to a place of its own beside the result: what comes then may be ahead of
    what this worker still has to send.

    Attributes:
        first: what is sent of this worker's own part.
        adds_what_it_sends: of its own part, too.
        beside: elements of memory beside the result.
        places: by step, whether what it receives goes beside the result, and where the vector's first element
            would lie in that memory.
    """

    def __init__(self, schedule: Schedule, length: int) -> None:
        bounds = segments(length, schedule.segments)
        self.steps = schedule.steps
        self.received = schedule.received(length)
        self.sent = schedule.sent(length)
        self.spans = [span(bounds, step.recv_segment, step.recv_count) for step in self.steps]
        sent = [span(bounds, step.send_segment, step.send_count) for step in self.steps]
        self.sizes = [stop - start for start, stop in sent]
        self.first: list[_Forward] = []
        self.after: list[list[_Forward]] = [[] for _ in self.steps]
        self.addends: list[list[_Addend]] = [[] for _ in self.steps]
        self.added_to: list[list[_Addend]] = [[] for _ in self.steps]
        self.adds_what_it_sends = False
        own_sent: set[int] = set()
        writer: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            for segment in _run_of(step.send_segment, step.send_count):
                start, stop = bounds[segment]
                if start < stop:
                    source = self.after[writer[segment]] if segment in writer else self.first
                    source.append(_Forward(number, start, stop, start - sent[number][0]))
                if segment not in writer:
                    own_sent.add(segment)
            received = _run_of(step.recv_segment, step.recv_count)
            if step.op == "add":
                for segment in received:
                    start, stop = bounds[segment]
                    if start < stop:
                        self._add(_Addend(number, writer.get(segment), start, stop))
                        self.adds_what_it_sends |= segment in own_sent and segment not in writer
            writer |= dict.fromkeys(received, number)
        self.beside = 0
        self.places = [(False, 0) for _ in self.steps]
        later: set[int] = set()
        for number, step in reversed([*enumerate(self.steps)]):
            start, stop = self.spans[number]
            received = _run_of(step.recv_segment, step.recv_count)
            if not later.isdisjoint(received):
                self.places[number] = (True, self.beside - start)
                self.beside += stop - start
            if step.op == "add":
                later.update(received)

    def _add(self, addend: _Addend) -> None:
        self.addends[addend.step].append(addend)
        if addend.before is not None:
            self.added_to[addend.before].append(addend)


def _run_of(segment: int | None, count: int) -> range:
    return range(0) if segment is None else range(segment, segment + count)


def _tag(exchange_id: int, index: int) -> int:
    return exchange_id << _ID_SHIFT | index << _STEP_BITS


class _ScheduleRun:
    """One schedule being executed; every method runs in the links' thread.

    What comes may come before this worker's own part is there, and before what it is to be added to.
    """

    def __init__(
        self, endpoint: Endpoint, names: tuple[str, ...], plan: _Plan, into: torch.Tensor, tag: int
    ) -> None:
        self._endpoint = endpoint
        self._names = names
        self._plan = plan
        self._into = into
        self._into_bytes = bytes_of(into)
        self._beside = into.new_empty(plan.beside)
        self._beside_bytes = bytes_of(self._beside)
        self._itemsize = into.element_size()
        self._tag = tag
        self._to_receive = plan.received
        self._to_send = plan.sent
        self._is_prepared = False
        self._early: list[tuple[int, int, int]] = []  # what came before this worker's own part
        self._came_of: list[list[tuple[int, int]]] = [[] for _ in plan.steps]
        self._is_there_of: list[list[tuple[int, int]]] = [[] for _ in plan.steps]
        self._own: Contribution | None = None
        self._priority = 0
        self._pending: _LinkPending

    def prepare(self) -> None:
        """Lets come what this worker's own part will be added to, or replaced by."""
        self._is_prepared = True
        for number, step in enumerate(self._plan.steps):
            start, stop = self._plan.spans[number]
            if step.recv_from is not None and start < stop:
                peer, tag = self._names[step.recv_from], self._tag + number
                on_data, on_shared = partial(self._came, number), partial(self._shown, number)
                self._endpoint.expect(peer, tag, self._bytes(number, start, stop), on_data, on_shared)

    def begin(self, own: Contribution, priority: int, pending: _LinkPending) -> None:
        """Adds and sends this worker's own part; `pending` hears when all is over."""
        self._priority, self._pending = priority, pending
        if self._plan.adds_what_it_sends or not self._plan.steps:
            own.settle()
        if not self._plan.steps:
            self._into.copy_(own.flat)
        self._send_own(own, [*reversed(self._plan.first)])
        if not self._is_prepared:
            self.prepare()
        self._own = own
        for number, first, last in self._early:
            self._take(number, first, last)
        self._see_whether_done()

    def _send_own(self, own: Contribution, forwards: list[_Forward]) -> None:
        """Sends this worker's own part, from the last of these on; others have a turn while it is settled."""
        size = self._itemsize
        whole = bytes_of(own.flat)
        step = max(1, _SETTLED_BYTES // size)
        while forwards and not self._pending.is_abandoned:
            forward = forwards.pop()
            stop = forward.stop if own.is_settled else min(forward.stop, forward.start + step)
            own.settle(forward.start, stop)
            self._send(forward, whole[forward.start * size : stop * size], forward.start)
            if stop < forward.stop:
                forwards.append(replace(forward, start=stop, offset=forward.offset + stop - forward.start))
            if forwards and not own.is_settled:
                self._endpoint.call(self._send_own, own, forwards)
                return

    def _came(self, number: int, offset: int, length: int) -> None:
        """Some of what a step receives is in its place."""
        first, last = self._elements(number, offset, length)
        if self._own is None:
            self._early.append((number, first, last))
        else:
            self._take(number, first, last)

    def _shown(self, number: int, offset: int, source: memoryview) -> None:
        """Some of what a step receives lies in the sender's memory: it is added from there."""
        first, last = self._elements(number, offset, len(source))
        theirs = torch.frombuffer(source, dtype=self._into.dtype)
        addends = self._plan.addends[number]
        if self._own is not None and addends and all(addend.before is None for addend in addends):
            self._own.add(theirs, first, last, out=self._values(number, first, last))
            self._arrived(number, first, last)
        else:
            self._values(number, first, last).copy_(theirs)
            self._came(number, offset, len(source))

    def _elements(self, number: int, offset: int, length: int) -> tuple[int, int]:
        size = self._itemsize
        if offset % size or length % size:
            raise ProtocolError(f"expected whole elements of {size} bytes, got {length} bytes from {offset}")
        base = self._plan.spans[number][0]
        return base + offset // size, base + (offset + length) // size

    def _values(self, number: int, first: int, last: int) -> torch.Tensor:
        is_beside, begin = self._plan.places[number]
        return (self._beside if is_beside else self._into)[begin + first : begin + last]

    def _bytes(self, number: int, first: int, last: int) -> memoryview:
        is_beside, begin = self._plan.places[number]
        memory = self._beside_bytes if is_beside else self._into_bytes
        return memory[(begin + first) * self._itemsize : (begin + last) * self._itemsize]

    def _take(self, number: int, first: int, last: int) -> None:
        """Adds to some of what a step has received as much as is there to be added; the rest waits for it."""
        assert self._own is not None
        self._came_of[number].append((first, last))
        addends = self._plan.addends[number]
        if not addends:
            self._arrived(number, first, last)
        for addend in addends:
            start, stop = max(first, addend.start), min(last, addend.stop)
            if start >= stop:
                continue
            if addend.before is None:
                values = self._values(number, start, stop)
                self._own.add(values, start, stop, out=values)
                self._arrived(number, start, stop)
                continue
            for low, high in _overlaps(self._is_there_of[addend.before], start, stop):
                self._values(number, low, high).add_(self._values(addend.before, low, high))
                self._arrived(number, low, high)

    def _arrived(self, number: int, first: int, last: int) -> None:
        """Sends on what a step has made of these elements, and adds it to what later steps have received."""
        due = [(number, first, last)]
        for number, first, last in due:  # which grows
            self._is_there_of[number].append((first, last))
            for addend in self._plan.added_to[number]:
                start, stop = max(first, addend.start), min(last, addend.stop)
                for low, high in _overlaps(self._came_of[addend.step], start, stop):
                    self._values(addend.step, low, high).add_(self._values(number, low, high))
                    due.append((addend.step, low, high))
            for forward in self._plan.after[number]:
                start, stop = max(first, forward.start), min(last, forward.stop)
                if start < stop:
                    self._send(forward, self._bytes(number, start, stop), start)
            self._to_receive -= last - first
        self._see_whether_done()

    def _send(self, forward: _Forward, data: memoryview, start: int) -> None:
        receiver = self._plan.steps[forward.step].send_to
        assert receiver is not None
        self._endpoint.put(
            self._names[receiver],
            self._tag + forward.step,
            data,
            offset=(forward.offset + start - forward.start) * self._itemsize,
            total=self._plan.sizes[forward.step] * self._itemsize,
            priority=self._priority,
            done=partial(self._sent, len(data) // self._itemsize),
        )

    def _sent(self, elements: int) -> None:
        self._to_send -= elements
        self._see_whether_done()

    def _see_whether_done(self) -> None:
        if not self._to_receive and not self._to_send:
            self._pending.finish()


def _overlaps(runs: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The parts of these runs of elements that lie within `first` to `last`."""
    return [
        (max(first, start), min(last, stop)) for start, stop in runs if max(first, start) < min(last, stop)
    ]
