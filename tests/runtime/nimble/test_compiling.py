"""`nimble.compile`: the module's results by threads, the choice by measured times, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from offbeat import nimble
from offbeat.errors import OffbeatError
from offbeat.runtime.nimble.compiling import MODULE, STREAMS, THREADS, choose_fastest, compile_module
from offbeat.runtime.nimble.program import same_values
from support.branching_models import MODELS, Branches, a_model, images, rows


def by_threads(model, inputs):
    return compile_module(model, inputs, choose=lambda times_s: THREADS)


def assert_like(compiled, model, inputs):
    with torch.no_grad():
        expected, structure = tree_flatten(model(*inputs))
    found, found_structure = tree_flatten(compiled(*inputs))
    assert found_structure == structure
    for one, other in zip(found, expected, strict=True):
        assert same_values(one, other) if isinstance(other, torch.Tensor) else one == other
        assert not isinstance(one, torch.Tensor) or not one.requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_threads_give_the_results_of_the_module_bit_for_bit(name):
    model, inputs = a_model(name)
    compiled = by_threads(model, inputs())
    assert compiled.is_on
    assert compiled.choice == THREADS
    assert compiled.stream_count > 1
    for seed in range(20):
        assert_like(compiled, model, inputs(seed))
    compiled.close()


def test_the_public_function_measures_and_says_what_it_has_chosen_and_why():
    model, inputs = a_model("branches")
    compiled = nimble.compile(model, inputs())
    assert set(compiled.times_s) == {MODULE, THREADS}
    assert compiled.choice == choose_fastest(compiled.times_s)
    assert compiled.is_on == (compiled.choice == THREADS)
    assert all(
        f"{name} {time_s * 1e3:.3g} ms" in compiled.reason for name, time_s in compiled.times_s.items()
    )
    assert_like(compiled, model, inputs(1))
    compiled.close()


def test_where_it_does_not_pay_the_module_itself_computes():
    model, inputs = a_model("branches")
    compiled = compile_module(model, inputs(), choose=lambda times_s: MODULE)
    assert not compiled.is_on
    assert compiled.reason.startswith("the module itself (3 streams; a call takes: module ")
    assert_like(compiled, model, inputs(1))


def test_the_fastest_is_chosen_if_it_is_a_twentieth_faster_than_the_module():
    assert choose_fastest({MODULE: 1.0, THREADS: 0.96}) == MODULE
    assert choose_fastest({MODULE: 1.0, THREADS: 0.95}) == THREADS
    assert choose_fastest({MODULE: 1.0, "graph on one stream": 0.5, STREAMS: 0.6}) == "graph on one stream"
    assert choose_fastest({MODULE: 1.0, "graph on one stream": 0.6, STREAMS: 0.5}) == STREAMS


def test_a_module_without_branches_stays_itself_and_says_so():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    compiled = nimble.compile(model, rows())
    assert (compiled.choice, compiled.stream_count, compiled.synchronization_count) == (MODULE, 1, 0)
    assert "no two operators are independent" in compiled.reason
    assert_like(compiled, model, rows(1))


def test_values_that_parameters_get_in_place_are_used():
    model, inputs = a_model("branches")
    compiled = by_threads(model, inputs())
    other = Branches()
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(compiled(*inputs()), other.eval()(*inputs()))
    compiled.close()


def test_parameters_that_have_moved_are_refused():
    model, inputs = a_model("branches")
    compiled = by_threads(model, inputs())
    model.one.weight.data = model.one.weight.data.clone()
    with pytest.raises(OffbeatError, match="have moved since it was compiled: compile it again"):
        compiled(*inputs())
    compiled.close()


def test_inputs_in_another_layout_give_the_same_values():
    model, inputs = a_model("branches")
    compiled = by_threads(model, inputs())
    (x,) = inputs(1)
    assert torch.equal(compiled(x.contiguous(memory_format=torch.channels_last)), compiled(x))
    compiled.close()


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ((torch.zeros(3, 4, 6, 6),), r"got \[3, 4, 6, 6\] torch.float32 on cpu"),
        ((torch.zeros(2, 4, 6, 6, dtype=torch.float64),), "got .* torch.float64 on cpu"),
        ((torch.zeros(2, 4, 6, 6, device="meta"),), "got .* on meta"),
        ((), "got no tensors"),
        ((*images(), *images()), "got .*, .* on cpu"),
        ((3,), "got no tensors"),
    ],
)
@pytest.mark.parametrize("choice", [THREADS, MODULE])
def test_inputs_other_than_the_example_are_refused(other, shown, choice):
    model, inputs = a_model("branches")
    compiled = compile_module(model, inputs(), choose=lambda times_s: choice)
    with pytest.raises(ValueError, match=rf"expected inputs like the example, \[2, 4, 6, 6\].*{shown}"):
        compiled(*other)
    compiled.close()


@pytest.mark.parametrize("example", [(), torch.zeros(2), (1,), [torch.zeros(2), None], None])
def test_an_example_that_is_no_tuple_of_tensors_is_refused(example):
    with pytest.raises(ValueError, match="expected a tuple of tensors"):
        nimble.compile(nn.Linear(2, 2).eval(), example)


def test_a_module_in_training_mode_is_refused_also_later():
    model, inputs = a_model("branches")
    model.norm.train()
    with pytest.raises(
        ValueError, match=r"evaluation mode, got one in training mode: call its eval\(\) first"
    ):
        nimble.compile(model, inputs())
    compiled = by_threads(model.eval(), inputs())
    model.train()
    with pytest.raises(OffbeatError, match=r"in training mode now: call its eval\(\) first"):
        compiled(*inputs())
    compiled.close()


def test_hooks_and_tensors_on_several_devices_are_refused():
    model, inputs = a_model("branches")
    handle = model.one.register_forward_hook(lambda *_: None)
    with pytest.raises(OffbeatError, match="has forward hooks"):
        nimble.compile(model, inputs())
    handle.remove()
    with pytest.raises(ValueError, match=r"on one device, got \['cpu', 'meta'\]"):
        nimble.compile(model, (torch.zeros(2, 4, 6, 6, device="meta"),))


def test_after_closing_the_module_itself_computes():
    model, inputs = a_model("branches")
    compiled = by_threads(model, inputs())
    compiled.close()
    compiled.close()
    assert (compiled.is_on, compiled.choice, compiled.reason) == (False, MODULE, "it was closed")
    assert_like(compiled, model, inputs(1))


class FailsLater(nn.Module):
    """Fails where a value is out of range."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Embedding(4, 3), nn.Embedding(4, 3)

    def forward(self, tokens):
        return self.one(tokens) + self.other(tokens + 1)


