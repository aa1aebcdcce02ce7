"""A training that Ray Train runs: it counts samples, reports checkpoints and stands still at a gate.

python -m support.ray_training SETTINGS.json, a file with what a test asks of the run:
    folder: for what the workers write, and for Ray's storage.
    address: of the cluster.
    env: for all processes of the run.
    workers: their number, or the fewest and the most (3).
    strategy: "partial" (the default) or "bsp".
    coordinator_options: of the coordinator's actor.
    servers, server_options: parameter servers; then the strategy is "ssp" or "ssp without replicas".
    storage: "subtree" for a file system of pyarrow's that offbeat does not take for a local one.
    monitor_s: how often Ray looks for nodes to be used, in seconds (60).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from torch.utils.data import TensorDataset

import offbeat
import offbeat.ray
from offbeat.strategies import SSP, AllReduce
from support.group_training import compute, digest
from support.newcomer_training import EPOCHS, GATE_STEP, STEADY, Adding, Counting, pass_gate
from support.sample_counting import BATCH, SAMPLES, once_each
from support.server_training import GATES, uses

FIRST_GATE = "OFFBEAT_TEST_FIRST_GATE"  # before the job begins
SECOND_GATE, SECOND_GATE_STEP = "OFFBEAT_TEST_SECOND_GATE", 12  # a step of the second epoch or a later one
STRATEGIES = {
    "partial": STEADY,
    "bsp": AllReduce(),
    "ssp": SSP(s=2),
    "ssp without replicas": SSP(s=2, replicas=0),
}


def train(settings):
    """A loop as its user would write it."""
    folder = Path(settings["folder"])
    context = ray.train.get_context()
    model = Counting()
    optimizer = Adding(model.parameters())
    dataset = TensorDataset(torch.arange(SAMPLES))
    first, has_passed = None, False
    with offbeat.join(model, optimizer) as session:
        place = {
            "rank": context.get_world_rank(),
            "worker": session.worker,
            "job": os.environ["OFFBEAT_JOB"],
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        }
        write(folder / f"started-{place['job']}-{session.worker}.json", place)
        saved = ray.train.get_checkpoint()
        if saved is not None:
            with saved.as_directory() as path:
                session.load_state_dict(torch.load(Path(path) / "state.pt"))
        for epoch in session.epochs(EPOCHS):
            for (numbers,) in session.batches(dataset, BATCH):
                first = session.step if first is None else first
                if session.step >= GATE_STEP and not has_passed:
                    has_passed = True
                    pass_gate()
                optimizer.zero_grad()
                compute(0.01)
                (-model(numbers)).backward()
                once_each(model)
                optimizer.step()
            report(session, epoch)
    result = {"step": session.step, "first": first, "uses": model.uses_N.tolist()}
    write(
        folder / f"result-{place['job']}-{session.worker}.json",
        place | result | {"digest": digest(model, optimizer)},
    )


def train_on_servers(settings):
    """A loop on a parameter server, which notes the samples that it uses."""
    job, rank = os.environ["OFFBEAT_JOB"], ray.train.get_context().get_world_rank()
    folder = Path(settings["folder"])
    write(folder / f"started-{job}-{rank}.json", {"job": job, "worker": rank})
    pass_gate(FIRST_GATE)
    gates = GATES | {SECOND_GATE_STEP: SECOND_GATE}
    used, last = uses(rank, lambda *_: None, None, EPOCHS, gates=gates)
    result = {"job": job, "worker": rank, "used": used, "last": last}
    write(folder / f"result-{job}-{rank}.json", result)


def report(session, epoch):
    with tempfile.TemporaryDirectory() as path:
        checkpoint = None
        if session.is_leader:
            torch.save(session.state_dict(), Path(path) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(path)
        ray.train.report({"epoch": epoch, "step": session.step}, checkpoint=checkpoint)


def write(path, value):
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def storage(settings):
    if settings.get("storage") == "subtree":
        return {
            "storage_path": "storage",
            "storage_filesystem": SubTreeFileSystem(settings["folder"], LocalFileSystem()),
        }
    return {"storage_path": settings["folder"]}


def main():
    settings = json.loads(Path(sys.argv[1]).read_text())
    ray.init(settings["address"], runtime_env={"env_vars": settings["env"]})
    workers = settings.get("workers", 3)
    trainer = offbeat.ray.OffbeatTrainer(
        train_on_servers if settings.get("servers") else train,
        strategy=STRATEGIES[settings.get("strategy", "partial")],
        train_loop_config=settings,
        coordinator_options=settings.get("coordinator_options"),
        servers=settings.get("servers", 0),
        server_options=settings.get("server_options"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=tuple(workers) if isinstance(workers, list) else workers,
            elastic_resize_monitor_interval_s=settings.get("monitor_s", 60.0),
        ),
        run_config=ray.train.RunConfig(
            name="run",
            **storage(settings),
            failure_config=ray.train.FailureConfig(max_failures=-1),
        ),
    )
    result = trainer.fit()
    checkpoint = None if result.checkpoint is None else result.checkpoint.path
    write(Path(settings["folder"]) / "fit.json", {"metrics": result.metrics, "checkpoint": checkpoint})


if __name__ == "__main__":
    main()
