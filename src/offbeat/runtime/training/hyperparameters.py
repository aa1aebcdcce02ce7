"""An optimizer's hyperparameters as plain values: for the comparison at join, for every round, for copies.

A group of parameters holds them by name. Numbers may be tensors of one element, as compiled optimizers want
their learning rate; they may change, and tuples of numbers may. All else stays what it was at join.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

import torch

from offbeat.errors import OffbeatError

Group: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer."""

Plain: TypeAlias = bool | int | float | str | None

_NAMES_OF_TENSORS = ("params", "param_names")


def plain_settings(group: Mapping[str, Any]) -> dict[str, Plain | list[Plain]]:
    """Returns a group's hyperparameters by name, in order of the names, with tensors as numbers.

    Raises:
        OffbeatError: one of them is neither a number nor plain data; names it.
    """
    return {
        name: [_plain(name, one) for one in value] if isinstance(value, tuple | list) else _plain(name, value)
        for name, value in sorted(group.items())
        if name not in _NAMES_OF_TENSORS
    }


def take_settings(group: Group, settings: Mapping[str, Plain | list[Plain]]) -> None:
    """Makes a group's hyperparameters what `plain_settings` said of another worker's."""
    for name, value in settings.items():
        if isinstance(value, list):
            before = group.get(name, ())
            parts = [_like(old, new) for old, new in zip(before, value, strict=False)]
            group[name] = type(before)([*parts, *value[len(parts) :]])
        else:
            group[name] = _like(group.get(name), value)


class NumberPlace(NamedTuple):
    """Where a number is among groups: in which, by which name, and which part of a tuple."""

    group: int
    name: str
    part: int | None


def places_of_numbers(groups: Sequence[Mapping[str, Any]]) -> list[NumberPlace]:
    """Returns where the groups' numbers are, in an order that is the same on every worker."""
    return [
        NumberPlace(number, name, index)
        for number, group in enumerate(groups)
        for name, index in _numbers(plain_settings(group))
    ]


def read_numbers(groups: Sequence[Mapping[str, Any]], places: Sequence[NumberPlace]) -> list[float]:
    """Returns the numbers at these places."""
    return [float(_at(groups[place.group], place)) for place in places]


def write_numbers(groups: Sequence[Group], places: Sequence[NumberPlace], values: Sequence[float]) -> None:
    """Writes numbers to these places; a tensor stays the one that it is, and what is equal is not touched."""
    for place, value in zip(places, values, strict=True):
        group = groups[place.group]
        before = _at(group, place)
        if float(before) == value:
            continue
        number = _like(before, value)
        if place.part is None:
            group[place.name] = number
        elif number is not before:
            several = list(group[place.name])
            several[place.part] = number
            group[place.name] = type(group[place.name])(several)


def _numbers(settings: Mapping[str, Plain | list[Plain]]) -> Iterator[tuple[str, int | None]]:
    for name, value in settings.items():
        if isinstance(value, list):
            yield from ((name, index) for index, one in enumerate(value) if _is_number(one))
        elif _is_number(value):
            yield name, None


def _is_number(value: Plain) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at(group: Mapping[str, Any], place: NumberPlace) -> Any:
    value = group[place.name]
    return value if place.part is None else value[place.part]


def _plain(name: str, value: Any) -> Plain:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, torch.dtype):
        return str(value)
    raise OffbeatError(
        f"the optimizer's hyperparameter {name!r} is a {type(value).__name__}, which cannot be compared "
        "between workers: expected numbers, texts, tensors of one element, or tuples of these"
    )


def _like(before: Any, value: Plain) -> Any:
    """Returns a value in the form of the one before: within the tensor that holds that, or as its type."""
    if isinstance(before, torch.Tensor) and isinstance(value, int | float):
        with torch.no_grad():
            return before.fill_(value)
    if isinstance(before, torch.dtype):
        return before
    return value
