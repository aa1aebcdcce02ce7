"""`OverlappedValidation`: a Keras 3 callback that validates an epoch while the next one trains.

    model.fit(x, y, epochs=10, callbacks=[offbeat.keras.OverlappedValidation(x_val, y_val, batch_size=64)])

It works with every backend: it uses only the values of the model's variables, its config and its compile
config. It writes to the model only to restore the best weights, after training has ended.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.numerics.metrics import MetricValue, validate_metrics
from offbeat.policies.validation.early_stopping import EarlyStopping
from offbeat.policies.validation.schedule import (
    PENDING_MAX,
    SkipValidation,
    ValidationScheduler,
    WaitForValidation,
    WhenFull,
    split_even,
)
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.validation.evaluators import CancelledError, EvaluatorPool, ValidationPart, make_parts
from offbeat.runtime.validation.isolation import IsolatedRandomness, isolated_evaluation
from offbeat.runtime.validation.result import ValidationLedger
from offbeat.runtime.validation.validator import DEADLINE_S

try:
    import keras
except ModuleNotFoundError as error:
    if error.name == "keras":
        raise ImportError("offbeat.keras needs Keras 3, an extra: pip install offbeat[keras]") from error
    raise ImportError(
        f"Keras is installed, but its backend is not ({error}): install that backend, or select another one "
        "before Keras is imported, such as KERAS_BACKEND=torch in the environment"
    ) from error

__all__ = ["OverlappedValidation"]

OnResult: TypeAlias = Callable[[int, Mapping[str, float]], None]
DecisionMode: TypeAlias = Literal["sync", "lag"]
_CLOSE_TIMEOUT_S: Final = 5.0


class _Snapshot:
    """A snapshot of the values of variables, in memory that is reused."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray[Any, Any]] = []

    def copy_from(self, variables: Sequence[Any]) -> None:
        """Copy the current values, which replace the previous snapshot."""
        buffers = self._arrays if len(self._arrays) == len(variables) else [None] * len(variables)
        self._arrays = [
            _copied(keras.ops.convert_to_numpy(variable.value), buffer)
            for variable, buffer in zip(variables, buffers, strict=True)
        ]

    def assign_to(self, variables: Sequence[Any]) -> None:
        """Assign the values to variables."""
        for variable, array in zip(variables, self._arrays, strict=True):
            variable.assign(array)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all values."""
        return [array.shape for array in self._arrays]

    def copies(self) -> list[np.ndarray[Any, Any]]:
        """Return copies of the values."""
        return [array.copy() for array in self._arrays]


def _copied(value: np.ndarray[Any, Any], buffer: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        return np.array(value)
    np.copyto(buffer, value)
    return buffer


def _all_variables(model: Any) -> list[Any]:
    """Return a model's weights, followed by its other variables, such as the states of random generators."""
    weights = list(model.weights)
    known = {id(weight) for weight in weights}
    return weights + [variable for variable in model.variables if id(variable) not in known]


