"""Synthetic examples like those of advertising: few features per row, with power-law frequencies.

Rows are generated in blocks, each from the seed and its own index alone: a worker generates only its part,
one block at a time. No array is as long as the number of features.

Shapes: R rows of a block, Z non-zero values.
"""

# ruff: noqa: N806 - shape suffixes in names are capitals

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from offbeat.apps.sparse_lr.sparse import SparseRows

FEATURES_MAX = 2**31
_INFORMATIVE_SHARE = 0.1
_WEIGHT_STD = 2.0


def power_law_blocks(
    rows: int,
    features: int,
    seed: int,
    *,
    draws: int = 20,
    exponent: float = 1.1,
    rows_per_block: int = 4096,
    part: int = 0,
    parts: int = 1,
) -> Iterator[SparseRows]:
    """Return blocks of rows with power-law feature frequencies, and labels drawn from a logistic model.

    The k-th most frequent feature is drawn about k^-`exponent` times as often as the first; frequent features
    are spread over the keys 0 to `features` - 1, as hashing would spread them. Every value is 1. A tenth of
    all features have a weight, drawn from a normal distribution, in the model of the labels.

    Args:
        rows: number of rows of all blocks of all parts together.
        features: number of possible features, 1 to 2^31.
        seed: at least 0; the same seed gives the same rows, however they are split among workers.
        draws: features drawn per row, with replacement; a repeated feature counts once.
        exponent: exponent of the power law, above 0.
        rows_per_block: rows per block; the last one may be shorter.
        part: index of this worker, which generates the blocks `part`, `part` + `parts`, ...
        parts: number of workers that share the blocks.

    Returns:
        An iterator over this part's blocks, in order.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 1 <= features <= FEATURES_MAX:
        raise ValueError(f"expected 1 to {FEATURES_MAX} features, got {features}")
    if not exponent > 0:
        raise ValueError(f"expected an exponent above 0, got {exponent}")
    if rows < 0 or seed < 0 or draws < 1 or rows_per_block < 1:
        raise ValueError(
            "expected rows and seed of at least 0, draws and rows of a block of at least 1, "
            f"got {rows}, {seed}, {draws} and {rows_per_block}"
        )
    if not 0 <= part < parts:
        raise ValueError(f"expected a part of 0 to {parts - 1}, got {part}")
    return (
        _block(min(rows_per_block, rows - first), features, (seed, first // rows_per_block), draws, exponent)
        for first in range(part * rows_per_block, rows, parts * rows_per_block)
    )


def _block(rows: int, features: int, seed: tuple[int, int], draws: int, exponent: float) -> SparseRows:
    rng = np.random.default_rng(seed)
    keys_RK = np.sort(_scatter(_ranks(rng.random((rows, draws)), features, exponent), features))
    is_first_RK = np.diff(keys_RK, prepend=-1) != 0
    weights_RK = np.where(is_first_RK, _true_weights(keys_RK, seed[0]), 0.0)
    probability_R = 1 / (1 + np.exp(-np.clip(weights_RK.sum(1), -500, 500)))
    keys_Z = keys_RK[is_first_RK]
    return SparseRows(
        labels=np.where(rng.random(rows) < probability_R, 1.0, -1.0),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(is_first_RK.sum(1))]),
        keys=keys_Z,
        values=np.ones(len(keys_Z)),
    )


def _ranks(uniforms: NDArray[np.float64], features: int, exponent: float) -> NDArray[np.int64]:
    """Draw ranks 0 to `features` - 1 from a power law on [1, features + 1), by inverse transform sampling."""
    logarithm = math.log(features + 1)
    power = 1 - exponent
    if abs(power) * logarithm < 1e-9:
        drawn = np.exp(uniforms * logarithm)
    else:
        drawn = np.exp(np.log1p(uniforms * math.expm1(power * logarithm)) / power)
    return np.clip(drawn.astype(np.int64) - 1, 0, features - 1)


def _scatter(ranks: NDArray[np.int64], features: int) -> NDArray[np.int64]:
    """Map each rank to its own key, adjacent ranks far apart: multiples of about the golden ratio, modulo."""
    factor = max(1, round(features * (math.sqrt(5) - 1) / 2))
    while math.gcd(factor, features) > 1:
        factor += 1
    return ranks * factor % features


def _true_weights(keys: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Return each key's weight in the model of the labels, from the key and the seed alone."""
    uniforms, angle = _hash_uniform(keys, 2 * seed), _hash_uniform(keys, 2 * seed + 1)
    # Given that `uniforms` is below the share, their quotient is uniform too: the radius of Box and Muller.
    radius = np.sqrt(-2 * np.log(np.clip(uniforms / _INFORMATIVE_SHARE, 1e-300, 1.0)))
    return np.where(uniforms < _INFORMATIVE_SHARE, _WEIGHT_STD * radius * np.cos(2 * np.pi * angle), 0.0)


def _hash_uniform(keys: NDArray[np.int64], stream: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each key: splitmix64 (S. Vigna), from the key and the stream, twice."""
    state = keys.astype(np.uint64) + np.uint64((stream * 0x9E3779B97F4A7C15) % 2**64)
    for _ in range(2):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) / 2**53
