"""Sampling profiler: records a thread's function a thousand times a second from another thread.

A sampled thread is hardly slowed down, but releases the interpreter more readily. C code counts for the
Python function that called it, and so does any wait for the interpreter afterwards.

`python -m benchmarks.sampling` runs a server of a parameter server that can be sampled.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

from benchmarks.children import Lines
from offbeat.runtime.ps import server

_INTERVAL_S = 1e-3
_SWITCH_S = 5e-6  # how soon a thread must release the interpreter; longer would favour system calls
_TOP = 12
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Sampler:
    """Samples the main thread and the links' thread for the duration of its context.

    Attributes:
        counts: for each thread, "main" or "links", how often it was in which function.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {"main": Counter(), "links": Counter()}
        self._spent_s: dict[str, dict[str, float]] = {}
        self._wall_s = 0.0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._switch_s = sys.getswitchinterval()

    def shares(self) -> list[dict[str, Any]]:
        """Return, for each thread, the shares of time in which it computed, and was in which function.

        Compute time is the kernel's count: "user" in the program, "system" in the kernel. Functions are the
        12 most frequent.
        """
        rows = []
        for thread, counts in self.counts.items():
            spent_s = self._spent_s.get(thread, {})
            shares = [(f"({kind} time)", value_s / self._wall_s) for kind, value_s in spent_s.items()]
            shares += [(function, count / counts.total()) for function, count in counts.most_common(_TOP)]
            rows += [{"thread": thread, "function": function, "share": share} for function, share in shares]
        return rows

    def __enter__(self) -> Sampler:
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopped.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def _sample(self) -> None:
        threads = {}
        for thread in threading.enumerate():
            if thread is threading.main_thread():
                threads[thread] = "main"
            elif thread.name.startswith("links of "):
                threads[thread] = "links"
        names = {thread.ident: name for thread, name in threads.items()}
        began_s, before = (
            monotonic(),
            {thread: cpu_times_s(f"self/task/{thread.native_id}") for thread in threads},
        )
        while not self._is_stopped.wait(_INTERVAL_S):
            for ident, frame in sys._current_frames().items():
                if ident in names:
                    self.counts[names[ident]][_name(frame)] += 1
        self._wall_s = monotonic() - began_s
        for thread, name in threads.items():
            now = cpu_times_s(f"self/task/{thread.native_id}")
            self._spent_s[name] = {kind: now[kind] - before[thread][kind] for kind in now}


def cpu_times_s(who: str) -> dict[str, float]:
    """Return the processor time so far of a process or a thread, a folder in /proc, in seconds."""
    fields = Path(f"/proc/{who}/stat").read_text().rpartition(")")[2].split()
    return {"user": int(fields[11]) / _TICKS_PER_S, "system": int(fields[12]) / _TICKS_PER_S}


def coordinator_pids() -> list[int]:
    """Return the pids of the coordinators that this process has started, and of their child processes."""
    found = [
        pid for pid in _children(os.getpid()) if b"offbeat.runtime.control.coordinator" in _command_of(pid)
    ]
    return found + [child for pid in found for child in _children(pid)]


def total_cpu_s(pids: list[int]) -> float:
    """Return the processor time so far of these processes together, in seconds."""
    return sum(sum(cpu_times_s(str(pid)).values()) for pid in pids)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _name(frame: FrameType) -> str:
    while frame.f_code.co_filename.startswith("<") and frame.f_back is not None:
        frame = frame.f_back  # from code that the standard library has generated to its caller
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"


def main() -> int:
    """Run a server that samples itself between "begin" and "end" and sends the shares."""
    lines = Lines.to_parent()
    configuration = io.StringIO(json.dumps(lines.receive()) + "\n")
    threading.Thread(target=_serve_samples, args=(lines,), daemon=True).start()
    return server.main(configuration)


def _serve_samples(lines: Lines) -> None:
    while True:  # until this process is killed
        while not lines.has_message(timeout_s=1.0):
            pass
        lines.receive()
        with Sampler() as sampler:
            lines.send("begun")
            lines.receive()
        lines.send([row for row in sampler.shares() if row["thread"] == "links"])


if __name__ == "__main__":
    sys.exit(main())
