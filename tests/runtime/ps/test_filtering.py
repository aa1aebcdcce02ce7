"""Filters of namespaces: encoding of messages between two nodes, and decoding at the other end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.numerics.ps.block_proximal import BlockProximal
from offbeat.numerics.ps.entries import Entries, PushMeta
from offbeat.numerics.ps.filters import FilterBytes
from offbeat.numerics.ps.spaces import FilterSpec, NamespaceFilters, encode_namespace
from offbeat.numerics.ps.updates import Assign, Sum
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.messages import (
    InspectPull,
    InspectResult,
    Operation,
    Pull,
    PullResult,
    Push,
    PushAck,
    PushStamp,
    Rejected,
    Replicate,
    ReplicateAck,
    WrongMaster,
)
from offbeat.policies.ps.range_clock import ClockRange
from offbeat.runtime.ps.filtering import NodeFilters
from offbeat.runtime.ps.packing import EncodedValues
from support.ps_messages import came, packed, plain

KEYS = 1000
CACHING = FilterSpec("KeyCaching", {"entries": 4})
COMPRESSION = FilterSpec("Compression", {"level": 1})
FIXED = FilterSpec("FixedPoint", {"bytes_per_value": 2})
SKIP = FilterSpec("RandomSkip", {"probability": 0.5})
MODIFIED = FilterSpec("SignificantlyModified", {"threshold": 0.5})
OF_SUMS = {
    "none": (),
    "caching": (CACHING,),
    "compression": (COMPRESSION,),
    "fixed point": (FIXED,),
    "skip": (SKIP,),
    "caching, compression": (CACHING, COMPRESSION),
    "skip, caching": (SKIP, CACHING),
    "skip, caching, fixed point, compression": (SKIP, CACHING, FIXED, COMPRESSION),
}
OF_STATES = {
    "modified": (MODIFIED,),
    "modified, caching, compression": (MODIFIED, CACHING, COMPRESSION),
    "modified, caching, fixed point, compression": (MODIFIED, CACHING, FIXED, COMPRESSION),
}
LOSSLESS = ("none", "caching", "compression", "caching, compression")
OF_PULLS = {"none": (), "compression": (COMPRESSION,), "all": (CACHING, FIXED, COMPRESSION)}
REMEMBERING = {
    "modified": (MODIFIED,),
    "modified, compression": (MODIFIED, COMPRESSION),
    "modified, caching, fixed point, compression": (MODIFIED, CACHING, FIXED, COMPRESSION),
}


class Ends:
    """Two nodes that exchange encoded messages."""

    def __init__(
        self, push: tuple[FilterSpec, ...] = (), pull: tuple[FilterSpec, ...] = (), update: Any = None
    ) -> None:
        about = encode_namespace(
            update or Sum(), width=0, dtype="float32", filters=NamespaceFilters(push, pull)
        )
        spaces = {"w": NamespaceSpec("w", KEYS, 100, about)}
        self.here, self.there = NodeFilters(1), NodeFilters(2)
        self.here.add_namespaces(spaces), self.there.add_namespaces(spaces)

    def encoded(self, message: Any) -> Any:
        """A message as received by `there`, not decoded yet."""
        (arrived,) = came(*packed(self.here.encode("there", message)))
        return arrived

    def decoded(self, message: Any) -> Any:
        """A message as received and decoded by `there`."""
        return self.there.decode("here", self.encoded(message))

    def answered(self, rows: Any, keys: Any = None, *, first: int = 0, last: int = KEYS) -> Any:
        """The rows that `there` decodes after a pull that `here` answers with `rows`."""
        asked = replace(pull(keys), first=first, last=last)
        (arrived,) = came(*packed(self.there.encode("here", asked)))
        assert plain(self.here.decode("there", arrived)) == plain(asked)
        answer = replace(pulled(rows, keys), first=first, last=last)
        answer.content.first = first
        return self.decoded(answer).content.values


def push(content: Entries, *, time: int = 1, first: int = 0, last: int = KEYS) -> Push:
    return Push(
        client=1,
        request=1,
        epoch=0,
        namespace="w",
        first=first,
        last=last,
        time=time,
        previous_times=(),
        content=content,
    )


def copy(content: Entries) -> Replicate:
    marks = (PushStamp(client=1, time=1, previous_times=()),)
    operation = Operation(namespace="w", first=0, last=KEYS, stamps=marks, content=content)
    return Replicate(view=0, master=1, serial=1, operation=operation, route=(2,))


def pull(keys: Any) -> Pull:
    return Pull(client=1, request=1, epoch=0, namespace="w", first=0, last=KEYS, keys=keys)


def pulled(rows: Any, keys: Any = None) -> PullResult:
    return PullResult(request=1, namespace="w", first=0, last=KEYS, content=Entries(0, rows, keys))


def some(seed: int, *, is_listed: bool = True) -> Entries:
    chance = np.random.default_rng(seed)
    keys = np.flatnonzero(chance.random(KEYS) < 0.3) if is_listed else None
    rows = chance.standard_normal(KEYS if keys is None else len(keys)).astype(np.float32)
    return Entries(0, rows, keys)


def dense(content: Entries) -> Any:
    rows = np.zeros(KEYS, np.float32)
    rows[content.key_array()] = content.values
    return rows


# Encoding and decoding


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("chain", LOSSLESS)
def test_lossless_filters_do_not_change_messages(chain: str, is_listed: bool) -> None:
    ends = Ends(OF_SUMS[chain])
    for seed in (1, 2, 1, 1, 3):
        message = push(some(seed, is_listed=is_listed))
        assert plain(ends.decoded(message)) == plain(message)


@pytest.mark.parametrize("chain", OF_PULLS)
def test_values_returned_by_a_push_pass_the_filters_of_pulls_once(chain: str) -> None:
    ends = Ends(pull=OF_PULLS[chain])
    rows, message = some(1, is_listed=False).values, push(some(2, is_listed=False))
    for returns_values in (True, False):
        asked = replace(message, request=1, returns_values=returns_values)
        (arrived,) = came(*packed(ends.there.encode("here", asked)))
        assert plain(ends.here.decode("there", arrived)) == plain(asked)
        if returns_values:
            assert np.abs(ends.decoded(pulled(rows)).content.values - rows).max() < 0.01
        with pytest.raises(ProtocolError, match="expected rows that were requested"):
            ends.decoded(pulled(rows))


@pytest.mark.parametrize("chain", [one for one in OF_SUMS if one not in LOSSLESS])
def test_random_filters_are_unbiased_and_close(chain: str) -> None:
    ends, content = Ends(OF_SUMS[chain]), some(1)
    received = [ends.decoded(push(content, time=time)) for time in range(400)]
    assert all(
        replace(one, content=None) == replace(push(content), time=one.time, content=None) for one in received
    )
    mean = sum(dense(one.content) for one in received) / len(received)
    assert (
        np.abs(mean - dense(content)).max() < 0.5
    )  # values are up to 3.5; skipped ones deviate by 1 / 20 of them
    assert np.abs((mean - dense(content)).mean()) < 0.01


@pytest.mark.parametrize("chain", OF_STATES)
def test_assigned_values_never_deviate_by_more_than_the_threshold(chain: str) -> None:
    ends, chance = Ends(OF_STATES[chain], update=Assign()), np.random.default_rng(1)
    there, here = np.zeros(KEYS), np.zeros(KEYS, np.float32)
    for time in range(20):
        here += chance.normal(0, 0.2, KEYS).astype(np.float32)
        content = ends.decoded(push(Entries(0, here.copy()), time=time)).content
        there[content.key_array()] = content.values
        assert np.abs(there - here).max() <= 0.5 + 1e-3  # plus a quantization step of FixedPoint
        assert not time or len(content) < KEYS


@pytest.mark.parametrize("chain", OF_SUMS | OF_STATES)
@pytest.mark.parametrize("is_listed", [True, False])
def test_replicas_receive_the_masters_exact_values_under_any_filters_of_pushes(chain, is_listed) -> None:
    update = Assign() if chain in OF_STATES else Sum()
    ends = Ends((OF_SUMS | OF_STATES)[chain], update=update)
    for seed in (1, 2, 1, 1, 3, 4, 5, 6, 1):
        message = copy(some(seed, is_listed=is_listed))
        assert plain(ends.decoded(message)) == plain(message)


@pytest.mark.parametrize("chain", OF_PULLS)
def test_a_pull_requests_its_listed_keys_under_any_filters(chain: str) -> None:
    ends = Ends(pull=OF_PULLS[chain])
    lists = [some(seed).keys for seed in (1, 2, 1, 3)] + [None]
    for keys in lists * 3:
        assert plain(ends.decoded(pull(keys))) == plain(pull(keys))


def test_a_repeated_list_of_keys_is_sent_once() -> None:
    ends = Ends(pull=OF_PULLS["all"])
    sizes = [len(packed(ends.encoded(pull(some(seed).keys)))[0]) for seed in (1, 2, 1, 2)]
    assert min(sizes[:2]) > 2000
    assert max(sizes[2:]) < 200


def test_both_ends_cache_the_same_lists_of_keys() -> None:
    ends = Ends((CACHING,), OF_PULLS["all"])
    for number in [*range(300), *range(300), 299, 0, 299, 43, 44, 45]:
        keys = np.array([number, number + 1])
        assert plain(ends.decoded(pull(keys))) == plain(pull(keys))
        message = push(Entries(0, np.ones(2, np.float32), keys))
        assert plain(ends.decoded(message)) == plain(message)


@pytest.mark.parametrize("chain", OF_PULLS)
def test_an_answer_arrives_with_its_rows(chain: str) -> None:
    ends = Ends(pull=OF_PULLS[chain])
    for content in (some(1), some(2, is_listed=False), some(1), Entries(0, ONES, np.arange(KEYS))):
        error = (float(np.ptp(content.values)) / (256**2 - 1)) if chain == "all" else 0.0
        found = ends.answered(content.values, content.keys)
        assert np.abs(found - content.values).max() <= error * 1.01
    assert len(ends.answered(np.zeros(0, np.float32), np.zeros(0, np.int64))) == 0


@pytest.mark.parametrize("chain", OF_PULLS | REMEMBERING)
def test_an_answer_is_sent_without_the_requested_keys(chain: str) -> None:
    ends = Ends(pull=(OF_PULLS | REMEMBERING)[chain])
    for seed in (1, 2, 1):
        content = some(seed)
        asked = ends.there.encode("here", pull(content.keys))
        ends.here.decode("there", asked)
        encoded = ends.encoded(pulled(content.values, content.keys))
        assert encoded.content.keys is None
        found = ends.there.decode("here", encoded).content
        assert found.keys.tolist() == content.keys.tolist()


@pytest.mark.parametrize("rows", [0, 1, 4, 6])
@pytest.mark.parametrize("chain", OF_PULLS | REMEMBERING)
def test_an_answer_with_other_rows_is_rejected(chain: str, rows: int) -> None:
    ends = Ends(pull=(OF_PULLS | REMEMBERING)[chain])
    ends.there.encode("here", pull(np.arange(rows)))
    with pytest.raises(ProtocolError, match="expected"):
        ends.decoded(pulled(np.ones(5, np.float32), np.arange(5)))
    ends.there.encode("here", pull(np.arange(rows)))
    with pytest.raises(ProtocolError, match=f"expected {rows} rows of w"):
        ends.there.decode("here", replace(pulled(ONES), content="rows"))


def test_each_pull_is_answered_once_by_any_kind_of_answer() -> None:
    ends, keys = Ends(), np.arange(3)
    answers = (
        pulled(np.ones(3, np.float32), keys),
        WrongMaster(request=1, first=0, last=KEYS, epoch=1),
        Rejected(request=1, first=0, last=KEYS, reason="no"),
    )
    for answer in answers:
        ends.there.encode("here", pull(keys))
        ends.there.encode("here", pull(keys))  # a second time, in another epoch
        for one in (answer, answers[0]):
            ends.decoded(one)
        with pytest.raises(ProtocolError, match="expected rows that were requested, got rows of w"):
            ends.decoded(answers[0])


def test_unrequested_rows_are_rejected() -> None:
    ends, keys = Ends(), np.arange(3)
    answer = pulled(np.ones(3, np.float32), keys)
    ends.there.encode("here", pull(keys))
    for other in ({"request": 2}, {"first": 1}, {"last": 9}, {"namespace": "v"}):
        with pytest.raises(ProtocolError, match="expected rows that were requested, got rows of"):
            ends.there.decode("here", replace(answer, **other))
    with pytest.raises(ProtocolError, match="expected rows that were requested"):
        ends.there.decode("elsewhere", answer)
    ends.there.encode("here", pull(keys))
    ends.there.on_node_gone("here")
    with pytest.raises(ProtocolError, match="expected rows that were requested"):
        ends.there.decode("here", answer)


# Rows with insignificant changes since the last answer


class Servers:
    """A client of servers that hold equal rows, with the state of its filters."""

    def __init__(self, chain: str) -> None:
        about = encode_namespace(
            Sum(), width=0, dtype="float64", filters=NamespaceFilters((), (*REMEMBERING[chain],))
        )
        self.spaces = {"w": NamespaceSpec("w", KEYS, 100, about)}
        self.client = self.node(0)
        self.servers = {name: self.node(seed) for seed, name in enumerate(("a", "b"), 1)}

    def node(self, seed: int) -> NodeFilters:
        node = NodeFilters(seed)
        node.add_namespaces(self.spaces)
        return node

    def pulled(self, server: str, rows: Any, asked: Pull) -> Any:
        """The rows that the client decodes; `size` is the number of bytes of the answer."""
        node = self.servers[server]
        (arrived,) = came(*packed(self.client.encode(server, asked)))
        node.decode("client", arrived)
        keys = asked.keys
        values = rows[asked.first : asked.last] if keys is None else rows[keys]
        content = Entries(asked.first, values.copy(), keys)
        answer = PullResult(
            request=asked.request, namespace="w", first=asked.first, last=asked.last, content=content
        )
        data, attachments = packed(node.encode("client", answer))
        self.size = len(data) + sum(one.nbytes for one in attachments)
        (encoded,) = came(data, attachments)
        return self.client.decode(server, encoded).content.values


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(list(REMEMBERING)))
def test_pulled_values_never_deviate_by_more_than_the_threshold(data: st.DataObject, chain: str) -> None:
    """For any ranges, lists and servers that are asked, also when nodes are lost meanwhile.

    Fixed point adds a step of the message that sent the value, whose range of values may have been larger
    than it is now.
    """
    both, chance = Servers(chain), np.random.default_rng(data.draw(st.integers(0, 99)))
    rows, range_max = chance.standard_normal(KEYS), 0.0
    for number in range(data.draw(st.integers(1, 30))):
        rows += chance.normal(0, 0.3, KEYS) * (chance.random(KEYS) < 0.5)
        range_max = max(range_max, float(np.ptp(rows)))
        server = data.draw(st.sampled_from(("a", "b")))
        match data.draw(st.sampled_from(("ask", "ask", "ask", "ask", "infinite", "away", "dies"))):
            case "ask":
                first = data.draw(st.integers(0, KEYS - 1))
                last = data.draw(st.integers(first + 1, KEYS))
                keys = first + np.flatnonzero(chance.random(last - first) < 0.3)
                asked = replace(
                    pull(data.draw(st.sampled_from((None, keys)))), first=first, last=last, request=number
                )
                found = both.pulled(server, rows, asked)
                held = rows[first:last] if asked.keys is None else rows[keys]
                error = range_max / (256**2 - 1) + 1e-12 if "fixed" in chain else 0.0
                assert len(found) == len(held)
                assert np.abs(found - held).max(initial=0) <= 0.5 + error
                if found.flags.writeable:
                    found[:] = 99  # a client may write to pulled rows
            case "infinite":  # FixedPoint cannot send it; the server's chain ends, the client's does not
                odd = np.where(np.arange(KEYS) == 7, np.inf, rows)
                found = both.pulled(server, odd, replace(pull(None), request=number))
                assert found[7] == np.inf
            case "away":  # the server forgets the client, which then reconnects
                both.servers[server].on_node_gone("client")
            case "dies":
                both.client.on_node_gone(server)
                both.servers[server] = both.node(number + 10)


def test_a_row_with_an_insignificant_change_costs_one_bit() -> None:
    both, rows = Servers("modified"), np.arange(float(KEYS))
    both.pulled("a", rows, pull(None))
    whole = both.size
    rows[:10] += 1
    found = both.pulled("a", rows + 0.4, pull(None))
    assert found[:10].tolist() == (rows[:10] + 0.4).tolist()
    assert found[10:].tolist() == rows[10:].tolist()
    assert whole > 8 * KEYS > 500 > both.size > KEYS / 8 + 80
    kinds = both.servers["a"].report("w"), both.client.report("w")
    assert kinds[0]["pull"]["significantly modified"] == FilterBytes(16 * KEYS, 8 * KEYS + 80 + 125)
    assert kinds[1]["pull received"]["significantly modified"] == FilterBytes(8 * KEYS + 80 + 125, 16 * KEYS)


def test_an_unsent_change_adds_to_the_error_of_the_step_that_the_value_was_sent_with() -> None:
    """The step is that of the message that sent the value, also when the range of values has shrunk."""
    both, rows = Servers("modified, caching, fixed point, compression"), np.linspace(0, 1e6, KEYS)
    step = np.ptp(rows) / (256**2 - 1)
    sent = both.pulled("a", rows, pull(None))
    assert 0.5 < np.abs(sent - rows).max() <= step
    changed = np.where(np.arange(KEYS) < KEYS // 2, rows + 0.5, 0)
    found = both.pulled("a", changed, pull(None))
    assert found[: KEYS // 2].tolist() == sent[: KEYS // 2].tolist()
    assert np.ptp(changed) < np.ptp(rows)
    assert np.abs(found - changed).max() <= 0.5 + step


def test_small_changes_add_up_until_they_are_sent() -> None:
    both, rows = Servers("modified"), np.zeros(KEYS)
    seen = [both.pulled("a", rows + number / 5, pull(None))[0] for number in range(6)]
    assert seen == [0, 0, 0, 3 / 5, 3 / 5, 3 / 5]


KEPT = "significantly modified"
LEFT_OUT = {
    "no bitmap": (np.ones(3), {KEPT: {}}),
    "a bitmap that is a number": (np.ones(3), {KEPT: {"kept": 7}}),
    "a short bitmap": (np.ones(3), {KEPT: {"kept": b""}}),
    "a long bitmap": (np.ones(3), {KEPT: {"kept": bytes([0b00111000]) + bytes(1 << 20)}}),
    "a bitmap of more rows": (np.ones(3), {KEPT: {"kept": bytes([0b00111001])}}),
    "more rows than the bitmap says": (np.ones(4), {KEPT: {"kept": bytes([0b00111000])}}),
    "fewer rows than the bitmap says": (np.ones(2), {KEPT: {"kept": bytes([0b00111000])}}),
    "unknown keys": (np.ones(3), {KEPT: {"kept": bytes([0b11100000])}}),
    "too few rows and no bitmap": (np.ones(3), {}),
    "no rows": (None, {KEPT: {"kept": bytes(1)}}),
    "rows of bytes": (np.ones(3, np.uint8), {KEPT: {"kept": bytes([0b00111000])}}),
    "rows of another type": (np.ones(3, np.float32), {KEPT: {"kept": bytes([0b00111000])}}),
    "wider rows": (np.ones((3, 2)), {KEPT: {"kept": bytes([0b00111000])}}),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_an_invalid_bitmap_of_unchanged_rows_is_a_protocol_error(what: str) -> None:
    both, (values, notes) = Servers("modified"), LEFT_OUT[what]
    both.pulled("a", np.zeros(KEYS), pull(np.arange(3)))
    asked = pull(np.arange(5))
    both.client.encode("a", asked)
    with pytest.raises(ProtocolError, match="expected"):
        both.client.decode("a", replace(pulled(None), content=EncodedValues(None, values, None, notes)))


@pytest.mark.parametrize(
    "message",
    [
        PushAck(request=1, first=0, last=1),
        ReplicateAck(view=0, master=1, serial=1),
        replace(push(some(1)), namespace="another"),
        replace(pull(some(1).keys), namespace="another"),
        WrongMaster(request=1, first=0, last=1, epoch=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_without_filters_are_not_changed(message: Any) -> None:
    ends = Ends((CACHING, COMPRESSION), (COMPRESSION,))
    assert ends.here.encode("there", message) is message
    assert ends.there.decode("here", message) is message


@pytest.mark.parametrize("chain", OF_SUMS)
def test_metadata_of_a_push_passes_every_filter_unchanged(chain: str) -> None:
    """Also where a filter cannot send the values."""
    for rows in (np.ones(KEYS, np.float32), np.full(KEYS, np.inf, np.float32)):
        ends = Ends(OF_SUMS[chain])
        content = Entries(0, rows, None, PushMeta(2.5, {"lr": 0.5, "betas": [0.5, 0.75]}))
        assert plain(ends.decoded(push(content)).content.meta) == plain(content.meta)
        assert plain(ends.decoded(copy(content)).operation.content.meta) == plain(content.meta)
        content.meta = None
        assert ends.decoded(push(content)).content.meta is None


@pytest.mark.parametrize("chain", [*OF_SUMS, *OF_STATES])
def test_a_put_is_sent_unfiltered_and_resets_the_values_known_as_sent(chain: str) -> None:
    specs = OF_SUMS.get(chain) or OF_STATES.get(chain, ())
    ends = Ends(specs, update=Assign() if chain in OF_STATES else Sum())
    ends.decoded(push(Entries(0, np.ones(KEYS, np.float32))))
    put = Entries(
        0, np.full(KEYS, np.pi, np.float32), None, PushMeta(states={"mean": np.ones(KEYS, np.float32)})
    )
    assert plain(ends.decoded(push(put, time=2)).content) == plain(put)
    assert plain(ends.decoded(copy(put)).operation.content) == plain(put)
    again = ends.decoded(push(Entries(0, np.ones(KEYS, np.float32)), time=3)).content
    if chain in OF_STATES:
        assert again.key_array().tolist() == list(range(KEYS))  # although the same values were sent before


@pytest.mark.parametrize("chain", [*OF_PULLS, "modified"])
@pytest.mark.parametrize("with_states", [False, True])
def test_an_answer_keeps_its_times_and_states_under_any_filters(chain: str, with_states: bool) -> None:
    """And whole rows with states do not affect the rows after them."""
    ends = Ends(pull=OF_PULLS.get(chain) or REMEMBERING.get(chain, ()))
    rows, keys = np.arange(5, dtype=np.float32), np.arange(0, 10, 2)
    ends.answered(rows, keys)
    fields = {"client": 1, "request": 2, "epoch": 0, "namespace": "w", "first": 0, "last": 10, "keys": keys}
    asked = InspectPull(**fields, returns_states=with_states, returns_times=True)
    (arrived,) = came(*packed(ends.there.encode("here", asked)))
    assert plain(ends.here.decode("there", arrived)) == plain(asked)
    meta = PushMeta(states={"mean": rows + 1}) if with_states else None
    content = Entries(0, rows, keys, meta)
    fields = {"request": 2, "namespace": "w", "first": 0, "last": 10}
    answer = ends.decoded(InspectResult(**fields, content=content, times=(ClockRange(0, 9, 4),)))
    assert answer.times == (ClockRange(0, 9, 4),)
    assert answer.content.key_array().tolist() == keys.tolist()
    assert np.allclose(answer.content.values, rows, atol=1e-3)
    assert plain(answer.content.meta) == plain(meta)
    rows[0] += 100
    assert np.allclose(ends.answered(rows, keys), rows, atol=1e-2)


def test_states_of_another_shape_than_the_values_are_a_protocol_error() -> None:
    ends = Ends()
    ends.there.encode("here", pull(None))
    content = Entries(0, np.ones(KEYS, np.float32), None, PushMeta(states={"mean": np.ones(3, np.float32)}))
    with pytest.raises(ProtocolError, match="expected states of w with the shape of its values"):
        ends.decoded(replace(pulled(None), content=content))


def test_encoding_and_decoding_do_not_modify_their_input() -> None:
    ends = Ends((CACHING, COMPRESSION), OF_PULLS["all"])
    ends.there.encode("here", pull(some(1).keys))
    for message in (push(some(1)), copy(some(1)), pull(some(1).keys), pulled(some(1).values, some(1).keys)):
        before = plain(message)
        encoded = ends.here.encode("there", message)
        assert plain(message) == before
        arrived = plain(encoded)
        ends.there.decode("here", encoded)
        assert plain(encoded) == arrived


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_each_kind_node_and_namespace_has_its_own_filter_chain(data: st.DataObject) -> None:
    """Messages of several chains are interleaved, and each list of keys is cached at its receiver."""
    about = encode_namespace(
        Sum(),
        width=0,
        dtype="float32",
        filters=NamespaceFilters((CACHING, COMPRESSION), (CACHING, COMPRESSION)),
    )
    spaces = {name: NamespaceSpec(name, KEYS, 100, about) for name in ("v", "w")}
    names = ("a", "b", "c")
    nodes = {name: NodeFilters(number) for number, name in enumerate(names)}
    for node in nodes.values():
        node.add_namespaces(spaces)
    for _ in range(data.draw(st.integers(1, 40))):
        one, other = data.draw(st.permutations(names))[:2]
        content = some(data.draw(st.integers(1, 6)))
        name = data.draw(st.sampled_from(("v", "w")))
        operation = replace(copy(content).operation, namespace=name)
        message: Any = data.draw(
            st.sampled_from(
                (
                    replace(push(content), namespace=name),
                    replace(copy(content), operation=operation),
                    replace(pull(content.keys), namespace=name),
                )
            )
        )
        (arrived,) = came(*packed(nodes[one].encode(other, message)))
        assert plain(nodes[other].decode(one, arrived)) == plain(message)


# KKT


class Skipping:
    """A client of a namespace with a KKT filter, and its pushes."""

    def __init__(self) -> None:
        about = encode_namespace(
            BlockProximal(l1=1.0, rate=1.0),
            width=2,
            dtype="float64",
            filters=NamespaceFilters((FilterSpec("KKT", {"l1": 1.0}), CACHING), (COMPRESSION,)),
        )
        self.nodes = {name: NodeFilters(seed) for seed, name in enumerate(("client", "a", "b"))}
        for node in self.nodes.values():
            node.add_namespaces({"w": NamespaceSpec("w", KEYS, 100, about)})
        self.client = self.nodes["client"]

    def pulled(self, server: str, rows: Any, keys: Any) -> None:
        """Pulls rows of weight and gradient of the keys, or of all keys from 0 on if `keys` is None."""
        asked = replace(pull(keys), last=KEYS if keys is not None else len(rows))
        self.nodes[server].decode("client", self.client.encode(server, asked))
        answer = replace(pulled(np.array(rows, float), keys), last=asked.last)
        self.client.update_kkt(self.client.decode(server, self.nodes[server].encode("client", answer)))

    def pushed(self, server: str) -> Any:
        """Pushes the first ten keys; returns the keys that the server receives."""
        rows = np.arange(20.0).reshape(10, 2)
        sent = self.client.encode(server, push(Entries(0, rows, np.arange(10))))
        content = self.nodes[server].decode("client", sent).content
        assert content.values.tolist() == rows[content.keys].tolist()
        return content.keys.tolist()


def test_pushes_to_all_servers_skip_keys_that_any_servers_answer_allows_to_skip() -> None:
    """Rows hold weight and gradient; an answer is judged by the margin at that time."""
    one = Skipping()
    one.pulled("a", np.zeros((10, 2)), None)
    assert one.pushed("a") == [*range(10)]
    one.client.kkt("w").set_margin(0.25)
    one.pulled("a", [[0, 0.7], [0, -0.8], [0.1, 0]], np.array([2, 3, 5]))
    one.pulled("b", [[0, 0], [0, -0.7], [0, 1], [0, 3]], None)
    for server in ("a", "b"):
        assert one.pushed(server) == [3, 4, 5, 6, 7, 8, 9]


def test_skipped_keys_stay_skipped_when_a_server_is_lost() -> None:
    one = Skipping()
    one.client.kkt("w").set_margin(0.25)
    one.pulled("a", np.zeros((9, 2)), None)
    one.client.on_node_gone("a")
    assert one.pushed("b") == [9]
    assert one.client.report("w")["push"]["KKT"] == FilterBytes(240, 24)
    one.client.kkt("w").set_margin(np.inf)
    assert one.pushed("b") == [*range(10)]


def test_rows_other_than_weight_and_gradient_are_a_protocol_error() -> None:
    one = Skipping()
    for rows in (np.zeros(3), np.zeros((3, 3))):
        one.client.encode("a", pull(np.arange(3)))
        with pytest.raises(ProtocolError, match="expected rows of weight and gradient"):
            one.client.update_kkt(one.client.decode("a", pulled(rows)))


def test_a_namespace_without_a_kkt_filter_is_rejected_by_kkt() -> None:
    ends = Ends((CACHING,))
    for name in ("w", "v"):
        with pytest.raises(ValueError, match=f"a namespace with a KKT filter of pushes, got {name}"):
            ends.here.kkt(name)


# What filters cannot send


@pytest.mark.parametrize("chain", ["fixed point", "skip, caching, fixed point, compression"])
def test_values_that_filters_cannot_encode_are_sent_unfiltered(chain: str) -> None:
    ends = Ends(OF_SUMS[chain], (FIXED, COMPRESSION))
    bad = some(1)
    bad.values[::2] = np.nan
    assert plain(ends.decoded(push(bad))) == plain(push(bad))
    assert plain(ends.answered(bad.values, bad.keys)) == plain(bad.values)
    for seed in (1, 2, 1):  # later messages are filtered again
        message = ends.encoded(push(some(seed)))
        assert isinstance(message.content, EncodedValues)
        assert np.isfinite(ends.there.decode("here", message).content.values).all()


def test_values_too_large_for_compression_are_sent_uncompressed() -> None:
    small = FilterSpec("Compression", {"size_bytes_max": 1000})
    ends = Ends((CACHING, small), (small,))
    for count in (900, 100, 900, 100, 900):
        keys = np.arange(count)
        content = Entries(0, np.arange(count, dtype=np.float32), keys)
        for message in (push(content), copy(content)):
            assert plain(ends.decoded(message)) == plain(message)
        assert plain(ends.answered(content.values, keys)) == plain(content.values)


# Lost nodes


def test_a_lost_node_is_forgotten_and_no_other() -> None:
    ends, third = Ends((CACHING,), (CACHING,)), NodeFilters(3)
    third.add_namespaces(
        {
            "w": NamespaceSpec(
                "w",
                KEYS,
                100,
                encode_namespace(
                    Sum(), width=0, dtype="float32", filters=NamespaceFilters((CACHING,), (CACHING,))
                ),
            )
        }
    )
    for message in (push(some(1)), pull(some(1).keys)):
        ends.decoded(message)
        third.decode("here", ends.here.encode("third", message))
    ends.there.on_node_gone("here")
    for message in (push(some(1)), pull(some(1).keys)):
        with pytest.raises(ProtocolError, match="signature of keys that came before"):
            ends.decoded(message)
        assert plain(third.decode("here", ends.here.encode("third", message))) == plain(message)
    ends.here.on_node_gone("there")
    for message in (push(some(1)), pull(some(1).keys)):
        assert plain(ends.decoded(message)) == plain(message)


# Reports


def test_the_report_adds_up() -> None:
    ends = Ends((CACHING, COMPRESSION), (COMPRESSION,))
    content = Entries(0, np.zeros(100, np.float32), np.arange(100))
    for node in ("there", "third", "there"):
        ends.here.encode(node, push(content))
    ends.here.encode("there", copy(content))
    ends.here.encode("there", pulled(content.values))
    found = ends.here.report("w")
    assert {kind: set(one) for kind, one in found.items()} == {
        "push": {"key caching", "compression"},
        "copy": {"key caching", "compression"},
        "pull": {"compression"},
    }
    caching, compression = found["push"]["key caching"], found["push"]["compression"]
    assert caching == FilterBytes(3 * 1200, 3 * 416 + 2 * 800)  # the keys are sent once to each of two nodes
    assert compression.in_bytes == caching.out_bytes
    assert compression.out_bytes < compression.in_bytes
    assert found["copy"]["key caching"] == FilterBytes(1200, 1216)
    assert found["pull"]["compression"].in_bytes == 400
    assert ends.here.report("v") == ends.there.report("w") == {}


def test_the_receivers_report_mirrors_the_senders() -> None:
    ends = Ends((CACHING, COMPRESSION), (MODIFIED, CACHING, COMPRESSION))
    for seed in (1, 2, 1):
        ends.decoded(push(some(seed)))
        ends.decoded(pull(some(seed).keys))
        ends.answered(some(seed).values, some(seed).keys)
    sent, received = ends.here.report("w"), ends.there.report("w")
    assert sent["ask"]["key caching"].in_bytes > 1.4 * sent["ask"]["key caching"].out_bytes
    assert set(sent) == {"push", "ask", "ask received", "pull"}
    assert set(received) == {"push received", "ask", "ask received", "pull received"}
    for kind in ("push", "ask", "pull"):
        assert {
            name: FilterBytes(*reversed(one)) for name, one in received[f"{kind} received"].items()
        } == sent[kind]


def test_the_report_keeps_the_bytes_sent_to_a_lost_node() -> None:
    ends = Ends((CACHING, COMPRESSION))
    ends.decoded(push(some(1)))
    here, there = ends.here.report("w"), ends.there.report("w")
    ends.here.on_node_gone("there"), ends.there.on_node_gone("here")
    assert (ends.here.report("w"), ends.there.report("w")) == (here, there)
    ends.decoded(push(some(1)))
    twice = {name: FilterBytes(2 * one.in_bytes, 2 * one.out_bytes) for name, one in here["push"].items()}
    assert ends.here.report("w") == {"push": twice}


# Invalid input


@pytest.mark.parametrize("about", ["nonsense", None, 3])
def test_using_a_namespace_with_invalid_filters_is_a_protocol_error(about: Any) -> None:
    """The peer is blamed, not the manager that announced the namespace."""
    one = NodeFilters(1)
    one.add_namespaces({"w": NamespaceSpec("w", KEYS, 100, about)})
    for message in (push(some(1)), pull(some(1).keys)):
        with pytest.raises(ProtocolError, match="expected a namespace with filters"):
            one.encode("there", message)
    with pytest.raises(ProtocolError, match="expected a namespace with filters"):
        one.decode("there", push(EncodedValues(None, ONES, None, {})))  # type: ignore[arg-type]


ONES = np.ones(KEYS, np.float32)
SIGNED = {"key caching": {"signature": b"0" * 16}}
HOSTILE = {
    "notes of no filter": EncodedValues(None, ONES, None, {"nobody": {"a": 1}}),
    "nothing": EncodedValues(None, None, None, {}),
    "an unknown signature of keys": EncodedValues(None, ONES, None, SIGNED),
    "another signature than the keys have": EncodedValues(np.arange(KEYS), ONES, None, SIGNED),
    "a body without a note": EncodedValues(None, None, b"body", {}),
    "keys beyond the range": EncodedValues(np.arange(KEYS) + 1, ONES, None, {}),
    "keys in two dimensions": EncodedValues(np.zeros((2, 2), np.int64), ONES, None, {}),
    "rows of whole numbers": EncodedValues(None, ONES.astype(np.int64), None, {}),
    "too few rows": EncodedValues(None, ONES[1:], None, {}),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("chain", OF_SUMS | OF_STATES)
def test_content_that_no_chain_produces_is_a_protocol_error(chain: str, what: str) -> None:
    update = Assign() if chain in OF_STATES else Sum()
    ends, content = Ends((OF_SUMS | OF_STATES)[chain], (COMPRESSION,), update=update), HOSTILE[what]
    for message in (push(some(1)), copy(some(1))):
        with pytest.raises(ProtocolError):
            ends.there.decode(
                "here",
                replace(message, content=content)
                if isinstance(message, Push)
                else replace(message, operation=replace(message.operation, content=content)),
            )
        ends.there.encode("here", pull(None))
        with pytest.raises(ProtocolError):
            ends.there.decode("here", replace(pulled(ONES), content=content))


def test_an_unknown_signature_of_keys_is_a_protocol_error() -> None:
    ends = Ends(pull=OF_PULLS["all"])
    for keys in (EncodedValues(None, None, None, SIGNED), EncodedValues(np.arange(3), None, None, SIGNED)):
        with pytest.raises(ProtocolError):
            ends.there.decode("here", pull(keys))
