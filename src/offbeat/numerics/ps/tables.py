"""The values of a parameter server: what one server has of a namespace, in blocks of neighbouring keys.

Nothing here knows which blocks a server is to have, or how they come to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from offbeat.numerics.ps.entries import PLAIN, Entries, Keys, Rows, Terms, problem_of, problem_of_keys, summed
from offbeat.numerics.ps.memory import page_aligned
from offbeat.numerics.ps.updates import Update, with_settings

Contents: TypeAlias = dict[str, Any]  # of a block, as plain data and arrays
Empty: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Rows]  # a new array, whose values are anything
Aggregate: TypeAlias = Literal["sum", "mean", "each"]

_READ_BYTES_MAX = 2**31  # in one message
DENSE_KEYS_MAX = 2**20  # in a block; with more, a block keeps the keys that it has
# Of values of blocks that lie together: with more, a call of the update costs nothing beside its work.
_TOGETHER_BYTES_MAX = 1024 * 1024
_PAGES_BYTES_MIN = 64 * 1024  # of values of a block that begin where a page does


class ArrayTable:
    """One namespace on one server: rows of numbers, and what an update keeps besides them.

    A key that was never pushed is zero, and so is what is kept besides it. Blocks come into being when
    something is pushed to them. One with up to 2**20 keys has an array of all of them; a larger one keeps the
    keys that were pushed, in order, and takes time for all of them when there is a new one. Small blocks that
    are pushed together come to lie together, up to 1 MiB of values, until one of them goes.

    Args:
        keys: of the namespace: 0 to `keys` - 1.
        block_keys: neighbours that come and go together.
        update: what becomes of what is pushed.
        width: numbers in a row; 0 for a number a key, not a row of one.
        dtype: float32 or float64.
        aggregate: what is pushed together counts as its sum, as its mean, or each by itself, one after the
            other.
        may_fail: the update may raise, as one of the user's own; `rehearse` is to find out.
        empty: (shape, dtype): memory for what is read, as `np.empty` gives it.

    Raises:
        ValueError: an argument out of range.
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
        empty: Empty = np.empty,
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
        self._stretches: dict[int, _Stretch] = {}  # by block
        self._empty = empty

    @property
    def looks_once(self) -> bool:
        """Whether what is pushed is looked at when it is applied, and not by a rehearsal before."""
        return not self._may_fail

    @property
    def size_bytes(self) -> int:
        """What the values, and what is kept besides them, take."""
        stretches = set(self._stretches.values())
        return sum(array.nbytes for stretch in stretches for array in stretch.arrays.values())

    def check(self, content: Entries, first: int, last: int) -> None:
        """See whether something can be pushed to keys `first` to `last` - 1.

        Raises:
            ValueError: it is of other keys, or of other rows than there are here, or its terms cannot be.
        """
        if not isinstance(content, Entries):
            raise ValueError(f"expected Entries, got {type(content).__name__}")
        rows = content.values
        if rows.dtype != self._dtype or rows.shape[1:] != self._shape:
            expected, came = (self._dtype, self._shape), (rows.dtype, rows.shape[1:])
            raise ValueError(
                f"expected rows of {expected[0]} and shape {expected[1]}, got {came[0]} and {came[1]}"
            )
        if problem := problem_of(content, first, last):
            raise ValueError(problem)
        if content.terms is not None:
            check_weight(content.terms.weight)
            self._update_for(content.terms)
            for name, one in (content.terms.states or {}).items():
                if one.dtype != rows.dtype or one.shape != rows.shape:
                    expected, came = (rows.dtype, rows.shape), (one.dtype, one.shape)
                    raise ValueError(f"expected {name} as {expected}, beside the values, got {came}")

    def rehearse(self, first: int, last: int, content: Entries) -> None:
        """See, on copies, whether the update can take what was pushed for keys `first` to `last` - 1.

        Raises:
            ValueError: it raises, or has no such states.
        """
        if content.terms is not None and content.terms.states is not None:
            check_states(self._update, content.terms.states)
            return
        if not self._may_fail:
            return
        for number, part in self._parts(content):
            if not len(part):
                continue
            rows = {name: np.zeros_like(part.values) for name in ("values", *self._update.states)}
            if (stretch := self._stretches.get(number)) is not None:
                for name, row in rows.items():
                    stretch.read_into(Entries(part.first, row, part.keys), name)
            pushed = part.values.view()
            pushed.flags.writeable = False  # replicas get it, too
            try:
                self._update.apply(rows.pop("values"), rows, pushed)
            except Exception as error:  # whatever a user's code does
                raise ValueError(f"the update cannot take what was pushed: {error!r}") from error

    def apply(self, first: int, last: int, content: Entries) -> None:
        """Take what was pushed for keys `first` to `last` - 1; of those that it does not list, nothing."""
        if content.keys is None and content.terms is None:
            self._apply_neighbours(content.first, content.values)
            return
        update = self._update if content.terms is None else self._update_for(content.terms)
        for number, part in self._parts(content):
            if not len(part):
                continue
            stretch = self._stretch(number)
            if content.replaces:
                stretch.replace(part)
            else:
                stretch.apply(update, part)

    def _apply_neighbours(self, first: int, rows: Rows) -> None:
        """Take rows of neighbouring keys without terms: nearly always, and often few of many blocks."""
        begin, last = first, first + len(rows)
        while begin < last:
            stretch = self._stretch(begin // self._block_keys)
            if stretch.last < last:
                stretch = self._put_together(stretch, last)
            end = min(last, stretch.last)
            stretch.apply_neighbours(self._update, begin, rows[begin - first : end - first])
            begin = end

    def _put_together(self, stretch: _Stretch, last: int) -> _Stretch:
        """Let blocks lie together that are pushed together, from those of a stretch on; return their stretch.

        Args:
            last: the last key that is pushed, + 1.
        """
        row_bytes = self._dtype.itemsize * math.prod(self._shape)
        found, end = [stretch], stretch.last
        while end < last and not stretch.is_sparse:
            following = self._stretch(end // self._block_keys)
            if (following.last - stretch.first) * row_bytes > _TOGETHER_BYTES_MAX:
                break
            found.append(following)
            end = following.last
        if len(found) == 1:
            return stretch
        arrays = {name: self._rows(end - stretch.first, np.empty) for name in stretch.arrays}
        for name, rows in arrays.items():
            np.concatenate([one.arrays[name] for one in found], out=rows)
        together = _Stretch(stretch.first, end, arrays)
        self._stretches.update(dict.fromkeys(self._blocks_of(together), together))
        return together

    def _take_out(self, number: int) -> None:
        """Forget a block; those with which it lies together get memory of their own."""
        stretch = self._stretches.pop(number, None)
        if stretch is not None:
            for other in self._blocks_of(stretch):
                if other != number:
                    first, last = self._range_of(other)
                    self._stretches[other] = _Stretch(first, last, stretch.copy_out(first, last))

    def read(self, first: int, last: int, keys: Keys | None, states: bool = False) -> Entries:
        """Return the values of keys `first` to `last` - 1, or of those of them that `keys` lists.

        Args:
            states: with all that the update keeps besides them.

        Raises:
            ValueError: what is listed is no such keys, or the values are of more than 2 GiB.
        """
        if keys is not None:
            problem = problem_of_keys(keys, first, last) if isinstance(keys, np.ndarray) else "expected keys"
            if problem:
                raise ValueError(problem)
        count = last - first if keys is None else len(keys)
        names = tuple(self._update.states) if states else ()
        size_bytes = count * math.prod(self._shape) * self._dtype.itemsize * (1 + len(names))
        if size_bytes > _READ_BYTES_MAX:
            raise ValueError(f"expected values of at most {_READ_BYTES_MAX} bytes, got {size_bytes}")
        wanted = self._read(first, count, keys, "values")
        if states:
            rows = {name: self._read(first, count, keys, name).values for name in names}
            wanted.terms = Terms(states=rows)
        return wanted

    def _read(self, first: int, count: int, keys: Keys | None, name: str) -> Entries:
        wanted = Entries(first, self._empty((count, *self._shape), self._dtype), keys)
        for number, part in self._parts(wanted):
            stretch = self._stretches.get(number)
            if stretch is None:
                part.values[...] = 0
            else:
                stretch.read_into(part, name)
        return wanted

    def cut(self, content: Entries, first: int, last: int) -> Entries:
        """Return what `content` has for keys `first` to `last` - 1."""
        return content.cut(first, last)

    def aggregated(self, contents: Sequence[Entries], first: int, last: int) -> Entries:
        """Return as one what `contents` have for keys `first` to `last` - 1.

        That is their sum, added up by key in their order; or their mean, the sum divided by that of the
        weights. The settings of the first one that has a weight hold. Or, where each counts by itself, it is
        what the update makes of one after the other, divided by its weight and with its settings: rows that
        take the place of what is there. Where all weights are 0, there is nothing to apply: no keys. Where
        some replace what is there, the first of them does, and nothing else is applied.
        """
        if self._aggregate != "each" and all(one.terms is None for one in contents):
            total = summed(contents, first, last)
            if self._aggregate == "mean":
                total.values /= len(contents)
            return total
        for one in contents:
            if one.replaces:
                return one.cut(first, last)
        weight = math.fsum((one.terms or PLAIN).weight for one in contents)
        if not weight:
            return Entries(first, np.zeros((0, *self._shape), self._dtype), np.zeros(0, np.int64))
        if self._aggregate == "each":
            return self._in_turn(contents, first, last)
        total = summed(contents, first, last)
        if self._aggregate == "mean":
            total.values /= weight
        every = [one.terms or PLAIN for one in contents]
        settings = next(terms.settings for terms in every if terms.weight)
        total.terms = None if settings is None else Terms(settings=settings)
        return total

    def _in_turn(self, contents: Sequence[Entries], first: int, last: int) -> Entries:
        contents = [one.cut(first, last) for one in contents if (one.terms or PLAIN).weight]
        listed = [one.keys for one in contents if one.keys is not None]
        keys = np.unique(np.concatenate(listed)) if len(listed) == len(contents) else None
        count = last - first if keys is None else len(keys)
        names = ("values", *self._update.states)
        rows = {name: self._read(first, count, keys, name).values for name in names}
        scratch = _Stretch(first, last, rows, keys)
        for one in contents:
            terms = one.terms or PLAIN
            scratch.apply(self._update_for(terms), Entries(one.first, one.values / terms.weight, one.keys))
        return Entries(first, rows.pop("values"), keys, Terms(states=rows))

    def copy_out(self, first: int, last: int) -> Contents | None:
        """Return all that is kept of the block of keys `first` to `last` - 1; None where that is nothing."""
        stretch = self._stretches.get(first // self._block_keys)
        return None if stretch is None else stretch.copy_out(first, last)

    def copy_in(self, first: int, last: int, content: Contents | None) -> None:
        """Replace all that is kept of the block of keys `first` to `last` - 1."""
        number = first // self._block_keys
        self._take_out(number)
        if content is not None:
            self._stretch(number).copy_in(content)

    def drop(self, first: int, last: int) -> None:
        """Forget the block of keys `first` to `last` - 1."""
        self._take_out(first // self._block_keys)

    def _update_for(self, terms: Terms) -> Update:
        """The update with the settings of a push.

        Raises:
            ValueError: it does not take them.
        """
        if terms.settings is None:
            return self._update
        if self._may_fail:
            raise ValueError("expected no settings for a function of the user's own")
        return with_settings(self._update, terms.settings)

    def _stretch(self, number: int) -> _Stretch:
        """Return the stretch in which a block lies; the block is made if need be."""
        stretch = self._stretches.get(number)
        if stretch is None:
            stretch = self._stretches[number] = self._new_stretch(number)
        return stretch

    def _new_stretch(self, number: int) -> _Stretch:
        first, last = self._range_of(number)
        names = ("values", *self._update.states)
        is_sparse = last - first > DENSE_KEYS_MAX
        rows = 0 if is_sparse else last - first
        arrays = {name: self._rows(rows, np.zeros) for name in names}
        return _Stretch(first, last, arrays, np.zeros(0, np.int64) if is_sparse else None)

    def _rows(self, count: int, make: Callable[..., Rows]) -> Rows:
        """Return new rows, as `np.empty` or `np.zeros` makes them."""
        shape = (count, *self._shape)
        size_bytes = math.prod(shape) * self._dtype.itemsize
        if size_bytes < _PAGES_BYTES_MIN:
            return make(shape, self._dtype)
        rows: Rows = page_aligned(size_bytes, make).view(self._dtype).reshape(shape)
        return rows

    def _range_of(self, number: int) -> tuple[int, int]:
        first = number * self._block_keys
        return first, min(first + self._block_keys, self._keys)

    def _blocks_of(self, stretch: _Stretch) -> range:
        return range(stretch.first // self._block_keys, (stretch.last - 1) // self._block_keys + 1)

    def _parts(self, content: Entries) -> Iterator[tuple[int, Entries]]:
        """Yield what is for blocks that lie together, and the number of the first of them."""
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
            stretch = self._stretches.get(number)
            end = min(last, (number + 1) * size if stretch is None else stretch.last)
            yield number, content.cut(begin, end)
            begin = end


def check_weight(weight: float) -> None:
    """See whether something can be a push's weight.

    Raises:
        ValueError: it is no finite number of at least 0.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"expected a finite weight of at least 0, got {weight}")


def check_states(update: Update, states: Mapping[str, Rows]) -> None:
    """See whether these are names of what an update keeps.

    Raises:
        ValueError: one is none.
    """
    if unknown := states.keys() - set(update.states):
        known = ", ".join(update.states) or "none"
        raise ValueError(f"expected states of {type(update).__name__} among {known}, got {min(unknown)}")


class _Stretch:
    """The rows of neighbouring blocks, by name: "values", and what the update keeps besides them.

    Args:
        first, last: the keys that it may have: `first` to `last` - 1.
        arrays: one row a key.
        keys: whose they are, ascending; None where they are of all keys.

    Attributes:
        first, last, arrays: as given.
    """

    def __init__(self, first: int, last: int, arrays: dict[str, Rows], keys: Keys | None = None) -> None:
        self.first, self.last = first, last
        self.arrays = arrays
        self._keys = keys

    @property
    def is_sparse(self) -> bool:
        """Whether it has some of the keys that it may have."""
        return self._keys is not None

    def rows_of(self, first: int, last: int) -> dict[str, Rows]:
        """Return the rows of some keys, where it has all."""
        begin, end = first - self.first, last - self.first
        return {name: rows[begin:end] for name, rows in self.arrays.items()}

    def apply(self, update: Update, content: Entries) -> None:
        """Take what was pushed."""
        if self._keys is not None:
            self._make_room(content.listed())
        places = self._places(content)
        values = self.arrays["values"][places]
        states = {name: self.arrays[name][places] for name in update.states}
        update.apply(values, states, content.values)
        if not isinstance(places, slice):  # these were copies
            self.arrays["values"][places] = values
            for name, rows in states.items():
                self.arrays[name][places] = rows

    def apply_neighbours(self, update: Update, first: int, rows: Rows) -> None:
        """Take what was pushed of neighbouring keys."""
        if self._keys is not None:
            self.apply(update, Entries(first, rows))
            return
        states = self.rows_of(first, first + len(rows))
        update.apply(states.pop("values"), states, rows)

    def replace(self, content: Entries) -> None:
        """Take what was pushed in the place of what is there."""
        if self._keys is not None:
            self._make_room(content.listed())
        places = self._places(content)
        assert content.terms is not None
        given = {"values": content.values, **(content.terms.states or {})}
        for name, rows in self.arrays.items():
            rows[places] = given.get(name, 0)

    def read_into(self, wanted: Entries, name: str = "values") -> None:
        """Write what is kept of these keys under a name into their rows."""
        values = self.arrays[name]
        if self._keys is None:
            wanted.values[...] = values[self._places(wanted)]
        elif len(self._keys):
            keys = wanted.listed()
            places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            is_there = self._keys[places] == keys
            wanted.values[...] = 0
            wanted.values[is_there] = values[places[is_there]]
        else:
            wanted.values[...] = 0

    def copy_out(self, first: int, last: int) -> Contents:
        """Return all that there is of a block's keys, as it is now."""
        if self._keys is None:
            return {name: rows.copy() for name, rows in self.rows_of(first, last).items()}
        return {name: rows.copy() for name, rows in self.arrays.items()} | {"keys": self._keys}

    def copy_in(self, content: Contents) -> None:
        """Take over what `copy_out` gave."""
        self.arrays = {name: np.array(content[name]) for name in self.arrays}
        if self._keys is not None:
            self._keys = np.array(content["keys"])

    def _places(self, content: Entries) -> slice | NDArray[np.int64]:
        if self._keys is not None:
            return np.searchsorted(self._keys, content.listed())
        if content.keys is None:
            return slice(content.first - self.first, content.first - self.first + len(content))
        return content.keys - self.first

    def _make_room(self, keys: Keys) -> None:
        assert self._keys is not None
        together = np.union1d(self._keys, keys)
        if len(together) == len(self._keys):
            return
        before = np.searchsorted(together, self._keys)
        for name, array in self.arrays.items():
            grown = np.zeros((len(together), *array.shape[1:]), array.dtype)
            grown[before] = array
            self.arrays[name] = grown
        self._keys = together
