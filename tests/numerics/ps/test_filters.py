"""Filters of messages: round trips, costs, errors and refusals."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.filters import (
    KKT,
    Compression,
    FilterBytes,
    FilterChain,
    FilterMessage,
    FixedPoint,
    KeyCaching,
    RandomSkip,
    SignificantlyModified,
    UnknownKeysError,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LAST = 2**63
OVERHEAD_BYTES = 64  # of zstd, for each message of up to 1 MB
STANDARD_ERRORS = 5  # a right filter is found wrong once in 1.7 million draws, and the seeds are fixed
few = settings(max_examples=40)


def message_of(keys, values, *, first=0, last=None, time=0, namespace="w"):
    values = np.asarray(values)
    if keys is not None:
        keys = np.asarray(keys, np.int64)
    if last is None:
        last = LAST if keys is not None else first + len(values)
    return FilterMessage(namespace=namespace, first=first, last=last, time=time, keys=keys, values=values)


@st.composite
def messages(draw):
    """Any bits as values, NaN with payloads included; rows of zeros are frequent."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    keys = np.array(sorted(draw(st.sets(st.integers(0, LAST - 1), max_size=20))), np.int64)
    is_dense = draw(st.booleans()) and len(keys) > 0
    shape = (len(keys), *draw(st.sampled_from([(), (1,), (3,)])))
    size_bytes = np.dtype(dtype).itemsize
    whole = st.integers(0, 256**size_bytes - 1)
    bits = npst.arrays(f"u{size_bytes}", shape, elements=whole, fill=st.just(0))
    values = draw(bits).view(dtype)
    return message_of(None if is_dense else keys, values, first=5 if is_dense else 0)


def plain(message):
    """Everything of a message, bit for bit."""
    arrays = [None if a is None else (a.dtype, a.shape, a.tobytes()) for a in (message.keys, message.values)]
    return (
        (message.namespace, message.first, message.last, message.time),
        arrays,
        message.body,
        message.notes,
    )


def both_ends(*kinds):
    return FilterChain(kind() for kind in kinds), FilterChain(kind() for kind in kinds)


def through(kind, message):
    sender, receiver = both_ends(kind)
    return receiver.decode(sender.encode(message))


# Lossless filters and chains ------------------------------------------------------------------------------

LOSSLESS = {
    "key caching": lambda: KeyCaching(2),
    "compression": lambda: Compression(),
    "random skip": lambda: RandomSkip(1, seed=0),
    "KKT": lambda: KKT(1),
}
ORDERS = [
    order
    for count in range(len(LOSSLESS) + 1)
    for order in itertools.permutations(LOSSLESS, count)
    # filters that read keys or numbers must precede filters that remove them
    if not any(
        order.index(after) > order.index(before)
        for before in {"key caching", "compression"} & set(order)
        for after in {"random skip", "KKT"} & set(order)
    )
]


@settings(max_examples=120)
@given(st.sampled_from(ORDERS), st.lists(messages(), max_size=4))
def test_lossless_filters_decode_bit_for_bit(order, sent):
    sender, receiver = both_ends(*(LOSSLESS[name] for name in order))
    for message in [*sent, *sent]:
        before = plain(message)
        encoded = sender.encode(message)
        decoded = plain(receiver.decode(encoded))
        assert plain(message) == before
        if "random skip" in order:  # it divides by one, which makes every NaN a quiet one
            before = plain(replace(message, values=message.values / message.values.dtype.type(1)))
        assert decoded == before


@few
@given(messages())
def test_a_message_is_made_of_entries_and_returns_them(message):
    content = Entries(5, message.values, message.keys)
    made = FilterMessage.from_entries("w", message.first, message.last, content, time=message.time)
    assert plain(made) == plain(message)
    sender, receiver = both_ends(lambda: KeyCaching(1), Compression)
    decoded = receiver.decode(sender.encode(made)).entries
    assert np.array_equal(decoded.key_array(), content.key_array())
    assert (decoded.keys is None) == (content.keys is None)
    assert decoded.values.tobytes() == content.values.tobytes()


