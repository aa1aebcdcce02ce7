"""A member and a worker outside its group, of which one may train on a device whose streams run late.

Random decisions, the same on every device: when a late block is assigned, computed, accepted or revoked, and
what is dropped in between. The links between the two deliver messages in pieces, at any time.
"""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch import nn

from offbeat.events import AssignBlocks, AssignLateBlock, Block, LateGradientArrived, ResolveLateBlock
from offbeat.policies.data.block_queue import BlockQueue
from offbeat.runtime.data.late_gradients import LateGradients
from support.late_device import joined

MEMBER, OUTSIDE = 0, 1
STEPS = 25
LR, WEIGHT = 0.125, 0.5


class Model(nn.Module):
    """Has a parameter of another layout, one in half precision, one used now and then, and two buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.other = nn.Parameter(torch.randn(3, 6).t())
        self.scales = nn.Parameter(torch.randn(3).bfloat16())
        self.seldom = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, with_seldom):
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
            self.count.add_(1)
        x = x @ self.other * self.scales
        return x + self.seldom if with_seldom else x


class _Lock:
    """Orders what its holders do, as a lock does."""

    def __init__(self, late):
        self._late, self._clock = late, {}

    def __enter__(self):
        if self._late is not None:
            self._late.wait_for_host(self._clock)

    def __exit__(self, *_):
        if self._late is not None:
            self._clock = joined(self._clock, self._late.clock())

    def notify_all(self):
        pass


class _Message:
    def __init__(self, tag, data, on_done, clock):
        self.tag, self.data, self.on_done, self.clock, self.sent = tag, data, on_done, clock, 0


class _Receive:
    def __init__(self, into, on_data):
        self.into, self.on_data = into, on_data


class _Endpoint:
    """One worker's end of the link: see `Endpoint`; its pieces are delivered by `deliver`."""

    def __init__(self, late, seed):
        self._late, self._random = late, random.Random(seed)
        self._posted, self._queue, self._cancelled = {}, [], []
        self.peer = None

    def send_tensor(self, peer, tag, data, *, priority, on_done):
        if not self._is_cancelled(tag):
            clock = {} if self._late is None else self._late.clock()
            self._queue.append(_Message(tag, data, on_done, clock))

    def post_receive(self, peer, tag, into, on_data):
        if not self._is_cancelled(tag):
            self._posted[tag] = _Receive(into, on_data)

    def cancel(self, first, last):
        self._cancelled.append(range(first, last))
        self._queue = [one for one in self._queue if not first <= one.tag < last]
        self._posted = {tag: one for tag, one in self._posted.items() if not first <= tag < last}

    def _is_cancelled(self, tag):
        return any(tag in tags for tags in self._cancelled)

    def deliver(self):
        """Sends a piece of a message to the peer; returns whether there was one."""
        due = [one for one in self._queue if one.tag in self.peer._posted or self.peer._is_cancelled(one.tag)]
        if not due:
            return False
        message = self._random.choice(due)
        start, left = message.sent, len(message.data) - message.sent
        stop = start + (left if self._random.random() < 0.5 else self._random.randint(1, left))
        message.sent = stop
        if stop == len(message.data):
            self._queue.remove(message)
        with self.in_io_thread(message.clock):
            self.access(message.data, start, stop, writes=False, what="a link sends")
            piece = bytes(message.data[start:stop])
            if stop == len(message.data):
                message.on_done()
        self.peer.receive(message.tag, start, piece)
        return True

    def receive(self, tag, start, piece):
        if (posted := self._posted.get(tag)) is None:
            return
        with self.in_io_thread({}):
            self.access(posted.into, start, start + len(piece), writes=True, what="a link receives")
            posted.into[start : start + len(piece)] = piece
            posted.on_data(start, len(piece))

    def in_io_thread(self, after):
        return nullcontext() if self._late is None else self._late.acting_as("the I/O thread", after)

    def access(self, memory, start, stop, *, writes, what):
        if self._late is not None:
            with self._late._unseen():
                piece = torch.frombuffer(memory, dtype=torch.uint8)[start:stop]
            self._late.access(piece, writes=writes, what=what)


