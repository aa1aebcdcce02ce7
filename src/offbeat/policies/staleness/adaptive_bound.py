"""The staleness bound as a function of how fast the loss falls. A part that a policy owns.

Nothing here knows of workers or clocks, or measures a loss.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal, TypeAlias, get_args

ProgressSignal: TypeAlias = Literal["loss", "accuracy"]

_LOSS_MIN = 1e-12  # divides in the place of a smaller loss


class LprController:
    """Raises the bound while the loss falls fast, and lowers it while the loss rises.

    The loss L of a version is the mean, by samples, of the training losses of all steps at its clock. Once
    the version is complete, its learning progress rate is LPR = 100 (M' - M) / |M'| percent, with M = L and
    M' that of the previous version. Above `limit` the bound s rises by `step`, below -`limit` it falls by
    `step`. With accuracies in the place of losses the rate has the opposite sign.

    Source: Y. Kim and S. Rhee, "Distributed and parallel deep learning architecture exploiting dynamic stale
    synchronous parallel method", Journal of Digital Contents Society 20(2), 2019 (DTSSP): steps of 1, a limit
    of 5 %, bounds from 3 to 10. Deviations: the paper does not print what the rate is computed from; this is
    the signal that a server has at every version without evaluating. A version without a reported loss is
    skipped, and so is the first. A loss that is not finite counts as an unbounded rise, and later losses are
    not compared with it. `signal`, `beta` and `window` are additions.

    Args:
        s: the initial bound, from `s_min` to `s_max`.
        s_min: at least 0.
        s_max: at least `s_min`.
        step: the change of the bound at one version, at least 1.
        limit: in percent, at least 0; with None the bound is constant.
        signal: "loss", or "accuracy" where steps report accuracies.
        beta: compares M = beta M' + (1 - beta) L instead, above 0 and below 1; None does not smooth.
        window: M is the mean L of the last `window` versions, at least 1; not together with beta.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        s: int = 3,
        *,
        s_min: int = 3,
        s_max: int = 10,
        step: int = 1,
        limit: float | None = 5.0,
        signal: ProgressSignal = "loss",
        beta: float | None = None,
        window: int = 1,
    ) -> None:
        if not 0 <= s_min <= s <= s_max:
            raise ValueError(f"expected 0 <= s_min <= s <= s_max, got s_min={s_min}, s={s}, s_max={s_max}")
        if step < 1:
            raise ValueError(f"expected a step of at least 1, got {step}")
        if limit is not None and not 0 <= limit < math.inf:
            raise ValueError(f"expected a finite limit of at least 0 percent, got {limit}")
        if beta is not None and not 0 < beta < 1:
            raise ValueError(f"expected beta above 0 and below 1, got {beta}")
        if signal not in get_args(ProgressSignal):
            raise ValueError(f"expected a signal of loss or accuracy, got {signal!r}")
        if window < 1 or (window > 1 and beta is not None):
            raise ValueError(f"expected a window of at least 1 version, and 1 with beta, got {window}")
        self._s, self._s_min, self._s_max = s, s_min, s_max
        self._step, self._limit, self._beta = step, math.inf if limit is None else limit, beta
        self._sign = 1 if signal == "loss" else -1
        self._recent: deque[float] = deque(maxlen=window)  # L of the last versions
        self._losses: dict[int, tuple[int, float]] = {}  # by version: samples, sum of their losses
        self._previous: float | None = None  # M'
        self._lpr: float | None = None

    @property
    def s(self) -> int:
        """The current bound."""
        return self._s

    @property
    def s_max(self) -> int:
        """The largest bound."""
        return self._s_max

    @property
    def lpr(self) -> float | None:
        """The last learning progress rate, in percent; None before the second version with a loss."""
        return self._lpr

    def add_loss(self, version: int, samples: int, loss: float) -> None:
        """Add the loss of a step.

        Args:
            version: the clock of the step, of a version that is not complete.
            samples: behind the loss, at least 0; a loss of 0 samples does not count.
            loss: their mean.
        """
        if samples:
            count, total = self._losses.get(version, (0, 0.0))
            self._losses[version] = (count + samples, total + samples * loss)

    def complete_versions(self, until: int) -> list[str]:
        """Process all versions before `until` as complete, in order; return why the bound has changed."""
        reasons = []
        for version in sorted(version for version in self._losses if version < until):
            count, total = self._losses.pop(version)
            self._lpr = self._progress_rate(total / count)
            if self._lpr is not None and self._change(self._lpr):
                direction = "fell" if self._lpr * self._sign > 0 else "rose"
                quantity = "loss" if self._sign > 0 else "accuracy"
                reasons.append(f"the {quantity} {direction} by {abs(self._lpr):.3g} % at version {version}")
        return reasons

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes, as plain data."""
        return {
            "s": self._s,
            "losses": [[version, *one] for version, one in self._losses.items()],
            "recent": list(self._recent),
            "previous": self._previous,
            "lpr": self._lpr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a controller with the same arguments."""
        self._s, self._previous, self._lpr = state["s"], state["previous"], state["lpr"]
        self._losses = {version: (count, total) for version, count, total in state["losses"]}
        self._recent.clear()
        self._recent.extend(state["recent"])

    def _progress_rate(self, loss: float) -> float | None:
        if not math.isfinite(loss):
            return -math.inf
        self._recent.append(loss)
        previous, current = self._previous, sum(self._recent) / len(self._recent)
        if previous is not None and self._beta is not None:
            current = self._beta * previous + (1 - self._beta) * loss
        self._previous = current
        return (
            None
            if previous is None
            else self._sign * 100 * (previous - current) / max(abs(previous), _LOSS_MIN)
        )

    def _change(self, lpr: float) -> bool:
        previous = self._s
        if lpr > self._limit:
            self._s = min(self._s_max, self._s + self._step)
        elif lpr < -self._limit:
            self._s = max(self._s_min, self._s - self._step)
        return self._s != previous
