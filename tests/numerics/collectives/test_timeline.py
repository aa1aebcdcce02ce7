"""A step of training on one line: by hand, tick by tick, the invariants, and AlexNet's."""

import math
from collections import deque
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.models import AlexNet
from offbeat.numerics.collectives.timeline import (
    TimedLayer,
    TimedMessage,
    Timeline,
    benchmark_floor_s,
    ideal_ddp_s,
    least_step_s,
    possible_saving,
    simulate_step,
)


def net(*passes: tuple[float, float]) -> list[TimedLayer]:
    return [TimedLayer(name=f"layer{i}", forward_s=f, backward_s=b) for i, (f, b) in enumerate(passes)]


def message(layer: int, *steps_s: float, latency_s: float = 0.0) -> TimedMessage:
    return TimedMessage(layer=layer, steps_s=steps_s, latency_s=latency_s)


def compute_s(layers: list[TimedLayer]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def transfer_s(messages: list[TimedMessage]) -> float:
    return sum(one.transfer_s for one in messages)


def spans(timeline: Timeline) -> list[tuple[float, float]]:
    return [(travel.start_s, travel.end_s) for travel in timeline.transmissions]


# By hand ------------------------------------------------------------------------------------------------

# The last layer's gradients are ready at 1 s and need the line for 6 s, the first one's at 3 s, for 2 s.
TWO = net((1, 2), (3, 1))
TWO_MESSAGES = [message(0, 2), message(1, 6)]


@pytest.mark.parametrize(
    ("settings", "sent", "exposed", "step"),
    [
        ({"order": "fifo", "overlap": "none"}, [(9, 11), (3, 9)], (8, 0), 15),
        ({"order": "fifo", "overlap": "backward"}, [(7, 9), (1, 7)], (6, 0), 13),
        ({"order": "fifo"}, [(7, 9), (1, 7)], (6, 0), 13),
        ({"order": "shared"}, [(3, 7), (1, 9)], (4, 1), 12),
        ({"order": "priority"}, [(3, 5), (1, 9)], (2, 3), 12),
        ({"order": "priority", "overlap": "backward"}, [(3, 5), (1, 9)], (6, 0), 13),
        ({"order": "priority", "in_flight_s": 1}, [(4, 6), (1, 9)], (3, 2), 12),
        ({"order": "priority", "in_flight_s": 3}, [(6, 8), (1, 9)], (5, 0), 12),
        ({"order": "priority", "in_flight_s": 3.5}, [(6.5, 8.5), (1, 9)], (5.5, 0), 12.5),
        ({"order": "priority", "in_flight_s": math.inf}, [(7, 9), (1, 7)], (6, 0), 13),
    ],
)
def test_two_layers_by_hand(settings, sent, exposed, step):
    timeline = simulate_step(TWO, TWO_MESSAGES, **settings)
    assert spans(timeline) == sent
    assert timeline.exposed_s == exposed
    assert timeline.step_s == step


def test_the_bounds_of_two_layers_by_hand():
    assert benchmark_floor_s(TWO, TWO_MESSAGES) == 9  # 7 s of computation and 2 s for the first layer
    assert least_step_s(TWO, TWO_MESSAGES) == 12  # 4 s of the last layer and 8 s for both


# A fused message of the first two layers is ready with the first, at 3 s; the last layer's takes two turns.
THREE = net((1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize(
    ("order", "latency", "sent", "exposed"),
    [
        # The two turns of the last layer's: 1 to 3 and, its latency over at 4, 4 to 6. The line is free at 3.
        ("fifo", 1, [(3, 6), (1, 7)], (3, 0, 0)),
        ("priority", 1, [(3, 6), (1, 7)], (3, 0, 0)),
        # Without latency both want the line at 3.
        ("fifo", 0, [(5, 8), (1, 5)], (5, 0, 0)),
        ("priority", 0, [(3, 6), (1, 6)], (3, 0, 0)),
        # Alone, it has its second turn at 3; then each has half: the one second of the other's takes two.
        ("shared", 0, [(3, 7), (1, 6)], (4, 0, 0)),
    ],
)
def test_three_layers_with_latency_and_turns_by_hand(order, latency, sent, exposed):
    messages = [message(0, 1, latency_s=2), message(2, 2, 2, latency_s=latency)]
    timeline = simulate_step(THREE, messages, order=order)
    assert spans(timeline) == sent
    assert timeline.exposed_s == exposed
    first_s = 3 + exposed[0]
    assert timeline.forward_starts_s == (first_s, first_s + 1, first_s + 2)
    assert timeline.step_s == first_s + 3


def test_shares_of_three_by_hand():
    """One has 1 s alone; two half of the next each; then each a third, until the first is done."""
    timeline = simulate_step(THREE, [message(0, 3), message(1, 3), message(2, 3)], order="shared")
    assert spans(timeline) == [(3, 10), (2, 9.5), (1, 7.5)]
    assert timeline.step_s == 13


def test_a_layer_without_messages_hides_the_wait_of_the_layers_after_it():
    layers = net((2, 0), (1, 1))
    timeline = simulate_step(layers, [message(1, 2)])
    assert timeline.forward_starts_s == (1, 3)
    assert timeline.exposed_s == (0, 0)
    assert timeline.step_s == 4


def test_without_messages_a_step_is_its_computation():
    assert simulate_step(TWO, []).step_s == least_step_s(TWO, []) == benchmark_floor_s(TWO, []) == 7


@pytest.mark.parametrize("order", ["fifo", "priority"])
def test_between_messages_of_one_layer_their_order_counts(order):
    assert spans(simulate_step(net((1, 1)), [message(0, 2), message(0, 3)], order=order)) == [(1, 3), (3, 6)]
    assert spans(simulate_step(net((1, 1)), [message(0, 3), message(0, 2)], order=order)) == [(1, 4), (4, 6)]


# Tick by tick -------------------------------------------------------------------------------------------


class Ticks:
    """The same in ticks, over several steps: a loop of passes next to a line that moves a unit at a time."""

    def __init__(self, layers, messages, order, overlap, in_flight):
        self.layers, self.messages, self.order, self.overlap = layers, messages, order, overlap
        self.in_flight = in_flight
        self.now = 0
        self.waiting = {}  # message -> units of its step that are not on the line
        self.line = deque()  # units on the line, by message
        self.unserved = {}  # message -> units of its step that the line has not moved
        self.step = [0] * len(messages)
        self.arrivals = []  # (when, message) for a next step, or for having arrived
        self.arrived = set(range(len(messages)))
        self.started, self.ended = {}, {}

    def first_waiting(self):
        sign = 1 if self.order == "priority" else -1
        return min(self.waiting, key=lambda one: (sign * self.messages[one].layer, one))

    def enqueue(self):
        while self.waiting and len(self.line) < self.in_flight:
            one = self.first_waiting()
            self.line.append(one)
            self.waiting[one] -= 1
            if not self.waiting[one]:
                del self.waiting[one]

    def begin_step(self, one):
        self.waiting[one] = self.unserved[one] = self.messages[one].steps_s[self.step[one]]

    def accept_arrivals(self):
        for arrival in [arrival for arrival in self.arrivals if arrival[0] <= self.now]:
            self.arrivals.remove(arrival)
            one = arrival[1]
            self.step[one] += 1
            if self.step[one] < len(self.messages[one].steps_s):
                self.begin_step(one)
            else:
                self.arrived.add(one)
                self.ended[one] = self.now

    def serve(self):
        """Move a unit of the first message, or as many of each in turn."""
        if self.order == "shared":
            moved = {one: min(1 / len(self.waiting), left) for one, left in self.waiting.items()}
            for one, units in moved.items():
                self.waiting[one] -= units
                if self.waiting[one] <= 1e-9:
                    del self.waiting[one]
        elif self.in_flight:
            moved = {self.line.popleft(): 1} if self.line else {}
        else:
            moved = {self.first_waiting(): 1} if self.waiting else {}
            for one in moved:
                self.waiting[one] -= 1
                if not self.waiting[one]:
                    del self.waiting[one]
        for one, units in moved.items():
            self.started.setdefault(one, self.now)
            self.unserved[one] -= units
            if self.unserved[one] <= 1e-9:
                self.arrivals.append((self.now + 1 + self.messages[one].latency_s, one))

    def gradients(self, layer):
        for one, its in enumerate(self.messages):
            if (its.layer if self.overlap != "none" else 0) == layer:
                self.arrived.discard(one)
                self.step[one] = 0
                self.begin_step(one)

    def may_begin(self, layer):
        return all(
            one in self.arrived
            for one, its in enumerate(self.messages)
            if (its.layer if self.overlap == "both" else 0) == layer
        )

    def steps(self, count):
        """Yield the beginning of each backward pass, with all that began, started and ended in that step."""
        passes = [("backward", layer) for layer in reversed(range(len(self.layers)))]
        passes += [("forward", layer) for layer in range(len(self.layers))]
        index, left, begins, forwards = 0, None, 0, {}
        while True:
            self.enqueue()  # units of earlier messages first, then the new ones
            self.accept_arrivals()
            while True:
                kind, layer = passes[index]
                if left is None:
                    if kind == "forward" and not self.may_begin(layer):
                        break
                    if kind == "forward":
                        forwards[layer] = self.now
                    left = (
                        self.layers[layer].forward_s if kind == "forward" else self.layers[layer].backward_s
                    )
                if left:
                    break
                if kind == "backward":
                    self.gradients(layer)
                left, index = None, index + 1
                if index == len(passes):
                    yield begins, self.now, forwards, self.started, self.ended
                    count -= 1
                    if not count:
                        return
                    index, begins, forwards, self.started, self.ended = 0, self.now, {}, {}, {}
            self.enqueue()
            self.serve()
            left = left - 1 if left is not None else None
            self.now += 1


TICKS = st.integers(0, 5)
SIZES = st.integers(1, 8)  # a size of 0 would never end in ticks
NETS = st.lists(st.tuples(TICKS, TICKS), min_size=1, max_size=4).map(lambda passes: net(*passes))


@st.composite
def jobs(draw, nets=NETS, turns_max=1, latency_max=0, sizes=SIZES):
    """Layers and their messages."""
    layers = draw(nets)
    one = st.builds(
        TimedMessage,
        layer=st.integers(0, len(layers) - 1),
        steps_s=st.lists(sizes, min_size=1, max_size=turns_max).map(tuple),
        latency_s=st.integers(0, latency_max),
    )
    return layers, draw(st.lists(one, max_size=5))


ORDERS = st.sampled_from(["fifo", "priority", "shared"])
OVERLAPS = st.sampled_from(["none", "backward", "both"])


@settings(deadline=None, max_examples=300)
@given(jobs(turns_max=3, latency_max=4), st.sampled_from(["fifo", "priority"]), OVERLAPS, st.integers(0, 7))
def test_a_timeline_equals_a_simulation_tick_by_tick_in_each_of_several_steps(job, order, overlap, in_flight):
    layers, messages = job
    timeline = simulate_step(layers, messages, order=order, overlap=overlap, in_flight_s=in_flight)
    ticks = Ticks(layers, messages, order, overlap, in_flight)
    for begin, end, forwards, started, ended in ticks.steps(3):
        assert timeline.step_s == end - begin
        assert timeline.forward_starts_s == tuple(forwards[i] - begin for i in range(len(layers)))
        assert spans(timeline) == [(started[i] - begin, ended[i] - begin) for i in range(len(messages))]


@settings(deadline=None, max_examples=30)
@given(jobs(turns_max=2, latency_max=4), OVERLAPS)
def test_a_shared_line_equals_a_simulation_in_small_ticks(job, overlap):
    """A tick is 1/100 s; a message done within one leaves its rest, so the times differ by a few."""
    layers, messages = job
    fine = [replace(one, forward_s=one.forward_s * 100, backward_s=one.backward_s * 100) for one in layers]
    small = [
        replace(one, steps_s=tuple(100 * step for step in one.steps_s), latency_s=one.latency_s * 100)
        for one in messages
    ]
    timeline = simulate_step(layers, messages, order="shared", overlap=overlap)
    *_, (begin, end, forwards, started, ended) = Ticks(fine, small, "shared", overlap, 0).steps(2)
    near = {"abs": 0.01 * 4 * (1 + sum(len(one.steps_s) for one in messages))}
    assert timeline.step_s == pytest.approx((end - begin) / 100, **near)
    for i in range(len(layers)):
        assert timeline.forward_starts_s[i] == pytest.approx((forwards[i] - begin) / 100, **near)
    for i, (start_s, end_s) in enumerate(spans(timeline)):
        assert start_s == pytest.approx((started[i] - begin) / 100, **near)
        assert end_s == pytest.approx((ended[i] - begin) / 100, **near)


# Invariants ---------------------------------------------------------------------------------------------

EXACT = {"rel": 1e-9, "abs": 1e-9}
TIMES = st.floats(0, 10)
FLOAT_NETS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5).map(lambda passes: net(*passes))
# Each layer's gradients take their time, so that no two layers' are ready at once; exact, in whole numbers.
APART = st.lists(st.tuples(TICKS, st.integers(1, 5)), min_size=1, max_size=5).map(lambda one: net(*one))
ANY = jobs(nets=FLOAT_NETS, turns_max=3, latency_max=3, sizes=TIMES)
WITHOUT_LATENCY = jobs(nets=FLOAT_NETS, turns_max=3, sizes=TIMES)
AT_ONCE = jobs(nets=FLOAT_NETS, sizes=TIMES)


def step_s(job, **settings) -> float:
    return simulate_step(*job, **settings).step_s


@given(ANY, ORDERS, OVERLAPS)
def test_a_step_takes_computation_and_waiting_and_no_less_than_its_floor(job, order, overlap):
    layers, messages = job
    timeline = simulate_step(layers, messages, order=order, overlap=overlap)
    assert timeline.step_s == pytest.approx(compute_s(layers) + sum(timeline.exposed_s), **EXACT)
    least_s, its_floor_s = least_step_s(layers, messages), benchmark_floor_s(layers, messages)
    assert max(compute_s(layers), transfer_s(messages)) <= its_floor_s + 1e-9
    assert its_floor_s <= least_s + 1e-9
    assert least_s <= timeline.step_s + 1e-9


@given(ANY, ORDERS, OVERLAPS, st.floats(0, 20))
def test_no_forward_pass_precedes_its_gradients_and_no_message_its_backward_pass(
    job, order, overlap, in_flight_s
):
    layers, messages = job
    in_flight_s = 0 if order == "shared" else in_flight_s
    timeline = simulate_step(layers, messages, order=order, overlap=overlap, in_flight_s=in_flight_s)
    for one, travel in zip(messages, timeline.transmissions, strict=True):
        assert travel.end_s <= timeline.forward_starts_s[one.layer if overlap == "both" else 0]
        assert travel.ready_s == pytest.approx(
            sum(layer.backward_s for layer in layers[0 if overlap == "none" else one.layer :]), **EXACT
        )
        alone_s = one.transfer_s + len(one.steps_s) * one.latency_s
        assert travel.ready_s <= travel.start_s
        assert travel.start_s + alone_s <= travel.end_s + 1e-9


@given(AT_ONCE, ORDERS, st.floats(0, 20))
def test_the_line_is_never_idle_while_a_message_waits(job, order, in_flight_s):
    """In any order, the last one arrives when a queue of all that has become ready would be empty."""
    layers, messages = job
    timeline = simulate_step(
        layers, messages, order=order, in_flight_s=0 if order == "shared" else in_flight_s
    )
    busy_until_s = 0.0
    for travel, one in sorted(
        zip(timeline.transmissions, messages, strict=True), key=lambda both: both[0].ready_s
    ):
        busy_until_s = max(busy_until_s, travel.ready_s) + one.transfer_s
    assert max((travel.end_s for travel in timeline.transmissions), default=0.0) == pytest.approx(
        busy_until_s, **EXACT
    )


@given(WITHOUT_LATENCY)
def test_without_latency_no_order_is_better_than_priority_and_none_is_worse_than_fifo(job):
    best_s, shared_s, worst_s = (step_s(job, order=order) for order in ("priority", "shared", "fifo"))
    assert best_s == pytest.approx(least_step_s(*job), **EXACT)
    assert best_s <= shared_s + 1e-9
    assert shared_s <= worst_s + 1e-9


@given(AT_ONCE, st.floats(0, 20), st.floats(0, 20))
def test_work_in_flight_only_costs_and_never_more_than_fifo(job, in_flight_s, more_s):
    """For messages of one turn: one of several waits behind as much before each."""
    few_s, many_s = (step_s(job, in_flight_s=in_flight_s + extra_s) for extra_s in (0, more_s))
    assert few_s <= many_s + 1e-9
    assert many_s <= step_s(job, order="fifo") + 1e-9


@given(jobs(nets=APART))
def test_with_everything_in_flight_priority_is_fifo(job):
    assert simulate_step(*job, in_flight_s=math.inf) == simulate_step(*job, order="fifo")


@given(WITHOUT_LATENCY)
def test_fifo_gains_nothing_from_the_next_forward_pass_if_the_first_layer_has_gradients(job):
    layers, messages = job
    backward_s = step_s(job, order="fifo", overlap="backward")
    assert step_s(job, order="fifo") <= backward_s + 1e-9
    with_first = (layers, [*messages, message(0, 0.5)])
    expected_s = step_s(with_first, order="fifo", overlap="backward")
    assert step_s(with_first, order="fifo") == pytest.approx(expected_s, **EXACT)


@given(WITHOUT_LATENCY, ORDERS)
def test_overlapping_more_never_costs_and_saves_half_at_most(job, order):
    layers, messages = job
    none_s, backward_s, both_s = (step_s(job, order=order, overlap=o) for o in ("none", "backward", "both"))
    assert none_s == pytest.approx(compute_s(layers) + transfer_s(messages), **EXACT)
    assert both_s <= backward_s + 1e-9
    assert backward_s <= none_s + 1e-9
    assert none_s <= 2 * both_s + 1e-9


@given(WITHOUT_LATENCY, ORDERS, st.data())
def test_without_latency_a_longer_transfer_never_makes_a_step_shorter(job, order, data):
    layers, messages = job
    longer = [
        replace(one, steps_s=tuple(step_s + data.draw(TIMES) for step_s in one.steps_s)) for one in messages
    ]
    assert step_s(job, order=order) <= step_s((layers, longer), order=order) + 1e-9


@given(ANY, ORDERS, OVERLAPS, st.sampled_from([0.125, 4.0]))
def test_the_unit_of_time_does_not_matter(job, order, overlap, factor):
    layers, messages = job
    scaled = (
        [
            replace(one, forward_s=one.forward_s * factor, backward_s=one.backward_s * factor)
            for one in layers
        ],
        [
            replace(one, steps_s=tuple(factor * s for s in one.steps_s), latency_s=one.latency_s * factor)
            for one in messages
        ],
    )
    expected_s = factor * step_s(job, order=order, overlap=overlap)
    assert step_s(scaled, order=order, overlap=overlap) == pytest.approx(expected_s, **EXACT)


# Exceptions with latency ---------------------------------------------------------------------------------


def test_with_latency_the_order_of_need_can_be_worse_than_fifo():
    """A later layer's long latency begins late, because the first layer's message goes first."""
    layers, messages = net((1, 1), (1, 1)), [message(0, 2), message(1, 2, latency_s=6)]
    # fifo: the later one is on the line from 1 to 3 and there at 9. priority: from 1 to 2 and 4 to 5, at 11.
    assert step_s((layers, messages), order="fifo") == 10
    assert step_s((layers, messages)) == 12


def test_with_latency_a_longer_transfer_can_make_a_step_shorter():
    """As in all list scheduling: the longer first turn lets the other's second turn go first."""
    layers = net((0, 1), (6, 1))
    later = message(1, 1, 1, latency_s=3)  # turns at 1, and from 5 on
    # The first layer's: 2 to 3 and 5 to 6, or 2 to 4 and 6 to 7.
    assert spans(simulate_step(layers, [message(0, 1, 1, latency_s=2), later])) == [(2, 8), (1, 10)]
    assert spans(simulate_step(layers, [message(0, 2, 1, latency_s=2), later])) == [(2, 9), (1, 9)]
    assert step_s((layers, [message(0, 1, 1, latency_s=2), later])) == 16
    assert step_s((layers, [message(0, 2, 1, latency_s=2), later])) == 15


# Few-step schedules pay where latency dominates ----------------------------------------------------------

BETA = 8 / 1e9  # seconds a byte at 1 Gbit/s


def ring(layer: int, size_bytes: float, alpha_s: float, workers: int = 4) -> TimedMessage:
    steps = 2 * (workers - 1)
    return message(layer, *[size_bytes / workers * BETA] * steps, latency_s=alpha_s)


def recursive_doubling(layer: int, size_bytes: float, alpha_s: float, workers: int = 4) -> TimedMessage:
    return message(layer, *[size_bytes * BETA] * int(math.log2(workers)), latency_s=alpha_s)


@pytest.mark.parametrize(
    ("in_flight_s", "crossover_bytes"),
    [(0.0, 50e3), (1e-3, 1.05e6), (4e-3, 4.05e6)],
)
def test_recursive_doubling_beats_the_ring_up_to_8_alpha_over_beta_with_the_delay_in_flight(
    in_flight_s, crossover_bytes
):
    """Appendix C: 8 alpha / beta, 50 kB at 50 µs. On a busy line each step waits for bytes in flight."""
    layers = net((0.1, 0.1), (0.1, 0.1))
    bulk = message(1, 2.0)

    def time_s(schedule, size_bytes) -> float:
        timeline = simulate_step(layers, [schedule(0, size_bytes, 50e-6), bulk], in_flight_s=in_flight_s)
        travel = timeline.transmissions[0]
        return travel.end_s - travel.ready_s

    assert crossover_bytes == pytest.approx(8 * (50e-6 + in_flight_s) / BETA)
    assert time_s(ring, crossover_bytes) == pytest.approx(time_s(recursive_doubling, crossover_bytes))
    assert time_s(ring, 0.99 * crossover_bytes) > time_s(recursive_doubling, 0.99 * crossover_bytes)
    assert time_s(ring, 1.01 * crossover_bytes) < time_s(recursive_doubling, 1.01 * crossover_bytes)


# Possible savings, in formulas ---------------------------------------------------------------------------


def test_the_possible_saving_at_known_ratios():
    """25 % and 33 % at C = S for f = 1/3 and 1/2, 7.6 % (1/13) at C = S/4, nothing at S <= (1-f)C."""

    def saving(compute_s: float, forward_share: float) -> float:
        return possible_saving(compute_s=compute_s, forward_share=forward_share, transfer_s=1.0)

    assert saving(1.0, 1 / 3) == pytest.approx(1 / 4)
    assert saving(1.0, 1 / 2) == pytest.approx(1 / 3)
    assert saving(0.25, 1 / 3) == pytest.approx(1 / 13)
    assert saving(1.5, 1 / 3) == pytest.approx(0)
    assert saving(2.0, 1 / 2) == saving(5.0, 1 / 2) == 0
    # Between, fC / (fC + S) would promise 3/7.
    assert saving(1.5, 1 / 2) == pytest.approx(1 / 7)


@given(st.floats(0.01, 10), st.floats(0, 1), st.floats(0.01, 10))
def test_the_saving_follows_its_three_formulas(c, f, s):
    saving = possible_saving(compute_s=c, forward_share=f, transfer_s=s)
    bound = f * c / (f * c + s)
    if s >= c:
        assert saving == pytest.approx(bound, **EXACT)
    elif s > (1 - f) * c:
        assert saving == pytest.approx((s - (1 - f) * c) / (f * c + s), **EXACT)
    else:
        assert saving == pytest.approx(0, **EXACT)
    assert -1e-9 <= saving <= min(bound, f / (1 + f)) + 1e-9


@given(st.floats(0.1, 10), st.floats(0, 1), st.floats(0.1, 10))
def test_the_ideal_is_that_of_a_net_of_very_many_alike_layers(c, f, s):
    many = 400
    layers = net(*[(f * c / many, (1 - f) * c / many)] * many)
    messages = [message(layer, s / many) for layer in range(many)]
    # The bounds of the first and last layers differ from the ideal by a layer's computation and transfer.
    near = {"abs": 2 * (c + s) / many}
    expected_s = ideal_ddp_s(compute_s=c, forward_share=f, transfer_s=s)
    assert simulate_step(layers, messages, order="fifo", overlap="backward").step_s == pytest.approx(
        expected_s, **near
    )
    assert simulate_step(layers, messages).step_s == pytest.approx(max(c, s), **near)


# AlexNet at 1 Gbit/s -------------------------------------------------------------------------------------


def alexnet_shapes() -> list[tuple[str, int, int]]:
    """Name, parameters and multiplications of a sample's forward pass, of each layer."""
    with torch.device("meta"):
        model = AlexNet()
        found = []

        def note(name):
            def hook(module, _, output):
                parameters = sum(one.numel() for one in module.parameters())
                found.append((name, parameters, output[0].numel() * module.weight[0].numel()))

            return hook

        for name, module in model.named_modules():
            if hasattr(module, "weight"):
                module.register_forward_hook(note(name))
        model(torch.empty(1, 3, 227, 227))
    return found


SHAPES = alexnet_shapes()
WORKERS = 4
GOODPUT = 956e6 / 8  # bytes a second of TCP at 1 Gbit/s
BYTES = 4 * 62_378_344
RING_S = 2 * (WORKERS - 1) / WORKERS * BYTES / GOODPUT


def alexnet(compute_s: float, forward_share: float) -> tuple[list[TimedLayer], list[TimedMessage]]:
    """AlexNet whose layers compute as long as they multiply, each with an all-reduce of its own."""
    multiplications = sum(one for _, _, one in SHAPES)
    layers = [
        TimedLayer(
            name=name,
            forward_s=forward_share * compute_s * own / multiplications,
            backward_s=(1 - forward_share) * compute_s * own / multiplications,
        )
        for name, _, own in SHAPES
    ]
    return layers, [message(i, RING_S * size * 4 / BYTES) for i, (_, size, _) in enumerate(SHAPES)]


def test_alexnets_layers():
    assert [name for name, _, _ in SHAPES] == [
        *("features.0", "features.3", "features.6", "features.8", "features.10"),
        *("classifier.1", "classifier.4", "classifier.6"),
    ]
    assert sum(size for _, size, _ in SHAPES) == 62_378_344
    assert sum(own for _, _, own in SHAPES) == 1_135_256_096
    _, messages = alexnet(1.0, 1 / 3)
    assert transfer_s(messages) == pytest.approx(3.132, abs=1e-3)
    assert transfer_s(messages[5:]) == pytest.approx(2.944, abs=1e-3)  # what the others queue behind


CASES = [(share, ratio) for share in (1 / 3, 1 / 2) for ratio in (0.25, 0.5, 0.75, 1.0, 1.5)]


@pytest.mark.parametrize(("forward_share", "ratio"), CASES)
def test_alexnet_gains_nothing_in_fifo_order_most_by_sharing_and_nearly_all_by_priority(forward_share, ratio):
    job = alexnet(ratio * RING_S, forward_share)
    ddp_s = step_s(job, order="fifo", overlap="backward")
    possible_s = ddp_s - least_step_s(*job)
    assert step_s(job, order="fifo") == pytest.approx(ddp_s)
    assert ddp_s - step_s(job, order="shared") >= 0.8 * possible_s
    assert ddp_s - step_s(job) == pytest.approx(possible_s)
    assert step_s(job, in_flight_s=0.005) <= 1.004 * benchmark_floor_s(*job)
    assert step_s(job) <= step_s(job, order="fifo", overlap="none") <= 2 * step_s(job)


@pytest.mark.parametrize(("forward_share", "ratio"), CASES)
def test_alexnets_ddp_is_nearly_ideal_and_its_least_step_nearly_the_floor(forward_share, ratio):
    job = alexnet(ratio * RING_S, forward_share)
    ideal_s = ideal_ddp_s(compute_s=ratio * RING_S, forward_share=forward_share, transfer_s=RING_S)
    assert ideal_s <= step_s(job, order="fifo", overlap="backward") <= 1.0025 * ideal_s
    assert 1 - 1e-9 <= least_step_s(*job) / benchmark_floor_s(*job) <= 1.0036


def test_the_prototypes_times_are_those_of_the_model():
    """At C = 2.1 s it took 3.90 s as DDP, 3.81 in FIFO order, 3.13 with priority; f = 1/3 fits."""
    job = alexnet(2.1, 1 / 3)
    assert step_s(job, order="fifo", overlap="backward") == pytest.approx(3.90, rel=0.02)
    assert step_s(job, order="fifo") == pytest.approx(3.81, rel=0.01)
    assert step_s(job) == pytest.approx(3.13, rel=0.005)


# Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_s", [-1.0, math.nan, math.inf])
def test_impossible_times_are_refused(time_s):
    with pytest.raises(ValueError, match="layer conv1: expected passes of finite time"):
        TimedLayer(name="conv1", forward_s=time_s, backward_s=1.0)
    with pytest.raises(ValueError, match="layer conv1: expected passes of finite time"):
        TimedLayer(name="conv1", forward_s=1.0, backward_s=time_s)
    with pytest.raises(ValueError, match="at least one step, and finite times"):
        message(0, 1.0, time_s)
    with pytest.raises(ValueError, match="at least one step, and finite times"):
        message(0, 1.0, latency_s=time_s)
    with pytest.raises(ValueError, match="expected finite times of at least 0 s and a forward share"):
        ideal_ddp_s(compute_s=time_s, forward_share=0.5, transfer_s=1.0)


@pytest.mark.parametrize(("layer", "steps_s"), [(-1, (1.0,)), (0, ())])
def test_messages_without_a_layer_or_a_step_are_refused(layer, steps_s):
    with pytest.raises(ValueError, match="expected a layer from 0, at least one step"):
        TimedMessage(layer=layer, steps_s=steps_s)


@pytest.mark.parametrize(
    ("layers", "messages", "settings", "text"),
    [
        ([], [], {}, "expected at least one layer, got none"),
        (TWO, [message(2, 1.0)], {}, "expected messages of layers 0 to 1, got one of 2"),
        (TWO, TWO_MESSAGES, {"order": "lifo"}, "expected an order of fifo, priority, shared .* got 'lifo'"),
        (TWO, TWO_MESSAGES, {"overlap": "forward"}, "an overlap of none, backward, both, got .* 'forward'"),
        (TWO, TWO_MESSAGES, {"in_flight_s": -1.0}, "expected at least 0 s of work in flight, got -1.0"),
        (TWO, TWO_MESSAGES, {"in_flight_s": math.nan}, "expected at least 0 s of work in flight, got nan"),
        (TWO, TWO_MESSAGES, {"order": "shared", "in_flight_s": 1.0}, "leave in_flight_s at 0"),
    ],
)
def test_impossible_simulations_are_refused(layers, messages, settings, text):
    with pytest.raises(ValueError, match=text):
        simulate_step(layers, messages, **settings)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_from_0_to_1(share):
    with pytest.raises(ValueError, match="a forward share from 0 to 1"):
        possible_saving(compute_s=1.0, forward_share=share, transfer_s=1.0)


def test_a_saving_without_computation_and_transfer_is_refused():
    with pytest.raises(ValueError, match="more than 0 s, got none"):
        possible_saving(compute_s=0.0, forward_share=0.5, transfer_s=0.0)
