"""Workers that only speak the coordinator's protocol: many in one process, which trains nothing.

Each worker has a TCP connection of its own, as workers of other hosts have, with the real handshake, frames,
control messages and `WorkerProtocol`; it joins, reports every step and its times, and acts on what the
coordinator answers. In place of an `Endpoint`, one loop serves all of them: an endpoint has a thread, a
listening socket and a timer, and a thousand of them would keep the cores busy that the coordinator is
measured on. A list of all workers, which every worker receives, is decoded once for the same reason.

Where gradients are averaged, a round begins when all workers have what they need for it: its messages are
encoded first and then sent in one burst, as workers of equal speed send them. On a parameter server a worker
goes on as soon as its permit allows.

`python -m benchmarks.protocol_workers` runs them for `python -m benchmarks coordinator`.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from benchmarks.children import Lines
from offbeat.errors import OffbeatError
from offbeat.events import (
    AbortJob,
    Action,
    AnnounceWorkerLost,
    EndEpoch,
    Event,
    Halt,
    Joined,
    Left,
    PeerList,
    Ready,
    RejectPeer,
    SamplesRequested,
    StepFinished,
    StepTimes,
)
from offbeat.policies.membership.group_protocol import GroupProtocol
from offbeat.policies.staleness.clock_protocol import ClockProtocol
from offbeat.runtime.control.channel import (
    SEQUENCE_ACK_INTERVAL,
    SequenceAck,
    decode_sequence_ack,
    encode_sequence_ack,
)
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.training.step_times import StepTimesBuffer
from offbeat.runtime.transport.addresses import parse_address
from offbeat.runtime.transport.framing import (
    HEADER,
    MAGIC,
    NUMBERED,
    VERSION,
    FrameKind,
    FrameReader,
    encode_frame,
)
from offbeat.runtime.transport.handshake import DiallerHandshake
from offbeat.strategies import parse_strategy
from offbeat.wire.codec import decode_actions, encode_events

_BATCH_SIZE = 32
_EPOCH_STEPS = 1_000_000  # of each worker: no epoch ends
_HANDSHAKES_MAX = 32  # at a time; the coordinator closes the oldest of more than 64
_HEARTBEAT_S = 0.25
_WAIT_S = 120.0  # for anything from the coordinator
_ACK_FRAMES = 64  # received frames, then they are acknowledged
_READ_AHEAD_BYTES = 8192
_RECEIVE_BYTES_MAX = 1 << 20  # from one connection at a time
_MESSAGE, _BYE = int(FrameKind.MESSAGE), int(FrameKind.BYE)
_HEARTBEAT = encode_frame(FrameKind.HEARTBEAT)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The job that the workers join.

    Attributes:
        addresses: of the coordinator.
        compute_s: time of forward and backward pass that every step reports; a coordinator that needs longer
            than some multiple of it for a round may class workers as late.
    """

    job: str
    token: str
    addresses: tuple[str, ...]
    strategy: str
    workers: int
    compute_s: float = 1.0


