"""Rounds of all workers after several steps each; a round closes without those that are late.

A component of policies. It knows workers and times only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from offbeat.events import OuterStep
from offbeat.policies.membership.quorum import workers_needed
from offbeat.policies.model_averaging.group_maker import CanMeet, ReadyWorkers, choose_meeting
from offbeat.policies.model_averaging.step_times import StepTimes

_STEPS_KEPT: Final = 9
_FIRST_STEPS: Final = 5
_GRACE_SHARE: Final = 0.25


class LocalRounds(ReadyWorkers):
    """Rounds in which all workers average that are ready when the round closes; see `GroupMaker`.

    A worker is ready after `every` steps. With `by_pace` only the fastest one makes that many, and all others
    as many as they can in the same time, so that all are ready together; a worker whose pace is not known yet
    makes 5 at most. A model's weight is the number of samples that it has learnt from since its last round.

    A round closes when all workers that are expected are ready or, after a time of grace, when a `quorum` of
    all workers is. Without `by_pace`, it gives stragglers no such time. A worker that comes later takes part
    in the next round, with all that it has learnt. Where fewer workers than a quorum are left to come,
    because the others wait for the mean after an epoch, each goes on alone.

    With `fragments`, each round is of one of so many parts of the parameters in turn, after `every` /
    `fragments` steps, and an outer optimizer's step of that part follows on each worker. A worker that has
    missed a step of a part is *behind*: in the next round of that part it only receives the outer optimizer's
    state, and what it has learnt counts in the round after. Each round holds a worker that is not behind, as
    long as there is one.

    With a `delay`, a worker that is ready makes so many more steps, and then waits for the mean if it is not
    there yet. They count as steps of its round.

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
        delay: steps from when a worker is ready until it takes the mean; 0 where it does when that is there.
    """

    def __init__(
        self,
        every: int,
        quorum: int | str | None,
        grace_s: float | None,
        *,
        by_pace: bool,
        fragments: int = 0,
        delay: int = 0,
    ) -> None:
        super().__init__()
        self._fragments, self._delay = fragments, delay
        self._workers: set[int] = set()  # that have not finished
        self._rounds = 0
        self._behind: tuple[int, ...] | None = None  # in the group removed last; None if that is no round
        self._version = 0  # of anchors: ascends with each round, and with each mean of all models
        self._versions: dict[int, list[int]] = {}  # by worker, for each part
        # By worker in an averaging, the version that it will have, and of which parts:
        self._next_versions: dict[int, tuple[int, list[int]]] = {}
        self._every, self._quorum, self._grace_s, self._by_pace = every, quorum, grace_s, by_pace
        self._began_s: float | None = None  # when the round under way began
        self._step_times = StepTimes(_STEPS_KEPT)
        self._fastest_s: float | None = None  # the shortest median when the last round closed
        self._samples: dict[int, int] = {}  # by worker, in no round yet
        self._contributed: dict[int, int] = {}  # of these, by worker, those in the round that it is in
        self._snapshot_samples: dict[int, int] = {}  # with a delay: when a worker was last ready
        self._all: set[int] | None = None  # see `_all_workers`; derived from the calls, not part of the state

    def observe_step(self, worker: int, now_s: float, *, samples: int, step_s: float) -> None:
        """See `GroupMaker.observe_step`; a batch of unknown size counts as one sample."""
        if self._began_s is None:
            self._began_s = now_s - step_s
        self._step_times.observe(worker, step_s)
        self._samples[worker] = self._samples.get(worker, 0) + max(1, samples)

    def add(self, worker: int, now_s: float) -> None:
        """See `GroupMaker.add`; with a delay, what the worker learns from now on is not in its round."""
        super().add(worker, now_s)
        if self._delay:
            self._snapshot_samples[worker] = self._samples.get(worker, 0)

    def on_joined(self, worker: int, host: str) -> None:
        """See `GroupMaker.on_joined`."""
        self._workers.add(worker)
        self._all = None

    def begin_mean_of_all(self, workers: Iterable[int]) -> None:
        """See `GroupMaker.begin_mean_of_all`: it becomes their anchor, and no samples are left."""
        self._version += 1
        self._began_s = None
        members = set(workers)
        newest = [self._newest(members, part) for part in range(self._fragments)]
        for worker in members:
            parts = [part for part, found in enumerate(newest) if worker in found]
            self._next_versions[worker] = (self._version, parts)
            self._contributed[worker] = self._samples.get(worker, 0)

    def end_averaging(self, worker: int, *, has_mean: bool) -> None:
        """See `GroupMaker.end_averaging`."""
        contributed = self._contributed.pop(worker, 0)
        version, parts = self._next_versions.pop(worker, (0, []))
        if not has_mean:
            return
        for part in parts:
            self._versions_of(worker)[part] = version
        self._samples[worker] = self._samples.get(worker, 0) - contributed

    def discard(self, worker: int) -> None:
        """See `GroupMaker.discard`."""
        super().discard(worker)
        self._workers.discard(worker)
        self._all = None
        self._step_times.forget(worker)
        self._samples.pop(worker, None)
        self._contributed.pop(worker, None)
        self._snapshot_samples.pop(worker, None)
        self._versions.pop(worker, None)
        self._next_versions.pop(worker, None)

    def pop_group(self, expected: frozenset[int], now_s: float, can_meet: CanMeet) -> tuple[int, ...] | None:
        """See `GroupMaker.pop_group`: all that are ready, once the round closes."""
        workers = self._all_workers(expected, can_meet)
        needed = workers_needed(len(workers) // 2 + 1 if self._quorum is None else self._quorum, len(workers))
        if len(self._ready_s) < needed <= len(expected):
            return None
        ready = [worker for worker in self._ready_s if worker in expected]
        if ready and len(expected) < needed:
            return self._release(ready, can_meet)
        if len(ready) < needed:
            return None
        late = expected.difference(ready)
        if not self._by_pace:
            late -= self._stragglers
        if late and not self._is_grace_over(ready[needed - 1], now_s):
            return None
        newest = self._newest(workers, self._rounds % max(1, self._fragments))
        group = choose_meeting(sorted(ready, key=lambda worker: worker not in newest), can_meet)
        if len(group) < needed or newest.isdisjoint(group):
            return None
        self._began_s = now_s
        self._behind = tuple(worker for worker in sorted(group) if worker not in newest)
        return self.take(group)

    def _all_workers(self, expected: frozenset[int], can_meet: CanMeet) -> set[int]:
        """Return the workers that have not finished, and those that are expected."""
        if self._has_new_arguments(expected, can_meet) or self._all is None:
            self._all = self._workers | expected
        return self._all

    def pop_first(self, can_meet: CanMeet) -> tuple[int, ...]:
        """See `GroupMaker.pop_first`: alone, and without an outer step."""
        return self._release(self._ready_s, can_meet)

    def _release(self, ready: Iterable[int], can_meet: CanMeet) -> tuple[int, ...]:
        """Let the first worker that is ready go on alone."""
        self._behind = None
        return self.take([next(worker for worker in ready if can_meet((), worker))])

    def _is_grace_over(self, last: int, now_s: float) -> bool:
        """Whether the round closes without those that are not ready; `last` made up the quorum."""
        since_s = self._ready_s[last]
        began_s = since_s if self._began_s is None else self._began_s
        grace_s = _GRACE_SHARE * (since_s - began_s) if self._grace_s is None else self._grace_s
        return now_s > since_s + grace_s

    def weights(self, group: tuple[int, ...]) -> tuple[float, ...]:
        """See `GroupMaker.weights`: by samples."""
        if self._behind is None:
            return super().weights(group)
        learnt = self._samples | self._snapshot_samples
        samples = {worker: learnt.get(worker, 0) for worker in group if worker not in self._behind}
        self._contributed |= samples
        self._fastest_s = self._step_times.fastest_s
        total = sum(samples.values())
        if not total:
            samples, total = dict.fromkeys(samples, 1), len(samples)
        return tuple(samples.get(worker, 0) / total for worker in group)

    def outer_step(self, group: tuple[int, ...]) -> OuterStep | None:
        """See `GroupMaker.outer_step`."""
        if not self._fragments or self._behind is None:
            return None
        number, part = divmod(self._rounds, self._fragments)
        self._rounds += 1
        self._version += 1
        self._next_versions |= {worker: (self._version, [part]) for worker in group}
        return OuterStep(fragment=part, number=number, behind=self._behind)

    def add_newcomer(self, worker: int) -> None:
        """See `GroupMaker.add_newcomer`."""
        self._versions[worker] = [-1] * self._fragments

    def continue_after(self, rounds: int) -> None:
        """See `GroupMaker.continue_after`: the next part, and its step's number, follow from it."""
        self._rounds = max(self._rounds, rounds)

    def _versions_of(self, worker: int) -> list[int]:
        return self._versions.setdefault(worker, [0] * self._fragments)

    def _newest(self, workers: Iterable[int], part: int) -> set[int]:
        """Return those of the workers whose anchor of a part is the newest of all; all without parts."""
        if not self._fragments:
            return set(workers)
        newest = max(self._versions_of(worker)[part] for worker in self._workers.union(workers))
        return {worker for worker in workers if self._versions_of(worker)[part] == newest}

    def steps(self, worker: int) -> int:
        """See `GroupMaker.steps`."""
        parts = max(1, self._fragments)
        part = self._rounds % parts
        every = self._every * (part + 1) // parts - self._every * part // parts
        return max(1, self._steps_of_round(worker, every) - self._delay)

    def _steps_of_round(self, worker: int, every: int) -> int:
        """Return how many steps a worker makes in a round in which the fastest one makes `every`."""
        if not self._by_pace:
            return every
        median_s = self._step_times.median_s(worker)
        if median_s is None or not self._fastest_s:
            return min(_FIRST_STEPS, every)
        return round(every * self._fastest_s / max(self._fastest_s, median_s))

    def state_dict(self) -> dict[str, Any]:
        """See `GroupMaker.state_dict`."""
        return {
            "ready_s": [list(entry) for entry in self._ready_s.items()],
            "began_s": self._began_s,
            "step_times": self._step_times.state_dict(),
            "fastest_s": self._fastest_s,
            "samples": [list(entry) for entry in self._samples.items()],
            "contributed": [list(entry) for entry in self._contributed.items()],
            "snapshot_samples": [list(entry) for entry in self._snapshot_samples.items()],
            "workers": sorted(self._workers),
            "rounds": self._rounds,
            "version": self._version,
            "versions": [[worker, list(parts)] for worker, parts in self._versions.items()],
            "next_versions": [
                [worker, version, list(parts)] for worker, (version, parts) in self._next_versions.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `GroupMaker.load_state_dict`."""
        self._restore_ready(state["ready_s"])
        self._began_s = state["began_s"]
        self._step_times.load_state_dict(state["step_times"])
        self._fastest_s = state["fastest_s"]
        self._samples, self._contributed = dict(state["samples"]), dict(state["contributed"])
        self._snapshot_samples = dict(state["snapshot_samples"])
        self._workers, self._rounds, self._version = set(state["workers"]), state["rounds"], state["version"]
        self._all = None
        self._versions = {worker: list(parts) for worker, parts in state["versions"]}
        self._next_versions = {
            worker: (version, list(parts)) for worker, version, parts in state["next_versions"]
        }
