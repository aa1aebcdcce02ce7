"""Where gradients and buffers lie while they are exchanged, and afterwards; nothing is sent from here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.buckets import Bucket
from offbeat.runtime.collectives.interface import Pending


class BufferList:
    """The buffers of a model by the places where they are: layers may put new tensors there."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._absent: list[tuple[nn.Module, str]] = []
        seen: set[int] = set()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None and name not in module._non_persistent_buffers_set:
                    self._absent.append((module, name))
                if buffer is not None and buffer.numel() and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((module, name, torch.empty_like(buffer, device="meta")))

    def tensors(self) -> list[torch.Tensor]:
        """The buffers as they are now.

        Raises:
            OffbeatError: one has changed its form since join, or was none then; but for those that are not
                saved, which are caches.
        """
        for module, name in self._absent:
            if (buffer := module._buffers.get(name)) is not None:
                raise OffbeatError(
                    f"the buffer {name!r} was None at join and is {buffer.dtype} {list(buffer.shape)}: run "
                    "one batch through the model before join"
                )
        found = []
        for module, name, form in self._places:
            buffer = getattr(module, name, None)
            if buffer is None or buffer.shape != form.shape or buffer.dtype != form.dtype:
                now = "gone" if buffer is None else f"{buffer.dtype} {list(buffer.shape)}"
                raise OffbeatError(
                    f"the buffer {name!r} was {form.dtype} {list(form.shape)} at join and is {now}: "
                    "leave the session and join again"
                )
            found.append(buffer)
        return found


Zeros = Callable[[int, torch.dtype], torch.Tensor]
"""(elements, dtype) -> a new tensor of zeros, in memory that suits the exchange."""


class Bank:
    """A bucket's memory: first gradients, then buffers, then the epilogue."""

    def __init__(self, bucket: Bucket, shapes: Sequence[torch.Size], zeros: Zeros) -> None:
        self.flat = zeros(bucket.elements, bucket.dtype)
        self.views = [
            self.flat[offset : offset + shapes[entry].numel()].view(shapes[entry])
            for entry, offset in zip(bucket.entries, bucket.offsets, strict=True)
        ]
        self._own_references = self._references()

    def is_kept(self) -> bool:
        """Whether somebody outside still holds a view, or a view of one."""
        return self._references() != self._own_references

    def _references(self) -> list[int]:
        counts = [sys.getrefcount(view) for view in self.views]
        counts.append(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))
        return counts


class Slot:
    """A bucket: this worker's own part of a round, and two banks of memory for the sums, used in turn.

    The means of a round stay where they were summed and become the gradients, so that nothing is copied
    out. The next round sums in the other bank, so that those gradients stay untouched until it is over; a
    bank of which somebody still keeps a gradient is left to him and replaced.
    """

    def __init__(self, bucket: Bucket, shapes: Sequence[torch.Size], parameters: int, zeros: Zeros) -> None:
        self.entries, self.offsets = bucket.entries, bucket.offsets
        self.parameters = sum(entry < parameters for entry in bucket.entries)
        self.gradient_elements = sum(shapes[entry].numel() for entry in bucket.entries[: self.parameters])
        self.missing = self.parameters
        self.pending: Pending | None = None
        self._plan = bucket, shapes, zeros
        self.own, self.bank, self._other = (Bank(*self._plan) for _ in range(3))

    def leave_to_readers(self, is_read: Callable[[torch.Tensor], bool]) -> None:
        """Replaces what another worker may still read (`TensorMemory.is_read`), so that it is not written.

        Due before anything is written after an exchange was abandoned. This worker's own part keeps its
        values.
        """
        if is_read(self.own.flat):
            before, self.own = self.own, Bank(*self._plan)
            self.own.flat.copy_(before.flat)
        if is_read(self.bank.flat):
            self.bank = Bank(*self._plan)
        if is_read(self._other.flat):
            self._other = Bank(*self._plan)

    def hand_out(self) -> None:
        """Leaves the bank to the gradients that lie in it now and turns to the other."""
        self.bank, self._other = self._other, self.bank
        if self.bank.is_kept():
            self.bank = Bank(*self._plan)
