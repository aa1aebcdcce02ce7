"""Open epochs: each position is in the pool, in one block, or used."""

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.events import Block
from offbeat.policies.data.open_epochs import OpenEpochs


def opened(samples: int = 12, batch_size: int = 4) -> OpenEpochs:
    epochs = OpenEpochs(2)
    begin(epochs, 0, samples, batch_size)
    return epochs


def begin(epochs: OpenEpochs, number: int, samples: int, batch_size: int = 4) -> None:
    epochs.begin(
        0,
        number,
        samples,
        batch_size,
        current=None,
        ends_previous_early=False,
        used_ranges=(),
        drop_last=False,
    )


def positions(ranges) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@settings(deadline=None, max_examples=100)
@given(
    samples=st.integers(1, 40), choices=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=60)
)
def test_a_position_is_in_the_pool_or_in_one_block_or_used(samples, choices):
    epochs = opened(samples)
    blocks: list[Block] = []
    given_ids: list[int] = []
    used = 0
    for kind, size in choices:
        if epochs.is_finished(0):
            break
        if kind == 0 and epochs[0].pooled >= size:
            blocks.append(epochs.cut_block(0, size))
            given_ids.append(blocks[-1].id)
        elif kind == 1 and blocks:
            epochs.put([blocks.pop(size % len(blocks))])
        elif kind == 2 and blocks:
            block = blocks.pop(0)
            used += block.samples
            epochs.use([block])
        if not epochs.is_finished(0):
            places = Counter(positions(epochs[0].pool))
            places.update(position for block in blocks for position in positions(block.ranges))
            assert max(places.values()) == 1
            assert len(places) == samples - used
            assert epochs.used_count(0) == used
            (ranges,) = epochs.used_ranges(blocks, {}).values()
            assert not places.keys() & set(positions(ranges))
            assert len(positions(ranges)) == used
    assert epochs.is_finished(0) == (used == samples)
    assert given_ids == sorted(set(given_ids))


def test_a_change_is_noted_when_a_pool_is_emptied_or_filled_and_when_an_epoch_is_finished():
    epochs = opened(samples=8)
    blocks = []

    def changes(step) -> bool:
        epochs.has_changed = False
        step()
        return epochs.has_changed

    assert not changes(lambda: blocks.append(epochs.cut_block(0, 4)))
    assert changes(lambda: blocks.append(epochs.cut_block(0, 4)))
    assert changes(lambda: epochs.put([blocks.pop()]))
    assert not changes(lambda: epochs.put([blocks.pop()]))
    blocks += [epochs.cut_block(0, 4), epochs.cut_block(0, 4)]
    assert not changes(lambda: epochs.use([blocks.pop()]))
    assert changes(lambda: epochs.use([blocks.pop()]))


def test_blocks_are_cut_from_the_oldest_epoch_with_a_pool():
    epochs = opened(samples=4)
    begin(epochs, 1, 8)
    assert epochs.source == 0
    block = epochs.cut_block(0, 4)
    assert epochs.source == 1
    epochs.put([block])
    assert (epochs.source, epochs.oldest) == (0, 0)
    epochs.cut_off(0)
    assert (epochs.source, epochs.oldest) == (1, 1)


def test_a_restored_state_continues_with_the_same_blocks():
    epochs = opened(samples=20)
    block = epochs.cut_block(0, 4)
    epochs.cut_block(0, 4)
    epochs.put([block])
    other = OpenEpochs(2)
    other.load_state_dict(json.loads(json.dumps(epochs.state_dict())))
    assert vars(other) == vars(epochs)
    assert other.cut_block(0, 8) == epochs.cut_block(0, 8) == Block(2, 0, ((0, 4), (8, 12)))
