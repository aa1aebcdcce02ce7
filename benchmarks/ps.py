"""`python -m benchmarks ps`: what a parameter server carries, by size, operation and how much is under way.

Servers add what is pushed, and hold it once. All of it, manager, servers and workers, runs in a network
namespace of its own, where loopback has an ordinary congestion control; there over TCP, and for comparison
over what nodes of one host use by themselves. Plain sockets to a process that adds are the floor under it.
In the end, what the servers hold is compared with what was pushed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.adding import sockets_per_s
from benchmarks.children import Child, Lines, ask_all
from benchmarks.namespaces import hosts
from benchmarks.pushing import Case
from offbeat.cli.result import Result, machine, percentile
from offbeat.errors import OffbeatError
from offbeat.runtime.ps.cluster import start_manager, start_server
from offbeat.runtime.ps.node import ClusterFile
from offbeat.runtime.ps.server import ServerConfiguration

DENSE_BYTES = {
    "4KB": 4_000,
    "64KB": 64_000,
    "1MB": 1_000_000,
    "16MB": 16_000_000,
    "64MB": 64_000_000,
}
SPARSE_KEYS = {"1k": 1_000, "100k": 100_000, "1M": 1_000_000}
OPERATIONS = ("push", "pull", "pushpull")
_IN_FLIGHT, _IN_FLIGHT_MANY = 16, 128
_IN_FLIGHT_BYTES = 128_000_000  # at most, and two requests at least
_SMALL_BYTES = 100_000  # up to which there are very many in flight, too
_WATCHED = ("64MB", "4KB")
_DEADLINE_S = 900.0
_HOST = "127.0.0.1"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    sizes: tuple[str, ...]
    seconds: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found of a case.

    Attributes:
        transport: "tcp", or "shared" for what nodes of one host use.
        nodes: how many workers, and as many servers.
        per_s: requests a second, of all workers.
        latency_s: of each request.
    """

    case: Case
    transport: str
    nodes: int
    per_s: float
    latency_s: list[float]


def run(*, command: str, sizes: Sequence[str] = (), seconds: float = 0.5, seed: int = 0) -> Result:
    """Measure; needs root.

    Args:
        sizes: those of `DENSE_BYTES` and `SPARSE_KEYS`; by default all.
        seconds: how long at least, and with 5 repetitions, each case is measured.
        seed: of the keys.

    Raises:
        ValueError: an unknown size, or no time.
        OffbeatError: no root, no iproute2, or something failed.
    """
    known = (*DENSE_BYTES, *SPARSE_KEYS)
    if unknown := [size for size in sizes if size not in known]:
        raise ValueError(f"expected sizes of {', '.join(known)}, got {unknown[0]}")
    if not 0 < seconds <= 60:
        raise ValueError(f"expected to measure for up to 60 s, got {seconds:g} s")
    settings = Settings(sizes=tuple(sizes) or known, seconds=seconds, seed=seed)
    with hosts(1) as (host,):
        with Child("benchmarks.ps", name="the measuring process", prefix=host.prefix) as child:
            child.lines.tell(msgspec.to_builtins(settings))
            answer = child.lines.hear(_DEADLINE_S)
    if "error" in answer:
        raise OffbeatError(answer["error"])
    return Result(
        name="ps",
        command=command,
        kind="real",
        seed=seed,
        figures=answer["figures"],
        rows=answer["rows"],
        machine=machine(congestion_control=host.congestion_control),
    )


def cases(sizes: Sequence[str]) -> list[Case]:
    """Return what is measured of some sizes."""
    found = []
    for size in sizes:
        is_sparse = size in SPARSE_KEYS
        count = SPARSE_KEYS[size] if is_sparse else DENSE_BYTES[size] // 4
        kinds = [(operation, False) for operation in OPERATIONS]
        if is_sparse:
            kinds.append(("push", True))
        for operation, is_fresh in kinds:
            one = Case(
                operation=operation,
                size=size,
                count=count,
                is_sparse=is_sparse,
                is_fresh=is_fresh,
                in_flight=1,
            )
            under_way = [_usual(one)]
            if not is_fresh:
                under_way.insert(0, 1)
                if one.size_bytes <= _SMALL_BYTES:
                    under_way.append(_IN_FLIGHT_MANY)
            found += [msgspec.structs.replace(one, in_flight=in_flight) for in_flight in under_way]
    return found


