"""The batches of one worker, epoch by epoch, however its strategy shares samples out.

Nothing here decides which worker gets which samples.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.utils.data import Dataset

from offbeat.errors import OffbeatError
from offbeat.events import CheckpointQuery
from offbeat.runtime.data.assigned_batches import AssignedBatches
from offbeat.runtime.data.equal_shards import EqualShards, epoch_order, load_batches
from offbeat.runtime.data.pairing import RoundPairing
from offbeat.runtime.data.taken_ahead import TakenAhead
from offbeat.runtime.training.data_position import DataPosition, Ranges, outdated_state_error
from offbeat.runtime.training.interface import Synchronizer
from offbeat.runtime.training.job_connection import JobConnection
from offbeat.runtime.training.timing import PartTimer


class BatchSource:
    """Yields a worker's batches, and keeps the `DataPosition` at the last step that has ended.

    A batch counts as used from its backward pass on; one that is skipped is paired with the rounds of other
    workers as in `RoundPairing`.

    Args:
        job: this worker's job, joined before the first batch.
        synchronizer: says how samples are shared out, and is given each batch's weight.
        position: where training is in its data.
        timer: switched to "batch" while the loop waits for one, and then to "compute".
        end_step: ends the step before, if there is one.
        timeout_s: how long to wait for the coordinator, in seconds.

    Attributes:
        samples: number of samples yielded since the last step that has ended.
    """

    def __init__(
        self,
        job: JobConnection,
        synchronizer: Synchronizer,
        position: DataPosition,
        timer: PartTimer,
        *,
        end_step: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.samples = 0
        self._job, self._synchronizer, self._position = job, synchronizer, position
        self._timer, self._end_step, self._timeout_s = timer, end_step, timeout_s
        self._pairing = RoundPairing(synchronizer.agree_on_batch)
        self._is_iterating = self._is_in_epochs = False
        # What is left of the epoch, and whose iterators share it.
        self._rest: tuple[object, Generator[Any] | TakenAhead] | None = None
        self._last_epoch: int | None = None
        self._has_left_epoch_early = False  # the loop left the epoch before early

    @property
    def has_begun(self) -> bool:
        """Whether batches of the epoch have been taken."""
        return self._position.batches_in_epoch is not None

    @property
    def is_between_epochs(self) -> bool:
        """Whether the worker has ended an epoch and the loop has more.

        Where samples are assigned on demand, others may not have ended it, and need this worker's next batch.
        """
        position = self._position
        if self._last_epoch is None:  # then an epoch ends for all together
            return False
        if position.is_used_up:
            return position.epoch < self._last_epoch
        return not self.has_begun and 0 < position.epoch <= self._last_epoch

    @property
    def batch(self) -> int:
        """The batch of the epoch that training has reached, from 1."""
        return self._pairing.batch

    def epochs(self, count: int, should_stop: Callable[[], bool]) -> Iterator[int]:
        """Yield the epochs from the first unfinished one to `count` - 1, or until `should_stop`."""
        position = self._position
        self._last_epoch = count - 1
        while position.epoch < count and not should_stop():
            epoch, self._is_in_epochs = position.epoch, True
            try:
                yield epoch
            finally:
                self._is_in_epochs = False
            if position.epoch == epoch:
                self._finish_epoch()

    def _finish_epoch(self) -> None:
        self.drop_rest()
        self._position.finish_epoch()
        self._pairing.begin_epoch(0)

    def go_to_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun; see `SessionLoader.set_epoch`."""
        self.end_epoch_if_over()
        first = self._position.epoch + self._position.is_used_up
        if epoch < first:
            raise OffbeatError(
                f"expected an epoch from {first} on, got {epoch}, which is over: begin the loop at "
                "session.epoch"
            )
        while self._position.epoch < epoch:
            self._finish_epoch()

    def rest_of_epoch(self, owner: object, **arguments: Any) -> Generator[Any]:
        """Return the batches that are left of the epoch; of the next one where none is left.

        In a loop over `epochs`, which begins them, there is an error in place of the next one.

        Args:
            owner: of the iterators that share them.
            arguments: of `batches`.
        """
        if self._rest is not None and self._rest[0] is owner:
            assert isinstance(self._rest[1], Generator)
            return self._rest[1]
        self._begin_next_if_used_up()
        rest = self.batches(**arguments)
        self._rest = owner, rest
        return rest

    def rest_taken_ahead(self, owner: object, **arguments: Any) -> TakenAhead:
        """Return what `rest_of_epoch` does, for a program that takes batches ahead.

        Raises:
            OffbeatError: samples are assigned on demand.
        """
        if self._synchronizer.assigns_samples:
            raise OffbeatError(
                "this program takes batches before it uses the ones before them, which is not possible where "
                'samples are assigned on demand: give the strategy shards="equal"'
            )
        self.end_epoch_if_over()
        if self._rest is not None and self._rest[0] is owner:
            assert isinstance(self._rest[1], TakenAhead)
            self._rest[1].restart()
            return self._rest[1]
        if self._rest is not None:
            raise _iterated_already_error()
        self._begin_next_if_used_up()
        source = self._begin_epoch(**arguments)
        rest = TakenAhead(
            source,
            lambda line: self._iterate(line, arguments["batch_size"]),
            lambda: self._is_last_used,
        )
        self._rest = owner, rest
        return rest

    def _begin_next_if_used_up(self) -> None:
        if self._position.is_used_up and not self._is_in_epochs:
            self._finish_epoch()

    def end_epoch_if_over(self) -> None:
        """End the epoch if its batches were taken ahead, and the last of them is used."""
        if self._rest is not None and isinstance(self._rest[1], TakenAhead) and self._rest[1].end_if_over():
            self._rest = None

    def forget_rest(self, rest: Iterator[Any]) -> None:
        """Forget a `rest_of_epoch` that has ended."""
        if self._rest is not None and self._rest[1] is rest:
            self._rest = None

    def drop_rest(self) -> None:
        """Drop what is left of the epoch, if iterators share it and have begun it."""
        self.end_epoch_if_over()
        if self._rest is not None:
            rest, self._rest = self._rest[1], None
            rest.close()

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        loader_options: dict[str, Any],
    ) -> Generator[Any]:
        """See `Session.batches`."""
        source = self._begin_epoch(
            dataset, batch_size, shuffle=shuffle, drop_last=drop_last, loader_options=loader_options
        )
        yield from self._iterate(source, batch_size)

    def _begin_epoch(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        loader_options: dict[str, Any],
    ) -> Iterator[tuple[Any, int]]:
        """Return the batches that are left of the epoch, with their sizes."""
        position = self._position
        if not hasattr(dataset, "__len__"):
            raise OffbeatError(
                "session.batches needs a data set with a length; for an iterable one use your own loader, "
                "with the same number of batches on every worker"
            )
        if self._is_iterating:
            raise _iterated_already_error()
        if position.is_used_up:
            raise OffbeatError(
                f"the samples of epoch {position.epoch} are used up: begin the next epoch with session.epochs"
            )
        shards = EqualShards(
            samples=len(dataset),
            workers=self._job.world,
            batch_size=batch_size,
            seed=position.seed,
            epoch=position.epoch,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        position.begin_batches(self._job.worker, shards.steps, shards.samples, batch_size, drop_last)
        if self._synchronizer.assigns_samples:
            return self._assigned_batches(dataset, shards, loader_options)
        return self._equal_batches(dataset, shards, loader_options)

    def _iterate(self, source: Iterator[tuple[Any, int]], batch_size: int) -> Generator[Any]:
        """Yield the batches of the epoch, each with its weight; a batch's own time ends with the next one."""
        position = self._position
        self._is_iterating = True
        try:
            self._begin_batch()
            for batch, samples in self._pairing.iterate(source):
                self._job.raise_if_failed()
                before = self.samples
                self.samples += samples
                self._synchronizer.set_batch_weight(samples / batch_size)
                self._timer.switch("compute")
                yield batch
                self._begin_batch()
                if not self._is_last_used:
                    self.samples = before
            self._job.raise_if_failed()
            self._synchronizer.end_epoch()
            position.is_used_up = True
        finally:
            self._is_iterating = False
            self._synchronizer.set_batch_weight(1.0)
            self._timer.switch("other")
            if not position.is_used_up:
                self._drop_rest_of_epoch()

    @property
    def _is_last_used(self) -> bool:
        """Whether the current batch has had a backward pass.

        Where each worker counts its own steps, a pass ends with its step: then the batch is taken to be used.
        """
        return self._pairing.is_batch_used or self._synchronizer.step is None

    def _begin_batch(self) -> None:
        self._end_step()
        self._timer.switch("batch")

    def _equal_batches(
        self, dataset: Dataset[Any], shards: EqualShards, loader_options: dict[str, Any]
    ) -> Iterator[tuple[Any, int]]:
        """Yield the batches of this worker's equal shard, with their sizes."""
        worker, coordinator = self._job.worker, self._job.coordinator
        indices = shards.batches(worker)[self._pairing.batches_taken :]
        seed = (self._position.seed, self._position.epoch, worker)
        loaded = load_batches(dataset, indices, seed=seed, loader_options=loader_options)
        for batch in indices:
            if coordinator is not None and coordinator.epochs_ended > self._position.epoch:
                break
            yield next(loaded), len(batch)

    def _assigned_batches(
        self, dataset: Dataset[Any], shards: EqualShards, loader_options: dict[str, Any]
    ) -> Iterator[tuple[Any, int]]:
        """Yield the batches assigned to this worker, with their sizes."""
        assert self._job.coordinator is not None
        position, synchronizer = self._position, self._synchronizer
        assigned = AssignedBatches(
            self._job.coordinator,
            lambda epoch: epoch_order(
                shards.samples, seed=position.seed, epoch=epoch, shuffle=shards.shuffle
            ),
            dataset,
            shards.batch_size,
            drop_last=shards.drop_last,
            epoch=position.epoch,
            loader_options=loader_options,
            seed=(position.seed, position.epoch, self._job.worker),
            is_last=self._last_epoch is None or position.epoch >= self._last_epoch,
            has_left_epoch_early=self._has_left_epoch_early,
            consumed=position.consumed.get(position.epoch, ()),
            late_gradients=synchronizer.late_gradients,
            has_no_pending_gradient=lambda: synchronizer.has_no_pending_gradient,
            blocks_per_round=synchronizer.blocks_per_round,
            timeout_s=self._timeout_s,
        )
        self._has_left_epoch_early = False
        return iter(assigned)

    def _drop_rest_of_epoch(self) -> None:
        """Drop the rest of the epoch, which the loop has left early."""
        coordinator = self._job.coordinator
        if coordinator is None:
            return
        with coordinator.lock:
            if self._synchronizer.assigns_samples:
                self._has_left_epoch_early = True
                coordinator.protocol.block_queue.discard()
            self._synchronizer.on_epoch_left_early()

    # What becomes of a batch ----------------------------------------------------------------------------

    def on_forward(self) -> None:
        """Let the current batch stand in for a skipped one, with weight 0, if the next round is for that."""
        if self._is_iterating and self._pairing.try_stand_in():
            self.samples = 0
            self._synchronizer.set_batch_weight(0)

    def on_computed(self) -> None:
        """Mark the current batch as used.

        Raises:
            OffbeatError: batches were taken ahead, and none has begun.
        """
        rest = None if self._rest is None else self._rest[1]
        if isinstance(rest, TakenAhead) and not rest.has_begun:
            raise OffbeatError(
                "a backward pass ended before begin_batch was called: with takes_ahead=True call it for each "
                "batch, before its forward pass"
            )
        self._pairing.is_batch_used = True

    def on_step_end(self) -> None:
        """Count the batches up to the current one as used by the step that ends."""
        self._pairing.is_batch_used = True
        self._position.batches_used = self._pairing.batch
        self.samples = 0

    @property
    def step_in_epoch(self) -> int:
        """Steps of the epoch done; derived from the samples used where these are assigned on demand."""
        coordinator, batches = self._job.coordinator, self._position.batches_in_epoch
        if not self._synchronizer.assigns_samples or batches is None or coordinator is None:
            return max(0, self._pairing.batch - 1)
        return coordinator.protocol.block_queue.samples_used * batches // self._position.samples

    # Checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, as plain data; may wait for the coordinator to report it.

        Raises:
            OffbeatError: other workers have gone on without this one.
            WorkerError: the job failed.
        """
        assigned = self._query_consumed() if self._synchronizer.assigns_samples else None
        return self._position.state_dict(self._job.world, assigned)

    def _query_consumed(self) -> tuple[int, dict[int, Ranges]]:
        """Return the state's epoch, and the positions that it has consumed of that and later epochs."""
        client, round_ = self._job.coordinator, self._synchronizer.round
        assert client is not None
        if client.protocol.block_queue.epoch < 0:  # nothing since the start
            return self._position.epoch, self._position.consumed
        client.consumed_samples = None
        self._job.send_event(CheckpointQuery(now_s=0.0, worker=self._job.worker, round=round_))
        client.wait_for(
            lambda: client.consumed_samples is not None and client.consumed_samples.round == round_,
            self._timeout_s,
            "the coordinator to report which samples the state has consumed",
        )
        assert client.consumed_samples is not None
        if not client.consumed_samples.is_current:
            raise outdated_state_error(self._job.worker)
        return client.consumed_samples.epoch, dict(client.consumed_samples.consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in the data at which `state` was saved."""
        self.drop_rest()
        self._position.load_state_dict(state)
        self._pairing.begin_epoch(self._position.batches_used)


def _iterated_already_error() -> OffbeatError:
    return OffbeatError("session.batches is being iterated already: finish that one first")
