"""Which optimizer step is deferred now, and how far it is applied.

This module never decides whether the program allows a step to be deferred.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from offbeat.runtime.hybrid.deferred_step import DeferredStep, DeferredStepThread
from offbeat.runtime.hybrid.layer_rounds import GradientRound, LayerRounds
from offbeat.runtime.training.partial_step import PartialOptimizer


class StepDeferral:
    """Defers one step at a time, and applies it to a bucket before its next use, or ahead in a forward pass.

    Args:
        optimizers: the steps of several are not deferred, since one may be called before the gradients of
            another's parameters are computed.
        rounds: the rounds' shared state, which has the parameters.

    Attributes:
        step: the deferred step, None once it is applied to all parameters.
        is_held: by parameter, whether an optimizer holds it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], rounds: LayerRounds) -> None:
        self._optimizer, self._rounds = PartialOptimizer(optimizers[0]), rounds
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        held = {id(one) for group in groups for one in group["params"]}
        self.is_held = [id(parameter) in held for parameter in rounds.parameters]
        self.step: DeferredStep | None = None
        self._thread: DeferredStepThread | None = None
        self._is_in_forward = False

    def start(self) -> None:
        """Begin to defer steps, with the buckets that there are now."""
        self._thread = DeferredStepThread(self._rounds.binding.start_thread)

    def stop(self) -> None:
        """End the thread; the deferred step is not applied any further."""
        if self.step is not None:
            self.step.stop_ahead()
        if self._thread is not None:
            self._thread.stop()

    @property
    def is_possible(self) -> bool:
        """Whether steps are deferred, and the optimizer's can be applied in parts."""
        return self._thread is not None and self._optimizer.is_possible

    def defer(self, round_: GradientRound) -> None:
        """Record the step with the means of a round as the deferred step, without waiting for the means."""
        self.step = DeferredStep(self._optimizer, self._rounds, round_, self.is_held)

    def has_step_of(self, round_: GradientRound | None) -> bool:
        """Whether the step with a round's means is still to be applied to some parameters."""
        return self.step is not None and self.step.round is round_

    def begin_forward(self) -> None:
        """Allow the step to be applied ahead, as the program changes nothing during a forward pass."""
        self._is_in_forward = True

    def end_forward(self) -> list[int]:
        """End applying ahead; return stepped parameters that the forward pass has not reached by a hook."""
        self._is_in_forward = False
        return self.step.stop_ahead() if self.step is not None and self.step.is_ahead else []

    def wait_and_apply(self, indices: Sequence[int]) -> None:
        """Apply the step to buckets that the loop needs; wait for their means."""
        step, timer = self.step, self._rounds.context.timer
        if step is not None:
            part = timer.part
            for index in indices:
                step.wait_and_apply(index)
            timer.switch(part)
            # Outside a forward pass, the program may change hyperparameters and parameters.
            # On an accelerator, the thread would gain nothing: the step is queued, as the forward pass is.
            is_ahead = step.is_ahead or self._rounds.context.device.has_streams
            if self._is_in_forward and step.round.weight and not is_ahead:
                assert self._thread is not None
                self._thread.begin(step)

    def apply_all(self) -> None:
        """Apply the rest of the step.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
        """
        if self.step is not None:
            self.step.wait_and_apply_all()
            self.step = None
