"""Where a `Validator` evaluates: in line, in threads or in processes; `auto` measures epochs, then chooses.

A change of the backend is rehearsed on a few samples before an epoch depends on it. Nothing here acts on
metrics.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch.utils.data import TensorDataset

from offbeat.errors import OffbeatError
from offbeat.policies.validation.overlap import BackendChoice, EpochCost, OverlapChooser
from offbeat.policies.validation.schedule import TakeSnapshot
from offbeat.runtime.control.environment import available_cores
from offbeat.runtime.devices.interface import Accelerator
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.validation.evaluators import (
    Evaluate,
    Evaluator,
    EvaluatorPool,
    ThreadEvaluator,
    ValidationPart,
    evaluate_or_error,
    evaluate_part,
    make_parts,
)
from offbeat.runtime.validation.isolation import isolated_evaluation
from offbeat.runtime.validation.parts import ValidationData
from offbeat.runtime.validation.process import ProcessEvaluator
from offbeat.runtime.validation.result import ValidationLedger
from offbeat.runtime.validation.scheduled_forward import ScheduledForward
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.runtime.validation.throttle import ThreadThrottle
from offbeat.runtime.validation.validated_training import EpochState, ValidatedTraining

Backend: TypeAlias = Literal["auto", "inline", "thread", "process", "stream"]
MakePool: TypeAlias = Callable[[Sequence[Evaluator[Snapshot]]], EvaluatorPool[Snapshot]]

END_S: Final = 5.0
"""How long closing waits for evaluations under way, in seconds."""
_REHEARSAL_SAMPLES: Final = 32
_PROCESS_START_S: Final = 4.0  # of core time: a new interpreter imports torch


class EvaluationBackend:
    """Evaluates parts where it was requested to; with "auto", where measured times say that it pays.

    Args:
        state: of the training.
        evaluate, data: see `Validator`.
        parts: of the set, one per evaluator.
        requested: see `Validator`.
        is_awaited: training waits for the metrics of each epoch anyway.
        ledger: receives the results.
        make_pool: returns a pool of threads for evaluators.
        timeout_s: see `Validator`.

    Raises:
        OffbeatError: this backend is not available here.

    Attributes:
        name: of the current backend; not "auto".
        reason: for the current backend.
        is_rehearsed: evaluating in another thread is known not to affect the training.
    """

    def __init__(
        self,
        state: ValidatedTraining,
        evaluate: Evaluate,
        data: ValidationData,
        parts: tuple[range, ...],
        requested: Backend,
        *,
        is_awaited: bool,
        ledger: ValidationLedger,
        make_pool: MakePool,
        timeout_s: float,
    ) -> None:
        self._state, self._evaluate, self._data, self._parts = state, evaluate, data, parts
        self._ledger, self._make_pool, self._timeout_s = ledger, make_pool, timeout_s
        self._inline_evaluator = ThreadEvaluator(evaluate, data, state.accelerators, has_stream=False)
        self._pools: list[tuple[EvaluatorPool[Snapshot], weakref.finalize[..., Any]]] = []
        self._throttle: ThreadThrottle | None = None
        self._schedules: list[ScheduledForward] = []
        self._chooser: OverlapChooser | None = None
        self._contention_share: float | None = None
        self._stopwatch = Stopwatch()
        self._trained = 0.0, 0.0  # wall and core time of the last epoch's training
        self._waited: tuple[float, float] | None = None  # by the training, at the end of an overlapped epoch
        self._calls_before = 0  # of torch, in line, before the current validation
        self.is_rehearsed = False
        self.name, self.reason = str(requested), "it was requested"
        if requested == "auto" and is_awaited:
            self.name, self.reason = "inline", "training waits for the metrics anyway"
        elif requested == "auto":
            candidates = ("stream",) if state.accelerators else ("thread", "process")
            self._chooser = OverlapChooser(candidates, cores=available_cores(), start_s=_PROCESS_START_S)
            self.name, self.reason = "inline", "the first epoch is measured"
        elif requested != "inline":
            with ExitStack() as cleanup:
                evaluators = self._make_evaluators(requested, cleanup)
                cleanup.pop_all()
            self._start_pool(evaluators)

    @property
    def is_inline(self) -> bool:
        """Whether the training thread evaluates."""
        return self.name == "inline"

    @property
    def is_process(self) -> bool:
        """Whether processes evaluate, so that snapshots are in shared memory."""
        return self.name == "process"

    def current_parts(self) -> tuple[range, ...]:
        """Return the parts for an epoch: one per evaluator; in line, the whole set as one.

        Where `auto` has not yet measured how threads delay each other: one half alone, then two quarters at
        once. With one evaluator the set is not divided.
        """
        if not self.is_inline:
            return self._parts
        samples = self._parts[-1].stop
        half, quarter = samples // 2, samples // 4
        is_known = self._chooser is None or self._contention_share is not None
        if is_known or len(self._parts) == 1 or not quarter:
            return (range(samples),)
        return range(half), range(half, half + quarter), range(half + quarter, samples)

    def submit(self, take: TakeSnapshot, moment: EpochState) -> None:
        """Submit the parts of an epoch for evaluation; in line, evaluate them."""
        parts = make_parts(take, moment.snapshot, moment.cancelled)
        if not self.is_inline:
            self._pools[-1][0].submit(parts)
            return
        alone_s = time.perf_counter()
        with isolated_evaluation() as moved:
            self._evaluate_in_line(parts[:1])
        alone_s = time.perf_counter() - alone_s
        if moved and self._chooser is not None:
            for backend in ("thread", "stream"):
                self._chooser.exclude(backend, f"evaluate changes {' and '.join(moved)}, which threads share")
        if len(parts) > 1 and moved:
            with isolated_evaluation():
                self._evaluate_in_line(parts[1:])
        elif len(parts) > 1:
            at_once_s = time.perf_counter()
            self._evaluate_at_once(parts[1:])
            at_once_s = time.perf_counter() - at_once_s
            self._contention_share = min(1.0, max(0.0, 2 - alone_s / at_once_s))

    def close(self) -> list[str]:
        """End the threads and processes; return the names of threads that did not end in time."""
        alive: list[str] = []
        for pool, finalizer in self._pools:
            finalizer.detach()
            alive += pool.close(END_S)
        return alive

    # Choosing -------------------------------------------------------------------------------------------

    def on_epoch_trained(self, finish_pending: Callable[[], None]) -> None:
        """Measure the training of an epoch that has ended; choose again if another one was evaluated then.

        Args:
            finish_pending: waits for the validations under way.
        """
        trained_s, trained_cpu_s = self._trained = self._stopwatch.lap()
        if self._chooser is not None and self._waited is not None:
            if self._throttle is not None and self._throttle.is_slow:
                choice = self._chooser.after_slow_threads(self.name)
                self._throttle = None
                finish_pending()
                self._stopwatch.lap()
            else:
                waited_s, waited_cpu_s = self._waited
                choice = self._chooser.after_overlapped_epoch(
                    self.name, waited_s + trained_s, waited_cpu_s + trained_cpu_s
                )
            self._apply_choice(choice)
        self._calls_before = self._inline_evaluator.calls

    def on_epoch_validated(self, *, was_inline: bool) -> None:
        """Measure what validating has cost the training thread; choose again if it was all of it."""
        validate_s, validate_cpu_s = self._stopwatch.lap()
        self._waited = None if was_inline else (validate_s, validate_cpu_s)
        if self._chooser is None or not was_inline:
            return
        trained_s, trained_cpu_s = self._trained
        spent = EpochCost(
            train_s=trained_s,
            train_cpu_s=trained_cpu_s,
            validate_s=validate_s,
            validate_cpu_s=validate_cpu_s,
            contention_share=self._contention_share,
            calls=self._inline_evaluator.calls - self._calls_before,
        )
        self._apply_choice(self._chooser.after_inline_epoch(spent))

    def _apply_choice(self, choice: BackendChoice) -> None:
        """Continue with the backend that `auto` has chosen."""
        self.reason = choice.reason
        if choice.backend == self.name:
            return
        self.name = choice.backend
        if self.is_inline:
            return
        self._state.drop_unused()  # other backends need other memory
        try:
            with ExitStack() as cleanup:
                evaluators = self._make_evaluators(choice.backend, cleanup)
                snapshot = self._state.capture(shared=self.is_process).snapshot  # may fail for processes
                if self.is_process:
                    self._rehearse_in_process(evaluators[0], snapshot)
                else:
                    self._rehearse(snapshot)
                cleanup.pop_all()
            self._start_pool(evaluators)
            self._state.reuse(snapshot)
        except OffbeatError as error:
            assert self._chooser is not None
            self._chooser.exclude(choice.backend, str(error))
            self.name, self.reason = "inline", str(error)
            self._state.drop_unused()

    def rehearse_once(self, snapshot: Snapshot) -> None:
        """Before threads evaluate for the first time, check on a few samples that they may.

        Raises:
            OffbeatError: evaluating in another thread would affect the training.
        """
        if self.name in ("thread", "stream") and not self.is_rehearsed:
            self._rehearse(snapshot)

    def schedule_when_due(self, snapshot: Snapshot) -> None:
        """Before an epoch is evaluated, make the schedules of forward passes that have been called often."""
        due = [scheduled for scheduled in self._schedules if scheduled.is_due]
        if not due:
            return
        with self._stopwatch.stopped(), self._ledger.waiting_context(), ExitStack() as pause:
            if not all(pause.enter_context(one.idle(self._timeout_s)) for one in self._schedules):
                return  # a later epoch may find all evaluators idle
            with isolated_evaluation():
                for scheduled in due:
                    scheduled.compile(snapshot)
        self.reason = f"{self.reason}; forward passes: {due[0].reason}"

    def _rehearse(self, snapshot: Snapshot) -> None:
        with isolated_evaluation() as moved:
            evaluate_part(
                snapshot.model(),
                self._evaluate,
                self._data,
                self._rehearsal_positions(),
                seed=0,
                watch=self._reject_trained_model,
            )
        if moved:
            raise OffbeatError(
                f"evaluate changes {' and '.join(moved)}, which all threads share, so that it would change "
                "the training: use backend='process', or pass a separate generator to what it draws"
            )
        self.is_rehearsed = True

    def _reject_trained_model(self, *arguments: Any) -> None:
        """Abort a rehearsal that computes with the model in training instead of the copy."""
        trained = {id(tensor) for tensor in self._state.model.parameters()}
        if any(id(argument) in trained for argument in arguments):
            raise OffbeatError(
                "evaluating the copy of the model computes with the model itself, which trains meanwhile: "
                "evaluate holds a reference to it, or its forward was replaced by something that does; use "
                "the model that evaluate receives, or backend='inline'"
            )

    def _rehearse_in_process(self, process: Evaluator[Snapshot], snapshot: Snapshot) -> None:
        """Check on a few samples that a process can evaluate.

        Raises:
            OffbeatError: it cannot.
        """
        part = ValidationPart(
            epoch=0,
            number=0,
            positions=self._rehearsal_positions(),
            snapshot=snapshot,
            cancelled=SignalSafeEvent(),
        )
        try:
            process.evaluate(part)
        except OffbeatError:
            raise
        except Exception as error:
            raise OffbeatError(
                f"evaluate fails in a process of its own ({type(error).__name__}: {error})"
            ) from error

    def _rehearsal_positions(self) -> range:
        return range(min(_REHEARSAL_SAMPLES, len(self._parts[0])))

    # Evaluators -----------------------------------------------------------------------------------------

    def _make_evaluators(self, backend: str, cleanup: ExitStack) -> list[Evaluator[Snapshot]]:
        """Return new evaluators, which `cleanup` closes.

        Raises:
            OffbeatError: this backend is not available here.
        """
        accelerators = self._state.accelerators
        if backend == "stream" and not accelerators:
            raise OffbeatError(
                "expected a model on an accelerator (a GPU) for backend='stream', got one on the CPU: use "
                "'thread' or 'process'"
            )
        if backend == "process" and accelerators:
            raise OffbeatError(
                "expected a model on the CPU for backend='process', got one on "
                f"{accelerators[0].torch_device}: use 'stream'"
            )
        data = _pinned(self._data, accelerators[0]) if backend == "stream" else self._data
        count = len(self._parts)
        self._schedules = [ScheduledForward() for _ in range(count)] if backend == "stream" else []
        if backend != "process":
            self._throttle = ThreadThrottle(
                count, None if self._chooser is None else self._chooser.minimum_rate()
            )
            self._ledger.waiting_context = self._throttle.training_waits
        if backend == "process" and self._chooser is not None:
            count = min(count, available_cores())  # more would only take longer to start
        threads = max(1, torch.get_num_threads() // count)
        evaluators: list[Evaluator[Snapshot]] = []
        for number in range(count):
            evaluators.append(
                ProcessEvaluator(number, self._evaluate, data, threads=threads, timeout_s=self._timeout_s)
                if backend == "process"
                else ThreadEvaluator(
                    self._evaluate,
                    data,
                    accelerators,
                    has_stream=backend == "stream",
                    throttle=self._throttle,
                    scheduled=self._schedules[number] if self._schedules else None,
                )
            )
            cleanup.callback(evaluators[-1].close)
        return evaluators

    def _start_pool(self, evaluators: Sequence[Evaluator[Snapshot]]) -> None:
        """Start a thread per evaluator that waits for parts."""
        pool = self._make_pool(evaluators)
        self._pools.append((pool, weakref.finalize(self, pool.close, END_S)))

    def _evaluate_in_line(self, parts: Sequence[ValidationPart[Snapshot]]) -> None:
        for part in parts:
            result = evaluate_or_error(self._inline_evaluator, part)
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result  # an interrupt reaches the training at once
            self._ledger.on_part_done(part, result)

    def _evaluate_at_once(self, parts: Sequence[ValidationPart[Snapshot]]) -> None:
        """Evaluate parts in a thread each, and wait for them."""

        def evaluate(part: ValidationPart[Snapshot]) -> None:
            self._ledger.on_part_done(part, evaluate_or_error(self._inline_evaluator, part))

        threads = [
            start_thread("offbeat validation", partial(evaluate, part), self._ledger.fail_all)
            for part in parts
        ]
        for thread in threads:
            thread.join(self._timeout_s)


class Stopwatch:
    """Wall time, and time of all cores that this process used, since the last lap."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Return both, in seconds, and restart."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        spent = wall_s - self._wall_s, cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return spent

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out of the lap what is done inside: it is done once, not every epoch."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._wall_s += time.perf_counter() - wall_s
            self._cpu_s += time.process_time() - cpu_s


def _pinned(data: ValidationData, accelerator: Accelerator) -> ValidationData:
    """Return a set whose tensors can be copied to an accelerator while it computes."""
    if type(data) is not TensorDataset or any(tensor.device.type != "cpu" for tensor in data.tensors):
        return data
    pinned = [accelerator.pinned_zeros(tensor.numel(), tensor.dtype) for tensor in data.tensors]
    return TensorDataset(
        *(flat.view(tensor.shape).copy_(tensor) for flat, tensor in zip(pinned, data.tensors, strict=True))
    )
