"""Evaluating in a process of its own, which reads the snapshot from shared memory.

For evaluations that compute in Python: in threads they would hold the interpreter's lock against the
training. The process is spawned, not forked, and reads nothing but what its parent, the same program, writes.
"""

from __future__ import annotations

import errno
import io
import multiprocessing as mp
import os
import signal
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, resource_tracker, spawn, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, cast

import torch
import torch.multiprocessing  # teaches multiprocessing to share tensors

from offbeat.errors import OffbeatError, explain
from offbeat.numerics.metrics import Value
from offbeat.runtime.processes import child
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.transport.descriptors import is_none_left
from offbeat.runtime.validation.evaluators import Evaluate, Part, evaluated
from offbeat.runtime.validation.parts import Data
from offbeat.runtime.validation.snapshot import Blocks, Lent, Place, Snapshot, read_model

_START_S: Final = 120.0
_END_S: Final = 5.0
_SHARED_MEMORY: Final = "shared memory"  # which torch says that it cannot open or allocate


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A part as it is sent; `blocks` only where the process does not know this room."""

    slot: int
    blocks: Mapping[torch.device, Lent | torch.Tensor] | None  # arrive as `Blocks`
    places: list[Place]
    structure: bytes
    positions: range
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What came of it: metrics, or an error and the text of where it came from."""

    metrics: dict[str, Value] | None
    error: BaseException | None = None
    where: str = ""


