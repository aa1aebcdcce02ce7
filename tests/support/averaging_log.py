"""A small run log of two workers that average their models once; one is lost before it has the mean."""

from pathlib import Path

from offbeat.events import Left, Lost, ModelsAveraged
from offbeat.policies.model_averaging.partial_reduce import PartialReduce
from offbeat.wire.log_file import LogWriter
from support.round_events import joined, ready


def averaging_log(path: Path) -> None:
    arguments = {"world": 2, "shards": "equal"}
    place = f"{PartialReduce.__module__}:{PartialReduce.__name__}"
    log = LogWriter(path, {"policies": [{"path": place, "arguments": arguments}]})
    policy = PartialReduce(**arguments)
    received = [_averaged(worker, exchange_id=0, model_steps=0) for worker in (0, 1)]
    steps = [ready(worker, 1, 0) for worker in (0, 1)]
    end = [
        _averaged(0, exchange_id=8, model_steps=1),
        Lost(now_s=2.0, worker=1, cause=""),
        Left(now_s=3.0, worker=0, step=1),
    ]
    for event in [joined(0), joined(1), *received, *steps, *end]:
        log.add_event(event)
        log.add_actions(policy.handle(event))
    log.close()


def _averaged(worker: int, *, exchange_id: int, model_steps: int) -> ModelsAveraged:
    return ModelsAveraged(
        now_s=0.0, worker=worker, exchange_id=exchange_id, model_steps=model_steps, has_mean=True
    )
