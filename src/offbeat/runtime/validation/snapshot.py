"""A model as it was at one moment, in memory that is reused.

The values of parameters and buffers lie in one block of memory per device; the rest of the model (its modules
and their attributes) is copied each time, so that anything that changes between epochs, a dropout rate or an
added module, is as it was. Nothing here waits, or knows of validation.

On an accelerator the copies are queued on the current stream, as the optimizer's steps are: so they come
after the last step and before the next one, and the host does not wait. Readers on other streams call
`make_streams_wait` first; nobody captures again before these streams have done what reads the snapshot.
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

from offbeat.errors import OffbeatError, describe_os_error
from offbeat.runtime.devices.interface import Accelerator
from offbeat.runtime.transport.shared_memory import HAS_SHARED_MEMORY, allocate_memory, map_memory
from offbeat.torch_compat import copy_tensors

DeviceBlocks: TypeAlias = Mapping[torch.device, Tensor]
_ALIGNMENT_BYTES: Final = 64
_DICTS: Final = (dict, OrderedDict)
_WRAPPERS: Final = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_room_ids = itertools.count()
_reading = threading.local()  # the tensors of the snapshot that this process is about to read


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without torch.compile, DistributedDataParallel and DataParallel around it.

    A compiled model is evaluated uncompiled: compiling belongs to the training thread. A copy of
    DistributedDataParallel would communicate with the other workers.

    Raises:
        OffbeatError: the parameters are not whole tensors: lazy and not initialised, or sharded.
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
                f"expected whole parameters, got {name}, of which this worker has only a part: sharded "
                "models cannot be validated while they train"
            )
    return model


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """The layout of a tensor in the block of its device."""

    start_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_parameter: bool

    def view(self, blocks: DeviceBlocks) -> Tensor:
        """Return the tensor in its block."""
        size_bytes = self.shape.numel() * self.dtype.itemsize
        flat = blocks[self.device][self.start_bytes : self.start_bytes + size_bytes].view(self.dtype)
        tensor = flat.as_strided(self.shape, self.stride)
        return nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor


def _layout_of(values: Sequence[Tensor]) -> tuple[list[TensorPlace], dict[torch.device, int]]:
    """Return places for tensors like these, one after the other, and the bytes needed on each device."""
    ends: dict[torch.device, int] = {}
    places: list[TensorPlace] = []
    for tensor in values:
        start = -(-ends.get(tensor.device, 0) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        ends[tensor.device] = start + tensor.numel() * tensor.element_size()
        # Densely packed: the same order of dimensions, without gaps and overlaps.
        stride = torch.empty_like(tensor, device="meta").stride()
        places.append(
            TensorPlace(
                start_bytes=start,
                shape=tensor.shape,
                stride=stride,
                dtype=tensor.dtype,
                device=tensor.device,
                is_parameter=isinstance(tensor, nn.Parameter),
            )
        )
    return places, ends


def _dense_tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers whose values are kept in blocks, each once: all dense ones."""
    return [tensor for tensor in [*model.parameters(), *model.buffers()] if _is_dense(tensor)]


