"""`offbeat.transformers`: a Trainer among workers, with a BERT of random weights."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)

from offbeat.errors import OffbeatError  # noqa: E402
from offbeat.strategies import SSP, AllReduce, Hybrid, LocalSGD, PartialAllReduce  # noqa: E402
from offbeat.transformers import (  # noqa: E402
    OffbeatCallback,
    OffbeatTrainerMixin,
    OffbeatTrainingArguments,
    _EmptyEpochs,
    _load_session_state,
)
from support.processes import run, values  # noqa: E402

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


def train(rank, emit, folder, strategy, options, trainer_options, samples=SAMPLES):
    recording = Recording()
    trainer = OffbeatTrainer(
        bert(rank),
        arguments(folder, **options),
        train_dataset=Tokens(samples),
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
        train_dataset=batches[:BATCHES],
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
    ("options", "trainer_options", "samples"),
    [
        ({}, {}, SAMPLES),
        ({"gradient_accumulation_steps": 3}, {}, SAMPLES),
        ({"gradient_accumulation_steps": 4}, {"compute_loss_func": mean_over_items}, SAMPLES),
        ({"max_steps": 7}, {}, SAMPLES),
        ({}, {}, SAMPLES - 3),
        ({"gradient_accumulation_steps": 3}, {"compute_loss_func": mean_over_items}, SAMPLES - 3),
    ],
    ids=[
        "each batch",
        "three batches",
        "four and a rest of two",
        "max_steps",
        "small last batch",
        "three with a small one",
    ],
)
def test_lockstep_is_the_training_of_one_process_with_the_global_batches(
    tmp_path, options, trainer_options, samples
):
    ended = values(run(train, 2, tmp_path, AllReduce(), options, trainer_options, samples))
    batches = [one[1] for one in ended]
    alone, outcome = train_alone(tmp_path / "alone", batches, options, trainer_options)
    untrained = torch.tensor(weights(bert(0)))
    assert not torch.allclose(torch.tensor(alone), untrained, atol=1e-3)
    for after, _, its_outcome in ended:
        torch.testing.assert_close(torch.tensor(after), torch.tensor(alone), rtol=1e-9, atol=1e-12)
        assert its_outcome == outcome


STRATEGIES = [
    Hybrid(),
    PartialAllReduce(limit=10**6, shards="equal"),
    SSP(s=2, shards="equal"),
    LocalSGD(every=2, shards="equal"),
]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
def test_each_strategy_trains_as_many_steps_as_the_schedule_has(tmp_path, strategy, every):
    options = {"gradient_accumulation_steps": every, "num_train_epochs": 3}
    ended = values(run(train, 2, tmp_path, strategy, options, {}))
    steps = 3 * BATCHES // every
    assert [outcome for *_, outcome in ended] == [(steps, 0.0)] * 2
    taken = [ids for _, batches, _ in ended for batch in batches[:BATCHES] for ids in batch["input_ids"]]
    assert sorted(taken) == sorted(ids.tolist() for ids in Tokens(SAMPLES)._ids)
    assert ended[0][0] == ended[1][0]


class Stopping(TrainerCallback):
    """Notes where each worker stops, and who prints."""

    def __init__(self):
        self.evaluated, self.printed = [], []

    def on_evaluate(self, args, state, control, metrics=None, **given):
        self.evaluated.append((state.global_step, metrics["eval_loss"]))

    def on_log(self, args, state, control, logs=None, **given):
        if state.is_world_process_zero:
            self.printed.append(state.global_step)


class CountingTrainer(OffbeatTrainer):
    """Counts the samples that it evaluates, and the models that it saves."""

    evaluated_samples = saved = 0

    def save_model(self, *args, **options):
        self.saved += 1
        super().save_model(*args, **options)

    def prediction_step(self, model, inputs, *args, **options):
        self.evaluated_samples += len(inputs["labels"])
        return super().prediction_step(model, inputs, *args, **options)


def train_until_worse(rank, emit, folder, strategy):
    notes = Stopping()
    options = {
        "num_train_epochs": 9,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # which it soon is not
    }
    trainer = CountingTrainer(
        bert(rank),
        arguments(folder, **options),
        train_dataset=Tokens(SAMPLES),
        eval_dataset=Tokens(20, seed=1),
        callbacks=[notes, EarlyStoppingCallback(early_stopping_patience=2)],
        strategy=strategy,
    )
    trainer.train()
    steps = trainer.state.global_step
    count = trainer.evaluated_samples, trainer.saved
    after = trainer.evaluate()["eval_loss"]
    return steps, notes.evaluated[:-1], notes.printed, count, after, trainer.state.best_model_checkpoint


@pytest.mark.parametrize("strategy", [AllReduce(), *STRATEGIES], ids=lambda one: one.name)
def test_one_worker_evaluates_and_saves_and_all_stop_at_the_same_step(tmp_path, strategy):
    ended = values(run(train_until_worse, 2, tmp_path, strategy))
    steps, evaluated, printed, _, _, best = ended[0]
    assert [one[:2] for one in ended] == [(steps, evaluated)] * 2
    assert 0 < steps < 9 * BATCHES
    assert [step for step, _ in evaluated] == [BATCHES * epoch for epoch in range(1, len(evaluated) + 1)]
    assert [one[3] for one in ended] == [(20 * len(evaluated), len(evaluated)), (0, 0)]
    assert printed
    assert ended[1][2] == []
    best_step, best_loss = max(evaluated, key=lambda one: one[1])
    assert {one[5] for one in ended} == {str(tmp_path / f"checkpoint-{best_step}")} == {best}
    assert [one[4] for one in ended] == [pytest.approx(best_loss, rel=1e-6)] * 2
    assert len([*tmp_path.glob("checkpoint-*")]) == 2


class KillAfter(TrainerCallback):
    """Ends its process as a power failure would."""

    def __init__(self, step):
        self._step = step

    def on_step_end(self, args, state, control, **given):
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_in_parts(rank, emit, folder, strategy, killed_at, resume, options):
    recording = Recording()
    given = {"save_strategy": "steps", "save_steps": 4, "optim": "adamw_torch", **options}
    trainer = OffbeatTrainer(
        bert(rank),
        arguments(folder, **given),
        train_dataset=Tokens(SAMPLES),
        data_collator=recording,
        callbacks=[] if killed_at is None else [KillAfter(killed_at)],
        strategy=strategy,
    )
    trainer.train(resume_from_checkpoint=resume)
    return weights(trainer.model), recording.batches, outcome_of(trainer)


@pytest.mark.parametrize(
    ("killed_at", "options"),
    [(5, {}), (7, {"save_steps": BATCHES}), (5, {"gradient_accumulation_steps": 2, "num_train_epochs": 4})],
    ids=["within an epoch", "between epochs", "steps of two batches"],
)
def test_a_run_continues_from_a_checkpoint_as_if_it_had_not_been_killed(tmp_path, killed_at, options):
    whole = values(run(train_in_parts, 2, tmp_path / "whole", AllReduce(), None, None, options))
    parts = tmp_path / "parts"
    killed = run(train_in_parts, 2, parts, AllReduce(), killed_at, None, options)
    assert {one.exitcode for one in killed} & {-signal.SIGKILL}
    saved = options.get("save_steps", 4)
    assert [path.name for path in parts.glob("checkpoint-*")] == [f"checkpoint-{saved}"]
    continued = values(run(train_in_parts, 2, parts, AllReduce(), None, True, options))
    used = saved * options.get("gradient_accumulation_steps", 1)
    for one, other in zip(whole, continued, strict=True):
        assert other[1] == one[1][used:]
        torch.testing.assert_close(torch.tensor(other[0]), torch.tensor(one[0]), rtol=1e-9, atol=1e-12)
        assert other[2] == one[2]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
def test_each_strategy_continues_from_a_checkpoint(tmp_path, strategy):
    given = {"save_strategy": "epoch", "num_train_epochs": 1}
    first = values(run(train_in_parts, 2, tmp_path, strategy, None, None, given))
    assert [one[2][0] for one in first] == [BATCHES] * 2
    given["num_train_epochs"] = 3
    ended = values(run(train_in_parts, 2, tmp_path, strategy, None, True, given))
    assert [one[2] for one in ended] == [(3 * BATCHES, 0.0)] * 2
    assert [len(one[1]) for one in ended] == [2 * BATCHES] * 2


def train_while_another_dies(rank, emit, folder, strategy, killed):
    options = {
        "num_train_epochs": 4,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    notes = Stopping()
    trainer = OffbeatTrainer(
        bert(rank),
        arguments(folder, **options),
        train_dataset=Tokens(SAMPLES),
        eval_dataset=Tokens(20, seed=1),
        callbacks=[notes, OffbeatCallback(), *([KillAfter(8)] if rank == killed else [])],
        strategy=strategy,
    )
    trainer.train()
    return trainer.state.global_step, notes.evaluated, bool(notes.printed), trainer.args.should_save


@pytest.mark.parametrize("killed", [0, 2])
def test_workers_go_on_when_one_is_killed(tmp_path, killed):
    strategy = LocalSGD(every=2, shards="equal")
    ended = run(train_while_another_dies, 3, tmp_path, strategy, killed)
    assert ended.pop(killed).exitcode == -signal.SIGKILL
    left = values(ended)
    batches = SAMPLES // 3 // 4
    assert [one[0] for one in left] == [4 * batches] * 2
    assert left[0][1] == left[1][1]
    assert [one[3] for one in left] == [True, False]
    assert left[0][2]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        f"checkpoint-{batches * epoch}" for epoch in range(1, 5)
    }


class Rounds(TrainerCallback):
    """Counts exchanges of gradients."""

    def on_step_end(self, args, state, control, **given):
        self.count = self.trainer.session._synchronizer.round


def train_in_bfloat16(rank, emit, folder):
    kinds, rounds = set(), Rounds()
    model = bert(rank).float()
    model.classifier.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    options = {"bf16": True, "gradient_accumulation_steps": 3, "dataloader_num_workers": 1}
    trainer = OffbeatTrainer(
        model, arguments(folder, **options), train_dataset=Tokens(SAMPLES), strategy=AllReduce()
    )
    rounds.trainer = trainer
    trainer.add_callback(rounds)
    trainer.train()
    return kinds == {torch.bfloat16}, weights(model), rounds.count


def test_mixed_precision_a_process_that_loads_batches_and_one_exchange_a_step(tmp_path):
    (is_mixed, after, rounds), (_, its_after, _) = values(run(train_in_bfloat16, 2, tmp_path))
    assert is_mixed
    assert rounds == 2 * BATCHES // 3
    assert after == its_after
    assert after != weights(bert(0).float())


@pytest.mark.parametrize("has_batch", [False, True])
def test_an_epoch_without_a_batch_is_no_reason_to_stop(has_batch):
    epochs, control = _EmptyEpochs(), TrainerControl(should_training_stop=True)
    epochs.on_epoch_begin(None, None, control)
    if has_batch:
        epochs.on_batch()
    epochs.on_epoch_end(None, None, control)
    assert control.should_training_stop == has_batch


def test_a_newcomer_is_refused(tmp_path, monkeypatch):
    for name, value in {"OFFBEAT_NEWCOMER": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OffbeatError, match="a Trainer cannot join a running job"):
        arguments(tmp_path)


class Endless(IterableDataset):
    """Samples without numbers."""

    def __iter__(self):
        return iter(Tokens(8))


def build(folder, data=None, kind=OffbeatTrainer, args=None, **options):
    given = {"strategy": AllReduce()} if issubclass(kind, OffbeatTrainer) else {}
    return kind(bert(), args or arguments(folder, **options), train_dataset=data or Tokens(8), **given)


def test_what_workers_cannot_do_together_is_refused_in_words(tmp_path):
    with pytest.raises(OffbeatError, match=r"write class Wrong\(OffbeatTrainerMixin, Trainer\)"):

        class Wrong(Trainer, OffbeatTrainerMixin):
            pass

    with pytest.raises(OffbeatError, match="expected a class with Trainer after OffbeatTrainerMixin"):
        OffbeatTrainerMixin()
    with pytest.raises(
        OffbeatError, match=r"use offbeat\.transformers\.OffbeatTrainingArguments in its place"
    ):
        build(tmp_path, args=arguments(tmp_path, TrainingArguments))
    with pytest.raises(OffbeatError, match="expected training arguments without fsdp"):
        build(tmp_path, fsdp=True)
    with pytest.raises(OffbeatError, match="expected training arguments without deepspeed"):
        build(tmp_path, deepspeed="zero.json")
    with pytest.raises(OffbeatError, match="got an IterableDataset: use a data set with a length"):
        build(tmp_path, Endless(), max_steps=2).train()
    with pytest.raises(OffbeatError, match='sampling_strategy "random" or "sequential", got a LengthGrouped'):
        build(tmp_path, train_sampling_strategy="group_by_length").train()
    plain = build(tmp_path, kind=Trainer, args=arguments(tmp_path, TrainingArguments))
    plain.add_callback(OffbeatCallback())
    with pytest.raises(OffbeatError, match="OffbeatCallback needs a Trainer whose model is in a session"):
        plain.train()
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(OffbeatError, match=r"expected offbeat\.pt in "):
        _load_session_state(tmp_path / "checkpoint-1")


def train_wrongly(rank, emit, folder, strategy, options):
    trainer = OffbeatTrainer(
        bert(), arguments(folder, **options), train_dataset=Tokens(SAMPLES), strategy=strategy
    )
    trainer.train()


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        (PartialAllReduce(), {}, 'give the strategy shards="equal"'),
        (PartialAllReduce(shards="equal"), {"save_strategy": "steps"}, "at the end of epochs alone"),
    ],
)
def test_a_strategy_whose_workers_take_unequal_numbers_of_batches_is_refused(
    tmp_path, strategy, options, words
):
    ended = run(train_wrongly, 2, tmp_path, strategy, options)
    assert any(words in (one.error or "") for one in ended)


def train_within_ddp(rank, emit, folder):
    class Wrapping(OffbeatTrainer):
        def compute_loss(self, model, *args, **options):
            return super().compute_loss(DistributedDataParallel(model), *args, **options)

    dist.init_process_group("gloo")
    build(folder, Tokens(SAMPLES), Wrapping).train()


def test_a_wrapper_that_averages_gradients_too_is_refused(tmp_path):
    for ended in run(train_within_ddp, 2, tmp_path):
        assert ended.was_ended_by("OffbeatError")
        assert "would average its gradients once more" in ended.error


def train_twice(rank, emit, folder):
    class Nested(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            trainer.train()

    trainer = build(folder, Tokens(SAMPLES))
    trainer.add_callback(Nested())
    trainer.train()


def test_a_training_within_a_training_is_refused(tmp_path):
    for ended in run(train_twice, 2, tmp_path):
        assert "OffbeatError: train() was called within train()" in ended.trace


class Rates(TrainerCallback):
    """Notes the learning rate of each step that both workers make together, by its number in the group."""

    def __init__(self):
        self.seen, self.own_steps, self.missed = {}, 0, 0
        self.trainer = None

    def on_pre_optimizer_step(self, args, state, control, **given):
        session = self.trainer.session
        self.own_steps += 1
        if session.members == (0, 1):
            self.seen[session.step] = self.trainer.optimizer.param_groups[0]["lr"]
            self.missed = session.step + 1 - self.own_steps


def train_with_a_straggler(rank, emit, folder):
    notes = Rates()
    notes.trainer = OffbeatTrainer(
        bert(rank),
        arguments(folder, logging_steps=1000, num_train_epochs=3),
        train_dataset=Tokens(800),
        callbacks=[notes, OffbeatCallback()],
        strategy=PartialAllReduce(k=4, limit=3, shards="equal"),
    )
    notes.trainer.train()
    return notes.seen, notes.missed, weights(notes.trainer.model)


def test_a_worker_that_returns_has_the_learning_rate_of_the_others(tmp_path):
    slow = {"OFFBEAT_SLOW": "1:10@burst=12/1000"}
    ended = values(run(train_with_a_straggler, 2, tmp_path, env=slow))
    (rates, missed, after), (its_rates, its_missed, its_after) = ended
    assert missed or its_missed  # one was excluded, and has returned
    both = rates.keys() & its_rates.keys()
    assert len(both) > 10
    assert {step: its_rates[step] for step in both} == {step: rates[step] for step in both}
    assert after == its_after
