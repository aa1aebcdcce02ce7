"""An optimizer's step that is deferred: applied bucket by bucket, when the means have arrived.

Theory of operation
-------------------

The gradients of a round travel in buckets, in the order in which the forward pass needs their parameters.
`optimizer.step()` is called before their means have arrived. `StepDeferral` then makes a `DeferredStep`,
which records the optimizer's hyperparameters and the parameters' versions, and lets the call itself step
nothing. The step is applied to a bucket's parameters later, by one of two threads:

- The loop calls `wait_and_apply` before a module uses a bucket, from the module's forward pre-hook. It waits
  for the means and applies the step if the other thread has not. Whatever reads all parameters (evaluation,
  `state_dict`, the next step) calls `wait_and_apply_all` first.
- `DeferredStepThread` is a thread that applies the buckets in order as they arrive, while the forward pass is
  under way: a step with the largest layers takes as long as their forward pass. It begins once the forward
  pass has reached a module that waits for a bucket, and stops at `stop_ahead`, when the pass is over. Outside
  a forward pass, the program sees no change that it did not ask for.

Invariants:

- A lock makes applying a bucket exclusive, and each bucket is applied once. When `stop_ahead` has returned,
  the thread applies nothing more.
- A step uses the means of one round and the hyperparameters of the time of `optimizer.step()`. Only
  parameters are stepped that a member has a gradient of and that the optimizer holds.
- A parameter must not change between `optimizer.step()` and the application of the step; its version is
  checked.

Failures: if an exchange fails, the thread stops, and the loop gets the WorkerError when it waits for the
bucket. An error while the thread applies a bucket is kept, and raised by the loop's next `wait_and_apply`. A
parameter that the forward pass has used without a hook, while the thread may have stepped it, is found by the
caller from what `stop_ahead` returns.

This module never decides whether a step may be deferred, nor when a pass begins and ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from offbeat.errors import OffbeatError
from offbeat.runtime.hybrid.layer_rounds import GradientRound, LayerRounds
from offbeat.runtime.training.partial_step import PartialOptimizer

_JOIN_TIMEOUT_S = 1.0  # if the job has failed, the thread may still wait for an exchange


class DeferredStep:
    """The optimizer step with one round's means and the hyperparameters at construction.

    Args:
        steps: applies the optimizer's steps in parts.
        rounds: the rounds' shared state, which has the parameters.
        gradient_round: a round that has been sent completely.
        is_held: by parameter, whether the optimizer holds it.

    Attributes:
        round: the round with the means.
        is_ahead: the thread may apply the step to buckets that the forward pass has not reached.
    """

    def __init__(
        self,
        steps: PartialOptimizer,
        rounds: LayerRounds,
        gradient_round: GradientRound,
        is_held: Sequence[bool],
    ) -> None:
        self._steps, self._rounds, self._is_held = steps, rounds, is_held
        self._parameters = rounds.parameters
        self.round = gradient_round
        gradient_round.settings = steps.settings()
        # By parameter: its version when the step was deferred, and once the step is applied, after it.
        self._versions = [parameter._version for parameter in self._parameters]
        self._is_applied = [False] * len(rounds.buckets)  # by bucket
        self._is_reached = [False] * len(rounds.buckets)  # by bucket, whether it was waited for
        self._failure: Exception | None = None  # the thread's
        self._apply_lock = threading.Lock()
        self.is_ahead = False

    def was_waited_for(self, index: int) -> bool:
        """Whether the loop has called `wait_and_apply` for this bucket."""
        return self._is_reached[index]

    def wait_and_apply(self, index: int) -> None:
        """Wait for a bucket that the loop needs, and apply the step to it if the thread has not.

        Raises:
            WorkerError: a member was lost, or did not join the exchange within the deadline.
            OffbeatError: its parameters were changed after `optimizer.step()`, or the step cannot be applied.
        """
        if self._is_reached[index]:
            return
        self.round.wait(index)
        if index < self._rounds.layout.gradient_buckets and self.round.weight:
            self._rounds.context.timer.switch("apply")
            with self._apply_lock:
                if self._failure is not None:
                    raise self._failure
                self._apply(index)
        self._is_reached[index] = True

    def wait_and_apply_all(self) -> None:
        """Call `wait_and_apply` for every bucket of gradients."""
        for index in range(self._rounds.layout.gradient_buckets):
            self.wait_and_apply(index)

    def stop_ahead(self) -> list[int]:
        """Stop the thread's work on this step; return stepped parameters that the loop has not reached."""
        with self._apply_lock:
            self.is_ahead = False
        return [
            entry
            for index, is_applied in enumerate(self._is_applied)
            if is_applied and not self._is_reached[index]
            for entry in self._entries(index)
        ]

    def apply_ahead(self) -> None:
        """Apply the step to buckets as they arrive, until `stop_ahead`; run in the thread."""
        for index in range(self._rounds.layout.gradient_buckets):
            if not self.round.wait_for_bucket(index):
                return  # the loop gets the error when it waits for it
            with self._apply_lock:
                if not self.is_ahead:
                    return
                if self._is_applied[index]:
                    continue
                began_s = time.perf_counter()
                try:
                    self._apply(index)
                except Exception as error:
                    self._failure = error
                    return
            if self._rounds.context.tracer is not None:
                name = self._rounds.names[self._rounds.buckets[index].entries[0]]
                self._rounds.context.tracer.add_span("steps ahead", name, began_s, time.perf_counter())

    def _apply(self, index: int) -> None:
        """Apply the step to a bucket that has arrived, if that has not been done."""
        entries = self._entries(index)
        for entry in entries:
            if self._parameters[entry]._version != self._versions[entry]:
                raise OffbeatError(
                    f"{self._rounds.names[entry]} was changed between optimizer.step() and its next use, "
                    "when the step may not have reached it yet: call session.refresh() before you change "
                    "parameters"
                )
        if self._is_applied[index]:
            return
        self.round.finalize(index)
        self._steps.apply(
            [self._parameters[entry] for entry in entries],
            [self.round.mean(entry) for entry in entries],
            self.round.settings,
        )
        for entry in entries:
            self._versions[entry] = self._parameters[entry]._version
        self.round.release(index)
        self._is_applied[index] = True

    def _entries(self, index: int) -> list[int]:
        """Return the parameters of a bucket that are stepped."""
        entries = self._rounds.buckets[index].entries
        return [entry for entry in entries if self.round.used[entry] and self._is_held[entry]]


class DeferredStepThread:
    """The thread that applies deferred steps ahead of the forward pass.

    Args:
        start: starts a thread, as `CoordinatorClient.start_thread` does.
    """

    def __init__(self, start: Callable[[str, Callable[[], object]], threading.Thread]) -> None:
        self._queue: queue.SimpleQueue[DeferredStep | None] = queue.SimpleQueue()
        self._thread = start("offbeat steps ahead", self._run)

    def begin(self, step: DeferredStep) -> None:
        """Let the thread apply a step until `DeferredStep.stop_ahead`."""
        step.is_ahead = True
        self._queue.put(step)

    def stop(self) -> None:
        """End the thread; the step under way must have got `stop_ahead`."""
        self._queue.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            step.apply_ahead()
            del step  # frees its memory
