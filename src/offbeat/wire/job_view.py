"""The state of a job, derived from the entries of its run log as they come.

Theory of operation
-------------------

`JobView.add` takes every event and action, in the order of the log, and notes plain facts: a worker's last
round, its compute times of late, the members of the group. It costs some microseconds and never looks at
other workers. Whatever compares workers (medians, ratios, who waits, the sentence) is computed when `status`
is called, which happens once a second or so.

A log may have gaps: the first parts of a log with a bound are gone, or the reader came late, or entries were
dropped. So no entry is required: a worker exists from the first event that names it; without a `Group`, the
members are taken to be those workers whose last `Ready` is for the newest round or the one before it, since
an excluded worker's stays behind.

Waiting. In rounds, a member waits while another member has not sent its `Ready` for the round of its own. On
a parameter server, it waits after a `StepPermit` that does not permit the start. Where workers own their
models, it waits after as many steps as its last `AverageModels` said, and at the end of an epoch, until the
next one.

Slowness. The *typical* compute time is the median of the workers' medians, computed again after every four
rounds. A round is slow if it takes at least 1.5 times the typical time. A worker's counter rises by 1 in a
slow round, up to 8, and falls by 1 in any other; at 8 the worker is slow since the step in which the counter
left 0, or since its first step, until that is 0 again. This only dates what `diagnose` finds from medians; it
is no second `StragglerClassifier`, which excludes workers and requires a log without gaps.

Per worker at most 16 compute times and 16 steps are kept.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from statistics import median, median_low
from typing import Final

from offbeat.events import (
    AbortJob,
    Action,
    AssignBlocks,
    AverageModels,
    EpochEnded,
    Event,
    Failed,
    Finished,
    Group,
    Halt,
    Halted,
    JobComplete,
    Joined,
    Left,
    Lost,
    Preempted,
    Ready,
    RejectPeer,
    SamplesRequested,
    SkipRound,
    StepFinished,
    StepPermit,
    StepsTimed,
    StepTimes,
    Tick,
)
from offbeat.wire.diagnosis import SLOW_RATIO, diagnose
from offbeat.wire.job_status import GONE, Coordination, ExclusionCause, JobStatus, JobWorker, WorkerState

TIME_PARTS: Final = tuple(
    one.name.removesuffix("_s")
    for one in fields(StepTimes)
    if one.name.endswith("_s") and one.name != "wall_s"
)
"""The named parts of a worker's wall time; they sum to it."""

RECENT: Final = 16
_COMPARED_MIN: Final = 3  # compute times: the first one includes what is built at first use
_SLOW_LIMIT: Final = 8
_TYPICAL_ROUNDS: Final = 4
_CONNECTION_TIMES: Final = 8
_CAUSES: Final[dict[str, ExclusionCause]] = {
    "compute time": "compute",
    "its line is slow": "line",
    "cannot reach": "unreachable",
    "did not answer": "silent",
    "was not ready in time": "late",
}
_times_of_parts = attrgetter(*(f"{part}_s" for part in TIME_PARTS))


