"""Made-up examples like those of advertising: few features a row, some of them in most rows, most in few.

Rows come in blocks, each made from the seed and its own number alone: a worker makes its part, and nobody
holds more than a block. Nothing is ever as long as there are features.

Shapes: R rows of a block, Z values that are not zero.
"""

# ruff: noqa: N806 - shapes stand in names in capitals

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from offbeat.numerics.sparse import SparseRows

FEATURES_MAX = 2**31
_INFORMATIVE_SHARE = 0.1
_WEIGHT_STD = 2.0


def power_law(
    rows: int,
    features: int,
    seed: int,
    *,
    draws: int = 20,
    exponent: float = 1.1,
    rows_of_block: int = 4096,
    part: int = 0,
    parts: int = 1,
) -> Iterator[SparseRows]:
    """Blocks of rows whose features' frequencies follow a power law, with labels of a logistic model.

    The k-th most frequent feature is drawn about k^-`exponent` times as often as the first; frequent ones lie
    spread over the keys 0 to `features` - 1, as hashing would spread them. Every value is 1. A tenth of all
    features have a weight, drawn from a normal distribution, in the model that draws the labels.

    Args:
        rows: of all blocks of all parts together.
        features: how many there may be, 1 to 2^31.
        seed: of everything, at least 0; the same seed gives the same rows, however they are shared out.
        draws: of features for a row, with replacement; what is drawn twice counts once.
        exponent: of the power law, above 0.
        rows_of_block: of each block but the last.
        part: this worker's number; its blocks are number `part`, `part` + `parts`, ...
        parts: how many workers share the blocks.

    Returns:
        An iterator of this part's blocks, in order.

    Raises:
        ValueError: an argument out of range.
    """
    if not 1 <= features <= FEATURES_MAX:
        raise ValueError(f"expected 1 to {FEATURES_MAX} features, got {features}")
    if not exponent > 0:
        raise ValueError(f"expected an exponent above 0, got {exponent}")
    if rows < 0 or seed < 0 or draws < 1 or rows_of_block < 1:
        raise ValueError(
            "expected rows and seed of at least 0, draws and rows of a block of at least 1, "
            f"got {rows}, {seed}, {draws} and {rows_of_block}"
        )
    if not 0 <= part < parts:
        raise ValueError(f"expected a part of 0 to {parts - 1}, got {part}")
    return (
        _block(min(rows_of_block, rows - first), features, (seed, first // rows_of_block), draws, exponent)
        for first in range(part * rows_of_block, rows, parts * rows_of_block)
    )


def _block(rows: int, features: int, seed: tuple[int, int], draws: int, exponent: float) -> SparseRows:
    chance = np.random.default_rng(seed)
    keys_RK = np.sort(_spread(_ranks(chance.random((rows, draws)), features, exponent), features))
    is_first_RK = np.diff(keys_RK, prepend=-1) != 0
    weights_RK = np.where(is_first_RK, _true_weights(keys_RK, seed[0]), 0.0)
    likelihood_R = 1 / (1 + np.exp(-np.clip(weights_RK.sum(1), -500, 500)))
    keys_Z = keys_RK[is_first_RK]
    return SparseRows(
        labels=np.where(chance.random(rows) < likelihood_R, 1.0, -1.0),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(is_first_RK.sum(1))]),
        keys=keys_Z,
        values=np.ones(len(keys_Z)),
    )


def _ranks(uniform: NDArray[np.float64], features: int, exponent: float) -> NDArray[np.int64]:
    """Ranks 0 to `features` - 1 from a power law on [1, features + 1), by the inverse of its distribution."""
    logarithm = math.log(features + 1)
    power = 1 - exponent
    if abs(power) * logarithm < 1e-9:
        drawn = np.exp(uniform * logarithm)
    else:
        drawn = np.exp(np.log1p(uniform * math.expm1(power * logarithm)) / power)
    return np.clip(drawn.astype(np.int64) - 1, 0, features - 1)


def _spread(ranks: NDArray[np.int64], features: int) -> NDArray[np.int64]:
    """One key for each rank, neighbouring ranks far apart: multiples of about the golden section, modulo."""
    factor = max(1, round(features * (math.sqrt(5) - 1) / 2))
    while math.gcd(factor, features) > 1:
        factor += 1
    return ranks * factor % features


def _true_weights(keys: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """What the labels' model makes of each key, from the key and the seed alone."""
    uniform, angle = _uniform(keys, 2 * seed), _uniform(keys, 2 * seed + 1)
    # Given that `uniform` is below the share, their quotient is uniform again: Box and Muller's radius.
    radius = np.sqrt(-2 * np.log(np.clip(uniform / _INFORMATIVE_SHARE, 1e-300, 1.0)))
    return np.where(uniform < _INFORMATIVE_SHARE, _WEIGHT_STD * radius * np.cos(2 * np.pi * angle), 0.0)


def _uniform(keys: NDArray[np.int64], stream: int) -> NDArray[np.float64]:
    """A number of [0, 1) for each key: splitmix64 (S. Vigna), from the key and the stream, twice."""
    state = keys.astype(np.uint64) + np.uint64((stream * 0x9E3779B97F4A7C15) % 2**64)
    for _ in range(2):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) / 2**53
