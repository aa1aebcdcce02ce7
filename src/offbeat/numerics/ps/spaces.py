"""What the values of a namespace are and what becomes of what is pushed, as text that any server understands.

A function of the user's own is known by its import path, and only where whoever started the server has named
it: no code ever comes over the network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.numerics.logistic import BlockProximal
from offbeat.numerics.ps.filters import (
    KKT,
    Compression,
    Filter,
    FilterChain,
    FixedPoint,
    KeyCaching,
    RandomSkip,
    SignificantlyModified,
)
from offbeat.numerics.ps.tables import Aggregate, ArrayTable, Empty
from offbeat.numerics.ps.updates import FTRL, SGD, Adagrad, Adam, Assign, SoftThreshold, Sum, Update

UPDATES: Final[Mapping[str, type]] = {
    kind.__name__: kind for kind in (Sum, Assign, SGD, Adagrad, Adam, FTRL, SoftThreshold, BlockProximal)
}
FILTERS: Final[Mapping[str, Any]] = {
    kind.__name__: kind
    for kind in (KeyCaching, Compression, FixedPoint, RandomSkip, SignificantlyModified, KKT)
}
_LOSSLESS: Final = frozenset({"KeyCaching", "Compression"})
_DRAWING: Final = frozenset({"FixedPoint", "RandomSkip"})
_OF_PULLS: Final = frozenset({"KeyCaching", "Compression", "FixedPoint", "SignificantlyModified"})
_TENSORS_CHARACTERS_MAX: Final = 4096  # well below what the coordinator takes of a text
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


@dataclass(frozen=True)
class FilterSpec:
    """A filter as both ends make it.

    Attributes:
        kind: of filter, by the name of its class.
        arguments: plain data, for it; without the seed, which each sender has of its own.

    Raises:
        ValueError: there is no such filter, or its arguments are none.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in FILTERS:
            raise ValueError(f"expected one of the filters {', '.join(FILTERS)}, got {self.kind!r}")
        try:
            self.make(0)
        except TypeError as error:
            raise ValueError(f"expected arguments that {self.kind} takes: {error}") from error

    def make(self, seed: int) -> Filter:
        """Return a filter."""
        own = {"seed": seed} if self.kind in _DRAWING else {}
        made: Filter = FILTERS[self.kind](**self.arguments, **own)
        return made


class Filters(NamedTuple):
    """The filters of a namespace, in the order in which they encode."""

    push: tuple[FilterSpec, ...]
    pull: tuple[FilterSpec, ...]

    @property
    def copy(self) -> tuple[FilterSpec, ...]:
        """Those of pushes that lose nothing, for replicas."""
        return tuple(spec for spec in self.push if spec.kind in _LOSSLESS)

    @property
    def caches_keys(self) -> bool:
        """Whether the lists of keys that pulls ask for are cached."""
        return any(spec.kind == "KeyCaching" for spec in self.pull)

    @property
    def knows_keys(self) -> bool:
        """Whether filters of what comes back go by the keys that were asked for."""
        return any(spec.kind == "SignificantlyModified" for spec in self.pull)

    def check(self, update: Update | Function) -> None:
        """See whether they go together, and with the update.

        Raises:
            ValueError: they do not.
        """
        FilterChain([spec.make(0) for spec in self.push])
        FilterChain([spec.make(0) for spec in self.pull])
        kinds = {spec.kind for spec in self.push}
        l1 = update.l1 if isinstance(update, BlockProximal) else None
        if any(spec.kind == "KKT" and spec.arguments["l1"] != l1 for spec in self.push):
            raise ValueError("expected KKT with update=BlockProximal() of the same l1 only")
        if isinstance(update, Assign) and "RandomSkip" in kinds:
            raise ValueError("expected no RandomSkip with update=Assign(): what is left out is not zero")
        if not isinstance(update, Assign) and "SignificantlyModified" in kinds:
            raise ValueError("expected SignificantlyModified of pushes with update=Assign() only")
        if wrong := {spec.kind for spec in self.pull} - _OF_PULLS:
            raise ValueError(
                f"expected filters of pulls among {', '.join(sorted(_OF_PULLS))}, got {min(wrong)}"
            )


NO_FILTERS: Final = Filters((), ())


