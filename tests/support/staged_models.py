"""A loop of random steps of a worker that averages its model, the same on every device.

Of the workers that it averages with, none exists: random decisions say what they contribute, which averagings
are cancelled and when, and whether memory is still read then.
"""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import torch
from torch import nn

from offbeat.events import AverageModels, OuterStep, Ready
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.policies.model_averaging.protocol import ModelAveragingProtocol
from offbeat.runtime.model_averaging.cancelled import AveragingCancelledError
from offbeat.runtime.model_averaging.synchronizer import ModelAveragingSynchronizer
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.trained import TrainingState
from support.simulated_group import SimulatedExchange, SimulatedLinks

STEPS = 12
WORKER, OTHERS = 1, (0, 2)


class Model(nn.Module):
    """Has parameters of two precisions and one of another layout, and buffers of three dtypes."""

    def __init__(self):
        super().__init__()
        self.first, self.precise = nn.Linear(4, 6), nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.other = nn.Parameter(torch.randn(3, 6).t())
        self.scales = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
            self.count.add_(1)
        return (x * self.precise.float()) @ self.other * self.scales


class _Links(SimulatedLinks):
    """What the synchronizer asks of its links, and its exchanges of them."""

    def __init__(self, seed, device):
        super().__init__(device)
        self._random, self._pace = random.Random(f"links {seed}"), random.Random(f"pace {seed}")
        self.exchange, self._cancels_at = None, None
        self._ends = random.Random(f"ends {seed}")

    def allocate_shared(self, size_bytes):
        return None

    def has_readers(self, memory):
        return self._is_read

    def is_exchange_over(self):
        return self._ends.random() < 0.6

    def open_exchange(self):
        self._cancels_at = self._random.randrange(3) if self._random.random() < 0.3 else None
        self.exchange = SimulatedExchange(self)
        return self.exchange

    def before_wait(self):
        """Cancels the averaging, where that was decided."""
        if self._cancels_at is None:
            return
        self._cancels_at -= 1
        if self._cancels_at < 0:
            while self._late is not None and self._pace.random() < 0.95 and self._late.run_one():
                pass  # so that it may have begun
            self.exchange.abandon()
            for pending in self.exchange.pending:  # the links' thread itself cancels
                self.join_host(pending.own_clock)
            self._is_read = self._random.random() < 0.5
            if not self._is_read:  # all that was sent has been read
                for pending in self.exchange.pending:
                    self.join_host(pending.clock)
            raise AveragingCancelledError

    def contribution_of_others(self, index, flat):
        self._is_read = False  # what was read has been replaced
        with self.unseen():
            return torch.full(flat.shape, 0.25 if flat.is_floating_point() else 1, dtype=flat.dtype)


class _Synchronizer(ModelAveragingSynchronizer):
    def _open_exchange(self, workers):
        assert self._client is not None
        return self._client.endpoint.open_exchange()


class ModelTraining:
    """The worker, and what its synchronizer asks of the session and of the control side.

    Args:
        seed: of the steps, and of what happens to the averagings.
        device: a `LateDevice`, or the host.
        overlap: the worker trains on while its model is averaged.
        fragments: parts that an outer optimizer steps by themselves; 0 without one.
        has_closure: the optimizer computes the gradients.

    Attributes:
        reported: the `Ready` of each step.
        cancelled: how many averagings were.
    """

    worker, is_newcomer, epoch, samples, batch = WORKER, False, 0, 0, 0
    failure = preempt = None
    is_job_complete = False

    def __init__(self, seed, device, *, overlap=False, fragments=0, has_closure=False):
        self._random, self._has_closure = random.Random(f"models {seed}"), has_closure
        torch.manual_seed(seed)
        self._model = Model()
        self._inputs = torch.randn(STEPS, 3, 4)
        if device.has_streams:
            for tensor in [*self._model.state_dict().values(), self._inputs]:
                device.adopt(tensor)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.125, momentum=0.5)
        self.timer = PartTimer(lambda: 0.0)
        self.reported, self.cancelled = [], 0
        self.endpoint, self.lock = _Links(seed, device), threading.Condition()
        self.protocol = ModelAveragingProtocol(WORKER)
        self._exchange_id = 0
        self.is_job_complete = False
        trained = TrainingState(self._model, [self._optimizer])
        self._overlap, self._fragments = overlap, fragments
        self._synchronizer = _Synchronizer(
            self,
            trained,
            overlap=overlap,
            has_epoch_means=False,
            timeout_s=10.0,
            assigns_samples=False,
            outer_optimizer=OuterOptimizer() if fragments else None,
            fragments=max(1, fragments),
        )
        self._synchronizer._join(self, device)
        self._synchronizer.attach()

    def run(self):
        """The state at the end."""
        for inputs in self._inputs:
            self._step(inputs)
            self._synchronizer.after_step()
        return [*self._model.state_dict().values()]

    def _step(self, inputs):
        def compute():
            self._optimizer.zero_grad()
            for _ in range(self._random.choice([1, 1, 2])):
                torch.sin(self._model(inputs)).mean().backward()

        if not self._has_closure:
            compute()
        self._synchronizer.before_step(self._optimizer, has_closure=self._has_closure)
        self._optimizer.step(compute if self._has_closure else None)

    # The control side --------------------------------------------------------------------------------------

    def wait_for(self, is_over, timeout_s, what):
        if not is_over():
            self._receive(self._next_averaging())
        assert is_over()

    def _receive(self, averaging):
        self.protocol.handle(averaging)
        with self.endpoint.in_io_thread():
            self.on_action(averaging)

    def _next_averaging(self):
        self._exchange_id += 4
        members, weights = (WORKER,), (1.0,)
        if self._exchange_id > 4 and self._random.random() < 0.9:
            other, weight = self._random.choice(OTHERS), self._random.choice([0.5, 0.25, 1 / 3])
            members, weights = zip(*sorted([(WORKER, weight), (other, 1 - weight)]), strict=True)
        includes_buffers, outer_step = self._random.random() < 0.4, None
        if self._fragments and not includes_buffers and self._exchange_id > 4:
            behind = self._random.choice([(), tuple(one for one in members if one != WORKER)])
            fragment = self._random.randrange(self._fragments)
            outer_step = OuterStep(fragment=fragment, number=self._exchange_id // 4, behind=behind)
        return AverageModels(
            exchange_id=self._exchange_id,
            members=members,
            joining=(),
            weights=weights,
            steps=(1,) * len(members),
            includes_buffers=includes_buffers,
            outer_step=outer_step,
            leader=members[0],
            reason="",
        )

    # The session -------------------------------------------------------------------------------------------

    def raise_if_failed(self):
        pass

    def on_computed(self, wait_for_compute_s):
        pass

    def send_event(self, event):
        if isinstance(event, Ready):
            self.reported.append(event)
            if self._overlap and self.protocol.averaging is None and self._random.random() < 0.8:
                self._receive(self._next_averaging())
        else:
            self.cancelled += not event.has_mean

    def position(self, round_):
        return SimpleNamespace(round=round_)
