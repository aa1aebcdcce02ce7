"""Promises of `offbeat.torch_compat`, with the torch that is installed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer

from offbeat import torch_compat
from offbeat.torch_compat import (
    abort_process_groups,
    active_ddp,
    backward_hooks,
    backward_pass_id,
    call_at_end_of_backward,
    copy_tensors,
    default_store,
    global_backward_hooks,
    group_of_one,
    has_forward_hooks,
    has_global_step_hooks,
    is_observed_by_tool,
    is_operator,
    is_traced_by_jit,
    is_traced_by_proxies,
    storage_use_count,
    uncompiled,
    without_subclass_functions,
    without_transformations,
    written_tensors,
)


def test_a_backward_pass_has_a_number_and_calls_back_once_at_its_end():
    seen, ended = [], []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def observe(_):
        if not seen:
            call_at_end_of_backward(lambda: ended.append(x.grad is not None))
        seen.append(backward_pass_id())

    y.register_hook(observe)
    assert backward_pass_id() == -1
    y.sum().backward()
    assert len(seen) == 1
    assert seen[0] >= 0
    assert ended == [True]
    assert backward_pass_id() == -1


@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_forward_hooks_of_submodules_and_of_all_modules_are_seen(name):
    model = nn.Sequential(nn.Linear(2, 2))
    assert not has_forward_hooks(model)
    handle = getattr(model[0], name)(lambda *_: None)
    assert has_forward_hooks(model)
    handle.remove()
    handle = getattr(nn.modules.module, name.replace("register_", "register_module_"))(lambda *_: None)
    assert has_forward_hooks(model)
    handle.remove()
    assert not has_forward_hooks(model)


def test_operators_declare_what_they_write():
    add, linear = torch.ops.aten.add_.Tensor, torch.ops.aten.linear.default
    assert is_operator(add)
    assert not is_operator(torch.add)
    x, y = torch.ones(2), torch.ones(2)
    (written,) = written_tensors(add, (x, y), {})
    assert written is x
    (written,) = written_tensors(torch.ops.aten.add.out, (x, x), {"out": y})
    assert written is y
    assert written_tensors(linear, (x, y), {}) == []


def test_a_backward_pass_that_raises_calls_nothing_back():
    ended = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def fail(_):
        call_at_end_of_backward(lambda: ended.append(True))
        raise KeyError("by hand")

    y.register_hook(fail)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert ended == []


def test_hooks_of_a_module_and_of_all_modules_are_detected_until_they_are_removed():
    layer = nn.Linear(2, 2)
    own, everywhere = backward_hooks(layer), global_backward_hooks()
    assert not any(own)
    assert not any(everywhere)
    handles = [
        layer.register_full_backward_hook(lambda *_: None),
        layer.register_full_backward_pre_hook(lambda *_: None),
        nn.modules.module.register_module_full_backward_hook(lambda *_: None),
        nn.modules.module.register_module_full_backward_pre_hook(lambda *_: None),
    ]
    assert all(own)
    assert all(everywhere)
    for handle in handles:
        handle.remove()
    assert not any(own)
    assert not any(everywhere)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_hooks_of_all_optimizers_are_seen(when):
    register = getattr(optimizer, f"register_optimizer_step_{when}_hook")
    assert not has_global_step_hooks()
    handle = register(lambda *_: None)
    assert has_global_step_hooks()
    handle.remove()
    assert not has_global_step_hooks()


class Observed(nn.Module):
    """Records which tools observe its operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append((is_traced_by_jit(), is_traced_by_proxies(), is_observed_by_tool()))
        return x * 2


def test_each_kind_of_tool_is_distinguished_from_the_others():
    model = Observed()
    model(torch.ones(2))
    assert model.seen.pop() == (False, False, False)
    torch.jit.trace(model, torch.ones(2), check_trace=False)
    assert model.seen.pop() == (True, False, True)
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(model)(torch.ones(2))
    assert model.seen.pop() == (False, True, True)
    torch.func.vmap(model)(torch.ones(2, 2))
    assert model.seen.pop() == (False, False, True)


def test_a_transformation_does_not_see_computation_outside_of_it():
    seen, shapes = [], []

    def f(x):
        seen.append(is_observed_by_tool())
        with without_transformations():
            seen.append(is_observed_by_tool())
            shapes.append((torch.ones(2, 3) * 2).shape)
        seen.append(is_observed_by_tool())
        return x * 2

    torch.func.vmap(f)(torch.ones(4, 5))
    assert seen == [True, False, True]
    assert shapes == [(2, 3)]


def test_a_compiled_function_calls_an_uncompiled_one_unchanged():
    seen = []

    def note():
        seen.append(torch.compiler.is_compiling())

    plain = uncompiled(note)

    @torch.compile(backend="eager")
    def double(x):
        plain()
        return x * 2

    assert double(torch.ones(2)).tolist() == [2, 2]
    assert seen == [False]


class Counted(torch.Tensor):
    """Counts calls of its function."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Counted.calls += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_functions_of_subclasses_are_not_called():
    x = torch.ones(2).as_subclass(Counted)
    before = Counted.calls
    with without_subclass_functions():
        x.add(1)
    assert Counted.calls == before
    x.add(1)
    assert Counted.calls > before


def test_a_view_holds_the_storage():
    x = torch.ones(4)
    before = storage_use_count(x)
    view = x[1:]
    assert storage_use_count(x) == before + 1
    del view
    assert storage_use_count(x) == before


def test_tensors_are_copied_into_their_targets():
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    copy_tensors(targets, sources)
    assert [one.tolist() for one in targets] == [[1, 1], [2, 2, 2]]


def test_without_a_process_group_there_is_no_default_store():
    with pytest.raises(ValueError, match="process group"):
        default_store()


def test_a_ddp_of_a_group_of_one_is_known_during_its_forward_pass():
    seen = []
    layer = nn.Linear(2, 1)
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(active_ddp()))
    wrapped = nn.parallel.DistributedDataParallel(layer, process_group=group_of_one(torch.device("cpu")))
    wrapped(torch.ones(1, 2)).sum().backward()
    layer(torch.ones(1, 2))
    assert seen == [wrapped, None]
    assert torch.equal(layer.weight.grad, torch.ones(1, 2))
    assert not dist.is_initialized()


def test_every_function_is_tested():
    public = {name for name, value in vars(torch_compat).items() if callable(value) and name.islower()}
    public = {name for name in public if getattr(torch_compat, name).__module__ == torch_compat.__name__}
    assert {name for name in public if not name.startswith("_")} <= globals().keys()


def test_no_process_group_is_left_after_an_abort():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group()
    abort_process_groups()
    assert not dist.is_initialized()
