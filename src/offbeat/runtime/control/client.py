"""A worker's side of the control path: it tells the coordinator what happened and hears what was decided."""

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
    Deal,
    Dismiss,
    EpochEnded,
    EvaluatePart,
    Event,
    Failed,
    Grant,
    Group,
    Halt,
    Joined,
    Left,
    Lend,
    LendSnapshot,
    MergeStates,
    Peer,
    PeerReachable,
    PeerUnreachable,
    Preempt,
    Recall,
    Refuse,
    RoundNamed,
    Settle,
    Start,
    Stop,
    Used,
    Validated,
    Validating,
    WorkerLost,
)
from offbeat.policies.data.block_queue import Hand
from offbeat.policies.membership.group_membership import Follower
from offbeat.runtime.control.channel import ControlLine
from offbeat.runtime.control.coordinator import Coordinator
from offbeat.runtime.control.outages import OutageNotes
from offbeat.runtime.control.rendezvous import Meeting
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import Condition
from offbeat.runtime.transport.endpoint import Endpoint

_log = logging.getLogger("offbeat")
_ERROR_CHARACTERS_MAX = 2000
_COORDINATOR_SAYS_MORE_S = 1.0
_ANSWER_MARGIN_S = 5.0
_GOODBYE_S = 5.0
# For how long workers that hear nothing of each other leave it to the coordinator, which hears both, to end
# the job: times `silent_s`. After that they end it themselves.
_PATIENCE = 3.0
_REACH_AGAIN_S = 1.0
_LOOK_S = 0.5  # into the store, for workers that could not tell the coordinator why they do not come
_LAST_WORD_S = 20.0  # the coordinator may be silent for 10 s, and then has 10 s to be reached again


