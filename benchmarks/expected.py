"""What a step of `python -m benchmarks hybrid` is expected to take: layer times of a case, bounds, a
prediction.
"""

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

TCP_SHARE = 0.956
"""Of a line's rate, what TCP carries."""

_DDP_LIKE = f"hybrid:policy=ring,order=fifo,overlap=backward,fuse_bytes={25 << 20}"
LATENCY_S = 200e-6
"""What a message between two of these hosts needs beside its bytes, about, with what both sides do for it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """How long a step computes.

    Attributes:
        ratio: of the time that the gradients need on the line.
        forward_share: of it, in the forward pass.
    """

    ratio: float
    forward_share: float

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and 0 < self.forward_share < 1):
            raise ValueError(f"expected a ratio above 0 and a share between 0 and 1, got {self}")

    @property
    def name(self) -> str:
        """As figures spell it, both in percent."""
        return f"c{100 * self.ratio:.0f}_f{100 * self.forward_share:.0f}"


def times_for(alone: ModelTimes, case: Case, transfer_s: float, optimizer_s: float) -> ModelTimes:
    """Return layer times that sum to a case's, in the proportions of those that were measured.

    Args:
        alone: those.
        case: how long a step computes.
        transfer_s: what its gradients need on the line.
        optimizer_s: what the optimizer takes of it, out of the forward pass's part.

    Raises:
        ValueError: the optimizer takes all of that part.
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
    """Return what each layer computes and sends; first what comes before the first layer.

    Args:
        times: of all layers.
        model: with these layers.
        optimizer_s: of a step; each layer takes its part.
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
    """Return the least time of a step in which no gradient waits longer than it must, in seconds."""
    messages = [
        TimedMessage(layer=index, steps_s=(transfer_s(work.size_bytes, workers, rate_bit_per_s),))
        for index, work in enumerate(works)
        if work.size_bytes
    ]
    return least_step_s([work.layer for work in works], messages)


def predicted_s(side: str, works: Sequence[LayerWork], workers: int, rate_bit_per_s: int) -> float:
    """Return the time of a step as `offbeat.numerics.collectives.forecast` predicts it, in seconds.

    DDP is taken for rings of 25 MiB buckets, in the order in which these fill, behind the backward pass.

    Raises:
        ValueError: a strategy that is not `hybrid`.
    """
    strategy = parse_strategy(_DDP_LIKE if side == DDP else SIDES.get(side, side))
    if not isinstance(strategy, Hybrid):
        raise ValueError(f"expected ddp or a hybrid, whose steps can be predicted, got {side!r}")
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
    """Return what a message costs on lines of this rate."""
    return LinkModel(alpha_s=LATENCY_S, beta_s=8 / (rate_bit_per_s * TCP_SHARE))


def transfer_s(size_bytes: int, workers: int, rate_bit_per_s: int) -> float:
    """Return how long TCP needs at least for an all-reduce on lines of this rate, in seconds."""
    return bound_s(size_bytes, workers, rate_bit_per_s * TCP_SHARE)
