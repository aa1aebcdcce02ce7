"""Workers of one process that train on real servers, in one thread, by the same steps on every device.

Synchronizers, caches, client, servers and the coordinator's policy are those of the library. What stands in
is what connects a process: a worker that waits for the coordinator lets the other workers go on meanwhile.
Nothing depends on how fast a server answers: a fetch in the background is there when its worker looks for it.
"""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from offbeat.events import Finished, Joined, StepFinished, StepPermit
from offbeat.policies.staleness.bounded_staleness import BoundedStaleness
from offbeat.policies.staleness.clock_protocol import ClockProtocol
from offbeat.runtime.staleness.served_parameters import ServedParameters
from offbeat.runtime.staleness.synchronizer import ServerSynchronizer
from offbeat.runtime.training.timing import PartTimer
from offbeat.runtime.training.trained import TrainingState
from support.staged_training import Model

STEPS, LR = 6, 0.125


class _Namespace:
    """A namespace of the servers; the device sees what a push reads."""

    def __init__(self, namespace, process):
        self._namespace, self._process = namespace, process

    def push(self, values, **rest):
        self._process.observe_push(torch.from_numpy(values))
        return self._namespace.push(values, **rest)

    def __getattr__(self, name):
        return getattr(self._namespace, name)


class _Process:
    """Stands for `ServedProcess`, whose client of the servers this is, too.

    Args:
        ps: a client that this process shares with those of other jobs.
        job: its name.
        threads: ids of its workers.
        late: a `LateDevice`, or None.
    """

    def __init__(self, ps, job, threads, late):
        self._ps, self._job, self.threads, self._late = ps, job, threads, late
        self.ps, self.model = self, None

    def tensors(self, name, *args, **kwargs):
        tensors = self._ps.tensors(f"{self._job}-{name}", *args, **kwargs)
        return SimpleNamespace(namespace=_Namespace(tensors.namespace, self))

    def observe_push(self, values):
        if self._late is not None:
            self._late.access(values, writes=False, what="a push")

    def begin_thread(self, initial, loop, unserved):
        if initial is None:
            return self.model.wait_until_begun(loop.raise_if_failed)
        return self.model.begin(loop.initial, loop.raise_if_failed)

    def fetch_unserved(self, unserved):
        pass  # every worker has the buffers of the first

    def publish_position(self, loop):
        pass

    def release(self):
        pass

    def __getattr__(self, name):
        return getattr(self._ps, name)


def _optimizers(model, seed):
    named = dict(model.named_parameters())
    early = [named.pop(name) for name in ("first.weight", "seldom")]
    if seed % 3 == 0:
        return [torch.optim.SGD(early, lr=LR), torch.optim.Adagrad(named.values(), lr=LR)]
    groups = [{"params": early}, {"params": [*named.values()], "lr": 2 * LR}]
    return [torch.optim.SGD(groups, lr=LR, momentum=0.5)]


class _Worker:
    """A worker's loop, its line to the coordinator, and what it does in each step."""

    is_newcomer = False
    epoch = 0
    samples = None

    def __init__(self, worker, training, seed, inputs):
        self.worker, self._training = worker, training
        self._random, self._inputs = random.Random(f"worker {worker} {seed}"), inputs
        self._now_s = 0.0
        self.timer = PartTimer(self._clock)
        twin = training.make_model()  # whose state is read as of the host: by `Tensor.cpu`
        self.initial = [*ServedParameters(TrainingState(twin, _optimizers(twin, seed))).states()]
        self.model = training.make_model()
        for tensor in self.model.state_dict().values():
            training.adopted(tensor)
        self.optimizers = _optimizers(self.model, seed)
        trained = TrainingState(self.model, self.optimizers)
        self.synchronizer = ServerSynchronizer(self, trained, options=training.options)
        self.protocol, self.on_action = ClockProtocol(), None
        self.steps_left, self.is_under_way = STEPS, False
        self.restarts, self.reported_s = 0, []

    def _clock(self):
        self._now_s += 1.0
        return self._now_s

    # The session -----------------------------------------------------------------------------------------

    @property
    def world(self):
        return len(self._training.workers)

    def raise_if_failed(self):
        pass

    def on_computed(self, wait_for_compute_s):
        pass

    def pop_mean_loss(self):
        return self._random.random()

    def send_event(self, event):
        if isinstance(event, StepFinished) and event.clock is not None:
            self.reported_s.append(event.compute_s)
        self._training.handle(event)

    # The coordinator's client ----------------------------------------------------------------------------

    def wait_for(self, condition, timeout_s, what):
        while not condition():
            self._training.step_any(what)

    # A step ----------------------------------------------------------------------------------------------

    def step(self):
        """Takes a step, as a program does that may fail in a backward pass, or leave an epoch early."""
        may, synchronizer = self._random.random, self.synchronizer
        x = self._inputs[self.steps_left - 1]
        synchronizer.set_batch_weight(self._random.choice([1.0, 1.0, 0.5, 0.75]))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=may() < 0.8)
        if may() < 0.15:
            with pytest.raises(ZeroDivisionError):
                self._backward(x, with_seldom=True, fails=True)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        if may() < 0.15:  # a step that begins again reads again where parameters may be newer
            synchronizer.on_epoch_left_early()
            self.restarts += 1
        if may() < 0.2:
            synchronizer.set_batch_weight(0.0)
            self._backward(x)
            synchronizer.set_batch_weight(1.0)
        self._backward(x, with_seldom=may() < 0.5)
        if may() < 0.3:
            self._backward(-x)
        if may() < 0.3:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        for optimizer in self.optimizers:
            synchronizer.before_step(optimizer, has_closure=False)
            optimizer.step()
        synchronizer.after_step()
        self.steps_left -= 1
        is_behind = not synchronizer._served.directory.has_pushed(self.protocol.permit.clock)
        if may() < 0.15 and not is_behind:  # else it would wait for another worker
            synchronizer.complete_state()
            self._training.complete_states += 1

    def _backward(self, x, *, with_seldom=False, fails=False):
        fetch = getattr(self.synchronizer._cache, "_fetch", None)
        if fetch is not None:
            fetch.result()
        torch.sin(self.model(x, with_seldom, fails)).mean().backward()

    def finish(self):
        self.synchronizer.flush()
        self.send_event(Finished(now_s=0.0, worker=self.worker, epoch=0, step=STEPS))
        self.synchronizer.finish()


