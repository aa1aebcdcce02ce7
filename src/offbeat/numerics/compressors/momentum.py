"""Momentum correction: each worker accumulates momentum SGD's updates, and the workers sum parts of them.

Theory of operation
-------------------

Momentum SGD steps by b' = m b + g, where g is the mean gradient with the weight decay. That is linear: where
each worker has a momentum of its own, b' = m b + g with its own gradient g, the mean of all workers' b is
SGD's momentum buffer. A worker adds its updates to its residual v, and sends parts of it:

    update:             x = b' = m b + g, or with Nesterov's momentum x = g + m b' = (1 + m) g + m^2 b
    what may be sent:   w = v + x
    new residual:       v' = w without what is sent
    new momentum:       b' from w - v, which is x; 0 where an element of w is sent, if the method masks it

So a vector is packed as w, and v' and b' follow from w when its round has succeeded. Where all is sent, v' is
0 and b' is kept: then the mean of w is the step of momentum SGD.

Source: Lin et al. 2018, "Deep gradient compression", sections 3.1 to 3.3 and algorithm 4 (momentum
correction, local clipping, momentum factor masking); Nesterov's form as in the authors' code, whose u is m b.
Deviation: the weight decay is part of g, so that it has SGD's momentum; the authors' code adds it to the
mean, with a momentum of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offbeat.numerics.compressors.interface import Requests
from offbeat.numerics.compressors.layout import WritesResidual, check_ratio


@dataclass(frozen=True, kw_only=True)
class MomentumCorrecting(ABC):
    """A method of compression with momentum correction, which takes the place of the optimizer's momentum.

    Args:
        ratio: fraction that is sent, more than 0 and at most 1.
        warmup: rounds in which the fraction falls exponentially from 1 to `ratio`; a new group repeats it.
        clip: largest Euclidean norm of a tensor's gradient, times the root of the number of members, on each
            worker before its momentum; None for no limit.

    Raises:
        ValueError: an argument is out of range.
    """

    ratio: float
    warmup: int = 0
    clip: float | None = None

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.warmup < 0:
            raise ValueError(f"expected a warm-up of at least 0 rounds, got {self.warmup}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"expected a finite norm of more than 0 to clip to, got {self.clip}")

    def ratio_in(self, round_: int) -> float:
        """Return the fraction that is sent in a round of a group, from 0.

        Source: the authors' code of deep gradient compression, with rounds in place of epochs.
        """
        return float(self.ratio ** (min(round_ + 1, self.warmup + 1) / (self.warmup + 1)))

    @abstractmethod
    def compressor(self, shapes: Sequence[torch.Size], seed: int) -> MomentumCompressor:
        """See `CompressionMethod.compressor`."""


class MomentumCompressor(WritesResidual, ABC):
    """A `Compressor` of vectors that `MomentumCorrection` writes."""

    @abstractmethod
    def sum(
        self,
        vector: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor,
        state: Any,
        *,
        members: int,
        position: int,
    ) -> Requests:
        """See `Compressor.sum`."""

    @abstractmethod
    def masks_momentum(self, state: Any, *, members: int) -> Sequence[bool]:
        """Return by tensor whether the momentum of what `sum` sends, with the same arguments, is dropped."""


class MomentumSettings(NamedTuple):
    """SGD's options for a parameter."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def gradient_factor(self) -> float:
        """Factor of a gradient in its update."""
        return 1 + self.momentum if self.nesterov else 1.0

    @property
    def momentum_factor(self) -> float:
        """Factor of the momentum before in the update."""
        return self.momentum**2 if self.nesterov else self.momentum


class MomentumCorrection:
    """One worker's momentum, by entry: a parameter's number.

    Momentum has no weight of a worker; it changes only in `advance` and `take_over`.

    Args:
        clip: see `MomentumCorrecting`.
    """

    def __init__(self, clip: float | None = None) -> None:
        self._clip = clip
        self._momenta: dict[int, torch.Tensor] = {}  # each 1-D
        self._settings: dict[int, MomentumSettings] = {}  # with which an entry was written

    def write(
        self,
        entry: int,
        gradient: torch.Tensor | None,
        parameter: torch.Tensor,
        settings: MomentumSettings,
        into: torch.Tensor,
        *,
        scale: float,
        residual: torch.Tensor | None,
        members: int,
    ) -> None:
        """Write this worker's residual and update, times its factor; zeros if the factor is 0.

        Args:
            entry: of the parameter.
            gradient: None where this worker has none; others may have one.
            parameter: for its weight decay.
            settings: of the optimizer.
            into: of the parameter's shape.
            scale: this worker's factor.
            residual: 1-D, None for zeros.
            members: of the group.
        """
        self._settings[entry] = settings
        momentum = self._momenta.get(entry)
        if residual is None or not scale:
            into.zero_()
        else:
            torch.mul(residual.view_as(into), scale, out=into)
        if not scale:
            return
        if momentum is not None:
            into.add_(momentum.view_as(into), alpha=scale * settings.momentum_factor)
        if settings.weight_decay:
            into.add_(parameter, alpha=scale * settings.weight_decay * settings.gradient_factor)
        if gradient is not None:
            self.add(entry, gradient, into, scale=scale, members=members)

    def add(
        self, entry: int, gradient: torch.Tensor, into: torch.Tensor, *, scale: float, members: int
    ) -> None:
        """Add a gradient to what `write` has written."""
        factor = self._settings[entry].gradient_factor * scale
        if self._clip is not None:
            norm = float(torch.linalg.vector_norm(gradient))
            factor *= min(1.0, self._clip / math.sqrt(members) / norm) if norm else 1.0
        into.add_(gradient, alpha=factor)

    def advance(
        self,
        entry: int,
        written: torch.Tensor,
        *,
        weight: float,
        residual: torch.Tensor | None,
        next_residual: torch.Tensor,
        is_masked: bool,
    ) -> None:
        """Compute the momentum after a round that has succeeded; zeros where any of it is not finite.

        Args:
            entry: of a parameter.
            written: 1-D, as `write` and `add` have left it.
            weight: this worker's.
            residual: with which it was written; None for zeros.
            next_residual: what is not sent.
            is_masked: the momentum of elements that were sent is dropped (momentum factor masking).
        """
        settings, before = self._settings[entry], self._momenta.get(entry)
        momentum = torch.div(written, weight, out=None if settings.nesterov else before)
        if residual is not None:
            momentum.sub_(residual)
        if settings.nesterov:
            if before is not None:
                momentum.add_(before, alpha=settings.momentum)
            momentum.div_(settings.gradient_factor)
        if is_masked:
            momentum.masked_fill_((next_residual == 0).logical_and_(written != 0), 0)
        if not momentum.sum().isfinite():
            momentum.zero_()
        self._momenta[entry] = momentum

    @property
    def momenta(self) -> Mapping[int, torch.Tensor]:
        """This worker's momentum by entry, 1-D, in memory that later rounds change."""
        return self._momenta

    def take_over(self, entry: int, momentum_buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """Continue with an optimizer's momentum, which is equal on all workers and so their mean.

        Or with this worker's own, as it was saved.
        """
        self._momenta[entry] = momentum_buffer.flatten().to(dtype, copy=True)

    def clear(self) -> None:
        """Drop all momentum."""
        self._momenta.clear()
