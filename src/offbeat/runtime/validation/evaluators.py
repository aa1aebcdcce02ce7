"""Evaluators of parts of a validation set, one part at a time each, and a pool of threads for them."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.numerics.metrics import MetricValue, validate_metrics
from offbeat.policies.validation.schedule import TakeSnapshot
from offbeat.runtime.devices.interface import Accelerator
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.validation.isolation import IsolatedRandomness, TorchCallHook
from offbeat.runtime.validation.parts import ValidationData, slice_data
from offbeat.runtime.validation.scheduled_forward import ScheduledForward
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.runtime.validation.throttle import ThreadThrottle

Evaluate: TypeAlias = Callable[[nn.Module, Any], Mapping[str, Any]]
ModelSnapshot = TypeVar("ModelSnapshot")
"""A model's values at one moment: a `Snapshot` of a torch module, or another framework's equivalent."""


class CancelledError(OffbeatError):
    """The result of this evaluation is not needed any more."""


@dataclass(frozen=True, kw_only=True)
class ValidationPart(Generic[ModelSnapshot]):
    """A part of a validation: the model of a snapshot, and positions of the set.

    Attributes:
        epoch: of the snapshot.
        number: of the part, from 0.
        positions: in the validation set.
        snapshot: not written to while it is being evaluated.
        cancelled: set when the result is not needed any more; shared by all parts of an epoch.
    """

    epoch: int
    number: int
    positions: range
    snapshot: ModelSnapshot
    cancelled: SignalSafeEvent

    @property
    def seed(self) -> int:
        """The seed of the random numbers drawn for this part; the same wherever it is evaluated."""
        return self.epoch * 1_000_003 + self.number


def make_parts(
    take: TakeSnapshot, snapshot: ModelSnapshot, cancelled: SignalSafeEvent
) -> list[ValidationPart[ModelSnapshot]]:
    """Return the parts of an epoch, in the order of the set; they share `cancelled`."""
    return [
        ValidationPart(
            epoch=take.epoch, number=number, positions=positions, snapshot=snapshot, cancelled=cancelled
        )
        for number, positions in enumerate(take.parts)
    ]


class Evaluator(Protocol[ModelSnapshot]):
    """Evaluates one part at a time."""

    def evaluate(self, part: ValidationPart[ModelSnapshot]) -> dict[str, MetricValue]:
        """Return the part's metrics; raises what evaluating raises."""

    def close(self) -> None:
        """Release the evaluator's resources; ends an evaluation under way where it can."""


def evaluate_or_error(
    evaluator: Evaluator[ModelSnapshot], part: ValidationPart[ModelSnapshot]
) -> dict[str, MetricValue] | BaseException:
    """Return a part's metrics, or the error that evaluating raised, to be raised where the result is read."""
    try:
        return evaluator.evaluate(part)
    except BaseException as error:
        return error


def evaluate_part(
    model: nn.Module,
    evaluate: Evaluate,
    data: ValidationData,
    positions: range,
    *,
    seed: int,
    watch: TorchCallHook | None = None,
) -> dict[str, MetricValue]:
    """Return the metrics of `model` on a part of `data`; torch's global generator is not changed.

    Args:
        watch: called with the arguments of every function of torch before the call; may raise.
    """
    with torch.no_grad(), IsolatedRandomness(seed, watch):
        return validate_metrics(evaluate(model, slice_data(data, positions, seed)))


