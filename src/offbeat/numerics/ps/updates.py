"""Updates of a parameter server: how a push changes the values of its keys, such as an optimizer step.

All work in place on arrays of one row per key, and row by row: the new value of a key depends only on its own
row. A range can therefore be split anywhere, replicas that apply the same pushes in the same order hold the
same bits, and a key that is not pushed is not changed. Nothing here knows what a key is or where it is
stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.numerics.ps.entries import UpdateSettings

Rows: TypeAlias = NDArray[np.floating]  # (K,) or (K, width)


class Update(Protocol):
    """A function from values, their state and a push to new values and state.

    It must be deterministic and have no other state, since replicas repeat the computation. It is first tried
    on copies: if it raises, nothing is changed and the push is rejected.
    """

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state that is kept for every value; all state is initially zero."""

    def apply(self, values: Rows, states: dict[str, Rows], pushed: Rows) -> None:
        """Take one step, in place.

        Args:
            values: values of the pushed keys, (K,) or (K, width).
            states: by name, each of the shape of `values`.
            pushed: of the same shape; not changed.
        """


_U = TypeVar("_U", bound=Update)


def with_settings(update: _U, settings: UpdateSettings) -> _U:
    """Return an update with some numbers replaced, and the same states.

    Args:
        update: an update of this package.
        settings: new numbers by field name; fields that are not given stay.

    Raises:
        ValueError: unknown names, values that are not numbers, or numbers that the update does not accept.
    """
    fields: Any = update  # a dataclass
    numbers = {
        field.name: value
        for field in dataclasses.fields(fields)
        if not isinstance(value := getattr(update, field.name), bool)
    }
    if unknown := settings.keys() - numbers.keys():
        raise ValueError(
            f"expected settings of {type(update).__name__} among {', '.join(numbers) or 'none'}, "
            f"got {min(unknown)}"
        )
    changed: _U = dataclasses.replace(
        fields, **{name: _converted(numbers[name], value, name) for name, value in settings.items()}
    )
    if changed.states != update.states:
        raise ValueError(
            f"expected settings with which {type(update).__name__} keeps {list(update.states)}, "
            f"got {dict(settings)}: it would keep {list(changed.states)}"
        )
    return changed


def _converted(current: float | Sequence[float], value: Any, name: str) -> float | tuple[float, ...]:
    """Convert a new value of a setting: a number, or as many numbers as `current` has.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(current, Sequence):
        if _is_number(value):
            return float(value)
        raise ValueError(f"expected a number as {name}, got {value!r}")
    if isinstance(value, list | tuple) and len(value) == len(current) and all(map(_is_number, value)):
        return tuple(map(float, value))
    raise ValueError(f"expected {len(current)} numbers as {name}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sum:
    """Adds pushed values: for counters, and for gradients that already include the learning rate."""

    @property
    def states(self) -> tuple[str, ...]:
        """See `Update.states`."""
        return ()

    def apply(self, values: Rows, states: dict[str, Rows], pushed: Rows) -> None:
        """See `Update.apply`."""
        values += pushed


@dataclass(frozen=True)
class Assign:
    """Replaces values with pushed ones."""

    @property
    def states(self) -> tuple[str, ...]:
        """See `Update.states`."""
        return ()

    def apply(self, values: Rows, states: dict[str, Rows], pushed: Rows) -> None:
        """See `Update.apply`."""
        values[...] = pushed


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent as in `torch.optim.SGD`, without dampening.

    Raises:
        ValueError: a number below 0, or Nesterov momentum without momentum.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_at_least_0(self, "lr", "momentum", "weight_decay")
        if self.nesterov and not self.momentum:
            raise ValueError("expected a momentum above 0 with nesterov, got 0")

    @property
    def states(self) -> tuple[str, ...]:
        """See `Update.states`."""
        return ("momentum",) if self.momentum else ()

    def apply(self, values: Rows, states: dict[str, Rows], pushed: Rows) -> None:
        """See `Update.apply`."""
        step = pushed + self.weight_decay * values if self.weight_decay else pushed
        if self.momentum:
            velocity = states["momentum"]
            velocity *= self.momentum
            velocity += step
            step = step + self.momentum * velocity if self.nesterov else velocity
        values -= self.lr * step


@dataclass(frozen=True)
class Adagrad:
    """Adagrad as in `torch.optim.Adagrad`, without decay of the learning rate.

    Source: J. Duchi, E. Hazan and Y. Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", JMLR 12, 2011.

    Raises:
        ValueError: a number below 0.
    """

    lr: float
    eps: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_at_least_0(self, "lr", "eps", "weight_decay")

    @property
    def states(self) -> tuple[str, ...]:
        """See `Update.states`."""
        return ("squares",)

    def apply(self, values: Rows, states: dict[str, Rows], pushed: Rows) -> None:
        """See `Update.apply`."""
        gradients = pushed + self.weight_decay * values if self.weight_decay else pushed
        squares = states["squares"]
        squares += gradients * gradients
        values -= self.lr * gradients / (np.sqrt(squares) + self.eps)


@dataclass(frozen=True)
class Adam:
    """Adam as in `torch.optim.Adam`, or, with `decoupled`, AdamW as in `torch.optim.AdamW`.

    The bias correction of both means uses the number of pushes of each single key.

    Source: D. P. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015; I. Loshchilov and
    F. Hutter's AdamW, ICLR 2019.

    Raises:
        ValueError: a number below 0, or a beta that is not below 1.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        _check_at_least_0(self, "lr", "eps", "weight_decay")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"expected two betas from 0 to below 1, got {self.betas}")

    @property
    def states(self) -> tuple[str, ...]:
        """See `Update.states`."""
        return ("mean", "squares", "steps")

    def apply(self, values: Rows, states: dict[str, Rows], pushed: Rows) -> None:
        """See `Update.apply`."""
        beta, beta_squares = self.betas
        mean, squares, steps = states["mean"], states["squares"], states["steps"]
        gradients = pushed
        if self.weight_decay and self.decoupled:
            values *= 1 - self.lr * self.weight_decay
        elif self.weight_decay:
            gradients = pushed + self.weight_decay * values
        steps += 1
        scratch = gradients - mean
        scratch *= 1 - beta
        mean += scratch
        squares *= beta_squares
        np.multiply(gradients, 1 - beta_squares, out=scratch)
        scratch *= gradients
        squares += scratch
        steps_taken = _collapse_if_equal(steps)
        root = np.divide(squares, 1 - beta_squares**steps_taken, out=scratch)
        np.sqrt(root, out=root)
        root += self.eps
        change = mean / (1 - beta**steps_taken)
        change *= self.lr
        change /= root
        values -= change


