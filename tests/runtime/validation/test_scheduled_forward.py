"""Validation by a schedule, here of threads: the metrics and the training are those without it.

On a GPU the same code gets a captured graph: tests/test_gpu.py.
"""

from __future__ import annotations

import copy
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.runtime.nimble.compiling import MODULE, THREADS, compile_module
from offbeat.runtime.processes.waiting import SignalSafeEvent
from offbeat.runtime.validation.backend import Stopwatch
from offbeat.runtime.validation.evaluators import CancelledError, ThreadEvaluator, ValidationPart
from offbeat.runtime.validation.isolation import IsolatedRandomness
from offbeat.runtime.validation.scheduled_forward import ScheduledForward
from offbeat.runtime.validation.snapshot import Snapshot
from support.branching_models import Branches

BATCH, SAMPLES = 8, 52  # six full batches, and one of four samples
by_threads = partial(compile_module, choose=lambda times_s: THREADS)


class Scaled(Branches):
    """Has a number that changes its outputs, and that is no tensor."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x, *, factor=1.0):
        return super().forward(x) * self.scale * factor


def samples():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, 6, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (SAMPLES,), generator=generator))


def evaluate(model, part):
    loss = right = 0.0
    for inputs, labels in DataLoader(part, batch_size=BATCH):
        logits = model(inputs)
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(1) == labels).sum())
    return {"loss": loss / len(part), "right": int(right)}


def a_part(snapshot):
    return ValidationPart(
        epoch=0, number=0, positions=range(SAMPLES), snapshot=snapshot, cancelled=SignalSafeEvent()
    )


def a_model(kind=Branches):
    torch.manual_seed(0)
    return kind().eval()


def an_evaluator(scheduled, evaluate=evaluate):
    return ThreadEvaluator(evaluate, samples(), [], has_stream=False, scheduled=scheduled)


def snapshot_of(model, snapshot=None):
    snapshot = snapshot or Snapshot(shared=False)
    snapshot.capture(model)
    return snapshot


@torch.no_grad()
def change(model):
    for tensor in model.parameters():
        tensor.mul_(1.1)
    model.norm.running_mean += 0.1


def scheduled_after_one_part(model, **options):
    """A schedule, made after one part of the model was evaluated."""
    scheduled = ScheduledForward(**{"compile_model": by_threads, "calls_min": 5, **options})
    evaluator = an_evaluator(scheduled)
    evaluator.evaluate(a_part(snapshot_of(model)))
    assert scheduled.is_due
    with scheduled.idle(1.0) as is_idle:
        assert is_idle
        scheduled.compile(snapshot_of(model))
    assert not scheduled.is_due
    return scheduled, evaluator


def test_metrics_of_every_snapshot_are_the_models_whatever_memory_it_has():
    model = a_model()
    scheduled, evaluator = scheduled_after_one_part(model)
    plain = an_evaluator(None)
    one, other = Snapshot(shared=False), Snapshot(shared=False)
    for snapshot in (one, other, one, other):
        change(model)
        part = a_part(snapshot_of(model, snapshot))
        assert evaluator.evaluate(part) == plain.evaluate(part)
    assert scheduled.served == 4 * (SAMPLES // BATCH)
    assert scheduled.reason.startswith("threads (")
    evaluator.close()


def test_a_snapshot_keeps_its_values_when_a_schedule_was_made_of_it():
    model = a_model()
    scheduled, first = ScheduledForward(by_threads, calls_min=5), snapshot_of(model)
    evaluator = an_evaluator(scheduled)
    evaluator.evaluate(a_part(first))
    scheduled.compile(first)
    digest = first.digest()
    change(model)
    evaluator.evaluate(a_part(snapshot_of(model)))
    assert scheduled.served
    assert first.digest() == digest
    evaluator.close()


def test_a_schedule_is_made_once_enough_calls_had_the_same_shapes():
    model = a_model()
    scheduled = ScheduledForward(by_threads, calls_min=12)
    evaluator = an_evaluator(scheduled)
    for is_due in (False, True):
        evaluator.evaluate(a_part(snapshot_of(model)))
        assert scheduled.is_due == is_due
    assert scheduled.served == 0


def test_what_evaluate_receives_is_the_model_and_its_own_again_afterwards():
    model = a_model(Scaled)
    received = []

    def evaluate_and_keep(model, part):
        received.append(model)
        assert type(model) is Scaled
        assert model.scale == 2.0
        assert not model.training
        return evaluate(model, part)

    scheduled, _ = scheduled_after_one_part(model)
    evaluator = an_evaluator(scheduled, evaluate_and_keep)
    evaluator.evaluate(a_part(snapshot_of(model)))
    assert scheduled.served
    assert "forward" not in vars(received[0])
    evaluator.close()


def test_outputs_that_are_kept_are_not_overwritten_by_later_calls():
    model = a_model()

    def evaluate_at_the_end(model, part):
        logits = torch.cat([model(inputs) for inputs, _ in DataLoader(part, batch_size=BATCH)])
        return {"sum": logits.double().sum().item()}

    scheduled, evaluator = scheduled_after_one_part(model)
    part = a_part(snapshot_of(model))
    served = an_evaluator(scheduled, evaluate_at_the_end).evaluate(part)
    assert served == an_evaluator(None, evaluate_at_the_end).evaluate(part)
    evaluator.close()


def test_when_an_attribute_changes_the_schedule_is_dropped_and_the_metrics_are_right():
    model = a_model(Scaled)
    scheduled, evaluator = scheduled_after_one_part(model)
    part = a_part(snapshot_of(model))
    evaluator.evaluate(part)
    served = scheduled.served
    assert served
    model.scale = 3.0
    part.snapshot.capture(model)
    assert evaluator.evaluate(part) == an_evaluator(None).evaluate(part)
    assert scheduled.served == served
    assert scheduled.reason == "an attribute of the model changes from epoch to epoch"
    model.scale = 2.0
    evaluator.evaluate(a_part(snapshot_of(model)))
    assert (scheduled.served, scheduled.is_due) == (served, False)


def test_when_a_parameter_has_another_shape_the_schedule_is_dropped():
    model = a_model()
    scheduled, evaluator = scheduled_after_one_part(model)
    model.classify.weight, model.classify.bias = nn.Parameter(torch.ones(5, 12)), nn.Parameter(torch.ones(5))
    evaluator.evaluate(a_part(snapshot_of(model)))
    assert scheduled.served == 0


def other_calls(model, inputs, kind):
    """A call of the model that a schedule does not serve."""
    if kind == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs)
    if kind == "gradients":
        with torch.enable_grad():
            return model(inputs.clone().requires_grad_())
    if kind == "vmap":
        return torch.vmap(model)(inputs[None])[0]
    return model(inputs, factor=3.0)


@pytest.mark.parametrize("kind", ["autocast", "gradients", "vmap", "by name"])
def test_calls_that_would_compute_something_else_are_the_models(kind):
    model = a_model(Scaled)

    def evaluate_otherwise(model, part):
        logits = other_calls(model, part.tensors[0][:BATCH], kind)
        assert logits.requires_grad == (kind == "gradients")
        return {"sum": logits.double().sum().item()}

    scheduled, _ = scheduled_after_one_part(model)
    part = a_part(snapshot_of(model))
    served = an_evaluator(scheduled, evaluate_otherwise).evaluate(part)
    assert served == an_evaluator(None, evaluate_otherwise).evaluate(part)
    assert scheduled.served == 0


def test_a_served_call_counts_as_the_calls_that_it_replaces():
    """The rate of calls is compared with that of evaluating without a schedule."""
    model = a_model()
    scheduled, evaluator = scheduled_after_one_part(model)
    plain = an_evaluator(None)
    plain.evaluate(a_part(snapshot_of(model)))
    of_the_schedule = []
    with torch.no_grad(), IsolatedRandomness(0, lambda *_: of_the_schedule.append(1)):
        scheduled._compiled(samples().tensors[0][:BATCH])
    before = evaluator.calls
    evaluator.evaluate(a_part(snapshot_of(model)))
    assert evaluator.calls - before >= plain.calls + (scheduled.served - 1) * len(of_the_schedule)
    evaluator.close()


def test_a_cancelled_part_ends_also_where_a_schedule_serves_it():
    model = a_model()
    scheduled, _ = scheduled_after_one_part(model)
    part = a_part(snapshot_of(model))

    def evaluate_until_cancelled(model, data):
        part.cancelled.set()
        return evaluate(model, data)

    with pytest.raises(CancelledError):
        an_evaluator(scheduled, evaluate_until_cancelled).evaluate(part)


def test_no_schedule_is_idle_while_a_part_is_evaluated():
    scheduled = ScheduledForward(by_threads, calls_min=1)
    idle = []

    def evaluate_and_ask(model, part):
        with scheduled.idle(0.01) as is_idle:
            idle.append(is_idle)
        return evaluate(model, part)

    an_evaluator(scheduled, evaluate_and_ask).evaluate(a_part(snapshot_of(a_model())))
    with scheduled.idle(0.01) as is_idle:
        idle.append(is_idle)
    assert idle == [False, True]


def test_while_any_part_is_evaluated_a_validator_makes_no_schedule():
    """Another evaluator is busy: its model may be called at any time."""
    due, busy = ScheduledForward(by_threads, calls_min=1), ScheduledForward(by_threads)
    model = a_model()
    an_evaluator(due).evaluate(a_part(snapshot_of(model)))
    with offbeat.Validator(model, evaluate, samples(), backend="thread", timeout_s=0.01) as validator:
        validator._backend._schedules = [due, busy]
        with busy.idle(1.0):
            validator._backend.schedule_when_due(snapshot_of(model))
        assert due.is_due
        validator._backend.schedule_when_due(snapshot_of(model))
        assert not due.is_due
    due.close()


def test_where_it_does_not_pay_the_model_serves_and_the_reason_says_so():
    model = a_model()
    by_itself = partial(compile_module, choose=lambda times_s: MODULE)
    scheduled, evaluator = scheduled_after_one_part(model, compile_model=by_itself)
    assert scheduled.reason.startswith("the module itself (")
    evaluator.evaluate(a_part(snapshot_of(model)))
    assert (scheduled.served, scheduled.is_due) == (0, False)


def test_a_model_that_cannot_be_compared_or_traced_serves_itself_and_the_reason_says_so():
    local = a_model()
    local.act = lambda x: x
    scheduled, _ = scheduled_after_one_part(local)
    assert scheduled.reason.startswith("the model cannot be pickled")
    hooked = a_model()
    hooked.one.register_forward_hook(a_hook)
    scheduled, evaluator = scheduled_after_one_part(hooked)
    assert scheduled.reason.startswith("the module has forward hooks")
    evaluator.evaluate(a_part(snapshot_of(hooked)))
    assert scheduled.served == 0


def a_hook(*_):
    """A hook that changes nothing."""


def test_after_closing_the_model_serves():
    model = a_model()
    scheduled, evaluator = scheduled_after_one_part(model)
    evaluator.close()
    assert not scheduled._compiled.is_on
    part = a_part(snapshot_of(model))
    assert evaluator.evaluate(part) == an_evaluator(None).evaluate(part)


def trained(with_schedule):
    """The history and weights of a training that is validated in a thread."""
    torch.manual_seed(1)
    model = a_model(Scaled).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = samples().tensors
    with offbeat.Validator(model, evaluate, samples(), backend="thread") as validator:
        scheduled = ScheduledForward(by_threads, calls_min=5)
        if with_schedule:
            (evaluator,) = validator._backend._pools[-1][0]._evaluators
            evaluator._scheduled = scheduled
            validator._backend._schedules = [scheduled]
        for _ in validator.epochs(6):
            optimizer.zero_grad()
            F.cross_entropy(F.dropout(model(inputs), 0.1), labels).backward()
            optimizer.step()
            validator.validate()
            validator.finish()
    return validator, scheduled, copy.deepcopy(model.state_dict())


def test_a_validator_makes_the_schedule_between_two_epochs_and_the_training_is_the_same():
    validator, scheduled, weights = trained(True)
    plain, _, expected = trained(False)
    assert validator.history == plain.history
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert scheduled.served == 5 * (SAMPLES // BATCH)
    assert validator.reason.startswith("it was requested; forward passes: threads (")
    assert plain.reason == "it was requested"


def test_the_time_of_making_a_schedule_is_no_time_of_an_epoch():
    """`auto` compares the times of epochs."""
    begin_s = time.perf_counter()
    stopwatch = Stopwatch()
    with stopwatch.stopped():
        inside_s = time.perf_counter()
        while time.perf_counter() < inside_s + 0.01:
            pass
    wall_s, _ = stopwatch.lap()
    assert 0 <= wall_s <= time.perf_counter() - begin_s - 0.01
