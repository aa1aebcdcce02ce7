"""Planning of layer-wise all-reduces: which gradients are fused, by which algorithm, in which order.

Pure: the same layers, workers, line and policy give the same plan, so that one worker plans for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from offbeat.numerics.collectives.costs import LinkModel, all_reduce_cost
from offbeat.numerics.collectives.schedules import ALGORITHMS

LayerKind: TypeAlias = Literal["convolution", "dense", "other"]
AlgorithmPolicy: TypeAlias = Literal["cost_model", "conv_butterfly_fc_ring", "table4", "ring"]
_WORTH_SWITCHING = 0.95
_QUEUED_BYTES_MAX = 1 << 20
_UNLIMITED_BYTES = 1 << 62
ALGORITHM_POLICIES: tuple[AlgorithmPolicy, ...] = get_args(AlgorithmPolicy)


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """A layer: the parameters that one module is the first to use, whose gradients are needed together.

    Attributes:
        kind: type of the module: `dense` is fully connected, or another table such as an embedding.
        size_bytes: size of its gradients.
        group: only layers of one group can be fused (layers of one dtype, say).
        slack_s: time from the end of its backward pass to the start of its next forward pass, in seconds.
    """

    kind: LayerKind
    size_bytes: int
    group: str = ""
    slack_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FusedBucket:
    """Layers whose gradients are fused into one vector.

    Attributes:
        layers: their indices, in the order of the forward pass.
        algorithm: see `offbeat.numerics.collectives.schedules.schedule`.
    """

    layers: tuple[int, ...]
    algorithm: str


def layer_kind(dimensions: Sequence[int]) -> LayerKind:
    """Return a layer's kind by its parameters' dimensions: above 2 for convolutions, 2 for tables."""
    most = max(dimensions)
    return "convolution" if most > 2 else "dense" if most == 2 else "other"


def plan_fused_buckets(
    layers: Sequence[PlannedLayer],
    workers: int,
    link: LinkModel,
    *,
    policy: AlgorithmPolicy = "cost_model",
    fuse_bytes: int | None = None,
) -> tuple[FusedBucket, ...]:
    """Plan the fused buckets of a step, in the order in which the forward pass needs them.

    Policies:

    - `conv_butterfly_fc_ring`: recursive doubling for convolutions, a ring for fully connected layers; other
      layers count as convolutions, whose size they have. The paper's text.
    - `table4`: the opposite assignment. The paper's table 4.
    - `ring`: a ring for all.
    - `cost_model`: the fastest algorithm for a bucket whose ring would take longer than its slack. A bucket
      whose ring fits into its slack should only delay others as little as possible, and uses the ring: no
      algorithm sends fewer bytes, and only in a ring does each line have a single sender, so that urgent
      bytes are not held up by other workers'. For the same reason `direct` is considered only where latency
      dominates, and an algorithm that saves less than a twentieth of the ring's time is not chosen.

    Layers that are adjacent in the forward pass are fused up to `fuse_bytes`: by default, as long as a
    message waits longer for latency, on a line that the rest keeps `busy_link`, than for its bytes, with the
    cheapest algorithm. Algorithms are compared on an idle line: with busy latencies `direct` was chosen for
    ResNet-50's first layers, which made its step longer by a twentieth (4 workers on 2 cores, 1 Gbit/s).

    Source: the layer-overlapping hybrid all-reduce paper, its text and its table 4; `cost_model` is ours.
    Fusion: Sergeev and Del Balso 2018, Horovod, section 4; deviation: buckets are fixed, where Horovod fills
    a buffer with the gradients that are ready within a cycle.

    Args:
        layers: in the order in which the forward pass needs them.
        workers: number of workers.
        link: cost of a message.
        policy: how the algorithm of a bucket is chosen.
        fuse_bytes: largest size of a bucket of several layers, in bytes; 0 sends every layer alone.

    Raises:
        ValueError: unknown policy, or a negative size.
    """
    if policy not in ALGORITHM_POLICIES:
        raise ValueError(f"expected a policy of {', '.join(ALGORITHM_POLICIES)}, got {policy!r}")
    if fuse_bytes is None:
        fuse_bytes = latency_bound_bytes(workers, busy_link(link, sum(layer.size_bytes for layer in layers)))
    elif fuse_bytes < 0:
        raise ValueError(f"expected fuse_bytes of at least 0, got {fuse_bytes}")
    fused = []
    for run in _runs(layers, fuse_bytes):
        algorithm = _algorithm([layers[index] for index in run], workers, link, policy)
        fused.append(FusedBucket(layers=tuple(run), algorithm=algorithm))
    return tuple(fused)


def busy_link(link: LinkModel, filling_bytes: int) -> LinkModel:
    """Return the effective line for an urgent message when others, of so many bytes in all, keep it busy.

    Even an urgent message cannot overtake bytes that the kernels on its way have accepted or a frame that has
    been started, and both ends may be working on other messages. With AlexNet's gradients on lines of
    1 Gbit/s, a round of the most urgent all-reduce took 9 to 15 ms, the time of about 1 MiB.
    """
    queued_bytes = min(filling_bytes, _QUEUED_BYTES_MAX)
    return replace(link, alpha_s=link.alpha_s + queued_bytes * link.beta_s)


def latency_bound_bytes(workers: int, link: LinkModel) -> int:
    """Return the size in bytes of a vector whose all-reduce waits as long for latency as for its bytes."""
    if workers == 1:
        return 0
    if not link.beta_s:
        return _UNLIMITED_BYTES
    cheapest = min(
        (all_reduce_cost(name, workers) for name in ALGORITHMS), key=lambda one: (one.volume, one.rounds)
    )
    return int(cheapest.rounds * link.alpha_s / (cheapest.volume * link.beta_s))


def _runs(layers: Sequence[PlannedLayer], fuse_bytes: int) -> list[list[int]]:
    """Group adjacent layers of one group and kind into runs of at most `fuse_bytes`."""
    runs: list[list[int]] = []
    open_runs: dict[tuple[str, bool], tuple[list[int], int]] = {}
    for index, layer in enumerate(layers):
        key = layer.group, layer.kind == "dense"
        run, size = open_runs.get(key, ([], 0))
        if not run or size + layer.size_bytes > fuse_bytes:
            run, size = [], 0
            runs.append(run)
        run.append(index)
        open_runs[key] = run, size + layer.size_bytes
    return runs


def _algorithm(layers: Sequence[PlannedLayer], workers: int, line: LinkModel, policy: AlgorithmPolicy) -> str:
    is_dense = layers[0].kind == "dense"
    if policy == "ring" or policy == ("conv_butterfly_fc_ring" if is_dense else "table4"):
        return "ring"
    if policy != "cost_model":
        return "recursive_doubling"
    size = sum(layer.size_bytes for layer in layers)
    slack_s = min(layer.slack_s for layer in layers)
    costs = {name: all_reduce_cost(name, workers) for name in ALGORITHMS}

    def seconds(name: str) -> float:
        return costs[name].seconds(size, line)

    candidates = [
        name for name in ALGORITHMS if name != "direct" or size <= latency_bound_bytes(workers, line)
    ]
    fastest = min(candidates, key=lambda name: (seconds(name), costs[name].rounds))
    is_worth_it = seconds("ring") > slack_s and seconds(fastest) < _WORTH_SWITCHING * seconds("ring")
    return fastest if is_worth_it else "ring"
