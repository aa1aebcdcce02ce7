"""Events and actions as plain data: as control messages in msgpack, and as lines of JSON.

Each dataclass of `offbeat.events` has a struct that is derived from it, so that data that are not exactly its
fields, within their ranges, are refused with a `ProtocolError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, reduce
from operator import or_
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeGuard,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    Evaluated,
    Event,
    PartEvaluated,
    StatesMerged,
    StepFinished,
    ValidationFinished,
)
from offbeat.wire.known import prime_msgspec_types

MESSAGE_BYTES_MAX: Final = 1024 * 1024  # maximum size of a control message on a link
ACTION_BYTES_MAX: Final = MESSAGE_BYTES_MAX - 1  # a message is a list, whose head is at least a byte

PlainEntry: TypeAlias = dict[str, Any] | msgspec.Struct  # an event or action as plain data
_NotFinite: TypeAlias = Literal["nan", "inf", "-inf"]  # JSON has no such numbers; a diverged loss does
_STRUCT_OPTIONS: Final[dict[str, Any]] = {
    "forbid_unknown_fields": True,
    "omit_defaults": True,
    "kw_only": True,
}
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1.7e308)]


class ActionMessage(NamedTuple):
    """A control message to a worker or node.

    Attributes:
        actions: number of actions in it.
        payload: the message.
    """

    actions: int
    payload: bytes


class DecodedEvent(NamedTuple):
    """An event that was received.

    Attributes:
        event: for policies.
        struct: the same data, which `append_json` and `encode_record` take like what `to_plain` returns.
    """

    event: Event
    struct: msgspec.Struct


def _struct_of(kind: type, *, is_received: bool = False) -> type[msgspec.Struct]:
    """Derive the msgspec struct of a dataclass: its fields, no other, and a "type" that names it.

    A received event has no `now_s` before `decode_events` sets it.
    """
    columns = _columns(kind)
    if is_received:
        columns = [("now_s", float | None, None), *(one for one in columns if one[0] != "now_s")]
    return msgspec.defstruct(
        kind.__name__,
        columns,
        namespace=_namespace(kind),
        tag=kind.__name__,
        tag_field="type",
        **_STRUCT_OPTIONS,
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    return get_type_hints(kind)


def _columns(kind: type) -> list[tuple[str, Any, Any]]:
    """Return name, constrained type and default of each field of a dataclass."""
    hints = _hints(kind)
    return [
        (
            field.name,
            _constrained(hints[field.name]),
            msgspec.NODEFAULT if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    ]


def _constrained(hint: Any) -> Any:
    """Constrain every number of a field: counts and durations are finite and not negative.

    Metrics, and a number that may be missing, such as a loss, are unconstrained.
    """
    if hint is bool:
        return bool
    if hint is int:
        return _Count
    if hint is float:
        return _Amount
    if hint == float | None:
        return float | _NotFinite | None
    if hint == dict[str, float]:
        return dict[str, float | _NotFinite]
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return tuple[tuple(map(_constrained, get_args(hint)))]  # type: ignore[misc]
    if get_origin(hint) is tuple:
        return tuple[_constrained(get_args(hint)[0]), ...]  # type: ignore[misc]
    if type(None) in get_args(hint):
        (part,) = (one for one in get_args(hint) if one is not type(None))
        return _constrained(part) | None
    if is_dataclass(hint):
        return _struct_of_part(cast(type, hint))
    assert hint is str, f"events and actions hold no {hint}"
    return str


@cache  # a schema has one struct of a name
def _struct_of_part(kind: type) -> type[msgspec.Struct]:
    """Derive the struct of a dataclass that events and actions hold."""
    return msgspec.defstruct(kind.__name__, _columns(kind), namespace=_namespace(kind), **_STRUCT_OPTIONS)


def _namespace(kind: type) -> dict[str, Any]:
    return {"__doc__": inspect.getdoc(kind)}  # which becomes its description in a schema


def _defaults(kind: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that may be omitted, with their defaults."""
    return [(field.name, field.default) for field in fields(kind) if field.default is not MISSING]


def _omit_defaults(plain: dict[str, Any], defaults: list[tuple[str, Any]]) -> None:
    for name, default in defaults:
        if plain[name] == default:
            del plain[name]


