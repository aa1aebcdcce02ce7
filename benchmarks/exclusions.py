"""What a run log says about who was left out when, beside who was slow when; nothing here reads a file.

A worker's *episode* is a run of the group's steps in which a rule makes it slow. The group's steps are
counted because a worker that is left out has a count of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from offbeat.events import Action, Event, Finished, Group, Halt, Left, Ready
from offbeat.policies.stragglers.injection import InjectedSlowness


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the group.

    Attributes:
        epoch: in which it was taken.
        used: samples of this epoch that the group had used before it.
        samples: that it used.
        ready_s: when the last member had its gradients, by the coordinator's clock.
    """

    epoch: int
    used: int
    samples: int
    ready_s: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the group.

    Attributes:
        step: the first one of the new group.
        decided: the furthest step that any member had computed when it was decided.
        named_s: when the group was named, by the coordinator's clock.
        members: from then on.
        finished: whose loop was over then.
    """

    step: int
    decided: int
    named_s: float
    members: frozenset[int]
    finished: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One worker is slow for a while.

    Attributes:
        begins: the first step of the group in which it is slow.
        ends: the first one after it in which it is not.
        left_out: the first step without it, None where it is missed.
        back: the first step after that with it, None where it did not come back.
        detect_s: from the beginning until the group without it was named.
        recover_s: from the end until the group with it was named.
    """

    worker: int
    epoch: int
    begins: int
    ends: int
    left_out: int | None
    back: int | None
    detect_s: float | None
    recover_s: float | None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """How well a run found who was slow.

    Attributes:
        episodes: in the order of their beginnings. Not in it: one that began while the worker was still out
            from the one before, which is nobody's merit.
        false_alarms: exclusions of workers that were not slow.
        early_recoveries: returns of workers that were still slow.
    """

    episodes: list[Episode] = field(default_factory=list)
    false_alarms: int = 0
    early_recoveries: int = 0

    @property
    def missed(self) -> int:
        """Episodes in which the worker was not left out."""
        return sum(episode.left_out is None for episode in self.episodes)

    @property
    def detect_steps(self) -> list[int]:
        """In how many steps each worker that was found had still taken part, slow."""
        return [e.left_out - e.begins for e in self.episodes if e.left_out is not None]

    @property
    def recover_steps(self) -> list[int]:
        """How many steps went without each worker that came back, although it was not slow any more."""
        return [e.back - e.ends for e in self.episodes if e.back is not None]


def read_changes(entries: Iterable[Event | Action]) -> list[Change]:
    """Return the groups in their order, the first one included."""
    changes: list[Change] = []
    known: set[int] = set()
    finished: set[int] = set()
    furthest, decided, now_s = -1, -1, 0.0
    for entry in entries:
        now_s = getattr(entry, "now_s", now_s)
        if isinstance(entry, Ready) and entry.worker in known:
            furthest = max(furthest, entry.step)
        elif isinstance(entry, Finished | Left):
            finished.add(entry.worker)
        elif isinstance(entry, Halt):
            decided = furthest
        elif isinstance(entry, Group):
            members = frozenset(entry.members)
            if not changes or members != changes[-1].members:
                changes.append(
                    Change(
                        step=entry.step,
                        decided=decided,
                        named_s=now_s,
                        members=members,
                        finished=frozenset(finished),
                    )
                )
            known = set(members)
    return changes


def read_steps(entries: Iterable[Event | Action], changes: Sequence[Change]) -> list[Step]:
    """Return the group's steps; place n is step n. What workers outside the group computed does not count."""
    samples: dict[int, dict[int, int]] = {}
    epochs: dict[int, int] = {}
    ready_s: dict[int, float] = {}
    for entry in entries:
        if isinstance(entry, Ready) and entry.worker in members_at(changes, entry.step):
            samples.setdefault(entry.step, {})[entry.worker] = entry.samples
            epochs[entry.step] = entry.epoch
            ready_s[entry.step] = entry.now_s
    steps: list[Step] = []
    used = 0
    for number in sorted(samples):
        if steps and epochs[number] != steps[-1].epoch:
            used = 0
        taken = sum(samples[number].values())
        steps.append(Step(epoch=epochs[number], used=used, samples=taken, ready_s=ready_s[number]))
        used += taken
    return steps


def members_at(changes: Sequence[Change], step: int) -> frozenset[int]:
    """Return who is in the group of a step."""
    return next((change.members for change in reversed(changes) if change.step <= step), frozenset())


def slow_in(
    slowness: InjectedSlowness, steps: Sequence[Step], workers: int, samples_per_epoch: int
) -> list[frozenset[int]]:
    """Return who is slow in each step of the group; parts of an epoch are parts of its samples."""
    return [
        frozenset(
            worker
            for worker in range(workers)
            if slowness.factor(worker, step.epoch, step.used, samples_per_epoch, number) > 1
        )
        for number, step in enumerate(steps)
    ]


def judge(changes: Sequence[Change], steps: Sequence[Step], slow: Sequence[frozenset[int]]) -> Findings:
    """Hold the groups against who was slow.

    A decision is right where the worker was slow (or, for its return, was not) in the furthest step that had
    been computed then or in the one before, for what the coordinator hears is about a step that is over.
    """
    found = Findings(episodes=[])
    runs = [(*run, worker) for worker in frozenset[int]().union(*slow) for run in _runs(slow, worker)]
    for begins, ends, worker in sorted(runs):
        if worker in members_at(changes, begins):
            found.episodes.append(_episode(worker, begins, ends, changes, steps))
    false_alarms = early = 0
    for before, change in pairwise(changes):
        at = min(change.decided, len(slow) - 1)
        around = slow[max(0, at - 1) : at + 1]
        gone = before.members - change.members - change.finished
        false_alarms += sum(not any(worker in now for now in around) for worker in gone)
        if change.step < len(steps):  # later, everybody comes back for the final state
            come = change.members - before.members
            early += sum(all(worker in now for now in around) for worker in come)
    return Findings(episodes=found.episodes, false_alarms=false_alarms, early_recoveries=early)


def _runs(slow: Sequence[frozenset[int]], worker: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    begins: int | None = None
    for step, who in enumerate([*slow, frozenset[int]()]):
        if worker in who and begins is None:
            begins = step
        elif worker not in who and begins is not None:
            runs.append((begins, step))
            begins = None
    return runs


def _episode(
    worker: int, begins: int, ends: int, changes: Sequence[Change], steps: Sequence[Step]
) -> Episode:
    out = next(
        (c for c in changes if begins <= c.decided and c.step > begins and worker not in c.members), None
    )
    if out is not None and out.decided > ends:
        out = None
    back = None
    if out is not None:
        back = next((c for c in changes if c.step > out.step and worker in c.members), None)
    if back is not None and back.step >= len(steps):
        back = None
    began_s = steps[begins - 1].ready_s if begins else changes[0].named_s
    ended_s = steps[ends - 1].ready_s
    return Episode(
        worker=worker,
        epoch=steps[begins].epoch,
        begins=begins,
        ends=ends,
        left_out=None if out is None else out.step,
        back=None if back is None else back.step,
        detect_s=None if out is None else out.named_s - began_s,
        recover_s=None if back is None else back.named_s - ended_s,
    )
