"""`OffbeatTrainerMixin`: the Trainer of Hugging Face's transformers, with the workers of a job.

    class OffbeatTrainer(OffbeatTrainerMixin, Trainer): ...

    args = OffbeatTrainingArguments(output_dir="run", num_train_epochs=3)
    OffbeatTrainer(model, args, train_dataset=data, strategy=LocalSGD(shards="equal")).train()

Theory of operation. For the Trainer and for Accelerate each worker is one process that trains alone: the
arguments hide the launcher's variables from them, so that nothing starts torch.distributed or wraps the model
in DistributedDataParallel, and no call of theirs waits for another worker. What a job has in common is the
session's:

- `get_train_dataloader` gives the Trainer this worker's batches. It takes all those of a step before it uses
  the first, so `training_step` says when each begins.
- The session is joined where the Trainer has prepared model, optimizer and checkpoint, and left when its last
  step is made, before it loads the best checkpoint.
- The leader evaluates and saves; the others wait, and get its metrics, so that all decide alike.
- An excluded worker's own steps are not those of the model: when it returns, it counts the group's.

Private methods of the Trainer that are extended here: `_prepare_for_training`, `_save_checkpoint` and
`_finalize_training`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from offbeat.errors import OffbeatError
from offbeat.runtime.control.environment import NEWCOMER_VARIABLE, read_environment
from offbeat.runtime.data.equal_shards import count_steps
from offbeat.runtime.session import Session, join
from offbeat.runtime.training.ddp import session_of
from offbeat.runtime.training.interface import Strategy
from offbeat.runtime.training.session_loader import SessionLoader

try:
    from accelerate.utils import patch_environment
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput
    from transformers.utils import logging
except ModuleNotFoundError as error:
    raise ImportError(
        "offbeat.transformers needs transformers, an extra: pip install offbeat[transformers]"
    ) from error

__all__ = ["OffbeatCallback", "OffbeatTrainerMixin", "OffbeatTrainingArguments"]

_logger = logging.get_logger(__name__)
_STATE_NAME: Final = "offbeat.pt"  # in a checkpoint: the session's state without model and optimizer
_ALONE: Final = {
    "local_rank": -1,
    "world_size": 1,
    "pmi_size": 1,
    "ompi_comm_world_size": 1,
    "mv2_comm_world_size": 1,
}
"""What Accelerate reads to find out whether there are other processes."""


@dataclass
class OffbeatTrainingArguments(TrainingArguments):  # type: ignore[misc]  # transformers is not checked
    """`TrainingArguments` of a worker on one device; `world_size` and `process_index` are the job's.

    Raises:
        OffbeatError: an argument is set that shards the model, or that the workers cannot follow together; or
            the process is a newcomer to a running job.
    """

    def __post_init__(self) -> None:
        for name in ("fsdp", "deepspeed", "parallelism_config", "auto_find_batch_size"):
            if getattr(self, name, None):
                raise OffbeatError(
                    f"expected training arguments without {name}: each worker has the whole model and one "
                    "batch size, and the strategy of the session keeps the workers in step"
                )
        place = read_environment()
        if place.is_newcomer:
            raise OffbeatError(
                f"a Trainer cannot join a running job, as {NEWCOMER_VARIABLE} asks for: its schedules would "
                "begin at the first step; start it with the job"
            )
        self._worker, self._workers = place.rank, place.world
        self.is_leader = self._worker == 0  # the Trainer keeps it up to date
        with patch_environment(**_ALONE):
            super().__post_init__()  # which looks for other processes
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        found: torch.device = super().device
        if found.type != "cuda":
            return found
        return torch.device("cuda", max(0, int(os.environ.get("LOCAL_RANK", 0))) % torch.cuda.device_count())

    @property
    def n_gpu(self) -> int:
        """How many GPUs this worker uses, at most one."""
        return int(min(1, super().n_gpu))

    @property
    def world_size(self) -> int:
        """How many workers the job starts with."""
        return self._workers

    @property
    def process_index(self) -> int:
        """The number of this worker."""
        return self._worker

    @property
    def local_process_index(self) -> int:
        """0 on the leader, which alone logs and saves."""
        return int(not self.is_leader)

    @property
    def should_log(self) -> bool:
        """Whether this worker is the leader."""
        return self.is_leader

    @property
    def should_save(self) -> bool:
        """Whether this worker is the leader."""
        return self.is_leader


class _EpochBatches(Dataset[Any]):
    """The batches of an epoch as a data set, whose items are taken in order.

    The Trainer, when it continues a run, makes another DataLoader of the data set, without the first ones.
    A new epoch begins where the index does not rise.
    """

    def __init__(self, samples: DataLoader[Any], batches: int) -> None:
        self.samples, self._batches = samples, batches
        self._last = -1
        self._taken: Iterator[Any] = iter(())
        self.loader: SessionLoader | None = None

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, index: int) -> Any:
        assert self.loader is not None, "the session is joined before the first batch"
        if index <= self._last or self._last < 0:
            self._taken = iter(self.loader)
        self._last = index
        batch = next(self._taken)
        if index == self._batches - 1:
            next(self._taken, None)  # so that the session knows that the epoch has no more
        return batch


class _EmptyEpochs(TrainerCallback):  # type: ignore[misc]
    """Lets the Trainer go on after an epoch that the others had ended before this worker began it."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin an epoch without a batch."""
        self._is_empty = True

    def on_batch(self) -> None:
        """Note a batch."""
        self._is_empty = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Go on; Trainer stops after an epoch without a batch."""
        if self._is_empty:
            control.should_training_stop = False


def _only_one(batches: list[Any]) -> Any:
    """Return the batch that is the only item."""
    return batches[0]


class OffbeatTrainerMixin:
    """Makes a Trainer one worker of the job that its launcher started; it stands before Trainer.

        class OffbeatTrainer(OffbeatTrainerMixin, Trainer): ...

        trainer = OffbeatTrainer(model, args, train_dataset=data, strategy=PartialAllReduce(shards="equal"))
        trainer.train()

    `train` joins a session and leaves it. The session shares out the samples, in an order that depends on its
    seed (OFFBEAT_SEED). The leader alone logs, saves and, during training, evaluates the whole set, while the
    others wait, as long as the strategy's `timeout_s`, and get its metrics. Before and after training each
    worker evaluates on its own. In the mean, a worker's gradient counts as many samples as its step has.

    Args:
        args: `OffbeatTrainingArguments`; all others are those of Trainer.
        strategy: how the workers synchronize; see `offbeat.join`. It needs equal shards.

    Raises:
        OffbeatError: the arguments are others, or what Accelerate is configured with shards the model.

    Attributes:
        session: during training, else None.
    """

    # Of Trainer:
    accelerator: Any
    args: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    lr_scheduler: Any
    model: Any
    optimizer: Any
    state: Any
    train_dataset: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Trainer in cls.__mro__ and cls.__mro__.index(Trainer) < cls.__mro__.index(OffbeatTrainerMixin):
            raise OffbeatError(
                f"expected OffbeatTrainerMixin before Trainer among the bases of {cls.__name__}: write "
                f"class {cls.__name__}(OffbeatTrainerMixin, Trainer)"
            )

    def __init__(self, *args: Any, strategy: Strategy | None = None, **options: Any) -> None:
        if not isinstance(self, Trainer):
            raise OffbeatError(
                f"expected a class with Trainer after OffbeatTrainerMixin, got {type(self).__name__}"
            )
        self.session: Session | None = None
        self._strategy = strategy
        self._epoch_batches: _EpochBatches | None = None
        self._empty_epochs = _EmptyEpochs()
        super().__init__(*args, **options)
        self.add_callback(self._empty_epochs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator of a process that trains alone."""
        if not isinstance(self.args, OffbeatTrainingArguments):
            raise OffbeatError(
                f"expected args of OffbeatTrainingArguments, got {type(self.args).__name__}, with which "
                "Accelerate would average the gradients once more: use "
                "offbeat.transformers.OffbeatTrainingArguments in its place"
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise OffbeatError(
                "expected Accelerate without FSDP and DeepSpeed, which shard the model: each worker has the "
                "whole model"
            )

    # The session -----------------------------------------------------------------------------------------

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as Trainer does, in a session.

        Raises:
            OffbeatError: what the workers cannot do together; or as `offbeat.join`.
            WorkerError: as `offbeat.join`.
        """
        if self.session is not None:
            raise OffbeatError("train() was called within train(): call it when the first has returned")
        if getattr(self._strategy, "readmits_workers", False):
            self._check_epochs_only()
        try:
            return super().train(*args, **options)  # type: ignore[misc]
        except BaseException as error:
            self._leave(error)
            raise

    def _check_epochs_only(self) -> None:
        """Refuse what workers do together at a step, since one that is excluded does not come to it."""
        for name in ("eval_strategy", "save_strategy"):
            if getattr(self.args, name) == "steps":
                raise OffbeatError(
                    f'expected {name} "epoch" or "no", got "steps": under this strategy an excluded worker '
                    "makes fewer steps, and workers evaluate and save together at the end of epochs alone"
                )

    def _leave(self, error: BaseException | None) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.leave(error)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> Any:
        prepared = super()._prepare_for_training(  # type: ignore[misc]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        with patch_environment(**{NEWCOMER_VARIABLE: 0}):  # which refuses one that the launcher starts again
            self.session = join(self.model, self.optimizer.optimizer, self._strategy)
        if resume_from_checkpoint is not None:
            self.session.load_state_dict(
                {**self.session.state_dict(), **_load_session_state(resume_from_checkpoint)}
            )
        assert self._epoch_batches is not None
        self._epoch_batches.loader = self.session.loader(self._epoch_batches.samples, takes_ahead=True)
        self._follow_leader()
        return prepared

    def _finalize_training(self, *args: Any) -> Any:
        self._leave(None)  # before the best checkpoint replaces the model of the last step
        return super()._finalize_training(*args)  # type: ignore[misc]

    def _follow_leader(self) -> None:
        """Log and save if this worker is the leader, who may have been lost."""
        assert self.session is not None
        self.args.is_leader = self.session.is_leader
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.args.is_leader

    def _agree_on_leader(self) -> bool:
        """Return whether this worker is the leader; all workers call it, of which exactly one gets True."""
        assert self.session is not None
        leads = self.session.gather_objects(self.session.is_leader)
        leader = min((worker for worker, is_leader in leads.items() if is_leader), default=min(leads))
        self.args.is_leader = leader == self.session.worker
        return bool(self.args.is_leader)

    def is_world_process_zero(self) -> bool:
        """Whether this worker is the leader."""
        return bool(self.args.is_leader)

    # Data and steps --------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this worker's batches, whose samples the session shares out.

        Raises:
            OffbeatError: the data set is iterable, or its samples are drawn in a way of their own.
        """
        if isinstance(self.train_dataset, IterableDataset):
            raise OffbeatError(
                "the session shares out samples by number, got an IterableDataset: use a data set with a "
                "length"
            )
        given: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        samples = _plain_loader(given, self.args.train_batch_size)
        steps = count_steps(
            len(samples.dataset),  # type: ignore[arg-type]
            self.args.world_size,
            self.args.train_batch_size,
            drop_last=samples.drop_last,
        )
        self._epoch_batches = _EpochBatches(samples, steps)
        return DataLoader(self._epoch_batches, batch_size=1, shuffle=False, collate_fn=_only_one)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples of all workers."""
        if isinstance(dataloader.dataset, _EpochBatches):
            return len(dataloader.dataset.samples.dataset)  # type: ignore[arg-type]
        count: int = super().num_examples(dataloader)  # type: ignore[misc]
        return count

    def training_step(self, model: nn.Module, *args: Any, **options: Any) -> Tensor:
        """Make the pass of one batch; the exchange is that of the last one of a step."""
        session, batches = self.session, self._epoch_batches
        assert session is not None
        assert batches is not None
        assert batches.loader is not None
        batches.loader.begin_batch()
        self._follow_leader()
        self._count_steps_of_group()
        self._empty_epochs.on_batch()
        with nullcontext() if self.accelerator.sync_gradients else session.no_sync():
            loss: Tensor = super().training_step(model, *args, **options)  # type: ignore[misc]
        return loss

    def _count_steps_of_group(self) -> None:
        """Leave out the steps that this worker has made while it was excluded, and count the group's."""
        assert self.session is not None
        if self.state.global_step == self.session.step:
            return
        self.state.global_step = self.session.step
        if isinstance(self.lr_scheduler, LambdaLR):  # as all schedules of Trainer that count steps
            self.lr_scheduler.last_epoch = self.session.step - 1
            self.lr_scheduler.step()

    # Evaluation and checkpoints --------------------------------------------------------------------------

    def evaluation_loop(
        self, dataloader: DataLoader[Any], description: str, *args: Any, **options: Any
    ) -> EvalLoopOutput:
        """Evaluate; during training on the leader alone, whose metrics all workers get."""
        session = self.session
        if session is None or description != "Evaluation":
            return super().evaluation_loop(dataloader, description, *args, **options)  # type: ignore[misc]
        output = EvalLoopOutput(predictions=None, label_ids=None, metrics=None, num_samples=None)
        if self._agree_on_leader():
            session.refresh()
            output = super().evaluation_loop(dataloader, description, *args, **options)  # type: ignore[misc]
        found = session.gather_objects([output.metrics, output.num_samples])
        metrics, samples = next(given for given in found.values() if given[0] is not None)
        return EvalLoopOutput(
            predictions=output.predictions, label_ids=output.label_ids, metrics=metrics, num_samples=samples
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        session = self.session
        assert session is not None
        if self._agree_on_leader():
            folder = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            if not self.args.save_only_model:
                folder.mkdir(parents=True, exist_ok=True)
                state = session.state_dict()
                kept = {name: state[name] for name in state.keys() - {"model", "optimizers"}}
                torch.save(kept, folder / _STATE_NAME)
            else:
                session.refresh()
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        best = session.gather_objects(self.state.best_model_checkpoint if self.args.is_leader else None)
        self.state.best_model_checkpoint = next((path for path in best.values() if path is not None), None)


def _plain_loader(given: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """Return a DataLoader of the samples and options of one that Accelerate has prepared."""
    sampler = getattr(given.batch_sampler, "sampler", given.batch_sampler)
    is_random = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not is_random and type(sampler) is not SequentialSampler:
        raise OffbeatError(
            "the session draws each sample once in an epoch, in random order or in that of the data set: "
            f'expected train_sampling_strategy "random" or "sequential", got a {type(sampler).__name__}'
        )
    options = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "prefetch_factor")
    return DataLoader(
        given.dataset,
        batch_size,
        shuffle=is_random,
        drop_last=given.batch_sampler.drop_last,  # type: ignore[union-attr]
        multiprocessing_context=given.multiprocessing_context,
        **{name: getattr(given, name) for name in options},
    )


def _load_session_state(checkpoint: str) -> dict[str, Any]:
    path = Path(checkpoint, _STATE_NAME)
    if not path.exists():
        raise OffbeatError(
            f"expected {_STATE_NAME} in {checkpoint}, which a Trainer with OffbeatTrainerMixin saves unless "
            "save_only_model is set: continue from a checkpoint of such a Trainer"
        )
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


class OffbeatCallback(TrainerCallback):  # type: ignore[misc]
    """Logs which workers train together, on the leader, whenever that changes.

    It is for a Trainer with `OffbeatTrainerMixin`, and refuses any other: a callback cannot keep the Trainer
    from averaging the gradients with DistributedDataParallel, too.
    """

    def __init__(self) -> None:
        self._members: tuple[int, ...] = ()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Refuse a Trainer without a session.

        Raises:
            OffbeatError: the Trainer's model is in no session.
        """
        self._members = _session_of(given["model"]).members

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Log the members, if they are others than before."""
        members = _session_of(given["model"]).members
        if members != self._members and state.is_world_process_zero:
            _logger.warning(
                "step %d: workers %s train together, before it were %s",
                state.global_step,
                ", ".join(map(str, members)),
                ", ".join(map(str, self._members)),
            )
        self._members = members


def _session_of(model: nn.Module) -> Session:
    session = session_of(model)
    if session is None:
        raise OffbeatError(
            "OffbeatCallback needs a Trainer whose model is in a session: make it with "
            "class OffbeatTrainer(OffbeatTrainerMixin, Trainer)"
        )
    assert isinstance(session, Session)
    return session
