"""Messages of a parameter server as bytes: packed, unpacked, and made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from offbeat.numerics.ps.entries import Entries
from offbeat.policies.ps.messages import (
    PullResult,
    Push,
    PushAck,
)
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.runtime.ps.packing import TO_CLIENT, TO_SERVER, EncodedValues, Packer, Unpacker

KINDS = (*TO_SERVER, *TO_CLIENT)


def plain(thing: Any) -> Any:
    """Something that is equal where all of it is, bit for bit."""
    if isinstance(thing, np.ndarray):
        return str(thing.dtype), thing.shape, thing.tobytes()
    if isinstance(thing, Entries):
        return "entries", thing.first, plain(thing.keys), plain(thing.values), plain(thing.meta)
    if isinstance(thing, EncodedValues):
        arrays = plain(thing.keys), plain(thing.values)
        return "encoded", *arrays, thing.body, thing.notes, plain(thing.meta)
    if dataclasses.is_dataclass(thing):
        return type(thing), {one.name: plain(getattr(thing, one.name)) for one in dataclasses.fields(thing)}
    if isinstance(thing, dict):
        return {key: plain(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing), [plain(one) for one in thing]
    return thing


def one_pulled(content: Any) -> PullResult:
    return PullResult(request=1, namespace="w", first=0, last=1, content=content)


def packed(*messages: Any) -> tuple[bytes, list[np.ndarray]]:
    """Messages that are one lot: its bytes, and the arrays that go beside."""
    ((data, attachments),) = Packer().pack(messages)
    return bytes(data), attachments


def came(data: bytes, attachments: list[np.ndarray]) -> list[Any]:
    """The messages of a lot as they come, once what goes beside has."""
    messages, waiting = Unpacker(KINDS).unpack(memoryview(data))
    for array, into in zip(attachments, waiting, strict=True):
        assert (array.dtype, array.shape) == (into.dtype, into.shape)
        into[...] = array
    return messages


PUSH = Push(
    client=7,
    request=1,
    epoch=0,
    namespace="w",
    first=0,
    last=9,
    time=1,
    previous_times=(ClockRange(0, 9, 0),),
    content=Entries(0, np.arange(4.0), np.array([1, 3, 5, 8])),
)
ONE_OF_EACH = (PUSH, PushAck(request=1, first=0, last=1), one_pulled(None))
CODE = {type(one): msgspec.msgpack.decode(packed(one)[0])[0][0] for one in ONE_OF_EACH}


def pulled(content: Any, code: int = CODE[PullResult]) -> bytes:
    fields = {"request": 1, "namespace": "w", "first": 0, "last": 1, "content": content}
    return msgspec.msgpack.encode([(code, fields)])


def claim(
    rows: int,
    width: int = 1,
    *,
    dtype: int = 0,
    dimensions: int = 1,
    is_attached: bool = False,
    then: bytes = b"",
) -> Ext:
    """What a message says of an array, with or without its bytes."""
    head = (
        bytes([dtype, dimensions, is_attached, 0]) + rows.to_bytes(8, "little") + width.to_bytes(8, "little")
    )
    return Ext(1, head + then)
