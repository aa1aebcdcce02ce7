"""Which worker evaluates which parts of a validation set, where several workers validate an epoch together.

Nothing here evaluates, copies or waits; training does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    EvaluatePart,
    Event,
    Failed,
    Finished,
    Joined,
    Left,
    Lost,
    MergeStates,
    PartEvaluated,
    RolledBack,
    SendSnapshot,
    SnapshotTaken,
    StatesMerged,
    Tick,
    ValidationFinished,
    ValidationStarted,
)
from offbeat.policies.validation.schedule import split_even

PARTS_PER_EVALUATOR: Final = 4
BACKUP_FACTOR: Final = 2.0


@dataclass(kw_only=True)
class _Offer:
    """A worker's offer to evaluate with its snapshot."""

    digest: str
    is_current: bool
    evaluators: int


@dataclass(kw_only=True)
class _Result:
    """The result of a part; see `PartEvaluated`."""

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
class _EpochState:
    """An epoch whose validation is not over.

    Attributes:
        offers: by worker, in the order of arrival.
        owner, digest: the worker whose snapshot is evaluated, None until it is chosen, and the digest.
        holders: workers that have that snapshot, bit for bit.
        snapshot_senders: by worker to which it was or is being sent, replacing its own, the latest sender.
        unassigned: parts that are not assigned, the next one last.
        assigned: by part and worker, when it was assigned.
        results: by part.
        merger: the worker that evaluated the first part, and can merge metric states.
        merging_since_s: when it was asked to merge; None before.
        spent_s, spent_count: total duration and number of the parts evaluated so far.
    """

    samples: int
    decision_rule: str
    timeout_s: float
    offers: dict[int, _Offer] = field(default_factory=dict)
    owner: int | None = None
    digest: str = ""
    holders: set[int] = field(default_factory=set)
    snapshot_senders: dict[int, int] = field(default_factory=dict)
    parts: int = 0
    unassigned: list[int] = field(default_factory=list)
    assigned: dict[int, dict[int, float]] = field(default_factory=dict)
    results: dict[int, _Result] = field(default_factory=dict)
    merger: int | None = None
    merging_since_s: float | None = None
    spent_s: float = 0.0
    spent_count: int = 0

    @property
    def is_evaluated(self) -> bool:
        return self.parts > 0 and len(self.results) == self.parts

    def release(self, worker: int) -> None:
        """Make the parts assigned to a worker available to other workers."""
        for part, assignees in list(self.assigned.items()):
            assignees.pop(worker, None)
            if not assignees:
                del self.assigned[part]
                self.unassigned.append(part)


