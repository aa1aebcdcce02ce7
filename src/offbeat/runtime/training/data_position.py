"""The position of a training in its data, which checkpoints and newcomers restore.

This module neither reads a data set nor takes a batch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from offbeat.errors import OffbeatError
from offbeat.policies.data.open_epochs import describe_batch_size
from offbeat.runtime.training.state_copy import TrainingPosition

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) of positions in the order of an epoch."""


class DataPosition:
    """The epoch under way, and what of it is used: the state of the last step that has ended.

    Data other than those of a loaded state, or of the job that a newcomer joins, are refused when the epoch's
    batches begin.

    Args:
        seed: of the order of the samples.

    Attributes:
        epoch: the epoch under way, from 0.
        seed: of the order of the samples.
        batches_used: number of batches of the epoch that training has used.
        batches_in_epoch: None until the epoch's batches begin.
        samples: number of samples in the data set, 0 until the first batches begin.
        is_used_up: no batch of the epoch is left.
        consumed: by epoch, the ranges of positions that a loaded state has consumed.
    """

    def __init__(self, seed: int) -> None:
        self.epoch, self.seed = 0, seed
        self.batches_used = 0
        self.batches_in_epoch: int | None = None
        self.samples = self._batch_size = 0
        self._drop_last = False
        self.is_used_up = False
        self.consumed: dict[int, Ranges] = {}
        self._samples_loaded = 0  # per epoch, in the loaded state
        self._joined_at: TrainingPosition | None = None  # of a newcomer, until its first epoch begins

    def begin_batches(
        self, worker: int, batches_in_epoch: int, samples: int, batch_size: int, drop_last: bool
    ) -> None:
        """Record the data of the epoch under way, before any are announced.

        Raises:
            OffbeatError: they differ from those of the state to continue from.
        """
        if self.consumed.get(self.epoch) and samples != self._samples_loaded:
            raise OffbeatError(
                f"the state was saved within an epoch of {self._samples_loaded} samples, and the "
                f"data set has {samples}: use the same data set, or a state from an epoch's end"
            )
        position, self._joined_at = self._joined_at, None
        if position is not None and position.samples and position.epoch == self.epoch:
            _check_same_data(position, worker, samples, batch_size, drop_last)
        self.batches_in_epoch, self.samples = batches_in_epoch, samples
        self._batch_size, self._drop_last = batch_size, drop_last

    def finish_epoch(self) -> None:
        """Go on to the next epoch."""
        self.epoch += 1
        self.batches_used = 0
        self.batches_in_epoch = None
        self.is_used_up = False

    @property
    def last_epoch_begun(self) -> int:
        """The epoch under way, or the one before if its batches have not begun."""
        return max(0, self.epoch - 1) if self.batches_in_epoch is None else self.epoch

    # Newcomers ------------------------------------------------------------------------------------------

    def training_position(self, round_: int) -> TrainingPosition:
        """Return this position, after `round_` rounds, to be copied to other workers."""
        return TrainingPosition(
            round=round_,
            epoch=self.epoch,
            seed=self.seed,
            samples=self.samples,
            batch_size=self._batch_size,
            drop_last=self._drop_last,
        )

    def restore(self, position: TrainingPosition) -> None:
        """Continue at the position of another worker."""
        self.epoch, self.seed = position.epoch, position.seed
        self._joined_at = position

    # Checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self, world: int, assigned: tuple[int, dict[int, Ranges]] | None) -> dict[str, Any]:
        """Return the position as plain data.

        Args:
            world: number of workers among which equal shards are split.
            assigned: where samples are assigned on demand, the epoch of the state, and by epoch the ranges of
                positions that it has consumed; None where they are split equally.
        """
        if assigned is not None:
            (epoch, consumed), taken = assigned, 0
        else:
            whole = self.is_used_up or self.batches_used == self.batches_in_epoch
            epoch, consumed, taken = self.epoch + whole, {}, 0 if whole else self.batches_used
        return {
            "epoch": epoch,
            "batches_taken": taken,
            "used": {str(epoch): list(map(list, ranges)) for epoch, ranges in consumed.items()},
            "samples": self.samples or self._samples_loaded,
            "seed": self.seed,
            "world": world,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; see `check_state`."""
        self.epoch, self.seed = state["epoch"], state["seed"]
        self.batches_used = state["batches_taken"]
        self.batches_in_epoch, self.is_used_up = None, False
        self.consumed = {
            int(epoch): tuple((start, stop) for start, stop in ranges)
            for epoch, ranges in state["used"].items()
        }
        self._samples_loaded = state["samples"]


def check_state(state: dict[str, Any], world: int, *, assigns_samples: bool) -> None:
    """Refuse the state of a `DataPosition` from which a job cannot continue.

    Args:
        state: as `DataPosition.state_dict` returned it.
        world: number of workers of the job.
        assigns_samples: the job assigns samples on demand; else it splits them equally.

    Raises:
        OffbeatError: it was saved within an epoch with another number of workers, or with samples assigned in
            another way.
    """
    if state["batches_taken"] and state["world"] != world:
        raise OffbeatError(
            f"the state was saved within an epoch with {state['world']} workers and there are "
            f"{world} now: use as many, or a state from an epoch's end"
        )
    if (state["batches_taken"] and assigns_samples) or (any(state["used"].values()) and not assigns_samples):
        how = "split equally" if assigns_samples else "assigned on demand"
        raise OffbeatError(
            f"the state was saved within an epoch whose samples were {how}: use a strategy "
            "that does the same, or a state from an epoch's end"
        )


def _check_same_data(
    position: TrainingPosition, worker: int, samples: int, batch_size: int, drop_last: bool
) -> None:
    if (samples, batch_size, drop_last) != (position.samples, position.batch_size, position.drop_last):
        job_batches = describe_batch_size(position.batch_size, position.drop_last)
        own_batches = describe_batch_size(batch_size, drop_last)
        raise OffbeatError(
            f"expected the data of the job that worker {worker} joins, {position.samples} samples in "
            f"batches of {job_batches}, got {samples} in batches of {own_batches}: start "
            "newcomers with the same data set, batch size and drop_last"
        )


def outdated_state_error(worker: int) -> OffbeatError:
    """Return the error for saving a state on a worker whose parameters are outdated."""
    return OffbeatError(
        f"worker {worker} is excluded from the group, and its parameters are outdated: save on the "
        "worker on which session.is_leader is true"
    )
