"""Every message of a parameter server is decoded as it was encoded, and invalid bytes are rejected."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from offbeat.errors import ProtocolError
from offbeat.numerics.ps.entries import Entries, PushMeta
from offbeat.policies.ps.messages import (
    HandoffOperations,
    Operation,
    Pull,
    PullResult,
    Push,
    PushAck,
    PushStamp,
    ReplicateAck,
    TransferChunk,
)
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.runtime.ps.packing import INLINE_BYTES, TO_CLIENT, TO_SERVER, EncodedValues, Packer, Unpacker
from support.ps_messages import CODE, KINDS, PUSH, came, claim, one_pulled, packed, plain, pulled

DTYPES = ("float32", "float64", "int64", "int32", "uint8", "uint64", "bool")
NOT_SENT = ("float16", "complex64", "int8", "uint32", ">f4", ">i8", "U3", "object", "datetime64[s]")


def an_array(dtype: str, rows: int, width: int | None, seed: int, has_gaps: bool) -> np.ndarray:
    shape = (rows,) if width is None else (rows, width)
    if has_gaps:
        shape = (2 * rows, *shape[1:])
    chance = np.random.default_rng(seed)
    if dtype == "bool":
        whole = chance.integers(0, 2, shape).astype(bool)
    else:
        whole = np.frombuffer(chance.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
        whole = whole.reshape(shape)
    return whole[::2] if has_gaps else whole


def arrays(*dtypes: str) -> st.SearchStrategy[np.ndarray]:
    """Empty arrays, small ones, and ones too large to be inline in the message."""
    return st.builds(
        an_array,
        st.sampled_from(dtypes or DTYPES),
        st.sampled_from((0, 1, 2, 7, 3000, INLINE_BYTES)),
        st.sampled_from((None, None, 0, 1, 3)),
        st.integers(0, 2**32),
        st.booleans(),
    )


metas = st.none() | st.builds(
    PushMeta,
    states=st.none() | st.dictionaries(st.text(max_size=5), arrays(), max_size=2),
    weight=st.floats(allow_nan=False),
    settings=st.none()
    | st.dictionaries(
        st.text(max_size=5),
        st.floats(allow_nan=False) | st.lists(st.floats(allow_nan=False), max_size=2),
        max_size=2,
    ),
)


@st.composite
def entries(draw: st.DrawFn) -> Entries:
    values = draw(arrays())
    keys = draw(st.none() | st.just(np.arange(len(values), dtype=np.int64)))
    return Entries(draw(st.integers(-(2**63), 2**63 - 1)), values, keys, draw(metas))


notes = st.dictionaries(
    st.text(max_size=10),
    st.dictionaries(
        st.text(max_size=10),
        st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=5)
        | st.binary(max_size=20)
        | st.lists(st.integers(0, 2**40), max_size=2),
        max_size=3,
    ),
    max_size=3,
)
encoded = st.builds(
    EncodedValues,
    st.none() | arrays("int64"),
    st.none() | arrays(),
    st.none() | st.binary(max_size=50),
    notes,
    metas,
)
whole_numbers = st.integers(-(2**63), 2**64 - 1)
pieces = st.lists(st.builds(ClockRange, whole_numbers, whole_numbers, whole_numbers), max_size=3)
contents = (
    st.none()
    | entries()
    | encoded
    | arrays()
    | st.dictionaries(st.text(max_size=5), arrays(), max_size=3)
    | st.recursive(st.integers(0, 9) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3))
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "namespace": st.text(max_size=10),
    "reason": st.text(max_size=10),
    "previous_times": pieces.map(tuple),
    "times": pieces.map(tuple),
    "returns_states": st.booleans(),
    "returns_times": st.booleans(),
    "returns_values": st.booleans(),
    "content": contents,
    "keys": st.none() | arrays("int64"),
    "route": st.lists(whole_numbers, max_size=3).map(tuple),
    "chain": st.lists(whole_numbers, max_size=3).map(tuple),
    "present_blocks": st.lists(st.tuples(st.text(max_size=5), whole_numbers), max_size=3).map(tuple),
    "clocks": st.dictionaries(whole_numbers, pieces, max_size=3),
}


def of_kind(kind: type) -> st.SearchStrategy[Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    return st.builds(kind, **{name: FIELDS.get(name, whole_numbers) for name in names})


FIELDS["stamps"] = st.lists(of_kind(PushStamp), min_size=1, max_size=2).map(tuple)
FIELDS["operation"] = of_kind(Operation)
FIELDS["operations"] = FIELDS["pending"] = st.lists(of_kind(Operation), max_size=2).map(tuple)


def arrays_of(value: Any) -> list[np.ndarray]:
    """The arrays in a message, in the order in which they are written."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, Entries | EncodedValues):
        return arrays_of([value.keys, value.values, value.meta])
    if dataclasses.is_dataclass(value):
        return arrays_of([getattr(value, one.name) for one in dataclasses.fields(value)])
    if isinstance(value, dict):
        return arrays_of(list(value.values()))
    return [found for one in value for found in arrays_of(one)] if isinstance(value, list | tuple) else []


