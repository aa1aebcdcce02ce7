"""Promises about what else has to do with a model in a session: hooks, compilers, copies and conversions."""

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
    """What the workers compute on in a step, and where it is one process, together."""
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
    """What is to be called from here on: what `prepare` returns, or the model, changed in place."""
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
    """The parameters after a few steps, where `prepare` is called before or after join."""
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


def follows(results, expected):
    """Whether all workers came to the same, and to what one process comes to."""
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
    """A hook for the other layer's gradients as well, as who wants the norm of all has."""

    def halve_others(_):
        for parameter in model.last.parameters():
            halves(parameter)

    model.first.weight.register_post_accumulate_grad_hook(halve_others)


def on_a_module(model):
    def halve(*_):
        halves(model.last.weight)

    model.first.register_full_backward_hook(halve)


def taking(model):
    def take(parameter):
        parameter.grad = None

    model.last.bias.register_post_accumulate_grad_hook(take)


HOOKS = [on_each, before_each, on_the_first_layer, on_a_module, taking]


def hooked(rank, emit, strategy):
    return [
        trained(rank, strategy, prepare, joins_first=joins_first)
        for prepare in HOOKS
        for joins_first in (False, True)
    ]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_programs_hooks_find_gradients_and_have_their_effect(strategy):
    """Whatever they hang on, and whether they were there before join or came after it."""
    results = values(run(hooked, WORKERS, strategy))
    expected = [alone(prepare) for prepare in HOOKS for _ in range(2)]
    for of_one, truth in zip(zip(*results, strict=True), expected, strict=True):
        follows(of_one, truth)


def test_only_hooks_that_may_look_at_gradients_keep_them_where_they_are():
    model = Net()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(do_nothing)  # the session's
    onlookers = GradientObservers(model, list(model.parameters()))
    before_each(model)
    assert not onlookers.exist
    for register in (
        model.last.bias.register_post_accumulate_grad_hook,
        model.first.register_full_backward_hook,
        model.norm.register_full_backward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(do_nothing)
        found = onlookers.exist
        handle.remove()
        assert found
        assert not onlookers.exist


def test_a_step_within_a_backward_pass_is_refused():
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()):
        model.first.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(OffbeatError, match=r"expected optimizer\.step\(\) after the backward pass"):
            model(batches(0)[0]).sum().backward()


def test_a_step_that_somebody_looks_on_at_is_not_taken_in_parts():
    """It is one by torch's own optimizer, with no hooks but the session's and a scheduler's wrapper."""

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


# Compilers and the like -----------------------------------------------------------------------------------


def looked_at(model):
    """By everything that looks at a model; what that finds is what it finds without a session."""
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
                looked_at(model)
        session.refresh()
    assert not any(hooks_of(model))
    assert not any("__prepare_scriptable__" in vars(module) for module in model.modules())
    return flat(model).tolist()


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_looks_at_a_joined_model_finds_what_it_finds_without_a_session(strategy):
    """TorchScript, export, traces, copies, torch.func; and the training goes on as if they had not."""
    follows(values(run(shown, WORKERS, strategy)), alone(do_nothing))


def traced_too_early(rank, emit):
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, STRATEGIES["hybrid"]) as session:
        for number in range(STEPS):
            step(model, optimizer, batches(number)[rank])
        with pytest.raises(OffbeatError, match=r"call session\.refresh\(\) before that"):
            torch.jit.trace(model, batches(99)[0])
        assert session._synchronizer.averager._deferred is not None
        torch.jit.script(model)  # which has it taken first
        assert session._synchronizer.averager._deferred is None


def test_no_step_that_was_put_off_gets_into_a_trace():
    values(run(traced_too_early, WORKERS))


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")


def partly_compiled(model):
    model.first.compile(backend="eager")


def with_compiler(rank, emit, strategy):
    """Compiled within the session, and, where layers are not waited for one by one, before it."""
    after = [compiled, partly_compiled if strategy == "hybrid" else compiled_in_place]
    before = [] if strategy == "hybrid" else [compiled_in_place]
    return [
        *(trained(rank, strategy, one, joins_first=True) for one in after),
        *(trained(rank, strategy, one, joins_first=False) for one in before),
    ]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["bsp", "hybrid", "ps-bsp"])
def test_a_compiled_model_is_trained_as_one_that_is_not(strategy):
    results = values(run(with_compiler, WORKERS, strategy))
    for of_one in zip(*results, strict=True):
        follows(of_one, alone(do_nothing))


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
def test_a_part_may_be_scripted_where_its_layers_are_not_waited_for():
    """Buffers of scripted modules lie in no plain dict."""
    for of_one in zip(*values(run(partly_scripted, WORKERS)), strict=True):
        follows(of_one, alone(do_nothing, PartlyScripted))
    with pytest.raises(OffbeatError, match="the module 'norm' of the model is compiled"):
        check_layers(PartlyScripted())


# Conversions ----------------------------------------------------------------------------------------------


def reshaped(model):
    model.last.bias.data = torch.zeros(1, dtype=torch.float64)


def convert_and_go_on(rank, strategy, convert):
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, STRATEGIES[strategy]):
        for number in range(STEPS):
            if number == 3:
                convert(model)
            step(model, optimizer, batches(number)[rank].to(model.first.weight.dtype))


def converted(rank, emit, strategy):
    """What each worker is told about parameters that it has converted in the midst of training."""
    told = []
    for convert in (nn.Module.float, reshaped):
        with pytest.raises(OffbeatError) as caught:
            convert_and_go_on(rank, strategy, convert)
        told.append(str(caught.value))
    return told


@pytest.mark.long(after=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_changes_its_form_is_named_on_all_workers(strategy):
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
def test_parameters_may_be_laid_out_in_another_order(strategy):
    follows(values(run(channels_last, WORKERS, strategy)), alone(do_nothing, Convolved))


def test_memory_that_was_taken_again_does_not_hide_a_conversion():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(0, 2))
    forms = ParameterFormCheck(model)
    for _ in range(3):
        model.double().half().float()
        forms.check()
    model[1].weight.data = model[1].weight.data.double()  # of no elements, and so of no place in memory
    with pytest.raises(OffbeatError, match=r"'1\.weight' was float32 \[2, 0\] on cpu"):
        forms.check()