@dataclass(frozen=True)
class FTRL:
    """Follow the proximally regularized leader (FTRL-Proximal); irrelevant weights are exactly zero.

    Source: H. B. McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1.

    Args:
        alpha: learning rate, above 0.
        beta: added to the root of the sum of squares.
        l1, l2: weights of the penalties.

    Raises:
        ValueError: a number is out of range.
    """

    alpha: float
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        _check_at_least_0(self, "beta", "l1", "l2")
        if not self.alpha > 0:
            raise ValueError(f"expected alpha above 0, got {self.alpha}")

    @property
    def states(self) -> tuple[str, ...]:
        """See `Update.states`."""
        return ("z", "squares")

    def apply(self, values: Rows, states: dict[str, Rows], pushed: Rows) -> None:
        """See `Update.apply`."""
        z, squares = states["z"], states["squares"]
        root = np.sqrt(squares)
        squares += pushed * pushed
        new_root = np.sqrt(squares)
        z += pushed - (new_root - root) / self.alpha * values
        shrunk = np.sign(z) * np.maximum(np.abs(z) - self.l1, 0)
        values[...] = -shrunk / ((self.beta + new_root) / self.alpha + self.l2)


@dataclass(frozen=True)
class SoftThreshold:
    """A proximal gradient step for the penalty `l1` |w|: weights with too small a gradient go to zero.

    Raises:
        ValueError: a number below 0.
    """

    lr: float
    l1: float

    def __post_init__(self) -> None:
        _check_at_least_0(self, "lr", "l1")

    @property
    def states(self) -> tuple[str, ...]:
        """See `Update.states`."""
        return ()

    def apply(self, values: Rows, states: dict[str, Rows], pushed: Rows) -> None:
        """See `Update.apply`."""
        stepped = values - self.lr * pushed
        values[...] = np.sign(stepped) * np.maximum(np.abs(stepped) - self.lr * self.l1, 0)


def _collapse_if_equal(rows: Rows) -> Rows:
    """Return a single number, with as many dimensions, if all are equal; else all of them.

    The number is not a Python float, whose powers may differ in bits from those of an array.
    """
    corner = rows[(slice(1),) * rows.ndim]
    return corner if (rows == corner).all() else rows


def _check_at_least_0(update: object, *names: str) -> None:
    for name in names:
        value = getattr(update, name)
        if not value >= 0:
            raise ValueError(f"expected {name} of at least 0, got {value}")
