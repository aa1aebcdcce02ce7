"""The example of sparse logistic regression, its workers as processes here, and a server that is killed."""

import argparse
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import offbeat
from offbeat.apps.sparse_lr.logistic import optimality
from offbeat.apps.sparse_lr.proximal_newton import distance_from_optimum
from offbeat.apps.sparse_lr.sparse import SignedColumns
from support.processes import start, values
from support.run_logs import wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "sparse_logistic_regression.py"
WORKERS = 4


def example():
    spec = importlib.util.spec_from_file_location("sparse_logistic_regression", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worker(rank, emit, cluster, options, killed):
    def report(line):
        emit(line)
        if killed and line.startswith("pass 10:"):
            wait_until(killed.exists, "the server's death")

    return example().work(rank, WORKERS, cluster, options, report)


def made_up(**settings):
    options = {"path": None, "l1": 4.0, "blocks": 10, "rate": 0.9, "tau": 2, "epsilon": 1e-9, "kkt": True}
    return argparse.Namespace(**options | settings), SignedColumns.from_rows(example().load(None))


@pytest.mark.long
def test_the_reported_objective_is_that_of_the_weights_on_the_servers():
    options, columns = made_up(epsilon=1.0)
    with (
        offbeat.PS.local(servers=2) as ps,
        start(worker, WORKERS, ps.cluster, options, None) as clients,
    ):
        reported = [clients.receive(0) for _ in range(3)]  # the second pass and the third change it by less
        pulled = values(clients.ends())
    weights = pulled[0][columns.keys]
    found = re.fullmatch(r"pass 3: objective (.*), (.*) weights, (.*) B", reported[-1])
    assert float(found[1]) == pytest.approx(optimality(columns, weights, 4.0).objective, abs=1e-6)
    assert int(found[2]) == np.count_nonzero(weights)
    assert float(found[3]) > 0


@pytest.mark.long
@pytest.mark.parametrize("tau", [0, 2])
@pytest.mark.parametrize("kkt", [True, False])
def test_the_optimum_is_found_though_a_server_is_killed_during_training(tmp_path, tau, kkt):
    killed = tmp_path / "killed"
    options, columns = made_up(tau=tau, kkt=kkt)
    with (
        offbeat.PS.local(servers=2) as ps,
        start(worker, WORKERS, ps.cluster, options, killed) as clients,
    ):
        while not clients.receive(0).startswith("pass 3:"):
            pass
        ps.local_servers.processes[1].kill()
        ps.wait_until_rebalanced([0])
        killed.touch()
        pulled = values(clients.ends())
    for one in pulled[1:]:
        np.testing.assert_array_equal(one, pulled[0])
    gap, differ = distance_from_optimum(columns, pulled[0][columns.keys], 4.0)
    assert abs(gap) < 1e-6
    assert differ == 0
