"""Promises of timed compute: measurements, and the properties that a timed model keeps of its model."""

import copy
import pickle
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timed import LayerTimes, ModelTimes, Stretch, TimedLayer, TimedModel, Waiter, time_layers
from offbeat.models import build_model


class Branched(nn.Module):
    """A shortcut next to two layers, a buffer that is not saved, and one of the root's own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.shortcut = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Sequential(nn.BatchNorm2d(4)))
        self.head = nn.Linear(4, 3)
        self.head.weight.requires_grad_(False)
        self.register_buffer("mean", torch.ones(1))
        self.norm.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x - self.mean)) + self.shortcut(x))
        return self.head(x.mean((2, 3)))


LAYERS = ["first", "norm", "shortcut.0", "shortcut.1.0", "head"]


def batch(samples=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 1, 6, 6, generator=generator), torch.arange(samples) % 3


def steady(names, forward_s=0.0, backward_s=0.0):
    layers = [LayerTimes(name=name, forward_s=forward_s, backward_s=backward_s) for name in names]
    return ModelTimes(layers=tuple(layers))


def twin(model, **kwargs):
    return TimedModel(model, steady(LAYERS), classes=3, seed=0, **kwargs)


class FakeTime:
    """A clock that only sleeping moves, by a little more than requested."""

    def __init__(self, late_s):
        self.now_s, self.late_s, self.slept = 100.0, late_s, []

    def clock(self):
        return self.now_s

    def sleep(self, duration_s):
        self.slept.append(duration_s)
        self.now_s += duration_s + self.late_s


# Measuring ----------------------------------------------------------------------------------------------


def test_measuring_names_the_layers_in_the_order_of_the_forward_pass():
    model = Branched()
    found = time_layers(model, *batch(), runs=1)
    assert [layer.name for layer in found.layers] == LAYERS
    assert all(layer.forward_s > 0 and layer.backward_s >= 0 for layer in found.layers)
    assert found.forward_s == pytest.approx(found.lead_s + sum(layer.forward_s for layer in found.layers))
    assert found.step_s == pytest.approx(found.forward_s + found.backward_s)


def test_the_parts_of_one_run_fit_into_the_time_that_it_took():
    model, (inputs, labels) = Branched(), batch()
    began_s = time.perf_counter()
    found = time_layers(model, inputs, labels, runs=1)
    assert 0 < found.step_s < time.perf_counter() - began_s


def test_measuring_leaves_no_hook_and_no_gradient():
    model, threads = Branched(), torch.get_num_threads()
    time_layers(model, *batch(), runs=1)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert torch.get_num_threads() == threads


def test_every_layer_of_resnet18_has_its_times():
    model = build_model("resnet18", sample_shape=(3, 8, 8), classes=10, seed=0)
    found = time_layers(model, torch.zeros(2, 3, 8, 8), torch.zeros(2).long(), runs=1)
    own = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    assert [layer.name for layer in found.layers] == own
    assert len(own) == 41


class Twice(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), calls
        self.other = nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(self.calls):
            x = self.layer(x)
        return self.other(x)


@pytest.mark.parametrize(("calls", "words"), [(2, "called twice"), (0, "not called")])
def test_a_layer_that_is_not_called_once_is_refused_by_name(calls, words):
    with pytest.raises(ValueError, match=f"layer layer is {words}"):
        time_layers(Twice(calls), torch.zeros(2, 3), torch.zeros(2).long(), runs=1)


def test_a_model_with_parameters_of_its_own_is_refused():
    with pytest.raises(ValueError, match="put it into a Sequential"):
        time_layers(nn.Linear(3, 3), torch.zeros(2, 3), torch.zeros(2).long())


@pytest.mark.parametrize("time_s", [-1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(time_s):
    with pytest.raises(ValueError, match="finite and at least 0 s"):
        steady(["a"], forward_s=time_s)


def test_scaling_and_plain_data_keep_the_proportions():
    found = ModelTimes(lead_s=1.0, layers=(LayerTimes(name="a", forward_s=2.0, backward_s=4.0),))
    assert found.scaled(0.5).step_s == 3.5
    assert found.scaled(0.5).layers[0] == LayerTimes(name="a", forward_s=1.0, backward_s=2.0)
    assert ModelTimes.from_plain(found.to_plain()) == found


# Waiting instead ------------------------------------------------------------------------------------------


def test_the_excess_of_a_sleep_is_deducted_from_the_next_ones():
    fake = FakeTime(late_s=0.25)
    waiter = Waiter(fake.clock, fake.sleep)
    for _ in range(8):
        waiter.wait(1.0)
    assert fake.slept == [1.0] + [0.75] * 7
    assert fake.now_s == 108.25  # late once, not eight times


def test_waits_shorter_than_the_excess_are_skipped():
    fake = FakeTime(late_s=1.0)
    waiter = Waiter(fake.clock, fake.sleep)
    for _ in range(5):
        waiter.wait(0.5)
    assert fake.slept == [0.5, 0.5]  # 1.5 s for three waits, another 1.5 s for the next three
    waiter.reset()
    waiter.wait(0.5)
    assert fake.slept == [0.5, 0.5, 0.5]


def test_time_spent_between_waits_is_not_deducted():
    fake = FakeTime(late_s=0.0)
    waiter = Waiter(fake.clock, fake.sleep)
    waiter.wait(1.0)
    fake.now_s += 5.0
    waiter.wait(1.0)
    assert fake.now_s == 107.0


def test_a_timed_model_has_the_parameters_and_buffers_of_the_model_in_the_same_order():
    model = Branched()
    timed = twin(model)
    for method in ("named_parameters", "named_buffers"):
        expected, got = list(getattr(model, method)()), list(getattr(timed, method)())
        assert [name for name, _ in got] == [name for name, _ in expected]
        assert all(torch.equal(mine, yours) for (_, mine), (_, yours) in zip(got, expected, strict=True))
    assert list(timed.state_dict()) == list(model.state_dict())
    assert [p.requires_grad for p in timed.parameters()] == [p.requires_grad for p in model.parameters()]
    assert not {id(p) for p in timed.parameters()} & {id(p) for p in model.parameters()}


def test_hooks_run_layer_by_layer_as_they_would_with_real_compute():
    inputs, labels = batch()
    seen = []
    for model in (Branched(), twin(Branched())):
        calls = []
        for name, module in model.named_modules():
            if name in LAYERS:
                module.register_forward_pre_hook(lambda *_, name=name, to=calls: to.append(("forward", name)))
        for name, parameter in model.named_parameters():
            layer = name.rpartition(".")[0]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, layer=layer, to=calls: to.append(("ready", layer))
                )
        F.cross_entropy(model(inputs), labels).backward()
        seen.append(calls)
    assert sorted(seen[1]) == sorted(seen[0])
    layers = [list(dict.fromkeys(layer for kind, layer in calls if kind == "ready")) for calls in seen]
    assert layers == [LAYERS[::-1], LAYERS[::-1]]
    assert [name for kind, name in seen[1] if kind == "forward"] == LAYERS


def test_each_layer_waits_for_its_own_time_forward_and_backward():
    fake = FakeTime(late_s=0.0)
    model, (inputs, labels) = Branched(), batch()
    times = [
        LayerTimes(name=name, forward_s=1.0 + place, backward_s=10.0 + place)
        for place, name in enumerate(LAYERS)
    ]
    timed = TimedModel(
        model,
        ModelTimes(layers=tuple(times), lead_s=0.5),
        classes=3,
        seed=0,
        waiter=Waiter(fake.clock, fake.sleep),
    )
    loss = F.cross_entropy(timed(inputs), labels)
    assert fake.slept == [0.5, 1.0, 2.0, 3.0, 4.0, 5.0]
    ready_s = {}

    def stamp(layer):
        return lambda _: ready_s.setdefault(layer, fake.now_s) and None

    for name, parameter in timed.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(stamp(name.rpartition(".")[0]))
    turn_s = fake.now_s
    loss.backward()
    reached = [ready_s[name] - turn_s for name in reversed(LAYERS)]
    assert reached == [14.0, 27.0, 39.0, 50.0, 60.0]


def test_gradients_are_drawn_from_the_seed_once_and_cost_no_copy():
    inputs, labels = batch()
    timed, again, other = (
        twin(Branched()),
        twin(Branched()),
        TimedModel(Branched(), steady(LAYERS), classes=3, seed=1),
    )
    for model in (timed, again, other):
        F.cross_entropy(model(inputs), labels).backward()
    grads = [[p.grad for p in model.parameters() if p.requires_grad] for model in (timed, again, other)]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads[0])
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[1], strict=True))
    assert not torch.equal(grads[0][0], grads[2][0])
    assert timed.head.weight.grad is None
    places = [grad.data_ptr() for grad in grads[0]]
    timed.zero_grad()
    F.cross_entropy(timed(inputs), labels).backward()
    assert [p.grad.data_ptr() for p in timed.parameters() if p.requires_grad] == places


def test_given_gradients_are_returned_by_name_and_kept_as_they_are():
    inputs, labels = batch()
    model = Branched()
    timed = twin(model)
    F.cross_entropy(model(inputs), labels).backward()
    given = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    timed.set_gradients(dict(reversed(given.items())))
    for _ in range(2):
        timed.zero_grad()
        F.cross_entropy(timed(inputs), labels).backward()
        assert {name for name, one in timed.named_parameters() if one.grad is not None} == given.keys()
        assert all(torch.equal(timed.get_parameter(name).grad, one) for name, one in given.items())
    with pytest.raises(KeyError, match="first"):
        timed.set_gradients({})


def test_a_copy_has_the_gradients_in_common_and_one_in_another_process_none():
    """A real model has none, and the cost of copying is measured with this one."""
    inputs, labels = batch()
    timed = twin(Branched())
    copied = copy.deepcopy(timed)
    for model in (timed, copied):
        F.cross_entropy(model(inputs), labels).backward()
    places = [[p.grad.data_ptr() for p in model.parameters() if p.requires_grad] for model in (timed, copied)]
    assert places[0] == places[1]
    assert copied.head.weight.data_ptr() != timed.head.weight.data_ptr()
    read = pickle.loads(pickle.dumps(timed))
    assert torch.equal(read.head.weight, timed.head.weight)
    assert not any(module._gradients for module in read.modules() if isinstance(module, TimedLayer))


def test_the_times_of_another_model_are_refused_by_layer():
    with pytest.raises(ValueError, match=r"layer 'shortcut\.1\.0' is in only one"):
        TimedModel(Branched(), steady([n for n in LAYERS if n != "shortcut.1.0"]), classes=3, seed=0)


def test_an_optimizer_steps_a_timed_model():
    model = Branched()
    timed = twin(model)
    optimizer = torch.optim.SGD(timed.parameters(), lr=1.0)
    F.cross_entropy(timed(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert not torch.equal(timed.first.weight, model.first.weight)
    assert torch.equal(timed.head.weight, model.head.weight)


# Computing, and waiting for the rest ------------------------------------------------------------------


def test_a_paced_step_computes_the_same_gradients_and_waits_at_its_turn_and_end():
    inputs, labels = batch()
    plain, stretched = Branched(), Branched()
    stretched.load_state_dict(plain.state_dict())
    waited = []
    stretch = Stretch(stretched, 3000.0, sleep=waited.append)
    for model in (plain, stretched):
        F.cross_entropy(model(inputs), labels).backward()
    assert torch.equal(plain.first.weight.grad, stretched.first.weight.grad)
    # A third of it, and all of it, before gradients are computed; what is then left of it passes at the end.
    assert [round(wait_s / 100) for wait_s in waited] == [10, 30, 30]
    assert (stretch.steps, stretch.late_steps) == (1, 0)


def test_a_pace_that_computing_does_not_keep_is_counted():
    model, (inputs, labels) = Branched(), batch()
    stretch = Stretch(model, 1e-9)
    for _ in range(3):
        F.cross_entropy(model(inputs), labels).backward()
    assert (stretch.steps, stretch.late_steps) == (3, 3)


def test_a_paced_model_that_only_predicts_is_not_slowed():
    waited = []
    model = Branched()
    stretch = Stretch(model, 3000.0, sleep=waited.append)
    with torch.no_grad():
        model(batch()[0])
    assert waited == []
    assert stretch.steps == 0


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_pace_of_no_time_is_refused(step_s):
    with pytest.raises(ValueError, match="stretched to more than 0 s"):
        Stretch(Branched(), step_s)
