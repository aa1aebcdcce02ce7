"""The batches of workers that take equal shards of the samples, as one process sees them."""

from collections.abc import Iterator

from offbeat.runtime.data.equal_shards import EqualShards


def batches_in_step(
    samples: int, workers: int, batch_size: int, epoch: int
) -> Iterator[tuple[list[int], ...]]:
    """The samples of all workers in each step of an epoch, with the default seed."""
    shards = EqualShards(
        samples=samples,
        workers=workers,
        batch_size=batch_size,
        seed=0,
        epoch=epoch,
        shuffle=True,
        drop_last=False,
    )
    return zip(*(shards.batches(worker) for worker in range(workers)), strict=True)
