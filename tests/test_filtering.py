"""What filters of namespaces make of messages between two nodes, and what comes out at the other end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.numerics.entries import Entries
from offbeat.numerics.filters import Passed
from offbeat.numerics.spaces import Filters, FilterSpec, describe
from offbeat.numerics.updates import Assign, Sum
from offbeat.policies.parcels import Copied, Copy, Mark, Operation, Pull, Pulled, Push, Pushed
from offbeat.policies.placement import Space
from offbeat.runtime.filtering import Filtering
from offbeat.runtime.parcelling import Encoded
from test_parcelling import came, packed, plain

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


class Ends:
    """Two nodes, and the bytes between them."""

    def __init__(
        self, push: tuple[FilterSpec, ...] = (), pull: tuple[FilterSpec, ...] = (), update: Any = None
    ) -> None:
        about = describe(update or Sum(), width=0, dtype="float32", filters=Filters(push, pull))
        spaces = {"w": Space("w", KEYS, 100, about)}
        self.here, self.there = Filtering(1), Filtering(2)
        self.here.learn(spaces), self.there.learn(spaces)

    def said(self, message: Any) -> Any:
        """A message as it comes there, not decoded yet."""
        (arrived,) = came(*packed(self.here.encoded("there", message)))
        return arrived

    def heard(self, message: Any) -> Any:
        """A message as it is there in the end."""
        return self.there.decoded("here", self.said(message))

    def answered(self, message: Pulled, rows: int) -> Any:
        """The rows of an answer as they are there in the end."""
        return self.there.answer("here", self.said(message), rows)


def push(content: Entries, *, time: int = 1, first: int = 0, last: int = KEYS) -> Push:
    return Push(
        client=1,
        number=1,
        epoch=0,
        namespace="w",
        first=first,
        last=last,
        time=time,
        after=(),
        content=content,
    )


def copy(content: Entries) -> Copy:
    marks = (Mark(client=1, time=1, after=()),)
    operation = Operation(namespace="w", first=0, last=KEYS, marks=marks, content=content)
    return Copy(view=0, master=1, serial=1, operation=operation, route=(2,))


def pull(keys: Any) -> Pull:
    return Pull(client=1, number=1, epoch=0, namespace="w", first=0, last=KEYS, keys=keys)


def pulled(rows: Any) -> Pulled:
    return Pulled(number=1, namespace="w", first=0, last=KEYS, content=Entries(0, rows))


def some(seed: int, *, is_listed: bool = True) -> Entries:
    chance = np.random.default_rng(seed)
    keys = np.flatnonzero(chance.random(KEYS) < 0.3) if is_listed else None
    rows = chance.standard_normal(KEYS if keys is None else len(keys)).astype(np.float32)
    return Entries(0, rows, keys)


def dense(content: Entries) -> Any:
    rows = np.zeros(KEYS, np.float32)
    rows[content.listed()] = content.values
    return rows


# There and back


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("chain", LOSSLESS)
def test_filters_that_lose_nothing_change_nothing(chain: str, is_listed: bool) -> None:
    ends = Ends(OF_SUMS[chain])
    for seed in (1, 2, 1, 1, 3):
        message = push(some(seed, is_listed=is_listed))
        assert plain(ends.heard(message)) == plain(message)


@pytest.mark.parametrize("chain", [one for one in OF_SUMS if one not in LOSSLESS])
def test_filters_that_draw_are_near_and_right_on_average(chain: str) -> None:
    ends, content = Ends(OF_SUMS[chain]), some(1)
    heard = [ends.heard(push(content, time=time)) for time in range(400)]
    assert all(
        replace(one, content=None) == replace(push(content), time=one.time, content=None) for one in heard
    )
    mean = sum(dense(one.content) for one in heard) / len(heard)
    assert (
        np.abs(mean - dense(content)).max() < 0.5
    )  # of values up to 3.5; skipped ones deviate by 1 / 20 of them
    assert np.abs((mean - dense(content)).mean()) < 0.01


@pytest.mark.parametrize("chain", OF_STATES)
def test_what_is_assigned_is_never_off_by_more_than_the_threshold(chain: str) -> None:
    ends, chance = Ends(OF_STATES[chain], update=Assign()), np.random.default_rng(1)
    there, here = np.zeros(KEYS), np.zeros(KEYS, np.float32)
    for time in range(20):
        here += chance.normal(0, 0.2, KEYS).astype(np.float32)
        content = ends.heard(push(Entries(0, here.copy()), time=time)).content
        there[content.listed()] = content.values
        assert np.abs(there - here).max() <= 0.5 + 1e-3  # and a step of fixed point
        assert not time or len(content) < KEYS


@pytest.mark.parametrize("chain", OF_SUMS | OF_STATES)
@pytest.mark.parametrize("is_listed", [True, False])
def test_replicas_get_what_the_master_has_whatever_the_filters_of_pushes_are(chain, is_listed) -> None:
    update = Assign() if chain in OF_STATES else Sum()
    ends = Ends((OF_SUMS | OF_STATES)[chain], update=update)
    for seed in (1, 2, 1, 1, 3, 4, 5, 6, 1):
        message = copy(some(seed, is_listed=is_listed))
        assert plain(ends.heard(message)) == plain(message)


@pytest.mark.parametrize("chain", OF_PULLS)
def test_a_pull_asks_for_the_keys_that_it_listed(chain: str) -> None:
    ends = Ends(pull=OF_PULLS[chain])
    lists = [some(seed).keys for seed in (1, 2, 1, 3)] + [None]
    for keys in lists * 3:
        assert plain(ends.heard(pull(keys))) == plain(pull(keys))


def test_a_list_of_keys_that_pulls_ask_for_again_travels_once() -> None:
    ends = Ends(pull=OF_PULLS["all"])
    sizes = [len(packed(ends.said(pull(some(seed).keys)))[0]) for seed in (1, 2, 1, 2)]
    assert sizes[:2] > [2000] * 2 > [200] * 2 > sizes[2:]


def test_lists_of_keys_are_remembered_for_as_long_at_both_ends() -> None:
    ends = Ends((CACHING,), OF_PULLS["all"])
    for number in [*range(300), *range(300), 299, 0, 299, 43, 44, 45]:
        keys = np.array([number, number + 1])
        assert plain(ends.heard(pull(keys))) == plain(pull(keys))
        message = push(Entries(0, np.ones(2, np.float32), keys))
        assert plain(ends.heard(message)) == plain(message)


@pytest.mark.parametrize("chain", OF_PULLS)
def test_an_answer_comes_with_its_rows(chain: str) -> None:
    ends = Ends(pull=OF_PULLS[chain])
    for rows in (some(1).values, some(2, is_listed=False).values, np.zeros(5, np.float32)):
        found = ends.answered(pulled(rows), len(rows))
        error = (float(np.ptp(rows)) / (256**2 - 1)) if chain == "all" else 0.0
        assert np.abs(found - rows).max() <= error * 1.01
    assert len(ends.answered(pulled(np.zeros(0, np.float32)), 0)) == 0


@pytest.mark.parametrize("rows", [0, 1, 4, 6])
@pytest.mark.parametrize("chain", OF_PULLS)
def test_an_answer_of_other_rows_is_refused(chain: str, rows: int) -> None:
    with pytest.raises(ProtocolError, match="expected"):
        Ends(pull=OF_PULLS[chain]).answered(pulled(np.ones(5, np.float32)), rows)
    with pytest.raises(ProtocolError, match=f"expected {rows} rows of w"):
        Ends().answered(replace(pulled(np.ones(5, np.float32)), content="rows"), rows)


@pytest.mark.parametrize(
    "message",
    [
        Pushed(number=1, first=0, last=1),
        Copied(view=0, master=1, serial=1),
        replace(push(some(1)), namespace="another"),
        replace(pull(some(1).keys), namespace="another"),
        replace(pulled(some(1).values), namespace="another"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_has_no_filters_is_as_it_was(message: Any) -> None:
    ends = Ends((CACHING, COMPRESSION), (COMPRESSION,))
    assert ends.here.encoded("there", message) is message
    assert ends.there.decoded("here", message) is message


def test_messages_are_not_changed_themselves() -> None:
    ends = Ends((CACHING, COMPRESSION), OF_PULLS["all"])
    for message in (push(some(1)), copy(some(1)), pull(some(1).keys), pulled(some(1).values)):
        before = plain(message)
        encoded = ends.here.encoded("there", message)
        assert plain(message) == before
        arrived = plain(encoded)
        ends.there.decoded("here", encoded)
        assert plain(encoded) == arrived


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_kinds_nodes_and_namespaces_have_chains_of_their_own(data: st.DataObject) -> None:
    """Messages of one stand between those of another, and each list is cached where it was sent."""
    about = describe(
        Sum(), width=0, dtype="float32", filters=Filters((CACHING, COMPRESSION), (CACHING, COMPRESSION))
    )
    spaces = {name: Space(name, KEYS, 100, about) for name in ("v", "w")}
    names = ("a", "b", "c")
    nodes = {name: Filtering(number) for number, name in enumerate(names)}
    for node in nodes.values():
        node.learn(spaces)
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
        (arrived,) = came(*packed(nodes[one].encoded(other, message)))
        assert plain(nodes[other].decoded(one, arrived)) == plain(message)


# What filters cannot send


@pytest.mark.parametrize("chain", ["fixed point", "skip, caching, fixed point, compression"])
def test_values_that_filters_cannot_send_travel_as_they_are(chain: str) -> None:
    ends = Ends(OF_SUMS[chain], (FIXED, COMPRESSION))
    bad = some(1)
    bad.values[::2] = np.nan
    assert plain(ends.heard(push(bad))) == plain(push(bad))
    assert plain(ends.answered(pulled(bad.values), len(bad))) == plain(bad.values)
    for seed in (1, 2, 1):  # and what comes behind is filtered again
        message = ends.said(push(some(seed)))
        assert isinstance(message.content, Encoded)
        assert np.isfinite(ends.there.decoded("here", message).content.values).all()


def test_what_is_too_large_for_compression_travels_as_it_is() -> None:
    small = FilterSpec("Compression", {"size_bytes_max": 1000})
    ends = Ends((CACHING, small), (small,))
    for count in (900, 100, 900, 100, 900):
        keys = np.arange(count)
        content = Entries(0, np.arange(count, dtype=np.float32), keys)
        for message in (push(content), copy(content)):
            assert plain(ends.heard(message)) == plain(message)
        assert plain(ends.answered(pulled(content.values), count)) == plain(content.values)


# Who is gone


def test_a_node_that_is_gone_is_forgotten_and_no_other() -> None:
    ends, third = Ends((CACHING,), (CACHING,)), Filtering(3)
    third.learn(
        {
            "w": Space(
                "w",
                KEYS,
                100,
                describe(Sum(), width=0, dtype="float32", filters=Filters((CACHING,), (CACHING,))),
            )
        }
    )
    for message in (push(some(1)), pull(some(1).keys)):
        ends.heard(message)
        third.decoded("here", ends.here.encoded("third", message))
    ends.there.forget("here")
    for message in (push(some(1)), pull(some(1).keys)):
        with pytest.raises(ProtocolError, match="signature of keys that came before"):
            ends.heard(message)
        assert plain(third.decoded("here", ends.here.encoded("third", message))) == plain(message)
    ends.here.forget("there")
    for message in (push(some(1)), pull(some(1).keys)):
        assert plain(ends.heard(message)) == plain(message)


# What is told


def test_the_report_adds_up() -> None:
    ends = Ends((CACHING, COMPRESSION), (COMPRESSION,))
    content = Entries(0, np.zeros(100, np.float32), np.arange(100))
    for node in ("there", "third", "there"):
        ends.here.encoded(node, push(content))
    ends.here.encoded("there", copy(content))
    ends.here.encoded("there", pulled(content.values))
    found = ends.here.report("w")
    assert {kind: set(one) for kind, one in found.items()} == {
        "push": {"key caching", "compression"},
        "copy": {"key caching", "compression"},
        "pull": {"compression"},
    }
    caching, compression = found["push"]["key caching"], found["push"]["compression"]
    assert caching == Passed(3 * 1200, 3 * 416 + 2 * 800)  # to two nodes for the first time
    assert compression.in_bytes == caching.out_bytes
    assert compression.out_bytes < compression.in_bytes
    assert found["copy"]["key caching"] == Passed(1200, 1216)
    assert found["pull"]["compression"].in_bytes == 400
    assert ends.here.report("v") == ends.there.report("w") == {}


def test_the_report_at_the_other_end_is_the_reverse() -> None:
    ends = Ends((CACHING, COMPRESSION), (COMPRESSION,))
    for seed in (1, 2, 1):
        ends.heard(push(some(seed)))
        ends.answered(pulled(some(seed).values), len(some(seed)))
    sent, heard = ends.here.report("w"), ends.there.report("w")
    assert set(sent) == {"push", "pull"}
    assert set(heard) == {"push heard", "pull heard"}
    for kind in sent:
        assert {name: Passed(*reversed(one)) for name, one in heard[f"{kind} heard"].items()} == sent[kind]


def test_the_report_still_has_what_went_to_a_node_that_is_gone() -> None:
    ends = Ends((CACHING, COMPRESSION))
    ends.heard(push(some(1)))
    here, there = ends.here.report("w"), ends.there.report("w")
    ends.here.forget("there"), ends.there.forget("here")
    assert (ends.here.report("w"), ends.there.report("w")) == (here, there)
    ends.heard(push(some(1)))
    twice = {name: Passed(2 * one.in_bytes, 2 * one.out_bytes) for name, one in here["push"].items()}
    assert ends.here.report("w") == {"push": twice}


# What cannot be


@pytest.mark.parametrize("about", ["nonsense", None, 3])
def test_who_uses_a_namespace_with_filters_that_are_none_breaks_the_protocol(about: Any) -> None:
    """Not the manager, which tells all nodes of it."""
    one = Filtering(1)
    one.learn({"w": Space("w", KEYS, 100, about)})
    for message in (push(some(1)), pull(some(1).keys)):
        with pytest.raises(ProtocolError, match="expected a namespace with filters"):
            one.encoded("there", message)
    with pytest.raises(ProtocolError, match="expected a namespace with filters"):
        one.decoded("there", push(Encoded(None, ONES, None, {})))  # type: ignore[arg-type]


ONES = np.ones(KEYS, np.float32)
SIGNED = {"key caching": {"signature": b"0" * 16}}
HOSTILE = {
    "notes of no filter": Encoded(None, ONES, None, {"nobody": {"a": 1}}),
    "nothing": Encoded(None, None, None, {}),
    "a signature of keys that never came": Encoded(None, ONES, None, SIGNED),
    "another signature than the keys have": Encoded(np.arange(KEYS), ONES, None, SIGNED),
    "a body without a note": Encoded(None, None, b"body", {}),
    "keys beyond the range": Encoded(np.arange(KEYS) + 1, ONES, None, {}),
    "keys in two dimensions": Encoded(np.zeros((2, 2), np.int64), ONES, None, {}),
    "rows of whole numbers": Encoded(None, ONES.astype(np.int64), None, {}),
    "too few rows": Encoded(None, ONES[1:], None, {}),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("chain", OF_SUMS | OF_STATES)
def test_what_no_chain_gives_is_a_protocol_error(chain: str, what: str) -> None:
    update = Assign() if chain in OF_STATES else Sum()
    ends, content = Ends((OF_SUMS | OF_STATES)[chain], (COMPRESSION,), update=update), HOSTILE[what]
    for message in (push(some(1)), copy(some(1))):
        with pytest.raises(ProtocolError):
            ends.there.decoded(
                "here",
                replace(message, content=content)
                if isinstance(message, Push)
                else replace(message, operation=replace(message.operation, content=content)),
            )
        with pytest.raises(ProtocolError):
            ends.there.answer("here", replace(pulled(ONES), content=content), KEYS)


def test_a_list_of_keys_that_never_came_is_a_protocol_error() -> None:
    ends = Ends(pull=OF_PULLS["all"])
    for keys in (Encoded(None, None, None, SIGNED), Encoded(np.arange(3), None, None, SIGNED)):
        with pytest.raises(ProtocolError):
            ends.there.decoded("here", pull(keys))