def sent(message: Any) -> tuple[Any, list[np.ndarray]]:
    """The message as received, and the arrays attached to it."""
    data, attachments = packed(message)
    (arrived,) = came(data, attachments)
    return arrived, attachments


def unpacked(data: bytes, kinds: Any = KINDS) -> Any:
    """The only message of a received pack."""
    (message,), _ = Unpacker(kinds).unpack(memoryview(data))
    return message


# Encoding and decoding


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_message_is_decoded_as_it_was_encoded(kind: type) -> None:
    @settings(max_examples=25, deadline=None)
    @given(of_kind(kind))
    def there_and_back(message: Any) -> None:
        arrived, attachments = sent(message)
        assert plain(arrived) == plain(message)
        large = [one for one in arrays_of(message) if one.nbytes >= INLINE_BYTES]
        assert [plain(one) for one in attachments] == [plain(one) for one in large]
        assert all(one.flags.c_contiguous for one in attachments)

    there_and_back()


@settings(max_examples=50, deadline=None)
@given(entries())
def test_entries_are_decoded_as_they_were_encoded(content: Entries) -> None:
    arrived, _ = sent(one_pulled(content))
    assert plain(arrived.content) == plain(content)


def test_attachments_arrive_in_the_order_of_the_message() -> None:
    keys = np.arange(INLINE_BYTES, dtype=np.int64)
    operations = tuple(
        Operation(
            namespace="w",
            first=0,
            last=len(keys),
            stamps=(PushStamp(client=1, time=number, previous_times=()),),
            content=Entries(0, np.full(len(keys), number, np.float32), keys),
        )
        for number in range(3)
    )
    chunk = TransferChunk(
        view=1,
        namespace="w",
        block=0,
        content={
            "values": np.full(len(keys), 9.0),
            "small": np.arange(3),
            "squares": np.full(len(keys), 8.0),
        },
        clocks={},
        pending=operations,
    )
    arrived, attachments = sent(chunk)
    assert [one.flat[1] for one in attachments] == [9.0, 8.0, 1, 0.0, 1, 1.0, 1, 2.0]
    assert plain(arrived) == plain(chunk)


@pytest.mark.parametrize("size", [INLINE_BYTES - 1, INLINE_BYTES])
def test_large_arrays_are_attached_and_small_ones_are_inline(size: int) -> None:
    data, attachments = packed(one_pulled(np.zeros(size, np.uint8)))
    assert len(attachments) == (size >= INLINE_BYTES)
    assert len(data) < 200 if attachments else len(data) > size


def test_an_attached_array_is_not_copied() -> None:
    values = np.zeros(INLINE_BYTES)
    _, attachments = packed(one_pulled(Entries(0, values)))
    assert np.shares_memory(attachments[0], values)


def test_a_packer_packs_the_next_message_after_an_error() -> None:
    packer = Packer()
    large = np.zeros(INLINE_BYTES)
    with pytest.raises(TypeError):
        list(packer.pack([one_pulled([large, large.astype(np.float16)])]))
    ((_, attachments),) = packer.pack([one_pulled(large)])
    assert len(attachments) == 1


# Packs


def test_messages_of_one_turn_of_the_loop_are_packed_together_in_order() -> None:
    messages = [PushAck(request=number, first=0, last=1) for number in range(100)]
    messages += [one_pulled(np.arange(number)) for number in range(5)]
    data, attachments = packed(*messages)
    assert plain(came(data, attachments)) == plain(messages)
    assert list(Packer().pack([])) == []


