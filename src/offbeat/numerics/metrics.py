"""Metrics of a whole validation set from those of its parts."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from offbeat.errors import OffbeatError

MetricValue: TypeAlias = "int | float | MergeableMetric"


@runtime_checkable
class MergeableMetric(Protocol):
    """A metric that can merge the state of another one, as those of torchmetrics can."""

    def merge_state(self, incoming_state: Any) -> None:
        """Merge the state of another metric into this one."""

    def compute(self) -> Any:
        """Return the value of the accumulated state."""


@runtime_checkable
class SendableMetric(MergeableMetric, Protocol):
    """A metric whose state can be sent to another worker and merged there, as those of torchmetrics can.

    Attributes:
        metric_state: accumulated state: tensors, or lists of tensors, by name.
        device: device of these tensors.
    """

    metric_state: Mapping[str, Tensor | list[Tensor]]
    device: torch.device


def validate_metrics(metrics: object) -> dict[str, MetricValue]:
    """Check what `evaluate` returned for a part, and convert one-element tensors to numbers.

    Raises:
        OffbeatError: it is not a mapping from names to numbers, one-element tensors or mergeable metrics.
    """
    if not isinstance(metrics, Mapping):
        raise OffbeatError(
            "expected evaluate to return a mapping from names to numbers, such as {'loss': 0.3}, got "
            f"{type(metrics).__name__}"
        )
    values: dict[str, MetricValue] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise OffbeatError(f"expected names of metrics to be strings, got {name!r}")
        if isinstance(value, Tensor) or (hasattr(value, "item") and not isinstance(value, MergeableMetric)):
            if math.prod(value.shape) != 1:
                raise OffbeatError(f"expected the metric {name!r} to be one number, got {tuple(value.shape)}")
            value = value.item()
        if not isinstance(value, int | float | MergeableMetric):
            raise OffbeatError(
                f"expected the metric {name!r} to be a number or to have merge_state and compute, got "
                f"{type(value).__name__}"
            )
        values[name] = value
    return values


def combine_parts(parts: Sequence[tuple[int, Mapping[str, MetricValue]]]) -> dict[str, float]:
    """Return the metrics of a set from those of its parts, in the order of the set.

    Integers are counts, and are added. Other numbers are means over a part's samples; the set's is their
    mean, weighted by samples. Mergeable metrics (torchmetrics) are merged and then computed.

    Source: the overlapped validation paper. Deviation: it averages the means of the parts, which is correct
    only for parts of one size; here they are weighted.

    Args:
        parts: number of samples, at least 1, and metrics, as `validate_metrics` returns them, of each part.

    Raises:
        OffbeatError: parts have different metrics, or a merged metric does not compute a single number.
    """
    names = parts[0][1].keys()
    for _, values in parts:
        if values.keys() != names:
            raise OffbeatError(
                f"expected the same metrics of all parts, got {', '.join(names)} and {', '.join(values)}"
            )
    return {name: _joined(name, [(samples, values[name]) for samples, values in parts]) for name in names}


def _joined(name: str, values: Sequence[tuple[int, MetricValue]]) -> float:
    if any(isinstance(value, MergeableMetric) for _, value in values):
        return merge_metric(name, values[0][1], [value for _, value in values[1:]])
    numbers = [(samples, value) for samples, value in values if isinstance(value, int | float)]
    if len(numbers) == 1:
        return numbers[0][1]
    if all(isinstance(value, int) for _, value in numbers):
        return sum(int(value) for _, value in numbers)
    samples = sum(samples for samples, _ in numbers)
    sums = [samples_of_part * value for samples_of_part, value in numbers]
    return (math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)) / samples


def merge_metric(name: str, first: MetricValue, others: Sequence[Any]) -> float:
    """Return the value of a metric merged with others of its kind, or with their `metric_state`s.

    Raises:
        OffbeatError: it cannot be merged, or does not compute a single number.
    """
    merged_metric = copy.deepcopy(first)
    if not isinstance(merged_metric, MergeableMetric):
        raise OffbeatError(f"expected the metric {name!r} of all parts to be of one kind")
    for other in others:
        merged_metric.merge_state(other)
    computed = validate_metrics({name: merged_metric.compute()})[name]
    if isinstance(computed, MergeableMetric):
        raise OffbeatError(f"expected the metric {name!r} to compute a number, got a metric")
    return computed
