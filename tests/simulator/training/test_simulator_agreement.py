"""Simulated results have real counterparts: 4 real workers, and 4 simulated with their times."""

from __future__ import annotations

import json

import pytest

from benchmarks import simulator
from benchmarks.__main__ import main
from offbeat.events import Finished, Joined, Ready
from offbeat.simulator.training import setting_from_log
from offbeat.wire.log_file import read_log
from support.processes import run, values


def train(rank, emit, *arguments):
    return simulator.train(*arguments)


@pytest.mark.long
def test_four_simulated_workers_change_groups_when_four_real_ones_do(tmp_path):
    """Worker 1 is slow for six steps, is excluded, and returns when it has recovered.

    The exclusion follows from the compute times alone. The return depends on where the others are when its
    message arrives, which real messages and loops do not fix to the step.
    """
    path = tmp_path / "log.jsonl"
    assert values(run(train, 4, str(path), 30, 0.05)) == [0, 1, 2, 3]
    log = read_log(path)
    found = simulator.compare(log)
    assert found["has_same_members"], found
    assert found["real_groups"].startswith("0 1 2 3 from step 0, 0 2 3 from step 4, 0 1 2 3 from step ")
    assert found["simulated_groups"].startswith("0 1 2 3 from step 0, 0 2 3 from step 4, 0 1 2 3 from step ")
    assert found["steps_apart_max"] <= 1, found
    assert found == simulator.compare(log)


@pytest.mark.long
def test_a_setting_matches_its_log(tmp_path):
    path = tmp_path / "log.jsonl"
    values(run(train, 2, str(path), 3, 0.0))  # too few for an exclusion, however slow a machine is
    entries = read_log(path).entries
    setting = setting_from_log.setting_from_log(entries)
    assert (setting.world, setting.steps, setting.steps_per_epoch) == (2, 3, 3)
    measured = [entry.compute_s for entry in entries if isinstance(entry, Ready) and entry.worker == 1]
    assert setting.times.times_s[1] == tuple(measured)
    assert 0 < setting.network.all_reduce_s(setting.size_bytes, range(2)) < 1
    assert 0 < setting.apply_s < 1
    joined = max(entry.now_s for entry in entries if isinstance(entry, Joined))
    finished = min(entry.now_s for entry in entries if isinstance(entry, Finished))
    assert setting_from_log.job_duration_s(entries) == finished - joined


def test_a_log_without_a_job_is_refused():
    with pytest.raises(ValueError, match="joined, computed and finished"):
        setting_from_log.setting_from_log([])
    with pytest.raises(ValueError, match="joined and finished"):
        setting_from_log.job_duration_s([])


@pytest.mark.long
def test_the_benchmark_reports_cpu_time_and_agreement(tmp_path):
    path = tmp_path / "result.json"
    options = ["--workers", "8", "--steps", "5", "--jobs", "1"]
    assert main(["simulator", *options, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert figures["cpu_s_8x5"] > 0
    assert figures["simulated_to_real_ratio_min"] > 0
    assert 0 <= figures["same_members_and_steps_share"] <= figures["same_members_share"] <= 1
