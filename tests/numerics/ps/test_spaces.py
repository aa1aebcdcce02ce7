"""Namespaces as text: every server builds what a client describes, or reports an error."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.numerics.ps.block_proximal import BlockProximal
from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.spaces import (
    FILTERS,
    NO_FILTERS,
    UPDATES,
    FilterSpec,
    NamespaceFilters,
    UserFunction,
    build_table,
    decode_filters,
    encode_namespace,
    import_function,
)
from offbeat.numerics.ps.tables import Aggregate, ArrayTable
from offbeat.numerics.ps.updates import FTRL, SGD, Adagrad, Adam, Assign, SoftThreshold, Sum

HERE = __name__
EXAMPLES = [
    Sum(),
    Assign(),
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adagrad(lr=0.1, eps=1e-3, weight_decay=0.1),
    Adam(lr=0.1),
    Adam(lr=0.1, betas=(0.5, 0.75), eps=1e-4, weight_decay=0.1, decoupled=True),
    FTRL(alpha=0.1, beta=0.5, l1=0.01, l2=0.1),
    SoftThreshold(lr=0.1, l1=0.3),
    BlockProximal(l1=0.3, rate=0.5),
]


@dataclasses.dataclass(frozen=True)
class Scaled:
    """An update of a user's own."""

    scale: float

    @property
    def states(self) -> tuple[str, ...]:
        return ("count",)

    def apply(self, values: Any, states: dict[str, Any], pushed: Any) -> None:
        states["count"] += 1
        values += self.scale * pushed * states["count"]


def twice(by: float = 2.0) -> Scaled:
    return Scaled(by)


def fails() -> Scaled:
    raise RuntimeError("it needs a lucky day")


def makes_nothing() -> None:
    pass


def widths(update: Any) -> tuple[int, ...]:
    """Of rows that an update takes."""
    return (update.width,) if hasattr(update, "width") else (0, 1, 3)


def pushed_twice(table: ArrayTable, *, width: int, dtype: str) -> np.ndarray:
    """All rows after two pushes that are the same for every table."""
    rows = np.linspace(-1, 1, 7 * (width or 1)).astype(dtype).reshape((7, width) if width else 7)
    for _ in range(2):
        content = Entries(2, rows)
        table.check(content, 2, 9)
        table.apply(2, 9, content)
    return table.read(0, 10, None).values


def served(about: str, functions: Any = None, *, width: int = 0, dtype: str = "float32") -> np.ndarray:
    return pushed_twice(build_table(about, 10, 4, functions or {}), width=width, dtype=dtype)


def by_hand(update: Any, *, width: int = 0, dtype: str = "float32") -> np.ndarray:
    return pushed_twice(ArrayTable(10, 4, update, width=width, dtype=dtype), width=width, dtype=dtype)


# Round trips


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("update", "width"), [(update, width) for update in EXAMPLES for width in widths(update)], ids=str
)
def test_a_server_builds_the_table_that_was_described(update: Any, dtype: str, width: int) -> None:
    about = encode_namespace(update, width=width, dtype=dtype)
    found = served(about, width=width, dtype=dtype)
    expected = by_hand(update, width=width, dtype=dtype)
    assert found.dtype == expected.dtype == dtype
    assert found.tobytes() == expected.tobytes()
    assert found.any()


def test_every_update_that_servers_know_is_among_the_examples() -> None:
    assert {type(update) for update in EXAMPLES} == set(UPDATES.values())


@pytest.mark.parametrize("update", EXAMPLES, ids=str)
def test_every_argument_of_an_update_is_described(update: Any) -> None:
    described = json.loads(encode_namespace(update, width=widths(update)[0], dtype="float32"))
    assert UPDATES[described["update"]] is type(update)
    assert set(described["arguments"]) == {field.name for field in dataclasses.fields(update)}


