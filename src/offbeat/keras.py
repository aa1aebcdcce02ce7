"""`OverlappedValidation`: a callback of Keras 3 that validates an epoch while the next one trains.

    model.fit(x, y, epochs=10, callbacks=[offbeat.keras.OverlappedValidation(x_val, y_val, batch_size=64)])

It asks the model for nothing but its variables' values, its config and how it was compiled, whatever the
backend. It never writes to the model, but for the best weights, once training has ended.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.numerics.metrics import Value, plain
from offbeat.policies.validation.early_stopping import Monitor
from offbeat.policies.validation.schedule import (
    PENDING_MAX,
    Block,
    Skip,
    ValidationScheduler,
    WhenFull,
    split_even,
)
from offbeat.runtime.processes.waiting import Flag
from offbeat.runtime.validation.evaluators import CancelledError, Crew, Part, parts_of
from offbeat.runtime.validation.isolation import OwnRandomness, apart
from offbeat.runtime.validation.result import Ledger
from offbeat.runtime.validation.validator import DEADLINE_S

try:
    import keras
except ModuleNotFoundError as error:
    if error.name == "keras":
        raise ImportError("offbeat.keras needs Keras 3, an extra: pip install offbeat[keras]") from error
    raise ImportError(
        f"Keras is there, but its backend is not ({error}): install that backend, or choose another one "
        "before Keras is imported, such as KERAS_BACKEND=torch in the environment"
    ) from error

OnResult: TypeAlias = Callable[[int, Mapping[str, float]], None]
Decision: TypeAlias = Literal["sync", "lag"]
_END_S: Final = 5.0


class _Values:
    """The values of variables at one moment, in memory that is used again."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray[Any, Any]] = []

    def take(self, variables: Sequence[Any]) -> None:
        """Copy the values as they are now; what was here before is overwritten."""
        kept = self._arrays if len(self._arrays) == len(variables) else [None] * len(variables)
        self._arrays = [
            _copied(keras.ops.convert_to_numpy(variable.value), room)
            for variable, room in zip(variables, kept, strict=True)
        ]

    def put(self, variables: Sequence[Any]) -> None:
        """Give variables these values."""
        for variable, array in zip(variables, self._arrays, strict=True):
            variable.assign(array)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of all values."""
        return [array.shape for array in self._arrays]

    def copies(self) -> list[np.ndarray[Any, Any]]:
        """Return the values, for somebody to keep."""
        return [array.copy() for array in self._arrays]


def _copied(value: np.ndarray[Any, Any], room: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    if room is None or (room.shape, room.dtype) != (value.shape, value.dtype):
        return np.array(value)
    np.copyto(room, value)
    return room


def _lasting(model: Any) -> list[Any]:
    """Return the weights of a model, and after them what else it keeps: the states of its random numbers."""
    weights = list(model.weights)
    known = {id(weight) for weight in weights}
    return weights + [variable for variable in model.variables if id(variable) not in known]


class OverlappedValidation(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Validates each epoch of `fit` while the next one trains, with copies of the model.

        late = offbeat.keras.OverlappedValidation(x_val, y_val, batch_size=64)
        fitted = model.fit(x, y, epochs=10, callbacks=[late])
        print(fitted.history["val_loss"])

    When `fit` begins, the model is cloned, once a thread, and compiled as it was, and one batch is evaluated
    so that what cannot work is said at once; or at the first epoch's end, for a model without an input shape,
    which may have no variables before. At the end of an epoch all of the model's variables are copied
    into memory that is used again, at most `max_pending` + 1 times, once more for the best epoch. Threads
    give these values to their clones and `evaluate` them. Training is bit for bit what it is without.

    Metrics are named as in Keras, `val_loss`, and come during a later epoch: `history` has them then,
    `on_result` is told, and the `History` that `fit` returns is filled in when training ends, an entry an
    epoch and not a number for one that was skipped. Other callbacks (EarlyStopping, ModelCheckpoint,
    ReduceLROnPlateau) do not see them, unless `decision="sync"`: what they would do with them, they would do
    to the weights of another epoch. `monitor` and `on_result` are there in their place.

    Source: the overlapped validation paper; see `offbeat.Validator`, which is for training loops in torch.

    Args:
        x, y: the validation set: whatever `model.evaluate` takes, more than once. With more than one worker
            arrays, or structures of them.
        batch_size: as in `model.evaluate`.
        workers: how many contiguous parts are evaluated at once, at least 1. Parts' losses and metrics are
            averaged, weighted by samples. That is right for what is a mean over samples. It is not for
            others, such as AUC, precision or F1: for these leave it at 1, which is exact.
        max_pending: how many copies may wait while one is evaluated, at least 0.
        when_full: what happens at an epoch's end when as many do: "block" waits, "skip" does not validate it.
        on_result: called in the thread that trains with each epoch and its metrics, in order.
        monitor: watches a metric, such as `offbeat.Monitor("val_loss", patience=3)`; when its patience is at
            its end, so is training. It goes on from what it has seen before.
        restore_best_weights: in the end the model gets the weights of the monitor's best epoch.
        decision: "lag" acts on metrics as soon as an epoch ends after they have come. "sync" waits for them,
            so that nothing overlaps, and callbacks that come after this one see them in their logs.
        build: makes another, compiled model like this one, where Keras cannot from its config.
        deadline_s: how long a validation may take, in seconds.

    Raises:
        ValueError: an argument out of range.

    Attributes:
        history: metrics of every epoch that was validated and has ended, in order; None for one that was
            skipped.
        stopped: the monitor's patience is at its end.
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
        monitor: Monitor | None = None,
        restore_best_weights: bool = False,
        decision: Decision = "lag",
        build: Callable[[], Any] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        super().__init__()
        if decision not in get_args(Decision):
            raise ValueError(f"expected a decision of {', '.join(get_args(Decision))}, got {decision!r}")
        if restore_best_weights and monitor is None:
            raise ValueError("expected a monitor, to say which epoch is the best one: pass monitor=…")
        if deadline_s <= 0:
            raise ValueError(f"expected a deadline above 0 s, got {deadline_s:g}")
        ValidationScheduler(pending_max=max_pending, when_full=when_full)  # says what is wrong with these
        self._x, self._y, self._batch_size = x, y, batch_size
        self._parts = _parts(x, workers)
        self._pending_max, self._when_full, self._deadline_s = max_pending, when_full, deadline_s
        self._on_result, self._monitor, self._decision = on_result, monitor, decision
        self._restores, self._build = restore_best_weights, build
        self._is_ready = False
        self._taken: dict[int, _Values] = {}  # by epoch, oldest first
        self._free: list[_Values] = []
        self._best: _Values | None = None
        self._end: Callable[[], Any] = list
        self.history: dict[int, Mapping[str, float] | None] = {}
        self.stopped = False

    # What Keras calls -----------------------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Have clones and threads ready, where the model has its variables.

        Raises:
            OffbeatError: the model cannot be cloned, or evaluating it would change its training.
            Exception: what `evaluate` raised.
        """
        self._end()  # a training that ended by an error elsewhere
        self.history, self.stopped = {}, False
        self._taken = {}
        self._is_ready = False
        if self.model.built:
            self._prepare()

    def _prepare(self) -> None:
        with apart():  # initial values are drawn at random
            evaluators = [
                _Evaluator(self._clone(), self._x, self._y, part, self._batch_size) for part in self._parts
            ]
        first = _Values()
        first.take(_lasting(self.model))
        for evaluator in evaluators:
            evaluator.rehearse(first)
        self._free.append(first)
        scheduler = ValidationScheduler(pending_max=self._pending_max, when_full=self._when_full)
        self._ledger = Ledger(scheduler, self._deadline_s)
        self._crew = Crew(evaluators, self._ledger.done, self._ledger.abandon)
        self._end = weakref.finalize(self, self._crew.close, _END_S)
        self._is_ready = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Have an epoch validated, once there is room for it, and act on what has come.

        Raises:
            OffbeatError: a validation did not end in time; names what is missing.
            Exception: what evaluating an earlier epoch raised, with its traceback.
        """
        with self._until_an_error():
            if not self._is_ready:
                self._prepare()
            self._take_in()
            self._begin(epoch)
            if self._decision == "sync":
                self._wait_for_all()
                if logs is not None:
                    logs.update(self.history[epoch] or {})
            if self.stopped:
                self.model.stop_training = True

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Wait for all validations under way, act on them, and fill in the `History` that `fit` returns.

        Raises:
            OffbeatError: a validation did not end in time; names what is missing.
            Exception: what evaluating an epoch raised, with its traceback.
        """
        with self._until_an_error():
            if self._is_ready:
                self._wait_for_all()
            if self.history:
                _fill_in(self.model.history, self.history)
            if self._restores and self._best is not None:
                self.model.set_weights(self.best_weights())
        self._end()

    def best_weights(self) -> list[np.ndarray[Any, Any]]:
        """Return the weights of the best epoch so far, for `model.set_weights`.

        Raises:
            OffbeatError: there is no monitor to say which one is the best, or none has been validated.
        """
        if self._monitor is None:
            raise OffbeatError("expected a monitor, to say which epoch is the best one: pass monitor=…")
        if self._best is None:
            raise OffbeatError("there is no best epoch yet: none has been validated")
        return self._best.copies()[: len(self.model.weights)]

    # An epoch's validation ------------------------------------------------------------------------------

    @contextmanager
    def _until_an_error(self) -> Iterator[None]:
        """After an error Keras calls no more, so the threads end with it."""
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _begin(self, epoch: int) -> None:
        while isinstance(answer := self._ledger.begin(epoch, self._parts)[0], Block):
            self._ledger.wait_for_oldest()
            self._take_in()
        if isinstance(answer, Skip):
            return
        values = self._taken[epoch] = self._free.pop() if self._free else _Values()
        values.take(_lasting(self.model))
        self._crew.give(parts_of(answer, values, Flag()))

    def _wait_for_all(self) -> None:
        while self._ledger.wait_for_oldest():
            self._take_in()
        self._take_in()

    def _take_in(self) -> None:
        """Act on what has come, in the order of epochs."""
        while (reported := self._ledger.report()) is not None:
            epoch, validation = reported
            if validation is None:
                self.history[epoch] = None
                continue
            metrics = validation.result()
            self.history[epoch] = metrics
            self._act(epoch, metrics, self._taken.pop(epoch))

    def _act(self, epoch: int, metrics: Mapping[str, float], values: _Values) -> None:
        unused: _Values | None = values
        if self._monitor is not None:
            verdict = self._monitor.observe(epoch, metrics)
            self.stopped = self.stopped or verdict.stop
            if verdict.improved:
                self._best, unused = values, self._best
        if unused is not None:
            self._free.append(unused)
        if self._on_result is not None:
            self._on_result(epoch, metrics)

    def _clone(self) -> Any:
        """Return another model like this one.

        Raises:
            OffbeatError: Keras cannot make one.
        """
        if self._build is not None:
            return self._build()
        losses = keras.tree.flatten(self.model.loss)
        of_ones_own = {loss.__name__: loss for loss in losses if hasattr(loss, "__name__")}
        try:
            with keras.saving.custom_object_scope(of_ones_own):
                clone = keras.models.clone_model(self.model)
                settings = {
                    name: keras.saving.deserialize_keras_object(value)
                    for name, value in self.model.get_compile_config().items()
                    if name not in ("optimizer", "loss")  # no need of the one; the other has no state
                }
            clone.compile(loss=self.model.loss, **settings)  # also where Keras has: away with that optimizer
        except Exception as error:
            raise OffbeatError(
                f"Keras cannot make another model like this one from its config ({type(error).__name__}: "
                f"{error}): pass build=, a function that returns a new one, compiled"
            ) from error
        return clone


