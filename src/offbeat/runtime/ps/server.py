"""A server of a parameter server, as a process: a `ServerNode` with links, and a table for each namespace.

Run as `python -m offbeat.runtime.ps.server`: it reads its configuration, one JSON object, from standard
input, answers with one line when it is ready, and serves until it is asked to leave (SIGTERM, SIGINT) or is
no longer part of the cluster.
"""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TextIO

import msgspec

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.events import ServerRemovalRequested
from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.spaces import build_table, import_function
from offbeat.numerics.ps.tables import Allocate, ArrayTable
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.manager import event_from_message, server_id
from offbeat.policies.ps.messages import PlacementView, Pull, Push, Replicate
from offbeat.policies.ps.server_node import CLIENT_REQUESTS, MANAGER, SendMessage, ServerNode, rejection
from offbeat.runtime.control.starting import failure_answer, read_configuration, write_answer
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.processes.waiting import SignalSafeCondition
from offbeat.runtime.ps.node import ClusterFile, PsNode
from offbeat.runtime.ps.packing import Array, EncodedValues

_LEAVE_S: Final = 60.0  # how long a leaving server waits until other servers have all data that it holds


class ServerConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a server process.

    Attributes:
        cluster: where the manager is.
        host: the address to listen on and to be reached at.
        server: its id, which no other has or had; drawn where it is None.
        functions: import paths of user-defined updates.
        unix: nodes on this host may reach it over Unix sockets, instead of TCP.
    """

    cluster: ClusterFile
    host: str
    server: int | None = None
    functions: tuple[str, ...] = ()
    unix: bool = True


class ServerTables:
    """All values of one server.

    Args:
        functions: user-defined updates, by import path.
        empty: (shape, dtype): returns memory for values that are read, as `np.empty` does.
    """

    def __init__(self, functions: Mapping[str, Any], empty: Allocate) -> None:
        self._functions, self._empty = functions, empty
        self._tables: dict[str, ArrayTable] = {}

    def table(self, space: NamespaceSpec) -> ArrayTable:
        """Return a namespace's table, created if needed."""
        found = self._tables.get(space.name)
        if found is None:
            found = self._tables[space.name] = build_table(
                space.spec, space.keys, space.block_keys, self._functions, self._empty
            )
        return found


