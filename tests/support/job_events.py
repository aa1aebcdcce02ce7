"""Events of workers whose times are chosen, and the state of a job that they make."""

from offbeat.events import (
    AverageModels,
    Finished,
    Group,
    Joined,
    Left,
    Lost,
    Ready,
    StepFinished,
    StepPermit,
    StepsTimed,
)
from offbeat.wire.job_view import JobView
from support.round_events import times_of_step


def joined(worker, world=3, host="node-1"):
    return Joined(
        now_s=0.0,
        worker=worker,
        world=world,
        peer=f"worker-{worker}.1",
        location=f"{host}, process {worker + 100}",
        addresses=(),
        model_signature=(),
        strategy="PartialAllReduce(k=2.0)",
    )


def group(*members, generation=0, step=0, joining=(), reason="all workers are here"):
    return Group(
        generation=generation,
        step=step,
        exchange_id=0,
        members=members,
        joining=joining,
        weights=(1 / len(members),) * len(members),
        reason=reason,
    )


def ready(worker, step, compute_s, *, round_=None, generation=0, line_s=()):
    return Ready(
        now_s=float(step),
        worker=worker,
        generation=generation,
        epoch=0,
        step=step,
        round=step if round_ is None else round_,
        compute_s=compute_s,
        samples=32,
        blocks=(),
        line_s=tuple(line_s),
    )


def timed(worker, step, *, wall_s, wait_s=0.0, compute_s, other_s=0.0):
    times = times_of_step(step, wall_s=wall_s, wait_s=wait_s, compute_s=compute_s, other_s=other_s)
    return StepsTimed(now_s=0.0, worker=worker, steps=(times,))


def lost(worker, cause="the connection was closed"):
    return Lost(now_s=9.0, worker=worker, cause=cause)


def finished(worker, step):
    return Finished(now_s=9.0, worker=worker, epoch=0, step=step)


def left(worker, step):
    return Left(now_s=9.0, worker=worker, step=step)


def step_finished(worker, step, compute_s):
    return StepFinished(
        now_s=float(step),
        worker=worker,
        clock=step - 1,
        parameter_version=0,
        epoch=0,
        step=step,
        compute_s=compute_s,
        samples=32,
        loss=None,
        blocks=(),
    )


def permit(worker, *, may_start, bound=2):
    return StepPermit(
        worker=worker,
        clock=1,
        version_min=0,
        complete_version=0,
        staleness_bound=bound,
        may_start=may_start,
        is_leader=False,
        reason="it is 3 ahead of the slowest, and the bound is 2",
    )


def averaging(*members, steps):
    return AverageModels(
        exchange_id=1,
        members=members,
        joining=(),
        weights=(1 / len(members),) * len(members),
        steps=(steps,) * len(members),
        includes_buffers=False,
        outer_step=None,
        leader=0,
        reason="they are ready",
    )


def rounds(times_s, steps, *, first_step=0, generation=0):
    """Rounds of a group: each worker is ready, with its compute time, and then their steps are timed.

    Args:
        times_s: compute time by worker; the steps take as long as the slowest, and 0.1 s more.
    """
    slowest_s = max(times_s.values())
    for step in range(first_step, first_step + steps):
        yield from (ready(worker, step, time_s, generation=generation) for worker, time_s in times_s.items())
        for worker, time_s in times_s.items():
            wait_s = slowest_s - time_s
            yield timed(worker, step, wall_s=slowest_s + 0.1, wait_s=wait_s, compute_s=time_s, other_s=0.1)


def view_of(*entries):
    view = JobView()
    for entry in entries:
        view.add(entry)
    return view


def status_of(*entries):
    return view_of(*entries).status()


def worker_of(status, number):
    (found,) = [one for one in status.workers if one.worker == number]
    return found