def test_entries_of_other_keys_make_no_message():
    with pytest.raises(ValueError, match="rows from key 0 on, got them from 1 on"):
        FilterMessage.from_entries("w", 0, 2, Entries(1, np.zeros(2)))
    with pytest.raises(ValueError, match="values of 3 keys, got 2"):
        FilterMessage.from_entries("w", 0, 3, Entries(0, np.zeros(2)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compression_keeps_subnormals_nans_and_infinities(dtype):
    tiny = np.finfo(dtype).smallest_subnormal
    special = np.array([0.0, -0.0, tiny, -tiny, math.inf, -math.inf, math.nan, 1.5] + [0.0] * 50, dtype)
    decoded = through(Compression, message_of(None, special))
    assert decoded.values.tobytes() == special.tobytes()
    assert decoded.values.flags.writeable


def test_rows_of_zeros_cost_a_bit_each():
    rng = np.random.default_rng(0)
    bits = rng.integers(1, 2**32, 8000, np.uint32)
    bits[rng.permutation(8000)[:4000]] = 0
    encoded = FilterChain([Compression()]).encode(message_of(None, bits.view(np.float32)))
    assert len(encoded.body) <= 8000 / 8 + 4000 * 4 + OVERHEAD_BYTES


def test_incompressible_values_grow_by_no_more_than_headers():
    bits = np.random.default_rng(0).integers(0, 2**32, 250_000, np.uint32).view(np.float32)
    encoded = FilterChain([Compression()]).encode(message_of(None, bits))
    assert bits.nbytes < len(encoded.body) <= bits.nbytes + OVERHEAD_BYTES


# Key caching ----------------------------------------------------------------------------------------------

lists = st.lists(st.sampled_from([(1, 2, 3), (1, 2), (4,), (), (7, 8, 9)]), max_size=25)


@few
@given(lists, st.integers(1, 4))
def test_in_order_without_loss_no_keys_are_unknown(order, entries):
    sender, receiver = both_ends(lambda: KeyCaching(entries))
    for place, keys in enumerate(order):
        last = 100 + place % 2
        encoded = sender.encode(message_of(keys, np.zeros(len(keys)), last=last))
        assert receiver.decode(encoded).keys.tolist() == list(keys)


@few
@given(lists, st.integers(1, 4), st.data())
def test_after_any_loss_keys_are_right_or_requested(order, entries, data):
    sender, receiver = both_ends(lambda: KeyCaching(entries))
    for keys in order:
        encoded = sender.encode(message_of(keys, np.zeros(len(keys))))
        if data.draw(st.booleans()):
            continue
        try:
            decoded = receiver.decode(encoded)
        except UnknownKeysError:
            decoded = receiver.decode(sender.resend(encoded))
        assert decoded.keys.tolist() == list(keys)
        assert not decoded.notes


def test_keys_travel_once_for_each_namespace_and_range():
    sender, receiver = both_ends(lambda: KeyCaching(8))
    places = [("w", 0, 10), ("w", 0, 11), ("v", 0, 10)]
    for turn in range(2):
        for namespace, first, last in places:
            message = message_of([1, 2], [0.5, 1], namespace=namespace, first=first, last=last)
            encoded = sender.encode(message)
            assert (encoded.keys is None) == (turn == 1)
            assert plain(receiver.decode(encoded)) == plain(message)


def test_the_list_that_was_used_longest_ago_is_forgotten_first():
    sender = FilterChain([KeyCaching(2)])
    sent = [sender.encode(message_of([key], [1.0])).keys is not None for key in (1, 2, 1, 3, 1, 2)]
    assert sent == [True, True, False, True, False, True]


def test_the_last_key_of_a_long_list_is_in_the_signature():
    """The authors' code hashes the first 2 kB."""
    keys = np.arange(5000)
    other = keys.copy()
    other[-1] += 1
    sender, receiver = both_ends(lambda: KeyCaching(2))
    for these in (keys, other, keys, other):
        decoded = receiver.decode(sender.encode(message_of(these, np.zeros(5000))))
        assert (decoded.keys == these).all()


def test_cached_keys_cannot_be_changed_from_outside():
    sender, receiver = both_ends(lambda: KeyCaching(2))
    keys = np.array([1, 2, 3])
    decoded = receiver.decode(sender.encode(message_of(keys, np.zeros(3))))
    with pytest.raises(ValueError, match="read-only"):
        decoded.keys[0] = 0
    keys[0] = 0
    encoded = sender.encode(message_of([1, 2, 3], np.zeros(3)))
    assert encoded.keys is None
    assert receiver.decode(encoded).keys.tolist() == [1, 2, 3]
    assert sender.resend(encoded).keys.tolist() == [1, 2, 3]


def test_a_resent_message_is_the_one_that_was_lost_with_its_keys():
    """Filters that draw or remember are not applied again to a resent message."""
    kinds = (
        lambda: SignificantlyModified(0.1),
        lambda: KeyCaching(2),
        lambda: FixedPoint(1, seed=0),
        lambda: Compression(),
    )
    sender, receiver = both_ends(*kinds)
    values = np.linspace(0, 1, 9)
    sender.encode(message_of(range(9), values))
    encoded = sender.encode(message_of(range(9), values + 1))
    with pytest.raises(UnknownKeysError, match="request a resend") as raised:
        receiver.decode(encoded)
    assert raised.value.signature == encoded.notes["key caching"]["signature"]
    again = sender.resend(encoded)
    assert (again.body, again.notes) == (encoded.body, encoded.notes)
    decoded = receiver.decode(again)
    assert decoded.keys.tolist() == list(range(9))
    np.testing.assert_allclose(decoded.values, values + 1, atol=1 / 255)


def test_impossible_resends_are_refused():
    sender = FilterChain([KeyCaching(1)])
    with_keys = sender.encode(message_of([1], [1.0]))
    encoded = sender.encode(message_of([1], [1.0]))
    with pytest.raises(ValueError, match="expected a message with a signature in place of its keys"):
        sender.resend(with_keys)
    with pytest.raises(ValueError, match="expected a chain with key caching"):
        FilterChain([Compression()]).resend(encoded)
    sender.encode(message_of([2], [1.0]))
    with pytest.raises(UnknownKeysError):
        sender.resend(encoded)


def test_a_resend_counts_as_use_at_both_ends():
    sender, receiver = both_ends(lambda: KeyCaching(2))
    sender.encode(message_of([1], [1.0]))  # lost
    encoded = sender.encode(message_of([1], [1.0]))
    receiver.decode(sender.encode(message_of([2], [1.0])))
    receiver.decode(sender.resend(encoded))
    receiver.decode(sender.encode(message_of([3], [1.0])))
    again = sender.encode(message_of([1], [1.0]))
    assert again.keys is None
    assert receiver.decode(again).keys.tolist() == [1]


def test_unknown_keys_are_an_error_of_offbeat():
    assert issubclass(UnknownKeysError, OffbeatError)
    assert not issubclass(UnknownKeysError, ProtocolError)


# Significantly modified -----------------------------------------------------------------------------------


@few
@given(
    st.lists(npst.arrays(np.float32, 6, elements=st.floats(-4, 4, width=32)), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.25, 1.0, lambda time: 4 / time]),
    st.sets(st.integers(0, 5)),
)
def test_the_receivers_values_are_never_off_by_more_than_the_threshold(states, threshold, left_out):
    sender, receiver = both_ends(lambda: SignificantlyModified(threshold))
    has = np.full(6, np.nan)
    offered = np.array([key for key in range(6) if key not in left_out], np.int64)
    for time, state in enumerate(states, start=1):
        keys = None if time == 1 else offered
        values = state if keys is None else state[keys]
        decoded = receiver.decode(sender.encode(message_of(keys, values, last=6, time=time)))
        places = np.arange(6) if decoded.keys is None else decoded.keys
        bound = threshold(time) if callable(threshold) else threshold
        at = np.arange(6) if keys is None else keys
        is_sent = np.isin(at, places)
        assert (is_sent == ~(np.abs(state[at].astype(float) - has[at]) <= bound)).all()
        has[places] = decoded.values
        assert (np.abs(has[at] - state[at]) <= bound).all()


def test_small_changes_add_up_until_they_are_sent():
    chain = FilterChain([SignificantlyModified(0.25)])
    sent = [len(chain.encode(message_of([3], [0.125 * step])).values) for step in range(9)]
    assert sent == [1, 0, 0, 1, 0, 0, 1, 0, 0]


def test_a_change_is_not_rounded_down_to_the_threshold():
    """In float32 the change would be 1."""
    chain = FilterChain([SignificantlyModified(1)])
    values = np.array([1e-9, -1.0], np.float32)
    assert [len(chain.encode(message_of([3], values[[place]])).values) for place in (0, 1)] == [1, 1]


def test_a_row_is_sent_whole_and_non_finite_rows_are_always_sent():
    chain = FilterChain([SignificantlyModified(1)])
    rows = np.array([[0.0, 0.0], [0.0, 0.0], [math.inf, 0.0], [math.nan, 0.0]])
    chain.encode(message_of(range(4), rows))
    rows[0, 1] = 2
    encoded = chain.encode(message_of(range(4), rows))
    assert encoded.keys.tolist() == [0, 2, 3]
    assert encoded.values[0].tolist() == [0, 2]


def test_namespaces_are_filtered_separately_and_their_rows_keep_shape_and_dtype():
    chain = FilterChain([SignificantlyModified(1)])
    chain.encode(message_of([1], [0.0]))
    assert len(chain.encode(message_of([1], [0.0], namespace="v")).values) == 1
    with pytest.raises(ValueError, match=r"expected rows of float64 \(\) as before, got float32 \(2,\)"):
        chain.encode(message_of([1], np.zeros((1, 2), np.float32)))


# Random skip ----------------------------------------------------------------------------------------------


def test_random_skip_leaves_every_expectation_as_it_was():
    """Each mean over the draws within 5 standard errors; one draw's variance is v^2 (1 - q) / q."""
    probability, draws = 0.3, 400
    values = np.array([1.0, -2.0, 0.0, 1e-3, 1e6, 3.0] * 20)
    sender, receiver = both_ends(lambda: RandomSkip(probability, seed=7))
    total, count = np.zeros(len(values)), 0
    for _ in range(draws):
        decoded = receiver.decode(sender.encode(message_of(None, values)))
        total[decoded.keys] += decoded.values
        count += len(decoded.keys)
    error = np.abs(values) * math.sqrt((1 - probability) / probability / draws)
    assert (np.abs(total / draws - values) <= STANDARD_ERRORS * error).all()
    trials = draws * len(values)
    spread = math.sqrt(trials * probability * (1 - probability))
    assert abs(count - trials * probability) <= STANDARD_ERRORS * spread


def test_random_skip_divides_at_the_receiver_and_keeps_the_dtype():
    sender, receiver = both_ends(lambda: RandomSkip(0.5, seed=0))
    encoded = sender.encode(message_of(range(100), np.ones((100, 2), np.float32)))
    assert (encoded.values == 1).all()
    decoded = receiver.decode(encoded)
    assert decoded.values.dtype == np.float32
    assert (decoded.values == 2).all()
    assert 0 < len(decoded.keys) < 100


# Fixed point ----------------------------------------------------------------------------------------------


@few
@given(
    npst.arrays(
        st.sampled_from([np.float32, np.float64]),
        st.tuples(st.integers(0, 8), st.integers(1, 3)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
)
def test_fixed_point_is_off_by_less_than_a_step(values, bytes_per_value, is_flat):
    values = values.ravel() if is_flat else values
    message = message_of(range(len(values)), values)
    sender, receiver = both_ends(lambda: FixedPoint(bytes_per_value, seed=3))
    encoded = sender.encode(message)
    assert encoded.values.nbytes == bytes_per_value * values.size
    decoded = receiver.decode(encoded)
    assert (decoded.values.dtype, decoded.values.shape) == (values.dtype, values.shape)
    if values.size:
        step = (float(values.max()) - float(values.min())) / (256**bytes_per_value - 1)
        rounding = np.finfo(values.dtype).eps * np.abs(values).max()
        assert np.abs(decoded.values.astype(float) - values).max() <= step + rounding
        assert values.min() <= decoded.values.min()
        assert decoded.values.max() <= values.max()


def test_fixed_point_rounds_with_the_fraction_as_the_probability():
    """A fair coin would be off by up to half a step here. One draw's variance is f (1 - f) steps^2."""
    draws, fractions = 400, np.linspace(0, 1, 41)
    values = np.concatenate([[0.0, 255.0], 100 + fractions])  # steps of 1
    sender, receiver = both_ends(lambda: FixedPoint(1, seed=11))
    total = np.zeros(len(values))
    for _ in range(draws):
        total += receiver.decode(sender.encode(message_of(None, values))).values
    error = np.sqrt(fractions * (1 - fractions) / draws)
    off = np.abs(total / draws - values)
    assert (off[:2] == 0).all()
    assert (off[2:] <= STANDARD_ERRORS * error + 1e-9).all()


@pytest.mark.parametrize("value", [0.0, -3.5, 1e-310, 1e308])
def test_equal_values_are_exact(value):
    assert (through(lambda: FixedPoint(1, seed=0), message_of(None, np.full(5, value))).values == value).all()


@pytest.mark.parametrize(
    "values", [[1.0, math.nan], [math.inf, 0.0], [-math.inf, 0.0], [-1.7e308, 1.7e308]], ids=str
)
def test_values_without_a_fixed_point_are_refused(values):
    with pytest.raises(ValueError, match="expected finite values in a finite range, got"):
        FilterChain([FixedPoint(2, seed=0)]).encode(message_of(None, values))


# KKT ------------------------------------------------------------------------------------------------------


@few
@given(
    npst.arrays(np.float64, 12, elements=st.sampled_from([0.0, -0.0, 0.5, -1.0])),
    npst.arrays(np.float64, 12, elements=st.sampled_from([-2.0, -0.75, -0.5, 0.0, 0.5, 0.75, 2.0, math.nan])),
    st.sampled_from([0.0, 0.25, 1.0, 2.0, math.inf]),
)
def test_kkt_skips_exactly_zero_weights_with_a_gradient_within_the_bound(weights, gradients, margin):
    """NIPS'14: w = 0 and |g| <= lambda - delta."""
    kkt, keys = KKT(l1=1.0), np.arange(10, 22)
    kkt.set_margin(margin)
    kkt.update_skipped(keys, weights, gradients)
    stays = [
        not (w == 0 and abs(g) <= 1.0 - margin)
        for w, g in zip(weights.tolist(), gradients.tolist(), strict=True)
    ]
    assert kkt.is_active(keys).tolist() == stays
    pushed = np.column_stack([gradients, np.ones(12)])
    encoded = FilterChain([kkt]).encode(message_of(None, pushed, first=10))
    places = np.arange(10, 22) if encoded.keys is None else encoded.keys
    assert places.tolist() == keys[stays].tolist()
    assert encoded.values.tobytes() == pushed[stays].tobytes()


def test_skipped_keys_stay_skipped_until_an_infinite_margin_resets_them():
    kkt, keys = KKT(l1=1.0), np.array([1, 3, 5])
    kkt.update_skipped(keys, np.zeros(3), np.zeros(3))
    assert kkt.is_active(keys).all(), "at first, nothing is skipped"
    kkt.set_margin(0.0)
    kkt.update_skipped(keys, np.zeros(3), np.zeros(3))
    kkt.update_skipped(np.array([2, 3]), np.zeros(2), np.array([0.0, 9.0]))
    kkt.set_margin(2.0)
    kkt.update_skipped(np.array([0, 4]), np.zeros(2), np.zeros(2))
    assert kkt.is_active(np.arange(7)).tolist() == [True, False, False, False, True, False, True]
    kkt.set_margin(np.inf)
    assert kkt.is_active(keys).all()


def test_with_skipped_coordinates_the_optimum_is_the_same():
    """A least-squares problem by proximal gradient; taken back once, and checked by the conditions."""
    rng = np.random.default_rng(0)
    rows, target = rng.normal(size=(60, 30)), rng.normal(size=60)
    rate, l1 = 1 / np.linalg.norm(rows, 2) ** 2, 15.0

    def solve(is_filtered):
        kkt, weights, gradient, skipped = KKT(l1), np.zeros(30), np.zeros(30), 0
        kkt.set_margin(0.1 * l1)
        chain = FilterChain([kkt])
        for step in range(600):
            if step == 400:
                kkt.set_margin(np.inf)
                kkt.set_margin(0.1 * l1)
            decoded = chain.encode(message_of(None, rows.T @ (rows @ weights - target)))
            keys = np.arange(30) if decoded.keys is None else decoded.keys
            skipped += 30 - len(keys)
            gradient[keys] = decoded.values
            moved = weights[keys] - rate * gradient[keys]
            weights[keys] = np.sign(moved) * np.maximum(np.abs(moved) - rate * l1, 0)
            if is_filtered:
                kkt.update_skipped(keys, weights[keys], gradient[keys])
        return weights, skipped

    weights, _ = solve(False)
    filtered, skipped = solve(True)
    np.testing.assert_allclose(filtered, weights, atol=1e-12)
    assert skipped > 600
    slope = rows.T @ (rows @ filtered - target)
    zero = filtered == 0
    assert 0 < zero.sum() < 30
    assert (np.abs(slope[zero]) <= l1).all()
    np.testing.assert_allclose(slope[~zero], -l1 * np.sign(filtered[~zero]), atol=1e-8)


# Bytes ----------------------------------------------------------------------------------------------------


def test_the_report_counts_bytes_before_and_after_each_filter():
    sender, receiver = both_ends(
        lambda: SignificantlyModified(0.5), lambda: KeyCaching(1), lambda: FixedPoint(1, seed=0)
    )
    for values in (np.arange(100.0), np.arange(100.0)):
        for end in (sender, receiver):
            assert set(end.report()) == {"significantly modified", "key caching", "fixed point"}
        receiver.decode(sender.encode(message_of(range(100), values)))
    whole, note, fixed = 1600, 16, 8 + 8 + 7 + 8  # low, high, "float64", width
    assert sender.report() == {
        "significantly modified": FilterBytes(2 * whole, whole),
        "key caching": FilterBytes(whole, whole + 2 * note),
        "fixed point": FilterBytes(whole + 2 * note, 800 + 2 * note + 100 + 2 * fixed),
    }
    reported = receiver.report()
    assert reported["fixed point"] == FilterBytes(*reversed(sender.report()["fixed point"]))
    assert reported["key caching"] == FilterBytes(*reversed(sender.report()["key caching"]))
    assert reported["significantly modified"] == FilterBytes(whole, whole)


def test_caching_takes_half_of_int64_keys_and_doubles_and_resends_are_counted():
    """OSDI'14 measured about a half too."""
    chain = FilterChain([KeyCaching(1), Compression()])
    message = message_of(range(1000), np.random.default_rng(0).normal(size=1000))
    chain.encode(message)
    before = chain.report()
    encoded = chain.encode(message)
    after = chain.report()
    saved = after["key caching"].out_bytes - before["key caching"].out_bytes
    assert saved == 8000 + 16
    again = chain.resend(encoded)
    assert again.size_bytes == encoded.size_bytes + 8000
    assert chain.report()["key caching"].out_bytes == after["key caching"].out_bytes + again.size_bytes
    assert chain.report()["compression"].out_bytes == after["compression"].out_bytes + again.size_bytes


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KeyCaching(0), "at least 1 entry, got 0"),
        (lambda: Compression(0), "level from 1 to 19, got 0"),
        (lambda: Compression(20), "level from 1 to 19, got 20"),
        (lambda: Compression(size_bytes_max=0), "at least 1 byte at most, got 0"),
        (lambda: SignificantlyModified(-1), "threshold of at least 0, got -1"),
        (lambda: SignificantlyModified(math.nan), "threshold of at least 0, got nan"),
        (lambda: RandomSkip(0, 1), "probability above 0 and up to 1, got 0"),
        (lambda: RandomSkip(1.5, 1), "probability above 0 and up to 1, got 1.5"),
        (lambda: FixedPoint(4, 1), "1, 2 or 3 bytes per value, got 4"),
        (lambda: KKT(-1), "l1 of at least 0, got -1"),
        (lambda: FilterChain([KKT(1), KKT(2)]), "expected KKT once, got it twice"),
        (
            lambda: FilterChain([KeyCaching(1), KKT(1)]),
            "no KKT behind key caching, which removes its keys",
        ),
        (lambda: FilterChain([Compression(), FixedPoint(1, 0)]), "no fixed point behind compression"),
        (lambda: FilterChain([FixedPoint(1, 0), RandomSkip(1, 0)]), "removes its numbers"),
        (lambda: FilterChain([SignificantlyModified(1), RandomSkip(1, 0)]), "removes its sums"),
        (lambda: FilterChain([RandomSkip(1, 0), SignificantlyModified(1)]), "removes its states"),
    ],
)
def test_impossible_filters_and_chains_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


