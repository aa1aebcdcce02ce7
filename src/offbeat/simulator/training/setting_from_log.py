"""A simulated cluster that reproduces a recorded run, and the quantities by which both are compared.

Nothing here simulates or reads a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from statistics import fmean

from offbeat.events import Action, EndEpoch, Event, Finished, Group, Halt, Joined, Ready, StepsTimed
from offbeat.simulator.core.network import NetworkCosts
from offbeat.simulator.core.times import recorded_times
from offbeat.simulator.training.setting import SimulationSetting

_LATENCY_S_MIN = 1e-6


def setting_from_log(entries: Sequence[Event | Action], *, seed: int = 0) -> SimulationSetting:
    """Return a cluster whose workers have the compute times of a run log, step by step.

    The rest of a step is the same for all workers: the mean of batch, optimizer and other time, and the mean
    duration of an exchange from the arrival of all members on, regardless of its size. Injected slowness is
    part of the compute times already.

    Args:
        entries: of a run log in which all workers took part from the start and finished.
        seed: seed of the remaining randomness: the order in which members end an exchange.

    Raises:
        ValueError: no worker joined, computed or finished, or no step was timed.
    """
    world = len({entry.worker for entry in entries if isinstance(entry, Joined)})
    readys = [entry for entry in entries if isinstance(entry, Ready)]
    timed = [step for entry in entries if isinstance(entry, StepsTimed) for step in entry.steps]
    steps = next((entry.step for entry in entries if isinstance(entry, Finished)), 0)
    if not (world and readys and timed and steps):
        raise ValueError("expected a run log of a job whose workers joined, computed and finished")
    in_first = Counter(ready.worker for ready in readys if ready.epoch == 0)  # fewer for an excluded worker
    exchange_s = fmean(step.communicate_s for step in timed)
    messages = max(1, 2 * (world - 1))
    return SimulationSetting(
        world=world,
        steps=steps,
        steps_per_epoch=max(in_first.values(), default=steps),
        times=recorded_times(entries),
        network=NetworkCosts(latency_s=max(_LATENCY_S_MIN, exchange_s / messages)),
        size_bytes=0,
        apply_s=fmean(step.batch_s + step.apply_s + step.other_s for step in timed),
        seed=seed,
    )


def decisions_from_log(entries: Iterable[Event | Action]) -> list[Halt | Group | EndEpoch]:
    """Return the decisions before the first worker finished, in the order of the log.

    After that, a worker that comes back completes its current batch in the real run; a simulated one
    has no batches of its own and ends its epoch together with the members.
    """
    running = takewhile(lambda entry: not isinstance(entry, Finished), entries)
    return [entry for entry in running if isinstance(entry, Halt | Group | EndEpoch)]


def job_duration_s(entries: Iterable[Event | Action]) -> float:
    """Return the duration of a job in seconds, from the last join until the first worker finished.

    Raises:
        ValueError: no worker joined or finished.
    """
    began_s = None
    for entry in entries:
        if isinstance(entry, Joined):
            began_s = entry.now_s
        elif isinstance(entry, Finished) and began_s is not None:
            return entry.now_s - began_s
    raise ValueError("expected a job whose workers joined and finished")
