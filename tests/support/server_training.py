"""A training on a parameter server that counts steps, and the rules of bounded staleness for its run log."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import Dataset

import offbeat
from offbeat.events import Failed, Finished, Left, Lost, StepFinished, StepPermit
from support.group_training import compute
from support.newcomer_training import GATE, pass_gate
from support.processes import values

GATES = {2: GATE}  # by a worker's own step, each of which is one of the first epoch, however slow it is
WORKERS, BATCH = 3, 4
SAMPLES = 44  # an epoch of four steps, the last of them of batches of 3, 3 and 2
STEPS = 12


class StepCounter(nn.Module):
    """A number for every worker, whose gradient lowers the worker's own by one: with lr 1 it counts steps."""

    def __init__(self, world, worker):
        super().__init__()
        self.counts_W = nn.Parameter(torch.zeros(world, dtype=torch.float64))
        self.worker = worker

    def forward(self):
        return -self.counts_W[self.worker]


def count_steps(
    strategy, world, worker, *, steps=STEPS, compute_s=0.001, every=1, saves=False, refreshes_every=0, **where
):
    """Steps on; returns what each step was computed with: (clock, version, counts); and the last counts."""
    model = StepCounter(world, worker)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reads = []
    with offbeat.join(model, optimizer, strategy, **where) as session:
        synchronizer = session._synchronizer
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(every):
                loss = model()
                counts = model.counts_W.tolist()
                compute(compute_s)
                with session.no_sync():
                    loss.backward()
            reads.append((synchronizer._clock, synchronizer._cache.read_version, counts))
            optimizer.step()
            if refreshes_every and len(reads) % refreshes_every == 0:
                session.refresh()
            if saves:
                session.refresh()
                kept = model.counts_W.tolist()
                clock, _, counts = reads[-1]
                is_versioned = synchronizer._options.is_versioned
                own = (clock + 1) * every / world if is_versioned else counts[worker] + every
                assert kept[worker] == own
                assert not is_versioned or min(kept) >= own  # what the others have done up to this clock, too
                assert session.state_dict()["model"]["counts_W"][worker] == own
    return reads, model.counts_W.tolist()


def check_versioned(found, s, steps=STEPS, gradients=1):
    """A clock of the servers' adds a worker's share of 1 / world for each of its gradients, once; its own
    model has had a whole step for each of them until then.
    """
    share = gradients / len(found)
    for worker, (reads, last) in enumerate(found):
        assert last == [steps * share] * len(found)
        assert [clock for clock, _, _ in reads] == list(range(steps))
        for clock, version, counts in reads:
            assert version >= clock - s
            for other, count in enumerate(counts):
                own = gradients * (clock - version) if other == worker else 0
                assert count == version * share + own


def check_eager(found, gradients=1, steps=STEPS):
    for worker, (reads, last) in enumerate(found):
        assert last == [steps * gradients] * len(found)
        for step, (_, _, counts) in enumerate(reads):
            assert counts[worker] == step * gradients
            assert max(counts) <= steps * gradients


class Numbers(Dataset):
    """Its samples' numbers."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index), torch.randn(6, generator=torch.Generator().manual_seed(index))


def uses(rank, emit, strategy, epochs=6, kills=None, gates=GATES):
    """Trains, and stands still at gates, each at one of its own steps.

    Returns the samples that this worker used, by epoch, and the parameters in the end. A worker waits at an
    epoch's end for the samples that others hold.
    """
    torch.manual_seed(rank)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    used, steps = {}, 0
    with offbeat.join(model, optimizer, strategy) as session:
        for epoch in session.epochs(epochs):
            for numbers, x in session.batches(Numbers(SAMPLES), BATCH):
                steps += 1
                if steps in gates and not session.is_newcomer:
                    emit("now")
                    pass_gate(gates[steps])
                    if rank == kills:
                        os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                compute(0.005)
                model(x).square().mean().backward()
                optimizer.step()
                used.setdefault(epoch, []).extend(numbers.tolist())
    return used, torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def check_equal(ended):
    """Checks that all end with equal parameters; returns the samples that they used."""
    found = values(ended)
    assert all(last == found[0][1] for _, last in found)
    return [used for used, _ in found]


def each_once(used, epochs):
    """Checks that each sample of these epochs was used once over all workers."""
    for epoch in epochs:
        assert sorted(number for one in used for number in one.get(epoch, [])) == list(range(SAMPLES))


def answered(log):
    """The events of a log, each with the Grants that it brought."""
    found = []
    for entry in log.entries:
        if isinstance(entry, StepPermit):
            found[-1][1].append(entry)
        elif hasattr(entry, "now_s"):
            found.append((entry, []))
    return found


def violations(log):
    """What in a run log is against the rules of bounded staleness (specification 2.4 and 2.5)."""
    arguments = log.header["policies"][1]["arguments"]
    rules = Rules(arguments["s"], **(arguments.get("dynamic") or {}))
    for event, permits in answered(log):
        rules.see(event)
        for one in permits:
            rules.note(one)
        for one in permits:
            if one.may_start:
                rules.check(one)
    return rules.broken


class Rules:
    """What a log has shown so far.

    Attributes:
        broken: what was against the rules.
    """

    def __init__(self, s, s_min=None, s_max=None, step=0, **_):
        self.s, self.step = s, step
        self.s_min, self.s_max = (s, s) if s_min is None else (s_min, s_max)
        self.bound, self.version, self.version_of_bound = s, 0, 0
        self.permitted, self.clocks = {}, {}  # by worker; clocks of who runs
        self.broken = []

    def see(self, event):
        if isinstance(event, StepFinished) and event.clock is not None:
            permit, behind = self.permitted[event.worker], event.clock - event.parameter_version
            if event.clock != permit.clock or not permit.may_start:
                self.broken.append(f"{event} without leave")
            if self.s is not None and behind > min(permit.staleness_bound, self.s_max):
                self.broken.append(f"{event} with parameters {behind} clocks old")
        if isinstance(event, Finished | Lost | Failed | Left):
            self.clocks.pop(event.worker, None)

    def note(self, permit):
        self.permitted[permit.worker] = permit
        rests = permit.reason == "it has no samples"
        if rests:
            self.clocks.pop(permit.worker, None)
        else:
            self.clocks[permit.worker] = permit.clock
        is_early = permit.reason == "not all workers have joined yet"
        if self.s is None and not (permit.may_start or rests or is_early):
            self.broken.append(f"{permit} without a bound")

    def check(self, permit):
        if self.s is None:
            return
        self.version = max(self.version, min(self.clocks.values()))
        passed = max(1, self.version - self.version_of_bound)
        if (
            abs(permit.staleness_bound - self.bound) > self.step * passed
            or not self.s_min <= permit.staleness_bound <= self.s_max
        ):
            self.broken.append(f"{permit} after a bound of {self.bound}")
        if permit.clock - min(self.clocks.values()) > permit.staleness_bound:
            self.broken.append(f"{permit} where others are at {self.clocks}")
        self.bound, self.version_of_bound = permit.staleness_bound, self.version
