"""Small values that workers give to each other before they join their job, as `Session.gather_objects` later.

They travel by the job's store, as no coordinator is running yet. A newcomer to a running job has nobody to
exchange them with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from offbeat.errors import OffbeatError, WorkerError
from offbeat.runtime.control.environment import COORDINATOR_VARIABLE, read_environment
from offbeat.runtime.control.meeting import meet
from offbeat.runtime.training.value_exchange import decode_value, encode_value

_TIMEOUT_S = 300.0  # one worker may prepare the data for all


def barrier(timeout_s: float = _TIMEOUT_S) -> None:
    """Wait until all workers of a job that starts have called this, before they call `join`.

    This and the two functions below are for programs that need to agree on something before there is a model;
    with a session, use its methods. Call them on all workers, in the same order, and before `join` on each.
    A newcomer to a running job, or a job of one worker, is alone, as worker 0: it does not wait, and gets its
    own value only.

    Args:
        timeout_s: how long to wait for the other workers, in seconds.

    Raises:
        OffbeatError: the job's store cannot be reached, or there is none: OFFBEAT_COORDINATOR is set.
        WorkerError: a worker did not call this in time, or called something else; names it.
    """
    _exchange("offbeat.barrier()", "", timeout_s)


def gather_objects(value: Any, timeout_s: float = _TIMEOUT_S) -> dict[int, Any]:
    """Return the values of all workers, by worker, on each of them; see `barrier`.

    Args:
        value: of this worker: numbers, texts, tensors, or lists, tuples, sets and dicts of them; at most
            100 KB when saved by torch. Tensors arrive on the CPU.
        timeout_s: see `barrier`.

    Raises:
        OffbeatError: the value is too large, or holds something else; or as `barrier`.
        WorkerError: as `barrier`.
    """
    call = "offbeat.gather_objects()"
    texts = _exchange(call, encode_value(call, value), timeout_s)
    return {worker: decode_value(text) for worker, text in texts.items()}


def broadcast_object(value: Any, timeout_s: float = _TIMEOUT_S) -> Any:
    """Return the value of the worker with the smallest id, on all workers; see `gather_objects`."""
    call = "offbeat.broadcast_object()"
    texts = _exchange(call, encode_value(call, value), timeout_s)
    return decode_value(texts[min(texts)])


def _exchange(call: str, text: str, timeout_s: float) -> dict[int, str]:
    environment = replace(read_environment(), start_s=timeout_s)
    if environment.is_newcomer or environment.world == 1:
        return {0: text}
    if environment.coordinator is not None:
        raise OffbeatError(
            f"{call} exchanges values by the job's store, and there is none where {COORDINATOR_VARIABLE} is "
            "set: call it on the session, after offbeat.join"
        )
    try:
        with meet(environment) as meeting:
            given = meeting.gather("values", json.dumps([call, text]), timeout_s)
    except WorkerError as error:
        raise WorkerError(f"{call}: {error}") from error
    calls = [json.loads(one) for one in given]
    for worker, (other, _) in enumerate(calls):
        if other != call:
            raise WorkerError(f"worker {environment.rank} called {call} while worker {worker} called {other}")
    return {worker: other for worker, (_, other) in enumerate(calls)}
