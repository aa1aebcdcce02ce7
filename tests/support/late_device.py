"""A device without hardware whose streams run late, and a checker of what its copies and kernels touch.

A tensor of this device is a tensor of the CPU whose memory is registered here. A program runs under the
device as a dispatch mode, which sees all operations of torch, also those of autograd. Operations on its
tensors are queued on the current stream; until they run, in the order of the stream and after a random delay,
their results hold garbage. Memory of the host that was pinned here is shared with the program as it is.

Whatever happens to run first, the checker finds each pair of accesses to the same memory of which at least
one writes, and that nothing orders: happens-before, by vector clocks. Streams, events, `call_after` and the
waits of the host make orders.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

Clock = dict[str, int]

# Synchronizations that a device can leave out, for the checker to find.
PACKING = "a copy out does not wait for the streams that pack"
COPIED_OUT = "a link does not wait for the copy out of what it sends"
COPIED_IN = "a link does not wait for the copy in of what it overwrites"
MEANS = "the current stream does not wait for the means"
COPIED_BACK = "a contribution is copied back before it has been copied out"
RECORDED = "a stream does not wait for what another had queued when an event was recorded"
FINISHED = "the host does not wait for an event"
OVERWRITTEN = "the host does not wait for the copy in of what it overwrites"


class RaceError(AssertionError):
    """Two accesses that nothing orders."""


def joined(one: Clock, other: Clock) -> Clock:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {*one, *other}}


@dataclass
class Event:
    """Something that a stream does; `kind` is "out" or "in" for the end of a copy."""

    stream: Stream
    position: int
    clock: Clock
    kind: str = ""

    @property
    def has_happened(self) -> bool:
        return self.stream.executed >= self.position


@dataclass(eq=False)
class Stream:
    """Work in the order in which it was queued; entries are calls, or events of other streams to wait for."""

    name: str
    clock: Clock = field(default_factory=dict)
    queue: deque[Callable[[], object] | Event] = field(default_factory=deque)
    executed: int = 0
    queued: int = 0

    def __hash__(self) -> int:
        return hash(self.name)

    def put(self, entry: Callable[[], object] | Event) -> None:
        self.queue.append(entry)
        self.queued += 1

    @property
    def may_run(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], Event) or self.queue[0].has_happened)

    def run_one(self) -> None:
        entry = self.queue.popleft()
        if not isinstance(entry, Event):
            entry()
        self.executed += 1


@dataclass(frozen=True)
class _Access:
    start: int
    stop: int
    writes: bool
    who: str
    time: int
    what: str


class _Thread(threading.local):
    """What each thread has of its own: its name in the order of accesses, its current stream, its waits."""

    name = "the loop"
    stream: Stream | None = None
    synchronizations = 0


class _DeepCopies(TorchFunctionMode):
    """Makes deep copies of a device's tensors as torch does on hardware: by its current stream."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__ or not self._device._find(args[0]):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


