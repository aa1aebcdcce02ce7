"""A program that launchers start: it counts samples, saves checkpoints and stands still at a gate.

python -m support.launched_training FOLDER
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import offbeat
from offbeat.runtime.control.environment import RUN_LOG_VARIABLE, read_environment
from support.group_training import compute, digest
from support.newcomer_training import EPOCHS, GATE_STEP, STEADY, Adding, Counting, pass_gate
from support.sample_counting import BATCH, SAMPLES, once_each


def main():
    folder = Path(sys.argv[1])
    attempt, rank = read_environment().attempt, os.environ["RANK"]
    (folder / f"process-{attempt}-{rank}-{os.getpid()}").touch()
    if attempt and RUN_LOG_VARIABLE in os.environ:  # the log of the attempt before stays
        os.environ[RUN_LOG_VARIABLE] += f".{attempt}"
    checkpoint = folder / "checkpoint.pt"
    model = Counting()
    optimizer = Adding(model.parameters())
    dataset = TensorDataset(torch.arange(SAMPLES))
    first, has_passed = None, False
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"signalled-{rank}").touch())
    with offbeat.join(model, optimizer, STEADY) as session:
        if checkpoint.exists():
            session.load_state_dict(torch.load(checkpoint))
        for _ in session.epochs(EPOCHS):
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
                if session.preempted:
                    break
            if session.is_leader:
                torch.save(session.state_dict(), folder / "checkpoint.part")
                (folder / "checkpoint.part").replace(checkpoint)
        result = {
            "worker": session.worker,
            "node": os.environ.get("SLURMD_NODENAME"),
            "attempt": attempt,
            "preempted": session.preempted,
            "first": first,
            "step": session.step,
        }
    result |= {"uses": model.uses_N.tolist(), "digest": digest(model, optimizer)}
    name = f"result-{result['attempt']}-{result['worker']}.json"
    (folder / name).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
