"""Checks of `join`; each error says in one sentence what to do instead."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from offbeat.errors import OffbeatError
from offbeat.runtime.training.ddp import SessionDDP
from offbeat.runtime.training.hooks import do_nothing
from offbeat.runtime.training.hyperparameters import ParameterGroup, plain_settings
from offbeat.runtime.training.interface import Strategy
from offbeat.runtime.training.trained import TrainingState

_DESCRIPTION_CHARACTERS_MAX = 256 * 1024


def check_arguments(models: object, optimizers: object, strategy: Strategy | None) -> Strategy:
    """Return the strategy; refuse arguments of `join` that are of another kind than it expects.

    Raises:
        OffbeatError: says what was expected and what was given.
    """
    if isinstance(models, Sequence) and not models:
        raise OffbeatError("expected a model (torch.nn.Module) or a list of them, got an empty list")
    if not isinstance(models, Sequence) or not all(isinstance(one, nn.Module) for one in models):
        raise OffbeatError(f"expected a model (torch.nn.Module) or a list of them, got {_kind_of(models)}")
    if not isinstance(optimizers, Sequence) or not all(isinstance(one, Optimizer) for one in optimizers):
        raise OffbeatError(
            f"expected an optimizer (torch.optim.Optimizer) or a list of them, got {_kind_of(optimizers)}"
        )
    if strategy is None or isinstance(strategy, type) or not hasattr(strategy, "make_synchronizer"):
        raise OffbeatError(
            f"expected a strategy such as offbeat.strategies.PartialAllReduce(), got {_kind_of(strategy)}; "
            "offbeat.strategies.parse_strategy makes one of its text on the command line"
        )
    if len({id(model) for model in models}) < len(models):
        raise OffbeatError("expected a list of different models, got one of them twice")
    if len(models) > 1 and not strategy.trains_several_models:
        raise OffbeatError(
            f"{type(strategy).__name__} trains one model, got {len(models)}: join a module whose forward "
            "pass calls them, or use a strategy that averages gradients or models, such as PartialAllReduce"
        )
    return strategy


def _kind_of(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {', '.join(sorted({type(one).__name__ for one in value}))}"
    return f"{value!r}" if value is None or isinstance(value, str) else f"a {type(value).__name__}"


def check_trainable(trained: TrainingState) -> None:
    """Refuse a model or optimizers whose replicas could not be kept equal.

    Raises:
        OffbeatError: names what was found and says what to do.
    """
    _check_hooks(trained.model)
    for module in trained.model.modules():
        name = type(module).__name__
        is_ddp = isinstance(module, DistributedDataParallel) and not isinstance(module, SessionDDP)
        if is_ddp or name == "FullyShardedDataParallel":
            raise OffbeatError(
                f"the model is wrapped in {name}, which exchanges gradients itself: "
                "join the bare module, or wrap that in offbeat.ddp"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise OffbeatError(
                f"a layer {name}(sparse=True) produces sparse gradients, which cannot be averaged: "
                "use sparse=False"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise OffbeatError(
                f"a layer {name}(max_norm={module.max_norm:g}) changes its weights in the forward pass, "
                "depending on each worker's batch, so that replicas would diverge: scale them after the step"
            )
    if any(isinstance(optimizer, LBFGS) for optimizer in trained.optimizers):
        raise OffbeatError(
            "LBFGS computes its step from each worker's own loss, so that replicas would diverge: "
            "use an optimizer that takes one gradient per step"
        )
    _check_tensors(trained.model)
    _check_optimizers(trained)


def _check_hooks(model: nn.Module) -> None:
    try:
        model.register_forward_pre_hook(do_nothing).remove()
    except Exception as error:
        raise OffbeatError(
            f"the model is a {type(model).__name__}, which takes no hooks ({error}): join the module that it "
            "was made from, or, with another strategy than hybrid, a module that contains it"
        ) from error


def _check_tensors(model: nn.Module) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if is_lazy(tensor):
            raise OffbeatError(f"{name} is not initialised yet: run one batch through the model before join")
        if tensor.is_inference():
            raise OffbeatError(
                f"{name} was made in inference mode, so that it cannot be trained: make the model outside "
                "torch.inference_mode()"
            )
        if tensor.layout is not torch.strided or type(tensor).__name__ == "DTensor":
            raise OffbeatError(
                f"{name} is not a plain dense tensor ({type(tensor).__name__}): join needs those"
            )
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise OffbeatError(f"{name} is expanded, several elements share memory: clone it before join")
        if not _can_add(tensor.dtype):
            raise OffbeatError(f"{name} is of type {tensor.dtype}, which torch cannot add: use another type")
    devices = {tensor.device for _, tensor in named}
    if len(devices) > 1:
        raise OffbeatError(
            f"the model is on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}): "
            "offbeat averages models that are on one"
        )
    if any(device.type == "meta" for device in devices):
        raise OffbeatError("the model is on the meta device and has no values: materialise it before join")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OffbeatError("no parameter of the model requires a gradient: there is nothing to train")


def _can_add(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1, dtype=dtype, device="cpu").add_(torch.zeros(1, dtype=dtype, device="cpu"))
    except RuntimeError:
        return False
    return True


def _check_optimizers(trained: TrainingState) -> None:
    if not trained.optimizers:
        raise OffbeatError("expected one optimizer or several, got none: pass the model's optimizer to join")
    for number, group in enumerate(trained.groups):
        foreign = sum(trained.name_of(parameter) is None for parameter in group["params"])
        if foreign:
            raise OffbeatError(
                f"parameter group {number} of the optimizer holds {foreign} parameters that are not the "
                "model's, which would not be averaged: make them part of the module passed to join"
            )
        plain_settings(group)


def check_all_in_optimizers(trained: TrainingState) -> None:
    """Refuse parameters that require a gradient and are in no optimizer.

    An optimizer unknown to the session would step them by this worker's own gradients, or have a state that
    a returning or new worker would lack.

    Raises:
        OffbeatError: names the first of them.
    """
    names = trained.names_without_optimizer()
    if names:
        raise OffbeatError(
            f"{names[0]} requires a gradient and is in no optimizer passed to join ({len(names)} such "
            "parameters): pass all optimizers, join(model, [one, another], ...), or freeze what is not "
            "trained with requires_grad_(False)"
        )


def check_no_overlap(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters, by name, that may overlap in memory, with themselves or one another.

    Raises:
        OffbeatError: names them.
    """
    intervals = []
    for name, tensor in parameters.items():
        if tensor.numel():
            extent = 1  # of the dimensions so far, in elements
            for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
                if size > 1 and stride < extent:
                    raise OffbeatError(
                        f"several elements of {name} share memory, and servers store each separately: clone "
                        "it before join"
                    )
                extent += stride * (size - 1)
            intervals.append((tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size(), name))
    intervals.sort()
    for (_, end, name), (first, _, other) in pairwise(intervals):
        if first < end:
            raise OffbeatError(
                f"{name} and {other} share memory, and servers store each parameter separately: clone one of "
                "them before join, or use a strategy without servers"
            )


