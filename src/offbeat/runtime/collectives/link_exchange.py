"""Collectives over links: runs the schedules of `offbeat.numerics.collectives.schedules`, piece by piece.

`LinkExchange` is called from a worker's threads, and its schedules run in the I/O thread. This module
decides neither on membership nor on the algorithm.
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
from offbeat.numerics.collectives.schedules import (
    AUTO,
    Schedule,
    algorithm_for,
    all_gather,
    all_to_all,
    chain_broadcast,
    cut_segments,
    schedule,
    segment_span,
)
from offbeat.runtime.collectives.contribution import Contribution, ExternalElements
from offbeat.runtime.collectives.interface import PendingExchange, check_equal_parts, memory_of
from offbeat.runtime.devices.interface import CallWhenReady
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.transport.endpoint import Endpoint

_STEP_BITS = 12
_ID_SHIFT = _STEP_BITS + 20
_ALL_GATHER, _ALL_TO_ALL = "all_gather", "all_to_all"
_PROGRESS_S = 0.2
_PROGRESS_BYTES = 2048  # more than the heartbeats of all peers in that time
_SETTLE_BYTES_MAX = 1 << 21  # per callback: about a millisecond of the I/O thread


class LinkExchange:
    """Collectives over links, run piece by piece in the links' own thread.

    A segment's pieces are forwarded as they arrive, so that receiving, adding and sending overlap and the
    line is never idle between two steps of a schedule.

    Args:
        endpoint: this worker's links, with every member introduced.
        names: the link names of the members, in the group's order.
        position: this worker's index in `names`.
        ids_below: its exchange ids are lower than this. Where it is abandoned, what arrives for such ids is
            dropped, even if this worker has begun no exchange; 0 if they are not known yet.
        on_end: called after the end of each exchange, whose `ended_s` is set; in the I/O thread, or the one
            that abandons the exchange or begins it when it is abandoned.

    Attributes:
        size, position: see `Exchange`.
    """

    device = torch.device("cpu")
    keeps_order = False

    def __init__(
        self,
        endpoint: Endpoint,
        names: Sequence[str],
        position: int,
        *,
        ids_below: int = 0,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._endpoint, self._on_end = endpoint, on_end
        self._names = tuple(names)
        self.size = len(self._names)
        self.position = position
        self._first_unused_tag = _tag(ids_below, 0)
        self._plans: dict[tuple[str | int, int], _Plan] = {}
        self._line_s: dict[str, float] = {}  # by link name, since they were taken
        self._prepared: dict[int, _ScheduleRun] = {}
        self._pending: set[_LinkPending] = set()
        self._error: WorkerError | None = None
        self._lock = threading.Lock()
        self._on_progress: Callable[[bool], None] | None = None
        self._is_watched = False  # a look at the progress is due

    def all_reduce(
        self,
        flat: torch.Tensor,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = AUTO,
        priority: int = 0,
        external: Sequence[ExternalElements] = (),
        after: CallWhenReady | None = None,
    ) -> PendingExchange:
        """See `Exchange.all_reduce`."""
        run = self._prepared.pop(_tag(exchange_id, index), None)
        if run is None:
            run = self._new_run(into, algorithm, exchange_id, index)
        return self._begin(run, Contribution(flat, external), priority, after)

    def prepare(
        self,
        into: torch.Tensor,
        *,
        exchange_id: int,
        index: int = 0,
        algorithm: str = AUTO,
        after: CallWhenReady | None = None,
    ) -> None:
        """See `Exchange.prepare`."""
        if self._error is None:
            run = self._prepared[_tag(exchange_id, index)] = self._new_run(
                into, algorithm, exchange_id, index
            )
            self._call_in_io_thread(run.prepare, after)

    def broadcast(
        self, flat: torch.Tensor, *, root: int, exchange_id: int, index: int = 0
    ) -> PendingExchange:
        """See `Exchange.broadcast`: pieces are forwarded along a chain that begins at the root."""
        return self._begin(self._new_run(flat, root, exchange_id, index), Contribution(flat), 0, None)

    def all_gather(self, flat: torch.Tensor, *, exchange_id: int, index: int = 0) -> PendingExchange:
        """See `Exchange.all_gather`: parts are sent on along the ring."""
        check_equal_parts(flat, self.size)
        return self._begin(self._new_run(flat, _ALL_GATHER, exchange_id, index), Contribution(flat), 0, None)

    def all_to_all(
        self, flat: torch.Tensor, into: torch.Tensor, *, exchange_id: int, index: int = 0
    ) -> PendingExchange:
        """See `Exchange.all_to_all`: parts are sent directly."""
        check_equal_parts(flat, self.size)
        run = self._new_run(into, _ALL_TO_ALL, exchange_id, index)
        own = self.position
        into.chunk(self.size)[own].copy_(flat.chunk(self.size)[own])
        return self._begin(run, Contribution(flat), 0, None)

    def abandon(self, error: WorkerError) -> None:
        """Fail all pending and later exchanges; see `Exchange.abandon`."""
        with self._lock:
            self._error = self._error or error
            pending, self._pending = self._pending, set()
        for one in pending:
            one.is_abandoned = True
        with suppress(LinkError):  # the links may be closed already
            self._endpoint.cancel(0, self._first_unused_tag)
        for one in pending:
            one.fail(self._error)

    def pop_line_times(self) -> dict[int, float]:
        """See `Exchange.pop_line_times`."""
        line_s, self._line_s = self._line_s, {}
        return {self._names.index(name): time_s for name, time_s in line_s.items()}

    def _note_line_time(self, name: str, time_s: float) -> None:
        line_s = self._line_s
        line_s[name] = max(time_s, line_s.get(name, 0.0))

    def _plan(self, operation: str | int, length: int) -> _Plan:
        """Return the plan of an operation: an all-reduce by its algorithm, a broadcast by its root, …"""
        plan = self._plans.get((operation, length))
        if plan is None:
            elements, into_start = length, 0
            if isinstance(operation, int):
                chosen = chain_broadcast(self.size, self.position, operation)
            elif operation == _ALL_GATHER:
                chosen = all_gather(self.size, self.position)
            elif operation == _ALL_TO_ALL:
                chosen = all_to_all(self.size, self.position)
                elements, into_start = 2 * length, length
            else:
                chosen = schedule(operation, self.size, self.position)
            if len(chosen.steps) > 1 << _STEP_BITS:
                raise ValueError(
                    f"expected at most {1 << _STEP_BITS} steps, got {len(chosen.steps)}: too many members"
                )
            plan = self._plans[operation, length] = _Plan(chosen, elements, into_start)
        return plan

    def _new_run(
        self, into: torch.Tensor, operation: str | int, exchange_id: int, index: int
    ) -> _ScheduleRun:
        if operation != self.position and self._endpoint.has_readers(memory_of(into)):
            raise ValueError("expected memory that no member reads, got memory that a member may still read")
        self._first_unused_tag = max(self._first_unused_tag, _tag(exchange_id + 1, 0))
        if operation == AUTO:
            operation = algorithm_for(into.nbytes, self.size)
        plan = self._plan(operation, into.numel())
        tag = _tag(exchange_id, index)
        return _ScheduleRun(self._endpoint, self._names, plan, into, tag, self._note_line_time)

    def report_progress(self, on_progress: Callable[[bool], None]) -> None:
        """See `Exchange.report_progress`."""
        self._on_progress = on_progress

    def _look_at_progress(self, before: set[_LinkPending], bytes_before: int) -> None:
        """Report exchanges that were under way at the last look already."""
        with self._lock:
            pending = set(self._pending)
            self._is_watched = bool(pending)
        if not pending:
            return
        bytes_now = self._bytes_moved()
        if self._on_progress is not None and pending & before:
            self._on_progress(bytes_now > bytes_before + _PROGRESS_BYTES)
        self._endpoint.call_later(_PROGRESS_S, partial(self._look_at_progress, pending, bytes_now))

    def _bytes_moved(self) -> int:
        return self._endpoint.bytes_sent + self._endpoint.bytes_received

    def _begin(
        self, run: _ScheduleRun, own: Contribution, priority: int, after: CallWhenReady | None
    ) -> PendingExchange:
        pending = _LinkPending(self._discard)
        with self._lock:
            if self._error is None:
                self._pending.add(pending)
            is_watched, self._is_watched = self._is_watched, self._on_progress is not None
        if not is_watched and self._on_progress is not None:
            look = partial(self._look_at_progress, {pending}, self._bytes_moved())
            self._endpoint.call_later(_PROGRESS_S, look)
        if self._error is not None:
            pending.fail(self._error)
        else:
            self._call_in_io_thread(partial(run.begin, own, priority, pending), after)
        return pending

    def _call_in_io_thread(self, call: Callable[[], object], after: CallWhenReady | None) -> None:
        call_soon = partial(self._endpoint.call_soon, call)
        if after is None:
            call_soon()
        else:
            after(call_soon)

    def _discard(self, pending: _LinkPending) -> None:
        with self._lock:
            self._pending.discard(pending)
        if self._on_end is not None:
            self._on_end()


class _LinkPending:
    """Done once all data was received, and all data to send was passed to the kernel.

    Attributes:
        is_abandoned: it is about to fail, and nothing more may be sent or written for it.
    """

    def __init__(self, on_end: Callable[[_LinkPending], None]) -> None:
        self._on_end = on_end
        self.is_abandoned = False
        self.ended_s: float | None = None
        self._done = SignalSafeEvent()
        self._error: WorkerError | None = None

    def wait(self, timeout_s: float) -> None:
        if not self._done.wait(timeout_s):
            raise WorkerError(
                f"an exchange was not finished within {timeout_s:g} s although no worker was reported "
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
    """Elements `start` to `stop` of the vector, sent in step `step` at offset `offset` of its message."""

    step: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class _Addend:
    """Elements `start` to `stop` that step `step` receives, to which their previous values are added.

    Attributes:
        previous: the step that received the previous values; None for this worker's own contribution.
    """

    step: int
    previous: int | None
    start: int
    stop: int


class _Plan:
    """A schedule compiled for one length: what can be sent immediately, and what each receive enables.

    A step that sends a segment which an earlier step received depends on that step, piece by piece; other
    sends can begin immediately. The same holds for additions.

    Received data is stored in the result, and the previous values are added to it there. If a later step also
    adds to it, the data is stored in scratch memory instead: the later step's data may arrive before this
    worker has forwarded the earlier values.

    Args:
        schedule: this worker's.
        length: of the vector.
        into_start: the vector's first element that lies in the result's memory; those before are only sent.

    Attributes:
        own_sends: sends of this worker's own contribution.
        adds_to_sent: elements of its own contribution are both sent and added to.
        scratch_elements: the number of elements of scratch memory.
        locations: by step, whether it receives into scratch memory, and where the vector's first element
            would lie in that memory.
    """

    def __init__(self, schedule: Schedule, length: int, into_start: int) -> None:
        bounds = cut_segments(length, schedule.segments)
        self.steps = schedule.steps
        self.received = schedule.elements_received(length)
        self.sent = schedule.elements_sent(length)
        self.spans = [segment_span(bounds, step.recv_segment, step.recv_count) for step in self.steps]
        sent = [segment_span(bounds, step.send_segment, step.send_count) for step in self.steps]
        self.sizes = [stop - start for start, stop in sent]
        self.own_sends: list[_Forward] = []
        self.forwards_after: list[list[_Forward]] = [[] for _ in self.steps]
        self.addends: list[list[_Addend]] = [[] for _ in self.steps]
        self.addends_after: list[list[_Addend]] = [[] for _ in self.steps]
        self.adds_to_sent = False
        own_sent: set[int] = set()
        writer: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            for segment in _segment_range(step.send_segment, step.send_count):
                start, stop = bounds[segment]
                if start < stop:
                    source = self.forwards_after[writer[segment]] if segment in writer else self.own_sends
                    source.append(_Forward(number, start, stop, start - sent[number][0]))
                if segment not in writer:
                    own_sent.add(segment)
            received = _segment_range(step.recv_segment, step.recv_count)
            if step.op == "add":
                for segment in received:
                    start, stop = bounds[segment]
                    if start < stop:
                        self._add(_Addend(number, writer.get(segment), start, stop))
                        self.adds_to_sent |= segment in own_sent and segment not in writer
            writer |= dict.fromkeys(received, number)
        self.scratch_elements = 0
        self.locations = [(False, -into_start) for _ in self.steps]
        added_later: set[int] = set()
        for number, step in reversed([*enumerate(self.steps)]):
            start, stop = self.spans[number]
            received = _segment_range(step.recv_segment, step.recv_count)
            if not added_later.isdisjoint(received):
                self.locations[number] = (True, self.scratch_elements - start)
                self.scratch_elements += stop - start
            if step.op == "add":
                added_later.update(received)

    def _add(self, addend: _Addend) -> None:
        self.addends[addend.step].append(addend)
        if addend.previous is not None:
            self.addends_after[addend.previous].append(addend)


def _segment_range(segment: int | None, count: int) -> range:
    return range(0) if segment is None else range(segment, segment + count)


def _tag(exchange_id: int, index: int) -> int:
    return exchange_id << _ID_SHIFT | index << _STEP_BITS


class _ScheduleRun:
    """One execution of a schedule; every method runs in the I/O thread.

    Data may arrive before this worker's own contribution, and before the values that are added to it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        names: tuple[str, ...],
        plan: _Plan,
        into: torch.Tensor,
        tag: int,
        on_line_time: Callable[[str, float], None],
    ) -> None:
        self._endpoint = endpoint
        self._on_line_time = on_line_time
        self._names = names
        self._plan = plan
        self._into = into
        self._into_bytes = memory_of(into)
        self._scratch = into.new_empty(plan.scratch_elements)
        self._scratch_bytes = memory_of(self._scratch)
        self._itemsize = into.element_size()
        self._tag = tag
        self._to_receive = plan.received
        self._to_send = plan.sent
        self._unsent = plan.sizes.copy()  # by step, the elements of its message that are not queued yet
        self._is_prepared = False
        self._early: list[tuple[int, int, int]] = []  # received before this worker's own contribution
        self._received: list[list[tuple[int, int]]] = [[] for _ in plan.steps]
        self._complete: list[list[tuple[int, int]]] = [[] for _ in plan.steps]
        self._own: Contribution | None = None
        self._priority = 0
        self._pending: _LinkPending

    def prepare(self) -> None:
        """Register the memory that all steps receive into."""
        self._is_prepared = True
        for number, step in enumerate(self._plan.steps):
            start, stop = self._plan.spans[number]
            if step.recv_from is not None and start < stop:
                peer, tag = self._names[step.recv_from], self._tag + number
                on_data, on_shared = partial(self._on_data, number), partial(self._on_shared, number)
                self._endpoint.post_receive(peer, tag, self._bytes(number, start, stop), on_data, on_shared)

    def begin(self, own: Contribution, priority: int, pending: _LinkPending) -> None:
        """Add and send this worker's own contribution; `pending` is finished at the end."""
        self._priority, self._pending = priority, pending
        if pending.is_abandoned:  # while the device was still copying what is to be sent
            return
        if self._plan.adds_to_sent or not self._plan.steps:
            own.materialize()
        if not self._plan.steps:
            self._into.copy_(own.flat)
        self._send_own(own, [*reversed(self._plan.own_sends)])
        if not self._is_prepared:
            self.prepare()
        self._own = own
        for number, first, last in self._early:
            self._add_previous(number, first, last)
        self._finish_if_done()

    def _send_own(self, own: Contribution, forwards: list[_Forward]) -> None:
        """Send own elements, last entry first; yield to other callbacks while it settles large ones."""
        size = self._itemsize
        whole = memory_of(own.flat)
        step = max(1, _SETTLE_BYTES_MAX // size)
        while forwards and not self._pending.is_abandoned:
            forward = forwards.pop()
            stop = forward.stop if own.is_materialized else min(forward.stop, forward.start + step)
            own.materialize(forward.start, stop)
            self._send(forward, whole[forward.start * size : stop * size], forward.start)
            if stop < forward.stop:
                forwards.append(replace(forward, start=stop, offset=forward.offset + stop - forward.start))
            if forwards and not own.is_materialized:
                self._endpoint.call_soon(self._send_own, own, forwards)
                return

    def _on_data(self, number: int, offset: int, length: int) -> None:
        """Note that data of a step has been received into its memory."""
        first, last = self._elements(number, offset, length)
        if self._own is None:
            self._early.append((number, first, last))
        else:
            self._add_previous(number, first, last)

    def _on_shared(self, number: int, offset: int, source: memoryview) -> None:
        """Add data of a step that can be read in the sender's memory, or copy it."""
        first, last = self._elements(number, offset, len(source))
        values = torch.frombuffer(source, dtype=self._into.dtype)
        addends = self._plan.addends[number]
        if self._own is not None and addends and all(addend.previous is None for addend in addends):
            self._own.add(values, first, last, out=self._values(number, first, last))
            self._on_complete(number, first, last)
        else:
            self._values(number, first, last).copy_(values)
            self._on_data(number, offset, len(source))

    def _elements(self, number: int, offset: int, length: int) -> tuple[int, int]:
        size = self._itemsize
        if offset % size or length % size:
            raise ProtocolError(f"expected whole elements of {size} bytes, got {length} bytes from {offset}")
        base = self._plan.spans[number][0]
        return base + offset // size, base + (offset + length) // size

    def _values(self, number: int, first: int, last: int) -> torch.Tensor:
        in_scratch, begin = self._plan.locations[number]
        return (self._scratch if in_scratch else self._into)[begin + first : begin + last]

    def _bytes(self, number: int, first: int, last: int) -> memoryview:
        in_scratch, begin = self._plan.locations[number]
        memory = self._scratch_bytes if in_scratch else self._into_bytes
        return memory[(begin + first) * self._itemsize : (begin + last) * self._itemsize]

    def _add_previous(self, number: int, first: int, last: int) -> None:
        """Add previous values to received elements where these are complete; the rest follows later."""
        assert self._own is not None
        self._received[number].append((first, last))
        addends = self._plan.addends[number]
        if not addends:
            self._on_complete(number, first, last)
        for addend in addends:
            start, stop = max(first, addend.start), min(last, addend.stop)
            if start >= stop:
                continue
            if addend.previous is None:
                values = self._values(number, start, stop)
                self._own.add(values, start, stop, out=values)
                self._on_complete(number, start, stop)
                continue
            for low, high in _overlaps(self._complete[addend.previous], start, stop):
                self._values(number, low, high).add_(self._values(addend.previous, low, high))
                self._on_complete(number, low, high)

    def _on_complete(self, number: int, first: int, last: int) -> None:
        """Forward elements that a step has completed, and add them to data that later steps received."""
        due = [(number, first, last)]
        for number, first, last in due:  # grows in the loop
            self._complete[number].append((first, last))
            for addend in self._plan.addends_after[number]:
                start, stop = max(first, addend.start), min(last, addend.stop)
                for low, high in _overlaps(self._received[addend.step], start, stop):
                    self._values(addend.step, low, high).add_(self._values(number, low, high))
                    due.append((addend.step, low, high))
            for forward in self._plan.forwards_after[number]:
                start, stop = max(first, forward.start), min(last, forward.stop)
                if start < stop:
                    self._send(forward, self._bytes(number, start, stop), start)
            self._to_receive -= last - first
        self._finish_if_done()

    def _send(self, forward: _Forward, data: memoryview, start: int) -> None:
        receiver = self._plan.steps[forward.step].send_to
        assert receiver is not None
        name, elements = self._names[receiver], len(data) // self._itemsize
        offset = forward.offset + start - forward.start
        self._unsent[forward.step] -= elements
        self._endpoint.send_tensor(
            name,
            self._tag + forward.step,
            data,
            offset=offset * self._itemsize,
            total=self._plan.sizes[forward.step] * self._itemsize,
            priority=self._priority,
            # A complete message is acknowledged at once; a part of it, some time later.
            on_done=partial(self._on_sent, elements)
            if self._unsent[forward.step]
            else partial(self._on_last_sent, elements, name, time.perf_counter()),
        )

    def _on_last_sent(self, elements: int, name: str, queued_s: float) -> None:
        self._on_line_time(name, time.perf_counter() - queued_s)
        self._on_sent(elements)

    def _on_sent(self, elements: int) -> None:
        self._to_send -= elements
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if not self._to_receive and not self._to_send:
            self._pending.finish()


def _overlaps(runs: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Clip runs of elements to `first` to `last`, without empty ones."""
    return [
        (max(first, start), min(last, stop)) for start, stop in runs if max(first, start) < min(last, stop)
    ]