NO_MESSAGES = [
    (message_of([2, 1], [0.0, 0.0]), "ascending keys, each once, got 2 before 1"),
    (message_of([1, 1], [0.0, 0.0]), "ascending keys, each once, got 1 before 1"),
    (message_of([1, 2], [0.0]), "values of 2 keys, got 1"),
    (message_of(None, [0.0], last=2), "values of 2 keys, got 1"),
    (message_of([5], [0.0], last=5), "keys from 0 to below 5, got 5 to 5"),
    (message_of([1], [0.0], first=4, last=4), "a range of keys within 0"),
    (message_of([1], [1]), "rows of floats or bytes in native byte order, got int64"),
    (message_of([1], np.zeros(1, np.uint8)), "values of float32 or float64"),
    (message_of([1], np.zeros((1, 1, 1))), "rows of floats or bytes"),
    (replace(message_of([1], [0.0]), keys=np.array([1], np.int32)), "one row of int64, got int32"),
    (replace(message_of([1], [0.0]), values=None), "values of float32 or float64, got none"),
    (replace(message_of([1], [0.0]), body=b"abc"), "without a body, got one of 3 bytes"),
    (message_of(range(2), np.zeros((2, 0))), r"values of float32 or float64, got float64 of shape \(2, 0\)"),
    (message_of([1], np.zeros(1, ">f4")), "in native byte order, got >f4"),
]


