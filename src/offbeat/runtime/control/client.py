"""A worker's client of the coordinator: sends events, applies the actions that come back.

Theory of operation. An `Endpoint` holds the connections to the coordinator and to other workers and serves
them in one thread, the I/O thread. A `ControlChannel` makes the connections to the coordinator one
reliable channel. `WorkerPeers` knows the other workers' links. A `CoordinatorClient` holds the state that
actions change, and on which the training loop waits.

Threads. The training loop calls `send_event`, `raise_if_failed`, `pause` and `wait_for`, which touch no
socket. Messages and lost connections are processed in the I/O thread, which notifies all waiting threads
after every message. `protocol` is the strategy's `WorkerProtocol`, an object without I/O; both threads use it
under `lock` only. The `on_*` callbacks run in the I/O thread, outside the lock; all links wait while they
run. A thread in `wait_for` calls `find_due_work` under the lock and does that work outside it; any thread may
make work due, and then calls `wake`.

Actions. This client applies those that every job has: which workers take part, how far an epoch or the job
is, what a checkpoint holds, validations, values of other workers. All others belong to the strategy:
`protocol` applies them, its answers are sent, and `on_action` lets the synchronizer carry out what follows.
An action that neither knows fails the job.

Exactly once. Events and actions are counted at both ends. The coordinator appends an event to its journal
before it sends any action that follows from it, and acknowledges events by their count in the journal. An
event that is not acknowledged is kept and sent again on the next connection; of a batch of events that is
recorded in part, only the rest is sent. The coordinator keeps actions in the same way. When the connection
breaks, the channel opens the next one, with a number higher by one, and sends its counts in a `SequenceAck`.
Until the coordinator's `SequenceAck` for that connection arrives, incoming actions are dropped, for the
coordinator sends them again, and outgoing events are queued. A coordinator that was killed is restarted from
its journal, so that it repeats the same decisions: to a worker a restart looks like a broken connection.

Failures. The first one wins: `_fail` sets `failure` once and calls `on_failure` once; `raise_if_failed`,
`pause` and `wait_for` raise it in the training loop.
- The coordinator sends AbortJob (the job has failed), RejectPeer (this worker is out), or an action that the
  strategy does not have.
- The coordinator cannot be reached after a lost connection, or closes its end before the job is over.
- The connection to another worker is lost. Where the strategy survives that, this worker reports it, tries
  to connect every second, and leaves the verdict to the coordinator. Where not, the coordinator has one
  second to send the cause, which it knows better, and longer while it is restarted; then this worker fails by
  itself. A violation of the protocol, which only this worker has seen, it reports and raises at once.
- The links' thread, or another thread of this worker (`start_thread`), raises.

Leaving. `send_end` sends Left or Failed, once. `close` waits until the coordinator has recorded it, and then
closes all connections.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from offbeat.errors import LinkError, OffbeatError, ProtocolError, WorkerError
from offbeat.events import (
    AbortJob,
    Action,
    AnnounceWorkerLost,
    ConsumedSamples,
    DeliverValue,
    EndEpoch,
    EndGathering,
    EvaluatePart,
    Event,
    Failed,
    JobComplete,
    Joined,
    Left,
    MergeStates,
    PeerList,
    Preempt,
    RejectPeer,
    SendSnapshot,
    ValidationFinished,
    ValidationStarted,
)
from offbeat.policies import WorkerProtocol
from offbeat.runtime.control.channel import ControlChannel
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.control.delivered_values import DeliveredValues
from offbeat.runtime.control.environment import load_tls
from offbeat.runtime.control.peers import WorkerPeers
from offbeat.runtime.control.rendezvous import RendezvousInfo
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import SignalSafeCondition
from offbeat.runtime.transport.addresses import this_host_id
from offbeat.runtime.transport.endpoint import Endpoint

_log = logging.getLogger("offbeat")
_ERROR_CHARACTERS_MAX = 2000
_COORDINATOR_REPORT_S = 1.0
_ANSWER_MARGIN_S = 5.0
_CLOSE_S = 5.0
_POLL_S = 0.5  # between looks into the store, for failures of workers that have not reached the coordinator
_FLUSH_S = 20.0  # the coordinator may be silent for 10 s, and reconnecting may take another 10 s


class CoordinatorClient:
    """A worker's client of the coordinator.

    Every failure of the job is reported in one place: `failure` is set once, naming the worker that caused
    it, and `on_failure` is called once, in the thread that detected it.

    Args:
        rendezvous: the rendezvous of the job.
        worker: this worker's id.
        protocol: the worker's side of the strategy's protocol.
        on_failure: called with the first failure.
        steps_finished: returns the number of optimizer steps that this worker has finished.
        survives_worker_loss: the loss of another worker does not end this one; the coordinator decides what
            follows.
        silent_s: a peer that has sent nothing for this many seconds is lost.

    Attributes:
        protocol: the worker's side of the strategy's protocol; to be used under `lock`.
        epochs_ended: number of epochs that the group has finished, as far as is known.
        consumed_samples: the last ConsumedSamples received: which samples the state has consumed.
        preempt: the last Preempt received, which names the worker about to be preempted; None before.
        is_job_complete: all workers have finished.
        delivered: the values of other workers; to be used under `lock`.
        on_action: called, in the I/O thread, with every action that `protocol` has applied.
        on_validation_action: called, in the I/O thread, with every action about validations.
        find_due_work: called, under `lock`, by a thread in `wait_for`; returns what that thread has to do
            before it waits on, without the lock, or None. What makes work due calls `wake` afterwards.
        validation_results: by epoch, the result of its validation, None while that is under way.
        failure: why the job has failed; None while it has not.
        is_failure_reported: the coordinator has reported the failure itself, or is gone.
    """

    def __init__(
        self,
        rendezvous: RendezvousInfo,
        worker: int,
        protocol: WorkerProtocol,
        on_failure: Callable[[WorkerError], None],
        *,
        steps_finished: Callable[[], int],
        survives_worker_loss: bool = False,
        silent_s: float = 10.0,
    ) -> None:
        self.worker, self._pid = worker, os.getpid()
        self.protocol = protocol
        self.epochs_ended = 0
        self.consumed_samples: ConsumedSamples | None = None
        self.preempt: Preempt | None = None
        self.is_job_complete = False
        self.delivered = DeliveredValues(worker)
        self.on_action: Callable[[Action], None] = _do_nothing
        self.on_validation_action: Callable[
            [SendSnapshot | EvaluatePart | MergeStates | ValidationFinished], None
        ] = _do_nothing
        self.find_due_work: Callable[[], Callable[[], object] | None] = _do_nothing
        self.validation_results: dict[int, ValidationFinished | None] = {}
        self._survives = survives_worker_loss
        self._is_closing = False
        self.failure: WorkerError | None = None
        self.is_failure_reported = False
        self._has_sent_end = False
        self._on_failure, self._step = on_failure, steps_finished
        self._changed = SignalSafeCondition()
        self._start: PeerList | None = None
        self._rendezvous = rendezvous
        self.endpoint = Endpoint(
            f"worker-{worker}.{secrets.token_hex(2)}",
            job=rendezvous.job,
            token=rendezvous.token,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_left=self._on_left,
            on_unreachable=lambda peer, cause: self._peers.on_unreachable(peer, cause),
            on_reachable=lambda peer: self._peers.on_reachable(peer),
            on_error=self._on_links_failed,
            host=rendezvous.host,
            silent_s=silent_s,
            tls=load_tls(),
        )
        self._peers = WorkerPeers(self.endpoint, worker, self.send_event, steps_finished, silent_s=silent_s)
        self._channel = ControlChannel(
            self.endpoint,
            COORDINATOR,
            rendezvous.coordinator,
            is_service=rendezvous.is_service,
            on_coordinator_gone=self._on_coordinator_gone,
        )

    def join(self, *, world: int, location: str, model: tuple[str, ...], strategy: str) -> PeerList:
        """Join the job and wait until all workers have joined.

        Args:
            world: number of workers at the start.
            location: host and process id, for messages.
            model: the model's signature, see `Joined.model_signature`.
            strategy: as text.

        Returns:
            All workers, with their addresses.

        Raises:
            WorkerError: the job did not start; names the workers that are missing or what does not match.
        """
        self.send_event(
            Joined(
                now_s=0.0,
                worker=self.worker,
                world=world,
                peer=self.endpoint.name,
                location=location,
                addresses=self.endpoint.addresses,
                model_signature=model,
                strategy=strategy,
                host=this_host_id(),
            )
        )
        timeout_s = self._rendezvous.start_s + _ANSWER_MARGIN_S
        limit_s = time.monotonic() + timeout_s
        while not self._wait_for_start(min(_POLL_S, limit_s - time.monotonic())):
            if (cause := self._rendezvous.published_failure()) is not None:
                raise WorkerError(cause)
            if time.monotonic() > limit_s:
                what = "the coordinator to start the job"
                raise WorkerError(f"worker {self.worker}: timed out after {timeout_s:g} s waiting for {what}")
        assert self._start is not None
        return self._start

    def _wait_for_start(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for the start; return whether the job has started."""
        with self._changed:
            self._changed.wait_for(lambda: self._start is not None or self.failure is not None, wait_s)
        self.raise_if_failed()
        return self._start is not None

    @property
    def lock(self) -> SignalSafeCondition:
        """To be held while `protocol` is used."""
        return self._changed

    def link_name(self, worker: int) -> str:
        """Return the link name of a worker that has joined."""
        return self._peers.link_name(worker)

    def host_of(self, worker: int) -> str:
        """See `WorkerPeers.host_of`."""
        return self._peers.host_of(worker)

    def send_event(self, *events: Event) -> None:
        """Send events to the coordinator, which sets their time; never blocks."""
        self._channel.send(*events)

    def send_end(self, error: BaseException | None, *events_before: Event) -> None:
        """Send the coordinator, once, that this worker has finished, or the error with which it ends.

        Any thread may call it. Events that other threads send after it are dropped. Nothing is sent if
        `is_failure_reported`.

        Args:
            error: None if the worker has finished.
            events_before: events to send first.
        """
        with self._changed:
            if self.is_failure_reported or self._has_sent_end:
                return
            self._has_sent_end = True
        end: Event
        if error is None:
            end = Left(now_s=0.0, worker=self.worker, step=self._step())
        else:
            text = one_line_error(error)
            end = Failed(now_s=0.0, worker=self.worker, step=self._step(), error=text)
        with suppress(LinkError):
            self._channel.send(*events_before, end, is_last=True)

    def start_thread(self, name: str, run: Callable[[], object]) -> threading.Thread:
        """Start a thread of this worker whose exceptions fail the job, as those of the training loop do.

        The training loop ends with a WorkerError that names the thread and the error. The coordinator is
        informed at once, whatever the loop is doing.
        """
        return start_thread(name, run, partial(self.on_thread_failed, name))

    def on_thread_failed(self, thread: str, error: BaseException) -> None:
        """Fail the job with the error that ended a thread of this worker; see `start_thread`."""
        failure = WorkerError(
            f"worker {self.worker} failed in its thread {thread!r}: {one_line_error(error)}",
            worker=self.worker,
            step=self._step(),
        )
        failure.__cause__ = error
        with self._changed:  # before the coordinator can end the job because of it
            is_first = self.failure is None
            self.failure = self.failure or failure
        self.send_end(error)
        if is_first:
            with self._changed:
                self._changed.notify_all()
            self._on_failure(failure)

    def raise_if_failed(self) -> None:
        """Raise the job's failure, if there is one.

        Raises:
            OffbeatError: this is not the worker's process but one that was forked from it.
        """
        if self.failure is not None:
            raise self.failure
        if os.getpid() != self._pid:
            raise OffbeatError(
                f"this process was forked from worker {self.worker}, which alone takes part in the job: use "
                "the session there, and only the model here"
            )

    def pause(self, duration_s: float) -> None:
        """Wait for `duration_s` seconds, or until the job fails.

        Raises:
            WorkerError: the job failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, duration_s)
        self.raise_if_failed()

    def close(self) -> None:
        """Send what is queued, unless `is_failure_reported`, and close every link in order."""
        self._is_closing = True
        self._peers.stop()
        if not self.is_failure_reported:
            self._channel.wait_until_acked(_FLUSH_S)
            self.endpoint.flush(_CLOSE_S)
        self.endpoint.close()

    @property
    def is_failure_raised(self) -> bool:
        """Whether the job's failure has been raised in the program already."""
        return self.failure is not None and self.failure.__traceback__ is not None

    def wake(self) -> None:
        """Have threads in `wait_for` look at their conditions, and for work that is due."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Wait until actions received make the condition true; do meanwhile what `find_due_work` returns.

        Args:
            condition: evaluated under `lock`.
            timeout_s: for how long, in seconds; None where the coordinator ends the wait.
            what: what is waited for, for the error message.

        Raises:
            WorkerError: the job failed, or the wait took longer than `timeout_s` seconds.
        """
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (due_work := self._wait_for_work(condition, limit_s, timeout_s, what)) is not None:
            due_work()

    def _wait_for_work(
        self, condition: Callable[[], bool], limit_s: float | None, timeout_s: float | None, what: str
    ) -> Callable[[], object] | None:
        """Wait until work is due, and return it; None once the condition is true."""
        with self._changed:
            while not condition():
                self.raise_if_failed()
                if (due_work := self.find_due_work()) is not None:
                    return due_work
                left_s = None if limit_s is None else limit_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise WorkerError(
                        f"worker {self.worker}: timed out after {timeout_s:g} s waiting for {what}"
                    )
                self._changed.wait(left_s)
        return None

    def _on_message(self, peer: str, payload: bytes) -> None:
        if peer != COORDINATOR:
            return
        try:
            for action in self._channel.receive(payload):
                self._apply(action)
        except ProtocolError as error:
            self._fail(WorkerError(f"worker {self.worker} cannot use a message of the coordinator: {error}"))
        with self._changed:
            self._changed.notify_all()

    def _apply(self, action: Action) -> None:
        """Apply an action, in the I/O thread.

        Raises:
            ProtocolError: the strategy has no such action.
        """
        match action:
            case PeerList():
                self._peers.add(action.peers)
                self._start = action
            case ConsumedSamples():
                self.consumed_samples = action
            case ValidationStarted():
                self.validation_results.setdefault(action.epoch, None)
            case SendSnapshot() | EvaluatePart() | MergeStates() | ValidationFinished():
                if isinstance(action, ValidationFinished):
                    self.validation_results[action.epoch] = action
                self.on_validation_action(action)
            case DeliverValue() | EndGathering():
                with self._changed:
                    self.delivered.on_action(action)
            case Preempt():
                self.preempt = action
            case EndEpoch():
                self.epochs_ended = action.epoch + 1
            case JobComplete():
                self.is_job_complete = True
            case AbortJob():
                self.is_failure_reported = True
                self._fail(WorkerError(action.reason, worker=action.worker, step=action.step))
            case AnnounceWorkerLost():
                self._peers.forget_worker(action.worker)
                if self.failure is None and not (self.is_job_complete or self._is_closing):
                    _log.warning(action.reason)
            case RejectPeer():
                self.is_failure_reported = True
                self._fail(WorkerError(action.reason, worker=self.worker))
            case _:
                with self._changed:
                    answers = self.protocol.handle(action)
                if answers:
                    self.send_event(*answers)
                self.on_action(action)

    def _on_lost(self, error: LinkError) -> None:
        if error.peer == COORDINATOR:
            self._channel.on_connection_lost(error)
        elif error.failure == "no files":  # a limit of this process: the peer is not at fault
            failure = OffbeatError(f"worker {self.worker}: {error}")
            self.send_end(failure)
            self._fail(WorkerError(str(failure), worker=self.worker))
        elif self._survives:
            self._peers.on_lost(error)
        elif (worker := self._peers.worker_of(error.peer)) is not None:
            text = f"worker {worker} was lost: {error} (noticed by worker {self.worker})"
            failure = WorkerError(text, worker=worker)
            if error.failure == "protocol":  # only this worker has seen it
                self.send_end(failure)
                self._fail(failure)
            else:
                self._fail_soon(failure)

    def _fail_soon(self, error: WorkerError) -> None:
        """Fail unless the coordinator reports the cause first; wait while it restarts."""

        def fail() -> None:
            if self._channel.is_connected:
                self._fail(error)
            elif self.failure is None:
                self._fail_soon(error)

        self.endpoint.call_later(_COORDINATOR_REPORT_S, fail)

    def _on_left(self, peer: str) -> None:
        """Handle a link closed in order; the coordinator closes before its workers only if it fails."""
        if peer == COORDINATOR:
            self._channel.on_peer_closed()
        else:
            self._peers.forget(peer)

    def _on_coordinator_gone(self, cause: str) -> None:
        if self._is_closing:  # the coordinator ends once the last worker has left
            return
        self.is_failure_reported = True
        self._fail(WorkerError(f"worker {self.worker} lost the coordinator: {cause}"))

    def _on_links_failed(self, error: BaseException) -> None:
        self._channel.fail()
        self._fail(WorkerError(f"worker {self.worker}: its links failed: {error!r}"))

    def _fail(self, error: WorkerError) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = error
            self._changed.notify_all()
        self._on_failure(error)


def one_line_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, to send to other workers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:_ERROR_CHARACTERS_MAX]


def _do_nothing(*_: object) -> None:
    return
