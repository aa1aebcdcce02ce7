"""The blocks that workers have contributed to rounds which are neither completed nor abandoned.

A part of `offbeat.policies.data.block_scheduler`.
"""

from __future__ import annotations

from typing import Any

from offbeat.errors import ProtocolError
from offbeat.events import Block
from offbeat.policies.data.open_epochs import blocks_from_plain, blocks_to_plain


class OpenRounds:
    """Holds each worker's contribution to each round; rounds are completed in order, each once."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[int, tuple[Block, ...]]] = {}
        self._last_completed = -1

    def numbers(self) -> tuple[int, ...]:
        """Return the rounds that have contributions, ascending."""
        return tuple(sorted(self._rounds))

    def contribution(self, worker: int, round_: int) -> tuple[Block, ...]:
        """Return what a worker has contributed to an open round."""
        return self._rounds[round_][worker]

    def blocks_from(self, round_: int) -> list[Block]:
        """Return what was contributed to this round and later ones."""
        return [
            block
            for other, contributions in self._rounds.items()
            if other >= round_
            for blocks in contributions.values()
            for block in blocks
        ]

    def check_contribution(self, worker: int, round_: int) -> None:
        """Check that a worker may contribute to a round.

        Raises:
            ProtocolError: a completed round, or one to which it has contributed.
        """
        if round_ <= self._last_completed:
            raise ProtocolError(
                f"expected a round after {self._last_completed}, which is completed, "
                f"got a contribution of worker {worker} to round {round_}"
            )
        if worker in self._rounds.get(round_, ()):
            raise ProtocolError(f"worker {worker} has contributed to round {round_} already")

    def add(self, worker: int, round_: int, blocks: tuple[Block, ...]) -> None:
        """Add a worker's contribution to a round."""
        self._rounds.setdefault(round_, {})[worker] = blocks

    def withdraw(self, worker: int, round_: int) -> tuple[Block, ...]:
        """Remove and return a worker's contribution to a round, if there is one."""
        return self._rounds.get(round_, {}).pop(worker, ())

    def complete(self, round_: int) -> list[Block]:
        """Close a round, and return what was contributed to it.

        Raises:
            ProtocolError: the round is completed already, or an earlier one is still open.
        """
        self._check_not_completed(round_)
        if self._rounds and min(self._rounds) < round_:
            raise ProtocolError(
                f"round {min(self._rounds)} is neither completed nor abandoned, got round {round_}"
            )
        self._last_completed = round_
        return [block for blocks in self._rounds.pop(round_, {}).values() for block in blocks]

    def abandon(self, round_: int) -> list[tuple[int, tuple[Block, ...]]]:
        """Remove the contributions to a round, and return them, ascending by worker.

        Raises:
            ProtocolError: the round is completed.
        """
        self._check_not_completed(round_)
        return sorted(self._rounds.pop(round_, {}).items())

    def _check_not_completed(self, round_: int) -> None:
        if round_ <= self._last_completed:
            raise ProtocolError(
                f"expected a round after {self._last_completed}, which is completed, got round {round_}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "open": [
                [round_, [[worker, blocks_to_plain(blocks)] for worker, blocks in sorted(entries.items())]]
                for round_, entries in sorted(self._rounds.items())
            ],
            "last_completed": self._last_completed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._rounds = {
            round_: {worker: tuple(blocks_from_plain(blocks).values()) for worker, blocks in entries}
            for round_, entries in state["open"]
        }
        self._last_completed = state["last_completed"]
