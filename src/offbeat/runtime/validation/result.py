"""`Validation`: the future metrics of an epoch; `ValidationLedger`: the validations under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.numerics.metrics import MetricValue, combine_parts
from offbeat.policies.validation.schedule import (
    SkipValidation,
    TakeSnapshot,
    ValidationScheduler,
    WaitForValidation,
)
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.validation.evaluators import ValidationPart


class NoMetricsError(OffbeatError):
    """An epoch has no metrics: it was skipped or rolled back, or its snapshot is lost."""


class Validation:
    """The future result of the validation of an epoch.

    Attributes:
        epoch: that is validated, from 0.
        timeout_s: the default timeout of `result`, in seconds.
    """

    def __init__(self, epoch: int, timeout_s: float, ledger: ValidationLedger) -> None:
        self.epoch, self.timeout_s = epoch, timeout_s
        self._ledger = ledger
        self._is_over = SignalSafeEvent()
        self._metrics: Mapping[str, float] = {}
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._is_over.is_set()

    def result(self, timeout_s: float | None = None) -> Mapping[str, float]:
        """Wait for the metrics of the whole set.

        Raises:
            OffbeatError: it took longer than `timeout_s` seconds (the message names what is missing); or
                there are no metrics: the epoch was skipped or rolled back, or the validator closed.
            Exception: what `evaluate` raised, with its traceback.
        """
        self.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return self._metrics

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the validation is done, with metrics or an error.

        Raises:
            OffbeatError: it took longer; the message names what is missing.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if self._is_over.is_set():
            return
        with self._ledger.waiting_context():
            is_over = self._is_over.wait(timeout_s)
        if not is_over:
            raise OffbeatError(
                f"the validation of epoch {self.epoch} is not done after {timeout_s:g} s: "
                f"{self._ledger.describe_missing(self.epoch)}"
            )

    def finish(self, metrics: Mapping[str, float], error: BaseException | None = None) -> None:
        """Set the metrics, or an error in their place; a second call is ignored."""
        if not self.is_done:
            self._metrics, self._error = metrics, error
            self._is_over.set()

    def end_without_metrics(self, reason: str) -> None:
        """Set an error that says why there are no metrics."""
        self.finish({}, NoMetricsError(f"there are no metrics of epoch {self.epoch}: {reason}"))


class ValidationLedger:
    """The validations under way: evaluating threads write results, the training thread reads them.

    Attributes:
        describe_missing: returns what an unfinished epoch waits for, as text.
        waiting_context: a context entered while a thread waits for a validation.
    """

    def __init__(self, scheduler: ValidationScheduler, timeout_s: float) -> None:
        self.describe_missing: Callable[[int], str] = self._missing_parts
        self.waiting_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self._scheduler, self._timeout_s = scheduler, timeout_s
        self._lock = threading.Lock()
        self._validations: dict[int, Validation] = {}
        self._failure: BaseException | None = None

    def on_epoch_ended(
        self, epoch: int, parts: tuple[range, ...]
    ) -> tuple[TakeSnapshot | WaitForValidation | SkipValidation, Validation]:
        """Decide what happens to an epoch that has ended; return the decision and the future result."""
        validation = Validation(epoch, self._timeout_s, self)
        with self._lock:
            answer = self._scheduler.on_epoch_ended(epoch, parts)
            if isinstance(answer, TakeSnapshot):
                self._validations[epoch] = validation
                if self._failure is not None:
                    self._fail(validation, self._failure)
        return answer, validation

    def on_part_done(
        self, part: ValidationPart[Any], result: Mapping[str, MetricValue] | BaseException
    ) -> None:
        """Record the result of a part; the last one of an epoch ends its validation."""
        with self._lock:
            validation = self._validations.get(part.epoch)
            if part.cancelled.is_set() or validation is None:
                return
            if isinstance(result, BaseException):
                part.cancelled.set()  # shared by all parts of the epoch
                self._fail(validation, result)
                return
            results = self._scheduler.on_part_done(part.epoch, part.number, (len(part.positions), result))
        if results is not None:
            try:
                validation.finish(combine_parts(results))
            except BaseException as error:  # of a metric that computes; raised where the result is read
                validation.finish({}, error)

    def fail_all(self, error: BaseException) -> None:
        """End all validations, and all later ones, with an error."""
        with self._lock:
            self._failure = error
            for validation in self._validations.values():
                self._fail(validation, error)

    def _fail(self, validation: Validation, error: BaseException) -> None:
        if not validation.is_done:
            self._scheduler.fail(validation.epoch)
            validation.finish({}, error)

    def pop_finished(self) -> tuple[int, Validation | None] | None:
        """Return the next epoch that is over, in order, with its validation, None if it was skipped."""
        with self._lock:
            epoch = self._scheduler.pop_finished()
            return None if epoch is None else (epoch, self._validations.pop(epoch, None))

    def make_without_metrics(self, epoch: int, reason: str) -> Validation:
        """Return the result of an epoch that is not validated."""
        validation = Validation(epoch, self._timeout_s, self)
        validation.end_without_metrics(reason)
        return validation

    def wait_for_oldest(self) -> bool:
        """Wait until the oldest unreported validation is done; return whether there was one.

        Raises:
            OffbeatError: it took longer than the deadline; the message names what is missing.
        """
        with self._lock:
            oldest = self._validations[min(self._validations)] if self._validations else None
        if oldest is not None:
            oldest.wait()
        return oldest is not None

    def drop_after(self, after: int, reason: str) -> None:
        """End the validations of epochs after `after`, without metrics."""
        with self._lock:
            self._scheduler.drop_after(after)
            dropped = [self._validations.pop(epoch) for epoch in list(self._validations) if epoch > after]
        for validation in dropped:
            validation.end_without_metrics(reason)

    def _missing_parts(self, epoch: int) -> str:
        with self._lock:
            missing = self._scheduler.missing_parts(epoch)
        return f"evaluating part {', '.join(map(str, missing))} has not ended"