class ServerProcess:
    """A server that runs in this process.

    Args:
        configuration: see `ServerConfiguration`.

    Raises:
        OffbeatError: a function cannot be imported.
        OSError: it cannot listen at this address.
    """

    def __init__(self, configuration: ServerConfiguration) -> None:
        functions = {path: import_function(path) for path in configuration.functions}
        server = configuration.server
        self.server = 1000 + secrets.randbelow(2**31) if server is None else server
        tables = ServerTables(functions, lambda shape, dtype: self._node.empty(shape, dtype))
        self._core = ServerNode(self.server, tables)
        self._early_messages: dict[
            str, list[Any]
        ] = {}  # by node: messages that wait for a view, and all later ones
        self._changed = SignalSafeCondition()
        self._is_leaving = self._is_in = self._is_out = self._is_last = self._is_closed = False
        self._gone: str | None = None
        self._node = PsNode(
            f"server-{self.server}",
            configuration.cluster,
            host=configuration.host,
            on_view=self._on_view,
            on_message=self._on_message,
            on_close=self._on_close,
            on_gone=self._on_gone,
            share=self._share,
            functions=configuration.functions,
            unix=configuration.unix,
        )
        self._node.join()  # only now: the callbacks use the attributes above

    def serve(self) -> None:
        """Run until it has left, a client has removed it, its job is over, or the manager has lost it.

        Raises:
            OffbeatError: the manager has lost it, or it could not hand its data over in time.
        """
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_leaving or self._is_out or self._is_closed or self._gone is not None
                )
                if self._is_closed:
                    return
                if self._gone is None and not self._is_out:
                    self._hand_over()
                if self._gone is not None and not self._is_leaving:
                    raise OffbeatError(f"server {self.server} is out of the cluster: {self._gone}")
        finally:
            self._node.close()

    def _hand_over(self) -> None:
        """Let other servers, if there are any, take over all data that this one holds.

        Raises:
            OffbeatError: that took too long.
        """
        leaves = ServerRemovalRequested(now_s=0.0, node=self._node.name, server=self.server)
        self._node.send_event(leaves)
        has_ended = self._changed.wait_for(
            lambda: self._is_out or self._is_last or self._gone is not None, _LEAVE_S
        )
        if self._is_in and not has_ended:
            raise OffbeatError(
                f"server {self.server} ends without having handed its data over: other servers did not have "
                f"all of it within {_LEAVE_S:g} s, and what no other one has is lost. Stop a server only "
                "while its manager (the coordinator) and the other servers can be reached"
            )

    @property
    def has_left_early(self) -> bool:
        """Whether it was asked to leave, and has, before its job was over."""
        return self._is_leaving and not self._is_closed

    def leave(self) -> None:
        """Leave as soon as other servers, if there are any, have all data that this one holds.

        Any thread and a signal handler may call it.
        """
        start_thread(
            "offbeat leaves", self._leave, lambda error: self._on_gone(f"it could not leave: {error!r}")
        )

    def _leave(self) -> None:
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()

    # In the I/O thread --------------------------------------------------------------------------------

    def _on_view(self, view: PlacementView) -> None:
        self._emit(self._core.on_view(view))
        held, self._early_messages = self._early_messages, {}
        for peer, messages in held.items():
            for message in messages:
                self._process_held(peer, message)
        is_in = self.server in view.ring.servers or (
            view.target is not None and self.server in view.target.servers
        )
        with self._changed:
            self._is_out = self._is_in and not is_in
            self._is_in |= is_in
            self._is_last = view.ring.servers == (self.server,) and view.target is None
            self._changed.notify_all()

    def _on_message(self, peer: str, message: Any) -> None:
        if isinstance(message, CLIENT_REQUESTS):
            is_allowed = peer == f"client-{message.client}"
        else:
            is_allowed = server_id(peer) is not None
        if not is_allowed:
            raise ProtocolError(f"{peer} may not send a {type(message).__name__} of another node")
        if peer in self._early_messages or self._needs_later_view(message):
            self._early_messages.setdefault(peer, []).append(message)
        else:
            self._emit(self._core.on_message(peer, self._node.filtering.decode(peer, message)))

    def _process_held(self, peer: str, message: Any) -> None:
        """Process a held message; its errors go to its sender, not to that of the current one."""
        try:
            self._on_message(peer, message)
        except ProtocolError as error:
            if not isinstance(message, CLIENT_REQUESTS):
                raise
            self._node.send(peer, rejection(message, error))

    def _needs_later_view(self, message: Any) -> bool:
        """Whether only a later view defines the filters that decode it."""
        one: Any = message.operation if isinstance(message, Replicate) else message
        content = one.keys if isinstance(message, Pull) else getattr(one, "content", None)
        if not isinstance(content, EncodedValues) or self._node.filtering.knows(one.namespace):
            return False
        number = message.epoch if isinstance(message, CLIENT_REQUESTS) else message.view
        return self._core.view is None or number > self._core.view.version

    def _share(self, peer: str, message: Any, array: Array, shared: Array) -> bool:
        """Let a push be read in the sender's memory, if it is read once and nothing of it is kept."""
        if not isinstance(message, Push) or not isinstance(message.content, Entries):
            return False
        content = message.content
        if (
            content.values is not array
            or peer in self._early_messages
            or not self._core.can_apply_in_place(message)
        ):
            return False
        message.content = Entries(content.first, shared, content.keys, content.meta)
        return True

    def _emit(self, actions: Sequence[SendMessage]) -> None:
        for to, message in actions:
            if to == MANAGER:
                self._node.send_event(event_from_message(self._node.name, message))
            else:
                self._node.send(to, message)

    def _on_close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _on_gone(self, cause: str) -> None:
        with self._changed:
            self._gone = cause
            self._changed.notify_all()


def serve(server: ServerProcess, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT asks the server to leave.

    Args:
        on_ready: called once, when the signal handlers are installed.

    Raises:
        OffbeatError: it is no longer part of the cluster, and was not asked to leave; it was, and could not
            hand its data over in time.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.leave())
    on_ready()
    server.serve()


def main(source: TextIO = sys.stdin, answer: TextIO = sys.stdout) -> int:
    """Read the configuration, answer with the server's id or an error, and serve."""
    try:
        server = ServerProcess(read_configuration(source, ServerConfiguration))
    except (OffbeatError, ProtocolError, ValueError, OSError) as error:
        write_answer(answer, failure_answer(error))
        return 1
    try:
        serve(server, lambda: write_answer(answer, {"server": server.server}))
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
