"""Prediction of a step's duration under a policy: plan, cost of each fused bucket, and timeline of the step.

Pure; it only combines `offbeat.numerics.plans`, `costs` and `timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from offbeat.numerics.collectives import plans
from offbeat.numerics.collectives.costs import Line, cost
from offbeat.numerics.collectives.plans import Kind, Policy
from offbeat.numerics.collectives.timeline import Layer, Message, Order, Overlap, Timeline, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Computation and communication of one layer.

    Attributes:
        layer: duration of its passes.
        kind: see `offbeat.numerics.plans.Layer`.
        size_bytes: size of its gradients; 0 if it has none.
    """

    layer: Layer
    kind: Kind
    size_bytes: int


def forecast(
    works: Sequence[Work],
    workers: int,
    line: Line,
    *,
    policy: Policy = "cost_model",
    algorithm: str | None = None,
    order: Order = "priority",
    overlap: Overlap = "both",
    fuse_bytes: int | None = None,
) -> Timeline:
    """Predict a training step in which all workers are equal.

    Work of the workers other than the passes (copying, adding, the interpreter) takes no time here.

    Source: specification 3.9, with the costs of appendix C. No deviation.

    Args:
        works: in the order of the forward pass.
        workers: number of workers.
        line: cost of a message.
        policy, fuse_bytes: see `offbeat.numerics.plans.plan`.
        algorithm: used for all buckets instead of the policy's; see `offbeat.numerics.schedules.schedule`.
        order, overlap: see `offbeat.numerics.timeline.simulate`.

    Raises:
        ValueError: raised by these functions.
    """
    layers = [work.layer for work in works]
    if workers == 1:
        return simulate(layers, [], order=order, overlap=overlap)
    # Between a layer's backward pass and its next forward pass, all earlier layers compute both passes.
    slacks_s = accumulate((layer.forward_s + layer.backward_s for layer in layers), initial=0.0)
    sending = [
        (index, plans.Layer(kind=work.kind, size_bytes=work.size_bytes, slack_s=slack_s))
        for index, (work, slack_s) in enumerate(zip(works, slacks_s, strict=False))
        if work.size_bytes
    ]
    parcels = plans.plan([layer for _, layer in sending], workers, line, policy=policy, fuse_bytes=fuse_bytes)
    messages = []
    for parcel in parcels:
        size = sum(sending[place][1].size_bytes for place in parcel.layers)
        price = cost(algorithm or parcel.algorithm, workers)
        step_s = price.volume * size * line.beta_s / price.rounds
        messages.append(
            Message(
                layer=sending[parcel.layers[0]][0],
                steps_s=(step_s,) * price.rounds,
                latency_s=line.alpha_s,
            )
        )
    return simulate(layers, messages, order=order, overlap=overlap)
