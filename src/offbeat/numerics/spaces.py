"""What the values of a namespace are and what becomes of what is pushed, as text that any server understands.

A function of the user's own is known by its import path, and only where whoever started the server has named
it: no code ever comes over the network.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.numerics.tables import ArrayTable
from offbeat.numerics.updates import FTRL, SGD, Adagrad, Adam, Assign, SoftThreshold, Sum, Update

UPDATES: Final[Mapping[str, type]] = {
    kind.__name__: kind for kind in (Sum, Assign, SGD, Adagrad, Adam, FTRL, SoftThreshold)
}
_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Function:
    """An update of the user's own.

    Attributes:
        path: `module:name` of a class, or of a function that returns an `Update`; every server has to be
            started with it.
        arguments: plain data, for it.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path):
            raise ValueError(f"expected an import path as module:name, got {self.path!r}")


def describe(
    update: Update | Function,
    *,
    width: int,
    dtype: str,
    means: bool = False,
    tensors: Mapping[str, Any] | None = None,
) -> str:
    """Return as text what a namespace is to be.

    Args:
        update: what becomes of what is pushed.
        width, dtype, means: as `ArrayTable` takes them.
        tensors: whose numbers the values are, as `Offsets.state_dict` gives it; None where they are nobody's.

    Raises:
        ValueError: an update that servers do not know.
    """
    if isinstance(update, Function):
        said: dict[str, Any] = {"function": update.path, "arguments": dict(update.arguments)}
    elif type(update).__name__ in UPDATES and dataclasses.is_dataclass(update):
        said = {"update": type(update).__name__, "arguments": dataclasses.asdict(update)}
    else:
        raise ValueError(
            f"expected one of the updates {', '.join(UPDATES)}, or Function(import path), "
            f"got {type(update).__name__}"
        )
    said |= {"width": width, "dtype": dtype, "means": means} | (
        {} if tensors is None else {"tensors": tensors}
    )
    return json.dumps(said, sort_keys=True)


def load(path: str) -> Any:
    """Import what a server is to offer under a path.

    Raises:
        OffbeatError: there is no such thing.
    """
    Function(path)
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OffbeatError(f"expected an update at {path} that can be imported: {error}") from error


def make_table(about: str, keys: int, block_keys: int, functions: Mapping[str, Any]) -> ArrayTable:
    """Return an empty table for a namespace.

    Args:
        about: as `describe` returns it.
        keys, block_keys: as `ArrayTable` takes them.
        functions: the user's own updates, by path.

    Raises:
        ProtocolError: the namespace is none that `describe` describes, or its function is not here.
    """
    try:
        said = json.loads(about)
        arguments = said["arguments"]
        if "function" in said:
            if said["function"] not in functions:
                raise ValueError(f"the function {said['function']} is not here")
            update = functions[said["function"]](**arguments)
        else:
            if isinstance(arguments.get("betas"), list):
                arguments["betas"] = tuple(arguments["betas"])
            update = UPDATES[said["update"]](**arguments)
        return ArrayTable(
            keys,
            block_keys,
            update,
            width=said["width"],
            dtype=np.dtype(said["dtype"]),
            means=said["means"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"expected a namespace that can be served, got {about}: {error}") from error
