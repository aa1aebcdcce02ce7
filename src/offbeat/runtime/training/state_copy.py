"""Copies training state (parameters, buffers, optimizers) between workers, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from offbeat.errors import OffbeatError
from offbeat.runtime.collectives.interface import Exchange
from offbeat.runtime.training.hyperparameters import apply_settings, plain_settings
from offbeat.runtime.training.trained import TrainingState

_PLAIN_TYPES = (bool, int, float, str, type(None))
_SEQUENCE_TYPES = (list, tuple)


class _TensorInfo(msgspec.Struct, frozen=True, tag=True):
    """Describes a tensor of the state, whose data is sent separately."""

    dtype: str
    shape: tuple[int, ...]
    on_cpu: bool


@dataclass(frozen=True, kw_only=True)
class TrainingPosition:
    """The position in the training that a state belongs to.

    Attributes:
        round: the number of finished rounds.
        epoch: the epoch under way.
        seed: the seed of the order of the data.
        samples: the number of samples in that epoch, 0 where it is not known.
        batch_size, drop_last: of that epoch, 0 and False where they are not known.
    """

    round: int
    epoch: int
    seed: int
    samples: int
    batch_size: int
    drop_last: bool


class _StateEntry(msgspec.Struct, frozen=True):
    """An entry of an optimizer's state: of a parameter, by name, or under another key."""

    optimizer: int
    parameter: str | None
    key: str | int | None
    entries: dict[str, Any]


class _StateDescription(msgspec.Struct, frozen=True, kw_only=True):
    position: TrainingPosition
    rows: list[_StateEntry]
    settings: list[dict[str, Any]]
    marks: list[_TensorInfo]


class StateCopier:
    """Sends one member's state to all others through an exchange.

    Args:
        exchange: over the members.
        trained: the model and optimizers that are copied.
        position: this worker's position; the state of the member at 0 is copied.
        timeout_s: the longest duration of one transfer, in seconds.
        exchange_id: the first id to use; the following 3 are used as well.
    """

    EXCHANGE_IDS = 4

    def __init__(
        self,
        exchange: Exchange,
        trained: TrainingState,
        *,
        position: int,
        timeout_s: float,
        exchange_id: int,
    ) -> None:
        self._exchange = exchange
        self._trained = trained
        self._device, self._model_device = exchange.device, trained.device
        self._is_root = position == 0
        self._timeout_s = timeout_s
        self._exchange_id = exchange_id

    @torch.no_grad()
    def copy(self, position: TrainingPosition) -> TrainingPosition:
        """Make parameters, buffers, optimizer state and hyperparameters equal to the root's.

        Args:
            position: the position of the root's state; ignored on other members.

        Returns:
            The root's `position`.

        Raises:
            WorkerError: a member was lost.
            OffbeatError: the optimizer's state has a value that is neither a tensor nor plain data.
        """
        model = self._trained.model
        self._copy_tensors([p.data for p in model.parameters()] + list(model.buffers()), self._exchange_id)
        return self._copy_optimizer_state(position)

    def _copy_tensors(self, tensors: list[torch.Tensor], exchange_id: int) -> None:
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                groups.setdefault(tensor.dtype, []).append(tensor)
        for index, group in enumerate(groups.values()):
            flat = torch.cat([tensor.reshape(-1).to(self._device) for tensor in group])
            self._broadcast(flat, exchange_id, index)
            if not self._is_root:
                pieces = flat.split([tensor.numel() for tensor in group])
                for tensor, piece in zip(group, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))

    def _copy_optimizer_state(self, position: TrainingPosition) -> TrainingPosition:
        tensors: list[torch.Tensor] = []
        plain = b""
        if self._is_root:
            described, tensors = _describe_state(self._trained, position)
            plain = msgspec.msgpack.encode(described)
        plain = self._broadcast_bytes(plain)
        if self._is_root:
            self._copy_tensors(tensors, self._exchange_id + 3)
            return position
        described = msgspec.msgpack.decode(plain, type=_StateDescription)
        tensors = [
            torch.empty(
                mark.shape,
                dtype=getattr(torch, mark.dtype),
                device="cpu" if mark.on_cpu else self._model_device,
            )
            for mark in described.marks
        ]
        self._copy_tensors(tensors, self._exchange_id + 3)
        self._restore(described, tensors)
        return described.position

    def _restore(self, described: _StateDescription, tensors: list[torch.Tensor]) -> None:
        """Restore the optimizers' state and hyperparameters from a description."""
        optimizers = self._trained.optimizers
        parameters = dict(self._trained.model.named_parameters())
        for optimizer in optimizers:
            optimizer.state.clear()
        for row in described.rows:
            key: Any = row.key if row.parameter is None else parameters[row.parameter]
            optimizers[row.optimizer].state[key] = {
                name: _decode(value, tensors) for name, value in row.entries.items()
            }
        for group, settings in zip(self._trained.groups, described.settings, strict=True):
            apply_settings(group, settings)

    def _broadcast_bytes(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], device=self._device)
        self._broadcast(length, self._exchange_id + 1, 0)
        content = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
        if self._is_root and data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._broadcast(content, self._exchange_id + 2, 0)
        return bytes(content.cpu().numpy())

    def _broadcast(self, flat: torch.Tensor, exchange_id: int, index: int) -> None:
        pending = self._exchange.broadcast(flat, root=0, exchange_id=exchange_id, index=index)
        pending.wait(self._timeout_s)


