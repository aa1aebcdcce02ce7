"""`PS`: a client of a parameter server, with or without any training.

A namespace holds a row of numbers for every key. `push` sends rows, to which the servers apply the
namespace's update; `pull` fetches rows. Both return a `Future`, at once unless too much is in flight.

    with offbeat.PS.local(servers=2) as ps:
        w = ps.namespace("w", keys=1000)
        pushed = w.push([1.0, 2.0], keys=[3, 500])
        w.pull(keys=[3, 4, 500], after=[pushed]).result()  # array([1., 0., 2.], dtype=float32)

This module connects, finds namespaces and groups by name, and closes. It does not know what a program does in
a namespace, nor which requests are in flight.
"""

from __future__ import annotations

import operator
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from offbeat.errors import OffbeatError
from offbeat.events import NamespaceRequested, ServerRemovalRequested, WorkerGroupAction
from offbeat.numerics.ps.spaces import FilterSpec, NamespaceFilters, UserFunction, encode_namespace
from offbeat.numerics.ps.tables import DENSE_KEYS_MAX, Aggregate
from offbeat.numerics.ps.updates import Sum, Update
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.runtime.ps.cluster import SILENT_S_DEFAULT, LocalServers
from offbeat.runtime.ps.future import TIMEOUT_S, Future
from offbeat.runtime.ps.namespace import Namespace
from offbeat.runtime.ps.node import ClusterFile
from offbeat.runtime.ps.packing import ARRAY_BYTES_MAX
from offbeat.runtime.ps.requests import InflightRequests
from offbeat.runtime.ps.worker_group import WorkerGroup

if TYPE_CHECKING:
    from offbeat.numerics.ps.tensors import Tensor
    from offbeat.runtime.ps.tensors import PsTensors

_START_S: Final = 30.0
_BLOCKS: Final = 64  # of a namespace, by default
_NUMBERS: Final = 2**62  # of clients

OnDataLoss: TypeAlias = Literal["error", "reset"]


