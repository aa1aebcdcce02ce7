"""The state of a job and of each of its workers at one moment: plain data, and the same as JSON.

`JobView` derives it from the entries of a run log. Nothing here reads a file or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from offbeat.wire.known import prime_msgspec_types

WorkerState: TypeAlias = Literal[
    "joined", "training", "waiting", "excluded", "preempted", "finished", "left", "lost", "failed", "rejected"
]
GONE: frozenset[WorkerState] = frozenset({"left", "lost", "failed", "rejected"})
"""The states of workers that are gone before the end of the job."""

ExclusionCause: TypeAlias = Literal["compute", "line", "silent", "late", "unreachable", "other"]
Coordination: TypeAlias = Literal["rounds", "clocks", "models"]


@dataclass(frozen=True, kw_only=True)
class JobWorker:
    """One worker of a job. What the log has not shown is None, "" or 0.

    *Of late* means: in its last 16 steps or rounds.

    Attributes:
        worker: its id.
        state: "joined" before its first step; "waiting" for other workers, or for samples; "preempted" from
            its signal on until it has left; "rejected" if the coordinator has put it out of the job.
        why: why it is excluded, waiting or gone.
        host: the name of its host.
        is_newcomer: it joined while the job ran.
        is_excluded: the others train without it; stays True when its loop ends meanwhile.
        state_step: the step of its last change to excluded, or of its end.
        step: optimizer steps finished; of an excluded worker, the one in which it last took part.
        epoch: counted from 0.
        compute_s: median time of forward and backward of a round of late, in seconds.
        compute_ratio: that time over the median of all workers' times, of an even number the lower one of the
            middle two: so of two workers, the faster one has 1.
        score: the fastest worker's time over its own, 0 to 1, as the relative score of NVIDIA Resiliency
            Extension's straggler detection.
        slow_since_step: the step from which on it is slow, see `JobView`; None if it is not.
        wait_share: the share of its wall time of late in which it waited for slower workers.
        compute_share: the share of it in which it computed.
        step_s: median wall time of a step of late, in seconds.
        samples_per_s: samples of late over their wall time.
        steps, samples: the sums over its timed steps, those outside the group included.
        parts_s: where their wall time went, in seconds, by part (see `StepTimes`); zeros are omitted.
        line_s: how long the last bytes of a message are on the way on the best of its connections: the
            median of late, in seconds.
        exclusions: how often it was excluded, by cause (`ExclusionCause`).
        skipped_rounds: rounds that were closed without it, for they had their quorum.
        is_skipped: one of late was.
    """

    worker: int
    state: WorkerState
    why: str = ""
    host: str = ""
    is_newcomer: bool = False
    is_excluded: bool = False
    state_step: int | None = None
    step: int = 0
    epoch: int = 0
    compute_s: float | None = None
    compute_ratio: float | None = None
    score: float | None = None
    slow_since_step: int | None = None
    wait_share: float | None = None
    compute_share: float | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    steps: int = 0
    samples: int = 0
    parts_s: dict[str, float]
    line_s: float | None = None
    exclusions: dict[str, int]
    skipped_rounds: int = 0
    is_skipped: bool = False


DiagnosisKind: TypeAlias = Literal["starting", "fine", "slow", "line", "lost", "excluded", "aborted"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong with a job, and what it costs; see `diagnose`.

    Attributes:
        kind: "fine" if nothing is wrong, "starting" if too few steps are known.
        workers: which workers it is about, ascending.
        saving: the share of a step's time that the others would save without them, 0 to 1.
        sentence: all of it in words.
    """

    kind: DiagnosisKind
    workers: tuple[int, ...] = ()
    saving: float = 0.0
    sentence: str


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The state of a job. What the log has not shown is None, "" or 0.

    Attributes:
        now_s: the time of the last event, by the coordinator's clock.
        strategy: as the workers named it.
        world: number of workers at the start.
        coordination: what workers wait for: the rounds of a group, in lockstep or not; clocks, on a parameter
            server; models of other workers.
        is_complete: all workers have finished.
        abort_reason: why the job was aborted, "" if it was not.
        step: optimizer steps finished by the foremost worker.
        epoch: its epoch, counted from 0.
        step_s: median over the training workers of the wall time of a step, in seconds.
        samples_per_s: the sum over the training workers.
        members: the workers that average with each other at present, ascending.
        exclusions: of workers from the group, by cause (see `JobWorker`).
        deaths: workers that were lost, failed or were rejected.
        newcomers: workers that joined while the job ran.
        workers: by id.
        diagnosis: what is wrong.
    """

    now_s: float
    strategy: str
    world: int
    coordination: Coordination
    is_complete: bool
    abort_reason: str
    step: int
    epoch: int
    step_s: float | None
    samples_per_s: float | None
    members: tuple[int, ...]
    exclusions: dict[str, int]
    deaths: int
    newcomers: int
    workers: tuple[JobWorker, ...]
    diagnosis: Diagnosis

    @property
    def is_over(self) -> bool:
        """Whether no worker trains any more."""
        return self.is_complete or bool(self.abort_reason)

    def to_json(self) -> bytes:
        """Return it as a JSON object with a key for each attribute, `workers` a list of objects."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> JobStatus:
        """Return the state from `to_json`; keys of a newer version are ignored.

        Raises:
            ValueError: it is no such JSON.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"expected the state of a job as JSON: {error}") from None


prime_msgspec_types(JobStatus)
