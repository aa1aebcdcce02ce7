"""Lightning's Trainer on real workers, which start as its own launcher or another one starts them."""

import csv
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from offbeat.errors import OffbeatError
from support.processes import run, unlaunched_environ, values

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric

from offbeat.lightning import OffbeatFabricStrategy, OffbeatStrategy

WORKERS, SAMPLES, BATCH = 2, 64, 4
STRATEGIES = ["bsp", "hybrid", "ssp:s=1", "localsgd:every=2"]


def samples():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Regression(LightningModule):
    def __init__(self, momentum=0.9):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.momentum, self.mean_target, self.seen = momentum, MeanMetric(), []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.mean_target.update(targets)
        self.log("val_loss", nn.functional.mse_loss(self.layers(inputs), targets), sync_dist=True)
        self.log("mean_target", self.mean_target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=self.momentum)

    def weights(self):
        return [value.tolist() for value in self.layers.state_dict().values()]


def trainer(folder, synchronization="bsp", **options):
    defaults = {
        "accelerator": "cpu",
        "devices": WORKERS,
        "strategy": OffbeatStrategy(synchronization),
        "max_epochs": 2,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    return Trainer(**(defaults | options))


def loaders(rank=None):
    """For training, in order, and for validation; Lightning shards the latter."""
    data = samples()
    share = None if rank is None else DistributedSampler(data, WORKERS, rank, shuffle=False)
    return DataLoader(data, BATCH, sampler=share), DataLoader(data, BATCH)


def fit(rank, emit, folder, synchronization, options=None):
    seed_everything(1 + rank, verbose=False)
    model = Regression()
    fitted = trainer(folder, synchronization, **(options or {}))
    fitted.fit(model, *loaders(rank))
    metrics = {name: float(value) for name, value in fitted.callback_metrics.items()}
    return model.weights(), metrics, fitted.global_step


def fit_alone(folder, **options):
    """The same training in one process, whose batches are those of all workers together."""
    seed_everything(1, verbose=False)
    model = Regression()
    fitted = trainer(folder, strategy="auto", devices=1, **options)
    fitted.fit(model, DataLoader(samples(), WORKERS * BATCH))
    return model.weights()


def assert_close(weights, expected):
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-10)


