"""A worker's side of a validation divided among the workers of a job, as the coordinator assigns it.

It evaluates the parts assigned to it, sends and receives snapshots, and records the results of epochs.
Nothing here acts on metrics.
"""

from __future__ import annotations

import base64
import io
import time
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from offbeat.errors import LinkError, OffbeatError
from offbeat.events import (
    EvaluatePart,
    MergeStates,
    PartEvaluated,
    SendSnapshot,
    SnapshotTaken,
    StatesMerged,
    ValidationFinished,
)
from offbeat.numerics.metrics import MetricValue, SendableMetric, merge_metric
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.processes.waiting import SignalSafeCondition, SignalSafeEvent
from offbeat.runtime.validation.evaluators import CancelledError, Evaluator, EvaluatorPool, ValidationPart
from offbeat.runtime.validation.result import NoMetricsError, ValidationLedger
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.runtime.validation.validated_training import EpochState
from offbeat.wire.codec import MESSAGE_BYTES_MAX, encode_events

_FIRST_TAG: Final = 3 << 62  # exchanges use tags below 2**63, late blocks those below this
_LOW_PRIORITY: Final = 1 << 20  # after all exchanges
_METRICS_BYTES_MAX: Final = MESSAGE_BYTES_MAX // 2
_COUNT_MAX: Final = 2**53  # up to which all integers are exact as floats


@dataclass(frozen=True, kw_only=True)
class _AssignedPart(ValidationPart[Snapshot]):
    """A part assigned to this worker; `digest`: of the snapshot to evaluate it with."""

    digest: str


@dataclass(frozen=True, kw_only=True)
class _MergeTask(_AssignedPart):
    """The first part, evaluated by this worker, whose metrics must be merged with those of the other parts.

    Attributes:
        first: metrics of the first part.
        others: states of the metrics of the other parts, in the order of the set.
    """

    first: dict[str, SendableMetric]
    others: Sequence[dict[str, str]]

    def merged(self) -> dict[str, MetricValue]:
        """Return the merged metrics."""
        return {
            name: merge_metric(
                name, metric, [_decode_state(states[name], metric.device) for states in self.others]
            )
            for name, metric in self.first.items()
        }


@dataclass(kw_only=True)
class _HeldSnapshot:
    """A snapshot of this worker, until its epoch is over.

    Attributes:
        digest: of the current content.
        wanted: of the content that the coordinator last asked for.
        incoming: the buffer of a snapshot being received; kept until it is complete.
        outgoing: the buffer being sent; a copy, since sending may outlast the reuse of the snapshot.
        under_way: how many parts this worker evaluates with it.
        first: metrics of the first part that must be merged, where this worker has evaluated it.
        states: the states to merge with them, as far as they have arrived.
        is_over: its validation has ended.
    """

    snapshot: Snapshot
    cancelled: SignalSafeEvent
    digest: str
    wanted: str
    incoming: torch.Tensor | None = None
    outgoing: torch.Tensor | None = None
    under_way: int = 0
    first: dict[str, SendableMetric] = field(default_factory=dict)
    states: list[dict[str, str]] = field(default_factory=list)
    is_over: bool = False


