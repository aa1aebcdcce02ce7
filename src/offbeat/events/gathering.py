"""Events and actions of small values that all workers of a job give to each other."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.events.recipients import ToMembers


@dataclass(frozen=True, kw_only=True)
class ValueGiven:
    """A worker gives a value to all others, and waits for theirs.

    Attributes:
        number: how many values the worker has given before.
        call: what its program called; the same on all workers.
        delivers_first: only the value of the worker with the smallest id is wanted.
        value: as text; "" to wait for the others only.
    """

    now_s: float
    worker: int
    number: int
    call: str
    delivers_first: bool
    value: str


@dataclass(frozen=True, kw_only=True)
class DeliverValue(ToMembers):
    """A worker's value, for all that have given theirs; an EndGathering follows.

    Attributes:
        members: the recipients.
        gathering: how many gatherings began before this one.
        source: the worker that has given the value.
        value: as text.
    """

    members: tuple[int, ...]
    gathering: int
    source: int
    value: str


@dataclass(frozen=True, kw_only=True)
class EndGathering(ToMembers):
    """All values have been delivered, or none will be.

    Attributes:
        members: the recipients, which have all given a value.
        numbers: of these values (see `ValueGiven`), by member.
        gathering: how many gatherings began before this one.
        error: why the gathering failed, "" if it did not.
        reason: why it ends now.
    """

    members: tuple[int, ...]
    numbers: tuple[int, ...]
    gathering: int
    error: str
    reason: str
