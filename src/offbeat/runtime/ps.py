"""`PS`: a parameter server from a program's side, with or without any training.

A namespace holds a row of numbers for every key. `push` sends rows, which the servers take as the namespace's
update says; `pull` fetches rows. Both return a `Future` at once.

    with offbeat.PS.local(servers=2) as ps:
        w = ps.namespace("w", keys=1000)
        pushed = w.push([1.0, 2.0], keys=[3, 500])
        w.pull(keys=[3, 4, 500], after=[pushed]).result()  # array([1., 0., 2.], dtype=float32)
"""

from __future__ import annotations

import operator
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.events import (
    ClientEnlists,
    ClientPaused,
    ClientWithdraws,
    Event,
    GroupAction,
    ServerLeaves,
    SpaceOpened,
    SpaceRefused,
)
from offbeat.numerics.entries import (
    Entries,
    Keys,
    Rows,
    Settings,
    Terms,
    places_of,
    problem_of,
    problem_of_rows,
)
from offbeat.numerics.filters import Passed
from offbeat.numerics.spaces import Filters, FilterSpec, Function, describe
from offbeat.numerics.tables import DENSE_KEYS_MAX, Aggregate, check_states, check_weight
from offbeat.numerics.updates import Sum, Update, with_settings
from offbeat.policies.client import Client, Done, Failed
from offbeat.policies.parcels import Enlist, Pulled, Reached, View, Withdraw
from offbeat.policies.placement import Space
from offbeat.policies.server import MANAGER, Send
from offbeat.policies.tasks import IterationScheduler, Run, TaskGraph, Told
from offbeat.runtime.answers import Answer
from offbeat.runtime.buffers import Buffers
from offbeat.runtime.cluster import SILENT_S, LocalServers
from offbeat.runtime.combining import COMBINED_BYTES_MAX, Combiner
from offbeat.runtime.future import TIMEOUT_S, Future
from offbeat.runtime.group import WorkerGroup
from offbeat.runtime.node import Cluster, Node
from offbeat.runtime.parcelling import ARRAY_BYTES_MAX, Array

if TYPE_CHECKING:
    from offbeat.numerics.tensors import Tensor
    from offbeat.runtime.dense import Tensors

_START_S: Final = 30.0
_BLOCKS: Final = 64  # of a namespace, if nobody says otherwise
_PIECE_BYTES: Final = 4 * 1024 * 1024
_CALLEE: Final = "servers"
_NUMBERS: Final = 2**62  # of clients


@dataclass(slots=True, eq=False)
class _Iteration:
    """Requests that belong together, and wait for the iterations before them.

    Attributes:
        begins: done when it may run.
        open_count: the requests that are not done, and one while there may be more.
    """

    begins: Future
    open_count: int = 1
    number: int = -1


