"""The servers of a parameter server, as the manager sees them: the ring in force, filling, the next ring.

Nothing here knows what is stored, how messages travel or how the loss of a server is detected. See
docs/decisions/0008-how-servers-replicate.md for the reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.events import LostArc
from offbeat.policies.ps.hash_ring import RING_SIZE, HashRing, NamespaceSpec
from offbeat.policies.ps.messages import (
    JoinAggregation,
    LeaveAggregation,
    PauseReached,
    PlacementView,
    RingArc,
    ServerFillDone,
)
from offbeat.policies.ps.participants import AggregationParticipants
from offbeat.policies.ps.range_clock import KEY_END


class ServerGroup:
    """Numbers the views of a ring whose servers join, leave and are lost.

    The first view has all servers of the start. A server that joins later, or asks to leave, is added or
    removed by preparing a ring: the servers that gain in it are filled, while every push goes to them too;
    then that ring comes into force. A loss changes the ring at once, and a ring in preparation is prepared
    again.

    When the last server that has all of a stretch of the ring is gone, the data of the stretch are lost. The
    keys of each namespace there are lost until a client opens it with `on_loss` "reset".

    Source: the parameter server of OSDI'14, section 4.5. Deviations: docs/decisions/0008.

    Args:
        servers: how many there are at the start, at least 1.
        virtual_nodes, replicas: of the ring.

    Attributes:
        view: the one in force, None before the first.
        data_losses: how many lost servers were the last ones to have some data.

    Raises:
        ValueError: no server, or arguments that `HashRing` rejects.
    """

    def __init__(self, servers: int, *, virtual_nodes: int = 16, replicas: int = 2) -> None:
        if servers < 1:
            raise ValueError(f"expected at least 1 server at the start, got {servers}")
        self._expected = servers
        self._virtual_nodes, self._replicas = virtual_nodes, replicas
        self._make_ring(())
        self.view: PlacementView | None = None
        self.data_losses = 0
        self._lost: list[LostArc] = []
        self._resets: set[str] = set()  # namespaces that restart from zero after losses
        self._silent: tuple[int, ...] = ()
        self._spaces: dict[str, NamespaceSpec] = {}
        self._alive: set[int] = set()
        self._gone: set[int] = set()
        self._leaving: set[int] = set()
        self._filled: set[int] = set()  # in the view in force
        self._participants = AggregationParticipants()

    @property
    def servers(self) -> Collection[int]:
        """All servers that have joined and have not left or been lost."""
        return self._alive

    def on_namespace_opened(self, space: NamespaceSpec, on_loss: str = "") -> PlacementView | None:
        """Open a namespace for a client; return the next view if it is new, or lost keys of it are reset.

        Args:
            space: its definition.
            on_loss: see `NamespaceRequested`.

        Raises:
            ProtocolError: the name belongs to another namespace, or the definition is invalid.
        """
        if on_loss not in ("", "error", "reset"):
            raise ProtocolError(f'expected on_loss to be "error" or "reset", got {on_loss!r}')
        known = self._spaces.get(space.name)
        if known is not None and known != space:
            raise ProtocolError(f"expected the namespace {space.name} as it was opened, {known}, got {space}")
        if space.keys >= KEY_END:
            raise ProtocolError(f"expected less than {KEY_END} keys, got {space}")
        if not 0 < space.block_keys <= space.keys:
            raise ProtocolError(f"expected blocks of 1 to {space.keys} keys, got {space}")
        is_reset = self._set_on_loss(space.name, on_loss)
        if known is not None and not is_reset:
            return None
        self._spaces[space.name] = space
        return self._next_epoch()

    def _set_on_loss(self, namespace: str, on_loss: str) -> bool:
        """Set what happens after losses; return whether lost keys of the namespace were reset."""
        if on_loss == "error":
            self._resets.discard(namespace)
        if on_loss != "reset":
            return False
        self._resets.add(namespace)
        before, self._lost = self._lost, [arc for arc in self._lost if arc.namespace != namespace]
        return before != self._lost

    def on_join_aggregation(self, message: JoinAggregation) -> PlacementView | None:
        """Let a client take part in a namespace that aggregates; return the next view, if there is one.

        Raises:
            ProtocolError: there is no such namespace, or it does not aggregate.
        """
        space = self._spaces.get(message.namespace)
        if space is None or not space.aggregates:
            raise ProtocolError(f"expected a namespace that aggregates, got {space or message.namespace}")
        number = None if self.view is None else self.view.version + 1
        is_new = self._participants.join(message.client, message.namespace, number)
        return self._next_epoch() if is_new else None

    def on_pause_reached(self, message: PauseReached) -> PlacementView | None:
        """Note that a participant has paused; return the next view, if all have."""
        is_over = self._participants.on_pause_reached(
            message.client, message.namespace, message.pause, message.time
        )
        return self._next_epoch() if is_over else None

    def on_leave_aggregation(self, message: LeaveAggregation) -> PlacementView | None:
        """Remove a client from a namespace's aggregation; return the next view, if there is one."""
        is_new = self._participants.leave(message.client, message.namespace)
        return self._next_epoch() if is_new else None

    def on_client_gone(self, client: int) -> PlacementView | None:
        """Remove a client that is lost or has left; return the next view, if there is one."""
        return self._next_epoch() if self._participants.on_client_lost(client) else None

    def on_joined(self, server: int) -> PlacementView | None:
        """Add a server; return the next view, if there is one.

        Raises:
            ProtocolError: a server with this id is or was there.
        """
        if server in self._alive or server in self._gone:
            raise ProtocolError(f"expected a new server, got server {server}, whose id was used before")
        self._alive.add(server)
        if self.view is None:
            if len(self._alive) < self._expected:
                return None
            return self._next_view(epoch=0, ring=self._make_ring(self._alive))
        return self._prepare(self.view)

    def on_leaving(self, server: int) -> PlacementView | None:
        """Let a server leave; return the next view. The server may end once a view does not contain it."""
        if server not in self._alive or self.view is None:
            return None
        self._leaving.add(server)
        return self._prepare(self.view)

    def on_lost(self, server: int) -> PlacementView | None:
        """Remove a lost server; return the next view, if that changes anything."""
        if server not in self._alive:
            return None
        self._alive.discard(server)
        self._leaving.discard(server)
        self._gone.add(server)
        view = self.view
        if view is None:
            return None
        if server not in view.ring.servers:
            return self._prepare(view)
        ring = view.ring.without_server(server)
        emptied = self._lose(view, server)
        filling = self._filling_after(view, ring)
        return self._next_view(
            epoch=view.version + 1, ring=ring, filling=filling, target=self._target(ring), emptied=emptied
        )

    def has_other_replicas(self, server: int, silent: Collection[int] = ()) -> bool:
        """Whether another server, and one that is not silent, has all that a server has."""
        view = self.view
        if view is None:
            return True
        return all(
            server not in holders or any(one != server and one not in silent for one in holders)
            for _, _, holders in self._stretches(view)
        )

    def set_silent(self, servers: Iterable[int]) -> None:
        """Set the silent servers that the manager waits for in the view, which keeps its number."""
        self._silent = tuple(sorted(servers))
        if self.view is not None:
            self.view = replace(self.view, silent_servers=self._silent)

    def on_filled(self, message: ServerFillDone) -> PlacementView | None:
        """Note that a server has been filled; ignore reports about older views."""
        view = self.view
        if view is None or message.view != view.version or message.server not in self._alive:
            return None
        self._filled.add(message.server)
        gaining = set(view.filling)
        if view.target is not None:
            gaining.update(
                one for move in view.ring.moves(view.target) for one in move.after if one not in move.before
            )
        if not gaining <= self._filled:
            return None
        return self._after_filling(view)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state but the constructor's arguments, as plain data."""
        view = self.view
        return {
            "view": None
            if view is None
            else {
                "number": view.version,
                "epoch": view.epoch,
                "servers": list(view.ring.servers),
                "filling": [[one, [[a.first, a.last] for a in arcs]] for one, arcs in view.filling.items()],
                "target": None if view.target is None else list(view.target.servers),
                "emptied": [[arc.first, arc.last] for arc in view.lost_arcs_dropped],
            },
            "data_losses": self.data_losses,
            "lost": [[arc.loss, arc.namespace, arc.start, arc.stop, arc.server] for arc in self._lost],
            "resets": sorted(self._resets),
            "silent": list(self._silent),
            "spaces": [list(space) for space in self._spaces.values()],
            "alive": sorted(self._alive),
            "gone": sorted(self._gone),
            "leaving": sorted(self._leaving),
            "filled": sorted(self._filled),
            "participants": self._participants.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a group with the same arguments."""
        view = state["view"]
        self._spaces = {space[0]: NamespaceSpec(*space) for space in state["spaces"]}
        self._participants.load_state_dict(state["participants"])
        self.data_losses, self._silent = state["data_losses"], tuple(state["silent"])
        self._lost = [
            LostArc(loss=number, namespace=namespace, start=first, stop=last, server=server)
            for number, namespace, first, last, server in state["lost"]
        ]
        self._resets = set(state["resets"])
        self.view = None
        if view is not None:
            self.view = PlacementView(
                version=view["number"],
                epoch=view["epoch"],
                ring=self._make_ring(view["servers"]),
                spaces=dict(self._spaces),
                filling={
                    one: tuple(RingArc(first=first, last=last) for first, last in arcs)
                    for one, arcs in view["filling"]
                },
                target=None if view["target"] is None else self._make_ring(view["target"]),
                lost_arcs_dropped=tuple(RingArc(first=first, last=last) for first, last in view["emptied"]),
                **self._common_fields(),
            )
        self._alive, self._gone = set(state["alive"]), set(state["gone"])
        self._leaving, self._filled = set(state["leaving"]), set(state["filled"])

    # Internal --------------------------------------------------------------------------------------------

    def _next_epoch(self) -> PlacementView | None:
        """Return the next view for a change other than of servers, in a new epoch."""
        view = self.view
        if view is None:
            return None
        return self._next_view(
            epoch=view.version + 1, ring=view.ring, filling=view.filling, target=view.target
        )

    def _common_fields(self) -> dict[str, Any]:
        begins = {name: dict(times) for name, times in self._participants.first_times.items() if times}
        return {
            "participants": begins,
            "paused": dict(self._participants.pauses),
            "lost": tuple(self._lost),
            "silent_servers": tuple(one for one in self._silent if one in self._alive),
        }

    def _next_view(
        self,
        *,
        epoch: int,
        ring: HashRing,
        filling: dict[int, tuple[RingArc, ...]] | None = None,
        target: HashRing | None = None,
        emptied: tuple[RingArc, ...] = (),
    ) -> PlacementView:
        number = 0 if self.view is None else self.view.version + 1
        self.view = PlacementView(
            version=number,
            epoch=epoch,
            ring=ring,
            spaces=dict(self._spaces),
            filling=filling or {},
            target=target,
            lost_arcs_dropped=emptied,
            **self._common_fields(),
        )
        self._filled.clear()
        return self.view

    def _make_ring(self, servers: Iterable[int]) -> HashRing:
        return HashRing(servers, virtual_nodes=self._virtual_nodes, replicas=self._replicas)

    def _target(self, ring: HashRing) -> HashRing | None:
        """Return the ring to prepare, None if it is the one in force."""
        wanted = tuple(sorted(self._alive - self._leaving)) or ring.servers
        return None if wanted == ring.servers else self._make_ring(wanted)

    def _prepare(self, view: PlacementView) -> PlacementView:
        return self._next_view(
            epoch=view.epoch, ring=view.ring, filling=view.filling, target=self._target(view.ring)
        )

    def _after_filling(self, view: PlacementView) -> PlacementView:
        """Return the next view after filling: with the target as its ring, if there is one."""
        if view.target is None:
            return self._next_view(epoch=view.epoch, ring=view.ring)
        left = self._leaving - set(view.target.servers)
        self._alive -= left
        self._gone |= left
        self._leaving -= left
        return self._next_view(epoch=view.version + 1, ring=view.target, target=self._target(view.target))

    def _filling_after(self, view: PlacementView, ring: HashRing) -> dict[int, tuple[RingArc, ...]]:
        """Which servers have to be filled with what after a loss; lost data are filled nowhere."""
        found: dict[int, list[RingArc]] = {}
        for first, last, holders in self._stretches(view, *ring.stretch_starts):
            after = ring.holders_at(first)
            missing = [server for server in after if server not in holders]
            if len(missing) == len(after):
                continue
            for server in missing:
                found.setdefault(server, []).append(RingArc(first=first, last=last))
        return {server: tuple(arcs) for server, arcs in sorted(found.items())}

    def _lose(self, view: PlacementView, server: int) -> tuple[RingArc, ...]:
        """Record what is lost with a server that was the last one to have it; return the places."""
        bounds = [bound for arc in self._lost for bound in (arc.start, arc.stop)]
        stretches = [
            (first, last) for first, last, holders in self._stretches(view, *bounds) if holders == [server]
        ]
        self.data_losses += bool(stretches)
        lost = [
            LostArc(loss=self.data_losses, namespace=name, start=arc.first, stop=arc.last, server=server)
            for name in self._spaces
            if name not in self._resets
            for arc in _merged(stretch for stretch in stretches if not self._is_lost(name, stretch[0]))
        ]
        self._lost += lost
        return tuple(_merged(stretches))

    def _is_lost(self, namespace: str, point: int) -> bool:
        return any(arc.namespace == namespace and arc.start <= point < arc.stop for arc in self._lost)

    def _stretches(self, view: PlacementView, *bounds: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield stretches of the ring, each with the servers that have all of it."""
        found = {0, RING_SIZE, *view.ring.stretch_starts, *bounds}
        found.update(
            bound for arcs in view.filling.values() for arc in arcs for bound in (arc.first, arc.last)
        )
        for first, last in pairwise(sorted(found)):
            holders = view.ring.holders_at(first)
            yield (
                first,
                last,
                [one for one in holders if one in self._filled or not _is_filled_at(view, one, first)],
            )


def _merged(stretches: Iterable[tuple[int, int]]) -> list[RingArc]:
    """Merge adjacent stretches."""
    arcs: list[RingArc] = []
    for first, last in stretches:
        if arcs and arcs[-1].last == first:
            arcs[-1] = RingArc(first=arcs[-1].first, last=last)
        else:
            arcs.append(RingArc(first=first, last=last))
    return arcs


def _is_filled_at(view: PlacementView, server: int, point: int) -> bool:
    return any(arc.first <= point < arc.last for arc in view.filling.get(server, ()))