class LateDevice(TorchDispatchMode):
    """See `Accelerator`.

    Args:
        seed: of the delays.
        without: a synchronization that this device leaves out.
        before_queueing: called before work is queued and while the host waits, where another thread may get
            its turn; of several threads only one may run at a time.

    Attributes:
        synchronizations: how often this thread has waited for the device, but in `synchronize_event`.
        awaited: the kinds of the events for which the host has waited in `synchronize_event`.
        awaited_early: of these, the kinds of those that had not happened yet.
    """

    has_streams = True
    torch_device = torch.device("cpu", 0)  # torch takes it for the CPU, and factories pass it on

    def __init__(
        self,
        seed: int,
        without: str | None = None,
        before_queueing: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._random, self._without = random.Random(seed), without
        self._before_queueing = before_queueing
        self._compute = Stream("compute")
        self._side, self._out, self._in = Stream("side"), Stream("copies out"), Stream("copies in")
        self._streams = [self._compute, self._side, self._out, self._in]
        self._thread = _Thread()
        self._deep_copies = _DeepCopies(self)
        self._host_clocks: dict[str, Clock] = {}
        self._callbacks: deque[tuple[list[Event], Clock, Callable[[], object]]] = deque()
        self._kept: dict[int, tuple[Any, bool]] = {}  # storages by address, and whether they are the device's
        self._accesses: dict[int, list[_Access]] = {}
        self._is_running = False
        self.awaited, self.awaited_early = [], []

    def __enter__(self) -> LateDevice:
        super().__enter__()
        self._deep_copies.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._deep_copies.__exit__(*error)
        super().__exit__(*error)

    # Memory ----------------------------------------------------------------------------------------------

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a tensor one of this device, with the values that it has."""
        self._keep(tensor, is_device=True)
        return tensor

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=self.torch_device)

    def pinned_zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        with self._unseen():
            flat = torch.zeros(elements, dtype=dtype)
        self._keep(flat, is_device=False)
        return flat

    def pin(self, memory: memoryview) -> bool:
        self._keep(torch.frombuffer(memory, dtype=torch.uint8), is_device=False)
        return True

    def _keep(self, tensor: torch.Tensor, *, is_device: bool) -> None:
        storage = tensor.untyped_storage()
        self._kept[storage.data_ptr()] = storage, is_device  # alive, so that no address means two memories

    def _find(self, tensor: torch.Tensor) -> bool | None:
        """Whether a tensor is the device's; None if it is neither the device's nor pinned."""
        found = self._kept.get(tensor.untyped_storage().data_ptr())
        return None if found is None or not tensor.numel() else found[1]

    @contextmanager
    def _unseen(self):
        with torch.utils._python_dispatch._disable_current_modes():
            yield

    # The order of accesses -------------------------------------------------------------------------------

    def _tick(self, who: str, clock: Clock) -> None:
        clock[who] = clock.get(who, 0) + 1

    def _host_clock(self) -> Clock:
        return self._host_clocks.setdefault(self._host, {})

    @property
    def synchronizations(self) -> int:
        return self._thread.synchronizations

    @property
    def _host(self) -> str:
        return self._thread.name

    @contextmanager
    def acting_as(self, host: str, after: Clock):
        """What follows is done by another thread of the host, after what the clock says."""
        before, self._thread.name = self._host, host
        self._host_clocks[host] = joined(self._host_clock(), after)
        try:
            yield
        finally:
            self._thread.name = before

    def clock(self) -> Clock:
        """The clock of this thread of the host."""
        return dict(self._host_clock())

    def wait_for_host(self, clock: Clock) -> None:
        """This thread of the host has waited for another."""
        self._host_clocks[self._host] = joined(self._host_clock(), clock)

    def access(self, tensor: torch.Tensor, *, writes: bool, what: str) -> None:
        """Records that this thread of the host reads or writes a tensor."""
        self._tick(self._host, self._host_clock())
        self._check(tensor, writes, self._host, self._host_clock(), what)

    def _check(self, tensor: torch.Tensor, writes: bool, who: str, clock: Clock, what: str) -> None:
        if self._find(tensor) is None:
            return
        base = tensor.untyped_storage().data_ptr()
        start = tensor.data_ptr()
        span = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        stop = start + span * tensor.element_size()
        kept = []
        for one in self._accesses.get(base, ()):
            overlaps = one.start < stop and start < one.stop
            is_ordered = clock.get(one.who, 0) >= one.time
            if overlaps and (writes or one.writes) and not is_ordered:
                raise RaceError(
                    f"{who} {'writes' if writes else 'reads'} in {what} what {one.who} "
                    f"{'writes' if one.writes else 'reads'} in {one.what}, and nothing orders the two"
                )
            if not (writes and start <= one.start and one.stop <= stop):
                kept.append(one)
        self._accesses[base] = [*kept, _Access(start, stop, writes, who, clock[who], what)]

    # Streams ---------------------------------------------------------------------------------------------

    def _queue(
        self,
        stream: Stream,
        run: Callable[[], object],
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        what: str,
    ) -> None:
        self._before_queueing()
        stream.clock = joined(stream.clock, self._host_clock())
        self._tick(stream.name, stream.clock)
        for tensor in reads:
            self._check(tensor, False, stream.name, stream.clock, what)
        for tensor in writes:
            self._check(tensor, True, stream.name, stream.clock, what)
        stream.put(run)
        self._maybe_run()

    def _record(self, stream: Stream, kind: str = "") -> Event:
        stream.clock = joined(stream.clock, self._host_clock())
        return Event(stream, stream.queued, dict(stream.clock), kind)

    def _wait(self, stream: Stream, event: Event) -> None:
        stream.clock = joined(stream.clock, event.clock)
        stream.put(event)

    def _maybe_run(self) -> None:
        while self._random.random() < 0.4 and self.run_one():
            pass

    def run_one(self) -> bool:
        """Does one piece of the work that is due, of a random stream; returns whether there was any."""
        if self._is_running:
            return False
        streams = [one for one in self._streams if one.may_run]
        if streams:
            self._is_running = True
            try:
                with self._unseen(), torch.no_grad():
                    self._random.choice(streams).run_one()
            finally:
                self._is_running = False
        has_called = self._call_back()
        return bool(streams) or has_called

    def _call_back(self) -> bool:
        has_called = False
        while self._callbacks and all(event.has_happened for event in self._callbacks[0][0]):
            events, clock, callback = self._callbacks.popleft()
            for event in events:
                left_out = {"out": COPIED_OUT, "in": COPIED_IN}[event.kind]
                if self._without != left_out:
                    clock = joined(clock, event.clock)
            has_called = True
            with self.acting_as("the waiting thread", clock):
                callback()
        return has_called

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        """Runs until a condition holds."""
        while not condition():
            self._before_queueing()
            assert condition() or self.run_one(), f"{what} never happens: nothing is left to run"

    def _synchronize(self, event: Event) -> None:
        self._thread.synchronizations += 1
        self.run_until(lambda: event.has_happened, "an event")
        self.wait_for_host(event.clock)

    # Accelerator -----------------------------------------------------------------------------------------

    def current_stream(self) -> Stream:
        return self._thread.stream or self._compute

    def new_stream(self) -> Stream:
        self._streams.append(Stream(f"stream {len(self._streams)}"))
        return self._streams[-1]

    @contextmanager
    def on_stream(self, stream: Stream):
        before, self._thread.stream = self._thread.stream, stream
        try:
            yield
        finally:
            self._thread.stream = before

    @contextmanager
    def on_side_stream(self, *, waits: bool = True):
        """Queues on another stream; with `waits`, after what the current one has queued."""
        if waits:
            self._wait(self._side, self._record(self.current_stream()))
        with self.on_stream(self._side):
            yield

    def join_side_stream(self) -> None:
        self._wait(self.current_stream(), self._record(self._side))

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Any]) -> Event:
        for stream in [] if self._without == PACKING else [*after]:
            self._wait(self._out, self._record(stream))
        return self._copy(source, target, self._out, "out")

    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: Iterable[Event]) -> Event:
        for event in after:
            if self._without != {"out": COPIED_BACK, "": RECORDED}.get(event.kind, MEANS):
                self._wait(self._in, event)
        return self._copy(source, target, self._in, "in")

    def record_event(self) -> Event:
        return self._record(self.current_stream())

    def keep_for_stream(self, tensor: torch.Tensor) -> None:
        pass  # all memory is kept

    def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream, kind: str) -> Event:
        assert self._find(source) is not None
        assert self._find(target) is not None
        self._queue(stream, lambda: target.copy_(source), [source], [target], f"a copy {kind}")
        return self._record(stream, kind)

    def make_stream_wait(self, event: Event) -> None:
        if self._without != {"in": MEANS, "": RECORDED}[event.kind]:
            self._wait(self.current_stream(), event)

    def call_after(self, events: Iterable[Event], callback: Callable[[], object]) -> None:
        self._callbacks.append(([*events], self.clock(), callback))
        self._maybe_run()

    def synchronize_event(self, event: Event) -> None:
        self.awaited.append(event.kind)
        if not event.has_happened:
            self.awaited_early.append(event.kind)
        self.run_until(lambda: event.has_happened, "an event")
        if self._without != (OVERWRITTEN if event.kind == "in" else FINISHED):
            self.wait_for_host(event.clock)

    def check_not_capturing(self) -> None:
        pass

    def synchronize(self) -> None:
        for stream in self._streams:
            self._synchronize(self._record(stream))

    def close(self) -> None:
        self.synchronize()

    def record_time(self) -> Event:
        return self._record(self.current_stream())

    def elapsed_s(self, begin: Event, end: Event) -> float | None:
        if not (begin.has_happened and end.has_happened):
            return None
        return float(end.position - begin.position)

    # Operations ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_factory = kwargs.get("device") == self.torch_device
        if is_factory:
            kwargs["device"] = torch.device("cpu")
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not is_factory and not any(self._find(one) for one in tensors):
            return self._on_host(func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self._synchronize(self._record(self.current_stream()))
            self.access(args[0], writes=False, what=str(func))
            return func(*args, **kwargs)
        returns = [one.alias_info for one in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returns):  # a view
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written:
            return self._write(func, args, kwargs, tensors, written)
        return self._compute_new(func, args, kwargs, tensors)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = _written(func, args, kwargs)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and self._find(tensor) is False and _is_data_used(func):
                is_written = any(tensor is one for one in written)
                self.access(tensor, writes=is_written, what=str(func))
        return func(*args, **kwargs)

    def _write(self, func: Any, args: Any, kwargs: Any, tensors: Any, written: Any) -> Any:
        """An operation into memory that exists: queued, but where it writes pageable memory of the host."""
        if not any(self._find(one) for one in written):  # to the host, and not by `copy_out`
            self._synchronize(self._record(self.current_stream()))
            for tensor in tensors:
                is_written = any(tensor is one for one in written)
                self.access(tensor, writes=is_written, what=str(func))
            return func(*args, **kwargs)
        frozen = self._frozen(args, kwargs)
        reads = [one for one in tensors if not any(one is other for other in written)]
        self._queue(self.current_stream(), lambda: func(*frozen[0], **frozen[1]), reads, written, str(func))
        if not func._schema.returns:
            return None
        return written[0] if len(written) == 1 else tuple(written)

    def _frozen(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as they are now: pageable memory is copied at once.

        What runs late counts as no change for autograd, which has counted it when it was queued.
        """

        def freeze(tensor: torch.Tensor) -> torch.Tensor:
            found = self._find(tensor)
            return tensor.clone() if found is None and tensor.numel() else tensor.data

        return tree_map_only(torch.Tensor, freeze, (args, kwargs))

    def _compute_new(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """An operation with new results: garbage until it runs."""

        def as_meta(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        meta_args, meta_kwargs = tree_map_only(torch.Tensor, as_meta, (args, kwargs))
        if "device" in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        leaves, shape = tree_flatten(func(*meta_args, **meta_kwargs))
        results = [self._garbage(one) if isinstance(one, torch.Tensor) else one for one in leaves]
        frozen = self._frozen(args, kwargs)

        def run() -> None:
            for result, value in zip(results, tree_leaves(func(*frozen[0], **frozen[1])), strict=True):
                if isinstance(result, torch.Tensor):
                    result.data.copy_(value)

        new = [one for one in results if isinstance(one, torch.Tensor)]
        if "empty" in str(func):  # the results stay garbage; what the memory held before may still be in use
            self._queue(self.current_stream(), lambda: None, [], new, "an allocation")
        else:
            self._queue(self.current_stream(), run, tensors, new, str(func))
        return tree_unflatten(results, shape)

    def _garbage(self, like: torch.Tensor) -> torch.Tensor:
        fill = float("nan") if like.is_floating_point() else 77
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).fill_(fill)
        self._keep(made, is_device=True)
        return made


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
    return found


def _is_data_used(func: Any) -> bool:
    """Whether an operation reads or writes elements: a view does not."""
    return not any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
