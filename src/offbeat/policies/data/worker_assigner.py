"""Assigns samples to workers without groups: the blocks of a finished step are used at once.

A component of a policy, which decides when a worker may compute; `offbeat.policies.data.block_scheduler` cuts
an epoch into blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, ClassVar, Final

from offbeat.errors import ProtocolError
from offbeat.events import Action, Block, SamplesRequested
from offbeat.policies.data.assigner import BlockAssigner
from offbeat.policies.data.open_epochs import blocks_from_plain

_RECENT: Final = 32  # clocks


class SoloBlockAssigner(BlockAssigner):
    """Assigns samples so that each is used once, while workers join and leave.

    A step is not repeated once its worker has reported it as finished, so its blocks count as used then. The
    blocks of a lost worker go to other workers. Without a group, no worker waits for another that has no
    samples; but a worker that waits for more within a step has to continue without
    (`AssignBlocks.is_awaited`), because other workers may wait for the blocks that it has taken. A worker
    that saves a checkpoint names the clock up to which its state holds all workers' steps
    (`CheckpointQuery.round`), and receives the samples used at these clocks.
    """

    _awaited_reason: ClassVar[str] = "other workers wait for what it has begun"

    def __init__(self) -> None:
        super().__init__(equal_counts=False)
        self._members: set[int] = set()
        self._waiting: set[int] = set()  # workers with nothing to compute whose epoch is not over
        self._is_settled = False  # nothing has changed since the last assignment
        self._asked: set[int] = set()  # those of them that have asked since the last assignment
        self._recent: list[tuple[int, Block, int]] = []  # clock, block used at it, positions of its epoch

    @property
    def waiting_workers(self) -> Set[int]:
        """The workers that wait for samples: a set that changes with them."""
        return self._waiting

    def has_work(self, worker: int) -> bool:
        """Whether the worker has samples, or has never requested any."""
        return worker not in self._epochs_of_workers or bool(self._scheduler.assigned_ids(worker))

    def blocking_workers(self) -> set[int]:
        """Return the workers with blocks of an epoch whose end a waiting worker needs."""
        latest = max((self._epochs_of_workers[worker][0] for worker in self._waiting), default=-1)
        epochs = [epoch for epoch in self._scheduler.epochs.numbers() if epoch <= latest]
        return {worker for epoch in epochs for worker in self._scheduler.holders(epoch)}

    def on_joined(self, worker: int) -> None:
        """Add a worker."""
        self._is_settled = False
        self._members.add(worker)
        self._scheduler.set_members(self._members)

    def on_samples_requested(self, event: SamplesRequested) -> None:
        """Process a worker's request for samples of an epoch.

        Raises:
            ProtocolError: an impossible epoch, size or block.
        """
        self._is_settled = False
        if self._begin_epoch(event):
            self._waiting.add(event.worker)
            self._asked.add(event.worker)

    def on_step(self, worker: int, clock: int, blocks: tuple[int, ...]) -> None:
        """Count the blocks of a step as used, which a worker has finished at a clock.

        Raises:
            ProtocolError: blocks that the worker does not have.
        """
        if not blocks:
            return
        self._is_settled = False
        used = self._scheduler.use(worker, blocks)
        if used is None:
            raise ProtocolError(
                f"expected blocks that the worker has, got {list(blocks)}, "
                f"which are not worker {worker}'s any more"
            )
        _, samples = self._epochs_of_workers[worker]
        self._recent += [(clock, block, samples) for block in used]

    def on_version(self, version: int) -> None:
        """Note that the parameters hold all steps at clocks before `version`.

        An idle worker may have fetched them up to 32 clocks earlier, and may query now which samples they
        hold.
        """
        # Some more are kept, so that the list is not copied at every version.
        if self._recent and self._recent[0][0] < version - _RECENT - _RECENT // 4:
            self._recent = [entry for entry in self._recent if entry[0] >= version - _RECENT]

    def on_finished(self, worker: int) -> None:
        """Retire a worker whose training loop has ended; its blocks go to other workers."""
        if worker in self._epochs_of_workers:
            self._scheduler.retire(worker)
        self._forget(worker)
        self._scheduler.set_members(self._members)

    def on_gone(self, worker: int) -> None:
        """Remove a worker that is gone; its blocks go to other workers."""
        self._forget(worker)
        if worker in self._scheduler:
            self._scheduler.remove_worker(worker)

    def _forget(self, worker: int) -> None:
        self._is_settled = False
        self._members.discard(worker)
        self._waiting.discard(worker)
        self._reset_workers.discard(worker)
        self._epochs_of_workers.pop(worker, None)
        self._checkpoint_queries.pop(worker, None)

    def pop_actions(self) -> list[Action]:
        """Return the actions to send now, ascending by worker."""
        if self._is_settled and not self._checkpoint_queries:
            return []
        self._is_settled = True
        assigned = {worker: (blocks, over) for worker, blocks, over in self._scheduler.assign()}
        awaited = self._end_waiting(assigned) if self._waiting or self._asked else set()
        actions: list[Action] = [
            self._assignment(worker, *assigned.get(worker, ((), False)), is_awaited=worker in awaited)
            for worker in sorted(assigned.keys() | awaited | self._reset_workers)
        ]
        self._reset_workers.clear()
        if self._checkpoint_queries:
            actions += self._checkpoint_answers()
        return actions

    def _end_waiting(self, assigned: Mapping[int, tuple[tuple[Block, ...], bool]]) -> set[int]:
        """Note which workers wait no longer; return those of them that continue without samples."""
        self._waiting -= {worker for worker, (blocks, over) in assigned.items() if blocks or over}
        asked = self._asked & self._waiting
        awaited = {worker for worker in asked if self._scheduler.started_count(worker)}
        self._waiting -= awaited
        self._asked.clear()
        return awaited

    def _checkpoint_answers(self) -> list[Action]:
        """Answer checkpoint queries with the samples used at the clocks that each checkpoint holds."""
        answers: list[Action] = []
        for worker, clock in sorted(self._checkpoint_queries.items()):
            later = [(block, samples) for block_clock, block, samples in self._recent if block_clock >= clock]
            answers.append(self._consumed_samples(worker, clock, self._scheduler.used_ranges(0, later)))
        self._checkpoint_queries.clear()
        return answers

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return {
            "scheduler": self._scheduler.state_dict(),
            "members": sorted(self._members),
            "epochs_of_workers": [[worker, *entry] for worker, entry in self._epochs_of_workers.items()],
            "waiting": sorted(self._waiting),
            # As `blocks_to_plain` would return them, without copies: these are a thousand for 32 workers.
            "recent": [
                (clock, ((block.id, block.epoch, block.ranges),), samples)
                for clock, block, samples in self._recent
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, which was taken with no action left to send."""
        self._scheduler.load_state_dict(state["scheduler"])
        self._members = set(state["members"])
        self._epochs_of_workers = {
            worker: (epoch, samples) for worker, epoch, samples in state["epochs_of_workers"]
        }
        self._waiting = set(state["waiting"])
        self._recent = [
            (clock, block, samples)
            for clock, plain, samples in state["recent"]
            for block in blocks_from_plain(plain).values()
        ]
        self._reset_workers, self._checkpoint_queries = set(), {}
        self._is_settled, self._asked = False, set(self._waiting)