@pytest.mark.parametrize(("message", "words"), NO_MESSAGES, ids=[words for _, words in NO_MESSAGES])
def test_malformed_messages_are_refused_at_both_ends(message, words):
    with pytest.raises(ValueError, match=words):
        FilterChain([]).encode(message)
    with pytest.raises(ProtocolError, match=words):
        FilterChain([]).decode(message)


def test_messages_that_cannot_be_encoded_are_refused():
    encoded = FilterChain([KeyCaching(1)]).encode(message_of([1], [0.0]))
    with pytest.raises(ValueError, match=r"without notes, got those of \['key caching'\]"):
        FilterChain([]).encode(encoded)
    with pytest.raises(ValueError, match="values of at most 8 bytes, got 16"):
        FilterChain([Compression(size_bytes_max=8)]).encode(message_of([1, 2], [0.0, 1.0]))
    falling = FilterChain([SignificantlyModified(lambda time: 1.0 - time)])
    with pytest.raises(ValueError, match=r"at least 0, got -1.0 at time 2"):
        falling.encode(message_of([1], [0.0], time=2))
    keys, zeros = np.array([1, 2]), np.zeros(2)
    for arguments, words in (
        ((keys, zeros[:1], zeros), r"a weight and a gradient per key, got shapes \(2,\), \(1,\) and \(2,\)"),
        ((keys[::-1], zeros, zeros), "ascending keys"),
    ):
        with pytest.raises(ValueError, match=words):
            KKT(1).update_skipped(*arguments)
    for margin in (-0.5, math.nan):
        with pytest.raises(ValueError, match=f"a margin of at least 0, got {margin}"):
            KKT(1).set_margin(margin)


