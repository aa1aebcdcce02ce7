"""Promises about a coordinator that is killed: another one takes its place, and training goes on.

Real workers, and real kills at random places in their training; what is recorded afterwards replays.
"""

import os
import signal

import pytest

from cluster import values
from jobs import job
from offbeat.record import read_log, replay
from offbeat.strategies import DPAR, AllReduce
from test_groups import STRATEGY, agree, train

STRATEGIES = {"bsp": AllReduce(), "partial": STRATEGY, "dpar": DPAR(threshold_ms=5000.0)}


class Say:
    def __init__(self, say, every):
        self.say, self.every, self.last = say, every, -1

    def __call__(self, session):
        if session.step // self.every != self.last:
            self.last = session.step // self.every
            self.say(session.step)


def trains(rank, say, strategy, epochs=20):
    return train(rank, say, strategy, epochs, Say(say, 10))


@pytest.mark.parametrize("name", STRATEGIES)
def test_one(name, tmp_path):
    log = tmp_path / "log"
    with job(trains, 3, STRATEGIES[name], env={"OFFBEAT_RUN_LOG": str(log)}) as running:
        for _ in range(5):
            running.said(0, 1, 2)
            os.kill(running.coordinator(), signal.SIGKILL)
        results = values(running.ends())
    agree(results)
    assert replay(read_log(log)) is None
