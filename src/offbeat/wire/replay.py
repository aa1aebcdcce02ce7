"""The replay of a run log: new policies handle its events and must answer with its actions."""

from __future__ import annotations

import base64
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

import msgspec

from offbeat.events import Action, Event
from offbeat.policies import Policy, dispatch_event
from offbeat.wire.codec import is_event, to_plain
from offbeat.wire.log_file import RunRecord

_STATES_KEY: Final = "states"
_POLICY_PATH: Final = re.compile(r"(offbeat\.policies(?:\.[a-z][a-z0-9_]*)+):([A-Z][A-Za-z0-9]*)")


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


def states_header(states: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the entry of a part's header for the state of the policies at its beginning.

    Base64 of msgpack, for a state may hold values that JSON lacks, such as a loss that is NaN.

    Args:
        states: the `state_dict` of each policy of the header's list.
    """
    return {_STATES_KEY: base64.b64encode(msgspec.msgpack.encode(states)).decode()}


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
    starts = [index for index, entry in enumerate(entries) if is_event(entry)]
    for start, stop in pairwise([*starts, len(entries)]):
        yield start + 1, cast(Event, entries[start]), tuple(cast("list[Action]", entries[start + 1 : stop]))


def _as_json(entries: Sequence[Event | Action]) -> str:
    return ", ".join(msgspec.json.encode(to_plain(entry)).decode() for entry in entries) or "nothing"
