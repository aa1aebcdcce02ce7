"""Promises about other uses of a model in a session: hooks, compilers, copies and conversions."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import offbeat
from offbeat.errors import OffbeatError
from offbeat.runtime.hybrid.layer_layout import check_layers
from offbeat.runtime.training.backward import GradientObservers
from offbeat.runtime.training.checks import ParameterFormCheck
from offbeat.runtime.training.hooks import SessionHook, do_nothing
from offbeat.runtime.training.partial_step import PartialOptimizer
from offbeat.strategies import AllReduce, Hybrid, PartialAllReduce, ServerBSP
from support.processes import run, values

STRATEGIES = {
    "bsp": AllReduce(bucket_bytes=64),
    "partial": PartialAllReduce(bucket_bytes=64),
    "hybrid": Hybrid(policy="ring", fuse_bytes=0),
    "ps-bsp": ServerBSP(shards="equal"),
}
STEPS = 5
WORKERS = 2


class Net(nn.Module):
    def __init__(self, normed=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6) if normed else nn.Identity()
        self.last = nn.Linear(6, 2)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def batches(step):
    """The inputs of all workers in a step; a single process uses them together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WORKERS, 4, 5, generator=generator, dtype=torch.float64)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum(1).mean().backward()
    optimizer.step()


def prepared(model, prepare):
    """The model to call: the result of `prepare`, or the model, changed in place."""
    made = prepare(model)
    return model if made is None else made


def alone(prepare, make=Net):
    model = make()
    called = prepared(model, prepare)
    optimizer = sgd(model)
    for number in range(STEPS):
        step(called, optimizer, batches(number).reshape(-1, 5))
    return flat(model)


def trained(rank, strategy, prepare, make=Net, *, joins_first):
    """The parameters after a few steps, with `prepare` called before or after join."""
    model = make()
    called = model if joins_first else prepared(model, prepare)
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, STRATEGIES[strategy]) as session:
        if joins_first:
            called = prepared(model, prepare)
        for number in range(STEPS):
            step(called, optimizer, batches(number)[rank])
        session.refresh()
    return flat(model).tolist()


def assert_follow(results, expected):
    """Asserts that all workers have equal parameters, and those of one process."""
    assert all(result == results[0] for result in results)
    assert torch.allclose(torch.tensor(results[0], dtype=torch.float64), expected, rtol=0, atol=1e-12)


# Hooks of the program -----------------------------------------------------------------------------------


def halves(parameter):
    parameter.grad.mul_(0.5)


def on_each(model):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halves)


def before_each(model):
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 0.5 * gradient)


def on_the_first_layer(model):
    """A hook that uses the other layer's gradients, as a norm of all gradients would."""

    def halve_others(_):
        for parameter in model.last.parameters():
            halves(parameter)

    model.first.weight.register_post_accumulate_grad_hook(halve_others)


def on_a_module(model):
    def halve(*_):
        halves(model.last.weight)

    model.first.register_full_backward_hook(halve)


def removing(model):
    def remove_gradient(parameter):
        parameter.grad = None

    model.last.bias.register_post_accumulate_grad_hook(remove_gradient)


HOOKS = [on_each, before_each, on_the_first_layer, on_a_module, removing]


def hooked(rank, emit, strategy):
    return [
        trained(rank, strategy, prepare, joins_first=joins_first)
        for prepare in HOOKS
        for joins_first in (False, True)
    ]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_programs_hooks_read_and_change_gradients(strategy):
    """For hooks of any kind, registered before or after join."""
    results = values(run(hooked, WORKERS, strategy))
    expected = [alone(prepare) for prepare in HOOKS for _ in range(2)]
    for of_one, truth in zip(zip(*results, strict=True), expected, strict=True):
        assert_follow(of_one, truth)


def test_only_hooks_that_may_read_gradients_count_as_observers():
    model = Net()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(do_nothing)  # the session's own hook
    observers = GradientObservers(model, list(model.parameters()))
    before_each(model)
    assert not observers.exist
    for register in (
        model.last.bias.register_post_accumulate_grad_hook,
        model.first.register_full_backward_hook,
        model.norm.register_full_backward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(do_nothing)
        found = observers.exist
        handle.remove()
        assert found
        assert not observers.exist


def test_a_step_within_a_backward_pass_is_refused():
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()):
        model.first.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(OffbeatError, match=r"expected optimizer\.step\(\) after the backward pass"):
            model(batches(0)[0]).sum().backward()


def test_a_step_with_foreign_hooks_or_wrappers_is_not_taken_in_parts():
    """Only torch's own step is, with no hooks but the session's and no wrapper but a scheduler's."""

    def are_possible(change):
        model = Net()
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(do_nothing)
        optimizer.register_step_post_hook(do_nothing)
        steps = PartialOptimizer(optimizer)
        handle = change(optimizer)
        possible = steps.is_possible
        if handle is not None and hasattr(handle, "remove"):
            handle.remove()
        return possible

    def wraps(optimizer):
        inner = optimizer.step
        optimizer.step = lambda: inner()

    assert are_possible(lambda _: None)
    assert are_possible(lambda one: torch.optim.lr_scheduler.StepLR(one, 1))
    assert not are_possible(wraps)
    assert not are_possible(lambda one: one.register_step_post_hook(do_nothing))
    assert not are_possible(lambda _: register_optimizer_step_post_hook(do_nothing))


# Compilers and other tools --------------------------------------------------------------------------------


