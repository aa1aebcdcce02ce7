"""Samples the use of the cores, and of an accelerator, over time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Final

import torch

from offbeat.errors import OffbeatError
from offbeat.runtime.control.environment import available_cores
from offbeat.runtime.processes.threads import start_thread

_INTERVAL_S: Final = 0.25
_INTERVALS_MAX: Final = 240  # per run, after averaging


@dataclass(frozen=True, kw_only=True)
class UseOverTime:
    """Used shares in successive intervals.

    Attributes:
        cores: of all cores, by this process.
        device: of the accelerator, by all processes; empty without one.
        interval_s: length of the intervals, in seconds.
    """

    cores: tuple[float, ...]
    device: tuple[float, ...]
    interval_s: float


class UseSampler:
    """Samples from its construction until `end`.

    Args:
        read_device: returns the use of an accelerator in percent; None for none.
    """

    def __init__(self, read_device: Callable[[], float] | None) -> None:
        self._read_device = read_device
        self._cores: list[float] = []
        self._device: list[float] = []
        self._errors: list[BaseException] = []
        self._is_stopped = threading.Event()
        self._thread = start_thread("offbeat use over time", self._sample, self._errors.append)

    def _sample(self) -> None:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        is_stopped = False
        while not is_stopped:
            is_stopped = self._is_stopped.wait(_INTERVAL_S)
            now_s, now_cpu_s = time.perf_counter(), time.process_time()
            self._cores.append((now_cpu_s - cpu_s) / ((now_s - wall_s) * available_cores()))
            wall_s, cpu_s = now_s, now_cpu_s
            if self._read_device is not None:
                self._device.append(self._read_device() / 100.0)

    def end(self) -> UseOverTime:
        """Stop; return the mean uses of at most 240 intervals.

        Raises:
            Exception: what `read_device` has raised.
        """
        self._is_stopped.set()
        self._thread.join()
        if self._errors:
            raise self._errors[0]
        size = math.ceil(len(self._cores) / _INTERVALS_MAX)
        return UseOverTime(
            cores=_means(self._cores, size), device=_means(self._device, size), interval_s=size * _INTERVAL_S
        )


def _means(values: Sequence[float], size: int) -> tuple[float, ...]:
    return tuple(fmean(values[first : first + size]) for first in range(0, len(values), size))


def device_use_reader(device: torch.device) -> Callable[[], float]:
    """Return a function that returns the use of an accelerator in percent, as its driver counts it.

    For a GPU of NVIDIA (NVML): the share of the last sixth of a second to second in which at least one kernel
    of any process ran. A kernel on one of its processors counts as much as one on all of them.

    Raises:
        OffbeatError: the driver or its library in Python does not tell.
    """
    try:
        read: Callable[[], float] = partial(torch.get_device_module(device).utilization, device)
        read()
    except Exception as error:
        raise OffbeatError(
            f"cannot read the use of {device} ({type(error).__name__}: {error}): expected a driver that "
            "counts it, and its library: pip install 'offbeat[gpu]' for a GPU of NVIDIA"
        ) from error
    return read
