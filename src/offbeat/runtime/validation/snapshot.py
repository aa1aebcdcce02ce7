"""A model as it was at one moment, in memory that is used again and again.

The values of parameters and buffers lie in one block of memory; all else of the model (its modules, their
attributes) is copied anew each time, so that what changes from epoch to epoch, a dropout rate or a module
that was added, is as it was. Nothing here waits, or knows of validation.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from offbeat.errors import OffbeatError, explain
from offbeat.runtime.transport.shared_memory import HAS_SHARED, allocated, mapped

Blocks: TypeAlias = Mapping[torch.device, Tensor]
_ALIGNMENT_BYTES: Final = 64
_DICTS: Final = (dict, OrderedDict)
_WRAPPERS: Final = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_rooms = itertools.count()
_read = threading.local()  # the tensors of the snapshot that a process of its own is about to read


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model itself, without torch.compile, DistributedDataParallel and DataParallel around it.

    A compiled model is evaluated as it was written: compiling belongs to the thread that trains; and a copy
    of DistributedDataParallel would talk to the other workers.

    Raises:
        OffbeatError: the parameters are no whole tensors: lazy and not yet made, or parts of sharded ones.
    """
    while True:
        if isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        elif isinstance(model, _WRAPPERS):
            model = model.module
        else:
            break
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise OffbeatError(f"{name} has no shape yet: run one batch through the model first")
        if hasattr(tensor, "to_local"):
            raise OffbeatError(
                f"expected whole parameters, got {name}, of which this worker has a part only: sharded "
                "models cannot be validated beside their training"
            )
    return model


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor lies in the block of its device, and as what."""

    start_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_parameter: bool

    def view(self, blocks: Blocks) -> Tensor:
        """Return the tensor in its block."""
        size_bytes = self.shape.numel() * self.dtype.itemsize
        flat = blocks[self.device][self.start_bytes : self.start_bytes + size_bytes].view(self.dtype)
        tensor = flat.as_strided(self.shape, self.stride)
        return nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor


def _lay_out(values: Sequence[Tensor]) -> tuple[list[Place], dict[torch.device, int]]:
    """Say where tensors like these lie, one after the other, and how many bytes a device that takes."""
    ends: dict[torch.device, int] = {}
    places: list[Place] = []
    for tensor in values:
        start = -(-ends.get(tensor.device, 0) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        ends[tensor.device] = start + tensor.numel() * tensor.element_size()
        # As dense as can be: the same order of the dimensions, without gaps and shared places.
        stride = torch.empty_like(tensor, device="meta").stride()
        places.append(
            Place(
                start_bytes=start,
                shape=tensor.shape,
                stride=stride,
                dtype=tensor.dtype,
                device=tensor.device,
                is_parameter=isinstance(tensor, nn.Parameter),
            )
        )
    return places, ends


def _values(model: nn.Module) -> list[Tensor]:
    """Return parameters and buffers, each once, whose values are kept in blocks: all that are dense."""
    return [tensor for tensor in [*model.parameters(), *model.buffers()] if _is_dense(tensor)]


def _is_dense(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _kinds(values: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(value.shape, value.stride(), value.dtype, value.device) for value in values]


class Snapshot:
    """Room for a model's values at one moment, and the rest of the model as it was then.

    Attributes:
        blocks: of memory, by device, in which the values lie.
        lent: what arrives in other processes of this program as these blocks; empty unless shared.
        places: of the values in them.
        room: a number that these blocks alone have, for processes that have seen them before.
        structure: the model without these values, for `read_model` in another process; empty unless shared.
        ready: by GPU, when the values are there; whoever reads them on another stream waits for it.
        shared: other processes of this program can read it.
    """

    def __init__(self, *, shared: bool) -> None:
        self.blocks: dict[torch.device, Tensor] = {}
        self.lent: dict[torch.device, Lent | Tensor] = {}
        self.places: list[Place] = []
        self.room = -1
        self.structure = b""
        self.ready: list[torch.cuda.Event] = []
        self.shared = shared
        self._kinds: list[tuple[object, ...]] | None = None
        self._tensors: list[Tensor] = []
        self._model: nn.Module | None = None

    @torch.no_grad()
    def take(self, model: nn.Module) -> None:
        """Copy `model`, which is `unwrapped`, as it is now; what was here before is overwritten.

        Raises:
            OffbeatError: something that hangs on the model cannot be copied.
        """
        values = _values(model)
        if (kinds := _kinds(values)) != self._kinds:
            self._make_room(values)
            self._kinds = kinds
        if values:
            torch._foreach_copy_(self._tensors, values)
        self.ready = []
        for device in self.blocks:
            if device.type == "cuda":
                self.ready.append(torch.cuda.current_stream(device).record_event())
        try:
            self._model = _copied(model, values, self._tensors)
            if self.shared:
                self.structure = _written(self._model, self._tensors)
        except Exception as error:
            raise OffbeatError(
                f"the model cannot be copied ({type(error).__name__}: {error}): something that hangs on it, "
                "an attribute or a hook, does not allow it"
            ) from error

    def _make_room(self, values: Sequence[Tensor]) -> None:
        self.places, sizes = _lay_out(values)
        self.room, self.lent = next(_rooms), {}
        self.blocks = {
            device: self._block(device, -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
            for device, size_bytes in sizes.items()
        }
        self._tensors = [place.view(self.blocks) for place in self.places]

    def _block(self, device: torch.device, size_bytes: int) -> Tensor:
        if self.shared and HAS_SHARED and device.type == "cpu" and size_bytes:
            lent = self.lent[device] = Lent(size_bytes)
            return lent.block
        block = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        if self.shared:
            self.lent[device] = block.share_memory_()
        return block

    def model(self) -> nn.Module:
        """Return a module of its own that reads these values, set to evaluate, without gradients.

        Threads take one each: what modules note of a forward pass, in attributes or buffers, is then not
        mixed up, and not in the snapshot. They have only the parameters in common.
        """
        assert self._model is not None
        return _copied(self._model, self._tensors, list(map(_to_read, self._tensors)))

    @torch.no_grad()
    def put_back(self, model: nn.Module) -> None:
        """Make the values of `model`, which is `unwrapped`, what they were.

        Raises:
            OffbeatError: the model has other tensors now.
        """
        values = _values(model)
        if _kinds(values) != self._kinds:
            raise OffbeatError("the model has other parameters or buffers than when the snapshot was taken")
        if values:
            torch._foreach_copy_(values, self._tensors)

    @property
    def size_bytes(self) -> int:
        """How long `to_bytes` is."""
        return sum(map(len, self.blocks.values()))

    def to_bytes(self) -> Tensor:
        """Return a copy of the values, bit for bit: uint8, on the CPU."""
        return torch.cat(
            [
                torch.empty(0, dtype=torch.uint8, device="cpu"),
                *(block.cpu() for block in self.blocks.values()),
            ]
        )

    def overwrite(self, values: Tensor) -> None:
        """Take on the values of another worker's snapshot of a model with the same tensors.

        Args:
            values: as its `to_bytes` gave them.
        """
        sizes = list(map(len, self.blocks.values()))
        for block, part in zip(self.blocks.values(), values.split(sizes), strict=True):
            block.copy_(part)

    def digest(self) -> str:
        """Return 16 digits: the same for the same values, bit for bit, and else all but surely others."""
        mixed = hashlib.sha256()
        for block in self.blocks.values():
            raw: Any = block.cpu().numpy()
            mixed.update(raw)
        return mixed.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state."""
        assert self._model is not None
        return copy.deepcopy(self._model.state_dict())