class ServerTraining:
    """A training of some workers on servers, in random order.

    Args:
        seed: of the order, and of what the workers do.
        device: a `LateDevice`, or the host.
        ps: a client of the servers.
        job: a name that no other training on these servers has.
        strategy: with equal shards.
        workers: their number.

    Attributes:
        workers: with their models, and the compute times that they have reported.
        complete_states: how often a worker has read all that servers keep.
    """

    def __init__(self, seed, device, ps, job, strategy, workers):
        self._random = random.Random(f"order {seed}")
        self._seed, self._device = seed, device
        self._late = device if device.has_streams else None
        self.options = strategy.ps_options()
        self._policy = BoundedStaleness(workers, **strategy.staleness_arguments())
        torch.manual_seed(seed)
        self._process = _Process(ps, job, range(workers), self._late)
        self.complete_states, self._has_begun = 0, False
        self.workers = []
        for worker in range(workers):
            inputs = torch.randn(STEPS, 3, 4)
            self.workers.append(_Worker(worker, self, seed, self.adopted(inputs)))
        for one in self.workers:
            if self._process.model is None:
                self._process.model = one.synchronizer._open_model(self._process)
            one.synchronizer._connect(one, device, self._process)
            one.synchronizer._reported_epoch = 0
            one.synchronizer.attach()
            self.handle(_joined(one.worker, workers))

    def make_model(self):
        torch.manual_seed(self._seed)
        return Model()

    def adopted(self, tensor):
        return tensor if self._late is None else self._late.adopt(tensor)

    @contextmanager
    def _acting_as(self, name):
        """What follows is done by another thread, after what this one has done; this one goes on after it."""
        if self._late is None:
            yield
            return
        with self._late.acting_as(name, self._late.clock()):
            yield
            clock = self._late.clock()
        self._late.wait_for_host(clock)

    def handle(self, event):
        """Lets the coordinator's policy handle an event; its permits arrive at once, in the I/O thread."""
        with self._acting_as("the I/O thread"):
            for action in self._policy.handle(event):
                if isinstance(action, StepPermit):
                    one = self.workers[action.worker]
                    one.protocol.handle(action)
                    one.on_action(action)

    def step_any(self, awaited):
        """Lets a worker that waits for nothing take a step."""
        ready = [one for one in self.workers if one.steps_left and not one.is_under_way]
        assert ready, f"nobody is left to bring about {awaited}"
        one = self._random.choice(ready) if self._has_begun else ready[0]  # whose parameters are the first
        self._has_begun = True
        one.is_under_way = True
        with self._acting_as(f"worker {one.worker}"):
            one.step()
            if not one.steps_left:
                one.finish()
        one.is_under_way = False

    def run(self):
        """Each worker's state after its last step, and the final state of all."""
        while any(one.steps_left for one in self.workers):
            self.step_any("the end")
        found = [[value.clone() for value in one.model.state_dict().values()] for one in self.workers]
        for one in self.workers:
            one.synchronizer.receive_final_state()
        return [*found, [*self.workers[0].model.state_dict().values()]]

    def close(self):
        for one in self.workers:
            one.synchronizer.detach()


def _joined(worker, world):
    return Joined(
        now_s=0.0,
        worker=worker,
        world=world,
        peer=f"worker-{worker}",
        location="here",
        addresses=(),
        model_signature=(),
        strategy="",
    )
