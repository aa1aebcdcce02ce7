"""`PS`: a parameter server from a program's side, with or without any training.

A namespace holds a row of numbers for every key. `push` sends rows, which the servers take as the namespace's
update says; `pull` fetches rows. Both return a `Future`, at once unless too much is under way.

    with offbeat.PS.local(servers=2) as ps:
        w = ps.namespace("w", keys=1000)
        pushed = w.push([1.0, 2.0], keys=[3, 500])
        w.pull(keys=[3, 4, 500], after=[pushed]).result()  # array([1., 0., 2.], dtype=float32)

This module connects, finds namespaces and groups by name, and closes. It does not know what a program does in
a namespace, nor which requests are under way.
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
from offbeat.events import GroupAction, ServerLeaves, SpaceOpened
from offbeat.numerics.ps.spaces import Filters, FilterSpec, Function, describe
from offbeat.numerics.ps.tables import DENSE_KEYS_MAX, Aggregate
from offbeat.numerics.ps.updates import Sum, Update
from offbeat.policies.ps.hash_ring import Space
from offbeat.runtime.ps.cluster import SILENT_S, LocalServers
from offbeat.runtime.ps.future import TIMEOUT_S, Future
from offbeat.runtime.ps.namespace import Namespace
from offbeat.runtime.ps.node import Cluster
from offbeat.runtime.ps.packing import ARRAY_BYTES_MAX
from offbeat.runtime.ps.requests import Requests
from offbeat.runtime.ps.worker_group import WorkerGroup

if TYPE_CHECKING:
    from offbeat.numerics.ps.tensors import Tensor
    from offbeat.runtime.ps.tensors import Tensors

_START_S: Final = 30.0
_BLOCKS: Final = 64  # of a namespace, if nobody says otherwise
_NUMBERS: Final = 2**62  # of clients

OnLoss: TypeAlias = Literal["error", "reset"]


class PS:
    """A client of a parameter server.

    What a client pushes to a key is applied in the order in which it pushed, each push once, whatever breaks;
    when a push is done, every holder has it. What a client pulls holds all pushes to these keys that were
    done before.

    Methods may be called by any thread. Arrays that are pushed must not change until the push is done.

    Args:
        cluster: a cluster, or the path of a cluster file, as `offbeat serve --new` writes it.
        host: this host's address as servers reach it; found by itself, usually.
        start_s: for how many seconds to wait for the cluster's servers.
        number: this client's, 0 to 2**62 - 1, which no other client of the cluster has or ever had; drawn if
            it is None. Where pushes are aggregated, they are added up in the order of these.

    Attributes:
        number: likewise.

    Raises:
        ValueError: no such number.
        FileNotFoundError: there is no such file.
        OffbeatError: the cluster cannot be reached, or has not got all its servers within `start_s`.
    """

    def __init__(
        self,
        cluster: Cluster | str | Path,
        *,
        host: str | None = None,
        start_s: float = _START_S,
        number: int | None = None,
    ) -> None:
        if number is not None and not 0 <= number < _NUMBERS:
            raise ValueError(f"expected a client's number from 0 to 2**62 - 1, got {number}")
        self.cluster = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
        self._owned: LocalServers | None = None
        self._pid = os.getpid()
        self.number = secrets.randbelow(_NUMBERS) if number is None else operator.index(number)
        self._groups: dict[str, WorkerGroup] = {}
        self._requests = Requests(
            self.number,
            self.cluster,
            host=host or self.cluster.own_host(),
            start_s=start_s,
            on_group=self._hear_group,
            on_end=self._end_groups,
        )
        self._node, self._views = self._requests.node, self._requests.views

    @classmethod
    def local(
        cls,
        servers: int = 2,
        *,
        copies: int = 2,
        functions: Sequence[str] = (),
        run_log: str | None = None,
        silent_s: float = SILENT_S,
    ) -> PS:
        """Start a parameter server on this machine, which ends with this client; return the client.

        Args:
            servers: how many processes.
            copies: how many replicas everything has, as far as there are servers.
            functions: import paths of your own updates.
            run_log: where the manager writes down what happens.
            silent_s: who has said nothing for so many seconds, more than 2, is lost.

        Raises:
            ValueError: an argument out of range.
            OffbeatError: it does not start.
        """
        owned = LocalServers(servers, copies=copies, functions=functions, run_log=run_log, silent_s=silent_s)
        try:
            ps = cls(owned.cluster, host="127.0.0.1")
        except BaseException:
            owned.close()
            raise
        ps._owned = owned
        return ps

    @property
    def servers(self) -> list[int]:
        """The servers that hold something, by id."""
        view = self._views.latest
        return [] if view is None else list(view.ring.servers)

    @property
    def is_settled(self) -> bool:
        """Whether all servers have all that they are to hold, and none is being taken in or let go."""
        view = self._views.latest
        return view is not None and not view.filling and view.target is None

    @property
    def local_servers(self) -> LocalServers:
        """The processes that `local` started.

        Raises:
            OffbeatError: this client did not start any.
        """
        if self._owned is None:
            raise OffbeatError(
                "expected a client that PS.local made, got one of a cluster that runs elsewhere"
            )
        return self._owned

    def namespace(
        self,
        name: str,
        keys: int,
        *,
        update: Update | Function | None = None,
        aggregate: Aggregate | None = None,
        width: int = 0,
        dtype: Literal["float32", "float64"] = "float32",
        block_keys: int | None = None,
        push_filters: Iterable[FilterSpec] = (),
        pull_filters: Iterable[FilterSpec] = (),
        on_loss: OnLoss | None = None,
    ) -> Namespace:
        """Open a namespace, or make it: keys 0 to `keys` - 1, all of them zero.

        Args:
            name: whoever opens it under this name gets the same one.
            keys: how many keys it may have, up to 2**63 - 1; what takes memory is blocks to which something
                was pushed, and in blocks of more than 2**20 keys those keys alone.
            update: what becomes of what is pushed; by default it is added.
            aggregate: what all who take part push at one time (their first pushes, their second ones, ...) is
                one push, of the sum or the mean; or "each" counts one after the other, in the order of the
                clients' numbers, and is seen with all others or not at all. All push the same ranges. By
                default each push counts by itself, when it comes.
            width: numbers in a row; 0 for one number a key.
            dtype: of the numbers.
            block_keys: neighbouring keys that are held together, of which a server sends all in one to
                another one; by default a 64th of all, or fewer of long rows.
            push_filters: what pushes go through, in this order: see `offbeat.numerics.filters`.
            pull_filters: likewise, what comes back.
            on_loss: what becomes of keys when all servers that had them are gone: "error", every request for
                them raises `LostKeysError`; "reset", they begin from zero, those that are lost already, too.
                It holds for all clients, until one opens the namespace with another; "error" at first.

        Raises:
            ValueError: an argument out of range.
            OffbeatError: there is another namespace with this name.
        """
        if not 1 <= keys < 2**63:
            raise ValueError(f"expected 1 to 2**63 - 1 keys, got {keys}")
        filters = Filters(tuple(push_filters), tuple(pull_filters))
        about = describe(
            update or Sum(), width=width, dtype=dtype, aggregate=aggregate or "sum", filters=filters
        )
        block_keys = _block_keys(keys, block_keys, np.dtype(dtype).itemsize * max(width, 1))
        space = Space(name, keys, block_keys, about, aggregate is not None)
        self._open(space, update, on_loss)
        combines = aggregate is None and not filters.push and not isinstance(update, Function)
        return Namespace(self._requests, space, update or Sum(), width=width, dtype=dtype, combines=combines)

    def tensors(
        self,
        name: str,
        named: Iterable[tuple[str, Tensor]],
        *,
        update: Update | Function | None = None,
        aggregate: Aggregate | None = None,
        on_loss: OnLoss | None = None,
    ) -> Tensors:
        """Open a namespace for dense tensors, or make it: a key for each number, all of them zero.

        Args:
            name: whoever opens it under this name gets the same one.
            named: names and tensors, as of `model.named_parameters()`; their shapes and type count.
            update: what becomes of what is pushed; by default it is added.
            aggregate, on_loss: as for `namespace`.

        Raises:
            ValueError: tensors of different types, or of one that servers do not keep.
            OffbeatError: there is another namespace with this name.
        """
        from offbeat.numerics.ps.tensors import Offsets  # they need torch, which takes a second to load
        from offbeat.runtime.ps.tensors import Tensors

        offsets = Offsets.of(named)
        about = describe(
            update or Sum(),
            width=0,
            dtype=offsets.dtype,
            aggregate=aggregate or "sum",
            tensors=offsets.state_dict(),
        )
        block_keys = _block_keys(offsets.keys, None, np.dtype(offsets.dtype).itemsize)
        space = Space(name, offsets.keys, block_keys, about, aggregate is not None)
        self._open(space, update, on_loss)
        combines = aggregate is None and not isinstance(update, Function)
        namespace = Namespace(
            self._requests, space, update or Sum(), width=0, dtype=offsets.dtype, combines=combines
        )
        return Tensors(self._requests, namespace, offsets)

    def join_group(
        self,
        name: str,
        shards: int,
        *,
        on_worker_loss: Literal["replace", "continue", "drop_slowest"] = "replace",
        patience_s: float = 30.0,
        timeout_s: float = TIMEOUT_S,
    ) -> WorkerGroup:
        """Become a worker of a group that goes through data together, in shards 0 to `shards` - 1.

        Args:
            name: whoever joins under this name works in the same group, which the first one makes. It
                remembers what was done for as long as the cluster is there.
            shards: parts of the data, 1 to 65536; what they hold is for the program to know.
            on_worker_loss: what becomes of the shards of a worker that is lost. "replace": they wait
                `patience_s` seconds for a newcomer, and then the others share them; "continue": the group
                goes on without them; "drop_slowest": the others share them at once, and who is furthest
                behind when somebody has waited `patience_s` seconds for a task is dropped as well.
            patience_s: seconds, as above.
            timeout_s: how long to wait for the manager, in seconds.

        Raises:
            ValueError: this client is in that group already; an argument out of range.
            OffbeatError: the group was made with other arguments, or cannot be; the manager has not answered
                in time.
        """
        if name in self._groups:
            raise ValueError(f"expected a group that this client is not in, got {name}")

        def leave() -> None:
            self._groups.pop(name, None)

        group = WorkerGroup(name, self._node.name, self._node.tell, self.when_done, leave)
        self._groups[name] = group
        if self._views.failure is not None:
            group.end(self._views.failure)
        try:
            group.join(shards, on_worker_loss, patience_s, timeout_s)
        except BaseException:
            leave()
            raise
        return group

    @property
    def traffic_bytes(self) -> int:
        """What this client has sent and received, over all connections."""
        return self._node.endpoint.bytes_sent + self._node.endpoint.bytes_received

    @property
    def tau(self) -> int | None:
        """How many iterations later ones may overtake: 0 for one after the other, None for no bound.

        It holds for iterations that begin after it was set.
        """
        return self._requests.tau

    @tau.setter
    def tau(self, tau: int | None) -> None:
        """Bound the delay of iterations that begin later.

        Raises:
            ValueError: it is negative.
        """
        self._requests.set_tau(tau)

    @contextmanager
    def iteration(self) -> Iterator[Future]:
        """Let all requests that this thread makes in the `with` block be one iteration.

        It may begin when all iterations up to `tau` + 1 before it are finished, and is finished when all its
        requests are done. They wait for its beginning by themselves; who computes what it pushes from what
        iterations before it have pulled waits for it first:

            with ps.iteration() as begins:
                begins.result()
                pushed = w.push(gradient(weights))

        Yields:
            A future that is done when the iteration begins.
        """
        with self._requests.iteration() as begins:
            yield begins

    def when_done(self, requests: Iterable[Future], function: Callable[[], Any] = lambda: None) -> Future:
        """Return a future of what a function returns that is called when all these requests are done.

        Args:
            requests: if one of them fails, so does the future, and the function is not called.
            function: must not wait for anything, for it is called in the thread that all requests go through.
        """
        return self._requests.when_done(requests, function)

    def remove_server(self, server: int, timeout_s: float = TIMEOUT_S) -> None:
        """Let a server leave, and wait until others have all that it holds.

        One that is silent and is waited for, since it has the last copy of something, is given up.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds; it is the only server.
        """
        if self.servers == [server]:
            raise OffbeatError(f"expected a server that others can stand in for, got {server}, the only one")
        self._node.tell(ServerLeaves(now_s=0.0, node=self._node.name, server=server))
        self._views.wait_for(lambda: server not in self.servers, f"server {server} to leave", timeout_s)

    def wait_for_servers(self, count: int, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until so many servers hold something.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds.
        """
        self._views.wait_for(lambda: len(self.servers) >= count, f"{count} servers", timeout_s)

    def wait_until_settled(self, servers: Collection[int], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until just these servers hold something, and all of them have all that they are to hold.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds.
        """
        wanted = sorted(servers)
        self._views.wait_for(
            lambda: self.servers == wanted and self.is_settled, f"servers {wanted}", timeout_s
        )

    def close(self) -> None:
        """Leave, and end the servers that `local` started; requests that are not done fail.

        In a process forked from the client's own this does nothing.
        """
        if os.getpid() != self._pid:
            return
        self._requests.close()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> PS:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, space: Space, update: Update | Function | None, on_loss: OnLoss | None) -> None:
        views, name = self._views, space.name
        views.forget_refusal(name)
        if views.space(name) != space or on_loss is not None:
            function = update.path if isinstance(update, Function) else ""
            self._node.tell(
                SpaceOpened(
                    now_s=0.0,
                    node=self._node.name,
                    function=function,
                    on_loss=on_loss or "",
                    **space._asdict(),
                )
            )
        views.wait_unless_refused(
            name,
            lambda: views.space(name) == space and not (on_loss == "reset" and views.has_lost(name)),
            f"the namespace {name}",
            _START_S,
            problem=f"the namespace {name} cannot be opened",
        )

    # In the links' thread --------------------------------------------------------------------------------

    def _hear_group(self, action: GroupAction) -> None:
        group = self._groups.get(action.group)
        if group is not None:
            group.hear(action)

    def _end_groups(self, cause: str) -> None:
        for group in list(self._groups.values()):
            group.end(cause)


def _block_keys(keys: int, block_keys: int | None, row_bytes: int) -> int:
    """How many keys are in a block, which travels in one when a server is filled.

    Raises:
        ValueError: too many for that.
    """
    most = ARRAY_BYTES_MAX // row_bytes
    if block_keys is None:
        usual = -(-keys // _BLOCKS)
        return usual if usual > DENSE_KEYS_MAX else min(usual, max(most, 1))
    if min(block_keys, DENSE_KEYS_MAX) > most:
        raise ValueError(
            f"expected blocks of up to {ARRAY_BYTES_MAX} bytes, here {most} keys, got {block_keys}"
        )
    return block_keys