@dataclass(kw_only=True)
class SharedParts:
    """The parts of the job's validations that a worker is assigned, and its reports on them.

    Attributes:
        client: the worker's client of the coordinator.
        ledger: of the validations under way here; each has one part, the set.
        samples: in the set.
        timeout_s: the longest time that the transfer of a snapshot may take.
        pool: evaluates the assigned parts.
    """

    client: CoordinatorClient
    ledger: ValidationLedger
    samples: int
    timeout_s: float
    pool: EvaluatorPool[Snapshot] | None = None
    _held: dict[int, _HeldSnapshot] = field(default_factory=dict)
    _changed: SignalSafeCondition = field(default_factory=SignalSafeCondition)

    def offer_snapshot(
        self, epoch: int, moment: EpochState, *, is_current: bool, evaluators: int, decision_rule: str
    ) -> None:
        """Offer to evaluate parts of an epoch."""
        digest = moment.snapshot.digest()
        if self.track_epoch(epoch, moment, digest):
            return
        self.client.send_event(
            SnapshotTaken(
                now_s=0.0,
                worker=self.client.worker,
                epoch=epoch,
                digest=digest,
                is_current=is_current,
                samples=self.samples,
                evaluators=evaluators,
                part_deadline_s=self.timeout_s,
                decision_rule=decision_rule,
            )
        )

    def track_epoch(self, epoch: int, moment: EpochState, digest: str = "") -> bool:
        """Register an epoch, so that the ledger receives its result; return whether it is over."""
        with self._changed:
            self._held[epoch] = _HeldSnapshot(
                snapshot=moment.snapshot, cancelled=moment.cancelled, digest=digest, wanted=digest
            )
        outcome = self.client.validation_results.get(epoch)
        if outcome is not None:
            self._end(outcome)
        return outcome is not None

    def digest_of(self, epoch: int) -> str:
        """Return the digest of this worker's snapshot of an epoch."""
        return self._held[epoch].digest

    def is_read(self, epoch: int) -> bool:
        """Whether the snapshot of an epoch that is over may still be read, or written, here."""
        with self._changed:
            held = self._held[epoch]
            return held.under_way > 0 or held.incoming is not None

    def keep_only(self, epochs: Collection[int]) -> None:
        """Drop the snapshots of all other epochs."""
        with self._changed:
            self._held = {epoch: held for epoch, held in self._held.items() if epoch in epochs}

    def describe_missing(self, epoch: int) -> str:
        """Return what an epoch waits for, as far as this worker knows, as text."""
        with self._changed:
            under_way = self._held[epoch].under_way if epoch in self._held else 0
        if under_way:
            return f"this worker, {self.client.worker}, has {under_way} parts that it has not evaluated"
        return (
            f"worker {self.client.worker} has evaluated all its parts, and waits for other workers, which "
            "have the other parts or are not yet at the end of that epoch"
        )

    # Actions, in the I/O thread -----------------------------------------------------------------------

    def on_action(self, action: SendSnapshot | EvaluatePart | MergeStates | ValidationFinished) -> None:
        """Carry out an action of the coordinator."""
        match action:
            case ValidationFinished():
                self._end(action)
            case EvaluatePart():
                self._on_part(action)
            case MergeStates():
                self._on_merge(action)
            case SendSnapshot() if action.receiver == self.client.worker:
                self._receive_snapshot(action)
            case SendSnapshot():
                self._send_snapshot(action)

    def _on_part(self, action: EvaluatePart) -> None:
        with self._changed:
            held = self._held.get(action.epoch)
            if held is None or self.pool is None:
                return
            held.under_way += 1
            held.wanted = action.digest
            self._changed.notify_all()
        assigned = _AssignedPart(
            epoch=action.epoch,
            number=action.part,
            positions=range(action.start, action.stop),
            snapshot=held.snapshot,
            cancelled=held.cancelled,
            digest=action.digest,
        )
        self.pool.submit([assigned])

    def _on_merge(self, action: MergeStates) -> None:
        with self._changed:
            held = self._held.get(action.epoch)
            if held is None or self.pool is None:
                return
            if action.part == 0:
                held.states = []
            held.states.append(dict(action.states))
            if len(held.states) < action.parts:
                return
            held.under_way += 1
        merge = _MergeTask(
            epoch=action.epoch,
            number=0,
            positions=range(self.samples),
            snapshot=held.snapshot,
            cancelled=held.cancelled,
            digest=action.digest,
            first=held.first,
            others=held.states[1:],
        )
        self.pool.submit([merge])

    def _receive_snapshot(self, transfer: SendSnapshot) -> None:
        with self._changed:
            held = self._held.get(transfer.epoch)
            if held is None:
                self.client.endpoint.cancel(
                    _FIRST_TAG + transfer.transfer, _FIRST_TAG + transfer.transfer + 1
                )
                return
            incoming = torch.empty(held.snapshot.size_bytes, dtype=torch.uint8, device="cpu")
            held.incoming, held.wanted = incoming, transfer.digest
            missing = len(incoming)

        def on_bytes(_: int, length: int) -> None:
            nonlocal missing
            missing -= length
            if missing:
                return
            with self._changed:
                if held.incoming is incoming:
                    held.incoming = None
                    if not held.cancelled.is_set():
                        held.snapshot.overwrite(incoming)
                        held.digest = transfer.digest
                self._changed.notify_all()

        owner = self.client.link_name(transfer.worker)
        self.client.endpoint.post_receive(
            owner, _FIRST_TAG + transfer.transfer, _memory_of(incoming), on_bytes
        )

    def _send_snapshot(self, transfer: SendSnapshot) -> None:
        held = self._held.get(transfer.epoch)
        if held is None or held.digest != transfer.digest:
            return  # it is over, and the receiver knows that
        values = held.outgoing = held.snapshot.to_bytes() if held.outgoing is None else held.outgoing
        self.client.endpoint.send_tensor(
            self.client.link_name(transfer.receiver),
            _FIRST_TAG + transfer.transfer,
            _memory_of(values),
            priority=_LOW_PRIORITY,
            on_done=partial(_keep_alive, values),
        )

    def _end(self, outcome: ValidationFinished) -> None:
        """Record the result of an epoch that is over for all workers."""
        with self._changed:
            held = self._held.get(outcome.epoch)
            if held is None or held.is_over:
                return
            held.is_over = True
        whole_set = ValidationPart(
            epoch=outcome.epoch,
            number=0,
            positions=range(self.samples),
            snapshot=held.snapshot,
            cancelled=held.cancelled,
        )
        if outcome.snapshot_owner is None:
            self.ledger.on_part_done(
                whole_set, NoMetricsError(f"there are no metrics of epoch {outcome.epoch}: {outcome.reason}")
            )
        else:
            self.ledger.on_part_done(whole_set, _metrics_of(outcome))
        with self._changed:
            held.cancelled.set()
            self._changed.notify_all()

    # In the threads that evaluate ------------------------------------------------------------------------

    def wait_for(self, part: ValidationPart[Snapshot]) -> None:
        """Wait until the snapshot is there with which a part is to be evaluated.

        Raises:
            CancelledError: the part is not needed any more.
            OffbeatError: it took too long.
        """
        assert isinstance(part, _AssignedPart)
        end_s = time.monotonic() + self.timeout_s
        with self._changed:
            while True:
                held = self._held.get(part.epoch)
                if held is None or part.cancelled.is_set() or held.wanted != part.digest:
                    raise CancelledError(f"part {part.number} of epoch {part.epoch} is not needed any more")
                if held.digest == part.digest:
                    return
                remaining_s = end_s - time.monotonic()
                if remaining_s <= 0:
                    raise OffbeatError(
                        f"worker {self.client.worker}: timed out waiting for another worker's snapshot of "
                        f"epoch {part.epoch} after {self.timeout_s:g} s"
                    )
                self._changed.wait(remaining_s)

    def wake(self) -> None:
        """Let waiting threads check whether they still need to wait."""
        with self._changed:
            self._changed.notify_all()

    def on_part_done(
        self, part: ValidationPart[Snapshot], result: dict[str, MetricValue] | BaseException
    ) -> None:
        """Report the result of a part; an error ends the validation, and this worker's training raises it."""
        assert isinstance(part, _AssignedPart)
        with self._changed:
            held = self._held.get(part.epoch)
            if held is not None:
                held.under_way -= 1
        if isinstance(result, CancelledError):
            return
        try:
            if isinstance(result, BaseException):
                raise result
            message = (
                self._states_merged(part, result)
                if isinstance(part, _MergeTask)
                else self._part_evaluated(part, result)
            )
        except BaseException as error:
            if part.cancelled.is_set():
                warnings.warn(
                    f"evaluating part {part.number} of epoch {part.epoch} failed on worker "
                    f"{self.client.worker}, after another one had succeeded: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self.ledger.on_part_done(part, error)
            return
        with suppress(LinkError):  # then the job has failed, and the error is raised elsewhere
            self.client.send_event(message)

    def _states_merged(self, part: _MergeTask, metrics: dict[str, MetricValue]) -> StatesMerged:
        means, counts = _means_and_counts(metrics)
        return StatesMerged(
            now_s=0.0,
            worker=self.client.worker,
            epoch=part.epoch,
            digest=part.digest,
            means=means,
            counts=counts,
        )

    def _part_evaluated(self, part: _AssignedPart, metrics: dict[str, MetricValue]) -> PartEvaluated:
        merged = {name: metric for name, metric in metrics.items() if isinstance(metric, SendableMetric)}
        means, counts = _means_and_counts(
            {name: metric for name, metric in metrics.items() if name not in merged}
        )
        if part.number == 0:
            with self._changed:
                held = self._held.get(part.epoch)
                if held is not None and held.wanted == part.digest:
                    held.first = merged
        message = PartEvaluated(
            now_s=0.0,
            worker=self.client.worker,
            epoch=part.epoch,
            digest=part.digest,
            part=part.number,
            means=means,
            counts=counts,
            states=tuple((name, _encode_state(metric)) for name, metric in merged.items()),
        )
        if len(encode_events([message])) > _METRICS_BYTES_MAX:
            raise OffbeatError(
                f"expected metrics that take at most {_METRICS_BYTES_MAX} bytes, names included, got "
                f"{len(metrics)} metrics that take {len(encode_events([message]))}: return fewer of them"
            )
        return message


class SnapshotAwaitingEvaluator:
    """Evaluates a part once the snapshot for it is there."""

    def __init__(self, evaluator: Evaluator[Snapshot], shares: SharedParts) -> None:
        self._evaluator, self._shares = evaluator, shares

    def evaluate(self, part: ValidationPart[Snapshot]) -> dict[str, MetricValue]:
        """See `Evaluator`."""
        if isinstance(part, _MergeTask):
            return part.merged()
        self._shares.wait_for(part)
        return self._evaluator.evaluate(part)

    def close(self) -> None:
        """See `Evaluator`."""
        self._shares.wake()
        self._evaluator.close()


def _means_and_counts(metrics: dict[str, MetricValue]) -> tuple[dict[str, float], dict[str, float]]:
    """Return means and counts as they are sent."""
    means: dict[str, float] = {}
    counts: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, float):
            means[name] = value
        elif isinstance(value, int):
            if abs(value) > _COUNT_MAX:
                raise OffbeatError(f"expected the count {name!r} to be at most 2**53, got {value}")
            counts[name] = float(value)
        else:
            raise OffbeatError(
                f"expected the metric {name!r} to be a mean, a count, or a metric with a metric_state where "
                f"several workers divide a validation, got {type(value).__name__}: return its numbers, or "
                "validate on one worker with offbeat.Validator"
            )
    return means, counts


def _encode_state(metric: SendableMetric) -> str:
    """Return the state of a metric as it is sent."""
    file = io.BytesIO()
    torch.save(dict(metric.metric_state), file)
    return base64.b85encode(file.getvalue()).decode()


def _decode_state(encoded: str, device: torch.device) -> Any:
    return torch.load(io.BytesIO(base64.b85decode(encoded)), map_location=device, weights_only=True)


def _metrics_of(outcome: ValidationFinished) -> dict[str, float]:
    return {**outcome.means, **{name: int(count) for name, count in outcome.counts.items()}}


def _memory_of(values: torch.Tensor) -> memoryview:
    raw: Any = values.numpy()
    return memoryview(raw)


def _keep_alive(_: torch.Tensor) -> None:
    """Keep the buffer alive while it is being sent."""
