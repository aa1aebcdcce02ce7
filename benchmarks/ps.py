"""`python -m benchmarks ps`: parameter server throughput and latency by size, operation and concurrency.

Servers add pushed values, without replicas. Manager, servers and workers run in one network namespace, where
loopback has an ordinary congestion control: over TCP, and for comparison over the default transport between
nodes of one host. Plain sockets to a process that adds are the lower bound. At the end, the servers' values
are compared with what was pushed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import msgspec

from benchmarks.adding import sockets_per_s
from benchmarks.children import Child, Lines, request_all
from benchmarks.commands import PsOptions
from benchmarks.namespaces import hosts
from benchmarks.pushing import RequestCase
from benchmarks.workers import print_progress
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
_IN_FLIGHT_BYTES = 128_000_000  # at most, but two requests at least
_SMALL_BYTES = 100_000  # up to this size also with `_IN_FLIGHT_MANY` requests
_SAMPLED = ("64MB", "4KB")
_DEADLINE_S = 900.0
_HOST = "127.0.0.1"


class PsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the benchmark."""

    sizes: tuple[str, ...]
    seconds: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class PsMeasurement:
    """Measurements of a case.

    Attributes:
        transport: "tcp", or "shared" for the default between nodes of one host.
        nodes: number of workers, and of servers.
        per_s: requests per second, over all workers.
        latency_s: of each request.
    """

    case: RequestCase
    transport: str
    nodes: int
    per_s: float
    latency_s: list[float]


def run(options: PsOptions, *, command: str) -> Result:
    """Run the benchmark; needs root.

    Raises:
        ValueError: an unknown size, or a time out of range.
        OffbeatError: no root, no iproute2, or a process failed.
    """
    sizes = [size.strip() for size in options.sizes.split(",") if size.strip()]
    seconds = options.seconds
    known = (*DENSE_BYTES, *SPARSE_KEYS)
    if unknown := [size for size in sizes if size not in known]:
        raise ValueError(f"expected sizes of {', '.join(known)}, got {unknown[0]}")
    if not 0 < seconds <= 60:
        raise ValueError(f"expected to measure for up to 60 s, got {seconds:g} s")
    settings = PsSettings(sizes=tuple(sizes) or known, seconds=seconds, seed=options.seed)
    with hosts(1) as (host,):
        with Child("benchmarks.ps", name="the measuring process", prefix=host.prefix) as child:
            child.lines.send(msgspec.to_builtins(settings))
            answer = child.lines.receive(_DEADLINE_S)
    if "error" in answer:
        raise OffbeatError(answer["error"])
    return Result(
        name="ps",
        command=command,
        kind="real",
        seed=options.seed,
        figures=answer["figures"],
        rows=answer["rows"],
        machine=machine(congestion_control=host.congestion_control),
    )


def cases(sizes: Sequence[str]) -> list[RequestCase]:
    """Return the cases of some sizes."""
    found = []
    for size in sizes:
        is_sparse = size in SPARSE_KEYS
        count = SPARSE_KEYS[size] if is_sparse else DENSE_BYTES[size] // 4
        kinds = [(operation, False) for operation in OPERATIONS]
        if is_sparse:
            kinds.append(("push", True))
        for operation, is_fresh in kinds:
            one = RequestCase(
                operation=operation,
                size=size,
                count=count,
                is_sparse=is_sparse,
                is_fresh=is_fresh,
                in_flight=1,
            )
            in_flight_counts = [_default_in_flight(one)]
            if not is_fresh:
                in_flight_counts.insert(0, 1)
                if one.size_bytes <= _SMALL_BYTES:
                    in_flight_counts.append(_IN_FLIGHT_MANY)
            found += [msgspec.structs.replace(one, in_flight=in_flight) for in_flight in in_flight_counts]
    return found


