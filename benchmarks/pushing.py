"""A worker of `python -m benchmarks ps`: makes requests of one kind for as long as it is told to, and times
them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.children import Lines
from benchmarks.sampling import Sampler
from offbeat.runtime.ps.client import PS
from offbeat.runtime.ps.future import Future
from offbeat.runtime.ps.namespace import Namespace
from offbeat.runtime.ps.node import ClusterFile

REPETITIONS = 5  # at least
_FRESH_LISTS = 8
_BLOCKS, _BLOCK_KEYS_MAX = 64, 250_000
_STRETCH_KEYS = 8  # of which a sparse request lists one

Keys = NDArray[np.int64]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request.

    Attributes:
        operation: "push", "pull" or "pushpull", which pulls what it has pushed.
        size: the name of the size.
        count: how many numbers, or keys of a sparse one.
        is_sparse: its keys are listed.
        is_fresh: other keys than the time before.
        in_flight: how many are under way at once.
    """

    operation: str
    size: str
    count: int
    is_sparse: bool
    is_fresh: bool
    in_flight: int

    @property
    def namespace(self) -> str:
        """Whom it is for."""
        return f"{'sparse' if self.is_sparse else 'dense'} {self.size}"

    @property
    def title(self) -> str:
        """What it is, for people."""
        keys = f" {'fresh' if self.is_fresh else 'known'} keys" if self.is_sparse else ""
        return f"{self.operation} {self.size}{keys}"

    @property
    def size_bytes(self) -> int:
        """Of values, and keys that are listed, one way."""
        return self.count * (12 if self.is_sparse else 4)

    @property
    def ways(self) -> int:
        """How often the values cross the line."""
        return 2 if self.operation == "pushpull" else 1


class Requests:
    """Makes requests of a case.

    A namespace has 64 blocks. Those for dense requests are as long as a request, but of 1 MB at most, and
    each request is for the keys behind those of the one before: so small ones are for one server each, large
    ones for all. Keys that are listed lie all over the namespace.

    Attributes:
        pushed: how many numbers were pushed so far, by namespace.
    """

    def __init__(self, ps: PS, seed: int) -> None:
        self._ps, self._seed = ps, seed
        self._spaces: dict[str, Namespace] = {}
        self.pushed: Counter[str] = Counter()

    def maker(self, case: Case) -> Callable[[], Future]:
        """Return what makes the next request."""
        space, count = self.space(case), case.count
        values = np.ones(count, np.float32)
        places: list[dict[str, Any]] = [{"first": first} for first in range(0, space.keys - count + 1, count)]
        if case.is_sparse:
            chance = np.random.default_rng([self._seed, count])
            places = [{"keys": _listed(chance, count)} for _ in range(_FRESH_LISTS if case.is_fresh else 1)]
        turns = itertools.cycle(places)

        def push(place: dict[str, Any]) -> Future:
            self.pushed[case.namespace] += count
            return space.push(values, **place)

        def pull(place: dict[str, Any], *after: Future) -> Future:
            bounds = {} if case.is_sparse else {"last": place["first"] + count}
            return space.pull(**place, **bounds, after=after)

        def push_and_pull(place: dict[str, Any]) -> Future:
            return pull(place, push(place))

        one = {"push": push, "pull": pull, "pushpull": push_and_pull}[case.operation]
        return lambda: one(next(turns))

    def space(self, case: Case) -> Namespace:
        """Return the namespace of a case."""
        name = case.namespace
        if name not in self._spaces:
            if case.is_sparse:
                self._spaces[name] = self._ps.namespace(name, keys=case.count * _STRETCH_KEYS)
            else:
                block_keys = min(case.count, _BLOCK_KEYS_MAX)
                keys = _BLOCKS * block_keys
                self._spaces[name] = self._ps.namespace(name, keys=keys, block_keys=block_keys)
        return self._spaces[name]


def _listed(chance: np.random.Generator, count: int) -> Keys:
    return np.arange(count) * _STRETCH_KEYS + chance.integers(0, _STRETCH_KEYS, count)


def measure(lines: Lines, make: Callable[[], Future], in_flight: int, seconds: float) -> dict[str, Any]:
    """Make requests until everybody has made enough.

    Returns:
        per_s: requests a second of each repetition; latency_s: of each request.
    """
    rate_per_s = _warm_up(make, in_flight, seconds / 4)
    block = max(in_flight, math.ceil(rate_per_s * seconds / REPETITIONS))
    lines.tell("ready")
    lines.hear()
    under_way: deque[tuple[float, Future]] = deque()
    latency_s: list[float] = []
    marks_s = [perf_counter()]
    is_enough = False
    while True:
        while len(under_way) < in_flight:
            under_way.append((perf_counter(), make()))
        begun_s, future = under_way.popleft()
        future.result()
        now_s = perf_counter()
        latency_s.append(now_s - begun_s)
        if len(latency_s) % block == 0:
            marks_s.append(now_s)
        if is_enough:
            if lines.has_come():
                lines.hear()
                break
        elif len(marks_s) > REPETITIONS and marks_s[-1] - marks_s[0] >= seconds:
            is_enough = True
            lines.tell("enough")
    for _, future in under_way:
        future.result()
    return {
        "per_s": [block / (later - before) for before, later in itertools.pairwise(marks_s)],
        "latency_s": latency_s,
    }


def _warm_up(make: Callable[[], Future], in_flight: int, seconds: float) -> float:
    """Make requests for a while; return how many a second."""
    began_s, made = perf_counter(), 0
    under_way: deque[Future] = deque()
    while made <= in_flight or perf_counter() - began_s < seconds:
        under_way.append(make())
        made += 1
        if len(under_way) == in_flight:
            under_way.popleft().result()
    for future in under_way:
        future.result()
    return made / (perf_counter() - began_s)


def main() -> None:
    """Measure what it is told to, one case after the other."""
    lines = Lines.to_parent()
    place = lines.hear()
    with PS(msgspec.convert(place["cluster"], ClusterFile), host="127.0.0.1") as ps:
        requests = Requests(ps, place["seed"])
        lines.tell("here")
        while True:  # until the benchmark is over, and this process with it
            asked = lines.hear()
            match asked["do"]:
                case "measure":
                    case = msgspec.convert(asked["case"], Case)
                    with Sampler() if asked["is_watched"] else nullcontext() as sampler:
                        found = measure(lines, requests.maker(case), case.in_flight, asked["seconds"])
                    lines.tell(found | {"shares": sampler.shares() if sampler is not None else []})
                case "pushed":
                    lines.tell(dict(requests.pushed))
                case "held":
                    space = requests.space(msgspec.convert(asked["case"], Case))
                    lines.tell(float(space.pull().result().sum(dtype=np.float64)))


if __name__ == "__main__":
    main()
