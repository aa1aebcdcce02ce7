"""offbeat: train PyTorch models on many workers without keeping to the beat of the slowest one.

`join` is the one line that an existing training loop needs; `offbeat.strategies` holds the ways to keep
workers together. Below the door: `runtime` acts (processes, sockets, clocks), `policies` decide, `numerics`
computes, `record` writes down, `events` is what they all speak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.errors import LinkError, LostKeysError, OffbeatError, ProtocolError, WorkerError
from offbeat.policies.validation.early_stopping import Monitor

if TYPE_CHECKING:
    from offbeat.runtime.ps.client import PS
    from offbeat.runtime.session import Session, join
    from offbeat.runtime.validation.validator import Validator

__all__ = [
    "PS",
    "LinkError",
    "LostKeysError",
    "Monitor",
    "OffbeatError",
    "ProtocolError",
    "Session",
    "Validator",
    "WorkerError",
    "join",
]


def __getattr__(name: str) -> Any:
    """Loads what needs torch when it is first asked for: the coordinator and servers never do."""
    if name in ("Session", "join"):
        from offbeat.runtime import session

        return getattr(session, name)
    if name == "PS":
        from offbeat.runtime.ps.client import PS

        return PS
    if name == "Validator":
        from offbeat.runtime.validation.validator import Validator

        return Validator
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