class _Evaluator:
    """Evaluates parts with a model of its own, in one thread."""

    def __init__(self, model: Any, x: Any, y: Any, first: range, batch_size: int | None) -> None:
        self._model, self._x, self._y = model, x, y
        self._first, self._batch_size = first, batch_size

    def rehearse(self, values: _Values) -> None:
        """See on one batch whether evaluating works, and leaves alone what training draws at random.

        Raises:
            OffbeatError: it does not; or the model is not like the one whose values these are.
        """
        with apart():  # what is only made when it is first needed may be drawn at random
            self._evaluate(self._first, seed=0, steps=1)
        with apart() as moved:
            variables = _lasting(self._model)
            shapes = [tuple(variable.shape) for variable in variables]
            if shapes != values.shapes:
                raise OffbeatError(
                    f"expected the clone to have variables like the model's, of the shapes {values.shapes}, "
                    f"got {shapes}: pass build=, a function that returns a model like this one, compiled"
                )
            values.put(variables)
            plain(self._evaluate(self._first, seed=0, steps=1))
        if moved:
            raise OffbeatError(
                f"evaluating changes {' and '.join(moved)}, which all threads share, so that training would "
                "go another way: give what draws at random a seed or a generator of its own"
            )

    def evaluate(self, part: Part[_Values]) -> dict[str, Value]:
        """Return the part's metrics; ends soon after the part is cancelled, with the next batch."""
        part.snapshot.put(_lasting(self._model))
        found = self._evaluate(part.positions, seed=part.seed, callbacks=[_EndIfCancelled(part)])
        return {f"val_{name}": value for name, value in plain(found).items()}

    def _evaluate(self, positions: range, *, seed: int, **options: Any) -> Any:
        x, y = _cut(self._x, positions), _cut(self._y, positions)
        with OwnRandomness(seed):
            return self._model.evaluate(
                x, y, batch_size=self._batch_size, verbose=0, return_dict=True, **options
            )

    def close(self) -> None:
        """There is nothing to give back."""


