"""The model of a step under a policy, in cases that can be worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.numerics.collectives.costs import LinkModel
from offbeat.numerics.collectives.forecast import LayerWork, forecast_step
from offbeat.numerics.collectives.plans import ALGORITHM_POLICIES
from offbeat.numerics.collectives.timeline import TimedLayer

LINE = LinkModel(alpha_s=0.0, beta_s=1e-6)


def work(forward_s, backward_s, size_bytes, kind="convolution"):
    return LayerWork(
        layer=TimedLayer(name="", forward_s=forward_s, backward_s=backward_s),
        kind=kind,
        size_bytes=size_bytes,
    )


def test_one_worker_only_computes():
    works = [work(1.0, 2.0, 100), work(3.0, 4.0, 100)]
    assert forecast_step(works, 1, LINE).step_s == 10.0


def test_a_ring_of_two_takes_the_whole_vector_once():
    works = [work(1.0, 2.0, 3_000_000)]
    assert forecast_step(works, 2, LINE, policy="ring").step_s == pytest.approx(6.0)


def test_latency_is_that_of_all_steps():
    works = [work(1.0, 2.0, 4)]
    line = LinkModel(alpha_s=0.5, beta_s=0.0)
    assert forecast_step(works, 4, line, policy="ring").step_s == pytest.approx(3.0 + 6 * 0.5)
    # Recursive doubling of 4 takes 2 steps.
    assert forecast_step(works, 4, line).step_s == pytest.approx(3.0 + 2 * 0.5)
    assert forecast_step(works, 4, line, policy="conv_butterfly_fc_ring").step_s == pytest.approx(
        3.0 + 2 * 0.5
    )


def test_gradients_needed_last_overlap_the_next_forward_pass_but_not_in_fifo_order():
    # The second layer's 4 s of gradients are ready at 1 s, the first one's 0.001 s at 2 s.
    works = [work(1.0, 1.0, 1000), work(1.0, 1.0, 4_000_000, "dense")]
    options = {"policy": "ring", "fuse_bytes": 0}
    urgent = forecast_step(works, 2, LINE, **options)
    assert urgent.step_s == pytest.approx(1.0 + 4.0 + 0.001 + 1.0)
    queued = forecast_step(works, 2, LINE, order="fifo", **options)
    assert queued.step_s == pytest.approx(1.0 + 4.0 + 0.001 + 1.0 + 1.0)
    assert forecast_step(works, 2, LINE, overlap="none", **options).step_s == pytest.approx(4.0 + 4.001)


def test_layers_without_gradients_send_nothing_and_still_compute():
    works = [work(1.0, 0.0, 0), work(1.0, 2.0, 1_000_000)]
    assert forecast_step(works, 2, LINE, policy="ring").step_s == pytest.approx(1.0 + 1.0 + 2.0)
    assert forecast_step(works, 2, LINE, policy="ring").exposed_s == pytest.approx((0.0, 0.0))


def test_one_algorithm_may_replace_the_policys():
    works = [work(0.0, 1.0, 1_000_000)]
    ring = forecast_step(works, 4, LINE, algorithm="ring")
    doubling = forecast_step(works, 4, LINE, algorithm="recursive_doubling")
    assert ring.step_s == pytest.approx(1.0 + 1.5)
    assert doubling.step_s == pytest.approx(1.0 + 2.0)
    assert forecast_step(works, 8, LINE, algorithm="hierarchical:4").step_s > ring.step_s


layers = st.lists(
    st.builds(
        work,
        st.floats(0, 3),
        st.floats(0, 3),
        st.integers(0, 5_000_000),
        st.sampled_from(["convolution", "dense", "other"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(works=layers, workers=st.integers(1, 9), policy=st.sampled_from(ALGORITHM_POLICIES))
def test_a_step_is_its_computing_and_the_waits_of_its_layers(works, workers, policy):
    compute_s = sum(one.layer.forward_s + one.layer.backward_s for one in works)
    line = LinkModel(alpha_s=1e-3, beta_s=1e-6)
    least = forecast_step(works, workers, line, policy=policy)
    assert min(least.exposed_s) >= 0
    assert sum(least.exposed_s) == pytest.approx(least.step_s - compute_s, abs=1e-6)


@pytest.mark.parametrize("workers", [4, 8, 64])
@pytest.mark.parametrize("rate_bit_per_s", [1e9, 1e10])
def test_layers_that_are_fused_by_default_do_nearly_as_well_as_with_any_size(workers, rate_bit_per_s):
    """50 convolutions that grow as those of a ResNet do, with normalisations; as much computing as bytes."""
    line = LinkModel(alpha_s=200e-6, beta_s=8 / rate_bit_per_s)
    sizes = [size for i in range(50) for size in (40_000 * (1 + i * i // 40), 512 * (1 + i // 10))]
    compute_s = 2 * sum(sizes) * line.beta_s
    works = [work(compute_s / 300, compute_s / 150, size) for size in sizes]
    found = forecast_step(works, workers, line).step_s
    tried = [
        forecast_step(works, workers, line, fuse_bytes=size).step_s
        for size in (0, 2**14, 2**18, 2**22, 2**25)
    ]
    assert found <= 1.05 * min(tried)
    assert max(tried) > 1.1 * min(tried)