class ParameterFormCheck:
    """Detects that a parameter's type, shape or device has changed during a session.

    A parameter whose memory has the same address is assumed to be unchanged, which is quick to check.

    Args:
        model: as joined.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._descriptions = [_type_shape_device(parameter) for parameter in self._parameters]
        self._remember()

    def check(self) -> None:
        """Raise OffbeatError, with the parameter's name, if one has changed."""
        if self._identities() == self._known_identities:
            return
        for name, parameter, was in zip(self._names, self._parameters, self._descriptions, strict=True):
            if (now := _type_shape_device(parameter)) != was:
                raise OffbeatError(
                    f"the parameter {name!r} was {was} at join and is {now}: leave the session and join again"
                )
        self._remember()

    def _remember(self) -> None:
        self._held = [
            parameter.detach() for parameter in self._parameters
        ]  # keeps the memory from being reused
        self._known_identities = self._identities()

    def _identities(self) -> list[object]:
        return [parameter.data_ptr() or parameter.dtype for parameter in self._parameters]


class ParameterSetCheck:
    """Detects that the set of trained parameters has changed during a session.

    Args:
        trained: as joined.
    """

    def __init__(self, trained: TrainingState) -> None:
        self._frozen = [(name, p) for name, p in trained.model.named_parameters() if not p.requires_grad]
        self._trained = trained
        self._held = self._parameter_ids()
        self._known_parameters = list(trained.model.parameters())  # kept, so that no id is reused
        self._remember()

    def check(self) -> None:
        """Raise OffbeatError if parameters were unfrozen, or added to model or optimizer, since join."""
        if self._part_ids() != self._known_part_ids:
            self._check_known()
            self._remember()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise OffbeatError(
                    f"{name} was frozen at join and requires a gradient now: leave the session and join again"
                )
        held = self._parameter_ids()
        if held != self._held:
            raise OffbeatError(
                f"the optimizers held {len(self._held)} parameters at join and hold {len(held)}, or "
                "different ones, now: leave the session and join again"
            )

    def _check_known(self) -> None:
        known = {id(parameter) for parameter in self._known_parameters}
        for name, parameter in self._trained.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise OffbeatError(
                    f"the model has a parameter {name!r} that it did not have at join and that would not be "
                    "averaged: leave the session and join again"
                )

    def _remember(self) -> None:
        modules = self._trained.model.modules()
        plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._held_by_modules = [
            held.values() for module in plain for held in (module._parameters, module._modules)
        ]
        self._known_part_ids = self._part_ids()

    def _part_ids(self) -> list[int]:
        """Ids of what the model's modules hold now: quick to compare, whatever the model's size."""
        return list(map(id, chain.from_iterable(self._held_by_modules)))

    def _parameter_ids(self) -> list[int]:
        return [id(parameter) for group in self._trained.groups for parameter in group["params"]]


