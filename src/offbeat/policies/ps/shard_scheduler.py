"""Whose data is whose in a group of workers, and which task comes next; a part that `WorkerGroups` owns.

Nothing here knows what a shard holds, how a death is noticed, or what a worker pushes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from offbeat.errors import ProtocolError
from offbeat.events import Action, GroupViewed, PassesEnded, TaskIssued, Worker, WorkerRefused

SHARDS_MAX: Final = 2**16  # so that who owns which fits into a control message, however they lie
POLICIES: Final = ("replace", "continue", "drop_slowest")


class _Task(NamedTuple):
    number: int
    pass_number: int
    shards: tuple[int, ...]


class _Want(NamedTuple):
    """A worker has asked for a task, and there was none for it."""

    passes: int
    shards_max: int
    since_s: float


@dataclass(slots=True)
class _Member:
    """A worker.

    Attributes:
        tasks: that it has and has not reported done, by number.
        done: passes over a shard that it has reported done.
    """

    shards: set[int] = field(default_factory=set)
    tasks: dict[int, _Task] = field(default_factory=dict)
    done: int = 0

    def idle(self) -> list[int]:
        """Its shards that are in none of its tasks, ascending."""
        busy = {shard for task in self.tasks.values() for shard in task.shards}
        return sorted(self.shards - busy)


class _Parcel(NamedTuple):
    """What a worker had that is gone; whoever has no shard takes it over.

    Attributes:
        due_s: from when on the others share it; None for never: it is lost until somebody takes it over.
    """

    due_s: float | None
    shards: tuple[int, ...]


class ShardScheduler:
    """Gives the shards 0 to `shards` - 1 to the workers of a group, and passes over them as tasks.

    Every shard is one worker's, or waits for one, or is lost. The first worker has all. Who comes later takes
    over what somebody left who is gone; then shards go, one at a time, from who has most to who has fewest,
    until they differ by one at most. A shard that is in a task stays where it is until that is done.

    A task is some shards of one worker, all in the same pass. With a `tau`, pass p of a shard may be begun
    when every shard that is not lost has been through p - tau passes. A shard goes through its passes in
    order. A pass over it counts when the worker that was given the task reports it done, and hence once: the
    tasks of a worker that is gone are no more, and whoever gets their shards is given new ones.

    Who leaves hands its shards to the others. What becomes of those of a worker that is lost is the policy:

    - "replace": they wait for a newcomer. After `patience_s` seconds without one, the others share them.
    - "continue": they are lost, and the group goes on without them. A newcomer takes them over, and begins
      with the pass in which the group is: nobody makes up for what they have missed.
    - "drop_slowest": the others share them at once. Besides, when a worker has waited for a task for
      `patience_s` seconds, that worker is dropped which is furthest behind, as if it were lost.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server", OSDI, section
    4.6 ("worker management"), which leaves it to the program whether a lost worker is replaced, or the others
    continue without it because a model suffers little from the loss of a little data, or slow ones are even
    ended. Hence "continue" is without the data. Deviations: a newcomer owns its shards before it has loaded
    them, since nobody writes to them and what is under way stays where it is; what a worker had that is
    dropped for being slow goes to the others. The bounded delay of section 3.5 is one of passes here.

    `policies/work.py` deals samples to groups whose members finish rounds together; here nobody waits for a
    round, and data stay with who has loaded them.

    Args:
        name: of the group.
        shards: 1 to 65536.
        on_loss: the policy.
        patience_s: seconds, as above.

    Attributes:
        tau: passes, None for no bound. It holds for tasks that are issued later.

    Raises:
        ProtocolError: an argument out of range.
    """

    def __init__(self, name: str, shards: int, on_loss: str, patience_s: float) -> None:
        if not 1 <= shards <= SHARDS_MAX:
            raise ProtocolError(f"expected 1 to {SHARDS_MAX} shards, got {shards}")
        if on_loss not in POLICIES:
            raise ProtocolError(
                f"expected on_worker_loss to be one of {', '.join(POLICIES)}, got {on_loss!r}"
            )
        self.name, self.shards, self.on_loss, self.patience_s = name, shards, on_loss, patience_s
        self.tau: int | None = None
        self._passes = [0] * shards  # that each shard has been through
        self._count: Counter[int] = Counter({0: shards})  # of shards that are not lost, by these passes
        self._members: dict[str, _Member] = {}  # in the order in which they came
        self._wants: dict[str, _Want] = {}
        self._parcels = [_Parcel(0.0, tuple(range(shards)))]  # the oldest first
        self._next = 0
        self._has_changed = False  # since everybody was told

    def __contains__(self, node: str) -> bool:
        return node in self._members

    @property
    def passes(self) -> int:
        """How many passes all shards have been through that are not lost."""
        return min(self._count, default=0)

    # What is heard ---------------------------------------------------------------------------------------

    def join(self, node: str, now_s: float) -> list[Action]:
        """A worker comes, which is no member."""
        self._members[node] = _Member()
        self._has_changed = True
        return self._settle(now_s, f"{node} has come")

    def leave(self, node: str, now_s: float) -> list[Action]:
        """A member goes in order."""
        return self._part(node, now_s, now_s, f"{node} has left")

    def lose(self, node: str, now_s: float, reason: str) -> list[Action]:
        """A member is gone without a word."""
        due_s = {"replace": now_s + self.patience_s, "continue": None, "drop_slowest": now_s}[self.on_loss]
        return self._part(node, due_s, now_s, reason)

    def want(self, node: str, passes: int, shards_max: int, now_s: float) -> list[Action]:
        """A member asks for a task of at most so many shards, in the first so many passes.

        Raises:
            ProtocolError: no shards.
        """
        if shards_max < 1:
            raise ProtocolError(f"expected a task of at least 1 shard to be asked for, got {shards_max}")
        since_s = self._wants[node].since_s if node in self._wants else now_s
        self._wants[node] = _Want(passes, shards_max, since_s)
        return self._serve([node])

    def done(self, node: str, number: int, now_s: float) -> list[Action]:
        """A member has done a task.

        Raises:
            ProtocolError: it has no such task.
        """
        member, before = self._members[node], self.passes
        task = member.tasks.pop(number, None)
        if task is None:
            raise ProtocolError(f"expected one of the {len(member.tasks)} tasks of {node}, got task {number}")
        for shard in task.shards:
            self._go_on(shard, task.pass_number + 1)
        member.done += len(task.shards)
        said = self._settle(now_s, f"{node} has done task {number}")
        return said or self._serve(list(self._wants) if self.passes > before else [node])

    def set_tau(self, tau: int | None, now_s: float) -> list[Action]:
        """Bound how many passes a shard may be ahead of another one, from now on."""
        self.tau = tau
        self._has_changed = True
        return self._settle(now_s, f"tau is {tau}")

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        said: list[Action] = []
        if self.on_loss == "drop_slowest":
            said = self._drop_slowest(now_s)
        return said or self._settle(now_s, f"nobody has come for {self.patience_s:g} s")

    def view(self, node: str, reason: str) -> GroupViewed:
        """Return what a node, or every member if that is empty, is to be told of who has what."""
        lost = [parcel.shards for parcel in self._parcels if parcel.due_s is None]
        waiting = [parcel.shards for parcel in self._parcels if parcel.due_s is not None]
        return GroupViewed(
            node=node,
            group=self.name,
            tau=self.tau,
            passes=self.passes,
            workers=tuple(
                Worker(
                    node=name, shards=_ranges(member.shards), passes=self._passes_of(member), done=member.done
                )
                for name, member in self._members.items()
            ),
            waiting=_ranges(shard for shards in waiting for shard in shards),
            lost=_ranges(shard for shards in lost for shard in shards),
            reason=reason,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "tau": self.tau,
            "passes": list(self._passes),
            "members": [
                [
                    name,
                    sorted(member.shards),
                    [list(task) for task in member.tasks.values()],
                    member.done,
                ]
                for name, member in self._members.items()
            ],
            "wants": [[name, *want] for name, want in self._wants.items()],
            "parcels": [[due_s, list(shards)] for due_s, shards in self._parcels],
            "next": self._next,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a scheduler with the same arguments."""
        self.tau, self._passes, self._next = state["tau"], list(state["passes"]), state["next"]
        self._parcels = [_Parcel(due_s, tuple(shards)) for due_s, shards in state["parcels"]]
        self._members = {}
        for name, shards, tasks, done in state["members"]:
            held = {number: _Task(number, at, tuple(those)) for number, at, those in tasks}
            self._members[name] = _Member(set(shards), held, done)
        self._wants = {name: _Want(*want) for name, *want in state["wants"]}
        lost = {shard for due_s, shards in self._parcels if due_s is None for shard in shards}
        self._count = Counter(found for shard, found in enumerate(self._passes) if shard not in lost)

    # Who has what ----------------------------------------------------------------------------------------

    def _part(self, node: str, due_s: float | None, now_s: float, reason: str) -> list[Action]:
        shards = tuple(sorted(self._members.pop(node).shards))
        self._wants.pop(node, None)
        self._has_changed = True
        if shards:
            self._parcels.append(_Parcel(due_s, shards))
        if due_s is None:
            self._count -= Counter(self._passes[shard] for shard in shards)
        return self._settle(now_s, reason)

    def _settle(self, now_s: float, reason: str) -> list[Action]:
        """Give away what can be, and tell everybody if anything has changed."""
        for member in self._members.values():
            if not member.shards and self._parcels:
                self._take_over(member, self._parcels.pop(0))
        if self._members:
            due = [one for one in self._parcels if one.due_s is not None and one.due_s <= now_s]
            for parcel in due:
                self._parcels.remove(parcel)
                self._share(parcel.shards)
            self._even_out()
        if not self._has_changed:
            return []
        self._has_changed = False
        said: list[Action] = [self.view("", reason)] if self._members else []
        return said + self._serve(list(self._wants))

    def _take_over(self, member: _Member, parcel: _Parcel) -> None:
        if parcel.due_s is None:
            passes = self.passes
            for shard in parcel.shards:
                self._passes[shard] = max(self._passes[shard], passes)
                self._count[self._passes[shard]] += 1
        member.shards.update(parcel.shards)
        self._has_changed = True

    def _share(self, shards: Sequence[int]) -> None:
        """Give each of these shards to one of those who have fewest then, and neighbours to the same one."""
        sizes = {name: len(member.shards) for name, member in self._members.items()}
        before = dict(sizes)
        for _ in shards:
            sizes[min(sizes, key=sizes.__getitem__)] += 1
        rest = iter(shards)
        for name, member in self._members.items():
            member.shards.update(islice(rest, sizes[name] - before[name]))
        self._has_changed = True

    def _even_out(self) -> None:
        """Move shards from who has most to who has fewest, as few as possible."""
        sizes = [len(member.shards) for member in self._members.values()]
        if max(sizes) - min(sizes) < 2:
            return
        members = list(self._members.values())
        idle = [member.idle() for member in members]
        while True:
            least = min(range(len(members)), key=sizes.__getitem__)
            most = max(
                (giver for giver in range(len(members)) if idle[giver]), key=sizes.__getitem__, default=least
            )
            if sizes[most] - sizes[least] < 2:
                return
            shard = idle[most].pop()
            members[most].shards.remove(shard)
            members[least].shards.add(shard)
            sizes[most] -= 1
            sizes[least] += 1
            self._has_changed = True

    def _drop_slowest(self, now_s: float) -> list[Action]:
        """Drop who keeps a member waiting that has shards and no task; nobody else for as long again."""
        overdue = [
            name
            for name, want in self._wants.items()
            if now_s - want.since_s >= self.patience_s
            and self._members[name].shards
            and not self._members[name].tasks
        ]
        behind = {
            name: member
            for name, member in self._members.items()
            if member.shards and self._passes_of(member) == self.passes
        }
        if not overdue or not behind:
            return []
        slowest = min(behind, key=lambda name: behind[name].done)
        self._wants = {name: want._replace(since_s=now_s) for name, want in self._wants.items()}
        reason = f"{slowest} was dropped: it kept {overdue[0]} waiting for {self.patience_s:g} s"
        refused = WorkerRefused(node=slowest, group=self.name, reason=reason)
        return [refused, *self.lose(slowest, now_s, reason)]

    # Tasks -----------------------------------------------------------------------------------------------

    def _serve(self, nodes: Iterable[str]) -> list[Action]:
        """Answer those of these members that want a task."""
        said: list[Action] = []
        for node in nodes:
            want = self._wants.get(node)
            answer = None if want is None else self._answer(node, self._members[node], want)
            if answer is not None:
                del self._wants[node]
                said.append(answer)
        return said

    def _answer(self, node: str, member: _Member, want: _Want) -> TaskIssued | PassesEnded | None:
        if self.passes >= want.passes:
            reason = f"all shards have been through {self.passes} passes"
            return PassesEnded(node=node, group=self.name, passes=self.passes, reason=reason)
        idle = member.idle()
        pass_number = min((self._passes[shard] for shard in idle), default=want.passes)
        if pass_number >= want.passes or (self.tau is not None and pass_number - self.passes > self.tau):
            return None
        shards = [shard for shard in idle if self._passes[shard] == pass_number]
        task = _Task(self._next, pass_number, tuple(shards[: want.shards_max]))
        member.tasks[task.number] = task
        self._next += 1
        return TaskIssued(
            node=node,
            group=self.name,
            task=task.number,
            pass_number=pass_number,
            shards=task.shards,
            reason=f"{len(shards)} shards of {node} are in pass {pass_number}",
        )

    def _go_on(self, shard: int, passes: int) -> None:
        self._count -= Counter([self._passes[shard]])
        self._passes[shard] = passes
        self._count[passes] += 1

    def _passes_of(self, member: _Member) -> int:
        return min((self._passes[shard] for shard in member.shards), default=self.passes)


def _ranges(shards: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The first and last of each run of neighbours, ascending."""
    found: list[tuple[int, int]] = []
    for shard in sorted(shards):
        if found and found[-1][1] == shard - 1:
            found[-1] = (found[-1][0], shard)
        else:
            found.append((shard, shard))
    return tuple(found)