class ProtocolWorker:
    """One worker: its connection, its counts of events and actions, and its side of the strategy's protocol.

    Attributes:
        is_open: the handshake is over.
        has_started: the coordinator has sent the list of all workers.
        has_ended: the coordinator has closed the connection in order.
        events, actions: counts of those sent and received.
        acked: count of events that the coordinator has acknowledged.
    """

    def __init__(self, settings: Settings, worker: int, decode: Callable[[bytes], list[Action]]) -> None:
        strategy = parse_strategy(settings.strategy)
        protocol = strategy.make_worker_protocol(worker)
        assert isinstance(protocol, GroupProtocol | ClockProtocol)
        self.worker, self.protocol = worker, protocol
        self.is_open = self.has_started = self.has_ended = False
        self.events = self.actions = self.acked = 0
        self._assigns_samples = strategy.shards == "dynamic"
        self._settings, self._decode = settings, decode
        self._name = f"worker-{worker}.{os.urandom(2).hex()}"
        self._handshake = DiallerHandshake(
            job=settings.job, token=settings.token, node=self._name, peer=COORDINATOR
        )
        self._reader = FrameReader(None, read_ahead_bytes=_READ_AHEAD_BYTES)
        self._out = bytearray()
        self._has_sent = True
        self._frames = self._acked_frames = 0
        self._reported_events = self._reported_actions = 0
        self._step = 0
        self._has_left = False
        self._times = StepTimesBuffer()
        self.socket = socket.create_connection(_tcp_place(settings.addresses), _WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._out += self._handshake.hello()

    # The connection --------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Send what is queued; return whether the kernel has accepted all of it."""
        if self._out:
            try:
                del self._out[: self.socket.send(self._out)]
            except BlockingIOError:
                return False
            self._has_sent = True
        return not self._out

    def keep_alive(self) -> None:
        """Send a heartbeat if nothing was sent since the last call."""
        if self.is_open and not self._has_sent and not self._out:
            self._out += _HEARTBEAT
            self.flush()
        self._has_sent = False

    def receive(self) -> None:
        """Receive and process what has arrived.

        Raises:
            OffbeatError: the coordinator has closed the connection or stops the job.
        """
        left = _RECEIVE_BYTES_MAX
        while left > 0:
            buffers = self._reader.buffers()
            try:
                count = self.socket.recvmsg_into(buffers)[0]
            except BlockingIOError:
                break
            if not count and self.has_ended:
                break
            if not count:
                raise OffbeatError(f"worker {self.worker}: the coordinator closed the connection")
            self._reader.on_received(count)
            left -= count
            while (frame := self._reader.next_frame()) is not None:
                if not self.is_open:
                    self._out += self._handshake.on_frame(frame)
                    if self._handshake.peer_position is not None:
                        self._reader.end_handshake(lambda *_: None)
                        self.is_open = True
                    continue
                self._frames += frame.kind in NUMBERED
                self.has_ended |= frame.kind == _BYE
                if frame.kind == _MESSAGE:
                    assert isinstance(frame.payload, bytes)
                    self._on_message(frame.payload)
            if count < sum(map(len, buffers)):
                break
        if self._frames - self._acked_frames >= _ACK_FRAMES:
            self._acked_frames = self._frames
            self._out += HEADER.pack(MAGIC, VERSION, FrameKind.ACK, 0, 0, 0, self._frames)
        self.flush()

    def send(self, *events: Event) -> None:
        """Queue events as one message, and a SequenceAck where it is due; `flush` sends them."""
        self._out += encode_frame(FrameKind.MESSAGE, encode_events(events))
        self.events += len(events)
        if self.events - self._reported_events >= SEQUENCE_ACK_INTERVAL:
            self.request_ack()

    def request_ack(self) -> None:
        """Queue a SequenceAck, which the coordinator answers."""
        self._reported_events, self._reported_actions = self.events, self.actions
        ack = encode_sequence_ack(SequenceAck(0, self.actions, self.events))
        self._out += encode_frame(FrameKind.MESSAGE, ack)

    def _on_message(self, payload: bytes) -> None:
        ack = decode_sequence_ack(payload)
        if ack is not None:
            self.acked = ack.received
            return
        for action in self._decode(payload):
            self.actions += 1
            self._apply(action)
        if self.actions - self._reported_actions >= SEQUENCE_ACK_INTERVAL:
            self.request_ack()

    def _apply(self, action: Action) -> None:
        match action:
            case _ if self._has_left:
                pass
            case PeerList():
                self.has_started = True
            case AbortJob() | RejectPeer() | Halt() | AnnounceWorkerLost():
                raise OffbeatError(
                    f"worker {self.worker}: expected the workers to stay as they are, got "
                    f"{type(action).__name__}: {action.reason}"
                )
            case EndEpoch():
                pass
            case _:
                self.protocol.handle(action)

    # What it reports -------------------------------------------------------------------------------------

    def join(self) -> None:
        """Queue the request to join."""
        self.send(
            Joined(
                now_s=0.0,
                worker=self.worker,
                world=self._settings.workers,
                peer=self._name,
                location=f"node-{self.worker}.cluster.example, process {10_000 + self.worker}",
                addresses=(
                    f"unix:///offbeat-{os.urandom(8).hex()}?host={os.urandom(18).hex()}",
                    f"tcp://127.0.0.1:{10_000 + self.worker}",
                ),
                model_signature=("weight float32 (10, 10)",),
                strategy=self._settings.strategy,
            )
        )

    def begin(self) -> None:
        """Queue what a worker sends before its first step."""
        if isinstance(self.protocol, ClockProtocol):
            self.send(self._step_finished(None, 0, ()))
        if self._assigns_samples:
            self.protocol.block_queue.begin_epoch(0)
            self.send(
                SamplesRequested(
                    now_s=0.0,
                    worker=self.worker,
                    epoch=0,
                    samples=self._settings.workers * _BATCH_SIZE * _EPOCH_STEPS,
                    batch_size=_BATCH_SIZE,
                    is_last=False,
                    abandons_previous=False,
                    blocks_max=0,
                    started_blocks=(),
                    round=0,
                    consumed_ranges=(),
                )
            )

    @property
    def can_step(self) -> bool:
        """Whether the worker has all that it needs for its next step but the other workers' gradients."""
        if self._assigns_samples and not len(self.protocol.block_queue):
            return False
        if isinstance(self.protocol, ClockProtocol):
            return self.protocol.permit is not None and self.protocol.permit.may_start
        return self.protocol.membership.group is not None

    def step(self) -> None:
        """Queue the report of a step, with the times of earlier ones where these are due."""
        blocks: tuple[int, ...] = ()
        queue = self.protocol.block_queue
        if self._assigns_samples:
            block = queue.next_to_load()
            assert block is not None
            queue.start(block.id)
            blocks = queue.pop_contribution(is_counted=True)
        report: Event
        if isinstance(self.protocol, ClockProtocol):
            permit, self.protocol.permit = self.protocol.permit, None
            assert permit is not None
            report = self._step_finished(permit.clock, permit.version_min, blocks)
        else:
            report = Ready(
                now_s=0.0,
                worker=self.worker,
                generation=0,
                epoch=0,
                step=self._step,
                round=self._step,
                compute_s=self._settings.compute_s,
                samples=_BATCH_SIZE,
                blocks=blocks,
                batches_fetched=self._step + 1,
            )
        self.send(*self._times.pop_due(report, self.worker), report)
        self._times.add(self._step_times())
        self._step += 1

    def leave(self) -> None:
        """Queue that the worker leaves in order; it ignores what the coordinator still sends."""
        self._has_left = True
        self.send(Left(now_s=0.0, worker=self.worker, step=self._step))

    def _step_finished(self, clock: int | None, version: int, blocks: tuple[int, ...]) -> StepFinished:
        return StepFinished(
            now_s=0.0,
            worker=self.worker,
            clock=clock,
            parameter_version=version,
            epoch=0,
            step=self._step,
            compute_s=self._settings.compute_s,
            samples=_BATCH_SIZE,
            loss=None,
            blocks=blocks,
        )

    def _step_times(self) -> StepTimes:
        """Return times of a step of 0.1 s, with as many digits as measured ones have."""
        part_s = 0.016666666666666 + self._step * 1e-12
        return StepTimes(
            step=self._step,
            batch_s=part_s,
            compute_s=part_s,
            apply_s=part_s,
            communicate_s=part_s,
            wait_s=part_s,
            other_s=part_s,
            wall_s=6 * part_s,
            samples=_BATCH_SIZE,
        )


class ProtocolWorkers:
    """All workers of a job, served by one loop.

    Raises:
        OffbeatError: the coordinator stops the job or does not answer; also from every method.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._poll = select.epoll()
        self._workers: list[ProtocolWorker] = []
        self._by_descriptor: dict[int, ProtocolWorker] = {}
        self._decoded: tuple[bytes, list[Action]] = (b"", [])
        self._next_heartbeat_s = 0.0

    @property
    def counts(self) -> tuple[int, int]:
        """How many events all workers have sent, and how many actions they have received."""
        return sum(one.events for one in self._workers), sum(one.actions for one in self._workers)

    def start(self) -> None:
        """Connect and join with all workers, and wait until each has the list of all."""
        opening: list[ProtocolWorker] = []
        for worker in range(self._settings.workers):
            opening.append(self._connect(worker))
            if len(opening) == _HANDSHAKES_MAX:
                self._receive_until(lambda one: one.is_open, opening)
                opening.clear()
        self._receive_until(lambda one: one.is_open, opening)
        for one in self._workers:
            one.join()
        self._receive_until(lambda one: one.has_started, self._workers)
        for one in self._workers:
            one.begin()
        self._receive_until(lambda one: one.can_step, self._workers)

    def step(self, steps: int) -> None:
        """Take so many steps on average with every worker, up to the answers to the last ones."""
        if isinstance(self._workers[0].protocol, ClockProtocol):
            self._step_as_permitted(steps)
        else:
            self._step_in_rounds(steps)

    def leave(self) -> None:
        """Leave the job with all workers; the coordinator ends with the last one."""
        for one in self._workers:
            one.leave()
        self._receive_until(lambda one: one.has_ended, self._workers)
        for one in self._workers:
            one.socket.close()

    def _connect(self, worker: int) -> ProtocolWorker:
        one = ProtocolWorker(self._settings, worker, self._decode)
        self._workers.append(one)
        self._by_descriptor[one.socket.fileno()] = one
        self._poll.register(one.socket, select.EPOLLIN)
        return one

    def _decode(self, payload: bytes) -> list[Action]:
        """Decode a message; the same bytes for all workers, once."""
        if payload != self._decoded[0]:
            self._decoded = (payload, decode_actions(payload))
        return self._decoded[1]

    def _step_in_rounds(self, steps: int) -> None:
        last = self._workers[-1]
        for _ in range(steps):
            self._receive_until(lambda one: one.can_step, self._workers)
            expected = last.events
            for one in self._workers:
                one.step()
            last.request_ack()
            if expected > last.acked:  # the coordinator is in the round before
                self._receive_until(partial(_has_acked, expected), [last])
            self._flush(self._workers)
        self._receive_until(lambda one: one.acked == one.events, [last])

    def _step_as_permitted(self, steps: int) -> None:
        left = steps * len(self._workers)  # of all together: one that stopped early would hold back the rest
        changed: Iterable[ProtocolWorker] = self._workers
        while left:
            able = [one for one in changed if one.can_step][:left]
            for one in able:
                one.step()
            left -= len(able)
            self._flush(able)
            changed = self._receive()

    def _receive_until(
        self, holds: Callable[[ProtocolWorker], bool], workers: Iterable[ProtocolWorker]
    ) -> None:
        """Send what is queued and receive until something holds for each of these workers."""
        missing = {one for one in workers if not holds(one)}
        self._flush(missing)
        while missing:
            missing -= {one for one in self._receive() if one in missing and holds(one)}

    def _flush(self, workers: Iterable[ProtocolWorker]) -> None:
        """Send what these workers have queued."""
        unsent = deque(workers)
        limit_s = time.monotonic() + _WAIT_S
        while unsent:
            one = unsent.popleft()
            if not one.flush():
                unsent.append(one)
                self._receive(0.001)
                if time.monotonic() > limit_s:
                    raise OffbeatError(f"timed out after {_WAIT_S:g} s sending to the coordinator")

    def _receive(self, timeout_s: float = _WAIT_S) -> list[ProtocolWorker]:
        """Receive what has arrived; return the workers for which something has."""
        limit_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            if now_s > self._next_heartbeat_s:
                self._next_heartbeat_s = now_s + _HEARTBEAT_S
                for one in self._workers:
                    one.keep_alive()
            ready = self._poll.poll(max(0.0, min(limit_s, self._next_heartbeat_s) - now_s), 1024)
            changed = [self._by_descriptor[descriptor] for descriptor, _ in ready]
            for one in changed:
                one.receive()
            if changed or timeout_s < _WAIT_S:
                return changed
            if now_s > limit_s:
                raise OffbeatError(f"timed out after {timeout_s:g} s waiting for the coordinator")


def _has_acked(events: int, worker: ProtocolWorker) -> bool:
    return worker.acked >= events


def _tcp_place(addresses: Iterable[str]) -> tuple[str, int]:
    parsed = [parse_address(text) for text in addresses]
    return next((one.host, one.port) for one in parsed if one.host)


def main() -> None:
    """Start workers with the settings received, and take steps as requested, until told to leave."""
    lines = Lines.to_parent()
    try:
        workers = ProtocolWorkers(msgspec.convert(lines.receive(), Settings))
        workers.start()
        while (steps := _report(lines, workers)) > 0:
            workers.step(steps)
        workers.leave()
        _report(lines, workers)
    except OffbeatError as error:
        lines.send({"error": str(error)})


def _report(lines: Lines, workers: ProtocolWorkers) -> int:
    """Send that a request is done; return the next one: how many steps to take, 0 to leave."""
    events, actions = workers.counts
    lines.send({"events": events, "actions": actions, "done_s": time.monotonic()})
    request: Any = lines.receive(timeout_s=600.0)
    return int(request)


if __name__ == "__main__":
    main()
