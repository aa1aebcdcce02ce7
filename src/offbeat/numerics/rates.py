"""Learning rates for large batches: linear scaling, warm-up, decay; pure functions of the epoch.

Nothing here depends on an optimizer. Rates are plain numbers; epochs are fractional: 2.5 is the middle of the
third epoch.

Source of all: Goyal et al. 2017, "Accurate, large minibatch SGD: training ImageNet in 1 hour", sections 2.1
(linear scaling), 2.2 (gradual warm-up), 3 (momentum correction) and 5.1 (rates and decay).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

WARM_UP_EPOCHS = 5.0
DECAY_AT_EPOCHS = (30.0, 60.0, 80.0)
DECAY = 0.1


def linear_scaling(batch_size: int, *, reference_rate: float = 0.1, reference_batch_size: int = 256) -> float:
    """Return the rate for a batch k times as large as the reference: k times the reference rate.

    Valid for a loss that is a mean over the whole batch, as offbeat's averaging by samples gives; weight
    decay is not scaled.

    Args:
        batch_size: samples in a step of all workers together, at least 1.
        reference_rate: rate for the reference batch (0.1: ResNet-50 on ImageNet), above 0.
        reference_batch_size: in samples, at least 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if batch_size < 1 or reference_batch_size < 1:
        raise ValueError(
            f"expected batches of at least 1 sample, got {batch_size} and {reference_batch_size}"
        )
    _check_rate(reference_rate)
    return reference_rate * batch_size / reference_batch_size


def rate_at(
    epoch: float,
    *,
    rate: float,
    scale: float = 1.0,
    warm_up_epochs: float = WARM_UP_EPOCHS,
    decay_at_epochs: Sequence[float] = DECAY_AT_EPOCHS,
    decay: float = DECAY,
) -> float:
    """Return the learning rate at an epoch: a linear ramp to `rate`, multiplied by `decay` at given epochs.

    During warm-up it is rate / scale * (1 + (scale - 1) * epoch / warm_up_epochs): from the reference rate to
    `scale` times that, continuous at the end. With a scale of 1 the ramp is constant.

    Deviation: none for the paper's values; the ramp is per iteration (the fractional epoch), as in the paper.
    Horovod's callback evaluates the same ramp one step later; add 1 / steps_per_epoch for that.

    Args:
        epoch: epochs done, at least 0.
        rate: rate after warm-up, above 0.
        scale: k, size of a step's batch as a multiple of the reference batch; above 0.
        warm_up_epochs: at least 0; 0 for no warm-up.
        decay_at_epochs: epochs at which the rate is multiplied by `decay`, ascending.
        decay: factor of each decay, above 0 and at most 1.

    Raises:
        ValueError: an argument is out of range.
    """
    _check_rate(rate)
    if not (math.isfinite(epoch) and epoch >= 0):
        raise ValueError(f"expected at least 0 epochs, got {epoch}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"expected a scale above 0 (1 = the reference batch), got {scale}")
    if not warm_up_epochs >= 0:
        raise ValueError(f"expected a warm-up of at least 0 epochs, got {warm_up_epochs}")
    if not 0 < decay <= 1:
        raise ValueError(f"expected a decay above 0 and at most 1, got {decay}")
    if list(decay_at_epochs) != sorted(decay_at_epochs):
        raise ValueError(f"expected ascending epochs of decay, got {list(decay_at_epochs)}")
    decayed = rate * decay ** sum(epoch >= at for at in decay_at_epochs)
    if epoch >= warm_up_epochs:
        return decayed
    reached = epoch / warm_up_epochs
    return decayed * ((1.0 - reached) / scale + reached)


def lr_lambda(
    steps_per_epoch: int,
    *,
    scale: float = 1.0,
    warm_up_epochs: float = WARM_UP_EPOCHS,
    decay_at_epochs: Sequence[float] = DECAY_AT_EPOCHS,
    decay: float = DECAY,
) -> Callable[[int], float]:
    """Return a function for `torch.optim.lr_scheduler.LambdaLR`: steps done to a factor of the rate.

    The optimizer's own rate is the one after warm-up; call the scheduler's `step` after every optimizer step.

    Args:
        steps_per_epoch: at least 1.
        scale: see `rate_at`, also for the other arguments.
        warm_up_epochs: see `rate_at`.
        decay_at_epochs: see `rate_at`.
        decay: see `rate_at`.

    Raises:
        ValueError: an argument is out of range.
    """
    if steps_per_epoch < 1:
        raise ValueError(f"expected at least 1 step per epoch, got {steps_per_epoch}")

    def factor(steps: int) -> float:
        return rate_at(
            steps / steps_per_epoch,
            rate=1.0,
            scale=scale,
            warm_up_epochs=warm_up_epochs,
            decay_at_epochs=decay_at_epochs,
            decay=decay,
        )

    factor(0)  # raises an error for bad arguments here rather than in the first step
    return factor


def momentum_correction(rate: float, rate_before: float) -> float:
    """Return the factor for a momentum buffer when the rate changes: rate / rate_before.

    Needed only if the buffer contains rates: v = m v + rate * g, w -= v. The form of torch.optim.SGD,
    u = m u + g, w -= rate * u, applies the new rate to all of u and needs no correction.

    Args:
        rate: rate of the coming step, above 0.
        rate_before: rate of the last step, above 0.

    Raises:
        ValueError: a rate is not above 0.
    """
    _check_rate(rate)
    _check_rate(rate_before)
    return rate / rate_before


def scale_to_active(rate: float, *, active: int, world: int) -> float:
    """Return the rate for a step in which only some workers took part: active / world of the full rate.

    Linear scaling, applied to a group that changes. Off by default: the mean over fewer workers estimates the
    same gradient, so that without this function each step has the same expected length and only more noise.
    With it, an epoch's worth of samples moves the model equally far, however they are spread over steps.
    Deviation: not in the papers.

    Args:
        rate: rate of a step of all workers, above 0.
        active: number of workers that took part, 1 to `world`.
        world: number of workers that `rate` is meant for.

    Raises:
        ValueError: an argument is out of range.
    """
    _check_rate(rate)
    if not 1 <= active <= world:
        raise ValueError(f"expected 1 to {world} active workers, got {active}")
    return rate * (active / world)


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"expected a finite learning rate above 0, got {rate}")
