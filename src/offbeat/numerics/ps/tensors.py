"""Dense tensors in a namespace: which keys belong to which tensor, and conversion in both directions.

Nothing here knows where values are sent or come from, or what is learned with them.
Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, section 3.1
("(key,value) vectors").
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.numerics.ps.entries import KEY_STOP_MAX, Entries, find_problem

Tensor: TypeAlias = torch.Tensor | NDArray[Any]

_DTYPES: Final = ("float32", "float64")


class TensorTable:
    """The keys of tensors: one key per number, tensor after tensor from key 0 on, each in row-major order.

    `TensorTable(**offsets.state_dict())` is the same table.

    Args:
        shapes: names and shapes, in order.
        dtype: "float32" or "float64", the same for all tensors.

    Raises:
        ValueError: another dtype, a repeated name, an invalid shape, or no number in all tensors.
    """

    def __init__(self, shapes: Iterable[tuple[str, Sequence[int]]], dtype: str = "float32") -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"expected tensors of float32 or float64, got {dtype!r}; {_dtype_hint(dtype)}")
        self._dtype = np.dtype(dtype)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes:
            if name in self._shapes:
                raise ValueError(f"expected each name once, got {name!r} twice; rename one")
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"expected a shape of sizes of at least 0 for {name!r}, got {shape}")
            self._shapes[name] = tuple(shape)
        self._names = list(self._shapes)
        self._indices = {name: index for index, name in enumerate(self._names)}
        self._firsts = list(accumulate((math.prod(shape) for shape in self._shapes.values()), initial=0))
        if not 0 < self.keys <= KEY_STOP_MAX:
            raise ValueError(f"expected tensors of 1 to {KEY_STOP_MAX} numbers in all, got {self.keys}")

    @classmethod
    def from_tensors(cls, named: Iterable[tuple[str, Tensor]]) -> TensorTable:
        """Return the table of some tensors, such as `model.named_parameters()`.

        Raises:
            ValueError: they are not all float32 or all float64, or one is not dense.
        """
        tensors = list(named)
        dtype = _dtype_of(tensors[0][1]) if tensors else _DTYPES[0]
        offsets = cls([(name, tuple(tensor.shape)) for name, tensor in tensors], dtype)
        for name, tensor in tensors:
            offsets._check(name, tensor)
        return offsets

    @property
    def keys(self) -> int:
        """The number of keys, which are 0 to `keys` - 1."""
        return self._firsts[-1]

    @property
    def dtype(self) -> str:
        """The dtype of all tensors."""
        return self._dtype.name

    def key_range_of(self, name: str) -> tuple[int, int]:
        """Return the first key of a tensor and the key after its last.

        Raises:
            ValueError: there is no such tensor.
        """
        if name not in self._indices:
            raise ValueError(f"expected one of the names {', '.join(self._indices)}, got {name!r}")
        index = self._indices[name]
        return self._firsts[index], self._firsts[index + 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the table as plain data, the arguments of an equal one."""
        return {"shapes": [[name, list(shape)] for name, shape in self._shapes.items()], "dtype": self.dtype}

    def gather(self, tensors: Mapping[str, Tensor], first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Return the elements of keys `first` to `last` - 1 as a 1-D array of `last` - `first` elements.

        If they lie in one contiguous tensor in main memory, it is a view of that tensor.

        Args:
            tensors: by name, all that the range touches; parameters, their gradients, or other tensors of the
                same shapes.
            first: the first key.
            last: the key after the last one; None for all keys from `first` on.

        Raises:
            ValueError: invalid range, or a tensor is missing or of another dtype or shape.
        """
        last = self.keys if last is None else last
        if not 0 <= first < last <= self.keys:
            raise ValueError(f"expected a range within keys 0 to {self.keys}, got {first} to {last}")
        parts = [
            _read(self._checked_tensor(tensors, name), max(first, begin) - begin, min(last, end) - begin)
            for name, begin, end in self._tensors_in(first, last)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def scatter(self, content: Entries, tensors: Mapping[str, Tensor]) -> None:
        """Write values into the tensors that their keys belong to, in place; other numbers are unchanged.

        Autograd sees an ordinary in-place change; the values themselves have no gradient history.

        Args:
            content: of any keys, contiguous or listed.
            tensors: by name, all that have one of these keys.

        Raises:
            ValueError: values of another dtype or for keys out of range, or a tensor is missing or of another
                dtype or shape; nothing is written then.
        """
        values = content.values
        if values.dtype != self._dtype or values.ndim != 1:
            raise ValueError(
                f"expected one number of {self.dtype} per key, got {values.dtype} of shape {values.shape}"
            )
        first, last = 0, self.keys
        if content.keys is None:
            first, last = content.first, content.first + len(content)
        if problem := find_problem(content, first, last):
            raise ValueError(problem)
        if not 0 <= first <= last <= self.keys:
            raise ValueError(f"expected keys within 0 to {self.keys}, got {first} to {last}")
        if content.keys is not None and len(content):
            first, last = int(content.keys[0]), int(content.keys[-1]) + 1
        parts = [
            (self._checked_tensor(tensors, name), begin, part)
            for name, begin, end in self._tensors_in(first, last)
            if len(part := content.key_range(begin, end))
        ]
        for tensor, begin, part in parts:
            _write(tensor, begin, part)

    def pack(self, tensors: Mapping[str, torch.Tensor], into: torch.Tensor) -> torch.Tensor:
        """Copy the elements of all keys to a vector on the tensors' device, which is not waited for.

        Args:
            tensors: by name, all of them: parameters, their gradients, or others of the same shapes.
            into: (keys,), returned.

        Raises:
            ValueError: a tensor is missing or of another dtype or shape.
        """
        for name in self._names:
            self._checked_tensor(tensors, name)
        return torch.cat([tensors[name].detach().reshape(-1) for name in self._names], out=into)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what `pack` has packed, by name, as views of its result.

        Args:
            flat: (keys,).
        """
        parts = flat.split([math.prod(shape) for shape in self._shapes.values()])
        return {name: part.view(self._shapes[name]) for name, part in zip(self._names, parts, strict=True)}

    def _tensors_in(self, first: int, last: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name and the key range of each tensor that has keys in a range."""
        for index in range(bisect_right(self._firsts, first) - 1, len(self._names)):
            begin, end = self._firsts[index : index + 2]
            if begin >= last:
                return
            if begin < end:
                yield self._names[index], begin, end

    def _checked_tensor(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        if name not in tensors:
            begin, end = self.key_range_of(name)
            raise ValueError(
                f"expected a tensor {name!r} for keys {begin} to {end - 1}, got none; "
                "add it, or request a range without these keys"
            )
        self._check(name, tensors[name])
        return tensors[name]

    def _check(self, name: str, tensor: Tensor) -> None:
        if not isinstance(tensor, torch.Tensor | np.ndarray):
            raise ValueError(
                f"expected a tensor {name!r}, got {type(tensor).__name__}; if it has no gradient, "
                "pass zeros or request a range without it"
            )
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            raise ValueError(f"expected {name!r} to be dense, got {tensor.layout}; use its to_dense()")
        if (dtype := _dtype_of(tensor)) != self.dtype:
            raise ValueError(f"expected {name!r} of {self.dtype}, got {dtype}; {_dtype_hint(dtype)}")
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"expected {name!r} of shape {self._shapes[name]}, got {tuple(tensor.shape)}; "
                "tensors must have the shapes that the table was built from"
            )


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype_hint(dtype: str) -> str:
    if dtype in _DTYPES:
        return "convert it, or make a namespace for each dtype"
    return "servers add in float32 and float64 only: push a float32 copy of it"


def _read(tensor: Tensor, begin: int, end: int) -> NDArray[Any]:
    """Return numbers `begin` to `end` - 1 of a tensor in row-major order."""
    if isinstance(tensor, torch.Tensor):
        numbers: NDArray[Any] = tensor.detach().reshape(-1)[begin:end].cpu().numpy()
        return numbers
    return tensor.reshape(-1)[begin:end]


def _write(tensor: Tensor, first: int, content: Entries) -> None:
    """Write values at the positions of their keys in a tensor whose first key is `first`."""
    positions: slice | NDArray[np.int64] = slice(content.first - first, content.first - first + len(content))
    if content.keys is not None:
        positions = content.keys - first
    if isinstance(tensor, torch.Tensor):
        flat = tensor.detach().reshape(-1)  # a copy if the tensor is not contiguous
        values = content.values
        if not values.flags.writeable or values.strides[0] < 0:  # torch supports neither
            values = values.copy()
        at = positions if isinstance(positions, slice) else torch.from_numpy(positions).to(flat.device)
        flat[at] = torch.from_numpy(values).to(flat.device)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))
    elif tensor.flags.c_contiguous:
        tensor.reshape(-1)[positions] = content.values
    else:
        tensor.flat[positions] = content.values
