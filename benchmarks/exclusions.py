"""Compares the exclusions in a run log with the injected slowness; pure, without I/O.

A worker's *episode* is a sequence of the group's steps in which a rule makes it slow. Steps are the group's,
because an excluded worker counts its own steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from offbeat.events import Action, Event, Finished, Group, Halt, Left, Ready
from offbeat.policies.stragglers.injection import InjectedSlowness


@dataclass(frozen=True, kw_only=True)
class GroupStep:
    """One step of the group.

    Attributes:
        epoch: of the step.
        used: samples of this epoch that the group used before the step.
        samples: used in the step.
        ready_s: when the last member had its gradients, by the coordinator's clock.
    """

    epoch: int
    used: int
    samples: int
    ready_s: float


@dataclass(frozen=True, kw_only=True)
class GroupChange:
    """A change of the group's members.

    Attributes:
        step: first step of the new group.
        decided: furthest step that any member had computed when the change was decided.
        named_s: when the group was announced, by the coordinator's clock.
        members: of the new group.
        finished: workers whose training had ended by then.
    """

    step: int
    decided: int
    named_s: float
    members: frozenset[int]
    finished: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An interval in which one worker is slow.

    Attributes:
        begins: first step of the group in which it is slow.
        ends: first step after it in which it is not.
        excluded_at: first step without the worker, None if it was not excluded.
        returned_at: first step after that with the worker, None if it did not return.
        detect_s: from the beginning until the group without it was announced.
        recover_s: from the end until the group with it was announced.
    """

    worker: int
    epoch: int
    begins: int
    ends: int
    excluded_at: int | None
    returned_at: int | None
    detect_s: float | None
    recover_s: float | None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Quality of the detection in one run.

    Attributes:
        episodes: in the order of their beginnings. Episodes that began while the worker was still excluded
            because of the previous one are omitted.
        false_alarms: exclusions of workers that were not slow.
        early_recoveries: returns of workers that were still slow.
    """

    episodes: list[Episode] = field(default_factory=list)
    false_alarms: int = 0
    early_recoveries: int = 0

    @property
    def missed(self) -> int:
        """Number of episodes without an exclusion."""
        return sum(episode.excluded_at is None for episode in self.episodes)

    @property
    def detect_steps(self) -> list[int]:
        """Steps of each excluded worker in which it was slow and still a member."""
        return [e.excluded_at - e.begins for e in self.episodes if e.excluded_at is not None]

    @property
    def recover_steps(self) -> list[int]:
        """Steps without each returned worker in which it was no longer slow."""
        return [e.returned_at - e.ends for e in self.episodes if e.returned_at is not None]


def read_changes(entries: Iterable[Event | Action]) -> list[GroupChange]:
    """Return the groups in their order, including the first."""
    changes: list[GroupChange] = []
    members_now: set[int] = set()
    finished: set[int] = set()
    furthest, decided, now_s = -1, -1, 0.0
    for entry in entries:
        now_s = getattr(entry, "now_s", now_s)
        if isinstance(entry, Ready) and entry.worker in members_now:
            furthest = max(furthest, entry.step)
        elif isinstance(entry, Finished | Left):
            finished.add(entry.worker)
        elif isinstance(entry, Halt):
            decided = furthest
        elif isinstance(entry, Group):
            members = frozenset(entry.members)
            if not changes or members != changes[-1].members:
                changes.append(
                    GroupChange(
                        step=entry.step,
                        decided=decided,
                        named_s=now_s,
                        members=members,
                        finished=frozenset(finished),
                    )
                )
            members_now = set(members)
    return changes


def read_steps(entries: Iterable[Event | Action], changes: Sequence[GroupChange]) -> list[GroupStep]:
    """Return the group's steps; index n is step n. Ready events of workers outside the group do not count."""
    samples: dict[int, dict[int, int]] = {}
    epochs: dict[int, int] = {}
    ready_s: dict[int, float] = {}
    for entry in entries:
        if isinstance(entry, Ready) and entry.worker in members_at(changes, entry.step):
            samples.setdefault(entry.step, {})[entry.worker] = entry.samples
            epochs[entry.step] = entry.epoch
            ready_s[entry.step] = entry.now_s
    steps: list[GroupStep] = []
    used = 0
    for number in sorted(samples):
        if steps and epochs[number] != steps[-1].epoch:
            used = 0
        taken = sum(samples[number].values())
        steps.append(GroupStep(epoch=epochs[number], used=used, samples=taken, ready_s=ready_s[number]))
        used += taken
    return steps