def _is_same_in_struct(hint: Any) -> bool:
    """Whether a field has the same value in the struct: it holds no dataclass and no number such as "nan"."""
    if get_origin(hint) is tuple:
        return all(_is_same_in_struct(inner) for inner in get_args(hint) if inner is not Ellipsis)
    return not any(map(is_dataclass, (hint, *get_args(hint)))) and hint not in (
        float | None,
        dict[str, float],
    )


_EVENTS: Final = {kind.__name__: kind for kind in get_args(Event)}
_ACTIONS: Final = {kind.__name__: kind for kind in get_args(Action)}
_KINDS: Final = _EVENTS | _ACTIONS
_DEFAULTS: Final = {kind: _defaults(kind) for kind in _KINDS.values()}
_PARTS_DEFAULTS: Final = {  # by kind, its fields that hold dataclasses with defaults, and these
    kind: [
        (name, _defaults(part))
        for name, hint in _hints(kind).items()
        for part in get_args(hint)
        if is_dataclass(part) and _defaults(part)
    ]
    for kind in _KINDS.values()
}
_CONVERTED: Final = {  # the fields whose value differs from that in the struct, and their types
    kind: [(name, hint) for name, hint in _hints(kind).items() if not _is_same_in_struct(hint)]
    for kind in _KINDS.values()
}
_METRICS: Final = {
    Evaluated: ("metrics",),
    PartEvaluated: ("means", "counts"),
    StatesMerged: ("means", "counts"),
    ValidationFinished: ("means", "counts"),
}
_EVENT_STRUCTS: Final = [_struct_of(kind, is_received=True) for kind in _EVENTS.values()]
_ACTION_STRUCTS: Final = [_struct_of(kind) for kind in _ACTIONS.values()]
_EntryStruct: Final = reduce(or_, [*(_struct_of(kind) for kind in _EVENTS.values()), *_ACTION_STRUCTS])
prime_msgspec_types(*_KINDS.values())

_event_decoder: Final = msgspec.msgpack.Decoder(list[reduce(or_, _EVENT_STRUCTS)])  # type: ignore[misc]
_action_decoder: Final = msgspec.msgpack.Decoder(list[reduce(or_, _ACTION_STRUCTS)])  # type: ignore[misc]
_line_decoder: Final = msgspec.json.Decoder(_EntryStruct)
_json: Final = msgspec.json.Encoder()
_msgpack: Final = msgspec.msgpack.Encoder()
MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def to_plain(entry: Event | Action) -> dict[str, Any]:
    """Return an event or action as a dict of plain data, with the name of its class under "type"."""
    plain: dict[str, Any] = {"type": type(entry).__name__, **msgspec.to_builtins(entry)}
    _omit_defaults(plain, _DEFAULTS[type(entry)])
    for name, defaults in _PARTS_DEFAULTS[type(entry)]:
        for part in plain[name]:
            _omit_defaults(part, defaults)
    for field in _METRICS.get(type(entry), ()):
        plain[field] = {name: _plain_metric(value) for name, value in plain[field].items()}
    if isinstance(entry, StepFinished) and entry.loss is not None:
        plain["loss"] = _plain_metric(entry.loss)
    return plain


def from_plain(plain: dict[str, Any]) -> Event | Action:
    """Return the event or action that `to_plain` converted.

    Raises:
        ProtocolError: an unknown type, a missing or unknown field, a wrong type, or a value out of range.
    """
    try:
        return _build(msgspec.convert(plain, _EntryStruct))
    except MALFORMED as error:
        raise ProtocolError(f"expected an event or action as plain data: {error}") from None


def is_event(entry: Event | Action) -> TypeGuard[Event]:
    """Return whether an entry is an event, and no action."""
    return type(entry).__name__ in _EVENTS


def append_json(plain: PlainEntry, buffer: bytearray) -> None:
    """Append plain data as one line of JSON."""
    length = len(buffer)
    try:
        _json.encode_into(plain, buffer, -1)
    except UnicodeEncodeError:
        del buffer[length:]
        _json.encode_into(_escaped(plain), buffer, -1)
    buffer += b"\n"


def decode_json(line: bytes) -> Event | Action:
    """Return the event or action of a line of JSON.

    Raises:
        ProtocolError: see `from_plain`.
    """
    try:
        return _build(_line_decoder.decode(line))
    except MALFORMED as error:
        raise ProtocolError(f"expected an event or action: {error}") from None


def entry_schema() -> dict[str, Any]:
    """Return the JSON Schema of an event or action as a line of JSON."""
    return msgspec.json.schema(_EntryStruct)


