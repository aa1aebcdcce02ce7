"""`Validator`: validates an epoch while the next one trains."""

from __future__ import annotations

import copy
import math
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, get_args

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from offbeat.errors import OffbeatError
from offbeat.policies.validation.early_stopping import EarlyStopping
from offbeat.policies.validation.overlap import BackendChoice, EpochCost, OverlapChooser
from offbeat.policies.validation.schedule import (
    PENDING_MAX,
    SkipValidation,
    TakeSnapshot,
    ValidationScheduler,
    WaitForValidation,
    WhenFull,
    split_even,
)
from offbeat.runtime.control.environment import available_cores
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
from offbeat.runtime.validation.isolation import GlobalRandomState, isolated_evaluation
from offbeat.runtime.validation.parts import ValidationData, count_samples
from offbeat.runtime.validation.process import ProcessEvaluator
from offbeat.runtime.validation.result import NoMetricsError, Validation, ValidationLedger
from offbeat.runtime.validation.snapshot import Snapshot, unwrap
from offbeat.runtime.validation.throttle import ThreadThrottle

Backend: TypeAlias = Literal["auto", "inline", "thread", "process", "stream"]
Decision: TypeAlias = Literal["sync", "lag", "rollback"]

DEADLINE_S: Final = 3600.0
_REHEARSAL_SAMPLES: Final = 32
_END_S: Final = 5.0
_PROCESS_START_S: Final = 4.0  # of core time: a new interpreter imports torch


class Stateful(Protocol):
    """An object with a state that can be saved and restored, such as an optimizer or a scheduler."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore a state."""


@dataclass(kw_only=True)
class EpochState:
    """The end of an epoch whose metrics may still matter: its snapshot, and what rolling back to it needs."""

    snapshot: Snapshot
    cancelled: SignalSafeEvent
    states: list[Any]
    randomness: GlobalRandomState | None


