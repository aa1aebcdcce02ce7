"""A node of a parameter server, server or client: its links, control connection and messages.

This module never decides which server holds what: the manager's views do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import msgspec
import numpy as np

from offbeat.errors import LinkError, OffbeatError, ProtocolError
from offbeat.events import (
    AbortJob,
    AssignTask,
    CloseServers,
    ClusterView,
    Event,
    ForgetClient,
    NodeJoined,
    NodeLeft,
    PassesEnded,
    RejectNamespace,
    RejectPeer,
    ServerReachable,
    ServerUnreachable,
    WorkerGroupAction,
    WorkerGroupRejected,
    WorkerGroupView,
)
from offbeat.policies.ps.manager import view_from_action
from offbeat.policies.ps.messages import PlacementView
from offbeat.runtime.control.channel import ControlChannel
from offbeat.runtime.control.configuration import COORDINATOR
from offbeat.runtime.control.environment import load_tls
from offbeat.runtime.control.outages import OutageLog
from offbeat.runtime.ps.filtering import NodeFilters
from offbeat.runtime.ps.messenger import Messenger, PlaceArray, ShareArray
from offbeat.runtime.ps.packing import TO_CLIENT, TO_SERVER, Array
from offbeat.runtime.transport import addresses as places
from offbeat.runtime.transport.buffer_pool import Buffer, BufferPool
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.runtime.transport.shared_memory import MAX_UNACKED_BYTES, UNACKED_BYTES
from offbeat.runtime.transport.staging import MIN_STAGED_BYTES

# The manager decides which nodes are lost: nodes keep their sessions with servers for as long as these are in
# its view, and their session with the manager for far longer than it waits for them.
_MANAGER_SILENT_S: Final = 600.0
_GONE_S: Final = 10.0  # how long a removed server may be silent before its session is closed
_RETRY_S: Final = 0.2  # after which a node that refused a connection is tried again
_GOODBYE_S: Final = 5.0


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True):
    """The location and the credentials of a parameter server. They permit everything on it.

    Attributes:
        job: its id.
        token: its secret.
        manager: the manager's addresses, best first.
        is_service: the manager is the coordinator of a training job that belongs to no worker.
    """

    job: str
    token: str
    manager: tuple[str, ...]
    is_service: bool = False

    @classmethod
    def read(cls, path: str | Path) -> ClusterFile:
        """Read a cluster file.

        Raises:
            FileNotFoundError: there is no such file.
            OffbeatError: it is not a cluster file.
        """
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise OffbeatError(
                f"expected a cluster file in {path}, as `offbeat serve --new {path}` writes it: {error}"
            ) from None

    def own_host(self) -> str:
        """Return this host's address as the cluster's nodes reach it."""
        hosts = [address.host for address in map(places.parse_address, self.manager) if address.host]
        return places.own_address(hosts[0]) if hosts else "127.0.0.1"

    def write(self, path: str | Path) -> None:
        """Write a cluster file that no other user of this host may read."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self) + b"\n")


