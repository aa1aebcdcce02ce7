"""Expected step times of `python -m benchmarks hybrid`: scaled layer times, bounds and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from benchmarks.gloo import bound_s
from benchmarks.timed import ModelTimes
from offbeat.numerics.collectives.costs import LinkModel
from offbeat.numerics.collectives.forecast import LayerWork, forecast_step
from offbeat.numerics.collectives.plans import layer_kind
from offbeat.numerics.collectives.timeline import TimedLayer, TimedMessage, least_step_s
from offbeat.strategies import Hybrid, parse_strategy

DDP, COST_MODEL = "ddp", "cost_model"
SIDES: Mapping[str, str] = {
    DDP: "",
    "sync_ring": "hybrid:policy=ring,overlap=none",
    "fifo_ring": "hybrid:policy=ring,order=fifo",
    "paper": "hybrid:policy=conv_butterfly_fc_ring,order=fifo,fuse_bytes=0",
    "table4": "hybrid:policy=table4,order=fifo,fuse_bytes=0",
    COST_MODEL: "hybrid",
}
"""Name -> strategy; `ddp` is PyTorch's own."""

BATCH_SIZE = 32
"""Batch size for which layer times are measured, before they are scaled to a case."""

TCP_SHARE = 0.956
"""Share of a line's rate that TCP carries."""

_DDP_LIKE = f"hybrid:policy=ring,order=fifo,overlap=backward,fuse_bytes={25 << 20}"
LATENCY_S = 200e-6
"""Approximate fixed cost of a message between two of these hosts, processing at both ends included."""


@dataclass(frozen=True, kw_only=True)
class ComputeCase:
    """Compute time of a step.

    Attributes:
        ratio: of compute time to the gradients' transfer time.
        forward_share: share of the compute time in the forward pass.
    """

    ratio: float
    forward_share: float

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and 0 < self.forward_share < 1):
            raise ValueError(f"expected a ratio above 0 and a share between 0 and 1, got {self}")

    @property
    def name(self) -> str:
        """As in figures, both numbers in percent."""
        return f"c{100 * self.ratio:.0f}_f{100 * self.forward_share:.0f}"


def times_for(alone: ModelTimes, case: ComputeCase, transfer_s: float, optimizer_s: float) -> ModelTimes:
    """Return measured layer times, scaled to a case.

    Args:
        alone: measured layer times.
        case: compute time of a step.
        transfer_s: transfer time of the gradients.
        optimizer_s: the optimizer's part of the compute time, subtracted from the forward pass's.

    Raises:
        ValueError: the optimizer takes longer than the forward pass's part.
    """
    compute_s = case.ratio * transfer_s
    forward_s = case.forward_share * compute_s - optimizer_s
    if forward_s <= 0:
        raise ValueError(
            f"expected a forward pass longer than the optimizer's {optimizer_s:.2f} s, "
            f"got {case.forward_share * compute_s:.2f} s for both"
        )
    forward = forward_s / alone.forward_s
    backward = (1 - case.forward_share) * compute_s / alone.backward_s
    return alone.scaled(forward, backward)


def works_of(times: ModelTimes, model: nn.Module, optimizer_s: float) -> list[LayerWork]:
    """Return each layer's compute times and message size, starting with the time before the first layer.

    Args:
        times: of all layers.
        model: with these layers.
        optimizer_s: of a step; divided among the layers by size.
    """
    parameters = {
        layer.name: [*model.get_submodule(layer.name).parameters(recurse=False)] for layer in times.layers
    }
    sizes = {name: sum(one.nbytes for one in some) for name, some in parameters.items()}
    lead = TimedLayer(name="lead", forward_s=times.lead_s, backward_s=0.0)
    works = [LayerWork(layer=lead, kind="other", size_bytes=0)]
    for layer in times.layers:
        size = sizes[layer.name]
        passes = TimedLayer(
            name=layer.name,
            forward_s=layer.forward_s + optimizer_s * size / sum(sizes.values()),
            backward_s=layer.backward_s,
        )
        kind = layer_kind([one.dim() for one in parameters[layer.name]])
        works.append(LayerWork(layer=passes, kind=kind, size_bytes=size))
    return works


def least_s(works: Sequence[LayerWork], workers: int, rate_bit_per_s: int) -> float:
    """Return a lower bound of a step's time in seconds: every gradient is sent as early as possible."""
    messages = [
        TimedMessage(layer=index, steps_s=(transfer_s(work.size_bytes, workers, rate_bit_per_s),))
        for index, work in enumerate(works)
        if work.size_bytes
    ]
    return least_step_s([work.layer for work in works], messages)


def predicted_s(side: str, works: Sequence[LayerWork], workers: int, rate_bit_per_s: int) -> float:
    """Return a step's time in seconds as predicted by `offbeat.numerics.collectives.forecast`.

    DDP is approximated by rings over buckets of 25 MiB, in the order in which they fill, overlapped with the
    backward pass.

    Raises:
        ValueError: a strategy that is not `hybrid`.
    """
    strategy = parse_strategy(_DDP_LIKE if side == DDP else SIDES.get(side, side))
    if not isinstance(strategy, Hybrid):
        raise ValueError(f"expected ddp or a hybrid strategy, whose steps can be predicted, got {side!r}")
    return forecast_step(
        works,
        workers,
        line_of(rate_bit_per_s),
        policy=strategy.policy,
        order=strategy.order,
        overlap="both" if strategy.overlap == "forward" else strategy.overlap,
        fuse_bytes=strategy.fuse_bytes,
    ).step_s


def line_of(rate_bit_per_s: int) -> LinkModel:
    """Return the cost of a message on lines of this rate."""
    return LinkModel(alpha_s=LATENCY_S, beta_s=8 / (rate_bit_per_s * TCP_SHARE))


def transfer_s(size_bytes: int, workers: int, rate_bit_per_s: int) -> float:
    """Return the least time of an all-reduce with TCP on lines of this rate, in seconds."""
    return bound_s(size_bytes, workers, rate_bit_per_s * TCP_SHARE)