def test_equal_namespaces_are_described_identically_and_others_are_not() -> None:
    described = [
        encode_namespace(update, width=width, dtype=dtype)
        for update in EXAMPLES
        for width in widths(update)
        for dtype in ("float32", "float64")
    ]
    assert len(set(described)) == len(described)
    one, other = ({"b": 1, "a": 2}, {"a": 2, "b": 1})
    assert encode_namespace(UserFunction(f"{HERE}:twice", one), width=0, dtype="float32") == encode_namespace(
        UserFunction(f"{HERE}:twice", other), width=0, dtype="float32"
    )


# Functions of the user's own


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Scaled", {"scale": 3.0}, Scaled(3.0)),
        ("twice", {}, Scaled(2.0)),
        ("twice", {"by": 5.0}, Scaled(5.0)),
    ],
)
def test_a_function_is_found_by_its_import_path(
    name: str, arguments: dict[str, Any], expected: Scaled
) -> None:
    path = f"{HERE}:{name}"
    about = encode_namespace(UserFunction(path, arguments), width=0, dtype="float64")
    found = served(about, {path: import_function(path)}, dtype="float64")
    assert found.tobytes() == by_hand(expected, dtype="float64").tobytes()


def test_a_function_not_registered_at_the_start_is_refused_though_importable() -> None:
    about = encode_namespace(UserFunction(f"{HERE}:Scaled", {"scale": 3.0}), width=0, dtype="float32")
    for functions in ({}, {f"{HERE}:twice": twice}):
        with pytest.raises(
            ProtocolError, match=f"the function {HERE}:Scaled is not registered on this server"
        ):
            build_table(about, 10, 4, functions)


@pytest.mark.parametrize(
    "path", ["", "m", "m:", ":f", "m:f:g", "m.:f", ".m:f", "m:f()", "os:system('x')", "m :f", "1m:f", "m:f\n"]
)
def test_malformed_import_paths_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="an import path as module:name"):
        UserFunction(path)
    with pytest.raises(ValueError, match="an import path as module:name"):
        import_function(path)


@pytest.mark.parametrize("path", ["no_such_module_anywhere:f", f"{HERE}:no_such_name", f"{HERE}.deeper:f"])
def test_a_path_that_cannot_be_imported_is_named(path: str) -> None:
    with pytest.raises(OffbeatError, match=f"expected an update at {path} that can be imported"):
        import_function(path)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("Scaled", {}, "scale"),
        ("Scaled", {"scale": 1.0, "more": 2}, "more"),
        ("fails", {}, "it needs a lucky day"),
        ("makes_nothing", {}, "to return an update, got a NoneType"),
    ],
)
def test_a_function_that_makes_no_update_of_its_arguments_is_a_protocol_error(
    name: str, arguments: dict[str, Any], why: str
) -> None:
    path = f"{HERE}:{name}"
    about = encode_namespace(UserFunction(path, arguments), width=0, dtype="float32")
    with pytest.raises(ProtocolError, match=why):
        build_table(about, 10, 4, {path: import_function(path)})


@pytest.mark.parametrize("update", [Scaled(1.0), object(), Sum, "Sum", None])
def test_an_update_that_servers_do_not_know_is_not_described(update: Any) -> None:
    with pytest.raises(ValueError, match=r"one of the updates Sum, .*, or UserFunction\(import path\), got"):
        encode_namespace(update, width=0, dtype="float32")


# Means, tensors and filters


SPECS = [
    FilterSpec("KeyCaching", {"entries": 4}),
    FilterSpec("RandomSkip", {"probability": 0.5}),
    FilterSpec("FixedPoint", {"bytes_per_value": 2}),
    FilterSpec("Compression"),
    FilterSpec("Compression", {"level": 9, "size_bytes_max": 100}),
    FilterSpec("SignificantlyModified", {"threshold": 0.5}),
    FilterSpec("KKT", {"l1": 0.3}),
]
CHAINS = [
    (Sum(), NO_FILTERS),
    (Sum(), NamespaceFilters((SPECS[1], SPECS[0], *SPECS[2:4]), (SPECS[0], SPECS[2], SPECS[4]))),
    (Assign(), NamespaceFilters((SPECS[5], SPECS[0], SPECS[2], SPECS[3]), ())),
    (SGD(lr=0.1), NamespaceFilters((), (SPECS[3],))),
    (SGD(lr=0.1), NamespaceFilters((), (SPECS[5], SPECS[0], SPECS[3]))),
    (BlockProximal(l1=0.3, rate=0.5), NamespaceFilters((SPECS[6], SPECS[0], SPECS[3]), (SPECS[3],))),
]


