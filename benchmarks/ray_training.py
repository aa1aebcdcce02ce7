"""The run of `python -m benchmarks ray-chaos`: a counting model that Ray Train trains.

`python -m benchmarks.ray_training SETTINGS`, one JSON object: `address` of the Ray cluster, `folder` for what
the workers write and for Ray's storage, `workers`, and `job`, the fields of `benchmarks.chaos.ChaosSettings`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train

import offbeat.ray
from benchmarks import chaos
from benchmarks.workers import read_settings
from offbeat.runtime.control import environment
from offbeat.runtime.session import Session
from offbeat.strategies import parse_strategy


def train(settings: dict[str, Any]) -> None:
    """Train as one worker; write where it runs when it has joined, and how often samples were used."""
    folder = Path(settings["folder"])

    def write_place(session: Session) -> None:
        place = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}
        _write(folder / f"place-{session.worker}.json", place)

    uses = chaos.train(chaos.ChaosSettings(**settings["job"]), write_place)
    _write(folder / f"uses-{os.getpid()}.json", uses)


def _write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def main() -> None:
    """Run the training until all workers have ended."""
    settings = read_settings(sys.argv)
    folder, job = settings["folder"], settings["job"]
    variables = {
        environment.RUN_LOG_VARIABLE: f"{folder}/log.jsonl",
        environment.SEED_VARIABLE: str(job["seed"]),
    }
    ray.init(settings["address"], runtime_env={"env_vars": variables})
    offbeat.ray.OffbeatTrainer(
        train,
        strategy=parse_strategy(job["strategy"]),
        train_loop_config=settings,
        scaling_config=ray.train.ScalingConfig(num_workers=settings["workers"]),
        run_config=ray.train.RunConfig(
            name="run", storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=-1)
        ),
    ).fit()


if __name__ == "__main__":
    main()
