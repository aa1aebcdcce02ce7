"""`python -m benchmarks tls`: an encrypted link beside a plain one, on loopback and on a line of known rate.

Two workers have two links, a plain one and an encrypted one. In alternating blocks each worker sends to the
other and receives as much at the same time, over one of the two; on a line also one to the other alone.
Processor time is that of both processes, all threads; the kernel's work for a connection is part of it, and
on a line the emulation's work is, too.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

from torch.distributed.distributed_c10d import Store

from benchmarks.commands import TlsOptions
from benchmarks.namespaces import hosts
from benchmarks.workers import print_progress, read_settings, run_workers, send_result
from offbeat.cli.result import Result, machine
from offbeat.errors import OffbeatError
from offbeat.runtime.control.environment import TLS_VARIABLES, load_tls, read_environment
from offbeat.runtime.control.rendezvous import open_store
from offbeat.runtime.processes.job_certificates import job_certificates
from offbeat.runtime.transport.endpoint import Endpoint

_SIDES = ("plain", "tls")
_MESSAGE_BYTES = 32_000_000
_DEADLINE_S = 300.0


def run(options: TlsOptions, *, command: str) -> Result:
    """Measure both links on loopback, then on a line, in temporary network namespaces; needs root."""
    figures: dict[str, float] = {}
    rows = []
    rate_bit_per_s = options.rate_mbit * 1_000_000
    with job_certificates() as paths, hosts(2, rate_bit_per_s=rate_bit_per_s) as made:
        env = dict(zip(TLS_VARIABLES, paths, strict=True))
        places: dict[str, dict[str, Any]] = {
            "loopback": {"addresses": ["127.0.0.1"] * 2},
            "line": {
                "addresses": [host.address for host in made],
                "prefix": [host.prefix for host in made],
                "master_addr": made[0].address,
            },
        }
        places["line_one_way"] = dict(places["line"])
        for place, where in places.items():
            settings = {
                "addresses": where.pop("addresses"),
                "messages": 16 if place == "loopback" else 4,
                "blocks": options.blocks,
                "senders": 1 if place == "line_one_way" else 2,
            }
            blocks = run_workers("benchmarks.tls", settings, 2, env=env, **where)
            for side in _SIDES:
                mbit_per_s = [block["bytes"] * 8 / block["s"] / 1e6 for block in blocks[side]]
                cpu_s_per_gb = [
                    block["cpu_s"] / (settings["senders"] * block["bytes"] / 1e9) for block in blocks[side]
                ]
                figures[f"mbit_per_s_{place}_{side}"] = median(mbit_per_s)
                figures[f"cpu_s_per_gb_{place}_{side}"] = median(cpu_s_per_gb)
                rows.append(
                    {
                        "place": place,
                        "side": side,
                        "mbit_per_s_p50": median(mbit_per_s),
                        "mbit_per_s_min": min(mbit_per_s),
                        "mbit_per_s_max": max(mbit_per_s),
                        "cpu_s_per_gb_p50": median(cpu_s_per_gb),
                    }
                )
            plain, encrypted = (figures[f"mbit_per_s_{place}_{side}"] for side in _SIDES)
            figures[f"tls_to_plain_ratio_{place}"] = encrypted / plain
        congestion_control = made[0].congestion_control
    return Result(
        name="tls",
        command=command,
        kind="real",
        seed=0,
        figures=figures,
        rows=rows,
        machine=machine(congestion_control=congestion_control, line_mbit_per_s=rate_bit_per_s / 1e6),
    )


def main() -> None:
    """Transfer over both links in alternation, as one of two workers; rank 0 sends the result."""
    settings = read_settings(sys.argv)
    environment = read_environment()
    rank, addresses = environment.rank, settings["addresses"]
    store = open_store(environment.master_addr, environment.master_port, is_host=rank == 0)
    store.set_timeout(timedelta(seconds=_DEADLINE_S))
    links = {side: _Link(side, rank, addresses, store) for side in _SIDES}
    blocks: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES}
    for block in range(settings["blocks"] + 1):
        for side in _SIDES[:: 1 if block % 2 else -1]:
            _meet(store, f"{block} {side} begins")
            cpu_s, began_s = _cpu_s(), time.perf_counter()
            links[side].transfer(settings["messages"], settings["senders"])
            took_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - cpu_s
            store.set(f"{block} {side} {rank}", json.dumps([took_s, cpu_s]))
            both = [json.loads(store.get(f"{block} {side} {other}")) for other in range(2)]
            if block:  # the first one warms up
                blocks[side].append(
                    {
                        "bytes": settings["messages"] * _MESSAGE_BYTES,
                        "s": max(one[0] for one in both),
                        "cpu_s": sum(one[1] for one in both),
                    }
                )
    if rank == 0:
        send_result(blocks)
        print_progress(f"{addresses[0]}: done")
    _meet(store, "end")
    for link in links.values():
        link.close()


class _Link:
    """One worker's end of a link, plain or encrypted."""

    def __init__(self, side: str, rank: int, addresses: list[str], store: Store) -> None:
        self._rank, self._peer = rank, f"{side}-{1 - rank}"
        self._tag = 0
        self._out, self._in = memoryview(bytes(_MESSAGE_BYTES)), bytearray(_MESSAGE_BYTES)
        self._endpoint = Endpoint(
            f"{side}-{rank}",
            job="bench",
            token="bench",
            on_message=lambda peer, payload: None,
            on_lost=lambda error: print(error, file=sys.stderr),
            host=addresses[rank],
            unix=False,
            tls=load_tls() if side == "tls" else None,
        )
        store.set(f"{side} {rank}", json.dumps(self._endpoint.addresses))
        self._endpoint.add_peer(self._peer, json.loads(store.get(f"{side} {1 - rank}")))

    def transfer(self, messages: int, senders: int) -> None:
        """Send and receive so many messages at the same time; with one sender, only the first worker sends.

        Raises:
            OffbeatError: they did not arrive in time.
        """
        sends, receives = self._rank < senders, 1 - self._rank < senders
        left = messages * (sends + receives)
        done = threading.Event()

        def count() -> None:  # in the I/O thread
            nonlocal left
            left -= 1
            if not left:
                done.set()

        tags = range(self._tag, self._tag + messages)
        self._tag += messages
        for tag in tags if receives else ():
            self._endpoint.post_receive(self._peer, tag, memoryview(self._in), _whole(count))
        for tag in tags if sends else ():
            self._endpoint.send_tensor(self._peer, tag, self._out, on_done=count)
        if not done.wait(_DEADLINE_S):
            raise OffbeatError(f"{self._peer} did not receive or send everything within {_DEADLINE_S:g} s")

    def close(self) -> None:
        """Leave."""
        self._endpoint.close()


def _whole(call: Callable[[], None]) -> Callable[[int, int], None]:
    """Return a callback for the pieces of a message that calls a function after the last one."""
    left = _MESSAGE_BYTES

    def on_data(_: int, length: int) -> None:
        nonlocal left
        left -= length
        if not left:
            call()

    return on_data


def _meet(store: Store, name: str) -> None:
    """Wait until both workers are here."""
    if store.add(name, 1) == 2:
        store.set(f"{name} met", "")
    store.wait([f"{name} met"], timedelta(seconds=_DEADLINE_S))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
