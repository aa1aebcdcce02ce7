"""One step of training on one line: when gradients travel, and how long which forward passes wait for them.

A model that predicts; nothing here reads a clock, draws anything or sends anything, and nothing imports more
than the standard library.

What is modelled: a backward pass, last layer first; then the forward pass of the next step, first layer
first. A layer's gradients are there when its backward pass is over, and its next forward pass waits until
they have been all-reduced. All workers are alike and compute is never slowed by communication, so the time of
one is the time of all. What travels shares one line, which does one second's work in a second as long as it
has any. A message takes turns: each step of its schedule needs the line for a while, and then some time
beside it (latency), in which others have the line.

What follows, and is tested:

- The period is that of the first step: every message has arrived before the forward pass that follows its
  backward pass is over, so the next backward pass finds the line idle.
- Where nothing has latency, no order is better than `priority` with nothing in flight (`least_step_s`), and
  none is worse than `fifo`, for gradients become ready in the reverse of the order in which they are needed.
- Then `fifo` gains nothing by overlapping with the next forward pass as well, if the first layer has
  gradients: they come last and are needed first, so that all others have arrived before that pass begins.
- With latency these are no laws, as in all list scheduling: even a longer transfer may shorten a step.

Source: specification 3.9 (`simulate_step`, one channel); the order of need is that of Jayarajan et al. 2019,
"Priority-based parameter propagation for distributed DNN training", and the argument for it Jackson's rule
for jobs with release dates and tails (J. Carlier, "The one-machine sequencing problem", European Journal of
Operational Research 11 (1982)). Deviations: see `simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

Order: TypeAlias = Literal["fifo", "priority", "shared"]
"""Who has the line: what became ready first; what is needed first; all in equal shares."""

Overlap: TypeAlias = Literal["none", "backward", "both"]
"""What communication runs beside: nothing; the backward pass (as in DDP); also the next forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """What one layer computes.

    What computes without gradients to exchange (the loss, a resizing before the first layer) is a layer
    without messages.

    Attributes:
        name: for errors and traces.
        forward_s: its forward pass, with the optimizer's step for it.
        backward_s: its backward pass, until all its gradients are there.
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
class Message:
    """One all-reduce of gradients that travel together, as one worker's line sees it.

    Attributes:
        layer: index of the first layer, in the order of the forward pass, whose gradients it carries. Of all
            its layers, this is the last to be ready and the first to be needed.
        steps_s: for how long each step of its schedule keeps the line busy.
        latency_s: what passes beside the line after each step, before the next step can begin (after the last
            one: before the message is there).
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
        """For how long it keeps the line busy in all."""
        return sum(self.steps_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Travel:
    """When one message travels, in seconds from the beginning of the backward pass.

    Attributes:
        ready_s: it may begin.
        start_s: its first byte goes; under `shared`, that is at once.
        end_s: it is there.
    """

    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One step in the steady state: a backward pass, and the forward pass that follows.

    Attributes:
        step_s: from the beginning of a backward pass to that of the next one.
        forward_starts_s: when each layer's forward pass begins, from the beginning of the backward pass.
        exposed_s: for how long each layer's forward pass waits, with all before it done. Their sum and the
            computation make up the step.
        travels: when each message travels, in the order in which they were given.
    """

    step_s: float
    forward_starts_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    travels: tuple[Travel, ...]


def simulate(
    layers: Sequence[Layer],
    messages: Sequence[Message],
    *,
    order: Order = "priority",
    overlap: Overlap = "both",
    in_flight_s: float = 0.0,
) -> Timeline:
    """Predict one step of training.

    Under `fifo` and `priority`, a message that comes before another in the order (of readiness, of need; of
    one layer's messages, as they are given) has the line whenever it can use it, but for what is in flight.
    So an urgent one overtakes under `priority`; under `fifo`, only what fills another's latency is overtaken.

    Deviation from the specification's `simulate_step`: latency passes beside the line, and what has been
    handed over cannot be overtaken. Where a sender does nothing else during its latency (one all-reduce at a
    time), count it into `steps_s`.

    Args:
        layers: in the order of the forward pass.
        messages: any number for each layer, in any order.
        order: who has the line.
        overlap: what communication runs beside.
        in_flight_s: how much is handed to the kernel ahead of the line, in seconds of its work. A step of a
            message waits behind that much of what comes after it in the order. `math.inf` hands over
            everything as soon as it may go.

    Raises:
        ValueError: no layers, a message of a layer that there is not, an unknown `order` or `overlap`, or an
            `in_flight_s` that is negative, no number, or given for `shared`.
    """
    _check(layers, messages, order, overlap, in_flight_s)
    gradients_s = [*accumulate(layer.backward_s for layer in reversed(layers))][::-1]
    backward_s = gradients_s[0]
    ready_s = [backward_s if overlap == "none" else gradients_s[message.layer] for message in messages]
    if order == "shared":
        travels = _share(messages, ready_s)
    else:
        sign = 1 if order == "priority" else -1
        places = [(sign * message.layer, index) for index, message in enumerate(messages)]
        travels = _queue(messages, ready_s, places, in_flight_s)
    needed_by = [message.layer if overlap == "both" else 0 for message in messages]
    return _forward(layers, backward_s, needed_by, travels)


def least_step_s(layers: Sequence[Layer], messages: Sequence[Message]) -> float:
    """Return the least time of a step on this line in whatever order: a bound, and reached without latency.

    Before the gradients of a layer and those before it have arrived, that layer and those after it have done
    their backward passes, and their forward passes come afterwards. So a step takes at least what these
    compute and those transfer, whichever the layer. Latencies are not counted; they can only add to it.

    Source: the bound of J. Carlier 1982, which the preemptive schedule reaches. Of its subsets of jobs only
    these need looking at, since what is ready later is needed earlier.
    """
    transfers_s = [0.0] * len(layers)
    for message in messages:
        transfers_s[message.layer] += message.transfer_s
    from_here_s = [*accumulate(layer.forward_s + layer.backward_s for layer in reversed(layers))][::-1]
    return max(map(sum, zip(from_here_s, accumulate(transfers_s), strict=True)))


def floor_s(layers: Sequence[Layer], messages: Sequence[Message]) -> float:
    """Return the floor of the benchmarks: all computation and the first layer's transfers, or all transfers.

    The first layer's gradients come when the backward pass is over, and the forward pass begins with them. A
    step takes at least the greater of the two; `least_step_s` is a closer bound.
    """
    computes_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    first_s = sum(message.transfer_s for message in messages if message.layer == 0)
    return max(computes_s + first_s, sum(message.transfer_s for message in messages))


def ideal_ddp_s(*, compute_s: float, forward_share: float, transfer_s: float) -> float:
    """Return the step time of an ideal DDP, whose gradients become ready evenly and in small parts.

    It is the forward pass, and then the longer of backward pass and communication: fC + max((1 - f) C, S). A
    net of few layers takes longer: the last gradients travel when nothing is left to hide them.

    Args:
        compute_s: C, both passes.
        forward_share: f, of the forward pass in it, 0 to 1.
        transfer_s: S, all communication.

    Raises:
        ValueError: an argument out of range.
    """
    if not (_are_times(compute_s, transfer_s) and 0 <= forward_share <= 1):
        raise ValueError(
            "expected finite times of at least 0 s and a forward share from 0 to 1, "
            f"got {compute_s} s, {transfer_s} s and {forward_share}"
        )
    return forward_share * compute_s + max((1 - forward_share) * compute_s, transfer_s)


def possible_saving(*, compute_s: float, forward_share: float, transfer_s: float) -> float:
    """Return which share of an ideal DDP's time a step can save at most by overlapping both passes.

    A step takes max(C, S) at least, so it is

    - nothing, where S <= (1 - f) C: the backward pass alone covers the communication;
    - (S - (1 - f) C) / (fC + S) from there to S = C;
    - fC / (fC + S) where S >= C: it falls again, and was most, f / (1 + f), at S = C.

    The last formula is a bound everywhere, but one that cannot be reached where S < C.

    Args:
        compute_s: C, both passes, more than 0 together with S.
        forward_share: f, of the forward pass in it, 0 to 1.
        transfer_s: S, all communication.

    Raises:
        ValueError: an argument out of range.
    """
    ddp_s = ideal_ddp_s(compute_s=compute_s, forward_share=forward_share, transfer_s=transfer_s)
    if ddp_s == 0:
        raise ValueError("expected computation or communication of more than 0 s, got none")
    return 1 - max(compute_s, transfer_s) / ddp_s


def _forward(
    layers: Sequence[Layer], backward_s: float, needed_by: list[int], travels: list[Travel]
) -> Timeline:
    """Let each layer begin when all before it are done and what it needs is there."""
    arrived_s = [0.0] * len(layers)
    for index, travel in zip(needed_by, travels, strict=True):
        arrived_s[index] = max(arrived_s[index], travel.end_s)
    now_s, starts_s, exposed_s = backward_s, [], []
    for layer, arrival_s in zip(layers, arrived_s, strict=True):
        starts_s.append(max(now_s, arrival_s))
        exposed_s.append(starts_s[-1] - now_s)
        now_s = starts_s[-1] + layer.forward_s
    return Timeline(
        step_s=now_s, forward_starts_s=tuple(starts_s), exposed_s=tuple(exposed_s), travels=tuple(travels)
    )


# One line -----------------------------------------------------------------------------------------------


def _queue(
    messages: Sequence[Message], ready_s: list[float], places: list[tuple[int, int]], in_flight_s: float
) -> list[Travel]:
    """Serve who comes first among those waiting, each time that there is room in what is in flight.

    What has been handed over goes in that order. So it is enough to know until when it keeps the line busy
    (`busy_until_s`): there is room until that is `in_flight_s` ahead of the time. Work is handed over as far
    as it can be before the next one comes to wait, at which time the first in order may be another.
    """
    comings = [(ready_s[place[1]], place, 0) for place in places]
    heapify(comings)
    waiting: list[tuple[tuple[int, int], int]] = []
    left_s = [message.steps_s[0] for message in messages]
    start_s: dict[int, float] = {}
    end_s = [0.0] * len(messages)
    busy_until_s = 0.0
    while comings or waiting:
        limit_s = comings[0][0] + in_flight_s if comings else math.inf
        if not waiting or busy_until_s >= limit_s:
            now_s, place, step = heappop(comings)  # of several at once, the first in order
            heappush(waiting, (place, step))
            busy_until_s = max(busy_until_s, now_s)
            continue
        place, step = waiting[0]
        index = place[1]
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
            heappush(comings, (end_s[index], place, step + 1))
    return _travels(ready_s, [start_s[index] for index in range(len(messages))], end_s)


def _share(messages: Sequence[Message], ready_s: list[float]) -> list[Travel]:
    """Serve all that are waiting in equal shares.

    `served_s` grows by as much as each of them gets, so that who comes knows at which value it will be done.
    """
    comings = [(time_s, index, 0) for index, time_s in enumerate(ready_s)]
    heapify(comings)
    serving: list[tuple[float, int, int]] = []
    end_s = [0.0] * len(messages)
    now_s = served_s = 0.0
    while comings or serving:
        # Not below 0, which rounding could make it.
        done_s = now_s + max(0.0, serving[0][0] - served_s) * len(serving) if serving else math.inf
        if comings and comings[0][0] <= done_s:
            coming_s, index, step = heappop(comings)
            if serving:
                served_s += (coming_s - now_s) / len(serving)
            now_s = coming_s
            heappush(serving, (served_s + messages[index].steps_s[step], index, step))
            continue
        now_s = done_s
        served_s, index, step = heappop(serving)
        end_s[index] = now_s + messages[index].latency_s
        if step + 1 < len(messages[index].steps_s):
            heappush(comings, (end_s[index], index, step + 1))
    return _travels(ready_s, ready_s, end_s)


def _travels(ready_s: list[float], start_s: list[float], end_s: list[float]) -> list[Travel]:
    return [
        Travel(ready_s=ready, start_s=start, end_s=end)
        for ready, start, end in zip(ready_s, start_s, end_s, strict=True)
    ]


def _check(
    layers: Sequence[Layer], messages: Sequence[Message], order: Order, overlap: Overlap, in_flight_s: float
) -> None:
    if not layers:
        raise ValueError("expected at least one layer, got none")
    for message in messages:
        if message.layer >= len(layers):
            raise ValueError(
                f"expected messages of layers 0 to {len(layers) - 1}, got one of {message.layer}"
            )
    if order not in get_args(Order) or overlap not in get_args(Overlap):
        raise ValueError(
            f"expected an order of {', '.join(get_args(Order))} and an overlap of "
            f"{', '.join(get_args(Overlap))}, got {order!r} and {overlap!r}"
        )
    if not in_flight_s >= 0:
        raise ValueError(f"expected at least 0 s of work in flight, got {in_flight_s}")
    if in_flight_s and order == "shared":
        raise ValueError(
            "what is shared is not handed over in order: leave in_flight_s at 0, or take an order"
        )


def _are_times(*times_s: float) -> bool:
    return all(math.isfinite(time_s) and time_s >= 0 for time_s in times_s)
