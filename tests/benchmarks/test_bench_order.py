"""Orders of gradients: figures, and the layers that each worker uses."""

import pytest

from benchmarks.order import OrderRun, build, figures
from benchmarks.timed import LayerTimes, ModelTimes


def test_figures_are_the_times_and_the_ratios_to_the_other_ways():
    rows = [
        {"model": "shuffled", "way": "bsp", "step_s": 1.0},
        {"model": "shuffled", "way": "static", "step_s": 2.0},
        {"model": "shuffled", "way": "ddp", "step_s": 4.0},
    ]
    assert figures(rows) == {
        "step_s_bsp_shuffled": 1.0,
        "step_s_static_shuffled": 2.0,
        "step_s_ddp_shuffled": 4.0,
        "bsp_to_static_ratio_shuffled": 0.5,
        "bsp_to_ddp_ratio_shuffled": 0.25,
    }


@pytest.fixture
def setting():
    def make(model):
        return OrderRun(
            model=model,
            times=ModelTimes(layers=(LayerTimes(name="unused", forward_s=0.0, backward_s=0.0),)),
            step_s=1.0,
            blocks=1,
            steps=1,
            seed=0,
            address="",
            interface="",
            port=0,
        )

    return make


def used_layers(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[layer] for layer in model._in_order]


def test_each_worker_leaves_out_the_layers_of_the_others(setting):
    used = [set(used_layers(build(setting("left_out"), rank, 3))) for rank in range(3)]
    common = set.intersection(*used)
    assert [one - common for one in used] == [{"16", "17"}, {"18", "19"}, {"20", "21"}]


def test_each_worker_uses_all_layers_in_an_order_of_its_own(setting):
    used = [used_layers(build(setting("shuffled"), rank, 3)) for rank in range(3)]
    assert all(set(one) == set(used[0]) for one in used)
    assert used[0] != used[1] != used[2]
