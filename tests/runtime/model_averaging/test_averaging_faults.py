"""A worker dies, hangs, joins or is cut off, or the coordinator dies, in each phase of averaging models.

Real processes. Afterwards all have one model, which the run log's matrices and the workers' own updates give
in float64, each sample was used once, and the log replays.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from offbeat.events import Finished
from offbeat.strategies import ADPSGD, Prague, PReduce
from support.averaging_phases import PHASES, VICTIM, check_end, standing
from support.run_logs import entries_of, wait_until

OVERLAPPED = [PReduce(P=3), ADPSGD(), Prague(size=3)]
WAITING = [PReduce(P=3, overlap=False), ADPSGD(overlap=False), Prague(size=3, overlap=False)]


# With overlap no worker waits for a group. Without it none has a mean that it has not added, and two of three
# do not rest or finish without the third.
WITHOUT_OVERLAP = {"waiting"}
WITH_OVERLAP = {"received", "resting", "finished"}


def cases():
    """All phases under all strategies, without those that a strategy does not have."""
    for phase in PHASES:
        for strategy in [*OVERLAPPED, *WAITING]:
            missing = WITHOUT_OVERLAP if strategy.overlap else WITH_OVERLAP
            if phase == "last averaging":  # which there is none after an epoch's mean
                strategy = replace(strategy, global_every=None)
            if phase not in missing:
                yield pytest.param(phase, strategy, id=name_of(phase, strategy))


def name_of(phase, strategy):
    return f"{phase}, {strategy.name}{'' if strategy.overlap else ' without overlap'}"


def survivors(ended):
    return [one for one in ended if one.rank != VICTIM]


@pytest.mark.parametrize(("phase", "strategy"), cases())
def test_a_worker_that_is_killed_is_lost_alone(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.kill()
        fault.places.open("go")
        fault.places.open("open")
        ended = fault.running.ends()
    check_end(survivors(ended), strategy, tmp_path, phase)


@pytest.mark.parametrize(("phase", "strategy"), cases())
def test_a_worker_that_hangs_is_lost_alone(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.stop()
        fault.places.open("go")
        fault.places.open("open")
        others = [fault.running.end(rank) for rank in range(3) if rank != VICTIM]
        fault.running.signal(VICTIM, signal.SIGCONT)
        assert fault.running.end(VICTIM).error_type == "WorkerError"
    check_end(others, strategy, tmp_path, phase)


@pytest.mark.parametrize(("phase", "strategy"), cases())
def test_a_newcomer_takes_part_whenever_it_comes(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.join(strategy, tmp_path, phase)
        fault.places.open("go")
        fault.places.open("open")
        ended = fault.running.ends()
    check_end(ended, strategy, tmp_path, phase)


@pytest.mark.parametrize(("phase", "strategy"), cases())
def test_a_coordinator_that_is_killed_changes_nothing(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.kill_coordinator()
        fault.places.open("go")
        fault.places.open("open")
        ended = fault.running.ends()
    check_end(ended, strategy, tmp_path, phase)


@pytest.mark.parametrize(("phase", "strategy"), cases())
def test_a_worker_that_reaches_no_other_trains_alone_until_it_does(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.cut()
        fault.places.open("go")
        fault.places.open("open")
        loops = 2 if phase == "joining" else 3  # it has no model before it reaches another worker
        wait_until(lambda: len(entries_of(fault.log, Finished)) == loops, "the end of the loops")
        fault.places.close("cut")
        ended = fault.running.ends()
    check_end(ended, strategy, tmp_path, phase)
