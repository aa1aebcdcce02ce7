"""The compute time of backward passes and of rounds.

On the CPU it is measured by the worker's clock. On an accelerator the program only queues work: there, the
device marks when it begins a forward pass and when it has computed the last gradient. The marks are read
without waiting for them, so a round's time is known one round later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from offbeat.runtime.devices.interface import Device
from offbeat.runtime.training.timing import PartTimer


class PassTimer:
    """Measures the compute time of each pass, forward and backward, and of everything since the last round.

    Args:
        timer: splits the worker's wall time.
        device: holds the model.
        on_computed: gets the compute time since the previous pass, in seconds. It may block to inject
            slowness, which counts as compute time of the round, but not of the next pass.
    """

    def __init__(self, timer: PartTimer, device: Device, on_computed: Callable[[float], None]) -> None:
        self._timer, self._on_computed = timer, on_computed
        self._device = _DeviceTimes(device) if device.has_streams else None
        self._pass_mark_s = self._round_mark_s = timer.total_s("compute")

    @property
    def compute_s(self) -> float:
        """Seconds of computing since the last round, without the running interval.

        On an accelerator, of the last round whose computation has ended, and before that the worker's time.
        """
        times = None if self._device is None else self._device.last_round()
        return self._timer.total_s("compute") - self._round_mark_s if times is None else times.round_s

    def begin_pass(self) -> None:
        """Begin a pass, if none is under way: the timer is in "compute"."""
        if self._device is not None:
            self._device.begin_pass()

    def end_pass(self) -> None:
        """End a backward pass, and report its compute time; the timer continues with "compute"."""
        self._timer.switch("compute")
        pass_s = self._timer.total_s("compute") - self._pass_mark_s
        if self._device is not None:
            self._device.end_computation()
            times = self._device.last_round()
            pass_s = pass_s if times is None else times.pass_s
        self._on_computed(pass_s)
        self._timer.switch("compute")
        if self._device is not None:
            self._device.end_pass()
        self._pass_mark_s = self._timer.total_s("compute")

    def end_round(self) -> None:
        """End a round, in which the timer is not in "compute"."""
        self._round_mark_s = self._timer.total_s("compute")
        if self._device is not None:
            self._device.end_round()


@dataclass(frozen=True)
class _RoundTimes:
    """Times of a round on the device.

    Attributes:
        round_s: of all its passes, with injected slowness, in seconds.
        pass_s: of one pass, without injected slowness, in seconds.
    """

    round_s: float
    pass_s: float


@dataclass
class _PassMarks:
    begin: Any
    computed: Any = None
    end: Any = None


@dataclass
class _DeviceTimes:
    """Marks of the passes of rounds, and the times of the last round of which the device has reached all."""

    _device: Device
    _pass: _PassMarks | None = None
    _passes: list[_PassMarks] = field(default_factory=list)  # of the round under way
    _rounds: deque[list[_PassMarks]] = field(default_factory=deque)  # whose times are not known yet
    _last: _RoundTimes | None = None

    def begin_pass(self) -> None:
        if self._pass is None:
            self._pass = _PassMarks(self._device.record_time())

    def end_computation(self) -> None:
        """Mark the last gradient of a pass."""
        self.begin_pass()  # where the program has set all gradients by hand
        assert self._pass is not None
        self._pass.computed = self._device.record_time()

    def end_pass(self) -> None:
        """Mark the end of a pass, after injected slowness."""
        assert self._pass is not None
        self._pass.end = self._device.record_time()
        self._passes.append(self._pass)
        self._pass = None

    def end_round(self) -> None:
        if self._passes:
            self._rounds.append(self._passes)
            self._passes = []

    def last_round(self) -> _RoundTimes | None:
        """Return the times of the last round that the device has computed; None before the first."""
        while self._rounds and (times := self._times_of(self._rounds[0])) is not None:
            self._rounds.popleft()
            self._last = times
        return self._last

    def _times_of(self, passes: list[_PassMarks]) -> _RoundTimes | None:
        round_s = pass_s = 0.0
        for marks in passes:
            whole_s = self._device.elapsed_s(marks.begin, marks.end)
            computed_s = self._device.elapsed_s(marks.begin, marks.computed)
            if whole_s is None or computed_s is None:
                return None
            round_s += whole_s
            pass_s += computed_s / len(passes)
        return _RoundTimes(round_s, pass_s)
