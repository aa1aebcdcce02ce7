"""Plans which layers' gradients share a bucket, and lays out the buckets of a round.

Pure: equal arguments give equal results. This module allocates no memory, sends and measures nothing, and
knows neither rounds nor hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.buckets import make_bucket, plan_buckets
from offbeat.numerics.collectives.costs import LinkModel
from offbeat.numerics.collectives.plans import AlgorithmPolicy, PlannedLayer, layer_kind, plan_fused_buckets
from offbeat.runtime.averaging.buckets import summed_dtype

SendOrder: TypeAlias = Literal["priority", "fifo"]

_AUXILIARY_ALGORITHM = "direct"
_AUXILIARY_BUCKET_BYTES = 25 << 20


def check_layers(model: nn.Module) -> None:
    """Raise an error for a model whose layers cannot be waited for one by one.

    Raises:
        OffbeatError: a module of it is compiled or scripted.
    """
    for name, module in model.named_modules():
        is_compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        if is_compiled or isinstance(module, torch.jit.ScriptModule):
            what = f"the module {name!r} of the model" if name else "the model"
            raise OffbeatError(
                f"{what} is compiled, and its layers cannot be waited for one by one: "
                "join the module that was compiled, or use bsp"
            )


class BucketPlan(msgspec.Struct, array_like=True):
    """A plan as sent to all workers: by bucket, its parameters and its all-reduce algorithm."""

    buckets: list[tuple[list[int], str]]


def plan_by_type(parameters: Sequence[torch.Tensor]) -> BucketPlan:
    """Return the initial plan, without knowledge of layers: one ring per dtype, last gradients first.

    Args:
        parameters: only their dtypes are used.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for entry, parameter in enumerate(parameters):
        groups.setdefault(parameter.dtype, []).append(entry)
    return BucketPlan([([*reversed(group)], "ring") for group in groups.values()])


def plan_by_layer(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    modules: Sequence[nn.Module],
    slacks_s: Sequence[float],
    *,
    workers: int,
    line: LinkModel,
    policy: AlgorithmPolicy,
    fuse_bytes: int | None,
) -> BucketPlan:
    """Return the plan in which a layer is the set of parameters of one dtype that one module is first to use.

    Args:
        parameters: only their shapes and dtypes are used.
        order: parameters in the order of their first use.
        modules: by parameter, the first module to use it.
        slacks_s: by parameter, the time from its gradient to the next forward pass's use of it, in seconds.
        workers, line, policy, fuse_bytes: see `offbeat.numerics.collectives.plans.plan_fused_buckets`.

    Raises:
        ValueError: the policy is unknown, or a size is negative.
    """
    layers: dict[tuple[nn.Module, torch.dtype], list[int]] = {}
    for entry in order:
        layers.setdefault((modules[entry], parameters[entry].dtype), []).append(entry)
    descriptions = [
        PlannedLayer(
            kind=layer_kind([parameters[entry].dim() for entry in entries]),
            size_bytes=sum(parameters[entry].nbytes for entry in entries),
            group=str(dtype),
            slack_s=min(slacks_s[entry] for entry in entries),
        )
        for (_, dtype), entries in layers.items()
    ]
    entries_by_layer = [*layers.values()]
    fused = plan_fused_buckets(descriptions, workers, line, policy=policy, fuse_bytes=fuse_bytes)
    return BucketPlan(
        [
            ([entry for layer in one.layers for entry in entries_by_layer[layer]], one.algorithm)
            for one in fused
        ]
    )


class BucketLayout:
    """The buckets of a round: gradient buckets in the order of need, then auxiliary buckets.

    The auxiliary buckets hold the buffers by dtype, and a trailer: the sum of weights, the amount of program
    writes to parameters, preemption flags, which parameters a member has a gradient of, and the first
    member's hyperparameters. Entries are numbered in this order: parameters, buffers, trailer.

    Args:
        plan: of all parameters.
        parameters, buffers: only their shapes and dtypes are used.
        hyperparameter_length: how many numbers of the trailer hold hyperparameters.
        order: `priority`: buckets that are needed first overtake others; `fifo`: first come, first served.

    Attributes:
        shapes: by entry.
        buckets: all buckets, the gradient buckets first.
        gradient_buckets: the number of gradient buckets.
        algorithms: by bucket, its all-reduce algorithm.
        priorities: by bucket; lower numbers overtake higher ones.
        location_of: by entry, its bucket and its position among the entries there.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        *,
        hyperparameter_length: int,
        order: SendOrder,
    ) -> None:
        tensors, count = [*parameters, *buffers], len(parameters)
        is_precise = any(parameter.dtype == torch.float64 for parameter in parameters)
        dtypes = [summed_dtype(one) for one in tensors] + [torch.float64 if is_precise else torch.float32]
        self.shapes = [one.shape for one in tensors] + [torch.Size([3 + count + hyperparameter_length])]
        sizes = [shape.numel() for shape in self.shapes]
        auxiliary = [
            [count + entry for entry in one.entries]
            for one in plan_buckets(sizes[count:], dtypes[count:], bucket_bytes=_AUXILIARY_BUCKET_BYTES)
        ]
        self.gradient_buckets = len(plan.buckets)
        self.buckets = [
            make_bucket(entries, sizes, dtypes[entries[0]])
            for entries in [*(entries for entries, _ in plan.buckets), *auxiliary]
        ]
        self.algorithms = [algorithm for _, algorithm in plan.buckets] + [_AUXILIARY_ALGORITHM] * len(
            auxiliary
        )
        self.priorities = [0] * len(self.buckets)
        if order == "priority":
            self.priorities[: self.gradient_buckets] = range(1, self.gradient_buckets + 1)
        self.location_of = {
            entry: (index, place)
            for index, bucket in enumerate(self.buckets)
            for place, entry in enumerate(bucket.entries)
        }

    def buckets_needed(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]
    ) -> dict[nn.Module, list[int]]:
        """Return by module the buckets it waits for: those of tensors that it owns or is the first to use.

        Args:
            model: the model with all modules.
            parameters: the parameters whose gradients are averaged.
            modules: by parameter, the first module to use it.
        """
        entry_of = {id(parameter): entry for entry, parameter in enumerate(parameters)}
        needs: dict[nn.Module, set[int]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in entry_of:
                    needs.setdefault(module, set()).add(self.location_of[entry_of[id(parameter)]][0])
            if any(buffer is not None for buffer in module._buffers.values()):
                needs.setdefault(module, set()).add(self.gradient_buckets)
        for entry, module in enumerate(modules):
            needs.setdefault(module, set()).add(self.location_of[entry][0])
        return {module: sorted(indices) for module, indices in needs.items()}
