"""An optimizer's hyperparameters as plain values: to compare at join, to send in every round, to copy.

A parameter group holds them by name. Numbers may be tensors of one element, as compiled optimizers need for
their learning rate. Numbers and tuples of numbers may change during training; all else stays as at join.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

import torch

from offbeat.errors import OffbeatError

ParameterGroup: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer."""

PlainValue: TypeAlias = bool | int | float | str | None

_NOT_SETTINGS = ("params", "param_names")


def plain_settings(group: Mapping[str, Any]) -> dict[str, PlainValue | list[PlainValue]]:
    """Return a group's hyperparameters by name, sorted by name, with tensors as numbers.

    Raises:
        OffbeatError: names a hyperparameter that is neither a number nor plain data.
    """
    return {
        name: [_plain_value(name, element) for element in value]
        if isinstance(value, tuple | list)
        else _plain_value(name, value)
        for name, value in sorted(group.items())
        if name not in _NOT_SETTINGS
    }


def apply_settings(group: ParameterGroup, settings: Mapping[str, PlainValue | list[PlainValue]]) -> None:
    """Set a group's hyperparameters to those that `plain_settings` returned on another worker."""
    for name, value in settings.items():
        if isinstance(value, list):
            before = group.get(name, ())
            parts = [_in_form_of(old, new) for old, new in zip(before, value, strict=False)]
            group[name] = type(before)([*parts, *value[len(parts) :]])
        else:
            group[name] = _in_form_of(group.get(name), value)


class NumberLocation(NamedTuple):
    """The location of a number: index of the group, name, and index in a tuple (None if it is not in one)."""

    group: int
    name: str
    element: int | None


def find_numbers(groups: Sequence[Mapping[str, Any]]) -> list[NumberLocation]:
    """Return the places of all numbers in the groups, in an order that is the same on every worker."""
    return [
        NumberLocation(number, name, index)
        for number, group in enumerate(groups)
        for name, index in _number_places(plain_settings(group))
    ]


def read_numbers(groups: Sequence[Mapping[str, Any]], places: Sequence[NumberLocation]) -> list[float]:
    """Return the numbers at these places."""
    return [float(_number_at(groups[place.group], place)) for place in places]


def write_numbers(
    groups: Sequence[ParameterGroup], places: Sequence[NumberLocation], values: Sequence[float]
) -> None:
    """Write numbers to these places; tensors are changed in place, and equal values are not written."""
    for place, value in zip(places, values, strict=True):
        group = groups[place.group]
        before = _number_at(group, place)
        if float(before) == value:
            continue
        number = _in_form_of(before, value)
        if place.element is None:
            group[place.name] = number
        elif number is not before:
            several = list(group[place.name])
            several[place.element] = number
            group[place.name] = type(group[place.name])(several)


def _number_places(settings: Mapping[str, PlainValue | list[PlainValue]]) -> Iterator[tuple[str, int | None]]:
    for name, value in settings.items():
        if isinstance(value, list):
            yield from ((name, index) for index, element in enumerate(value) if _is_number(element))
        elif _is_number(value):
            yield name, None


def _is_number(value: PlainValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_at(group: Mapping[str, Any], place: NumberLocation) -> Any:
    value = group[place.name]
    return value if place.element is None else value[place.element]


def _plain_value(name: str, value: Any) -> PlainValue:
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
        "between workers: expected numbers, strings, tensors of one element, or tuples of these"
    )


def _in_form_of(before: Any, value: PlainValue) -> Any:
    """Return a value in the form of the old one: in the same tensor, or the old dtype, else as it is."""
    if isinstance(before, torch.Tensor) and isinstance(value, int | float):
        with torch.no_grad():
            return before.fill_(value)
    if isinstance(before, torch.dtype):
        return before
    return value