def sum_parts(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Return the sum of each part of the steps' wall times in seconds, by `TIME_PARTS`."""
    totals = map(sum, zip(*map(_times_of_parts, steps), strict=True)) if steps else [0.0] * len(TIME_PARTS)
    return dict(zip(TIME_PARTS, totals, strict=True))


@dataclass(slots=True, kw_only=True)
class _Worker:
    """What is known of one worker; see `JobWorker`.

    Attributes:
        round: of its last Ready; None before the first in the group.
        may_start: of its last StepPermit.
        averaging_steps: how many steps it makes until it waits for its next averaging; None if unknown.
        slow_count: see the module's docstring.
        slow_from_step: the step after the last one that was not slow with the counter at 0, or the first one.
        timed: wall, wait and compute time and samples of the steps of late.
        skipped_round: the last round that was closed without it.
    """

    state: WorkerState = "joined"
    why: str = ""
    host: str = ""
    peer: str = ""
    is_newcomer: bool = False
    is_excluded: bool = False
    state_step: int | None = None
    step: int = 0
    epoch: int = 0
    round: int | None = None
    may_start: bool = True
    averaging_steps: int | None = None
    compute_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    slow_count: int = 0
    slow_from_step: int | None = None
    is_slow: bool = False
    timed: deque[tuple[float, float, float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    steps: int = 0
    samples: int = 0
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PARTS, 0.0))
    exclusions: Counter[str] = field(default_factory=Counter)
    skipped_rounds: int = 0
    skipped_round: int | None = None

    def end(self, state: WorkerState, why: str) -> None:
        """Note that the worker is gone."""
        self.state, self.why, self.state_step = state, why, self.step

    def median_s(self) -> float | None:
        """Return the median of its compute times of late, None if there are too few."""
        return median(self.compute_s) if len(self.compute_s) >= _COMPARED_MIN else None


class JobView:
    """Derives the state of a job from the entries of its run log; see the module's docstring.

    For one thread. It keeps no entry, and no more than some hundred bytes for each worker.

    Attributes:
        entries: how many were added.
    """

    def __init__(self) -> None:
        self.entries = 0
        self._now_s = 0.0
        self._strategy = ""
        self._world = 0
        self._coordination: Coordination = "rounds"
        self._is_complete = False
        self._abort_reason = ""
        self._workers: dict[int, _Worker] = {}
        self._members: tuple[int, ...] | None = None
        self._halt_reason = ""
        self._connections: dict[tuple[int, int], deque[float]] = {}  # pair of members: times in seconds
        self._connections_generation = 0  # of the group that has these connections
        self._typical_s: float | None = None
        self._reports_to_typical = 0  # compute times until `_typical_s` is computed again

    # Entries ---------------------------------------------------------------------------------------------

    def add(self, entry: Event | Action) -> None:
        """Add the next entry of the log."""
        self.entries += 1
        self._now_s = getattr(entry, "now_s", self._now_s)
        match entry:
            case Ready():
                self._on_ready(entry)
            case AssignBlocks() | Tick():
                pass
            case StepPermit():
                self._coordination = "clocks"
                worker = self._worker(entry.worker)
                worker.may_start, worker.why = entry.may_start, "" if entry.may_start else entry.reason
            case StepFinished():
                worker = self._train(entry)
                if entry.clock is not None:
                    self._add_compute(worker, entry.compute_s)
            case StepsTimed():
                self._on_steps_timed(entry)
            case SamplesRequested() | EpochEnded():
                worker = self._worker(entry.worker)
                worker.epoch = entry.epoch
                if isinstance(entry, EpochEnded) and entry.is_complete:
                    worker.averaging_steps = 0
            case AverageModels():
                self._on_average_models(entry)
            case SkipRound():
                worker = self._worker(entry.worker)
                worker.skipped_rounds += 1
                worker.skipped_round = entry.round
            case Joined():
                self._on_joined(entry)
            case Halt():
                self._halt_reason = entry.reason
            case Halted():
                if entry.has_state:
                    self._worker(entry.worker).step = entry.step
            case Group():
                self._on_group(entry)
            case _:
                self._add_end(entry)

    def _add_end(self, entry: Event | Action) -> None:
        """Add an entry about the end of a worker or of the job; any other is ignored."""
        match entry:
            case Preempted():
                worker = self._worker(entry.worker)
                worker.state, worker.why, worker.step = "preempted", f"it was sent {entry.signal}", entry.step
            case Finished():
                worker = self._worker(entry.worker)
                worker.state, worker.why, worker.step = "finished", "", entry.step
                worker.state_step, worker.epoch = entry.step, entry.epoch
            case Left():
                worker = self._worker(entry.worker)
                worker.step = entry.step
                if worker.state != "finished":
                    worker.end("left", worker.why)
            case Lost():
                self._worker(entry.worker).end("lost", entry.cause)
            case Failed():
                worker = self._worker(entry.worker)
                worker.step = entry.step
                worker.end("failed", entry.error)
            case RejectPeer():
                for worker in self._workers.values():
                    if worker.peer == entry.peer and worker.state not in GONE:
                        worker.end("rejected", entry.reason)
            case JobComplete():
                self._is_complete = True
            case AbortJob():
                self._abort_reason = entry.reason
            case _:
                pass

    def _worker(self, worker: int) -> _Worker:
        found = self._workers.get(worker)
        if found is None:
            found = self._workers[worker] = _Worker()
        return found

    def _train(self, event: Ready | StepFinished) -> _Worker:
        worker = self._worker(event.worker)
        worker.step, worker.epoch = event.step, event.epoch
        if worker.state == "joined":
            worker.state, worker.slow_from_step = "training", event.step
        return worker

    def _on_joined(self, event: Joined) -> None:
        if event.worker in self._workers and self._workers[event.worker].peer:
            return  # a second worker claims the id, and is rejected
        worker = self._worker(event.worker)
        worker.host, worker.peer = event.location.rpartition(", process ")[0], event.peer
        worker.is_newcomer = event.worker >= event.world
        self._strategy, self._world = event.strategy, event.world

    def _on_ready(self, event: Ready) -> None:
        worker = self._train(event)
        worker.round = event.round
        if worker.averaging_steps:
            worker.averaging_steps -= 1
        self._add_compute(worker, event.compute_s)
        if event.line_s:
            self._add_line_times(event)

    def _add_line_times(self, event: Ready) -> None:
        if event.generation > self._connections_generation:
            self._connections.clear()  # the neighbours are others
            self._connections_generation = event.generation
        for peer, time_s in event.line_s:
            pair = (event.worker, peer) if event.worker < peer else (peer, event.worker)
            times_s = self._connections.get(pair)
            if times_s is None:
                times_s = self._connections[pair] = deque(maxlen=_CONNECTION_TIMES)
            times_s.append(time_s)

    def _add_compute(self, worker: _Worker, compute_s: float) -> None:
        if not compute_s:
            return  # it took part without a batch
        worker.compute_s.append(compute_s)
        self._reports_to_typical -= 1
        if self._reports_to_typical < 0:
            self._reports_to_typical = _TYPICAL_ROUNDS * len(self._workers)
            medians = [one.median_s() for one in self._workers.values() if one.state not in GONE]
            known = [time_s for time_s in medians if time_s is not None]
            self._typical_s = median_low(known) if len(known) > 1 else None
        if self._typical_s is None:
            return
        if compute_s >= SLOW_RATIO * self._typical_s:
            worker.slow_count = min(worker.slow_count + 1, _SLOW_LIMIT)
            worker.is_slow |= worker.slow_count == _SLOW_LIMIT
            return
        worker.slow_count = max(worker.slow_count - 1, 0)
        if not worker.slow_count:
            worker.is_slow, worker.slow_from_step = False, worker.step + 1

    def _on_steps_timed(self, event: StepsTimed) -> None:
        worker = self._worker(event.worker)
        worker.steps += len(event.steps)
        for step in event.steps:
            worker.samples += step.samples
            worker.timed.append((step.wall_s, step.wait_s, step.compute_s, step.samples))
        for part, time_s in sum_parts(event.steps).items():
            worker.parts_s[part] += time_s

    def _on_average_models(self, action: AverageModels) -> None:
        self._coordination = "models"
        for member, steps in zip(action.members, action.steps, strict=True):
            self._worker(member).averaging_steps = steps

    def _on_group(self, action: Group) -> None:
        self._coordination, self._members = "rounds", action.members
        for number, worker in self._workers.items():
            if worker.state in GONE or worker.state == "finished":
                continue
            if number not in action.members:
                if not worker.is_excluded and worker.round is not None:
                    self._exclude(number, worker, action)
            elif worker.is_excluded or number in action.joining:
                worker.is_excluded, worker.why, worker.state_step = False, "", action.step
                worker.round = None  # it has not been Ready in this group

    def _exclude(self, number: int, worker: _Worker, action: Group) -> None:
        worker.is_excluded, worker.state_step = True, action.step
        worker.why = _clause_about(number, action.reason) or _clause_about(number, self._halt_reason)
        cause = next((cause for words, cause in _CAUSES.items() if words in worker.why), "other")
        worker.exclusions[cause] += 1

    # State -----------------------------------------------------------------------------------------------

    def status(self) -> JobStatus:
        """Return the state of the job after the last entry; it costs some microseconds a worker."""
        members = self._present_members()
        workers = tuple(self._job_workers(frozenset(members)))
        training = [one for one in workers if one.state in ("training", "waiting", "preempted")]
        if not training:
            training = [one for one in workers if one.state == "finished" and not one.is_excluded]
        steps_s = [one.step_s for one in training if one.step_s is not None]
        rates = [one.samples_per_s for one in training if one.samples_per_s is not None]
        exclusions: Counter[str] = Counter()
        for one in workers:
            exclusions.update(one.exclusions)
        return JobStatus(
            now_s=self._now_s,
            strategy=self._strategy,
            world=self._world,
            coordination=self._coordination,
            is_complete=self._is_complete,
            abort_reason=self._abort_reason,
            step=max((one.step for one in workers), default=0),
            epoch=max((one.epoch for one in workers), default=0),
            step_s=median(steps_s) if steps_s else None,
            samples_per_s=sum(rates) if rates else None,
            members=members,
            exclusions=dict(exclusions),
            deaths=sum(one.state in ("lost", "failed", "rejected") for one in workers),
            newcomers=sum(one.is_newcomer for one in workers),
            workers=workers,
            diagnosis=diagnose(
                workers,
                world=self._world,
                coordination=self._coordination,
                abort_reason=self._abort_reason,
            ),
        )

    def _present_members(self) -> tuple[int, ...]:
        if self._coordination != "rounds":
            return ()
        here = {number: one for number, one in self._workers.items() if one.state not in GONE}
        if self._members is not None:
            return tuple(number for number in self._members if number in here)
        rounds = {number: one.round for number, one in here.items() if one.round is not None}
        newest = max(rounds.values(), default=0)
        return tuple(sorted(number for number, round_ in rounds.items() if round_ >= newest - 1))

    def _job_workers(self, members: frozenset[int]) -> Iterator[JobWorker]:
        working = [self._workers[one].round for one in members if self._workers[one].state != "finished"]
        rounds = [round_ for round_ in working if round_ is not None]
        slowest_round, newest_round = min(rounds, default=0), max(rounds, default=0)
        compute_s = {number: one.median_s() for number, one in self._workers.items()}
        compared = {
            number: time_s
            for number, time_s in compute_s.items()
            if time_s is not None and self._workers[number].state not in GONE
        }
        if len(compared) < 2:
            compared.clear()
        fastest_s = min(compared.values(), default=0.0)
        median_s = median_low(compared.values()) if compared else 0.0
        lines_s = self._lines_s()
        for number, worker in sorted(self._workers.items()):
            yield JobWorker(
                worker=number,
                state=self._state_of(number, worker, members, slowest_round),
                why=worker.why,
                host=worker.host,
                is_newcomer=worker.is_newcomer,
                is_excluded=worker.is_excluded,
                state_step=worker.state_step,
                step=worker.step,
                epoch=worker.epoch,
                compute_s=compute_s[number],
                compute_ratio=compared[number] / median_s if number in compared else None,
                score=fastest_s / compared[number] if number in compared else None,
                slow_since_step=worker.slow_from_step if worker.is_slow else None,
                **_recent_times(worker),
                steps=worker.steps,
                samples=worker.samples,
                parts_s={part: time_s for part, time_s in worker.parts_s.items() if time_s},
                line_s=lines_s.get(number),
                exclusions=dict(worker.exclusions),
                skipped_rounds=worker.skipped_rounds,
                is_skipped=worker.skipped_round is not None and worker.skipped_round > newest_round - RECENT,
            )

    def _state_of(
        self, number: int, worker: _Worker, members: frozenset[int], slowest_round: int
    ) -> WorkerState:
        if worker.state != "training":
            return worker.state
        if worker.is_excluded:
            return "excluded"
        if self._coordination == "clocks":
            is_waiting = not worker.may_start
        elif self._coordination == "models":
            is_waiting = worker.averaging_steps == 0
        else:
            is_waiting = number in members and worker.round is not None and worker.round > slowest_round
        return "waiting" if is_waiting else "training"

    def _lines_s(self) -> dict[int, float]:
        """Return the median time on the best connection of each worker, in seconds."""
        best: dict[int, float] = {}
        for pair, times in self._connections.items():
            time_s = median(times)
            for number in pair:
                best[number] = min(time_s, best.get(number, time_s))
        return best


def _recent_times(worker: _Worker) -> dict[str, float | None]:
    if not worker.timed:
        return {}
    wall_s, wait_s, compute_s, samples = map(sum, zip(*worker.timed, strict=True))
    return {
        "wait_share": wait_s / wall_s if wall_s else None,
        "compute_share": compute_s / wall_s if wall_s else None,
        "step_s": median([step[0] for step in worker.timed]),
        "samples_per_s": samples / wall_s if wall_s and samples else None,
    }


def _clause_about(worker: int, reason: str) -> str:
    """Return what a reason says about one worker."""
    found = re.search(rf"(?:^|; )worker {worker}\b:? ?(.*?)(?=; worker \d|$)", reason)
    return found[1] if found else ""