def _usual(case: Case) -> int:
    """How many requests are under way, if it is not one."""
    return max(2, min(_IN_FLIGHT, _IN_FLIGHT_BYTES // case.size_bytes))


def by_transport(turns: Sequence[Found]) -> list[Found]:
    """Return what was found of a case by turns as one for each transport: machines are faster at times."""
    found: dict[str, list[Found]] = {}
    for one in turns:
        found.setdefault(one.transport, []).append(one)
    return [
        replace(
            several[0],
            per_s=fmean(one.per_s for one in several),
            latency_s=list(itertools.chain.from_iterable(one.latency_s for one in several)),
        )
        for several in found.values()
    ]


def figures(all_found: Sequence[Found]) -> dict[str, float]:
    """Return the figures of what was found."""
    made: dict[str, float] = {}
    rates = {(one.case, one.nodes, one.transport): one.per_s for one in all_found}
    for one in all_found:
        if one.transport == "tcp":
            made |= _figures_of(one)
    for (case, nodes, transport), per_s in rates.items():
        tcp_per_s = rates.get((case, nodes, "tcp"))
        if transport == "shared" and tcp_per_s is not None:
            made[f"shared_to_tcp_{case.operation}_{case.size}"] = per_s / tcp_per_s
    return made


def _figures_of(found: Found) -> dict[str, float]:
    case = found.case
    name = f"sparse_{case.operation}_{case.size}" if case.is_sparse else f"{case.operation}_{case.size}"
    name += "_fresh" if case.is_fresh else ""
    end = "" if found.nodes == 1 else f"_{found.nodes}x{found.nodes}"
    if case.in_flight == 1:
        return {f"{name}_p{p}_us{end}": percentile(found.latency_s, p) * 1e6 for p in (50, 99)}
    if case.in_flight != _usual(case):
        name += f"_{case.in_flight}_in_flight"
    if case.is_sparse:
        return {f"{name}_keys_per_s{end}": found.per_s * case.count * case.ways}
    made = {f"{name}_per_s{end}": found.per_s}
    if case.in_flight == _usual(case):
        made[f"{name}_gb_per_s{end}"] = _gb_per_s(found)
    return made


def _gb_per_s(found: Found) -> float:
    """Of values, each way that they go."""
    return found.per_s * found.case.count * 4 * found.case.ways / 1e9


def _row(found: Found) -> dict[str, Any]:
    case = found.case
    return {
        "where": f"{found.transport} {found.nodes}+{found.nodes}",
        "what": case.title,
        "in_flight": case.in_flight,
        "per_s": found.per_s,
        "gb_per_s": _gb_per_s(found),
        "keys_per_s": found.per_s * case.count * case.ways if case.is_sparse else None,
        "p50_us": percentile(found.latency_s, 50) * 1e6,
        "p99_us": percentile(found.latency_s, 99) * 1e6,
    }


# In the namespace ---------------------------------------------------------------------------------------


def measured(settings: Settings) -> dict[str, Any]:
    """Measure all, and return figures and rows."""
    every = cases(settings.sizes)
    compared = [case for case in every if not case.is_sparse and case.in_flight == _usual(case)]
    found: list[Found] = []
    with _Cluster("tcp", 1, settings) as tcp, _Cluster("shared", 1, settings) as shared:
        for case in every:
            turns = (tcp, shared, shared, tcp) if case in compared else (tcp,)
            found += by_transport([one.measure(case) for one in turns])
        tcp.check(every)
        shared.check(compared)
    with _Cluster("tcp", 2, settings) as two:
        found += [two.measure(case) for case in every]
        two.check(every)
    rows = [_row(one) for one in found]
    floors = [_floor(case, settings.seconds) for case in compared if case.operation == "push"]
    rows += floors
    made = figures(found) | {
        f"sockets_{row['what'].replace(' ', '_')}_{unit}": row[unit]
        for row in floors
        for unit in ("per_s", "gb_per_s")
    }
    for size in _WATCHED:
        for case in compared:
            if (case.operation, case.size) == ("push", size):
                _say(f"where the time of a push of {size} goes")
                rows += _watched(case, settings)
    return {"figures": made, "rows": rows}


def _floor(case: Case, seconds: float) -> dict[str, Any]:
    """What plain sockets carry of a push, to a process that adds."""
    _say(f"plain sockets: {case.title}, {case.in_flight} in flight")
    per_s = sockets_per_s(case.size_bytes, case.in_flight, seconds)
    return {
        "where": "plain sockets",
        "what": case.title,
        "in_flight": case.in_flight,
        "per_s": per_s,
        "gb_per_s": per_s * case.size_bytes / 1e9,
    }


class _Cluster:
    """A parameter server, and as many workers as it has servers.

    Args:
        transport: "tcp", or "shared" for what nodes of one host use.
        nodes: how many servers.
    """

    def __init__(self, transport: str, nodes: int, settings: Settings) -> None:
        self._transport, self._nodes, self._settings = transport, nodes, settings

    def __enter__(self) -> _Cluster:
        with ExitStack() as stack:
            cluster = start_manager(self._nodes, host=_HOST, copies=0)
            for server in range(self._nodes):
                is_shared = self._transport == "shared"
                process = start_server(
                    ServerConfiguration(cluster=cluster, host=_HOST, server=server, unix=is_shared)
                )
                stack.enter_context(process)
                stack.callback(process.kill)
            self._workers = stack.enter_context(_workers(self._nodes, cluster, self._settings.seed))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, case: Case) -> Found:
        """Make requests, and see how many a second are done."""
        _say(f"{self._transport} {self._nodes}+{self._nodes}: {case.title}, {case.in_flight} in flight")
        told = _measure(self._workers, case, self._settings.seconds)
        return Found(
            case=case,
            transport=self._transport,
            nodes=self._nodes,
            per_s=sum(median(one["per_s"]) for one in told),
            latency_s=list(itertools.chain.from_iterable(one["latency_s"] for one in told)),
        )

    def check(self, measured: Sequence[Case]) -> None:
        """See whether the servers have added all that was pushed.

        Raises:
            OffbeatError: they have not.
        """
        pushed = ask_all(self._workers, {"do": "pushed"})
        for case in {case.namespace: case for case in measured}.values():
            wanted = sum(one.get(case.namespace, 0) for one in pushed)
            (held,) = ask_all(self._workers[:1], {"do": "held", "case": msgspec.to_builtins(case)})
            if held != wanted:
                raise OffbeatError(f"the servers hold {held:,.0f} of {case.namespace}, {wanted:,} was pushed")


@contextmanager
def _workers(count: int, cluster: ClusterFile, seed: int) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Child("benchmarks.pushing", name=f"worker {worker}"))
            for worker in range(count)
        ]
        for worker, child in enumerate(workers):
            child.lines.tell({"cluster": msgspec.to_builtins(cluster), "seed": seed + worker})
        for child in workers:
            child.lines.hear()
        yield workers


