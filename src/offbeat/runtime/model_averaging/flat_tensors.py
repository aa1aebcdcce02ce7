"""A list of tensors as a few contiguous vectors, which an exchange can average. This module sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offbeat.runtime.collectives.interface import TensorMemory


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
    """

    def __init__(self, tensors: Callable[[], Sequence[torch.Tensor]], memory: TensorMemory) -> None:
        self._tensors, self._memory = tensors, memory
        elements: dict[torch.dtype, int] = {}
        for tensor in self._real_tensors():
            dtype = _exchanged_dtype(tensor)
            elements[dtype] = elements.get(dtype, 0) + tensor.numel()
        self._dtypes = list(elements)
        self.contributions = [memory.zeros(elements[dtype], dtype) for dtype in self._dtypes]
        self.outputs = [memory.zeros(elements[dtype], dtype) for dtype in self._dtypes]

    def _real_tensors(self) -> list[torch.Tensor]:
        detached = [tensor.detach() for tensor in self._tensors() if tensor.numel()]
        return [torch.view_as_real(one) if one.is_complex() else one for one in detached]

    @torch.no_grad()
    def pack(self, weight: float, *, is_first: bool) -> None:
        """Fill `contributions` with the tensors times `weight`; integers are taken as they are or left out.

        Memory that another worker may still read, because an exchange was abandoned, is replaced before.
        """
        for flats in (self.contributions, self.outputs):
            for index, flat in enumerate(flats):
                if self._memory.may_be_read(flat):
                    flats[index] = self._memory.zeros(flat.numel(), flat.dtype)
        packed = self._on_device(self.contributions)
        for tensor, part in self._parts(packed):
            if tensor.is_floating_point():
                part.copy_(tensor).mul_(weight)
            elif is_first:
                part.copy_(tensor)
            else:
                part.zero_()
        for flat, source in zip(self.contributions, packed, strict=True):
            if flat is not source:
                flat.copy_(source)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy `outputs` into the tensors."""
        sums = self._on_device(self.outputs)
        for flat, target in zip(self.outputs, sums, strict=True):
            if flat is not target:
                target.copy_(flat)
        for tensor, part in self._parts(sums):
            tensor.copy_(part)

    def _on_device(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return vectors where the tensors lie: these, or new ones on an accelerator."""
        device = self._memory.device
        if not device.has_streams:
            return flats
        return [torch.empty(flat.shape, dtype=flat.dtype, device=device.torch_device) for flat in flats]

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
