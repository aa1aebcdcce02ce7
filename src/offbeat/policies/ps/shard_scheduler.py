"""The assignment of shards and tasks to the workers of a group; a part of `WorkerGroups`.

Nothing here knows what a shard contains, how the loss of a worker is detected, or what a worker pushes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    AssignTask,
    PassesEnded,
    WorkerGroupMember,
    WorkerGroupRejected,
    WorkerGroupView,
)

SHARDS_MAX: Final = 2**16  # so that any assignment fits into a control message
LOSS_POLICIES: Final = ("replace", "continue", "drop_slowest")


class _Task(NamedTuple):
    number: int
    pass_number: int
    shards: tuple[int, ...]


class _TaskRequest(NamedTuple):
    """A worker's request for a task that could not be answered yet."""

    passes: int
    shards_max: int
    since_s: float


@dataclass(slots=True)
class _Member:
    """A worker.

    Attributes:
        tasks: assigned and not reported done, by number.
        done: passes over a shard that it has reported done.
    """

    shards: set[int] = field(default_factory=set)
    tasks: dict[int, _Task] = field(default_factory=dict)
    done: int = 0

    def idle(self) -> list[int]:
        """Its shards that are in none of its tasks, ascending."""
        busy = {shard for task in self.tasks.values() for shard in task.shards}
        return sorted(self.shards - busy)


class _FreeShards(NamedTuple):
    """The shards of a worker that is gone; the next worker without shards gets them.

    Attributes:
        due_s: when the remaining workers share them; None for never: they are lost until a worker gets them.
    """

    due_s: float | None
    shards: tuple[int, ...]