def assert_inspected_as_without_a_session(model):
    """Applies all tools that inspect a model; they must find the same as without a session."""
    x = batches(99)[0]
    expected = copy.deepcopy(model).eval()(x)
    assert any(hooks_of(model))
    assert all(
        hook._call is do_nothing for hook in hooks_of(copy.deepcopy(model)) if isinstance(hook, SessionHook)
    )
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for one in (model, copy.deepcopy(model), loaded, nn.Sequential(model)):
        scripted = torch.jit.script(one)
        assert torch.equal(scripted.eval()(x), expected)
    assert torch.equal(torch.jit.trace(model, x)(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    assert torch.equal(torch.export.export(model, (x,), strict=True).module()(x), expected)
    assert torch.equal(torch.fx.experimental.proxy_tensor.make_fx(model)(x)(x), expected)
    named = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(values, sample):
        return torch.func.functional_call(model, values, (sample[None],)).sum()

    assert torch.func.vmap(torch.func.grad(of_one), (None, 0))(named, x)["last.bias"].shape == (4, 2)


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    ]


def shown(rank, emit, strategy):
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, STRATEGIES[strategy]) as session:
        for number in range(STEPS):
            step(model, optimizer, batches(number)[rank])
            if number == 2:
                session.refresh()
                assert_inspected_as_without_a_session(model)
        session.refresh()
    assert not any(hooks_of(model))
    assert not any("__prepare_scriptable__" in vars(module) for module in model.modules())
    return flat(model).tolist()


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tools_find_the_same_in_a_joined_model_as_without_a_session(strategy):
    """TorchScript, export, traces, copies, torch.func; the training is not affected by them."""
    assert_follow(values(run(shown, WORKERS, strategy)), alone(do_nothing))


def traced_too_early(rank, emit):
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, STRATEGIES["hybrid"]) as session:
        for number in range(STEPS):
            step(model, optimizer, batches(number)[rank])
        with pytest.raises(OffbeatError, match=r"call session\.refresh\(\) before that"):
            torch.jit.trace(model, batches(99)[0])
        assert session._synchronizer.averager.has_deferred_step
        torch.jit.script(model)  # takes the deferred step first
        assert not session._synchronizer.averager.has_deferred_step


def test_a_trace_before_a_deferred_step_is_refused():
    values(run(traced_too_early, WORKERS))


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")


def partly_compiled(model):
    model.first.compile(backend="eager")


def with_compiler(rank, emit, strategy):
    """Compiled within the session and, unless the strategy waits for single layers, before it."""
    after = [compiled, partly_compiled if strategy == "hybrid" else compiled_in_place]
    before = [] if strategy == "hybrid" else [compiled_in_place]
    return [
        *(trained(rank, strategy, one, joins_first=True) for one in after),
        *(trained(rank, strategy, one, joins_first=False) for one in before),
    ]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["bsp", "hybrid", "ps-bsp"])
def test_a_compiled_model_trains_like_an_uncompiled_one(strategy):
    results = values(run(with_compiler, WORKERS, strategy))
    for of_one in zip(*results, strict=True):
        assert_follow(of_one, alone(do_nothing))


def test_a_scripted_model_is_refused():
    model = torch.jit.script(Net())
    with pytest.raises(OffbeatError, match="RecursiveScriptModule, which takes no hooks"):
        offbeat.join(model, sgd(model), AllReduce())


class PartlyScripted(Net):
    def __init__(self):
        super().__init__(normed=True)
        self.norm = torch.jit.script(self.norm.eval())


def partly_scripted(rank, emit):
    return [trained(rank, one, do_nothing, PartlyScripted, joins_first=True) for one in ("bsp", "ps-bsp")]


@pytest.mark.long
def test_a_scripted_submodule_is_accepted_unless_its_layers_are_waited_for():
    """Buffers of scripted modules are not in a plain dict."""
    for of_one in zip(*values(run(partly_scripted, WORKERS)), strict=True):
        assert_follow(of_one, alone(do_nothing, PartlyScripted))
    with pytest.raises(OffbeatError, match="the module 'norm' of the model is compiled"):
        check_layers(PartlyScripted())


# Conversions ----------------------------------------------------------------------------------------------


def reshaped(model):
    model.last.bias.data = torch.zeros(1, dtype=torch.float64)


def convert_and_continue(rank, strategy, convert):
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, STRATEGIES[strategy]):
        for number in range(STEPS):
            if number == 3:
                convert(model)
            step(model, optimizer, batches(number)[rank].to(model.first.weight.dtype))


def converted(rank, emit, strategy):
    """The errors on each worker after parameters were converted in the middle of training."""
    errors = []
    for convert in (nn.Module.float, reshaped):
        with pytest.raises(OffbeatError) as caught:
            convert_and_continue(rank, strategy, convert)
        errors.append(str(caught.value))
    return errors


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_changes_type_or_shape_is_named_on_all_workers(strategy):
    for of_one in values(run(converted, WORKERS, strategy)):
        assert "the parameter 'first.weight' was float64 [6, 5] on cpu at join and is float32" in of_one[0]
        assert "the parameter 'last.bias' was float64 [2] on cpu at join and is float64 [1]" in of_one[1]


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Conv2d(5, 4, 3, padding=1), nn.Flatten())
        self.double()

    def forward(self, x):
        return self.layers(x)


def channels_last(rank, emit, strategy):
    def convert(model):
        model.to(memory_format=torch.channels_last)

    return trained(rank, strategy, convert, Convolved, joins_first=True)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_may_change_their_memory_format(strategy):
    assert_follow(values(run(channels_last, WORKERS, strategy)), alone(do_nothing, Convolved))


def test_reused_memory_does_not_hide_a_conversion():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(0, 2))
    forms = ParameterFormCheck(model)
    for _ in range(3):
        model.double().half().float()
        forms.check()
    model[1].weight.data = model[1].weight.data.double()  # without elements, and so without an address
    with pytest.raises(OffbeatError, match=r"'1\.weight' was float32 \[2, 0\] on cpu"):
        forms.check()