class Member:
    """One worker as a member of its job.

    Any failure of the job ends up in one place: `failure` is set once, with whoever caused it named, and
    `on_failure` is called once, in whatever thread learnt of it.

    Args:
        meeting: where the job meets.
        worker: this worker's id.
        on_failure: hears of the first failure.
        step: returns how many optimizer steps this worker has finished.
        survives: the loss of another worker does not end this one; the coordinator says what it means.
        silent_s: who has said nothing for so long is lost.

    Attributes:
        follower: what the coordinator's Halts and Groups allow; to be used under `lock`.
        hand: the samples that it was dealt; likewise.
        epochs_ended: how many epochs the group is done with, as far as is known.
        used: which samples a state holds, the last that was heard.
        preempt: says which worker is about to be taken away, None where none is.
        is_dismissed: everybody has finished.
        grant: the last one; set to None before another is asked for.
        round_named: for which batch the next round is; likewise.
        on_grant: called, in the links' thread, with every Grant.
        on_abandon: called, in the links' thread, when exchanges under way cannot be finished.
        on_loan: called, in the links' thread, with all that is said of loans.
        on_validation: called, in the links' thread, with all that is said of validations.
        validated: what the validations of epochs have come to, None for those under way.
        failure: why the job has failed, None as long as it has not.
        coordinator_knows: the coordinator is the one who said so, or is gone itself.
    """

    def __init__(
        self,
        meeting: Meeting,
        worker: int,
        on_failure: Callable[[WorkerError], None],
        *,
        step: Callable[[], int],
        survives: bool = False,
        silent_s: float = 10.0,
    ) -> None:
        self.worker, self._pid = worker, os.getpid()
        self.follower = Follower(worker)
        self.hand = Hand()
        self.epochs_ended = 0
        self.used: Used | None = None
        self.preempt: Preempt | None = None
        self.is_dismissed = False
        self.grant: Grant | None = None
        self.round_named: RoundNamed | None = None
        self.on_grant: Callable[[Grant], None] = _do_nothing
        self.on_abandon: Callable[[], None] = _do_nothing
        self.on_loan: Callable[[Lend | Settle | Deal], None] = _do_nothing
        self.on_validation: Callable[[LendSnapshot | EvaluatePart | MergeStates | Validated], None] = (
            _do_nothing
        )
        self.validated: dict[int, Validated | None] = {}
        self._survives = survives
        self._is_closing = False
        self.failure: WorkerError | None = None
        self.coordinator_knows = False
        self._has_told_end = False
        self._on_failure, self._step = on_failure, step
        self._changed = Condition()
        self._start: Start | None = None
        self._peers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._reported: set[str] = set()  # whom this worker has reported as unreachable
        self._silent_s = silent_s
        self._host, self._start_s, self._meeting_failure = meeting.host, meeting.start_s, meeting.failure
        self.endpoint = Endpoint(
            f"worker-{worker}.{secrets.token_hex(2)}",
            job=meeting.job,
            token=meeting.token,
            on_message=self._hear,
            on_lost=self._lose,
            on_left=self._miss,
            on_unreachable=self._report,
            on_reachable=self._withdraw_report,
            on_error=self._fail_with_the_links,
            host=meeting.host,
            silent_s=silent_s,
        )
        self._notes = OutageNotes(f"worker {worker}", self.endpoint.later)
        self._line = ControlLine(
            self.endpoint, Coordinator.NAME, meeting.coordinator, on_gone=self._lose_coordinator
        )

    def join(self, *, world: int, place: str, model: tuple[str, ...], strategy: str) -> Start:
        """Asks to take part and waits until everybody is here.

        Raises:
            WorkerError: the job did not come together; says who is missing or what does not fit.
        """
        self.tell(
            Joined(
                now_s=0.0,
                worker=self.worker,
                world=world,
                peer=self.endpoint.name,
                place=place,
                addresses=self.endpoint.addresses,
                model=model,
                strategy=strategy,
            )
        )
        deadline_s = self._start_s + _ANSWER_MARGIN_S
        limit_s = time.monotonic() + deadline_s
        while not self._has_started(min(_LOOK_S, limit_s - time.monotonic())):
            if (cause := self._meeting_failure()) is not None:
                raise WorkerError(cause)
            if time.monotonic() > limit_s:
                what = "the coordinator to start the job"
                raise WorkerError(f"worker {self.worker} waited {deadline_s:g} s for {what} in vain")
        assert self._start is not None
        return self._start

    def _has_started(self, wait_s: float) -> bool:
        """Waits for the start, for so many seconds at most, and returns whether it has come."""
        with self._changed:
            self._changed.wait_for(lambda: self._start is not None or self.failure is not None, wait_s)
        self.check()
        return self._start is not None

    @property
    def lock(self) -> Condition:
        """Held while `follower` or `hand` is asked or told something."""
        return self._changed

    def name_of(self, worker: int) -> str:
        """The link name of a worker that has come."""
        return self._names[worker]

    def tell(self, *events: Event) -> None:
        """Sends events to the coordinator, which puts its own time on them; never blocks."""
        self._line.tell(*events)

    def tell_end(self, error: BaseException | None, *before: Event) -> None:
        """Tells the coordinator, once, that this worker is done, or of which error it ends.

        Any thread may call it; nothing is told to a coordinator that knows.

        Args:
            error: None where the worker is done.
            before: what is still to be told first.
        """
        with self._changed:
            if self.coordinator_knows or self._has_told_end:
                return
            self._has_told_end = True
        with suppress(LinkError):
            if error is None:
                self.tell(*before, Left(now_s=0.0, worker=self.worker, step=self._step()))
            else:
                text = in_one_line(error)
                self.tell(*before, Failed(now_s=0.0, worker=self.worker, step=self._step(), error=text))

    def start_thread(self, name: str, run: Callable[[], object]) -> threading.Thread:
        """Starts a thread of this worker: what it raises fails the job, as what the loop raises does.

        This worker's loop ends with a WorkerError that names the thread and the error, and the coordinator is
        told at once, whatever the loop does meanwhile.
        """
        return start_thread(name, run, partial(self.fail_in, name))

    def fail_in(self, thread: str, error: BaseException) -> None:
        """A thread of this worker has died of an error; see `start_thread`."""
        self.tell_end(error)
        failure = WorkerError(
            f"worker {self.worker} failed in its thread {thread!r}: {in_one_line(error)}",
            worker=self.worker,
            step=self._step(),
        )
        failure.__cause__ = error
        self._fail(failure)

    def check(self) -> None:
        """Raises the job's failure, if there is one.

        Raises:
            OffbeatError: this is not the worker's process but one that was forked from it.
        """
        if self.failure is not None:
            raise self.failure
        if os.getpid() != self._pid:
            raise OffbeatError(
                f"this process was forked from worker {self.worker}, which alone takes part in the job: use "
                "the session there, and here no more of it than the model"
            )

    def pause(self, duration_s: float) -> None:
        """Waits for `duration_s` seconds, or until the job fails.

        Raises:
            WorkerError: the job failed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, duration_s)
        self.check()

    def close(self) -> None:
        """Hands out what is still queued, unless nobody waits for it, and closes every link in order."""
        self._is_closing = True
        if not self.coordinator_knows:
            self._line.settle(_LAST_WORD_S)
            self.endpoint.flush(_GOODBYE_S)
        self.endpoint.close()

    @property
    def has_raised(self) -> bool:
        """Whether the program has met the job's failure already."""
        return self.failure is not None and self.failure.__traceback__ is not None

    def wait_for(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Waits until what was heard makes the condition true.

        Raises:
            WorkerError: the job failed, or that took longer than `deadline_s` seconds.
        """
        limit_s = time.monotonic() + deadline_s
        with self._changed:
            while not condition():
                self.check()
                left_s = limit_s - time.monotonic()
                if left_s <= 0:
                    raise WorkerError(f"worker {self.worker} waited {deadline_s:g} s for {what} in vain")
                self._changed.wait(left_s)

    def _hear(self, peer: str, payload: bytes) -> None:
        if peer != Coordinator.NAME:
            return
        try:
            actions = self._line.hear(payload)
        except ProtocolError as error:
            self._fail(WorkerError(f"the coordinator said something that is not understood: {error}"))
            return
        for action in actions:
            match action:
                case Start():
                    self._meet_peers(action.peers)
                    self._start = action
                case Halt():
                    self._halt(action)
                case Group():
                    with self._changed:
                        self.follower.hear_group(action)
                case Deal():
                    with self._changed:
                        self.hand.hear(action)
                    if action.anew or not self.follower.is_member:
                        self.on_loan(action)
                case Grant():
                    self.grant = action
                    self.on_grant(action)
                case RoundNamed():
                    self.round_named = action
                case Recall():
                    with self._changed:
                        recalled = self.follower.recall(action)
                    self.tell(recalled)
                case Used():
                    self.used = action
                case Lend() | Settle():
                    self.on_loan(action)
                case Validating():
                    self.validated.setdefault(action.epoch, None)
                case LendSnapshot() | EvaluatePart() | MergeStates() | Validated():
                    if isinstance(action, Validated):
                        self.validated[action.epoch] = action
                    self.on_validation(action)
                case Preempt():
                    self.preempt = action
                case EpochEnded():
                    self.epochs_ended = action.epoch + 1
                case Dismiss():
                    self.is_dismissed = True
                case Stop():
                    self.coordinator_knows = True
                    self._fail(WorkerError(action.reason, worker=action.worker, step=action.step))
                case WorkerLost():
                    self._forget(self._names.get(action.worker, ""))
                    if self.failure is None and not (self.is_dismissed or self._is_closing):
                        _log.warning(action.reason)
                case Refuse():
                    self.coordinator_knows = True
                    self._fail(WorkerError(action.reason, worker=self.worker))
        with self._changed:
            self._changed.notify_all()

    def _meet_peers(self, peers: tuple[Peer, ...]) -> None:
        for peer in peers:
            if peer.name in self._peers:
                continue
            self._peers[peer.name] = peer.worker
            self._names[peer.worker] = peer.name
            if peer.name != self.endpoint.name:
                self._addresses[peer.name] = peer.addresses
                self._introduce(peer.name)

    def _introduce(self, peer: str) -> None:
        """Lets the links dial another worker; whether it is lost, the coordinator says first."""
        silent_s = _PATIENCE * self._silent_s
        self.endpoint.introduce(peer, self._addresses[peer], lasting=True, silent_s=silent_s)

    def _report(self, peer: str, cause: str) -> None:
        """Writes that nothing comes from a peer; tells the coordinator, where that is another worker."""
        with self._changed:
            cause = f"{cause}, in step {self.follower.step}"
        if not self._is_closing and (peer == Coordinator.NAME or peer in self._addresses):
            self._notes.begin(self._spoken_name(peer), cause)
        if peer in self._addresses and peer not in self._reported:
            self._reported.add(peer)
            self.tell(PeerUnreachable(now_s=0.0, worker=self.worker, peer=self._peers[peer], cause=cause))

    def _withdraw_report(self, peer: str) -> None:
        self._notes.end(self._spoken_name(peer))
        if peer in self._reported:
            self._reported.remove(peer)
            self.tell(PeerReachable(now_s=0.0, worker=self.worker, peer=self._peers[peer]))

    def _reach_again(self, peer: str) -> None:
        """Tries again to reach a worker that is said to take part."""
        if peer in self._addresses and not self._is_closing:
            self._introduce(peer)
            self.endpoint.reach(peer)

    def _halt(self, halt: Halt) -> None:
        with self._changed:
            answer = self.follower.hear_halt(halt)
        if answer is not None:
            self.tell(answer)
            if halt.abandon:
                self.on_abandon()

    def _lose(self, error: LinkError) -> None:
        if error.peer == Coordinator.NAME:
            self._line.lost(error)
        elif error.failure == "no files":  # whoever the peer is, it is not the peer's fault
            failure = OffbeatError(f"worker {self.worker}: {error}")
            self.tell_end(failure)
            self._fail(WorkerError(str(failure), worker=self.worker))
        elif error.peer in self._addresses and self._survives:
            self._report(error.peer, str(error))
            self.endpoint.later(_REACH_AGAIN_S, partial(self._reach_again, error.peer))
        elif error.peer in self._peers and not self._survives:
            worker = self._peers[error.peer]
            text = f"worker {worker} was lost: {error} (noticed by worker {self.worker})"
            failure = WorkerError(text, worker=worker)
            if error.failure == "protocol":  # of which the coordinator does not know
                self.tell_end(failure)
                self._fail(failure)
            else:
                self._fail_soon(failure)

    def _fail_soon(self, error: WorkerError) -> None:
        """Fails unless the coordinator, which knows more, says so first; waits while it is started again."""

        def fail() -> None:
            if self._line.is_open:
                self._fail(error)
            elif self.failure is None:
                self._fail_soon(error)

        self.endpoint.later(_COORDINATOR_SAYS_MORE_S, fail)

    def _miss(self, peer: str) -> None:
        """A peer has left in order; the coordinator does so before its workers only if it fails."""
        if peer == Coordinator.NAME:
            self._line.left()
        else:
            self._forget(peer)

    def _forget(self, peer: str) -> None:
        """This worker takes part no more: nobody tries to reach it again."""
        self._addresses.pop(peer, None)
        self._reported.discard(peer)
        self._notes.forget(self._spoken_name(peer))

    def _spoken_name(self, peer: str) -> str:
        return f"worker {self._peers[peer]}" if peer in self._peers else "the coordinator"

    def _lose_coordinator(self, cause: str) -> None:
        if self._is_closing:  # the coordinator ends when it has heard the last worker
            return
        self.coordinator_knows = True
        self._fail(WorkerError(f"worker {self.worker} lost the coordinator: {cause}"))

    def _fail_with_the_links(self, error: BaseException) -> None:
        self._line.abandon()
        self._fail(WorkerError(f"the links of worker {self.worker} failed: {error!r}"))

    def _fail(self, error: WorkerError) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = error
            self._changed.notify_all()
        self._on_failure(error)


def in_one_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of what it says, for the other workers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:_ERROR_CHARACTERS_MAX]


def _do_nothing(*_: object) -> None:
    return
