"""A group of which only one member exists: what its averager asks of binding, exchange and session.

Random decisions change the group, abandon exchanges, leave memory to readers and exclude the member; equal
seeds give equal decisions, whatever the device. The other members contribute nothing but, where this member
is not the first, the first one's buffers and hyperparameters.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from offbeat.runtime.averaging.group_binding import GroupChangedError, GroupHandle
from offbeat.runtime.collectives.interface import TensorMemory
from offbeat.runtime.processes.threads import start_thread
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.trained import TrainingState
from offbeat.runtime.training.writes import WriteDetector

LR = 0.25


class _Pending:
    def __init__(self, group):
        self._group, self.is_done, self.is_abandoned, self.clock = group, False, False, {}
        self.own_clock = {}  # when this worker's own thread has read what it alone reads

    @property
    def ended_s(self):
        return 0.0 if self._group.is_exchange_over() else None

    def wait(self, timeout_s):
        self._group.before_wait()
        self._group.run_until(lambda: self.is_done, "the end of an exchange")
        self._group.join_host(self.clock)


class SimulatedExchange:
    """Sums at once, as soon as it may read; what is prepared is overwritten at once."""

    device = torch.device("cpu")

    def __init__(self, group):
        self._group, self.pending = group, []
        self._last_call = (-1, -1)

    @property
    def keeps_order(self):
        return self._group.keeps_order

    def all_reduce(self, flat, into, *, exchange_id, index=0, after=None, external=(), **_):
        assert not self.keeps_order or (exchange_id, index) > self._last_call
        self._last_call = exchange_id, index
        pending, group = _Pending(self._group), self._group
        self.pending.append(pending)
        others = group.contribution_of_others(index, flat)

        def begin():
            if pending.is_abandoned:
                return
            with group.in_io_thread() as clock:
                for part in external:
                    group.host_access(part.values, writes=False, what="a link adds")
                pending.own_clock = clock()
                group.host_access(flat, writes=False, what="a link sends")
                group.host_access(into, writes=True, what="a link receives")
                with group.unseen():
                    values = flat.clone()
                    for part in external:
                        span = slice(part.start, part.start + len(part.values))
                        values[span] = torch.mul(part.values, part.factor)
                    into.copy_(values if others is None else values + others)
                pending.is_done, pending.clock = True, clock()

        begin() if after is None else after(begin)
        return pending

    def prepare(self, into, *, exchange_id, index=0, after=None, **_):
        group = self._group

        def receive():
            with group.in_io_thread():
                group.host_access(into, writes=True, what="a link receives early")
                with group.unseen():
                    into.fill_(float("nan") if into.is_floating_point() else 99)

        receive() if after is None else after(receive)

    def broadcast(self, flat, *, root, exchange_id, index=0):
        pending = _Pending(self._group)
        pending.is_done = True
        return pending

    def abandon(self):
        for pending in self.pending:
            pending.is_abandoned = True


class _LateGradients:
    """The late gradients that a test lets count in the next round."""

    def __init__(self):
        self.active = []

    def set_tensors(self, parameters, get_buffers):
        pass

    def activate_accepted(self):
        pass

    def clear_active(self):
        self.active = []

    def send_gradient(self, weight):
        pass


class SimulatedLinks:
    """The links of a worker that allocates its memory on a device: their thread, and who reads the memory.

    Args:
        device: a `LateDevice`, or the host.

    Attributes:
        tensors: what it has allocated on the host.
        keeps_order: see `Exchange`; checked.
    """

    keeps_order = False

    def __init__(self, device):
        self.device, self._late = device, device if device.has_streams else None
        self.tensors = TensorMemory(SimpleNamespace(allocate_shared=lambda size_bytes: None), device)
        self._is_read = False

    def zeros(self, elements, dtype):
        return self.tensors.zeros(elements, dtype)

    def may_be_read(self, flat):
        return self._is_read

    def is_exchange_over(self):
        """Whether somebody who does not wait for an exchange sees its end."""
        return False

    @contextmanager
    def in_io_thread(self):
        if self._late is None:
            yield dict
        else:
            with self._late.acting_as("the I/O thread", self._late.clock()):
                yield self._late.clock

    def host_access(self, tensor, *, writes, what):
        if self._late is not None:
            self._late.access(tensor, writes=writes, what=what)

    @contextmanager
    def unseen(self):
        if self._late is None:
            yield
        else:
            with self._late._unseen():
                yield

    def run_until(self, condition, what):
        if self._late is None:
            assert condition(), what
        else:
            self._late.run_until(condition, what)

    def join_host(self, clock):
        if self._late is not None:
            self._late.wait_for_host(clock)


class SimulatedGroup(SimulatedLinks):
    """Binding, session and memory for one averager; see the module.

    Args:
        seed: of the decisions.
        device: a `LateDevice`, or the host.
        changes: the group changes, and with it all that can happen then.

    Attributes:
        averager: set by the test before the first round.
        position: this member's.
    """

    def __init__(self, seed, device, model, optimizer, *, changes=True):
        super().__init__(device)
        self._random, self._changes = random.Random(seed), changes
        self._optimizer, self._model = optimizer, model
        self.memory = self
        self.exchange_device = torch.device("cpu")
        self.membership = SimpleNamespace(exchange_id=0, round=0, step=0, is_member=True, generation=0)
        self.was_state_replaced, self._size, self.position = False, 2, 0
        self._handle = None
        self._abandons_at = None
        self.late_gradients = _LateGradients()
        self._failures = []  # of threads
        self._now_s = 0.0
        self.timer = PartTimer(self._clock)
        self.tracer, self.has_preemption_signal = None, False
        self.writes = WriteDetector(TrainingState(model, [optimizer]))
        self.averager = None

    def _clock(self):
        self._now_s += 1.0
        return self._now_s

    # The binding -------------------------------------------------------------------------------------------

    def start_thread(self, name, run):
        return start_thread(name, run, on_failure=self._failures.append)

    def acquire(self, *, wait, may_replace_state=False):
        if self._handle is None:
            if wait and self._changes and self._random.random() < 0.1:
                return None  # excluded from this round
            if self._changes:
                self._size = self._random.choice([2, 2, 3, 5])
                self.position = self._random.choice([0, 1])
            self.membership.generation += 1
            self._handle = GroupHandle(
                exchange=SimulatedExchange(self),
                algorithm="ring",
                members=tuple(range(self._size)),
                position=self.position,
                weight=1.0,
                generation=self.membership.generation,
            )
        if wait and self._changes and self._abandons_at is None and self._random.random() < 0.3:
            self._abandons_at = self._random.randrange(4)
        return self._handle

    def before_wait(self):
        """Abandons the exchanges of this group where that was decided."""
        if self._abandons_at is None:
            return
        self._abandons_at -= 1
        if self._abandons_at < 0:
            self._abandons_at = None
            self._leave()
            raise GroupChangedError("the group has changed")

    def _leave(self):
        exchange = self._handle.exchange
        exchange.abandon()
        self._handle = None
        self._is_read = self._random.random() < 0.5
        if not self._is_read:  # all that was sent has been read
            for pending in exchange.pending:
                self.join_host(pending.clock)

    def next_exchange_id(self):
        self._is_read = False  # what was read has been replaced
        self.membership.exchange_id += 1
        return self.membership.exchange_id - 1

    @property
    def is_stable(self):
        return self._handle is not None

    def finish_round(self, contributions):
        self._abandons_at = None
        if self._changes and self._random.random() < 0.15:
            self._leave()
            return False
        self.membership.round += 1
        if self._changes and self._random.random() < 0.3:
            self._handle.exchange.abandon()
            self._handle = None
        return True

    def contribution_of_others(self, index, flat):
        """The first member's buffers and hyperparameters, where this member is not the first."""
        with self.unseen():
            if self.position == 0:
                return None
            others = torch.zeros(flat.shape, dtype=flat.dtype)
            buckets = self.averager._buckets
            bucket, trailer = buckets._buckets[index], buckets._trailer
            offset = dict(zip(bucket.entries, bucket.offsets, strict=True))
            count = len(buckets._parameters)
            for number, buffer in enumerate(self._model.buffers(), count):
                if number in offset:
                    others[offset[number] : offset[number] + buffer.numel()] = 3
            if (last := buckets._trailer_entry) in offset:
                encoded = trailer.encode(
                    0,
                    weight=0.0,
                    is_stale=False,
                    writes=0,
                    is_preempted=False,
                    round_s=0.0,
                    offset_s=0.0,
                    has_gradient=[False] * count,
                    hyperparameters=[LR / 2],
                )
                others[offset[last] :] = torch.tensor(encoded, dtype=flat.dtype)
            return others

    # The session -------------------------------------------------------------------------------------------

    def raise_if_failed(self):
        assert not self._failures

    def on_computed(self, wait_for_compute_s):
        pass

    def announce_gradients(self, compute_s):
        return 1, 0

    def hyperparameters(self):
        return [group["lr"] for group in self._optimizer.param_groups]

    def apply_hyperparameters(self, values, groups=None):
        for group, value in zip(groups or self._optimizer.param_groups, values, strict=True):
            group["lr"] = value
