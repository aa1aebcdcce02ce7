"""One sentence about a job: which worker is wrong, since which step, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from offbeat.wire.job_status import GONE, Coordination, Diagnosis, JobWorker

SLOW_RATIO: Final = 1.5  # less is common among equal workers; the policies exclude from about 2 on
_SAVING_MIN: Final = 0.05
_LINE_RATIO: Final = 2.0  # as `LineMonitor` has it
_LINE_WORKERS_MIN: Final = 3  # of two workers it is not known whose line is slow


def diagnose(
    workers: Sequence[JobWorker], *, world: int, coordination: Coordination, abort_reason: str
) -> Diagnosis:
    """Return the first of these that holds.

    1. The job was aborted.
    2. Slow workers hold the others up. A worker is *slow* if its compute time is at least 1.5 times the
       median of all workers' times. Among workers that exchange gradients in rounds, the slowest one
       makes the step: of its time, computing takes the share p, and c a round. Without the slow workers, the
       slowest of the others takes c', and the saving is p (1 - c' / c), from the medians of late. With clocks
       or averaged models not every step waits: there the saving is the median share of their time that the
       others wait. Less than 5 % is no finding here, and an excluded worker, or one that rounds are closed
       without, holds no one up.
    3. A line is slow: for one of at least three workers, computing and the time on its best connection take
       more than twice as long as computing and the time on the fastest connection. The saving is that of the
       sum of both, with the slowest member's compute time.
    4. Workers were lost, have failed, or were rejected, and fewer are here than at the start. What that costs
       is the share that is missing.
    5. Workers are excluded, or slow without holding anyone up: the saving is 0.
    6. Fewer than two workers have compute times to compare: the job starts, or has one worker.
    7. Nothing is wrong.
    """
    if abort_reason:
        return Diagnosis(kind="aborted", sentence=f"the job was aborted: {abort_reason}")
    here = [one for one in workers if one.state not in GONE]
    compared = [one for one in here if one.compute_ratio is not None]
    slow = [one for one in compared if _ratio(one) >= SLOW_RATIO]
    return (
        _holding_up(slow, compared, coordination)
        or _slow_line([one for one in compared if not one.is_excluded])
        or _lost(workers, len(here), world)
        or _excluded([one for one in here if one.is_excluded], slow)
        or _fine(here, compared, world)
    )


def name_workers(workers: Sequence[JobWorker]) -> str:
    """Return "worker 3", or "workers 3, 5 and 8"; of many, the first eight and how many more."""
    names = [str(one.worker) for one in workers[:8]]
    if len(workers) > len(names):
        names.append(f"{len(workers) - len(names)} more")
    return f"worker {names[0]}" if len(names) == 1 else f"workers {', '.join(names[:-1])} and {names[-1]}"


def _ratio(one: JobWorker) -> float:
    return one.compute_ratio or 0.0


def _holding_up(
    slow: Sequence[JobWorker], compared: Sequence[JobWorker], coordination: Coordination
) -> Diagnosis | None:
    blamed = [one for one in slow if not (one.is_excluded or one.is_skipped)]
    others = [one for one in compared if _ratio(one) < SLOW_RATIO and not one.is_excluded]
    if not blamed or not others:
        return None
    saving = _saving(blamed, others) if coordination == "rounds" else _median_wait(others)
    if saving < _SAVING_MIN:
        return None
    sentence = f"{_slowness(blamed)}; without {_it(blamed)} the others save {saving:.0%}"
    return Diagnosis(kind="slow", workers=_ids(blamed), saving=saving, sentence=sentence)


def _saving(blamed: Sequence[JobWorker], others: Sequence[JobWorker]) -> float:
    slowest = max(blamed, key=lambda one: one.compute_s or 0.0)
    compute_s = slowest.compute_s or 0.0
    other_s = max(one.compute_s or 0.0 for one in others)
    share = 1.0 if slowest.compute_share is None else slowest.compute_share
    return share * max(0.0, 1 - other_s / compute_s) if compute_s else 0.0


def _median_wait(others: Sequence[JobWorker]) -> float:
    shares = sorted(one.wait_share or 0.0 for one in others)
    return shares[len(shares) // 2]


def _slowness(slow: Sequence[JobWorker]) -> str:
    ratio = max(map(_ratio, slow))
    since = min((one.slow_since_step for one in slow if one.slow_since_step is not None), default=None)
    when = "" if since is None else f" since step {since:,}" if since else " since the first step"
    verb = "takes" if len(slow) == 1 else "take up to"
    return f"{name_workers(slow)} {verb} {ratio:.2g} times as long as the others{when}"


def _slow_line(members: Sequence[JobWorker]) -> Diagnosis | None:
    lines_s = [(one.line_s, one.worker) for one in members if one.line_s is not None]
    if len(lines_s) < _LINE_WORKERS_MIN:
        return None
    (fastest_s, _), (longest_s, worker) = min(lines_s), max(lines_s)
    compute_s = max(one.compute_s or 0.0 for one in members)
    if compute_s + longest_s <= _LINE_RATIO * (compute_s + fastest_s):
        return None
    saving = (longest_s - fastest_s) / (compute_s + longest_s)
    sentence = (
        f"the line of worker {worker} is slow: data are on the way for {longest_s:.2g} s, elsewhere "
        f"for {fastest_s:.2g} s; without it the others save {saving:.0%}"
    )
    return Diagnosis(kind="line", workers=(worker,), saving=saving, sentence=sentence)


def _lost(workers: Sequence[JobWorker], here: int, world: int) -> Diagnosis | None:
    lost = [one for one in workers if one.state in ("lost", "failed", "rejected")]
    all_workers = world or here + len(lost)
    if not lost or here >= all_workers:
        return None
    last = max(lost, key=lambda one: (one.state_step or 0, one.worker))
    verb = "has failed" if last.state == "failed" else f"was {last.state}"
    more = f", {len(lost) - 1} more before" if len(lost) > 1 else ""
    sentence = (
        f"worker {last.worker} {verb} in step {last.state_step or 0:,} ({last.why}){more}; "
        f"{here} of {all_workers} workers go on, with {here / all_workers:.0%} of the speed"
    )
    return Diagnosis(kind="lost", workers=_ids(lost), sentence=sentence)


def _excluded(excluded: Sequence[JobWorker], slow: Sequence[JobWorker]) -> Diagnosis | None:
    slow_excluded = [one for one in slow if one.is_excluded]
    if slow_excluded:
        sentence = f"{_slowness(slow_excluded)}, and the group trains without {_it(slow_excluded)}"
        return Diagnosis(kind="excluded", workers=_ids(slow_excluded), sentence=sentence)
    if excluded:
        first = excluded[0]
        since = "" if first.state_step is None else f" since step {first.state_step:,}"
        verb = "is" if len(excluded) == 1 else "are"
        sentence = (
            f"{name_workers(excluded)} {verb} excluded{since}: {first.why or 'the log lacks the reason'}"
        )
        return Diagnosis(kind="excluded", workers=_ids(excluded), sentence=sentence)
    if slow:
        sentence = f"{_slowness(slow)}; the others do not wait for {_it(slow)}"
        return Diagnosis(kind="slow", workers=_ids(slow), sentence=sentence)
    return None


def _it(workers: Sequence[JobWorker]) -> str:
    return "it" if len(workers) == 1 else "them"


def _ids(workers: Sequence[JobWorker]) -> tuple[int, ...]:
    return tuple(one.worker for one in workers)


def _fine(here: Sequence[JobWorker], compared: Sequence[JobWorker], world: int) -> Diagnosis:
    if len(compared) > 1:
        slowest = max(map(_ratio, compared))
        sentence = (
            f"all {len(compared)} workers take about as long: the slowest {slowest:.2g} times the median"
        )
        return Diagnosis(kind="fine", sentence=sentence)
    if len(here) == world == 1:
        return Diagnosis(kind="fine", sentence="the job has one worker")
    sentence = f"too few steps to compare workers; {len(here)} of {max(world, len(here))} are here"
    return Diagnosis(kind="starting", sentence=sentence)