def test_a_message_with_attachments_is_the_last_of_its_pack() -> None:
    large = np.arange(INLINE_BYTES)
    messages = [one_pulled(content) for content in (1, large, 2, 3, [large, large], 4)]
    lots = [(bytes(data), attachments) for data, attachments in Packer().pack(messages)]
    arrived = [came(*lot) for lot in lots]
    assert [[plain(one.content) for one in lot] for lot in arrived] == [
        [1, plain(large)],
        [2, 3, (list, [plain(large)] * 2)],
        [4],
    ]
    assert [len(attachments) for _, attachments in lots] == [1, 2, 0]


def test_a_pack_is_not_much_longer_than_the_limit_of_a_batch() -> None:
    messages = [one_pulled(np.zeros(INLINE_BYTES - 1, np.uint8)) for _ in range(100)]
    lots = [bytes(data) for data, _ in Packer().pack(messages)]
    assert all(256 * 1024 < len(data) < 256 * 1024 + 2 * INLINE_BYTES for data in lots[:-1])
    assert plain([one for data in lots for one in came(data, [])]) == plain(messages)


# Values that cannot be sent


@pytest.mark.parametrize("dtype", NOT_SENT)
def test_an_array_of_an_unsupported_type_is_reported_with_the_supported_types(dtype: str) -> None:
    array = np.zeros(3, dtype)
    with pytest.raises(TypeError, match="float32, float64, int64, int32, uint8, uint64, bool, got 1 of") as e:
        packed(one_pulled(Entries(0, array)))
    assert str(array.dtype) in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("shape", [(), (1, 1, 1)])
def test_an_array_of_zero_or_three_dimensions_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=f"one or two dimensions of .*, got {len(shape)} of float64"):
        packed(one_pulled(np.zeros(shape)))


def test_content_other_than_plain_data_and_arrays_is_rejected() -> None:
    with pytest.raises(TypeError, match="plain data, arrays and Entries, got object"):
        packed(one_pulled(object()))


# Invalid input


def test_the_handmade_bytes_are_a_valid_message() -> None:
    """Otherwise the tests below would be rejected for another reason than the tested one."""
    message = unpacked(pulled(claim(2, then=np.array([1, 2], np.float32).tobytes())), TO_CLIENT)
    assert plain(message.content) == plain(np.array([1, 2], np.float32))


def test_a_truncated_or_extended_message_is_rejected() -> None:
    data, _ = packed(PUSH)
    unpacker = Unpacker(TO_SERVER)
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            unpacker.unpack(memoryview(data[:end]))
    with pytest.raises(ProtocolError):
        unpacker.unpack(memoryview(data + b"\0"))
    assert plain(unpacker.unpack(memoryview(data))[0]) == plain([PUSH])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300), st.booleans())
def test_garbage_gives_a_message_or_a_protocol_error_and_nothing_else(garbage, place, in_a_message):
    if in_a_message:
        data, _ = packed(PUSH)
        garbage = data[:place] + garbage[:4] + data[place + 4 :]
    try:
        messages, _ = Unpacker(TO_SERVER).unpack(memoryview(garbage))
    except ProtocolError:
        return
    assert all(isinstance(message, TO_SERVER) for message in messages)


@pytest.mark.parametrize(
    ("kinds", "others"), [(TO_SERVER, TO_CLIENT), (TO_CLIENT, TO_SERVER)], ids=["server", "client"]
)
def test_messages_for_the_other_side_are_rejected(kinds, others):
    unpacker = Unpacker(kinds)

    @settings(max_examples=30, deadline=None)
    @given(st.one_of([of_kind(kind) for kind in others]))
    def refused(message):
        with pytest.raises(ProtocolError, match="expected messages of the kinds"):
            unpacker.unpack(memoryview(packed(message)[0]))

    refused()


@pytest.mark.parametrize("code", [-1, len(KINDS), 2**40, True, "Push", None, [0]])
def test_an_unknown_kind_is_rejected(code):
    with pytest.raises(ProtocolError):
        unpacked(pulled(None, code))