@dataclass(slots=True, eq=False)
class _Request:
    """A request that was not sent yet.

    Attributes:
        make: makes it, in the client; None where there is nothing to send.
        finish: what the future comes to, where there is nothing to send.
        before: what has to be done before.
        answer: what is put together of a pull.
        part: namespace and content of a push that may go out as one with others.
    """

    make: Callable[[], tuple[int, list[Send | Done | Failed]]] | None
    future: Future
    iteration: _Iteration | None
    before: list[Future]
    answer: Answer | None = None
    part: tuple[str, Entries] | None = None
    finish: Callable[[], Any] = lambda: None


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
        self.number = secrets.randbelow(_NUMBERS) if number is None else operator.index(number)
        self._client = Client(self.number, _cut, self._pieces)
        self._piece_keys: dict[str, int] = {}  # by namespace: in ranges of so many keys they travel
        self._changed = threading.Condition()
        self._view: View | None = None
        self._refused: dict[str, str] = {}
        self._failure: str | None = None
        # Who waits for a request, and what is put together of a pull.
        self._asked: dict[int, tuple[Sequence[Future], Answer | None]] = {}
        self._buffers = Buffers()  # for what is pulled: a program that is through with it gives it back
        self._combined = Combiner(self._buffers.array)
        self._waiting: set[Future] = set()  # for others, or for their iteration
        self._graph = TaskGraph()
        self._tau: int | None = None
        self._scheduler = IterationScheduler(self._graph, None)
        self._iterations: dict[int, _Iteration] = {}  # by their task's number
        self._current = threading.local()
        self._groups: dict[str, WorkerGroup] = {}
        self._node = Node(
            f"client-{self.number}",
            self.cluster,
            host=host or self.cluster.own_host(),
            on_view=self._see,
            on_message=self._hear,
            on_gone=self._end,
            on_refused=self._refuse,
            on_group=self._hear_group,
            place=self._place,
        )
        self._node.join()
        try:
            self._wait_for(lambda: self._view is not None, "all servers that it is to begin with", start_s)
        except BaseException:
            self._node.close()
            raise

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
        with self._changed:
            return [] if self._view is None else list(self._view.ring.servers)

    @property
    def is_settled(self) -> bool:
        """Whether all servers have all that they are to hold, and none is being taken in or let go."""
        with self._changed:
            return self._view is not None and not self._view.filling and self._view.target is None

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
        self._open(space, update)
        combines = aggregate is None and not filters.push and not isinstance(update, Function)
        return Namespace(self, space, update or Sum(), width=width, dtype=dtype, combines=combines)

    def tensors(
        self,
        name: str,
        named: Iterable[tuple[str, Tensor]],
        *,
        update: Update | Function | None = None,
        aggregate: Aggregate | None = None,
    ) -> Tensors:
        """Open a namespace for dense tensors, or make it: a key for each number, all of them zero.

        Args:
            name: whoever opens it under this name gets the same one.
            named: names and tensors, as of `model.named_parameters()`; their shapes and type count.
            update: what becomes of what is pushed; by default it is added.
            aggregate: as for `namespace`.

        Raises:
            ValueError: tensors of different types, or of one that servers do not keep.
            OffbeatError: there is another namespace with this name.
        """
        from offbeat.numerics.tensors import Offsets  # they need torch, which takes a second to load
        from offbeat.runtime.dense import Tensors

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
        self._open(space, update)
        combines = aggregate is None and not isinstance(update, Function)
        namespace = Namespace(self, space, update or Sum(), width=0, dtype=offsets.dtype, combines=combines)
        return Tensors(self, namespace, offsets)

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
        if self._failure is not None:
            group.end(self._failure)
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
        return self._tau

    @tau.setter
    def tau(self, tau: int | None) -> None:
        """Bound the delay of iterations that begin later.

        Raises:
            ValueError: it is negative.
        """
        if tau is not None and tau < 0:
            raise ValueError(f"expected a tau of at least 0, or None for no bound, got {tau}")
        self._tau = tau
        self._node.endpoint.call(self._scheduler.set_tau, tau)

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
        iteration = _Iteration(Future("an iteration", lambda: "others before it are not finished"))
        self._node.endpoint.call(self._issue_iteration, iteration)
        self._current.iteration = iteration
        try:
            yield iteration.begins
        finally:
            self._current.iteration = None
            self._node.endpoint.call(self._finish_one, iteration)

    def remove_server(self, server: int, timeout_s: float = TIMEOUT_S) -> None:
        """Let a server leave, and wait until others have all that it holds.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds; it is the only server.
        """
        if self.servers == [server]:
            raise OffbeatError(f"expected a server that others can stand in for, got {server}, the only one")
        self._node.tell(ServerLeaves(now_s=0.0, node=self._node.name, server=server))
        self._wait_for(lambda: server not in self.servers, f"server {server} to leave", timeout_s)

    def wait_for_servers(self, count: int, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until so many servers hold something.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds.
        """
        self._wait_for(lambda: len(self.servers) >= count, f"{count} servers", timeout_s)

    def wait_until_settled(self, servers: Collection[int], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until just these servers hold something, and all of them have all that they are to hold.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds.
        """
        wanted = sorted(servers)
        self._wait_for(lambda: self.servers == wanted and self.is_settled, f"servers {wanted}", timeout_s)

    def close(self) -> None:
        """Leave, and end the servers that `local` started; requests that are not done fail."""
        self._node.close()
        self._end("this client was closed")
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> PS:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, space: Space, update: Update | Function | None) -> None:
        name = space.name
        with self._changed:
            self._refused.pop(name, None)
            is_new = self._space(name) != space
        if is_new:
            function = update.path if isinstance(update, Function) else ""
            opened = SpaceOpened(now_s=0.0, node=self._node.name, function=function, **space._asdict())
            self._node.tell(opened)
        self._wait_for(
            lambda: name in self._refused or self._space(name) == space,
            f"the namespace {name}",
        )
        with self._changed:
            if name in self._refused:
                raise OffbeatError(f"the namespace {name} cannot be opened: {self._refused[name]}")

    def _take_part(self, name: str, clients: int, timeout_s: float) -> int:
        def is_complete(participants: Mapping[int, int]) -> bool:
            return self.number in participants and len(participants) >= clients

        self.when_done([], lambda: self._take_up(self._client.enlist(name))).result(timeout_s)
        self._wait_for(
            lambda: name in self._refused or is_complete(self._participants(name)),
            f"{clients} clients to take part in {name}",
            timeout_s,
        )
        with self._changed:
            if name in self._refused:
                raise OffbeatError(f"nobody takes part in {name}: {self._refused[name]}")
            return self._participants(name)[self.number]

    def _wait_until_left(self, name: str, timeout_s: float) -> None:
        def left() -> str:
            return ", ".join(f"client {one}" for one in sorted(self._participants(name)))

        try:
            self._wait_for(lambda: not self._participants(name), f"all to leave {name}", timeout_s)
        except OffbeatError as error:
            raise OffbeatError(f"{error}; {left() or 'nobody'} is left") from None

    def _withdraw(self, name: str, after: Iterable[Future] = ()) -> Future:
        return self.when_done(after, lambda: self._take_up(self._client.withdraw(name)))

    def _in_order(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns in the links' thread, after what was asked for before."""
        return self.when_done([], function).result()

    def _participants(self, name: str) -> dict[int, int]:
        return {} if self._view is None else self._view.participants.get(name, {})

    # Requests --------------------------------------------------------------------------------------------

    def _request(
        self,
        make: Callable[[], tuple[int, list[Send | Done | Failed]]],
        what: str,
        span: tuple[str, int, int],
        after: Iterable[Future],
        answer: Answer | None = None,
        part: tuple[str, Entries] | None = None,
    ) -> Future:
        if self._failure is not None:
            raise OffbeatError(f"{what} cannot be: {self._failure}")
        future = Future(what, lambda: self._who_is_asked(*span))
        request = _Request(make, future, self._iteration, list(after), answer, part)
        self._node.endpoint.call(self._admit, request)
        return future

    @property
    def _iteration(self) -> _Iteration | None:
        """To which what the calling thread asks for belongs."""
        return getattr(self._current, "iteration", None)

    def _push_at_once(self, name: str, content: Entries, what: str) -> Future:
        """What `_request` comes to where a part waits for nothing, for less: these are many."""
        if self._failure is not None:
            raise OffbeatError(f"{what} cannot be: {self._failure}")
        future = Future(what, lambda: self._who_is_asked(name, content.first, content.first + len(content)))
        self._node.endpoint.call(self._admit_part, name, content, future)
        return future

    def when_done(self, requests: Iterable[Future], function: Callable[[], Any] = lambda: None) -> Future:
        """Return a future of what a function returns that is called when all these requests are done.

        Args:
            requests: if one of them fails, so does the future, and the function is not called.
            function: must not wait for anything, for it is called in the thread that all requests go through.
        """
        before = list(requests)

        def first_of_them() -> str:
            first = next((one for one in before if not one.is_done), None)
            return "all of them are done" if first is None else f"{first.what} is not: {first.waits_for()}"

        future = Future("what follows other requests", first_of_them)
        self._node.endpoint.call(self._admit, _Request(None, future, None, before, finish=function))
        return future

    def _space(self, name: str) -> Space | None:
        return None if self._view is None else self._view.spaces.get(name)

    def _who_is_asked(self, name: str, first: int, last: int) -> str:
        view = self._view
        if view is None or name not in view.spaces:
            return "no server is known"
        masters = {span.holders[:1] for span in view.ring.spans(view.spaces[name], first, last)}
        named = ", ".join(f"server {master[0]}" for master in sorted(masters) if master)
        return f"its keys are with {named}" if named else "there is no server any more"

    def _wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = _START_S) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._failure is not None, timeout_s)
            if condition():
                return
            if self._failure is not None:
                raise OffbeatError(f"waited for {what} of the parameter server: {self._failure}")
            raise OffbeatError(f"waited {timeout_s:g} s for {what} of the parameter server in vain")

    # In the links' thread --------------------------------------------------------------------------------

    def _admit(self, request: _Request) -> None:
        iteration = request.iteration
        if iteration is not None:
            iteration.open_count += 1
            request.future.followers.append(lambda: self._finish_one(iteration))
        if self._failure is not None:
            request.future.finish(None, OffbeatError(self._failure))
        else:
            self._advance(request)

    def _admit_part(self, name: str, content: Entries, future: Future) -> None:
        if self._failure is not None:
            future.finish(None, OffbeatError(self._failure))
        else:
            self._combine(name, content, future)

    def _advance(self, request: _Request) -> None:
        """Send a request, once those before it are done and its iteration may run."""
        future, iteration = request.future, request.iteration
        self._waiting.discard(future)
        if future.is_done:
            return
        for one in request.before:
            if not one.is_done:
                self._waiting.add(future)
                one.followers.append(lambda: self._advance(request))
                return
            if one.error is not None:
                future.finish(None, one.error)
                return
        if iteration is not None and not iteration.begins.is_done:
            self._waiting.add(future)
            iteration.begins.followers.append(lambda: self._advance(request))
            return
        if request.make is None:
            try:
                future.finish(request.finish())
            except Exception as error:
                future.finish(None, error)
            return
        if request.part is not None:
            self._combine(*request.part, future)
            return
        self._send_combined()
        try:
            number, said = request.make()
        except (ProtocolError, ValueError) as error:  # it has withdrawn, or the time has been
            future.finish(None, error)
            return
        self._asked[number] = (future,), request.answer
        self._take_up(said)

    def _combine(self, name: str, content: Entries, future: Future) -> None:
        """Let a push go out as one with others; those with which it does not go before it."""
        if not self._combined.take(name, content, future):
            self._send_combined()
            self._combined.take(name, content, future)
        if len(self._combined) == 1:
            self._node.endpoint.when_idle(self._send_combined)

    def _send_combined(self) -> None:
        if not len(self._combined):
            return
        name, content, last, futures = self._combined.give()
        number, said = self._client.push(name, content, content.first, last)
        self._asked[number] = futures, None
        self._take_up(said)

    def _pieces(
        self, name: str, content: Entries | Keys | None, first: int, last: int
    ) -> Iterable[tuple[int, int]]:
        """Neighbouring keys travel in pieces that a server takes up while the next one comes."""
        step = self._piece_keys.get(name, last)
        if (
            last - first <= step
            or isinstance(content, np.ndarray)
            or getattr(content, "keys", None) is not None
        ):
            return ((first, last),)
        return [(begin, min(begin + step, last)) for begin in range(first, last, step)]

    def _take_up(self, said: Iterable[Send | Done | Failed]) -> None:
        for one in said:
            if isinstance(one, Done):
                futures, answer = self._asked.pop(one.number)
                value = None if answer is None else answer.result(one.parts, one.times)
                for future in futures:
                    future.finish(value)
            elif isinstance(one, Failed):
                futures, _ = self._asked.pop(one.number)
                for future in futures:
                    future.finish(None, OffbeatError(f"{future.what} was refused: {one.reason}"))
            elif one.to == MANAGER:
                self._node.tell(self._told(one.message))
            else:
                self._node.send(one.to, one.message)

    def _told(self, message: object) -> Event:
        """What this client has to say to the manager."""
        node = self._node.name
        match message:
            case Enlist():
                return ClientEnlists(now_s=0.0, node=node, namespace=message.namespace)
            case Reached():
                return ClientPaused(
                    now_s=0.0, node=node, namespace=message.namespace, pause=message.pause, time=message.time
                )
            case Withdraw():
                return ClientWithdraws(now_s=0.0, node=node, namespace=message.namespace)
        raise AssertionError(f"a client says no {type(message).__name__} to the manager")

    def _see(self, view: View) -> None:
        self._take_up(self._client.see(view))
        with self._changed:
            self._view = view
            self._changed.notify_all()

    def _hear(self, peer: str, message: Any) -> None:
        message = self._node.filtering.decoded(peer, message)
        if isinstance(message, Pulled):
            _, answer = self._asked.get(message.number, (None, None))
            if answer is not None:  # else it has come before
                answer.came(message.first, message.last, message.content.values)
                self._node.filtering.observe(message)
        self._take_up(self._client.hear(message))

    def _place(self, peer: str, message: Any, coming: Array) -> Array | None:
        """Where rows that were pulled belong."""
        if not isinstance(message, Pulled) or not isinstance(message.content, Entries):
            return None
        _, answer = self._asked.get(message.number, (None, None))
        place = None if answer is None else answer.place(message.first, message.last, coming)
        if place is not None:
            message.content = Entries(message.first, place, None, message.content.terms)
        return place

    def _refuse(self, refused: SpaceRefused) -> None:
        with self._changed:
            self._refused[refused.name] = refused.reason
            self._changed.notify_all()

    def _hear_group(self, action: GroupAction) -> None:
        group = self._groups.get(action.group)
        if group is not None:
            group.hear(action)

    def _end(self, cause: str) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = cause
            self._changed.notify_all()
        for group in list(self._groups.values()):
            group.end(cause)
        error = OffbeatError(f"this client is out of the parameter server: {cause}")
        waiting = [*chain.from_iterable(futures for futures, _ in self._asked.values()), *self._waiting]
        if len(self._combined):
            waiting += self._combined.give()[-1]
        self._asked.clear()
        self._waiting.clear()
        for future in waiting:
            future.finish(None, error)

    def _issue_iteration(self, iteration: _Iteration) -> None:
        if self._failure is not None:
            iteration.begins.finish(None, OffbeatError(self._failure))
            return
        self._waiting.add(iteration.begins)
        iteration.number, told = self._scheduler.issue([_CALLEE])
        self._iterations[iteration.number] = iteration
        self._run(told)

    def _finish_one(self, iteration: _Iteration) -> None:
        iteration.open_count -= 1
        if not iteration.open_count and iteration.begins.is_done and self._failure is None:
            self._finish_iteration(iteration)

    def _finish_iteration(self, iteration: _Iteration) -> None:
        self._run(self._graph.returned(iteration.number, _CALLEE))

    def _run(self, told: list[Told]) -> None:
        for one in told:
            if isinstance(one, Run):
                iteration = self._iterations.pop(one.number)
                self._graph.started(one.number, _CALLEE)
                self._waiting.discard(iteration.begins)
                iteration.begins.finish(None)
                if not iteration.open_count:
                    self._finish_iteration(iteration)


