"""Who evaluates which parts of a validation set, where several workers validate an epoch together.

Nothing here evaluates, copies or waits; training does not hear of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    EvaluatePart,
    Event,
    Failed,
    Finished,
    Joined,
    Left,
    LendSnapshot,
    Lost,
    MergeStates,
    PartEvaluated,
    SnapshotTaken,
    StatesMerged,
    Stop,
    Tick,
    Validated,
    Validating,
    WentBack,
)
from offbeat.policies.validation.schedule import split_even

PARTS_PER_EVALUATOR: Final = 4
BACKUP_FACTOR: Final = 2.0


@dataclass(kw_only=True)
class _Offer:
    """What a worker has said that has a snapshot."""

    digest: str
    is_current: bool
    evaluators: int


@dataclass(kw_only=True)
class _Result:
    """What a part came to; see `PartEvaluated`."""

    means: dict[str, float]
    counts: dict[str, float]
    states: tuple[tuple[str, str], ...]

    def names(self) -> str:
        return ", ".join(
            [f"the mean {name}" for name in sorted(self.means)]
            + [f"the count {name}" for name in sorted(self.counts)]
            + [f"the merged {name}" for name in sorted(name for name, _ in self.states)]
        )


@dataclass(kw_only=True)
class _Epoch:
    """An epoch whose validation is not over.

    Attributes:
        offers: by worker, in the order in which they came.
        owner, digest: whose snapshot is evaluated, None as long as that is open, and its digest.
        holders: who has that snapshot, bit for bit.
        lent: who has been, or is being, sent it in the place of its own; by whom at last.
        waiting: parts that nobody evaluates, the next one last.
        out: by part, when it was given to whom.
        results: by part.
        merger: who evaluated the first part, and can merge what metrics have seen.
        merging_since_s: when it was asked to; None as long as it was not.
        spent_s, spent_count: how long parts took that have been evaluated, in all, and how many.
    """

    samples: int
    terms: str
    deadline_s: float
    offers: dict[int, _Offer] = field(default_factory=dict)
    owner: int | None = None
    digest: str = ""
    holders: set[int] = field(default_factory=set)
    lent: dict[int, int] = field(default_factory=dict)
    parts: int = 0
    waiting: list[int] = field(default_factory=list)
    out: dict[int, dict[int, float]] = field(default_factory=dict)
    results: dict[int, _Result] = field(default_factory=dict)
    merger: int | None = None
    merging_since_s: float | None = None
    spent_s: float = 0.0
    spent_count: int = 0

    @property
    def is_evaluated(self) -> bool:
        return self.parts > 0 and len(self.results) == self.parts

    def take_back(self, worker: int) -> None:
        """Let others evaluate what a worker was given."""
        for part, given in list(self.out.items()):
            given.pop(worker, None)
            if not given:
                del self.out[part]
                self.waiting.append(part)


class SharedValidation:
    """Deals the parts of an epoch's validation to whoever has time for them, all with one snapshot.

    The first worker that has the current model at an epoch's end has its snapshot evaluated. Who has the
    same, bit for bit, helps with its own copy; who has another one (statistics of BatchNorm, a worker's own
    copy of parameters on servers, parameters of one that was left out) is lent it. Parts are contiguous,
    `PARTS_PER_EVALUATOR` for each that can be evaluated at once; a worker gets another one when it has
    evaluated one, so that a slow one evaluates less. What a lost worker had goes to others, and a part that
    is out for more than `BACKUP_FACTOR` times what parts took goes to a second worker that has nothing else
    to do; the first result counts. Where nobody is left that has the snapshot, another one takes its place,
    of a worker whose own has not been overwritten; where there is none, the epoch has no metrics.

    Metrics that are merged are objects of the program, of which workers tell the states. Who has evaluated
    the first part has such an object: once all parts are evaluated, it is sent their states, merges them in
    the order of the set, and says what they come to. If it is lost before, another worker evaluates the first
    part again.

    Source: the overlapped validation paper has one worker; that each of several validates its share is the
    project's. Backup parts: J. Dean and S. Ghemawat, "MapReduce: simplified data processing on large
    clusters", OSDI 2004, section 3.6.
    """

    def __init__(self) -> None:
        self._reached: dict[int, float] = {}  # by worker that is here: its last snapshot's epoch
        self._epochs: dict[int, _Epoch] = {}  # by epoch, those not over
        self._over: dict[int, Validated] = {}  # by epoch
        self._loans = 0
        self._has_stopped = False

    def handle(self, event: Event) -> list[Action]:
        """Answer with parts, loans of snapshots, and the metrics of epochs that are over.

        Raises:
            ProtocolError: workers disagree about the set or the metrics, or say what cannot be.
        """
        match event:
            case Joined():
                self._reached[event.worker] = -1.0
                return self._history(event.worker)
            case SnapshotTaken():
                begun = self._offered(event)
                return [*begun, *self._answers(event.now_s)]
            case PartEvaluated():
                self._evaluated(event)
            case StatesMerged():
                merged = self._merged(event)
                return [*merged, *self._answers(event.now_s)]
            case WentBack():
                dropped = self._dropped_after(event.epoch)
                return [*dropped, *self._answers(event.now_s)]
            case Finished():
                self._reached[event.worker] = math.inf
            case Left() | Lost() | Failed():
                self._gone(event.worker)
            case Tick():
                if not self._epochs:
                    return []
            case _:
                return []
        return self._answers(event.now_s)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "reached": [[worker, None if math.isinf(at) else at] for worker, at in self._reached.items()],
            "epochs": [[epoch, _plain(one)] for epoch, one in self._epochs.items()],
            "over": [asdict(over) for over in self._over.values()],
            "loans": self._loans,
            "has_stopped": self._has_stopped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a policy with the same arguments."""
        self._reached = {worker: math.inf if at is None else at for worker, at in state["reached"]}
        self._epochs = {epoch: _of_plain(plain) for epoch, plain in state["epochs"]}
        self._over = {plain["epoch"]: Validated(**plain) for plain in state["over"]}
        self._loans, self._has_stopped = state["loans"], state["has_stopped"]

    # What is heard ---------------------------------------------------------------------------------------

    def _offered(self, event: SnapshotTaken) -> list[Action]:
        if event.samples < 1 or event.evaluators < 1:
            raise ProtocolError(
                f"worker {event.worker} offers to evaluate {event.evaluators} parts at once of a set of "
                f"{event.samples} samples: expected at least one of each"
            )
        self._reached[event.worker] = max(self._reached.get(event.worker, -1.0), event.epoch)
        if event.epoch in self._over:
            return []
        begun: list[Action] = []
        one = self._epochs.get(event.epoch)
        if one is None:
            one = _Epoch(samples=event.samples, terms=event.terms, deadline_s=event.deadline_s)
            self._epochs[event.epoch] = one
            reason = f"worker {event.worker} is through with the epoch"
            begun.append(Validating(worker=None, epoch=event.epoch, reason=reason))
        for what, theirs, given in (
            ("validation set", f"{one.samples} samples", f"{event.samples} samples"),
            ("decisions on metrics", one.terms, event.terms),
        ):
            if given != theirs:
                others = ", ".join(map(str, one.offers)) or "another one"
                raise ProtocolError(
                    f"expected the same {what} on every worker, got {theirs} on worker {others} and {given} "
                    f"on worker {event.worker}, both in epoch {event.epoch}"
                )
        if event.worker in one.offers:
            raise ProtocolError(f"worker {event.worker} has taken a second snapshot of epoch {event.epoch}")
        one.offers[event.worker] = _Offer(
            digest=event.digest, is_current=event.is_current, evaluators=event.evaluators
        )
        if one.owner is not None and one.digest == event.digest:
            one.holders.add(event.worker)
        return begun

    def _evaluated(self, event: PartEvaluated) -> None:
        one = self._epochs.get(event.epoch)
        if one is None and event.epoch not in self._over:
            raise ProtocolError(f"no part of epoch {event.epoch} was given to worker {event.worker}")
        if one is None or event.worker not in one.out.get(event.part, {}) or event.digest != one.digest:
            return  # another one was faster, or it was taken back
        result = _Result(means=event.means, counts=event.counts, states=event.states)
        for other in list(one.results.values())[:1]:
            if other.names() != result.names():
                raise ProtocolError(
                    f"expected the same metrics of every part of epoch {event.epoch}, got "
                    f"{other.names() or 'none'}, and of part {event.part}, on worker {event.worker}, "
                    f"{result.names() or 'none'}"
                )
        one.spent_s += event.now_s - one.out[event.part][event.worker]
        one.spent_count += 1
        one.holders.add(event.worker)
        one.results[event.part] = result
        del one.out[event.part]
        if event.part == 0:
            one.merger = event.worker

    def _merged(self, event: StatesMerged) -> list[Action]:
        one = self._epochs.get(event.epoch)
        if one is None and event.epoch not in self._over:
            raise ProtocolError(
                f"worker {event.worker} was not asked to merge metrics of epoch {event.epoch}"
            )
        if one is None or event.digest != one.digest or one.merging_since_s is None:
            return []  # what it had was evaluated anew
        if event.worker != one.merger:
            raise ProtocolError(
                f"worker {event.worker} was not asked to merge metrics of epoch {event.epoch}"
            )
        return [self._end(event.epoch, one, event.means, event.counts)]

    def _dropped_after(self, epoch: int) -> list[Action]:
        """End the epochs that nobody wants validated any more."""
        reason = f"training went back to the end of epoch {epoch}"
        return [self._without_metrics(later, reason) for later in sorted(self._epochs) if later > epoch]

    def _gone(self, worker: int) -> None:
        self._reached.pop(worker, None)
        for one in self._epochs.values():
            one.offers.pop(worker, None)
            one.take_back(worker)
            if one.owner == worker:
                one.owner = next((other for other in one.offers if other in one.holders), None)
                for borrower in one.lent.keys() - one.holders:  # what it was sent may not have come whole
                    one.take_back(borrower)
                if one.owner is None:  # nobody has any more what was evaluated
                    one.results, one.merger, one.merging_since_s = {}, None, None
            if one.merger == worker:
                one.merger = one.merging_since_s = None
                if one.results[0].states:
                    del one.results[0]
                    one.waiting.append(0)

    # What follows ----------------------------------------------------------------------------------------

    def _answers(self, now_s: float) -> list[Action]:
        if self._has_stopped:
            return []
        actions: list[Action] = []
        for epoch in sorted(self._epochs):
            one = self._epochs[epoch]
            actions += self._choose(epoch, one)
            if one.is_evaluated and not one.results[0].states:
                actions.append(self._end(epoch, one, {}, {}))
            elif one.is_evaluated and one.merging_since_s is None:
                one.merging_since_s = now_s
                actions += self._merge(epoch, one)
        for epoch in sorted(self._epochs):
            actions += self._late(epoch, self._epochs[epoch], now_s)
            if self._has_stopped:
                return actions
            actions += self._deal(epoch, self._epochs[epoch], now_s)
        return actions

    def _choose(self, epoch: int, one: _Epoch) -> list[Action]:
        """Say whose snapshot is evaluated, if that is open and can be said."""
        if one.owner is not None:
            return []
        whole = [worker for worker in one.offers if worker not in one.lent]
        current = [worker for worker in whole if one.offers[worker].is_current]
        if not current and any(reached < epoch for reached in self._reached.values()):
            return []  # others have yet to come
        owner = next(iter(current or whole), None)
        if owner is None:
            return [self._without_metrics(epoch, "nobody is left that has the snapshot that was evaluated")]
        one.owner, one.digest = owner, one.offers[owner].digest
        if not one.parts:  # once made they stay: a part's result may come late, and must mean its samples
            evaluators = one.offers[owner].evaluators * len(self._reached)
            parts = evaluators * PARTS_PER_EVALUATOR if evaluators > 1 else 1
            one.parts = len(split_even(one.samples, parts))
        one.waiting = list(range(one.parts))[::-1]
        one.holders = {worker for worker in whole if one.offers[worker].digest == one.digest}
        return []

    def _merge(self, epoch: int, one: _Epoch) -> Iterator[Action]:
        """Send the states of all parts to the worker that merges them."""
        assert one.merger is not None
        for part in range(one.parts):
            yield MergeStates(
                worker=one.merger,
                epoch=epoch,
                digest=one.digest,
                part=part,
                parts=one.parts,
                states=one.results[part].states,
                reason=f"all {one.parts} parts are evaluated, the first one by worker {one.merger}",
            )

    def _end(
        self, epoch: int, one: _Epoch, merged_means: dict[str, float], merged_counts: dict[str, float]
    ) -> Validated:
        """The epoch is over, with the means and counts of all parts and what others were merged to."""
        assert one.owner is not None
        results = [one.results[part] for part in range(one.parts)]
        sizes = list(map(len, split_even(one.samples, one.parts)))
        means = {name: _mean([found.means[name] for found in results], sizes) for name in results[0].means}
        counts = {name: math.fsum(found.counts[name] for found in results) for name in results[0].counts}
        over = Validated(
            worker=None,
            epoch=epoch,
            owner=one.owner,
            digest=one.digest,
            means=means | merged_means,
            counts=counts | merged_counts,
            reason=f"all {one.parts} parts are evaluated",
        )
        self._over[epoch] = over
        del self._epochs[epoch]
        return over

    def _without_metrics(self, epoch: int, reason: str) -> Validated:
        over = Validated(
            worker=None,
            epoch=epoch,
            owner=None,
            digest="",
            means={},
            counts={},
            reason=reason,
        )
        self._over[epoch] = over
        del self._epochs[epoch]
        return over

    def _history(self, worker: int) -> list[Action]:
        """Tell a worker that comes what the others have heard."""
        why = "it was before the worker came"
        over = [Validated(**{**asdict(one), "worker": worker, "reason": why}) for one in self._over.values()]
        return [*over, *(Validating(worker=worker, epoch=epoch, reason=why) for epoch in self._epochs)]

    def _late(self, epoch: int, one: _Epoch, now_s: float) -> list[Action]:
        """Stop the job where a part takes for ever, wherever it is evaluated."""
        waits = [
            (*min(given.items(), key=lambda item: item[1]), f"evaluate part {part}", "evaluate is")
            for part, given in one.out.items()
        ]
        if one.merger is not None and one.merging_since_s is not None:
            waits.append((one.merger, one.merging_since_s, "merge the metrics", "they are"))
        for worker, since_s, what, who in waits:
            if now_s - since_s > one.deadline_s:
                self._has_stopped = True
                return [
                    Stop(
                        worker=worker,
                        step=None,
                        reason=f"worker {worker} did not {what} of epoch {epoch} within "
                        f"{one.deadline_s:g} s: look what {who} doing, or give it a longer deadline_s",
                    )
                ]
        return []

    def _deal(self, epoch: int, one: _Epoch, now_s: float) -> Iterator[Action]:
        if one.owner is None:
            return
        while free := [worker for worker in one.offers if self._is_free(worker, one)]:
            dealt = False
            for worker in free:
                part = self._part_for(worker, one, now_s)
                if part is None:
                    continue
                dealt = True
                is_backup = part in one.out
                one.out.setdefault(part, {})[worker] = now_s
                if worker not in one.holders and one.lent.get(worker) != one.owner:
                    yield self._lend(worker, epoch, one)
                positions = split_even(one.samples, one.parts)[part]
                yield EvaluatePart(
                    worker=worker,
                    epoch=epoch,
                    digest=one.digest,
                    part=part,
                    start=positions.start,
                    stop=positions.stop,
                    reason="another worker takes long for it" if is_backup else "the worker has time for it",
                )
            if not dealt:
                return

    def _lend(self, worker: int, epoch: int, one: _Epoch) -> LendSnapshot:
        assert one.owner is not None
        one.lent[worker] = one.owner
        self._loans += 1
        return LendSnapshot(
            worker=one.owner,
            borrower=worker,
            epoch=epoch,
            digest=one.digest,
            number=self._loans - 1,
            reason=f"worker {one.owner}'s snapshot is evaluated, and worker {worker} has another one",
        )

    def _is_free(self, worker: int, one: _Epoch) -> bool:
        under_way = sum(worker in given for other in self._epochs.values() for given in other.out.values())
        return under_way < one.offers[worker].evaluators

    def _part_for(self, worker: int, one: _Epoch, now_s: float) -> int | None:
        """Return a part for a worker that is free: one that nobody has, else one that is late elsewhere."""
        if one.waiting:
            return one.waiting.pop()
        if not one.spent_count:
            return None
        usual_s = one.spent_s / one.spent_count
        late = [
            (max(given.values()), part)
            for part, given in one.out.items()
            if worker not in given and now_s - max(given.values()) > BACKUP_FACTOR * usual_s
        ]
        return min(late)[1] if late else None


