"""The fourth paper's figures 6 to 13: uses over time are sampled, and figures match their names."""

import pytest
import torch

from benchmarks.commands import ValidateGpuOptions
from benchmarks.use_over_time import UseSampler, device_use_reader
from benchmarks.validate_gpu import figures, run
from offbeat.errors import OffbeatError


def row(side, number, epoch_s, cpu, gpu=None):
    found = {"load": "memory", "threads": 6, "side": side, "run": number, "epoch_s": epoch_s}
    found["cpu_use_percent"] = cpu
    return found if gpu is None else {**found, "gpu_use_percent": gpu}


def test_figures_are_medians_over_runs_by_side_load_and_threads():
    found = figures(
        [
            *(row("serial", number, epoch_s, 30.0, 20.0) for number, epoch_s in enumerate([4.0, 5.0, 9.0])),
            *(
                row("overlapped", number, epoch_s, 50.0, 45.0)
                for number, epoch_s in enumerate([8.0, 4.0, 3.0])
            ),
        ]
    )
    assert found == {
        "epoch_s_serial_memory_6": 5.0,
        "cpu_use_percent_serial_memory_6": 30.0,
        "gpu_use_percent_serial_memory_6": 20.0,
        "epoch_s_overlapped_memory_6": 4.0,
        "cpu_use_percent_overlapped_memory_6": 50.0,
        "gpu_use_percent_overlapped_memory_6": 45.0,
        "saving_memory_6": pytest.approx(0.2),
    }


def test_without_an_accelerator_there_are_no_figures_of_its_use():
    found = figures([row("serial", 0, 5.0, 30.0), row("overlapped", 0, 4.0, 50.0)])
    assert not [name for name in found if name.startswith("gpu")]


def test_the_use_of_a_device_is_sampled_with_that_of_the_cores():
    use = UseSampler(lambda: 40.0).end()
    assert len(use.cores) == len(use.device) >= 1
    assert all(share >= 0 for share in use.cores)
    assert set(use.device) == {0.4}


def test_without_a_device_only_the_use_of_the_cores_is_sampled():
    use = UseSampler(None).end()
    assert use.cores
    assert not use.device


def test_an_error_while_sampling_is_raised_at_the_end():
    def read():
        raise OSError("the driver is gone")

    sampler = UseSampler(read)
    with pytest.raises(OSError, match="the driver is gone"):
        sampler.end()


def test_a_device_whose_use_is_not_counted_is_refused_in_words():
    with pytest.raises(OffbeatError, match=r"cannot read the use of cpu .*pip install 'offbeat\[gpu\]'"):
        device_use_reader(torch.device("cpu"))


def test_an_unknown_load_is_refused():
    with pytest.raises(ValueError, match="unknown load 'tape': expected one of memory, files"):
        run(ValidateGpuOptions(load=["tape"], device="cpu"), command="")


@pytest.mark.long
def test_the_benchmark_runs_on_the_cpu_without_the_use_of_a_gpu():
    options = ValidateGpuOptions(
        load=["memory"],
        threads=[2],
        epochs=2,
        batch_size=32,
        samples=256,
        held_out=64,
        data="digits",
        device="cpu",
    )
    result = run(options, command="python -m benchmarks validate-gpu")
    runs = [one for one in result.rows if "run" in one]
    looks = [one for one in result.rows if "at_s" in one]
    assert [one["side"] for one in runs] == ["serial", "overlapped"]
    assert {one["side"] for one in looks} == {"serial", "overlapped"}
    assert all(one["cpu_use_percent"] >= 0 and "gpu_use_percent" not in one for one in looks)
    assert set(result.figures) == {
        *(
            f"{name}_{side}_memory_2"
            for name in ("epoch_s", "cpu_use_percent")
            for side in ("serial", "overlapped")
        ),
        "saving_memory_2",
    }
