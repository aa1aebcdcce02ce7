"""Dense tensors in a namespace: whose numbers a range of keys is, and the way from tensors to keys and back.

Nothing here knows where the values go or come from, or what is learnt with them.

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

from offbeat.numerics.ps.entries import LAST_MAX, Entries, problem_of

Tensor: TypeAlias = torch.Tensor | NDArray[Any]

_DTYPES: Final = ("float32", "float64")


class Offsets:
    """Which keys are which tensor's: a key a number, tensor after tensor from key 0 on, each row by row.

    `Offsets(**offsets.state_dict())` is the same table.

    Args:
        shapes: names and shapes, in order.
        dtype: "float32" or "float64", of all of them.

    Raises:
        ValueError: another dtype, a name that comes twice, a shape that is none, or no number in all of them.
    """

    def __init__(self, shapes: Iterable[tuple[str, Sequence[int]]], dtype: str = "float32") -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"expected tensors of float32 or float64, got {dtype!r}; {_what_to_do(dtype)}")
        self._dtype = np.dtype(dtype)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes:
            if name in self._shapes:
                raise ValueError(f"expected each name once, got {name!r} twice; rename one")
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"expected a shape of sizes of at least 0 for {name!r}, got {shape}")
            self._shapes[name] = tuple(shape)
        self._names = list(self._shapes)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._firsts = list(accumulate((math.prod(shape) for shape in self._shapes.values()), initial=0))
        if not 0 < self.keys <= LAST_MAX:
            raise ValueError(f"expected tensors of 1 to {LAST_MAX} numbers in all, got {self.keys}")

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> Offsets:
        """Return a table of some tensors, as of `model.named_parameters()`.

        Raises:
            ValueError: they are not all of float32 or all of float64, or one is not dense.
        """
        tensors = list(named)
        dtype = _dtype_of(tensors[0][1]) if tensors else _DTYPES[0]
        offsets = cls([(name, tuple(tensor.shape)) for name, tensor in tensors], dtype)
        for name, tensor in tensors:
            offsets._check(name, tensor)
        return offsets

    @property
    def keys(self) -> int:
        """How many there are: 0 to `keys` - 1."""
        return self._firsts[-1]

    @property
    def dtype(self) -> str:
        """Of all tensors."""
        return self._dtype.name

    def range_of(self, name: str) -> tuple[int, int]:
        """Return the first key of a tensor, and the one after its last.

        Raises:
            ValueError: there is no such tensor.
        """
        if name not in self._places:
            raise ValueError(f"expected one of the names {', '.join(self._places)}, got {name!r}")
        place = self._places[name]
        return self._firsts[place], self._firsts[place + 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the table as plain data, the arguments of another one."""
        return {"shapes": [[name, list(shape)] for name, shape in self._shapes.items()], "dtype": self.dtype}

    def gather(self, tensors: Mapping[str, Tensor], first: int = 0, last: int | None = None) -> NDArray[Any]:
        """Return the numbers of keys `first` to `last` - 1, (`last` - `first`,).

        Numbers of one contiguous tensor in main memory are not copied: they change when it does.

        Args:
            tensors: by name, all that the range touches; parameters, their gradients, or what else has
                their shapes.
            first: the first key.
            last: the key after the last one; None for all from `first` on.

        Raises:
            ValueError: no such range, or a tensor is missing or of another dtype or shape.
        """
        last = self.keys if last is None else last
        if not 0 <= first < last <= self.keys:
            raise ValueError(f"expected a range within keys 0 to {self.keys}, got {first} to {last}")
        parts = [
            _read(self._checked(tensors, name), max(first, begin) - begin, min(last, end) - begin)
            for name, begin, end in self._touched(first, last)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def scatter(self, content: Entries, tensors: Mapping[str, Tensor]) -> None:
        """Write values into the tensors whose they are, in place; other numbers stay as they are.

        Autograd sees it as it sees any change in place, but for where the numbers come from.

        Args:
            content: of any keys, neighbours or listed.
            tensors: by name, all that have one of these keys.

        Raises:
            ValueError: values of another dtype or of other keys, or a tensor is missing or of another dtype
                or shape; nothing is written then.
        """
        values = content.values
        if values.dtype != self._dtype or values.ndim != 1:
            raise ValueError(
                f"expected one number of {self.dtype} a key, got {values.dtype} of shape {values.shape}"
            )
        first, last = 0, self.keys
        if content.keys is None:
            first, last = content.first, content.first + len(content)
        if problem := problem_of(content, first, last):
            raise ValueError(problem)
        if not 0 <= first <= last <= self.keys:
            raise ValueError(f"expected keys within 0 to {self.keys}, got {first} to {last}")
        if content.keys is not None and len(content):
            first, last = int(content.keys[0]), int(content.keys[-1]) + 1
        parts = [
            (self._checked(tensors, name), begin, part)
            for name, begin, end in self._touched(first, last)
            if len(part := content.cut(begin, end))
        ]
        for tensor, begin, part in parts:
            _write(tensor, begin, part)

    def _touched(self, first: int, last: int) -> Iterator[tuple[str, int, int]]:
        """Yield the tensors that have keys of a range, and their own ranges."""
        for place in range(bisect_right(self._firsts, first) - 1, len(self._names)):
            begin, end = self._firsts[place : place + 2]
            if begin >= last:
                return
            if begin < end:
                yield self._names[place], begin, end

    def _checked(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        if name not in tensors:
            begin, end = self.range_of(name)
            raise ValueError(
                f"expected a tensor {name!r} for keys {begin} to {end - 1}, got none; "
                "add it, or ask for a range without these keys"
            )
        self._check(name, tensors[name])
        return tensors[name]

    def _check(self, name: str, tensor: Tensor) -> None:
        if not isinstance(tensor, torch.Tensor | np.ndarray):
            raise ValueError(
                f"expected a tensor {name!r}, got {type(tensor).__name__}; where there is no gradient, "
                "give zeros or ask for a range without it"
            )
        if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
            raise ValueError(f"expected {name!r} to be dense, got {tensor.layout}; use its to_dense()")
        if (dtype := _dtype_of(tensor)) != self.dtype:
            raise ValueError(f"expected {name!r} of {self.dtype}, got {dtype}; {_what_to_do(dtype)}")
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"expected {name!r} of shape {self._shapes[name]}, got {tuple(tensor.shape)}; "
                "a table is for tensors of the shapes that it was made of"
            )


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _what_to_do(dtype: str) -> str:
    if dtype in _DTYPES:
        return "convert it, or make a namespace for each dtype"
    return "servers add in float32 and float64 only: keep a copy of it in float32 for them"


def _read(tensor: Tensor, begin: int, end: int) -> NDArray[Any]:
    """Return numbers `begin` to `end` - 1 of a tensor, row by row."""
    if isinstance(tensor, torch.Tensor):
        numbers: NDArray[Any] = tensor.detach().reshape(-1)[begin:end].cpu().numpy()
        return numbers
    return tensor.reshape(-1)[begin:end]


def _write(tensor: Tensor, first: int, content: Entries) -> None:
    """Write values to the places that their keys have in a tensor whose first key is `first`."""
    places: slice | NDArray[np.int64] = slice(content.first - first, content.first - first + len(content))
    if content.keys is not None:
        places = content.keys - first
    if isinstance(tensor, torch.Tensor):
        flat = tensor.detach().reshape(-1)  # a copy where the numbers do not lie row by row
        values = content.values
        if not values.flags.writeable or values.strides[0] < 0:  # torch takes neither
            values = values.copy()
        at = places if isinstance(places, slice) else torch.from_numpy(places).to(flat.device)
        flat[at] = torch.from_numpy(values).to(flat.device)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))
    elif tensor.flags.c_contiguous:
        tensor.reshape(-1)[places] = content.values
    else:
        tensor.flat[places] = content.values
