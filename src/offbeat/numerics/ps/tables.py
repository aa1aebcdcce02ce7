"""Storage of a parameter server: one server's values of a namespace, in blocks of contiguous keys.

Nothing here knows which blocks a server is to have, or how it receives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from offbeat.numerics.ps.entries import (
    DEFAULT_PUSH_META,
    Entries,
    Keys,
    PushMeta,
    Rows,
    find_keys_problem,
    find_problem,
    sum_entries,
)
from offbeat.numerics.ps.memory import allocate_page_aligned
from offbeat.numerics.ps.updates import Update, with_settings

BlockContents: TypeAlias = dict[str, Any]  # of a block, as plain data and arrays
Allocate: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Rows]  # returns a new, uninitialised array
Aggregate: TypeAlias = Literal["sum", "mean", "each"]

_READ_BYTES_MAX = 2**31  # in one message
DENSE_KEYS_MAX = 2**20  # keys in a block; a larger block stores only the keys that were pushed
# Largest size of the values of merged blocks: above it, the overhead of a call of the update is negligible.
_RUN_BYTES_MAX = 1024 * 1024
_PAGE_ALIGNED_BYTES_MIN = 64 * 1024  # size of values from which arrays start on a page boundary


class ArrayTable:
    """One namespace on one server: rows of numbers, and the update's state of each.

    A key that was never pushed is zero, and so is its state. Blocks are created by the first push to them. A
    block of up to 2**20 keys is an array of all its keys; a larger one stores only the keys that were pushed,
    in order, and a new key costs time proportional to their number. Small blocks that are pushed together are
    merged into one array of up to 1 MiB of values, until one of them is removed.

    Args:
        keys: number of keys of the namespace, 0 to `keys` - 1.
        block_keys: contiguous keys per block; blocks are added and removed as a whole.
        update: how a push changes values.
        width: numbers in a row; 0 for a single number per key.
        dtype: float32 or float64.
        aggregate: values that are pushed together are applied as their sum, as their mean, or each by itself,
            one after the other.
        may_fail: the update is user-defined and may raise; `dry_run` finds out before it is applied.
        empty: allocates memory for values that are read, from (shape, dtype), like `np.empty`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        keys: int,
        block_keys: int,
        update: Update,
        *,
        width: int = 0,
        dtype: DTypeLike = np.float32,
        aggregate: Aggregate = "sum",
        may_fail: bool = False,
        empty: Allocate = np.empty,
    ) -> None:
        if not 0 < block_keys <= keys:
            raise ValueError(f"expected blocks of 1 to {keys} keys, got {block_keys}")
        if width < 0:
            raise ValueError(f"expected rows of at least 0 numbers, got {width}")
        if np.dtype(dtype) not in (np.float32, np.float64):
            raise ValueError(f"expected values of float32 or float64, got {np.dtype(dtype)}")
        self._keys, self._block_keys, self._update = keys, block_keys, update
        if aggregate not in get_args(Aggregate):
            raise ValueError(f"expected aggregate to be sum, mean or each, got {aggregate!r}")
        self._shape = (width,) if width else ()
        self._dtype = np.dtype(dtype)
        self._aggregate, self._may_fail = aggregate, may_fail
        self._runs: dict[int, _BlockRun] = {}  # by block
        self._empty = empty

    @property
    def reads_pushes_once(self) -> bool:
        """Whether pushes are read only when they are applied, not by a rehearsal before."""
        return not self._may_fail

    @property
    def size_bytes(self) -> int:
        """Size of all values and state in bytes."""
        runs = set(self._runs.values())
        return sum(array.nbytes for run in runs for array in run.arrays.values())

    def check(self, content: Entries, first: int, last: int) -> None:
        """Check that entries can be pushed to keys `first` to `last` - 1.

        Raises:
            ValueError: other keys, rows of another dtype or width, or invalid metadata.
        """
        if not isinstance(content, Entries):
            raise ValueError(f"expected Entries, got {type(content).__name__}")
        rows = content.values
        if rows.dtype != self._dtype or rows.shape[1:] != self._shape:
            expected, actual = (self._dtype, self._shape), (rows.dtype, rows.shape[1:])
            raise ValueError(
                f"expected rows of {expected[0]} and shape {expected[1]}, got {actual[0]} and {actual[1]}"
            )
        if problem := find_problem(content, first, last):
            raise ValueError(problem)
        if content.meta is not None:
            check_weight(content.meta.weight)
            self._update_for(content.meta)
            for name, one in (content.meta.states or {}).items():
                if one.dtype != rows.dtype or one.shape != rows.shape:
                    expected, actual = (rows.dtype, rows.shape), (one.dtype, one.shape)
                    raise ValueError(f"expected {name} as {expected}, like the values, got {actual}")

    def dry_run(self, first: int, last: int, content: Entries) -> None:
        """Try on copies whether the update accepts a push to keys `first` to `last` - 1.

        Raises:
            ValueError: the update raises an error, or has no such states.
        """
        if content.meta is not None and content.meta.states is not None:
            check_states(self._update, content.meta.states)
            return
        if not self._may_fail:
            return
        for number, part in self._parts(content):
            if not len(part):
                continue
            rows = {name: np.zeros_like(part.values) for name in ("values", *self._update.states)}
            if (run := self._runs.get(number)) is not None:
                for name, row in rows.items():
                    run.read_into(Entries(part.first, row, part.keys), name)
            pushed = part.values.view()
            pushed.flags.writeable = False  # replicas receive the same array
            try:
                self._update.apply(rows.pop("values"), rows, pushed)
            except Exception as error:  # user code may raise anything
                raise ValueError(f"the update failed on the pushed values: {error!r}") from error

    def apply(self, first: int, last: int, content: Entries) -> None:
        """Apply a push to keys `first` to `last` - 1; keys that it does not list are unchanged."""
        if content.keys is None and content.meta is None:
            self._apply_contiguous(content.first, content.values)
            return
        update = self._update if content.meta is None else self._update_for(content.meta)
        for number, part in self._parts(content):
            if not len(part):
                continue
            run = self._run_of(number)
            if content.is_replacement:
                run.replace(part)
            else:
                run.apply(update, part)

    def _apply_contiguous(self, first: int, rows: Rows) -> None:
        """Apply rows of contiguous keys without metadata: the usual case, often over many small blocks."""
        begin, last = first, first + len(rows)
        while begin < last:
            run = self._run_of(begin // self._block_keys)
            if run.last < last:
                run = self._merge_blocks(run, last)
            end = min(last, run.last)
            run.apply_contiguous(self._update, begin, rows[begin - first : end - first])
            begin = end

    def _merge_blocks(self, run: _BlockRun, last: int) -> _BlockRun:
        """Merge blocks that are pushed together, starting at a run; return the merged run.

        Args:
            last: the key after the last pushed one.
        """
        row_bytes = self._dtype.itemsize * math.prod(self._shape)
        found, end = [run], run.last
        while end < last and not run.is_sparse:
            following = self._run_of(end // self._block_keys)
            if (following.last - run.first) * row_bytes > _RUN_BYTES_MAX:
                break
            found.append(following)
            end = following.last
        if len(found) == 1:
            return run
        arrays = {name: self._rows(end - run.first, np.empty) for name in run.arrays}
        for name, rows in arrays.items():
            np.concatenate([one.arrays[name] for one in found], out=rows)
        merged = _BlockRun(run.first, end, arrays)
        self._runs.update(dict.fromkeys(self._blocks_of(merged), merged))
        return merged

    def _remove_block(self, number: int) -> None:
        """Remove a block; blocks that share its array get arrays of their own."""
        run = self._runs.pop(number, None)
        if run is not None:
            for other in self._blocks_of(run):
                if other != number:
                    first, last = self._range_of(other)
                    self._runs[other] = _BlockRun(first, last, run.copy_out(first, last))

    def read(self, first: int, last: int, keys: Keys | None, states: bool = False) -> Entries:
        """Return the values of keys `first` to `last` - 1, or of those of them that `keys` lists.

        Args:
            states: whether to include the update's state.

        Raises:
            ValueError: invalid keys, or values of more than 2 GiB.
        """
        if keys is not None:
            problem = (
                find_keys_problem(keys, first, last) if isinstance(keys, np.ndarray) else "expected keys"
            )
            if problem:
                raise ValueError(problem)
        count = last - first if keys is None else len(keys)
        names = tuple(self._update.states) if states else ()
        size_bytes = count * math.prod(self._shape) * self._dtype.itemsize * (1 + len(names))
        if size_bytes > _READ_BYTES_MAX:
            raise ValueError(f"expected values of at most {_READ_BYTES_MAX} bytes, got {size_bytes}")
        result = self._read(first, count, keys, "values")
        if states:
            rows = {name: self._read(first, count, keys, name).values for name in names}
            result.meta = PushMeta(states=rows)
        return result

    def _read(self, first: int, count: int, keys: Keys | None, name: str) -> Entries:
        result = Entries(first, self._empty((count, *self._shape), self._dtype), keys)
        for number, part in self._parts(result):
            run = self._runs.get(number)
            if run is None:
                part.values[...] = 0
            else:
                run.read_into(part, name)
        return result

    def key_range(self, content: Entries, first: int, last: int) -> Entries:
        """Return the entries of `content` for keys `first` to `last` - 1."""
        return content.key_range(first, last)

    def combine(self, contents: Sequence[Entries], first: int, last: int) -> Entries:
        """Combine pushes to keys `first` to `last` - 1 into one, according to `aggregate`.

        sum: their sum by key, added in their order. mean: that sum divided by the sum of the weights. Both
        use the settings of the first push that has a weight. each: the result of applying the update to one
        push after the other, divided by its weight and with its settings; the returned rows replace the
        current ones. If all weights are 0, there is nothing to apply, and the result has no keys. If some
        pushes replace values, the first of them is returned, and the rest are ignored.
        """
        if self._aggregate != "each" and all(one.meta is None for one in contents):
            total = sum_entries(contents, first, last)
            if self._aggregate == "mean":
                total.values /= len(contents)
            return total
        for one in contents:
            if one.is_replacement:
                return one.key_range(first, last)
        weight = math.fsum((one.meta or DEFAULT_PUSH_META).weight for one in contents)
        if not weight:
            return Entries(first, np.zeros((0, *self._shape), self._dtype), np.zeros(0, np.int64))
        if self._aggregate == "each":
            return self._aggregate_each(contents, first, last)
        total = sum_entries(contents, first, last)
        if self._aggregate == "mean":
            total.values /= weight
        every = [one.meta or DEFAULT_PUSH_META for one in contents]
        settings = next(meta.settings for meta in every if meta.weight)
        total.meta = None if settings is None else PushMeta(settings=settings)
        return total

    def _aggregate_each(self, contents: Sequence[Entries], first: int, last: int) -> Entries:
        contents = [one.key_range(first, last) for one in contents if (one.meta or DEFAULT_PUSH_META).weight]
        listed = [one.keys for one in contents if one.keys is not None]
        keys = np.unique(np.concatenate(listed)) if len(listed) == len(contents) else None
        count = last - first if keys is None else len(keys)
        names = ("values", *self._update.states)
        rows = {name: self._read(first, count, keys, name).values for name in names}
        scratch = _BlockRun(first, last, rows, keys)
        for one in contents:
            meta = one.meta or DEFAULT_PUSH_META
            scratch.apply(self._update_for(meta), Entries(one.first, one.values / meta.weight, one.keys))
        return Entries(first, rows.pop("values"), keys, PushMeta(states=rows))

    def export_block(self, first: int, last: int) -> BlockContents | None:
        """Return a copy of the block of keys `first` to `last` - 1; None if it has never been pushed to."""
        run = self._runs.get(first // self._block_keys)
        return None if run is None else run.copy_out(first, last)

    def import_block(self, first: int, last: int, content: BlockContents | None) -> None:
        """Replace the block of keys `first` to `last` - 1."""
        number = first // self._block_keys
        self._remove_block(number)
        if content is not None:
            self._run_of(number).copy_in(content)

    def remove_block(self, first: int, last: int) -> None:
        """Remove the block of keys `first` to `last` - 1."""
        self._remove_block(first // self._block_keys)

    def _update_for(self, meta: PushMeta) -> Update:
        """Return the update with the settings of a push.

        Raises:
            ValueError: it does not accept them.
        """
        if meta.settings is None:
            return self._update
        if self._may_fail:
            raise ValueError("expected no settings for a user-defined function")
        return with_settings(self._update, meta.settings)

    def _run_of(self, number: int) -> _BlockRun:
        """Return the run that contains a block, which is created if needed."""
        run = self._runs.get(number)
        if run is None:
            run = self._runs[number] = self._new_run(number)
        return run

    def _new_run(self, number: int) -> _BlockRun:
        first, last = self._range_of(number)
        names = ("values", *self._update.states)
        is_sparse = last - first > DENSE_KEYS_MAX
        rows = 0 if is_sparse else last - first
        arrays = {name: self._rows(rows, np.zeros) for name in names}
        return _BlockRun(first, last, arrays, np.zeros(0, np.int64) if is_sparse else None)

    def _rows(self, count: int, make: Callable[..., Rows]) -> Rows:
        """Allocate rows with `np.empty` or `np.zeros`."""
        shape = (count, *self._shape)
        size_bytes = math.prod(shape) * self._dtype.itemsize
        if size_bytes < _PAGE_ALIGNED_BYTES_MIN:
            return make(shape, self._dtype)
        rows: Rows = allocate_page_aligned(size_bytes, make).view(self._dtype).reshape(shape)
        return rows

    def _range_of(self, number: int) -> tuple[int, int]:
        first = number * self._block_keys
        return first, min(first + self._block_keys, self._keys)

    def _blocks_of(self, run: _BlockRun) -> range:
        return range(run.first // self._block_keys, (run.last - 1) // self._block_keys + 1)

    def _parts(self, content: Entries) -> Iterator[tuple[int, Entries]]:
        """Split entries by run; yield each part with the number of its first block."""
        if content.keys is None:
            begin, last = content.first, content.first + len(content)
        elif len(content.keys):
            begin, last = int(content.keys[0]), int(content.keys[-1]) + 1
        else:
            return
        size = self._block_keys
        if begin // size == (last - 1) // size:
            yield begin // size, content
            return
        while begin < last:
            number = begin // size
            run = self._runs.get(number)
            end = min(last, (number + 1) * size if run is None else run.last)
            yield number, content.key_range(begin, end)
            begin = end


def check_weight(weight: float) -> None:
    """Check the weight of a push.

    Raises:
        ValueError: it is not finite or below 0.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"expected a finite weight of at least 0, got {weight}")


def check_states(update: Update, states: Mapping[str, Rows]) -> None:
    """Check that an update has states of these names.

    Raises:
        ValueError: it does not have one of them.
    """
    if unknown := states.keys() - set(update.states):
        known = ", ".join(update.states) or "none"
        raise ValueError(f"expected states of {type(update).__name__} among {known}, got {min(unknown)}")


class _BlockRun:
    """The rows of adjacent blocks in one array per name: "values", and the update's states.

    Args:
        first, last: range of its keys, `first` to `last` - 1.
        arrays: one row per key.
        keys: the keys that have rows, ascending; None if all of the range have.

    Attributes:
        first, last, arrays: as given.
    """

    def __init__(self, first: int, last: int, arrays: dict[str, Rows], keys: Keys | None = None) -> None:
        self.first, self.last = first, last
        self.arrays = arrays
        self._keys = keys

    @property
    def is_sparse(self) -> bool:
        """Whether only some keys of the range have rows."""
        return self._keys is not None

    def rows_of(self, first: int, last: int) -> dict[str, Rows]:
        """Return the rows of a range of keys, if it is not sparse."""
        begin, end = first - self.first, last - self.first
        return {name: rows[begin:end] for name, rows in self.arrays.items()}

    def apply(self, update: Update, content: Entries) -> None:
        """Apply a push."""
        if self._keys is not None:
            self._insert_keys(content.key_array())
        positions = self._positions(content)
        values = self.arrays["values"][positions]
        states = {name: self.arrays[name][positions] for name in update.states}
        update.apply(values, states, content.values)
        if not isinstance(positions, slice):  # indexing by an array has copied the rows
            self.arrays["values"][positions] = values
            for name, rows in states.items():
                self.arrays[name][positions] = rows

    def apply_contiguous(self, update: Update, first: int, rows: Rows) -> None:
        """Apply a push of contiguous keys."""
        if self._keys is not None:
            self.apply(update, Entries(first, rows))
            return
        states = self.rows_of(first, first + len(rows))
        update.apply(states.pop("values"), states, rows)

    def replace(self, content: Entries) -> None:
        """Apply a push that replaces (`Entries.is_replacement`): its keys get its values and states.

        States that it lacks become 0.
        """
        if self._keys is not None:
            self._insert_keys(content.key_array())
        positions = self._positions(content)
        assert content.meta is not None
        given = {"values": content.values, **(content.meta.states or {})}
        for name, rows in self.arrays.items():
            rows[positions] = given.get(name, 0)

    def read_into(self, result: Entries, name: str = "values") -> None:
        """Copy the rows of a name into the given entries, by their keys."""
        values = self.arrays[name]
        if self._keys is None:
            result.values[...] = values[self._positions(result)]
        elif len(self._keys):
            keys = result.key_array()
            positions = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            is_present = self._keys[positions] == keys
            result.values[...] = 0
            result.values[is_present] = values[positions[is_present]]
        else:
            result.values[...] = 0

    def copy_out(self, first: int, last: int) -> BlockContents:
        """Return a copy of a block."""
        if self._keys is None:
            return {name: rows.copy() for name, rows in self.rows_of(first, last).items()}
        return {name: rows.copy() for name, rows in self.arrays.items()} | {"keys": self._keys}

    def copy_in(self, content: BlockContents) -> None:
        """Replace all rows by a copy from `copy_out`."""
        self.arrays = {name: np.array(content[name]) for name in self.arrays}
        if self._keys is not None:
            self._keys = np.array(content["keys"])

    def _positions(self, content: Entries) -> slice | NDArray[np.int64]:
        if self._keys is not None:
            return np.searchsorted(self._keys, content.key_array())
        if content.keys is None:
            return slice(content.first - self.first, content.first - self.first + len(content))
        return content.keys - self.first

    def _insert_keys(self, keys: Keys) -> None:
        """Insert rows of zeros for those of these keys that have none."""
        assert self._keys is not None
        merged = np.union1d(self._keys, keys)
        if len(merged) == len(self._keys):
            return
        before = np.searchsorted(merged, self._keys)
        for name, array in self.arrays.items():
            grown = np.zeros((len(merged), *array.shape[1:]), array.dtype)
            grown[before] = array
            self.arrays[name] = grown
        self._keys = merged
