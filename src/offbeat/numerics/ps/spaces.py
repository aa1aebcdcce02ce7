"""Description of a namespace as text that any server understands: its values, update and filters.

A user-defined function is named by its import path and accepted only if it was registered when the server was
started: code is never sent over the network.
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
from offbeat.numerics.ps.block_proximal import BlockProximal
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
from offbeat.numerics.ps.tables import Aggregate, Allocate, ArrayTable
from offbeat.numerics.ps.updates import FTRL, SGD, Adagrad, Adam, Assign, SoftThreshold, Sum, Update

UPDATES: Final[Mapping[str, type]] = {
    kind.__name__: kind for kind in (Sum, Assign, SGD, Adagrad, Adam, FTRL, SoftThreshold, BlockProximal)
}
FILTERS: Final[Mapping[str, Any]] = {
    kind.__name__: kind
    for kind in (KeyCaching, Compression, FixedPoint, RandomSkip, SignificantlyModified, KKT)
}
_LOSSLESS: Final = frozenset({"KeyCaching", "Compression"})
_RANDOM: Final = frozenset({"FixedPoint", "RandomSkip"})
_PULL_FILTERS: Final = frozenset({"KeyCaching", "Compression", "FixedPoint", "SignificantlyModified"})
_TENSORS_CHARACTERS_MAX: Final = 4096  # well below the coordinator's limit for a text
_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class UserFunction:
    """A user-defined update.

    Attributes:
        path: `module:name` of a class, or of a function that returns an `Update`; every server has to be
            started with it.
        arguments: its arguments, plain data.
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path):
            raise ValueError(f"expected an import path as module:name, got {self.path!r}")


@dataclass(frozen=True)
class FilterSpec:
    """Specification of a filter, from which both ends build it.

    Attributes:
        kind: name of the filter's class.
        arguments: its arguments, plain data, except the seed, which each sender chooses.

    Raises:
        ValueError: unknown filter, or invalid arguments.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in FILTERS:
            raise ValueError(f"expected one of the filters {', '.join(FILTERS)}, got {self.kind!r}")
        try:
            self.build(0)
        except TypeError as error:
            raise ValueError(f"expected valid arguments of {self.kind}: {error}") from error

    def build(self, seed: int) -> Filter:
        """Return a new filter; `seed` is used by filters that draw random numbers."""
        own = {"seed": seed} if self.kind in _RANDOM else {}
        filter_: Filter = FILTERS[self.kind](**self.arguments, **own)
        return filter_


class NamespaceFilters(NamedTuple):
    """The filters of a namespace, in the order in which they encode."""

    push: tuple[FilterSpec, ...]
    pull: tuple[FilterSpec, ...]

    @property
    def replica_filters(self) -> tuple[FilterSpec, ...]:
        """The lossless filters of pushes, for replicas."""
        return tuple(spec for spec in self.push if spec.kind in _LOSSLESS)

    @property
    def caches_pull_keys(self) -> bool:
        """Whether the key lists of pull requests are cached."""
        return any(spec.kind == "KeyCaching" for spec in self.pull)

    @property
    def needs_pull_keys(self) -> bool:
        """Whether filters of pull responses depend on the requested keys."""
        return any(spec.kind == "SignificantlyModified" for spec in self.pull)

    def check(self, update: Update | UserFunction) -> None:
        """Check that the filters are compatible with each other and with the update.

        Raises:
            ValueError: they are not.
        """
        FilterChain([spec.build(0) for spec in self.push])
        FilterChain([spec.build(0) for spec in self.pull])
        kinds = {spec.kind for spec in self.push}
        l1 = update.l1 if isinstance(update, BlockProximal) else None
        if any(spec.kind == "KKT" and spec.arguments["l1"] != l1 for spec in self.push):
            raise ValueError("expected KKT with update=BlockProximal() of the same l1 only")
        if isinstance(update, Assign) and "RandomSkip" in kinds:
            raise ValueError("expected no RandomSkip with update=Assign(): a skipped value is not zero")
        if not isinstance(update, Assign) and "SignificantlyModified" in kinds:
            raise ValueError("expected SignificantlyModified of pushes with update=Assign() only")
        if unsupported := {spec.kind for spec in self.pull} - _PULL_FILTERS:
            raise ValueError(
                f"expected filters of pulls among {', '.join(sorted(_PULL_FILTERS))}, got {min(unsupported)}"
            )


NO_FILTERS: Final = NamespaceFilters((), ())


def encode_namespace(
    update: Update | UserFunction,
    *,
    width: int,
    dtype: str,
    aggregate: Aggregate = "sum",
    filters: NamespaceFilters = NO_FILTERS,
    tensors: Mapping[str, Any] | None = None,
) -> str:
    """Return the description of a namespace as text.

    Args:
        update: how a push changes values.
        width, dtype, aggregate: see `ArrayTable`.
        filters: filters of transfers.
        tensors: table of the tensors that the keys belong to, from `TensorTable.state_dict`; None if there
            are none.

    Raises:
        ValueError: an update that servers do not know, one of another width, or, with aggregate="each", a
            user-defined one, which might fail between two pushes.
    """
    _check_width(update, width)
    if aggregate not in get_args(Aggregate):
        raise ValueError(f"expected aggregate to be sum, mean or each, got {aggregate!r}")
    if isinstance(update, UserFunction):
        if aggregate == "each":
            raise ValueError("expected aggregate to be sum or mean with a function of your own, got each")
        description: dict[str, Any] = {"function": update.path, "arguments": dict(update.arguments)}
    elif type(update).__name__ in UPDATES and dataclasses.is_dataclass(update):
        description = {"update": type(update).__name__, "arguments": dataclasses.asdict(update)}
    else:
        raise ValueError(
            f"expected one of the updates {', '.join(UPDATES)}, or UserFunction(import path), "
            f"got {type(update).__name__}"
        )
    filters.check(update)
    description["filters"] = [[[spec.kind, dict(spec.arguments)] for spec in one] for one in filters]
    description |= {"width": width, "dtype": dtype, "aggregate": aggregate} | (
        {} if tensors is None else {"tensors": _digest_if_long(tensors)}
    )
    return json.dumps(description, sort_keys=True)


def _digest_if_long(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table of tensors, or the digest of a long one, since tables are only compared."""
    text = json.dumps(tensors, sort_keys=True)
    if len(text) <= _TENSORS_CHARACTERS_MAX:
        return tensors
    return {"digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def import_function(path: str) -> Any:
    """Import an update that a server is to provide.

    Raises:
        OffbeatError: it cannot be imported.
    """
    UserFunction(path)
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OffbeatError(f"expected an update at {path} that can be imported: {error}") from error


def decode_filters(description: str) -> NamespaceFilters:
    """Return the filters of a namespace.

    Args:
        description: description from `encode_namespace`.

    Raises:
        ProtocolError: it has no filters, or invalid ones.
    """
    try:
        push, pull = json.loads(description)["filters"]
        filters = NamespaceFilters(
            tuple(FilterSpec(kind, arguments) for kind, arguments in push),
            tuple(FilterSpec(kind, arguments) for kind, arguments in pull),
        )
        for chain in filters:
            FilterChain([spec.build(0) for spec in chain])
        return filters
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"expected a namespace with filters, got {description}: {error}") from error


