"""Whether validating during the next epoch pays, and with which backend, by measured times.

Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from offbeat.policies.validation.throttle import MinimumRate

_MARGIN: Final = 0.05
"""The least predicted saving, as a share of an epoch, for which overlapping is tried."""
_START_SHARE: Final = 0.01
"""The largest share of the time spent so far that starting processes may take; below `auto`'s goal, 1.02."""
_CHECK_SHARE: Final = 0.1
"""The share of the in-line validation time after which the rate of threads is checked."""
_SLOW_FACTOR: Final = 2.0
"""A validation this many times as slow as in line costs training more than it saves: see `OverlapChooser`."""
_CALLS_MIN: Final = 50
"""Calls in line below which their rate is not significant."""
_CORES_FULL: Final = 0.85
"""The share of the core time from which on the cores count as busy."""


@dataclass(frozen=True, kw_only=True)
class EpochCost:
    """The cost of an epoch: seconds of wall time, and of core time of this machine that this process used.

    Attributes:
        calls: of torch functions during the validation.
        train_s, train_cpu_s: from the end of the last validation to the end of the epoch.
        validate_s, validate_cpu_s: validating while no training runs.
        contention_share: how much one evaluating thread delays another: 0 if two of them need half of the
            time that one needs, 1 if they need as much. None where that is not known.
    """

    train_s: float
    train_cpu_s: float
    validate_s: float
    validate_cpu_s: float
    contention_share: float | None
    calls: int

    @property
    def serial_s(self) -> float:
        """Training and validation one after the other."""
        return self.train_s + self.validate_s


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """How epochs are validated from now on, and why."""

    backend: str
    reason: str


class OverlapChooser:
    """Chooses between validating in line and during the next epoch, by what each has cost.

    Epochs are validated in line at first, and measured. Overlapped, an epoch takes at least as long as each
    of the two, and as long as the cores need for both; threads also delay each other, at the interpreter's
    lock or elsewhere: t' = max(v, (cpu_t + cpu_v) / cores, t + held_up v). Processes do not, but starting
    them takes time, which must be small compared with the time spent so far. The first of `backends` that
    saves more than a twentieth of t + v is tried. An overlapped epoch that then takes longer than t + v ends
    the trial. So does, in threads, a tenth of a validation that is r > 2 times as slow as in line: if it
    slows the training as much as the training slows it, the training loses (r - 1) v of the r v that it
    takes, and the v that is saved is less. The rest of that validation waits until the epoch is over.

    Source: the overlapped validation paper always overlaps; its time model is E (t + v) for E epochs in
    line, and t + (E - 1) max(t, v) + v overlapped. Deviation: core time, and the mutual delay of threads,
    which the paper leaves out.

    Args:
        backends: the backends to try, in order.
        cores: at least 1.
        start_s: the cost of starting "process", in seconds.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, backends: Sequence[str], *, cores: int, start_s: float) -> None:
        if cores < 1 or start_s < 0:
            raise ValueError(f"expected at least 1 core and 0 s to start, got {cores} and {start_s}")
        self._backends, self._cores, self._start_s = list(backends), cores, start_s
        self._exclusions: list[str] = []
        self._spent: EpochCost | None = None
        self._spent_s = 0.0  # on all epochs in line

    def exclude(self, backend: str, why: str) -> None:
        """Do not try a backend, or not again."""
        if backend in self._backends:
            self._backends.remove(backend)
            self._exclusions.append(f"not {backend}: {why}")

    def after_inline_epoch(self, spent: EpochCost) -> BackendChoice:
        """Choose how to go on after an epoch that was validated in line."""
        self._spent = spent
        self._spent_s += spent.serial_s
        cpu_s = spent.train_cpu_s + spent.validate_cpu_s
        least_s = max(spent.validate_s, cpu_s / self._cores)
        times = f"training took {spent.train_s:.2f} s, validation {spent.validate_s:.2f} s"
        exclusions = list(self._exclusions)
        for backend in self._backends:
            held_up_s = 0.0 if backend == "process" else (spent.contention_share or 0.0) * spent.validate_s
            saving_s = spent.serial_s - max(least_s, spent.train_s + held_up_s)
            if saving_s <= _MARGIN * spent.serial_s:
                exclusions.append(f"not {backend}: it would save {max(0.0, saving_s):.2f} s an epoch at most")
            elif backend == "process" and self._start_s > _START_SHARE * self._spent_s:
                exclusions.append(
                    f"not {backend} yet: it would save {saving_s:.2f} s an epoch, but starting it takes "
                    f"{self._start_s:.1f} s"
                )
            else:
                return BackendChoice(
                    backend=backend, reason=f"{times}: {backend} should save {saving_s:.2f} s an epoch"
                )
        usage = f"they used {cpu_s / (spent.serial_s * self._cores):.0%} of {self._cores} cores"
        if spent.contention_share is not None:
            usage += f", and two threads that evaluate delay each other by {spent.contention_share:.0%}"
        return BackendChoice(backend="inline", reason="; ".join([times, usage, *exclusions]))

    def minimum_rate(self) -> MinimumRate | None:
        """Return the rate of torch calls below which threads that validate during training have to rest.

        It is None if no validation in line has been measured, or if the last one made too few calls.
        """
        spent = self._spent
        if spent is None or spent.calls < _CALLS_MIN or not spent.validate_s:
            return None
        return MinimumRate(
            check_after_s=_CHECK_SHARE * spent.validate_s,
            calls_per_s_min=spent.calls / (_SLOW_FACTOR * spent.validate_s),
            rest_s=2 * spent.serial_s,
        )

    def after_slow_threads(self, backend: str) -> BackendChoice:
        """Choose how to go on after evaluating threads were slower than the minimum rate."""
        why = f"during training, evaluating is more than {_SLOW_FACTOR:g} times as slow"
        self.exclude(backend, why)
        return BackendChoice(backend="inline", reason=why)

    def after_overlapped_epoch(self, backend: str, epoch_s: float, cpu_s: float) -> BackendChoice:
        """Choose how to go on after an epoch during which another one was validated.

        Args:
            backend: the backend that was used.
            epoch_s: from the end of the epoch before to the end of this one.
            cpu_s: of all cores, in that time.
        """
        assert self._spent is not None
        serial_s = self._spent.serial_s
        description = f"an epoch took {epoch_s:.2f} s overlapped and {serial_s:.2f} s in line"
        if epoch_s <= serial_s:
            return BackendChoice(backend=backend, reason=description)
        if cpu_s >= _CORES_FULL * self._cores * epoch_s:
            description += " and the cores were busy"
            self.exclude("process", description)
        self.exclude(backend, description)
        return BackendChoice(backend="inline", reason=description)
