"""Messages of a parameter server as bytes, and the arrays that are sent separately.

A message is msgpack: a number for its kind, and its fields by name. Small arrays are included; of larger
ones the message has type and shape, and their bytes are sent straight from array to array. Nothing is
unpickled, and no memory is allocated beyond what a message may have.
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
from offbeat.numerics.ps.entries import Entries, PushMeta
from offbeat.policies.ps.messages import ClientMessage, ServerMessage
from offbeat.runtime.transport.buffer_pool import BufferPool
from offbeat.wire.known import prime_msgspec_types

INLINE_BYTES: Final = 32 * 1024  # smaller arrays are included in the message
ARRAY_BYTES_MAX: Final = 2**31
_BATCH_BYTES: Final = 256 * 1024
_SEPARATE_BYTES_MAX: Final = 2**33  # of all arrays of a message

TO_SERVER: Final[tuple[type, ...]] = get_args(ServerMessage)
TO_CLIENT: Final[tuple[type, ...]] = get_args(ClientMessage)
_CODES: Final = {kind: code for code, kind in enumerate((*TO_SERVER, *TO_CLIENT))}
prime_msgspec_types(*_CODES)
_DTYPES: Final = tuple(
    np.dtype(name) for name in ("float32", "float64", "int64", "int32", "uint8", "uint64", "bool")
)
_DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ARRAY, _ENTRIES, _ENCODED, _WITH_TERMS = 1, 2, 3, 4
_HEAD: Final = struct.Struct("<BBBxQQ")  # dtype, dimensions, sent separately or not; rows, numbers in a row
_FIRST: Final = struct.Struct("<qB")  # of Entries: the first key, and whether keys are listed
_MALFORMED: Final = (
    *(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, struct.error, ValueError),
    MemoryError,  # a message may claim more than there is, which is its sender's fault
)

Array = NDArray[Any]


class EncodedValues:
    """Values encoded by filters: the keys and rows that remain, and what is needed to decode the rest.

    Attributes:
        meta: of the `Entries` that were encoded; no filter changes them.
    """

    __slots__ = ("body", "keys", "meta", "notes", "values")

    def __init__(
        self,
        keys: Array | None,
        values: Array | None,
        body: bytes | None,
        notes: Mapping[str, Mapping[str, Any]],
        meta: PushMeta | None = None,
    ) -> None:
        self.keys, self.values, self.body, self.notes, self.meta = keys, values, body, notes, meta


class Packed(NamedTuple):
    """Messages as bytes, and the arrays whose bytes follow, in order."""

    messages: msgspec.Raw
    attachments: list[Array]


class Packer:
    """Serializes messages."""

    def __init__(self) -> None:
        self._separate: list[Array] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._extend)

    def pack(self, messages: Iterable[ServerMessage | ClientMessage]) -> Iterator[Packed]:
        """Yield batches of serialized messages, each up to a size limit.

        A message with separate arrays is the last one of its batch, so that no other message waits for its
        arrays.

        Raises:
            TypeError: an array of a type that is not supported.
        """
        batch: list[msgspec.Raw] = []
        size = 0
        for message in messages:
            attachments: list[Array] = []
            self._separate = attachments
            data = self._encoder.encode((_CODES[type(message)], message))
            batch.append(msgspec.Raw(data))
            size += len(data)
            if attachments or size > _BATCH_BYTES:
                yield Packed(msgspec.Raw(self._encoder.encode(batch)), attachments)
                batch, size = [], 0
        if batch:
            yield Packed(msgspec.Raw(self._encoder.encode(batch)), [])

    def _extend(self, value: Any) -> Ext:
        if isinstance(value, Entries):
            pieces = [_FIRST.pack(value.first, value.keys is not None)]
            if value.keys is not None:
                self._append_array(value.keys, pieces)
            self._append_array(value.values, pieces)
            entries = Ext(_ENTRIES, b"".join(pieces))
            return entries if value.meta is None else self._with_meta(entries, value.meta)
        if isinstance(value, np.ndarray):
            pieces = []
            self._append_array(value, pieces)
            return Ext(_ARRAY, b"".join(pieces))
        if isinstance(value, EncodedValues):
            plain = (value.keys, value.values, value.body, value.notes)
            encoded = Ext(_ENCODED, self._encoder.encode(plain))
            return encoded if value.meta is None else self._with_meta(encoded, value.meta)
        raise TypeError(f"expected plain data, arrays and Entries, got {type(value).__name__}")

    def _with_meta(self, content: Ext, meta: PushMeta) -> Ext:
        plain = (content, meta.weight, meta.settings, meta.states)
        return Ext(_WITH_TERMS, self._encoder.encode(plain))

    def _append_array(self, array: Array, pieces: list[Any]) -> None:
        code = _DTYPE_CODES.get(array.dtype)
        if code is None or not 1 <= array.ndim <= 2:
            raise TypeError(
                f"expected an array of one or two dimensions of {', '.join(map(str, _DTYPES))}, "
                f"got {array.ndim} of {array.dtype}"
            )
        is_separate = array.nbytes >= INLINE_BYTES
        width = array.shape[1] if array.ndim == 2 else 1
        pieces.append(_HEAD.pack(code, array.ndim, is_separate, len(array), width))
        if is_separate:
            self._separate.append(np.ascontiguousarray(array))
        else:
            pieces.append(array.tobytes())


class Unpacker:
    """Deserializes messages.

    Args:
        kinds: of the messages that are accepted.
    """

    def __init__(self, kinds: Collection[type]) -> None:
        self._separate: list[Array] = []
        self._buffers = BufferPool()
        self._encoded = msgspec.msgpack.Decoder(
            tuple[Any, Any, bytes | None, dict[str, dict[str, Any]]], ext_hook=self._extend
        )
        self._with_meta_decoder = msgspec.msgpack.Decoder(
            tuple[Any, float, dict[str, float | list[float]] | None, dict[str, Any] | None],
            ext_hook=self._extend,
        )
        self._batches = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
        self._separate_bytes = 0
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
            code: msgspec.msgpack.Decoder(kind, ext_hook=self._extend)
            for kind, code in _CODES.items()
            if kind in kinds
        }

    def unpack(self, data: msgspec.Raw | memoryview) -> tuple[list[Any], list[Array]]:
        """Return the messages, and the arrays in them that are still to be received, in order.

        Raises:
            ProtocolError: these are not the bytes of messages that are accepted.
        """
        self._separate, self._separate_bytes = [], 0
        decoders = self._decoders
        try:
            return [decoders[code].decode(rest) for code, rest in self._batches.decode(data)], self._separate
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
                raise ValueError("expected keys and values that filters have left to be arrays or None")
            if not all(_is_valid_note(one) for note in notes.values() for one in note.values()):
                raise ValueError(
                    "expected the notes of filters to be numbers, strings, bytes or lists of integers"
                )
            return EncodedValues(keys, values, body, notes)
        if code == _WITH_TERMS:
            return self._decode_with_meta(data)
        if code != _ENTRIES:
            raise ValueError(f"expected an array or Entries, got extension {code}")
        first, is_listed = _FIRST.unpack_from(data)
        keys, end = self._array(data, _FIRST.size) if is_listed else (None, _FIRST.size)
        values, end = self._array(data, end)
        if end != len(data):
            raise ValueError(f"expected Entries in {end} bytes, got {len(data)}")
        return Entries(first, values, keys)

    def _decode_with_meta(self, data: memoryview) -> Entries | EncodedValues:
        content, weight, settings, states = self._with_meta_decoder.decode(data)
        if not isinstance(content, Entries | EncodedValues) or content.meta is not None:
            raise ValueError("expected values with the options of a push, got another object")
        if not all(isinstance(rows, np.ndarray) for rows in (states or {}).values()):
            raise ValueError("expected arrays as states")
        content.meta = PushMeta(weight, settings, states)
        return content

    def _array(self, data: memoryview, begin: int) -> tuple[Array, int]:
        code, dimensions, is_separate, rows, width = _HEAD.unpack_from(data, begin)
        if code >= len(_DTYPES) or not 1 <= dimensions <= 2:
            raise ValueError(f"expected an array of a known kind, got {code} with {dimensions} dimensions")
        dtype = _DTYPES[code]
        shape = (rows,) if dimensions == 1 else (rows, width)
        size = math.prod(shape) * dtype.itemsize
        begin += _HEAD.size
        if size > ARRAY_BYTES_MAX:
            raise ValueError(f"expected an array of at most {ARRAY_BYTES_MAX} bytes, got {size}")
        if is_separate:
            self._separate_bytes += size
            if self._separate_bytes > _SEPARATE_BYTES_MAX:
                raise ValueError(f"expected arrays of at most {_SEPARATE_BYTES_MAX} bytes in a message")
            array = self._buffers.allocate_array(shape, dtype)
            self._separate.append(array)
            return array, begin
        if begin + size > len(data):
            raise ValueError(f"expected {size} bytes of an array, got {len(data) - begin}")
        flat = np.frombuffer(data, dtype, math.prod(shape), begin)
        return flat.reshape(shape), begin + size


def _is_valid_note(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, int) for one in value)
    return isinstance(value, int | float | str | bytes)
