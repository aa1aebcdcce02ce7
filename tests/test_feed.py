"""Promises of `offbeat.runtime.feed`: every sample once an epoch, the same number of steps for everybody."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from offbeat.errors import OffbeatError
from offbeat.runtime.feed import EqualShards, load_batches


def shards(samples, workers, batch_size, **more):
    settings = {"seed": 0, "epoch": 0, "shuffle": True} | more
    return EqualShards(samples=samples, workers=workers, batch_size=batch_size, **settings)


@given(st.integers(1, 9), st.integers(0, 300), st.integers(1, 40), st.booleans())
def test_each_sample_comes_once_and_all_workers_take_equally_many_steps(workers, extra, batch_size, shuffle):
    samples = workers + extra
    plan = shards(samples, workers, batch_size, shuffle=shuffle)
    dealt = [plan.batches(worker) for worker in range(workers)]
    assert sorted(index for batches in dealt for batch in batches for index in batch) == list(range(samples))
    assert {len(batches) for batches in dealt} == {plan.steps}
    sizes = [len(batch) for batches in dealt for batch in batches]
    assert min(sizes) >= 1
    assert max(sizes) <= batch_size + 1
    for step in range(plan.steps):
        in_step = [len(batches[step]) for batches in dealt]
        assert max(in_step) - min(in_step) <= 1


def test_the_joined_batches_do_not_depend_on_how_the_batch_is_split():
    two, four = shards(640, 2, 32, seed=5), shards(640, 4, 16, seed=5)
    for step in range(two.steps):
        joined_two = [index for worker in range(2) for index in two.batches(worker)[step]]
        joined_four = [index for worker in range(4) for index in four.batches(worker)[step]]
        assert joined_two == joined_four


def test_the_order_depends_on_seed_and_epoch_alone():
    state = torch.get_rng_state()
    random.seed(1)
    first = shards(100, 2, 10, seed=3, epoch=4).batches(1)
    torch.rand(7)
    random.random()
    assert shards(100, 2, 10, seed=3, epoch=4).batches(1) == first
    assert shards(100, 2, 10, seed=3, epoch=5).batches(1) != first
    assert shards(100, 2, 10, seed=4, epoch=4).batches(1) != first
    torch.set_rng_state(state)
    shards(100, 2, 10).batches(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_shuffling_the_order_is_the_data_sets():
    assert shards(6, 2, 2, shuffle=False).batches(0) == [[0, 1], [4]]
    assert shards(6, 2, 2, shuffle=False).batches(1) == [[2, 3], [5]]


def test_fewer_samples_than_workers_and_empty_batches_are_refused():
    with pytest.raises(ValueError, match="3 samples for 4 workers"):
        shards(3, 4, 1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        shards(3, 1, 0)


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, index**2


def test_any_data_set_is_loaded_through_a_data_loader_without_touching_the_global_generator():
    state = torch.get_rng_state()
    loaded = list(load_batches(Squares(), [[1, 2], [5]], seed=(0,), loader_options={"num_workers": 0}))
    assert [[part.tolist() for part in batch] for batch in loaded] == [[[1, 2], [1, 4]], [[5], [25]]]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_data_set_gives_the_same_batches_either_way():
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    direct = list(load_batches(data, [[3, 1], [7]], seed=(0,), loader_options={}))
    loaded = list(load_batches(data, [[3, 1], [7]], seed=(0,), loader_options={"num_workers": 0}))
    for left, right in zip(direct, loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("option", ["shuffle", "sampler", "batch_size", "drop_last"])
def test_an_option_that_the_session_decides_is_refused(option):
    with pytest.raises(OffbeatError, match=option):
        list(load_batches(Squares(), [[1]], seed=(0,), loader_options={option: 1}))
