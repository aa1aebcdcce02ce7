"""Rounds of all workers after several steps each; a round closes without those that are late.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, Final

from offbeat.events import OuterStep
from offbeat.policies.membership.quorum import workers_needed
from offbeat.policies.model_averaging.group_maker import CanMeet, ReadyWorkers

_STEPS_KEPT: Final = 9
_FIRST_STEPS: Final = 5
_GRACE_SHARE: Final = 0.25


class LocalRounds(ReadyWorkers):
    """Rounds in which all workers average that are ready when the round closes; see `GroupMaker`.

    A worker is ready after `every` steps. With `by_pace` only the fastest one makes that many, and all others
    as many as they can in the same time, so that all are ready together; a worker whose pace is not known yet
    makes 5 at most. A model's weight is the number of samples that it has learnt from since its last round.

    With `fragments`, each round is of one of so many parts of the parameters in turn, after `every` /
    `fragments` steps, and an outer optimizer's step of that part follows on each worker. A worker that has
    missed a step of a part is *behind*: in the next round of that part it only receives the outer optimizer's
    state, and what it has learnt counts in the round after. So each round holds a worker that is not behind,
    unless none is left.

    A round closes when all workers are ready or, where a `quorum` is, after a time of grace. A worker that
    comes later takes part in the next round, with all that it has learnt.

    Source: Douillard et al. 2026, "Decoupled DiLoCo", for quorum and grace; Liu et al. 2024, "Asynchronous
    local-SGD training for language modeling", for steps by pace (dynamic local updates). Deviations: models
    are weighted by their samples only; the default grace is a share of the round.

    Args:
        every: steps of the fastest worker in a round, at least 1.
        quorum: workers with which a round may close, as `check_quorum`; None for more than half of all.
        grace_s: how long a round stays open from when as many are ready, in seconds; None for a quarter of
            the time that it has taken until then.
        by_pace: slower workers make fewer steps.
        fragments: parts of the parameters, at least 1; 0 without an outer optimizer.
    """

    def __init__(
        self,
        every: int,
        quorum: int | str | None,
        grace_s: float | None,
        *,
        by_pace: bool,
        fragments: int = 0,
    ) -> None:
        super().__init__()
        self._fragments = fragments
        self._rounds = 0
        self._outer_steps: dict[int, list[int]] = {}  # by worker, for each part the last round with a step
        self._entered: dict[int, tuple[int, int]] = {}  # by worker, round and part of that which it is in
        self._every, self._quorum, self._grace_s, self._by_pace = every, quorum, grace_s, by_pace
        self._began_s: float | None = None  # when the round under way began
        self._step_s: dict[int, deque[float]] = {}  # by worker, the times of its last steps
        self._fastest_s: float | None = None  # the shortest median when the last round closed
        self._samples: dict[int, int] = {}  # by worker, in no round yet
        self._contributed: dict[int, int] = {}  # of these, by worker, those in the round that it is in

    def observe_step(self, worker: int, now_s: float, *, samples: int, step_s: float) -> None:
        """See `GroupMaker.observe_step`; a batch of unknown size counts as one sample."""
        if self._began_s is None:
            self._began_s = now_s - step_s
        self._step_s.setdefault(worker, deque(maxlen=_STEPS_KEPT)).append(step_s)
        self._samples[worker] = self._samples.get(worker, 0) + max(1, samples)

    def end_averaging(self, worker: int, *, has_mean: bool) -> None:
        """See `GroupMaker.end_averaging`."""
        contributed = self._contributed.pop(worker, 0)
        entered = self._entered.pop(worker, None)
        if has_mean and entered is not None:
            round_, fragment = entered
            self._steps_of(worker)[fragment] = round_
        if has_mean:
            self._samples[worker] = self._samples.get(worker, 0) - contributed

    def discard(self, worker: int) -> None:
        """See `GroupMaker.discard`."""
        super().discard(worker)
        self._step_s.pop(worker, None)
        self._samples.pop(worker, None)
        self._contributed.pop(worker, None)
        self._outer_steps.pop(worker, None)
        self._entered.pop(worker, None)

    def pop_group(self, expected: frozenset[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`: all that are ready, once the round closes."""
        ready = [(worker, ready_s) for worker, ready_s in self._ready_s.items() if worker in expected]
        if not ready or (len(ready) < len(expected) and not self._has_quorum(ready, len(expected), now_s)):
            return None
        if self._fragments and not self._newest(expected).intersection(self._ready_s):
            return None
        self._began_s = now_s
        return self.take(self._meeting((worker for worker, _ in ready), can_meet))

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: with all others that it can meet."""
        return self.take(self._meeting(self._ready_s, can_meet))

    def _has_quorum(self, ready: list[tuple[int, float]], expected: int, now_s: float) -> bool:
        """Whether the round may close without those that are expected and not ready."""
        needed = workers_needed(expected // 2 + 1 if self._quorum is None else self._quorum, expected)
        if len(ready) < needed:
            return False
        since_s = ready[needed - 1][1]
        began_s = since_s if self._began_s is None else self._began_s
        grace_s = _GRACE_SHARE * (since_s - began_s) if self._grace_s is None else self._grace_s
        return now_s > since_s + grace_s

    def _meeting(self, workers: Iterable[int], can_meet: CanMeet) -> list[int]:
        chosen: list[int] = []
        for worker in workers:
            if can_meet(tuple(chosen), worker):
                chosen.append(worker)
        return chosen

    def weights(self, group: tuple[int, ...]) -> tuple[float, ...]:
        """See `GroupMaker.weights`: by samples."""
        newest = self._newest(group)
        samples = {worker: self._samples.get(worker, 0) if worker in newest else 0 for worker in group}
        self._contributed |= samples
        times_s = [median(times_s) for times_s in self._step_s.values()]
        self._fastest_s = min(times_s, default=None)
        total = sum(samples.values())
        if not total:
            samples, total = dict.fromkeys(newest, 1), len(newest)
        return tuple(samples.get(worker, 0) / total for worker in group)

    def outer_step(self, group: tuple[int, ...]) -> OuterStep | None:
        """See `GroupMaker.outer_step`."""
        if not self._fragments:
            return None
        newest = self._newest(group)
        number, fragment = divmod(self._rounds, self._fragments)
        self._rounds += 1
        self._entered |= dict.fromkeys(group, (self._rounds, fragment))
        behind = tuple(worker for worker in group if worker not in newest)
        return OuterStep(fragment=fragment, number=number, behind=behind)

    def add_newcomer(self, worker: int) -> None:
        """See `GroupMaker.add_newcomer`."""
        self._outer_steps[worker] = [-1] * self._fragments

    def _steps_of(self, worker: int) -> list[int]:
        return self._outer_steps.setdefault(worker, [0] * self._fragments)

    def _newest(self, workers: Iterable[int]) -> set[int]:
        """Return those of the workers that have missed no step of the next part; all without parts."""
        if not self._fragments:
            return set(workers)
        fragment = self._rounds % self._fragments
        last = {worker: self._steps_of(worker)[fragment] for worker in workers}
        return {worker for worker, round_ in last.items() if round_ == max(last.values())}

    def steps(self, worker: int) -> int:
        """See `GroupMaker.steps`."""
        every = max(1, round(self._every / max(1, self._fragments)))
        if not self._by_pace:
            return every
        times_s = self._step_s.get(worker)
        if times_s is None or not self._fastest_s:
            return min(_FIRST_STEPS, every)
        return max(1, round(every * self._fastest_s / max(self._fastest_s, median(times_s))))

    def state_dict(self) -> dict[str, Any]:
        """See `GroupMaker.state_dict`."""
        return {
            "ready_s": [list(entry) for entry in self._ready_s.items()],
            "began_s": self._began_s,
            "step_s": [[worker, list(times_s)] for worker, times_s in self._step_s.items()],
            "fastest_s": self._fastest_s,
            "samples": [list(entry) for entry in self._samples.items()],
            "contributed": [list(entry) for entry in self._contributed.items()],
            "rounds": self._rounds,
            "outer_steps": [[worker, list(steps)] for worker, steps in self._outer_steps.items()],
            "entered": [[worker, *entry] for worker, entry in self._entered.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GroupMaker.load_state_dict`."""
        self._restore_ready(state["ready_s"])
        self._began_s = state["began_s"]
        self._step_s = {worker: deque(times_s, maxlen=_STEPS_KEPT) for worker, times_s in state["step_s"]}
        self._fastest_s = state["fastest_s"]
        self._samples, self._contributed = dict(state["samples"]), dict(state["contributed"])
        self._rounds = state["rounds"]
        self._outer_steps = {worker: list(steps) for worker, steps in state["outer_steps"]}
        self._entered = {worker: (round_, fragment) for worker, round_, fragment in state["entered"]}
