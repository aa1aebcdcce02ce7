"""Learning rates for large batches: scaled with the batch, warmed up, decayed; pure functions of the epoch.

Nothing here knows an optimizer. Rates are plain numbers; epochs are fractional: 2.5 is the middle of the
third one.

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

    Holds for a loss that is a mean over the whole batch, which offbeat's averaging by samples gives; weight
    decay is not scaled.

    Args:
        batch_size: samples in a step of all workers together, at least 1.
        reference_rate: the rate that suits the reference batch (0.1: ResNet-50 on ImageNet), above 0.
        reference_batch_size: in samples, at least 1.

    Raises:
        ValueError: an argument out of range.
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
    """Return the learning rate at an epoch: a linear ramp to `rate`, then times `decay` at each epoch named.

    During warm-up it is rate / scale * (1 + (scale - 1) * epoch / warm_up_epochs): from the reference rate to
    `scale` times that, continuous at the end. With a scale of 1 the ramp is level.

    Deviation: none for the paper's values; the ramp is by iteration (the fractional epoch), as in the paper.
    Horovod's callback evaluates the same ramp one step later; for that, add 1 / steps_per_epoch.

    Args:
        epoch: epochs done, at least 0.
        rate: the rate after warm-up, above 0.
        scale: k, how many times the reference batch a step has; above 0.
        warm_up_epochs: at least 0; 0 is none.
        decay_at_epochs: where the rate falls, ascending.
        decay: the factor by which, above 0 and at most 1.

    Raises:
        ValueError: an argument out of range.
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


def factor_of_steps(
    steps_per_epoch: int,
    *,
    scale: float = 1.0,
    warm_up_epochs: float = WARM_UP_EPOCHS,
    decay_at_epochs: Sequence[float] = DECAY_AT_EPOCHS,
    decay: float = DECAY,
) -> Callable[[int], float]:
    """Return what `torch.optim.lr_scheduler.LambdaLR` wants: steps done to a factor on the optimizer's rate.

    The optimizer's own rate is that after warm-up; call the scheduler's `step` after every optimizer step.

    Args:
        steps_per_epoch: at least 1.
        scale: see `rate_at`, as for the rest.
        warm_up_epochs: see `rate_at`.
        decay_at_epochs: see `rate_at`.
        decay: see `rate_at`.

    Raises:
        ValueError: an argument out of range.
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

    factor(0)  # refuses bad arguments here rather than in the first step
    return factor


def momentum_correction(rate: float, rate_before: float) -> float:
    """Return what to multiply a momentum buffer by when the rate changes: rate / rate_before.

    Only where the buffer holds rates: v = m v + rate * g, w -= v. The form of torch.optim.SGD, u = m u + g,
    w -= rate * u, applies the new rate to all of u by itself and needs no correction.

    Args:
        rate: of the coming step, above 0.
        rate_before: of the last step, above 0.

    Raises:
        ValueError: a rate that is not above 0.
    """
    _check_rate(rate)
    _check_rate(rate_before)
    return rate / rate_before


def lr_follow_active(rate: float, *, active: int, world: int) -> float:
    """Return the rate for a step in which only some workers took part: active / world of it.

    Linear scaling, applied to a group that changes. Off unless asked for: the mean over fewer workers
    estimates the same gradient, so without it every step is as long as before, and only noisier. With it, an
    epoch's worth of samples moves the model as far however they are spread over steps. Deviation: not in the
    papers, which are silent about it.

    Args:
        rate: of a step of everybody, above 0.
        active: who took part, 1 to `world`.
        world: how many workers `rate` is meant for.

    Raises:
        ValueError: an argument out of range.
    """
    _check_rate(rate)
    if not 1 <= active <= world:
        raise ValueError(f"expected 1 to {world} active workers, got {active}")
    return rate * (active / world)


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"expected a finite learning rate above 0, got {rate}")