class PS:
    """A client of a parameter server.

    A client's pushes to a key are applied in the order in which it made them, each once, whatever fails; when
    a push is done, every holder has applied it. A pull returns values that contain all pushes to these keys
    that were done before.

    Methods may be called by any thread. Arrays that are pushed must not change until the push is done.

    Args:
        cluster: a cluster, or the path of a cluster file, as `offbeat serve --new` writes it.
        host: this host's address as servers reach it; determined automatically by default.
        start_s: how many seconds to wait for the cluster's servers.
        client_id: this client's, 0 to 2**62 - 1, which no other client of the cluster has or ever had; drawn
            at random if it is None. Pushes that are aggregated are summed in the order of these numbers.

    Attributes:
        client_id: this client's.

    Raises:
        ValueError: `client_id` is out of range.
        FileNotFoundError: there is no such file.
        OffbeatError: the cluster cannot be reached, or does not have all its servers within `start_s`.
    """

    def __init__(
        self,
        cluster: ClusterFile | str | Path,
        *,
        host: str | None = None,
        start_s: float = _START_S,
        client_id: int | None = None,
    ) -> None:
        if client_id is not None and not 0 <= client_id < _NUMBERS:
            raise ValueError(f"expected a client_id from 0 to 2**62 - 1, got {client_id}")
        self.cluster = cluster if isinstance(cluster, ClusterFile) else ClusterFile.read(cluster)
        self._local_servers: LocalServers | None = None
        self._pid = os.getpid()
        self.client_id = secrets.randbelow(_NUMBERS) if client_id is None else operator.index(client_id)
        self._groups: dict[str, WorkerGroup] = {}
        self._requests = InflightRequests(
            self.client_id,
            self.cluster,
            host=host or self.cluster.own_host(),
            start_s=start_s,
            on_group=self._on_group,
            on_end=self._end_groups,
        )
        self._node, self._cluster_state = self._requests.node, self._requests.cluster_state

    @classmethod
    def local(
        cls,
        servers: int = 2,
        *,
        replicas: int = 2,
        functions: Sequence[str] = (),
        run_log: str | None = None,
        silent_s: float = SILENT_S_DEFAULT,
    ) -> PS:
        """Start a parameter server on this machine, which ends with this client; return the client.

        Args:
            servers: how many processes.
            replicas: how many replicas each block has, as far as there are servers.
            functions: import paths of user-defined updates.
            run_log: path of the file to which the manager writes its run log.
            silent_s: a node from which the manager receives nothing for so many seconds, more than 2, is
                lost.

        Raises:
            ValueError: an argument out of range.
            OffbeatError: it does not start.
        """
        owned = LocalServers(
            servers, replicas=replicas, functions=functions, run_log=run_log, silent_s=silent_s
        )
        try:
            ps = cls(owned.cluster, host="127.0.0.1")
        except BaseException:
            owned.close()
            raise
        ps._local_servers = owned
        return ps

    @property
    def servers(self) -> list[int]:
        """The servers that hold data, by id, ascending."""
        view = self._cluster_state.latest
        return [] if view is None else list(view.ring.servers)

    @property
    def is_rebalanced(self) -> bool:
        """Whether all servers have all data that they are to hold, and none is being added or removed."""
        view = self._cluster_state.latest
        return view is not None and not view.filling and view.target is None

    @property
    def local_servers(self) -> LocalServers:
        """The processes that `local` started.

        Raises:
            OffbeatError: this client did not start any.
        """
        if self._local_servers is None:
            raise OffbeatError(
                "expected a client that PS.local made, got one of a cluster that runs elsewhere"
            )
        return self._local_servers

    def namespace(
        self,
        name: str,
        keys: int,
        *,
        update: Update | UserFunction | None = None,
        aggregate: Aggregate | None = None,
        width: int = 0,
        dtype: Literal["float32", "float64"] = "float32",
        block_keys: int | None = None,
        push_filters: Iterable[FilterSpec] = (),
        pull_filters: Iterable[FilterSpec] = (),
        on_loss: OnDataLoss | None = None,
    ) -> Namespace:
        """Open a namespace, or create it: keys 0 to `keys` - 1, all of them zero.

        Args:
            name: clients that open the same name share the namespace.
            keys: how many keys it has, up to 2**63 - 1; memory is used only for blocks to which something was
                pushed, and in blocks of more than 2**20 keys only for those keys.
            update: how pushed rows are applied; by default they are added.
            aggregate: combine what all participants push at one time (their first pushes, their second ones,
                ...) into one push: "sum" or "mean"; or "each": the pushes are applied one after the other, in
                the order of the clients' numbers, and become visible together. All participants push the same
                ranges. By default each push is applied by itself, when it arrives.
            width: numbers in a row; 0 for one number per key.
            dtype: of the numbers.
            block_keys: neighbouring keys that are held together, and that one server sends to another in one
                transfer; by default a 64th of all keys, or fewer if rows are long.
            push_filters: applied to pushes, in this order: see `offbeat.numerics.ps.filters`.
            pull_filters: applied to the values of pulls, in this order.
            on_loss: what happens to keys when all servers that had them are gone: "error", every request for
                them raises `LostKeysError`; "reset", they start again from zero, including those that are
                lost already. It holds for all clients, until one opens the namespace with the other value;
                "error" at first.

        Raises:
            ValueError: an argument out of range.
            OffbeatError: the name belongs to a different namespace.
        """
        if not 1 <= keys < 2**63:
            raise ValueError(f"expected 1 to 2**63 - 1 keys, got {keys}")
        filters = NamespaceFilters(tuple(push_filters), tuple(pull_filters))
        about = encode_namespace(
            update or Sum(), width=width, dtype=dtype, aggregate=aggregate or "sum", filters=filters
        )
        block_keys = _block_keys(keys, block_keys, np.dtype(dtype).itemsize * max(width, 1))
        space = NamespaceSpec(name, keys, block_keys, about, aggregate is not None)
        return self._open(
            space, update, on_loss, width=width, dtype=dtype, has_push_filters=bool(filters.push)
        )

    def tensors(
        self,
        name: str,
        named: Iterable[tuple[str, Tensor]],
        *,
        update: Update | UserFunction | None = None,
        aggregate: Aggregate | None = None,
        on_loss: OnDataLoss | None = None,
    ) -> PsTensors:
        """Open a namespace for dense tensors, or create it: one key per number, all of them zero.

        Args:
            name: clients that open the same name share the namespace.
            named: names and tensors, as from `model.named_parameters()`; only their shapes and type are used.
            update: how pushed values are applied; by default they are added.
            aggregate, on_loss: as for `namespace`.

        Raises:
            ValueError: tensors of different types, or of a type that servers do not store.
            OffbeatError: the name belongs to a different namespace.
        """
        from offbeat.numerics.ps.tensors import TensorTable  # these import torch, which takes a second
        from offbeat.runtime.ps.tensors import PsTensors

        offsets = TensorTable.from_tensors(named)
        about = encode_namespace(
            update or Sum(),
            width=0,
            dtype=offsets.dtype,
            aggregate=aggregate or "sum",
            tensors=offsets.state_dict(),
        )
        block_keys = _block_keys(offsets.keys, None, np.dtype(offsets.dtype).itemsize)
        space = NamespaceSpec(name, offsets.keys, block_keys, about, aggregate is not None)
        namespace = self._open(space, update, on_loss, width=0, dtype=offsets.dtype, has_push_filters=False)
        return PsTensors(self._requests, namespace, offsets)

    def join_group(
        self,
        name: str,
        shards: int,
        *,
        on_worker_loss: Literal["replace", "continue", "drop_slowest"] = "replace",
        patience_s: float = 30.0,
        timeout_s: float = TIMEOUT_S,
    ) -> WorkerGroup:
        """Join, as a worker, a group that processes data together, in shards 0 to `shards` - 1.

        Args:
            name: clients that join under the same name work in one group, which the first one creates. Its
                progress is kept as long as the cluster runs.
            shards: parts of the data, 1 to 65536; their contents are up to the program.
            on_worker_loss: what happens to the shards of a lost worker. "replace": they wait `patience_s`
                seconds for a newcomer, then the remaining workers share them; "continue": the group continues
                without them; "drop_slowest": the remaining workers share them at once, and the worker that is
                furthest behind is dropped as well when another has waited `patience_s` seconds for a task.
            patience_s: in seconds, see above.
            timeout_s: how long to wait for the manager, in seconds.

        Raises:
            ValueError: this client is in that group already; an argument out of range.
            OffbeatError: the group was created with other arguments, or is refused; the manager did not reply
                in time.
        """
        if name in self._groups:
            raise ValueError(f"expected a group that this client is not in, got {name}")

        def leave() -> None:
            self._groups.pop(name, None)

        group = WorkerGroup(name, self._node.name, self._node.send_event, self.when_done, leave)
        self._groups[name] = group
        if self._cluster_state.failure is not None:
            group.on_end(self._cluster_state.failure)
        try:
            group.join(shards, on_worker_loss, patience_s, timeout_s)
        except BaseException:
            leave()
            raise
        return group

    @property
    def traffic_bytes(self) -> int:
        """Bytes that this client has sent and received, over all connections."""
        return self._node.endpoint.bytes_sent + self._node.endpoint.bytes_received

    @property
    def tau(self) -> int | None:
        """How many earlier iterations may be unfinished when one begins; 0: sequential, None: no bound.

        It holds for iterations that begin after it was set.
        """
        return self._requests.iterations.tau

    @tau.setter
    def tau(self, tau: int | None) -> None:
        """Bound the delay of iterations that begin later.

        Raises:
            ValueError: it is negative.
        """
        self._requests.iterations.set_tau(tau)

    @contextmanager
    def iteration(self) -> Iterator[Future]:
        """Make all requests of this thread in the `with` block one iteration.

        Iteration t may begin when all iterations up to t - `tau` - 1 are finished; it is finished when all
        its requests are done. Its requests wait for its beginning by themselves; a program that computes what
        it pushes from values pulled in earlier iterations waits for it first:

            with ps.iteration() as begins:
                begins.result()
                pushed = w.push(gradient(weights))

        Yields:
            A future that is done when the iteration begins.
        """
        with self._requests.iterations.iteration() as begins:
            yield begins

    def when_done(self, requests: Iterable[Future], function: Callable[[], Any] = lambda: None) -> Future:
        """Return a future of the result of a function that is called when all these requests are done.

        Args:
            requests: if one of them fails, the future fails too and the function is not called.
            function: must not block, as it is called in the thread that processes all requests.
        """
        return self._requests.when_done(requests, function)

    def remove_server(self, server: int, timeout_s: float = TIMEOUT_S) -> None:
        """Remove a server, and wait until other servers have all data that it holds.

        A server that is silent, and that the manager waits for because it has the last copy of some data, is
        given up.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds; it is the only server.
        """
        if self.servers == [server]:
            raise OffbeatError(f"expected a server that others can replace, got {server}, the only one")
        self._node.send_event(ServerRemovalRequested(now_s=0.0, node=self._node.name, server=server))
        self._cluster_state.wait_for(
            lambda: server not in self.servers, f"server {server} to leave", timeout_s
        )

    def wait_for_servers(self, count: int, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until so many servers hold data.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds.
        """
        self._cluster_state.wait_for(lambda: len(self.servers) >= count, f"{count} servers", timeout_s)

    def wait_until_rebalanced(self, servers: Collection[int], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until exactly these servers hold data, and all of them have all data that they are to hold.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds.
        """
        wanted = sorted(servers)
        self._cluster_state.wait_for(
            lambda: self.servers == wanted and self.is_rebalanced, f"servers {wanted}", timeout_s
        )

    def close(self) -> None:
        """Leave, and end the servers that `local` started; requests that are not done fail.

        In a process forked from the client's own this does nothing.
        """
        if os.getpid() != self._pid:
            return
        self._requests.close()
        if self._local_servers is not None:
            self._local_servers.close()

    def __enter__(self) -> PS:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(
        self,
        space: NamespaceSpec,
        update: Update | UserFunction | None,
        on_loss: OnDataLoss | None,
        *,
        width: int,
        dtype: str,
        has_push_filters: bool,
    ) -> Namespace:
        views, name = self._cluster_state, space.name
        views.forget_refusal(name)
        if views.space(name) != space or on_loss is not None:
            function = update.path if isinstance(update, UserFunction) else ""
            self._node.send_event(
                NamespaceRequested(
                    now_s=0.0,
                    node=self._node.name,
                    function=function,
                    on_loss=on_loss or "",
                    **space._asdict(),
                )
            )
        views.wait_unless_refused(
            name,
            lambda: views.space(name) == space and not (on_loss == "reset" and views.has_lost_keys(name)),
            f"the namespace {name}",
            _START_S,
            problem=f"the namespace {name} cannot be opened",
        )
        combines = not (space.aggregates or has_push_filters or isinstance(update, UserFunction))
        return Namespace(self._requests, space, update or Sum(), width=width, dtype=dtype, combines=combines)

    # In the I/O thread --------------------------------------------------------------------------------

    def _on_group(self, action: WorkerGroupAction) -> None:
        group = self._groups.get(action.group)
        if group is not None:
            group.on_action(action)

    def _end_groups(self, cause: str) -> None:
        for group in list(self._groups.values()):
            group.on_end(cause)


def _block_keys(keys: int, block_keys: int | None, row_bytes: int) -> int:
    """Return how many keys are in a block, which travels as one array when a server is filled.

    Raises:
        ValueError: too many for that.
    """
    keys_max = ARRAY_BYTES_MAX // row_bytes
    if block_keys is None:
        default = -(-keys // _BLOCKS)
        return default if default > DENSE_KEYS_MAX else min(default, max(keys_max, 1))
    if min(block_keys, DENSE_KEYS_MAX) > keys_max:
        raise ValueError(
            f"expected blocks of up to {ARRAY_BYTES_MAX} bytes, here {keys_max} keys, got {block_keys}"
        )
    return block_keys
