"""Gossip with compressed differences: weights of neighbours, and what a worker computes in a round.

Workers hold different models x_i and mix them with those of their neighbours, by a symmetric and doubly
stochastic matrix W. No model is sent: each worker has a public copy xhat_i, which its neighbours follow, and
sends what a compressor Q leaves of the difference. A round of worker i:

    q_i    = Q(x_i - xhat_i), which goes to the neighbours
    xhat_i = xhat_i + q_i
    s_i    = s_i + sum over j of w_ij q_j = sum over j of w_ij xhat_j
    x_i    = x_i + gamma (s_i - xhat_i)

As W is symmetric, the corrections of all workers sum to 0: with an equal gamma on all of them, the mean of
the models stays as it is, whatever Q loses. A gamma that is too large for Q diverges.

Source: Koloskova, Stich, Jaggi 2019, "Decentralized stochastic optimization and gossip algorithms with
compressed communication", algorithms 1 and 2; Koloskova et al. 2020, "Decentralized deep learning with
arbitrary communication compression".
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

_KEPT: Final = 0.9  # of the exponential mean, in a round
TOPOLOGIES: Final = ("ring", "exponential", "complete")


def mixing_weights(topology: str, workers: int, place: int) -> dict[int, float]:
    """Return a row of W: by place, the weights of a worker itself and of its neighbours, which are equal.

    Args:
        topology: the neighbours of a worker are the two next to it (`ring`), those 1, 2, 4, ... places away
            in both directions, up to half the ring (`exponential`), or all others (`complete`).
        workers: their number, at least 1.
        place: of the worker, from 0.

    Raises:
        ValueError: the topology is unknown.
    """
    match topology:
        case "ring":
            hops = {1}
        case "exponential":
            hops = {1 << power for power in range(workers.bit_length()) if 2 << power <= workers}
        case "complete":
            hops = set(range(workers))
        case _:
            raise ValueError(f"expected the topology to be {', '.join(TOPOLOGIES)}, got {topology!r}")
    places = {place} | {(place + way * hop) % workers for hop in hops for way in (1, -1)}
    return {other: 1 / len(places) for other in sorted(places)}


def spectral_gap(topology: str, workers: int) -> float:
    """Return rho = 1 - |lambda|, with lambda the second largest eigenvalue of W in magnitude."""
    return 1 - max((abs(value) for value in _eigenvalues(topology, workers)[1:]), default=0.0)


def laplacian_norm(topology: str, workers: int) -> float:
    """Return beta = ||I - W||, the largest difference of an eigenvalue of W from 1."""
    return max(1 - value for value in _eigenvalues(topology, workers))


@lru_cache(maxsize=64)
def consensus_step(topology: str, workers: int, omega: float) -> float:
    """Return the gamma with which gossip is proven to converge; far larger ones do so in practice.

    The distance from the mean shrinks by the factor 1 - rho^2 omega / 82 in a round, at least.

    Source: Koloskova, Stich, Jaggi 2019, theorem 2.

    Args:
        topology, workers: see `mixing_weights`.
        omega: of the compressor, see `Encoder.omega`.
    """
    rho, beta = spectral_gap(topology, workers), laplacian_norm(topology, workers)
    return rho**2 * omega / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * omega)


class AdaptiveStep:
    """A worker's consensus step that follows what compression leaves out: its measured contraction.

    In a round with the difference d = x_i - xhat_i the contraction is 1 - ||Q(d) - d||^2 / ||d||^2. The step
    is its exponential mean; 1 in rounds without loss. On rings of 4 and 9 workers with noisy quadratic
    functions it comes at least as close as half of the best of fixed steps up to 0.4, without a search for
    it, where a fixed step of 0.4 diverges with 1 % of the elements. Workers' steps differ slightly, and so
    the mean of the models moves slightly.

    No source: found by simulation. Aketi, Hashemi and Roy 2024, "AdaGossip", divides by the root mean square
    of each element's correction, which leaves a step of the size of a parameter to be chosen.
    """

    def __init__(self) -> None:
        self._contraction: float | None = None

    def update(self, difference: float, lost: float) -> float:
        """Return the step for a round.

        Args:
            difference: ||d||^2, not negative.
            lost: ||Q(d) - d||^2.
        """
        if difference > 0 and math.isfinite(difference) and math.isfinite(lost):
            measured = min(1.0, max(0.0, 1 - lost / difference))
            before = measured if self._contraction is None else self._contraction
            self._contraction = _KEPT * before + (1 - _KEPT) * measured
        return 1.0 if self._contraction is None else self._contraction


def _eigenvalues(topology: str, workers: int) -> list[float]:
    """Return the eigenvalues of W, which is circulant; the first one is 1."""
    row = mixing_weights(topology, workers, 0)
    return [
        sum(weight * math.cos(2 * math.pi * index * place / workers) for place, weight in row.items())
        for index in range(workers)
    ]