class OverlappedValidation(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Validates each epoch of `fit` while the next one trains, with copies of the model.

        late = offbeat.keras.OverlappedValidation(x_val, y_val, batch_size=64)
        fitted = model.fit(x, y, epochs=10, callbacks=[late])
        print(fitted.history["val_loss"])

    When `fit` begins, the model is cloned once per thread, compiled with the same configuration, and one
    batch is evaluated, so that errors are raised at once. A model without an input shape, which may have no
    variables yet, is cloned at the end of the first epoch. At the end of an epoch all variables of the model
    are copied into reused memory, at most `max_pending` + 1 times and once more for the best epoch. Threads
    assign these values to their clones and `evaluate` them. Training is bitwise the same as without.

    Metrics are named as in Keras (`val_loss`) and arrive during a later epoch: they are then put into
    `history` and passed to `on_result`. The `History` that `fit` returns is completed when training ends,
    with one entry per epoch, NaN for one that was skipped. Other callbacks (EarlyStopping, ModelCheckpoint,
    ReduceLROnPlateau) do not see these metrics, unless `decision="sync"`, since they would apply them to the
    weights of a later epoch; use `monitor` and `on_result` instead.

    Source: the overlapped validation paper; see `offbeat.Validator`, which is for training loops in torch.

    Args:
        x, y: the validation set: whatever `model.evaluate` accepts more than once. With more than one worker,
            arrays or structures of arrays.
        batch_size: as in `model.evaluate`.
        workers: number of contiguous parts that are evaluated at once, at least 1. The losses and metrics of
            the parts are averaged, weighted by samples. That is correct for metrics that are means over
            samples. For others, such as AUC, precision or F1, leave it at 1, which is exact.
        max_pending: how many snapshots may wait while one is evaluated, at least 0.
        when_full: what happens at the end of an epoch when that many wait: "block" waits for one to be
            evaluated, "skip" does not validate the epoch.
        on_result: called in the training thread with each epoch and its metrics, in order.
        monitor: watches a metric, such as `offbeat.EarlyStopping("val_loss", patience=3)`, and stops training
            when its patience is exhausted. It keeps its state across calls of `fit`.
        restore_best_weights: set the model to the weights of the monitor's best epoch at the end.
        decision: "lag" acts on metrics at the end of the epoch during which they arrive. "sync" waits for
            them, so that nothing overlaps, and callbacks after this one see them in their logs.
        build: returns a new, compiled model like this one; needed where Keras cannot clone it by its config.
        timeout_s: how long a validation may take, in seconds.

    Raises:
        ValueError: an argument is out of range.

    Attributes:
        history: metrics of every epoch whose validation has ended, in order; None for an epoch that was
            skipped.
        stopped: whether the monitor's patience is exhausted.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        workers: int = 1,
        max_pending: int = PENDING_MAX,
        when_full: WhenFull = "block",
        on_result: OnResult | None = None,
        monitor: EarlyStopping | None = None,
        restore_best_weights: bool = False,
        decision: DecisionMode = "lag",
        build: Callable[[], Any] | None = None,
        timeout_s: float = DEADLINE_S,
    ) -> None:
        super().__init__()
        if decision not in get_args(DecisionMode):
            raise ValueError(f"expected a decision of {', '.join(get_args(DecisionMode))}, got {decision!r}")
        if restore_best_weights and monitor is None:
            raise ValueError("expected a monitor, to decide which epoch is the best: pass monitor=…")
        if timeout_s <= 0:
            raise ValueError(f"expected a timeout above 0 s, got {timeout_s:g}")
        ValidationScheduler(pending_max=max_pending, when_full=when_full)  # validates these arguments
        self._x, self._y, self._batch_size = x, y, batch_size
        self._parts = _parts(x, workers)
        self._pending_max, self._when_full, self._timeout_s = max_pending, when_full, timeout_s
        self._on_result, self._monitor, self._decision = on_result, monitor, decision
        self._restores, self._build = restore_best_weights, build
        self._is_ready = False
        self._snapshots: dict[int, _Snapshot] = {}  # by epoch, oldest first
        self._free_snapshots: list[_Snapshot] = []
        self._best: _Snapshot | None = None
        self._close: Callable[[], Any] = list
        self.history: dict[int, Mapping[str, float] | None] = {}
        self.stopped = False

    # Callback methods of Keras ---------------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Prepare clones and threads, if the model has its variables already.

        Raises:
            OffbeatError: the model cannot be cloned, or evaluating it would change its training.
            Exception: raised by `evaluate`.
        """
        self._close()  # the last training may have ended with an error elsewhere
        self.history, self.stopped = {}, False
        self._snapshots = {}
        self._is_ready = False
        if self.model.built:
            self._prepare()

    def _prepare(self) -> None:
        with isolated_evaluation():  # initial values are random
            evaluators = [
                _Evaluator(self._clone(), self._x, self._y, part, self._batch_size) for part in self._parts
            ]
        first = _Snapshot()
        first.copy_from(_all_variables(self.model))
        for evaluator in evaluators:
            evaluator.check(first)
        self._free_snapshots.append(first)
        scheduler = ValidationScheduler(pending_max=self._pending_max, when_full=self._when_full)
        self._ledger = ValidationLedger(scheduler, self._timeout_s)
        self._evaluators = EvaluatorPool(evaluators, self._ledger.on_part_done, self._ledger.fail_all)
        self._close = weakref.finalize(self, self._evaluators.close, _CLOSE_TIMEOUT_S)
        self._is_ready = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the validation of an epoch once there is room, and process the results that have arrived.

        Raises:
            OffbeatError: a validation timed out; names what is missing.
            Exception: raised by the evaluation of an earlier epoch, with its traceback.
        """
        with self._closing_on_error():
            if not self._is_ready:
                self._prepare()
            self._process_results()
            self._start_validation(epoch)
            if self._decision == "sync":
                self._wait_for_all()
                if logs is not None:
                    logs.update(self.history[epoch] or {})
            if self.stopped:
                self.model.stop_training = True

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Wait for all validations, process their results, and complete the `History` that `fit` returns.

        Then restore the weights of the best epoch, if that was requested, and end the evaluating threads.

        Raises:
            OffbeatError: a validation timed out; names what is missing.
            Exception: raised by the evaluation of an epoch, with its traceback.
        """
        with self._closing_on_error():
            if self._is_ready:
                self._wait_for_all()
            if self.history:
                _complete_history(self.model.history, self.history)
            if self._restores and self._best is not None:
                self.model.set_weights(self.best_weights())
        self._close()

    def best_weights(self) -> list[np.ndarray[Any, Any]]:
        """Return the weights of the best epoch so far, for `model.set_weights`.

        Raises:
            OffbeatError: there is no monitor, or no epoch has been validated yet.
        """
        if self._monitor is None:
            raise OffbeatError("expected a monitor, to decide which epoch is the best: pass monitor=…")
        if self._best is None:
            raise OffbeatError("there is no best epoch yet: no epoch has been validated")
        return self._best.copies()[: len(self.model.weights)]

    # An epoch's validation ------------------------------------------------------------------------------

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """End the threads on an error, since Keras makes no further call after one."""
        try:
            yield
        except BaseException:
            self._close()
            raise

    def _start_validation(self, epoch: int) -> None:
        while isinstance(answer := self._ledger.on_epoch_ended(epoch, self._parts)[0], WaitForValidation):
            self._ledger.wait_for_oldest()
            self._process_results()
        if isinstance(answer, SkipValidation):
            return
        values = self._snapshots[epoch] = self._free_snapshots.pop() if self._free_snapshots else _Snapshot()
        values.copy_from(_all_variables(self.model))
        self._evaluators.submit(make_parts(answer, values, SignalSafeEvent()))

    def _wait_for_all(self) -> None:
        while self._ledger.wait_for_oldest():
            self._process_results()
        self._process_results()

    def _process_results(self) -> None:
        """Process the results that have arrived, in the order of epochs."""
        while (reported := self._ledger.pop_finished()) is not None:
            epoch, validation = reported
            if validation is None:
                self.history[epoch] = None
                continue
            metrics = validation.result()
            self.history[epoch] = metrics
            self._on_metrics(epoch, metrics, self._snapshots.pop(epoch))

    def _on_metrics(self, epoch: int, metrics: Mapping[str, float], values: _Snapshot) -> None:
        unused: _Snapshot | None = values
        if self._monitor is not None:
            verdict = self._monitor.observe(epoch, metrics)
            self.stopped = self.stopped or verdict.should_stop
            if verdict.has_improved:
                self._best, unused = values, self._best
        if unused is not None:
            self._free_snapshots.append(unused)
        if self._on_result is not None:
            self._on_result(epoch, metrics)

    def _clone(self) -> Any:
        """Return a new model like this one.

        Raises:
            OffbeatError: Keras cannot clone it.
        """
        if self._build is not None:
            return self._build()
        losses = keras.tree.flatten(self.model.loss)
        custom_losses = {loss.__name__: loss for loss in losses if hasattr(loss, "__name__")}
        try:
            with keras.saving.custom_object_scope(custom_losses):
                clone = keras.models.clone_model(self.model)
                settings = {
                    name: keras.saving.deserialize_keras_object(value)
                    for name, value in self.model.get_compile_config().items()
                    if name not in ("optimizer", "loss")  # no optimizer is needed; the loss has no state
                }
            clone.compile(loss=self.model.loss, **settings)  # replaces Keras's own compilation, if any
        except Exception as error:
            raise OffbeatError(
                f"Keras cannot clone this model by its config ({type(error).__name__}: {error}): pass "
                "build=, a function that returns a new, compiled model"
            ) from error
        return clone


class _Evaluator:
    """Evaluates parts of the validation set in one thread, with its own model."""

    def __init__(self, model: Any, x: Any, y: Any, first: range, batch_size: int | None) -> None:
        self._model, self._x, self._y = model, x, y
        self._first, self._batch_size = first, batch_size

    def check(self, values: _Snapshot) -> None:
        """Evaluate one batch, to check that it works and leaves the random state of training alone.

        Raises:
            OffbeatError: the evaluation changes that state, or the clone's variables have other shapes.
        """
        with isolated_evaluation():  # variables that are created on first use may be random
            self._evaluate(self._first, seed=0, steps=1)
        with isolated_evaluation() as changed:
            variables = _all_variables(self._model)
            shapes = [tuple(variable.shape) for variable in variables]
            if shapes != values.shapes:
                raise OffbeatError(
                    f"expected the clone to have variables of the same shapes as the model, {values.shapes}, "
                    f"got {shapes}: pass build=, a function that returns a model like this one, compiled"
                )
            values.assign_to(variables)
            validate_metrics(self._evaluate(self._first, seed=0, steps=1))
        if changed:
            raise OffbeatError(
                f"evaluation changes {' and '.join(changed)}, which all threads share, and so would change "
                "the training: pass a seed or a generator to the layers that draw random numbers"
            )

    def evaluate(self, part: ValidationPart[_Snapshot]) -> dict[str, MetricValue]:
        """Return the part's metrics; a cancelled part ends before its next batch."""
        part.snapshot.assign_to(_all_variables(self._model))
        found = self._evaluate(part.positions, seed=part.seed, callbacks=[_CancelCallback(part)])
        return {f"val_{name}": value for name, value in validate_metrics(found).items()}

    def _evaluate(self, positions: range, *, seed: int, **options: Any) -> Any:
        x, y = _select(self._x, positions), _select(self._y, positions)
        with IsolatedRandomness(seed):
            return self._model.evaluate(
                x, y, batch_size=self._batch_size, verbose=0, return_dict=True, **options
            )

    def close(self) -> None:
        """Do nothing: there is no resource to release."""


