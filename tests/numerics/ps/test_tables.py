"""A server's table of a namespace, against one array of all values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.numerics.ps import tables
from offbeat.numerics.ps.entries import Entries, PushMeta
from offbeat.numerics.ps.tables import ArrayTable
from offbeat.numerics.ps.updates import SGD, Adam, Assign, Sum

KEYS = 60


class FailsBelowZero:
    """An update of a user's own, which changes rows before it fails."""

    states = ("count",)

    def apply(self, values, states, pushed):
        states["count"] += 1
        values += pushed
        if (values < 0).any():
            raise ArithmeticError("below zero")


def some_entries(data, *, width=0):
    shape = (width,) if width else ()
    first = data.draw(st.integers(0, KEYS - 1))
    last = data.draw(st.integers(first + 1, KEYS))
    numbers = np.random.default_rng(data.draw(st.integers(0, 1000)))
    if data.draw(st.booleans()):
        return first, last, Entries(first, numbers.normal(size=(last - first, *shape)).astype(np.float32))
    listed = sorted(data.draw(st.sets(st.integers(first, last - 1), max_size=20)))
    keys = np.array(listed, np.int64)
    return first, last, Entries(first, numbers.normal(size=(len(keys), *shape)).astype(np.float32), keys)


def of_all(content):
    return np.arange(content.first, content.first + len(content)) if content.keys is None else content.keys


@pytest.mark.long(after=4)
@pytest.mark.parametrize("dense_keys_max", [1000, 3])
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("update", [Sum(), SGD(0.1, 0.9, nesterov=True), Adam(0.01)], ids=repr)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_blocks_are_as_one_array_of_all_keys(update, width, dense_keys_max, data):
    shape = (width,) if width else ()
    whole = {name: np.zeros((KEYS, *shape), np.float32) for name in ("values", *update.states)}
    before, tables.DENSE_KEYS_MAX = tables.DENSE_KEYS_MAX, dense_keys_max
    try:
        table = ArrayTable(KEYS, data.draw(st.integers(4, KEYS)), update, width=width)
        for _ in range(4):
            first, last, content = some_entries(data, width=width)
            table.check(content, first, last)
            table.apply(first, last, content)
            keys = of_all(content)
            rows = {name: array[keys] for name, array in whole.items()}
            update.apply(rows["values"], {name: rows[name] for name in update.states}, content.values)
            for name, array in whole.items():
                array[keys] = rows[name]
        first, last, wanted = some_entries(data, width=width)
        read = table.read(first, last, wanted.keys)
        assert np.array_equal(read.values, whole["values"][of_all(read)])
    finally:
        tables.DENSE_KEYS_MAX = before