class ShardScheduler:
    """Assigns the shards 0 to `shards` - 1 to the workers of a group, and passes over them as tasks.

    Every shard belongs to one worker, or waits for one, or is lost. The first worker gets all. A later one
    takes over the shards of a worker that is gone; then shards move, one at a time, from the worker with most
    to the worker with fewest, until they differ by one at most. A shard that is in a task stays until the
    task is done.

    A task is some shards of one worker, all in the same pass. With a `tau`, pass p of a shard may begin when
    every shard that is not lost has completed p - tau passes. A shard goes through its passes in order. A
    pass over it counts when the worker that got the task reports it done, and hence once: the tasks of a
    worker that is gone are cancelled, and the new owners of its shards get new ones.

    A worker that leaves hands its shards to the remaining ones. What happens to those of a lost worker is the
    policy:

    - "replace": they wait for a newcomer. After `patience_s` seconds without one, the remaining workers share
      them.
    - "continue": they are lost, and the group continues without them. A newcomer takes them over, and begins
      with the group's current pass: the passes that they have missed are not repeated.
    - "drop_slowest": the remaining workers share them at once. Also, when a worker has waited for a task for
      `patience_s` seconds, the worker that is furthest behind is dropped as if it were lost.

    Source: Li et al. 2014, "Scaling distributed machine learning with the parameter server", OSDI, section
    4.6 ("worker management"), which leaves it to the program whether a lost worker is replaced, or the others
    continue without it because a model suffers little from the loss of a little data, or slow ones are even
    ended. Hence "continue" is without the data. Deviations: a newcomer owns its shards before it has loaded
    them, since nothing writes to them and shards in a task stay where they are; the shards of a worker that
    is dropped for being slow go to the remaining ones. The bounded delay of section 3.5 is one of passes
    here.

    `offbeat.policies.data.group_assigner` assigns samples to groups whose members finish rounds together;
    here no worker waits for a round, and data stay with the worker that has loaded them.

    Args:
        name: of the group.
        shards: 1 to 65536.
        on_loss: the policy.
        patience_s: in seconds, see above.

    Attributes:
        tau: passes, None for no bound. It holds for tasks that are issued later.

    Raises:
        ProtocolError: an argument out of range.
    """

    def __init__(self, name: str, shards: int, on_loss: str, patience_s: float) -> None:
        if not 1 <= shards <= SHARDS_MAX:
            raise ProtocolError(f"expected 1 to {SHARDS_MAX} shards, got {shards}")
        if on_loss not in LOSS_POLICIES:
            raise ProtocolError(
                f"expected on_worker_loss to be one of {', '.join(LOSS_POLICIES)}, got {on_loss!r}"
            )
        self.name, self.shards, self.on_loss, self.patience_s = name, shards, on_loss, patience_s
        self.tau: int | None = None
        self._passes = [0] * shards  # completed by each shard
        self._count: Counter[int] = Counter({0: shards})  # of shards that are not lost, by their passes
        self._members: dict[str, _Member] = {}  # in the order of joining
        self._task_requests: dict[str, _TaskRequest] = {}
        self._free = [_FreeShards(0.0, tuple(range(shards)))]  # the oldest first
        self._next = 0
        self._has_changed = False  # since the members received a view

    def __contains__(self, node: str) -> bool:
        return node in self._members

    @property
    def completed_passes(self) -> int:
        """How many passes every shard that is not lost has completed."""
        return min(self._count, default=0)

    # Events ----------------------------------------------------------------------------------------------

    def on_joined(self, node: str, now_s: float) -> list[Action]:
        """Add a worker that is not a member."""
        self._members[node] = _Member()
        self._has_changed = True
        return self._settle(now_s, f"{node} has joined")

    def on_left(self, node: str, now_s: float) -> list[Action]:
        """Remove a member that leaves in order."""
        return self._remove(node, now_s, now_s, f"{node} has left")

    def on_lost(self, node: str, now_s: float, reason: str) -> list[Action]:
        """Remove a lost member."""
        due_s = {"replace": now_s + self.patience_s, "continue": None, "drop_slowest": now_s}[self.on_loss]
        return self._remove(node, due_s, now_s, reason)

    def on_task_requested(self, node: str, passes_max: int, shards_max: int, now_s: float) -> list[Action]:
        """Assign a member a task of at most `shards_max` shards, in the first `passes_max` passes.

        Raises:
            ProtocolError: `shards_max` is below 1.
        """
        if shards_max < 1:
            raise ProtocolError(f"expected a request for at least 1 shard, got {shards_max}")
        since_s = self._task_requests[node].since_s if node in self._task_requests else now_s
        self._task_requests[node] = _TaskRequest(passes_max, shards_max, since_s)
        return self._serve([node])

    def on_task_done(self, node: str, number: int, now_s: float) -> list[Action]:
        """Record that a member has done a task.

        Raises:
            ProtocolError: it has no such task.
        """
        member, before = self._members[node], self.completed_passes
        task = member.tasks.pop(number, None)
        if task is None:
            raise ProtocolError(f"expected one of the {len(member.tasks)} tasks of {node}, got task {number}")
        for shard in task.shards:
            self._set_passes(shard, task.pass_number + 1)
        member.done += len(task.shards)
        actions = self._settle(now_s, f"{node} has done task {number}")
        return actions or self._serve(list(self._task_requests) if self.completed_passes > before else [node])

    def set_tau(self, tau: int | None, now_s: float) -> list[Action]:
        """Bound how many passes a shard may be ahead of another one, from now on."""
        self.tau = tau
        self._has_changed = True
        return self._settle(now_s, f"tau is {tau}")

    def on_tick(self, now_s: float) -> list[Action]:
        """Time has passed: share overdue shards, or drop the slowest worker."""
        actions: list[Action] = []
        if self.on_loss == "drop_slowest":
            actions = self._drop_slowest(now_s)
        return actions or self._settle(now_s, f"no worker has joined for {self.patience_s:g} s")

    def view(self, node: str, reason: str) -> WorkerGroupView:
        """Return the view of the group for a node, or for every member if `node` is empty."""
        lost = [free.shards for free in self._free if free.due_s is None]
        waiting = [free.shards for free in self._free if free.due_s is not None]
        return WorkerGroupView(
            node=node,
            group=self.name,
            tau=self.tau,
            passes=self.completed_passes,
            workers=tuple(
                WorkerGroupMember(
                    node=name,
                    shards=_ranges(member.shards),
                    passes=self._passes_of(member),
                    shard_passes_done=member.done,
                )
                for name, member in self._members.items()
            ),
            unassigned=_ranges(shard for shards in waiting for shard in shards),
            lost=_ranges(shard for shards in lost for shard in shards),
            reason=reason,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state but the constructor's arguments, as plain data."""
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
            "task_requests": [[name, *request] for name, request in self._task_requests.items()],
            "free": [[due_s, list(shards)] for due_s, shards in self._free],
            "next": self._next,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a scheduler with the same arguments."""
        self.tau, self._passes, self._next = state["tau"], list(state["passes"]), state["next"]
        self._free = [_FreeShards(due_s, tuple(shards)) for due_s, shards in state["free"]]
        self._members = {}
        for name, shards, tasks, done in state["members"]:
            held = {number: _Task(number, at, tuple(task_shards)) for number, at, task_shards in tasks}
            self._members[name] = _Member(set(shards), held, done)
        self._task_requests = {name: _TaskRequest(*request) for name, *request in state["task_requests"]}
        lost = {shard for due_s, shards in self._free if due_s is None for shard in shards}
        self._count = Counter(found for shard, found in enumerate(self._passes) if shard not in lost)

    # Assignment of shards --------------------------------------------------------------------------------

    def _remove(self, node: str, due_s: float | None, now_s: float, reason: str) -> list[Action]:
        shards = tuple(sorted(self._members.pop(node).shards))
        self._task_requests.pop(node, None)
        self._has_changed = True
        if shards:
            self._free.append(_FreeShards(due_s, shards))
        if due_s is None:
            self._count -= Counter(self._passes[shard] for shard in shards)
        return self._settle(now_s, reason)

    def _settle(self, now_s: float, reason: str) -> list[Action]:
        """Assign the shards that are free, and send all members a view if anything has changed."""
        for member in self._members.values():
            if not member.shards and self._free:
                self._adopt(member, self._free.pop(0))
        if self._members:
            due = [one for one in self._free if one.due_s is not None and one.due_s <= now_s]
            for free in due:
                self._free.remove(free)
                self._share(free.shards)
            self._even_out()
        if not self._has_changed:
            return []
        self._has_changed = False
        actions: list[Action] = [self.view("", reason)] if self._members else []
        return actions + self._serve(list(self._task_requests))

    def _adopt(self, member: _Member, free: _FreeShards) -> None:
        if free.due_s is None:
            passes = self.completed_passes
            for shard in free.shards:
                self._passes[shard] = max(self._passes[shard], passes)
                self._count[self._passes[shard]] += 1
        member.shards.update(free.shards)
        self._has_changed = True

    def _share(self, shards: Sequence[int]) -> None:
        """Assign each shard to the member with fewest at that point, in contiguous runs."""
        sizes = {name: len(member.shards) for name, member in self._members.items()}
        before = dict(sizes)
        for _ in shards:
            sizes[min(sizes, key=sizes.__getitem__)] += 1
        rest = iter(shards)
        for name, member in self._members.items():
            member.shards.update(islice(rest, sizes[name] - before[name]))
        self._has_changed = True

    def _even_out(self) -> None:
        """Move shards from the member with most to the one with fewest, as few as possible."""
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
        """Drop the slowest member if one with shards and no task is overdue; then none for as long again."""
        overdue = [
            name
            for name, request in self._task_requests.items()
            if now_s - request.since_s >= self.patience_s
            and self._members[name].shards
            and not self._members[name].tasks
        ]
        behind = {
            name: member
            for name, member in self._members.items()
            if member.shards and self._passes_of(member) == self.completed_passes
        }
        if not overdue or not behind:
            return []
        slowest = min(behind, key=lambda name: behind[name].done)
        self._task_requests = {
            name: request._replace(since_s=now_s) for name, request in self._task_requests.items()
        }
        reason = f"{slowest} was dropped: it kept {overdue[0]} waiting for {self.patience_s:g} s"
        refused = WorkerGroupRejected(node=slowest, group=self.name, reason=reason)
        return [refused, *self.on_lost(slowest, now_s, reason)]

    # Tasks -----------------------------------------------------------------------------------------------

    def _serve(self, nodes: Iterable[str]) -> list[Action]:
        """Answer the waiting requests of these members."""
        actions: list[Action] = []
        for node in nodes:
            request = self._task_requests.get(node)
            answer = None if request is None else self._next_task(node, self._members[node], request)
            if answer is not None:
                del self._task_requests[node]
                actions.append(answer)
        return actions

    def _next_task(
        self, node: str, member: _Member, request: _TaskRequest
    ) -> AssignTask | PassesEnded | None:
        if self.completed_passes >= request.passes:
            reason = f"all shards have completed {self.completed_passes} passes"
            return PassesEnded(node=node, group=self.name, passes=self.completed_passes, reason=reason)
        idle = member.idle()
        pass_number = min((self._passes[shard] for shard in idle), default=request.passes)
        if pass_number >= request.passes or (
            self.tau is not None and pass_number - self.completed_passes > self.tau
        ):
            return None
        shards = [shard for shard in idle if self._passes[shard] == pass_number]
        task = _Task(self._next, pass_number, tuple(shards[: request.shards_max]))
        member.tasks[task.number] = task
        self._next += 1
        return AssignTask(
            node=node,
            group=self.name,
            task=task.number,
            pass_number=pass_number,
            shards=task.shards,
            reason=f"{len(shards)} shards of {node} are in pass {pass_number}",
        )

    def _set_passes(self, shard: int, passes: int) -> None:
        self._count -= Counter([self._passes[shard]])
        self._passes[shard] = passes
        self._count[passes] += 1

    def _passes_of(self, member: _Member) -> int:
        return min((self._passes[shard] for shard in member.shards), default=self.completed_passes)


def _ranges(shards: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the first and last of each run of consecutive shards, ascending."""
    found: list[tuple[int, int]] = []
    for shard in sorted(shards):
        if found and found[-1][1] == shard - 1:
            found[-1] = (found[-1][0], shard)
        else:
            found.append((shard, shard))
    return tuple(found)