class Validator:
    """Validates each epoch while the next one trains, with a copy of the model as it was at the epoch's end.

        with offbeat.Validator(model, evaluate, validation_set) as validator:
            for epoch in validator.epochs(10):
                train(model)
                validator.validate()
        print(validator.history)

    `evaluate` gets a model and a part of the set and returns the part's metrics by name: means over its
    samples as floats, counts as integers, or metrics of torchmetrics. It may run in another thread or
    process, on several parts at once, and must not affect the training: neither the model, nor random
    numbers, nor torch's settings. Parameters and buffers are copied into memory that is reused, at most
    `max_pending` + 1 copies, plus one for the best snapshot where there is a monitor.

    Source: the overlapped validation paper: at the end of an epoch the model is copied, validation threads
    evaluate equal contiguous parts of the set with the copies, and training goes on. Deviations: one copy of
    the values for all threads, which only read it (the paper makes one per thread); one thread by default
    (the paper has up to 6), since not every metric and not every set can be divided, and of several threads
    not all at once where they contend for the interpreter's lock (`ThreadSearch`); means are weighted by
    samples (the paper averages the parts' means); `decision` sets what follows from metrics that come late,
    and `max_pending` how many snapshots may wait (the paper leaves both open).

    Args:
        model: the model in training; it may be compiled or in DistributedDataParallel.
        evaluate: called with a model, in evaluation mode and without gradients, and a part of `data`.
        data: the validation set, map-style, or a DataLoader that reads it in order.
        workers: number of parts that the set is evaluated in, at least 1, and of threads or processes. With 1
            `evaluate` gets the whole set, so that every metric is right. More are for metrics as above, and
            in threads for a set that several threads may read at once; of those, as many run at once as
            make it faster.
        backend: where to evaluate: "thread"; "process" for evaluations that compute in Python, with
            `evaluate` and `data` that can be pickled and a model on the CPU; "stream", threads with separate
            CUDA streams; "inline", in the training thread, which waits; "auto" measures the first epoch
            inline, then chooses, and gives the reason in `reason`.
        max_pending: how many snapshots may wait while one is evaluated, at least 0.
        when_full: what happens at the end of an epoch when that many wait: "block" waits, "skip" does not
            validate the epoch.
        monitor: watches a metric, for `stopped` and for the best snapshot.
        plateau: a scheduler that receives the monitor's metric and lowers the learning rate.
        decision: when metrics are acted on. "sync": `validate` waits for them. "lag": as soon as they are
            there, an epoch late or more. "rollback": as "lag", but training returns to the end of the epoch
            that they belong to, so that it ends with the weights that "sync" would give; needs `epochs`.
        restores: what "rollback" restores in addition to the model and the global random numbers: the
            optimizer, schedulers.
        deadline_s: the longest time that a validation may take, in seconds.

    Raises:
        ValueError: an argument is out of range.
        OffbeatError: model, data or evaluate are not suitable; the message states the remedy.

    Attributes:
        backend: where epochs are evaluated now.
        reason: why there.
        history: metrics of every epoch whose validation has ended, in order; None for a skipped epoch.
        stopped: the monitor's patience is exhausted.
        copy_s: time that snapshots have cost the training thread, in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate,
        data: ValidationData,
        *,
        workers: int = 1,
        backend: Backend = "auto",
        max_pending: int = PENDING_MAX,
        when_full: WhenFull = "block",
        monitor: EarlyStopping | None = None,
        plateau: ReduceLROnPlateau | None = None,
        decision: Decision = "lag",
        restores: Sequence[Stateful] = (),
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"expected a backend of {', '.join(get_args(Backend))}, got {backend!r}")
        if decision not in get_args(Decision):
            raise ValueError(f"expected a decision of {', '.join(get_args(Decision))}, got {decision!r}")
        if plateau is not None and monitor is None:
            raise ValueError(
                "expected a monitor together with plateau, to name the metric that plateau receives"
            )
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"expected a finite deadline above 0 s, got {deadline_s:g}")
        self._samples = count_samples(data)
        self._parts = split_even(self._samples, workers)
        scheduler = ValidationScheduler(pending_max=max_pending, when_full=when_full)
        self._ledger = ValidationLedger(scheduler, deadline_s)
        self._model, self._evaluate, self._data = model, evaluate, data
        self._monitor, self._plateau, self._decision = monitor, plateau, decision
        # A plateau receives epochs in order, once each, even if training rolls back.
        self._restores = [stateful for stateful in restores if stateful is not plateau]
        if plateau is not None and plateau.optimizer not in self._restores:
            self._restores.append(plateau.optimizer)
        self._deadline_s = deadline_s
        self._device = next((tensor.device for tensor in unwrap(model).parameters()), torch.device("cpu"))
        self._epoch_states: dict[int, EpochState] = {}  # by epoch, oldest first
        self._free_snapshots: list[Snapshot] = []
        self._best: Snapshot | None = None
        self._crews: list[tuple[EvaluatorPool[Snapshot], weakref.finalize[..., Any]]] = []
        self._errors: dict[int, Exception] = {}  # still to be raised, by epoch, oldest first
        self._last_epoch = -1  # the last epoch that has ended
        self._is_rehearsed = self._is_closed = self._has_validated = False
        self._inline_evaluator = ThreadEvaluator(evaluate, data, self._device, has_stream=False)
        self._waited_times: tuple[float, float] | None = (
            None  # by the training, at the end of an overlapped epoch
        )
        self._contention_share: float | None = None
        self._stopwatch = _Stopwatch()
        self._pacer: ThreadThrottle | None = None
        self._chooser: OverlapChooser | None = None
        self.history: dict[int, Mapping[str, float] | None] = {}
        self.stopped = False
        self.copy_s = 0.0
        self.backend, self.reason = str(backend), "it was requested"
        if backend == "auto" and decision == "sync":
            self.backend, self.reason = "inline", "training waits for the metrics anyway"
        elif backend == "auto":
            candidates = ("stream",) if self._device.type == "cuda" else ("thread", "process")
            self._chooser = OverlapChooser(candidates, cores=available_cores(), start_s=_PROCESS_START_S)
            self.backend, self.reason = "inline", "the first epoch is measured"
        elif backend != "inline":
            with ExitStack() as cleanup:
                evaluators = self._make_evaluators(backend, cleanup)
                cleanup.pop_all()
            self._start_pool(evaluators)

    # Evaluators -----------------------------------------------------------------------------------------

    def _make_evaluators(self, backend: str, cleanup: ExitStack) -> list[Evaluator[Snapshot]]:
        """Return new evaluators, which `cleanup` closes.

        Raises:
            OffbeatError: this backend is not available here.
        """
        if backend == "stream" and self._device.type != "cuda":
            raise OffbeatError(f"expected a model on a GPU for backend='stream', got one on {self._device}")
        if backend == "process" and self._device.type != "cpu":
            raise OffbeatError(
                f"expected a model on the CPU for backend='process', got one on {self._device}: use 'stream'"
            )
        data = _pinned(self._data) if backend == "stream" else self._data
        count = len(self._parts)
        if backend != "process":
            self._pacer = ThreadThrottle(
                count, None if self._chooser is None else self._chooser.minimum_rate()
            )
            self._ledger.waiting_context = self._pacer.training_waits
        if backend == "process" and self._chooser is not None:
            count = min(count, available_cores())  # more would only take longer to start
        threads = max(1, torch.get_num_threads() // count)
        evaluators: list[Evaluator[Snapshot]] = []
        for number in range(count):
            evaluators.append(
                ProcessEvaluator(number, self._evaluate, data, threads=threads, deadline_s=self._deadline_s)
                if backend == "process"
                else ThreadEvaluator(
                    self._evaluate, data, self._device, has_stream=backend == "stream", throttle=self._pacer
                )
            )
            cleanup.callback(evaluators[-1].close)
        return evaluators

    def _start_pool(self, evaluators: list[Evaluator[Snapshot]]) -> None:
        """Start a thread per evaluator that waits for parts."""
        crew = self._make_pool(evaluators)
        self._crews.append((crew, weakref.finalize(self, crew.close, _END_S)))

    def _make_pool(self, evaluators: list[Evaluator[Snapshot]]) -> EvaluatorPool[Snapshot]:
        return EvaluatorPool(evaluators, self._ledger.on_part_done, self._ledger.fail_all)

    def _apply_choice(self, choice: BackendChoice) -> None:
        """Continue with the backend that `auto` has chosen."""
        self.reason = choice.reason
        if choice.backend == self.backend:
            return
        self.backend = choice.backend
        if choice.backend == "inline":
            return
        self._free_snapshots.clear()  # other backends need other memory
        try:
            with ExitStack() as cleanup:
                evaluators = self._make_evaluators(choice.backend, cleanup)
                snapshot = self._capture().snapshot  # may fail for processes
                if choice.backend == "process":
                    self._rehearse_in_process(evaluators[0], snapshot)
                else:
                    self._rehearse(snapshot)
                cleanup.pop_all()
            self._start_pool(evaluators)
            self._free_snapshots.append(snapshot)
        except OffbeatError as error:
            assert self._chooser is not None
            self._chooser.exclude(choice.backend, str(error))
            self.backend, self.reason = "inline", str(error)
            self._free_snapshots.clear()

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

    def _rehearse(self, snapshot: Snapshot) -> None:
        """Check on a few samples that evaluating in another thread would not affect the training.

        Raises:
            OffbeatError: it changes state that all threads share.
        """
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
        self._is_rehearsed = True

    def _reject_trained_model(self, *arguments: Any) -> None:
        """Abort a rehearsal that computes with the model in training instead of the copy."""
        trained = {id(tensor) for tensor in unwrap(self._model).parameters()}
        if any(id(argument) in trained for argument in arguments):
            raise OffbeatError(
                "evaluating the copy of the model computes with the model itself, which trains meanwhile: "
                "evaluate holds a reference to it, or its forward was replaced by something that does; use "
                "the model that evaluate receives, or backend='inline'"
            )

    # The end of an epoch --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._last_epoch + 1

    def epochs(self, count: int) -> Iterator[int]:
        """Yield epochs up to `count` - 1 until training is to stop; epochs rolled back are yielded again."""
        while not self.stopped:
            if self.epoch >= count and self._decision == "rollback":
                self.finish()  # may roll back to an earlier epoch
            if self.epoch >= count or self.stopped:
                break
            self._has_validated = False
            yield self.epoch
            if not self._has_validated:
                self._last_epoch += 1

    def validate(self, epoch: int | None = None) -> Validation:
        """Mark the end of an epoch, and start its validation.

        Also acts on metrics of earlier epochs that have arrived, which may roll this epoch back.

        Args:
            epoch: its number, larger than those before; by default the one after the last.

        Returns:
            The future result.

        Raises:
            ValueError: the epoch has ended before.
            OffbeatError: the validator is closed, the model cannot be copied, or a validation did not end in
                time.
            Exception: what `evaluate` raised, with its traceback. If that was for an earlier epoch, this one
                is validated nevertheless.
        """
        if self._is_closed:
            raise OffbeatError("this validator is closed: make another one")
        if epoch is not None and epoch <= self._last_epoch:
            raise ValueError(f"expected an epoch after {self._last_epoch}, which has ended, got {epoch}")
        self._has_validated = True
        spent_s, spent_cpu_s = self._stopwatch.lap()
        self._last_epoch = epoch = self.epoch if epoch is None else epoch
        if self._chooser is not None and self._waited_times is not None:
            self._apply_choice(self._choose_after_overlap(spent_s, spent_cpu_s))
        is_in_line = self.backend == "inline"
        calls = self._inline_evaluator.calls
        self._apply_finished()
        validation = self._begin(epoch)
        if is_in_line or self._decision == "sync":
            validation.wait()
        validate_s, validate_cpu_s = self._stopwatch.lap()
        self._waited_times = None if is_in_line else (validate_s, validate_cpu_s)
        if self._chooser is not None and is_in_line:
            spent = EpochCost(
                train_s=spent_s,
                train_cpu_s=spent_cpu_s,
                validate_s=validate_s,
                validate_cpu_s=validate_cpu_s,
                contention_share=self._contention_share,
                calls=self._inline_evaluator.calls - calls,
            )
            self._apply_choice(self._chooser.after_inline_epoch(spent))
        self._apply_finished()
        self._raise_errors()
        return validation

    def _choose_after_overlap(self, spent_s: float, spent_cpu_s: float) -> BackendChoice:
        """Choose how to go on after an epoch during which another one was evaluated."""
        assert self._chooser is not None
        assert self._waited_times is not None
        if self._pacer is not None and self._pacer.is_slow:
            choice = self._chooser.after_slow_threads(self.backend)
            self._pacer = None
            while self._ledger.wait_for_oldest():
                self._apply_finished()
            self._stopwatch.lap()
            return choice
        waited_s, waited_cpu_s = self._waited_times  # at the last epoch's end
        return self._chooser.after_overlapped_epoch(
            self.backend, waited_s + spent_s, waited_cpu_s + spent_cpu_s
        )

    def _begin(self, epoch: int) -> Validation:
        """Start the validation of an epoch once there is room for its snapshot."""
        parts = self._current_parts()
        while self._last_epoch == epoch:
            decision, validation = self._ledger.on_epoch_ended(epoch, parts)
            if not isinstance(decision, WaitForValidation):
                break
            self._ledger.wait_for_oldest()
            self._apply_finished()
        else:
            return self._ledger.make_without_metrics(epoch, _rollback_reason(self._last_epoch))
        if isinstance(decision, SkipValidation):
            return self._ledger.make_without_metrics(epoch, "it was skipped, because others were under way")
        try:
            moment = self._epoch_states[epoch] = self._capture()
            if self.backend in ("thread", "stream") and not self._is_rehearsed:
                self._rehearse(moment.snapshot)
            self._submit(decision, moment)
        except BaseException as error:
            self._epoch_states.pop(epoch, None)
            self._ledger.drop_after(epoch - 1, str(error))
            raise
        return validation

    def _submit(self, take: TakeSnapshot, moment: EpochState) -> None:
        """Submit the parts of an epoch for evaluation."""
        parts = make_parts(take, moment.snapshot, moment.cancelled)
        if self.backend != "inline":
            self._crews[-1][0].submit(parts)
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

    def _current_parts(self) -> tuple[range, ...]:
        """Return the parts for an epoch: one per worker; in line, the whole set as one.

        Where `auto` has not yet measured how threads delay each other: one half alone, then two quarters at
        once. With one worker the set is not divided.
        """
        if self.backend != "inline":
            return self._parts
        half, quarter = self._samples // 2, self._samples // 4
        is_known = self._chooser is None or self._contention_share is not None
        if is_known or len(self._parts) == 1 or not quarter:
            return (range(self._samples),)
        return range(half), range(half, half + quarter), range(half + quarter, self._samples)

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
            thread.join(self._deadline_s)

    def _capture(self) -> EpochState:
        """Capture the current state of the training."""
        start_s = time.perf_counter()
        snapshot = (
            self._free_snapshots.pop() if self._free_snapshots else Snapshot(shared=self.backend == "process")
        )
        snapshot.capture(unwrap(self._model))
        goes_back = self._decision == "rollback"
        moment = EpochState(
            snapshot=snapshot,
            cancelled=SignalSafeEvent(),
            states=[copy.deepcopy(stateful.state_dict()) for stateful in self._restores] if goes_back else [],
            randomness=GlobalRandomState() if goes_back else None,
        )
        self.copy_s += time.perf_counter() - start_s
        return moment

    # Acting on metrics ----------------------------------------------------------------------------------

    def _apply_finished(self) -> None:
        """Act on all results that have arrived, in the order of epochs."""
        while self._apply_next():
            pass

    def _apply_next(self) -> bool:
        """Act on the next epoch that is over; return whether there was one."""
        reported = self._ledger.pop_finished()
        if reported is None:
            return False
        epoch, validation = reported
        if validation is None:
            self.history[epoch] = None
            return True
        moment = self._epoch_states.pop(epoch)
        try:
            metrics = validation.result()
        except NoMetricsError:
            self.history[epoch] = None
        except Exception as error:
            self._errors[epoch] = error
        else:
            self.history[epoch] = metrics
            self._act(epoch, metrics, moment)
        return True  # where there are no metrics, other threads may still read the snapshot

    def _act(self, epoch: int, metrics: Mapping[str, float], moment: EpochState) -> None:
        unused = moment.snapshot
        if self._monitor is not None:
            verdict = self._monitor.observe(epoch, metrics)
            is_late = self._decision == "rollback" and epoch < self._last_epoch
            if is_late and (verdict.should_stop or self._would_lower_rate(metrics)):
                self._roll_back(epoch, moment)
            if self._plateau is not None:
                self._plateau.step(self._monitor.value_of(metrics))
            self.stopped = self.stopped or verdict.should_stop
            if verdict.has_improved:
                self._best, unused = moment.snapshot, self._best
        self._reuse(unused)

    def _reuse(self, unused: Snapshot | None) -> None:
        """Reuse this memory for the next snapshot, if it suits the current backend."""
        if unused is not None and unused.is_shared == (self.backend == "process"):
            self._free_snapshots.append(unused)

    def _would_lower_rate(self, metrics: Mapping[str, float]) -> bool:
        """Whether the scheduler would lower a learning rate for these metrics; its state is restored."""
        if self._plateau is None or self._monitor is None:
            return False
        groups = self._plateau.optimizer.param_groups
        state, before = copy.deepcopy(self._plateau.state_dict()), copy.deepcopy([g["lr"] for g in groups])
        self._plateau.step(self._monitor.value_of(metrics))
        would_lower = [float(group["lr"]) for group in groups] != [float(rate) for rate in before]
        self._plateau.load_state_dict(state)
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate
        return would_lower

    def _roll_back(self, epoch: int, moment: EpochState) -> None:
        """Roll the training back to the end of an epoch."""
        moment.snapshot.restore_to(unwrap(self._model))
        for stateful, state in zip(self._restores, moment.states, strict=True):
            stateful.load_state_dict(state)
        assert moment.randomness is not None
        moment.randomness.restore()
        for later in self._epoch_states.values():
            later.cancelled.set()
        self._epoch_states.clear()
        self._ledger.drop_after(epoch, _rollback_reason(epoch))
        self._last_epoch = epoch

    @property
    def has_best(self) -> bool:
        """Whether this worker has the snapshot of the best epoch so far."""
        return self._best is not None

    def best_state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state at the end of the best epoch so far, under its names.

        Raises:
            OffbeatError: there is no monitor to determine the best epoch, or none has been validated.
        """
        if self._monitor is None:
            raise OffbeatError("expected a monitor, to determine the best epoch: pass monitor=…")
        if self._best is None:
            raise OffbeatError("no epoch has been validated yet: call finish() to wait for those under way")
        return self._best.state_dict()

    # The end --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all validations under way, and act on their metrics.

        Raises:
            OffbeatError: one did not end in time; the message names what is missing.
            Exception: what `evaluate` raised, with its traceback; has a note on each later epoch that failed.
        """
        while self._ledger.wait_for_oldest():
            self._apply_finished()
        self._apply_finished()
        self._raise_errors()

    def _raise_errors(self) -> None:
        """Raise the first pending error, with a note on each later one."""
        errors, self._errors = self._errors, {}
        if not errors:
            return
        first, *later_errors = errors.items()
        for epoch, error in later_errors:
            if error is not first[1]:
                first[1].add_note(
                    f"the validation of epoch {epoch} failed, too: {type(error).__name__}: {error}"
                )
        raise first[1]

    def close(self) -> None:
        """End the threads and processes, and drop validations under way. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        for moment in self._epoch_states.values():
            moment.cancelled.set()
        self._ledger.drop_after(-1, "the validator was closed")
        for crew, finalizer in self._crews:
            finalizer.detach()
            if alive := crew.close(_END_S):
                warnings.warn(
                    f"{', '.join(alive)} did not end within {_END_S:g} s: the next call of torch ends it",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()


def _rollback_reason(epoch: int) -> str:
    return f"training went back to the end of epoch {epoch}"


class _Stopwatch:
    """Wall time, and time of all cores that this process used, since the last lap."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Return both, in seconds, and restart."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        spent = wall_s - self._wall_s, cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return spent


def _pinned(data: ValidationData) -> ValidationData:
    """Return a set whose tensors can be copied to a GPU while it computes."""
    if type(data) is TensorDataset and not any(tensor.is_cuda for tensor in data.tensors):
        return TensorDataset(*(tensor.pin_memory() for tensor in data.tensors))
    return data
