"""SGD's momentum and weight decay, which momentum correction applies before gradients are sent.

The optimizer keeps its options, which programs and schedulers see and change; they are 0 only while it steps.
A momentum buffer that it has, as after a checkpoint was loaded, is equal on all workers: each continues with
it, and the optimizer has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatError
from offbeat.numerics.compressors.momentum import MomentumCorrecting, MomentumCorrection, MomentumSettings
from offbeat.runtime.training.hooks import SessionHook
from offbeat.runtime.training.hyperparameters import ParameterGroup
from offbeat.runtime.training.trained import TrainingState

_UNSUPPORTED = ("dampening", "maximize", "differentiable")
_OPTIONS = ("momentum", "weight_decay")


def check_momentum(trained: TrainingState) -> None:
    """Check that momentum correction can take the place of the optimizers' momentum.

    Raises:
        OffbeatError: an optimizer is not SGD with momentum, or has an option that is not supported; or a
            parameter is complex.
    """
    for optimizer, group in zip(trained.optimizer_of_group, trained.groups, strict=True):
        got = type(optimizer).__name__
        if type(optimizer) is SGD:
            wrong = [name for name in _UNSUPPORTED if group[name]] + ["momentum"] * (not group["momentum"])
            wrong += ["complex parameters"] * any(one.is_complex() for one in group["params"])
            if not wrong:
                continue
            got = f"SGD with {wrong[0]}" + (f"={group[wrong[0]]}" if wrong[0] in group else "")
        raise OffbeatError(
            "momentum correction (compress=dgc or csc) takes torch.optim.SGD with momentum, of real "
            f"parameters, without {', '.join(_UNSUPPORTED)}, got {got}: use compress=topk:RATIO"
        )


class SGDMomentum:
    """Writes a worker's gradients with momentum correction, with the options of its optimizers.

    Args:
        trained: model and optimizers, as `check_momentum` accepts them.
        method: of compression.

    Attributes:
        correction: this worker's momentum.
    """

    def __init__(self, trained: TrainingState, method: MomentumCorrecting) -> None:
        self.correction = MomentumCorrection(method.clip)
        self._trained = trained
        self._group_numbers = {
            id(parameter): number
            for number, group in enumerate(trained.groups)
            for parameter in group["params"]
        }
        self._withheld: list[tuple[ParameterGroup, dict[str, Any]]] = []  # groups, and their options
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Return withheld options after each step."""
        self._handles = [
            optimizer.register_step_post_hook(SessionHook(self._after_step))
            for optimizer in self._trained.optimizers
        ]

    def detach(self) -> None:
        """Return withheld options, and no longer withhold any."""
        for handle in self._handles:
            handle.remove()
        self._return_options()

    def withhold(self) -> None:
        """Set momentum and weight decay to 0 until a step has ended."""
        if not self._withheld:
            for group in self._trained.groups:
                self._withheld.append((group, {name: group[name] for name in _OPTIONS}))
                group.update(dict.fromkeys(_OPTIONS, 0.0))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._return_options()

    def _return_options(self) -> None:
        for group, options in self._withheld:
            group.update(options)
        self._withheld = []

    def pack(
        self,
        entry: int,
        parameter: torch.Tensor,
        into: torch.Tensor,
        *,
        scale: float,
        residuals: dict[int, torch.Tensor],
        members: int,
        add: bool,
    ) -> None:
        """Write a parameter's residual and update, or add another gradient: see `MomentumCorrection`.

        Args:
            residuals: by entry; that of a parameter whose momentum buffer is taken over is dropped.
        """
        if add:
            if parameter.grad is not None and scale:
                self.correction.add(entry, parameter.grad, into, scale=scale, members=members)
            return
        number = self._group_numbers.get(id(parameter))
        settings = MomentumSettings()
        if number is not None:
            settings = self._settings(self._trained.groups[number])
            state = self._trained.optimizer_of_group[number].state.get(parameter, {})
            if (buffer := state.pop("momentum_buffer", None)) is not None:
                self.correction.take_over(entry, buffer, into.dtype)
                residuals.pop(entry, None)
        self.correction.write(
            entry,
            parameter.grad,
            parameter,
            settings,
            into,
            scale=scale,
            residual=residuals.get(entry),
            members=members,
        )

    def _settings(self, group: ParameterGroup) -> MomentumSettings:
        options = next((options for one, options in self._withheld if one is group), group)
        return MomentumSettings(
            float(options["momentum"]), bool(group["nesterov"]), float(options["weight_decay"])
        )
