"""A list of tensors as a few contiguous vectors, which an exchange can average.

Theory of operation. The vectors are memory of the host, which the links send and receive into. Where the
tensors lie on an accelerator, they are packed there, in the current stream, and copied to the host by the
stream for copies out; the exchange begins when that copy has ended. The sums are copied back by the stream
for copies in, and the current stream waits for that before it unpacks them. What it packs next is copied out
after that, so the next exchange, which receives into the same memory, cannot begin before the copy back has
ended. The host waits for no copy.

Where the tensors change during an exchange, a *snapshot* of them is exchanged, kept until the end. The sums
less the snapshot are then added to the tensors as they are by then. One of several *fragments*, equal parts
of each vector, may be exchanged alone. This module decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch

from offbeat.runtime.collectives.contribution import ExternalElements
from offbeat.runtime.collectives.interface import Exchange, PendingExchange, TensorMemory
from offbeat.runtime.devices.interface import Accelerator, CallWhenReady
from offbeat.runtime.devices.memory import DeviceMemory


@dataclass(frozen=True)
class Fragment:
    """One of several equal parts of each vector.

    Attributes:
        number: from 0.
        count: of all parts, at least 1.
    """

    number: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this part of a vector, in place."""
        start, stop = self.limits(flat)
        return flat[start:stop]

    def outside(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what lies before this part of a vector and what lies behind it, in place."""
        start, stop = self.limits(flat)
        return flat[:start], flat[stop:]

    def limits(self, flat: torch.Tensor) -> tuple[int, int]:
        """Return where in a vector this part begins and ends."""
        length = len(flat)
        return length * self.number // self.count, length * (self.number + 1) // self.count


WHOLE: Final = Fragment(0, 1)


class FlatTensors:
    """Packs tensors into one vector for each dtype, and unpacks the results of an exchange.

    Numbers with a fraction are averaged in float32, or in float64 where they are float64; complex numbers as
    pairs. Of integers and booleans the first member's are taken: the others contribute zeros.

    Args:
        tensors: returns the tensors, each time of the same shapes and dtypes.
        memory: allocates the vectors, on the host.

    Attributes:
        contributions: what this worker contributes, by `pack`.
        outputs: for the sums, of the same shapes and dtypes.
        snapshots: of the same shapes and dtypes, by `take_snapshot`; empty before the first.
    """

    def __init__(self, tensors: Callable[[], Sequence[torch.Tensor]], memory: TensorMemory) -> None:
        self._tensors, self._memory = tensors, memory
        device = memory.device
        self._accelerator = cast(Accelerator, device) if device.has_streams else None
        self._copied_out: list[Any] = []  # by vector, the event of the last copy to the host
        elements: dict[torch.dtype, int] = {}
        for tensor in self._real_tensors():
            dtype = _exchanged_dtype(tensor)
            elements[dtype] = elements.get(dtype, 0) + tensor.numel()
        self._dtypes = list(elements)
        self.contributions = [memory.zeros(elements[dtype], dtype) for dtype in self._dtypes]
        self.outputs = [memory.zeros(elements[dtype], dtype) for dtype in self._dtypes]
        self.snapshots: list[torch.Tensor] = []

    def _real_tensors(self) -> list[torch.Tensor]:
        detached = [tensor.detach() for tensor in self._tensors() if tensor.numel()]
        return [torch.view_as_real(one) if one.is_complex() else one for one in detached]

    @torch.no_grad()
    def pack(self, weight: float, *, is_first: bool) -> None:
        """Fill `contributions` with the tensors times `weight`; integers are taken as they are or left out.

        Memory that another worker may still read, because an exchange was abandoned, is replaced before. On
        an accelerator the tensors are packed there, and this begins to copy them to the host.
        """
        self.replace_read_memory()
        self._copy_to_host(self.contributions, weight, is_first=is_first)

    @torch.no_grad()
    def take_snapshot(self) -> None:
        """Fill `snapshots` with the tensors, which are numbers with a fraction; see `pack`."""
        if not self.snapshots:
            self.snapshots = self.zeros()
        self._replace_read(self.snapshots)
        self.copy_into(self.snapshots)

    def copy_into(self, flats: Sequence[torch.Tensor]) -> None:
        """Fill vectors of the same shapes and dtypes with the tensors; see `take_snapshot`."""
        self._copy_to_host(flats, 1.0, is_first=True)

    def zeros(self) -> list[torch.Tensor]:
        """Return new vectors of the same shapes and dtypes."""
        return [self._memory.zeros(flat.numel(), flat.dtype) for flat in self.outputs]

    def shapes(self, fragment: Fragment) -> list[list[torch.Size]]:
        """Return, for each vector, the shapes of the parts of tensors that a fragment of it holds.

        Of a tensor of several dimensions that it does not hold whole, the part is one row.
        """
        shapes: list[list[torch.Size]] = []
        for number, flat in enumerate(self.outputs):
            first, last = fragment.limits(flat)
            start, of_vector = 0, []
            for tensor in self._real_tensors():
                if _exchanged_dtype(tensor) != self._dtypes[number]:
                    continue
                stop = start + tensor.numel()
                elements = min(stop, last) - max(start, first)
                if elements == tensor.numel():
                    of_vector.append(tensor.shape)
                elif elements > 0:
                    of_vector.append(torch.Size([1, elements] if tensor.dim() > 1 else [elements]))
                start = stop
            shapes.append(of_vector)
        return shapes

    def split(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the part of each tensor that has elements, in vectors of the same shapes and dtypes."""
        return [part for _, part in self._parts(flats)]

    def replace_read_memory(self) -> None:
        """Replace memory that another worker may still read, because an exchange was abandoned."""
        self._replace_read(self.contributions)
        self._replace_read(self.outputs)

    def _replace_read(self, flats: list[torch.Tensor]) -> None:
        for index, flat in enumerate(flats):
            if self._memory.may_be_read(flat):
                flats[index] = self._memory.zeros(flat.numel(), flat.dtype)

    def _copy_to_host(self, flats: Sequence[torch.Tensor], weight: float, *, is_first: bool) -> None:
        if self._accelerator is None:
            self._write(flats, weight, is_first=is_first)
            return
        packed = [self._allocate(self._accelerator, flat) for flat in flats]
        self._write([memory.flat for memory in packed], weight, is_first=is_first)
        self._copied_out = [memory.copy_out(flat) for memory, flat in zip(packed, flats, strict=True)]

    def _write(self, flats: Sequence[torch.Tensor], weight: float, *, is_first: bool) -> None:
        for tensor, part in self._parts(flats):
            if tensor.is_floating_point():
                part.copy_(tensor).mul_(weight)
            elif is_first:
                part.copy_(tensor)
            else:
                part.zero_()

    def all_reduce(self, exchange: Exchange, *, exchange_id: int, first_index: int) -> list[PendingExchange]:
        """Start to sum `contributions` into `outputs`, once the former have been copied there.

        Args:
            exchange, exchange_id: see `Exchange.all_reduce`.
            first_index: of the first vector; the others follow.
        """
        return [
            exchange.all_reduce(
                self.contributions[number],
                self.outputs[number],
                exchange_id=exchange_id,
                index=first_index + number,
                after=self._when_copied(number),
            )
            for number in range(len(self.outputs))
        ]

    def all_reduce_snapshot(
        self, exchange: Exchange, *, exchange_id: int, weight: float, fragment: Fragment = WHOLE
    ) -> list[PendingExchange]:
        """Start to sum the snapshots times the members' weights into `outputs`; thread-safe.

        Args:
            exchange, exchange_id: see `Exchange.all_reduce`.
            weight: this member's.
            fragment: of all vectors, what is summed.
        """
        self.replace_read_memory()
        return [
            exchange.all_reduce(
                fragment.of(self.contributions[number]),
                fragment.of(self.outputs[number]),
                exchange_id=exchange_id,
                index=number,
                external=[ExternalElements(0, fragment.of(snapshot), weight)],
                after=self._when_copied(number),
            )
            for number, snapshot in enumerate(self.snapshots)
        ]

    def _when_copied(self, number: int) -> CallWhenReady | None:
        if self._accelerator is None:
            return None
        return partial(self._accelerator.call_after, [self._copied_out[number]])

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy `outputs` into the tensors; on an accelerator the current stream does so later."""
        for tensor, part in self._parts(self._bring_back(self.outputs)):
            tensor.copy_(part)

    @torch.no_grad()
    def add_difference(
        self, before: Sequence[torch.Tensor], fragment: Fragment = WHOLE, share: float = 1.0
    ) -> None:
        """Add `outputs` less what was there before to the tensors; overwrites `outputs`, see `unpack`.

        Args:
            before: the snapshots, or other vectors of the same shapes and dtypes.
            fragment: of all vectors, what is added.
            share: of the difference, what is added.
        """
        for output, flat in zip(self.outputs, before, strict=True):
            difference = fragment.of(output).sub_(fragment.of(flat))
            if share != 1.0:
                difference.mul_(share)
            for other in fragment.outside(output):
                other.zero_()
        self.add_outputs()

    @torch.no_grad()
    def add_outputs(self) -> None:
        """Add `outputs` to the tensors; see `unpack`."""
        for tensor, part in self._parts(self._bring_back(self.outputs)):
            tensor.add_(part)

    @torch.no_grad()
    def replace(self, fragment: Fragment) -> None:
        """Copy a fragment of `outputs` into the tensors, which are otherwise as in `snapshots`."""
        for output, snapshot in zip(self.outputs, self.snapshots, strict=True):
            for other, kept in zip(fragment.outside(output), fragment.outside(snapshot), strict=True):
                other.copy_(kept)
        self.unpack()

    def _bring_back(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return vectors of the host where the tensors lie."""
        if self._accelerator is None:
            return flats
        received = [self._allocate(self._accelerator, flat) for flat in flats]
        for memory, flat in zip(received, flats, strict=True):
            memory.copy_in(flat)
            memory.use()
        return [memory.flat for memory in received]

    def _allocate(self, device: Accelerator, like: torch.Tensor) -> DeviceMemory:
        return DeviceMemory(device, torch.empty(like.shape, dtype=like.dtype, device=device.torch_device))

    def _parts(self, flats: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each tensor with its part of the vectors, in its shape."""
        flat_of = dict(zip(self._dtypes, flats, strict=True))
        offsets = dict.fromkeys(self._dtypes, 0)
        parts = []
        for tensor in self._real_tensors():
            dtype = _exchanged_dtype(tensor)
            start = offsets[dtype]
            offsets[dtype] = start + tensor.numel()
            parts.append((tensor, flat_of[dtype][start : offsets[dtype]].view(tensor.shape)))
        return parts


def _exchanged_dtype(tensor: torch.Tensor) -> torch.dtype:
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return torch.float32
    return tensor.dtype
