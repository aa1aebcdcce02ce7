"""Small values that all workers of a job give to each other, by way of the coordinator.

Values are numbers, texts, tensors, and lists, tuples, sets and dicts of such: what torch loads without
running code. Nothing here is for gradients or models, which travel directly between workers.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from offbeat.errors import OffbeatError, WorkerError
from offbeat.events import ValueGiven
from offbeat.policies.membership.value_gathering import VALUE_CHARACTERS_MAX
from offbeat.runtime.control.client import DeliveredValues
from offbeat.runtime.training.job_connection import JobConnection

Reduction: TypeAlias = Literal["mean", "sum", "min", "max"]
Number: TypeAlias = float | Tensor
REDUCTIONS: Final = ("mean", "sum", "min", "max")
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
            OffbeatError: the value is too large, or holds something else.
            WorkerError: as in `wait_for_all`.
        """
        if self._job.coordinator is None:
            return {self._job.worker: value}
        texts = self._exchange(call, _encode(call, value), only_first=only_first)
        return {worker: _decode(text) for worker, text in sorted(texts.items())}

    def reduce(self, value: Number | Mapping[str, Number], op: Reduction) -> Number | dict[str, Number]:
        """Return the mean, sum, minimum or maximum of all workers' values, name by name.

        Args:
            value: a number, a tensor, or a dict of such.
            op: what to compute, in the order of the workers.

        Raises:
            OffbeatError: not numbers, too large, or of other names or shapes on another worker.
            WorkerError: as in `wait_for_all`.
        """
        named = value if isinstance(value, Mapping) else {"": value}
        own = {name: _on_cpu(one) for name, one in named.items()}
        gathered = self.gather(f"session.reduce(op={op!r})", own)
        _check_alike(gathered)
        result: dict[str, Number] = {}
        for name, one in named.items():
            reduced = _reduced([other[name] for other in gathered.values()], op)
            result[name] = reduced.to(one.device) if isinstance(one, Tensor) else reduced.item()
        return result if isinstance(value, Mapping) else result[""]

    def _exchange(self, call: str, text: str, *, only_first: bool = False) -> dict[int, str]:
        client = self._job.coordinator
        if client is None:
            return {}
        with client.lock:
            client.gathering = gathering = DeliveredValues()
        self._job.send_event(
            ValueGiven(now_s=0.0, worker=self._job.worker, call=call, delivers_first=only_first, value=text)
        )
        client.wait_for(
            lambda: gathering.end is not None,
            self._timeout_s + _MARGIN_S,
            f"all workers to call {call}",
        )
        assert gathering.end is not None
        if gathering.end.error:
            raise WorkerError(gathering.end.error)
        return gathering.values


def _encode(call: str, value: Any) -> str:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        text = base64.b85encode(file.getvalue()).decode()
        _decode(text)
    except Exception as error:  # whatever a class raises that does not let itself be saved
        raise OffbeatError(
            f"{call} needs numbers, texts, tensors, or lists, tuples, sets and dicts of them, got a "
            f"{type(value).__name__} that is, or holds, something else"
        ) from error
    if len(text) > VALUE_CHARACTERS_MAX:
        raise OffbeatError(
            f"{call} is for small values, of at most {VALUE_CHARACTERS_MAX * 4 // 5:,} bytes when saved, "
            f"got {len(text) * 4 // 5:,}: write it to a file that all hosts see, and give its path"
        )
    return text


def _decode(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b85decode(text)), map_location="cpu", weights_only=True)


def _on_cpu(value: Any) -> Number:
    """Return a number that can be sent.

    Raises:
        OffbeatError: it is neither a number nor a tensor.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, int | float):
        return value
    raise OffbeatError(
        f"session.reduce needs numbers, tensors, or a dict of them, got a {type(value).__name__}"
    )


def _check_alike(gathered: Mapping[int, Mapping[str, Number]]) -> None:
    """Refuse values of different names or shapes.

    Raises:
        OffbeatError: names two workers whose values differ.
    """
    kinds = {worker: {name: _kind(one) for name, one in named.items()} for worker, named in gathered.items()}
    (first, expected), *others = kinds.items()
    for worker, kind in others:
        if kind != expected:
            raise OffbeatError(
                f"session.reduce needs values of the same names and shapes on all workers, got {expected} "
                f"from worker {first} and {kind} from worker {worker}"
            )


def _kind(value: Number) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else "number"


def _reduced(values: Sequence[Number], op: Reduction) -> Tensor:
    is_number = not isinstance(values[0], Tensor)
    exact = torch.float64 if is_number and any(isinstance(value, float) for value in values) else None
    stacked = torch.stack([torch.as_tensor(value, dtype=exact) for value in values])
    if op == "mean":
        floating = torch.float64 if is_number else torch.get_default_dtype()
        return stacked.mean(0, dtype=torch.promote_types(stacked.dtype, floating))
    if op == "sum":
        return stacked.sum(0)
    return stacked.amin(0) if op == "min" else stacked.amax(0)