def members_at(changes: Sequence[GroupChange], step: int) -> frozenset[int]:
    """Return the members of the group at a step."""
    return next((change.members for change in reversed(changes) if change.step <= step), frozenset())


def slow_workers(
    slowness: InjectedSlowness, steps: Sequence[GroupStep], workers: int, samples_per_epoch: int
) -> list[frozenset[int]]:
    """Return the slow workers in each step of the group; parts of an epoch are parts of its samples."""
    return [
        frozenset(
            worker
            for worker in range(workers)
            if slowness.factor(worker, step.epoch, step.used, samples_per_epoch, number) > 1
        )
        for number, step in enumerate(steps)
    ]


def evaluate_detection(
    changes: Sequence[GroupChange], steps: Sequence[GroupStep], slow: Sequence[frozenset[int]]
) -> Findings:
    """Compare the groups with the slow workers.

    A decision is correct if the worker was slow (or, for its return, was not) in the furthest step computed
    by then or in the one before, because events at the coordinator are about finished steps.
    """
    found = Findings(episodes=[])
    runs = [
        (*run, worker) for worker in frozenset[int]().union(*slow) for run in _slow_intervals(slow, worker)
    ]
    for begins, ends, worker in sorted(runs):
        if worker in members_at(changes, begins):
            found.episodes.append(_episode(worker, begins, ends, changes, steps))
    false_alarms = early = 0
    for before, change in pairwise(changes):
        at = min(change.decided, len(slow) - 1)
        around = slow[max(0, at - 1) : at + 1]
        excluded = before.members - change.members - change.finished
        false_alarms += sum(not any(worker in now for now in around) for worker in excluded)
        if change.step < len(steps):  # afterwards all workers return for the final state
            joined = change.members - before.members
            early += sum(all(worker in now for now in around) for worker in joined)
    return Findings(episodes=found.episodes, false_alarms=false_alarms, early_recoveries=early)


def _slow_intervals(slow: Sequence[frozenset[int]], worker: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    begins: int | None = None
    for step, slow_now in enumerate([*slow, frozenset[int]()]):
        if worker in slow_now and begins is None:
            begins = step
        elif worker not in slow_now and begins is not None:
            runs.append((begins, step))
            begins = None
    return runs


def _episode(
    worker: int, begins: int, ends: int, changes: Sequence[GroupChange], steps: Sequence[GroupStep]
) -> Episode:
    exclusion = next(
        (c for c in changes if begins <= c.decided and c.step > begins and worker not in c.members), None
    )
    if exclusion is not None and exclusion.decided > ends:
        exclusion = None
    returned = None
    if exclusion is not None:
        returned = next((c for c in changes if c.step > exclusion.step and worker in c.members), None)
    if returned is not None and returned.step >= len(steps):
        returned = None
    began_s = steps[begins - 1].ready_s if begins else changes[0].named_s
    ended_s = steps[ends - 1].ready_s
    return Episode(
        worker=worker,
        epoch=steps[begins].epoch,
        begins=begins,
        ends=ends,
        excluded_at=None if exclusion is None else exclusion.step,
        returned_at=None if returned is None else returned.step,
        detect_s=None if exclusion is None else exclusion.named_s - began_s,
        recover_s=None if returned is None else returned.named_s - ended_s,
    )
