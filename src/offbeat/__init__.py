"""offbeat: train PyTorch models on many workers without keeping to the beat of the slowest one.

`join` is the one line that an existing training loop needs; `offbeat.strategies` holds the ways to keep
workers together. Below the door: `runtime` acts (processes, sockets, clocks), `policies` decide, `numerics`
computes, `record` writes down, `events` is what they all speak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.errors import LinkError, OffbeatError, ProtocolError, WorkerError

if TYPE_CHECKING:
    from offbeat.runtime.session import Session, join

__all__ = ["LinkError", "OffbeatError", "ProtocolError", "Session", "WorkerError", "join"]


def __getattr__(name: str) -> Any:
    """Loads the session, and torch with it, when it is first asked for: the coordinator never does."""
    if name in ("Session", "join"):
        from offbeat.runtime import session

        return getattr(session, name)
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