def _mean(values: list[float], sizes: list[int]) -> float:
    if len(values) == 1:
        return values[0]
    products = [value * size for value, size in zip(values, sizes, strict=True)]
    total = math.fsum(products) if all(map(math.isfinite, products)) else sum(products)
    return total / sum(sizes)


def _plain(one: _Epoch) -> dict[str, Any]:
    return {
        **vars(one),
        "offers": [[worker, asdict(offer)] for worker, offer in one.offers.items()],
        "holders": sorted(one.holders),
        "lent": [list(loan) for loan in one.lent.items()],
        "waiting": list(one.waiting),
        "out": [
            [part, [[worker, since_s] for worker, since_s in given.items()]]
            for part, given in one.out.items()
        ],
        "results": [[part, asdict(result)] for part, result in one.results.items()],
    }


def _of_plain(plain: dict[str, Any]) -> _Epoch:
    return _Epoch(
        **{
            **plain,
            "offers": {worker: _Offer(**offer) for worker, offer in plain["offers"]},
            "holders": set(plain["holders"]),
            "lent": dict(plain["lent"]),
            "waiting": list(plain["waiting"]),
            "out": {part: dict(given) for part, given in plain["out"]},
            "results": {part: _result(result) for part, result in plain["results"]},
        }
    )


def _result(plain: dict[str, Any]) -> _Result:
    states = tuple((name, state) for name, state in plain["states"])
    return _Result(means=plain["means"], counts=plain["counts"], states=states)
