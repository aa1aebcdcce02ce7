"""What makes messages between clients and servers smaller: filters in a chain, undone in reverse.

Keys may be replaced by their hash, values compressed or rounded, entries left out. Nothing here sends
anything, knows who the peer is or what values mean to it, or reads a clock.

Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, sections
3.6 ("user-defined filters") and 4.2 ("messages"); M. Li, D. G. Andersen, A. Smola and K. Yu, "Communication
efficient distributed machine learning with the parameter server", NIPS 2014.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.numerics.ps.entries import (
    LAST_MAX,
    Entries,
    Keys,
    Rows,
    problem_of_keys,
    problem_of_rows,
)

Mask: TypeAlias = NDArray[np.bool_]  # (K,)

SIGNATURE_BYTES: Final = 16
_FLOATS: Final = ("float32", "float64")


class UnknownKeysError(OffbeatError):
    """Keys are not known by this signature: ask the sender for the message with its keys in it.

    Attributes:
        signature: what came in place of the keys.
    """

    def __init__(self, signature: bytes) -> None:
        super().__init__(
            f"expected the signature of keys that came before, got {signature.hex()}; ask for a resend"
        )
        self.signature = signature


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Message:
    """Values of some of the keys `first` to `last` - 1, as the application has them or as filters left them.

    Attributes:
        time: the sender's, of this message; what falling thresholds go by.
        keys: None where it is all of the range, or where key caching has taken them out.
        known: of an answer, the keys of its rows, which whoever asked has; they do not travel.
        values: one row a key, float32 or float64, or bytes out of fixed point; None where `body` has them.
        body: what compression made of the values.
        notes: by filter, what it needs to be undone, as plain data.
    """

    namespace: str
    first: int
    last: int
    time: int = 0
    keys: Keys | None
    known: Keys | None = None
    values: Rows | None
    body: bytes | None = None
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, namespace: str, first: int, last: int, content: Entries, *, time: int = 0) -> Message:
        """Return what a chain is to encode: values of keys `first` to `last` - 1, or of listed ones of them.

        Raises:
            ValueError: there is not a row for each key.
        """
        if problem := problem_of_rows(content, first, last):
            raise ValueError(problem)
        return cls(
            namespace=namespace, first=first, last=last, time=time, keys=content.keys, values=content.values
        )

    @classmethod
    def answering(cls, namespace: str, values: Rows, known: Keys | None) -> Message:
        """Return an answer that a chain is to encode: rows by their place, and the keys of them or None."""
        return cls(namespace=namespace, first=0, last=len(values), keys=None, known=known, values=values)

    @property
    def entries(self) -> Entries:
        """The values, as they were given to `of`; of a message that is not encoded."""
        assert self.values is not None
        return Entries(self.first, self.values, self.keys)

    @property
    def size_bytes(self) -> int:
        """Of keys, values, body and what the notes say, without whatever frames them."""
        arrays = sum(array.nbytes for array in (self.keys, self.values) if array is not None)
        notes = sum(_size_bytes(list(note.values())) for note in self.notes.values())
        return arrays + len(self.body or b"") + notes


class Filter(Protocol):
    """Encodes messages to one peer, or decodes those of one peer.

    What it may find in a message: "keys"; "numbers", values as floats; "bytes", values as an array; "sums",
    values that the receiver adds; "states", values that it assigns.
    """

    @property
    def name(self) -> str:
        """Under which it is reported and leaves its notes."""

    @property
    def needs(self) -> frozenset[str]:
        """What it must find."""

    @property
    def hides(self) -> frozenset[str]:
        """What filters behind it do not find any more."""

    def encode(self, message: Message) -> Message:
        """Return the message as it is to travel; `message` stays as it is."""

    def decode(self, message: Message) -> Message:
        """Undo `encode`, or what can be undone of it.

        Raises:
            ProtocolError: no `encode` gives such a message.
        """


class Passed(NamedTuple):
    """Bytes that went into a filter and came out of it."""

    in_bytes: int
    out_bytes: int


class FilterChain:
    """Filters one behind the other, for one direction and one peer.

    Both ends have a chain of equal filters: the sender's only encodes and the receiver's only decodes. When
    either end is replaced, both begin with a new chain.

    Args:
        filters: in the order in which they encode; no two of a kind.

    Raises:
        ValueError: a filter that finds nothing to work on behind the others.
    """

    def __init__(self, filters: Iterable[Filter]) -> None:
        self._filters = tuple(filters)
        for place, one in enumerate(self._filters):
            for other in self._filters[:place]:
                if one.name == other.name:
                    raise ValueError(f"expected {one.name} once, got it twice")
                if missing := one.needs & other.hides:
                    lacks = " and ".join(sorted(missing))
                    raise ValueError(
                        f"expected no {one.name} behind {other.name}, which leaves it no {lacks}"
                    )
        self._passed = {one.name: Passed(0, 0) for one in self._filters}

    def encode(self, message: Message) -> Message:
        """Return the message as it is to travel.

        Raises:
            ValueError: it is no message, or holds what a filter cannot send; the chain is of no use after
                that, for filters may count as sent what was not.
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

    def decode(self, message: Message) -> Message:
        """Return what the sender's chain was given, as far as its filters can be undone.

        Raises:
            UnknownKeysError: the sender must `resend` the message; decode that instead.
            ProtocolError: no chain of the same filters gives such a message.
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

    def resend(self, encoded: Message) -> Message:
        """Return a message that `encode` gave, with its keys in it, for a receiver that did not know them.

        To encode the content once more instead would be wrong behind filters that draw or remember.

        Raises:
            ValueError: it has its keys already, or the chain does not cache any.
            UnknownKeysError: so many others were sent since that they are not known here either; both ends
                must begin with a new chain.
        """
        places = [place for place, one in enumerate(self._filters) if isinstance(one, KeyCaching)]
        if not places:
            raise ValueError(f"expected a chain with key caching, got {sorted(self._passed)}")
        caching = self._filters[places[0]]
        assert isinstance(caching, KeyCaching)
        message = caching.resend(encoded)
        self._count(caching, 0, message.size_bytes)
        for one in self._filters[places[0] + 1 :]:
            self._count(one, message.size_bytes, message.size_bytes)
        return message

    def report(self) -> dict[str, Passed]:
        """Return how many bytes each filter was given and gave, by its name."""
        return dict(self._passed)

    def _count(self, one: Filter, in_bytes: int, out_bytes: int) -> None:
        before = self._passed[one.name]
        self._passed[one.name] = Passed(before.in_bytes + in_bytes, before.out_bytes + out_bytes)


class KeyCaching:
    """Sends a hash in place of keys that were sent before.

    Both ends remember the lists of keys that were used last, each with its namespace and range. As long as
    messages arrive in order and none is lost they remember the same ones; else the receiver finds out that it
    does not know a list, and never takes another for it.

    Source: OSDI'14, section 4.2. Deviation: the hash is BLAKE2b of 128 bits over the complete list (the
    authors' code hashes 2 kB of it), several lists of one range are remembered, and both ends forget.

    Args:
        entries: how many lists each end remembers, at least 1; more than there are messages on the way.

    Raises:
        ValueError: no such number.
    """

    name: Final = "key caching"
    needs: Final = frozenset({"keys"})
    hides: Final = frozenset({"keys"})

    def __init__(self, entries: int) -> None:
        if entries < 1:
            raise ValueError(f"expected at least 1 entry, got {entries}")
        self._entries = entries
        self._sent: OrderedDict[tuple[str, int, int, bytes], Keys] = OrderedDict()
        self._received: OrderedDict[tuple[str, int, int, bytes], Keys] = OrderedDict()

    def encode(self, message: Message) -> Message:
        """See `Filter.encode`."""
        if message.keys is None:
            return message
        signature = _signature(message.keys)
        entry = (message.namespace, message.first, message.last, signature)
        is_known = entry in self._sent
        self._remember(self._sent, entry, self._sent.get(entry, message.keys))
        keys = None if is_known else message.keys
        return replace(message, keys=keys, notes={**message.notes, self.name: {"signature": signature}})

    def decode(self, message: Message) -> Message:
        """See `Filter.decode`.

        Raises:
            UnknownKeysError: the keys did not come with this message, and are not remembered.
        """
        if message.keys is None and self.name not in message.notes:
            return message
        (signature,) = _noted(message, self.name, signature=bytes)
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

    def resend(self, encoded: Message) -> Message:
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
            lists[entry] = keys.copy()  # nobody else can change it
            lists[entry].flags.writeable = False
        lists.move_to_end(entry)
        if len(lists) > self._entries:
            lists.popitem(last=False)


class Compression:
    """Compresses values without loss; rows of zeros cost a bit each.

    Only rows whose bytes are all zero are left out: -0.0 and the smallest numbers come back as they were.

    Source: OSDI'14, section 4.2. Deviation: zlib in place of Snappy, and a bitmap of the rows that are not
    zero before it, where that is smaller.

    Args:
        level: zlib's, 0 (none) to 9 (smallest).
        size_bytes_max: of a message's values; more is neither sent nor unpacked.

    Raises:
        ValueError: no such level or size.
    """

    name: Final = "compression"
    needs: Final = frozenset({"bytes"})
    hides: Final = frozenset({"bytes", "numbers"})

    def __init__(self, level: int = 1, *, size_bytes_max: int = 1 << 30) -> None:
        if not 0 <= level <= 9:
            raise ValueError(f"expected a level from 0 to 9, got {level}")
        if size_bytes_max < 1:
            raise ValueError(f"expected values of at least 1 byte at most, got {size_bytes_max}")
        self._level = level
        self._size_bytes_max = size_bytes_max

    def encode(self, message: Message) -> Message:
        """See `Filter.encode`.

        Raises:
            ValueError: the values are larger than was allowed.
        """
        values = message.values
        assert values is not None
        if values.nbytes > self._size_bytes_max:
            raise ValueError(f"expected values of at most {self._size_bytes_max} bytes, got {values.nbytes}")
        rows = _bytes_of_rows(values)
        is_nonzero = rows.any(axis=1)
        bitmap, kept = np.packbits(is_nonzero), rows[is_nonzero]
        is_sparse = bitmap.nbytes + kept.nbytes < rows.nbytes
        plain = bitmap.tobytes() + kept.tobytes() if is_sparse else rows.tobytes()
        note = {"dtype": values.dtype.name, "shape": list(values.shape), "sparse": is_sparse}
        body = zlib.compress(plain, self._level)
        return replace(message, values=None, body=body, notes={**message.notes, self.name: note})

    def decode(self, message: Message) -> Message:
        """See `Filter.decode`."""
        dtype, shape, is_sparse = _noted(message, self.name, dtype=str, shape=list, sparse=bool)
        if dtype not in (*_FLOATS, "uint8"):
            raise ProtocolError(f"expected values of float32, float64 or uint8, got {dtype[:20]!r}")
        if len(shape) not in (1, 2) or not all(type(n) is int and n >= 0 for n in shape) or 0 in shape[1:]:
            raise ProtocolError(f"expected a shape of rows, got {str(shape)[:80]}")
        width_bytes = np.dtype(dtype).itemsize * (shape[1] if shape[1:] else 1)
        size_bytes = shape[0] * width_bytes
        if max(size_bytes, width_bytes) > self._size_bytes_max:
            raise ProtocolError(f"expected values of at most {self._size_bytes_max} bytes, got {size_bytes}")
        plain = np.frombuffer(self._unpacked(message.body, size_bytes), np.uint8)
        is_nonzero = np.ones(shape[0], np.bool_)
        if is_sparse:
            bitmap_bytes = (shape[0] + 7) // 8
            is_nonzero = _unpacked_bits(plain[:bitmap_bytes], shape[0])
            plain = plain[bitmap_bytes:]
        kept_bytes = int(is_nonzero.sum()) * width_bytes
        if plain.nbytes != kept_bytes:
            raise ProtocolError(f"expected {kept_bytes} bytes of values, got {plain.nbytes}")
        rows = np.zeros((shape[0], width_bytes), np.uint8)
        rows[is_nonzero] = plain.reshape(-1, width_bytes)
        values = rows.reshape(-1).view(dtype).reshape(shape)
        return replace(message, values=values, body=None, notes=_without(message, self.name))

    def _unpacked(self, body: bytes | None, size_bytes_max: int) -> bytes:
        if body is None:
            raise ProtocolError("expected a body, got a message without")
        unpacker = zlib.decompressobj()
        try:
            plain = unpacker.decompress(body, size_bytes_max + 1)
        except zlib.error as error:
            raise ProtocolError(f"expected a body that zlib unpacks, got {error}") from error
        if not unpacker.eof or unpacker.unused_data or len(plain) > size_bytes_max:
            end = "and the end" if unpacker.eof else "and no end"
            raise ProtocolError(
                f"expected a body of at most {size_bytes_max} bytes unpacked and its end, "
                f"got {len(plain)} {end}, and {len(unpacker.unused_data)} bytes behind it"
            )
        return plain


class SignificantlyModified:
    """Leaves out entries that have hardly changed since they were sent last.

    An entry goes out when `|w - w_last_sent| > threshold` for any value of its row, or when it was never
    sent. What is left out is compared with what was sent, not with what was offered: small changes add up
    until they are sent, and what the receiver has of a key is never off by more than the threshold of the
    message that offered it last. That holds if what is encoded arrives. Values must be states, which the
    receiver assigns; those that are not finite always go out.

    Of messages with `known` keys, answers to pulls, the receiver remembers what came, too, and fills in what
    was left out; a bit a row says what that is. What an end remembers, a row and a key, grows with the keys
    that were sent, and is forgotten with the chain.

    Source: OSDI'14, section 3.6; NIPS'14 for thresholds of O(1/t). Deviation: what was never
    sent goes out however small, for the receiver has no value that it could be off from. Behind this filter,
    fixed point adds its own error to the bound.

    Args:
        threshold: at least 0, or a function from a message's `time` to that.

    Raises:
        ValueError: no such threshold.
    """

    name: Final = "significantly modified"
    needs: Final = frozenset({"keys", "numbers", "states"})
    hides: Final = frozenset({"sums"})

    def __init__(self, threshold: float | Callable[[int], float]) -> None:
        self._threshold = threshold
        self._sent: dict[str, _LastRows] = {}  # by namespace
        self._received: dict[str, _LastRows] = {}  # likewise, as far as the keys are known
        if not callable(threshold):
            self._at(0)

    def encode(self, message: Message) -> Message:
        """See `Filter.encode`.

        Raises:
            ValueError: rows are not as they were in earlier messages, or the threshold is below 0.
        """
        threshold = self._at(message.time)
        keys, values = message.entries.listed() if message.known is None else message.known, message.values
        assert values is not None
        sent = self._sent.setdefault(message.namespace, _LastRows(values))
        if problem := sent.problem_of(values):
            raise ValueError(problem)
        places, is_known = sent.find(keys)
        with np.errstate(invalid="ignore", over="ignore"):
            change = np.abs(values[is_known].astype(np.float64) - sent.rows[places[is_known]])
        is_near = change <= threshold
        kept = ~is_known
        kept[is_known] = ~(is_near if is_near.ndim == 1 else is_near.all(axis=1))
        sent.put(keys[kept], values[kept])
        if message.known is None or kept.all():
            return _only(message, kept)
        note = {"kept": np.packbits(kept).tobytes()}
        return replace(message, values=values[kept], notes={**message.notes, self.name: note})

    def decode(self, message: Message) -> Message:
        """Fill in what was left out, where the keys are known; else the receiver still has it."""
        keys, values = message.known, message.values
        if keys is None:
            return message
        kept = np.ones(len(keys), np.bool_)
        if self.name in message.notes:
            (bitmap,) = _noted(message, self.name, kept=bytes)
            kept = _unpacked_bits(np.frombuffer(bitmap, np.uint8), len(keys))
        if values is None or values.dtype.name not in _FLOATS or len(values) != kept.sum():
            raise ProtocolError(f"expected {kept.sum()} rows of floats, got {_told(values)}")
        received = self._received.setdefault(message.namespace, _LastRows(values))
        if problem := received.problem_of(values):
            raise ProtocolError(problem)
        received.put(keys[kept], values)
        if kept.all():
            return replace(message, notes=_without(message, self.name))
        places, is_known = received.find(keys)
        if not is_known.all():
            raise ProtocolError(f"expected a row of key {keys[~is_known][0]}, which never had one, got none")
        return replace(message, values=received.rows[places], notes=_without(message, self.name))

    def _at(self, time: int) -> float:
        threshold = self._threshold(time) if callable(self._threshold) else self._threshold
        if not threshold >= 0:
            raise ValueError(f"expected a threshold of at least 0, got {threshold} at time {time}")
        return threshold


class _LastRows:
    """The row that each of some keys had last; there is no key yet.

    Args:
        like: rows as there will be.
    """

    def __init__(self, like: Rows) -> None:
        self._keys = np.zeros(0, np.int64)  # ascending
        self.rows = like[:0].copy()

    def problem_of(self, rows: Rows) -> str:
        """Say why rows are not as there are here; empty where they are."""
        before, now = (f"{one.dtype} {one.shape[1:]}" for one in (self.rows, rows))
        return "" if before == now else f"expected rows of {before} as before, got {now}"

    def find(self, keys: Keys) -> tuple[NDArray[np.int64], Mask]:
        """Return where the keys are among `rows`, or belong, and which of them are there."""
        return _found(self._keys, keys)

    def put(self, keys: Keys, rows: Rows) -> None:
        """Take other rows of some keys, ascending."""
        places, is_there = self.find(keys)
        self.rows[places[is_there]] = rows[is_there]
        if not is_there.all():
            new = ~is_there
            self._keys = np.insert(self._keys, places[new], keys[new])
            self.rows = np.insert(self.rows, places[new], rows[new], axis=0)


class RandomSkip:
    """Leaves out entries by chance; the others grow, so that the expectation stays what it was.

    Each entry stays with the given probability, whatever the others do, and the receiver divides it by that.
    Values must be sums, which the receiver adds.

    Source: NIPS'14, appendix.

    Args:
        probability: of an entry to stay, above 0, up to 1.
        seed: of the sender's chance.

    Raises:
        ValueError: no such probability.
    """

    name: Final = "random skip"
    needs: Final = frozenset({"keys", "numbers", "sums"})
    hides: Final = frozenset({"states"})

    def __init__(self, probability: float, seed: int) -> None:
        if not 0 < probability <= 1:
            raise ValueError(f"expected a probability above 0 and up to 1, got {probability}")
        self._probability = float(probability)
        self._generator = np.random.default_rng(seed)

    def encode(self, message: Message) -> Message:
        """See `Filter.encode`."""
        assert message.values is not None
        kept = self._generator.random(len(message.values)) < self._probability
        note = {"probability": self._probability}
        return replace(_only(message, kept), notes={**message.notes, self.name: note})

    def decode(self, message: Message) -> Message:
        """Divide what was kept; what was left out stays so."""
        (probability,) = _noted(message, self.name, probability=float)
        if not 0 < probability <= 1:
            raise ProtocolError(f"expected a probability above 0 and up to 1, got {probability}")
        if message.values is None or message.values.dtype.name not in _FLOATS:
            raise ProtocolError(f"expected values of float32 or float64, got {_told(message.values)}")
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            values = message.values / np.asarray(probability, message.values.dtype)
        return replace(message, values=values, notes=_without(message, self.name))


class FixedPoint:
    """Sends a value as a whole number of 1 to 3 bytes: which of the equal steps from lowest to highest it is.

    A value between two steps becomes the upper one with a probability of its distance from the lower one, in
    steps: its expectation is the value, its error less than a step, besides the rounding of floats. A step is
    the range of the message's values divided by 256 ** bytes_per_value - 1; equal values come exactly.

    Source: the authors' code ("fixing float"). Deviation: there a fair coin rounds, which is unbiased only on
    average over fractions.

    Args:
        bytes_per_value: 1, 2 or 3.
        seed: of the sender's chance.

    Raises:
        ValueError: no such number of bytes.
    """

    name: Final = "fixed point"
    needs: Final = frozenset({"numbers"})
    hides: Final = frozenset({"numbers"})

    def __init__(self, bytes_per_value: int, seed: int) -> None:
        if bytes_per_value not in (1, 2, 3):
            raise ValueError(f"expected 1, 2 or 3 bytes a value, got {bytes_per_value}")
        self._bytes_per_value = bytes_per_value
        self._steps = 256**bytes_per_value - 1
        self._generator = np.random.default_rng(seed)

    def encode(self, message: Message) -> Message:
        """See `Filter.encode`.

        Raises:
            ValueError: a value is not finite, or the range of values not a finite float64.
        """
        assert message.values is not None
        values = message.values.astype(np.float64)
        low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
        span = high - low
        if not np.isfinite(span):
            raise ValueError(f"expected finite values in a finite range, got {low} to {high}")
        places = (values - low) / span * self._steps if span else np.zeros_like(values)
        below = np.floor(places)
        steps = (below + (self._generator.random(values.shape) < places - below)).astype("<u4")
        rows = steps.reshape(-1, 1).view(np.uint8)[:, : self._bytes_per_value]
        width = message.values.shape[1] if message.values.ndim == 2 else 0
        note = {"low": low, "high": high, "dtype": message.values.dtype.name, "width": width}
        return replace(
            message,
            values=rows.reshape(len(values), self._bytes_per_value * max(width, 1)),
            notes={**message.notes, self.name: note},
        )

    def decode(self, message: Message) -> Message:
        """See `Filter.decode`."""
        low, high, dtype, width = _noted(message, self.name, low=float, high=float, dtype=str, width=int)
        rows = message.values
        if not (low <= high and np.isfinite(high - low)) or dtype not in _FLOATS:
            raise ProtocolError(f"expected floats from low to high, got {dtype[:20]!r} from {low} to {high}")
        size_bytes = self._bytes_per_value * max(width, 1)
        if rows is None or rows.dtype != np.uint8 or rows.shape[1:] != (size_bytes,) or width < 0:
            raise ProtocolError(f"expected rows of {size_bytes} bytes, got {_told(rows)}")
        wide = np.zeros((len(rows) * max(width, 1), 4), np.uint8)
        wide[:, : self._bytes_per_value] = rows.reshape(-1, self._bytes_per_value)
        steps = wide.view("<u4").reshape((len(rows), width) if width else len(rows))
        values = np.clip(low + steps / self._steps * (high - low), low, high).astype(dtype)
        return replace(message, values=values, notes=_without(message, self.name))


class KKT:
    """Leaves out coordinates that are zero and, by the conditions of Karush, Kuhn and Tucker, will stay zero.

    For a loss with the penalty `l1` |w|: a coordinate with w = 0 is skipped from when it is learned that
    |g| <= l1 - margin, where g is its gradient as it was aggregated last, until all are taken back; meanwhile
    it need not be computed (`active`). It is for one namespace, and for pushes to whichever server.

    Source: NIPS'14, section 5. Deviation: the authors' code compares with < and marks what it skips by NaN;
    here the keys are not listed. How margins change from pass to pass is up to the caller.

    Args:
        l1: weight of the penalty (λ), at least 0.

    Raises:
        ValueError: no such weight.
    """

    name: Final = "KKT"
    needs: Final = frozenset({"keys", "numbers"})
    hides: Final[frozenset[str]] = frozenset()

    def __init__(self, l1: float) -> None:
        if not 0 <= l1 < np.inf:
            raise ValueError(f"expected a finite l1 of at least 0, got {l1}")
        self._l1 = l1
        self._margin = np.inf
        self._skipped = np.zeros(0, np.int64)  # ascending

    def set_margin(self, margin: float) -> None:
        """Go by another margin in what is learned from now on.

        Args:
            margin: at least 0 (δ), at first infinite. The more, the less is skipped, and nothing if it is
                above `l1`; if it is infinite, all is taken back, as is due before a solution counts as final.

        Raises:
            ValueError: no such margin.
        """
        if not margin >= 0:
            raise ValueError(f"expected a margin of at least 0, got {margin}")
        self._margin = margin
        if margin == np.inf:
            self._skipped = self._skipped[:0]

    def learn(self, keys: Keys, weights: Rows, gradients: Rows) -> None:
        """Skip what need not be looked at any more; what is skipped stays so.

        Args:
            keys: (K,), ascending, each once.
            weights: as they are now, (K,).
            gradients: of the loss without the penalty, as they were aggregated last, (K,).

        Raises:
            ValueError: arrays that do not fit.
        """
        if keys.ndim != 1 or not keys.shape == weights.shape == gradients.shape:
            shapes = f"{keys.shape}, {weights.shape} and {gradients.shape}"
            raise ValueError(f"expected a weight and a gradient a key, got shapes {shapes}")
        if problem := problem_of_keys(keys, 0, LAST_MAX):
            raise ValueError(problem)
        found = keys[(weights == 0) & (np.abs(gradients) <= self._l1 - self._margin)]
        places, is_there = _found(self._skipped, found)
        if not is_there.all():
            self._skipped = np.insert(self._skipped, places[~is_there], found[~is_there])

    def active(self, keys: Keys) -> Mask:
        """Return which of the keys are not skipped, (K,)."""
        _, is_there = _found(self._skipped, keys)
        return ~is_there

    def encode(self, message: Message) -> Message:
        """See `Filter.encode`."""
        return _only(message, self.active(message.entries.listed()))

    def decode(self, message: Message) -> Message:
        """Return the message: the receiver takes what is not listed for unchanged."""
        return message


def _check(message: Message, error: type[Exception]) -> None:
    """Raise unless range, keys and values are each what they may be in any message, encoded or not."""
    if not 0 <= message.first < message.last <= LAST_MAX:
        raise error(f"expected a range of keys within 0 to {LAST_MAX}, got {message.first} to {message.last}")
    if not all(isinstance(note, dict) for note in message.notes.values()):
        raise error(f"expected notes by filter and name, got {str(message.notes)[:80]}")
    keys, values = message.keys, message.values
    if keys is not None and (problem := problem_of_keys(keys, message.first, message.last)):
        raise error(problem)
    if values is not None and (
        values.dtype not in (np.float32, np.float64, np.uint8) or values.ndim not in (1, 2)
    ):
        raise error(f"expected rows of floats or bytes in this machine's order, got {_told(values)}")


def _check_rows(message: Message, error: type[Exception]) -> None:
    """Raise unless the message is one that the application has."""
    values = message.values
    if values is None or values.dtype.name not in _FLOATS or 0 in values.shape[1:]:
        raise error(f"expected values of float32 or float64, got {_told(values)}")
    if message.body is not None:
        raise error(f"expected a message without a body, got one of {len(message.body)} bytes")
    if problem := problem_of_rows(message.entries, message.first, message.last):
        raise error(problem)


def _told(values: Rows | None) -> str:
    return "none" if values is None else f"{values.dtype} of shape {values.shape}"


def _noted(message: Message, name: str, **kinds: type) -> list[Any]:
    """Return what a filter noted, in the order of `kinds`, having checked that it is all there."""
    note = message.notes.get(name)
    if note is None or note.keys() != kinds.keys() or any(type(note[k]) is not kinds[k] for k in kinds):
        wanted = ", ".join(f"{word} ({kind.__name__})" for word, kind in kinds.items())
        raise ProtocolError(f"expected a note of {name} with {wanted}, got {str(note)[:80]}")
    return [note[word] for word in kinds]


def _without(message: Message, name: str) -> dict[str, Mapping[str, Any]]:
    return {other: note for other, note in message.notes.items() if other != name}


def _size_bytes(note: Any) -> int:
    if isinstance(note, list):
        return sum(map(_size_bytes, note))
    if isinstance(note, str | bytes):
        return len(note)
    return 1 if isinstance(note, bool) else 8


def _signature(keys: Keys) -> bytes:
    return hashlib.blake2b(keys.astype("<i8").tobytes(), digest_size=SIGNATURE_BYTES).digest()


def _found(among: Keys, keys: Keys) -> tuple[NDArray[np.int64], Mask]:
    """Return where keys are among others that ascend, or belong, and which of them are there."""
    places = np.searchsorted(among, keys)
    is_there = places < len(among)
    is_there[is_there] = among[places[is_there]] == keys[is_there]
    return places, is_there


def _only(message: Message, kept: Mask) -> Message:
    """Return a message of the entries that are kept."""
    if kept.all():
        return message
    assert message.values is not None
    return replace(message, keys=message.entries.listed()[kept], values=message.values[kept])


def _bytes_of_rows(values: Rows) -> NDArray[np.uint8]:
    width_bytes = values.itemsize * (values.shape[1] if values.ndim == 2 else 1)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(len(values), width_bytes)


def _unpacked_bits(bitmap: NDArray[np.uint8], count: int) -> Mask:
    if len(bitmap) != (count + 7) // 8:
        raise ProtocolError(f"expected a bitmap of {count} rows, got {len(bitmap)} bytes")
    bits = np.unpackbits(bitmap).astype(np.bool_)
    if bits[count:].any():
        raise ProtocolError(f"expected a bitmap of {count} rows, got one of more")
    return bits[:count]
