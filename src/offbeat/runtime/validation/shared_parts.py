"""What a worker does of the validations that a job's workers share out, as the coordinator deals it.

It evaluates the parts that it is given, lends and borrows snapshots, and hears what came of epochs. Nothing
here acts on metrics.
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
    LendSnapshot,
    MergeStates,
    PartEvaluated,
    SnapshotTaken,
    StatesMerged,
    Validated,
    WentBack,
)
from offbeat.numerics.metrics import Tellable, Value, merged
from offbeat.runtime.control.client import Member
from offbeat.runtime.processes.waiting import Condition, Flag
from offbeat.runtime.validation.evaluators import CancelledError, Crew, Evaluator, Part
from offbeat.runtime.validation.result import Ledger, NoMetricsError
from offbeat.runtime.validation.snapshot import Snapshot
from offbeat.runtime.validation.validator import Moment
from offbeat.wire.record import MESSAGE_BYTES_MAX, encode

_FIRST_TAG: Final = 3 << 62  # exchanges use what is below 2**63, loans of samples what is below this
_LATER: Final = 1 << 20  # priority: after all exchanges
_METRICS_BYTES_MAX: Final = MESSAGE_BYTES_MAX // 2
_COUNT_MAX: Final = 2**53  # up to which all whole numbers are floats


@dataclass(frozen=True, kw_only=True)
class _Share(Part[Snapshot]):
    """A part that this worker was dealt; `digest`: of the snapshot that it is to be evaluated with."""

    digest: str


@dataclass(frozen=True, kw_only=True)
class _Merge(_Share):
    """The first part, evaluated by this worker, whose metrics are to be merged with those of the others.

    Attributes:
        first: metrics of the first part.
        others: states of the metrics of the other parts, in the order of the set.
    """

    first: dict[str, Tellable]
    others: Sequence[dict[str, str]]

    def merged(self) -> dict[str, Value]:
        """Return what they come to."""
        return {
            name: merged(name, metric, [_state(states[name], metric.device) for states in self.others])
            for name, metric in self.first.items()
        }


@dataclass(kw_only=True)
class _Held:
    """A snapshot of this worker's, for as long as its epoch is not over.

    Attributes:
        digest: of what lies in it now.
        wanted: of what it is to hold, as far as is known.
        incoming: what is on its way to it; kept until it is there.
        lent: what others are being sent of it; a copy, since they may still be when it is used again.
        under_way: how many parts this worker evaluates with it.
        first: metrics of the first part that are to be merged, where this worker has evaluated it.
        states: that those are to be merged with, as far as they have come.
        is_over: its validation has ended.
    """

    snapshot: Snapshot
    cancelled: Flag
    digest: str
    wanted: str
    incoming: torch.Tensor | None = None
    lent: torch.Tensor | None = None
    under_way: int = 0
    first: dict[str, Tellable] = field(default_factory=dict)
    states: list[dict[str, str]] = field(default_factory=list)
    is_over: bool = False


@dataclass(kw_only=True)
class Shares:
    """What a worker is dealt of its job's validations, and what it says of it.

    Attributes:
        member: the control side.
        ledger: of the validations under way here; each has one part, the set.
        samples: in the set.
        deadline_s: how long a snapshot that is lent may take to come.
        crew: evaluates what is dealt.
    """

    member: Member
    ledger: Ledger
    samples: int
    deadline_s: float
    crew: Crew[Snapshot] | None = None
    _held: dict[int, _Held] = field(default_factory=dict)
    _changed: Condition = field(default_factory=Condition)

    def begin(self) -> None:
        """Listen to what is said of validations."""
        self.member.on_validation = self.hear

    def offer(self, epoch: int, moment: Moment, *, is_current: bool, evaluators: int, terms: str) -> None:
        """Say that this worker can evaluate parts of an epoch."""
        digest = moment.snapshot.digest()
        if self.watch(epoch, moment, digest):
            return
        self.member.tell(
            SnapshotTaken(
                now_s=0.0,
                worker=self.member.worker,
                epoch=epoch,
                digest=digest,
                is_current=is_current,
                samples=self.samples,
                evaluators=evaluators,
                deadline_s=self.deadline_s,
                terms=terms,
            )
        )

    def drop_after(self, epoch: int) -> None:
        """Say that the training has gone back to the end of an epoch."""
        self.member.tell(WentBack(now_s=0.0, worker=self.member.worker, epoch=epoch))

    def watch(self, epoch: int, moment: Moment, digest: str = "") -> bool:
        """Have the ledger hear what the validation of an epoch comes to; return whether it is over."""
        with self._changed:
            self._held[epoch] = _Held(
                snapshot=moment.snapshot, cancelled=moment.cancelled, digest=digest, wanted=digest
            )
        over = self.member.validated.get(epoch)
        if over is not None:
            self._end(over)
        return over is not None

    def digest_of(self, epoch: int) -> str:
        """Return the digest of the snapshot that this worker has of an epoch."""
        return self._held[epoch].digest

    def outcome_of(self, epoch: int) -> Validated:
        """Return what the validation of an epoch came to, which is over."""
        over = self.member.validated[epoch]
        assert over is not None
        return over

    def is_read(self, epoch: int) -> bool:
        """Whether the snapshot of an epoch that is over may still be read, or written, here."""
        with self._changed:
            held = self._held[epoch]
            return held.under_way > 0 or held.incoming is not None

    def keep(self, epochs: Collection[int]) -> None:
        """Forget the snapshots of all other epochs."""
        with self._changed:
            self._held = {epoch: held for epoch, held in self._held.items() if epoch in epochs}

    def what_is_missing(self, epoch: int) -> str:
        """Say what an epoch waits for, as far as this worker knows."""
        with self._changed:
            under_way = self._held[epoch].under_way if epoch in self._held else 0
        if under_way:
            return f"this worker, {self.member.worker}, has {under_way} parts that it has not evaluated"
        return (
            f"worker {self.member.worker} has evaluated all that it was dealt, and waits for others, who "
            "have the other parts or are not yet at the end of that epoch"
        )

    # What is said, in the links' thread ------------------------------------------------------------------

    def hear(self, action: LendSnapshot | EvaluatePart | MergeStates | Validated) -> None:
        """Do what the coordinator says."""
        match action:
            case Validated():
                self._end(action)
            case EvaluatePart():
                self._take(action)
            case MergeStates():
                self._merge(action)
            case LendSnapshot() if action.borrower == self.member.worker:
                self._borrow(action)
            case LendSnapshot():
                self._lend(action)

    def _take(self, action: EvaluatePart) -> None:
        with self._changed:
            held = self._held.get(action.epoch)
            if held is None or self.crew is None:
                return
            held.under_way += 1
            held.wanted = action.digest
            self._changed.notify_all()
        share = _Share(
            epoch=action.epoch,
            number=action.part,
            positions=range(action.start, action.stop),
            snapshot=held.snapshot,
            cancelled=held.cancelled,
            digest=action.digest,
        )
        self.crew.give([share])

    def _merge(self, action: MergeStates) -> None:
        with self._changed:
            held = self._held.get(action.epoch)
            if held is None or self.crew is None:
                return
            if action.part == 0:
                held.states = []
            held.states.append(dict(action.states))
            if len(held.states) < action.parts:
                return
            held.under_way += 1
        merge = _Merge(
            epoch=action.epoch,
            number=0,
            positions=range(self.samples),
            snapshot=held.snapshot,
            cancelled=held.cancelled,
            digest=action.digest,
            first=held.first,
            others=held.states[1:],
        )
        self.crew.give([merge])

    def _borrow(self, loan: LendSnapshot) -> None:
        with self._changed:
            held = self._held.get(loan.epoch)
            if held is None:
                self.member.endpoint.forget(_FIRST_TAG + loan.number, _FIRST_TAG + loan.number + 1)
                return
            incoming = torch.empty(held.snapshot.size_bytes, dtype=torch.uint8, device="cpu")
            held.incoming, held.wanted = incoming, loan.digest
            missing = len(incoming)

        def came(_: int, length: int) -> None:
            nonlocal missing
            missing -= length
            if missing:
                return
            with self._changed:
                if held.incoming is incoming:
                    held.incoming = None
                    if not held.cancelled.is_set():
                        held.snapshot.overwrite(incoming)
                        held.digest = loan.digest
                self._changed.notify_all()

        owner = self.member.name_of(loan.worker)
        self.member.endpoint.expect(owner, _FIRST_TAG + loan.number, _memory(incoming), came)

    def _lend(self, loan: LendSnapshot) -> None:
        held = self._held.get(loan.epoch)
        if held is None or held.digest != loan.digest:
            return  # it is over, and the borrower has heard that
        values = held.lent = held.snapshot.to_bytes() if held.lent is None else held.lent
        self.member.endpoint.put(
            self.member.name_of(loan.borrower),
            _FIRST_TAG + loan.number,
            _memory(values),
            priority=_LATER,
            done=partial(_keep, values),
        )

    def _end(self, over: Validated) -> None:
        """An epoch is over, for everybody."""
        with self._changed:
            held = self._held.get(over.epoch)
            if held is None or held.is_over:
                return
            held.is_over = True
        whole = Part(
            epoch=over.epoch,
            number=0,
            positions=range(self.samples),
            snapshot=held.snapshot,
            cancelled=held.cancelled,
        )
        if over.owner is None:
            self.ledger.done(
                whole, NoMetricsError(f"there are no metrics of epoch {over.epoch}: {over.reason}")
            )
        else:
            self.ledger.done(whole, _metrics(over))
        with self._changed:
            held.cancelled.set()
            self._changed.notify_all()

    # In the threads that evaluate ------------------------------------------------------------------------

    def wait_for(self, part: Part[Snapshot]) -> None:
        """Wait until the snapshot is there that a part is to be evaluated with.

        Raises:
            CancelledError: it is not wanted any more.
            OffbeatError: that took too long.
        """
        assert isinstance(part, _Share)
        limit_s = time.monotonic() + self.deadline_s
        with self._changed:
            while True:
                held = self._held.get(part.epoch)
                if held is None or part.cancelled.is_set() or held.wanted != part.digest:
                    raise CancelledError(f"part {part.number} of epoch {part.epoch} is not needed any more")
                if held.digest == part.digest:
                    return
                left_s = limit_s - time.monotonic()
                if left_s <= 0:
                    raise OffbeatError(
                        f"worker {self.member.worker} was to be lent a snapshot of epoch {part.epoch}, and "
                        f"waited {self.deadline_s:g} s for it in vain"
                    )
                self._changed.wait(left_s)

    def wake(self) -> None:
        """Let threads that wait see that they need not any more."""
        with self._changed:
            self._changed.notify_all()

    def done(self, part: Part[Snapshot], result: dict[str, Value] | BaseException) -> None:
        """Tell what a part came to; an error ends the validation, and this worker's training says so."""
        assert isinstance(part, _Share)
        with self._changed:
            held = self._held.get(part.epoch)
            if held is not None:
                held.under_way -= 1
        if isinstance(result, CancelledError):
            return
        try:
            if isinstance(result, BaseException):
                raise result
            said = self._merged(part, result) if isinstance(part, _Merge) else self._said(part, result)
        except BaseException as error:
            if part.cancelled.is_set():
                warnings.warn(
                    f"evaluating part {part.number} of epoch {part.epoch} failed on worker "
                    f"{self.member.worker}, after another one had done it: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self.ledger.done(part, error)
            return
        with suppress(LinkError):  # then the job has failed, and says so elsewhere
            self.member.tell(said)

    def _merged(self, part: _Merge, metrics: dict[str, Value]) -> StatesMerged:
        means, counts = _told(metrics)
        return StatesMerged(
            now_s=0.0,
            worker=self.member.worker,
            epoch=part.epoch,
            digest=part.digest,
            means=means,
            counts=counts,
        )

    def _said(self, part: _Share, metrics: dict[str, Value]) -> PartEvaluated:
        merged = {name: metric for name, metric in metrics.items() if isinstance(metric, Tellable)}
        means, counts = _told({name: metric for name, metric in metrics.items() if name not in merged})
        if part.number == 0:
            with self._changed:
                held = self._held.get(part.epoch)
                if held is not None and held.wanted == part.digest:
                    held.first = merged
        said = PartEvaluated(
            now_s=0.0,
            worker=self.member.worker,
            epoch=part.epoch,
            digest=part.digest,
            part=part.number,
            means=means,
            counts=counts,
            states=tuple((name, _state_told(metric)) for name, metric in merged.items()),
        )
        if len(encode([said])) > _METRICS_BYTES_MAX:
            raise OffbeatError(
                f"expected metrics that take at most {_METRICS_BYTES_MAX} bytes, names included, got "
                f"{len(metrics)} metrics that take {len(encode([said]))}: return fewer of them"
            )
        return said


class WithTheRightSnapshot:
    """Evaluates a part once the snapshot is there that it is to be evaluated with."""

    def __init__(self, evaluator: Evaluator[Snapshot], shares: Shares) -> None:
        self._evaluator, self._shares = evaluator, shares

    def evaluate(self, part: Part[Snapshot]) -> dict[str, Value]:
        """See `Evaluator`."""
        if isinstance(part, _Merge):
            return part.merged()
        self._shares.wait_for(part)
        return self._evaluator.evaluate(part)

    def close(self) -> None:
        """See `Evaluator`."""
        self._shares.wake()
        self._evaluator.close()


def _told(metrics: dict[str, Value]) -> tuple[dict[str, float], dict[str, float]]:
    """Return means and counts, as they are told."""
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
                f"several workers share a validation out, got {type(value).__name__}: return its numbers, or "
                "validate on one worker with offbeat.Validator"
            )
    return means, counts


def _state_told(metric: Tellable) -> str:
    """Return the state of a metric as it is told."""
    file = io.BytesIO()
    torch.save(dict(metric.metric_state), file)
    return base64.b85encode(file.getvalue()).decode()


def _state(told: str, device: torch.device) -> Any:
    return torch.load(io.BytesIO(base64.b85decode(told)), map_location=device, weights_only=True)


def _metrics(over: Validated) -> dict[str, float]:
    return {**over.means, **{name: int(count) for name, count in over.counts.items()}}


def _memory(values: torch.Tensor) -> memoryview:
    raw: Any = values.numpy()
    return memoryview(raw)


def _keep(_: torch.Tensor) -> None:
    """Holds what is sent for as long as it is being sent."""