def test_notes_of_an_unknown_filter_are_refused():
    encoded = FilterChain([RandomSkip(1, 0)]).encode(message_of([1], [0.0]))
    with pytest.raises(
        ProtocolError, match=r"notes of the filters here only, got those of \['random skip'\]"
    ):
        FilterChain([]).decode(encoded)


KINDS = (
    lambda: RandomSkip(0.5, seed=1),
    lambda: KeyCaching(2),
    lambda: FixedPoint(2, seed=2),
    lambda: Compression(size_bytes_max=1000),
)
VALUES = np.array([0.0] * 30 + [1.0, -2.0])
BAD = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.binary(max_size=20)),
    *(st.sampled_from(["", "float64", "uint8", "object"]), st.lists(st.integers(-1, 2**70), max_size=3)),
)


@settings(max_examples=100)
@given(st.data())
def test_notes_that_are_damaged_are_refused_or_the_message_is_whole(data):
    """An error of offbeat, or a message of the right shape."""
    sender, receiver = both_ends(*KINDS)
    encoded = sender.encode(message_of(range(32), VALUES))
    name = data.draw(st.sampled_from(sorted(encoded.notes)))
    note = dict(encoded.notes[name])
    note[data.draw(st.sampled_from([*sorted(note), "more"]))] = data.draw(BAD)
    note = data.draw(st.sampled_from([note, {}, 3]))
    try:
        decoded = receiver.decode(replace(encoded, notes={**encoded.notes, name: note}))
    except ProtocolError:
        return
    assert decoded.values.shape == decoded.keys.shape
    assert decoded.values.dtype in (np.float32, np.float64)