def describe(
    update: Update | Function,
    *,
    width: int,
    dtype: str,
    aggregate: Aggregate = "sum",
    filters: Filters = NO_FILTERS,
    tensors: Mapping[str, Any] | None = None,
) -> str:
    """Return as text what a namespace is to be.

    Args:
        update: what becomes of what is pushed.
        width, dtype, aggregate: as `ArrayTable` takes them.
        filters: what travels goes through them.
        tensors: whose numbers the values are, as `Offsets.state_dict` gives it; None where they are nobody's.

    Raises:
        ValueError: an update that servers do not know, one of other rows, or one that may fail in the midst
            of several pushes.
    """
    _check_width(update, width)
    if aggregate not in get_args(Aggregate):
        raise ValueError(f"expected aggregate to be sum, mean or each, got {aggregate!r}")
    if isinstance(update, Function):
        if aggregate == "each":
            raise ValueError("expected aggregate to be sum or mean with a function of your own, got each")
        said: dict[str, Any] = {"function": update.path, "arguments": dict(update.arguments)}
    elif type(update).__name__ in UPDATES and dataclasses.is_dataclass(update):
        said = {"update": type(update).__name__, "arguments": dataclasses.asdict(update)}
    else:
        raise ValueError(
            f"expected one of the updates {', '.join(UPDATES)}, or Function(import path), "
            f"got {type(update).__name__}"
        )
    filters.check(update)
    said["filters"] = [[[spec.kind, dict(spec.arguments)] for spec in one] for one in filters]
    said |= {"width": width, "dtype": dtype, "aggregate": aggregate} | (
        {} if tensors is None else {"tensors": _shortened(tensors)}
    )
    return json.dumps(said, sort_keys=True)


def _shortened(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table of tensors, or of a long one its digest: tables are only compared."""
    text = json.dumps(tensors, sort_keys=True)
    if len(text) <= _TENSORS_CHARACTERS_MAX:
        return tensors
    return {"digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


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


def make_filters(about: str) -> Filters:
    """Return the filters of a namespace.

    Args:
        about: as `describe` returns it.

    Raises:
        ProtocolError: it says nothing of filters, or of some that are none.
    """
    try:
        push, pull = json.loads(about)["filters"]
        filters = Filters(
            tuple(FilterSpec(kind, arguments) for kind, arguments in push),
            tuple(FilterSpec(kind, arguments) for kind, arguments in pull),
        )
        for chain in filters:
            FilterChain([spec.make(0) for spec in chain])
        return filters
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"expected a namespace with filters, got {about}: {error}") from error


def make_table(
    about: str, keys: int, block_keys: int, functions: Mapping[str, Any], empty: Empty = np.empty
) -> ArrayTable:
    """Return an empty table for a namespace.

    Args:
        about: as `describe` returns it.
        keys, block_keys: as `ArrayTable` takes them.
        functions: the user's own updates, by path.
        empty: likewise.

    Raises:
        ProtocolError: the namespace is none that `describe` describes, or its function is not here.
    """
    make_filters(about)
    try:
        said = json.loads(about)
        arguments = dict(said["arguments"])
        if "function" in said:
            if said["function"] not in functions:
                raise ValueError(f"the function {said['function']} is not here")
            update = _made(said["function"], functions[said["function"]], arguments)
        else:
            numbers = {name: _numbers(value) for name, value in arguments.items()}
            update = UPDATES[said["update"]](**numbers)
        _check_width(update, said["width"])
        return ArrayTable(
            keys,
            block_keys,
            update,
            width=operator.index(said["width"]),
            dtype=np.dtype(said["dtype"]),
            aggregate=said["aggregate"],
            may_fail="function" in said,
            empty=empty,
        )
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"expected a namespace that can be served, got {about}: {error}") from error


def _made(path: str, function: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        update = function(**arguments)
    except Exception as error:  # whatever a user's code does with a client's arguments
        raise ValueError(f"{path} with these arguments: {error!r}") from error
    if not (hasattr(update, "states") and hasattr(update, "apply")):
        raise ValueError(f"{path} made no update but a {type(update).__name__}")
    return update


def _numbers(value: Any) -> bool | float | tuple[float, ...]:
    """An argument of an update, of which JSON knows no tuples."""
    if isinstance(value, list):
        return tuple(map(float, value))
    return value if isinstance(value, bool) else float(value)


def _check_width(update: object, width: int) -> None:
    """See whether an update that takes rows of one width only, its attribute `width`, has such rows."""
    expected = getattr(update, "width", width)
    if width != expected:
        raise ValueError(f"expected rows of {expected} numbers for {type(update).__name__}, got {width}")
