"""Strategies by name, and their form on the command line: `name` or `name:key=value,key=value`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from offbeat.runtime.training.interface import Strategy
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.hybrid import Hybrid
from offbeat.strategies.model_averaging import ADPSGD, Choco, DiLoCo, LocalSGD, Prague, PReduce
from offbeat.strategies.partial import DPAR, PartialAllReduce
from offbeat.strategies.staleness import ASP, DTSSP, SSP, Downpour, ServerBSP
from offbeat.wire.known import prime_msgspec_types

_KINDS = (
    AllReduce,
    Hybrid,
    PartialAllReduce,
    DPAR,
    PReduce,
    ADPSGD,
    Prague,
    LocalSGD,
    DiLoCo,
    Choco,
    ServerBSP,
    SSP,
    DTSSP,
    ASP,
    Downpour,
)
_CHECKED: tuple[type[Strategy], ...] = _KINDS  # for mypy: each has what a session reads of a strategy
STRATEGIES: dict[str, type[Any]] = {kind.name: kind for kind in _KINDS}
prime_msgspec_types(*_KINDS)


def parse_strategy(text: str) -> Strategy:
    """Parse a strategy from its form on the command line, such as `ssp:s=2`; `null` is None.

    Raises:
        ValueError: the text is not a strategy; one line with what was expected and what was given.
    """
    name, colon, rest = text.partition(":")
    kind = STRATEGIES.get(name)
    if kind is None:
        raise ValueError(f"unknown strategy {name!r}: expected one of {', '.join(sorted(STRATEGIES))}")
    known = [field.name for field in fields(kind)]
    arguments: dict[str, str | None] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"strategy {text!r}: expected key=value, got {part!r}")
        if key not in known:
            raise ValueError(f"strategy {name!r} has no {key!r}: expected one of {', '.join(known)}")
        if key in arguments:
            raise ValueError(f"strategy {text!r}: {key} is given twice")
        arguments[key] = None if value == "null" else value
    try:
        strategy: Strategy = msgspec.convert(arguments, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"strategy {text!r}: {error}") from None
    return strategy
