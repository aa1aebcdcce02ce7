"""Random acyclic graphs, and streams on which operations run as late as their synchronizations allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from offbeat.numerics.nimble.stream_assignment import Launch


def a_graph(seed: int, nodes_max: int = 40) -> list[set[int]]:
    """Successors of each node, whose numbers are no topological order; from a chain to almost all edges."""
    chance = random.Random(seed)
    numbers = list(range(chance.randint(1, nodes_max)))
    chance.shuffle(numbers)
    density = chance.choice([0.05, 0.1, 0.3, 0.6, 0.95])
    successors: list[set[int]] = [set() for _ in numbers]
    for place, node in enumerate(numbers):
        successors[node] |= {to for to in numbers[place + 1 :] if chance.random() < density}
    return successors


def paths(successors: list[set[int]]) -> list[set[int]]:
    """For each node those that a path leads to, by search."""
    found = []
    for node in range(len(successors)):
        reached: set[int] = set()
        waiting = list(successors[node])
        while waiting:
            to = waiting.pop()
            if to not in reached:
                reached.add(to)
                waiting += successors[to]
        found.append(reached)
    return found


def predecessors(successors: list[set[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in successors]
    for node, following in enumerate(successors):
        for to in following:
            found[to].append(node)
    return found


class LateStreams:
    """Streams that do nothing until they are run; see `DeviceStreams`.

    `run` holds one operation back as long as anything else can run. Whatever may run before it, does.
    """

    def __init__(self, count: int) -> None:
        self.queues: list[list[tuple[str, object]]] = [[] for _ in range(count)]
        self._current = 0

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def call(self, node: int) -> None:
        self.queues[self._current].append(("call", node))

    def record_event(self, stream: int) -> object:
        event = object()
        self.queues[stream].append(("record", event))
        return event

    def make_wait(self, stream: int, event: object) -> None:
        self.queues[stream].append(("wait", event))

    def run(self, held_back: object, call: Callable[[int], object]) -> None:
        """Runs all that was queued, and `held_back`, an operation or an event, as late as possible."""
        places = [0] * len(self.queues)
        happened: set[int] = set()

        def may_run(stream: int) -> bool:
            if places[stream] == len(self.queues[stream]):
                return False
            kind, what = self.queues[stream][places[stream]]
            return kind != "wait" or id(what) in happened

        while True:
            free = [stream for stream in range(len(places)) if may_run(stream)]
            if not free:
                assert places == [len(queue) for queue in self.queues], "the streams wait for one another"
                return
            free.sort(key=lambda stream: self.queues[stream][places[stream]][1] == held_back)
            kind, what = self.queues[free[0]][places[free[0]]]
            places[free[0]] += 1
            if kind == "call":
                assert isinstance(what, int)
                call(what)
            else:
                happened.add(id(what))


def without(launches: tuple[Launch, ...], left_out: tuple[int, int]) -> tuple[Launch, ...]:
    """The launches without one synchronization: (node that is awaited, node that waits)."""
    return tuple(
        Launch(
            node=one.node,
            stream=one.stream,
            waits_for=tuple(node for node in one.waits_for if (node, one.node) != left_out),
            is_awaited=one.is_awaited,
        )
        for one in launches
    )


def value_of(node: int, earlier: Collection[int]) -> int:
    """A value that depends on the values of all nodes before."""
    return hash((node, *earlier)) & 0xFFFFFFFF
