"""Hooks that a session puts on somebody's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A session's hook on a model; copies and pickles of the model get one that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """Do what the session wants done."""
        self._call(*arguments)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., None]]]:
        """Leave the session behind."""
        return Hook, (do_nothing,)


def do_nothing(*_: Any) -> None:
    """Do nothing, whatever is given."""
    return
