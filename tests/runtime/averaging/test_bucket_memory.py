"""Memory for the sums of a bucket: means that the program still has are not overwritten."""

import pytest
import torch

from offbeat.numerics.collectives.buckets import plan_buckets
from offbeat.runtime.averaging.buckets import GradientBucket


@pytest.fixture
def bucket():
    (plan,) = plan_buckets([6, 2], [torch.float32] * 2, bucket_bytes=1 << 20)
    shapes = [torch.Size([2, 3]), torch.Size([2])]
    return GradientBucket(plan, shapes, 2, lambda elements, dtype: torch.zeros(elements, dtype=dtype))


def begin_round(bucket, value):
    """Returns the means, which become gradients."""
    bucket.begin_round()
    bucket.output.flat.fill_(value)
    return bucket.output.means().views()


def test_a_round_uses_the_same_memory_where_the_program_has_removed_its_gradients(bucket):
    place = bucket.output.flat.data_ptr()
    for value in range(5):
        gradient = begin_round(bucket, value)[0]
        assert gradient.data_ptr() == place
        del gradient


def test_where_the_program_keeps_the_last_gradients_two_memories_are_used_alternately(bucket):
    places, gradient = [], None
    for value in range(6):
        last, gradient = gradient, begin_round(bucket, value)[0]
        assert last is None or last.eq(value - 1).all()
        places.append(gradient.data_ptr())
        del last
    assert len({*places}) == 2
    assert places[::2] == [places[0]] * 3


@pytest.mark.parametrize("keep", [lambda mean: mean, lambda mean: mean[1], lambda mean: mean.detach()])
def test_gradients_of_all_rounds_that_the_program_keeps_stay_as_they_are(bucket, keep):
    kept = [keep(begin_round(bucket, value)[0]) for value in range(5)]
    for value, gradient in enumerate(kept):
        assert gradient.eq(value).all()