def test_a_damaged_body_is_refused_or_decodes_to_the_same():
    """Some bits have no effect: bits that fill the last byte, and which of equal bytes are repeated."""
    sender, receiver = both_ends(*KINDS)
    encoded = sender.encode(message_of(range(32), VALUES))
    body, right = encoded.body, plain(receiver.decode(encoded))
    refused = 0
    for bit in range(8 * len(body)):
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert plain(receiver.decode(replace(encoded, body=bytes(damaged)))) == right
        except ProtocolError:
            refused += 1
    assert refused >= 8 * len(body) - 16
    for damaged in [*(body[:end] for end in range(len(body))), body + b"0"]:
        with pytest.raises(ProtocolError, match="expected a body"):
            receiver.decode(replace(encoded, body=damaged))


def test_keys_that_do_not_have_their_signature_are_refused():
    sender, receiver = both_ends(lambda: KeyCaching(2))
    encoded = sender.encode(message_of([1, 2], [0.0, 0.0]))
    with pytest.raises(ProtocolError, match="expected keys with the signature"):
        receiver.decode(replace(encoded, keys=np.array([1, 3])))
    with pytest.raises(ProtocolError, match="expected a note of key caching"):
        receiver.decode(message_of([1], [0.0]))
    short = {"key caching": {"signature": b"short"}}
    with pytest.raises(ProtocolError, match="signature of 16 bytes, got 5"):
        receiver.decode(replace(encoded, notes=short))


