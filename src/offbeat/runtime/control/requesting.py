"""Asks a coordinator that no worker has started whether this process takes part in the job, and as what.

This module opens one connection, for one question, and closes it.
"""

from __future__ import annotations

import queue
import secrets
import time

from offbeat.errors import LinkError, OffbeatError, ProtocolError, describe_os_error
from offbeat.runtime.control.admission import (
    JobAnswer,
    JobRequest,
    ServerRequest,
    decode_job_answer,
    encode_job_message,
)
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.control.environment import (
    COORDINATOR_VARIABLE,
    JOB_VARIABLE,
    TOKEN_FILE_VARIABLE,
    load_tls,
)
from offbeat.runtime.transport.addresses import parse_address, read_host_and_port
from offbeat.runtime.transport.endpoint import Endpoint

_FILE_S = 0.1  # between looks at a file that will name the coordinator
_MARGIN_S = 1.0  # in which the endpoint reports that it has not reached the coordinator in time


def request_admission(
    address: str, request: JobRequest | ServerRequest, *, job: str, token: str, timeout_s: float
) -> JobAnswer:
    """Return the answer of the coordinator to a request to take part in its job.

    Args:
        address: of the coordinator, as `tcp://HOST:PORT`.
        request: of this process.
        job: the job's name.
        token: the job's secret.
        timeout_s: how long the coordinator may take to come and to answer, in seconds.

    Raises:
        OffbeatError: it was not reached or did not answer in time, or this process cannot take part.
    """
    answers: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
    endpoint = Endpoint(
        f"request-{secrets.token_hex(8)}",
        job=job,
        token=token,
        on_message=lambda peer, payload: answers.put(payload),
        on_lost=answers.put,
        on_left=lambda peer: answers.put(None),
        on_error=answers.put,
        listeners=[],
        connect_s=timeout_s,
        tls=load_tls(),
    )
    try:
        endpoint.add_peer(COORDINATOR, [address])
        endpoint.send(COORDINATOR, encode_job_message(request))
        try:
            item = answers.get(timeout=timeout_s + _MARGIN_S)
        except queue.Empty:
            raise OffbeatError(
                f"the coordinator at {address} did not answer within {timeout_s:.0f} s: a newcomer or a "
                "server waits for a running job, and a process of a failed job until the other workers have "
                "ended"
            ) from None
    finally:
        endpoint.close()
    if isinstance(item, LinkError):
        raise OffbeatError(
            f"the coordinator at {address} ({COORDINATOR_VARIABLE}) cannot be reached: {item}; does 'offbeat "
            f"coordinator' run there, with this process's {JOB_VARIABLE} and {TOKEN_FILE_VARIABLE}?"
        )
    if isinstance(item, BaseException):
        raise item
    if item is None:
        raise OffbeatError(f"the coordinator at {address} ended before it answered: see its output")
    try:
        answer = decode_job_answer(item)
    except ProtocolError as error:
        raise OffbeatError(f"the coordinator at {address} does not answer as one: {error}") from error
    if answer.refusal:
        raise OffbeatError(f"this process cannot take part in the job: {answer.refusal}")
    return answer


def find_host(address: str, limit_s: float) -> str:
    """Return the host of a coordinator; where a file names it, wait for that until `limit_s` (monotonic).

    Raises:
        OffbeatError: the file could not be read in time, or names no host.
    """
    place = parse_address(address)
    while place.path:
        try:
            return read_host_and_port(place.path)[0]
        except OSError as error:
            if time.monotonic() >= limit_s:
                raise OffbeatError(
                    f"{place.path} ({COORDINATOR_VARIABLE}) does not name the coordinator in time: "
                    f"{describe_os_error(error)}; does 'offbeat coordinator' run with --state, in a "
                    "folder that this host reaches?"
                ) from error
            time.sleep(_FILE_S)
    return place.host
