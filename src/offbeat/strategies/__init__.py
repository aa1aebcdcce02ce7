"""The published methods, one short file each that follows its paper and binds policies to the runtime.

A method's module is imported when the method is first used: together they import most of the library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.strategies.allreduce import AllReduce
    from offbeat.strategies.hybrid import Hybrid
    from offbeat.strategies.model_averaging import ADPSGD, Choco, DiLoCo, LocalSGD, Prague, PReduce
    from offbeat.strategies.partial import DPAR, PartialAllReduce
    from offbeat.strategies.registry import STRATEGIES, parse_strategy
    from offbeat.strategies.staleness import ASP, DTSSP, SSP, Downpour, ServerBSP

__all__ = [
    "ADPSGD",
    "ASP",
    "DPAR",
    "DTSSP",
    "SSP",
    "STRATEGIES",
    "AllReduce",
    "Choco",
    "DiLoCo",
    "Downpour",
    "Hybrid",
    "LocalSGD",
    "PReduce",
    "PartialAllReduce",
    "Prague",
    "ServerBSP",
    "parse_strategy",
]

_MODULES = {
    "allreduce": ("AllReduce",),
    "hybrid": ("Hybrid",),
    "model_averaging": ("ADPSGD", "Choco", "DiLoCo", "LocalSGD", "PReduce", "Prague"),
    "partial": ("DPAR", "PartialAllReduce"),
    "registry": ("STRATEGIES", "parse_strategy"),
    "staleness": ("ASP", "DTSSP", "SSP", "Downpour", "ServerBSP"),
}


def __getattr__(name: str) -> Any:
    """Import a module, or the module of a name, on first access."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