class Namespace:
    """Keys 0 to `keys` - 1 of a parameter server, with a row of numbers each; `PS.namespace` makes it.

    Attributes:
        name, keys: of the namespace.
    """

    def __init__(
        self,
        ps: PS,
        space: Space,
        update: Update | Function,
        *,
        width: int,
        dtype: str,
        combines: bool,
    ) -> None:
        self.name, self.keys = space.name, space.keys
        self._aggregates, self._update, self._combines = space.aggregates, update, combines
        self._ps = ps
        self._shape = (width,) if width else ()
        self._dtype = np.dtype(dtype)
        self._row_bytes = max(
            self._dtype.itemsize * max(width, 1), np.dtype(np.int64).itemsize
        )  # or its key's
        self._a_push = f"a push to {self.name}"
        ps._piece_keys[space.name] = max(1, _PIECE_BYTES // (self._dtype.itemsize * max(width, 1)))

    def push(
        self,
        values: ArrayLike,
        *,
        keys: ArrayLike | None = None,
        first: int = 0,
        last: int | None = None,
        weight: float = 1.0,
        settings: Settings | None = None,
        time: int | None = None,
        after: Iterable[Future] = (),
    ) -> Future:
        """Send rows for some keys.

        Args:
            values: one row a key, (K,) or (K, width). They must not change until the push is done.
            keys: (K,) whole numbers, ascending, each once; by default neighbours from `first` on.
            first, last: the range that the push is of, keys `first` to `last` - 1, where `keys` may list
                some of them or none; by default it goes from the first to the last that are listed. Where
                pushes are aggregated, it is this range that all have to push.
            weight: where pushes are aggregated, of how many the rows are the sum already: a mean is divided
                by the sum of all weights, what counts by itself by its own. With 0, and no keys of a whole
                range, this client has nothing at this time; where nobody has anything, nothing is applied.
            settings: numbers of the namespace's update that hold for this push, such as `{"lr": 0.05}`; by
                default those with which the namespace was made. Of a sum or a mean, those of the first
                client, by number, that has a weight above 0.
            time: of this push, later than those of all pushes of this client to the namespace before it; by
                default the next one. Where pushes are aggregated, what is summed is what has one time, and
                who leaves a time out and pushes later has nothing of it: all may push at a clock's time what
                they have of that clock. The future fails if others began without this client and are beyond
                that time, or if an earlier request of a later time went first.
            after: requests that have to be done before this one is sent.

        Raises:
            ValueError: rows or keys that the namespace has not got, or more than 2 GiB with `keys`; a weight
                below 0, or one other than 1 where nothing is aggregated; settings that the update does not
                take, and a function takes none; a time below 1.
            OffbeatError: this client is out of the parameter server.
        """
        rows = self._rows(values)
        self._check_size(1 if keys is None else len(rows))
        listed = None if keys is None else self._listed(keys)
        if listed is not None and len(listed) != len(rows):
            raise ValueError(f"expected a row for each key, got {len(listed)} keys and {len(rows)} rows")
        if last is None:
            if not len(rows):
                return self._nothing(None, after)
            first, last = (first, first + len(rows)) if listed is None else _ends(listed)
        begin, end = self._range(first, last)
        content = Entries(begin, rows, listed)
        if listed is None:
            problem = problem_of_rows(content, begin, end)
        elif not len(listed) or (begin <= listed[0] and listed[-1] < end):
            problem = ""
        else:
            problem = f"expected keys from {begin} to below {end}, got {listed[0]} to {listed[-1]}"
        if problem:
            raise ValueError(problem)
        if weight != 1.0 or settings is not None:
            content.terms = self._terms(weight, settings)
        if time is None and after == () and self._may_combine(content) and self._ps._iteration is None:
            return self._ps._push_at_once(self.name, content, self._a_push)
        return self._push(content, begin, end, time, after)

    def put(
        self,
        values: ArrayLike,
        *,
        first: int = 0,
        states: Mapping[str, ArrayLike] | None = None,
        time: int | None = None,
        after: Iterable[Future] = (),
    ) -> Future:
        """Replace the rows of neighbouring keys, and what the update keeps besides them, whatever it is.

        It is one of this client's pushes of these keys: it comes behind those before it, once, and to all
        replicas. Where pushes are aggregated, it is this client's push of its time: if any of that time is a
        put, the put of the first client, by number, is applied, and nothing else of that time.

        Args:
            values: one row a key, (K,) or (K, width). They must not change until it is done.
            first: the first key.
            states: by the names that the update has for them, rows beside those of `values`; zero for those
                that are left out.
            time: as for `push`.
            after: requests that have to be done before this one is sent.

        Raises:
            ValueError: rows, keys or states that the namespace has not got; a time below 1.
            OffbeatError: this client is out of the parameter server.
        """
        rows = self._rows(values)
        self._check_size(1)
        given = {name: np.ascontiguousarray(one, self._dtype) for name, one in (states or {}).items()}
        for name, one in given.items():
            if one.shape != rows.shape:
                raise ValueError(f"expected {name} of shape {rows.shape}, beside the values, got {one.shape}")
        if not isinstance(self._update, Function):
            check_states(self._update, given)
        if not len(rows):
            return self._nothing(None, after)
        begin, end = self._range(first, first + len(rows))
        return self._push(Entries(begin, rows, None, Terms(states=given)), begin, end, time, after)

    def pull(
        self,
        *,
        keys: ArrayLike | None = None,
        first: int = 0,
        last: int | None = None,
        states: bool = False,
        times: bool = False,
        after: Iterable[Future] = (),
    ) -> Future:
        """Fetch the rows of some keys; those that nobody has pushed are zero.

        Args:
            keys: (K,) whole numbers, ascending, each once; by default all from `first` to `last` - 1.
            first, last: see `keys`; by default all keys.
            states: what the update keeps besides the rows, too, by name, and the rows as "values": a
                dictionary takes the place of the rows in what is returned.
            times: the times of this client's own pushes that are in these very rows, too. Then the future is
                of a pair, whose second are `Piece`s (first, last, time), ascending: keys `first` to
                `last` - 1 hold this client's pushes up to `time`. Keys that hold none are in no piece. Where
                keys are listed, pieces are also of those between them.
            after: requests that have to be done before this one is sent.

        Returns:
            A future of the rows, (K,) or (K, width); or as `states` and `times` say.

        Raises:
            ValueError: keys that the namespace has not got, or more than 2 GiB with `keys`.
            OffbeatError: this client is out of the parameter server.
        """
        count = 1 if keys is None else np.size(keys)
        self._check_size(count * (1 + len(self._states)) if states else count)
        listed = None if keys is None else self._listed(keys)
        if listed is not None and not len(listed):
            rows = np.zeros((0, *self._shape), self._dtype)
            empty = dict.fromkeys(("values", *self._states), rows) if states else rows
            return self._nothing((empty, ()) if times else empty, after)
        begin, end = (
            self._range(first, self.keys if last is None else last) if listed is None else _ends(listed)
        )
        client, name = self._ps._client, self.name
        return self._ps._request(
            lambda: client.pull(name, begin, end, listed, states=states, times=times),
            f"a pull from {name}",
            (name, begin, end),
            after,
            Answer(
                *(begin, end, listed, self._shape, self._dtype, self._ps._buffers), states=states, times=times
            ),
        )

    def report(self) -> dict[str, dict[str, Passed]]:
        """Return how many bytes each filter was given and gave at this client, by kind of message and filter.

        The kinds are "push"; "ask" for the keys that pulls list; "pull heard" for what is undone here.
        """
        found: dict[str, dict[str, Passed]] = self._ps._in_order(
            lambda: self._ps._node.filtering.report(self.name)
        )
        return found

    def set_margin(self, margin: float) -> None:
        """Let the KKT filter go by another margin in what is pulled from now on; see `numerics.filters.KKT`.

        Where pushes are aggregated, all who take part have to skip the same keys: a sum that lacks the share
        of one is no gradient. They do if each key is pushed and then pulled once between two changes of the
        margin, and each waits for all of it before the next change.

        Args:
            margin: at least 0; infinite, as at first, for skipping nothing until there is another one.

        Raises:
            ValueError: the namespace has no such filter, or no such margin.
            OffbeatError: this client is out of the parameter server.
        """
        self._ps._in_order(lambda: self._ps._node.filtering.kkt(self.name).set_margin(margin))

    def active(self, keys: ArrayLike) -> NDArray[np.bool_]:
        """Return which keys the KKT filter does not leave out of pushes: of others, nothing need be computed.

        What is not pushed at all is not in the report as left out.

        Args:
            keys: (K,), ascending, each once.

        Raises:
            ValueError: keys that the namespace has not got, or it has no such filter.
            OffbeatError: this client is out of the parameter server.
        """
        listed = self._listed(keys)
        found: NDArray[np.bool_] = self._ps._in_order(
            lambda: self._ps._node.filtering.kkt(self.name).active(listed)
        )
        return found

    def take_part(self, clients: int = 1, timeout_s: float = TIMEOUT_S) -> int:
        """Take part in a namespace that aggregates, and wait until so many clients do, this one among them.

        Who pushes without having said so takes part from then on. Clients that are to begin together call
        this before any of them pushes.

        Returns:
            The time of this client's first push: 1 if nobody has pushed before, or one that is later than
            those of all pushes of others.

        Raises:
            OffbeatError: it does not aggregate, this client has withdrawn, or so many did not come within
                `timeout_s` seconds.
        """
        return self._ps._take_part(self.name, clients, timeout_s)

    @property
    def participants(self) -> tuple[int, ...]:
        """The numbers of the clients that take part in a namespace that aggregates, ascending."""
        return tuple(sorted(self._ps._participants(self.name)))

    def wait_until_left(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until nobody takes part any more: all that was pushed is done then.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds; names who is left.
        """
        self._ps._wait_until_left(self.name, timeout_s)

    def withdraw(self, timeout_s: float = TIMEOUT_S) -> None:
        """Push no more to a namespace that aggregates, so that nobody waits for this client.

        It cannot come back.

        Raises:
            OffbeatError: pushes to it are not done.
        """
        self._ps._withdraw(self.name).result(timeout_s)

    def withdraw_after(self, requests: Iterable[Future]) -> Future:
        """Withdraw once these requests are done, without waiting for it; if one fails, so does the future."""
        return self._ps._withdraw(self.name, requests)

    def _push(
        self, content: Entries, first: int, last: int, time: int | None, after: Iterable[Future]
    ) -> Future:
        if time is not None and not 1 <= operator.index(time) < 2**63:
            raise ValueError(f"expected a time of 1 to 2**63 - 1, got {time}")
        chosen = None if time is None else operator.index(time)
        client, name = self._ps._client, self.name
        return self._ps._request(
            lambda: client.push(name, content, first, last, chosen),
            self._a_push,
            (name, first, last),
            after,
            part=(name, content) if time is None and self._may_combine(content) else None,
        )

    def _may_combine(self, content: Entries) -> bool:
        is_plain = content.keys is None and content.terms is None
        return is_plain and self._combines and content.values.nbytes <= COMBINED_BYTES_MAX // 2

    def _rows(self, values: ArrayLike) -> Rows:
        rows: Rows = np.ascontiguousarray(values, dtype=self._dtype)
        if rows.shape[1:] != self._shape or rows.ndim != 1 + len(self._shape):
            raise ValueError(f"expected rows of shape {self._shape}, got values of {rows.shape}")
        return rows

    def _terms(self, weight: float, settings: Settings | None) -> Terms:
        check_weight(weight)
        if weight != 1.0 and not self._aggregates:
            raise ValueError(f"expected no weight where pushes are not aggregated, got {weight}")
        if settings is None:
            return Terms(float(weight))
        if isinstance(self._update, Function):
            raise ValueError(f"expected no settings for a function of your own, got {dict(settings)}")
        changed = with_settings(self._update, settings)
        return Terms(float(weight), {name: getattr(changed, name) for name in settings})

    def _check_size(self, rows: int) -> None:
        """See whether so many rows, or their keys, can be one array; neighbours travel in pieces anyway."""
        if rows * self._row_bytes > ARRAY_BYTES_MAX:
            raise ValueError(
                f"expected at most {ARRAY_BYTES_MAX} bytes of rows or of keys at once, "
                f"got {rows * self._row_bytes}; push or pull ranges of keys, one after the other"
            )

    def _listed(self, keys: ArrayLike) -> Keys:
        found = np.ascontiguousarray(keys)
        if found.dtype.kind not in "iu" and len(found):
            raise ValueError(f"expected whole numbers as keys, got {found.dtype}")
        listed: Keys = found.astype(np.int64, copy=False)
        if wrong := problem_of(Entries(0, listed, listed), 0, self.keys):
            raise ValueError(f"{wrong}; sort them, and add up what is for the same key")
        return listed

    def _range(self, first: int, last: int) -> tuple[int, int]:
        if not 0 <= first < last <= self.keys:
            raise ValueError(f"expected keys from 0 to {self.keys - 1}, got {first} to {last - 1}")
        return first, last

    @property
    def _states(self) -> tuple[str, ...]:
        """What is kept besides the values, as far as is known here."""
        return () if isinstance(self._update, Function) else tuple(self._update.states)

    def _nothing(self, value: Any, after: Iterable[Future]) -> Future:
        return self._ps.when_done(after, lambda: value)


def _cut(content: Entries | Keys, first: int, last: int) -> Entries | Keys:
    return (
        content.cut(first, last) if isinstance(content, Entries) else content[places_of(content, first, last)]
    )


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


def _ends(listed: Keys) -> tuple[int, int]:
    return int(listed[0]), int(listed[-1]) + 1
