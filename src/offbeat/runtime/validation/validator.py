"""`Validator`: an epoch is validated while the next one trains."""

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
from offbeat.policies.validation.early_stopping import Monitor
from offbeat.policies.validation.overlap import Choice, OverlapChooser, Spent
from offbeat.policies.validation.schedule import (
    PENDING_MAX,
    Block,
    Skip,
    Take,
    ValidationScheduler,
    WhenFull,
    split_even,
)
from offbeat.runtime.control.environment import cores
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import Flag
from offbeat.runtime.validation.evaluators import (
    Crew,
    Evaluate,
    Evaluator,
    InThisThread,
    Part,
    evaluated,
    outcome,
    parts_of,
)
from offbeat.runtime.validation.isolation import GlobalRandomness, apart
from offbeat.runtime.validation.parts import Data, samples_of
from offbeat.runtime.validation.process import InAProcess
from offbeat.runtime.validation.result import Ledger, NoMetricsError, Validation
from offbeat.runtime.validation.snapshot import Snapshot, unwrapped
from offbeat.runtime.validation.throttle import Pacer

Backend: TypeAlias = Literal["auto", "inline", "thread", "process", "stream"]
Decision: TypeAlias = Literal["sync", "lag", "rollback"]

DEADLINE_S: Final = 3600.0
_REHEARSED_SAMPLES: Final = 32
_END_S: Final = 5.0
_PROCESS_START_S: Final = 4.0  # of the cores' time: a new interpreter imports torch


class Stateful(Protocol):
    """An optimizer, a scheduler: what can say and take on its state."""

    def state_dict(self) -> Any:
        """Its state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes a state on."""


@dataclass(kw_only=True)
class Moment:
    """An epoch's end, as long as something may come of it: its snapshot, and what going back takes."""

    snapshot: Snapshot
    cancelled: Flag
    states: list[Any]
    randomness: GlobalRandomness | None


