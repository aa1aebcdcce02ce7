"""Promises of `offbeat.runtime.data.equal_shards`: every sample once an epoch, and the same number of steps
for every worker.
"""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from offbeat.errors import OffbeatError
from offbeat.runtime.data.equal_shards import EqualShards, epoch_order, load_batches


def shards(samples, workers, batch_size, **more):
    settings = {"seed": 0, "epoch": 0, "shuffle": True} | more
    return EqualShards(samples=samples, workers=workers, batch_size=batch_size, **settings)


@given(st.integers(1, 9), st.integers(0, 300), st.integers(1, 40), st.booleans())
def test_each_sample_is_used_once_and_all_workers_take_equally_many_steps(
    workers, extra, batch_size, shuffle
):
    samples = workers + extra
    plan = shards(samples, workers, batch_size, shuffle=shuffle)
    assigned = [plan.batches(worker) for worker in range(workers)]
    assert sorted(index for batches in assigned for batch in batches for index in batch) == list(
        range(samples)
    )
    assert {len(batches) for batches in assigned} == {plan.steps}
    sizes = [len(batch) for batches in assigned for batch in batches]
    assert min(sizes) >= 1
    assert max(sizes) <= (batch_size if batch_size > 3 else batch_size + min(2, batch_size))
    for step in range(plan.steps):
        in_step = [len(batches[step]) for batches in assigned]
        assert max(in_step) - min(in_step) <= 1


@given(st.integers(1, 9), st.integers(0, 300), st.integers(2, 40))
def test_no_batch_holds_a_single_sample_if_there_are_two_per_worker(workers, extra, batch_size):
    plan = shards(2 * workers + extra, workers, batch_size)
    assert min(len(batch) for worker in range(workers) for batch in plan.batches(worker)) >= 2


@given(st.integers(1, 9), st.integers(0, 300), st.integers(1, 40), st.booleans())
def test_with_drop_last_every_batch_is_whole_and_the_end_of_the_order_is_left_out(
    workers, extra, batch_size, shuffle
):
    samples = workers * batch_size + extra
    plan = shards(samples, workers, batch_size, shuffle=shuffle, drop_last=True)
    assigned = [plan.batches(worker) for worker in range(workers)]
    assert {len(batch) for batches in assigned for batch in batches} == {batch_size}
    assert {len(batches) for batches in assigned} == {plan.steps} == {samples // (workers * batch_size)}
    used = sorted(index for batches in assigned for batch in batches for index in batch)
    kept = plan.steps * workers * batch_size
    assert used == sorted(epoch_order(samples, seed=0, epoch=0, shuffle=shuffle)[:kept].tolist())
    assert samples - kept < workers * batch_size


def test_with_drop_last_other_samples_are_left_out_every_epoch():
    def left_out(epoch):
        plan = shards(30, 2, 4, epoch=epoch, drop_last=True)
        return set(range(30)) - {
            index for worker in (0, 1) for batch in plan.batches(worker) for index in batch
        }

    assert [len(left_out(epoch)) for epoch in range(9)] == [6] * 9
    assert set().union(*map(left_out, range(9))) > left_out(0)


@pytest.mark.parametrize(
    ("samples", "workers", "batch_size", "steps"),
    [
        (10, 2, 4, [[3, 2], [3, 2]]),  # not 4 and 1
        (34, 4, 8, [[5, 4, 4, 4], [5, 4, 4, 4]]),
        (40, 4, 8, [[8] * 4, [2] * 4]),  # two per worker are enough
        (7, 2, 3, [[4, 3]]),
        (11, 2, 2, [[2, 2], [4, 3]]),
        (5, 2, 1, [[1, 1], [2, 1]]),
        (3, 2, 4, [[2, 1]]),  # no more samples exist
    ],
)
def test_the_last_steps_are_split_so_that_a_worker_has_two_samples_where_possible(
    samples, workers, batch_size, steps
):
    plan = shards(samples, workers, batch_size, shuffle=False)
    assert [
        [len(plan.batches(worker)[step]) for worker in range(workers)] for step in range(plan.steps)
    ] == steps


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
    assert shards(8, 2, 2, shuffle=False).batches(0) == [[0, 1], [4, 5]]
    assert shards(8, 2, 2, shuffle=False).batches(1) == [[2, 3], [6, 7]]


def test_too_few_samples_and_empty_batches_are_rejected():
    with pytest.raises(ValueError, match="3 samples for 4 workers"):
        shards(3, 4, 1)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        shards(3, 1, 0)
    with pytest.raises(ValueError, match="drop_last leaves nothing of 7 samples: 2 workers need 8"):
        shards(7, 2, 4, drop_last=True)


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, index**2


def test_loading_through_a_data_loader_leaves_the_global_generator_unchanged():
    state = torch.get_rng_state()
    loaded = list(load_batches(Squares(), [[1, 2], [5]], seed=(0,), loader_options={"num_workers": 0}))
    assert [[part.tolist() for part in batch] for batch in loaded] == [[[1, 2], [1, 4]], [[5], [25]]]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_data_set_gives_the_same_batches_with_and_without_a_data_loader():
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    direct = list(load_batches(data, [[3, 1], [7]], seed=(0,), loader_options={}))
    loaded = list(load_batches(data, [[3, 1], [7]], seed=(0,), loader_options={"num_workers": 0}))
    for left, right in zip(direct, loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("option", ["shuffle", "sampler", "batch_size"])
def test_an_option_that_the_session_decides_is_refused(option):
    with pytest.raises(OffbeatError, match=option):
        list(load_batches(Squares(), [[1]], seed=(0,), loader_options={option: 1}))
