"""Compressed pseudo-gradients of several workers in one process: anchors, residuals, and what is kept."""

import copy
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from offbeat.errors import OffbeatError
from offbeat.events import AverageModels, OuterStep
from offbeat.numerics.compressors.interface import Sum
from offbeat.numerics.compressors.registry import parse_compression
from offbeat.numerics.outer_optimizer import OuterOptimizer
from offbeat.runtime.devices.host import Host
from offbeat.runtime.model_averaging.flat_tensors import FlatTensors, Fragment
from offbeat.runtime.model_averaging.outer_state import OuterState
from offbeat.runtime.model_averaging.pseudo_gradients import PseudoGradients
from support.simulated_group import SimulatedLinks

SHAPES = {"matrix": (10, 12), "bias": (7,), "other": (8, 9)}
PLAIN = OuterOptimizer(rate=1.0, momentum=0.0)


class Meeting:
    """Exchanges over some workers, each of which ends when the last one has called."""

    def __init__(self, size):
        self.size, self.calls = size, defaultdict(dict)

    def meet(self, position, index, kind, tensors, finish):
        calls, pending = self.calls[index, kind], SimpleNamespace(ended_s=None)
        pending.wait = lambda timeout_s: self._check(pending)
        calls[position] = (tensors, pending)
        if len(calls) == self.size:
            finish([calls[member][0] for member in range(self.size)])
            for _, one in calls.values():
                one.ended_s = 1.0
        return pending

    def _check(self, pending):
        assert pending.ended_s is not None


class Exchange:
    def __init__(self, meeting, position):
        self._meeting, self.position, self.size = meeting, position, meeting.size

    def all_reduce(self, flat, into, *, index, **_):
        def finish(calls):
            total = sum(values for values, _ in calls)
            for _, one in calls:
                one.copy_(total)

        return self._meeting.meet(self.position, index, "sum", (flat.clone(), into), finish)

    def all_gather(self, flat, *, index, **_):
        def finish(calls):
            rows = [one.view(self.size, -1)[position].clone() for position, one in enumerate(calls)]
            for one in calls:
                one.copy_(torch.cat(rows))

        return self._meeting.meet(self.position, index, "all_gather", flat, finish)

    def broadcast(self, flat, *, root, index, **_):
        return self._meeting.meet(
            self.position, index, "copy", flat, lambda calls: [one.copy_(calls[root]) for one in calls]
        )


class Worker:
    """A worker whose steps are given."""

    def __init__(self, optimizer, fragments, method, decay):
        chance = torch.Generator().manual_seed(0)
        self.model = {
            name: torch.randn(shape, generator=chance, dtype=torch.float64) for name, shape in SHAPES.items()
        }
        links = SimulatedLinks(Host())
        self.flat = FlatTensors(lambda: list(self.model.values()), links)
        pseudo_gradients = None
        if method is not None:
            parsed = parse_compression(method) if isinstance(method, str) else method
            pseudo_gradients = PseudoGradients(parsed, decay, self.flat, [*SHAPES])
        self.outer = OuterState(optimizer, fragments, self.flat, [*SHAPES], links, pseudo_gradients)
        self.outer.begin()

    def learn(self, change):
        for tensor, part in zip(self.model.values(), change.split(SIZES), strict=True):
            tensor += part.view(tensor.shape)

    @property
    def values(self):
        return torch.cat([tensor.flatten() for tensor in self.model.values()])

    @property
    def anchor(self):
        return torch.cat([one.flatten() for one in self.outer.state_dict()["anchor"].values()])

    @property
    def residual(self):
        state = self.outer.local_state_dict()
        if not state:
            return torch.zeros(sum(SIZES), dtype=torch.float64)
        return torch.cat([one.flatten() for one in state["pseudo_gradient_residuals"].values()])


SIZES = [torch.Size(shape).numel() for shape in SHAPES.values()]


