"""Starting a parameter server: its manager, and servers on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from offbeat.runtime.control.configuration import (
    PARAMETER_SERVER_PATH,
    CoordinatorConfiguration,
    PolicySpec,
)
from offbeat.runtime.control.starting import new_job_id_and_token, start_coordinator, start_program
from offbeat.runtime.ps.node import ClusterFile
from offbeat.runtime.ps.server import ServerConfiguration

SILENT_S_DEFAULT: Final = 10.0  # the same limit as for a worker
_SERVER_START_S: Final = 60.0  # the manager has to accept it first
_SILENT_S_MIN: Final = 2.0  # two intervals of the heartbeats that an idle node sends


def start_server(configuration: ServerConfiguration, *, is_detached: bool = False) -> subprocess.Popen[bytes]:
    """Start a server as a process of its own.

    Args:
        configuration: of the server.
        is_detached: it ends with its job; otherwise, with the thread that starts it.

    Raises:
        OffbeatError: it did not start.
    """
    name = "a server" if configuration.server is None else f"server {configuration.server}"
    return start_program(
        "offbeat.runtime.ps.server", configuration, name, _SERVER_START_S, is_detached=is_detached
    )


class LocalServers:
    """The server processes of a parameter server on this machine; they end with this process.

    Attributes:
        cluster: where they are.
        processes: of the servers, by id.
    """

    def __init__(
        self,
        servers: int,
        *,
        replicas: int,
        functions: Sequence[str],
        run_log: str | None = None,
        silent_s: float = SILENT_S_DEFAULT,
    ) -> None:
        if servers < 1:
            raise ValueError(f"expected at least 1 server, got {servers}")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._functions = tuple(functions)
        self.cluster = start_manager(
            servers, host="127.0.0.1", replicas=replicas, run_log=run_log, silent_s=silent_s
        )
        # Its thread runs as long as the servers: the kernel ends them with the thread that started them.
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
        """End the servers."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self._starter.shutdown()


def start_manager(
    servers: int,
    *,
    host: str,
    replicas: int = 2,
    run_log: str | None = None,
    silent_s: float = SILENT_S_DEFAULT,
) -> ClusterFile:
    """Start the manager of a parameter server that begins with so many servers.

    It runs for as long as there is a server or a client. A node from which it receives nothing for `silent_s`
    seconds is lost.

    Raises:
        ValueError: `silent_s` is not more than 2.
        OffbeatError: it did not start.
    """
    if not silent_s > _SILENT_S_MIN:
        raise ValueError(f"expected silent_s to be more than {_SILENT_S_MIN:g} s, got {silent_s:g} s")
    job, token = new_job_id_and_token()
    arguments = {"servers": servers, "replicas": replicas, "silent_s": silent_s}
    addresses = start_coordinator(
        CoordinatorConfiguration(
            job=job,
            token=token,
            host=host,
            policies=(PolicySpec(path=PARAMETER_SERVER_PATH, arguments=arguments),),
            log_path=run_log,
            silent_s=silent_s,
        )
    )
    return ClusterFile(job=job, token=token, manager=addresses)
