"""Filters that make messages between clients and servers smaller: chained to encode, undone in reverse.

A filter replaces keys by their hash, compresses or rounds values, or omits entries. The sender's chain
encodes and the receiver's, built from equal filters, decodes; a filter leaves the data that its inverse needs
in the message's notes. Lossy filters are undone as far as possible. Some filters remember what was sent, so
that both ends must start again with new chains if either is replaced. Nothing here sends anything, knows the
peer or the meaning of values, or reads a clock.

Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, sections
3.6 ("user-defined filters") and 4.2 ("messages"); M. Li, D. G. Andersen, A. Smola and K. Yu, "Communication
efficient distributed machine learning with the parameter server", NIPS 2014.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.numerics.ps.entries import (
    KEY_STOP_MAX,
    Entries,
    Keys,
    Rows,
    find_keys_problem,
    find_rows_problem,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Mask: TypeAlias = NDArray[np.bool_]  # (K,)

SIGNATURE_BYTES: Final = 16
_FLOATS: Final = ("float32", "float64")
_ALGORITHM: Final = "zstd"  # of compression
_LEVEL_MAX: Final = 19
_WINDOW_LOG_MAX: Final = 23  # zstd uses no larger window up to level 19


class UnknownKeysError(OffbeatError):
    """The receiver does not know the keys of a signature: the sender must send the message with its keys.

    Attributes:
        signature: the signature that was received in place of the keys.
    """

    def __init__(self, signature: bytes) -> None:
        super().__init__(
            f"expected the signature of keys that came before, got {signature.hex()}; request a resend"
        )
        self.signature = signature


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FilterMessage:
    """Values of some of the keys `first` to `last` - 1, before or after encoding.

    Attributes:
        namespace: the namespace of the keys.
        first, last: range of keys `first` to `last` - 1.
        time: the sender's time of this message, from which time-dependent thresholds are computed.
        keys: listed keys; None for all of the range, or if key caching has removed them.
        known_keys: in a response, the keys of its rows, which the requester knows; they are not sent.
        values: one row per key, float32 or float64, or bytes after fixed point; None if they are in `body`.
        body: compressed values.
        notes: data that each filter needs to decode, by filter, as plain data.
    """

    namespace: str
    first: int
    last: int
    time: int = 0
    keys: Keys | None
    known_keys: Keys | None = None
    values: Rows | None
    body: bytes | None = None
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_entries(
        cls, namespace: str, first: int, last: int, content: Entries, *, time: int = 0
    ) -> FilterMessage:
        """Return a message to encode: values of keys `first` to `last` - 1, or of listed ones of them.

        Raises:
            ValueError: there is not one row per key.
        """
        if problem := find_rows_problem(content, first, last):
            raise ValueError(problem)
        return cls(
            namespace=namespace, first=first, last=last, time=time, keys=content.keys, values=content.values
        )

    @classmethod
    def response(cls, namespace: str, values: Rows, known_keys: Keys | None) -> FilterMessage:
        """Return a response to encode: rows by position, and their keys if they are known."""
        return cls(
            namespace=namespace, first=0, last=len(values), keys=None, known_keys=known_keys, values=values
        )

    @property
    def entries(self) -> Entries:
        """The entries of a message that is not encoded, as they were given to `from_entries`."""
        assert self.values is not None
        return Entries(self.first, self.values, self.keys)

    @property
    def size_bytes(self) -> int:
        """Size of keys, values, body and notes in bytes, without framing."""
        arrays = sum(array.nbytes for array in (self.keys, self.values) if array is not None)
        notes = sum(_size_bytes(list(note.values())) for note in self.notes.values())
        return arrays + len(self.body or b"") + notes


class Filter(Protocol):
    """Encodes messages to one peer, or decodes those from one peer.

    Properties of a message that filters need or remove: "keys"; "numbers": values are floats; "bytes": values
    are an array; "sums": the receiver adds the values; "states": the receiver assigns them.
    """

    @property
    def name(self) -> str:
        """Name of the filter in reports and notes."""

    @property
    def needs(self) -> frozenset[str]:
        """Properties that the message must have."""

    @property
    def removes(self) -> frozenset[str]:
        """Properties that the message no longer has for later filters."""

    def encode(self, message: FilterMessage) -> FilterMessage:
        """Return the encoded message; `message` is not changed."""

    def decode(self, message: FilterMessage) -> FilterMessage:
        """Undo `encode`, as far as that is possible.

        Raises:
            ProtocolError: the message cannot come from `encode`.
        """


class FilterBytes(NamedTuple):
    """Bytes before and after a filter."""

    in_bytes: int
    out_bytes: int


class FilterChain:
    """Several filters in series, for one direction and one peer.

    Both ends have a chain of equal filters: the sender's only encodes and the receiver's only decodes. If
    either end is replaced, both start with a new chain.

    Args:
        filters: in the order in which they encode; each kind at most once.

    Raises:
        ValueError: an earlier filter removes a property that a later one needs.
    """

    def __init__(self, filters: Iterable[Filter]) -> None:
        self._filters = tuple(filters)
        for index, one in enumerate(self._filters):
            for other in self._filters[:index]:
                if one.name == other.name:
                    raise ValueError(f"expected {one.name} once, got it twice")
                if missing := one.needs & other.removes:
                    lacks = " and ".join(sorted(missing))
                    raise ValueError(f"expected no {one.name} behind {other.name}, which removes its {lacks}")
        self._passed = {one.name: FilterBytes(0, 0) for one in self._filters}

    def encode(self, message: FilterMessage) -> FilterMessage:
        """Return the encoded message.

        Raises:
            ValueError: the message is invalid, or holds something that a filter cannot send. The chain must
                not be used after that, since filters may count unsent entries as sent.
        """
        _check(message, ValueError)
        _check_rows(message, ValueError)
        if message.notes:
            raise ValueError(f"expected a message without notes, got those of {sorted(message.notes)}")
        for one in self._filters:
            encoded = one.encode(message)
            self._count(one, message.size_bytes, encoded.size_bytes)
            message = encoded
        return message

    def decode(self, message: FilterMessage) -> FilterMessage:
        """Return what was given to the sender's chain, as far as its filters can be undone.

        Raises:
            UnknownKeysError: the sender must `resend` the message, to be decoded in its place.
            ProtocolError: the message cannot come from a chain of the same filters.
        """
        _check(message, ProtocolError)
        for one in reversed(self._filters):
            decoded = one.decode(message)
            self._count(one, message.size_bytes, decoded.size_bytes)
            message = decoded
        if message.notes:
            raise ProtocolError(
                f"expected notes of the filters here only, got those of {sorted(message.notes)}"
            )
        _check_rows(message, ProtocolError)
        return message

    def resend(self, encoded: FilterMessage) -> FilterMessage:
        """Return a message from `encode` with its keys, for a receiver that does not know them.

        Encoding the content again would be wrong with filters that draw random numbers or remember entries.

        Raises:
            ValueError: it has its keys already, or the chain does not cache keys.
            UnknownKeysError: the keys have been evicted here too; both ends must start with a new chain.
        """
        positions = [index for index, one in enumerate(self._filters) if isinstance(one, KeyCaching)]
        if not positions:
            raise ValueError(f"expected a chain with key caching, got {sorted(self._passed)}")
        caching = self._filters[positions[0]]
        assert isinstance(caching, KeyCaching)
        message = caching.resend(encoded)
        self._count(caching, 0, message.size_bytes)
        for one in self._filters[positions[0] + 1 :]:
            self._count(one, message.size_bytes, message.size_bytes)
        return message

    def report(self) -> dict[str, FilterBytes]:
        """Return the bytes before and after each filter, by its name."""
        return dict(self._passed)

    def _count(self, one: Filter, in_bytes: int, out_bytes: int) -> None:
        before = self._passed[one.name]
        self._passed[one.name] = FilterBytes(before.in_bytes + in_bytes, before.out_bytes + out_bytes)


class KeyCaching:
    """Sends a hash in place of keys that were sent before.

    Both ends remember the most recently used key lists, by namespace and range. As long as messages arrive in
    order and none is lost, both remember the same lists; otherwise the receiver detects that it does not know
    a list, and never confuses it with another.

    Source: OSDI'14, section 4.2. Deviation: the hash is BLAKE2b of 128 bits over the complete list (the
    authors' code hashes 2 kB of it), several lists of one range are remembered, and both ends evict lists.

    Args:
        entries: number of lists that each end remembers, at least 1; more than messages in flight.

    Raises:
        ValueError: `entries` below 1.
    """

    name: Final = "key caching"
    needs: Final = frozenset({"keys"})
    removes: Final = frozenset({"keys"})

    def __init__(self, entries: int) -> None:
        if entries < 1:
            raise ValueError(f"expected at least 1 entry, got {entries}")
        self._entries = entries
        self._sent: OrderedDict[tuple[str, int, int, bytes], Keys] = OrderedDict()
        self._received: OrderedDict[tuple[str, int, int, bytes], Keys] = OrderedDict()

    def encode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.encode`."""
        if message.keys is None:
            return message
        signature = _signature(message.keys)
        entry = (message.namespace, message.first, message.last, signature)
        is_known = entry in self._sent
        self._remember(self._sent, entry, self._sent.get(entry, message.keys))
        keys = None if is_known else message.keys
        return replace(message, keys=keys, notes={**message.notes, self.name: {"signature": signature}})

    def decode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.decode`.

        Raises:
            UnknownKeysError: the message has no keys, and its signature is not known.
        """
        if message.keys is None and self.name not in message.notes:
            return message
        (signature,) = _read_note(message, self.name, signature=bytes)
        if len(signature) != SIGNATURE_BYTES:
            raise ProtocolError(f"expected a signature of {SIGNATURE_BYTES} bytes, got {len(signature)}")
        entry = (message.namespace, message.first, message.last, signature)
        keys = message.keys
        if keys is None:
            keys = self._received.get(entry)
            if keys is None:
                raise UnknownKeysError(signature)
        elif _signature(keys) != signature:
            raise ProtocolError(f"expected keys with the signature {signature.hex()}, got others")
        self._remember(self._received, entry, keys)
        return replace(message, keys=self._received[entry], notes=_without(message, self.name))

    def resend(self, encoded: FilterMessage) -> FilterMessage:
        """See `FilterChain.resend`."""
        signature = encoded.notes.get(self.name, {}).get("signature")
        if encoded.keys is not None or signature is None:
            raise ValueError("expected a message with a signature in place of its keys, got one without")
        entry = (encoded.namespace, encoded.first, encoded.last, signature)
        if entry not in self._sent:
            raise UnknownKeysError(signature)
        self._sent.move_to_end(entry)
        return replace(encoded, keys=self._sent[entry])

    def _remember(
        self,
        lists: OrderedDict[tuple[str, int, int, bytes], Keys],
        entry: tuple[str, int, int, bytes],
        keys: Keys,
    ) -> None:
        if entry not in lists:
            lists[entry] = keys.copy()  # protects it from changes by the caller
            lists[entry].flags.writeable = False
        lists.move_to_end(entry)
        if len(lists) > self._entries:
            lists.popitem(last=False)


class Compression:
    """Compresses values without loss; a row of zeros costs one bit.

    Only rows whose bytes are all zero are omitted: -0.0 and the smallest numbers are restored exactly.

    The message names the algorithm, and the receiver refuses one that it does not have.

    Source: OSDI'14, section 4.2. Deviation: zstd in place of Snappy, preceded by a bitmap of the non-zero
    rows where that is smaller.

    Args:
        level: zstd's level, 1 (fastest) to 19 (smallest).
        size_bytes_max: limit on the size of a message's values, both to send and to decompress.

    Raises:
        ValueError: invalid level or size.
    """

    name: Final = "compression"
    needs: Final = frozenset({"bytes"})
    removes: Final = frozenset({"bytes", "numbers"})

    def __init__(self, level: int = 1, *, size_bytes_max: int = 1 << 30) -> None:
        if not 1 <= level <= _LEVEL_MAX:
            raise ValueError(f"expected a level from 1 to {_LEVEL_MAX}, got {level}")
        if size_bytes_max < 1:
            raise ValueError(f"expected values of at least 1 byte at most, got {size_bytes_max}")
        self._options: dict[int, int] = {
            zstd.CompressionParameter.compression_level: level,
            zstd.CompressionParameter.checksum_flag: 1,
        }
        self._size_bytes_max = size_bytes_max

    def encode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.encode`.

        Raises:
            ValueError: the values are larger than `size_bytes_max`.
        """
        values = message.values
        assert values is not None
        if values.nbytes > self._size_bytes_max:
            raise ValueError(f"expected values of at most {self._size_bytes_max} bytes, got {values.nbytes}")
        rows = _bits_of_rows(values)
        is_nonzero = rows[:, 0] != 0 if rows.shape[1] == 1 else rows.any(axis=1)
        kept_bytes = int(np.count_nonzero(is_nonzero)) * rows.itemsize * rows.shape[1]
        is_sparse = _bitmap_bytes(len(rows)) + kept_bytes < rows.nbytes
        plain = (
            np.packbits(is_nonzero).tobytes() + rows[is_nonzero].tobytes() if is_sparse else rows.tobytes()
        )
        note = {
            "algorithm": _ALGORITHM,
            "dtype": values.dtype.name,
            "shape": list(values.shape),
            "sparse": is_sparse,
        }
        body = zstd.compress(plain, options=self._options)
        return replace(message, values=None, body=body, notes={**message.notes, self.name: note})

    def decode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.decode`."""
        algorithm, dtype, shape, is_sparse = _read_note(
            message, self.name, algorithm=str, dtype=str, shape=list, sparse=bool
        )
        if algorithm != _ALGORITHM:
            raise ProtocolError(
                f"expected values compressed with {_ALGORITHM}, got {algorithm[:20]!r}; "
                f"all nodes of a job need the same version of offbeat"
            )
        if dtype not in (*_FLOATS, "uint8"):
            raise ProtocolError(f"expected values of float32, float64 or uint8, got {dtype[:20]!r}")
        if len(shape) not in (1, 2) or not all(type(n) is int and n >= 0 for n in shape) or 0 in shape[1:]:
            raise ProtocolError(f"expected a shape of rows, got {str(shape)[:80]}")
        width_bytes = np.dtype(dtype).itemsize * (shape[1] if shape[1:] else 1)
        size_bytes = shape[0] * width_bytes
        if max(size_bytes, width_bytes) > self._size_bytes_max:
            raise ProtocolError(f"expected values of at most {self._size_bytes_max} bytes, got {size_bytes}")
        plain = np.frombuffer(_decompress(message.body, size_bytes), np.uint8)
        is_nonzero, kept_bytes = None, size_bytes
        if is_sparse:
            bitmap_bytes = _bitmap_bytes(shape[0])
            is_nonzero = _unpack_bits(plain[:bitmap_bytes], shape[0])
            plain = plain[bitmap_bytes:]
            kept_bytes = int(np.count_nonzero(is_nonzero)) * width_bytes
        if plain.nbytes != kept_bytes:
            raise ProtocolError(f"expected {kept_bytes} bytes of values, got {plain.nbytes}")
        if is_nonzero is None:
            values = plain.copy().view(dtype).reshape(shape)
        else:
            values = np.zeros(shape, dtype)
            values[is_nonzero] = plain.view(dtype).reshape(-1, *shape[1:])
        return replace(message, values=values, body=None, notes=_without(message, self.name))


