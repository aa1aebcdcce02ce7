"""Which gradients travel together, by which all-reduce, and what goes first: decided by layer.

Pure: the same layers, workers, line and policy give the same plan, so that one worker decides for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from offbeat.numerics.collectives.costs import Line, cost
from offbeat.numerics.collectives.schedules import ALGORITHMS

Kind: TypeAlias = Literal["convolution", "dense", "other"]
Policy: TypeAlias = Literal["cost_model", "conv_butterfly_fc_ring", "table4", "ring"]
_MUCH_FASTER = 0.95
_IN_THE_WAY_BYTES = 1 << 20
_ANY_BYTES = 1 << 62
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Gradients that are needed at once: those of the parameters that one module is the first to use.

    Attributes:
        kind: what the module is: `dense` is fully connected, or another table such as an embedding.
        size_bytes: of its gradients.
        group: only layers of one group can travel together (one type of number, say).
        slack_s: from the end of its backward pass to the beginning of its next forward pass, in seconds.
    """

    kind: Kind
    size_bytes: int
    group: str = ""
    slack_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """Layers whose gradients travel as one vector.

    Attributes:
        layers: their indices, in the order of the forward pass.
        algorithm: see `offbeat.numerics.schedules.schedule`.
    """

    layers: tuple[int, ...]
    algorithm: str


def kind_of(dimensions: Sequence[int]) -> Kind:
    """Return a layer's kind by its parameters' dimensions: convolutions have a window, others are tables."""
    most = max(dimensions)
    return "convolution" if most > 2 else "dense" if most == 2 else "other"


def plan(
    layers: Sequence[Layer],
    workers: int,
    line: Line,
    *,
    policy: Policy = "cost_model",
    fuse_bytes: int | None = None,
) -> tuple[Parcel, ...]:
    """Return the parcels of a step in the order in which the forward pass needs them.

    Policies:

    - `conv_butterfly_fc_ring`: recursive doubling for convolutions, a ring for fully connected layers; what
      is neither goes with the convolutions, whose size it has. The paper's text.
    - `table4`: the other way round. The paper's table 4.
    - `ring`: a ring for all.
    - `cost_model`: the fastest algorithm for a parcel that would travel for longer than its slack in a ring;
      for one that would not, and so should only not delay others, a ring: no algorithm sends fewer bytes,
      and in no other does each line have one sender, whose urgent bytes nobody else's are in the way of.
      `direct` is considered only where latency dominates, for the same reason, and what saves less than a
      twentieth of the time not at all.

    Neighbours in the forward pass travel together as long as they are `fuse_bytes` at most: by default, as
    long as a message waits longer for latency, on a line that the rest keeps `busy`, than for its bytes, by
    the cheapest algorithm. Algorithms are compared as on an idle line: with busy latencies `direct` took
    ResNet-50's first layers, which made its step longer by a twentieth (4 workers on 2 cores, 1 Gbit/s).

    Source: the layer-overlapping hybrid all-reduce paper, its text and its table 4; `cost_model` is ours.
    Fusion: Sergeev and Del Balso 2018, Horovod, section 4; deviation: parcels are fixed, where Horovod fills
    a buffer with what is ready within a cycle.

    Args:
        layers: in the order in which the forward pass needs them.
        workers: how many there are.
        line: what a message costs.
        policy: which algorithm for which parcel.
        fuse_bytes: the largest parcel of several layers, in bytes; 0 to send every layer alone.

    Raises:
        ValueError: an unknown policy, or a negative size.
    """
    if policy not in POLICIES:
        raise ValueError(f"expected a policy of {', '.join(POLICIES)}, got {policy!r}")
    if fuse_bytes is None:
        fuse_bytes = latency_bytes(workers, busy(line, sum(layer.size_bytes for layer in layers)))
    elif fuse_bytes < 0:
        raise ValueError(f"expected fuse_bytes of at least 0, got {fuse_bytes}")
    parcels = []
    for run in _runs(layers, fuse_bytes):
        algorithm = _algorithm([layers[index] for index in run], workers, line, policy)
        parcels.append(Parcel(layers=tuple(run), algorithm=algorithm))
    return tuple(parcels)


def busy(line: Line, filling_bytes: int) -> Line:
    """Return a line as a message finds it that others, of so many bytes in all, keep busy.

    However urgent it is, it does not overtake what the kernels on its way have taken, nor a frame that is
    begun, and both sides may be at work on others. With AlexNet's gradients on lines of 1 Gbit/s a round of
    the most urgent all-reduce took 9 to 15 ms, in which a MiB passes.
    """
    waiting_bytes = min(filling_bytes, _IN_THE_WAY_BYTES)
    return replace(line, alpha_s=line.alpha_s + waiting_bytes * line.beta_s)


def latency_bytes(workers: int, line: Line) -> int:
    """Return how large a vector is whose all-reduce waits as long for latency as for its bytes."""
    if workers == 1:
        return 0
    if not line.beta_s:
        return _ANY_BYTES
    fewest = min((cost(name, workers) for name in ALGORITHMS), key=lambda one: (one.volume, one.rounds))
    return int(fewest.rounds * line.alpha_s / (fewest.volume * line.beta_s))


def _runs(layers: Sequence[Layer], fuse_bytes: int) -> list[list[int]]:
    """Neighbours of one group and kind that travel together."""
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


def _algorithm(layers: Sequence[Layer], workers: int, line: Line, policy: Policy) -> str:
    is_dense = layers[0].kind == "dense"
    if policy == "ring" or policy == ("conv_butterfly_fc_ring" if is_dense else "table4"):
        return "ring"
    if policy != "cost_model":
        return "recursive_doubling"
    size = sum(layer.size_bytes for layer in layers)
    slack_s = min(layer.slack_s for layer in layers)
    costs = {name: cost(name, workers) for name in ALGORITHMS}

    def seconds(name: str) -> float:
        return costs[name].seconds(size, line)

    known = [name for name in ALGORITHMS if name != "direct" or size <= latency_bytes(workers, line)]
    fastest = min(known, key=lambda name: (seconds(name), costs[name].rounds))
    is_worth_it = seconds("ring") > slack_s and seconds(fastest) < _MUCH_FASTER * seconds("ring")
    return fastest if is_worth_it else "ring"
