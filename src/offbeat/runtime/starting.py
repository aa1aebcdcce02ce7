"""The coordinator's process, started by whoever begins a job or a parameter server."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys

import msgspec

from offbeat.errors import OffbeatError
from offbeat.runtime.coordinator import Configuration

_START_S = 20.0
_started: list[subprocess.Popen[bytes]] = []  # here; those that ended are reaped at the next start


def start_coordinator(configuration: Configuration) -> tuple[str, ...]:
    """Starts the coordinator as a process of its own, which outlives its starter, and returns its addresses.

    Raises:
        OffbeatError: it did not start.
    """
    _started[:] = [one for one in _started if one.poll() is None]
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat.runtime.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    _started.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(configuration) + b"\n")
    process.stdin.close()
    if not select.select([process.stdout], [], [], _START_S)[0]:
        os.killpg(process.pid, signal.SIGKILL)  # its child too
        raise OffbeatError(f"the coordinator did not answer within {_START_S:g} s of its start")
    line = process.stdout.readline()
    process.stdout.close()
    answer = json.loads(line) if line else {"error": "it ended without a word"}
    if "error" in answer:
        raise OffbeatError(f"the coordinator did not start: {answer['error']}")
    return tuple(answer["addresses"])
