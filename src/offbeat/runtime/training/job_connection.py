"""A worker's connection to its job: joins it, sends events, and leaves it.

Nothing here touches a tensor, or decides when a worker leaves.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from offbeat.errors import WorkerError
from offbeat.events import Event, StepTimes
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.control.configuration import CoordinatorConfiguration, PolicySpec
from offbeat.runtime.control.environment import Environment
from offbeat.runtime.control.rendezvous import RendezvousInfo, rendezvous
from offbeat.runtime.training.checks import describe_training
from offbeat.runtime.training.interface import Strategy
from offbeat.runtime.training.step_times import StepTimesBuffer
from offbeat.runtime.training.tracing import Tracer
from offbeat.runtime.training.trained import TrainingState

_log = logging.getLogger("offbeat")
_SILENT_S = 10.0
_SILENT_RETURNING_S = 300.0
_STAY_S = 10.0  # longest wait for other workers to finish where none of them needs this one
_COUNT_EVERY_S = 0.005
_VALIDATION = PolicySpec(path="offbeat.policies.validation.shared_schedule:SharedValidation")
_GATHERING = "offbeat.policies.membership.value_gathering:ValueGathering"
_PREEMPTION = PolicySpec(path="offbeat.policies.membership.preemption:PreemptionBroadcast")


class JobConnection:
    """Connects a worker to its job, with or without a coordinator.

    A job of one worker has none, unless it writes a run log or its strategy needs one: then events are
    dropped, and there is no failure to raise and nothing to wait for.

    Args:
        environment: of this worker.
        strategy: of the job.

    Attributes:
        worker, world: this worker's id and the number of workers at the job's start; a newcomer learns them
            in `join`.
        is_newcomer: this worker joins a running job; known after `join`.
        rendezvous: how this worker has found its coordinator, None if it has not.
        coordinator: the client of the coordinator; None without one, and before `join`.
    """

    def __init__(self, environment: Environment, strategy: Strategy) -> None:
        self.worker, self.world = environment.rank, environment.world
        self.is_newcomer = environment.is_newcomer
        self.rendezvous: RendezvousInfo | None = None
        self.coordinator: CoordinatorClient | None = None
        self._environment, self._strategy = environment, strategy
        self._times = StepTimesBuffer()

    def join(
        self,
        trained: TrainingState,
        on_failure: Callable[[WorkerError], None],
        steps_finished: Callable[[], int],
    ) -> None:
        """Join the job and wait until all workers have joined; rank 0 starts the coordinator first.

        Args:
            trained: what this worker trains; the same on every worker.
            on_failure, steps_finished: see `CoordinatorClient`.

        Raises:
            WorkerError: the job did not start; names the workers that are missing or what does not match.
        """
        environment, strategy = self._environment, self._strategy
        is_alone = not environment.is_newcomer and environment.coordinator is None
        needs_coordinator = not is_alone or strategy.always_needs_coordinator
        if self.world == 1 and environment.run_log is None and not needs_coordinator:
            return
        silent_s = _SILENT_RETURNING_S if strategy.readmits_workers else _SILENT_S
        model = type(trained.model).__name__
        configure = partial(_coordinator_configuration, environment, strategy, model, silent_s)
        self.rendezvous = found = rendezvous(environment, configure)
        self.worker, self.world, self.is_newcomer = found.worker, found.world, found.is_newcomer
        try:
            self.coordinator = CoordinatorClient(
                found,
                self.worker,
                strategy.make_worker_protocol(self.worker),
                on_failure,
                steps_finished=steps_finished,
                survives_worker_loss=strategy.survives_worker_loss,
                silent_s=silent_s,
            )
        except BaseException as error:
            found.publish_failure(error)
            raise
        self.coordinator.join(
            world=self.world,
            location=f"{socket.gethostname()}, process {os.getpid()}",
            model=describe_training(trained),
            strategy=str(strategy),
        )
        if self.worker == 0:
            found.publish_coordinator()
            if environment.ends_together and strategy.survives_worker_loss:
                _log.warning(
                    f"{type(strategy).__name__} goes on without dead workers, but torchrun ends all workers "
                    "of a host when one dies: start the script with 'offbeat run' instead"
                )

    def send_event(self, event: Event) -> None:
        """Send an event to the coordinator, after the times of earlier steps where these are due."""
        if self.coordinator is not None:
            self.coordinator.send_event(*self._times.pop_due(event, self.worker), event)

    def queue_times(self, times: StepTimes) -> None:
        """Send the times of a step with a later event."""
        if self.coordinator is not None:
            self._times.add(times)

    def raise_if_failed(self) -> None:
        """Raise the job's failure, if there is one."""
        if self.coordinator is not None:
            self.coordinator.raise_if_failed()

    def pause(self, duration_s: float) -> None:
        """Wait for `duration_s` seconds, or until the job fails.

        Raises:
            WorkerError: the job failed.
        """
        if self.coordinator is not None:
            self.coordinator.pause(duration_s)
        else:
            time.sleep(duration_s)

    def record_bytes_sent(self, tracer: Tracer) -> None:
        """Record in the trace, as long as it is on, how many bytes this worker has sent."""
        if self.coordinator is None:
            return
        endpoint = self.coordinator.endpoint

        def record() -> None:
            tracer.record_bytes_sent(endpoint.bytes_sent)
            if tracer.is_on:
                endpoint.call_later(_COUNT_EVERY_S, record)

        endpoint.call_soon(record)

    @property
    def is_alone(self) -> bool:
        """Whether no other worker takes part in the job, or can join it later."""
        is_service = self.rendezvous is not None and self.rendezvous.is_service
        may_grow = is_service and self._strategy.survives_worker_loss
        return self.world == 1 and not (may_grow or self._strategy.always_needs_coordinator)

    @property
    def is_complete(self) -> bool:
        """Whether all workers have finished."""
        return self.coordinator is not None and self.coordinator.is_job_complete

    def wait_until_complete(self) -> None:
        """Wait until all workers have finished.

        Where the loss of a worker ends the job, none needs this one any more; the wait is short then, for a
        worker that had fewer batches than others to learn of it.

        Raises:
            WorkerError: the job failed, or the wait took too long.
        """
        assert self.coordinator is not None
        what = "all workers to finish"
        if self._strategy.survives_worker_loss:
            self.coordinator.wait_for(lambda: self.is_complete, self._strategy.timeout_s, what)
            return
        limit_s = time.monotonic() + _STAY_S
        self.coordinator.wait_for(lambda: self.is_complete or time.monotonic() >= limit_s, 2 * _STAY_S, what)

    def send_end(self, error: BaseException | None) -> None:
        """Send that this worker has left, or the error with which it fails."""
        if self.coordinator is not None:
            self.coordinator.send_end(error, *self._times.pop_all(self.worker))

    def wait_for_late_workers(self) -> None:
        """Wait, where the job cannot start, until workers that come later can learn why."""
        if self.rendezvous is not None:
            self.rendezvous.wait_for_late_workers()

    def close(self) -> None:
        """Send what is queued, and close all connections."""
        if self.coordinator is not None:
            self.coordinator.close()


def _coordinator_configuration(
    environment: Environment,
    strategy: Strategy,
    model: str,
    silent_s: float,
    job: str,
    token: str,
    host: str,
) -> CoordinatorConfiguration:
    log = environment.run_log
    policies = strategy.policies(environment.world, environment.start_s, environment.servers)
    gathering = PolicySpec(path=_GATHERING, arguments={"timeout_s": strategy.timeout_s})
    return CoordinatorConfiguration(
        job=job,
        token=token,
        host=host,
        policies=(*policies, _VALIDATION, _PREEMPTION, gathering),
        log_path=None if log is None else os.path.abspath(log),
        log_bytes_max=environment.run_log_bytes_max,
        monitoring=environment.monitoring,
        log_header={
            "world": environment.world,
            "strategy": str(strategy),
            "model": model,
            "seed": environment.seed,
            "command": os.path.basename(sys.argv[0]),
        },
        silent_s=silent_s,
        linger_s=environment.start_s,
    )
