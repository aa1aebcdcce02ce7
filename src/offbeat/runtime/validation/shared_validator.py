"""Validation divided among the workers of a job: each evaluates the parts that are assigned to it.

The coordinator decides which worker evaluates what, and with which snapshot (see
`offbeat.policies.validation.shared_schedule`). No exchange of the training is used, and a worker waits for
another worker only where metrics are acted on.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import nn

from offbeat.errors import OffbeatError, WorkerError
from offbeat.events import RolledBack
from offbeat.policies.validation.schedule import PENDING_MAX, TakeSnapshot
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.validation.backend import MakePool
from offbeat.runtime.validation.evaluators import Evaluate, Evaluator, EvaluatorPool
from offbeat.runtime.validation.parts import ValidationData
from offbeat.runtime.validation.result import Validation
from offbeat.runtime.validation.shared_parts import SharedParts, SnapshotAwaitingEvaluator
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.runtime.validation.validated_training import EpochState
from offbeat.runtime.validation.validator import Validator

_PLATEAU: Final = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lrs", "eps")


class SharedValidator(Validator):
    """A `Validator` whose epochs are evaluated by all workers of a session together; see `Session.validate`.

    All workers take the same decisions at the same points, so that none stops while others train on: metrics
    are acted on once `max_pending` + 1 further epochs have been validated and not before, and training waits
    for them there. With "sync", and at the end, it waits for all.

    Args:
        model, evaluate, data: see `Validator`.
        client: this worker's client of the coordinator.
        is_current: whether this worker's model is one to validate with.
        can_roll_back: whether the strategy permits "rollback".
        has_learning_rates: a worker that joins later receives the learning rates with the state.
        is_only_thread: no other thread of this process trains.
        options: of `Validator`.

    Raises:
        ValueError: an argument is out of range, or not possible with several workers.
        OffbeatError: see `Validator`.
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate,
        data: ValidationData,
        *,
        client: CoordinatorClient,
        is_current: Callable[[], bool],
        can_roll_back: bool,
        has_learning_rates: bool,
        is_only_thread: bool,
        **options: Any,
    ) -> None:
        _check_options(options, goes_back=can_roll_back)
        self._client, self._is_current, self._has_rates = client, is_current, has_learning_rates
        self._max_pending: int = options.get("max_pending", PENDING_MAX)
        self._evaluators: int = options.get("workers", 1)
        self._is_ending = False
        self._best_owner: int | None = None
        self._read: weakref.WeakSet[Snapshot] = weakref.WeakSet()  # by threads that are not waited for
        if options.get("backend", "auto") == "auto":
            options["backend"] = "thread"
        super().__init__(model, evaluate, data, **options)
        # If other threads train too, a rehearsal would attribute their draws to evaluate.
        self._backend.is_rehearsed = not is_only_thread
        self._ledger.describe_missing = self._shares.describe_missing
        self._client.on_validation_action = self._shares.on_action

    def _pool_factory(self, samples: int, timeout_s: float) -> MakePool:
        self._shares = shares = SharedParts(
            client=self._client, ledger=self._ledger, samples=samples, timeout_s=timeout_s
        )
        on_failure = partial(self._client.on_thread_failed, "offbeat validation")

        def make_pool(evaluators: Sequence[Evaluator[Snapshot]]) -> EvaluatorPool[Snapshot]:
            awaiting = [SnapshotAwaitingEvaluator(evaluator, shares) for evaluator in evaluators]
            shares.pool = EvaluatorPool(awaiting, shares.on_part_done, on_failure)
            return shares.pool

        return make_pool

    # The end of an epoch --------------------------------------------------------------------------------

    def validate(self, epoch: int | None = None) -> Validation:
        """See `Validator.validate`."""
        if self._last_epoch < 0:
            epoch = self.epoch if epoch is None else epoch
            self._catch_up(epoch)
            if self.stopped:
                self._last_epoch = epoch
                return self._ledger.make_without_metrics(
                    epoch, "training had been stopped before this worker joined"
                )
        return super().validate(epoch)

    def _catch_up(self, epoch: int) -> None:
        """Act on validations that ended before this worker joined, at the points where the others acted."""
        groups = [] if self._plateau is None else self._plateau.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        self._act_on_earlier(epoch)
        if self._has_rates:  # they contain the changes of the other workers' plateau
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _act_on_earlier(self, epoch: int) -> None:
        for earlier in sorted(one for one in self._client.validation_results if one < epoch):
            self._last_epoch = earlier
            self._apply_finished()
            self._ledger.on_epoch_ended(earlier, self._current_parts())
            self._epoch_states[earlier] = EpochState(
                snapshot=self._state.make_snapshot(shared=self._backend.is_process),  # stays empty
                cancelled=SignalSafeEvent(),
                states=[],
                randomness=None,
            )
            self._shares.track_epoch(earlier, self._epoch_states[earlier])
            self._apply_finished()

    def _current_parts(self) -> tuple[range, ...]:
        return (range(self._shares.samples),)  # parts of it are assigned to this worker

    def _submit(self, take: TakeSnapshot, moment: EpochState) -> None:
        start_s = time.perf_counter()
        self._shares.offer_snapshot(
            take.epoch,
            moment,
            is_current=self._is_current(),
            evaluators=self._evaluators,
            decision_rule=self._decision_rule(),
        )
        self._state.copy_s += time.perf_counter() - start_s

    def _decision_rule(self) -> str:
        """Return the rules for acting on metrics as text; workers with different rules would diverge."""
        decision_rule = (
            f"decision={self._decision!r}, max_pending={self._max_pending}, monitor={self._monitor!r}"
        )
        if self._plateau is not None:
            decision_rule += f", plateau={ ({name: getattr(self._plateau, name) for name in _PLATEAU}) }"
        return decision_rule

    def _roll_back(self, epoch: int, moment: EpochState) -> None:
        super()._roll_back(epoch, moment)
        self._client.send_event(RolledBack(now_s=0.0, worker=self._client.worker, epoch=epoch))

    def _apply_finished(self) -> None:
        """Act on the metrics that all workers act on at this point; wait for them."""
        is_begun = self._last_epoch in self._epoch_states
        pending_max = 0 if self._is_ending or self._decision == "sync" else self._max_pending + is_begun
        while len(self._epoch_states) > pending_max:
            self._ledger.wait_for_oldest()
            self._apply_next()
            self._shares.keep_only(self._epoch_states)
            self._raise_errors()  # other workers wait for this one: the job must fail

    def _act(self, epoch: int, metrics: Mapping[str, float], moment: EpochState) -> None:
        digest, outcome = self._shares.digest_of(epoch), self._client.validation_results[epoch]
        assert outcome is not None
        if self._shares.is_read(epoch):
            self._read.add(moment.snapshot)
        super()._act(epoch, metrics, moment)
        if self._best is moment.snapshot:
            self._best_owner = outcome.snapshot_owner
            if digest != outcome.digest:  # another worker's snapshot was evaluated, and is the best
                self._best = None
                self._reuse(moment.snapshot)

    def _reuse(self, unused: Snapshot | None) -> None:
        if unused not in self._read:
            super()._reuse(unused)

    def finish(self) -> None:
        """See `Validator.finish`; call it on all workers at the same point, since it acts on metrics."""
        self._is_ending = True
        try:
            super().finish()
        finally:
            self._is_ending = False

    def best_state_dict(self) -> dict[str, Any]:
        """See `Validator.best_state_dict`; a worker whose `has_best` is false cannot return it.

        Raises:
            OffbeatError: another worker has it; the message names that worker.
        """
        if self._best is None and self._best_owner is not None:
            raise OffbeatError(
                f"the best snapshot is worker {self._best_owner}'s, and this is worker "
                f"{self._client.worker}: save it where session.validator.has_best is true"
            )
        return super().best_state_dict()

    def fail_all(self, error: WorkerError) -> None:
        """End all waiting with the job's failure; any thread may call it."""
        self._ledger.fail_all(error)


def _check_options(options: dict[str, Any], *, goes_back: bool) -> None:
    if options.get("backend") == "inline":
        raise ValueError(
            "expected a backend of thread, process or stream with several workers, got 'inline': parts are "
            "assigned at any time; decision='sync' makes training wait for them"
        )
    if options.get("when_full", "block") != "block":
        raise ValueError(
            "expected when_full='block' with several workers, got 'skip': which epochs are skipped would "
            "depend on the workers' speeds"
        )
    if options.get("decision") == "rollback" and not goes_back:
        raise ValueError(
            "expected a decision of sync or lag with this strategy, got 'rollback': the workers do "
            "not have the same parameters at the same time, so that they cannot all return to them"
        )
