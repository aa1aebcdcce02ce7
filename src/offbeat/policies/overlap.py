"""Whether validating beside the next epoch pays, and how: by times that were measured.

Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MARGIN: Final = 0.05
"""The least saving, as a share of an epoch, for which overlapping is tried: it is a prediction."""
_CORES_FULL: Final = 0.85
"""The share of the cores' time from which on more of it is not to be had."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What an epoch took: seconds of wall time and of all this machine's cores that this process used.

    Attributes:
        train_s, train_cpu_s: from the end of the last validation to the end of the epoch.
        validate_s, validate_cpu_s: validating while nothing trains.
    """

    train_s: float
    train_cpu_s: float
    validate_s: float
    validate_cpu_s: float

    @property
    def serial_s(self) -> float:
        """One after the other."""
        return self.train_s + self.validate_s


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How epochs are validated from now on, and why in words."""

    backend: str
    reason: str


class OverlapChooser:
    """Chooses between validating in line and beside the next epoch, and goes back where that did not pay.

    The first epochs are validated in line, and measured. Overlapped, an epoch takes at least as long as each
    of the two, and as long as the cores need for both:
    t' = max(t, v, (cpu_t + cpu_v) / cores). Where t + v - t' is more than a twentieth of t + v, the first of
    `backends` is tried. An overlapped epoch that then takes longer than t + v ends the trial. Where the cores
    had time left, the interpreter's lock is what they waited for, and a backend with processes of its own is
    next, as soon as the epochs since have lost as much as starting it costs.

    Source: the overlapped validation paper always overlaps; its time model is E (t + v) for E epochs in
    line, and t + (E - 1) max(t, v) + v overlapped. Deviation: the cores' time, which the paper had plenty of.

    Args:
        backends: what may be tried, in order.
        cores: at least 1.
        start_s: what starting "process" costs, in seconds.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, backends: Sequence[str], *, cores: int, start_s: float) -> None:
        if cores < 1 or start_s < 0:
            raise ValueError(f"expected at least 1 core and 0 s to start, got {cores} and {start_s}")
        self._backends, self._cores, self._start_s = list(backends), cores, start_s
        self._why_not: list[str] = []
        self._spent: Spent | None = None
        self._lost_s = 0.0  # in line, by what processes would save

    def exclude(self, backend: str, why: str) -> None:
        """Do not try a backend, or not again."""
        if backend in self._backends:
            self._backends.remove(backend)
            self._why_not.append(f"not {backend}: {why}")

    def in_line(self, spent: Spent) -> Choice:
        """Say how to go on after an epoch that was validated in line."""
        self._spent = spent
        cpu_s = spent.train_cpu_s + spent.validate_cpu_s
        if not self._backends:
            return Choice(backend="inline", reason="; ".join(self._why_not))
        overlapped_s = max(spent.train_s, spent.validate_s, cpu_s / self._cores)
        saving_s = spent.serial_s - overlapped_s
        times = f"training took {spent.train_s:.2f} s, validation {spent.validate_s:.2f} s"
        if saving_s <= _MARGIN * spent.serial_s:
            busy = cpu_s / (spent.serial_s * self._cores)
            return Choice(
                backend="inline",
                reason=f"{times}, and both used {busy:.0%} of {self._cores} cores: overlapping would save "
                f"{max(0.0, saving_s):.2f} s an epoch at most",
            )
        if self._backends[0] == "process":
            self._lost_s += saving_s
            if self._lost_s < self._start_s:
                return Choice(
                    backend="inline",
                    reason=f"processes would save {saving_s:.2f} s an epoch, and {self._start_s:.1f} s are "
                    "needed to start them",
                )
        return Choice(
            backend=self._backends[0], reason=f"{times}: overlapping should save {saving_s:.2f} s an epoch"
        )

    def overlapped(self, epoch_s: float, cpu_s: float) -> Choice:
        """Say how to go on after an epoch beside which another one was validated.

        Args:
            epoch_s: from the end of the epoch before to the end of this one.
            cpu_s: of all cores, in that time.
        """
        assert self._spent is not None
        backend = self._backends[0]
        serial_s = self._spent.serial_s
        took = f"an epoch took {epoch_s:.2f} s overlapped and {serial_s:.2f} s in line"
        if epoch_s <= serial_s:
            return Choice(backend=backend, reason=took)
        if cpu_s >= _CORES_FULL * self._cores * epoch_s:
            took += " and the cores were busy"
            self.exclude("process", took)
        self.exclude(backend, took)
        return Choice(backend="inline", reason=took)