class SharedValidation:
    """Assigns the parts of an epoch's validation to workers that have time for them, all with one snapshot.

    At the end of an epoch, the snapshot of the first worker that has the current model is evaluated. Workers
    with an equal snapshot, bit for bit, evaluate with their own; workers with a different one (statistics of
    BatchNorm, a worker's own copy of parameters on servers, parameters of a worker that was left out) are
    sent it. Parts are contiguous, `PARTS_PER_EVALUATOR` for each that can be evaluated at once; a worker gets
    the next one when it has evaluated one, so that a slow worker evaluates fewer. The parts of a lost worker
    are assigned again, and a part that takes more than `BACKUP_FACTOR` times the mean duration goes to a
    second, idle worker as well; the first result counts. Where no worker is left that has the snapshot,
    another one replaces it, of a worker whose own has not been overwritten; where there is none, the epoch
    has no metrics.

    Metrics that are merged are objects of the program, whose states the workers send. The worker that has
    evaluated the first part has such an object: once all parts are evaluated, it is sent their states, merges
    them in the order of the set, and reports the results. If it is lost before that, another worker evaluates
    the first part again.

    Source: the overlapped validation paper has one worker; the division among several workers is the
    project's. Backup parts: J. Dean and S. Ghemawat, "MapReduce: simplified data processing on large
    clusters", OSDI 2004, section 3.6.
    """

    def __init__(self) -> None:
        self._last_epochs: dict[int, float] = {}  # by present worker: the epoch of its last snapshot
        self._epochs: dict[int, _EpochState] = {}  # by epoch, the unfinished ones
        self._finished: dict[int, ValidationFinished] = {}  # by epoch
        self._transfers = 0
        self._has_stopped = False

    def handle(self, event: Event) -> list[Action]:
        """Return parts to evaluate, transfers of snapshots, and the metrics of finished epochs.

        Raises:
            ProtocolError: workers disagree about the set or the metrics, or the event is impossible.
        """
        match event:
            case Joined():
                self._last_epochs[event.worker] = -1.0
                return self._catch_up(event.worker)
            case SnapshotTaken():
                started = self._on_snapshot(event)
                return [*started, *self._decide(event.now_s)]
            case PartEvaluated():
                self._on_part_evaluated(event)
            case StatesMerged():
                merged = self._on_states_merged(event)
                return [*merged, *self._decide(event.now_s)]
            case RolledBack():
                dropped = self._drop_after(event.epoch)
                return [*dropped, *self._decide(event.now_s)]
            case Finished():
                self._last_epochs[event.worker] = math.inf
            case Left() | Lost() | Failed():
                self._on_gone(event.worker)
            case Tick():
                if not self._epochs:
                    return []
            case _:
                return []
        return self._decide(event.now_s)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is not a constructor argument, as plain data."""
        return {
            "last_epochs": [
                [worker, None if math.isinf(at) else at] for worker, at in self._last_epochs.items()
            ],
            "epochs": [[epoch, _epoch_to_plain(state)] for epoch, state in self._epochs.items()],
            "finished": [asdict(finished) for finished in self._finished.values()],
            "transfers": self._transfers,
            "has_stopped": self._has_stopped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        self._last_epochs = {worker: math.inf if at is None else at for worker, at in state["last_epochs"]}
        self._epochs = {epoch: _epoch_from_plain(plain) for epoch, plain in state["epochs"]}
        self._finished = {plain["epoch"]: ValidationFinished(**plain) for plain in state["finished"]}
        self._transfers, self._has_stopped = state["transfers"], state["has_stopped"]

    # Events ----------------------------------------------------------------------------------------------

    def _on_snapshot(self, event: SnapshotTaken) -> list[Action]:
        if event.samples < 1 or event.evaluators < 1:
            raise ProtocolError(
                f"expected at least one of each, got an offer of worker {event.worker} to evaluate "
                f"{event.evaluators} parts at once of a set of {event.samples} samples"
            )
        self._last_epochs[event.worker] = max(self._last_epochs.get(event.worker, -1.0), event.epoch)
        if event.epoch in self._finished:
            return []
        started: list[Action] = []
        state = self._epochs.get(event.epoch)
        if state is None:
            state = _EpochState(
                samples=event.samples, decision_rule=event.decision_rule, timeout_s=event.part_deadline_s
            )
            self._epochs[event.epoch] = state
            reason = f"worker {event.worker} has finished the epoch"
            started.append(ValidationStarted(worker=None, epoch=event.epoch, reason=reason))
        for what, expected, got in (
            ("validation set", f"{state.samples} samples", f"{event.samples} samples"),
            ("decisions on metrics", state.decision_rule, event.decision_rule),
        ):
            if got != expected:
                others = ", ".join(map(str, state.offers)) or "another one"
                raise ProtocolError(
                    f"expected the same {what} on every worker, got {expected} on worker {others} and {got} "
                    f"on worker {event.worker}, both in epoch {event.epoch}"
                )
        if event.worker in state.offers:
            raise ProtocolError(
                f"expected one snapshot of epoch {event.epoch} from worker {event.worker}, got a second one"
            )
        state.offers[event.worker] = _Offer(
            digest=event.digest, is_current=event.is_current, evaluators=event.evaluators
        )
        if state.owner is not None and state.digest == event.digest:
            state.holders.add(event.worker)
        return started

    def _on_part_evaluated(self, event: PartEvaluated) -> None:
        state = self._epochs.get(event.epoch)
        if state is None and event.epoch not in self._finished:
            raise ProtocolError(
                f"expected a part that was assigned to worker {event.worker}, got one of epoch {event.epoch}"
            )
        if (
            state is None
            or event.worker not in state.assigned.get(event.part, {})
            or event.digest != state.digest
        ):
            return  # another worker was faster, or the part was assigned again
        result = _Result(means=event.means, counts=event.counts, states=event.states)
        for other in list(state.results.values())[:1]:
            if other.names() != result.names():
                raise ProtocolError(
                    f"expected the same metrics of every part of epoch {event.epoch}, got "
                    f"{other.names() or 'none'}, and of part {event.part}, on worker {event.worker}, "
                    f"{result.names() or 'none'}"
                )
        state.spent_s += event.now_s - state.assigned[event.part][event.worker]
        state.spent_count += 1
        state.holders.add(event.worker)
        state.results[event.part] = result
        del state.assigned[event.part]
        if event.part == 0:
            state.merger = event.worker

    def _on_states_merged(self, event: StatesMerged) -> list[Action]:
        state = self._epochs.get(event.epoch)
        if state is None and event.epoch not in self._finished:
            raise ProtocolError(
                f"worker {event.worker} was not asked to merge metrics of epoch {event.epoch}"
            )
        if state is None or event.digest != state.digest or state.merging_since_s is None:
            return []  # the parts are being evaluated again
        if event.worker != state.merger:
            raise ProtocolError(
                f"worker {event.worker} was not asked to merge metrics of epoch {event.epoch}"
            )
        return [self._end(event.epoch, state, event.means, event.counts)]

    def _drop_after(self, epoch: int) -> list[Action]:
        """End the validations of epochs that training has returned to before."""
        reason = f"training went back to the end of epoch {epoch}"
        return [self._end_without_metrics(later, reason) for later in sorted(self._epochs) if later > epoch]

    def _on_gone(self, worker: int) -> None:
        self._last_epochs.pop(worker, None)
        for state in self._epochs.values():
            state.offers.pop(worker, None)
            state.release(worker)
            if state.owner == worker:
                state.owner = next((other for other in state.offers if other in state.holders), None)
                # Transfers to workers that do not hold the snapshot yet may be incomplete.
                for receiver in state.snapshot_senders.keys() - state.holders:
                    state.release(receiver)
                if state.owner is None:  # the evaluated snapshot is gone
                    state.results, state.merger, state.merging_since_s = {}, None, None
            if state.merger == worker:
                state.merger = state.merging_since_s = None
                if state.results[0].states:
                    del state.results[0]
                    state.unassigned.append(0)

    # Decisions -------------------------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Action]:
        if self._has_stopped:
            return []
        actions: list[Action] = []
        for epoch in sorted(self._epochs):
            state = self._epochs[epoch]
            actions += self._choose_snapshot(epoch, state)
            if state.is_evaluated and not state.results[0].states:
                actions.append(self._end(epoch, state, {}, {}))
            elif state.is_evaluated and state.merging_since_s is None:
                state.merging_since_s = now_s
                actions += self._send_states(epoch, state)
        for epoch in sorted(self._epochs):
            actions += self._check_deadlines(epoch, self._epochs[epoch], now_s)
            if self._has_stopped:
                return actions
            actions += self._assign_parts(epoch, self._epochs[epoch], now_s)
        return actions

    def _choose_snapshot(self, epoch: int, state: _EpochState) -> list[Action]:
        """Choose the snapshot to evaluate, if it is not chosen yet and can be."""
        if state.owner is not None:
            return []
        intact = [worker for worker in state.offers if worker not in state.snapshot_senders]
        current = [worker for worker in intact if state.offers[worker].is_current]
        if not current and any(reached < epoch for reached in self._last_epochs.values()):
            return []  # wait for the other workers
        owner = next(iter(current or intact), None)
        if owner is None:
            return [
                self._end_without_metrics(epoch, "no worker is left that has the snapshot that was evaluated")
            ]
        state.owner, state.digest = owner, state.offers[owner].digest
        if not state.parts:  # fixed from then on: a late result must mean the same samples
            evaluators = state.offers[owner].evaluators * len(self._last_epochs)
            parts = evaluators * PARTS_PER_EVALUATOR if evaluators > 1 else 1
            state.parts = len(split_even(state.samples, parts))
        state.unassigned = list(range(state.parts))[::-1]
        state.holders = {worker for worker in intact if state.offers[worker].digest == state.digest}
        return []

    def _send_states(self, epoch: int, state: _EpochState) -> Iterator[Action]:
        """Send the states of all parts to the worker that merges them."""
        assert state.merger is not None
        for part in range(state.parts):
            yield MergeStates(
                worker=state.merger,
                epoch=epoch,
                digest=state.digest,
                part=part,
                parts=state.parts,
                states=state.results[part].states,
                reason=f"all {state.parts} parts are evaluated, the first one by worker {state.merger}",
            )

    def _end(
        self, epoch: int, state: _EpochState, merged_means: dict[str, float], merged_counts: dict[str, float]
    ) -> ValidationFinished:
        """Finish the epoch with the means and counts over all parts and the merged metrics."""
        assert state.owner is not None
        results = [state.results[part] for part in range(state.parts)]
        sizes = list(map(len, split_even(state.samples, state.parts)))
        means = {name: _mean([found.means[name] for found in results], sizes) for name in results[0].means}
        counts = {name: math.fsum(found.counts[name] for found in results) for name in results[0].counts}
        finished = ValidationFinished(
            worker=None,
            epoch=epoch,
            snapshot_owner=state.owner,
            digest=state.digest,
            means=means | merged_means,
            counts=counts | merged_counts,
            reason=f"all {state.parts} parts are evaluated",
        )
        self._finished[epoch] = finished
        del self._epochs[epoch]
        return finished

    def _end_without_metrics(self, epoch: int, reason: str) -> ValidationFinished:
        finished = ValidationFinished(
            worker=None,
            epoch=epoch,
            snapshot_owner=None,
            digest="",
            means={},
            counts={},
            reason=reason,
        )
        self._finished[epoch] = finished
        del self._epochs[epoch]
        return finished

    def _catch_up(self, worker: int) -> list[Action]:
        """Send a new worker the validations that ended or began before it joined."""
        reason = "it began before the worker joined"
        finished = [
            ValidationFinished(**{**asdict(state), "worker": worker, "reason": reason})
            for state in self._finished.values()
        ]
        return [
            *finished,
            *(ValidationStarted(worker=worker, epoch=epoch, reason=reason) for epoch in self._epochs),
        ]

    def _check_deadlines(self, epoch: int, state: _EpochState, now_s: float) -> list[Action]:
        """Abort the job if a worker has had a part, or the merge, for longer than `timeout_s`.

        Of the workers that have one part, the one that has had it longest counts.
        """
        waits = [
            (*min(assignees.items(), key=lambda item: item[1]), f"evaluate part {part}", "evaluate is")
            for part, assignees in state.assigned.items()
        ]
        if state.merger is not None and state.merging_since_s is not None:
            waits.append((state.merger, state.merging_since_s, "merge the metrics", "they are"))
        for worker, since_s, task, activity in waits:
            if now_s - since_s > state.timeout_s:
                self._has_stopped = True
                return [
                    AbortJob(
                        worker=worker,
                        step=None,
                        reason=f"worker {worker} did not {task} of epoch {epoch} within "
                        f"{state.timeout_s:g} s: check what {activity} doing, or set a longer timeout_s",
                    )
                ]
        return []

    def _assign_parts(self, epoch: int, state: _EpochState, now_s: float) -> Iterator[Action]:
        if state.owner is None:
            return
        while free := [worker for worker in state.offers if self._is_free(worker, state)]:
            assigned = False
            for worker in free:
                part = self._next_part(worker, state, now_s)
                if part is None:
                    continue
                assigned = True
                is_backup = part in state.assigned
                state.assigned.setdefault(part, {})[worker] = now_s
                if worker not in state.holders and state.snapshot_senders.get(worker) != state.owner:
                    yield self._send_snapshot(worker, epoch, state)
                positions = split_even(state.samples, state.parts)[part]
                yield EvaluatePart(
                    worker=worker,
                    epoch=epoch,
                    digest=state.digest,
                    part=part,
                    start=positions.start,
                    stop=positions.stop,
                    reason="another worker is slow with it" if is_backup else "the worker has time for it",
                )
            if not assigned:
                return

    def _send_snapshot(self, worker: int, epoch: int, state: _EpochState) -> SendSnapshot:
        assert state.owner is not None
        state.snapshot_senders[worker] = state.owner
        self._transfers += 1
        return SendSnapshot(
            worker=state.owner,
            receiver=worker,
            epoch=epoch,
            digest=state.digest,
            transfer=self._transfers - 1,
            reason=f"worker {state.owner}'s snapshot is evaluated, and worker {worker} has a different one",
        )

    def _is_free(self, worker: int, state: _EpochState) -> bool:
        under_way = sum(
            worker in assignees for other in self._epochs.values() for assignees in other.assigned.values()
        )
        return under_way < state.offers[worker].evaluators

    def _next_part(self, worker: int, state: _EpochState, now_s: float) -> int | None:
        """Return a part for an idle worker: one that is not assigned, else one that is late elsewhere."""
        if state.unassigned:
            return state.unassigned.pop()
        if not state.spent_count:
            return None
        usual_s = state.spent_s / state.spent_count
        late = [
            (max(assignees.values()), part)
            for part, assignees in state.assigned.items()
            if worker not in assignees and now_s - max(assignees.values()) > BACKUP_FACTOR * usual_s
        ]
        return min(late)[1] if late else None


def _mean(values: list[float], sizes: list[int]) -> float:
    if len(values) == 1:
        return values[0]
    products = [value * size for value, size in zip(values, sizes, strict=True)]
    total = math.fsum(products) if all(map(math.isfinite, products)) else sum(products)
    return total / sum(sizes)


def _epoch_to_plain(state: _EpochState) -> dict[str, Any]:
    return {
        **vars(state),
        "offers": [[worker, asdict(offer)] for worker, offer in state.offers.items()],
        "holders": sorted(state.holders),
        "snapshot_senders": [list(pair) for pair in state.snapshot_senders.items()],
        "unassigned": list(state.unassigned),
        "assigned": [
            [part, [[worker, since_s] for worker, since_s in assignees.items()]]
            for part, assignees in state.assigned.items()
        ],
        "results": [[part, asdict(result)] for part, result in state.results.items()],
    }


def _epoch_from_plain(plain: dict[str, Any]) -> _EpochState:
    return _EpochState(
        **{
            **plain,
            "offers": {worker: _Offer(**offer) for worker, offer in plain["offers"]},
            "holders": set(plain["holders"]),
            "snapshot_senders": dict(plain["snapshot_senders"]),
            "unassigned": list(plain["unassigned"]),
            "assigned": {part: dict(assignees) for part, assignees in plain["assigned"]},
            "results": {part: _result_from_plain(result) for part, result in plain["results"]},
        }
    )


def _result_from_plain(plain: dict[str, Any]) -> _Result:
    states = tuple((name, state) for name, state in plain["states"])
    return _Result(means=plain["means"], counts=plain["counts"], states=states)