def build_table(
    description: str, keys: int, block_keys: int, functions: Mapping[str, Any], empty: Allocate = np.empty
) -> ArrayTable:
    """Return an empty table for a namespace.

    Args:
        description: description from `encode_namespace`.
        keys, block_keys: see `ArrayTable`.
        functions: user-defined updates by path.
        empty: see `ArrayTable`.

    Raises:
        ProtocolError: the description is invalid, or its function is not registered here.
    """
    decode_filters(description)
    try:
        spec = json.loads(description)
        arguments = dict(spec["arguments"])
        if "function" in spec:
            if spec["function"] not in functions:
                raise ValueError(f"the function {spec['function']} is not registered on this server")
            update = _build_update(spec["function"], functions[spec["function"]], arguments)
        else:
            numbers = {name: _numbers(value) for name, value in arguments.items()}
            update = UPDATES[spec["update"]](**numbers)
        _check_width(update, spec["width"])
        return ArrayTable(
            keys,
            block_keys,
            update,
            width=operator.index(spec["width"]),
            dtype=np.dtype(spec["dtype"]),
            aggregate=spec["aggregate"],
            may_fail="function" in spec,
            empty=empty,
        )
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"expected a namespace that can be served, got {description}: {error}") from error


def _build_update(path: str, function: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        update = function(**arguments)
    except Exception as error:  # user code may raise anything
        raise ValueError(f"{path} failed with these arguments: {error!r}") from error
    if not (hasattr(update, "states") and hasattr(update, "apply")):
        raise ValueError(f"expected {path} to return an update, got a {type(update).__name__}")
    return update


def _numbers(value: Any) -> bool | float | tuple[float, ...]:
    """Convert an argument of an update from JSON, which has no tuples."""
    if isinstance(value, list):
        return tuple(map(float, value))
    return value if isinstance(value, bool) else float(value)


def _check_width(update: object, width: int) -> None:
    """Check the width of rows for an update that needs a fixed one, its attribute `width`."""
    expected = getattr(update, "width", width)
    if width != expected:
        raise ValueError(f"expected rows of {expected} numbers for {type(update).__name__}, got {width}")
