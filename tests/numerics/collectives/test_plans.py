"""Which gradients are exchanged together and how: every policy, and properties of all plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.numerics.collectives.costs import LinkModel
from offbeat.numerics.collectives.plans import (
    ALGORITHM_POLICIES,
    PlannedLayer,
    busy_link,
    latency_bound_bytes,
    plan_fused_buckets,
)

LINE = LinkModel(alpha_s=200e-6, beta_s=8e-9)  # 1 Gbit/s

ALEXNET = [
    *(PlannedLayer(kind="convolution", size_bytes=size, slack_s=slack) for size, slack in
      [(140_000, 0.0), (1_229_000, 0.05), (3_540_000, 0.1), (2_656_000, 0.15), (1_771_000, 0.2)]),
    *(PlannedLayer(kind="dense", size_bytes=size, slack_s=slack) for size, slack in
      [(151_000_000, 1.0), (67_000_000, 1.5), (16_000_000, 2.0)]),
]  # fmt: skip

layers = st.lists(
    st.builds(
        PlannedLayer,
        kind=st.sampled_from(["convolution", "dense", "other"]),
        size_bytes=st.integers(1, 10**7),
        group=st.sampled_from(["float32", "float16"]),
        slack_s=st.floats(0, 3),
    ),
    max_size=20,
)


def algorithms(policy, **options):
    return [
        one.algorithm for one in plan_fused_buckets(ALEXNET, 4, LINE, policy=policy, fuse_bytes=0, **options)
    ]


def test_the_papers_text_and_its_table_are_each_others_reverse():
    text, table = algorithms("conv_butterfly_fc_ring"), algorithms("table4")
    assert text == ["recursive_doubling"] * 5 + ["ring"] * 3
    assert table == ["ring"] * 5 + ["recursive_doubling"] * 3
    assert algorithms("ring") == ["ring"] * 8


def test_the_cost_model_takes_a_faster_algorithm_without_slack_and_rings_elsewhere():
    # 140 kB: rings of 6 messages take 2.9 ms, halving and doubling with 4 takes 2.5.
    assert algorithms("cost_model") == ["rabenseifner", *["ring"] * 7]


@pytest.mark.long
def test_a_ring_that_would_outlast_the_slack_is_not_taken_though_another_algorithm_would_not():
    # 20 kB among 256: a ring waits 510 times, 102 ms, halving and doubling 16 times.
    head = [PlannedLayer(kind="dense", size_bytes=20_000, slack_s=0.014)]
    assert plan_fused_buckets(head, 256, LINE)[0].algorithm == "direct"
    patient = [PlannedLayer(kind="dense", size_bytes=20_000, slack_s=1.0)]
    assert plan_fused_buckets(patient, 256, LINE)[0].algorithm == "ring"


def test_small_messages_without_slack_use_the_fewest_sequential_messages():
    tiny = [PlannedLayer(kind="other", size_bytes=1000)]
    assert plan_fused_buckets(tiny, 4, LINE)[0].algorithm == "direct"
    assert plan_fused_buckets(tiny, 4, LINE, policy="ring")[0].algorithm == "ring"


def test_small_layers_are_fused_as_long_as_latency_costs_more_than_bytes():
    # direct: 2 rounds of 200 us, and 1.5 times the vector at 8 ns a byte
    assert latency_bound_bytes(4, LINE) == int(2 * 200e-6 / (1.5 * 8e-9))
    small = [PlannedLayer(kind="convolution", size_bytes=10_000) for _ in range(7)]
    assert [one.layers for one in plan_fused_buckets(small, 4, LINE)] == [tuple(range(7))]
    assert [one.layers for one in plan_fused_buckets(small, 4, LINE, fuse_bytes=30_000)] == [
        (0, 1, 2),
        (3, 4, 5),
        (6,),
    ]
    assert [one.layers for one in plan_fused_buckets(small, 4, LINE, fuse_bytes=0)] == [
        (i,) for i in range(7)
    ]
    assert [one.layers for one in plan_fused_buckets(small, 4, LINE, fuse_bytes=10**6)] == [tuple(range(7))]
    assert latency_bound_bytes(1, LINE) == 0
    no_bytes = LinkModel(alpha_s=1e-4, beta_s=0.0)  # bytes without a measurable cost
    assert [one.layers for one in plan_fused_buckets(small, 4, no_bytes)] == [tuple(range(7))]


def test_on_a_busy_line_more_layers_are_fused():
    # 100 MB keep the line busy: before each of 2 rounds a MiB passes, so 200 us and 8.4 ms.
    assert busy_link(LINE, 100_000_000).alpha_s == pytest.approx(200e-6 + 2**20 * 8e-9)
    assert busy_link(LINE, 1000).alpha_s == pytest.approx(208e-6)
    many = [PlannedLayer(kind="convolution", size_bytes=500_000) for _ in range(200)]
    assert {len(one.layers) for one in plan_fused_buckets(many, 4, LINE)} == {2}  # of 1.43 MB at most


@given(
    layers,
    st.integers(1, 17),
    st.sampled_from(ALGORITHM_POLICIES),
    st.none() | st.integers(0, 10**7),
)
def test_every_layer_travels_once_in_order_with_its_like(described, workers, policy, fuse_bytes):
    found = plan_fused_buckets(described, workers, LINE, policy=policy, fuse_bytes=fuse_bytes)
    assert sorted(layer for one in found for layer in one.layers) == list(range(len(described)))
    line = busy_link(LINE, sum(layer.size_bytes for layer in described))
    limit = latency_bound_bytes(workers, line) if fuse_bytes is None else fuse_bytes
    for one in found:
        members = [described[layer] for layer in one.layers]
        assert list(one.layers) == sorted(one.layers)
        assert len({(layer.group, layer.kind == "dense") for layer in members}) == 1
        assert len(members) == 1 or sum(layer.size_bytes for layer in members) <= limit
    assert [one.layers[0] for one in found] == sorted(one.layers[0] for one in found)
    assert found == plan_fused_buckets(described, workers, LINE, policy=policy, fuse_bytes=fuse_bytes)


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="a policy of cost_model, conv_butterfly_fc_ring, table4, ring, got"):
        plan_fused_buckets([], 4, LINE, policy="best")
    with pytest.raises(ValueError, match="fuse_bytes of at least 0, got -1"):
        plan_fused_buckets([], 4, LINE, fuse_bytes=-1)
