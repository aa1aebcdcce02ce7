"""A small run log of two workers in lockstep."""

from offbeat.events import Group, Joined, Left, Ready
from offbeat.wire import log_file


def log_of(path, group):
    header = {
        "policies": [{"path": "offbeat.policies.membership.lockstep:Lockstep", "arguments": {"world": 1}}]
    }
    log = log_file.LogWriter(path, header)
    joined = Joined(
        now_s=0.0,
        worker=0,
        world=1,
        peer="a",
        location="here",
        addresses=(),
        model_signature=(),
        strategy="bsp",
    )
    log.add_event(joined)
    log.add_actions([group])
    log.add_event(
        Ready(
            now_s=1.0, worker=0, generation=0, epoch=0, step=0, round=0, compute_s=0.1, samples=1, blocks=()
        )
    )
    log.add_event(Left(now_s=2.0, worker=0, step=1))
    log.close()


def lockstep_group(**change):
    reason = "all 1 workers are here, and in lockstep all take part in every round"
    group = {"generation": 0, "step": 0, "exchange_id": 0, "members": (0,), "joining": (), "weights": (1.0,)}
    return Group(**group | {"reason": reason} | change)
