"""The event of a worker that joins a job of two."""

from offbeat.events import Joined


def joined(worker):
    return Joined(
        now_s=float(worker),
        worker=worker,
        world=2,
        peer=f"worker-{worker}",
        location="host",
        addresses=("a:1",),
        model_signature=("weight",),
        strategy="bsp",
    )
