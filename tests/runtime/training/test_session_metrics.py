"""`session.metrics()` are the figures of the run log, for a program that logs a dict and a step."""

import pytest
import torch
from torch.utils.data import TensorDataset

import offbeat
from offbeat.strategies import SSP, AllReduce, LocalSGD
from support.processes import run, values
from support.run_logs import entries_of, step_times

WORKERS = 2
STEPS_PER_REPORT = 4


class Reports(list):
    """What trackers of experiments have: a function that takes a dict and a step."""

    def log_metrics(self, metrics, step=None):
        self.append((step, metrics))


def train(rank, emit, strategy):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, reports, slowest = TensorDataset(torch.randn(64, 4), torch.randn(64, 2)), Reports(), {}
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(1):
            for x, y in session.batches(data, 4):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                if session.step % STEPS_PER_REPORT == 0:
                    reports.log_metrics(session.metrics(), step=session.step)
                    assert session.metrics() == reports[-1][1]
        slowest = session.reduce(session.metrics(), "max")
    return list(reports), slowest


@pytest.mark.parametrize(
    "strategy", [AllReduce(), LocalSGD(every=4), SSP(s=2)], ids=lambda one: type(one).__name__
)
def test_means_are_those_of_the_steps_in_the_run_log(strategy, tmp_path):
    log = tmp_path / "log.jsonl"
    for rank, (reports, slowest) in enumerate(
        values(run(train, WORKERS, strategy, env={"OFFBEAT_RUN_LOG": str(log)}))
    ):
        times = step_times(entries_of(log), rank)
        assert reports
        for number, (step, metrics) in enumerate(reports):
            own = times[number * STEPS_PER_REPORT : (number + 1) * STEPS_PER_REPORT]
            wall_s = sum(one.wall_s for one in own)
            assert step == (number + 1) * STEPS_PER_REPORT
            assert metrics["offbeat/step_s"] == pytest.approx(wall_s / STEPS_PER_REPORT, rel=1e-9)
            assert metrics["offbeat/wait_s"] == pytest.approx(
                sum(one.wait_s for one in own) / STEPS_PER_REPORT, rel=1e-9
            )
            assert metrics["offbeat/samples_per_s"] == pytest.approx(16 / wall_s, rel=1e-9)
            assert metrics["offbeat/members"] == WORKERS
            parts = [name for name in metrics if name.endswith("_s") and "per_s" not in name]
            assert sum(metrics[name] for name in parts) == pytest.approx(2 * metrics["offbeat/step_s"])
        assert slowest.keys() == reports[0][1].keys()
