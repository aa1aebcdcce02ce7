"""What workers know of each other in compressed gossip, computed again from the run log and their snapshots.

Written by the formulas: with x the snapshot of worker i, c its public copy, and w the weights,

    q_i = Q(x_i - c_i);  c_i += q_i;  s_i += sum over j of w_ij q_j;  x_i += gamma (s_i - c_i)

An adaptive gamma is the exponential mean, by 0.9 and 0.1, of 1 - |q_i - (x_i - c_i)|^2 / |x_i - c_i|^2 over
all rounds that send differences, from the first; it is 1 where whole models are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offbeat.events import AverageModels, ModelsAveraged
from offbeat.numerics.compressors.registry import parse_encoding
from offbeat.numerics.gossip import consensus_step, mixing_weights
from offbeat.strategies import Choco

Contribution = Callable[[int, AverageModels], Any]
"""(worker, averaging) -> its snapshot; None where that is not known yet."""


@dataclass
class _Copies:
    """The public copy and the weighted sum of a worker after a round, and the consensus step."""

    copy: Any
    weighted_sum: Any
    gamma: float


class GossipReplay:
    """Rounds of compressed gossip.

    Args:
        entries: of the run log.
        strategy: of the job.
        shapes: of the tensors that a model holds, one after another.
        contribution: see `Contribution`.
    """

    def __init__(
        self,
        entries: Sequence[Any],
        strategy: Choco,
        shapes: Sequence[torch.Size],
        contribution: Contribution,
    ) -> None:
        self._strategy, self._contribution = strategy, contribution
        self._method, self._shapes = parse_encoding(strategy.compress), shapes
        self._rounds_before: dict[tuple[int, int], int] = {}  # exchange, worker: rounds that it had ended
        self._before: dict[int, AverageModels] = {}  # by exchange, the averaging that it continues
        self._contractions: dict[int, float] = {}  # by worker, the exponential mean
        self._after: dict[tuple[int, int], _Copies] = {}  # exchange, worker
        averagings: dict[int, AverageModels] = {}
        last: dict[int, int] = {}  # by worker, the last averaging that it has ended with a mean
        rounds: Counter[int] = Counter()  # by worker, those that it has ended
        for entry in entries:
            if isinstance(entry, AverageModels):
                averagings[entry.exchange_id] = entry
                self._rounds_before |= {(entry.exchange_id, member): rounds[member] for member in entry.group}
                if entry.continues:
                    (before,) = {last[member] for member in entry.group}
                    self._before[entry.exchange_id] = averagings[before]
            elif isinstance(entry, ModelsAveraged) and entry.has_mean:
                last[entry.worker] = entry.exchange_id
                ended = averagings[entry.exchange_id]
                rounds[entry.worker] += len(ended.group) > 1 and not ended.includes_buffers

    def correction(self, worker: int, averaging: AverageModels) -> Any:
        """What is added to a worker's model, None where a contribution to it is not known yet."""
        after = self._copies_after(worker, averaging)
        return after and after.gamma * (after.weighted_sum - after.copy)

    def _copies_after(self, worker: int, averaging: AverageModels) -> _Copies | None:
        key = averaging.exchange_id, worker
        if key in self._after:
            return self._after[key]
        before = None
        if averaging.continues:
            before = self._copies_after(worker, self._before[averaging.exchange_id])
            assert before is not None
        group = averaging.group
        weights = mixing_weights(self._strategy.topology, len(group), group.index(worker))
        codes = {place: self._code(group[place], averaging) for place in weights}
        if any(code is None for code in codes.values()):
            return None
        code = codes[group.index(worker)]
        gamma = self._gamma(worker, averaging, code, before)
        news = sum(weight * codes[place] for place, weight in weights.items())
        copy = code if before is None else before.copy + code
        self._after[key] = _Copies(copy, news if before is None else before.weighted_sum + news, gamma)
        return self._after[key]

    def _gamma(self, worker: int, averaging: AverageModels, code: Any, before: _Copies | None) -> float:
        gamma = self._strategy.gamma
        if gamma == "theory":
            omega = self._method.encoder(self._shapes, seed=worker).omega()
            return consensus_step(self._strategy.topology, len(averaging.group), omega)
        if gamma != "adaptive":
            return gamma
        if before is None:
            return 1.0
        difference = self._contribution(worker, averaging) - before.copy
        measured = 1 - np.square(code - difference).sum() / np.square(difference).sum()
        mean = 0.9 * self._contractions.get(worker, measured) + 0.1 * measured
        self._contractions[worker] = mean
        return mean

    def _code(self, worker: int, averaging: AverageModels) -> Any:
        snapshot = self._contribution(worker, averaging)
        if snapshot is None or not averaging.continues:
            return snapshot
        before = self._copies_after(worker, self._before[averaging.exchange_id])
        if before is None:
            return None
        difference = torch.from_numpy(np.asarray(snapshot - before.copy))
        decoded = torch.empty_like(difference)
        encoder = self._method.encoder(self._shapes, seed=worker)
        encoder.decode(
            encoder.encode(difference, self._rounds_before[averaging.exchange_id, worker]), decoded
        )
        return decoded.numpy()
