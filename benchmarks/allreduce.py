"""`python -m benchmarks allreduce`: all-reduce over offbeat's links against gloo, on lines of known rate.

Four network namespaces on one machine, each shaped to the rate, stand for four hosts with one worker each.
Blocks of consecutive all-reduces alternate between the sides in one run: the ring over links, the other
algorithms over links, gloo, and plain sockets. The sockets move as many bytes as the ring and sum nothing:
they show the limit of the lines and this machine.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.commands import AllreduceOptions
from benchmarks.gloo import GlooSide, bound_s
from benchmarks.namespaces import hosts
from benchmarks.sockets import SocketRing
from benchmarks.workers import read_settings, run_workers, send_result
from offbeat.cli.result import Result, machine
from offbeat.errors import OffbeatError
from offbeat.numerics.collectives.schedules import ALGORITHMS
from offbeat.runtime.collectives.link_exchange import LinkExchange
from offbeat.runtime.control.environment import read_environment
from offbeat.runtime.launch import find_free_port
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.torch_compat import default_store

SIZES_BYTES = {"35KB": 35_000, "600KB": 600_000, "5MB": 5_000_000, "67MB": 67_000_000}
_ROUNDS = {"35KB": 40, "600KB": 20, "5MB": 6, "67MB": 2}
_OTHERS = tuple(algorithm for algorithm in ALGORITHMS if algorithm != "ring")
_DEADLINE_S = 120.0
_Side = Callable[[torch.Tensor], torch.Tensor | None]


def run(options: AllreduceOptions, *, command: str) -> Result:
    """Measure all sizes, in temporary network namespaces; needs root."""
    workers, rate_bit_per_s = options.workers, options.rate_mbit * 1_000_000
    with hosts(workers, rate_bit_per_s=rate_bit_per_s) as made:
        settings = {
            "addresses": [host.address for host in made],
            "interface": made[0].interface,
            "port": find_free_port(),
            "sizes": list(SIZES_BYTES),
            "blocks": options.blocks,
            "seed": options.seed,
        }
        times_s = run_workers(
            "benchmarks.allreduce",
            settings,
            workers,
            prefix=[host.prefix for host in made],
            master_addr=made[0].address,
        )
        congestion_control = made[0].congestion_control
    rows, figures = [], {}
    for size, nbytes in SIZES_BYTES.items():
        least_s = bound_s(nbytes, workers, rate_bit_per_s)
        links_s, gloo_s, sockets_s = (median(times_s[size][side]) for side in ("links", "gloo", "sockets"))
        figures[f"ratio_to_bound_{size}"] = links_s / least_s
        figures[f"ratio_to_gloo_{size}"] = links_s / gloo_s
        figures[f"ratio_to_sockets_{size}"] = links_s / sockets_s
        figures[f"sockets_ratio_to_bound_{size}"] = sockets_s / least_s
        for algorithm in _OTHERS:
            figures[f"ratio_to_ring_{size}_{algorithm}"] = median(times_s[size][algorithm]) / links_s
        for side, all_s in times_s[size].items():
            rows.append(
                {
                    "size": size,
                    "side": side,
                    "all_reduce_ms_p50": median(all_s) * 1e3,
                    "all_reduce_ms_min": min(all_s) * 1e3,
                    "all_reduce_ms_max": max(all_s) * 1e3,
                    "bound_ms": least_s * 1e3,
                    "ratio_to_bound": median(all_s) / least_s,
                }
            )
    return Result(
        name="allreduce",
        command=command,
        kind="real",
        seed=options.seed,
        figures=figures,
        rows=rows,
        machine=machine(congestion_control=congestion_control, line_mbit_per_s=rate_bit_per_s / 1e6),
    )


def main() -> None:
    """Run the sides in alternation, as one worker; rank 0 sends the seconds per all-reduce of each block."""
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

        sums = {nbytes: torch.empty(nbytes // 4) for nbytes in SIZES_BYTES.values()}

        def over_links(tensor: torch.Tensor, algorithm: str = "ring") -> torch.Tensor:
            into = sums[tensor.nbytes]
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
                sides |= {other: partial(over_links, algorithm=other) for other in _OTHERS}
                times_s[size] = _measure(sides, size, settings)
                dist.barrier()
        if rank == 0:
            send_result(times_s)
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
        unix=len(set(addresses)) == 1,
    )
    store = default_store()
    store.set_timeout(timedelta(seconds=_DEADLINE_S))
    store.set(f"links/{rank}", json.dumps(endpoint.addresses))
    for other in range(len(addresses)):
        if other != rank:
            endpoint.add_peer(f"worker-{other}", json.loads(store.get(f"links/{other}")))
    return endpoint


def _measure(sides: Mapping[str, _Side], size: str, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Return each block's mean seconds per all-reduce; the first block warms up and checks the sum.

    A side that returns None sums nothing.
    """
    generator = torch.Generator().manual_seed(settings["seed"] + dist.get_rank())
    own = torch.randint(-8, 8, (SIZES_BYTES[size] // 4,), generator=generator).float()
    expected = own.clone()
    dist.all_reduce(expected)
    times_s: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(settings["blocks"] + 1):
        for side in list(sides)[:: 1 if block % 2 else -1]:
            tensor = own.clone()
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
