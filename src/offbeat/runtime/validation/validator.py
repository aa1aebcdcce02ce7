"""`Validator`: validates an epoch while the next one trains."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from offbeat.errors import OffbeatError
from offbeat.policies.validation.early_stopping import EarlyStopping
from offbeat.policies.validation.schedule import (
    PENDING_MAX,
    SkipValidation,
    TakeSnapshot,
    ValidationScheduler,
    WaitForValidation,
    WhenFull,
    split_even,
)
from offbeat.runtime.devices.opening import open_accelerators
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.validation.backend import END_S, Backend, EvaluationBackend, MakePool
from offbeat.runtime.validation.evaluators import Evaluate, EvaluatorPool
from offbeat.runtime.validation.parts import ValidationData, count_samples
from offbeat.runtime.validation.result import NoMetricsError, Validation, ValidationLedger
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.runtime.validation.validated_training import EpochState, Stateful, ValidatedTraining

Decision: TypeAlias = Literal["sync", "lag", "rollback"]

DEADLINE_S: Final = 3600.0


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
            streams of the accelerator that holds the model; "inline", in the training thread, which waits;
            "auto" measures the first epoch inline, then chooses, and gives the reason in `reason`.
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
        timeout_s: the longest time that a validation may take, in seconds.

    Raises:
        ValueError: an argument is out of range.
        OffbeatError: model, data or evaluate are not suitable; the message states the remedy.

    Attributes:
        history: metrics of every epoch whose validation has ended, in order; None for a skipped epoch.
        stopped: the monitor's patience is exhausted.
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
        timeout_s: float = DEADLINE_S,
    ) -> None:
        if backend not in get_args(Backend):
            raise ValueError(f"expected a backend of {', '.join(get_args(Backend))}, got {backend!r}")
        if decision not in get_args(Decision):
            raise ValueError(f"expected a decision of {', '.join(get_args(Decision))}, got {decision!r}")
        if plateau is not None and monitor is None:
            raise ValueError(
                "expected a monitor together with plateau, to name the metric that plateau receives"
            )
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"expected a finite timeout above 0 s, got {timeout_s:g}")
        samples = count_samples(data)
        parts = split_even(samples, workers)
        scheduler = ValidationScheduler(pending_max=max_pending, when_full=when_full)
        self._ledger = ValidationLedger(scheduler, timeout_s)
        self._monitor, self._plateau, self._decision = monitor, plateau, decision
        # A plateau receives epochs in order, once each, even if training rolls back.
        restored = [stateful for stateful in restores if stateful is not plateau]
        if plateau is not None and plateau.optimizer not in restored:
            restored.append(plateau.optimizer)
        self._state = ValidatedTraining(
            model,
            restored,
            goes_back=decision == "rollback",
            accelerators=open_accelerators(
                (tensor.device for tensor in [*model.parameters(), *model.buffers()]),
                partial(start_thread, on_failure=self._ledger.fail_all),
                timeout_s,
            ),
        )
        self._epoch_states: dict[int, EpochState] = {}  # by epoch, oldest first
        self._best: Snapshot | None = None
        self._errors: dict[int, Exception] = {}  # still to be raised, by epoch, oldest first
        self._last_epoch = -1  # the last epoch that has ended
        self._is_closed = self._has_validated = False
        self.history: dict[int, Mapping[str, float] | None] = {}
        self.stopped = False
        self._backend = EvaluationBackend(
            self._state,
            evaluate,
            data,
            parts,
            backend,
            is_awaited=decision == "sync",
            ledger=self._ledger,
            make_pool=self._pool_factory(samples, timeout_s),
            timeout_s=timeout_s,
        )

    def _pool_factory(self, samples: int, timeout_s: float) -> MakePool:
        """Return what makes the pools of evaluating threads, without a reference to this validator."""
        return partial(EvaluatorPool, on_done=self._ledger.on_part_done, on_failure=self._ledger.fail_all)

    @property
    def backend(self) -> str:
        """Where epochs are evaluated now."""
        return self._backend.name

    @property
    def reason(self) -> str:
        """Why they are evaluated there."""
        return self._backend.reason

    @property
    def copy_s(self) -> float:
        """Time that snapshots have cost the training thread, in seconds."""
        return self._state.copy_s

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
        self._last_epoch = epoch = self.epoch if epoch is None else epoch
        self._backend.on_epoch_trained(self._finish_pending)
        was_inline = self._backend.is_inline
        self._apply_finished()
        validation = self._begin(epoch)
        if was_inline or self._decision == "sync":
            validation.wait()
        self._backend.on_epoch_validated(was_inline=was_inline)
        self._apply_finished()
        self._raise_errors()
        return validation

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
            moment = self._state.capture(shared=self._backend.is_process)
            self._epoch_states[epoch] = moment
            self._backend.rehearse_once(moment.snapshot)
            self._backend.schedule_when_due(moment.snapshot)
            self._submit(decision, moment)
        except BaseException as error:
            self._epoch_states.pop(epoch, None)
            self._ledger.drop_after(epoch - 1, str(error))
            raise
        return validation

    def _submit(self, take: TakeSnapshot, moment: EpochState) -> None:
        """Submit the parts of an epoch for evaluation."""
        self._backend.submit(take, moment)

    def _current_parts(self) -> tuple[range, ...]:
        """Return the parts for an epoch."""
        return self._backend.current_parts()

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
        if unused is not None and unused.is_shared == self._backend.is_process:
            self._state.reuse(unused)

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
        self._state.restore(moment)
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
        self._finish_pending()
        self._apply_finished()
        self._raise_errors()

    def _finish_pending(self) -> None:
        while self._ledger.wait_for_oldest():
            self._apply_finished()

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
        if alive := self._backend.close():
            warnings.warn(
                f"{', '.join(alive)} did not end within {END_S:g} s: the next call of torch ends it",
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