class SignificantlyModified:
    """Omits entries that have hardly changed since they were last sent.

    An entry is sent if `|w - w_last_sent| > threshold` for any value of its row, or if it was never sent. An
    omitted entry is compared with the values last sent, not with those last offered: small changes accumulate
    until they are sent, and the receiver's value of a key differs by at most the threshold of the message
    that last offered it. That holds if every encoded message arrives. Values must be states, which the
    receiver assigns; non-finite ones are always sent.

    For messages with `known_keys` (responses to pulls) the receiver also remembers values, and fills in the
    omitted ones; a bitmap, one bit per row, marks the rows that were sent. Each end remembers one row per key
    that was ever sent, as long as the chain exists.

    Source: OSDI'14, section 3.6; NIPS'14 for thresholds of O(1/t). Deviation: an entry that was never sent is
    sent even if it is small, since the receiver has no earlier value of it. Fixed point after this filter
    adds its own error to the bound.

    Args:
        threshold: at least 0, or a function from a message's `time` to such a number.

    Raises:
        ValueError: invalid threshold.
    """

    name: Final = "significantly modified"
    needs: Final = frozenset({"keys", "numbers", "states"})
    removes: Final = frozenset({"sums"})

    def __init__(self, threshold: float | Callable[[int], float]) -> None:
        self._threshold = threshold
        self._sent: dict[str, _LastRows] = {}  # by namespace
        self._received: dict[str, _LastRows] = {}  # by namespace, where the keys are known
        if not callable(threshold):
            self._threshold_at(0)

    def encode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.encode`.

        Raises:
            ValueError: rows have another dtype or width than before, or the threshold is below 0.
        """
        threshold = self._threshold_at(message.time)
        keys, values = (
            message.entries.key_array() if message.known_keys is None else message.known_keys,
            message.values,
        )
        assert values is not None
        sent = self._sent.setdefault(message.namespace, _LastRows(values))
        if problem := sent.problem_of(values):
            raise ValueError(problem)
        positions, is_known = sent.find(keys)
        with np.errstate(invalid="ignore", over="ignore"):
            change = np.abs(values[is_known].astype(np.float64) - sent.rows[positions[is_known]])
        is_near = change <= threshold
        kept = ~is_known
        kept[is_known] = ~(is_near if is_near.ndim == 1 else is_near.all(axis=1))
        sent.put(keys[kept], values[kept])
        if message.known_keys is None or kept.all():
            return _keep_only(message, kept)
        note = {"kept": np.packbits(kept).tobytes()}
        return replace(message, values=values[kept], notes={**message.notes, self.name: note})

    def decode(self, message: FilterMessage) -> FilterMessage:
        """Fill in omitted rows if the keys are known; otherwise the receiver has kept its values."""
        keys, values = message.known_keys, message.values
        if keys is None:
            return message
        kept = np.ones(len(keys), np.bool_)
        if self.name in message.notes:
            (bitmap,) = _read_note(message, self.name, kept=bytes)
            kept = _unpack_bits(np.frombuffer(bitmap, np.uint8), len(keys))
        if values is None or values.dtype.name not in _FLOATS or len(values) != kept.sum():
            raise ProtocolError(f"expected {kept.sum()} rows of floats, got {_described(values)}")
        received = self._received.setdefault(message.namespace, _LastRows(values))
        if problem := received.problem_of(values):
            raise ProtocolError(problem)
        received.put(keys[kept], values)
        if kept.all():
            return replace(message, notes=_without(message, self.name))
        positions, is_known = received.find(keys)
        if not is_known.all():
            raise ProtocolError(f"expected a row of key {keys[~is_known][0]}, never sent before, got none")
        return replace(message, values=received.rows[positions], notes=_without(message, self.name))

    def _threshold_at(self, time: int) -> float:
        threshold = self._threshold(time) if callable(self._threshold) else self._threshold
        if not threshold >= 0:
            raise ValueError(f"expected a threshold of at least 0, got {threshold} at time {time}")
        return threshold


class _LastRows:
    """The last row of each of some keys; initially none.

    Args:
        like: rows of the dtype and width to store.
    """

    def __init__(self, like: Rows) -> None:
        self._keys = np.zeros(0, np.int64)  # ascending
        self.rows = like[:0].copy()

    def problem_of(self, rows: Rows) -> str:
        """Return why rows differ in dtype or width from those stored; empty if they do not."""
        before, now = (f"{one.dtype} {one.shape[1:]}" for one in (self.rows, rows))
        return "" if before == now else f"expected rows of {before} as before, got {now}"

    def find(self, keys: Keys) -> tuple[NDArray[np.int64], Mask]:
        """Return the positions of keys in `rows`, or where to insert them, and a mask of the stored ones."""
        return _find(self._keys, keys)

    def put(self, keys: Keys, rows: Rows) -> None:
        """Store new rows of some ascending keys."""
        positions, is_found = self.find(keys)
        self.rows[positions[is_found]] = rows[is_found]
        if not is_found.all():
            new = ~is_found
            self._keys = np.insert(self._keys, positions[new], keys[new])
            self.rows = np.insert(self.rows, positions[new], rows[new], axis=0)


class RandomSkip:
    """Omits entries at random and scales up the rest, which leaves the expectation unchanged.

    Each entry is kept with the given probability, independently of others, and the receiver divides it by the
    probability. Values must be sums, which the receiver adds.

    Source: NIPS'14, appendix.

    Args:
        probability: probability to keep an entry, above 0, up to 1.
        seed: seed of the sender's random numbers.

    Raises:
        ValueError: invalid probability.
    """

    name: Final = "random skip"
    needs: Final = frozenset({"keys", "numbers", "sums"})
    removes: Final = frozenset({"states"})

    def __init__(self, probability: float, seed: int) -> None:
        if not 0 < probability <= 1:
            raise ValueError(f"expected a probability above 0 and up to 1, got {probability}")
        self._probability = float(probability)
        self._generator = np.random.default_rng(seed)

    def encode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.encode`."""
        assert message.values is not None
        kept = self._generator.random(len(message.values)) < self._probability
        note = {"probability": self._probability}
        return replace(_keep_only(message, kept), notes={**message.notes, self.name: note})

    def decode(self, message: FilterMessage) -> FilterMessage:
        """Divide the values that were kept by their probability; omitted ones stay omitted."""
        (probability,) = _read_note(message, self.name, probability=float)
        if not 0 < probability <= 1:
            raise ProtocolError(f"expected a probability above 0 and up to 1, got {probability}")
        if message.values is None or message.values.dtype.name not in _FLOATS:
            raise ProtocolError(f"expected values of float32 or float64, got {_described(message.values)}")
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            values = message.values / np.asarray(probability, message.values.dtype)
        return replace(message, values=values, notes=_without(message, self.name))


class FixedPoint:
    """Sends a value as an integer of 1 to 3 bytes: a step of an equidistant grid from lowest to highest.

    A value between two steps is rounded up with a probability of its distance from the lower one, in steps:
    its expectation is the value, and its error is less than a step, up to the rounding of floats. A step is
    the range of the message's values divided by 256 ** bytes_per_value - 1; equal values are exact.

    Source: the authors' code ("fixing float"). Deviation: their code rounds by a fair coin, which is unbiased
    only on average over fractions.

    Args:
        bytes_per_value: 1, 2 or 3.
        seed: seed of the sender's random numbers.

    Raises:
        ValueError: invalid number of bytes.
    """

    name: Final = "fixed point"
    needs: Final = frozenset({"numbers"})
    removes: Final = frozenset({"numbers"})

    def __init__(self, bytes_per_value: int, seed: int) -> None:
        if bytes_per_value not in (1, 2, 3):
            raise ValueError(f"expected 1, 2 or 3 bytes per value, got {bytes_per_value}")
        self._bytes_per_value = bytes_per_value
        self._steps = 256**bytes_per_value - 1
        self._generator = np.random.default_rng(seed)

    def encode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.encode`.

        Raises:
            ValueError: a value is not finite, or the range of values is not a finite float64.
        """
        assert message.values is not None
        values = message.values.astype(np.float64)
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
        span = high - low
        if not np.isfinite(span):
            raise ValueError(f"expected finite values in a finite range, got {low} to {high}")
        positions = (values - low) / span * self._steps if span else np.zeros_like(values)
        below = np.floor(positions)
        steps = (below + (self._generator.random(values.shape) < positions - below)).astype("<u4")
        rows = steps.reshape(-1, 1).view(np.uint8)[:, : self._bytes_per_value]
        width = message.values.shape[1] if message.values.ndim == 2 else 0
        note = {"low": low, "high": high, "dtype": message.values.dtype.name, "width": width}
        return replace(
            message,
            values=rows.reshape(len(values), self._bytes_per_value * max(width, 1)),
            notes={**message.notes, self.name: note},
        )

    def decode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.decode`."""
        low, high, dtype, width = _read_note(message, self.name, low=float, high=float, dtype=str, width=int)
        rows = message.values
        if not (low <= high and np.isfinite(high - low)) or dtype not in _FLOATS:
            raise ProtocolError(f"expected floats from low to high, got {dtype[:20]!r} from {low} to {high}")
        size_bytes = self._bytes_per_value * max(width, 1)
        if rows is None or rows.dtype != np.uint8 or rows.shape[1:] != (size_bytes,) or width < 0:
            raise ProtocolError(f"expected rows of {size_bytes} bytes, got {_described(rows)}")
        wide = np.zeros((len(rows) * max(width, 1), 4), np.uint8)
        wide[:, : self._bytes_per_value] = rows.reshape(-1, self._bytes_per_value)
        steps = wide.view("<u4").reshape((len(rows), width) if width else len(rows))
        values = np.clip(low + steps / self._steps * (high - low), low, high).astype(dtype)
        return replace(message, values=values, notes=_without(message, self.name))


class KKT:
    """Omits coordinates that are zero and will stay zero by the Karush-Kuhn-Tucker conditions.

    For a loss with the penalty `l1` |w|: a coordinate with w = 0 is skipped once `update_skipped` finds
    |g| <= l1 - margin, where g is its last aggregated gradient, until all coordinates are restored; meanwhile
    it need not be computed (`active`). One filter serves one namespace, and pushes to all of its servers.

    Source: NIPS'14, section 5. Deviation: the authors' code compares with < and marks skipped coordinates by
    NaN; here their keys are not listed. The caller changes the margin from pass to pass.

    Args:
        l1: weight of the penalty (λ), at least 0.

    Raises:
        ValueError: invalid weight.
    """

    name: Final = "KKT"
    needs: Final = frozenset({"keys", "numbers"})
    removes: Final[frozenset[str]] = frozenset()

    def __init__(self, l1: float) -> None:
        if not 0 <= l1 < np.inf:
            raise ValueError(f"expected a finite l1 of at least 0, got {l1}")
        self._l1 = l1
        self._margin = np.inf
        self._skipped = np.zeros(0, np.int64)  # ascending

    def set_margin(self, margin: float) -> None:
        """Set the margin for later calls of `update_skipped`.

        Args:
            margin: at least 0 (δ), initially infinite. A larger margin skips less, and one above `l1`
                nothing; an infinite one restores all coordinates, as is required before a solution is final.

        Raises:
            ValueError: invalid margin.
        """
        if not margin >= 0:
            raise ValueError(f"expected a margin of at least 0, got {margin}")
        self._margin = margin
        if margin == np.inf:
            self._skipped = self._skipped[:0]

    def update_skipped(self, keys: Keys, weights: Rows, gradients: Rows) -> None:
        """Skip coordinates that fulfil the conditions; skipped ones stay skipped.

        Args:
            keys: (K,), ascending, each once.
            weights: current weights, (K,).
            gradients: last aggregated gradients of the loss without the penalty, (K,).

        Raises:
            ValueError: arrays of different or wrong shapes.
        """
        if keys.ndim != 1 or not keys.shape == weights.shape == gradients.shape:
            shapes = f"{keys.shape}, {weights.shape} and {gradients.shape}"
            raise ValueError(f"expected a weight and a gradient per key, got shapes {shapes}")
        if problem := find_keys_problem(keys, 0, KEY_STOP_MAX):
            raise ValueError(problem)
        found = keys[(weights == 0) & (np.abs(gradients) <= self._l1 - self._margin)]
        positions, is_found = _find(self._skipped, found)
        if not is_found.all():
            self._skipped = np.insert(self._skipped, positions[~is_found], found[~is_found])

    def is_active(self, keys: Keys) -> Mask:
        """Return a mask of the keys that are not skipped, (K,)."""
        _, is_found = _find(self._skipped, keys)
        return ~is_found

    def encode(self, message: FilterMessage) -> FilterMessage:
        """See `Filter.encode`."""
        return _keep_only(message, self.is_active(message.entries.key_array()))

    def decode(self, message: FilterMessage) -> FilterMessage:
        """Return the message unchanged: keys that are not listed keep their values."""
        return message


def _check(message: FilterMessage, error: type[Exception]) -> None:
    """Check the range, keys and values that any message must have, encoded or not."""
    if not 0 <= message.first < message.last <= KEY_STOP_MAX:
        raise error(
            f"expected a range of keys within 0 to {KEY_STOP_MAX}, got {message.first} to {message.last}"
        )
    if not all(isinstance(note, dict) for note in message.notes.values()):
        raise error(f"expected notes by filter and name, got {str(message.notes)[:80]}")
    keys, values = message.keys, message.values
    if keys is not None and (problem := find_keys_problem(keys, message.first, message.last)):
        raise error(problem)
    if values is not None and (
        values.dtype not in (np.float32, np.float64, np.uint8) or values.ndim not in (1, 2)
    ):
        raise error(f"expected rows of floats or bytes in native byte order, got {_described(values)}")


def _check_rows(message: FilterMessage, error: type[Exception]) -> None:
    """Check that a message is valid before encoding or after decoding."""
    values = message.values
    if values is None or values.dtype.name not in _FLOATS or 0 in values.shape[1:]:
        raise error(f"expected values of float32 or float64, got {_described(values)}")
    if message.body is not None:
        raise error(f"expected a message without a body, got one of {len(message.body)} bytes")
    if problem := find_rows_problem(message.entries, message.first, message.last):
        raise error(problem)


def _described(values: Rows | None) -> str:
    return "none" if values is None else f"{values.dtype} of shape {values.shape}"


def _read_note(message: FilterMessage, name: str, **kinds: type) -> list[Any]:
    """Return the values of a filter's note, in the order of `kinds`, after checking their types."""
    note = message.notes.get(name)
    if note is None or note.keys() != kinds.keys() or any(type(note[k]) is not kinds[k] for k in kinds):
        expected = ", ".join(f"{word} ({kind.__name__})" for word, kind in kinds.items())
        raise ProtocolError(f"expected a note of {name} with {expected}, got {str(note)[:80]}")
    return [note[word] for word in kinds]


def _without(message: FilterMessage, name: str) -> dict[str, Mapping[str, Any]]:
    return {other: note for other, note in message.notes.items() if other != name}


def _size_bytes(note: Any) -> int:
    if isinstance(note, list):
        return sum(map(_size_bytes, note))
    if isinstance(note, str | bytes):
        return len(note)
    return 1 if isinstance(note, bool) else 8


def _signature(keys: Keys) -> bytes:
    return hashlib.blake2b(keys.astype("<i8").tobytes(), digest_size=SIGNATURE_BYTES).digest()


def _find(among: Keys, keys: Keys) -> tuple[NDArray[np.int64], Mask]:
    """Return positions of keys among ascending ones, or where to insert them, and a mask of those found."""
    positions = np.searchsorted(among, keys)
    is_found = positions < len(among)
    is_found[is_found] = among[positions[is_found]] == keys[is_found]
    return positions, is_found


def _keep_only(message: FilterMessage, kept: Mask) -> FilterMessage:
    """Return a message of only the entries to keep."""
    if kept.all():
        return message
    assert message.values is not None
    return replace(message, keys=message.entries.key_array()[kept], values=message.values[kept])


def _bits_of_rows(values: Rows) -> NDArray[np.unsignedinteger[Any]]:
    """Return the bits of values as unsigned integers, (rows, values in a row)."""
    width = values.shape[1] if values.ndim == 2 else 1
    return np.ascontiguousarray(values).view(f"u{values.itemsize}").reshape(len(values), width)


def _decompress(body: bytes | None, size_bytes_max: int) -> bytes:
    """Return the plain body, without memory for more than its largest size and zstd's window."""
    if body is None:
        raise ProtocolError("expected a body, got a message without")
    unpacker = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX})
    try:
        plain = unpacker.decompress(body, size_bytes_max + 1)
    except zstd.ZstdError as error:
        raise ProtocolError(f"expected a body that zstd decompresses, got one that fails: {error}") from error
    if not unpacker.eof or unpacker.unused_data or len(plain) > size_bytes_max:
        end = "and the end" if unpacker.eof else "and no end"
        raise ProtocolError(
            f"expected a body of at most {size_bytes_max} bytes unpacked and its end, "
            f"got {len(plain)} {end}, and {len(unpacker.unused_data)} bytes after it"
        )
    return plain


def _bitmap_bytes(count: int) -> int:
    return (count + 7) // 8


def _unpack_bits(bitmap: NDArray[np.uint8], count: int) -> Mask:
    if len(bitmap) != _bitmap_bytes(count):
        raise ProtocolError(f"expected a bitmap of {count} rows, got {len(bitmap)} bytes")
    bits = np.unpackbits(bitmap).astype(np.bool_)
    if bits[count:].any():
        raise ProtocolError(f"expected a bitmap of {count} rows, got one of more")
    return bits[:count]
