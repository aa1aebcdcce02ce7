"""Events of workers that train undisturbed."""

from typing import Any

from offbeat.events import BatchesSkipped, Joined, Ready, StepTimes

_PARTS = ("batch_s", "compute_s", "apply_s", "communicate_s", "wait_s", "other_s", "wall_s")


def joined(worker: int, world: int = 2) -> Joined:
    return Joined(
        now_s=0.0,
        worker=worker,
        world=world,
        peer=f"worker-{worker}",
        location="host process 1",
        addresses=(),
        model_signature=(),
        strategy="bsp",
    )


def ready(worker: int, round_: int, step: int | None = None, *, epoch: int = 0, batch: int = 0) -> Ready:
    step = round_ if step is None else step
    return Ready(
        now_s=1.0,
        worker=worker,
        generation=0,
        epoch=epoch,
        step=step,
        round=round_,
        compute_s=0.1,
        samples=32,
        blocks=(),
        batches_fetched=batch,
    )


def times_of_step(step: int, **changes: Any) -> StepTimes:
    """Times of a step that took none, but for the changes."""
    return StepTimes(**{"step": step, "samples": 32, **dict.fromkeys(_PARTS, 0.0), **changes})


def left_out(worker: int, round_: int, *, batch: int, count: int = 1, epoch: int = 0) -> BatchesSkipped:
    return BatchesSkipped(
        now_s=1.0, worker=worker, epoch=epoch, step=round_, round=round_, batches_fetched=batch, skipped=count
    )