def compressed(plain, shape, *, is_sparse=False, dtype="float64", algorithm="zstd"):
    note = {"algorithm": algorithm, "dtype": dtype, "shape": shape, "sparse": is_sparse}
    body = zstd.compress(plain)
    return replace(message_of(range(3), np.zeros(3)), values=None, body=body, notes={"compression": note})


def cut_by(message, count):
    return replace(message, body=message.body[:-count])


def with_a_window_of(window_bytes):
    options = {zstd.CompressionParameter.window_log: window_bytes.bit_length() - 1}
    packer = zstd.ZstdCompressor(options=options)  # of data whose size it does not know
    return packer.compress(bytes(24), packer.FLUSH_BLOCK) + packer.flush()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (compressed(bytes(10**7), [3]), "body of at most 24 bytes unpacked and its end, got 25"),
        (compressed(bytes(24), [2**40]), "values of at most 1000 bytes, got"),
        (compressed(bytes(0), [0, 2**70]), "values of at most 1000 bytes, got"),
        (compressed(bytes(23), [3]), "24 bytes of values, got 23"),
        (compressed(bytes(24), [4]), "32 bytes of values, got 24"),
        (compressed(bytes(16), [2]), "values of 3 keys, got 2"),
        (compressed(bytes(0), [3], is_sparse=True), "bitmap of 3 rows, got 0 bytes"),
        (compressed(b"\xff" + bytes(24), [3], is_sparse=True), "expected a body of at most 24"),
        (compressed(b"\x10", [3], is_sparse=True), "bitmap of 3 rows, got one of more"),
        (compressed(b"\x80", [3], is_sparse=True), "8 bytes of values, got 0"),
        (compressed(bytes(24), [3], dtype="object"), "float32, float64 or uint8, got 'object'"),
        (compressed(bytes(24), [3, 0]), "a shape of rows"),
        (compressed(bytes(24), [3], algorithm="lz4"), "compressed with zstd, got 'lz4'; all nodes"),
        (replace(compressed(b"", [3]), body=b"garbage"), "expected a body that zstd decompresses, got"),
        (cut_by(compressed(bytes(24), [3]), 1), "at most 24 bytes unpacked and its end, got .* no end"),
        (
            replace(compressed(b"", [3]), body=with_a_window_of(2**24)),
            "a body that zstd decompresses, got .* memory",
        ),
        (replace(compressed(b"", [0]), body=None), "expected a body, got a message without"),
    ],
)
def test_bodies_that_no_compression_gives_are_refused(message, words):
    with pytest.raises(ProtocolError, match=words):
        FilterChain([Compression(size_bytes_max=1000)]).decode(message)