def _measure(
    workers: Sequence[Child], case: Case, seconds: float, *, is_watched: bool = False
) -> list[dict[str, Any]]:
    asked = {"case": msgspec.to_builtins(case), "seconds": seconds, "is_watched": is_watched}
    ask_all(workers, {"do": "measure", **asked})  # they are warm
    ask_all(workers, "go")  # they have made enough
    return ask_all(workers, "stop")


def _watched(case: Case, settings: Settings) -> list[dict[str, Any]]:
    """Of pushes over TCP, what the threads of worker and server are at."""
    cluster = start_manager(1, host=_HOST, copies=0)
    configuration = ServerConfiguration(cluster=cluster, host=_HOST, server=0, unix=False)
    with Child("benchmarks.sampling", name="the server that is looked at") as server:
        ask_all([server], msgspec.to_builtins(configuration))
        with _workers(1, cluster, settings.seed) as workers:
            ask_all([server], "begin")
            (told,) = _measure(workers, case, 2 * settings.seconds, is_watched=True)
            (of_server,) = ask_all([server], "end")
    shares = [("worker", row) for row in told["shares"]] + [("server", row) for row in of_server]
    return [
        {
            "where": f"{process}, thread {row['thread']}",
            "what": case.title,
            "in_flight": case.in_flight,
            "function": row["function"],
            "share": row["share"],
        }
        for process, row in shares
    ]


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Measure in the namespace in which this process is."""
    lines = Lines.to_parent()
    settings = msgspec.convert(lines.hear(), Settings)
    try:
        lines.tell(measured(settings))
    except OffbeatError as error:
        lines.tell({"error": str(error)})


if __name__ == "__main__":
    main()
