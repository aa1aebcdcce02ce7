"""`python -m benchmarks nimble`: its networks have the branches that it is about."""

import pytest
import torch

from benchmarks import nimble
from benchmarks.commands import NimbleOptions


def test_each_network_is_measured_with_each_batch_size():
    result = nimble.run(NimbleOptions(batch_size=[1, 2], cells=1), command="nimble")
    assert [(row["network"], row["batch"]) for row in result.rows] == [
        (name, batch) for name in ("inception", "nas") for batch in (1, 2)
    ]
    for row in result.rows:
        where = f"{row['network']}_b{row['batch']}"
        assert result.figures[f"module_ms_{where}"] == row["module ms"]
        ratio = row["threads ms"] / row["module ms"]
        assert result.figures[f"ratio_threads_to_module_{where}"] == pytest.approx(ratio)


def test_streams_are_as_many_as_branches_that_run_at_once():
    rows = nimble.run(NimbleOptions(batch_size=[1], cells=2), command="nimble").rows
    assert [row["streams"] for row in rows] == [4, 10]


def test_networks_classify_images():
    for kind in nimble.NETWORKS.values():
        assert kind(1).eval()(torch.zeros(2, 3, 8, 8)).shape == (2, nimble.CLASSES)
