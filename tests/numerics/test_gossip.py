"""Gossip with compressed differences: weights, constants of the theory, and invariants in float64."""

import numpy as np
import pytest
import torch

from offbeat.numerics.compressors.registry import parse_encoding
from offbeat.numerics.gossip import (
    TOPOLOGIES,
    AdaptiveStep,
    consensus_step,
    laplacian_norm,
    mixing_weights,
    spectral_gap,
)
from offbeat.numerics.public_copy import PublicCopy
from support.choco import Choco, ring

METHODS = [None, "topk:0.01", "topk:0.1", "sign", "qsgd:16", "randomk:0.1"]
WORKERS = [1, 2, 3, 4, 5, 8, 9, 16]


def matrix_of(topology, workers):
    matrix = np.zeros((workers, workers))
    for place in range(workers):
        for other, weight in mixing_weights(topology, workers, place).items():
            matrix[place, other] = weight
    return matrix


def models(workers, elements=200, seed=0):
    return np.random.default_rng(seed).normal(size=(workers, elements))


def quadratics(workers, elements=200, seed=1):
    """Gradients of quadratic functions with other optima and curvatures on each worker."""
    generator = np.random.default_rng(seed)
    optima = generator.normal(size=(workers, elements))
    curvatures = generator.uniform(0.5, 1.5, size=(workers, elements))
    return lambda x, worker: curvatures[worker] * (x - optima[worker])


# Weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_weights_are_symmetric_doubly_stochastic_and_connect_all(topology, workers):
    matrix = matrix_of(topology, workers)
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix.sum(0), 1, rtol=0, atol=1e-15)
    assert (np.diag(matrix) > 0).all()
    assert (np.linalg.matrix_power(matrix, workers) > 0).all()


def test_weights_of_each_topology():
    assert mixing_weights("ring", 1, 0) == {0: 1}
    assert mixing_weights("ring", 2, 1) == {0: 1 / 2, 1: 1 / 2}
    assert mixing_weights("ring", 3, 1) == {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}
    assert mixing_weights("ring", 9, 0) == {8: 1 / 3, 0: 1 / 3, 1: 1 / 3}
    assert mixing_weights("exponential", 16, 3) == dict.fromkeys([1, 2, 3, 4, 5, 7, 11, 15], 1 / 8)
    assert mixing_weights("complete", 4, 2) == dict.fromkeys(range(4), 1 / 4)


def test_a_topology_that_is_unknown_is_an_error():
    with pytest.raises(
        ValueError, match="expected the topology to be ring, exponential, complete, got 'star'"
    ):
        mixing_weights("star", 4, 0)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_constants_are_those_of_the_matrix(topology, workers):
    matrix = matrix_of(topology, workers)
    magnitudes = np.sort(np.abs(np.linalg.eigvalsh(matrix)))
    rho = 1 - (magnitudes[-2] if workers > 1 else 0)
    assert spectral_gap(topology, workers) == pytest.approx(rho, abs=1e-12)
    assert laplacian_norm(topology, workers) == pytest.approx(
        np.linalg.norm(np.eye(workers) - matrix, 2), abs=1e-12
    )


def test_the_consensus_step_of_the_theory():
    assert consensus_step("ring", 9, 0.1) == pytest.approx(2.5e-4, rel=0.02)
    assert consensus_step("complete", 4, 1.0) == pytest.approx(1 / (16 + 1 + 4 + 2 - 8))


# Rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [None, quadratics(9)], ids=["gossip", "sgd"])
@pytest.mark.parametrize("gamma", [0.02, 0.4])
@pytest.mark.parametrize("compress", METHODS)
def test_only_gradients_move_the_mean_and_sums_are_those_of_all_public_copies(compress, gamma, gradient):
    """Even where gamma = 0.4 is too large for convergence."""
    choco = Choco(models(9), ring(9), compress, gamma=gamma, eta=0.05, gradient=gradient)
    for _ in range(40):
        before = choco.x.mean(0)
        choco.step()
        expected = before if gradient is None else before - choco.eta * choco.mean_gradient
        scale = max(1.0, np.abs(choco.x).max(), np.abs(choco.x_hat).max())
        assert np.abs(choco.x.mean(0) - expected).max() <= 1e-12 * scale
        assert np.abs(choco.s - choco.matrix @ choco.x_hat).max() <= 1e-12 * scale


def test_without_compression_and_with_gamma_1_a_round_is_a_product_with_the_matrix():
    choco, expected = Choco(models(9), ring(9), None, gamma=1.0), models(9)
    for _ in range(20):
        choco.step()
        expected = ring(9) @ expected
        np.testing.assert_allclose(choco.x, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("gamma", "converges"), [(0.04, True), (0.2, True), (0.4, False)])
def test_ring_of_9_with_a_tenth_of_the_elements_converges_up_to_a_gamma_far_above_the_proven_one(
    gamma, converges
):
    """Models of 50 normal numbers, public copies of zeros, 600 rounds."""
    choco = Choco(models(9, 50), ring(9), "topk:0.1", gamma=gamma)
    before = choco.distance()
    for _ in range(600):
        choco.step()
    assert (choco.distance() < 1e-3 * before) == converges
    assert (choco.distance() < 10 * before) == converges