def test_every_filter_that_nodes_know_is_among_the_examples() -> None:
    assert {spec.kind for spec in SPECS} == set(FILTERS)


@pytest.mark.parametrize(("update", "filters"), CHAINS, ids=str)
def test_every_node_makes_the_filters_that_were_described(update: Any, filters: NamespaceFilters) -> None:
    width = widths(update)[0]
    about = encode_namespace(update, width=width, dtype="float32", filters=filters)
    assert decode_filters(about) == filters
    assert encode_namespace(update, width=width, dtype="float32", filters=decode_filters(about)) == about
    assert served(about, width=width).tobytes() == by_hand(update, width=width).tobytes()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_spec_makes_a_filter_of_its_kind_again(spec: FilterSpec) -> None:
    one, other = spec.build(1), spec.build(1)
    assert type(one) is type(other) is FILTERS[spec.kind]
    assert one is not other


def test_filters_for_replicas_are_those_that_lose_nothing_in_their_order() -> None:
    filters = NamespaceFilters(tuple(SPECS[:4]), ())
    assert [spec.kind for spec in filters.replica_filters] == ["KeyCaching", "Compression"]
    assert [filters.caches_pull_keys, NamespaceFilters((), (SPECS[0],)).caches_pull_keys] == [False, True]
    assert NO_FILTERS.replica_filters == NamespaceFilters((SPECS[6],), ()).replica_filters == ()


def test_only_filters_that_remember_values_need_the_keys_of_pulls() -> None:
    assert NamespaceFilters((), (SPECS[5], SPECS[3])).needs_pull_keys
    assert not NamespaceFilters((SPECS[5],), (SPECS[0], *SPECS[2:4])).needs_pull_keys


def test_aggregation_and_tensors_are_part_of_the_description() -> None:
    tensors = {"a": [0, [2, 3]]}
    described = [
        encode_namespace(Sum(), width=0, dtype="float32", aggregate=aggregate, tensors=of, filters=filters)
        for aggregate in ("sum", "mean", "each")
        for of in (None, tensors, {"b": [0, [2, 3]]})
        for filters in (NO_FILTERS, NamespaceFilters((SPECS[3],), ()), NamespaceFilters((), (SPECS[3],)))
    ]
    assert len(set(described)) == len(described)
    assert json.loads(described[-1])["tensors"] == {"b": [0, [2, 3]]}
    assert "tensors" not in json.loads(described[0])


@pytest.mark.parametrize(("aggregate", "expected"), [("sum", 6.0), ("mean", 3.0)])
def test_pushes_of_one_time_are_summed_or_averaged_as_described(
    aggregate: Aggregate, expected: float
) -> None:
    table = build_table(encode_namespace(Sum(), width=0, dtype="float32", aggregate=aggregate), 10, 4, {})
    contents = [Entries(2, np.full(3, value, np.float32)) for value in (2.0, 4.0)]
    assert table.combine(contents, 2, 5).values.tolist() == [expected] * 3