class Job:
    """Workers that make rounds at the same time."""

    def __init__(self, workers, method="topk:0.1", *, decay=1.0, optimizer=PLAIN, fragments=1):
        self.workers = [Worker(optimizer, fragments, method, decay) for _ in range(workers)]
        self._chance, self._rounds = torch.Generator().manual_seed(5), 0
        self._fragments = fragments

    def continue_after(self, other):
        """Number the next rounds, and draw the next changes, as another job's."""
        self._rounds = other._rounds
        self._chance.set_state(other._chance.get_state())

    def learn(self):
        """Each worker makes steps of its own; returns what it changes."""
        changes = [torch.randn(sum(SIZES), generator=self._chance).double() for _ in self.workers]
        for worker, change in zip(self.workers, changes, strict=True):
            worker.learn(change)
        return changes

    def round(self, weights, behind=(), *, lacking=()):
        """A round of some workers, by weights; those of `lacking` get no result, as if it was cancelled."""
        number, fragment = divmod(self._rounds, self._fragments)
        self._rounds += 1
        averaging = AverageModels(
            exchange_id=8 * self._rounds,
            members=tuple(weights),
            joining=(),
            weights=tuple(weights.values()),
            steps=(1,) * len(weights),
            includes_buffers=False,
            outer_step=OuterStep(fragment=fragment, number=number, behind=behind),
            leader=0,
            reason="",
        )
        meeting, pending = Meeting(len(weights)), {}
        for position, member in enumerate(weights):
            worker = self.workers[member]
            worker.flat.take_snapshot()
            exchange = Exchange(meeting, position)
            if worker.outer.is_compressed:
                pending[member] = worker.outer.sum_pseudo_gradients(exchange, averaging, member)
            else:
                for own, snapshot in zip(worker.flat.contributions, worker.flat.snapshots, strict=True):
                    torch.mul(snapshot, weights[member], out=own)
                parts = zip(worker.flat.contributions, worker.flat.outputs, strict=True)
                part = worker.outer.fragment_of(averaging.outer_step)
                for index, (own, total) in enumerate(parts):
                    exchange.all_reduce(part.of(own), part.of(total), index=index)
                pending[member] = []
        for _ in range(8):  # requests of a compressor, at most
            for one in [one for sums in pending.values() for one in sums]:
                if hasattr(one, "advance_if_ended"):
                    one.advance_if_ended(0.0)
        for member, sums in pending.items():
            assert all(one.ended_s is not None for one in sums)
            if member not in lacking:
                worker = self.workers[member]
                before = worker.outer.step(averaging, member, worker.flat.outputs)
                part = worker.outer.fragment_of(averaging.outer_step)
                worker.flat.add_difference(before or worker.flat.snapshots, part)

    def mean_of_all(self):
        """As after an epoch."""
        mean = sum(worker.values for worker in self.workers) / len(self.workers)
        for worker in self.workers:
            worker.outer.take_anchor([mean.clone()])
            worker.learn(mean - worker.values)

    def equal_anchors(self):
        anchors = [worker.anchor.tolist() for worker in self.workers]
        assert all(anchor == anchors[0] for anchor in anchors)
        return self.workers[0].anchor


