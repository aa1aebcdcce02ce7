"""The coordinator as a service: one process that belongs to no worker, and outlives all of them.

Theory of operation
-------------------

1. `run_service` opens what must survive: the listening socket and the journal, in a folder if one is given,
   which then also gets a file with the address. A supervisor runs the coordinator (see
   `offbeat.runtime.processes.supervisor`).
2. A process that wants to take part connects and sends a JobRequest. The first one begins the job: it brings
   the policies. Each gets its id in a JobAnswer (see `offbeat.runtime.control.admission`), and then joins
   like any worker. Requests are in the journal, with the events. A server that no worker has started sends a
   ServerRequest, which changes nothing, and is answered once a job has begun.
3. A worker that loses its connection dials the address again for minutes, or reads it again from the file. So
   the service may be killed and started again, with the same folder, on the same host or on another one that
   the address then leads to. Without a folder, the job ends with the service.
4. Where nothing is received from any process, this host is cut off: no worker is lost for as long as they
   look for the coordinator, 300 s, and the job continues when the line works again.
5. A job that fails is over; the service stays, and the next process begins the job again. Once all workers of
   a job have finished, the service ends with exit code 0.

The run log is written on the service's host. A service that is started again continues it if the file is
still there, and otherwise goes on without a log.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import LinkError, OffbeatError, describe_os_error
from offbeat.events import AbortJob, Action, Event, Failed, JobComplete, Left, Lost
from offbeat.policies import Policy
from offbeat.runtime.control.admission import (
    Admission,
    JobAnswer,
    JobRequest,
    ServerRequest,
    decode_job_request,
    encode_job_message,
)
from offbeat.runtime.control.channel import OUTAGE_S
from offbeat.runtime.control.configuration import CoordinatorConfiguration
from offbeat.runtime.control.coordinator import RECONNECT_S, Coordinator
from offbeat.runtime.control.cut_off import CutOffDetector
from offbeat.runtime.control.environment import (
    COORDINATOR_VARIABLE,
    DEFAULT_JOB,
    TOKEN_FILE_VARIABLE,
    Environment,
    parse_bind,
    read_token,
)
from offbeat.runtime.control.journal import Journal
from offbeat.runtime.control.peer_table import PeerTable
from offbeat.runtime.processes.supervisor import supervise
from offbeat.runtime.transport.addresses import listen_at, own_address, parse_address, write_host_and_port
from offbeat.wire.codec import encode_record
from offbeat.wire.replay import build_policy

ADDRESS_FILE = "address"  # in the folder: HOST:PORT at which the coordinator listens
_PR_SET_PDEATHSIG = 1
_ALL_ADDRESSES = ("0.0.0.0", "::")
_REQUEST = "JobRequest"  # the type of a request in the journal


class ServiceCoordinator(Coordinator):
    """A coordinator whose job is begun by the first process that asks for its id.

    Args:
        configuration: without policies.
        listeners: the sockets on which it is reached.
        journal: of an earlier coordinator, or empty.
    """

    def __init__(
        self,
        configuration: CoordinatorConfiguration,
        *,
        listeners: list[tuple[socket.socket, str]],
        journal: Journal,
    ) -> None:
        super().__init__(
            msgspec.structs.replace(configuration, log_path=None), listeners=listeners, journal=journal
        )
        self._log_path = configuration.log_path
        self._admission = Admission()
        self._deferred: dict[str, JobRequest | ServerRequest] = {}  # by peer
        self._has_finished = False  # the last worker that ended has left in order
        self._is_complete = False
        self._cut_off = CutOffDetector(OUTAGE_S)  # no longer than workers look for the coordinator

    def _is_over(self) -> bool:
        return self._is_complete

    # Requests --------------------------------------------------------------------------------------------

    def _answer_request(self, peer: str, payload: bytes) -> bool:
        request = decode_job_request(payload)
        if request is None:
            return False
        self._cut_off.on_reached()
        self._deferred[peer] = request
        self._answer_deferred()
        return True

    def _answer_deferred(self) -> None:
        """Answer every request that need not wait any more."""
        for peer, request in list(self._deferred.items()):
            answer: JobAnswer | None
            if self._is_complete:
                answer = JobAnswer(refusal="all workers of the job have finished")
            elif isinstance(request, ServerRequest):
                answer = self._admission.admit_server(request)
                if answer is None:
                    continue
            elif self._admission.is_deferred(
                request, has_started=self._has_started, has_workers=bool(self._peers.present)
            ):
                continue
            else:
                answer = self._admit(request)
                plain = {"type": _REQUEST, **msgspec.to_builtins(request)}
                self.journal.append(encode_record(peer, plain, b""))
            del self._deferred[peer]
            self._queue(peer, encode_job_message(answer))

    def _admit(self, request: JobRequest) -> JobAnswer:
        """Begin the job with a request, if that is due, and return the answer."""
        if self._admission.begins_job(request):
            try:
                policies = _build_policies(request)
            except ValueError as error:
                return JobAnswer(refusal=f"its job needs other policies than this coordinator has: {error}")
            self._end_attempt(request.attempt)
            self._admission.begin(request)
            self._configure(request, policies)
            self._log = self._open_log()
        return self._admission.admit(request, has_started=self._has_started)

    def _end_attempt(self, next_attempt: int) -> None:
        """End the workers of the attempt that another one replaces."""
        before = self._admission.request
        if before is not None and self._peers.present:
            reason = (
                f"attempt {next_attempt} of the job has begun; this worker is of attempt {before.attempt}"
            )
            self._dispatch([AbortJob(worker=None, step=None, reason=reason)])
        self._peers = PeerTable()
        self._reconnecting.clear()
        self._expected_workers = 0
        self._has_started = self._has_finished = False
        self._log.close()
        if self._publisher is not None:
            self._publisher.begin_job()

    def _configure(self, request: JobRequest, policies: list[Policy]) -> None:
        """Set the policies, and what else a request says of its job."""
        self._configuration = msgspec.structs.replace(
            self._configuration,
            policies=request.policies,
            log_path=self._log_path,
            log_header=request.log_header,
            silent_s=request.silent_s,
        )
        self._policies = policies

    # Outages ---------------------------------------------------------------------------------------------

    def _tick(self) -> Iterator[tuple[Event, str]]:
        """Tick; the deadlines of silent peers begin when this host is not cut off any more."""
        now_s = time.monotonic()
        if self._deferred:
            self._cut_off.on_reached()
        are_all_silent = all(self._peers[peer].is_silent for peer in self._peers.present)
        if self._cut_off.on_tick(now_s, are_all_silent=are_all_silent):
            self._excused_at_s = now_s
            self._reconnecting = dict.fromkeys(self._reconnecting, now_s + RECONNECT_S)
        yield from super()._tick()

    def _may_reconnect(self, error: LinkError) -> bool:
        """Whether a peer is given time; also if its connection broke in or soon after such a time."""
        is_silent = error.failure in ("broken", "unreachable")
        was_cut_off = time.monotonic() - self._excused_at_s < RECONNECT_S
        return super()._may_reconnect(error) or (is_silent and was_cut_off)

    # Events ----------------------------------------------------------------------------------------------

    def _handle(self, event: Event, peer: str, struct: msgspec.Struct | None = None) -> None:
        super()._handle(event, peer, struct)
        self._answer_deferred()

    def _decide(self, event: Event, peer: str) -> list[Action]:
        actions = super()._decide(event, peer)
        match event:
            case Left():
                self._has_finished = True
            case Lost() | Failed():
                self._has_finished = False
        self._has_finished |= any(isinstance(action, JobComplete) for action in actions)
        is_aborted = any(isinstance(action, AbortJob) for action in actions)
        self._admission.is_over |= is_aborted
        if not self._peers.present and self._peers:
            self._is_complete = self._has_started and self._has_finished and not self._admission.is_over
            self._admission.is_over = not self._is_complete
        return actions

    # The journal -----------------------------------------------------------------------------------------

    def _restore(self) -> None:
        super()._restore()
        if self._is_complete:
            _report("all workers of the job in this folder have finished: a new job needs a new folder")

    def _replay_request(self, plain: dict[str, Any]) -> bool:
        if plain["type"] != _REQUEST:
            return False
        self._admit(msgspec.convert({key: plain[key] for key in plain if key != "type"}, JobRequest))
        return True

    def _state(self) -> dict[str, Any]:
        return {
            **super()._state(),
            "admission": self._admission.state_dict(),
            "has_finished": self._has_finished,
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        self._admission.load_state_dict(state["admission"])
        self._has_finished = state["has_finished"]
        if self._admission.request is not None:
            self._configure(self._admission.request, _build_policies(self._admission.request))
            self._log = self._open_log(is_continued=True)
        super()._load_state(state)


def _build_policies(request: JobRequest) -> list[Policy]:
    return [build_policy(spec.path, spec.arguments) for spec in request.policies]


def run_service(bind: str, environment: Environment, *, state: Path | None) -> int:
    """Run the coordinator of a job until all its workers have finished, and return the exit code.

    Args:
        bind: HOST:PORT on which it listens; port 0 for any free one.
        environment: has the name and the secret of the job, and where the run log goes.
        state: folder of the journal, and of a file with the address; None to keep the journal in memory.

    Raises:
        OffbeatError: it cannot listen there, the token cannot be read, or the folder is in use.
        OSError: the folder or the run log cannot be written.
    """
    host, port = parse_bind(bind)
    job, token = environment.job_name or DEFAULT_JOB, read_token(environment.token_file)
    journal = Journal(state)
    try:
        listeners = [listen_at(host, port)]
    except OSError as error:
        raise OffbeatError(f"the coordinator cannot listen on {bind}: {describe_os_error(error)}") from error
    port = parse_address(listeners[0][1]).port
    if state is not None:
        reached_at = own_address(socket.gethostname()) if host in _ALL_ADDRESSES else host
        write_host_and_port(state / ADDRESS_FILE, reached_at, port)
    log = environment.run_log
    if log is not None:
        with open(log, "ab"):  # raises now, and not when the first worker comes
            pass
    configuration = CoordinatorConfiguration(
        job=job,
        token=token,
        host=host,
        policies=(),
        log_path=None if log is None else os.path.abspath(log),
        log_bytes_max=environment.run_log_bytes_max,
        monitoring=environment.monitoring,
    )
    coordinator = ServiceCoordinator(configuration, listeners=listeners, journal=journal)
    for number in (signal.SIGINT, signal.SIGTERM):  # a folder has all that a successor needs
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    bound = listeners[0][1].removeprefix("tcp://")
    _report(f"the coordinator of {job!r} listens on {bound}; workers find it by {COORDINATOR_VARIABLE}")
    if environment.token_file is None:
        _report(f"anybody who reaches {bound} can join: set {TOKEN_FILE_VARIABLE} here and for the workers")
    supervisor = os.getpid()

    def serve() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() == supervisor:
            coordinator.serve()

    return supervise(serve, lambda: journal.file_sizes_bytes, name="the coordinator")


def _report(line: str) -> None:
    print(f"offbeat: {line}", file=sys.stderr, flush=True)
