"""Weights of models in an averaging, and how much of the mean each member takes.

Pure arithmetic of policies, for the workers too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from offbeat.events import AverageModels

GroupWeights: TypeAlias = Literal["constant", "dynamic"]
GROUP_WEIGHTS: Final = ("constant", "dynamic")
MeanApplication: TypeAlias = Literal["common", "own_share"]
MEAN_APPLICATIONS: Final = ("common", "own_share")

_OTHERS_LEAST: Final = 1e-3  # rounding errors of a float32 mean, 6e-8, grow to 6e-5 at most


def ema_weights(clocks: Sequence[int], alpha: float = 0.9) -> tuple[float, ...]:
    """Return weights by age: an exponential moving average over the models of a group.

    The age of a model is 1 for the highest clock, and one more for each step less. Age a has the mass
    (1 - alpha) alpha^(a-1) / (1 - alpha^T), where T is the highest age. The mass of ages that no model has
    goes to age 1; models of equal age share its mass equally. So the mass of an age is not less than that of
    a higher one, though the weight of a single model may be, and equal clocks have equal weights.

    Source: Miao et al. 2021, "Heterogeneity-aware distributed machine learning training via partial reduce"
    (dynamic partial reduce); missing ages and `alpha` as in the authors' program.

    Args:
        clocks: steps that are in each model, at least one model.
        alpha: between 0 and 1, exclusive.

    Returns:
        One weight for each model, not negative; their sum is 1.
    """
    ages = [max(clocks) - clock + 1 for clock in clocks]
    models = Counter(ages)
    all_mass = 1 - alpha ** max(ages)
    mass = {age: (1 - alpha) * alpha ** (age - 1) / all_mass for age in models}
    mass[1] += 1 - sum(mass.values())
    return tuple(mass[age] / models[age] for age in ages)


def equal_weights(count: int) -> tuple[float, ...]:
    """Return the weights of so many models that count alike."""
    return (1 / count,) * count


def mean_share(averaging: AverageModels, worker: int) -> float:
    """Return how much of the mean less its own model a member adds to its model.

    1 makes the model the mean. Where members keep their own share of 1/P, their models become

        x_i / P + (P-1)/P * sum over j != i of w_j / (1 - w_i) x_j

    for weights w, which is x_i + s (mean - x_i) with s = (P-1) / (P (1 - w_i)). Where all others together
    have a weight of less than 0.001, s is limited, since it multiplies the rounding errors of the mean.

    Source: the authors' program of partial reduce, see `ema_weights`.
    """
    if not averaging.keeps_own_share:
        return 1.0
    count = len(averaging.members)
    others = 1 - averaging.weight_of(worker)
    return (count - 1) / (count * max(others, _OTHERS_LEAST))