def _describe_state(
    trained: TrainingState, position: TrainingPosition
) -> tuple[_StateDescription, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    rows: list[_StateEntry] = []
    for number, optimizer in enumerate(trained.optimizers):
        for key, entries in optimizer.state.items():
            name = trained.name_of(key) if isinstance(key, torch.Tensor) else None
            if name is None and not isinstance(key, str | int):
                raise OffbeatError(f"the optimizer keeps state of {type(key).__name__}, not of a parameter")
            described = {what: _encode(what, value, tensors) for what, value in entries.items()}
            rows.append(_StateEntry(number, name, None if name is not None else key, described))
    marks = [
        _TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.device.type == "cpu")
        for t in tensors
    ]
    settings = [plain_settings(group) for group in trained.groups]
    return _StateDescription(position=position, rows=rows, settings=settings, marks=marks), tensors


def _encode(name: str, value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Encode a value for `_decode`; its tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, _PLAIN_TYPES):
        return {"plain": value}
    if type(value) in _SEQUENCE_TYPES:
        return {type(value).__name__: [_encode(name, one, tensors) for one in value]}
    if type(value) is dict and all(isinstance(key, _PLAIN_TYPES) for key in value):
        return {"dict": [(key, _encode(name, one, tensors)) for key, one in value.items()]}
    raise OffbeatError(
        f"the optimizer keeps {name!r} as {type(value).__name__}; only tensors, plain numbers, and lists, "
        "tuples and dicts of these can be copied to other workers"
    )


def _decode(described: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    ((kind, content),) = described.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "list":
            return [_decode(one, tensors) for one in content]
        case "tuple":
            return tuple(_decode(one, tensors) for one in content)
        case "dict":
            return {key: _decode(one, tensors) for key, one in content}
    return content


def check_can_copy(trained: TrainingState) -> None:
    """Check that the optimizers' state, complete from the first step on, can be copied to another worker.

    Raises:
        OffbeatError: the state has a value of an unsupported type, which the message names.
    """
    position = TrainingPosition(round=0, epoch=0, seed=0, samples=0, batch_size=0, drop_last=False)
    try:
        described, _ = _describe_state(trained, position)
        msgspec.msgpack.encode(described)
    except (OffbeatError, TypeError) as error:
        raise OffbeatError(
            f"{error}, as this strategy does when a worker joins or comes back: use another optimizer, or "
            "the strategy bsp"
        ) from error