@pytest.mark.parametrize("keys", [KEYS, 2**40])
def test_a_copied_block_continues_as_the_original_would(keys):
    one, another = (ArrayTable(keys, keys // 3, Adam(0.1)) for _ in range(2))
    pushed = Entries(0, np.ones(3, np.float32), np.array([1, 5, keys // 3 - 1], np.int64))
    one.apply(0, keys // 3, pushed)
    another.apply(0, keys // 3, Entries(0, np.full(1, 7, np.float32), np.array([2], np.int64)))
    another.import_block(0, keys // 3, one.export_block(0, keys // 3))
    for table in (one, another):
        table.apply(0, keys // 3, pushed)
    assert np.array_equal(one.read(0, 2**62, pushed.keys).values, another.read(0, 2**62, pushed.keys).values)
    assert another.read(0, 2**62, np.array([2], np.int64)).values == 0
    assert another.read(0, 2**62, pushed.keys).values.all()


def some(*values, keys=None, **terms):
    listed = None if keys is None else np.array(keys, np.int64)
    return Entries(0, np.array(values, np.float32), listed, PushMeta(**terms) if terms else None)


def nothing():
    return some(keys=[], weight=0)


def test_a_mean_is_the_sum_of_values_divided_by_the_sum_of_weights():
    table = ArrayTable(10, 10, Sum(), aggregate="mean")
    parts = [some(1, 2), some(30, 40, weight=3.5), some(5, keys=[1], weight=0.5)]
    assert table.combine(parts, 0, 2).values.tolist() == pytest.approx([31 / 5, 47 / 5])
    assert table.combine([nothing(), some(3, 5, weight=2), nothing()], 0, 2).values.tolist() == [1.5, 2.5]
    assert table.combine([some(3, 5), nothing()], 0, 2).values.tolist() == [3, 5]
    assert table.combine([some(3, 5), some(1, 2)], 0, 2).values.tolist() == [2, 3.5]
    assert ArrayTable(10, 10, Sum()).combine(parts, 0, 2).values.tolist() == [31, 47]


@pytest.mark.parametrize("aggregate", ["sum", "mean", "each"])
def test_without_pushed_values_or_weights_the_update_takes_no_step(aggregate):
    table = ArrayTable(10, 10, Adam(0.1), aggregate=aggregate)
    table.apply(0, 10, Entries(0, np.ones(10, np.float32)))
    before = table.export_block(0, 10)
    total = table.combine([nothing(), some(*[0] * 10, weight=0)], 0, 10)
    table.dry_run(0, 10, total)
    table.apply(0, 10, total)
    after = table.export_block(0, 10)
    assert all(np.array_equal(after[name], rows) for name, rows in before.items())
    table.apply(0, 10, table.combine([nothing(), some(*[0] * 10, weight=1)], 0, 10))
    assert (table.export_block(0, 10)["steps"] == 2).all()


def test_settings_hold_for_the_push_that_carries_them():
    table = ArrayTable(10, 5, SGD(1.0, momentum=0.5))
    table.apply(0, 2, some(1, 1, settings={"lr": 0.25}))
    table.apply(0, 10, some(4, 4, keys=[1, 7], settings={"lr": 2.0, "momentum": 0.0625}))
    table.apply(0, 2, some(0, 0))
    first, second, other = 1 * 0.5, (1 * 0.0625 + 4) * 0.5, 4
    expected = [-0.25 - first, -0.25 - (1 * 0.0625 + 4) * 2 - second, -other * 2]
    assert table.read(0, 10, np.array([0, 1, 7])).values.tolist() == expected


def test_the_settings_of_a_sum_are_those_of_the_first_that_has_a_weight():
    table = ArrayTable(10, 10, SGD(1.0), aggregate="mean")
    idle, first, second = some(keys=[], weight=0, settings={"lr": 9.0}), some(3, 5), some(5, 7, weight=3.0)
    second.meta = PushMeta(3.0, {"lr": 0.5})
    assert table.combine([idle, second, first], 0, 2).meta.settings == {"lr": 0.5}
    assert table.combine([first, second], 0, 2).meta is None
    table.apply(0, 2, table.combine([idle, second], 0, 2))
    assert table.read(0, 2, None).values.tolist() == pytest.approx([-0.5 * 5 / 3, -0.5 * 7 / 3])


@pytest.mark.parametrize("keys", [100, 2**40])
@pytest.mark.parametrize("listed", [None, [3, 30, 31], [0, 3, 49]])
def test_with_aggregate_each_the_update_applies_pushes_one_after_the_other(keys, listed):
    def one(seed, listed, **terms):
        count = 50 if listed is None else len(listed)
        rows = np.random.default_rng(seed).normal(size=count).astype(np.float32)
        return Entries(
            0, rows, None if listed is None else np.array(listed), PushMeta(**terms) if terms else None
        )

    contents = [
        one(0, [3, 31, 40]),
        nothing(),
        one(1, listed, weight=2.0),
        one(2, listed, settings={"lr": 0.5}),
    ]
    table, other = (ArrayTable(keys, keys // 4, Adam(0.1), aggregate=how) for how in ("each", "sum"))
    for _ in range(2):
        before = table.read(0, 50, None).values.copy()
        together = table.combine(contents, 0, 50)
        assert np.array_equal(table.read(0, 50, None).values, before)
        assert together.is_replacement
        table.apply(0, 50, together)
        for content in contents:
            terms = content.meta or PushMeta()
            if terms.weight:
                rows, settings = content.values / terms.weight, PushMeta(settings=terms.settings)
                other.apply(0, 50, Entries(0, rows, content.keys, settings))
        for name, rows in other.read(0, 50, None, states=True).meta.states.items():
            assert np.array_equal(table.read(0, 50, None, states=True).meta.states[name], rows), name
        assert np.array_equal(table.read(0, 50, None).values, other.read(0, 50, None).values)
        assert table.read(0, 50, None).values.any()


@pytest.mark.parametrize("keys", [KEYS, 2**40])
def test_a_put_replaces_values_and_all_states(keys):
    table = ArrayTable(keys, 25, Adam(0.1)) if keys == KEYS else ArrayTable(keys, keys // 2, Adam(0.1))
    table.apply(0, 50, Entries(0, np.ones(50, np.float32)))
    before = table.read(0, 50, None).values.copy()
    rows = np.arange(20, 40, dtype=np.float32)
    put = Entries(20, rows, None, PushMeta(states={"mean": rows + 1, "steps": np.full(20, 7, np.float32)}))
    table.check(put, 20, 40)
    table.dry_run(20, 40, put)
    table.apply(20, 40, put)
    expected = {
        "values": before,
        "mean": np.full(50, 0.1),
        "squares": np.full(50, 0.001),
        "steps": np.ones(50),
    }
    for name, kept in {"values": rows, "mean": rows + 1, "squares": 0, "steps": 7}.items():
        expected[name][20:40] = kept
    found = {name: [] for name in expected}
    for first in range(0, 50, 25 if keys == KEYS else 50):
        for name in expected:
            found[name] += table.export_block(first, first + 25)[name][:50].tolist()
    for name, kept in expected.items():
        assert found[name][:50] == pytest.approx(kept.tolist()), name


@pytest.mark.parametrize("aggregate", ["mean", "each"])
def test_of_several_puts_at_one_time_only_the_first_counts(aggregate):
    table = ArrayTable(10, 10, SGD(1.0, momentum=0.5), aggregate=aggregate)
    first, second = some(1, 2, states={"momentum": np.array([3, 4], np.float32)}), some(5, 6, states={})
    total = table.combine([some(7, 8), first, nothing(), second], 1, 2)
    assert total.is_replacement
    assert (total.first, total.values.tolist(), total.meta.states["momentum"].tolist()) == (1, [2], [4])


@pytest.mark.parametrize("update", [Sum(), FailsBelowZero()])
def test_states_that_an_update_does_not_have_are_refused(update):
    table = ArrayTable(10, 10, update, may_fail=True)
    put = some(-1, 2, states={"momentum": np.array([3, 4], np.float32)})
    with pytest.raises(ValueError, match=r"expected states of \w+ among (none|count), got momentum"):
        table.dry_run(0, 2, put)
    table.dry_run(0, 2, some(-1, 2, states={}))


def test_a_copy_does_not_change_with_the_original():
    table = ArrayTable(10, 10, Sum())
    table.apply(0, 10, Entries(0, np.ones(10, np.float32)))
    copied = table.export_block(0, 10)
    table.apply(0, 10, Entries(0, np.ones(10, np.float32)))
    assert copied["values"].tolist() == [1.0] * 10


def test_a_removed_block_is_zero_again_and_takes_no_memory():
    table = ArrayTable(20, 10, Sum())
    table.apply(0, 20, Entries(0, np.ones(20, np.float32)))
    assert table.size_bytes == 20 * 4
    table.remove_block(0, 10)
    assert table.size_bytes == 10 * 4
    assert table.read(0, 20, None).values.tolist() == [0.0] * 10 + [1.0] * 10
    assert table.export_block(0, 10) is None
    table.import_block(10, 20, None)
    assert not table.read(0, 20, None).values.any()


def test_a_table_of_many_keys_takes_as_much_memory_as_is_pushed():
    table = ArrayTable(2**62, 2**61, Assign())
    keys = np.array([3, 2**60, 2**61 + 5], np.int64)
    table.apply(0, 2**62, Entries(0, np.array([1, 2, 3], np.float32), keys))
    assert table.size_bytes == 3 * 4
    assert table.read(0, 2**62, np.array([3, 4, 2**60, 2**61 + 5], np.int64)).values.tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Entries(0, np.ones(10)), "expected rows of float32"),
        (Entries(0, np.ones((10, 2), np.float32)), r"shape \(\), got float32 and \(2,\)"),
        (Entries(0, np.ones(9, np.float32)), "values of 10 keys, got 9"),
        (Entries(1, np.ones(10, np.float32)), "rows from key 0 on, got them from 1 on"),
        (Entries(0, np.ones(2, np.float32), np.array([3, 3])), "ascending keys, each once, got 3 before 3"),
        (Entries(0, np.ones(2, np.float32), np.array([3, 10])), "keys from 0 to below 10, got 3 to 10"),
        (Entries(0, np.ones(1, np.float32), np.array([3, 4])), "values of 2 keys, got 1"),
        (Entries(0, np.ones(10, np.float32), None, PushMeta(-1.0)), "finite weight of at least 0, got -1"),
        (Entries(0, np.ones(10, np.float32), None, PushMeta(np.nan)), "finite weight of at least 0, got nan"),
        (Entries(0, np.ones(10, np.float32), None, PushMeta(np.inf)), "finite weight of at least 0, got inf"),
        (Entries(0, np.ones(10, np.float32), None, PushMeta(1.0, {"lr": 1.0})), "settings of Sum among none"),
        (Entries(0, np.ones(10, np.float32), None, PushMeta(states={"a": np.ones(10)})), "expected a as"),
        (
            Entries(0, np.ones(10, np.float32), None, PushMeta(states={"a": np.ones(9, np.float32)})),
            "expected a",
        ),
    ],
)
def test_impossible_pushes_are_refused(content, words):
    with pytest.raises(ValueError, match=words):
        ArrayTable(20, 10, Sum()).check(content, 0, 10)


@pytest.mark.parametrize("keys", [20, 2**40])
def test_a_failing_update_is_detected_before_anything_changes(keys):
    table = ArrayTable(keys, keys // 2, FailsBelowZero(), may_fail=True)
    far = keys // 2 + 1
    for content in (
        Entries(3, np.ones(4, np.float32)),
        Entries(0, np.ones(2, np.float32), np.array([4, far])),
    ):
        table.dry_run(0, keys, content)
        table.apply(0, keys, content)
    listed = np.array([3, 4, 5, far])
    before = table.export_block(0, keys // 2), table.read(0, keys, listed).values.tolist()
    assert before[1] == [1, 2, 1, 1]
    for rows in ([-1.0, -3.0], [-2.0, 0.0]):
        bad = Entries(0, np.array(rows, np.float32), np.array([3, far]))
        with pytest.raises(ValueError, match=r"the update failed on the pushed values: .*below zero"):
            table.dry_run(0, keys, bad)
    assert table.read(0, keys, listed).values.tolist() == before[1]
    after = table.export_block(0, keys // 2)
    assert all(np.array_equal(after[name], array) for name, array in before[0].items())
    table.dry_run(0, keys, Entries(0, np.array([-1.0], np.float32), np.array([far])))


def test_a_function_takes_no_settings():
    table = ArrayTable(10, 10, FailsBelowZero(), may_fail=True)
    with pytest.raises(ValueError, match="expected no settings for a user-defined function"):
        table.check(some(1, 2, settings={"lr": 1.0}), 0, 2)


@pytest.mark.parametrize("keys", [KEYS, 2**40])
def test_all_states_can_be_read(keys):
    table = ArrayTable(keys, 25 if keys == KEYS else keys // 2, Adam(0.1), dtype=np.float64)
    table.apply(0, 60, Entries(0, np.ones(2), np.array([3, 30])))
    for listed in (None, np.array([3, 4, 30])):
        read = table.read(0, 31, listed, states=True)
        assert np.array_equal(read.values, table.read(0, 31, listed).values)
        places = [3, 30] if listed is None else [0, 2]
        for name, kept in {"mean": 0.1, "squares": 0.001, "steps": 1}.items():
            expected = np.zeros(len(read))
            expected[places] = kept
            np.testing.assert_allclose(read.meta.states[name], expected)
    assert table.read(0, 31, None).meta is None


@pytest.mark.parametrize(("keys", "width"), [(2**62, 0), (2**29 + 1, 0), (1, 2**62), (2**20, 2**9 + 1)])
def test_reading_more_values_than_a_message_may_have_is_refused(keys, width):
    table = ArrayTable(keys, keys, Sum(), width=width)
    with pytest.raises(ValueError, match=f"values of at most {2**31} bytes"):
        table.read(0, keys, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keys": 5, "block_keys": 6}, "blocks of 1 to 5 keys, got 6"),
        ({"keys": 5, "block_keys": 0}, "blocks of 1 to 5 keys, got 0"),
        ({"keys": 5, "block_keys": 5, "width": -1}, "at least 0 numbers"),
        ({"keys": 5, "block_keys": 5, "dtype": np.int32}, "float32 or float64, got int32"),
    ],
)
def test_an_impossible_table_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        ArrayTable(update=Sum(), **arguments)


class CountsCalls(Sum):
    """An update that records the number of rows of each of its calls."""

    def __init__(self):
        object.__setattr__(self, "calls", [])

    def apply(self, values, states, pushed):
        self.calls.append(len(values))
        super().apply(values, states, pushed)


def test_small_blocks_that_are_pushed_together_are_updated_together():
    update = CountsCalls()
    table = ArrayTable(100, 10, update)
    for _ in range(2):
        table.apply(15, 75, Entries(15, np.ones(60, np.float32)))
    table.apply(0, 100, Entries(0, np.ones(100, np.float32)))
    table.remove_block(30, 40)
    table.apply(20, 50, Entries(20, np.ones(30, np.float32)))
    assert update.calls == [60, 60, 100, 30]
    expected = np.repeat([1.0, 3, 4, 1, 4, 3, 1], [15, 5, 10, 10, 10, 25, 25])
    assert np.array_equal(table.read(0, 100, None).values, expected)


def test_blocks_lie_together_up_to_a_mebibyte_of_values():
    update = CountsCalls()
    keys, block_keys = 2**20, 2**16  # of 256 KiB
    table = ArrayTable(keys, block_keys, update)
    table.apply(0, keys, Entries(0, np.ones(keys, np.float32)))
    assert update.calls == [2**18] * 4
    large = ArrayTable(keys, keys // 2, CountsCalls())
    large.apply(0, keys, Entries(0, np.ones(keys, np.float32)))
    assert large.size_bytes == table.size_bytes == 4 * keys


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_block_is_added_and_removed_without_its_neighbours_in_memory(data):
    block_keys, update = data.draw(st.integers(1, 20)), SGD(0.1, 0.9)
    table, other = (ArrayTable(KEYS, block_keys, update) for _ in range(2))
    other.apply(0, KEYS, Entries(0, np.arange(KEYS, dtype=np.float32)))
    expected = {name: np.zeros(KEYS, np.float32) for name in ("values", "momentum")}
    present: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        first = data.draw(st.integers(0, KEYS - 1))
        number = first // block_keys
        begin, end = number * block_keys, min((number + 1) * block_keys, KEYS)
        match data.draw(st.sampled_from(["apply", "apply", "drop", "copy in", "copy nothing in"])):
            case "apply":
                last = data.draw(st.integers(first + 1, KEYS))
                rows = np.random.default_rng(last).normal(size=last - first).astype(np.float32)
                table.apply(first, last, Entries(first, rows))
                states = {"momentum": expected["momentum"][first:last]}
                update.apply(expected["values"][first:last], states, rows)
                present.update(range(number, (last - 1) // block_keys + 1))
            case "copy in":
                block = other.export_block(begin, end)
                table.import_block(begin, end, block)
                for name, rows in expected.items():
                    rows[begin:end] = block[name]
                present.add(number)
            case how:
                table.remove_block(begin, end) if how == "drop" else table.import_block(begin, end, None)
                for rows in expected.values():
                    rows[begin:end] = 0
                present.discard(number)
    held = 0
    for number in range((KEYS - 1) // block_keys + 1):
        begin, end = number * block_keys, min((number + 1) * block_keys, KEYS)
        block = table.export_block(begin, end)
        assert (block is not None) == (number in present)
        for name, rows in (block or {}).items():
            assert np.array_equal(rows, expected[name][begin:end]), name
            held += rows.nbytes
    assert table.size_bytes == held
    assert np.array_equal(table.read(0, KEYS, None).values, expected["values"])
