"""A worker of `python -m benchmarks ps`: makes requests of one kind on command, and times them."""

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
_STRETCH_KEYS = 8  # a sparse request lists one key of each stretch of this length

Keys = NDArray[np.int64]


class RequestCase(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request.

    Attributes:
        operation: "push", "pull" or "pushpull", a pull that follows its push.
        size: name of the size.
        count: how many values, which is also how many keys of a sparse request.
        is_sparse: its keys are listed.
        is_fresh: its keys differ from the previous request's.
        in_flight: concurrent requests.
    """

    operation: str
    size: str
    count: int
    is_sparse: bool
    is_fresh: bool
    in_flight: int

    @property
    def namespace(self) -> str:
        """Name of its namespace."""
        return f"{'sparse' if self.is_sparse else 'dense'} {self.size}"

    @property
    def title(self) -> str:
        """Description for tables."""
        keys = f" {'fresh' if self.is_fresh else 'known'} keys" if self.is_sparse else ""
        return f"{self.operation} {self.size}{keys}"

    @property
    def size_bytes(self) -> int:
        """Size of values and listed keys, one way."""
        return self.count * (12 if self.is_sparse else 4)

    @property
    def ways(self) -> int:
        """How often the values cross the line."""
        return 2 if self.operation == "pushpull" else 1


class RequestMaker:
    """Makes requests of a case.

    A namespace has 64 blocks. For dense requests a block is as long as a request, but at most 1 MB, and each
    request is for the keys after the previous one's: so small requests go to one server each, large ones to
    all. Listed keys are spread over the whole namespace.

    Attributes:
        pushed: values pushed so far, by namespace.
    """

    def __init__(self, ps: PS, seed: int) -> None:
        self._ps, self._seed = ps, seed
        self._namespaces: dict[str, Namespace] = {}
        self.pushed: Counter[str] = Counter()

    def maker(self, case: RequestCase) -> Callable[[], Future]:
        """Return a function that makes the next request."""
        namespace, count = self.namespace_of(case), case.count
        values = np.ones(count, np.float32)
        key_choices: list[dict[str, Any]] = [
            {"first": first} for first in range(0, namespace.keys - count + 1, count)
        ]
        if case.is_sparse:
            chance = np.random.default_rng([self._seed, count])
            key_choices = [
                {"keys": _spread_keys(chance, count)} for _ in range(_FRESH_LISTS if case.is_fresh else 1)
            ]
        choices = itertools.cycle(key_choices)

        def push(keys: dict[str, Any]) -> Future:
            self.pushed[case.namespace] += count
            return namespace.push(values, **keys)

        def pull(keys: dict[str, Any], *after: Future) -> Future:
            bounds = {} if case.is_sparse else {"last": keys["first"] + count}
            return namespace.pull(**keys, **bounds, after=after)

        def push_and_pull(keys: dict[str, Any]) -> Future:
            return pull(keys, push(keys))

        one = {"push": push, "pull": pull, "pushpull": push_and_pull}[case.operation]
        return lambda: one(next(choices))

    def namespace_of(self, case: RequestCase) -> Namespace:
        """Return the namespace of a case."""
        name = case.namespace
        if name not in self._namespaces:
            if case.is_sparse:
                self._namespaces[name] = self._ps.namespace(name, keys=case.count * _STRETCH_KEYS)
            else:
                block_keys = min(case.count, _BLOCK_KEYS_MAX)
                keys = _BLOCKS * block_keys
                self._namespaces[name] = self._ps.namespace(name, keys=keys, block_keys=block_keys)
        return self._namespaces[name]


def _spread_keys(chance: np.random.Generator, count: int) -> Keys:
    return np.arange(count) * _STRETCH_KEYS + chance.integers(0, _STRETCH_KEYS, count)


def measure(lines: Lines, make: Callable[[], Future], in_flight: int, seconds: float) -> dict[str, Any]:
    """Make requests until all workers have made enough.

    Returns:
        per_s: requests per second of each repetition; latency_s: of each request.
    """
    rate_per_s = _warm_up(make, in_flight, seconds / 4)
    block = max(in_flight, math.ceil(rate_per_s * seconds / REPETITIONS))
    lines.send("ready")
    lines.receive()
    in_flight_requests: deque[tuple[float, Future]] = deque()
    latency_s: list[float] = []
    marks_s = [perf_counter()]
    has_reported = False
    while True:
        while len(in_flight_requests) < in_flight:
            in_flight_requests.append((perf_counter(), make()))
        begun_s, future = in_flight_requests.popleft()
        future.result()
        now_s = perf_counter()
        latency_s.append(now_s - begun_s)
        if len(latency_s) % block == 0:
            marks_s.append(now_s)
        if has_reported:
            if lines.has_message():
                lines.receive()
                break
        elif len(marks_s) > REPETITIONS and marks_s[-1] - marks_s[0] >= seconds:
            has_reported = True
            lines.send("enough")
    for _, future in in_flight_requests:
        future.result()
    return {
        "per_s": [block / (later - before) for before, later in itertools.pairwise(marks_s)],
        "latency_s": latency_s,
    }


def _warm_up(make: Callable[[], Future], in_flight: int, seconds: float) -> float:
    """Make requests for some seconds; return their rate per second."""
    began_s, made = perf_counter(), 0
    in_flight_requests: deque[Future] = deque()
    while made <= in_flight or perf_counter() - began_s < seconds:
        in_flight_requests.append(make())
        made += 1
        if len(in_flight_requests) == in_flight:
            in_flight_requests.popleft().result()
    for future in in_flight_requests:
        future.result()
    return made / (perf_counter() - began_s)


def main() -> None:
    """Run the commands of the benchmark one after the other."""
    lines = Lines.to_parent()
    settings = lines.receive()
    with PS(msgspec.convert(settings["cluster"], ClusterFile), host="127.0.0.1") as ps:
        requests = RequestMaker(ps, settings["seed"])
        lines.send("here")
        while True:  # until the benchmark ends this process
            command = lines.receive()
            match command["do"]:
                case "measure":
                    case = msgspec.convert(command["case"], RequestCase)
                    with Sampler() if command["is_sampled"] else nullcontext() as sampler:
                        found = measure(lines, requests.maker(case), case.in_flight, command["seconds"])
                    lines.send(found | {"shares": sampler.shares() if sampler is not None else []})
                case "pushed":
                    lines.send(dict(requests.pushed))
                case "held":
                    namespace = requests.namespace_of(msgspec.convert(command["case"], RequestCase))
                    lines.send(float(namespace.pull().result().sum(dtype=np.float64)))


if __name__ == "__main__":
    main()
