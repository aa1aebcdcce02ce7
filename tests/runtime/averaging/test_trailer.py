"""Promises of `offbeat.runtime.averaging.trailer`."""

import pytest

from offbeat.runtime.averaging.trailer import TrailerLayout


def summed(layout, members):
    trailers = []
    for position, (numbers, blocks) in enumerate(members):
        trailers.append(layout.encode(position, **numbers))
        for index, count in zip(layout.block_indices(position), blocks, strict=True):
            trailers[-1][index] = count
    return [sum(column) for column in zip(*trailers, strict=True)]


@pytest.mark.parametrize("capacity", [3, 4])
def test_the_sum_of_the_members_trailers_holds_what_each_has_contributed(capacity):
    layout = TrailerLayout(capacity, parameters=2, hyperparameters=2)
    common = {"is_stale": False, "weight": 0.25, "round_s": 0.5}
    members = [
        (
            {**common, "writes": 1, "is_preempted": True, "offset_s": 1.5, "has_gradient": [True, False]}
            | {"hyperparameters": [0.1, 1e-3]},
            (5, 0),
        ),
        (
            {**common, "writes": 0, "is_preempted": False, "offset_s": 2.5, "has_gradient": [True, False]}
            | {"hyperparameters": [7.0, 8.0]},
            (0, 6),
        ),
        (
            {**common, "writes": 2, "is_preempted": True, "offset_s": 3.5, "has_gradient": [False, False]}
            | {"hyperparameters": [9.0, 10.0]},
            (7, 8),
        ),
    ]
    values = summed(layout, members)
    assert len(values) == layout.length
    sums = layout.decode(values, size=len(members))
    assert (sums.weight, sums.stale, sums.writes, sums.preempted) == (0.75, 0, 3, 2)
    assert sums.round_s == 1.5
    assert sums.offsets_s == [1.5, 2.5, 3.5]
    assert sums.contributions == [(5, 0), (0, 6), (7, 8)]
    assert sums.used == [True, False]
    assert sums.hyperparameters == [0.1, 1e-3]


@pytest.mark.parametrize(
    ("weights", "used"),
    [
        pytest.param([0.5, 0.0, 0.25], [True, True, False, False], id="of members with weight, one suffices"),
        pytest.param([0.0, 0.0, 0.0], [True, False, False, False], id="without weight, all are needed"),
    ],
)
@pytest.mark.parametrize("capacity", [3, 4])
def test_a_parameter_is_used_if_a_member_with_weight_or_else_every_member_has_a_gradient(
    weights, used, capacity
):
    layout = TrailerLayout(capacity, parameters=4, hyperparameters=0)
    common = {"is_stale": False, "round_s": 0.0, "writes": 0, "is_preempted": False, "offset_s": 0.0}
    has_gradient = [[True, False, False, False], [True, True, True, False], [True, True, False, False]]
    members = [
        ({**common, "weight": weight, "has_gradient": has, "hyperparameters": []}, (0, 0))
        for weight, has in zip(weights, has_gradient, strict=True)
    ]
    assert layout.decode(summed(layout, members), size=3).used == used
