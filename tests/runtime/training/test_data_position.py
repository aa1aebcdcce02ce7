import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.training.data_position import DataPosition, check_state

WORLD = 2
BATCHES, SAMPLES, BATCH = 4, 32, 4


def begun(position=None, samples=SAMPLES, batch_size=BATCH, drop_last=False):
    position = position or DataPosition(seed=7)
    position.begin_batches(0, BATCHES, samples, batch_size, drop_last)
    return position


def loaded(state):
    position = DataPosition(seed=0)
    position.load_state_dict(state)
    return position


def test_a_state_within_an_epoch_of_equal_shards_continues_after_the_batches_used():
    position = begun()
    position.batches_used = 3
    state = position.state_dict(WORLD, None)
    check_state(state, WORLD, assigns_samples=False)
    restored = loaded(state)
    assert (restored.epoch, restored.batches_used, restored.seed) == (0, 3, 7)
    assert begun(restored).state_dict(WORLD, None) == state


def test_a_state_after_the_last_batch_begins_the_next_epoch():
    position = begun()
    position.batches_used = BATCHES
    ended = position.state_dict(WORLD, None)
    assert (ended["epoch"], ended["batches_taken"]) == (1, 0)
    position.finish_epoch()
    assert position.state_dict(WORLD, None) == ended
    check_state(ended, WORLD + 1, assigns_samples=True)


def test_a_state_of_assigned_samples_holds_the_ranges_consumed_of_each_epoch():
    consumed = {3: ((0, 8), (12, 16)), 4: ((0, 4),)}
    state = begun().state_dict(WORLD, (3, consumed))
    check_state(state, WORLD + 1, assigns_samples=True)
    restored = loaded(state)
    assert (restored.epoch, restored.batches_used, restored.consumed) == (3, 0, consumed)
    with pytest.raises(OffbeatError, match=f"an epoch of {SAMPLES} samples, and the data set has 30"):
        begun(restored, samples=30)


@pytest.mark.parametrize(
    ("assigned", "world", "assigns_samples", "words"),
    [
        (None, 3, False, "with 2 workers and there are 3 now"),
        (None, 2, True, "samples were split equally"),
        ((0, {0: ((0, 4),)}), 2, False, "samples were assigned on demand"),
    ],
)
def test_a_state_within_an_epoch_that_was_shared_out_otherwise_is_refused(
    assigned, world, assigns_samples, words
):
    position = begun()
    position.batches_used = 1
    with pytest.raises(OffbeatError, match=words):
        check_state(position.state_dict(WORLD, assigned), world, assigns_samples=assigns_samples)


@pytest.mark.parametrize("other", [{"samples": 30}, {"batch_size": 5}, {"drop_last": True}])
def test_a_newcomer_with_other_data_is_refused_in_the_epoch_that_it_joins_only(other):
    newcomer = DataPosition(seed=0)
    newcomer.restore(begun().training_position(5))
    assert newcomer.seed == 7
    with pytest.raises(OffbeatError, match="the job that worker 0 joins, 32 samples in batches of"):
        begun(newcomer, **other)
    newcomer.restore(begun().training_position(5))
    newcomer.finish_epoch()
    begun(newcomer, **other)


def test_the_last_epoch_begun_is_the_one_before_until_its_batches_begin():
    position = DataPosition(seed=0)
    assert position.last_epoch_begun == 0
    begun(position).finish_epoch()
    assert (position.epoch, position.last_epoch_begun) == (1, 0)
    assert begun(position).last_epoch_begun == 1