def test_with_the_proven_gamma_the_distance_shrinks_as_fast_as_the_theory_says():
    choco = Choco(models(4, 50), ring(4), "topk:0.1", gamma=consensus_step("ring", 4, 0.1))
    start, rounds = choco.distance() + (choco.x**2).sum(), 300
    for _ in range(rounds):
        choco.step()
    left = choco.distance() + ((choco.x - choco.x_hat) ** 2).sum()
    assert left <= start * (1 - spectral_gap("ring", 4) ** 2 * 0.1 / 82) ** rounds


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("compress", METHODS)
def test_public_copies_make_the_rounds_of_the_formulas(compress, topology):
    """Workers that follow their neighbours' codes only, each with scratch memory of one vector."""
    workers, elements, gamma = 5, 200, 0.1
    expected = Choco(models(workers, elements), matrix_of(topology, workers), compress, gamma=gamma)
    x = torch.from_numpy(models(workers, elements))
    shapes = [torch.Size((1, elements))]
    encoders = [parse_encoding(compress).encoder(shapes, worker) for worker in range(workers)]
    copies = [PublicCopy(torch.zeros(elements, dtype=torch.float64)) for _ in range(workers)]
    scratch = torch.empty(elements, dtype=torch.float64)
    for number in range(30):
        expected.step()
        codes = [
            encoder.encode(copy.difference(row, scratch), number)
            for encoder, copy, row in zip(encoders, copies, x, strict=True)
        ]
        for place, (encoder, copy) in enumerate(zip(encoders, copies, strict=True)):
            for other, weight in mixing_weights(topology, workers, place).items():
                encoder.decode(codes[other], scratch)
                (copy.add_own if other == place else copy.add_neighbour)(scratch, weight)
            x[place] += copy.correction(gamma, scratch)
    np.testing.assert_allclose(x.numpy(), expected.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        torch.stack([copy.copy for copy in copies]), expected.x_hat, rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(torch.stack([copy.sum for copy in copies]), expected.s, rtol=0, atol=1e-12)


def test_a_public_copy_that_begins_with_the_models_of_all_corrects_nothing():
    start = torch.from_numpy(models(1)[0])
    copy, out = PublicCopy(start), torch.empty_like(start)
    assert not copy.difference(start, out).any()
    assert not copy.correction(0.5, out).any()
    copy.add_own(torch.ones_like(start), 1.0)
    assert copy.copy is not start
    assert torch.equal(start, torch.from_numpy(models(1)[0]))


# The adaptive step ----------------------------------------------------------------------------------------


def test_the_adaptive_step_is_the_mean_contraction():
    step = AdaptiveStep()
    assert step.update(0.0, 0.0) == 1.0  # nothing was lost yet
    assert step.update(4.0, 3.0) == 0.25
    assert step.update(4.0, 1.0) == pytest.approx(0.9 * 0.25 + 0.1 * 0.75)
    assert step.update(float("nan"), 1.0) == pytest.approx(0.3)
    assert step.update(1.0, 50.0) == pytest.approx(0.27)  # never negative


class AdaptiveChoco(Choco):
    """Each worker measures its own step."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, gamma=None, **options)
        self.steps = [AdaptiveStep() for _ in self.x]

    def decoded(self, worker):
        difference, q = self.x[worker] - self.x_hat[worker], super().decoded(worker)
        left = difference - q
        if self.gamma is None:
            self.gamma = np.ones((len(self.x), 1))
        self.gamma[worker] = self.steps[worker].update(difference @ difference, left @ left)
        return q


def excess_loss(compress, workers, gamma):
    """How much the loss of the worst worker is above the least, relative to that; noisy quadratics."""
    elements, noise = 200, np.random.default_rng(5)
    generator = np.random.default_rng(1)
    optima = generator.normal(size=(workers, elements))
    curvatures = generator.uniform(0.5, 1.5, size=(workers, elements))

    def gradient(x, worker):
        return curvatures[worker] * (x - optima[worker]) + 0.3 * noise.normal(size=elements)

    start, options = np.zeros((workers, elements)), {"eta": 0.02, "gradient": gradient}
    if gamma == "adaptive":
        choco = AdaptiveChoco(start, ring(workers), compress, **options)
    else:
        choco = Choco(start, ring(workers), compress, gamma=gamma, **options)
    for _ in range(500):
        choco.step()

    def loss(x):
        return (curvatures * (x - optima) ** 2).sum()

    least = loss((curvatures * optima).sum(0) / curvatures.sum(0))
    return max(loss(row) for row in choco.x) / least - 1


@pytest.mark.parametrize("workers", [4, 9])
@pytest.mark.parametrize("compress", ["topk:0.01", "topk:0.1", "sign", "qsgd:16", None])
def test_the_adaptive_step_comes_as_far_as_the_best_of_fixed_ones(compress, workers):
    with np.errstate(all="ignore"):  # some diverge
        best = min(excess_loss(compress, workers, gamma) for gamma in (0.01, 0.03, 0.1, 0.2, 0.4))
    assert excess_loss(compress, workers, "adaptive") < 2 * best


def test_a_fixed_step_that_suits_one_compressor_diverges_with_another():
    with np.errstate(all="ignore"):
        assert excess_loss("topk:0.1", 4, 0.4) < 0.01
        assert not excess_loss("topk:0.01", 4, 0.4) < 1000
