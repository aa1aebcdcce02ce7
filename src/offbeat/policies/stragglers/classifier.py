"""Classifies stragglers: compute times against a threshold profiled from the fast workers, and a counter.

A component of group policies, not a policy itself: they pass it every computed iteration and act on its
verdicts. It knows no groups, does not decide which workers take part, and judges compute times only, because
a worker that waits for a slow one would otherwise look equally slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from offbeat.errors import ProtocolError
from offbeat.policies.stragglers import calibration
from offbeat.policies.stragglers.throughput_gate import ThroughputGate, break_even_factor

ITERATIONS_PER_EPOCH_ASSUMED = 1000
THRESHOLD_FACTOR_MAX = 2.0
PAPER_LIMIT = 10
_RATIOS_KEPT = 512
_LAST_KEPT = 20
_SLOW_ITERATION_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class ClassChange:
    """A change of a worker's class.

    Attributes:
        worker: the worker's id.
        is_straggler: its class from now on.
        epoch: the epoch of the observation that decided it.
        iteration: that observation's iteration in its epoch; both are the observed worker's own counts.
        reason: one line with the numbers.
    """

    worker: int
    is_straggler: bool
    epoch: int
    iteration: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Threshold:
    threshold_s: float
    pace_s: float | None  # mean of the window's minima; None for a static threshold
    epoch: int


@dataclass(slots=True)
class _WorkerTimes:
    count: int = 0
    straggler: bool = False
    takes_part: bool = False  # its iterations count for profiles
    epoch: int = -1
    iteration: int = -1
    last_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST_KEPT))
    # Times relative to the pace since the counter was last 0; they count as normal once it is 0 again.
    held: deque[float] = field(default_factory=lambda: deque(maxlen=_RATIOS_KEPT))


@dataclass
class _Window:
    """A profile under way: iterations `first` to `last` of an epoch.

    Attributes:
        before: the threshold that judges until the last of them.
        pending: workers whose times of its last iteration have not come.
        times_s: per iteration, each normal worker's time in seconds.
        waiting: observations that the new threshold will judge: worker, iteration, time in seconds.
    """

    epoch: int
    first: int
    last: int
    before: _Threshold | None
    pending: set[int]
    times_s: list[dict[int, float]]
    waiting: list[tuple[int, int, float]] = field(default_factory=list)


class StragglerClassifier:
    """Classes workers as normal or straggler by their compute times, in both directions.

    In the first `n_profile` iterations of every epoch, the fastest normal worker's time is recorded; the mean
    of these minima, times k, is the epoch's threshold. Minima of more than twice their median do not count:
    the first steps of a process, which load and compile, are slow on all workers. A time above the threshold
    raises the worker's counter by one, any other lowers it, within 0 and `limit`. A normal worker whose
    counter reaches `limit` becomes a straggler; a straggler whose counter has fallen to `limit` -
    `recover_gap` becomes normal.

    Until an epoch's threshold is known, the previous one judges (`window_judge="previous"`) or none does; the
    iteration that completes the profile is already judged by the new one. So a worker that is slow from the
    start is found in iteration n_profile - 1 + limit of the first epoch and after `limit` iterations later.
    An observation that has to wait for the profile is judged when the last normal worker's time has come; the
    order in which the workers of an iteration are observed does not matter. Where workers make as many steps
    as they can, an epoch may have too few iterations of a slow one: a profile also ends with its epoch.

    *Observed workers.* Stragglers are still observed, at their own pace and with their own iteration counts;
    the newest threshold judges them. No profile waits for them: it consists of normal workers only. A worker
    that has recovered, or was added during the run, counts for profiles again from its first observation
    within one iteration of the others. The caller decides which workers take part: "epoch_window" monitoring
    means to observe stragglers only while `is_profiled` returns True.

    *A slowdown of all workers* makes no stragglers. If a classification would bring the workers found in this
    epoch, including those about to be found, above `max_straggler_fraction` of all workers, none is classed:
    those found in this epoch become normal again, counters restart at 0, and the next `n_profile` iterations
    are profiled at once. This happens only once an epoch: a worker above the new threshold as well is slower
    than some other. It happens always if no normal worker would be left.

    *Automatic* (`k="auto"`): k, n_profile and limit follow the measured times such that a normal worker is
    classed with a probability of at most `false_alarm` an epoch, and a slow one as early as that allows; the
    arguments `n_profile` and `limit` are not used. `offbeat.policies.stragglers.calibration` has the
    derivation. k is at most 2 unless such times are too common among normal workers, and at least the
    break-even factor (`offbeat.policies.stragglers.throughput_gate.break_even_factor`): below that, excluding
    a worker costs more than waiting for it. The times are those of the first profile, without workers that
    are clearly slow in all of it, later the last 512 judged ones whose counters came back to 0. With fewer
    times than any bound needs, k is 2 and limit 10. Limits change with thresholds only.

    *The gate* (`gate="throughput"`) decides when a normal worker's counter is at the limit: of all such
    workers, those are classed whose exclusion raises the predicted throughput by more than `gate_margin`,
    from the last 20 times of each; if there are none, all stay and are weighed again at the next judgement of
    one of them. In return a given k is lowered to the break-even factor, (1 + gate_margin) W / (W - 1), so
    that the counter covers every worker whose exclusion could pay: 1.3 times as slow is worth it among 8
    workers, not among 4. The gate never makes a straggler normal; its counter does.

    Source: dynamic worker classification (the paper's algorithm 1 and sections 4.2 and 4.3). The algorithm
    cannot be run as printed. Deviations: only the class decides which workers are excluded, not the counter;
    the time is compute time alone; an equal time counts as fast; counters stay within 0 and limit; stragglers
    are still timed; profiles need no stragglers and no slow start; and automatic parameters, gate and the
    guard against slowdowns of all workers are additions. With `threshold_s`, the threshold of dynamic partial
    all-reduce (ICCE 2023): a constant, and nothing is profiled.

    Args:
        n_profile: iterations in a profile, at least 1.
        k: the threshold as a multiple of the pace of the fastest, above 1, or "auto".
        limit: judged iterations from counter 0 until a slow worker is found, at least 1 (10: the paper's
            figure 2).
        limit_ratio: the limit as a share of `iterations_per_epoch` instead, above 0 and at most 1; at least 2
            then (the paper's alternative, without a number).
        recover_gap: how far the counter falls until a straggler is normal again, 1 to limit.
        window_judge: which threshold judges until the epoch's own is known: "previous" or "none".
        skip_first_iters: iterations of each epoch that are neither profiled nor judged, at least 0.
        max_straggler_fraction: a larger share of all workers slow at once is a slowdown of all workers; above
            0 and at most 1.
        threshold_s: a constant threshold in seconds, above 0, instead of a profiled one.
        gate: None, or "throughput".
        gate_margin: the gain that the gate requires, as a share, at least 0; also the margin in the least
            automatic k.
        false_alarm: the bound for automatic parameters, per worker and epoch, above 0 and below 1.
        iterations_per_epoch: at least 1; None uses the length of the epoch before, and 1000 in the first
            epoch, for automatic parameters.

    Raises:
        ValueError: an argument out of range, or two that contradict each other.

    Size: a third of the lines are this text and the arguments. The rest is one algorithm: an observation may
    complete the profile, which sets the threshold, limit and counters, judges what waited, and may start the
    profile again; all of it reads the same records of all workers.
    """

    def __init__(
        self,
        *,
        n_profile: int = 5,
        k: float | Literal["auto"] = 2.0,
        limit: int = PAPER_LIMIT,
        limit_ratio: float | None = None,
        recover_gap: int = 1,
        window_judge: Literal["previous", "none"] = "previous",
        skip_first_iters: int = 0,
        max_straggler_fraction: float = 0.5,
        threshold_s: float | None = None,
        gate: Literal["throughput"] | None = None,
        gate_margin: float = 0.05,
        false_alarm: float = 1e-3,
        iterations_per_epoch: int | None = None,
    ) -> None:
        if iterations_per_epoch is not None and iterations_per_epoch < 1:
            raise ValueError(f"expected at least 1 iteration per epoch, got {iterations_per_epoch}")
        if limit_ratio is not None:
            limit = _limit_of(limit_ratio, iterations_per_epoch)
        _check(
            n_profile,
            k,
            limit,
            recover_gap,
            window_judge,
            skip_first_iters,
            max_straggler_fraction,
            false_alarm,
        )
        if threshold_s is not None and not (math.isfinite(threshold_s) and threshold_s > 0):
            raise ValueError(f"expected a threshold of more than 0 s, got {threshold_s} s")
        if threshold_s is not None and k == "auto":
            raise ValueError("expected either threshold_s or k='auto', got both: leave one of them out")
        if gate not in (None, "throughput"):
            raise ValueError(f"expected the gate None or 'throughput', got {gate!r}")
        self._n_profile = n_profile
        self._k = k
        self._limit = limit
        self._recover_gap = recover_gap
        self._window_judge = window_judge
        self._skip_first_iters = skip_first_iters
        self._max_straggler_fraction = max_straggler_fraction
        self._gate_margin = gate_margin
        self._gate = ThroughputGate(gate_margin)
        self._is_gated = gate == "throughput"
        self._false_alarm = false_alarm
        self._iterations_per_epoch = iterations_per_epoch
        self._iterations_seen = ITERATIONS_PER_EPOCH_ASSUMED  # in the epoch before this
        self._is_static = threshold_s is not None
        self._newest: _Threshold | None = None
        if threshold_s is not None:
            self._newest = _Threshold(threshold_s=threshold_s, pace_s=None, epoch=-1)
        self._previous: _Threshold | None = None  # of the epoch before, for late observations
        self._workers: dict[int, _WorkerTimes] = {}
        self._front: tuple[int, int] | None = None  # the latest epoch and iteration of workers in profiles
        self._window: _Window | None = None
        self._found_this_epoch: set[int] = set()  # classed in the epoch of the front
        self._may_profile_again = True
        self._ratios: deque[float] = deque(maxlen=_RATIOS_KEPT)

    @property
    def stragglers(self) -> frozenset[int]:
        """The current stragglers; never all workers."""
        return frozenset(worker for worker, record in self._workers.items() if record.straggler)

    @property
    def limit(self) -> int:
        """The current limit of the counters."""
        return self._limit

    @property
    def recent_compute_s(self) -> dict[int, list[float]]:
        """Compute times of each worker's last iterations, in seconds, the newest last.

        20 at most, and none without the gate, which alone needs them.
        """
        return {worker: list(record.last_s) for worker, record in self._workers.items()}

    def threshold_s(self, epoch: int) -> float | None:
        """Return the threshold that was profiled in `epoch`, in seconds.

        None where it is not known yet, and for all epochs but the newest two.
        """
        for threshold in (self._newest, self._previous):
            if threshold is not None and (self._is_static or threshold.epoch == epoch):
                return threshold.threshold_s
        return None

    def time_to_classify_s(self, epoch: int) -> float | None:
        """Return how long a worker just above the threshold delays others until it is classed, in seconds.

        By the threshold of `epoch`, or the newest; None while there is none. The pace within a static
        threshold is unknown, so all of it counts as waiting.
        """
        threshold = self._newest
        if self._previous is not None and self._previous.epoch == epoch:
            threshold = self._previous
        return (
            None if threshold is None else self._limit * (threshold.threshold_s - (threshold.pace_s or 0.0))
        )

    def is_profiled(self, iteration: int) -> bool:
        """Return whether this iteration of the current or next epoch is profiled."""
        if self._is_static:
            return False
        first = self._skip_first_iters
        if first <= iteration < first + self._n_profile:
            return True
        return self._window is not None and self._window.first <= iteration <= self._window.last

    def add(self, worker: int) -> None:
        """Add a worker, as a normal one.

        Raises:
            ProtocolError: a worker that was added before.
        """
        if worker in self._workers:
            raise ProtocolError(f"expected a new worker, got worker {worker} a second time")
        self._workers[worker] = _WorkerTimes(takes_part=self._front is None)

    def remove(self, worker: int) -> list[ClassChange]:
        """Remove a worker, and return the resulting changes of class of other workers.

        A profile that lacked only its times is complete. If only stragglers are left, they are normal again,
        because at least one worker has to take part.

        Raises:
            ProtocolError: an unknown worker.
        """
        if worker not in self._workers:
            raise ProtocolError(f"expected a worker that was added, got worker {worker}")
        del self._workers[worker]
        self._found_this_epoch.discard(worker)
        if self._window is not None:
            self._leave_window(worker)
            self._window.waiting = [
                observation for observation in self._window.waiting if observation[0] != worker
            ]
        if self._workers and all(record.straggler for record in self._workers.values()):
            self._front = self._window = None
            if not self._is_static:
                self._newest = self._previous = None
            reason = f"worker {worker}, the last one that was not slow, is gone"
            return [
                self._make_normal(other, record.epoch, record.iteration, reason, count=0)
                for other, record in self._workers.items()
            ]
        return self._close_window()

    def observe_next(self, worker: int, *, epoch: int, compute_s: float) -> list[ClassChange]:
        """Judge a worker's next iteration of an epoch, where iterations are its own steps; see `observe`."""
        record = self._workers.get(worker)
        iteration = record.iteration + 1 if record is not None and record.epoch == epoch else 0
        return self.observe(worker, epoch=epoch, iteration=iteration, compute_s=compute_s)

    def observe(self, worker: int, *, epoch: int, iteration: int, compute_s: float) -> list[ClassChange]:
        """Judge one computed iteration, and return the resulting changes of class.

        Args:
            worker: the worker that computed it.
            epoch: the worker's epoch, from 0.
            iteration: the worker's iteration in its epoch, from 0.
            compute_s: forward and backward pass, in seconds, without waiting or exchanging.

        Raises:
            ProtocolError: an unknown worker, a negative count, or an impossible time; nothing changes.
        """
        record = self._workers.get(worker)
        if record is None or epoch < 0 or iteration < 0 or not 0 <= compute_s < math.inf:
            raise ProtocolError(
                f"{self._expectation(worker, epoch, iteration)}, "
                f"got {compute_s} s in iteration {iteration} of epoch {epoch} of worker {worker}"
            )
        if self._is_gated:
            record.last_s.append(compute_s)
        record.epoch, record.iteration = epoch, iteration
        if not record.straggler and not record.takes_part:
            record.takes_part = self._is_at_the_front(epoch, iteration)
            window = self._window
            if record.takes_part and window is not None and (epoch, iteration) < (window.epoch, window.last):
                window.pending.add(worker)
        if not record.takes_part:
            return self._judge(worker, epoch, iteration, compute_s, self._newest)
        changes: list[ClassChange] = []
        if self._front is None or self._front < (epoch, iteration):
            changes = self._advance(epoch, iteration)
        return changes + self._judge_by_epoch(worker, epoch, iteration, compute_s)

    def _judge_by_epoch(self, worker: int, epoch: int, iteration: int, compute_s: float) -> list[ClassChange]:
        """Note a time for the profile under way, and judge it by the threshold of its epoch."""
        window = self._window
        if self._is_static:
            threshold = self._newest if iteration >= self._skip_first_iters else None
            return self._judge(worker, epoch, iteration, compute_s, threshold)
        if window is None:
            threshold = self._newest
            if threshold is not None and threshold.epoch > epoch:
                threshold = self._previous
            return self._judge(worker, epoch, iteration, compute_s, threshold)
        if epoch < window.epoch:
            return self._judge(worker, epoch, iteration, compute_s, self._newest)
        if iteration < window.first:
            return []
        if iteration <= window.last:
            window.times_s[iteration - window.first][worker] = compute_s
        if iteration >= window.last:
            window.pending.discard(worker)
            window.waiting.append((worker, iteration, compute_s))
            return self._close_window()
        return self._judge(worker, epoch, iteration, compute_s, window.before)

    def _expectation(self, worker: int, epoch: int, iteration: int) -> str:
        if worker not in self._workers:
            return "expected a worker that was added"
        if epoch < 0 or iteration < 0:
            return "expected epochs and iterations from 0"
        return "expected a finite time of at least 0 s"

    # Profiles --------------------------------------------------------------------------------------------

    def _is_at_the_front(self, epoch: int, iteration: int) -> bool:
        if self._front is None or not any(record.takes_part for record in self._workers.values()):
            return True
        front_epoch, front_iteration = self._front
        if epoch == front_epoch:
            return abs(iteration - front_iteration) <= 1
        return (epoch, iteration) == (front_epoch + 1, 0)

    def _advance(self, epoch: int, iteration: int) -> list[ClassChange]:
        """Advance the front to a new iteration; a new epoch ends the window under way, and opens one."""
        changes: list[ClassChange] = []
        if self._front is None or epoch > self._front[0]:
            if self._window is not None:
                self._window.pending.clear()
                changes = self._close_window()
            if self._front is not None and self._iterations_per_epoch is None and self._front[0] == epoch - 1:
                self._iterations_seen = self._front[1] + 1
            self._found_this_epoch.clear()
            self._may_profile_again = True
            self._front = (epoch, iteration)
            self._open_window(epoch, max(iteration, self._skip_first_iters), self._newest)
        self._front = (epoch, iteration)
        return changes

    def _open_window(self, epoch: int, first: int, before: _Threshold | None) -> None:
        if self._is_static:
            return
        if self._k == "auto":
            self._n_profile = calibration.profile_iterations(
                workers=max(1, len(self._workers) - 1),  # one may be slow
                judged=self._judged_per_epoch(),
                bound=self._false_alarm,
            )
        last = first + self._n_profile - 1
        self._window = _Window(
            epoch=epoch,
            first=first,
            last=last,
            before=before if self._window_judge == "previous" else None,
            pending={
                worker
                for worker, record in self._workers.items()
                if record.takes_part and (record.epoch, record.iteration) < (epoch, last)
            },
            times_s=[{} for _ in range(self._n_profile)],
        )

    def _close_window(self) -> list[ClassChange]:
        """Set the threshold once all workers of the profile are through, and judge waiting observations."""
        window = self._window
        if window is None or window.pending:
            return []
        iterations_s = _usual_iterations([times_s for times_s in window.times_s if times_s])
        if not iterations_s:
            return []
        self._window = None
        minima_s = [min(times_s.values()) for times_s in iterations_s]
        pace_s = sum(minima_s) / len(minima_s)
        k = self._calibrate(iterations_s, pace_s, minima_s) if self._k == "auto" else self._k
        if self._is_gated and self._k != "auto":
            k = min(k, break_even_factor(len(self._workers), self._gate_margin))
        self._previous = self._newest
        self._newest = _Threshold(threshold_s=k * pace_s, pace_s=pace_s, epoch=window.epoch)
        verdicts: list[ClassChange] = []
        for worker, iteration, compute_s in window.waiting:
            if self._newest is not None and self._workers[worker].takes_part:
                verdicts += self._judge(worker, window.epoch, iteration, compute_s, self._newest)
        return verdicts

    def _judged_per_epoch(self) -> int:
        """Return the number of judged iterations in an epoch."""
        return self._iterations_per_epoch or self._iterations_seen

    def _calibrate(
        self, iterations_s: Sequence[Mapping[int, float]], pace_s: float, minima_s: Sequence[float]
    ) -> float:
        """Return k (a step is slow above k times the pace), and set `limit`, the counter that excludes."""
        k_min = break_even_factor(len(self._workers), self._gate_margin)
        if not math.isfinite(k_min):  # a single worker is never left out
            k_min = THRESHOLD_FACTOR_MAX
        margin_factor = 1.0
        if self._ratios:
            margin_factor = calibration.pace_margin_factor(minima_s)
        elif pace_s > 0:
            ratios: dict[int, list[float]] = {}
            for times_s in iterations_s:
                for worker, time_s in times_s.items():
                    ratios.setdefault(worker, []).append(time_s / pace_s)
            self._ratios.extend(
                calibration.drop_slow_workers(list(ratios.values()), k_min=k_min, k_max=THRESHOLD_FACTOR_MAX)
            )
        choice = calibration.choose_threshold(
            self._ratios,
            judged=self._judged_per_epoch(),
            bound=self._false_alarm,
            k_min=k_min / margin_factor,
            k_max=THRESHOLD_FACTOR_MAX / margin_factor,
        )
        if choice is None:
            choice = calibration.CalibratedThreshold(
                k=max(THRESHOLD_FACTOR_MAX, k_min) / margin_factor, limit=PAPER_LIMIT
            )
        self._limit = choice.limit
        for record in self._workers.values():
            record.count = choice.limit if record.straggler else min(record.count, choice.limit - 1)
        return choice.k * margin_factor

    # Judgements ------------------------------------------------------------------------------------------

    def _judge(
        self, worker: int, epoch: int, iteration: int, compute_s: float, threshold: _Threshold | None
    ) -> list[ClassChange]:
        if threshold is None:
            return []
        record = self._workers[worker]
        if compute_s > threshold.threshold_s:
            record.count = min(record.count + 1, self._limit)
        elif record.count:
            record.count = min(record.count - 1, self._limit)  # which may have been lowered
        if record.straggler:
            if record.count > self._limit - min(self._recover_gap, self._limit):
                return []
            reason = f"compute time at or below {_threshold_text(threshold)} again: {compute_s:.3g} s"
            return [self._make_normal(worker, epoch, iteration, reason, count=record.count)]
        if self._k == "auto" and threshold.pace_s and threshold.epoch == epoch:
            record.held.append(compute_s / threshold.pace_s)
        if record.count == 0 and record.held:
            self._ratios.extend(record.held)
            record.held.clear()
        if record.count == self._limit:
            return self._detect(worker, epoch, iteration, threshold)
        return []

    def _detect(self, worker: int, epoch: int, iteration: int, threshold: _Threshold) -> list[ClassChange]:
        leaving = {worker}
        gain = ""
        if self._is_gated:
            last_s, stragglers = self.recent_compute_s, self.stragglers
            suspects = [
                other
                for other, record in self._workers.items()
                if not record.straggler and record.count == self._limit
            ]
            leaving = set(self._gate.workers_to_exclude(last_s, excluded=stragglers, candidates=suspects))
            if not leaving:
                return []
            before, after = (
                self._gate.batches_per_s(last_s, excluded) for excluded in (stragglers, stragglers | leaving)
            )
            gain = f"; without it {after:.3g} instead of {before:.3g} batches/s"
        if self._is_general_slowdown(leaving):
            return self._profile_again(epoch, iteration, threshold)
        reason = (
            f"compute time above {_threshold_text(threshold)} in {self._limit} more judged iterations "
            f"than not{gain}"
        )
        return [self._make_straggler(other, epoch, iteration, reason) for other in sorted(leaving)]

    def _is_general_slowdown(self, leaving: set[int]) -> bool:
        """Return whether so many workers are slow that this is a slowdown of all workers.

        That is, all are slow, or more than the allowed share of them and profiling again is still allowed.

        Args:
            leaving: workers about to be classed as stragglers; they count as slow, and so do normal workers
                whose counter is near the limit.
        """
        # Counters of workers that became slow together differ by the iteration or two that they are apart.
        near = max(self._limit - 2, (self._limit + 1) // 2)
        slow = leaving | {
            other for other, record in self._workers.items() if not record.straggler and record.count >= near
        }
        if len(slow | self.stragglers) == len(self._workers):
            return True
        share = self._max_straggler_fraction * len(self._workers)
        return self._may_profile_again and len(slow | self._found_this_epoch) > share

    def _profile_again(self, epoch: int, iteration: int, threshold: _Threshold) -> list[ClassChange]:
        """Make workers classed in this epoch normal again, and profile again."""
        reason = (
            f"more than {self._max_straggler_fraction:.0%} of {len(self._workers)} workers above "
            f"{_threshold_text(threshold)} in epoch {epoch}: all workers are slower, "
            "the threshold is profiled again"
        )
        reverted = sorted(self._found_this_epoch) if self._may_profile_again else []
        self._may_profile_again = False
        self._found_this_epoch.clear()
        for record in self._workers.values():
            if not record.straggler:
                record.count = 0
                record.held.clear()
        verdicts = [self._make_normal(other, epoch, iteration, reason, count=0) for other in reverted]
        if not self._is_static:
            assert self._front is not None
            self._newest = self._previous = None
            front_epoch, front_iteration = self._front
            self._open_window(front_epoch, front_iteration + 1, None)
        return verdicts

    def _make_straggler(self, worker: int, epoch: int, iteration: int, reason: str) -> ClassChange:
        record = self._workers[worker]
        record.straggler, record.takes_part, record.count = True, False, self._limit
        self._leave_window(worker)
        record.held.clear()
        self._found_this_epoch.add(worker)
        return ClassChange(worker=worker, is_straggler=True, epoch=epoch, iteration=iteration, reason=reason)

    def _make_normal(
        self, worker: int, epoch: int, iteration: int, reason: str, *, count: int
    ) -> ClassChange:
        record = self._workers[worker]
        record.straggler, record.takes_part, record.count = False, False, count
        self._leave_window(worker)
        self._found_this_epoch.discard(worker)
        return ClassChange(worker=worker, is_straggler=False, epoch=epoch, iteration=iteration, reason=reason)

    def _leave_window(self, worker: int) -> None:
        """Let the profile under way wait for a worker no more."""
        if self._window is not None:
            self._window.pending.discard(worker)

    # State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        window = self._window
        return {
            "workers": [
                [
                    *(
                        worker,
                        record.count,
                        record.straggler,
                        record.takes_part,
                        record.epoch,
                        record.iteration,
                    ),
                    *(list(record.last_s), list(record.held)),
                ]
                for worker, record in self._workers.items()
            ],
            "window": None
            if window is None
            else {
                "epoch": window.epoch,
                "first": window.first,
                "last": window.last,
                "before": _threshold_to_plain(window.before),
                "pending": sorted(window.pending),
                "times_s": [[list(entry) for entry in times_s.items()] for times_s in window.times_s],
                "waiting": [list(entry) for entry in window.waiting],
            },
            "newest": _threshold_to_plain(self._newest),
            "previous": _threshold_to_plain(self._previous),
            "front": None if self._front is None else list(self._front),
            "found_this_epoch": sorted(self._found_this_epoch),
            "may_profile_again": self._may_profile_again,
            "ratios": list(self._ratios),
            "limit": self._limit,
            "n_profile": self._n_profile,
            "iterations_seen": self._iterations_seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a classifier with the same arguments."""
        self._workers = {
            worker: _WorkerTimes(
                count=count,
                straggler=straggler,
                takes_part=takes_part,
                epoch=epoch,
                iteration=iteration,
                last_s=deque(last_s, maxlen=_LAST_KEPT),
                held=deque(held, maxlen=_RATIOS_KEPT),
            )
            for worker, count, straggler, takes_part, epoch, iteration, last_s, held in state["workers"]
        }
        window = state["window"]
        self._window = (
            None
            if window is None
            else _Window(
                epoch=window["epoch"],
                first=window["first"],
                last=window["last"],
                before=_threshold_from_plain(window["before"]),
                pending=set(window["pending"]),
                times_s=[dict(times_s) for times_s in window["times_s"]],
                waiting=[
                    (worker, iteration, compute_s) for worker, iteration, compute_s in window["waiting"]
                ],
            )
        )
        self._newest = _threshold_from_plain(state["newest"])
        self._previous = _threshold_from_plain(state["previous"])
        self._front = None if state["front"] is None else (state["front"][0], state["front"][1])
        self._found_this_epoch = set(state["found_this_epoch"])
        self._may_profile_again = state["may_profile_again"]
        self._ratios = deque(state["ratios"], maxlen=_RATIOS_KEPT)
        self._limit = state["limit"]
        self._n_profile = state["n_profile"]
        self._iterations_seen = state["iterations_seen"]


def _usual_iterations(iterations_s: Sequence[Mapping[int, float]]) -> list[Mapping[int, float]]:
    """Return the iterations of a profile without those in which even the fastest worker was slow.

    Args:
        iterations_s: by iteration, each worker's time in seconds; none of them empty.
    """
    if not iterations_s:
        return []
    limit_s = _SLOW_ITERATION_FACTOR * median(min(times_s.values()) for times_s in iterations_s)
    return [times_s for times_s in iterations_s if min(times_s.values()) <= limit_s]


def _threshold_to_plain(threshold: _Threshold | None) -> list[Any] | None:
    return None if threshold is None else [threshold.threshold_s, threshold.pace_s, threshold.epoch]


def _threshold_from_plain(plain: Sequence[Any] | None) -> _Threshold | None:
    if plain is None:
        return None
    return _Threshold(threshold_s=plain[0], pace_s=plain[1], epoch=plain[2])


def _threshold_text(threshold: _Threshold) -> str:
    if not threshold.pace_s:
        return f"{threshold.threshold_s:.3g} s"
    k = threshold.threshold_s / threshold.pace_s
    return f"{threshold.threshold_s:.3g} s ({k:.3g} x {threshold.pace_s:.3g} s)"


def _limit_of(limit_ratio: float, iterations_per_epoch: int | None) -> int:
    if iterations_per_epoch is None:
        raise ValueError("expected iterations_per_epoch together with limit_ratio, got None")
    if not 0 < limit_ratio <= 1:
        raise ValueError(f"expected a limit_ratio above 0 and at most 1, got {limit_ratio}")
    return max(2, math.ceil(limit_ratio * iterations_per_epoch))


def _check(
    n_profile: int,
    k: float | str,
    limit: int,
    recover_gap: int,
    window_judge: str,
    skip_first_iters: int,
    max_straggler_fraction: float,
    false_alarm: float,
) -> None:
    if n_profile < 1:
        raise ValueError(f"expected a profile of at least 1 iteration, got {n_profile}")
    if isinstance(k, str):
        if k != "auto":
            raise ValueError(f"expected k as a number above 1 or 'auto', got {k!r}")
    elif not (math.isfinite(k) and k > 1):
        raise ValueError(f"expected a finite k above 1 (2 = twice as slow as the fastest), got {k}")
    if limit < 1:
        raise ValueError(f"expected a limit of at least 1 judged iteration, got {limit}")
    if not 1 <= recover_gap <= limit:
        raise ValueError(f"expected a recover_gap from 1 to the limit, {limit}, got {recover_gap}")
    if window_judge not in ("previous", "none"):
        raise ValueError(f"expected window_judge 'previous' or 'none', got {window_judge!r}")
    if skip_first_iters < 0:
        raise ValueError(f"expected at least 0 iterations to skip, got {skip_first_iters}")
    if not 0 < max_straggler_fraction <= 1:
        raise ValueError(
            f"expected max_straggler_fraction above 0 and at most 1, got {max_straggler_fraction}"
        )
    if not 0 < false_alarm < 1:
        raise ValueError(f"expected false_alarm, a probability, above 0 and below 1, got {false_alarm}")
