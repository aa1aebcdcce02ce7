"""Used samples are counted once, and a second use is found, in whatever order they are used."""

import random

from offbeat.events import Block
from offbeat.simulator.model_averaging.sample_uses import SampleUses


def test_random_blocks_are_counted_as_a_set_of_positions_would():
    chance = random.Random(0)
    for _ in range(300):
        uses, used = SampleUses(), set()
        for number in range(20):
            epoch, bounds = chance.randrange(2), sorted(chance.sample(range(30), 4))
            ranges = ((bounds[0], bounds[1]), (bounds[2], bounds[3]))[: chance.randint(1, 2)]
            positions = {(epoch, place) for start, stop in ranges for place in range(start, stop)}
            again = uses.add(Block(number, epoch, ranges))
            if used & positions:
                assert (epoch, again) == min(used & positions)
                break
            assert again is None
            used |= positions
            assert uses.count == len(used)


def test_ranges_that_touch_become_one():
    uses = SampleUses()
    for start in (4, 0, 2, 6):
        assert uses.add(Block(start, 0, ((start, start + 2),))) is None
    assert uses._bounds == {0: [0, 8]}