def describe_training(trained: TrainingState) -> tuple[str, ...]:
    """Return one line per parameter, buffer and optimizer group, which must be equal on all workers.

    If these take more than 256 KiB, the remaining lines are replaced by one with their digest.
    """
    places: dict[int, list[str]] = {}
    for number, group in enumerate(trained.groups):
        for parameter in group["params"]:
            places.setdefault(id(parameter), []).append(f"group {number}")
    lines = [
        f"parameter {name} {_type_and_shape(p)}{'' if p.requires_grad else ' frozen'}, "
        f"in {' and '.join(places.get(id(p), ['no optimizer']))}"
        for name, p in trained.model.named_parameters()
    ]
    lines += [f"buffer {name} {_type_and_shape(b)}" for name, b in trained.model.named_buffers()]
    lines += [
        f"{type(optimizer).__name__}, group {number}: {_settings_text(group)}"
        for number, (optimizer, group) in enumerate(
            zip(trained.optimizer_of_group, trained.groups, strict=True)
        )
    ]
    sizes = accumulate(len(line) for line in lines)
    kept = sum(size <= _DESCRIPTION_CHARACTERS_MAX for size in sizes)
    if kept < len(lines):
        digest = hashlib.blake2b("\n".join(lines[kept:]).encode(), digest_size=16).hexdigest()
        lines[kept:] = [f"{len(lines) - kept} more lines with the digest {digest}"]
    return tuple(lines)


def _type_and_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _type_shape_device(tensor: torch.Tensor) -> str:
    return f"{_type_and_shape(tensor)} on {tensor.device}"


def _settings_text(group: ParameterGroup) -> str:
    return ", ".join(f"{name}={value}" for name, value in plain_settings(group).items())
