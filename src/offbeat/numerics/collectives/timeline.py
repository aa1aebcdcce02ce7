"""Timeline of one training step on one line: when gradients are sent, and which forward passes wait for them.

A predictive model; nothing here reads a clock, draws random numbers or sends anything, and nothing imports
more than the standard library.

The model: a backward pass, last layer first; then the forward pass of the next step, first layer first. A
layer's gradients are ready when its backward pass is over, and its next forward pass waits until they have
been all-reduced. All workers are equal and communication never slows down computation, so that the time of
one worker is the time of all. All messages share one line (the worker's network link), which does one second
of work per second while it has any. A message alternates: each step of its schedule occupies the line for
some time, and is followed by a latency in which others can use the line.

Consequences, which are tested:

- The period is that of the first step: every message has arrived before the forward pass that follows its
  backward pass is over, so that the next backward pass finds the line idle.
- Without latency, no order is better than `priority` with nothing in flight (`least_step_s`), and none is
  worse than `fifo`, since gradients become ready in the reverse of the order in which they are needed.
- In that case `fifo` gains nothing by overlapping the next forward pass too, if the first layer has
  gradients: they are sent last and needed first, so that all others have arrived before that pass begins.
- With latency these rules do not hold, as in all list scheduling: even a longer transfer may shorten a step.

Source: specification 3.9 (`simulate_step`, one channel); the order of need is that of Jayarajan et al. 2019,
"Priority-based parameter propagation for distributed DNN training", and the argument for it Jackson's rule
for jobs with release dates and tails (J. Carlier, "The one-machine sequencing problem", European Journal of
Operational Research 11 (1982)). Deviations: see `simulate_step`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

LineOrder: TypeAlias = Literal["fifo", "priority", "shared"]
"""Which message has the line: the one that was ready first; the one needed first; all in equal shares."""

TimelineOverlap: TypeAlias = Literal["none", "backward", "both"]
"""What communication overlaps: nothing; the backward pass (as in DDP); also the next forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedLayer:
    """Computation of one layer.

    Computation without gradients to exchange (the loss, a resizing before the first layer) is a layer without
    messages.

    Attributes:
        name: for errors and traces.
        forward_s: duration of its forward pass, including the optimizer's step for it.
        backward_s: duration of its backward pass, until all its gradients are ready.
    """

    name: str
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if not _are_times(self.forward_s, self.backward_s):
            raise ValueError(
                f"layer {self.name}: expected passes of finite time, at least 0 s, "
                f"got {self.forward_s} and {self.backward_s}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedMessage:
    """One all-reduce of fused gradients, as it occupies one worker's line.

    Attributes:
        layer: index of the first layer, in the order of the forward pass, whose gradients it carries. Of all
            its layers, this is the last to be ready and the first to be needed.
        steps_s: how long each step of its schedule occupies the line.
        latency_s: time after each step, without use of the line, before the next step can begin (after the
            last one: before the message has arrived).
    """

    layer: int
    steps_s: tuple[float, ...]
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.layer < 0 or not self.steps_s or not _are_times(*self.steps_s, self.latency_s):
            raise ValueError(
                "expected a layer from 0, at least one step, and finite times of at least 0 s, "
                f"got layer {self.layer}, steps of {self.steps_s} s and a latency of {self.latency_s} s"
            )

    @property
    def transfer_s(self) -> float:
        """How long it occupies the line in all."""
        return sum(self.steps_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transmission:
    """When one message is sent, in seconds from the start of the backward pass.

    Attributes:
        ready_s: it may start.
        start_s: its first byte is sent; under `shared`, that is at once.
        end_s: it has arrived.
    """

    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One step in the steady state: a backward pass, and the forward pass that follows.

    Attributes:
        step_s: from the start of a backward pass to that of the next one.
        forward_starts_s: start of each layer's forward pass, from the start of the backward pass.
        exposed_s: how long each layer's forward pass waits after all layers before it are done. The step is
            the sum of these and the computation.
        transmissions: when each message is sent, in the order in which they were given.
    """

    step_s: float
    forward_starts_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    transmissions: tuple[Transmission, ...]


def simulate_step(
    layers: Sequence[TimedLayer],
    messages: Sequence[TimedMessage],
    *,
    order: LineOrder = "priority",
    overlap: TimelineOverlap = "both",
    in_flight_s: float = 0.0,
) -> Timeline:
    """Predict one step of training.

    Under `fifo` and `priority`, a message that precedes another in the order (of readiness or of need; within
    a layer, as given) has the line whenever it can use it, except for work in flight. An urgent message
    therefore overtakes under `priority`; under `fifo`, a message is overtaken only during its latency.

    Deviation from the specification's `simulate_step`: latency does not occupy the line, and work that has
    been handed over cannot be overtaken. If a sender does nothing else during its latency (one all-reduce at
    a time), include it in `steps_s`.

    Args:
        layers: in the order of the forward pass.
        messages: any number for each layer, in any order.
        order: which message has the line.
        overlap: what communication overlaps.
        in_flight_s: how much work is handed to the kernel ahead of the line, in seconds. A step of a message
            waits for up to that much work that follows it in the order. `math.inf` hands over everything as
            soon as it is ready.

    Raises:
        ValueError: no layers, a message of a layer that does not exist, an unknown `order` or `overlap`, or
            an `in_flight_s` that is negative, not a number, or given for `shared`.
    """
    _check(layers, messages, order, overlap, in_flight_s)
    gradients_s = [*accumulate(layer.backward_s for layer in reversed(layers))][::-1]
    backward_s = gradients_s[0]
    ready_s = [backward_s if overlap == "none" else gradients_s[message.layer] for message in messages]
    if order == "shared":
        travels = _serve_shared(messages, ready_s)
    else:
        sign = 1 if order == "priority" else -1
        priorities = [(sign * message.layer, index) for index, message in enumerate(messages)]
        travels = _serve_in_order(messages, ready_s, priorities, in_flight_s)
    needed_by = [message.layer if overlap == "both" else 0 for message in messages]
    return _forward(layers, backward_s, needed_by, travels)


def least_step_s(layers: Sequence[TimedLayer], messages: Sequence[TimedMessage]) -> float:
    """Return a lower bound on the time of a step, in any order of sending; without latency it is reached.

    For any layer k: the transfers of layers 0 to k can only begin after the backward passes of layers k and
    later, and the forward passes of layers k and later can only begin after these transfers. So a step takes
    at least these passes plus the transfers of layers 0 to k. Latencies are not counted; they can only add to
    it.

    Source: the bound of J. Carlier 1982, which the preemptive schedule reaches (`priority`). Of its subsets
    of jobs only these matter, since gradients that are ready later are needed earlier.
    """
    transfers_s = [0.0] * len(layers)
    for message in messages:
        transfers_s[message.layer] += message.transfer_s
    from_here_s = [*accumulate(layer.forward_s + layer.backward_s for layer in reversed(layers))][::-1]
    return max(map(sum, zip(from_here_s, accumulate(transfers_s), strict=True)))


def benchmark_floor_s(layers: Sequence[TimedLayer], messages: Sequence[TimedMessage]) -> float:
    """Return the floor of the benchmarks: all computation plus the first layer's transfers, or all transfers.

    The first layer's gradients are ready when the backward pass is over, and the forward pass needs them
    first. A step takes at least the greater of the two; `least_step_s` is a tighter bound.
    """
    computes_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    first_s = sum(message.transfer_s for message in messages if message.layer == 0)
    return max(computes_s + first_s, sum(message.transfer_s for message in messages))


def ideal_ddp_s(*, compute_s: float, forward_share: float, transfer_s: float) -> float:
    """Return the step time of an ideal DDP, whose gradients become ready evenly and in small parts.

    It is the forward pass, plus the longer of backward pass and communication: fC + max((1 - f) C, S). A
    network of few layers takes longer: when its last gradients are sent, no computation is left to hide them.

    Args:
        compute_s: C, both passes.
        forward_share: f, share of the forward pass, 0 to 1.
        transfer_s: S, all communication.

    Raises:
        ValueError: an argument is out of range.
    """
    if not (_are_times(compute_s, transfer_s) and 0 <= forward_share <= 1):
        raise ValueError(
            "expected finite times of at least 0 s and a forward share from 0 to 1, "
            f"got {compute_s} s, {transfer_s} s and {forward_share}"
        )
    return forward_share * compute_s + max((1 - forward_share) * compute_s, transfer_s)


def possible_saving(*, compute_s: float, forward_share: float, transfer_s: float) -> float:
    """Return the largest share of an ideal DDP's time that a step can save by overlapping both passes.

    A step takes at least max(C, S), so it is

    - 0 if S <= (1 - f) C: the backward pass alone covers the communication;
    - (S - (1 - f) C) / (fC + S) from there to S = C;
    - fC / (fC + S) if S >= C: it decreases, from its maximum f / (1 + f) at S = C.

    The last formula is a bound everywhere, but cannot be reached if S < C.

    Args:
        compute_s: C, both passes, more than 0 together with S.
        forward_share: f, share of the forward pass, 0 to 1.
        transfer_s: S, all communication.

    Raises:
        ValueError: an argument is out of range.
    """
    ddp_s = ideal_ddp_s(compute_s=compute_s, forward_share=forward_share, transfer_s=transfer_s)
    if ddp_s == 0:
        raise ValueError("expected computation or communication of more than 0 s, got none")
    return 1 - max(compute_s, transfer_s) / ddp_s


def _forward(
    layers: Sequence[TimedLayer], backward_s: float, needed_by: list[int], travels: list[Transmission]
) -> Timeline:
    """Start each layer when all before it are done and the messages that it needs have arrived."""
    arrived_s = [0.0] * len(layers)
    for index, travel in zip(needed_by, travels, strict=True):
        arrived_s[index] = max(arrived_s[index], travel.end_s)
    now_s, starts_s, exposed_s = backward_s, [], []
    for layer, arrival_s in zip(layers, arrived_s, strict=True):
        starts_s.append(max(now_s, arrival_s))
        exposed_s.append(starts_s[-1] - now_s)
        now_s = starts_s[-1] + layer.forward_s
    return Timeline(
        step_s=now_s,
        forward_starts_s=tuple(starts_s),
        exposed_s=tuple(exposed_s),
        transmissions=tuple(travels),
    )


# The line -----------------------------------------------------------------------------------------------


def _serve_in_order(
    messages: Sequence[TimedMessage],
    ready_s: list[float],
    priorities: list[tuple[int, int]],
    in_flight_s: float,
) -> list[Transmission]:
    """Serve the first waiting message in the order, whenever there is room in flight.

    Work that has been handed over is done in that order. It is therefore enough to know until when it keeps
    the line busy (`busy_until_s`): there is room until that is `in_flight_s` ahead of the time. Work is
    handed over as far as possible before the next arrival, after which another message may be the first in
    order.
    """
    arrivals = [(ready_s[priority[1]], priority, 0) for priority in priorities]
    heapify(arrivals)
    waiting: list[tuple[tuple[int, int], int]] = []
    left_s = [message.steps_s[0] for message in messages]
    start_s: dict[int, float] = {}
    end_s = [0.0] * len(messages)
    busy_until_s = 0.0
    while arrivals or waiting:
        limit_s = arrivals[0][0] + in_flight_s if arrivals else math.inf
        if not waiting or busy_until_s >= limit_s:
            now_s, priority, step = heappop(arrivals)  # of several at the same time, the first in order
            heappush(waiting, (priority, step))
            busy_until_s = max(busy_until_s, now_s)
            continue
        priority, step = waiting[0]
        index = priority[1]
        start_s.setdefault(index, busy_until_s)
        if left_s[index] > limit_s - busy_until_s:
            left_s[index] -= limit_s - busy_until_s
            busy_until_s = limit_s
            continue
        heappop(waiting)
        busy_until_s += left_s[index]
        end_s[index] = busy_until_s + messages[index].latency_s
        if step + 1 < len(messages[index].steps_s):
            left_s[index] = messages[index].steps_s[step + 1]
            heappush(arrivals, (end_s[index], priority, step + 1))
    return _make_travels(ready_s, [start_s[index] for index in range(len(messages))], end_s)


def _serve_shared(messages: Sequence[TimedMessage], ready_s: list[float]) -> list[Transmission]:
    """Serve all waiting messages in equal shares.

    `served_s` grows by the amount that each of them is served, so that the value at which a message will be
    done is known when it arrives.
    """
    arrivals = [(time_s, index, 0) for index, time_s in enumerate(ready_s)]
    heapify(arrivals)
    serving: list[tuple[float, int, int]] = []
    end_s = [0.0] * len(messages)
    now_s = served_s = 0.0
    while arrivals or serving:
        # The difference could be negative by rounding.
        done_s = now_s + max(0.0, serving[0][0] - served_s) * len(serving) if serving else math.inf
        if arrivals and arrivals[0][0] <= done_s:
            arrival_s, index, step = heappop(arrivals)
            if serving:
                served_s += (arrival_s - now_s) / len(serving)
            now_s = arrival_s
            heappush(serving, (served_s + messages[index].steps_s[step], index, step))
            continue
        now_s = done_s
        served_s, index, step = heappop(serving)
        end_s[index] = now_s + messages[index].latency_s
        if step + 1 < len(messages[index].steps_s):
            heappush(arrivals, (end_s[index], index, step + 1))
    return _make_travels(ready_s, ready_s, end_s)


def _make_travels(ready_s: list[float], start_s: list[float], end_s: list[float]) -> list[Transmission]:
    return [
        Transmission(ready_s=ready, start_s=start, end_s=end)
        for ready, start, end in zip(ready_s, start_s, end_s, strict=True)
    ]


def _check(
    layers: Sequence[TimedLayer],
    messages: Sequence[TimedMessage],
    order: LineOrder,
    overlap: TimelineOverlap,
    in_flight_s: float,
) -> None:
    if not layers:
        raise ValueError("expected at least one layer, got none")
    for message in messages:
        if message.layer >= len(layers):
            raise ValueError(
                f"expected messages of layers 0 to {len(layers) - 1}, got one of {message.layer}"
            )
    if order not in get_args(LineOrder) or overlap not in get_args(TimelineOverlap):
        raise ValueError(
            f"expected an order of {', '.join(get_args(LineOrder))} and an overlap of "
            f"{', '.join(get_args(TimelineOverlap))}, got {order!r} and {overlap!r}"
        )
    if not in_flight_s >= 0:
        raise ValueError(f"expected at least 0 s of work in flight, got {in_flight_s}")
    if in_flight_s and order == "shared":
        raise ValueError(
            "the order `shared` has no work in flight: leave in_flight_s at 0, or use another order"
        )


def _are_times(*times_s: float) -> bool:
    return all(math.isfinite(time_s) and time_s >= 0 for time_s in times_s)
