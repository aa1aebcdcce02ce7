"""Small values that all workers of a job give to each other, by way of the coordinator.

Values are numbers, texts, tensors, and lists, tuples, sets and dicts of such: what torch loads without
running code. Nothing here is for gradients or models, which travel directly between workers.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from offbeat.errors import OffbeatError, WorkerError
from offbeat.events import ValueGiven
from offbeat.policies.membership.value_gathering import VALUE_CHARACTERS_MAX
from offbeat.runtime.training.job_connection import JobConnection

Reduction: TypeAlias = Literal["mean", "sum", "min", "max"]
Number: TypeAlias = float | Tensor
REDUCTIONS: Final[tuple[Reduction, ...]] = ("mean", "sum", "min", "max")
_BYTES_MAX: Final = VALUE_CHARACTERS_MAX * 4 // 5  # of which base 85 makes as many characters
_MARGIN_S: Final = 10.0  # the coordinator, which names the workers that are missing, is to be first


class ValueExchange:
    """Exchanges values with all workers that are in the job.

    Args:
        job: this worker's job.
        timeout_s: how long to wait for the other workers, in seconds.
    """

    def __init__(self, job: JobConnection, timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s

    def wait_for_all(self, call: str) -> None:
        """Wait until all workers have called this.

        Args:
            call: what the program called, for messages.

        Raises:
            WorkerError: the job failed, or a worker called something else, or did not call it in time.
        """
        self._exchange(call, "")

    def gather(self, call: str, value: Any, *, only_first: bool = False) -> dict[int, Any]:
        """Return the values of all workers, by worker; with `only_first` that of the smallest id alone.

        Raises:
            OffbeatError: the value is too large, or holds something else than values do.
            WorkerError: as in `wait_for_all`.
        """
        texts = self._exchange(call, encode_value(call, value), only_first=only_first)
        return {worker: decode_value(text) for worker, text in sorted(texts.items())}

    def reduce(self, value: Number | Mapping[str, Number], op: Reduction) -> Number | dict[str, Number]:
        """Return the mean, sum, minimum or maximum of all workers' values, name by name.

        Args:
            value: a number, a tensor, or a dict of such.
            op: what to compute, in the order of the workers.

        Raises:
            OffbeatError: not numbers, too large, or of other names or shapes on another worker.
            WorkerError: as in `wait_for_all`.
        """
        named = value if isinstance(value, Mapping) else {"the value": value}
        own = {name: _as_number(name, one) for name, one in named.items()}
        gathered = self.gather(f"session.reduce(op={op!r})", own)
        _check_alike(gathered)
        result: dict[str, Number] = {}
        for name, one in named.items():
            values = [other[name] for other in gathered.values()]
            if isinstance(one, Tensor):
                result[name] = reduce_tensors(values, op).to(one.device)
            else:
                result[name] = _reduce_numbers(values, op)
        return result if isinstance(value, Mapping) else result["the value"]

    def _exchange(self, call: str, text: str, *, only_first: bool = False) -> dict[int, str]:
        client, worker = self._job.coordinator, self._job.worker
        if client is None:
            return {worker: text}
        delivered = client.delivered
        with client.lock:
            number = delivered.begin()
        self._job.send_event(
            ValueGiven(
                now_s=0.0, worker=worker, number=number, call=call, delivers_first=only_first, value=text
            )
        )
        client.wait_for(
            lambda: delivered.end is not None,
            self._timeout_s + _MARGIN_S,
            f"all workers to call {call}",
        )
        with client.lock:
            end, values = delivered.end, delivered.values
        assert end is not None
        if end.error:
            raise WorkerError(end.error)
        return values


def encode_value(call: str, value: Any) -> str:
    """Return a value as a text.

    Args:
        call: what the program called, for messages.
        value: numbers, texts, tensors, or lists, tuples, sets and dicts of them.

    Raises:
        OffbeatError: it is too large, or holds something else.
    """
    file = io.BytesIO()
    try:
        torch.save(_without_storage(value), file)
        data = file.getvalue()
        if len(data) <= _BYTES_MAX:
            _load(data)
    except Exception as error:  # whatever a class raises that does not let itself be saved
        raise OffbeatError(
            f"{call} needs numbers, texts, tensors, or lists, tuples, sets and dicts of them, got a "
            f"{type(value).__name__} that is, or holds, something else"
        ) from error
    if len(data) > _BYTES_MAX:
        raise OffbeatError(
            f"{call} is for small values, of at most {_BYTES_MAX:,} bytes when saved, got {len(data):,}: "
            "write it to a file that all hosts see, and give its path"
        )
    return base64.b85encode(data).decode()


def _without_storage(value: Any) -> Any:
    """Return a copy in which tensors hold their own elements only, on the CPU and without a gradient."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if type(value) is dict:
        return {name: _without_storage(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_storage, value))
    return value


def decode_value(text: str) -> Any:
    """Return the value of an `encode_value`; tensors are on the CPU."""
    return _load(base64.b85decode(text))


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _as_number(name: str, value: Any) -> Number:
    """Return a number, or a tensor, that can be sent and reduced.

    Raises:
        OffbeatError: it is neither.
    """
    if isinstance(value, Tensor) and not value.is_complex():
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise OffbeatError(
        "session.reduce needs real numbers, tensors of them, or a dict of such, got a "
        f"{type(value).__name__} for {name}"
    )


def _check_alike(gathered: Mapping[int, Mapping[str, Number]]) -> None:
    """Refuse values of different names or shapes.

    Raises:
        OffbeatError: names two workers whose values differ.
    """
    kinds = {
        worker: ", ".join(f"{name}: {_kind(one)}" for name, one in sorted(named.items()))
        for worker, named in gathered.items()
    }
    (first, expected), *others = kinds.items()
    for worker, kind in others:
        if kind != expected:
            raise OffbeatError(
                "session.reduce needs values of the same names and shapes on all workers, got "
                f"({expected}) from worker {first} and ({kind}) from worker {worker}"
            )


def _kind(value: Number) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "a number"


def _reduce_numbers(values: Sequence[float], op: Reduction) -> float:
    if op == "mean":
        return math.fsum(values) / len(values)
    if op == "sum":
        return sum(values)
    return min(values) if op == "min" else max(values)


def reduce_tensors(values: Sequence[Tensor], op: Reduction) -> Tensor:
    """Return the mean, sum, minimum or maximum of tensors of one shape; see `Session.reduce`."""
    stacked = torch.stack(list(values))
    if op == "min":
        return stacked.amin(0)
    if op == "max":
        return stacked.amax(0)
    if not stacked.is_floating_point():
        return stacked.sum(0) if op == "sum" else stacked.mean(0, dtype=torch.get_default_dtype())
    exact = stacked.double()
    return (exact.sum(0) if op == "sum" else exact.mean(0)).to(stacked.dtype)