@pytest.mark.parametrize(
    ("kind", "arguments", "why"),
    [
        ("Nonsense", {}, "expected one of the filters KeyCaching, "),
        ("KKT", {"l1": -1.0}, "a finite l1 of at least 0"),
        ("KKT", {}, "valid arguments of KKT"),
        ("", {}, "expected one of the filters"),
        ("KeyCaching", {}, "valid arguments of KeyCaching"),
        ("KeyCaching", {"entries": 0}, "at least 1 entry"),
        ("KeyCaching", {"entries": "4"}, "KeyCaching"),
        ("Compression", {"level": 20}, "level from 1 to 19"),
        ("Compression", {"speed": 1}, "valid arguments of Compression"),
        ("FixedPoint", {"bytes_per_value": 4}, "1, 2 or 3 bytes"),
        ("FixedPoint", {"bytes_per_value": 1, "seed": 1}, "valid arguments of FixedPoint"),
        ("RandomSkip", {"probability": 0}, "a probability above 0"),
        ("RandomSkip", {"probability": None}, "RandomSkip"),
        ("SignificantlyModified", {"threshold": -1}, "threshold of at least 0"),
    ],
)
def test_an_impossible_filter_spec_is_refused(kind: str, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FilterSpec(kind, arguments)


@pytest.mark.parametrize(
    ("update", "push", "pull", "why"),
    [
        (Assign(), (1,), (), "no RandomSkip with update=Assign"),
        (Sum(), (5,), (), "SignificantlyModified of pushes with update=Assign"),
        (Sum(), (), (1,), "filters of pulls among Compression, FixedPoint, .*, got RandomSkip"),
        (Sum(), (6,), (), r"KKT with update=BlockProximal\(\) of the same l1"),
        (BlockProximal(l1=0.4, rate=0.5), (6,), (), r"KKT with update=BlockProximal\(\) of the same l1"),
        (BlockProximal(l1=0.3, rate=0.5), (), (6,), "filters of pulls among .*, got KKT"),
        (BlockProximal(l1=0.3, rate=0.5), (0, 6), (), "no KKT behind key caching"),
        (Sum(), (), (0, 5), "no significantly modified behind key caching"),
        (Sum(), (3, 2), (), "no fixed point behind compression"),
        (Sum(), (0, 1), (), "no random skip behind key caching"),
        (Sum(), (0, 0), (), "key caching once"),
        (Sum(), (), (3, 4), "compression once"),
    ],
)
def test_incompatible_filters_are_not_described(update, push, pull, why) -> None:
    filters = NamespaceFilters(tuple(SPECS[one] for one in push), tuple(SPECS[one] for one in pull))
    with pytest.raises(ValueError, match=why):
        encode_namespace(update, width=widths(update)[0], dtype="float32", filters=filters)


# Nonsense

GOOD = json.loads(encode_namespace(SGD(lr=0.1), width=2, dtype="float32"))


def changed(**different: Any) -> str:
    """A good description but for this; None takes a field away."""
    return json.dumps({key: value for key, value in (GOOD | different).items() if value is not None})


@pytest.mark.parametrize(
    "about",
    [
        "",
        "nonsense",
        "{",
        "null",
        "3",
        '"Sum"',
        "[]",
        "{}",
        changed(update=None),
        changed(update="Average"),
        changed(update=["SGD"]),
        changed(update={"SGD": 1}),
        changed(arguments=None),
        changed(arguments=[0.1]),
        changed(arguments="lr"),
        changed(arguments=3),
        changed(arguments={}),
        changed(arguments={"lr": -1.0}),
        changed(arguments={"lr": 0.1, "speed": 2}),
        changed(arguments={"lr": "fast"}),
        changed(arguments={"lr": [0.1]}),
        changed(arguments={"lr": 10**400}),
        changed(width=None),
        changed(width=-1),
        changed(width="2"),
        changed(width=1.5),
        changed(width=[2]),
        changed(dtype=None),
        changed(dtype="int64"),
        changed(dtype="float16"),
        changed(dtype="no such type"),
        changed(dtype="float32,float32"),
        changed(dtype=["float32"]),
        changed(dtype={"a": 1}),
        changed(function=f"{HERE}:twice"),
        changed(function=["a"]),
        changed(function={}),
        changed(function=7),
        changed(aggregate=None),
        changed(aggregate="means"),
        changed(update="Adam", arguments={"lr": 0.1, "betas": 0.9}),
        changed(update="Adam", arguments={"lr": 0.1, "betas": [0.9]}),
        changed(update="Adam", arguments={"lr": 0.1, "betas": [0.9, 0.9, 0.9]}),
        changed(update="Adam", arguments={"lr": 0.1, "betas": ["a", "b"]}),
        "[" * 100_000,
    ],
    ids=lambda about: about[:60],
)
def test_nonsense_is_a_protocol_error(about: str) -> None:
    with pytest.raises(ProtocolError, match=r"expected a namespace (that can be served|with filters)"):
        build_table(about, 10, 4, {})


@pytest.mark.parametrize(("keys", "block_keys"), [(0, 1), (10, 0), (10, 11), (-1, -1)])
def test_impossible_blocks_are_a_protocol_error(keys: int, block_keys: int) -> None:
    with pytest.raises(ProtocolError, match="expected blocks of"):
        build_table(json.dumps(GOOD), keys, block_keys, {})


@pytest.mark.parametrize(
    "about",
    [
        "",
        "nonsense",
        "null",
        "3",
        "[]",
        "{}",
        changed(filters=None),
        changed(filters=[]),
        changed(filters=[[]]),
        changed(filters=[[], [], []]),
        changed(filters={"push": []}),
        changed(filters=3),
        changed(filters="no"),
        changed(filters=[[], 3]),
        changed(filters=[["Compression"], []]),
        changed(filters=[[["Compression"]], []]),
        changed(filters=[[["Compression", {}, {}]], []]),
        changed(filters=[[["Compression", 3]], []]),
        changed(filters=[[["Compression", ["level"]]], []]),
        changed(filters=[[["Compression", {"level": "high"}]], []]),
        changed(filters=[[["Compression", {"level": 99}]], []]),
        changed(filters=[[["Nonsense", {}]], []]),
        changed(filters=[[[["Compression"], {}]], []]),
        changed(filters=[[[{}, {}]], []]),
        changed(filters=[[[None, None]], []]),
        changed(filters=[[["KeyCaching", {"entries": 10**400}]], [["KeyCaching", {"entries": None}]]]),
        changed(filters=[[["SignificantlyModified", {"threshold": "x"}]], []]),
        changed(filters=[[["RandomSkip", {"probability": [0.5]}]], []]),
        changed(filters=[[["RandomSkip", {"probability": 0.5}]], [["Compression", {"level": 1.5j.imag}], 1]]),
        changed(filters=[[["Compression", {}], ["FixedPoint", {"bytes_per_value": 1}]], []]),
        changed(filters=[[["Compression", {}], ["Compression", {}]], []]),
        "[" * 100_000,
    ],
    ids=lambda about: about[:90],
)
def test_nonsense_of_filters_is_a_protocol_error(about: str) -> None:
    for make in (decode_filters, lambda about: build_table(about, 10, 4, {})):
        with pytest.raises(ProtocolError, match="expected a namespace with filters"):
            make(about)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(("SGD", "lr", "float32", "")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("lr", "betas", "x")), inner),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=20)
    | st.builds(
        lambda key, value: json.dumps(GOOD | {key: value}),
        st.sampled_from(("update", "arguments", "width", "dtype", "function")),
        json_values,
    )
)
def test_a_text_makes_a_table_that_can_be_used_or_is_a_protocol_error(about: str) -> None:
    try:
        table = build_table(about, 10, 4, {})
    except ProtocolError:
        return
    shape = table.read(0, 10, None).values.shape
    table.apply(0, 10, Entries(0, np.ones(shape, json.loads(about)["dtype"])))
    assert shape[0] == 10


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=20)
    | st.lists(
        st.lists(st.tuples(st.sampled_from((*FILTERS, "", "x")), json_values), max_size=2), max_size=3
    ).map(lambda filters: json.dumps(GOOD | {"filters": filters}))
    | json_values.map(lambda filters: json.dumps(GOOD | {"filters": filters}))
)
def test_a_text_makes_filters_that_can_be_made_or_is_a_protocol_error(about: str) -> None:
    try:
        filters = decode_filters(about)
    except ProtocolError:
        return
    for spec in (*filters.push, *filters.pull):
        spec.build(1)
