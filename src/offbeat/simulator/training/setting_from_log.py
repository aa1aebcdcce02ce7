"""A simulated cluster that is like the one in which a run log was written; and what both can be compared by.

Nothing here simulates or reads a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from statistics import fmean

from offbeat.events import Action, EpochEnded, Event, Finished, Group, Halt, Joined, Ready, StepTimed
from offbeat.simulator.core.network import Network
from offbeat.simulator.core.times import recorded
from offbeat.simulator.training.cluster import Setting

_LATENCY_S_MIN = 1e-6


def setting_of(entries: Sequence[Event | Action], *, seed: int = 0) -> Setting:
    """Return a cluster whose workers compute as long as those of a run log did, step for step.

    What else a step took is the same for all: the mean of batch, optimizer and the rest for a member, and the
    mean of what an exchange took when all were there, without regard to its size. Injected slowness is in the
    compute times already.

    Args:
        entries: of a run log in which everybody took part from the start and finished.
        seed: of all chance that is left: in which order members end an exchange.

    Raises:
        ValueError: nobody joined, computed or finished, or no step was timed.
    """
    world = len({entry.worker for entry in entries if isinstance(entry, Joined)})
    readys = [entry for entry in entries if isinstance(entry, Ready)]
    timed = [entry for entry in entries if isinstance(entry, StepTimed)]
    steps = next((entry.step for entry in entries if isinstance(entry, Finished)), 0)
    if not (world and readys and timed and steps):
        raise ValueError("expected a run log of a job whose workers joined, computed and finished")
    in_first = Counter(ready.worker for ready in readys if ready.epoch == 0)  # fewer for who was left out
    exchange_s = fmean(one.communicate_s for one in timed)
    messages = max(1, 2 * (world - 1))
    return Setting(
        world=world,
        steps=steps,
        steps_per_epoch=max(in_first.values(), default=steps),
        times=recorded(entries),
        network=Network(latency_s=max(_LATENCY_S_MIN, exchange_s / messages)),
        size_bytes=0,
        apply_s=fmean(one.batch_s + one.apply_s + one.other_s for one in timed),
        seed=seed,
    )


def decisions_of(entries: Iterable[Event | Action]) -> list[Halt | Group | EpochEnded]:
    """Return what was decided until the first worker finished, in the order in which it was said.

    After that, a worker that has come back takes the batch to its end that it is in; a simulated one has no
    batches of its own and is at the end of its epoch when the others are.
    """
    running = takewhile(lambda entry: not isinstance(entry, Finished), entries)
    return [entry for entry in running if isinstance(entry, Halt | Group | EpochEnded)]


def job_s(entries: Iterable[Event | Action]) -> float:
    """Return how long a job took from when everybody was there until the first worker finished, in seconds.

    Raises:
        ValueError: nobody joined or finished.
    """
    began_s = None
    for entry in entries:
        if isinstance(entry, Joined):
            began_s = entry.now_s
        elif isinstance(entry, Finished) and began_s is not None:
            return entry.now_s - began_s
    raise ValueError("expected a job whose workers joined and finished")