class ThreadEvaluator:
    """Evaluates with the snapshot in the calling thread.

    Args:
        evaluate: the user's function.
        data: the whole set.
        accelerators: those that hold the model.
        has_stream: use a separate stream on each of them, so that evaluation overlaps with training.
        throttle: pauses this thread where it delays training or other evaluating threads; None for none.
        scheduled: serves the calls of the model where that is faster; None for none.

    Attributes:
        calls: functions of torch called so far.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        data: ValidationData,
        accelerators: Sequence[Accelerator],
        *,
        has_stream: bool,
        throttle: ThreadThrottle | None = None,
        scheduled: ScheduledForward | None = None,
    ) -> None:
        self._evaluate, self._data, self._throttle = evaluate, data, throttle
        self._scheduled = scheduled
        self.calls = 0
        self._streams = [(one, one.new_stream() if has_stream else None) for one in accelerators]

    def evaluate(self, part: ValidationPart[Snapshot]) -> dict[str, MetricValue]:
        """Return the part's metrics; after the part is cancelled, ends at the next call of torch.

        When it ends, even by an error, the accelerators have done what was queued here: the snapshot may be
        overwritten, and the metrics be read on any stream.
        """

        def watch(*_: Any) -> None:
            self.calls += 1
            on_call()
            if part.cancelled.is_set():
                raise CancelledError(f"part {part.number} of epoch {part.epoch} is not needed any more")

        turn: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
        if self._throttle is not None:
            turn = self._throttle.evaluating_part()
        with turn as on_call, self._on_streams():
            part.snapshot.make_streams_wait()
            model = part.snapshot.model()
            try:
                with self._serving(model, part.snapshot, watch):
                    return evaluate_part(
                        model, self._evaluate, self._data, part.positions, seed=part.seed, watch=watch
                    )
            finally:
                for accelerator, _ in self._streams:
                    accelerator.synchronize_event(accelerator.record_event())

    def _on_streams(self) -> ExitStack:
        """Context in which this thread queues on this evaluator's streams; its device is the first one."""
        contexts = ExitStack()
        for accelerator, stream in reversed(self._streams):
            contexts.enter_context(accelerator.on_stream(stream or accelerator.current_stream()))
        return contexts

    def _serving(
        self, model: nn.Module, snapshot: Snapshot, watch: TorchCallHook
    ) -> AbstractContextManager[None]:
        if self._scheduled is None:
            return nullcontext()
        return self._scheduled.serving(model, snapshot, watch, lambda: self.calls)

    def close(self) -> None:
        """Let paused threads go on, and release the schedule."""
        if self._throttle is not None:
            self._throttle.lift_limit()
        if self._scheduled is not None:
            self._scheduled.close()


class EvaluatorPool(Generic[ModelSnapshot]):
    """Threads that evaluate parts in the order of submission.

    They are daemons: an evaluation that never ends does not keep the interpreter from exiting.

    Args:
        evaluators: one per thread.
        on_done: called in these threads with a part and its metrics, or the error.
        on_failure: called in a thread with the error that has ended it; that thread returns no more parts.
    """

    def __init__(
        self,
        evaluators: Sequence[Evaluator[ModelSnapshot]],
        on_done: Callable[[ValidationPart[ModelSnapshot], dict[str, MetricValue] | BaseException], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._evaluators, self._done = list(evaluators), on_done
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[ValidationPart[ModelSnapshot] | None] = queue.SimpleQueue()
        self._under_way: dict[int, ValidationPart[ModelSnapshot]] = {}
        self._is_closed = SignalSafeEvent()
        self._threads = [
            start_thread(f"offbeat validation {number}", partial(self._work, number), on_failure)
            for number in range(len(evaluators))
        ]

    def submit(self, parts: Sequence[ValidationPart[ModelSnapshot]]) -> None:
        """Add parts to the queue."""
        for part in parts:
            self._queue.put(part)

    def _work(self, number: int) -> None:
        evaluator = self._evaluators[number]
        while (part := self._queue.get()) is not None:
            if self._is_closed.is_set() or part.cancelled.is_set():
                continue
            self._under_way[number] = part
            result = evaluate_or_error(evaluator, part)
            del self._under_way[number]
            self._done(part, result)
            del part, result  # a waiting thread must not keep a model alive

    def close(self, wait_s: float) -> list[str]:
        """End the threads; queued parts are dropped, and evaluations under way end as soon as they can.

        In a forked process, which has none of the threads, this does nothing.

        Returns:
            The names of threads that still evaluate after `wait_s` seconds.
        """
        if os.getpid() != self._pid:
            return []
        self._is_closed.set()
        for part in list(self._under_way.values()):
            part.cancelled.set()
        for evaluator in self._evaluators:
            evaluator.close()
        for _ in self._threads:
            self._queue.put(None)
        end_s = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]