def _is_dense(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _kinds_of(values: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(value.shape, value.stride(), value.dtype, value.device) for value in values]


class Snapshot:
    """Memory for a model's values at one moment, and a copy of the rest of the model.

    Args:
        shared: other processes of this program are to read it.
        accelerators: those that hold the model.

    Attributes:
        blocks: of memory, by device, that hold the values.
        exported: objects that other processes of this program receive as these blocks; empty unless shared.
        places: of the values in the blocks.
        layout_id: a number unique to these blocks, for processes that have mapped them before.
        structure: the model without these values, for `load_model` in another process; empty unless shared.
        is_shared: other processes of this program can read it.
    """

    def __init__(self, *, shared: bool, accelerators: Sequence[Accelerator] = ()) -> None:
        self.blocks: dict[torch.device, Tensor] = {}
        self.exported: dict[torch.device, ExportedBlock | Tensor] = {}
        self.places: list[TensorPlace] = []
        self.layout_id = -1
        self.structure = b""
        self.is_shared = shared
        self._accelerators = accelerators
        self._written: list[Any] = []  # by accelerator, the event that the values are there
        self._kinds_of: list[tuple[object, ...]] | None = None
        self._structure_digest: str | None = None
        self._tensors: list[Tensor] = []
        self._model: nn.Module | None = None

    @torch.no_grad()
    def capture(self, model: nn.Module) -> None:
        """Copy `model` as it is now; earlier content is overwritten.

        Args:
            model: a result of `unwrap`.

        Raises:
            OffbeatError: something attached to the model cannot be copied.
        """
        values = _dense_tensors(model)
        if (kinds := _kinds_of(values)) != self._kinds_of:
            self._allocate(values)
            self._kinds_of = kinds
        if values:
            copy_tensors(self._tensors, values)
        self._structure_digest = None
        try:
            self._model = _copy_model(model, values, self._tensors)
            if self.is_shared:
                self.structure = _serialize(self._model, self._tensors)
        except Exception as error:
            raise OffbeatError(
                f"the model cannot be copied ({type(error).__name__}: {error}): an attribute or a hook of it "
                "does not allow it"
            ) from error
        self._record_written()

    def _record_written(self) -> None:
        self._written = [accelerator.record_event() for accelerator in self._accelerators]

    def make_streams_wait(self) -> None:
        """Make this thread's current stream on each accelerator wait until the values are there."""
        for accelerator, event in zip(self._accelerators, self._written, strict=True):
            accelerator.make_stream_wait(event)

    def _allocate(self, values: Sequence[Tensor]) -> None:
        self.places, sizes = _layout_of(values)
        self.layout_id, self.exported = next(_room_ids), {}
        self.blocks = {
            value.device: self._allocate_block(
                value, -(-sizes[value.device] // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            )
            for value in {value.device: value for value in values}.values()
        }
        self._tensors = [place.view(self.blocks) for place in self.places]

    def _allocate_block(self, like: Tensor, size_bytes: int) -> Tensor:
        """Return a block on the device of a tensor."""
        if self.is_shared and HAS_SHARED_MEMORY and like.device.type == "cpu" and size_bytes:
            exported = self.exported[like.device] = ExportedBlock(size_bytes)
            return exported.block
        block = like.new_zeros(size_bytes, dtype=torch.uint8)
        if self.is_shared:
            self.exported[like.device] = block.share_memory_()
        return block

    def model(self) -> nn.Module:
        """Return a separate module that reads these values, in evaluation mode, without gradients.

        Each thread uses its own: what modules store during a forward pass, in attributes or buffers, is then
        neither mixed up nor written to the snapshot. Only the parameters are shared.
        """
        assert self._model is not None
        return _copy_model(self._model, self._tensors, list(map(_for_reading, self._tensors)))

    @torch.no_grad()
    def restore_to(self, model: nn.Module) -> None:
        """Copy the values of the dense parameters and buffers back into `model`.

        Args:
            model: a result of `unwrap`.

        Raises:
            OffbeatError: the model's parameters or buffers are not those of the snapshot any more: their
                number, a shape, a layout, a dtype or a device differs.
        """
        values = _dense_tensors(model)
        if _kinds_of(values) != self._kinds_of:
            raise OffbeatError(
                "the model has different parameters or buffers than when the snapshot was taken"
            )
        if values:
            copy_tensors(values, self._tensors)

    @property
    def size_bytes(self) -> int:
        """The length of `to_bytes`."""
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
        """Replace the values with those of another worker's snapshot of a model with the same tensors.

        Args:
            values: the result of its `to_bytes`.
        """
        self.make_streams_wait()
        sizes = list(map(len, self.blocks.values()))
        for block, part in zip(self.blocks.values(), values.split(sizes), strict=True):
            block.copy_(part)
        self._record_written()

    def digest(self) -> str:
        """Return 16 hexadecimal digits: equal for bitwise equal values, else different almost surely."""
        hasher = hashlib.sha256()
        for block in self.blocks.values():
            raw: Any = block.cpu().numpy()
            hasher.update(raw)
        return hasher.hexdigest()[:16]

    def structure_digest(self) -> str | None:
        """Return hexadecimal digits that differ for models which differ in more than these values.

        It may also differ for equal models. None if the model cannot be pickled.
        """
        if self._structure_digest is None:
            assert self._model is not None
            try:
                structure = _serialize(self._model, self._tensors, by_value=True)
            except Exception:
                return None
            kinds = repr(self._kinds_of).encode()
            self._structure_digest = hashlib.sha256(structure + kinds).hexdigest()[:16]
        return self._structure_digest

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state."""
        assert self._model is not None
        return copy.deepcopy(self._model.state_dict())


def _for_reading(tensor: Tensor) -> Tensor:
    """Return a parameter itself, which evaluation does not write to, and a copy of a buffer."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


def _copy_model(model: nn.Module, values: Sequence[Tensor], replacements: Sequence[Tensor]) -> nn.Module:
    """Return a copy of a model in evaluation mode, with `replacements` in the place of `values`."""
    memo: dict[int, Any] = {id(value): tensor for value, tensor in zip(values, replacements, strict=True)}
    for module in model.modules():
        for attribute in vars(module).values():
            if (
                type(attribute) in _DICTS and not attribute
            ):  # mostly hooks, a dozen per module: saves half of the time
                memo[id(attribute)] = type(attribute)()
            elif isinstance(attribute, Tensor) and not attribute.is_leaf:
                # A result of the last forward pass, which torch does not copy.
                memo[id(attribute)] = attribute.detach().clone()
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied.eval()


# Between processes of one program -----------------------------------------------------------------------


class ExportedBlock:
    """A block of memory on the CPU that other processes of this program can map.

    It has no file in /dev/shm, which may be small (64 MiB in a container) or not writable.

    Raises:
        OffbeatError: there is not enough memory.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self._descriptor, memory = allocate_memory(size_bytes)
        except OSError as error:
            raise OffbeatError(
                f"cannot share {size_bytes} bytes with the processes that validate: "
                f"{describe_os_error(error)}; or use backend='thread'"
            ) from error
        self._size_bytes = size_bytes
        self.block = torch.frombuffer(memory, dtype=torch.uint8)
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def __reduce__(self) -> Any:
        return _map_block, (DupFd(self._descriptor), self._size_bytes)


def _map_block(descriptor: Any, size_bytes: int) -> Tensor:
    index = descriptor.detach()
    try:
        memory = map_memory(index, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED)
    finally:
        os.close(index)
    return torch.frombuffer(memory, dtype=torch.uint8)


class _ModelPickler(ForkingPickler):
    """Pickles a model with indices in the place of the tensors whose values lie in a snapshot's blocks.

    Args:
        file: to write to.
        values: these tensors.
        by_value: other tensors are written by value, whatever their device.
    """

    def __init__(self, file: io.BytesIO, values: Sequence[Tensor], *, by_value: bool) -> None:
        super().__init__(file)
        self._numbers = {id(value): index for index, value in enumerate(values)}
        self._by_value = by_value

    def reducer_override(self, value: Any) -> Any:
        """Write the index of a tensor that has one; everything else as usual."""
        if not isinstance(value, Tensor):
            return NotImplemented
        if (index := self._numbers.get(id(value))) is not None:
            return _tensor_of_number, (index,)
        is_on_host = value.device.type == "cpu"
        if _is_dense(value) and type(value) is Tensor and (is_on_host or self._by_value):
            # By value, for any number of processes to read; handles of shared memory can be read once.
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _tensor_of_bytes, (flat.numpy().tobytes(), value.dtype, value.shape)
        return NotImplemented


def _tensor_of_number(index: int) -> Tensor:
    tensors: list[Tensor] = _reading.tensors
    return tensors[index]


def _tensor_of_bytes(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _serialize(model: nn.Module, values: Sequence[Tensor], *, by_value: bool = False) -> bytes:
    file = io.BytesIO()
    _ModelPickler(file, values, by_value=by_value).dump(model)
    return file.getvalue()


def load_model(structure: bytes, places: Sequence[TensorPlace], blocks: DeviceBlocks) -> nn.Module:
    """Return a model that another process of this program has serialised, in evaluation mode."""
    _reading.tensors = [_for_reading(place.view(blocks)) for place in places]
    try:
        model: nn.Module = ForkingPickler.loads(structure)
    finally:
        _reading.tensors = []
    return model.eval()
