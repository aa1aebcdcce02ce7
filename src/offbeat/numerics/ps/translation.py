"""Translation of torch optimizers, and their state, to and from the updates of a parameter server.

Nothing here takes a step or knows how rows are transferred. Options that servers cannot reproduce are an
error that names them; options that change only the speed of a step (`foreach`, `fused`, `capturable`) are
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from offbeat.numerics.ps import updates
from offbeat.numerics.ps.entries import Rows

# State that both torch and an update keep, one number per number of the parameter: torch's name to ours.
_STATES: Final[Mapping[type[Optimizer], Mapping[str, str]]] = {
    SGD: {"momentum_buffer": "momentum"},
    Adagrad: {"sum": "squares"},
    Adam: {"exp_avg": "mean", "exp_avg_sq": "squares", "step": "steps"},
    AdamW: {"exp_avg": "mean", "exp_avg_sq": "squares", "step": "steps"},
}
_UNSUPPORTED: Final = (
    *("dampening", "maximize", "amsgrad", "differentiable"),
    *("lr_decay", "initial_accumulator_value"),
)
_SETTINGS: Final = ("lr", "momentum", "betas", "eps", "weight_decay")
_SUPPORTED: Final = (
    f"{', '.join(kind.__name__ for kind in _STATES)} of torch.optim, without {', '.join(_UNSUPPORTED)}"
)


def update_for_group(group: Mapping[str, Any], kind: type[Optimizer]) -> updates.Update:
    """Return the update that takes the same steps as an optimizer on one of its parameter groups.

    Args:
        group: options of the group; parameters and unknown options are ignored.
        kind: class of the optimizer; a derived class is not accepted, since its behaviour is not known.

    Raises:
        ValueError: servers do not support the optimizer or one of its options.
    """
    _check_kind(kind)
    for option in _UNSUPPORTED:
        if group.get(option):
            raise ValueError(
                f"expected one of {_SUPPORTED}, got {kind.__name__} with {option}={group[option]}"
            )
    settings: dict[str, Any] = settings_of_group(group)
    if kind is SGD:
        return updates.SGD(**settings, nesterov=bool(group.get("nesterov")))
    if kind is Adagrad:
        return updates.Adagrad(**settings)
    is_decoupled = kind is AdamW or bool(group.get("decoupled_weight_decay"))
    return updates.Adam(**settings, decoupled=is_decoupled)


def settings_of_group(group: Mapping[str, Any]) -> dict[str, float | tuple[float, ...]]:
    """Return the current numeric options of a parameter group, which schedulers change, to send with pushes.

    Momentum must stay zero or stay non-zero: servers reject a change between the two.
    """
    return {name: _plain(group[name]) for name in _SETTINGS if name in group}


def export_states(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Rows]:
    """Return an optimizer's state of one parameter, in the form of the corresponding update.

    Args:
        parameter: of P numbers; one of the optimizer's.

    Returns:
        Arrays by the update's names, (P,) of the parameter's dtype: copies, zero where there is no state yet.

    Raises:
        ValueError: servers do not support the optimizer or one of its options; not one of its parameters.
    """
    _check_kind(type(optimizer))
    state = optimizer.state.get(parameter, {})
    states = {}
    for torch_name, update_name in _names(optimizer, parameter).items():
        rows = np.zeros_like(_flat(parameter))
        if state.get(torch_name) is not None:
            rows[...] = _flat(state[torch_name])  # a number of steps is broadcast to all rows
        states[update_name] = rows
    return states


def import_states(optimizer: Optimizer, parameter: torch.Tensor, rows: Mapping[str, Rows]) -> None:
    """Set an optimizer's state of one parameter to that of an update, in torch's form.

    The step count of torch's Adagrad has no effect without `lr_decay` and is left as it is.

    Args:
        parameter: of P numbers; one of the optimizer's.
        rows: by the update's names, (P,); others, such as the values themselves, are ignored.

    Raises:
        ValueError: servers do not support the optimizer or one of its options; not one of its parameters;
            rows are missing, have another length, or hold different step counts, which torch cannot
            represent.
    """
    _check_kind(type(optimizer))
    names = _names(optimizer, parameter)
    for update_name in names.values():
        if update_name not in rows or rows[update_name].shape != (parameter.numel(),):
            came = rows[update_name].shape if update_name in rows else "none"
            raise ValueError(f"expected {parameter.numel()} rows of {update_name}, got {came}")
    if "steps" in names.values() and len(np.unique(rows["steps"])) > 1:
        raise ValueError(
            "expected the same number of steps for all numbers of a parameter, got different ones"
        )
    for torch_name, update_name in names.items():
        if update_name == "steps":
            value = torch.tensor(
                float(rows[update_name].max(initial=0)), dtype=_step_type(optimizer, parameter), device="cpu"
            )
            if _on_device(optimizer, parameter):
                value = value.to(parameter.device)
        else:
            value = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
            value.copy_(torch.tensor(rows[update_name], device="cpu").reshape(parameter.shape))
        optimizer.state[parameter][torch_name] = value


def _check_kind(kind: type[Optimizer]) -> None:
    if kind not in _STATES:
        raise ValueError(f"expected one of {_SUPPORTED}, got {kind.__name__}")


def _group_of(optimizer: Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    for group in optimizer.param_groups:
        if any(one is parameter for one in group["params"]):
            update_for_group(group, type(optimizer))
            states: Mapping[str, Any] = group
            return states
    raise ValueError(f"expected a parameter of the optimizer, got a tensor of shape {tuple(parameter.shape)}")


def _names(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, str]:
    """Return the state of a parameter that its update has: torch's names to the update's."""
    update_states = update_for_group(_group_of(optimizer, parameter), type(optimizer)).states
    return {
        torch_name: update_name
        for torch_name, update_name in _STATES[type(optimizer)].items()
        if update_name in update_states
    }


def _on_device(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether torch keeps the step count on the parameter's device."""
    group = _group_of(optimizer, parameter)
    return bool(group.get("capturable") or group.get("fused"))


def _step_type(optimizer: Optimizer, parameter: torch.Tensor) -> torch.dtype:
    is_fused = bool(_group_of(optimizer, parameter).get("fused"))
    return torch.float64 if torch.get_default_dtype() == torch.float64 and not is_fused else torch.float32


def _flat(tensor: torch.Tensor) -> Rows:
    flat: Rows = tensor.detach().cpu().reshape(-1).numpy()
    return flat


def _plain(value: Any) -> float | tuple[float, ...]:
    """Convert numbers, which may be tensors, to floats."""
    return tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)