def _default_in_flight(case: RequestCase) -> int:
    """Return the number of requests in flight in cases with more than one."""
    return max(2, min(_IN_FLIGHT, _IN_FLIGHT_BYTES // case.size_bytes))


def by_transport(turns: Sequence[PsMeasurement]) -> list[PsMeasurement]:
    """Return one result per transport from alternating measurements, since the machine's speed changes."""
    found: dict[str, list[PsMeasurement]] = {}
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


def figures(all_found: Sequence[PsMeasurement]) -> dict[str, float]:
    """Return the figures of all measurements."""
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


def _figures_of(found: PsMeasurement) -> dict[str, float]:
    case = found.case
    name = f"sparse_{case.operation}_{case.size}" if case.is_sparse else f"{case.operation}_{case.size}"
    name += "_fresh" if case.is_fresh else ""
    end = "" if found.nodes == 1 else f"_{found.nodes}x{found.nodes}"
    if case.in_flight == 1:
        return {f"{name}_p{p}_us{end}": percentile(found.latency_s, p) * 1e6 for p in (50, 99)}
    if case.in_flight != _default_in_flight(case):
        name += f"_{case.in_flight}_in_flight"
    if case.is_sparse:
        return {f"{name}_keys_per_s{end}": found.per_s * case.count * case.ways}
    made = {f"{name}_per_s{end}": found.per_s}
    if case.in_flight == _default_in_flight(case):
        made[f"{name}_gb_per_s{end}"] = _gb_per_s(found)
    return made


def _gb_per_s(found: PsMeasurement) -> float:
    """Return the rate of values, in both directions, in 10^9 bytes per second."""
    return found.per_s * found.case.count * 4 * found.case.ways / 1e9


def _row(found: PsMeasurement) -> dict[str, Any]:
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


def measure_all(settings: PsSettings) -> dict[str, Any]:
    """Measure all cases; return figures and rows."""
    all_cases = cases(settings.sizes)
    compared = [
        case for case in all_cases if not case.is_sparse and case.in_flight == _default_in_flight(case)
    ]
    found: list[PsMeasurement] = []
    with _BenchmarkCluster("tcp", 1, settings) as tcp, _BenchmarkCluster("shared", 1, settings) as shared:
        for case in all_cases:
            turns = (tcp, shared, shared, tcp) if case in compared else (tcp,)
            found += by_transport([one.measure(case) for one in turns])
        tcp.check(all_cases)
        shared.check(compared)
    with _BenchmarkCluster("tcp", 2, settings) as two:
        found += [two.measure(case) for case in all_cases]
        two.check(all_cases)
    rows = [_row(one) for one in found]
    floors = [_floor(case, settings.seconds) for case in compared if case.operation == "push"]
    rows += floors
    made = figures(found) | {
        f"sockets_{row['what'].replace(' ', '_')}_{unit}": row[unit]
        for row in floors
        for unit in ("per_s", "gb_per_s")
    }
    for size in _SAMPLED:
        for case in compared:
            if (case.operation, case.size) == ("push", size):
                print_progress(f"where the time of a push of {size} goes")
                rows += _sampled_rows(case, settings)
    return {"figures": made, "rows": rows}


def _floor(case: RequestCase, seconds: float) -> dict[str, Any]:
    """Return the rate of plain sockets to a process that adds, for the data of a push."""
    print_progress(f"plain sockets: {case.title}, {case.in_flight} in flight")
    per_s = sockets_per_s(case.size_bytes, case.in_flight, seconds)
    return {
        "where": "plain sockets",
        "what": case.title,
        "in_flight": case.in_flight,
        "per_s": per_s,
        "gb_per_s": per_s * case.size_bytes / 1e9,
    }


class _BenchmarkCluster:
    """A parameter server with as many workers as servers.

    Args:
        transport: "tcp", or "shared" for the default between nodes of one host.
        nodes: number of servers.
    """

    def __init__(self, transport: str, nodes: int, settings: PsSettings) -> None:
        self._transport, self._nodes, self._settings = transport, nodes, settings

    def __enter__(self) -> _BenchmarkCluster:
        with ExitStack() as stack:
            cluster = start_manager(self._nodes, host=_HOST, replicas=0)
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

    def measure(self, case: RequestCase) -> PsMeasurement:
        """Measure one case with all workers."""
        print_progress(
            f"{self._transport} {self._nodes}+{self._nodes}: {case.title}, {case.in_flight} in flight"
        )
        replies = _measure(self._workers, case, self._settings.seconds)
        return PsMeasurement(
            case=case,
            transport=self._transport,
            nodes=self._nodes,
            per_s=sum(median(one["per_s"]) for one in replies),
            latency_s=list(itertools.chain.from_iterable(one["latency_s"] for one in replies)),
        )

    def check(self, measured: Sequence[RequestCase]) -> None:
        """Compare the servers' sums with what was pushed.

        Raises:
            OffbeatError: they differ.
        """
        pushed = request_all(self._workers, {"do": "pushed"})
        for case in {case.namespace: case for case in measured}.values():
            expected = sum(one.get(case.namespace, 0) for one in pushed)
            (held,) = request_all(self._workers[:1], {"do": "held", "case": msgspec.to_builtins(case)})
            if held != expected:
                raise OffbeatError(f"the servers hold {held:,.0f} of {case.namespace}, expected {expected:,}")


@contextmanager
def _workers(count: int, cluster: ClusterFile, seed: int) -> Iterator[list[Child]]:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Child("benchmarks.pushing", name=f"worker {worker}"))
            for worker in range(count)
        ]
        for worker, child in enumerate(workers):
            child.lines.send({"cluster": msgspec.to_builtins(cluster), "seed": seed + worker})
        for child in workers:
            child.lines.receive()
        yield workers


def _measure(
    workers: Sequence[Child], case: RequestCase, seconds: float, *, is_sampled: bool = False
) -> list[dict[str, Any]]:
    command = {"case": msgspec.to_builtins(case), "seconds": seconds, "is_sampled": is_sampled}
    request_all(workers, {"do": "measure", **command})  # replies when warmed up
    request_all(workers, "go")  # replies when all have made enough requests
    return request_all(workers, "stop")


def _sampled_rows(case: RequestCase, settings: PsSettings) -> list[dict[str, Any]]:
    """Return where the threads of worker and server spend the time of pushes over TCP."""
    cluster = start_manager(1, host=_HOST, replicas=0)
    configuration = ServerConfiguration(cluster=cluster, host=_HOST, server=0, unix=False)
    with Child("benchmarks.sampling", name="the sampled server") as server:
        request_all([server], msgspec.to_builtins(configuration))
        with _workers(1, cluster, settings.seed) as workers:
            request_all([server], "begin")
            (reply,) = _measure(workers, case, 2 * settings.seconds, is_sampled=True)
            (of_server,) = request_all([server], "end")
    shares = [("worker", row) for row in reply["shares"]] + [("server", row) for row in of_server]
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


def main() -> None:
    """Measure in the network namespace of this process."""
    lines = Lines.to_parent()
    settings = msgspec.convert(lines.receive(), PsSettings)
    try:
        lines.send(measure_all(settings))
    except OffbeatError as error:
        lines.send({"error": str(error)})


if __name__ == "__main__":
    main()
