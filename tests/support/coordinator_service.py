"""A coordinator as a service, which tests start, kill and start again, also on another host."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

from offbeat.runtime.launch import find_free_port

DEADLINE_S = 60.0


class Service:
    """`offbeat coordinator` on this machine, or on a host that a command with `prefix` enters.

    Attributes:
        address: HOST:PORT on which it listens; with port 0, at another one after every start.
        env: for the processes of the job.
        state: its folder; None for none.
    """

    def __init__(
        self, folder, *, state=True, moves=False, secret="a secret", log=None, host="127.0.0.1", prefix=()
    ):
        (folder / "token").write_text(secret)
        self.address = f"{host}:{0 if moves else find_free_port()}"
        self.state = folder / "state" if state else None
        self.env = {
            "OFFBEAT_COORDINATOR": (self.state / "address").as_uri() if moves else self.address,
            "OFFBEAT_TOKEN_FILE": str(folder / "token"),
        }
        self._own = {"OFFBEAT_TOKEN_FILE": str(folder / "token")}
        if log is not None:
            self._own["OFFBEAT_RUN_LOG"] = str(log)
        self._prefix = prefix
        self._errors = folder / "errors.txt"
        self.start()

    def start(self):
        command = [*self._prefix, sys.executable, "-m", "offbeat", "coordinator", "--bind", self.address]
        command += [] if self.state is None else ["--state", str(self.state)]
        with self._errors.open("a") as errors:
            self.process = subprocess.Popen(command, env={**os.environ, **self._own}, stderr=errors)

    def start_on(self, host, prefix):
        """Starts it again at any port of another host."""
        self.address, self._prefix = f"{host}:0", prefix
        self.start()

    def kill(self):
        """Kills the supervisor; the kernel then kills the coordinator."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def ended(self):
        """Waits for its end; returns the exit code and what it wrote to standard error."""
        return self.process.wait(DEADLINE_S), self._errors.read_text()

    def close(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def service(folder, **options):
    running = Service(folder, **options)
    try:
        yield running
    finally:
        running.close()
