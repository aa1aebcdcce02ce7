"""Pure decisions: who waits for whom, who averages with whom, who is slow.

A policy has one method, `handle(event) -> list[Action]`, and `state_dict` / `load_state_dict` of plain data;
its constructor arguments are its whole configuration. Nothing here reads a clock, draws from a global
generator, logs, or imports anything but the standard library and `offbeat.events`.
"""

from __future__ import annotations

from typing import Any, Protocol

from offbeat.events import Action, Event


class Policy(Protocol):
    """What the coordinator, the simulator and a replay drive alike."""

    def handle(self, event: Event) -> list[Action]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
