"""Events and actions as plain data, on the wire and in the run log; and the replay of a log.

A run log is JSON lines: a header with the log's version and the job's policies, then every event in the order
in which the policies received it, each followed by the actions that answered it. A log of bounded size is a
series of such files, its parts: `log.000001.jsonl`, `log.000002.jsonl`, …, and `log.jsonl`, which is the
newest. The header of each part but the first holds the state of the policies at its beginning, so that every
part can be replayed without the parts before it. This module opens no connection, reads no clock, and decides
nothing but whether data are valid.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, cast, get_args, get_origin, get_type_hints

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
from offbeat.policies import Policy, dispatch_event
from offbeat.wire.known import prime_msgspec_types

LOG_VERSION: Final = 3
MESSAGE_BYTES_MAX: Final = 1024 * 1024  # maximum size of a control message on a link
_BUFFER_BYTES_MAX: Final = 64 * 1024
_HEADER_BYTES_MAX: Final = 64 * 1024 * 1024  # a file that is no log may be one line of any length
_VERSION_KEY: Final = "offbeat_log"
_STATES_KEY: Final = "states"
EVENTS_BEFORE_KEY: Final = "events_before"
_POLICY_PATH: Final = re.compile(r"(offbeat\.policies(?:\.[a-z][a-z0-9_]*)+):([A-Z][A-Za-z0-9]*)")

_NotFinite: TypeAlias = Literal["nan", "inf", "-inf"]  # JSON has no such numbers; a diverged loss does
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1.7e308)]


def _struct_of(kind: type, *, without_clock: bool = False) -> type[msgspec.Struct]:
    """Derive the msgspec struct of a dataclass: its fields, no other, and a "type" that names it."""
    hints = get_type_hints(kind)
    columns = [
        (
            field.name,
            _constrained(hints[field.name]),
            msgspec.NODEFAULT if field.default is MISSING else field.default,
        )
        for field in fields(kind)
        if not (without_clock and field.name == "now_s")
    ]
    return msgspec.defstruct(
        kind.__name__, columns, tag=kind.__name__, tag_field="type", forbid_unknown_fields=True, kw_only=True
    )


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
    if hint == int | None:
        return _Count | None
    if hint == float | None:
        return float | _NotFinite | None
    if hint == dict[str, float]:
        return dict[str, float | _NotFinite]
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return tuple[tuple(map(_constrained, get_args(hint)))]  # type: ignore[misc]
    if get_origin(hint) is tuple:
        return tuple[_constrained(get_args(hint)[0]), ...]  # type: ignore[misc]
    if is_dataclass(hint):
        return msgspec.defstruct(
            cast(type, hint).__name__,
            [(name, _constrained(inner)) for name, inner in get_type_hints(hint).items()],
            forbid_unknown_fields=True,
            kw_only=True,
        )
    assert hint is str, f"events and actions hold no {hint}"
    return str


_EVENTS: Final = {kind.__name__: kind for kind in get_args(Event)}
_ACTIONS: Final = {kind.__name__: kind for kind in get_args(Action)}
_KINDS: Final = _EVENTS | _ACTIONS
_DEFAULTS: Final = {  # of the fields that may be omitted
    kind: [(field.name, field.default) for field in fields(kind) if field.default is not MISSING]
    for kind in _KINDS.values()
}
_METRICS: Final = {
    Evaluated: ("metrics",),
    PartEvaluated: ("means", "counts"),
    StatesMerged: ("means", "counts"),
    ValidationFinished: ("means", "counts"),
}
_EVENT_STRUCTS: Final = [_struct_of(kind, without_clock=True) for kind in _EVENTS.values()]
_ACTION_STRUCTS: Final = [_struct_of(kind) for kind in _ACTIONS.values()]
_EntryStruct: Final = reduce(or_, [_struct_of(kind) for kind in _KINDS.values()])
prime_msgspec_types(*_KINDS.values())

_event_decoder: Final = msgspec.msgpack.Decoder(list[reduce(or_, _EVENT_STRUCTS)])  # type: ignore[misc]
_action_decoder: Final = msgspec.msgpack.Decoder(list[reduce(or_, _ACTION_STRUCTS)])  # type: ignore[misc]
_line_decoder: Final = msgspec.json.Decoder(_EntryStruct)
_json: Final = msgspec.json.Encoder()
_LOG_BEGINS: Final = f'{{"{_VERSION_KEY}":'.encode()
_msgpack: Final = msgspec.msgpack.Encoder()
_MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def to_plain(entry: Event | Action) -> dict[str, Any]:
    """Return an event or action as a dict of plain data, with the name of its class under "type"."""
    plain: dict[str, Any] = {"type": type(entry).__name__, **msgspec.to_builtins(entry)}
    for name, default in _DEFAULTS[type(entry)]:
        if plain[name] == default:
            del plain[name]
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
    except _MALFORMED as error:
        raise ProtocolError(f"expected an event or action as plain data: {error}") from None


def encode_events(events: Sequence[Event]) -> bytes:
    """Return a control message with these events, without `now_s`, which the receiver sets."""
    plains = [to_plain(event) for event in events]
    for plain in plains:
        del plain["now_s"]
    return _packed(plains)


def decode_events(data: bytes, now_s: float) -> list[Event]:
    """Return the events of a control message, with `now_s` as their time.

    The caller checks whether the sender is allowed to send these events.

    Raises:
        ProtocolError: the message is too long, is no list of events, or a field is out of range.
    """
    return [cast(Event, _build(struct, now_s=now_s)) for struct in _unpacked(data, _event_decoder, "events")]


def encode_actions(actions: Sequence[Action]) -> bytes:
    """Return a control message with these actions."""
    return _packed([to_plain(action) for action in actions])


def split_actions(actions: Sequence[Action]) -> list[bytes]:
    """Return control messages with these actions, in order: several where one would be too long."""
    whole = encode_actions(actions)
    if len(whole) <= MESSAGE_BYTES_MAX or len(actions) < 2:
        return [whole]
    half = len(actions) // 2
    return [*split_actions(actions[:half]), *split_actions(actions[half:])]


def decode_actions(data: bytes) -> list[Action]:
    """Return the actions of a control message.

    Raises:
        ProtocolError: the message is too long, is no list of actions, or a field is out of range.
    """
    return [cast(Action, _build(struct)) for struct in _unpacked(data, _action_decoder, "actions")]


def _packed(plains: list[dict[str, Any]]) -> bytes:
    try:
        return _msgpack.encode(plains)
    except UnicodeEncodeError:
        return _msgpack.encode(_escaped(plains))


def _unpacked(data: bytes, decoder: msgspec.msgpack.Decoder[Any], what: str) -> list[msgspec.Struct]:
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"expected {what} in at most {MESSAGE_BYTES_MAX} bytes, got {len(data)} bytes")
    try:
        return cast(list[msgspec.Struct], decoder.decode(data))
    except _MALFORMED as error:
        raise ProtocolError(f"expected a list of {what}: {error}") from None


def _build(struct: msgspec.Struct, **clock: float) -> Event | Action:
    """Build the dataclass of a valid struct; not strict, so that "nan" becomes the number again."""
    kind = _KINDS[type(struct).__name__]
    whole = {**msgspec.structs.asdict(struct), **clock}
    return cast("Event | Action", msgspec.convert(whole, kind, strict=False, from_attributes=True))


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


class LogWriter:
    """Writes a run log, or one part of it; for one thread.

    A line reaches the file when more than 64 KiB are buffered, or at `flush`, which the caller calls on a
    timer: so the caller bounds the loss when a run is killed. The buffer is written only before an event,
    never between an event and its actions.

    Args:
        path: the file; an existing one is replaced.
        header: plain data for the first line, among them "policies": a list of {"path": "module:Class",
            "arguments": {…}} in the order in which they handle events.

    Attributes:
        events: events that have reached the file, each with its actions.

    Raises:
        OSError: the file cannot be written; also from every method. Nothing can be added then, and the file
            ends with a whole event wherever it can still be truncated.
    """

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        self.events = 0
        self._buffer = bytearray()
        self._starts: list[int] = []  # offsets of the events in the buffer
        self._write({_VERSION_KEY: LOG_VERSION, **header})
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 (open until close)
        self.flush()

    @property
    def is_buffer_full(self) -> bool:
        """Whether the next event flushes the buffer."""
        return len(self._buffer) > _BUFFER_BYTES_MAX

    @property
    def is_regular_file(self) -> bool:
        """Whether this is a file that can be truncated and renamed, and no pipe or device."""
        return stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    @property
    def size_bytes(self) -> int:
        """The size of the file, without the buffer."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def buffered_bytes(self) -> int:
        """The size of the buffer."""
        return len(self._buffer)

    def reopen(self, path: str | Path) -> None:
        """Continue in a file that has a header already; the buffer is dropped."""
        file = Path(path).open("r+b", buffering=0)  # noqa: SIM115 (open until close)
        self._file.close()
        self._file = file

    def truncate(self, size_bytes: int, events: int) -> None:
        """Truncate the file to `size_bytes` and continue there; the buffer is dropped.

        A file that is not regular (a pipe, a device) keeps its content.

        Args:
            size_bytes: an earlier `size_bytes` of this file.
            events: the value of `events` at that time.
        """
        self._discard_buffer()
        self.events = events
        if self.is_regular_file:
            self._file.truncate(size_bytes)
            self._file.seek(size_bytes)

    def add_event(self, event: Event) -> None:
        """Add an event that the policies handle."""
        if self.is_buffer_full:
            self.flush()
        start = len(self._buffer)
        self._write(to_plain(event))
        self._starts.append(start)

    def add_actions(self, actions: Sequence[Action]) -> None:
        """Add the actions that answer the last event, in their order."""
        for action in actions:
            self._write(to_plain(action))

    def flush(self) -> None:
        """Write every buffered line to the operating system."""
        written_bytes = 0
        try:
            while self._buffer:
                written = self._file.write(self._buffer)
                del self._buffer[:written]
                written_bytes += written
        except OSError:
            self._truncate_to_whole_event(written_bytes)
            raise
        self.events += len(self._starts)
        self._starts.clear()

    def close(self) -> None:
        """Flush and close the file; a second call does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def close_unflushed(self) -> None:
        """Close the file without its buffer; for a file that cannot be written."""
        self._discard_buffer()
        with suppress(OSError):
            self._file.close()

    def _truncate_to_whole_event(self, written_bytes: int) -> None:
        """Truncate a partial event after a flush that failed at this offset, and drop the buffer."""
        started = bisect_right(self._starts, written_bytes)
        begin = self._starts[started - 1] if started else 0
        self.events += max(0, started - 1)
        self._discard_buffer()
        with suppress(OSError):
            if self.is_regular_file:
                self._file.truncate(self._file.tell() - written_bytes + begin)

    def _discard_buffer(self) -> None:
        self._buffer.clear()
        self._starts.clear()

    def _write(self, plain: dict[str, Any]) -> None:
        length = len(self._buffer)
        try:
            _json.encode_into(plain, self._buffer, -1)
        except UnicodeEncodeError:
            del self._buffer[length:]
            _json.encode_into(_escaped(plain), self._buffer, -1)
        self._buffer += b"\n"


def states_header(states: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the entry of a part's header for the state of the policies at its beginning.

    Base64 of msgpack, for a state may hold values that JSON lacks, such as a loss that is NaN.

    Args:
        states: the `state_dict` of each policy of the header's list.
    """
    return {_STATES_KEY: base64.b64encode(_msgpack.encode(states)).decode()}


