"""Starting a parameter server: its manager, and servers on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from offbeat.errors import OffbeatError
from offbeat.runtime.coordinator import Configuration, PolicySpec
from offbeat.runtime.launch import tied
from offbeat.runtime.node import SILENT_S, Cluster, new_cluster_secrets
from offbeat.runtime.server import ServerConfiguration
from offbeat.runtime.starting import start_coordinator


class LocalServers:
    """The processes of a parameter server on this machine, which end with this one.

    Attributes:
        cluster: where they are.
        processes: the servers', by id.
    """

    def __init__(
        self, servers: int, *, copies: int, functions: Sequence[str], run_log: str | None = None
    ) -> None:
        if servers < 1:
            raise ValueError(f"expected at least 1 server, got {servers}")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._functions = tuple(functions)
        self.cluster = start_cluster(servers, host="127.0.0.1", copies=copies, run_log=run_log)
        # Its thread lives as long as they shall: the kernel ends them with the thread that started them.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="offbeat servers")
        try:
            for server in range(servers):
                self.start(server)
        except BaseException:
            self.close()
            raise

    def start(self, server: int) -> None:
        """Start one more server.

        Raises:
            OffbeatError: it did not start.
        """
        configuration = ServerConfiguration(
            cluster=self.cluster, host="127.0.0.1", server=server, functions=self._functions
        )
        self.processes[server] = self._starter.submit(start_server, configuration).result()

    def close(self) -> None:
        """End them."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self._starter.shutdown()


def start_cluster(
    servers: int, *, host: str, copies: int = 2, virtual_nodes: int = 16, run_log: str | None = None
) -> Cluster:
    """Start the manager of a parameter server that begins with so many servers.

    It lives for as long as there is a server or a client.

    Raises:
        OffbeatError: it did not start.
    """
    job, token = new_cluster_secrets()
    arguments = {"servers": servers, "copies": copies, "virtual_nodes": virtual_nodes}
    addresses = start_coordinator(
        Configuration(
            job=job,
            token=token,
            host=host,
            policies=(PolicySpec(path="offbeat.policies.manager:Manager", arguments=arguments),),
            log_path=run_log,
            silent_s=SILENT_S,
        )
    )
    return Cluster(job=job, token=token, manager=addresses)


def start_server(configuration: ServerConfiguration) -> subprocess.Popen[bytes]:
    """Start a server as a process that ends with the thread that starts it.

    Raises:
        OffbeatError: it did not start.
    """
    process = subprocess.Popen(
        tied([sys.executable, "-m", "offbeat.runtime.server"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(configuration) + b"\n")
    process.stdin.close()
    line = process.stdout.readline()
    answer = msgspec.json.decode(line) if line else {"error": "it ended without a word"}
    if "error" in answer:
        process.wait()
        raise OffbeatError(f"server {configuration.server} did not start: {answer['error']}")
    return process
