"""The outer optimizer's state of a worker: what its model moves by, and what one that is behind receives."""

import pytest
import torch

from offbeat.errors import OffbeatError
from offbeat.events import AverageModels, OuterStep
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.runtime.devices.host import Host
from offbeat.runtime.model_averaging.flat_tensors import FlatTensors, Fragment
from offbeat.runtime.model_averaging.outer_state import OuterState
from support.simulated_group import SimulatedLinks

AVERAGING = 8


class Exchange:
    """Copies the state of another worker to this one: its anchor and its momentum."""

    def __init__(self, anchor, momentum):
        self._values, self.roots = [anchor, momentum], []

    def broadcast(self, flat, *, root, exchange_id, index):
        self.roots.append(root)
        flat.fill_(self._values[index - 1])
        return


def averaging_of(fragment, number, behind):
    return AverageModels(
        exchange_id=AVERAGING,
        members=(0, 1),
        joining=(),
        weights=(0.5, 0.5),
        steps=(1, 1),
        includes_buffers=False,
        outer_step=OuterStep(fragment=fragment, number=number, behind=behind),
        leader=0,
        reason="",
    )


class Worker:
    """A worker with one parameter, which takes the mean for its model (a rate of 1, no momentum)."""

    def __init__(self, value, optimizer=None, fragments=1, elements=1):
        self.value = torch.full((elements,), value)
        links = SimulatedLinks(Host())
        self.flat = FlatTensors(lambda: [self.value], links)
        optimizer = optimizer or OuterOptimizer(rate=1.0, momentum=0.0)
        self.outer = OuterState(optimizer, fragments, self.flat, ["value"], links)
        self.outer.begin()

    def average(self, mean, *, behind=False, anchor=0.0, momentum=0.0, fragment=0, number=0):
        """Takes part in a round whose mean this is, in which worker 1 has the newest anchor."""
        averaging = averaging_of(fragment, number, (0,) if behind else ())
        exchange = Exchange(anchor, momentum)
        self.flat.take_snapshot()
        self.outer.send_to_members_behind(exchange, averaging, 0, 1)
        part = self.outer.fragment_of(averaging.outer_step)
        part.of(self.flat.outputs[0]).fill_(mean)
        before = self.outer.step(averaging, 0, self.flat.outputs)
        self.flat.add_difference(before or self.flat.snapshots, part)
        return exchange


def test_a_workers_model_moves_to_the_new_anchor_and_keeps_what_it_has_learnt_meanwhile():
    worker = Worker(0.0)
    worker.value.fill_(2.0)
    worker.flat.take_snapshot()
    worker.average(1.0)
    assert worker.value.tolist() == [1.0]


def test_a_worker_that_is_behind_receives_the_state_from_the_first_other_one_and_keeps_all_it_has_learnt():
    worker = Worker(0.0)
    worker.value.fill_(2.0)
    exchange = worker.average(6.0, behind=True, anchor=5.0)
    assert exchange.roots == [1, 1]
    assert worker.value.tolist() == [8.0]  # the new anchor, 6, and what it has learnt since its own, 2
    worker.average(7.0)
    assert worker.value.tolist() == [7.0]


def test_a_worker_that_is_behind_receives_the_momentum_too():
    worker = Worker(0.0, OuterOptimizer(rate=1.0, momentum=0.5))
    worker.average(4.0, behind=True, anchor=5.0, momentum=2.0)
    # The gradient is 1, the momentum then 0.5 * 2 + 1 = 2, and the anchor 5 - (1 + 0.5 * 2) = 3.
    assert worker.value.tolist() == [3.0]


def test_after_a_mean_of_all_models_a_worker_that_is_behind_moves_from_that_mean():
    worker = Worker(0.0)
    worker.outer.take_anchor([torch.tensor([3.5])])
    worker.value.fill_(4.5)  # the mean, and 1 that it has learnt since
    worker.average(5.0, behind=True, anchor=3.5)
    assert worker.value.tolist() == [6.0]


def test_a_mean_of_all_models_before_the_first_step_is_the_anchor():
    worker = Worker(0.0)
    fresh = OuterState(OuterOptimizer(), 1, worker.flat, ["value"], SimulatedLinks(Host()))
    fresh.take_anchor([torch.tensor([2.0])])
    worker.value.fill_(9.0)
    fresh.begin()
    worker.flat.outputs[0].fill_(2.0)
    fresh.step(averaging_of(0, 0, ()), 0, worker.flat.outputs)
    assert worker.flat.outputs[0].tolist() == [2.0]


def test_a_round_of_a_part_changes_no_other_part():
    worker = Worker(0.0, fragments=2, elements=4)
    worker.value.fill_(2.0)
    worker.average(1.0, fragment=1)
    assert worker.value.tolist() == [2.0, 2.0, 1.0, 1.0]
    worker.average(5.0, fragment=0)
    assert worker.value.tolist() == [5.0, 5.0, 1.0, 1.0]


def test_parts_hold_all_elements_once_though_there_are_fewer_elements_than_parts():
    flat = torch.arange(3)
    parts = [Fragment(number, 5).of(flat).tolist() for number in range(5)]
    assert [element for part in parts for element in part] == [0, 1, 2]
    for number in range(5):
        before, after = Fragment(number, 5).outside(flat)
        assert [*before.tolist(), *parts[number], *after.tolist()] == [0, 1, 2]


def test_a_checkpoint_holds_anchor_momentum_and_rounds_by_the_parameters_names():
    worker = Worker(8.0, OuterOptimizer(rate=1.0, momentum=0.5), fragments=2, elements=2)
    worker.average(4.0, fragment=0, number=6)  # a gradient of 4
    state = worker.outer.state_dict()
    assert state["rounds"] == 13
    assert state["anchor"]["value"].tolist() == [2.0, 8.0]
    assert [one["value"].tolist() for one in state["buffers"]] == [[4.0, 0.0]]
    other = Worker(0.0, OuterOptimizer(rate=1.0, momentum=0.5, momentum_every=2), fragments=2, elements=2)
    other.outer.load_state_dict(state)
    restored = other.outer.state_dict()
    assert restored["rounds"] == 13
    assert restored["anchor"]["value"].tolist() == [2.0, 8.0]
    assert [one["value"].tolist() for one in restored["buffers"]] == [[4.0, 0.0], [0.0, 0.0]]


def test_a_checkpoint_of_other_parameters_is_refused():
    worker = Worker(0.0)
    state = worker.outer.state_dict()
    state["anchor"]["frozen"] = state["anchor"]["value"]
    with pytest.raises(OffbeatError, match="of the parameters value, got that of value, frozen"):
        worker.outer.load_state_dict(state)