class PsNode:
    """A server or a client.

    All callbacks run in the I/O thread, and all methods except `close` must be called there.

    Args:
        name: "server-3" or "client-7".
        cluster: where the manager is.
        host: the address to listen on and to be reached at.
        on_view: there is a new view.
        on_message: (node, message) from a server or a client; may raise ProtocolError.
        on_refused: the manager has refused a namespace that this node requested.
        on_group: the manager has sent an action for a group of workers.
        place, gather, share: see `Messenger`.
        on_close: the job to which the servers belong is over.
        on_gone: this node is no longer part of the cluster, with the cause; called once.
        functions: import paths of the user-defined updates that a server has.
        unix: nodes on this host may reach it over Unix sockets, instead of TCP.
    """

    def __init__(
        self,
        name: str,
        cluster: ClusterFile,
        *,
        host: str,
        on_view: Callable[[PlacementView], None],
        on_message: Callable[[str, Any], None],
        on_gone: Callable[[str], None],
        on_refused: Callable[[RejectNamespace], None] = lambda refused: None,
        on_group: Callable[[WorkerGroupAction], None] = lambda action: None,
        on_close: Callable[[], None] = lambda: None,
        place: PlaceArray = lambda node, message, array: None,
        gather: Callable[[], None] = lambda: None,
        share: ShareArray = lambda node, message, array, shared: False,
        functions: tuple[str, ...] = (),
        unix: bool = True,
    ) -> None:
        self.name = name
        self._on_view, self._on_gone = on_view, on_gone
        self._on_refused, self._on_group, self._on_close = on_refused, on_group, on_close
        self._addresses: dict[str, tuple[str, ...]] = {}  # of the servers in the view
        self._gone: set[str] = set()  # servers and clients that have left or are lost
        self._reported_missing: set[str] = set()  # servers reported to the manager as unreachable
        self._is_over = False
        is_server = name.startswith("server-")
        self.endpoint = Endpoint(
            name,
            job=cluster.job,
            token=cluster.token,
            on_message=self._on_control,
            on_lost=self._on_lost,
            on_left=self._on_left,
            on_unreachable=self._unreachable,
            on_reachable=self._reachable,
            on_error=lambda error: self._disconnect(f"the links of {name} failed: {error!r}"),
            host=host,
            unix=unix,
            silent_s=_MANAGER_SILENT_S,
            busy_polls=is_server,
            unacked_bytes=MAX_UNACKED_BYTES if is_server else UNACKED_BYTES,
            tls=load_tls(),
        )
        self._notes = OutageLog(name, self.endpoint.call_later)
        kinds = TO_SERVER if is_server else TO_CLIENT
        self.messenger = Messenger(self.endpoint, kinds, on_message, place, gather, share)
        self.filtering = NodeFilters(crc32(name.encode()))
        self._buffers = BufferPool(self._allocate, lambda buffer: self.endpoint.has_readers(buffer.data))
        self._control = ControlChannel(
            self.endpoint,
            COORDINATOR,
            cluster.manager,
            is_service=cluster.is_service,
            on_coordinator_gone=self._disconnect,
        )
        self._functions = functions

    def join(self) -> None:
        """Report this node to the manager; no callback is called before."""
        addresses = self.endpoint.addresses
        self.send_event(NodeJoined(now_s=0.0, node=self.name, addresses=addresses, functions=self._functions))

    def send_event(self, *events: Event) -> None:
        """Send events to the manager; never blocks."""
        self._control.send(*events)

    def send(self, to: str, message: Any) -> None:
        """Send a message to a server or a client, encoded by its namespace's filters."""
        self.messenger.send(to, self.filtering.encode(to, message))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialized array for data that will be sent.

        If it is large, nodes on this host read it in place.
        """
        return self._buffers.allocate_array(shape, dtype)

    def close(self) -> None:
        """Leave the cluster and close the links."""
        if not self._is_over:
            self._is_over = True
            self.send_event(NodeLeft(now_s=0.0, node=self.name))
            self._control.wait_until_acked(_GOODBYE_S)
        self.endpoint.close()

    # In the I/O thread --------------------------------------------------------------------------------

    def _allocate(self, size_bytes: int) -> Buffer:
        if size_bytes < MIN_STAGED_BYTES:
            return np.empty(size_bytes, np.uint8)
        return np.frombuffer(self.endpoint.allocate(size_bytes), np.uint8)

    def _on_control(self, peer: str, payload: bytes) -> None:
        if peer != COORDINATOR:
            if peer not in self._gone:
                if self._reported_missing:
                    self._reachable(peer)
                self.messenger.on_message(peer, payload)
            return
        for action in self._control.receive(payload):
            match action:
                case ClusterView():
                    self._on_view_action(action)
                case RejectNamespace():
                    self._on_refused(action)
                case ForgetClient():
                    self._gone.add(action.node)
                    self._forget(action.node)
                case WorkerGroupView() | AssignTask() | PassesEnded() | WorkerGroupRejected():
                    self._on_group(action)
                case CloseServers():
                    self._on_close()
                case RejectPeer() | AbortJob():
                    self._disconnect(action.reason)
                case _:
                    raise ProtocolError(f"{self.name} cannot use the action {type(action).__name__}")

    def _on_view_action(self, action: ClusterView) -> None:
        servers = {f"server-{one.server}": one.addresses for one in action.servers}
        for name in self._addresses.keys() - servers.keys():
            self._gone.add(name)
            self._reachable(name)
            self._notes.on_gone(name)
            self._forget(name)
            if name != self.name:
                self.endpoint.add_peer(
                    name, self._addresses[name], has_fixed_addresses=True, silent_s=_GONE_S
                )
        for name in servers.keys() - self._addresses.keys():
            if name != self.name:
                self.endpoint.add_peer(name, servers[name], has_fixed_addresses=True, silent_s=inf)
        self._addresses = servers
        view = view_from_action(action)
        self.filtering.add_namespaces(view.spaces)
        self._on_view(view)

    def _on_lost(self, error: LinkError) -> None:
        peer = error.peer
        if peer == COORDINATOR:
            self._control.on_connection_lost(error)
            return
        if error.failure == "no files":  # a limit of this process, not the peer's fault
            self._disconnect(str(error))
            return
        self.messenger.on_lost(peer)  # messages to a client are kept until the manager reports it gone
        if peer in self._addresses:
            self._unreachable(peer, str(error))
            if error.was_open:
                self._reconnect(peer)
            else:
                self.endpoint.call_later(_RETRY_S, partial(self._reconnect, peer))

    def _on_left(self, peer: str) -> None:
        if peer == COORDINATOR:
            self._control.on_peer_closed()
        else:
            self._forget(peer)

    def _reconnect(self, peer: str) -> None:
        """Connect to a server again."""
        if peer in self._addresses and not self._is_over:
            self.endpoint.add_peer(peer, self._addresses[peer], has_fixed_addresses=True, silent_s=inf)
            self.messenger.on_reconnected(peer)

    def _unreachable(self, peer: str, cause: str) -> None:
        """Report a server of the view, or note the manager, from which nothing is received."""
        if not self._is_over and (peer in self._addresses or peer == COORDINATOR):
            self._notes.on_unreachable(_display_name(peer), cause)
        if peer in self._addresses and peer not in self._reported_missing:
            self._reported_missing.add(peer)
            self.send_event(ServerUnreachable(now_s=0.0, node=self.name, server=_number(peer), cause=cause))

    def _reachable(self, peer: str) -> None:
        """End the outage of a server: something was received, or it is no longer in the view."""
        self._notes.on_reachable(_display_name(peer))
        if peer in self._reported_missing:
            self._reported_missing.discard(peer)
            self.send_event(ServerReachable(now_s=0.0, node=self.name, server=_number(peer)))

    def _forget(self, peer: str) -> None:
        self.messenger.on_peer_gone(peer)
        self.filtering.on_node_gone(peer)

    def _disconnect(self, cause: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_gone(cause)


def _display_name(peer: str) -> str:
    return "the manager" if peer == COORDINATOR else peer


def _number(server: str) -> int:
    return int(server.removeprefix("server-"))
