"""Copies training state from one worker to the others, bit for bit: parameters, buffers, optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from offbeat.errors import OffbeatError
from offbeat.runtime.collectives.interface import Exchange
from offbeat.runtime.training.hyperparameters import plain_settings, take_settings
from offbeat.runtime.training.trained import Trained

_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES = (list, tuple)


class _Mark(msgspec.Struct, frozen=True, tag=True):
    """Stands for a tensor in the plain part of a state."""

    dtype: str
    shape: tuple[int, ...]
    on_cpu: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the training a state belongs.

    Attributes:
        round: how many rounds are finished.
        epoch: the epoch under way.
        seed: of the order of the data.
        samples: in that epoch, 0 where that is not known.
        batch_size, drop_last: likewise.
    """

    round: int
    epoch: int
    seed: int
    samples: int
    batch_size: int
    drop_last: bool


class _Row(msgspec.Struct, frozen=True):
    """What an optimizer keeps: of a parameter by name, or under a key of its own."""

    optimizer: int
    parameter: str | None
    key: str | int | None
    entries: dict[str, Any]


class _Described(msgspec.Struct, frozen=True, kw_only=True):
    place: Place
    rows: list[_Row]
    settings: list[dict[str, Any]]
    marks: list[_Mark]


class StateCopier:
    """Sends one member's state to all others through an exchange.

    Args:
        exchange: over the members.
        trained: what is copied, and where it goes.
        position: this worker's position; everybody takes the state of the member at 0.
        deadline_s: how long one transfer may take at most.
        exchange_id: the id to use; the following 3 are used as well.
    """

    IDS = 4

    def __init__(
        self,
        exchange: Exchange,
        trained: Trained,
        *,
        position: int,
        deadline_s: float,
        exchange_id: int,
    ) -> None:
        self._exchange = exchange
        self._trained = trained
        self._device = trained.device
        self._is_root = position == 0
        self._deadline_s = deadline_s
        self._exchange_id = exchange_id

    @torch.no_grad()
    def copy(self, place: Place) -> Place:
        """Makes parameters, buffers, optimizer state and hyperparameters equal to the root's.

        Args:
            place: at the root, where its state belongs.

        Returns:
            The root's `place`.

        Raises:
            WorkerError: a member was lost.
            OffbeatError: the optimizer keeps something that is neither a tensor nor plain data.
        """
        model = self._trained.model
        self._tensors([p.data for p in model.parameters()] + list(model.buffers()), self._exchange_id)
        return self._optimizer_state(place)

    def _tensors(self, tensors: list[torch.Tensor], exchange_id: int) -> None:
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                groups.setdefault(tensor.dtype, []).append(tensor)
        for index, group in enumerate(groups.values()):
            flat = torch.cat([tensor.reshape(-1).to(self._device) for tensor in group])
            self._send(flat, exchange_id, index)
            if not self._is_root:
                pieces = flat.split([tensor.numel() for tensor in group])
                for tensor, piece in zip(group, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))

    def _optimizer_state(self, place: Place) -> Place:
        tensors: list[torch.Tensor] = []
        plain = b""
        if self._is_root:
            described, tensors = _describe(self._trained, place)
            plain = msgspec.msgpack.encode(described)
        plain = self._plain(plain)
        if self._is_root:
            self._tensors(tensors, self._exchange_id + 3)
            return place
        described = msgspec.msgpack.decode(plain, type=_Described)
        tensors = [
            torch.empty(
                mark.shape,
                dtype=getattr(torch, mark.dtype),
                device="cpu" if mark.on_cpu else self._device,
            )
            for mark in described.marks
        ]
        self._tensors(tensors, self._exchange_id + 3)
        self._take(described, tensors)
        return described.place

    def _take(self, described: _Described, tensors: list[torch.Tensor]) -> None:
        """Makes the optimizers' state and hyperparameters what was described."""
        optimizers = self._trained.optimizers
        named = dict(self._trained.model.named_parameters())
        for optimizer in optimizers:
            optimizer.state.clear()
        for row in described.rows:
            key: Any = row.key if row.parameter is None else named[row.parameter]
            optimizers[row.optimizer].state[key] = {
                name: _entry(value, tensors) for name, value in row.entries.items()
            }
        for group, settings in zip(self._trained.groups, described.settings, strict=True):
            take_settings(group, settings)

    def _plain(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], device=self._device)
        self._send(length, self._exchange_id + 1, 0)
        content = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
        if self._is_root and data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._send(content, self._exchange_id + 2, 0)
        return bytes(content.cpu().numpy())

    def _send(self, flat: torch.Tensor, exchange_id: int, index: int) -> None:
        pending = self._exchange.broadcast(flat, root=0, exchange_id=exchange_id, index=index)
        pending.wait(self._deadline_s)


def _describe(trained: Trained, place: Place) -> tuple[_Described, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    rows: list[_Row] = []
    for number, optimizer in enumerate(trained.optimizers):
        for key, entries in optimizer.state.items():
            name = trained.name_of(key) if isinstance(key, torch.Tensor) else None
            if name is None and not isinstance(key, str | int):
                raise OffbeatError(f"the optimizer keeps state of {type(key).__name__}, not of a parameter")
            described = {what: _described_entry(what, value, tensors) for what, value in entries.items()}
            rows.append(_Row(number, name, None if name is not None else key, described))
    marks = [
        _Mark(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.device.type == "cpu") for t in tensors
    ]
    settings = [plain_settings(group) for group in trained.groups]
    return _Described(place=place, rows=rows, settings=settings, marks=marks), tensors


def _described_entry(name: str, value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Returns what `_entry` makes the value of again; its tensors are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    if type(value) in _SEQUENCES:
        return {type(value).__name__: [_described_entry(name, one, tensors) for one in value]}
    if type(value) is dict and all(isinstance(key, _PLAIN) for key in value):
        return {"dict": [(key, _described_entry(name, one, tensors)) for key, one in value.items()]}
    raise OffbeatError(
        f"the optimizer keeps {name!r} as {type(value).__name__}; only tensors, plain numbers, and lists, "
        "tuples and dicts of these can be copied to other workers"
    )


def _entry(described: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    ((kind, content),) = described.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "list":
            return [_entry(one, tensors) for one in content]
        case "tuple":
            return tuple(_entry(one, tensors) for one in content)
        case "dict":
            return {key: _entry(one, tensors) for key, one in content}
    return content


def check_can_travel(trained: Trained) -> None:
    """Refuses an optimizer whose state, as it is now, cannot be copied to another worker.

    Raises:
        OffbeatError: names what it keeps that is none of what `_described_entry` knows.
    """
    place = Place(round=0, epoch=0, seed=0, samples=0, batch_size=0, drop_last=False)
    try:
        described, _ = _describe(trained, place)
        msgspec.msgpack.encode(described)
    except (OffbeatError, TypeError) as error:
        raise OffbeatError(
            f"{error}, as this strategy does when a worker joins or comes back: use another optimizer, or "
            "the strategy bsp"
        ) from error