def encode_events(events: Sequence[Event]) -> bytes:
    """Return a control message with these events, without `now_s`, which the receiver sets."""
    plains = [to_plain(event) for event in events]
    for plain in plains:
        del plain["now_s"]
    return _packed(plains)


def decode_events(data: bytes, now_s: float) -> list[DecodedEvent]:
    """Return the events of a control message, with `now_s` as their time.

    The caller checks whether the sender is allowed to send these events.

    Raises:
        ProtocolError: the message is too long, is no list of events, or a field is out of range.
    """
    structs: list[Any] = _unpacked(data, _event_decoder, "events")
    for struct in structs:
        if struct.now_s is not None:
            raise ProtocolError(f"expected events without now_s, which the receiver sets, got {struct}")
        struct.now_s = now_s
    return [DecodedEvent(cast(Event, _build(struct)), struct) for struct in structs]


def encode_actions(actions: Sequence[Action]) -> bytes:
    """Return a control message with these actions."""
    return _packed([to_plain(action) for action in actions])


def encode_action(plain: dict[str, Any]) -> bytes:
    """Return an action, as plain data, as in a control message, for `join_actions` and `split_actions`.

    Raises:
        ValueError: no message can hold it.
    """
    encoded = _packed(plain)
    if len(encoded) > ACTION_BYTES_MAX:
        sizes = {name: len(_packed(value)) for name, value in plain.items()}
        longest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"expected an action of at most {ACTION_BYTES_MAX} bytes, as much as a message can hold, got "
            f"{plain['type']} of {len(encoded)} bytes, {sizes[longest]} of them in {longest!r}: make that "
            "shorter"
        )
    return encoded


def encode_record(peer: str, event: PlainEntry, answers: bytes) -> bytes:
    """Return a record of the journal: an event, the peer that it concerns, and the actions that answer it."""
    return _msgpack.encode((peer, event, answers))


def join_actions(encoded: Sequence[bytes]) -> bytes:
    """Return a control message with these actions, of `encode_action`, as `encode_actions` does."""
    return _msgpack.encode([*map(msgspec.Raw, encoded)])


def split_actions(encoded: Sequence[bytes]) -> list[ActionMessage]:
    """Return control messages with these actions, in order: several where one would be too long."""
    whole = join_actions(encoded)
    if len(whole) <= MESSAGE_BYTES_MAX:
        return [ActionMessage(len(encoded), whole)]
    half = len(encoded) // 2
    return [*split_actions(encoded[:half]), *split_actions(encoded[half:])]


def decode_actions(data: bytes) -> list[Action]:
    """Return the actions of a control message.

    Raises:
        ProtocolError: the message is too long, is no list of actions, or a field is out of range.
    """
    return [cast(Action, _build(struct)) for struct in _unpacked(data, _action_decoder, "actions")]


def _packed(data: Any) -> bytes:
    try:
        return _msgpack.encode(data)
    except UnicodeEncodeError:
        return _msgpack.encode(_escaped(data))


def _unpacked(data: bytes, decoder: msgspec.msgpack.Decoder[Any], what: str) -> list[msgspec.Struct]:
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"expected {what} in at most {MESSAGE_BYTES_MAX} bytes, got {len(data)} bytes")
    try:
        return cast(list[msgspec.Struct], decoder.decode(data))
    except MALFORMED as error:
        raise ProtocolError(f"expected a list of {what}: {error}") from None


def _build(struct: msgspec.Struct) -> Event | Action:
    """Build the dataclass of a valid struct.

    Its fields are set at once: the constructor of a frozen dataclass sets each by a call, which takes several
    times as long for the events of every step.
    """
    kind = _KINDS[type(struct).__name__]
    entry: Event | Action = object.__new__(kind)
    values = entry.__dict__
    values.update(msgspec.structs.asdict(struct))
    for name, hint in _CONVERTED[kind]:  # not strict, so that "nan" becomes the number again
        values[name] = msgspec.convert(values[name], hint, strict=False, from_attributes=True)
    return entry


def _plain_metric(value: float) -> float | str:
    return value if value - value == 0 else str(float(value))


def _escaped(data: Any) -> Any:
    """Replace what UTF-8 cannot encode (lone surrogates, from file names) by backslash escapes."""
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode()
    if isinstance(data, dict):
        return {_escaped(key): _escaped(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_escaped(value) for value in data]
    return data
