"""Evaluating in a separate process, which reads the snapshot from shared memory.

For evaluations that compute in Python: in threads they would compete with training for the interpreter's
lock. The process is spawned, not forked, and reads only what its parent, the same program, writes.
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
import torch.multiprocessing  # registers the sharing of tensors with multiprocessing

from offbeat.errors import OffbeatError, describe_os_error
from offbeat.numerics.metrics import MetricValue
from offbeat.runtime.processes import child
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.transport.descriptors import is_out_of_descriptors
from offbeat.runtime.validation.evaluators import Evaluate, ValidationPart, evaluate_part
from offbeat.runtime.validation.parts import ValidationData
from offbeat.runtime.validation.snapshot import DeviceBlocks, ExportedBlock, Snapshot, TensorPlace, load_model

_START_S: Final = 120.0
_END_S: Final = 5.0
_SHARED_MEMORY: Final = "shared memory"  # part of torch's error when it cannot open or allocate some


@dataclass(frozen=True, kw_only=True)
class _PartRequest:
    """A part as it is sent; `blocks` is None where the process has these blocks already."""

    snapshot_id: int
    blocks: Mapping[torch.device, ExportedBlock | torch.Tensor] | None  # received as `DeviceBlocks`
    places: list[TensorPlace]
    structure: bytes
    positions: range
    seed: int


@dataclass(frozen=True, kw_only=True)
class _PartResult:
    """The result of a part: metrics, or an error with its traceback as text."""

    metrics: dict[str, MetricValue] | None
    error: BaseException | None = None
    where: str = ""


class _Popen(popen_spawn_posix.Popen):
    """Starts a process as multiprocessing does, with the command of `child`."""

    _fds: list[int]  # descriptors that the pickled content refers to

    def _launch(self, process_obj: Any) -> None:
        content = io.BytesIO()
        set_spawning_popen(self)
        try:
            ForkingPickler(content).dump(spawn.get_preparation_data(process_obj.name))
            ForkingPickler(content).dump(process_obj)
        finally:
            set_spawning_popen(None)
        tracker: int | None = getattr(resource_tracker._resource_tracker, "_fd", None)  # where one runs
        self.sentinel, ended_end = os.pipe()
        read_end, write_end = os.pipe()
        # Closed when this object is gone: the process ends when the write end is closed everywhere.
        self.finalizer = util.Finalize(self, _close, (self.sentinel, write_end))
        try:
            code = (
                "from multiprocessing.spawn import spawn_main\n"
                f"spawn_main(pipe_handle={read_end}, tracker_fd={tracker})"
            )
            descriptors = [ended_end, read_end, *self._fds, *([] if tracker is None else [tracker])]
            command = child.evaluation_command(code, "--multiprocessing-fork")
            self._process = child.start_evaluation(command, process_obj.name, descriptors)
        except BaseException:
            self.finalizer()
            raise
        finally:
            os.close(ended_end)
            os.close(read_end)
        self.pid = self._process.pid
        with (
            suppress(BrokenPipeError),
            open(write_end, "wb", closefd=False) as file,
        ):  # a dead process is detected later
            file.write(content.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code if the process has ended; without WNOHANG, wait until it has."""
        if self.returncode is None:
            self.returncode = self._process.poll() if flag == os.WNOHANG else self._process.wait()
        return self.returncode


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(  # noqa: N802 (multiprocessing's name)
        process_obj: Any,
    ) -> Any:
        return _Popen(process_obj)


