"""The messages of a parameter server as bytes, and the arrays that travel beside them.

A message is msgpack: a number for its kind, and its fields by name. Small arrays are in it as they are; of
larger ones it says what they are, and their bytes go straight from array to array. Nothing is unpickled, and
no memory is taken for more than a message may have.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from offbeat.errors import ProtocolError
from offbeat.numerics.ps.entries import Entries, Terms
from offbeat.policies.ps.messages import ToClient, ToServer
from offbeat.runtime.transport.buffer_pool import Buffers
from offbeat.wire.known import make_known

INLINE_BYTES: Final = 32 * 1024  # arrays that are smaller are in the message itself
ARRAY_BYTES_MAX: Final = 2**31
_LOT_BYTES: Final = 256 * 1024
_BESIDE_BYTES_MAX: Final = 2**33  # of all arrays of a message

TO_SERVER: Final[tuple[type, ...]] = get_args(ToServer)
TO_CLIENT: Final[tuple[type, ...]] = get_args(ToClient)
_CODES: Final = {kind: code for code, kind in enumerate((*TO_SERVER, *TO_CLIENT))}
make_known(*_CODES)
_DTYPES: Final = tuple(
    np.dtype(name) for name in ("float32", "float64", "int64", "int32", "uint8", "uint64", "bool")
)
_DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ARRAY, _ENTRIES, _ENCODED, _ON_TERMS = 1, 2, 3, 4
_HEAD: Final = struct.Struct("<BBBxQQ")  # dtype, dimensions, whether it is beside; rows, and numbers in a row
_FIRST: Final = struct.Struct("<qB")  # of Entries: the first key, and whether keys are listed
_MALFORMED: Final = (
    *(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, struct.error, ValueError),
    MemoryError,  # what is claimed is more than there is; who claims it is to blame
)

Array = NDArray[Any]


class Encoded:
    """What filters have made of values: keys and rows as far as they are left, and what undoes the rest.

    Attributes:
        terms: of the `Entries` that they were; no filter changes them.
    """

    __slots__ = ("body", "keys", "notes", "terms", "values")

    def __init__(
        self,
        keys: Array | None,
        values: Array | None,
        body: bytes | None,
        notes: Mapping[str, Mapping[str, Any]],
        terms: Terms | None = None,
    ) -> None:
        self.keys, self.values, self.body, self.notes, self.terms = keys, values, body, notes, terms


class Packed(NamedTuple):
    """Messages as bytes, and the arrays whose bytes are to follow, in order."""

    messages: msgspec.Raw
    beside: list[Array]


class Packer:
    """Makes bytes of messages."""

    def __init__(self) -> None:
        self._beside: list[Array] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._extend)

    def pack(self, messages: Iterable[ToServer | ToClient]) -> Iterator[Packed]:
        """Yield messages, together with those that follow as long as that is not too much.

        One with arrays beside it is the last one of its lot, so that nobody waits for more than its own.

        Raises:
            TypeError: an array of a kind that is not sent.
        """
        lot: list[msgspec.Raw] = []
        size = 0
        for message in messages:
            beside: list[Array] = []
            self._beside = beside
            data = self._encoder.encode((_CODES[type(message)], message))
            lot.append(msgspec.Raw(data))
            size += len(data)
            if beside or size > _LOT_BYTES:
                yield Packed(msgspec.Raw(self._encoder.encode(lot)), beside)
                lot, size = [], 0
        if lot:
            yield Packed(msgspec.Raw(self._encoder.encode(lot)), [])

    def _extend(self, thing: Any) -> Ext:
        if isinstance(thing, Entries):
            pieces = [_FIRST.pack(thing.first, thing.keys is not None)]
            if thing.keys is not None:
                self._describe(thing.keys, pieces)
            self._describe(thing.values, pieces)
            entries = Ext(_ENTRIES, b"".join(pieces))
            return entries if thing.terms is None else self._with_terms(entries, thing.terms)
        if isinstance(thing, np.ndarray):
            pieces = []
            self._describe(thing, pieces)
            return Ext(_ARRAY, b"".join(pieces))
        if isinstance(thing, Encoded):
            plain = (thing.keys, thing.values, thing.body, thing.notes)
            encoded = Ext(_ENCODED, self._encoder.encode(plain))
            return encoded if thing.terms is None else self._with_terms(encoded, thing.terms)
        raise TypeError(f"expected plain data, arrays and Entries, got {type(thing).__name__}")

    def _with_terms(self, content: Ext, terms: Terms) -> Ext:
        plain = (content, terms.weight, terms.settings, terms.states)
        return Ext(_ON_TERMS, self._encoder.encode(plain))

    def _describe(self, array: Array, pieces: list[Any]) -> None:
        code = _DTYPE_CODES.get(array.dtype)
        if code is None or not 1 <= array.ndim <= 2:
            raise TypeError(
                f"expected an array of one or two dimensions of {', '.join(map(str, _DTYPES))}, "
                f"got {array.ndim} of {array.dtype}"
            )
        is_beside = array.nbytes >= INLINE_BYTES
        width = array.shape[1] if array.ndim == 2 else 1
        pieces.append(_HEAD.pack(code, array.ndim, is_beside, len(array), width))
        if is_beside:
            self._beside.append(np.ascontiguousarray(array))
        else:
            pieces.append(array.tobytes())


class Unpacker:
    """Makes messages of bytes.

    Args:
        kinds: of the messages that may come.
    """

    def __init__(self, kinds: Collection[type]) -> None:
        self._beside: list[Array] = []
        self._buffers = Buffers()
        self._encoded = msgspec.msgpack.Decoder(
            tuple[Any, Any, bytes | None, dict[str, dict[str, Any]]], ext_hook=self._extend
        )
        self._on_terms = msgspec.msgpack.Decoder(
            tuple[Any, float, dict[str, float | list[float]] | None, dict[str, Any] | None],
            ext_hook=self._extend,
        )
        self._lots = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
        self._beside_bytes = 0
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
            code: msgspec.msgpack.Decoder(kind, ext_hook=self._extend)
            for kind, code in _CODES.items()
            if kind in kinds
        }

    def unpack(self, data: msgspec.Raw | memoryview) -> tuple[list[Any], list[Array]]:
        """Return messages, and the arrays in them that are still to be filled, in order.

        Raises:
            ProtocolError: these are not the bytes of messages that may come.
        """
        self._beside, self._beside_bytes = [], 0
        decoders = self._decoders
        try:
            return [decoders[code].decode(rest) for code, rest in self._lots.decode(data)], self._beside
        except KeyError as error:
            raise ProtocolError(f"expected messages of the kinds {sorted(decoders)}, got {error}") from None
        except _MALFORMED as error:
            raise ProtocolError(f"expected messages of a parameter server: {error}") from None

    def _extend(self, code: int, data: memoryview) -> Any:
        if code == _ARRAY:
            array, end = self._array(data, 0)
            if end != len(data):
                raise ValueError(f"expected an array in {end} bytes, got {len(data)}")
            return array
        if code == _ENCODED:
            keys, values, body, notes = self._encoded.decode(data)
            if not all(one is None or isinstance(one, np.ndarray) for one in (keys, values)):
                raise ValueError("expected arrays as what filters have left of keys and values")
            if not all(_is_noted(one) for note in notes.values() for one in note.values()):
                raise ValueError(
                    "expected numbers and texts, or lists of whole numbers, as what filters note"
                )
            return Encoded(keys, values, body, notes)
        if code == _ON_TERMS:
            return self._taken_on_terms(data)
        if code != _ENTRIES:
            raise ValueError(f"expected an array or Entries, got extension {code}")
        first, is_listed = _FIRST.unpack_from(data)
        keys, end = self._array(data, _FIRST.size) if is_listed else (None, _FIRST.size)
        values, end = self._array(data, end)
        if end != len(data):
            raise ValueError(f"expected Entries in {end} bytes, got {len(data)}")
        return Entries(first, values, keys)

    def _taken_on_terms(self, data: memoryview) -> Entries | Encoded:
        content, weight, settings, states = self._on_terms.decode(data)
        if not isinstance(content, Entries | Encoded) or content.terms is not None:
            raise ValueError("expected values with the terms of a push, got something else")
        if not all(isinstance(rows, np.ndarray) for rows in (states or {}).values()):
            raise ValueError("expected arrays as states")
        content.terms = Terms(weight, settings, states)
        return content

    def _array(self, data: memoryview, begin: int) -> tuple[Array, int]:
        code, dimensions, is_beside, rows, width = _HEAD.unpack_from(data, begin)
        if code >= len(_DTYPES) or not 1 <= dimensions <= 2:
            raise ValueError(f"expected an array of a known kind, got {code} with {dimensions} dimensions")
        dtype = _DTYPES[code]
        shape = (rows,) if dimensions == 1 else (rows, width)
        size = math.prod(shape) * dtype.itemsize
        begin += _HEAD.size
        if size > ARRAY_BYTES_MAX:
            raise ValueError(f"expected an array of at most {ARRAY_BYTES_MAX} bytes, got {size}")
        if is_beside:
            self._beside_bytes += size
            if self._beside_bytes > _BESIDE_BYTES_MAX:
                raise ValueError(f"expected arrays of at most {_BESIDE_BYTES_MAX} bytes in a message")
            array = self._buffers.array(shape, dtype)
            self._beside.append(array)
            return array, begin
        if begin + size > len(data):
            raise ValueError(f"expected {size} bytes of an array, got {len(data) - begin}")
        flat = np.frombuffer(data, dtype, math.prod(shape), begin)
        return flat.reshape(shape), begin + size


def _is_noted(thing: Any) -> bool:
    if isinstance(thing, list):
        return all(isinstance(one, int) for one in thing)
    return isinstance(thing, int | float | str | bytes)
