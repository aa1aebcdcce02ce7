"""Events and actions of validations that workers share."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.events.recipients import ToNamed, ToWorker, ToWorkerOrAll


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    """A worker's report on the validation of an epoch.

    Attributes:
        epoch: the epoch at whose end the model was in the state that is evaluated.
    """

    now_s: float
    worker: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken(ValidationEvent):
    """A worker has finished an epoch, holds a snapshot of its model, and offers to evaluate parts of the set.

    Attributes:
        digest: equal for snapshots that are equal bit for bit, and different for all others.
        is_current: the model is the one that the group trains or, with a parameter server, the leader's.
        samples: in the validation set; the same for all workers.
        evaluators: how many parts the worker evaluates at once, at least 1.
        part_deadline_s: the longest time that a part may take.
        decision_rule: what follows from the metrics, as text; the same for all workers.
    """

    digest: str
    is_current: bool
    samples: int
    evaluators: int
    part_deadline_s: float
    decision_rule: str


@dataclass(frozen=True, kw_only=True)
class PartEvaluated(ValidationEvent):
    """A worker has evaluated a part that was assigned to it.

    Attributes:
        digest: of the snapshot (see `SnapshotTaken`).
        part: its number.
        means: over the part's samples, by name.
        counts: by name, integers.
        states: of metrics that are merged: name and state, as text.
    """

    digest: str
    part: int
    means: dict[str, float]
    counts: dict[str, float]
    states: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StatesMerged(ValidationEvent):
    """A worker has merged the states of all parts (see `MergeStates`), and computed the results.

    Attributes:
        digest: of the snapshot.
        means: numbers over the set, by name.
        counts: integers, by name.
    """

    digest: str
    means: dict[str, float]
    counts: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class RolledBack(ValidationEvent):
    """A worker's training is back at the end of `epoch`; validations of later epochs are not needed."""


@dataclass(frozen=True, kw_only=True)
class ValidationStarted(ToWorkerOrAll):
    """The validation of an epoch has begun: some worker has a snapshot of the model at its end.

    Attributes:
        worker: the recipient, None for all.
    """

    worker: int | None
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SendSnapshot(ToNamed):
    """A worker sends its snapshot to another one, which evaluates parts with it; only these two receive it.

    Attributes:
        worker: the sender of the snapshot.
        receiver: its receiver, which replaces its own snapshot.
        epoch, digest: of the snapshot.
        transfer: of such transfers, from 0 up.
    """

    worker: int
    receiver: int
    epoch: int
    digest: str
    transfer: int
    reason: str

    @property
    def named_recipients(self) -> tuple[int, ...]:
        """See `Addressed.named_recipients`."""
        return self.worker, self.receiver


@dataclass(frozen=True, kw_only=True)
class EvaluatePart(ToWorker):
    """A part of the validation set for one worker, which alone receives it.

    Attributes:
        epoch, digest: of the snapshot to evaluate; the worker has it, or another worker is sending it.
        part: its number, from 0.
        start, stop: positions in the set.
    """

    worker: int
    epoch: int
    digest: str
    part: int
    start: int
    stop: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class MergeStates(ToWorker):
    """The metric states of one part, for the worker that evaluated the first part; only it receives them.

    All parts are sent, in the order of the set; with the last one the worker merges them and reports the
    results.

    Attributes:
        epoch, digest: of the snapshot.
        part, parts: the number of the part, from 0, and the number of parts.
        states: name and state, as text.
    """

    worker: int
    epoch: int
    digest: str
    part: int
    parts: int
    states: tuple[tuple[str, str], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class ValidationFinished(ToWorkerOrAll):
    """The validation of an epoch is over.

    Attributes:
        worker: the recipient, None for all.
        snapshot_owner: the worker whose snapshot was evaluated; None where there are no metrics.
        digest: of that snapshot, or "".
        means: over the set, by name.
        counts: by name, integers.
    """

    worker: int | None
    epoch: int
    snapshot_owner: int | None
    digest: str
    means: dict[str, float]
    counts: dict[str, float]
    reason: str