def test_an_error_of_an_operator_is_raised_and_the_next_call_works():
    model = FailsLater().eval()
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 3])
    compiled = by_threads(model, (good,))
    with pytest.raises(IndexError):
        compiled(bad)
    assert_like(compiled, model, (good,))
    compiled.close()


class Counted(nn.Module):
    """Computes with the number of its calls, which a schedule cannot know."""

    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, x):
        return x.exp() + x.sin() * next(self.calls)


def test_a_schedule_whose_results_differ_from_the_modules_is_left_out_and_the_reason_says_so():
    compiled = nimble.compile(Counted().eval(), rows())
    assert set(compiled.times_s) == {MODULE}
    assert not compiled.is_on
    assert compiled.reason.endswith("not threads: its results differ from the module's")


class Remembers(nn.Module):
    """Keeps what others read after a call."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls, self.seen, self.by_name = kind, 0, [], {}

    def forward(self, x):
        if self.kind == "a number":
            self.calls += 1
        elif self.kind == "a new attribute":
            self.last = x
        elif self.kind == "a list":
            self.seen.append(x)
        elif self.kind == "a dict":
            self.by_name["x"] = x
        return x.exp() + x.sin()


@pytest.mark.parametrize(
    ("kind", "named"),
    [("a number", "calls"), ("a new attribute", "last"), ("a list", "seen"), ("a dict", "by_name")],
)
def test_a_forward_pass_that_sets_attributes_is_refused_before_anything_traces_it(kind, named):
    model = nn.Sequential(Remembers(kind)).eval()
    with pytest.raises(OffbeatError, match=rf"changes 0\.{named}, an attribute of the module"):
        nimble.compile(model, rows())
    kept = [getattr(model[0], "last", None), *model[0].seen, *model[0].by_name.values()]
    assert all(type(one) is torch.Tensor for one in kept if one is not None)


def test_in_inference_mode_and_with_gradients_on_the_results_are_the_same():
    model, inputs = a_model("residual")
    compiled = by_threads(model, inputs())
    with torch.inference_mode():
        inferred = compiled(*inputs())
    for one, other in zip(inferred, compiled(*inputs()), strict=True):
        assert torch.equal(one, other)
    compiled.close()