@pytest.mark.parametrize("synchronization", STRATEGIES)
def test_all_workers_fit_and_see_the_same_metrics(tmp_path, synchronization):
    """Each has its own share of the validation set, and a metric is that of the whole set."""
    results = values(run(fit, WORKERS, tmp_path, synchronization))
    metrics = [metrics for _, metrics, _ in results]
    assert metrics[0] == metrics[1]
    assert metrics[0]["mean_target"] == pytest.approx(samples().tensors[1].mean().item(), rel=1e-5)
    assert {steps for _, _, steps in results} == {2 * SAMPLES // BATCH // WORKERS}
    assert_close(results[0][0], results[1][0])


OPTIONS = [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_model_is_that_of_one_process_with_all_samples_of_a_step(tmp_path, options):
    """Accumulation and clipping are those of the mean."""
    weights, _, _ = values(run(fit, WORKERS, tmp_path, "bsp", options))[0]
    assert_close(weights, fit_alone(tmp_path, **options))


def fit_and_resume(rank, emit, folder, synchronization):
    """Three epochs at once, and with an interruption after the second."""
    results = []
    for epochs, path in ((3, None), (2, None), (3, folder / "last.ckpt")):
        seed_everything(1, verbose=False)
        model = Regression()
        saving = ModelCheckpoint(folder, filename="last", save_top_k=1, enable_version_counter=False)
        options = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": epochs}
        fitted = trainer(folder, synchronization, **options)
        fitted.fit(model, *loaders(rank), ckpt_path=path)
        results.append((model.weights(), fitted.global_step))
    return results[0], results[2]


@pytest.mark.parametrize("synchronization", ["bsp", "hybrid"])
def test_a_training_resumes_from_the_checkpoint_of_the_leader(tmp_path, synchronization):
    for whole, resumed in values(run(fit_and_resume, WORKERS, tmp_path, synchronization)):
        assert whole[1] == resumed[1] == 3 * SAMPLES // BATCH // WORKERS
        assert_close(resumed[0], whole[0])
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]


class StopsForOne(Callback):
    """One worker's monitor gets worse, and that of the others better."""

    def on_validation_epoch_end(self, trainer, module):
        module.log("of_worker", float(trainer.current_epoch * (1 if trainer.global_rank else -1)))


def stop_early(rank, emit, folder):
    logger = CSVLogger(folder, name="log", version=0)
    stopping = EarlyStopping("of_worker", patience=1)
    model = Regression()
    fitted = trainer(folder, max_epochs=9, logger=logger, callbacks=[StopsForOne(), stopping])
    fitted.fit(model, *loaders(rank))
    return fitted.current_epoch


def test_early_stopping_and_logging_are_common(tmp_path):
    assert values(run(stop_early, WORKERS, tmp_path)) == [2, 2]
    with (tmp_path / "log" / "version_0" / "metrics.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1"]


class DiesAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Leader(Callback):
    """Where the training ends, the leader says so."""

    def on_train_end(self, trainer, module):
        self.was_leader = trainer.is_global_zero


def lose_one(rank, emit, folder, victim):
    leader = Leader()
    callbacks = [leader, ModelCheckpoint(folder, filename="{epoch}"), *([DiesAt(10)] * (rank == victim))]
    data = samples()
    share = DistributedSampler(data, 3, rank, shuffle=False)
    options = {"devices": 3, "enable_checkpointing": True, "callbacks": callbacks}
    fitted = trainer(folder, "localsgd:every=2", **options)
    fitted.fit(Regression(), DataLoader(data, BATCH, sampler=share), DataLoader(data, BATCH))
    return fitted.global_step, leader.was_leader


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_does_not_stop_the_others(tmp_path, victim):
    """The leader saves the last checkpoint, though it may not have been the first worker."""
    ended = run(lose_one, 3, tmp_path, victim)
    assert ended[victim].exitcode == -signal.SIGKILL
    others = values([one for one in ended if one.rank != victim])
    assert {steps for steps, _ in others} == {12}
    assert sorted(was_leader for _, was_leader in others) == [False, True]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=1.ckpt"]


class Gan(LightningModule):
    """Two models and optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        of_generator, of_critic = self.optimizers()
        inputs = batch[0].float()
        self.manual_backward(self.critic(inputs).mean() - self.critic(self.generator(inputs).detach()).mean())
        of_critic.step()
        of_critic.zero_grad()
        self.manual_backward(self.critic(self.generator(inputs)).mean())
        of_generator.step()
        of_generator.zero_grad()
        self.critic.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.Adam(one.parameters(), lr=0.01) for one in (self.generator, self.critic)]


def fit_other(rank, emit, folder, make, options):
    seed_everything(1 + rank, verbose=False)
    model = make()
    fitted = trainer(folder, **options)
    fitted.fit(model, *(loaders(rank) if make is Regression else loaders(rank)[:1]))
    return [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("make", "options"), [(Gan, {}), (Regression, {"precision": "bf16-mixed"})], ids=["gan", "bf16-mixed"]
)
def test_manual_optimization_and_mixed_precision(tmp_path, make, options):
    first, second = values(run(fit_other, WORKERS, tmp_path, make, options))
    assert_close(first, second)


class Skipping(Regression):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 and self.global_rank == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (Skipping, {}, "returning None in distributed training is not supported"),
        (Regression, {"sync_batchnorm": True}, "sync_batchnorm=True needs a process group"),
    ],
)
def test_what_would_have_no_effect_or_hang_is_refused(tmp_path, make, options, words):
    ended = run(fit_other, WORKERS, tmp_path, make, options)
    assert any(words in (one.error or "") for one in ended)
    assert all(one.error for one in ended)


@pytest.mark.parametrize(
    ("synchronization", "words"),
    [
        ("partial", "PartialAllReduce excludes slow workers"),
        ("preduce:P=3,overlap=false", "use it with overlap"),
    ],
)
def test_strategies_that_lightning_would_hang_with_are_refused(synchronization, words):
    with pytest.raises(OffbeatError, match=words):
        OffbeatStrategy(synchronization)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_lightning
folder = Path(sys.argv[1])
model = test_lightning.Regression()
fitted = test_lightning.trainer(folder, "bsp")
fitted.fit(model, *test_lightning.loaders())
(folder / f"weights-{fitted.global_rank}-of-{fitted.world_size}").write_text(str(model.weights()))
fitted.validate(model, test_lightning.loaders()[1], verbose=False)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
OFFBEAT_RUN = ["-m", "offbeat", "run", "--nproc-per-node=2"]


@pytest.mark.parametrize(
    "launcher", [[], TORCHRUN, OFFBEAT_RUN], ids=["lightning", "torchrun", "offbeat run"]
)
def test_workers_are_started_by_lightning_or_a_launcher(tmp_path, launcher):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(script), str(tmp_path), os.path.dirname(__file__)]
    ended = subprocess.run(
        [sys.executable, *launcher, *arguments], env=unlaunched_environ(), capture_output=True, timeout=120
    )
    assert not ended.returncode, ended.stderr.decode()
    written = [tmp_path / f"weights-{rank}-of-2" for rank in range(2)]
    assert written[0].read_text() == written[1].read_text()


class Logging(Regression):
    """Exchanges values within a step, as many programs log."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        assert self.all_gather(torch.tensor(self.global_rank)).tolist() == [0, 1]
        return loss


def log_and_save(rank, emit, folder):
    model = Logging()
    fitted = trainer(folder, max_epochs=1)
    fitted.fit(model, *loaders(rank))
    fitted.save_checkpoint(folder / "after.ckpt")
    torch.save(model.mean_target, folder / f"metric-{rank}")
    return float(fitted.callback_metrics["loss"])


def test_values_within_a_step_and_after_fit(tmp_path):
    first, second = values(run(log_and_save, WORKERS, tmp_path))
    assert first == second
    assert (tmp_path / "after.ckpt").exists()


SCRIPT_WITH_A_DEATH = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_lightning as t
folder = Path(sys.argv[1])
fitted = t.trainer(folder, "localsgd:every=2", max_epochs=4, callbacks=[t.DiesAt(8)] * t.is_second_worker())
fitted.fit(t.Regression(), *t.loaders())
(folder / "steps").write_text(str(fitted.global_step))
"""


def is_second_worker():
    return os.environ.get("LOCAL_RANK") == "1"


def test_the_process_that_has_started_the_others_goes_on_without_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_WITH_A_DEATH)
    arguments = [str(script), str(tmp_path), os.path.dirname(__file__)]
    ended = subprocess.run(
        [sys.executable, *arguments], env=unlaunched_environ(), capture_output=True, timeout=120
    )
    assert not ended.returncode, ended.stderr.decode()
    assert (tmp_path / "steps").read_text() == str(4 * SAMPLES // BATCH // WORKERS)


# Fabric -----------------------------------------------------------------------------------------------------


def fabric_loop(rank, emit, folder, synchronization, epochs=2, resumes=False):
    """A loop as Fabric's users write it, with accumulation and clipping; its last state is saved."""
    torch.manual_seed(rank)
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy=OffbeatFabricStrategy(synchronization))
    fabric.launch()
    model = Regression().layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resumes:
        fabric.load(folder / "state.ckpt", state)
    model, optimizer = fabric.setup(model, optimizer)
    data = samples()
    loader = fabric.setup_dataloaders(
        DataLoader(data, BATCH, sampler=DistributedSampler(data, WORKERS, rank, shuffle=False))
    )
    with fabric.strategy.session:
        for epoch in range(state["epoch"], epochs):
            for place, (inputs, targets) in enumerate(loader):
                with fabric.no_backward_sync(model, enabled=place % 2 == 0):
                    fabric.backward(nn.functional.mse_loss(model(inputs), targets))
                if place % 2:
                    fabric.clip_gradients(model, optimizer, max_norm=0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            total = fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum")
            state |= {"model": model, "optimizer": optimizer, "epoch": epoch + 1}
        fabric.save(folder / "state.ckpt", state)
    gathered = fabric.all_gather(torch.tensor([rank]))  # after the session
    return [value.tolist() for value in model.state_dict().values()], float(total), gathered.tolist()


def fabric_alone(folder):
    torch.manual_seed(0)
    model = Regression().layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        for place, (inputs, targets) in enumerate(DataLoader(samples(), WORKERS * BATCH)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            if place % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return [value.tolist() for value in model.state_dict().values()]


def test_a_loop_of_fabric_is_that_of_one_process(tmp_path):
    for weights, total, gathered in values(run(fabric_loop, WORKERS, tmp_path, "bsp")):
        assert_close(weights, fabric_alone(tmp_path))
        assert total == 1.0
        assert gathered == [[0], [1]]


@pytest.mark.parametrize("synchronization", ["bsp", "hybrid"])
def test_a_loop_of_fabric_resumes(tmp_path, synchronization):
    values(run(fabric_loop, WORKERS, tmp_path, synchronization, 1))
    resumed = values(run(fabric_loop, WORKERS, tmp_path, synchronization, 2, True))
    whole = values(run(fabric_loop, WORKERS, tmp_path, synchronization, 2))
    for (weights, _, _), (expected, _, _) in zip(resumed, whole, strict=True):
        assert_close(weights, expected)


def load_within(rank, emit, folder):
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy=OffbeatFabricStrategy("ssp:s=1"))
    fabric.launch()
    model = nn.Linear(2, 1)
    fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with fabric.strategy.session:
        fabric.load(folder / "state.ckpt", {})


def test_on_servers_a_checkpoint_is_loaded_before_the_session(tmp_path):
    ended = run(load_within, WORKERS, tmp_path)
    assert any("load the checkpoint before fabric.setup" in one.error for one in ended)


def set_up_apart(rank, emit):
    fabric = Fabric(accelerator="cpu", devices=1, strategy=OffbeatFabricStrategy("bsp"))
    fabric.launch()
    model = nn.Linear(2, 1)
    fabric.setup_module(model)
    fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))


def set_up_twice(rank, emit):
    fabric = Fabric(accelerator="cpu", devices=1, strategy=OffbeatFabricStrategy("bsp"))
    fabric.launch()
    for model in (nn.Linear(2, 1), nn.Linear(2, 1)):
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (set_up_apart, "the session begins with both together"),
        (set_up_twice, "fabric.setup was called twice"),
    ],
)
def test_models_that_would_not_be_synchronized_are_refused(loop, words):
    (ended,) = run(loop, 1)
    assert words in (ended.error or "")