class ProcessEvaluator:
    """Evaluates in a process that it starts; a process that dies is replaced for the next part.

    Args:
        number: of this evaluator, for messages.
        evaluate, data: passed to the process as copies, except for tensors, which are shared.
        threads: torch threads of the process.
        timeout_s: the longest time that a part may take.

    Raises:
        OffbeatError: `evaluate` or `data` cannot be sent to another process.
    """

    def __init__(
        self, number: int, evaluate: Evaluate, data: ValidationData, *, threads: int, timeout_s: float
    ) -> None:
        self._number, self._evaluate, self._data = number, evaluate, data
        self._threads, self._timeout_s = threads, timeout_s
        self._is_closed = False
        self._lock = threading.Lock()  # starting and closing
        self._start()

    def _start(self) -> None:
        name = f"offbeat validation {self._number}"
        try:
            self._connection, child_end = mp.Pipe()
        except OSError as error:
            raise OffbeatError(f"{name} did not start: {describe_os_error(error)}") from error
        self._process = _Process(
            target=_serve,
            args=(child_end, self._evaluate, self._data, self._threads),
            name=name,
            daemon=True,
        )
        self._known_layouts: dict[int, int] = {}  # by snapshot_id: the layout_id that the process knows
        self._is_ready = False
        try:
            self._process.start()
        except OffbeatError:
            raise
        except Exception as error:
            if is_out_of_descriptors(error):
                cause = describe_os_error(OSError(errno.EMFILE, ""))
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
            child_end.close()

    def evaluate(self, part: ValidationPart[Snapshot]) -> dict[str, MetricValue]:
        """Return the part's metrics.

        Raises:
            OffbeatError: the process died or did not answer in time; the message names it.
        """
        with self._lock:
            if not self._is_closed and not self._process.is_alive():
                self._connection.close()
                self._start()
        if not self._is_ready:
            self._receive(_START_S, "to start (is the script's code guarded by if __name__ == '__main__'?)")
            self._is_ready = True
        task = f"to evaluate part {part.number} of epoch {part.epoch}"
        try:
            self._connection.send(self._make_request(part))
        except OSError:
            raise self._death_error(task) from None
        answer = self._receive(self._timeout_s, task)
        if answer.metrics is not None:
            return answer.metrics
        assert answer.error is not None
        answer.error.add_note(f"in validation process {self._number}:\n{answer.where}")
        raise answer.error

    def _make_request(self, part: ValidationPart[Snapshot]) -> _PartRequest:
        snapshot = part.snapshot
        snapshot_id, layout_id = id(snapshot), snapshot.layout_id
        is_known = self._known_layouts.get(snapshot_id) == layout_id
        self._known_layouts[snapshot_id] = layout_id
        return _PartRequest(
            snapshot_id=snapshot_id,
            blocks=None if is_known else snapshot.exported,
            places=snapshot.places,
            structure=snapshot.structure,
            positions=part.positions,
            seed=part.seed,
        )

    def _receive(self, timeout_s: float, task: str) -> _PartResult:
        if not wait([self._connection, self._process.sentinel], timeout_s):
            self._kill()
            raise OffbeatError(f"{self._label} timed out after {timeout_s:g} s {task}, and was killed")
        try:
            answer: _PartResult = self._connection.recv()
        except (EOFError, OSError):
            raise self._death_error(task) from None
        return answer

    @property
    def _label(self) -> str:
        return f"validation process {self._number} ({self._process.pid})"

    def _death_error(self, task: str) -> OffbeatError:
        self._process.join(_END_S)
        code = self._process.exitcode
        status = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"code {code}"
        return OffbeatError(f"{self._label} ended with {status} when it was {task}")

    def _kill(self) -> None:
        self._process.kill()
        self._process.join(_END_S)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._is_closed = True
            self._kill()


def _serve(connection: Connection, evaluate: Evaluate, data: ValidationData, threads: int) -> None:
    """Evaluate parts on request until the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    start_thread("offbeat parent", _exit_with_parent, lambda _: os._exit(1))
    torch.set_num_threads(threads)
    connection.send(_PartResult(metrics={}))
    known: dict[int, DeviceBlocks] = {}
    while True:
        try:
            request: _PartRequest = connection.recv()
        except (EOFError, OSError):
            return
        if request.blocks is not None:
            known[request.snapshot_id] = cast(DeviceBlocks, request.blocks)
        connection.send(_evaluate_request(evaluate, data, request, known[request.snapshot_id]))


def _evaluate_request(
    evaluate: Evaluate, data: ValidationData, request: _PartRequest, blocks: DeviceBlocks
) -> _PartResult:
    try:
        model = load_model(request.structure, request.places, blocks)
        torch.manual_seed(request.seed)
        metrics = evaluate_part(model, evaluate, data, request.positions, seed=request.seed)
        ForkingPickler.dumps(metrics)
    except Exception as error:
        return _PartResult(metrics=None, error=_picklable(error), where=traceback.format_exc())
    return _PartResult(metrics=metrics)


def _picklable(error: Exception) -> Exception:
    """Return the error itself if it can be pickled and unpickled, else one with its type and text."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return OffbeatError(f"{type(error).__name__}: {error}")
    return error


def _exit_with_parent() -> None:
    parent: Any = mp.parent_process()
    parent.join()
    os._exit(1)