@pytest.mark.parametrize(
    "fields",
    [
        {"request": 1, "first": 0},
        {"request": "1", "first": 0, "last": 1},
        {"request": 1.5, "first": 0, "last": 1},
        {"request": None, "first": 0, "last": 1},
        [1, 0, 1],
        None,
    ],
)
def test_fields_that_are_missing_or_of_another_type_are_rejected(fields):
    with pytest.raises(ProtocolError):
        unpacked(msgspec.msgpack.encode([(CODE[PushAck], fields)]), TO_CLIENT)


@pytest.mark.parametrize(
    "content",
    [
        Ext(1, b""),
        Ext(1, b"\0" * 19),
        claim(1),
        claim(1, then=b"\0" * 3),
        claim(1, then=b"\0" * 5),
        claim(1, dtype=7, then=b"\0" * 8),
        claim(1, dimensions=0, then=b"\0" * 4),
        claim(1, dimensions=3, then=b"\0" * 4),
        claim(2**63, 0, dimensions=2),
        claim(2**64 - 1, 0, dimensions=2, is_attached=True),
        claim(5000, is_attached=True, then=b"\0"),
        Ext(2, b""),
        Ext(2, b"\0" * 8),
        Ext(2, b"\0" * 9),
        Ext(2, b"\0" * 8 + b"\1" + claim(1, dtype=2, then=b"\0" * 8).data),
        Ext(2, b"\0" * 9 + claim(1, then=b"\0" * 5).data),
        Ext(3, b""),
        Ext(3, b"\0" * 20),
        Ext(4, b"\0" * 20),
        Ext(-1, b"\0" * 20),
        {("a", "key"): claim(1)},
    ],
)
def test_an_invalid_array_is_rejected(content):
    with pytest.raises(ProtocolError):
        unpacked(pulled(content), TO_CLIENT)


def encoded_by_hand(
    keys: Any = None, values: Any = None, body: Any = None, notes: Any = MappingProxyType({})
) -> Ext:
    return Ext(
        3, msgspec.msgpack.encode((keys, values, body, dict(notes) if isinstance(notes, Mapping) else notes))
    )


def test_the_handmade_bytes_are_valid_encoded_values() -> None:
    """Otherwise the tests below would be rejected for another reason than the tested one."""
    ones = np.ones(2, np.float32)
    content = encoded_by_hand(values=claim(2, then=ones.tobytes()), notes={"a": {"b": [1]}})
    message = unpacked(pulled(content), TO_CLIENT)
    assert plain(message.content) == plain(EncodedValues(None, ones, None, {"a": {"b": [1]}}))


@pytest.mark.parametrize(
    "content",
    [
        Ext(3, msgspec.msgpack.encode([])),
        Ext(3, msgspec.msgpack.encode([None, None, None])),
        Ext(3, msgspec.msgpack.encode([None, None, None, {}, None])),
        Ext(3, msgspec.msgpack.encode([None, None, None, {}]) + b"\0"),
        encoded_by_hand("keys"),
        encoded_by_hand([1, 2]),
        encoded_by_hand(values=1.5),
        encoded_by_hand(values={"a": claim(0)}),
        encoded_by_hand(encoded_by_hand()),
        encoded_by_hand(values=Ext(2, b"\0" * 9 + claim(0).data)),
        encoded_by_hand(claim(3, then=b"\0")),
        encoded_by_hand(values=claim(2**62, is_attached=True)),
        encoded_by_hand(body="text"),
        encoded_by_hand(body=[0]),
        encoded_by_hand(notes=None),
        encoded_by_hand(notes=[]),
        encoded_by_hand(notes={"a": 1}),
        encoded_by_hand(notes={1: {}}),
        encoded_by_hand(notes={"a": {1: 1}}),
        encoded_by_hand(notes={"a": {"b": {}}}),
        encoded_by_hand(notes={"a": {"b": None}}),
        encoded_by_hand(notes={"a": {"b": [[1]]}}),
        encoded_by_hand(notes={"a": {"b": ["c"]}}),
        encoded_by_hand(notes={"a": {"b": claim(0)}}),
        encoded_by_hand(notes={"a": {"b": encoded_by_hand()}}),
    ],
)
def test_invalid_encoded_values_are_rejected(content: Ext) -> None:
    with pytest.raises(ProtocolError):
        unpacked(pulled(content), TO_CLIENT)


