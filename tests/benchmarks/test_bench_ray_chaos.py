"""The chaos benchmark under Ray, small, with real Ray."""

import os

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from benchmarks import ray_chaos
from benchmarks.commands import RayChaosOptions

pytestmark = pytest.mark.skipif(
    os.environ.get("OFFBEAT_TEST_RAY") != "1", reason="set OFFBEAT_TEST_RAY=1, as `make test-ray` does"
)


@pytest.mark.long
def test_each_sample_is_counted_once_though_the_coordinator_and_a_worker_are_killed():
    result = ray_chaos.run(RayChaosOptions(workers=2, minutes=1.5, every_s=1.0), command="test")
    kinds = [row["kind"] for row in result.rows]
    assert kinds[:2] == ["coordinator", "worker"]
    assert kinds[-2:] == ["calm run", "wild run"]
    assert set(result.figures) == {
        *("throughput_kept", "samples_lost", "samples_doubled"),
        *("recover_s_p50", "recover_s_max", "strikes_count"),
    }
    assert result.figures["samples_lost"] == result.figures["samples_doubled"] == 0
    assert result.figures["throughput_kept"] > 0
