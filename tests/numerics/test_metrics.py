"""Metrics of a whole set from those of its parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import OffbeatError
from offbeat.numerics.metrics import combine_parts, validate_metrics


class Sum:
    """A metric that can be merged, as those of torchmetrics can."""

    def __init__(self, seen):
        self.seen = list(seen)

    def merge_state(self, incoming_state):
        self.seen += incoming_state.seen

    def compute(self):
        return torch.tensor(float(sum(self.seen)))


@given(
    parts=st.lists(
        st.lists(st.floats(-1e3, 1e3, allow_nan=False), min_size=1, max_size=9), min_size=1, max_size=8
    )
)
def test_means_of_parts_are_weighted_by_their_samples(parts):
    whole = [value for part in parts for value in part]
    metrics = combine_parts([(len(part), {"loss": sum(part) / len(part)}) for part in parts])
    assert metrics["loss"] == pytest.approx(sum(whole) / len(whole), abs=1e-9)


@given(counts=st.lists(st.integers(0, 2**60), min_size=1, max_size=8))
def test_counts_are_added_and_exact(counts):
    assert combine_parts([(3, {"right": count}) for count in counts]) == {"right": sum(counts)}


def test_mergeable_metrics_are_merged_in_the_order_of_the_set_and_not_changed():
    first, second = Sum([1]), Sum([2, 3])
    assert combine_parts([(1, {"sum": first}), (2, {"sum": second})]) == {"sum": 6.0}
    assert (first.seen, second.seen) == ([1], [2, 3])


def test_the_metric_of_a_single_part_is_unchanged():
    assert combine_parts([(3, {"loss": 0.1})]) == {"loss": 0.1}


def test_tensors_with_one_number_become_numbers():
    values = validate_metrics({"right": torch.tensor(3), "loss": torch.tensor([0.5])})
    assert values == {"right": 3, "loss": 0.5}
    assert isinstance(values["right"], int)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (0.3, "a mapping from names to numbers, such as .* got float"),
        ({1: 0.3}, "names of metrics to be strings, got 1"),
        ({"loss": torch.zeros(2)}, r"'loss' to be one number, got \(2,\)"),
        ({"loss": "low"}, "'loss' to be a number or to have merge_state and compute, got str"),
        ({"loss": None}, "got NoneType"),
    ],
)
def test_impossible_metrics_are_refused(returned, text):
    with pytest.raises(OffbeatError, match=text):
        validate_metrics(returned)


def test_parts_with_different_metrics_are_refused():
    with pytest.raises(OffbeatError, match="the same metrics of all parts, got loss and accuracy"):
        combine_parts([(1, {"loss": 1.0}), (1, {"accuracy": 1.0})])
    with pytest.raises(OffbeatError, match="of all parts to be of one kind"):
        combine_parts([(1, {"sum": 1.0}), (1, {"sum": Sum([1])})])