def _to_read(tensor: Tensor) -> Tensor:
    """Return a parameter itself, which nobody writes to when it evaluates, and of a buffer a copy."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


def _copied(model: nn.Module, values: Sequence[Tensor], instead: Sequence[Tensor]) -> nn.Module:
    """Return a copy of a model with `instead` in the place of `values`, set to evaluate."""
    memo: dict[int, Any] = {id(value): tensor for value, tensor in zip(values, instead, strict=True)}
    for module in model.modules():
        for noted in vars(module).values():
            if type(noted) in _DICTS and not noted:  # hooks mostly, a dozen a module: half of the time
                memo[id(noted)] = type(noted)()
            elif isinstance(noted, Tensor) and not noted.is_leaf:
                # A result of the last forward pass, which torch does not copy.
                memo[id(noted)] = noted.detach().clone()
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied.eval()


# Between processes of one program -----------------------------------------------------------------------


class Lent:
    """A block of memory on the CPU that other processes of this program map.

    It has no file in /dev/shm, which may be small (64 MiB in a container) or not there to be written.

    Raises:
        OffbeatError: there is not so much memory.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self._descriptor, memory = allocated(size_bytes)
        except OSError as error:
            raise OffbeatError(
                f"cannot share {size_bytes} bytes with the processes that validate: {explain(error)}; or use "
                "backend='thread'"
            ) from error
        self._size_bytes = size_bytes
        self.block = torch.frombuffer(memory, dtype=torch.uint8)
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def __reduce__(self) -> Any:
        return _borrowed, (DupFd(self._descriptor), self._size_bytes)


def _borrowed(descriptor: Any, size_bytes: int) -> Tensor:
    number = descriptor.detach()
    try:
        memory = mapped(number, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED)
    finally:
        os.close(number)
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Writer(ForkingPickler):
    """Writes a model with numbers in the place of the tensors whose values lie in shared memory."""

    def __init__(self, file: io.BytesIO, values: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._numbers = {id(value): number for number, value in enumerate(values)}

    def reducer_override(self, thing: Any) -> Any:
        """Write the number of a tensor that has one; all else as usual."""
        if not isinstance(thing, Tensor):
            return NotImplemented
        if (number := self._numbers.get(id(thing))) is not None:
            return _tensor_of_number, (number,)
        if _is_dense(thing) and type(thing) is Tensor and thing.device.type == "cpu":
            # By value, for any number of processes to read; handles of shared memory can be read once.
            flat = thing.detach().contiguous().reshape(-1).view(torch.uint8)
            return _tensor_of_bytes, (flat.numpy().tobytes(), thing.dtype, thing.shape)
        return NotImplemented


def _tensor_of_number(number: int) -> Tensor:
    tensors: list[Tensor] = _read.tensors
    return tensors[number]


def _tensor_of_bytes(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _written(model: nn.Module, values: Sequence[Tensor]) -> bytes:
    file = io.BytesIO()
    _Writer(file, values).dump(model)
    return file.getvalue()


def read_model(structure: bytes, places: Sequence[Place], blocks: Blocks) -> nn.Module:
    """Return the model that another process of this program has written, set to evaluate."""
    _read.tensors = [_to_read(place.view(blocks)) for place in places]
    try:
        model: nn.Module = ForkingPickler.loads(structure)
    finally:
        _read.tensors = []
    return model.eval()
