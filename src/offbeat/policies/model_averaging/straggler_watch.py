"""Which workers no group waits for: those that compute slowly, and those with which an averaging takes long.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, Final

from offbeat.events import Ready
from offbeat.policies.stragglers.classifier import StragglerClassifier

_AVERAGINGS_JUDGED: Final = 4
_TIMES_KEPT: Final = 32
_FACTOR: Final = 2.0
_STEPS_BETWEEN: Final = 4  # the time of a slow averaging, as a multiple


class StragglerWatch:
    """Judges workers by their steps, and by how long averagings with them take.

    `StragglerClassifier` judges compute times. Where groups change, the line of a worker is judged by the
    averagings that it is in: the time from the action until the first member has the mean. It is *slow* if
    each of the last 4 took longer than a step and twice a fast averaging; of the last 32 of all workers, a
    step is the median, and a fast averaging the lower quartile. Two workers that have met only each other are
    classed together, and the first faster averaging with another worker clears the one with the fast line.
    From then on an averaging with the other one says nothing of its partners. Where more than half of the
    lines would be slow, all averagings take longer, and none is.

    A worker with a slow line keeps its partners from other averagings. Therefore it makes so many steps until
    its next one that these take 4 times as long as the averaging.

    Source: dynamic worker classification, see `StragglerClassifier`. The rule for lines is an addition.

    Args:
        is_on: it judges; else nobody is a straggler.

    Attributes:
        stragglers: the workers that are classed: the same object until they change.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._classifier = StragglerClassifier()
        self._steps_s: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._averagings_s: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._step_s: dict[int, float] = {}  # by worker, its last one
        self._last_s: dict[int, deque[float]] = {}  # by worker, how long its last averagings took
        # By worker that is classed, how long the fastest of its last averagings took:
        self._slow_lines: dict[int, float] = {}
        self._reasons: dict[int, str] = {}  # by worker, of its last change of class
        self.stragglers: frozenset[int] = frozenset()

    def add(self, worker: int) -> None:
        """Add a worker."""
        self._classifier.add(worker)
        self._last_s[worker] = deque(maxlen=_AVERAGINGS_JUDGED)

    def remove(self, worker: int) -> None:
        """Remove a worker, if it is there."""
        if self._last_s.pop(worker, None) is None:
            return
        for by_worker in (self._step_s, self._slow_lines, self._reasons):
            by_worker.pop(worker, None)
        self._reasons |= {change.worker: change.reason for change in self._classifier.remove(worker)}
        self._update()

    def observe_step(self, event: Ready, step_s: float) -> None:
        """Judge a step, which has taken so many seconds, data and computing."""
        if not self._is_on:
            return
        self._steps_s.append(step_s)
        self._step_s[event.worker] = step_s
        changes = self._classifier.observe_next(event.worker, epoch=event.epoch, compute_s=event.compute_s)
        if changes:
            self._reasons |= {change.worker: change.reason for change in changes}
            self._update()

    def observe_averaging(self, members: Sequence[int], time_s: float) -> None:
        """Judge the members of an averaging, which has taken so many seconds."""
        self._averagings_s.append(time_s)
        if len(self._averagings_s) < _AVERAGINGS_JUDGED or not self._steps_s:
            return
        known = self._slow_lines.keys() & set(members)
        judged = [worker for worker in known or members if worker in self._last_s]  # others have finished
        for worker in judged:
            self._last_s[worker].append(time_s)
        fast_s, step_s = sorted(self._averagings_s)[(len(self._averagings_s) - 1) // 4], median(self._steps_s)
        least_s = {worker: min(self._last_s[worker]) for worker in judged}
        slow = {
            worker
            for worker in judged
            if least_s[worker] > step_s + _FACTOR * fast_s
            and (worker in known or len(self._last_s[worker]) == _AVERAGINGS_JUDGED)
        }
        if 2 * len(slow | self._slow_lines.keys()) > len(self._last_s):
            self._forget_averagings()
            return
        for worker in known - slow:
            del self._slow_lines[worker]
            self._reasons[worker] = f"an averaging with it takes {least_s[worker]:.3g} s again"
        for worker in slow - known:
            self._reasons[worker] = (
                f"its line is slow: its last {_AVERAGINGS_JUDGED} averagings took at least "
                f"{least_s[worker]:.3g} s, others {fast_s:.3g} s, and a step {step_s:.3g} s"
            )
        self._slow_lines |= {worker: least_s[worker] for worker in slow}
        if slow != known:
            self._update()

    def _forget_averagings(self) -> None:
        self._slow_lines.clear()
        for last_s in self._last_s.values():
            last_s.clear()
        self._update()

    def _update(self) -> None:
        self.stragglers = self._classifier.stragglers | self._slow_lines.keys()

    def least_steps(self, worker: int) -> int:
        """Return how many steps a worker makes at least until its next averaging."""
        averaging_s, step_s = self._slow_lines.get(worker, 0.0), self._step_s.get(worker, 0.0)
        return math.ceil(_STEPS_BETWEEN * averaging_s / step_s) if averaging_s and step_s else 1

    def pop_reasons(self, workers: Iterable[int]) -> str:
        """Return why the class of some of these workers has changed, each change once; empty for none."""
        found = [(worker, self._reasons.pop(worker)) for worker in workers if worker in self._reasons]
        return "".join(f"; worker {worker}: {reason}" for worker, reason in found)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "classifier": self._classifier.state_dict(),
            "steps_s": list(self._steps_s),
            "averagings_s": list(self._averagings_s),
            "step_s": [list(entry) for entry in self._step_s.items()],
            "last_s": [[worker, list(last_s)] for worker, last_s in self._last_s.items()],
            "slow_lines": [list(entry) for entry in self._slow_lines.items()],
            "reasons": [list(entry) for entry in self._reasons.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._classifier.load_state_dict(state["classifier"])
        self._steps_s = deque(state["steps_s"], maxlen=_TIMES_KEPT)
        self._averagings_s = deque(state["averagings_s"], maxlen=_TIMES_KEPT)
        self._step_s = dict(state["step_s"])
        self._last_s = {
            worker: deque(last_s, maxlen=_AVERAGINGS_JUDGED) for worker, last_s in state["last_s"]
        }
        self._slow_lines, self._reasons = dict(state["slow_lines"]), dict(state["reasons"])
        self._update()