class Worker:
    """One of the two: its model, its late gradients, and what these ask of the control side.

    Attributes:
        arrived: assignments whose gradient has arrived, and the step of its parameters.
    """

    def __init__(self, worker, seed, device):
        self.worker, self.device = worker, device
        self.late_device = device if device.has_streams else None
        torch.manual_seed(seed + worker)
        self.model = Model()
        if self.late_device is not None:
            for tensor in self.model.state_dict().values():
                device.adopt(tensor)
        self.lock = _Lock(self.late_device)
        self.endpoint = _Endpoint(self.late_device, f"link {seed} {worker}")
        self.membership = SimpleNamespace(is_member=worker == MEMBER)
        self.block_queue = BlockQueue()
        self.arrived = {}
        self.late_gradients = LateGradients(self, self, device)
        self.late_gradients.set_tensors([*self.model.parameters()], lambda: [*self.model.buffers()])

    def link_name(self, worker):
        return str(worker)

    def send_event(self, event):
        assert isinstance(event, LateGradientArrived)
        self.arrived[event.assignment] = event.step

    def on_action(self, action):
        with self.endpoint.in_io_thread({}):
            self.late_gradients.on_action(action)

    def compute(self, inputs, *, with_seldom):
        """Leaves new gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.late_device is not None:
            inputs = self.late_device.adopt(inputs.clone())
        torch.sin(self.model(inputs, with_seldom)).mean().backward()

    @contextmanager
    def on_side_stream(self, *, is_used):
        """A stream of another branch of the model, where there are streams; it waits for no other."""
        if self.late_device is None or not is_used:
            yield
            return
        with self.late_device.on_side_stream(waits=False):
            yield
        self.late_device.join_side_stream()


class LateTraining:
    """A loop of random steps of both workers.

    Args:
        seed: of the decisions.
        devices: of the member and of the worker outside; at most one of them is a `LateDevice`.

    Attributes:
        begun_with: for each late block that was computed, the step of its parameters, and these.
        states: the member's parameters and buffers after each step; None on a `LateDevice`.
        added: late gradients that were added.
    """

    def __init__(self, seed, devices):
        self._random = random.Random(f"late {seed}")
        self._pace = random.Random(f"pace {seed}")  # of what has no effect on results
        self.member, self.outside = workers = [
            Worker(worker, seed, device) for worker, device in zip((MEMBER, OUTSIDE), devices, strict=True)
        ]
        self.member.endpoint.peer, self.outside.endpoint.peer = self.outside.endpoint, self.member.endpoint
        self._late = next((one.late_device for one in workers if one.late_device is not None), None)
        self._assignment, self._stage, self._steps = -1, "idle", 0
        self._inputs = torch.randn(2 * STEPS, 3, 4, generator=torch.Generator().manual_seed(seed))
        self.begun_with, self.states, self.added = [], [], 0

    def run(self):
        """The state of both at the end."""
        for step in range(STEPS):
            self._assign()
            self._step(self._inputs[2 * step])
            self._advance(self._inputs[2 * step + 1])
            self._pump()
        return [*self.member.model.state_dict().values(), *self.outside.model.state_dict().values()]

    # What happens in any order -----------------------------------------------------------------------------

    def _run_one(self):
        """Delivers a piece, or lets the device do one; returns whether there was any."""
        calls = [self.member.endpoint.deliver, self.outside.endpoint.deliver]
        if self._late is not None:
            calls.append(self._late.run_one)
        self._pace.shuffle(calls)
        return any(call() for call in calls)

    def _pump(self):
        while self._pace.random() < 0.7 and self._run_one():
            pass

    def _run_until(self, condition, what):
        while not condition():
            assert self._run_one(), f"{what} never happens: nothing is left to run"

    # The member --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _add_gradients(self):
        """A step with the member's own gradients and the late ones that were accepted."""
        late_gradients = self.member.late_gradients
        late_gradients.activate_accepted()
        self.added += len(late_gradients.active)
        for entry, parameter in enumerate(self.member.model.parameters()):
            sums = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * WEIGHT
            for late in late_gradients.active:
                if late.has[entry]:
                    with self.member.on_side_stream(is_used=self._random.random() < 0.3):
                        weighted = late.gradient(entry) * late.weight
                    sums.add_(weighted)
            parameter.sub_(sums, alpha=LR)
        late_gradients.clear_active()

    def _step(self, inputs):
        self.member.compute(inputs, with_seldom=self._random.random() < 0.5)
        self._add_gradients()
        with self.member.lock:
            self._steps += 1
        self.member.late_gradients.finish_step(self._steps)
        if self.member.late_device is None:
            state = self.member.model.state_dict().values()
            self.states.append([one.clone() for one in state])

    # Assignments -------------------------------------------------------------------------------------------

    def _assign(self):
        if self._stage != "idle" or self._random.random() < 0.3:
            return
        self._assignment += 1
        block = Block(id=self._assignment, epoch=0, ranges=((0, 1),))
        assigned = AssignLateBlock(
            worker=OUTSIDE, assignment=self._assignment, proxy=MEMBER, block=block, reason=""
        )
        workers = [self.member, self.outside]
        self._random.shuffle(workers)
        for worker in workers:
            worker.on_action(assigned)
        self._stage = "assigned"

    def _advance(self, inputs):
        """Goes on with the assignment, or revokes it."""
        chosen = self._random.random()
        if self._stage == "idle" or chosen < 0.2:
            return
        if chosen < 0.35:
            self._revoke(inputs)
        elif self._stage == "assigned":
            self._begin_block()
            self._stage = "begun"
        elif self._stage == "begun":
            self._compute_block(inputs)
            self._stage = "sent"
        else:
            self._run_until(lambda: self._assignment in self.member.arrived, "the late gradient")
            self._resolve(is_contributed=True)
            self._stage = "idle"

    def _begin_block(self):
        late_gradients = self.outside.late_gradients

        def has_block():
            with self.outside.lock:
                return late_gradients.has_block

        self._run_until(has_block, "the arrival of the parameters")
        assert late_gradients.begin_block() is not None
        if self.outside.late_device is None:
            step = int(late_gradients._late_block.step)
            self.begun_with.append((step, [one.clone() for one in self.outside.model.state_dict().values()]))

    def _compute_block(self, inputs):
        self.outside.compute(inputs, with_seldom=self._random.random() < 0.5)
        self.outside.late_gradients.send_gradient(0.75)

    def _revoke(self, inputs):
        """The worker outside may not know of it yet; all that is still sent is dropped."""
        self._resolve(is_contributed=False)
        if self._stage == "begun" and self._random.random() < 0.5:
            self._compute_block(inputs)
        if self._random.random() < 0.3:
            self.outside.on_action(
                AssignBlocks(
                    worker=OUTSIDE,
                    epoch=0,
                    replaces_queue=True,
                    blocks=(),
                    is_last=False,
                    is_awaited=False,
                    consumed=0,
                    reason="",
                )
            )
        self._stage = "idle"

    def _resolve(self, *, is_contributed):
        self.member.on_action(
            ResolveLateBlock(
                worker=MEMBER,
                late_worker=OUTSIDE,
                assignment=self._assignment,
                is_contributed=is_contributed,
                reason="",
            )
        )
