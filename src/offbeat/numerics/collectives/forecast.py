"""Prediction of a step's duration under a policy: plan, cost of each fused bucket, and timeline of the step.

Pure; it only combines `offbeat.numerics.collectives.plans`, `costs` and `timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from offbeat.numerics.collectives import plans
from offbeat.numerics.collectives.costs import LinkModel, all_reduce_cost
from offbeat.numerics.collectives.plans import AlgorithmPolicy, LayerKind
from offbeat.numerics.collectives.timeline import (
    LineOrder,
    TimedLayer,
    TimedMessage,
    Timeline,
    TimelineOverlap,
    simulate_step,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Computation and communication of one layer.

    Attributes:
        layer: duration of its passes.
        kind: see `offbeat.numerics.collectives.plans.PlannedLayer`.
        size_bytes: size of its gradients; 0 if it has none.
    """

    layer: TimedLayer
    kind: LayerKind
    size_bytes: int


def forecast_step(
    works: Sequence[LayerWork],
    workers: int,
    link: LinkModel,
    *,
    policy: AlgorithmPolicy = "cost_model",
    algorithm: str | None = None,
    order: LineOrder = "priority",
    overlap: TimelineOverlap = "both",
    fuse_bytes: int | None = None,
) -> Timeline:
    """Predict a training step in which all workers are equal.

    Work of the workers other than the passes (copying, adding, the interpreter) takes no time here.

    Source: specification 3.9, with the costs of appendix C. No deviation.

    Args:
        works: in the order of the forward pass.
        workers: number of workers.
        link: cost of a message.
        policy, fuse_bytes: see `offbeat.numerics.collectives.plans.plan_fused_buckets`.
        algorithm: used for all buckets instead of the policy's; see
            `offbeat.numerics.collectives.schedules.schedule`.
        order, overlap: see `offbeat.numerics.collectives.timeline.simulate_step`.

    Raises:
        ValueError: raised by these functions.
    """
    layers = [work.layer for work in works]
    if workers == 1:
        return simulate_step(layers, [], order=order, overlap=overlap)
    # Between a layer's backward pass and its next forward pass, all earlier layers compute both passes.
    slacks_s = accumulate((layer.forward_s + layer.backward_s for layer in layers), initial=0.0)
    sending = [
        (index, plans.PlannedLayer(kind=work.kind, size_bytes=work.size_bytes, slack_s=slack_s))
        for index, (work, slack_s) in enumerate(zip(works, slacks_s, strict=False))
        if work.size_bytes
    ]
    fused = plans.plan_fused_buckets(
        [layer for _, layer in sending], workers, link, policy=policy, fuse_bytes=fuse_bytes
    )
    messages = []
    for bucket in fused:
        size = sum(sending[place][1].size_bytes for place in bucket.layers)
        price = all_reduce_cost(algorithm or bucket.algorithm, workers)
        step_s = price.volume * size * link.beta_s / price.rounds
        messages.append(
            TimedMessage(
                layer=sending[bucket.layers[0]][0],
                steps_s=(step_s,) * price.rounds,
                latency_s=link.alpha_s,
            )
        )
    return simulate_step(layers, messages, order=order, overlap=overlap)
