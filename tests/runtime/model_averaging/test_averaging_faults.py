"""A worker dies, hangs, joins or is cut off, or the coordinator dies, in each phase of averaging models.

Real processes. Afterwards all have one model, which the run log's matrices and the workers' own updates give
in float64, each sample was used once, and the log replays.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from offbeat.events import Finished, ModelsAveraged, Ready
from offbeat.strategies import ADPSGD, Choco, DiLoCo, LocalSGD, Prague, PReduce
from offbeat.wire.averagings import count_averagings
from offbeat.wire.log_file import read_log
from support.averaging_phases import HOLDER, PHASES, VICTIM, check_end, standing
from support.processes import values
from support.run_logs import entries_of, wait_for_entry, wait_until

CHOCO = Choco(compress="topk:0.3", gamma=0.4)
# A quorum of all: else a round closes without the victim where it is late by chance.
LOCAL = {"every": 2, "quorum": 3}
OVERLAPPED = [PReduce(P=3), ADPSGD(), Prague(size=3), LocalSGD(**LOCAL), DiLoCo(**LOCAL), CHOCO]
WAITING = [replace(strategy, overlap=False) for strategy in OVERLAPPED]

# With overlap no worker waits for a group. Without it none has a mean that it has not added, and two of three
# do not rest or finish without the third.
WITHOUT_OVERLAP = {"waiting"}
WITH_OVERLAP = {"received", "resting", "finished"}


def cases(turn=None):
    """All phases, each under all strategies that have it, or under one with overlap and one without."""
    for number, phase in enumerate(PHASES):
        for strategies, missing in ((OVERLAPPED, WITHOUT_OVERLAP), (WAITING, WITH_OVERLAP)):
            chosen = strategies if turn is None else [strategies[(number + turn) % len(strategies)]]
            for strategy in chosen if phase not in missing else []:
                named = f"{phase}, {strategy.name}{'' if strategy.overlap else ' without overlap'}"
                if phase == "last averaging":  # which there is none after an epoch's mean
                    strategy = replace(strategy, global_every=None)
                yield pytest.param(phase, strategy, id=named)


def survivors(ended):
    return [one for one in ended if one.rank != VICTIM]


@pytest.mark.long(after=5)
@pytest.mark.parametrize(("phase", "strategy"), [*cases()])
def test_a_worker_that_is_killed_is_lost_alone(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.kill()
        fault.go_on()
        ended = fault.running.ends()
    check_end(survivors(ended), tmp_path, phase, strategy)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("phase", "strategy"), [*cases(0)])
def test_a_worker_that_hangs_is_lost_alone(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.stop()
        fault.go_on()
        others = [fault.running.end(rank) for rank in range(3) if rank != VICTIM]
        fault.running.signal(VICTIM, signal.SIGCONT)
        assert fault.running.end(VICTIM).error_type == "WorkerError"
    check_end(others, tmp_path, phase, strategy)


@pytest.mark.long(after=3)
@pytest.mark.parametrize(("phase", "strategy"), [*cases(1)])
def test_a_newcomer_takes_part_whenever_it_comes(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.join(strategy, tmp_path, phase)
        fault.go_on()
        ended = fault.running.ends()
    check_end(ended, tmp_path, phase, strategy)


@pytest.mark.long(after=3)
@pytest.mark.parametrize(("phase", "strategy"), [*cases(2)])
def test_a_coordinator_that_is_killed_changes_nothing(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.kill_coordinator()
        fault.go_on()
        ended = fault.running.ends()
    check_end(ended, tmp_path, phase, strategy)


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("phase", "strategy"),
    [case for case in cases(1) if case.values[0] != "joining"],  # where nothing may be left to be sent
)
def test_a_worker_that_reaches_no_other_trains_alone_until_it_does(tmp_path, phase, strategy):
    with standing(strategy, tmp_path, phase) as fault:
        fault.cut()
        fault.go_on()
        wait_until(lambda: len(entries_of(fault.log, Finished)) == 3, "the end of the loops")
        fault.places.close("cut")
        ended = fault.running.ends()
    check_end(ended, tmp_path, phase, strategy)


def test_a_worker_that_is_killed_while_the_others_wait_after_a_delay_is_lost_alone(tmp_path):
    strategy = DiLoCo(every=2, delay=1)
    with standing(strategy, tmp_path, "exchanging") as fault:
        for worker in (0, HOLDER):
            wait_until(partial(has_made_two_steps, fault.log, worker), f"the end of the delay of {worker}")
        fault.kill()
        fault.go_on()
        ended = fault.running.ends()
    check_end(survivors(ended), tmp_path, "exchanging", strategy)


def has_made_two_steps(log, worker):
    return [one.worker for one in entries_of(log, Ready)].count(worker) == 2


# The mean of all models ------------------------------------------------------------------------------------


def first_models(folder):
    return [np.array(json.loads((folder / f"start-{worker}").read_text())) for worker in range(3)]


def kill_at_rate_0(folder, phase, strategy):
    """The final model of the survivors, without updates, and how many averagings moved the mean."""
    with standing(strategy, folder, phase, rate=0.0) as fault:
        if phase == "last step":
            wait_for_entry(fault.log, "a mean", lambda one: is_end(one) and one.worker == HOLDER)
        fault.kill()
        fault.places.open("open")
        ended = fault.running.ends()
    check_end(survivors(ended), folder, phase, strategy)
    (_, final, _), *_ = values(survivors(ended))
    return np.array(final), count_averagings(read_log(folder / "log").entries).incomplete


def is_end(entry):
    return isinstance(entry, ModelsAveraged) and entry.exchange_id > 0


def test_a_worker_that_is_killed_before_it_sends_does_not_move_the_mean_of_the_others(tmp_path):
    final, incomplete = kill_at_rate_0(tmp_path, "exchanging", PReduce(P=3, overlap=False))
    first = first_models(tmp_path)
    np.testing.assert_allclose(final, (first[0] + first[2]) / 2, rtol=0, atol=1e-12)
    assert incomplete == 0


def test_of_a_worker_that_is_killed_with_the_mean_the_others_keep_its_part(tmp_path):
    final, incomplete = kill_at_rate_0(tmp_path, "received", PReduce(P=3))
    np.testing.assert_allclose(final, np.mean(first_models(tmp_path), 0), rtol=0, atol=1e-12)
    assert incomplete == 1  # it has not added it


def test_where_one_member_has_the_mean_its_share_of_it_moves_the_mean_of_the_others(tmp_path):
    """Worker 1 is killed when worker 2 has all of the mean and worker 0, which worker 1 sends it to, not."""
    final, incomplete = kill_at_rate_0(tmp_path, "last step", PReduce(P=3, overlap=False))
    first = first_models(tmp_path)
    np.testing.assert_allclose(final, (np.mean(first, 0) + first[0]) / 2, rtol=0, atol=1e-12)
    assert incomplete == 1