def test_impossible_numbers_are_refused():
    fixed = FilterChain([FixedPoint(2, 0)]).encode(message_of([1, 2], [0.0, 1.0]))
    note = fixed.notes["fixed point"]
    for change, words in (
        ({"notes": {"fixed point": {**note, "low": 2.0}}}, "floats from low to high"),
        ({"notes": {"fixed point": {**note, "high": math.inf}}}, "floats from low to high"),
        ({"notes": {"fixed point": {**note, "dtype": "int8"}}}, "floats from low to high"),
        ({"notes": {"fixed point": {**note, "width": -1}}}, "rows of 2 bytes"),
        ({"notes": {"fixed point": {**note, "width": 2**70}}}, "expected rows of"),
        ({"values": np.zeros((2, 3), np.uint8)}, "rows of 2 bytes"),
        ({"values": np.zeros(2)}, "rows of 2 bytes"),
    ):
        with pytest.raises(ProtocolError, match=words):
            FilterChain([FixedPoint(2, 0)]).decode(replace(fixed, **change))
    skipped = replace(message_of([1], np.zeros(1, np.uint8)), notes={"random skip": {"probability": 0.5}})
    with pytest.raises(ProtocolError, match="values of float32 or float64"):
        FilterChain([RandomSkip(0.5, 0)]).decode(skipped)
    wrong = replace(message_of([1], [0.0]), notes={"random skip": {"probability": math.nan}})
    with pytest.raises(ProtocolError, match="probability above 0"):
        FilterChain([RandomSkip(0.5, 0)]).decode(wrong)