class _Popen(popen_spawn_posix.Popen):
    """Starts a process as multiprocessing does, by the command of `child`."""

    _fds: list[int]  # that what is written refers to

    def _launch(self, process_obj: Any) -> None:
        content = io.BytesIO()
        set_spawning_popen(self)
        try:
            ForkingPickler(content).dump(spawn.get_preparation_data(process_obj.name))
            ForkingPickler(content).dump(process_obj)
        finally:
            set_spawning_popen(None)
        tracker: int | None = getattr(resource_tracker._resource_tracker, "_fd", None)  # where one runs
        self.sentinel, ended = os.pipe()
        given, ours = os.pipe()
        # Closed when this object is gone: the process ends when nobody has the end to write any more.
        self.finalizer = util.Finalize(self, _close, (self.sentinel, ours))
        try:
            code = (
                "from multiprocessing.spawn import spawn_main\n"
                f"spawn_main(pipe_handle={given}, tracker_fd={tracker})"
            )
            descriptors = [ended, given, *self._fds, *([] if tracker is None else [tracker])]
            command = child.evaluation(code, "--multiprocessing-fork")
            self._process = child.start_evaluation(command, process_obj.name, descriptors)
        except BaseException:
            self.finalizer()
            raise
        finally:
            os.close(ended)
            os.close(given)
        self.pid = self._process.pid
        with (
            suppress(BrokenPipeError),
            open(ours, "wb", closefd=False) as file,
        ):  # else it is found to be dead
            file.write(content.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, of a process that has ended or, without that flag, will."""
        if self.returncode is None:
            self.returncode = self._process.poll() if flag == os.WNOHANG else self._process.wait()
        return self.returncode


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(  # noqa: N802 (multiprocessing calls it so)
        process_obj: Any,
    ) -> Any:
        return _Popen(process_obj)


class InAProcess:
    """Evaluates in a process that it starts; one that dies is replaced for the next part.

    Args:
        number: of this evaluator, for messages.
        evaluate, data: what the process works with; it gets copies, but of tensors, which it shares.
        threads: for torch to compute with.
        deadline_s: how long a part may take.

    Raises:
        OffbeatError: `evaluate` or `data` cannot be sent to another process.
    """

    def __init__(
        self, number: int, evaluate: Evaluate, data: Data, *, threads: int, deadline_s: float
    ) -> None:
        self._number, self._evaluate, self._data = number, evaluate, data
        self._threads, self._deadline_s = threads, deadline_s
        self._is_closed = False
        self._lock = threading.Lock()  # starting and closing
        self._start()

    def _start(self) -> None:
        name = f"offbeat validation {self._number}"
        try:
            self._connection, theirs = mp.Pipe()
        except OSError as error:
            raise OffbeatError(f"{name} did not start: {explain(error)}") from error
        self._process = _Process(
            target=_serve,
            args=(theirs, self._evaluate, self._data, self._threads),
            name=name,
            daemon=True,
        )
        self._rooms: dict[int, int] = {}  # what the process knows: slot: room
        self._is_ready = False
        try:
            self._process.start()
        except OffbeatError:
            raise
        except Exception as error:
            if is_none_left(error):
                cause = explain(OSError(errno.EMFILE, ""))
                raise OffbeatError(f"{name} did not start: {cause}") from error
            if _SHARED_MEMORY in str(error):
                raise OffbeatError(
                    f"the validation set cannot be shared with another process ({error}): make /dev/shm "
                    "larger and writable (docker run --shm-size=1g, mount -o remount,rw,size=1g "
                    "/dev/shm), or use backend='thread'"
                ) from error
            raise OffbeatError(
                f"evaluate and the validation set cannot be sent to another process ({type(error).__name__}: "
                f"{error}): define them at the top level of a module, or use backend='thread'"
            ) from error
        finally:
            theirs.close()

    def evaluate(self, part: Part[Snapshot]) -> dict[str, Value]:
        """Return the part's metrics.

        Raises:
            OffbeatError: the process died or did not answer in time; names it.
        """
        with self._lock:
            if not self._is_closed and not self._process.is_alive():
                self._connection.close()
                self._start()
        if not self._is_ready:
            self._hear(_START_S, "to start (is what the script does guarded by if __name__ == '__main__'?)")
            self._is_ready = True
        what = f"to evaluate part {part.number} of epoch {part.epoch}"
        try:
            self._connection.send(self._task(part))
        except OSError:
            raise self._died(what) from None
        answer = self._hear(self._deadline_s, what)
        if answer.metrics is not None:
            return answer.metrics
        assert answer.error is not None
        answer.error.add_note(f"in validation process {self._number}:\n{answer.where}")
        raise answer.error

    def _task(self, part: Part[Snapshot]) -> _Task:
        snapshot = part.snapshot
        slot, room = id(snapshot), snapshot.room
        is_known = self._rooms.get(slot) == room
        self._rooms[slot] = room
        return _Task(
            slot=slot,
            blocks=None if is_known else snapshot.lent,
            places=snapshot.places,
            structure=snapshot.structure,
            positions=part.positions,
            seed=part.seed,
        )

    def _hear(self, timeout_s: float, what: str) -> _Answer:
        if not wait([self._connection, self._process.sentinel], timeout_s):
            self._kill()
            raise OffbeatError(f"{self._who} was given {timeout_s:g} s {what}, and was ended")
        try:
            answer: _Answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._died(what) from None
        return answer

    @property
    def _who(self) -> str:
        return f"validation process {self._number} ({self._process.pid})"

    def _died(self, what: str) -> OffbeatError:
        self._process.join(_END_S)
        code = self._process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"code {code}"
        return OffbeatError(f"{self._who} ended with {how} when it was {what}")

    def _kill(self) -> None:
        self._process.kill()
        self._process.join(_END_S)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._is_closed = True
            self._kill()


def _serve(connection: Connection, evaluate: Evaluate, data: Data, threads: int) -> None:
    """Evaluates what it is told to, until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to answer
    start_thread("offbeat parent", _end_with_the_parent, lambda _: os._exit(1))
    torch.set_num_threads(threads)
    connection.send(_Answer(metrics={}))
    known: dict[int, Blocks] = {}
    while True:
        try:
            task: _Task = connection.recv()
        except (EOFError, OSError):
            return
        if task.blocks is not None:
            known[task.slot] = cast(Blocks, task.blocks)
        connection.send(_answer(evaluate, data, task, known[task.slot]))


def _answer(evaluate: Evaluate, data: Data, task: _Task, blocks: Blocks) -> _Answer:
    try:
        model = read_model(task.structure, task.places, blocks)
        torch.manual_seed(task.seed)
        metrics = evaluated(model, evaluate, data, task.positions, seed=task.seed)
        ForkingPickler.dumps(metrics)
    except Exception as error:
        return _Answer(metrics=None, error=_that_travels(error), where=traceback.format_exc())
    return _Answer(metrics=metrics)


def _that_travels(error: Exception) -> Exception:
    """Return the error itself if it can be written and read again, else one that says as much."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return OffbeatError(f"{type(error).__name__}: {error}")
    return error


def _end_with_the_parent() -> None:
    parent: Any = mp.parent_process()
    parent.join()
    os._exit(1)
