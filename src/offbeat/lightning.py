"""Lightning's Trainer, and Fabric, on workers that synchronize by one of offbeat's strategies.

    trainer = Trainer(accelerator="cpu", devices=4, strategy=OffbeatStrategy("hybrid"))
    fabric = Fabric(accelerator="cpu", devices=4, strategy=OffbeatFabricStrategy("hybrid"))

Lightning shards the data, by its DistributedSampler, and runs the loop; the session averages gradients or
models. Each worker has the same number of batches, and workers meet at the end of an epoch, where Lightning
reduces metrics and saves checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from offbeat.errors import OffbeatError
from offbeat.runtime.session import Session, join
from offbeat.runtime.training.interface import Strategy
from offbeat.runtime.training.start_values import gather_objects
from offbeat.runtime.training.value_exchange import REDUCTIONS, reduce_tensors
from offbeat.strategies.model_averaging import AveragesModels
from offbeat.strategies.partial import DPAR, PartialAllReduce
from offbeat.strategies.registry import parse_strategy
from offbeat.strategies.staleness import ServerStrategy

try:
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import ParallelStrategy as FabricParallelStrategy
    from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _TrainerLauncher
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
    from torchmetrics import Metric
except ModuleNotFoundError as error:
    raise ImportError(
        "offbeat.lightning needs Lightning, an extra: pip install offbeat[lightning]"
    ) from error

__all__ = ["OffbeatFabricStrategy", "OffbeatStrategy"]


class _Unobserved:
    """A launcher whose main process is not ended when another one dies: the strategy goes on without it."""

    cluster_environment: Any
    num_processes: int
    num_nodes: int
    _call_children_scripts: Callable[[], None]

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other processes, and call the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


if TYPE_CHECKING:
    _Base = FabricParallelStrategy
else:
    _Base = object  # each of Lightning's two has the rest


class _Workers(_Base):  # type: ignore[misc, valid-type]  # types of an extra are not read
    """What both of Lightning's strategies are to Lightning: which worker this is, and values of all workers.

    Args:
        synchronization: the strategy, or its text on the command line.
        options: of Lightning's strategy.

    Raises:
        OffbeatError: a strategy that cannot be used with Lightning's loop; says why.
        ValueError: a text that is no strategy.
    """

    _launcher_class: ClassVar[Any]

    def __init__(self, synchronization: Strategy | str = "bsp", **options: Any) -> None:
        super().__init__(**options)
        if isinstance(synchronization, str):
            synchronization = parse_strategy(synchronization)
        _check_usable(synchronization)
        if isinstance(synchronization, AveragesModels | ServerStrategy):
            synchronization = replace(synchronization, shards="equal")  # Lightning splits the samples
        self.session: Session | None = None
        self.num_nodes = 1
        self._synchronization = synchronization
        self._leader = 0
        self._lost: set[int] = set()

    # Processes -------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shards the data among several workers."""
        return True

    @property
    def num_processes(self) -> int:
        """Workers on this host."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of the samples is this worker's."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def root_device(self) -> torch.device:
        """This worker's device."""
        assert self.parallel_devices is not None
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker saves, prints and logs for all: the first that was in the job at the last call.

        That is the last of `barrier`, `reduce` and the like, so that all workers agree on it.
        """
        return bool(self.global_rank == self._leader)

    def set_world_ranks(self) -> None:
        """Tell the environment which worker this is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _set_rank(self.global_rank)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        launcher: Any = self._launcher_class
        if self._synchronization.survives_worker_loss:
            launcher = type(launcher.__name__, (_Unobserved, launcher), {})
        self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Prepare this process, and say where its job is, unless a launcher has."""
        super().setup_environment()
        self.set_world_ranks()
        self._publish_place()

    def _publish_place(self) -> None:
        """Set a launcher's variables where Lightning is the launcher; it removes some of them after a run."""
        environment = self.cluster_environment
        if isinstance(environment, LightningEnvironment):
            os.environ |= {
                "RANK": str(self.global_rank),
                "WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": environment.main_address,
                "MASTER_PORT": str(environment.main_port),
            }

    # Small values ----------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait until all workers have called this."""
        self._gather(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return a worker's value on all workers; the first worker's if that one has been lost."""
        values = self._gather_by_worker(obj)
        return values.get(src, values[min(values)])

    def all_reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Return the mean, sum, minimum or maximum of all workers' tensors; other values as they are.

        Raises:
            OffbeatError: another operation, or tensors of other shapes.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op).lower().removeprefix("redoptype.").replace("avg", "mean")
        op = next((one for one in REDUCTIONS if one == name), None)
        if op is None:
            raise OffbeatError(f"expected a reduction of {', '.join(REDUCTIONS)}, got {reduce_op}")
        values = self._gather(tensor)
        if len({value.shape for value in values}) > 1:
            raise OffbeatError(
                f"expected a tensor of one shape on all workers, got {[(*value.shape,) for value in values]}"
            )
        return reduce_tensors(values, op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return all workers' tensors, stacked, shape (workers, *shape).

        Raises:
            OffbeatError: `sync_grads`: gradients do not flow to other workers.
        """
        if sync_grads:
            raise OffbeatError("all_gather(sync_grads=True) is not there: gradients stay on their worker")
        return torch.stack(self._gather(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all workers have decided so, or any of them."""
        decisions = self._gather(bool(decision))
        return (False not in decisions) if all else (True in decisions)

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all workers that are in the job; tensors on this worker's device."""
        values = self._gather_by_worker(value).values()
        return [one.to(self.root_device) if isinstance(one, Tensor) else one for one in values]

    def _gather_by_worker(self, value: Any) -> dict[int, Any]:
        if self.session is not None and not self.session.has_left:
            values = self.session.gather_within_step(value)
            self._leader, self._lost = min(values), {*range(self.world_size)} - values.keys()
            return values
        if self._lost:
            raise OffbeatError(
                f"workers {sorted(self._lost)} were lost, and what comes after the training needs all of "
                "them: evaluate in a job of its own"
            )
        self._publish_place()
        return gather_objects(value, self._synchronization.timeout_s)


class OffbeatStrategy(_Workers, ParallelStrategy):  # type: ignore[misc]  # see above
    """A Lightning strategy whose workers synchronize by a strategy of offbeat.

    Workers are started by Lightning (`devices=4`), or by torchrun, `offbeat run` or srun. The session begins
    with `fit`, after a checkpoint has been loaded, and ends with it. What Lightning does on rank zero is done
    by the first worker; if that one is lost, by the next.

    Metrics of torchmetrics, `self.log(..., sync_dist=True)`, `trainer.strategy.reduce` and `all_gather`
    exchange values by way of the coordinator, of at most 100 KB; workers that have been lost are left out.

    Args:
        synchronization: the strategy, or its text on the command line, such as "hybrid" or
            "localsgd:every=8"; not one that excludes slow workers, which would end an epoch at another step
            than the others.
        options: of Lightning's ParallelStrategy, such as `cluster_environment`.

    Attributes:
        session: the session of the `fit` under way, else None.

    Raises:
        OffbeatError: a strategy that cannot be used with Lightning's loop; says why.
        ValueError: a text that is no strategy.
    """

    _launcher_class = _TrainerLauncher

    def __init__(self, synchronization: Strategy | str = "bsp", **options: Any) -> None:
        super().__init__(synchronization, **options)
        self._metrics: list[tuple[Any, Any, Any]] = []  # of torchmetrics, and the functions that they had

    def model_to_device(self) -> None:
        """Move the model to this worker's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Prepare the model and the optimizers.

        Raises:
            OffbeatError: `sync_batchnorm=True`, which would have no effect.
        """
        if self._layer_sync is not None:
            raise OffbeatError(
                "sync_batchnorm=True needs a process group, which offbeat's strategies do not have: leave it "
                "out (running statistics are copied from the first worker), or use GroupNorm"
            )
        super().setup(trainer)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                self._metrics.append((module, module.distributed_available_fn, module.dist_sync_fn))
                module.distributed_available_fn = lambda: True
                module.dist_sync_fn = lambda value, group=None: self._gather(value)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return _StepModule(model)

    def on_train_start(self) -> None:
        """Join the job: what a checkpoint holds has been loaded.

        Raises:
            OffbeatError: the model or the optimizers cannot be used.
            WorkerError: the job did not start, or is running: it takes no newcomers.
        """
        assert self.model is not None
        self.session = join(self.model, self.optimizers, self._synchronization)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make this worker the one that logs and prints if it leads now."""
        if self.is_global_zero:
            _set_rank(0)

    def on_validation_start(self) -> None:
        """Bring the model up to date."""
        if self.session is not None:
            self.session.refresh()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model, up to date."""
        if self.session is not None:
            self.session.refresh()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save on the leader; all workers call this, for the one of the last call may have been lost."""
        self.barrier()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def on_exception(self, exception: BaseException) -> None:
        """Leave the job; the other workers learn why."""
        self._leave(exception)

    def teardown(self) -> None:
        """Leave the job once all workers have finished."""
        self._leave(None)
        for metric, *functions in self._metrics:
            metric.distributed_available_fn, metric.dist_sync_fn = functions
        self._metrics.clear()
        super().teardown()

    def _leave(self, error: BaseException | None) -> None:
        if self.session is not None:
            session, self.session = self.session, None
            session.__exit__(None if error is None else type(error), error, None)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate gradients."""
        assert self.session is not None
        with self.session.no_sync():
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the backward pass, then step: a step with a closure would have its backward pass within it."""
        plugin, module = self.precision_plugin, self.lightning_module
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:  # which does so itself
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = closure()
        plugin._after_closure(module, optimizer)
        optimizer.step(**kwargs)
        return result

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Return the mean, sum, minimum or maximum of all workers' tensors; other values as they are.

        Raises:
            OffbeatError: another operation, or tensors of other shapes.
        """
        return self.all_reduce(tensor, group, reduce_op)


class OffbeatFabricStrategy(_Workers, FabricParallelStrategy, _BackwardSyncControl):  # type: ignore[misc]  # see above
    """A strategy of Fabric whose workers synchronize by a strategy of offbeat; see `OffbeatStrategy`.

    The session begins with `fabric.setup(model, optimizer)`, after a checkpoint has been loaded, and ends
    with a `with` block, as every session:

        model, optimizer = fabric.setup(model, optimizer)
        with fabric.strategy.session:
            for inputs, targets in fabric.setup_dataloaders(loader):

    Args:
        synchronization, options: see `OffbeatStrategy`.

    Attributes:
        session: the last one that `fabric.setup` has begun, None before.
    """

    _launcher_class = _SubprocessScriptLauncher

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to this worker's device."""
        module.to(self.root_device)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Join the job with a model and its optimizers.

        Raises:
            OffbeatError: the model or the optimizers cannot be used.
            WorkerError: the job did not start, or is running: it takes no newcomers.
        """
        if self.session is not None and not self.session.has_left:
            raise OffbeatError(
                "fabric.setup was called twice, and a session has one model: set up a module that holds the "
                "others, with all optimizers"
            )
        self.session = join(module, optimizers, self._synchronization)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer without its model.

        Raises:
            OffbeatError: always.
        """
        raise OffbeatError("expected fabric.setup(model, optimizer): the session begins with both together")

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Context in which backward passes only accumulate gradients, if enabled."""
        assert self.session is not None
        with self.session.no_sync() if enabled else nullcontext():
            yield

    def save_checkpoint(self, path: Any, state: dict[str, Any], *arguments: Any, **options: Any) -> None:
        """Save on the leader; all workers call this, for the one of the last call may have been lost."""
        if self.session is not None and not self.session.has_left:
            self.session.refresh()
        self.barrier()
        super().save_checkpoint(path, state, *arguments, **options)

    def load_checkpoint(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Load what all workers have saved.

        Raises:
            OffbeatError: within a session on servers, which hold the parameters.
        """
        is_in_session = self.session is not None and not self.session.has_left
        if is_in_session and isinstance(self._synchronization, ServerStrategy):
            raise OffbeatError("servers hold the parameters: load the checkpoint before fabric.setup")
        state: dict[str, Any] = super().load_checkpoint(*arguments, **options)
        return state


class _StepModule(nn.Module):
    """Calls the Lightning module; Lightning has `training_step` run in this module's forward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @property
    def training(self) -> bool:
        """Whether the Lightning module is in training mode: Lightning restores that mode alone."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing: `train` and `eval` set the mode of the Lightning module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _check_usable(strategy: Strategy) -> None:
    if isinstance(strategy, PartialAllReduce | DPAR):
        raise OffbeatError(
            f"{type(strategy).__name__} excludes slow workers, which then end an epoch at another step than "
            "the others, where Lightning waits for all: use Hybrid, SSP or LocalSGD with Lightning, or "
            "offbeat.join in a loop of your own"
        )
    if isinstance(strategy, AveragesModels) and not strategy.overlap:
        raise OffbeatError(
            f"{type(strategy).__name__}(overlap=False) waits for workers that may wait for this one at the "
            "end of an epoch: use it with overlap"
        )


def _set_rank(rank: int) -> None:
    rank_zero_only.rank = rank
