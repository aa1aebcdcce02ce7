"""The compute time of backward passes and of rounds.

On the CPU it is measured by the worker's clock. On an accelerator the program only queues work: there, the
device marks when it begins a forward pass and when it has computed the last gradient. The marks are read
without waiting for them, so a round's time is known one round later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from offbeat.runtime.devices.interface import Device
from offbeat.runtime.training.timing import PartTimer


class PassTimer:
    """Measures the compute time of each pass, forward and backward, and of everything since the last round.

    Args:
        timer: splits the worker's wall time.
        device: holds the model.
        on_computed: called at the end of each pass, with what returns its compute time; see
            `TrainingLoop.on_computed`. It may block to inject slowness, which counts as compute time of the
            round, but not of the next pass.
    """

    def __init__(
        self, timer: PartTimer, device: Device, on_computed: Callable[[Callable[[], float]], None]
    ) -> None:
        self._timer, self._on_computed = timer, on_computed
        self._device = _DeviceTimes(device) if device.has_streams else None
        self._pass_mark_s = self._round_mark_s = timer.total_s("compute")

    @property
    def compute_s(self) -> float:
        """Seconds of computing since the last round, without the running interval.

        On an accelerator, those of the last round that it has computed, and before the first the worker's.
        """
        round_s = None if self._device is None else self._device.last_round_s()
        return self._timer.total_s("compute") - self._round_mark_s if round_s is None else round_s

    def begin_round(self) -> None:
        """Forget what was computed since the last round: the timer is not in "compute".

        Needed only where a round may begin again: otherwise it begins where the last one has ended.
        """
        self._pass_mark_s = self._round_mark_s = self._timer.total_s("compute")
        if self._device is not None:
            self._device.forget_round()

    def begin_pass(self) -> None:
        """Begin a pass, if none is under way: the timer is in "compute"."""
        if self._device is not None:
            self._device.begin_pass()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what the device does and waits for inside; the timer is in another part then."""
        if self._device is None or not self._device.is_in_pass:
            yield
            return
        self._device.pause()
        yield
        self._device.resume()

    def end_pass(self) -> None:
        """End a backward pass, and report that; the timer continues with "compute"."""
        self._timer.switch("compute")
        if self._device is not None:
            self._device.end_computation()
        self._on_computed(self._pass_s)
        self._timer.switch("compute")
        if self._device is not None:
            self._device.end_pass()
        self._pass_mark_s = self._timer.total_s("compute")

    def _pass_s(self) -> float:
        """Return the seconds of the pass that ends; block until the device has computed it."""
        if self._device is not None:
            return self._device.wait_for_pass()
        return self._timer.total_s("compute") - self._pass_mark_s

    def end_round(self) -> None:
        """End a round, in which the timer is not in "compute"."""
        self._round_mark_s = self._timer.total_s("compute")
        if self._device is not None:
            self._device.end_round()


@dataclass
class _PassMarks:
    """Marks of a pass.

    Attributes:
        begin: of the interval under way.
        intervals: beginnings and ends of the intervals before, which ended with a pause.
        computed: the last gradient.
        end: the end of injected slowness.
    """

    begin: Any
    intervals: list[tuple[Any, Any]] = field(default_factory=list)
    computed: Any = None
    end: Any = None


@dataclass
class _DeviceTimes:
    """Marks of the passes of rounds, and the time of the last round of which the device has reached all."""

    _device: Device
    _pass: _PassMarks | None = None
    _passes: list[_PassMarks] = field(default_factory=list)  # of the round under way
    _rounds: deque[list[_PassMarks]] = field(default_factory=deque)  # whose times are not known yet
    _last_s: float | None = None

    def forget_round(self) -> None:
        """Forget the passes of the round under way."""
        self._pass, self._passes = None, []

    def begin_pass(self) -> None:
        if self._pass is None:
            self._pass = _PassMarks(self._device.record_time())

    @property
    def is_in_pass(self) -> bool:
        return self._pass is not None

    def pause(self) -> None:
        assert self._pass is not None
        self._pass.intervals.append((self._pass.begin, self._device.record_time()))

    def resume(self) -> None:
        assert self._pass is not None
        self._pass.begin = self._device.record_time()

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

    def wait_for_pass(self) -> float:
        """Wait until the device has computed the pass that ends; return the time that it took, in seconds."""
        assert self._pass is not None
        self._device.synchronize()
        return self._computed_s(self._pass) or 0.0

    def last_round_s(self) -> float | None:
        """Return the seconds of the last round that the device has computed; None before the first.

        They include injected slowness.
        """
        while self._rounds and (round_s := self._round_s(self._rounds[0])) is not None:
            self._rounds.popleft()
            self._last_s = round_s
        return self._last_s

    def _round_s(self, passes: list[_PassMarks]) -> float | None:
        total_s = 0.0
        for marks in passes:
            computed_s = self._computed_s(marks)
            injected_s = self._device.elapsed_s(marks.computed, marks.end)
            if computed_s is None or injected_s is None:
                return None
            total_s += computed_s + injected_s
        return total_s

    def _computed_s(self, marks: _PassMarks) -> float | None:
        """Return the seconds of a pass without injected slowness; None before the device has computed it."""
        intervals = [*marks.intervals, (marks.begin, marks.computed)]
        times_s = [self._device.elapsed_s(begin, end) for begin, end in intervals]
        known_s = [time_s for time_s in times_s if time_s is not None]
        return sum(known_s) if len(known_s) == len(times_s) else None