class _CancelCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def __init__(self, part: ValidationPart[_Snapshot]) -> None:
        super().__init__()
        self._part = part

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._part.cancelled.is_set():
            raise CancelledError(f"part {self._part.number} of epoch {self._part.epoch} is no longer needed")


def _sample_count(x: Any) -> int | None:
    """Return the number of samples in arrays; None if these are not arrays."""
    arrays = keras.tree.flatten(x)
    if not arrays or not all(getattr(array, "shape", ()) for array in arrays):
        return None
    return int(arrays[0].shape[0])


def _parts(x: Any, workers: int) -> tuple[range, ...]:
    samples = _sample_count(x)
    if samples is not None:
        return split_even(samples, workers)
    if workers != 1:
        raise ValueError(
            f"expected arrays that can be split for {workers} workers, got {type(x).__name__}: "
            "leave workers at 1"
        )
    return (range(1),)  # one part that stands for all data, whatever the type


def _select(data: Any, positions: range) -> Any:
    """Return the samples of arrays at these positions; anything else is returned whole."""
    samples = _sample_count(data)
    if samples is None or len(positions) == samples:
        return data
    return keras.tree.map_structure(lambda array: array[positions.start : positions.stop], data)


def _complete_history(history_callback: Any, found: Mapping[int, Mapping[str, float] | None]) -> None:
    """Write metrics to a Keras `History`, one entry per epoch, NaN where there are none."""
    names = dict.fromkeys(name for metrics in found.values() for name in metrics or ())
    for name in names:
        history_callback.history[name] = [
            (found.get(epoch) or {}).get(name, math.nan) for epoch in history_callback.epoch
        ]
