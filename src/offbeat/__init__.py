"""offbeat: train PyTorch models on many workers without keeping to the beat of the slowest one.

`join` is the one line that an existing training loop needs; `offbeat.strategies` holds the ways to
synchronise workers. `runtime` does all I/O (processes, sockets, clocks), `policies` decide, `numerics`
computes, `record` writes and replays run logs, `events` defines the events and actions that pass between
them. `__version__` is the version of the library; its packages take it from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.errors import LinkError, LostKeysError, OffbeatError, ProtocolError, WorkerError
from offbeat.policies.validation.early_stopping import EarlyStopping

if TYPE_CHECKING:
    from offbeat.runtime.ps.client import PS
    from offbeat.runtime.session import Session, join
    from offbeat.runtime.training.ddp import ddp
    from offbeat.runtime.training.start_values import barrier, broadcast_object, gather_objects
    from offbeat.runtime.validation.validator import Validator

__all__ = [
    "PS",
    "EarlyStopping",
    "LinkError",
    "LostKeysError",
    "OffbeatError",
    "ProtocolError",
    "Session",
    "Validator",
    "WorkerError",
    "barrier",
    "broadcast_object",
    "ddp",
    "gather_objects",
    "join",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what needs torch on first access: the coordinator and the servers run without torch."""
    if name in ("Session", "join"):
        from offbeat.runtime import session

        return getattr(session, name)
    if name in ("barrier", "broadcast_object", "gather_objects"):
        from offbeat.runtime.training import start_values

        return getattr(start_values, name)
    if name == "ddp":
        from offbeat.runtime.training.ddp import ddp

        return ddp
    if name == "PS":
        from offbeat.runtime.ps.client import PS

        return PS
    if name == "Validator":
        from offbeat.runtime.validation.validator import Validator

        return Validator
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
