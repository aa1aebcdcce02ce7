"""The compute time of backward passes and of rounds."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.runtime.training.timing import PartTimer


class PassTimer:
    """Measures the compute time of each backward pass, and of everything since the last round.

    Args:
        timer: splits the worker's wall time.
        on_computed: gets the compute time since the previous pass, in seconds. It may block to inject
            slowness, which counts as compute time of the round, but not of the next pass.
    """

    def __init__(self, timer: PartTimer, on_computed: Callable[[float], None]) -> None:
        self._timer, self._on_computed = timer, on_computed
        self._pass_mark_s = self._round_mark_s = timer.total_s("compute")

    @property
    def compute_s(self) -> float:
        """Seconds of "compute" since the last round, without the running interval."""
        return self._timer.total_s("compute") - self._round_mark_s

    def end_pass(self) -> None:
        """End a backward pass, and report its compute time; the timer continues with "compute"."""
        self._timer.switch("compute")
        self._on_computed(self._timer.total_s("compute") - self._pass_mark_s)
        self._timer.switch("compute")
        self._pass_mark_s = self._timer.total_s("compute")

    def end_round(self) -> None:
        """End a round, in which the timer is not in "compute"."""
        self._round_mark_s = self._timer.total_s("compute")