def test_nested_contents_are_rejected_at_any_depth() -> None:
    content = encoded_by_hand()
    for _ in range(3000):
        content = encoded_by_hand(content)
    with pytest.raises(ProtocolError):
        unpacked(pulled(content), TO_CLIENT)
    lists = b"\x94\xc0\xc0\xc0\x81\xa1a\x81\xa1b" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ProtocolError):
        unpacked(pulled(Ext(3, lists)), TO_CLIENT)


def memory_taken(function: Any) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [
        claim(2**29 + 1, is_attached=True),
        claim(2**62, is_attached=True),
        claim(2**64 - 1, 2**64 - 1, dimensions=2, is_attached=True),
        claim(2**20, 2**20, dimensions=2, is_attached=True),
        claim(2**29),
        claim(2**64 - 1),
        Ext(2, b"\0" * 9 + claim(2**62, is_attached=True).data),
        encoded_by_hand(values=claim(2**62, is_attached=True)),
        encoded_by_hand(claim(2**29, dtype=2, is_attached=True)),
    ],
    ids=[*"abcdefghi"],
)
def test_no_memory_is_allocated_for_an_array_above_the_size_limit(content):
    data = pulled(content)

    def refused():
        with pytest.raises(ProtocolError, match="bytes"):
            unpacked(data, TO_CLIENT)

    assert memory_taken(refused) < 2**20


def test_the_total_size_of_attached_arrays_is_limited() -> None:
    data = pulled([claim(2**29, is_attached=True) for _ in range(1000)])
    with pytest.raises(ProtocolError, match=f"arrays of at most {2**33} bytes"):
        unpacked(data, TO_CLIENT)


def test_an_announced_array_larger_than_the_free_memory_is_a_protocol_error() -> None:
    """In a process of its own, whose memory is limited."""
    code = (
        "import resource\n"
        "from offbeat.errors import ProtocolError\n"
        "from offbeat.runtime.ps.packing import TO_CLIENT, Unpacker\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
        "try:\n"
        f"    Unpacker(TO_CLIENT).unpack(memoryview({pulled(claim(2**29, is_attached=True))!r}))\n"
        "except ProtocolError as error:\n"
        "    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("expected messages of a parameter server"), done.stderr


def test_an_array_in_place_of_a_number_is_rejected() -> None:
    data = msgspec.msgpack.encode([(CODE[PushAck], {"request": claim(0), "first": 0, "last": 1})])
    with pytest.raises(ProtocolError):
        unpacked(data, TO_CLIENT)


def test_the_kinds_for_servers_and_for_clients_are_disjoint():
    assert not set(TO_SERVER) & set(TO_CLIENT)
    assert {Push, Pull, ReplicateAck, HandoffOperations} <= set(TO_SERVER)
    assert {PushAck, PullResult} <= set(TO_CLIENT)


def with_meta(*plain: Any) -> Ext:
    return Ext(4, msgspec.msgpack.encode(plain))


EMPTY = msgspec.msgpack.decode(packed(one_pulled(Entries(0, np.zeros(0))))[0])[0][1]["content"]


@pytest.mark.parametrize(
    "content",
    [
        with_meta(EMPTY, "heavy", None, None),
        with_meta(EMPTY, 1.0, {"lr": "fast"}, None),
        with_meta(EMPTY, 1.0, {"lr": [[1.0]]}, None),
        with_meta(EMPTY, 1.0),
        with_meta(EMPTY, 1.0, None, {"mean": EMPTY}),
        with_meta(EMPTY, 1.0, None, {"mean": 1.0}),
        with_meta(None, 1.0, None, None),
        with_meta(Ext(1, EMPTY.data[9:]), 1.0, None, None),
        with_meta(with_meta(EMPTY, 1.0, None, None), 1.0, None, None),
    ],
)
def test_invalid_push_metadata_is_a_protocol_error(content: Ext) -> None:
    unpacked(pulled(with_meta(EMPTY, 1.0, None, None)))
    with pytest.raises(ProtocolError, match="expected messages of a parameter server"):
        unpacked(pulled(content))
