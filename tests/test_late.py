"""Promises of `late="join"`, with real workers: what one that is left out computes counts, and counts once.

The model of `test_data_once` counts the uses of each sample; a replica that holds one use of each an epoch
has lost none and doubled none, whoever computed it.
"""

import itertools
import signal

import pytest

from cluster import run, values
from jobs import job
from offbeat.events import Brought, Lend, Settle
from offbeat.record import read_log, replay
from offbeat.strategies import PartialAllReduce
from test_data_once import Misdeed, count, once, wait_for_group
from test_groups import agree, train

STRATEGY = PartialAllReduce(limit=3, n_profile=2, late="join", staleness=100)


def entries(log, kind):
    return [entry for entry in read_log(log).entries if isinstance(entry, kind)]


def late_ones(log):
    """The gradients that counted."""
    return [settled for settled in entries(log, Settle) if settled.counts]


def counts(rank, say, strategy=STRATEGY, epochs=4):
    return count(rank, say, strategy, epochs)


@pytest.mark.parametrize("slow", ["1:20", "0:10", "1:10@burst=5/12", "2:20@0.0-0.5"])
def test_each_sample_is_used_once_whoever_is_late(slow, tmp_path):
    log = tmp_path / "log.jsonl"
    once(run(counts, 3, env={"OFFBEAT_SLOW": slow, "OFFBEAT_RUN_LOG": str(log)}))
    assert late_ones(log)
    assert replay(read_log(log)) is None
