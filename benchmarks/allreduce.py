"""`python -m benchmarks allreduce`: all-reduce over offbeat's links against gloo, on lines of known rate.

Four network namespaces on one machine, each shaped to the rate, stand for four hosts with one worker each.
Blocks of consecutive all-reduces alternate between the sides in one run: links, as strategies use them; each
algorithm over links; gloo; and plain sockets. The sockets move as many bytes as a ring and sum nothing: they
show the limit of the lines and this machine.

Then two namespaces with four workers each sum the largest vector, by the flat ring and in two levels, and
choose between the two as workers do at a job's start. All of that takes long enough for large token buckets
(`benchmarks.namespaces`), which leave the two levels more of the processor.

With `--one-host` the workers share a host, where links use Unix sockets and shared memory. If Open MPI is
installed, it is one more side.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from benchmarks import mpi
from benchmarks.commands import AllreduceOptions
from benchmarks.gloo import GlooSide, bound_s
from benchmarks.namespaces import Host, hosts
from benchmarks.sockets import SocketRing
from benchmarks.workers import read_settings, run_workers, send_result
from offbeat.cli.result import Result, machine
from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.hosts import hierarchy_of
from offbeat.numerics.collectives.schedules import ALGORITHMS, AUTO
from offbeat.runtime.averaging.exchange_choice import Candidate, choose_exchange
from offbeat.runtime.collectives.interface import TensorMemory
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.control.environment import read_environment
from offbeat.runtime.devices.host import Host as LocalHost
from offbeat.runtime.launch import find_free_port
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.torch_compat import default_store

SIZES_BYTES = {"35KB": 35_000, "600KB": 600_000, "5MB": 5_000_000, "67MB": 67_000_000}
_ROUNDS = {"35KB": 40, "600KB": 20, "5MB": 6, "67MB": 2}
_LARGEST = "67MB"
_HOSTS, _WORKERS_PER_HOST = 2, 4
_HIERARCHY = f"torus:{_WORKERS_PER_HOST}"
_EARLY_S = 800e-6
_DEADLINE_S = 120.0
_LOOPBACK = "127.0.0.1"
_Side = Callable[[torch.Tensor], torch.Tensor | None]
_Measured: TypeAlias = tuple[dict[str, float], list[dict[str, Any]], dict[str, Any]]  # figures, rows, machine


def run(options: AllreduceOptions, *, command: str) -> Result:
    """Measure all sizes, in temporary network namespaces as root, or on this host."""
    measure = _measure_one_host if options.one_host else _measure_hosts
    figures, rows, place = measure(options)
    return Result(
        name="allreduce",
        command=command,
        kind="real",
        seed=options.seed,
        figures=figures,
        rows=rows,
        machine=machine(**place),
    )


def _measure_one_host(options: AllreduceOptions) -> _Measured:
    times_s = _run_sides(options, [None] * options.workers, list(SIZES_BYTES), ALGORITHMS)["times_s"]
    figures = {}
    for size, sides_s in times_s.items():
        p50_s = {side: median(all_s) for side, all_s in sides_s.items()}
        figures[f"links_ms_{size}"] = p50_s["links"] * 1e3
        figures |= _ratios(size, p50_s, [side for side in ("gloo", "mpi", "sockets") if side in p50_s])
    return figures, _rows(times_s), {}


def _measure_hosts(options: AllreduceOptions) -> _Measured:
    workers, rate_bit_per_s = options.workers, options.rate_mbit * 1_000_000
    with hosts(workers, rate_bit_per_s=rate_bit_per_s) as made:
        times_s = _run_sides(options, made, list(SIZES_BYTES), ALGORITHMS)["times_s"]
        congestion_control = made[0].congestion_control
    with hosts(_HOSTS, rate_bit_per_s=rate_bit_per_s, early_s=_EARLY_S) as made:
        places = [host for host in made for _ in range(_WORKERS_PER_HOST)]
        fewer = replace(options, blocks=-(-options.blocks // 3))
        by_hosts = _run_sides(fewer, places, [_LARGEST], ("ring", _HIERARCHY))
    figures = {}
    for size, sides_s in times_s.items():
        least_s = bound_s(SIZES_BYTES[size], workers, rate_bit_per_s)
        p50_s = {side: median(all_s) for side, all_s in sides_s.items()}
        figures[f"links_ms_{size}"] = p50_s["links"] * 1e3
        figures[f"ratio_to_bound_{size}"] = p50_s["links"] / least_s
        figures[f"sockets_ratio_to_bound_{size}"] = p50_s["sockets"] / least_s
        figures |= _ratios(size, p50_s, ["gloo", "sockets"])
    ring_s, hierarchical_s = (median(by_hosts["times_s"][_LARGEST][side]) for side in ("ring", _HIERARCHY))
    figures[f"hierarchical_to_flat_ratio_{_LARGEST}"] = hierarchical_s / ring_s
    trial_s = by_hosts["trial_s"]
    figures["hierarchical_to_flat_ratio_trial"] = trial_s[_HIERARCHY] / trial_s["ring"]
    figures["trial_duration_s"] = by_hosts["trial_duration_s"]
    place = {"congestion_control": congestion_control, "line_mbit_per_s": rate_bit_per_s / 1e6}
    return figures, _rows(times_s), place


def _ratios(size: str, p50_s: Mapping[str, float], others: Sequence[str]) -> dict[str, float]:
    """Return the ratios of links to the other sides, and of the algorithms to the ring."""
    found = {f"ratio_to_{other}_{size}": p50_s["links"] / p50_s[other] for other in others}
    for algorithm in ALGORITHMS:
        if algorithm != "ring":
            found[f"ratio_to_ring_{size}_{algorithm}"] = p50_s[algorithm] / p50_s["ring"]
    return found


def _rows(times_s: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    return [
        {
            "size": size,
            "side": side,
            "all_reduce_ms_p50": median(all_s) * 1e3,
            "all_reduce_ms_min": min(all_s) * 1e3,
            "all_reduce_ms_max": max(all_s) * 1e3,
        }
        for size, sides_s in times_s.items()
        for side, all_s in sides_s.items()
    ]


def _run_sides(
    options: AllreduceOptions, places: Sequence[Host | None], sizes: list[str], algorithms: Sequence[str]
) -> dict[str, Any]:
    """Run a worker at each place, None for this host; return what `main` sends."""
    addresses = [_LOOPBACK if host is None else host.address for host in places]
    settings = {
        "addresses": addresses,
        "interface": None if places[0] is None else places[0].interface,
        "port": find_free_port(),
        "sizes": sizes,
        "algorithms": algorithms,
        "blocks": options.blocks,
        "has_mpi": options.one_host and mpi.is_installed(),
        "seed": options.seed,
    }
    found: dict[str, Any] = run_workers(
        "benchmarks.allreduce",
        settings,
        len(places),
        prefix=[[] if host is None else host.prefix for host in places],
        master_addr=addresses[0],
    )
    return found


def main() -> None:
    """Run the sides in alternation, as one worker; rank 0 sends the results.

    They are by size and side the seconds per all-reduce of each block and, with several workers a host, the
    seconds that each algorithm took in the trial by which workers choose, and that the trial took.
    """
    settings = read_settings(sys.argv)
    torch.set_num_threads(1)
    environment = read_environment()
    rank, world, addresses = environment.rank, environment.world, settings["addresses"]
    with GlooSide(
        rank, world, addresses[0], settings["port"], interface=settings["interface"], limit_s=_DEADLINE_S
    ) as gloo:
        endpoint = _open_links(rank, addresses)
        names = [f"worker-{other}" for other in range(world)]
        exchange = LinkExchange(endpoint, names, rank)
        ids = iter(range(2**31))

        memory = TensorMemory(endpoint, LocalHost())
        sums = {size: memory.zeros(SIZES_BYTES[size] // 4, torch.float32) for size in settings["sizes"]}

        def over_links(tensor: torch.Tensor, algorithm: str = AUTO) -> torch.Tensor:
            into = sums[size]
            exchange.all_reduce(tensor, into, exchange_id=next(ids), algorithm=algorithm).wait(_DEADLINE_S)
            return into

        def over_gloo(tensor: torch.Tensor) -> torch.Tensor:
            gloo.all_reduce(tensor)
            return tensor

        times_s = {}
        for size in settings["sizes"]:
            with _open_sockets(rank, addresses, size) as sockets:

                def over_sockets(tensor: torch.Tensor, ring: SocketRing = sockets) -> None:
                    ring.move(2 * (world - 1) * tensor.nbytes // world)

                sides: dict[str, _Side] = {"links": over_links, "gloo": over_gloo, "sockets": over_sockets}
                sides |= {other: partial(over_links, algorithm=other) for other in settings["algorithms"]}
                times_s[size] = _measure(sides, size, settings, memory)
                dist.barrier()
        found: dict[str, Any] = {"times_s": times_s}
        if hierarchy_of(addresses) is not None:
            began_s = time.perf_counter()
            choice = choose_exchange(
                {one: Candidate(exchange, one) for one in settings["algorithms"]},
                exchange,
                memory,
                SIZES_BYTES[_LARGEST],
                next_exchange_id=partial(next, ids),
                timeout_s=_DEADLINE_S,
            )
            found |= {"trial_s": choice.times_s, "trial_duration_s": time.perf_counter() - began_s}
        if rank == 0:
            send_result(found)
        endpoint.close()


def _open_sockets(rank: int, addresses: list[str], size: str) -> SocketRing:
    """Open this worker's position in a ring of plain sockets.

    Each size has new connections: TCP may shrink a connection's window when it takes reordered packets for
    lost ones, and the window grows back so slowly that all later transfers would be delayed.
    """
    store = default_store()
    listener = socket.create_server((addresses[rank], 0))
    store.set(f"sockets/{size}/{rank}", str(listener.getsockname()[1]))
    following = (rank + 1) % len(addresses)
    port = int(store.get(f"sockets/{size}/{following}"))
    return SocketRing(listener, (addresses[following], port), limit_s=_DEADLINE_S)


def _open_links(rank: int, addresses: list[str]) -> Endpoint:
    """Open this worker's links; addresses are exchanged through a store of this benchmark's own."""
    endpoint = Endpoint(
        f"worker-{rank}",
        job="bench",
        token="bench",
        on_message=lambda peer, payload: None,
        on_lost=lambda error: print(error, file=sys.stderr),
        host=addresses[rank],
        unix=len(set(addresses)) < len(addresses),
    )
    store = default_store()
    store.set_timeout(timedelta(seconds=_DEADLINE_S))
    store.set(f"links/{rank}", json.dumps(endpoint.addresses))
    for other in range(len(addresses)):
        if other != rank:
            endpoint.add_peer(f"worker-{other}", json.loads(store.get(f"links/{other}")))
    return endpoint


def _measure(
    sides: Mapping[str, _Side], size: str, settings: dict[str, Any], memory: TensorMemory
) -> dict[str, list[float]]:
    """Return each block's mean seconds per all-reduce; the first block warms up and checks the sum.

    A side that returns None sums nothing. Open MPI's processes are started by rank 0, which alone returns
    their times.
    """
    generator = torch.Generator().manual_seed(settings["seed"] + dist.get_rank())
    own = torch.randint(-8, 8, (SIZES_BYTES[size] // 4,), generator=generator).float()
    expected = own.clone()
    dist.all_reduce(expected)
    tensor = memory.zeros(own.numel(), own.dtype)
    times_s: dict[str, list[float]] = {side: [] for side in sides}
    if settings["has_mpi"]:
        times_s["mpi"] = []
    for block in range(settings["blocks"] + 1):
        if settings["has_mpi"] and dist.get_rank() == 0 and block:
            nbytes, workers = tensor.nbytes, dist.get_world_size()
            times_s["mpi"].append(mpi.all_reduce_s(nbytes, _ROUNDS[size], workers, limit_s=_DEADLINE_S))
        for side in list(sides)[:: 1 if block % 2 else -1]:
            tensor.copy_(own)
            dist.barrier()
            if not block:
                total = sides[side](tensor)
                if total is not None and not torch.equal(total, expected):
                    raise OffbeatError(f"{side} gave a wrong sum for {size}")
                continue
            began_s = time.perf_counter()
            for _ in range(_ROUNDS[size]):
                sides[side](tensor)
            times_s[side].append((time.perf_counter() - began_s) / _ROUNDS[size])
    if dist.get_rank() == 0:
        print(f"{size}: done", flush=True)
    return times_s


if __name__ == "__main__":
    main()