class _EndIfCancelled(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def __init__(self, part: Part[_Values]) -> None:
        super().__init__()
        self._part = part

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._part.cancelled.is_set():
            raise CancelledError(
                f"part {self._part.number} of epoch {self._part.epoch} is not needed any more"
            )


def _samples(x: Any) -> int | None:
    """Return how many samples arrays hold; None where these are no arrays."""
    arrays = keras.tree.flatten(x)
    if not arrays or not all(getattr(array, "shape", ()) for array in arrays):
        return None
    return int(arrays[0].shape[0])


def _parts(x: Any, workers: int) -> tuple[range, ...]:
    samples = _samples(x)
    if samples is not None:
        return split_even(samples, workers)
    if workers != 1:
        raise ValueError(
            f"expected arrays for {workers} workers, to be cut in as many parts, got {type(x).__name__}: "
            "leave workers at 1"
        )
    return (range(1),)  # the whole, whatever it holds


def _cut(data: Any, positions: range) -> Any:
    """Return the samples at these positions, of arrays; anything else is a whole."""
    samples = _samples(data)
    if samples is None or len(positions) == samples:
        return data
    return keras.tree.map_structure(lambda array: array[positions.start : positions.stop], data)


def _fill_in(recorded: Any, found: Mapping[int, Mapping[str, float] | None]) -> None:
    """Write metrics to a `History` of Keras, an entry an epoch, not a number where there are none."""
    names = dict.fromkeys(name for metrics in found.values() for name in metrics or ())
    for name in names:
        recorded.history[name] = [(found.get(epoch) or {}).get(name, math.nan) for epoch in recorded.epoch]
