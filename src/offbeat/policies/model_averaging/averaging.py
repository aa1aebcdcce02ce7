"""Workers average their models in groups.

Theory of operation
-------------------

Each worker trains its own model. It reports every optimizer step (`Ready`). After some of them, usually each,
it is *ready* for an averaging: `AverageModels.steps` says after how many. An `AverageModels` names a group of
workers that are ready, and its weights. When the worker has the mean, or has given up, it reports
`ModelsAveraged`. Without `overlap` it waits in between. With it, it trains on: its Ready publishes a
*snapshot* of its model, of which the mean is made, and at the end of a later step it adds the mean less its
snapshot to its model, and then reports. The policy owns parts and decides only what passes between them:
`Roster` (the workers of the job), a `GroupMaker` (who is ready, and the groups), `SoloBlockAssigner` (the
samples, with shards="dynamic"), `Reachability` (outages between workers), `StragglerWatch`.

A worker is in at most one averaging, from its AverageModels to its ModelsAveraged. Exchange ids ascend, so
that each member's do. With overlap this is what keeps models from diverging: a worker that is averaged again
before it has added the last difference would be drawn to the mean twice by the same snapshot.

*Stragglers.* `StragglerWatch` judges workers by their steps and by how long averagings with them take. No
group waits for a straggler, and one with a slow line makes more steps between two averagings.

A worker that waits for samples rests: no group waits for it, since it may wait for blocks that a worker of
the group has begun.

*State.* Worker 0 of the start has the initial state. Workers without the state are members of an averaging
whose other members send it to them (`AverageModels.joining`): all of them in the first averaging, a newcomer
in the next one.

*Global means.* With `global_every` "epoch", a worker that has used up an epoch waits until all have, and all
average, buffers included: so validation and checkpoints see one model. With a number, a group holds all
workers each time that they have made as many steps on average, which is Gossip-PGA (Chen et al. 2021,
"Accelerating gossip SGD with periodic global averaging").

*The end.* When the loops of all workers have ended, all average once more, buffers included, so that all have
the same model, unless they have it already; then the job is complete. A lost member repeats that averaging.

*Failures.* A member that is lost, or that another member or the coordinator cannot reach, ends its averaging:
`CancelAveraging`. A member that has the mean by then keeps it; another keeps its own model: both are valid.
Workers that cannot reach each other are in no group together. A worker that keeps others waiting for longer
than the deadline, though the coordinator receives messages from it, is rejected: others that are ready, or
that have finished, or used up the epoch.

Nothing here moves a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from offbeat.errors import ProtocolError
from offbeat.events import (
    AbortJob,
    Action,
    AverageModels,
    CancelAveraging,
    CheckpointQuery,
    EpochEnded,
    Event,
    Failed,
    Finished,
    JobComplete,
    Joined,
    Left,
    Lost,
    ModelsAveraged,
    OuterStateLoaded,
    OuterStep,
    PeerReachable,
    PeerUnreachable,
    Ready,
    RejectPeer,
    SamplesRequested,
    Tick,
)
from offbeat.policies.data.worker_assigner import SoloBlockAssigner
from offbeat.policies.membership.reachability import Reachability
from offbeat.policies.membership.roster import Roster
from offbeat.policies.model_averaging.epoch_means import EpochMeans
from offbeat.policies.model_averaging.group_maker import GroupMaker, choose_meeting
from offbeat.policies.model_averaging.protocol import EXCHANGE_IDS
from offbeat.policies.model_averaging.straggler_watch import StragglerWatch
from offbeat.policies.model_averaging.weights import equal_weights

GlobalEvery: TypeAlias = Literal["epoch"] | int | None

# For the assigner, which counts steps by clocks: here a state that is saved holds all steps reported before.
_REPORTED: Final = -1
_LATEST: Final = 2**62


@dataclass(kw_only=True)
class _Averaging:
    """An averaging under way.

    Attributes:
        pending: members that have not reported its end.
        steps: one per member, see `AverageModels`.
        judged_from_s: when it began, where its duration is that of a group's exchange; until it is judged.
        is_common: it leaves its members with the same model, buffers included: after an epoch, or at the end.
        is_cancelled: its members have been asked to give up.
    """

    members: tuple[int, ...]
    joining: tuple[int, ...]
    pending: set[int]
    steps: tuple[int, ...]
    is_common: bool
    judged_from_s: float | None = None
    is_cancelled: bool = False


class ModelAveraging:
    """Lets groups of workers average their models, again and again.

    Size: most of it decides for one event each; what has a state of its own is in parts that it owns.

    Args:
        world: number of workers at the start; their ids are 0 to `world` - 1.
        groups: forms the groups.
        shards: "dynamic" assigns samples as they are needed; with "equal" none are assigned.
        overlap: workers train on while their models are averaged.
        global_every: when all workers average: "epoch", a number of steps, or None for only at the end.
        detector: "on" judges workers by `StragglerWatch`; "off" treats all alike.
        timeout_s: how long other workers wait for a worker that trains, in seconds.
        keeps_own_share: see `AverageModels`; not where all models are to be equal afterwards, and not where a
            member sends its model to new workers.
        has_delay: with `overlap`, workers wait for an averaging after a fixed number of steps.
        keeps_copies: workers keep copies of each other's models, see `AverageModels.continues`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        world: int,
        groups: GroupMaker,
        *,
        shards: Literal["dynamic", "equal"],
        overlap: bool,
        global_every: GlobalEvery,
        detector: Literal["on", "off"],
        timeout_s: float,
        keeps_own_share: bool = False,
        has_delay: bool = False,
        keeps_copies: bool = False,
    ) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
        if shards not in ("dynamic", "equal"):
            raise ValueError(f"expected shards dynamic or equal, got {shards!r}")
        if global_every != "epoch" and not (
            global_every is None or (isinstance(global_every, int) and global_every >= 1)
        ):
            raise ValueError(
                f"expected global_every to be epoch, at least 1 step, or None, got {global_every!r}"
            )
        if detector not in ("on", "off"):
            raise ValueError(f"expected the detector on or off, got {detector!r}")
        check_seconds("timeout_s", timeout_s)
        self._global_every = global_every
        self._groups, self._overlap, self._timeout_s = groups, overlap, timeout_s
        self._keeps_own_share, self._has_delay = keeps_own_share, has_delay
        self._keeps_copies = keeps_copies
        self._roster = Roster(world)
        self._assigner = SoloBlockAssigner() if shards == "dynamic" else None
        self._reachability = Reachability()
        self._watch = StragglerWatch(is_on=detector == "on")
        self._averagings: dict[int, _Averaging] = {}  # under way, by their first exchange id
        self._exchange_of: dict[int, int] = {}  # by member, the averaging that it is in
        self._next_exchange = 0
        # With copies, by worker, the id and the group of its last averaging, if that was one of snapshots:
        self._last_rounds: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._steps_left: dict[int, int] = {}  # by worker, steps until it is ready; 1 where none is noted
        self._began_s: dict[int, float] = {}  # by worker, when its step under way began
        self._active_s: dict[int, float] = {}  # by worker, when it last began to train, or ended a step
        self._finished_s: dict[int, float] = {}  # by worker, when its loop had ended
        self._epoch_means = EpochMeans()
        self._steps_since_mean = 0  # of all workers, since all have averaged
        self._last_common: int | None = None  # the last averaging after which all have the same model
        self._equal: set[int] = set()  # its members that have, and have made no step since
        self._without_state_since_s: float | None = None
        self._is_over = False
        self._expected: frozenset[int] = frozenset()  # see `_update_expected`; derived from the rest
        self._expected_parts: tuple[Set[int], ...] = ()

    def handle(self, event: Event) -> list[Action]:
        """Return AverageModels, CancelAveragings, AssignBlocks, a JobComplete, an AbortJob, or nothing.

        Raises:
            ProtocolError: the event cannot come from a worker of a running job.
        """
        if self._is_over:
            if isinstance(event, Joined):
                reason = f"worker {event.worker} joined too late: the job is over"
                return [RejectPeer(peer=event.peer, reason=reason)]
            return []
        actions: list[Action] = []
        match event:
            case Joined():
                self._handle_joined(event)
            case Ready():
                self._handle_ready(event)
            case ModelsAveraged():
                self._handle_averaged(event)
            case EpochEnded():
                self._handle_epoch_ended(event)
            case OuterStateLoaded():
                self._roster.require(event, event.worker)
                self._groups.continue_after(event.rounds)
            case SamplesRequested() | CheckpointQuery():
                self._handle_query(event)
            case Finished():
                self._handle_finished(event)
            case Left() | Lost() | Failed():
                actions = self._remove(event.worker)
            case PeerUnreachable() | PeerReachable():
                actions = self._handle_report(event)
            case Tick():
                actions = self._reject_late(event.now_s)
            case _:
                return []
        actions += self._proceed(event.now_s)
        if not self._roster.without_state:
            self._without_state_since_s = None
        elif self._without_state_since_s is None:
            self._without_state_since_s = event.now_s
        return actions

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "roster": self._roster.state_dict(),
            "groups": self._groups.state_dict(),
            "assigner": None if self._assigner is None else self._assigner.state_dict(),
            "reachability": self._reachability.state_dict(),
            "watch": self._watch.state_dict(),
            "averagings": [
                [exchange_id, {**asdict(one), "pending": sorted(one.pending)}]
                for exchange_id, one in self._averagings.items()
            ],
            "exchange_of": [list(entry) for entry in self._exchange_of.items()],
            "next_exchange": self._next_exchange,
            "last_rounds": [
                [worker, number, list(group)] for worker, (number, group) in self._last_rounds.items()
            ],
            "steps_left": [list(entry) for entry in self._steps_left.items()],
            "began_s": [list(entry) for entry in self._began_s.items()],
            "active_s": [list(entry) for entry in self._active_s.items()],
            "finished_s": [list(entry) for entry in self._finished_s.items()],
            "epoch_means": self._epoch_means.state_dict(),
            "steps_since_mean": self._steps_since_mean,
            "last_common": self._last_common,
            "without_state_since_s": self._without_state_since_s,
            "equal": sorted(self._equal),
            "is_over": self._is_over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a policy with the same arguments."""
        self._roster.load_state_dict(state["roster"])
        self._groups.load_state_dict(state["groups"])
        if self._assigner is not None:
            self._assigner.load_state_dict(state["assigner"])
        self._reachability.load_state_dict(state["reachability"])
        self._watch.load_state_dict(state["watch"])
        self._averagings = {
            exchange_id: _Averaging(
                **entry
                | {
                    "members": tuple(entry["members"]),
                    "joining": tuple(entry["joining"]),
                    "pending": set(entry["pending"]),
                    "steps": tuple(entry["steps"]),
                }
            )
            for exchange_id, entry in state["averagings"]
        }
        self._exchange_of = dict(state["exchange_of"])
        self._next_exchange = state["next_exchange"]
        self._last_rounds = {worker: (number, tuple(group)) for worker, number, group in state["last_rounds"]}
        self._steps_left, self._began_s = dict(state["steps_left"]), dict(state["began_s"])
        self._active_s, self._finished_s = dict(state["active_s"]), dict(state["finished_s"])
        self._epoch_means.load_state_dict(state["epoch_means"])
        self._steps_since_mean = state["steps_since_mean"]
        self._last_common, self._equal = state["last_common"], set(state["equal"])
        self._without_state_since_s, self._is_over = state["without_state_since_s"], state["is_over"]

    # Events ----------------------------------------------------------------------------------------------

    def _handle_joined(self, event: Joined) -> None:
        if not self._roster.add(event):
            return
        self._groups.on_joined(event.worker, event.host)
        self._watch.add(event.worker)
        if self._assigner is not None:
            self._assigner.on_joined(event.worker)

    def _handle_ready(self, event: Ready) -> None:
        self._roster.require(event, event.worker)
        is_busy = event.worker in self._exchange_of or event.worker in self._groups.ready
        if is_busy and not self._overlap:
            raise ProtocolError(f"expected no Ready of worker {event.worker}, which waits for an averaging")
        if event.blocks and self._assigner is None:
            raise ProtocolError(f"expected no blocks, because none are assigned, got {list(event.blocks)}")
        if self._assigner is not None:
            self._assigner.on_step(event.worker, _REPORTED, event.blocks)
            self._assigner.on_version(_LATEST)
        if (began_s := self._began_s.get(event.worker)) is not None:
            step_s = max(0.0, event.now_s - began_s)
            self._groups.observe_step(event.worker, event.now_s, samples=event.samples, step_s=step_s)
            self._watch.observe_step(event, step_s)
        self._began_s[event.worker] = self._active_s[event.worker] = event.now_s
        self._epoch_means.observe_step(event.worker, event.epoch)
        self._equal.discard(event.worker)
        self._steps_since_mean += 1
        if not is_busy:
            self._count_step(event)

    def _count_step(self, event: Ready) -> None:
        """Count a step of a worker in no averaging, after which it may be ready."""
        left = self._steps_left.pop(event.worker, 1) - 1
        if left:
            self._steps_left[event.worker] = left
        else:
            self._groups.add(event.worker, event.now_s)

    def _handle_averaged(self, event: ModelsAveraged) -> None:
        averaging = self._averagings.get(event.exchange_id)
        if averaging is None or event.worker not in averaging.pending:
            raise ProtocolError(
                f"expected the end of an averaging that worker {event.worker} is in, got {event.exchange_id}"
            )
        del self._exchange_of[event.worker]
        averaging.pending.discard(event.worker)
        self._groups.end_averaging(event.worker, has_mean=event.has_mean)
        self._last_rounds.pop(event.worker, None)
        if self._keeps_copies and event.has_mean and not averaging.is_common:
            group = tuple(member for member in averaging.members if member not in averaging.joining)
            self._last_rounds[event.worker] = (event.exchange_id, group)
        waits = not self._overlap or self._has_delay
        if waits or averaging.is_common or event.worker not in self._began_s:
            self._began_s[event.worker] = event.now_s
        self._active_s[event.worker] = event.now_s
        if event.has_mean:
            if averaging.judged_from_s is not None:
                self._watch.observe_averaging(averaging.members, event.now_s - averaging.judged_from_s)
                averaging.judged_from_s = None
            if event.exchange_id == self._last_common:
                self._equal.add(event.worker)
            elif len(averaging.members) > 1:
                self._equal.discard(event.worker)
            self._steps_left[event.worker] = averaging.steps[averaging.members.index(event.worker)]
            self._roster.on_state_received(event.worker)
        else:
            self._forget_common(event.exchange_id)
            self._steps_left.pop(event.worker, None)
            if averaging.is_common and event.worker in self._roster.training:
                self._epoch_means.wait_again(event.worker, event.now_s)
        if not averaging.pending:
            del self._averagings[event.exchange_id]

    def _forget_common(self, exchange_id: int) -> None:
        """Note that a member of an averaging has not received the mean."""
        if exchange_id == self._last_common:
            self._last_common = None
            self._equal.clear()

    def _handle_epoch_ended(self, event: EpochEnded) -> None:
        self._roster.require(event, event.worker)
        if event.is_complete:
            self._groups.take(self._groups.ready & {event.worker})
        self._epoch_means.end_epoch(event.worker, event.epoch, event.now_s, is_complete=event.is_complete)

    def _handle_query(self, event: SamplesRequested | CheckpointQuery) -> None:
        self._roster.require(event, event.worker)
        if self._assigner is None:
            raise ProtocolError(
                f"expected nothing about samples, because none are assigned, got {type(event).__name__}"
            )
        if isinstance(event, SamplesRequested):
            self._assigner.on_samples_requested(event)
        else:
            self._assigner.on_checkpoint_query(event)

    def _handle_finished(self, event: Finished) -> None:
        self._roster.require(event, event.worker)
        self._roster.finish(event.worker)
        self._groups.discard(event.worker)
        self._watch.remove(event.worker)
        self._epoch_means.forget(event.worker)
        self._finished_s[event.worker] = event.now_s
        if self._assigner is not None:
            self._assigner.on_finished(event.worker)

    def _remove(self, worker: int) -> list[Action]:
        """Remove a worker that is gone, and end the averaging that it is in."""
        if not self._roster.remove(worker):
            return []
        self._groups.discard(worker)
        by_workers: tuple[dict[int, Any], ...]
        by_workers = (self._steps_left, self._began_s, self._active_s, self._finished_s, self._last_rounds)
        for by_worker in by_workers:
            by_worker.pop(worker, None)
        self._watch.remove(worker)
        self._reachability.forget(worker)
        self._epoch_means.forget(worker)
        self._equal.discard(worker)
        if self._assigner is not None:
            self._assigner.on_gone(worker)
        own_id = self._exchange_of.pop(worker, None)
        if own_id is not None:
            self._averagings[own_id].pending.discard(worker)
            self._forget_common(own_id)
            if not self._averagings[own_id].pending:
                del self._averagings[own_id]
        # Also one of models that it has ended: what it had still to pass on to others is lost.
        return [
            action
            for exchange_id, averaging in self._averagings.items()
            if exchange_id == own_id or (worker in averaging.members and not averaging.joining)
            for action in self._cancel(exchange_id, f"worker {worker} is gone")
        ]

    def _handle_report(self, event: PeerUnreachable | PeerReachable) -> list[Action]:
        if event.peer not in self._roster or (event.worker is not None and event.worker not in self._roster):
            return []  # the report crossed the end of one of the two
        self._reachability.on_report(event)
        if isinstance(event, PeerReachable):
            return []
        exchange_id = self._exchange_of.get(event.peer)
        if exchange_id is None or (
            event.worker is not None and self._exchange_of.get(event.worker) != exchange_id
        ):
            return []
        observer = "the coordinator" if event.worker is None else f"worker {event.worker}"
        return self._cancel(exchange_id, f"{observer} cannot reach worker {event.peer}: {event.cause}")

    def _reject_late(self, now_s: float) -> list[Action]:
        """Reject the workers that others have waited for for longer than the deadline."""
        if late := self._late_workers(now_s):
            reason = f"others have waited for it for more than {self._timeout_s:g} s"
            return self._reject(dict.fromkeys(late, reason))
        outage = self._reachability.oldest_outage()
        if outage is None or now_s - outage[0] <= self._timeout_s or self._roster.training:
            return []
        return self._reject(self._reachability.exclusions(self._roster.present, ()))  # they delay the end

    def _late_workers(self, now_s: float) -> list[int]:
        """Return the workers that have ended no step for longer than the deadline, while others waited.

        Others wait where they are ready for a group, have used up the epoch or finished, or lack the state.
        """
        began_s = (
            self._groups.waiting_since_s,
            self._epoch_means.waiting_since_s,
            min(self._finished_s.values(), default=None),
            self._without_state_since_s,
        )
        since_s = [one for one in began_s if one is not None]
        if not since_s:
            return []
        waiting = self._resting | self._reachability.silent_workers | self._epoch_means.waiting.keys()
        for averaging in self._averagings.values():
            if averaging.is_common:
                waiting = waiting | averaging.pending
        if not self._overlap:
            waiting = waiting | self._groups.ready | self._exchange_of.keys()
        elif self._has_delay:
            waiting = waiting | self._groups.ready
        return [
            worker
            for worker in sorted(self._roster.training - waiting)
            if now_s - max(self._active_s.get(worker, 0.0), min(since_s)) > self._timeout_s
        ]

    def _reject(self, reasons: Mapping[int, str]) -> list[Action]:
        actions: list[Action] = []
        for worker, reason in reasons.items():
            peer = self._roster.peer_of(worker)
            actions.append(RejectPeer(peer=peer, reason=f"worker {worker} is out: {reason}"))
            actions += self._remove(worker)
        return actions

    @property
    def _resting(self) -> Set[int]:
        """Workers that wait for samples."""
        return frozenset() if self._assigner is None else self._assigner.waiting_workers

    @property
    def _receiving(self) -> Set[int]:
        """Workers that receive the state now, and train then."""
        return self._roster.without_state & self._exchange_of.keys()

    # Decisions -------------------------------------------------------------------------------------------

    def _proceed(self, now_s: float) -> list[Action]:
        """Assign samples, form groups, and end the job when it is over."""
        actions: list[Action] = [] if self._assigner is None else self._assigner.pop_actions()
        if not self._roster.has_started or not self._roster.present:
            return actions
        if self._roster.leader is None:
            if self._exchange_of:
                return actions  # a member may have received the state already
            self._is_over = True
            reason = "no worker that has the initial state is left: start the job again"
            return [*actions, AbortJob(worker=None, step=None, reason=reason)]
        actions += self._name_state_sender()
        actions += self._begin_epoch_means()
        actions += self._form_groups(now_s)
        actions += self._complete()
        return actions

    def _name_state_sender(self) -> list[Action]:
        """Name a worker that waits anyway as the one that sends the state; else the next group sends it."""
        if self._next_exchange == 0:  # the start
            senders = frozenset({0})
        elif self._roster.without_state and not self._roster.training:
            senders = self._roster.finished - self._exchange_of.keys()
        else:
            return []
        for worker in sorted(senders):
            joining = self._joining((worker,))
            if self._can_meet((), worker) and (joining or self._next_exchange == 0):
                return [self._begin_averaging((worker,), joining, f"worker {worker} has the state")]
        return []

    def _begin_epoch_means(self) -> list[Action]:
        """Average the models of all workers that have used up the epoch, once all have."""
        if not self._epoch_means.waiting:
            return []
        if any(averaging.is_common for averaging in self._averagings.values()):
            return []  # its members wait again if it fails
        silent = self._reachability.silent_workers
        due = self._epoch_means.due(self._roster.training | self._receiving, silent)
        if not self._exchange_of.keys().isdisjoint(due):
            return []
        actions: list[Action] = []
        while due:
            group = choose_meeting(due, self._can_meet)
            due = [worker for worker in due if worker not in group]
            for worker in group:
                self._epoch_means.release(worker)
            reason = f"workers {', '.join(map(str, group))} have used up the epoch"
            actions.append(self._begin_averaging(group, self._joining(group), reason, is_common=True))
        return actions

    def _form_groups(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        expected = self._update_expected()
        self._groups.set_stragglers(self._watch.stragglers)
        if self._is_global_mean_due(expected):
            if not expected <= self._groups.ready:
                return []
            self._steps_since_mean = 0
            everyone = self._groups.take(expected)
            reason = f"all models were averaged {self._global_every} steps ago"
            return [self._begin_averaging(everyone, self._joining(everyone), reason)]
        while group := self._next_group(expected, now_s):
            if self._has_delay:
                self._active_s |= dict.fromkeys(group, now_s)  # until now others may have kept it waiting
            reason = f"workers {', '.join(map(str, group))} are ready{self._watch.pop_reasons(group)}"
            joining = self._joining(group)
            action = self._begin_averaging(
                group,
                joining,
                reason,
                weights=self._groups.weights(group),
                outer_step=self._groups.outer_step(group),
            )
            if len(group) > 1 and not joining:
                self._averagings[action.exchange_id].judged_from_s = now_s
            actions.append(action)
        return actions

    def _update_expected(self) -> frozenset[int]:
        """Return the workers that are ready or will be: the same object until they change."""
        resting, silent = self._resting, self._reachability.silent_workers
        means = self._epoch_means
        if not (resting or silent or means.waiting or means.absent or self._roster.without_state):
            return self._roster.training
        waiting = means.waiting.keys() | means.absent
        receiving = self._receiving
        ready = self._groups.ready  # with overlap, a worker may be ready and rest
        away = {worker for worker in resting if worker not in ready} | silent | waiting
        parts = (self._roster.training, receiving, away)
        if parts != self._expected_parts:
            self._expected_parts = parts
            self._expected = (self._roster.training | receiving) - away
        return self._expected

    def _next_group(self, expected: frozenset[int], now_s: float) -> tuple[int, ...] | None:
        can_meet = self._can_meet if self._reachability else _can_always_meet
        group = self._groups.pop_group(expected, now_s, can_meet)
        if group is None and expected and expected <= self._groups.ready:
            return self._groups.pop_first(can_meet)  # no other worker comes: some cannot meet
        return group

    def _is_global_mean_due(self, training: frozenset[int]) -> bool:
        """Whether the next group is of all workers; it is put off where some cannot meet."""
        if not isinstance(self._global_every, int) or not training:
            return False
        if self._steps_since_mean < self._global_every * len(training):
            return False
        return not self._reachability.outside_exclusions(training, training)

    def _complete(self) -> list[Action]:
        """Average all models once all loops have ended; then complete the job."""
        if self._roster.training or self._exchange_of or self._roster.without_state:
            return []
        present = self._roster.present
        if present <= self._equal or len(present) == 1:
            self._is_over = True
            return [JobComplete(reason="all workers have finished")]
        reachable = sorted(present - self._reachability.exclusions(present, ()).keys())
        if len(reachable) < len(present):
            return []  # until the others are reachable again, or lost
        return [self._begin_averaging(reachable, (), "all workers have finished", is_common=True)]

    def _joining(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Workers without the state that can receive it from this group now."""
        if not self._roster.without_state:
            return ()
        waiting = self._roster.without_state - self._exchange_of.keys()
        excluded = self._reachability.outside_exclusions(group, waiting)
        return tuple(sorted(waiting - excluded.keys()))

    def _can_meet(self, group: tuple[int, ...], worker: int) -> bool:
        return not self._reachability.outside_exclusions(group, [worker])

    def _begin_averaging(
        self,
        group: list[int] | tuple[int, ...],
        joining: tuple[int, ...],
        reason: str,
        *,
        weights: tuple[float, ...] | None = None,
        outer_step: OuterStep | None = None,
        is_common: bool = False,
    ) -> AverageModels:
        """Begin an averaging; all have the same weight, and keep nothing of their own, without `weights`."""
        weight_of = dict(zip(group, weights or equal_weights(len(group)), strict=True))
        for worker in joining if self._next_exchange else ():
            self._groups.add_newcomer(worker)
        exchange_id, self._next_exchange = self._next_exchange, self._next_exchange + EXCHANGE_IDS
        members = tuple(sorted((*group, *joining)))
        steps = tuple(max(self._groups.steps(member), self._watch.least_steps(member)) for member in members)
        self._averagings[exchange_id] = _Averaging(
            members=members, joining=joining, pending=set(members), steps=steps, is_common=is_common
        )
        self._exchange_of |= dict.fromkeys(members, exchange_id)
        if is_common:
            self._groups.begin_mean_of_all(group)
            self._last_common, self._equal = exchange_id, set()
        leader = self._roster.leader
        assert leader is not None
        return AverageModels(
            exchange_id=exchange_id,
            members=members,
            joining=joining,
            weights=tuple(weight_of.get(member, 0.0) for member in members),
            steps=steps,
            includes_buffers=is_common,
            keeps_own_share=self._keeps_own_share and weights is not None and not joining,
            continues=not is_common and self._has_copies(tuple(group)),
            outer_step=outer_step,
            leader=leader,
            reason=reason,
        )

    def _has_copies(self, group: tuple[int, ...]) -> bool:
        """Whether all workers of a group know each other from the last averaging of each."""
        last = {self._last_rounds.get(worker) for worker in group}
        return len(group) > 1 and len(last) == 1 and (found := last.pop()) is not None and found[1] == group

    def _cancel(self, exchange_id: int, reason: str) -> list[Action]:
        averaging = self._averagings[exchange_id]
        if averaging.is_cancelled:
            return []
        averaging.is_cancelled = True
        return [CancelAveraging(exchange_id=exchange_id, members=averaging.members, reason=reason)]


def _can_always_meet(group: tuple[int, ...], worker: int) -> bool:
    """Return that a worker can exchange with others, where no outage is reported."""
    return True


def check_seconds(name: str, value_s: float) -> None:
    """Check an argument of so many seconds.

    Raises:
        ValueError: it is not positive, or infinite.
    """
    if not 0 < value_s < math.inf:
        raise ValueError(f"expected a finite {name} of more than 0 s, got {value_s}")
