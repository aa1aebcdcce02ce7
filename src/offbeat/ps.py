"""The parameter server from a program's side: `PS`, updates and filters of namespaces, torch's optimizers.

The updates say what a server makes of pushed values, `FilterSpec` names a filter between clients and servers,
and `update_for_group` and its relatives translate torch's optimizers and their states; these need torch,
which is loaded when the first of them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.numerics.ps.block_proximal import BlockProximal
from offbeat.numerics.ps.spaces import FilterSpec, UserFunction
from offbeat.numerics.ps.updates import FTRL, SGD, Adagrad, Adam, Assign, SoftThreshold, Sum
from offbeat.runtime.ps.client import PS

if TYPE_CHECKING:
    from offbeat.numerics.ps.translation import (
        export_states,
        import_states,
        settings_of_group,
        update_for_group,
    )

__all__ = [
    "FTRL",
    "PS",
    "SGD",
    "Adagrad",
    "Adam",
    "Assign",
    "BlockProximal",
    "FilterSpec",
    "SoftThreshold",
    "Sum",
    "UserFunction",
    "export_states",
    "import_states",
    "settings_of_group",
    "update_for_group",
]


def __getattr__(name: str) -> Any:
    """Load the translation of torch's optimizers when it is first used."""
    if name in __all__:
        from offbeat.numerics.ps import translation

        return getattr(translation, name)
    raise AttributeError(f"module 'offbeat.ps' has no attribute {name!r}")