def chosen(values, ratio):
    """The largest values of each matrix, and all of the bias."""
    kept = torch.zeros_like(values)
    for part, of, size, shape in zip(
        values.split(SIZES), kept.split(SIZES), SIZES, SHAPES.values(), strict=True
    ):
        count = size if len(shape) == 1 else -int(-ratio * size // 1)
        largest = part.abs().argsort(descending=True)[:count]
        of[largest] = part[largest]
    return kept


@pytest.mark.parametrize(("decay", "rate"), [(0.95, 1.0), (0.5, 0.8)])
def test_rounds_follow_the_papers_algorithm(decay, rate):
    """Algorithm 1: an error is its decayed self plus the pseudo-gradient, less what is sent."""
    optimizer = OuterOptimizer(rate=rate, momentum=0.0)
    job = Job(3, "topk:0.1", decay=decay, optimizer=optimizer)
    anchor, errors = job.workers[0].values, [0.0] * 3
    for _ in range(6):
        sent = []
        for number, change in enumerate(job.learn()):
            error = decay * errors[number] - change
            sent.append(chosen(error, 0.1))
            errors[number] = error - sent[-1]
        job.round({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
        anchor = anchor - rate * sum(sent) / 3
        torch.testing.assert_close(job.equal_anchors(), anchor, rtol=0, atol=1e-12)
        for worker, error in zip(job.workers, errors, strict=True):
            torch.testing.assert_close(worker.values, anchor, rtol=0, atol=1e-12)
            torch.testing.assert_close(worker.residual, error / 3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fragments", [1, 3])
def test_where_all_is_sent_the_anchors_are_those_without_compression(fragments):
    jobs = [Job(3, method, optimizer=OuterOptimizer(), fragments=fragments) for method in ("topk:1", None)]
    for _ in range(7):
        for job in jobs:
            job.learn()
            job.round({0: 0.5, 1: 0.25, 2: 0.25})
        compressed, plain = (job.equal_anchors() for job in jobs)
        torch.testing.assert_close(compressed, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["topk:0.05", "powersgd:1"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_anchor_and_residuals_hold_all_that_workers_have_learnt(method, fragments):
    """Rounds by other weights each, one without a worker, which is behind then, and a mean of all models."""
    rate = 0.7
    job = Job(3, method, optimizer=OuterOptimizer(rate=rate, momentum=0.0), fragments=fragments)

    def held():
        return job.workers[0].anchor - rate * sum(worker.residual for worker in job.workers)

    def learnt(weights):
        """What the members have learnt since their anchors, in the part whose round is next."""
        part = Fragment(job._rounds % fragments, fragments)
        total = torch.zeros(sum(SIZES), dtype=torch.float64)
        for member, weight in weights.items():
            worker = job.workers[member]
            part.of(total).add_(part.of(worker.values - worker.anchor), alpha=weight)
        return total

    for weights, behind in [
        ({0: 0.5, 1: 0.3, 2: 0.2}, ()),
        ({0: 0.1, 1: 0.2, 2: 0.7}, ()),
        ({0: 0.6, 1: 0.4}, ()),
        ({0: 0.6, 1: 0.4}, ()),
        ({0: 0.2, 1: 0.8, 2: 0.0}, (2,)),
        ({0: 0.9, 1: 0.1, 2: 0.0}, (2,) if fragments == 2 else ()),
        ({0: 0.3, 1: 0.3, 2: 0.4}, ()),
    ]:
        job.learn()
        expected = held() + rate * learnt(weights)
        job.round(weights, behind)
        torch.testing.assert_close(held(), expected, rtol=0, atol=1e-12)
    job.equal_anchors()
    assert all(worker.residual.abs().max() > 0.01 for worker in job.workers)
    job.learn()
    expected = held() + sum(worker.values - worker.anchor for worker in job.workers) / 3
    job.mean_of_all()
    torch.testing.assert_close(held(), expected, rtol=0, atol=1e-12)
    job.equal_anchors()
    for _ in range(fragments):
        job.learn()
        expected = held() + rate * learnt({0: 0.5, 1: 0.5})
        job.round({0: 0.5, 1: 0.5})
        torch.testing.assert_close(held(), expected, rtol=0, atol=1e-12)


def test_a_round_that_is_cancelled_leaves_a_workers_residual():
    job = Job(2)
    job.learn()
    job.round({0: 0.5, 1: 0.5})
    before = [worker.residual.clone() for worker in job.workers]
    job.learn()
    job.round({0: 0.5, 1: 0.5}, lacking=(0, 1))
    assert all(torch.equal(worker.residual, own) for worker, own in zip(job.workers, before, strict=True))
    job.round({0: 0.5, 1: 0.5})
    assert not any(torch.equal(worker.residual, own) for worker, own in zip(job.workers, before, strict=True))


@pytest.mark.parametrize("method", ["topk:0.1", "powersgd:1"])
def test_a_worker_that_is_behind_contributes_nothing_and_keeps_its_residual(method):
    job = Job(3, method, decay=0.9)
    for _ in range(2):
        job.learn()
        job.round({0: 0.4, 1: 0.4, 2: 0.2})
    kept = job.workers[2].residual.clone()
    job.learn()
    job.round({0: 0.5, 1: 0.5, 2: 0.0}, lacking=(2,))
    learnt = job.workers[2].values - job.workers[2].anchor
    job.round({0: 0.5, 1: 0.5, 2: 0.0}, behind=(2,))
    assert torch.equal(job.workers[2].residual, kept)
    anchor = job.equal_anchors()
    torch.testing.assert_close(job.workers[2].values - anchor, learnt, rtol=0, atol=1e-12)


def test_factors_of_powersgd_go_on_from_round_to_round_and_begin_anew_after_a_mean_of_all_models():
    """A mean of all models gives its anchor to a worker that lacks the factors of the last round, too."""
    jobs = [Job(2, "powersgd:1"), Job(2, "powersgd:1")]
    for job in jobs:
        job.learn()
        job.round({0: 0.5, 1: 0.5})
    jobs[1].workers[1].outer._pseudo_gradients.forget_states()
    for job in jobs:
        job.learn()
        job.mean_of_all()
        job.learn()
        job.round({0: 0.5, 1: 0.5})
    assert torch.equal(jobs[0].equal_anchors(), jobs[1].equal_anchors())
    jobs[1].workers[0].outer._pseudo_gradients.forget_states()
    jobs[1].workers[1].outer._pseudo_gradients.forget_states()
    for job in jobs:
        job.learn()
        job.round({0: 0.5, 1: 0.5})
    assert not torch.equal(jobs[0].equal_anchors(), jobs[1].equal_anchors())


class CountingSum:
    """A compressor that sums all, whose state is how often it has; notes the states that calls begin with."""

    keeps_residual = False

    def __init__(self):
        self.begun_with = []

    def compressor(self, shapes, seed):
        return self

    def sum(self, vector, out, residual, state, *, members, position):
        self.begun_with.append(state)
        out.copy_((yield Sum(vector)))
        return (state or 0) + 1


def test_all_members_begin_a_round_with_the_same_state_and_one_that_is_behind_has_none():
    method = CountingSum()
    job = Job(3, method)
    for weights, behind in [
        ({0: 0.5, 1: 0.25, 2: 0.25}, ()),
        ({0: 0.5, 1: 0.5}, ()),
        ({0: 0.5, 1: 0.5, 2: 0.0}, (2,)),
        ({0: 0.5, 1: 0.25, 2: 0.25}, ()),
    ]:
        job.learn()
        job.round(weights, behind)
    job.equal_anchors()
    assert method.begun_with == [None] * 3 + [1] * 2 + [None] * 3 + [1] * 3


def test_a_worker_alone_sends_nothing_and_its_anchor_is_its_model():
    job = Job(2)
    job.learn()
    job.round({0: 0.5, 1: 0.5})
    job.learn()
    sent = job.workers[0].values - job.workers[0].residual
    job.round({0: 1.0})
    torch.testing.assert_close(job.workers[0].anchor, sent, rtol=0, atol=1e-12)
    assert not job.workers[0].residual.any()


def test_parts_of_matrices_are_rows_and_parts_of_biases_stay_biases():
    flat = Job(1).workers[0].flat  # of 120, 7 and 72 elements
    assert flat.shapes(Fragment(0, 1)) == [[(10, 12), (7,), (8, 9)]]
    assert [flat.shapes(Fragment(number, 3)) for number in range(3)] == [
        [[(1, 66)]],
        [[(1, 54), (7,), (1, 5)]],
        [[(1, 67)]],
    ]


def test_a_checkpoint_holds_a_workers_residuals_by_the_parameters_names():
    job = Job(2)
    assert job.workers[0].outer.local_state_dict() == {}
    job.learn()
    job.round({0: 0.5, 1: 0.5})
    state = job.workers[0].outer.local_state_dict()
    assert {name: one.shape for name, one in state["pseudo_gradient_residuals"].items()} == SHAPES
    fresh = Job(1).workers[0]
    with pytest.raises(OffbeatError, match="state of round 0, got that of round 1: save both states"):
        fresh.outer.load_local_state_dict(state)
    fresh.outer.rounds = 1
    fresh.outer.load_local_state_dict(state)
    assert torch.equal(fresh.residual, job.workers[0].residual)
    state["pseudo_gradient_residuals"]["frozen"] = torch.zeros(2)
    with pytest.raises(OffbeatError, match="bias, other, got those of matrix"):
        fresh.outer.load_local_state_dict(state)


@pytest.mark.parametrize(("method", "fragments"), [("powersgd:1", 1), ("powersgd:1", 2), ("randomk:0.3", 1)])
def test_a_job_that_loads_a_checkpoint_goes_on_as_the_one_that_saved_it(method, fragments):
    job, resumed = (Job(2, method, fragments=fragments) for _ in range(2))
    for _ in range(3):
        job.learn()
        job.round({0: 0.5, 1: 0.5})
    for saved, loading in zip(job.workers, resumed.workers, strict=True):
        loading.learn(saved.values - loading.values)
        loading.outer.load_state_dict(copy.deepcopy(job.workers[0].outer.state_dict()))
        loading.outer.load_local_state_dict(copy.deepcopy(saved.outer.local_state_dict()))
    resumed.continue_after(job)
    for one in (job, resumed):
        for _ in range(2):
            one.learn()
            one.round({0: 0.5, 1: 0.5})
    for expected, found in zip(job.workers, resumed.workers, strict=True):
        torch.testing.assert_close(found.anchor, expected.anchor, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.residual, expected.residual, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("method", "fragments"), [("powersgd:2", 1), ("powersgd:1", 2), (None, 1)])
def test_compressors_begin_without_the_state_of_another_compression_or_of_other_fragments(method, fragments):
    saved = Job(2, "powersgd:1")
    saved.round({0: 0.5, 1: 0.5})
    fresh = Job(1, method, fragments=fragments).workers[0]
    fresh.outer.load_state_dict(saved.workers[0].outer.state_dict())
    assert fresh.outer.state_dict().get("compressors", {}).get("states", {}) == {}
