"""How much a policy does for an event must not grow with the number of workers that it does not concern."""

import sys
from collections import deque

import pytest

from offbeat.events import AverageModels, Joined, ModelsAveraged, Ready
from offbeat.policies.model_averaging.local_steps import LocalSteps
from offbeat.policies.model_averaging.pair_averaging import PairAveraging
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.policies.model_averaging.prague import PragueAveraging


class CountedId(int):
    """A worker's id that counts how often it is hashed or compared: what loops in C do with it."""

    count = 0

    def __hash__(self):
        CountedId.count += 1
        return int.__hash__(self)

    def __eq__(self, other):
        CountedId.count += 1
        return int.__eq__(self, other)

    def __lt__(self, other):
        CountedId.count += 1
        return int.__lt__(self, other)


class Work:
    """Counts the bytecodes that are executed, and the uses of ids."""

    def __init__(self):
        self.bytecodes = 0

    def _trace(self, frame, what, argument):
        frame.f_trace_opcodes = True
        self.bytecodes += what == "opcode"
        return self._trace

    def of(self, call, argument):
        """Call a function; return its result and what it took."""
        bytecodes, ids = self.bytecodes, CountedId.count
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            result = call(argument)
        finally:
            sys.settrace(before)
        return result, self.bytecodes - bytecodes + CountedId.count - ids


def work_per_event(make_policy, world, *, rounds, slow=()):
    """Run workers that are never undisturbed; return the mean work for an event of the last round.

    Some are three times as slow as the others.
    """
    policy, ids = make_policy(world), [CountedId(worker) for worker in range(world)]
    joined = {"world": world, "addresses": (), "model_signature": (), "strategy": "", "location": ""}
    actions = []
    for worker in ids:
        actions += policy.handle(Joined(now_s=0.0, worker=worker, peer=f"worker-{worker}", **joined))
    assert len(actions) == 1  # the state of worker 0 for all
    in_averaging, spent, work, entered = {}, [], Work(), 0

    def begin(actions):
        nonlocal entered
        for action in actions:
            if isinstance(action, AverageModels):
                in_averaging.update((ids[member], action.exchange_id) for member in action.members)
                entered += len(action.members)

    begin(actions)
    queue, steps = deque(ids), dict.fromkeys(ids, 0)
    for turn in range(rounds):
        for _ in range(len(queue)):
            worker = queue.popleft()
            queue.append(worker)
            if worker in slow and turn % 3:
                continue
            events = []
            if worker in in_averaging:
                exchange_id = in_averaging.pop(worker)
                events.append(
                    ModelsAveraged(
                        now_s=float(turn),
                        worker=worker,
                        exchange_id=exchange_id,
                        model_steps=steps[worker],
                        has_mean=True,
                    )
                )
            events.append(
                Ready(
                    now_s=float(turn),
                    worker=worker,
                    generation=0,
                    epoch=0,
                    step=steps[worker],
                    round=0,
                    compute_s=0.1,
                    samples=0,
                    blocks=(),
                )
            )
            steps[worker] += 1
            for event in events:
                if turn < rounds - 3:
                    begin(policy.handle(event))
                else:
                    actions, took = work.of(policy.handle, event)
                    begin(actions)
                    spent.append(took)
        queue.rotate(turn * 7 % world)  # so that others are ready at the same time
    assert entered > 2 * world  # they do average
    return sum(spent) / len(spent)


POLICIES = {
    "adpsgd": lambda world: PairAveraging(world, shards="equal", overlap=True),
    "adpsgd, exponential": lambda world: PairAveraging(
        world, topology="exponential", shards="equal", overlap=True
    ),
    "adpsgd, complete": lambda world: PairAveraging(world, topology="complete", shards="equal", overlap=True),
    "diloco": lambda world: LocalSteps(world, every=4, fragments=2, shards="equal", overlap=True),
    "localsgd": lambda world: LocalSteps(world, every=4, shards="equal", overlap=True),
    "preduce": lambda world: PartialReduce(world, shards="equal", overlap=True),
    "prague": lambda world: PragueAveraging(world, shards="equal", overlap=True),
    "prague, random": lambda world: PragueAveraging(world, mode="random", shards="equal", overlap=True),
    "prague, static": lambda world: PragueAveraging(world, mode="static", shards="equal", overlap=True),
}


@pytest.mark.parametrize("slow", [(), (1, 2)], ids=["equal paces", "two are slow"])
@pytest.mark.parametrize("name", POLICIES)
def test_work_for_an_event_does_not_grow_with_the_number_of_workers(name, slow):
    """8 times as many workers: at most twice as much, for searches whose depth is a logarithm."""
    few, many = (work_per_event(POLICIES[name], world, rounds=15, slow=slow) for world in (24, 192))
    assert many < 2 * few
