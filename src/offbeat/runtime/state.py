"""Copies training state from one worker to the others, bit for bit: parameters, buffers, optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.errors import OffbeatError
from offbeat.runtime.exchange import Exchange


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
        batch_size: likewise.
    """

    round: int
    epoch: int
    seed: int
    samples: int
    batch_size: int


class _Described(msgspec.Struct, frozen=True, kw_only=True):
    place: Place
    state: list[tuple[int, dict[str, Any]]]
    hyperparameters: list[dict[str, Any]]
    marks: list[_Mark]


class StateCopier:
    """Sends one member's state to all others through an exchange.

    Args:
        exchange: over the members.
        device: where tensors have to lie to travel: the model's device.
        position: this worker's position; everybody takes the state of the member at 0.
        deadline_s: how long one transfer may take at most.
        exchange_id: the id to use; the following 3 are used as well.
    """

    IDS = 4

    def __init__(
        self,
        exchange: Exchange,
        *,
        device: torch.device,
        position: int,
        deadline_s: float,
        exchange_id: int,
    ) -> None:
        self._exchange = exchange
        self._device = device
        self._is_root = position == 0
        self._deadline_s = deadline_s
        self._exchange_id = exchange_id

    @torch.no_grad()
    def copy(self, model: nn.Module, optimizer: Optimizer, place: Place) -> Place:
        """Makes parameters, buffers, optimizer state and hyperparameters equal to the root's.

        Args:
            place: at the root, where its state belongs.

        Returns:
            The root's `place`.

        Raises:
            WorkerError: a member was lost.
            OffbeatError: the optimizer keeps something that is neither a tensor nor plain data.
        """
        self._tensors([p.data for p in model.parameters()] + list(model.buffers()), self._exchange_id)
        return self._optimizer_state(optimizer, place)

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

    def _optimizer_state(self, optimizer: Optimizer, place: Place) -> Place:
        tensors: list[torch.Tensor] = []
        plain = b""
        if self._is_root:
            described, tensors = _describe(optimizer.state_dict(), place)
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
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.state.clear()
        for number, row in _restore(described, tensors).items():
            optimizer.state[parameters[number]] = row
        for group, values in zip(optimizer.param_groups, described.hyperparameters, strict=True):
            group.update(
                {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            )
        return described.place

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


def _describe(whole: dict[str, Any], place: Place) -> tuple[_Described, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, entries in whole["state"].items():
        row: dict[str, Any] = {}
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                row[name] = {"tensor": len(tensors)}
                tensors.append(value)
            elif isinstance(value, (bool, int, float, str, type(None))):
                row[name] = {"plain": value}
            else:
                raise OffbeatError(
                    f"the optimizer keeps {name!r} as {type(value).__name__}; only tensors and plain numbers "
                    "can be copied to other workers"
                )
        rows.append((number, row))
    marks = [
        _Mark(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.device.type == "cpu") for t in tensors
    ]
    hyperparameters = [
        {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
        for group in whole["param_groups"]
    ]
    described = _Described(
        place=place,
        state=rows,
        hyperparameters=hyperparameters,
        marks=marks,
    )
    return described, tensors


def _restore(described: _Described, tensors: list[torch.Tensor]) -> dict[int, dict[str, Any]]:
    return {
        number: {
            name: tensors[value["tensor"]] if "tensor" in value else value["plain"]
            for name, value in row.items()
        }
        for number, row in described.state
    }