class Validator:
    """Validates each epoch while the next one trains, with a copy of the model as it was at the epoch's end.

        with offbeat.Validator(model, evaluate, validation_set) as validator:
            for epoch in validator.epochs(10):
                train(model)
                validator.validate()
        print(validator.history)

    `evaluate` gets a model and a part of the set and returns the part's metrics by name: means over its
    samples as floats, counts as whole numbers, or metrics of torchmetrics. It may run in another thread or
    process, on several parts at once, and changes nothing of the training: neither the model, nor what is
    drawn at random, nor torch's settings. Parameters and buffers are copied into memory that is used again,
    at most `max_pending` + 1 times, once more for the best snapshot where there is a monitor.

    Source: the overlapped validation paper: at the end of an epoch the model is copied, validation threads
    evaluate equal contiguous parts of the set with the copies, and training goes on. Deviations: one copy of
    the values for all threads, which only read it (the paper makes one a thread); one thread unless more are
    asked for (the paper has up to 6), since not every metric and not every set can be shared out, and of
    those not all at once where they stand in line for the interpreter's lock (`Climb`); means are weighted
    by samples (the paper averages the parts' means); what follows from metrics that come late is decided by
    `decision`, and how many may wait by `max_pending` (the paper leaves both open).

    Args:
        model: what is trained; compiled or in DistributedDataParallel is fine.
        evaluate: called with a model, set to evaluate and without gradients, and a part of `data`.
        data: the validation set, map-style, or a DataLoader that takes it in order.
        workers: in how many parts the set is evaluated, at least 1, by as many threads or processes. With 1
            `evaluate` gets the whole set, so that every metric is right. More are for metrics as above, and
            in threads for a set that several threads may read at once; of those, as many go on at once as
            make it faster.
        backend: where: "thread"; "process" for what computes in Python, with `evaluate` and `data` that
            can be pickled and a model on the CPU; "stream", threads with CUDA streams of their own; "inline",
            in the training's thread, which waits; "auto" measures the first epoch inline and says in `reason`
            what it then does.
        max_pending: how many snapshots may wait while one is evaluated, at least 0.
        when_full: what happens at an epoch's end when as many do: "block" waits, "skip" does not validate it.
        monitor: watches a metric, for `stopped` and for the best snapshot.
        plateau: a scheduler to be told the monitor's metric, which lowers the learning rate.
        decision: when metrics are acted on. "sync": `validate` waits for them. "lag": as soon as they are
            there, an epoch late or more. "rollback": likewise, but training goes back to the end of the
            epoch that they are of, so that it ends with the weights that "sync" would have; takes `epochs`.
        restores: what "rollback" takes back beside the model and the global random numbers: the optimizer,
            schedulers.
        deadline_s: how long a validation may take, in seconds.

    Raises:
        ValueError: an argument out of range.
        OffbeatError: model, data or evaluate are not fit for it; says what to do.

    Attributes:
        backend: where epochs are evaluated now.
        reason: why there.
        history: metrics of every epoch that was validated and has ended, in order; None for one that was
            skipped.
        stopped: the monitor's patience is at its end.
        copy_s: what taking snapshots has cost the training's thread, in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate,
        data: Data,
        *,
        workers: int = 1,
        backend: Backend = "auto",
        max_pending: int = PENDING_MAX,
        when_full: WhenFull = "block",
        monitor: Monitor | None = None,
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
            raise ValueError("expected a monitor beside plateau, to say which metric it is told")
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"expected a finite deadline above 0 s, got {deadline_s:g}")
        self._samples = samples_of(data)
        self._parts = split_even(self._samples, workers)
        scheduler = ValidationScheduler(pending_max=max_pending, when_full=when_full)
        self._ledger = Ledger(scheduler, deadline_s)
        self._model, self._evaluate, self._data = model, evaluate, data
        self._monitor, self._plateau, self._decision = monitor, plateau, decision
        # A plateau hears of epochs in order, once each, whatever is taken back.
        self._restores = [thing for thing in restores if thing is not plateau]
        if plateau is not None and plateau.optimizer not in self._restores:
            self._restores.append(plateau.optimizer)
        self._deadline_s = deadline_s
        self._device = next((tensor.device for tensor in unwrapped(model).parameters()), torch.device("cpu"))
        self._moments: dict[int, Moment] = {}  # by epoch, oldest first
        self._free: list[Snapshot] = []
        self._best: Snapshot | None = None
        self._crews: list[tuple[Crew[Snapshot], weakref.finalize[..., Any]]] = []
        self._errors: dict[int, Exception] = {}  # that are still to be raised, by epoch, oldest first
        self._ended = -1  # the epoch at whose end the model stands, or beyond which it trains
        self._is_rehearsed = self._is_closed = self._has_validated = False
        self._in_line = InThisThread(evaluate, data, self._device, has_stream=False)
        self._waited: tuple[float, float] | None = None  # by the training, for an epoch that others evaluate
        self._held_up_share: float | None = None
        self._clock = _Clock()
        self._pacer: Pacer | None = None
        self._chooser: OverlapChooser | None = None
        self.history: dict[int, Mapping[str, float] | None] = {}
        self.stopped = False
        self.copy_s = 0.0
        self.backend, self.reason = str(backend), "it was asked for"
        if backend == "auto" and decision == "sync":
            self.backend, self.reason = "inline", "training waits for the metrics anyway"
        elif backend == "auto":
            candidates = ("stream",) if self._device.type == "cuda" else ("thread", "process")
            self._chooser = OverlapChooser(candidates, cores=cores(), start_s=_PROCESS_START_S)
            self.backend, self.reason = "inline", "the first epoch is measured"
        elif backend != "inline":
            with ExitStack() as unless_it_works:
                evaluators = self._make_evaluators(backend, unless_it_works)
                unless_it_works.pop_all()
            self._hire(evaluators)

    # Those who evaluate ---------------------------------------------------------------------------------

    def _make_evaluators(self, backend: str, unless_it_works: ExitStack) -> list[Evaluator[Snapshot]]:
        """Make those who evaluate; `unless_it_works` closes them.

        Raises:
            OffbeatError: they cannot be had here.
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
            self._pacer = Pacer(count, None if self._chooser is None else self._chooser.pace())
            self._ledger.waiting = self._pacer.waited_for
        if backend == "process" and self._chooser is not None:
            count = min(count, cores())  # more would only take longer to start
        threads = max(1, torch.get_num_threads() // count)
        evaluators: list[Evaluator[Snapshot]] = []
        for number in range(count):
            evaluators.append(
                InAProcess(number, self._evaluate, data, threads=threads, deadline_s=self._deadline_s)
                if backend == "process"
                else InThisThread(
                    self._evaluate, data, self._device, has_stream=backend == "stream", pacer=self._pacer
                )
            )
            unless_it_works.callback(evaluators[-1].close)
        return evaluators

    def _hire(self, evaluators: list[Evaluator[Snapshot]]) -> None:
        """Have them wait for parts, in a thread each."""
        crew = self._crew(evaluators)
        self._crews.append((crew, weakref.finalize(self, crew.close, _END_S)))

    def _crew(self, evaluators: list[Evaluator[Snapshot]]) -> Crew[Snapshot]:
        return Crew(evaluators, self._ledger.done, self._ledger.abandon)

    def _choose(self, choice: Choice) -> None:
        """Go on as `auto` has decided."""
        self.reason = choice.reason
        if choice.backend == self.backend:
            return
        self.backend = choice.backend
        if choice.backend == "inline":
            return
        self._free.clear()  # other backends want other memory
        try:
            with ExitStack() as unless_it_works:
                evaluators = self._make_evaluators(choice.backend, unless_it_works)
                snapshot = self._moment().snapshot  # which may be refused to processes
                if choice.backend == "process":
                    self._rehearse_there(evaluators[0], snapshot)
                else:
                    self._rehearse(snapshot)
                unless_it_works.pop_all()
            self._hire(evaluators)
            self._free.append(snapshot)
        except OffbeatError as error:
            assert self._chooser is not None
            self._chooser.exclude(choice.backend, str(error))
            self.backend, self.reason = "inline", str(error)
            self._free.clear()

    def _rehearse_there(self, process: Evaluator[Snapshot], snapshot: Snapshot) -> None:
        """See on a few samples whether a process can evaluate.

        Raises:
            OffbeatError: it cannot.
        """
        part = Part(epoch=0, number=0, positions=self._few(), snapshot=snapshot, cancelled=Flag())
        try:
            process.evaluate(part)
        except OffbeatError:
            raise
        except Exception as error:
            raise OffbeatError(
                f"evaluate fails in a process of its own ({type(error).__name__}: {error})"
            ) from error

    def _few(self) -> range:
        return range(min(_REHEARSED_SAMPLES, len(self._parts[0])))

    def _rehearse(self, snapshot: Snapshot) -> None:
        """See on a few samples whether evaluating in another thread would change the training.

        Raises:
            OffbeatError: it changes what all threads share.
        """
        with apart() as moved:
            evaluated(
                snapshot.model(),
                self._evaluate,
                self._data,
                self._few(),
                seed=0,
                watch=self._refuse_the_model,
            )
        if moved:
            raise OffbeatError(
                f"evaluate changes {' and '.join(moved)}, which all threads share, so that training would go "
                "another way: use backend='process', or a generator of its own for what it draws"
            )
        self._is_rehearsed = True

    def _refuse_the_model(self, *arguments: Any) -> None:
        """Ends a rehearsal in which what is trained is computed with, and not the copy."""
        trained = {id(tensor) for tensor in unwrapped(self._model).parameters()}
        if any(id(argument) in trained for argument in arguments):
            raise OffbeatError(
                "evaluating the copy of the model computes with the model itself, which trains meanwhile: "
                "evaluate holds on to it, or something that does has been put in the place of its forward; "
                "use what evaluate is given, or backend='inline'"
            )

    # The end of an epoch --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._ended + 1

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs up to `count` - 1 until it is time to stop; what is taken back comes again."""
        while not self.stopped:
            if self.epoch >= count and self._decision == "rollback":
                self.finish()  # after which there may be more to do
            if self.epoch >= count or self.stopped:
                break
            self._has_validated = False
            yield self.epoch
            if not self._has_validated:
                self._ended += 1

    def validate(self, epoch: int | None = None) -> Validation:
        """Say that an epoch has ended, and have it validated.

        Also acts on metrics of earlier epochs that have come, which may take this epoch back.

        Args:
            epoch: its number, larger than those before; by default the one after the last.

        Returns:
            What will come of it.

        Raises:
            ValueError: the epoch has ended before.
            OffbeatError: the validator is closed, the model cannot be copied, or a validation did not end in
                time.
            Exception: what `evaluate` raised, with its traceback. Where that was for an earlier epoch, this
                one is validated all the same.
        """
        if self._is_closed:
            raise OffbeatError("this validator is closed: make another one")
        if epoch is not None and epoch <= self._ended:
            raise ValueError(f"expected an epoch after {self._ended}, which has ended, got {epoch}")
        self._has_validated = True
        spent_s, spent_cpu_s = self._clock.lap()
        self._ended = epoch = self.epoch if epoch is None else epoch
        if self._chooser is not None and self._waited is not None:
            self._choose(self._judged(spent_s, spent_cpu_s))
        is_in_line = self.backend == "inline"
        calls = self._in_line.calls
        self._take_in()
        validation = self._begin(epoch)
        if is_in_line or self._decision == "sync":
            validation.wait()
        validate_s, validate_cpu_s = self._clock.lap()
        self._waited = None if is_in_line else (validate_s, validate_cpu_s)
        if self._chooser is not None and is_in_line:
            spent = Spent(
                train_s=spent_s,
                train_cpu_s=spent_cpu_s,
                validate_s=validate_s,
                validate_cpu_s=validate_cpu_s,
                held_up_share=self._held_up_share,
                calls=self._in_line.calls - calls,
            )
            self._choose(self._chooser.in_line(spent))
        self._take_in()
        self._raise()
        return validation

    def _judged(self, spent_s: float, spent_cpu_s: float) -> Choice:
        """Say how to go on after an epoch beside which another one was to be evaluated."""
        assert self._chooser is not None
        assert self._waited is not None
        if self._pacer is not None and self._pacer.is_slow:
            choice = self._chooser.too_slow(self.backend)
            self._pacer = None
            while self._ledger.wait_for_oldest():
                self._take_in()
            self._clock.lap()
            return choice
        waited_s, waited_cpu_s = self._waited  # at the last epoch's end
        return self._chooser.overlapped(self.backend, waited_s + spent_s, waited_cpu_s + spent_cpu_s)

    def _begin(self, epoch: int) -> Validation:
        """Have an epoch evaluated, once there is room for it."""
        parts = self._parts_now()
        while self._ended == epoch:
            answer, validation = self._ledger.begin(epoch, parts)
            if not isinstance(answer, Block):
                break
            self._ledger.wait_for_oldest()
            self._take_in()
        else:
            return self._ledger.without_metrics(epoch, _went_back(self._ended))
        if isinstance(answer, Skip):
            return self._ledger.without_metrics(epoch, "it was skipped, for others were under way")
        try:
            moment = self._moments[epoch] = self._moment()
            if self.backend in ("thread", "stream") and not self._is_rehearsed:
                self._rehearse(moment.snapshot)
            self._give(answer, moment)
        except BaseException as error:
            self._moments.pop(epoch, None)
            self._ledger.drop(epoch - 1, str(error))
            raise
        return validation

    def _give(self, take: Take, moment: Moment) -> None:
        """Hand the parts of an epoch to those who evaluate."""
        parts = parts_of(take, moment.snapshot, moment.cancelled)
        if self.backend != "inline":
            self._crews[-1][0].give(parts)
            return
        alone_s = time.perf_counter()
        with apart() as moved:
            self._evaluate_here(parts[:1])
        alone_s = time.perf_counter() - alone_s
        if moved and self._chooser is not None:
            for backend in ("thread", "stream"):
                self._chooser.exclude(backend, f"evaluate changes {' and '.join(moved)}, which threads share")
        if len(parts) > 1 and moved:
            with apart():
                self._evaluate_here(parts[1:])
        elif len(parts) > 1:
            at_once_s = time.perf_counter()
            self._evaluate_at_once(parts[1:])
            at_once_s = time.perf_counter() - at_once_s
            self._held_up_share = min(1.0, max(0.0, 2 - alone_s / at_once_s))

    def _parts_now(self) -> tuple[range, ...]:
        """Return the parts that an epoch's validation has: one for each worker; in line, one for the set.

        Where `auto` does not know yet what threads are worth: one half, and two quarters at once. With one
        worker nothing is shared out.
        """
        if self.backend != "inline":
            return self._parts
        half, quarter = self._samples // 2, self._samples // 4
        knows = self._chooser is None or self._held_up_share is not None
        if knows or len(self._parts) == 1 or not quarter:
            return (range(self._samples),)
        return range(half), range(half, half + quarter), range(half + quarter, self._samples)

    def _evaluate_here(self, parts: Sequence[Part[Snapshot]]) -> None:
        for part in parts:
            result = outcome(self._in_line, part)
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result  # an interrupt is for the training, at once
            self._ledger.done(part, result)

    def _evaluate_at_once(self, parts: Sequence[Part[Snapshot]]) -> None:
        """Evaluate parts in a thread each, and wait for them."""

        def evaluate(part: Part[Snapshot]) -> None:
            self._ledger.done(part, outcome(self._in_line, part))

        threads = [
            start_thread("offbeat validation", partial(evaluate, part), self._ledger.abandon)
            for part in parts
        ]
        for thread in threads:
            thread.join(self._deadline_s)

    def _moment(self) -> Moment:
        """Note what the training is at now."""
        start_s = time.perf_counter()
        snapshot = self._free.pop() if self._free else Snapshot(shared=self.backend == "process")
        snapshot.take(unwrapped(self._model))
        goes_back = self._decision == "rollback"
        moment = Moment(
            snapshot=snapshot,
            cancelled=Flag(),
            states=[copy.deepcopy(thing.state_dict()) for thing in self._restores] if goes_back else [],
            randomness=GlobalRandomness() if goes_back else None,
        )
        self.copy_s += time.perf_counter() - start_s
        return moment

    # What follows from metrics --------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Act on what has come, in the order of epochs."""
        while self._take_in_next():
            pass

    def _take_in_next(self) -> bool:
        """Act on the next epoch that is over; return whether there was one."""
        reported = self._ledger.report()
        if reported is None:
            return False
        epoch, validation = reported
        if validation is None:
            self.history[epoch] = None
            return True
        moment = self._moments.pop(epoch)
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

    def _act(self, epoch: int, metrics: Mapping[str, float], moment: Moment) -> None:
        unused = moment.snapshot
        if self._monitor is not None:
            verdict = self._monitor.observe(epoch, metrics)
            is_late = self._decision == "rollback" and epoch < self._ended
            if is_late and (verdict.stop or self._lowers(metrics)):
                self._go_back(epoch, moment)
            if self._plateau is not None:
                self._plateau.step(self._monitor.value_of(metrics))
            self.stopped = self.stopped or verdict.stop
            if verdict.improved:
                self._best, unused = moment.snapshot, self._best
        self._use_again(unused)

    def _use_again(self, unused: Snapshot | None) -> None:
        """Take the next snapshot with this memory, if it is fit for those who evaluate now."""
        if unused is not None and unused.shared == (self.backend == "process"):
            self._free.append(unused)

    def _lowers(self, metrics: Mapping[str, float]) -> bool:
        """Try whether the scheduler lowers a learning rate."""
        if self._plateau is None or self._monitor is None:
            return False
        groups = self._plateau.optimizer.param_groups
        state, before = copy.deepcopy(self._plateau.state_dict()), copy.deepcopy([g["lr"] for g in groups])
        self._plateau.step(self._monitor.value_of(metrics))
        lowers = [float(group["lr"]) for group in groups] != [float(rate) for rate in before]
        self._plateau.load_state_dict(state)
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate
        return lowers

    def _go_back(self, epoch: int, moment: Moment) -> None:
        """Take the training back to the end of an epoch."""
        moment.snapshot.put_back(unwrapped(self._model))
        for thing, state in zip(self._restores, moment.states, strict=True):
            thing.load_state_dict(state)
        assert moment.randomness is not None
        moment.randomness.restore()
        for later in self._moments.values():
            later.cancelled.set()
        self._moments.clear()
        self._ledger.drop(epoch, _went_back(epoch))
        self._ended = epoch

    @property
    def has_best(self) -> bool:
        """Whether this worker has the snapshot of the best epoch so far."""
        return self._best is not None

    def best_state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state at the end of the best epoch so far, under its names.

        Raises:
            OffbeatError: there is no monitor to say which one is the best, or none has been validated.
        """
        if self._monitor is None:
            raise OffbeatError("expected a monitor, to say which epoch is the best one: pass monitor=…")
        if self._best is None:
            raise OffbeatError("no epoch has been validated yet: call finish() to wait for those under way")
        return self._best.state_dict()

    # The end --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all validations under way, and act on what comes of them.

        Raises:
            OffbeatError: one did not end in time; names what is missing.
            Exception: what `evaluate` raised, with its traceback; has a note of each later epoch that failed.
        """
        while self._ledger.wait_for_oldest():
            self._take_in()
        self._take_in()
        self._raise()

    def _raise(self) -> None:
        """Raise the first error that is still to be raised, with a note of each other one."""
        errors, self._errors = self._errors, {}
        if not errors:
            return
        first, *others = errors.items()
        for epoch, error in others:
            if error is not first[1]:
                first[1].add_note(
                    f"the validation of epoch {epoch} failed, too: {type(error).__name__}: {error}"
                )
        raise first[1]

    def close(self) -> None:
        """End the threads and processes; validations under way come to nothing. Again is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        for moment in self._moments.values():
            moment.cancelled.set()
        self._ledger.drop(-1, "the validator was closed")
        for crew, finalizer in self._crews:
            finalizer.detach()
            if still := crew.close(_END_S):
                warnings.warn(
                    f"{', '.join(still)} did not end within {_END_S:g} s: the next call of torch ends it",
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


def _went_back(epoch: int) -> str:
    return f"training went back to the end of epoch {epoch}"


class _Clock:
    """Wall time, and time of all cores that this process used, since the last look."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Return both, in seconds, and begin anew."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        spent = wall_s - self._wall_s, cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return spent


def _pinned(data: Data) -> Data:
    """Return a set whose tensors can be copied to a GPU while it computes."""
    if type(data) is TensorDataset and not any(tensor.is_cuda for tensor in data.tensors):
        return TensorDataset(*(tensor.pin_memory() for tensor in data.tensors))
    return data