def log_part_path(path: Path, number: int) -> Path:
    """Return the path of a log's finished part, numbered from 1."""
    return path.with_name(f"{path.stem}.{number:06d}{path.suffix}")


def finished_log_parts(path: Path) -> dict[int, Path]:
    """Return the existing finished parts of a log by number, oldest first.

    Files with such a name that are no run logs are skipped.
    """
    pattern = re.compile(rf"{re.escape(path.stem)}\.(\d{{6,}}){re.escape(path.suffix)}")
    try:
        names = os.listdir(path.parent)
    except OSError:
        return {}
    found = {int(match[1]): path.parent / match[0] for match in map(pattern.fullmatch, names) if match}
    return {number: part for number, part in sorted(found.items()) if _is_log(part)}


def _is_log(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LOG_BEGINS)) == _LOG_BEGINS
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run log, or one part of it, as read from its file.

    Attributes:
        header: the first line, including the version.
        entries: events, each followed by its actions.
        is_truncated: the file ends in the middle of a line, which was skipped, and the last event may lack
            actions: the run was killed during a write, or could not write any more.
    """

    header: dict[str, Any]
    entries: list[Event | Action]
    is_truncated: bool = False

    @property
    def events_before(self) -> int:
        """Events in the parts before this one; 0 for a whole log."""
        before = self.header.get(EVENTS_BEFORE_KEY, 0)
        return before if isinstance(before, int) else 0


def read_logs(path: str | Path) -> dict[Path, RunRecord]:
    """Read all existing parts of a run log, oldest first; most logs have one.

    Raises:
        FileNotFoundError, ValueError: see `read_log`.
    """
    path = Path(path)
    parts = list(finished_log_parts(path).values())
    if path.exists() or not parts:
        parts.append(path)
    return {part: read_log(part) for part in parts}


def read_log(path: str | Path) -> RunRecord:
    """Read a run log, or one part of it; only its last line may be incomplete.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, no run log, of a newer version, or has an invalid line; the message
            names the file and the line.
    """
    path = Path(path)
    entries: list[Event | Action] = []
    line = b""
    with path.open("rb") as file:
        header = _header(path, file.readline(_HEADER_BYTES_MAX))
        for number, line in enumerate(file, start=2):
            try:
                entry = _build(_line_decoder.decode(line))
            except _MALFORMED as error:
                if not line.endswith(b"\n"):
                    return RunRecord(header=header, entries=entries, is_truncated=True)
                raise ValueError(f"{path}, line {number}: expected an event or action: {error}") from None
            if not entries and type(entry).__name__ not in _EVENTS:
                raise ValueError(f"{path}, line {number}: expected an event before the first action")
            entries.append(entry)
    return RunRecord(header=header, entries=entries, is_truncated=bool(line) and not line.endswith(b"\n"))


def _header(path: Path, line: bytes) -> dict[str, Any]:
    expected = f"expected a run log, whose first line is a JSON object with {_VERSION_KEY!r}"
    if not line:
        raise ValueError(f"{path} is empty: {expected}")
    try:
        header = msgspec.json.decode(line, type=dict[str, Any])
    except _MALFORMED:
        raise ValueError(f"{path} is not a run log: {expected}") from None
    version = header.get(_VERSION_KEY)
    if type(version) is not int or version < 1:
        raise ValueError(f"{path} is not a run log: {expected}")
    if version != LOG_VERSION:
        raise ValueError(
            f"{path} is a run log of version {version}, expected version {LOG_VERSION}: "
            "read it with the offbeat that wrote it"
        )
    return header


@dataclass(frozen=True, kw_only=True)
class ReplayDifference:
    """The first event of a log that a replay answers differently.

    Attributes:
        entry: number of the event's entry, from 1; its line in the file is one more, for the header.
        event: the event.
        expected: the recorded actions.
        got: the actions of the replay.
    """

    entry: int
    event: Event
    expected: tuple[Action, ...]
    got: tuple[Action, ...]

    def __str__(self) -> str:
        return (
            f"entry {self.entry} (line {self.entry + 1}): to {_as_json([self.event])}\n"
            f"  the log has the answer {_as_json(self.expected)}\n"
            f"  the policies now give  {_as_json(self.got)}"
        )


def replay(log: RunRecord) -> ReplayDifference | None:
    """Let policies handle every event of a log; return the first difference, if any.

    The policies are new, or have the state from the header of a part.

    Raises:
        ValueError: the header lacks the policies, or names something that is no policy.
    """
    policies = build_policies(log.header)
    events = list(_events_with_actions(log.entries))
    for index, (number, event, expected) in enumerate(events):
        got = tuple(dispatch_event(policies, event))
        if log.is_truncated and index == len(events) - 1:
            got = got[: len(expected)]
        if got != expected:
            return ReplayDifference(entry=number, event=event, expected=expected, got=got)
    return None


def build_policy(path: str, arguments: dict[str, Any]) -> Policy:
    """Build the policy at `path`, "offbeat.policies.MODULE:Class".

    Raises:
        ValueError: there is no policy at this path, or it does not accept these arguments.
    """
    expected = f"expected a policy as 'offbeat.policies.MODULE:Class', got {path!r}"
    found = _POLICY_PATH.fullmatch(path)
    if found is None:
        raise ValueError(expected)
    try:
        kind = getattr(importlib.import_module(found[1]), found[2], None)
    except ModuleNotFoundError:
        raise ValueError(f"{expected}: there is no such module") from None
    if not (inspect.isclass(kind) and hasattr(kind, "handle")):
        raise ValueError(f"{expected}: {found[1]} has no such policy")
    try:
        return cast(Policy, kind(**arguments))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the policy {path} cannot be built with {arguments}: {error}") from None


def build_policies(header: dict[str, Any]) -> list[Policy]:
    """Build the policies that a run log's header names, with their states if it has any.

    Raises:
        ValueError: the header lacks the policies, or names something that is no policy.
    """

    class PolicyLine(msgspec.Struct):
        path: str
        arguments: dict[str, Any] = {}

    try:
        lines = msgspec.convert(header.get("policies"), list[PolicyLine])
    except msgspec.ValidationError as error:
        raise ValueError(
            f"expected the log's header to list its policies, with path and arguments: {error}"
        ) from None
    policies = [build_policy(line.path, line.arguments) for line in lines]
    if _STATES_KEY in header:
        _load_states(policies, header[_STATES_KEY])
    return policies


def _load_states(policies: Sequence[Policy], text: Any) -> None:
    try:
        states = msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=list[dict[str, Any]])
        for policy, state in zip(policies, states, strict=True):
            policy.load_state_dict(state)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"expected the log's header to hold a state of each policy: {type(error).__name__}: {error}"
        ) from None


def _events_with_actions(entries: list[Event | Action]) -> Iterator[tuple[int, Event, tuple[Action, ...]]]:
    """Yield the number of every event, the event, and its actions."""
    starts = [index for index, entry in enumerate(entries) if type(entry).__name__ in _EVENTS]
    for start, stop in pairwise([*starts, len(entries)]):
        yield start + 1, cast(Event, entries[start]), tuple(cast("list[Action]", entries[start + 1 : stop]))


def _as_json(entries: Sequence[Event | Action]) -> str:
    return ", ".join(_json.encode(to_plain(entry)).decode() for entry in entries) or "nothing"
