"""`OffbeatTrainer`: Ray Train places and replaces the workers of a job, and the others go on.

    trainer = offbeat.ray.OffbeatTrainer(
        train_loop_per_worker,
        strategy=PartialAllReduce(),
        scaling_config=ray.train.ScalingConfig(num_workers=4),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=-1)),
    )
    trainer.fit()

Theory of operation
-------------------

1. Ray's controller starts a group of workers, each an actor in a bundle of one placement group, and has the
   backend set them up. That starts the job's coordinator in an actor of its own, and sets in each worker what
   `offbeat.join` reads: RANK, WORLD_SIZE, the coordinator's address, the job's name and secret.
2. A worker that dies is replaced alone (`has_replica_groups`): Ray starts another actor in the same bundle.
   If the node is gone, Ray moves the bundle to another one, and waits for one if there is none. The new
   process has the same rank, and joins the running job as a newcomer. The others train on.
3. The coordinator's actor runs `offbeat coordinator` as a process that ends with it. Ray restarts the actor,
   on another node if need be, and the coordinator continues from its folder in the run's storage. Workers
   find it by the file with its address in that folder, which they read at every connection: so nothing has to
   pass a new address on to all of them. A process that does not see the folder (storage in a cloud, or not
   shared) gets the address itself. That is still right after a restart of the actor on its node, where the
   coordinator listens at the port it had before. But the job ends with the coordinator's node, and Ray
   restarts it from the last checkpoint.
4. When Ray starts the whole group again (all workers have failed, or their number changes), that is another
   job with a coordinator and a folder of its own, which begins from the last checkpoint.
5. Parameter servers, if there are any, are started by a `ServerGroup`, an actor that is found by the run's
   name: so any process of the cluster can change their number. It is on the controller's node. The servers
   end with it; then workers lose the parameters, and Ray starts all again from the last checkpoint.
6. Ray's `report` waits until all workers have called it. Here one worker may be a step ahead at an epoch's
   end, and a newcomer needs the state of others: a wait in `report` would keep those from it. So a worker
   asks a `ReportLedger` instead, which does not wait: it says whether all workers make this report or all
   skip it, as Ray has those skip it that wait while it replaces a worker.

This package never moves a tensor, and decides nothing about the training.
"""

from __future__ import annotations

try:
    import ray.train.v2  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"offbeat.ray needs Ray Train 2.60 or newer, an extra: pip install offbeat[ray] ({error})"
    ) from error

from offbeat.ray.servers import scale_servers
from offbeat.ray.trainer import OffbeatConfig, OffbeatTrainer

__all__ = ["OffbeatConfig", "OffbeatTrainer", "scale_servers"]
