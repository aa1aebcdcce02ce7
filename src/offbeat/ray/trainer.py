"""The trainer, and the backend by which Ray's controller sets up the workers of a job."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.ray.actors import RESTARTED, CoordinatorActor
from offbeat.ray.reports import ReportLedger
from offbeat.ray.servers import NAMESPACE, ServerGroup, server_group_name
from offbeat.ray.workers import ANSWER_S, Job, enter_job, in_job, run_name_and_storage
from offbeat.runtime.control.service import ADDRESS_FILE
from offbeat.runtime.training.interface import Strategy

_STOP_S: Final = 10.0  # for the coordinator to end
_log = logging.getLogger("offbeat")


@dataclass
class OffbeatConfig(BackendConfig):  # type: ignore[misc]
    """Ray Train's configuration of offbeat as its backend.

    Args:
        strategy: how the workers synchronize; `offbeat.join` uses it where the loop gives none. If it
            survives the loss of workers, Ray replaces a worker alone, else it restarts all of them.
        coordinator_options: Ray's options of the coordinator's actor, such as
            `{"resources": {"on_demand": 0.01}}` for a node that stays. By default it is on the node of Ray's
            controller, without which the run ends in any case, and needs no CPU.
        servers: with how many parameter servers a job begins, each in an actor that Ray restarts;
            for strategies that have one; see `scale_servers`. With 0, workers start the server.
        server_options: Ray's options of the servers' actors; by default each takes one CPU.
    """

    strategy: Strategy
    coordinator_options: Mapping[str, Any] = field(default_factory=dict)
    servers: int = 0
    server_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[_Backend]:
        """The backend; with one of the two, Ray replaces workers one by one."""
        return _SurvivingBackend if self.strategy.survives_worker_loss else _Backend

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """Surrounds the user's loop in each worker."""
        return partial(in_job, self.strategy)

    def to_dict(self) -> dict[str, Any]:
        """Return what Ray shows of the configuration."""
        return {"strategy": str(self.strategy), "servers": self.servers}


class OffbeatTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a training loop in the workers of a Ray cluster, as `ray.train.torch.TorchTrainer` does.

    The loop calls `offbeat.join(model, optimizer)`, `ray.train.report` and `ray.train.get_checkpoint`; the
    model needs no `prepare_model`.

    Args:
        train_loop_per_worker: the loop, with or without an argument for `train_loop_config`.
        strategy: how the workers synchronize.
        train_loop_config: passed to the loop.
        coordinator_options, servers, server_options: see `OffbeatConfig`.
        scaling_config: how many workers there are, and what each needs.
        run_config: storage, checkpoints, and how many failures are survived
            (`FailureConfig(max_failures=-1)`: any number; Ray's default is none).
        datasets: Ray's data sets. A worker that replaces another gets the whole of each (Ray 2.60); where
            each sample is to be used once an epoch whatever happens, use `session.batches`.
        dataset_config: how Ray splits them.
        validation_config: how Ray validates checkpoints.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        strategy: Strategy,
        train_loop_config: dict[str, Any] | None = None,
        coordinator_options: Mapping[str, Any] | None = None,
        servers: int = 0,
        server_options: Mapping[str, Any] | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: Any = None,
        validation_config: Any = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=OffbeatConfig(strategy, coordinator_options or {}, servers, server_options or {}),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=None if datasets is None else dict(datasets),
            dataset_config=dataset_config,
            validation_config=validation_config,
        )
        if strategy.survives_worker_loss and not self.run_config.failure_config.max_failures:
            _log.warning(
                "Ray ends this run when the first worker dies, though its strategy survives that: set "
                "RunConfig(failure_config=FailureConfig(max_failures=-1)), or the number of deaths to survive"
            )


class _Backend(Backend):  # type: ignore[misc]
    """Starts and ends the coordinator of a group of workers, and says to them where it is."""

    def __init__(self) -> None:
        self._world = 0
        self._job: Job | None = None
        self._servers: Any = None

    def on_start(self, worker_group: Any, backend_config: OffbeatConfig) -> None:
        """Set up all workers, or one that replaces another."""
        if self._job is not None and self._is_one_worker(worker_group):
            worker_group.execute(enter_job, replace(self._job, is_replacement=True))
        else:
            self._world = len(worker_group)
            run, storage = worker_group.execute_single(0, run_name_and_storage)
            self._job = _begin_job(storage, backend_config)
            if backend_config.servers:
                named = {"name": server_group_name(run, self._job.name), "namespace": NAMESPACE}
                group = ray.remote(**named, **_controller_node_options())(ServerGroup)
                job = replace(self._job, coordinator=None, reports=None)  # Ray warns of handles in arguments
                self._servers = group.remote(job, backend_config.server_options)
                ray.get(self._servers.scale.remote(backend_config.servers))
            worker_group.execute(enter_job, self._job)

    def on_shutdown(self, worker_group: Any, backend_config: OffbeatConfig) -> None:
        """End the job with its last worker; note the loss of one."""
        if self._job is None:
            return
        if self._is_one_worker(worker_group):
            rank = worker_group.get_workers()[0].distributed_context.world_rank
            ray.get(self._job.reports.lose.remote(rank), timeout=ANSWER_S)
            return
        with suppress(RayError):
            ray.get(self._job.coordinator.stop.remote(), timeout=_STOP_S)
        for actor in (self._job.coordinator, self._job.reports, self._servers):
            if actor is not None:
                ray.kill(actor)
        self._job = self._servers = None

    def _is_one_worker(self, worker_group: Any) -> bool:
        """Whether a group is one worker of the job: Ray replaces all workers together if all have failed."""
        return len(worker_group) < self._world


class _SurvivingBackend(_Backend):
    """Has Ray replace a worker that dies, and no other one."""

    has_replica_groups = True


def _begin_job(storage: str | None, config: OffbeatConfig) -> Job:
    """Start the coordinator of another job, and what else belongs to the job and to no worker."""
    name, secret = secrets.token_hex(8), secrets.token_hex(32)
    folder = None if storage is None else os.path.join(storage, f"offbeat-{name}")
    options = {
        "num_cpus": 0,
        **RESTARTED,
        "scheduling_strategy": _on_this_node(is_soft=True),
        **config.coordinator_options,
    }
    coordinator = ray.remote(**options)(CoordinatorActor).remote(folder, name, secret)
    reports = None
    if config.strategy.survives_worker_loss:
        reports = ray.remote(**_controller_node_options())(ReportLedger).remote()
    return Job(
        name=name,
        secret=secret,
        address=ray.get(coordinator.address.remote()),
        address_file=None if folder is None else os.path.join(folder, ADDRESS_FILE),
        coordinator=coordinator,
        reports=reports,
        servers=config.servers,
    )


def _controller_node_options() -> dict[str, Any]:
    """Return the options of an actor that ends with the node of Ray's controller, as the run does."""
    return {"num_cpus": 0, "scheduling_strategy": _on_this_node(is_soft=False)}


def _on_this_node(*, is_soft: bool) -> Any:
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=is_soft)
