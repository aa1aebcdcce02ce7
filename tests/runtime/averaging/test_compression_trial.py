"""Trials of compressions: what is chosen for which times, and gradients across changes in real jobs."""

import random
from collections import Counter

import pytest
import torch
from torch import nn

import offbeat
from offbeat.runtime.averaging.compression_trial import CANDIDATES, CompressionTrial
from offbeat.strategies import AllReduce, PartialAllReduce
from support.processes import run, values

WORKERS, STEPS = 3, 24


def finish(trial, time_of, seed=0):
    """End rounds until a compression is chosen; of each, one round is 100 times as long."""
    noise, rounds, previous_s, methods = random.Random(seed), 0, 0.0, []
    while trial.chosen is None:
        used = trial.compression
        methods.append(used)
        changed = trial.end_round(previous_s)
        assert changed == (trial.compression != used)
        is_slow = methods.count(used) == 4
        previous_s = time_of[used] * noise.uniform(0.999, 1.001) * (100 if is_slow else 1)
        rounds += 1
    return rounds, methods


@pytest.mark.parametrize(
    ("times_s", "chosen"),
    [
        ((0.67, 0.39, 0.30), "powersgd:2"),  # a slow line
        ((0.67, 0.30, 0.39), "bf16"),
        ((0.67, 0.30, 0.29), "bf16"),  # what is gained is not worth another rounding
        ((0.20, 0.195, 0.192), ""),
        ((0.20, 0.21, 0.35), ""),  # a fast line
        ((0.20, 0.25, 0.15), "powersgd:2"),
    ],
)
def test_the_most_exact_compression_is_chosen_that_none_beats_by_more_than_a_twentieth(times_s, chosen):
    trial, names = CompressionTrial(), ["", *CANDIDATES]
    rounds, methods = finish(trial, dict(zip(names, times_s, strict=True)))
    assert trial.chosen == trial.compression == chosen
    assert rounds == 19  # as documented
    assert Counter(methods) == {"": 6, "bf16": 6, "powersgd:2": 7}
    assert list(trial.times_s.values()) == pytest.approx(list(times_s), rel=0.01)
    assert str(trial).startswith("gradients are sent " + (f"with compress={chosen}:" if chosen else "whole:"))


def test_the_first_round_after_a_change_does_not_count():
    trial = CompressionTrial()
    round_, previous_s = 0, 0.0
    while trial.chosen is None:
        trial.end_round(previous_s)
        previous_s = 50.0 if round_ % 6 == 0 else float(round_)
        round_ += 1
    assert list(trial.times_s.values()) == [3.0, 9.0, 15.0]


def train_with_times(rank, emit, times_s):
    """The sum of the applied means times the workers, parts not sent yet, what was chosen, the model."""
    end_round = CompressionTrial.end_round
    used = []

    def of_these_times(self, previous_round_s):
        assert len(used) < 2 or previous_round_s > 0
        used.append(self.compression)
        return end_round(self, times_s[used[-2]] if len(used) > 1 else 0.0)

    CompressionTrial.end_round = of_these_times
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    means = [torch.zeros_like(parameter) for parameter in model.parameters()]
    with offbeat.join(model, optimizer, AllReduce(compress="auto", bucket_bytes=4000)) as session:
        own = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for step in range(STEPS):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * rank + step)
            gradients = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
            sum((p * g).sum() for p, g in zip(model.parameters(), gradients, strict=True)).backward()
            for mine, mean, gradient, parameter in zip(
                own, means, gradients, model.parameters(), strict=True
            ):
                mine += gradient
                mean += parameter.grad
            optimizer.step()
        residuals = session.local_state_dict()["synchronizer"].get("residuals", {})
        names = [name for name, _ in model.named_parameters()]
        unsent = [residuals.get(name, torch.zeros(0)).view(-1) for name in names]
    return (
        [mean.flatten().tolist() for mean in means],
        [mine.flatten().tolist() for mine in own],
        [one.tolist() for one in unsent],
        used,
        [parameter.flatten().tolist() for parameter in model.parameters()],
    )


@pytest.mark.parametrize("chosen", ["", "bf16", "powersgd:2"])
def test_gradients_are_applied_once_whatever_compressions_change(chosen):
    times_s = {name: 0.2 if name == chosen else 0.3 for name in ("", *CANDIDATES)}
    found = values(run(train_with_times, WORKERS, times_s))
    assert all(one[0] == found[0][0] and one[3:] == found[0][3:] for one in found)
    assert Counter(found[0][3]) == {"": 6, "bf16": 6, "powersgd:2": 7}
    assert any(map(len, found[0][2])) == (chosen == "powersgd:2")
    for index, mean in enumerate(found[0][0]):
        computed = sum(torch.tensor(one[1][index]) for one in found)
        unsent = sum(torch.tensor(one[2][index] or [0.0]) for one in found)
        rounding = 0.1 if chosen != "bf16" else 0.2  # 6 or 11 rounds in 16 bits
        torch.testing.assert_close(WORKERS * torch.tensor(mean) + unsent, computed, rtol=0, atol=rounding)


def test_a_group_that_changes_is_given_a_method():
    with pytest.raises(ValueError, match="compress=auto needs a group that does not change"):
        PartialAllReduce(compress="auto")
