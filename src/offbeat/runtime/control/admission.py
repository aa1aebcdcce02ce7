"""Admission to the job of a coordinator that no worker has started: which id a process gets in which attempt.

Such a coordinator knows nothing of the job until the first process asks for its id. That JobRequest says what
the job is: its policies, the number of its workers, the attempt. From then on the rules are:

- Until all workers have joined, a process has the id that its launcher gave it, its RANK.
- While the job runs, a process gets a new id, whatever its RANK: it is a newcomer. So a worker that is
  started again after a crash comes back by itself.
- A job that failed, or whose workers are all gone before they finished, is over. As soon as none of its
  workers is left, the next process begins the job again, from its checkpoint.
- A process of a higher attempt begins the job again at once, and the workers of the attempt before end. A
  process of a lower attempt is refused.
- A server that is started apart from the workers waits until a job has begun. It is refused if that job has
  no parameter server.

The objects here are pure: no socket, no clock.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from offbeat.errors import ProtocolError
from offbeat.runtime.control.configuration import PARAMETER_SERVER_PATH, PolicySpec

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process sends to get its id in the job.

    Attributes:
        rank: the id that its launcher gave it; -1 for a newcomer without one.
        world: the number of workers with which the job starts.
        attempt: how often the launcher has started the whole job again.
        is_newcomer: it joins a running job only, and does not begin one.
        policies: the job's policies, in order.
        log_header: further plain data for the header of the run log.
        silent_s: a worker from which nothing was received for this many seconds is lost.
        start_s: how long after the first worker the last one may join, in seconds.
    """

    rank: Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
    world: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    attempt: _Count
    is_newcomer: bool
    policies: tuple[PolicySpec, ...]
    log_header: dict[str, Any]
    silent_s: float
    start_s: float


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server that no worker has started sends before it joins the job.

    Attributes:
        attempt: as in a JobRequest.
    """

    attempt: _Count


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to a JobRequest or a ServerRequest.

    Attributes:
        worker: the id of the process in the job; -1 for a server.
        world: the number of workers with which the job starts, or has started.
        is_newcomer: the job runs already.
        refusal: why the process cannot take part; "" if it can.
    """

    worker: int = -1
    world: int = 1
    is_newcomer: bool = False
    refusal: str = ""


# By the first byte: a request begins with the number of its fields, which no other control message has.
_request_decoders: Final[dict[int, msgspec.msgpack.Decoder[JobRequest | ServerRequest]]] = {
    0x80 | len(kind.__struct_fields__): msgspec.msgpack.Decoder(kind) for kind in (JobRequest, ServerRequest)
}
_answer_decoder: Final = msgspec.msgpack.Decoder(JobAnswer)


def encode_job_message(message: JobRequest | ServerRequest | JobAnswer) -> bytes:
    """Return the control message with this request or answer."""
    return msgspec.msgpack.encode(message)


def decode_job_request(data: bytes) -> JobRequest | ServerRequest | None:
    """Return the request in a control message; None if the message holds something else.

    Raises:
        ProtocolError: the message begins like a request and cannot be decoded as one.
    """
    decoder = _request_decoders.get(data[0]) if data else None
    if decoder is None:
        return None
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"expected a request for an id in the job: {error}") from None


def decode_job_answer(data: bytes) -> JobAnswer:
    """Return the JobAnswer in a control message.

    Raises:
        ProtocolError: the message holds something else.
    """
    try:
        return _answer_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"expected the answer to a request for an id in the job: {error}") from None


class Admission:
    """The attempt that runs, and the ids given to its newcomers.

    Attributes:
        request: the request that began the attempt; None before the first.
        is_over: the attempt has failed, or all its workers were lost; the next process begins the job again.
    """

    def __init__(self) -> None:
        self.request: JobRequest | None = None
        self.is_over = False
        self._next_id = 0

    def is_deferred(self, request: JobRequest, *, has_started: bool, has_workers: bool) -> bool:
        """Whether a request has to wait: for the end of a failed attempt's workers, or for a running job.

        Args:
            request: of a process.
            has_started: all workers with which the job starts have joined.
            has_workers: workers of the attempt have not ended yet.
        """
        running = self.request
        if running is None or request.attempt > running.attempt:
            return request.is_newcomer
        if request.attempt < running.attempt:
            return False
        if request.is_newcomer:
            return self.is_over or not has_started
        return self.is_over and has_workers

    def begins_job(self, request: JobRequest) -> bool:
        """Whether a request, which is not deferred, begins the job, for the first time or again."""
        running = self.request
        if running is None or request.attempt > running.attempt:
            return True
        return request.attempt == running.attempt and self.is_over

    def begin(self, request: JobRequest) -> None:
        """Begin the job that a request describes."""
        self.request, self.is_over, self._next_id = request, False, request.world

    def admit(self, request: JobRequest, *, has_started: bool) -> JobAnswer:
        """Return the answer to a request, which is not deferred, once the job has begun.

        Args:
            request: of the process.
            has_started: all workers with which the job starts have joined.
        """
        running = self.request
        assert running is not None
        if request.attempt < running.attempt:
            return _refusal_of_attempt(request.attempt, running.attempt)
        if not has_started:
            return JobAnswer(worker=request.rank, world=request.world)
        if request.is_newcomer and request.rank >= self._next_id:
            self._next_id = request.rank  # its launcher has drawn it
        worker, self._next_id = self._next_id, self._next_id + 1
        return JobAnswer(worker=worker, world=running.world, is_newcomer=True)

    def admit_server(self, request: ServerRequest) -> JobAnswer | None:
        """Return the answer to a server; None if it has to wait until the job has begun."""
        running = self.request
        if running is None or request.attempt > running.attempt:
            return None
        if request.attempt < running.attempt:
            return _refusal_of_attempt(request.attempt, running.attempt)
        if self.is_over:
            return None
        if all(policy.path != PARAMETER_SERVER_PATH for policy in running.policies):
            return JobAnswer(
                refusal="its strategy has no parameter server: start no server, or choose another strategy"
            )
        return JobAnswer(world=running.world)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        request = None if self.request is None else msgspec.to_builtins(self.request)
        return {"request": request, "is_over": self.is_over, "next_id": self._next_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        request = state["request"]
        self.request = None if request is None else msgspec.convert(request, JobRequest)
        self.is_over, self._next_id = state["is_over"], state["next_id"]


def _refusal_of_attempt(attempt: int, running: int) -> JobAnswer:
    return JobAnswer(
        refusal=f"attempt {running} of the job has begun, and this process is of attempt {attempt}"
    )
