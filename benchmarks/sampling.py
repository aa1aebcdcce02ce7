"""Where a thread's time goes: what it is at, looked at a thousand times a second from another thread.

What is looked at is hardly slowed down, but hands the interpreter over more readily. What is written in C
counts for the Python function that called it, and so does any wait for the interpreter afterwards.

Run as `python -m benchmarks.sampling`, it is a server of a parameter server that can be looked at.
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

_LOOK_S = 1e-3
_SWITCH_S = 5e-6  # after which who runs lets another thread look; with more, system calls are seen too often
_TOP = 12
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Sampler:
    """Looks at the main thread and the links' for as long as its context lasts.

    Attributes:
        seen: how often each thread, "main" or "links", was found in which function.
    """

    def __init__(self) -> None:
        self.seen: dict[str, Counter[str]] = {"main": Counter(), "links": Counter()}
        self._spent_s: dict[str, dict[str, float]] = {}
        self._wall_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sampler", daemon=True)
        self._switch_s = sys.getswitchinterval()

    def shares(self) -> list[dict[str, Any]]:
        """Return of each thread for which share of the time it computed, and was in which function.

        Computing is the kernel's count, of the program and, where it is "system", of the kernel itself. Of
        the functions it is the 12 with the most.
        """
        rows = []
        for thread, counts in self.seen.items():
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
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def _look(self) -> None:
        threads = {}
        for thread in threading.enumerate():
            if thread is threading.main_thread():
                threads[thread] = "main"
            elif thread.name.startswith("links of "):
                threads[thread] = "links"
        names = {thread.ident: name for thread, name in threads.items()}
        began_s, before = monotonic(), {thread: _spent_s(thread) for thread in threads}
        while not self._over.wait(_LOOK_S):
            for ident, frame in sys._current_frames().items():
                if ident in names:
                    self.seen[names[ident]][_name(frame)] += 1
        self._wall_s = monotonic() - began_s
        for thread, name in threads.items():
            now = _spent_s(thread)
            self._spent_s[name] = {kind: now[kind] - before[thread][kind] for kind in now}


def _spent_s(thread: threading.Thread) -> dict[str, float]:
    """What a thread has computed so far."""
    fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return {"user": int(fields[11]) / _TICKS_PER_S, "system": int(fields[12]) / _TICKS_PER_S}


def _name(frame: FrameType) -> str:
    while frame.f_code.co_filename.startswith("<") and frame.f_back is not None:
        frame = frame.f_back  # from what the standard library has generated to whom it is for
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"


def main() -> int:
    """A server that says what it was at between "begin" and "end"."""
    lines = Lines.to_parent()
    configuration = io.StringIO(json.dumps(lines.hear()) + "\n")
    threading.Thread(target=_answer, args=(lines,), daemon=True).start()
    return server.main(configuration)


def _answer(lines: Lines) -> None:
    while True:  # until this process is killed
        while not lines.has_come(timeout_s=1.0):
            pass
        lines.hear()
        with Sampler() as sampler:
            lines.tell("begun")
            lines.hear()
        lines.tell([row for row in sampler.shares() if row["thread"] == "links"])


if __name__ == "__main__":
    sys.exit(main())
