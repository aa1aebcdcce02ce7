"""Optimizers of torch as updates of a parameter server, and their states both ways.

Nothing here takes a step, and nothing knows how rows travel. What servers cannot do as torch does it is
refused by name; options that change how fast a step is, not what it is (`foreach`, `fused`, `capturable`),
are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from offbeat.numerics.ps import updates
from offbeat.numerics.ps.entries import Rows

# What torch and an update call the same thing, one number for each of the parameter's.
_STATES: Final[Mapping[type[Optimizer], Mapping[str, str]]] = {
    SGD: {"momentum_buffer": "momentum"},
    Adagrad: {"sum": "squares"},
    Adam: {"exp_avg": "mean", "exp_avg_sq": "squares", "step": "steps"},
    AdamW: {"exp_avg": "mean", "exp_avg_sq": "squares", "step": "steps"},
}
_REFUSED: Final = (
    *("dampening", "maximize", "amsgrad", "differentiable"),
    *("lr_decay", "initial_accumulator_value"),
)
_SETTINGS: Final = ("lr", "momentum", "betas", "eps", "weight_decay")
_POSSIBLE: Final = (
    f"{', '.join(kind.__name__ for kind in _STATES)} of torch.optim, without {', '.join(_REFUSED)}"
)


def translate(group: Mapping[str, Any], kind: type[Optimizer]) -> updates.Update:
    """Return the update that takes the steps of an optimizer on one of its parameter groups.

    Args:
        group: its options; parameters and whatever else is in it are not looked at.
        kind: of the optimizer, this class itself: what a class derived from it does is not known.

    Raises:
        ValueError: an optimizer, or an option of it, that servers do not do.
    """
    _check_kind(kind)
    for option in _REFUSED:
        if group.get(option):
            raise ValueError(
                f"expected one of {_POSSIBLE}, got {kind.__name__} with {option}={group[option]}"
            )
    settings: dict[str, Any] = settings_of(group)
    if kind is SGD:
        return updates.SGD(**settings, nesterov=bool(group.get("nesterov")))
    if kind is Adagrad:
        return updates.Adagrad(**settings)
    is_decoupled = kind is AdamW or bool(group.get("decoupled_weight_decay"))
    return updates.Adam(**settings, decoupled=is_decoupled)


def settings_of(group: Mapping[str, Any]) -> dict[str, float | tuple[float, ...]]:
    """Return the numbers of a parameter group, which schedulers change, as they are now: to go with pushes.

    An optimizer that has momentum, or none, must keep it so: servers refuse a momentum that comes or goes.
    """
    return {name: _plain(group[name]) for name in _SETTINGS if name in group}


def states_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Rows]:
    """Return what an optimizer keeps of a parameter, as the update of its group does.

    Args:
        parameter: of P numbers; one of the optimizer's.

    Returns:
        By the update's names, (P,) of the parameter's type: copies, zero where there is nothing yet.

    Raises:
        ValueError: an optimizer, or an option of it, that servers do not do; not one of its parameters.
    """
    _check_kind(type(optimizer))
    kept = optimizer.state.get(parameter, {})
    found = {}
    for theirs, ours in _names(optimizer, parameter).items():
        rows = np.zeros_like(_flat(parameter))
        if kept.get(theirs) is not None:
            rows[...] = _flat(kept[theirs])  # of steps, one number for all
        found[ours] = rows
    return found


def take_states(optimizer: Optimizer, parameter: torch.Tensor, rows: Mapping[str, Rows]) -> None:
    """Let an optimizer keep of a parameter what an update has kept, in torch's own form.

    The steps that torch's Adagrad counts change nothing without `lr_decay`, and stay as they are.

    Args:
        parameter: of P numbers; one of the optimizer's.
        rows: by the update's names, (P,); others, such as the values themselves, are not looked at.

    Raises:
        ValueError: an optimizer, or an option of it, that servers do not do; not one of its parameters; rows
            that are missing, of another number, or of steps that differ, which torch cannot keep.
    """
    _check_kind(type(optimizer))
    names = _names(optimizer, parameter)
    for ours in names.values():
        if ours not in rows or rows[ours].shape != (parameter.numel(),):
            came = rows[ours].shape if ours in rows else "none"
            raise ValueError(f"expected {parameter.numel()} rows of {ours}, got {came}")
    if "steps" in names.values() and len(np.unique(rows["steps"])) > 1:
        raise ValueError("expected as many steps of all numbers of a parameter, got different ones")
    for theirs, ours in names.items():
        if ours == "steps":
            kept = torch.tensor(
                float(rows[ours].max(initial=0)), dtype=_step_type(optimizer, parameter), device="cpu"
            )
            if _on_device(optimizer, parameter):
                kept = kept.to(parameter.device)
        else:
            kept = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
            kept.copy_(torch.tensor(rows[ours], device="cpu").reshape(parameter.shape))
        optimizer.state[parameter][theirs] = kept


def _check_kind(kind: type[Optimizer]) -> None:
    if kind not in _STATES:
        raise ValueError(f"expected one of {_POSSIBLE}, got {kind.__name__}")


def _group_of(optimizer: Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    for group in optimizer.param_groups:
        if any(one is parameter for one in group["params"]):
            translate(group, type(optimizer))
            found: Mapping[str, Any] = group
            return found
    raise ValueError(f"expected a parameter of the optimizer, got a tensor of shape {tuple(parameter.shape)}")


def _names(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, str]:
    """What is kept of a parameter, by torch's names for it, as the update calls it."""
    kept = translate(_group_of(optimizer, parameter), type(optimizer)).states
    return {theirs: ours for theirs, ours in _STATES[type(optimizer)].items() if ours in kept}


def _on_device(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether torch keeps the number of steps where the parameter is."""
    group = _group_of(optimizer, parameter)
    return bool(group.get("capturable") or group.get("fused"))


def _step_type(optimizer: Optimizer, parameter: torch.Tensor) -> torch.dtype:
    is_fused = bool(_group_of(optimizer, parameter).get("fused"))
    return torch.float64 if torch.get_default_dtype() == torch.float64 and not is_fused else torch.float32


def _flat(tensor: torch.Tensor) -> Rows:
    flat: Rows = tensor.detach().cpu().reshape(-1).numpy()
    return flat


def _plain(value: Any) -> float | tuple[float, ...]:
    """Numbers that may be tensors."""
    return tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)
