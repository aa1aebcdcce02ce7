"""`offbeat.transformers`: a Trainer among workers, with a BERT of random weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from offbeat.errors import OffbeatError  # noqa: E402
from offbeat.strategies import SSP, AllReduce, Hybrid, LocalSGD, PartialAllReduce  # noqa: E402
from offbeat.transformers import (  # noqa: E402
    OffbeatCallback,
    OffbeatTrainerMixin,
    OffbeatTrainingArguments,
)
from support.processes import run, start, values  # noqa: E402

SAMPLES = 48
BATCHES = SAMPLES // 2 // 4  # of an epoch, of each of two workers
RATE = 0.05


class Tokens(Dataset):
    """Random token ids with two classes."""

    def __init__(self, samples, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(0, 32, (samples, 6), generator=generator)
        self._labels = torch.randint(0, 2, (samples,), generator=generator)

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, place):
        return {"input_ids": self._ids[place], "labels": self._labels[place]}


class OffbeatTrainer(OffbeatTrainerMixin, Trainer):
    """What users write."""


def bert(seed=0):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return BertForSequenceClassification(config).double()


class Recording:
    """A collator that keeps what it has put together."""

    def __init__(self):
        self.batches = []

    def __call__(self, samples):
        batch = transformers.default_data_collator(samples)
        self.batches.append({name: tensor.tolist() for name, tensor in batch.items()})
        return batch


def arguments(folder, kind=OffbeatTrainingArguments, **options):
    given = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": RATE,
        "optim": "sgd",
        "max_grad_norm": 0.5,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    return kind(output_dir=str(folder), **given)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def mean_over_items(outputs, labels, num_items_in_batch):
    """A loss that knows how many labels its step has."""
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def train(rank, emit, folder, strategy, options, trainer_options):
    recording = Recording()
    trainer = OffbeatTrainer(
        bert(rank),
        arguments(folder, **options),
        train_dataset=Tokens(SAMPLES),
        data_collator=recording,
        strategy=strategy,
        **trainer_options,
    )
    trainer.train()
    return weights(trainer.model), recording.batches, outcome_of(trainer)


def outcome_of(trainer):
    return trainer.state.global_step, trainer.optimizer.param_groups[0]["lr"]


def only_one(batches):
    return batches[0]


def train_alone(folder, batches_of_workers, options, trainer_options):
    """A Trainer of one process with the same global batches."""
    batches = [
        {name: torch.tensor([one for part in parts for one in part[name]]) for name in parts[0]}
        for parts in zip(*batches_of_workers, strict=True)
    ]
    given = {**options, "per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
    epochs = given.pop("num_train_epochs", 2)
    trainer = OneAfterAnother(
        bert(0),
        arguments(folder, TrainingArguments, **given, num_train_epochs=epochs),
        train_dataset=batches[: BATCHES],
        data_collator=only_one,
        **trainer_options,
    )
    trainer.batches = iter(batches)
    trainer.train()
    return weights(trainer.model), outcome_of(trainer)


class OneAfterAnother(Trainer):
    """Takes the batches of a list whose epochs differ in their order."""

    def training_step(self, model, inputs, *args, **options):
        return super().training_step(model, next(self.batches), *args, **options)


@pytest.mark.parametrize(
    ("options", "trainer_options"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 3}, {}),
        ({"gradient_accumulation_steps": 4}, {"compute_loss_func": mean_over_items}),
        ({"max_steps": 7}, {}),
    ],
    ids=["each batch", "three batches", "four and a rest of two", "max_steps"],
)
def test_lockstep_is_the_training_of_one_process_with_the_global_batches(tmp_path, options, trainer_options):
    ended = values(run(train, 2, tmp_path, AllReduce(), options, trainer_options))
    batches = [one[1] for one in ended]
    alone, outcome = train_alone(tmp_path / "alone", batches, options, trainer_options)
    untrained = torch.tensor(weights(bert(0)))
    assert not torch.allclose(torch.tensor(alone), untrained, atol=1e-3)
    for after, _, its_outcome in ended:
        torch.testing.assert_close(torch.tensor(after), torch.tensor(alone), rtol=1e-9, atol=1e-12)
        assert its_outcome == outcome
