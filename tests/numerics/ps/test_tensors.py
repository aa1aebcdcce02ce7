"""Tensors as ranges of keys, against one flat array of all their numbers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.numerics.ps.entries import Entries
from offbeat.numerics.ps.tensors import TensorTable

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5).filter(
    lambda shapes: sum(map(math.prod, shapes)) > 0
)


def new(kind, array):
    """A tensor of these numbers, in one of the ways in which they may lie in memory."""
    if kind == "numpy":
        return array.copy()
    if kind == "numpy, by columns":
        return np.array(array, order="F")
    if kind == "torch":
        return torch.tensor(array)
    if kind == "parameter":
        return nn.Parameter(torch.tensor(array))
    if kind == "torch, every other":
        wide = torch.zeros(*array.shape, 2, dtype=torch.from_numpy(array).dtype)
        wide[..., 0] = torch.from_numpy(array)
        return wide[..., 0]
    assert kind == "torch, by columns"
    return torch.tensor(array.T.copy()).permute(tuple(reversed(range(array.ndim))))


KINDS = (
    *("numpy", "numpy, by columns"),
    *("torch", "parameter", "torch, every other", "torch, by columns"),
)


@st.composite
def models(draw):
    """Some tensors by name, and all their numbers in one row."""
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    shapes = draw(SHAPES)
    flat = np.arange(1, 1 + sum(map(math.prod, shapes)), dtype=dtype)
    tensors, begin = {}, 0
    for number, shape in enumerate(shapes):
        array = flat[begin : begin + math.prod(shape)].reshape(shape)
        tensors[f"t{number}"] = new(draw(st.sampled_from(KINDS)), array)
        begin += math.prod(shape)
    return tensors, flat


def numbers_of(tensor):
    """Its numbers one by one, in the order in which indices count."""
    array = tensor.detach().numpy() if isinstance(tensor, torch.Tensor) else tensor
    return [array[index].item() for index in np.ndindex(array.shape)]


@given(models(), st.data())
def test_a_range_of_keys_is_that_part_of_all_numbers(model, data):
    tensors, flat = model
    offsets = TensorTable.from_tensors(tensors.items())
    assert offsets.keys == len(flat)
    assert offsets.dtype == flat.dtype.name
    first = data.draw(st.integers(0, len(flat) - 1))
    last = data.draw(st.integers(first + 1, len(flat)))
    touched = {}
    for name, tensor in tensors.items():
        begin, end = offsets.key_range_of(name)
        if max(first, begin) < min(last, end):
            touched[name] = tensor
    gathered = offsets.gather(touched, first, last)
    assert gathered.dtype == flat.dtype
    assert gathered.tolist() == flat[first:last].tolist()
    assert offsets.gather(tensors).tolist() == flat.tolist()
    assert offsets.gather(tensors, first).tolist() == flat[first:].tolist()


@given(models())
def test_ranges_of_names_follow_each_other_in_order(model):
    tensors, flat = model
    offsets = TensorTable.from_tensors(tensors.items())
    end = 0
    for name, tensor in tensors.items():
        first, last = offsets.key_range_of(name)
        assert first == end
        assert flat[first:last].tolist() == numbers_of(tensor)
        end = last
    assert end == offsets.keys


@given(models(), st.booleans(), st.data())
def test_scattered_values_are_written_to_their_keys_and_nowhere_else(model, is_listed, data):
    tensors, flat = model
    offsets = TensorTable.from_tensors(tensors.items())
    expected = flat.copy()
    if is_listed:
        keys = np.array(sorted(data.draw(st.sets(st.integers(0, len(flat) - 1)))), np.int64)
        content = Entries(0, -flat[keys] - 0.5, keys)
        expected[keys] = content.values
    else:
        first = data.draw(st.integers(0, len(flat)))
        last = data.draw(st.integers(first, len(flat)))
        content = Entries(first, -flat[first:last] - 0.5)
        expected[first:last] = content.values
    content.values.flags.writeable = data.draw(st.booleans())
    if data.draw(st.booleans()):
        content.values = content.values[::-1].copy()[::-1]  # backwards in memory
    touched = {
        name: tensor
        for name, tensor in tensors.items()
        if len(content.key_range(*offsets.key_range_of(name))) or data.draw(st.booleans())
    }
    offsets.scatter(content, touched)
    assert [number for tensor in tensors.values() for number in numbers_of(tensor)] == expected.tolist()


@given(models())
def test_a_table_is_the_same_from_plain_data(model):
    tensors, _ = model
    offsets = TensorTable.from_tensors(tensors.items())
    again = TensorTable(**json.loads(json.dumps(offsets.state_dict())))
    assert again.state_dict() == offsets.state_dict()
    assert [again.key_range_of(name) for name in tensors] == [offsets.key_range_of(name) for name in tensors]


@pytest.mark.parametrize("kind", ["numpy", "torch", "parameter"])
def test_one_contiguous_tensor_is_not_copied(kind):
    tensors = {name: new(kind, np.zeros((2, 3), np.float32)) for name in ("a", "b")}
    offsets = TensorTable.from_tensors(tensors.items())
    for first, last in ((6, 12), (7, 9)):
        offsets.gather(tensors, first, last)[...] = 1
    assert numbers_of(tensors["b"]) == [1] * 6
    offsets.gather(tensors, 5, 12)[...] = 2
    assert numbers_of(tensors["a"]) == [0] * 6


def test_packed_tensors_have_the_order_of_the_keys_whatever_their_layout():
    matrix, vector = torch.arange(6.0).view(3, 2).t(), torch.arange(6.0, 8.0)
    tensors = {"matrix": matrix, "none": torch.empty(0), "vector": vector}
    table = TensorTable.from_tensors(tensors.items())
    into = torch.empty(table.keys)
    flat = table.pack(tensors, into)
    assert flat is into
    assert np.array_equal(flat.numpy(), table.gather(tensors))
    views = table.views(flat)
    assert list(views) == list(tensors)
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())
    views["vector"] += 1  # of the packed numbers, which are no longer those of the tensors
    assert flat[-2:].tolist() == [7.0, 8.0]
    assert vector.tolist() == [6.0, 7.0]
    with pytest.raises(ValueError, match="use its to_dense"):
        table.pack(tensors | {"vector": vector.to_sparse()}, into)


def test_a_tensor_without_numbers_has_no_keys_and_need_not_be_present():
    offsets = TensorTable([("a", (2,)), ("none", (0, 3)), ("b", (2,))])
    assert offsets.key_range_of("none") == (2, 2)
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    offsets.scatter(Entries(1, np.ones(2, np.float32)), tensors)
    assert offsets.gather(tensors).tolist() == [0, 1, 1, 0]


def test_a_model_and_its_gradients_have_the_same_table():
    torch.manual_seed(0)  # a weight near zero would have a large relative error
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    parameters = dict(model.named_parameters())
    offsets = TensorTable.from_tensors(model.named_parameters())
    assert offsets.key_range_of("0.bias") == (6, 8)
    model(torch.ones(4, 3)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    before = offsets.gather(parameters).copy()
    moved = before - np.float32(0.1) * offsets.gather(gradients)
    offsets.scatter(Entries(0, moved), parameters)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter += 0.1 * parameter.grad
    np.testing.assert_allclose(offsets.gather(parameters), before, rtol=1e-5)


@pytest.mark.parametrize("keys", [None, np.array([1])], ids=["neighbours", "listed"])
def test_autograd_notices_that_a_parameter_was_written(keys):
    """Otherwise a gradient would mix numbers from before and after the write."""
    parameter = nn.Parameter(torch.ones(2))
    loss = (parameter * parameter).sum()
    values = np.ones(2 if keys is None else 1, np.float32)
    TensorTable.from_tensors([("w", parameter)]).scatter(Entries(0, values, keys), {"w": parameter})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            torch.zeros(2, dtype=torch.bfloat16),
            "float32 or float64, got 'bfloat16'; .*push a float32 copy",
        ),
        (torch.zeros(2, dtype=torch.float16), "float32 or float64, got 'float16'; .*push a float32 copy"),
        (np.zeros(2, np.float16), "float32 or float64, got 'float16'; .*push a float32 copy"),
        (torch.zeros(2, dtype=torch.int64), "float32 or float64, got 'int64'"),
        (np.zeros(2, ">f4"), "float32 or float64, got '>f4'"),
        (torch.zeros(2).to_sparse(), "expected 'w' to be dense, got torch.sparse_coo; use its to_dense"),
    ],
    ids=str,
)
def test_tensors_that_have_no_keys_are_refused(tensor, words):
    with pytest.raises(ValueError, match=words):
        TensorTable.from_tensors([("w", tensor)])
    if tensor.dtype not in (torch.float32, np.dtype(">f4")):
        with pytest.raises(ValueError, match=r"expected 'w' of float32, got .* servers add in float32"):
            TensorTable([("w", (2,))]).gather({"w": tensor})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TensorTable.from_tensors([]), "1 to 9223372036854775808 numbers in all, got 0"),
        (lambda: TensorTable([("w", (0, 3))]), "numbers in all, got 0"),
        (lambda: TensorTable([("w", (2**32, 2**32))]), "numbers in all, got 18446744073709551616"),
        (lambda: TensorTable([("w", (2,)), ("w", (2,))]), "each name once, got 'w' twice"),
        (lambda: TensorTable([("w", (-1,))]), r"sizes of at least 0 for 'w', got \(-1,\)"),
        (lambda: TensorTable([("w", (1.0,))]), r"sizes of at least 0 for 'w', got \(1.0,\)"),
        (lambda: TensorTable([("w", (1,))], "float16"), "float32 or float64, got 'float16'"),
        (
            lambda: TensorTable.from_tensors([("v", torch.zeros(1)), ("w", np.zeros(1))]),
            "expected 'w' of float32, got float64; convert it, or make a namespace for each dtype",
        ),
        (lambda: TensorTable([("v", (1,))]).key_range_of("w"), "one of the names v, got 'w'"),
    ],
)
def test_impossible_tables_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


TWO = TensorTable([("v", (2,)), ("w", (2, 3))])
V, W = torch.zeros(2), np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"v": V}, "expected a tensor 'w' for keys 2 to 7, got none; add it, or request a range without"),
        ({"v": V, "w": W.T}, r"expected 'w' of shape \(2, 3\), got \(3, 2\)"),
        ({"v": V, "w": W.astype(np.float64)}, "expected 'w' of float32, got float64; convert it"),
        ({"v": V, "w": None}, "expected a tensor 'w', got NoneType; if it has no gradient, pass zeros"),
        ({"v": V, "w": torch.zeros(2, 3).to_sparse()}, "expected 'w' to be dense"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_none_is_written(tensors, words):
    with pytest.raises(ValueError, match=words):
        TWO.gather(tensors)
    with pytest.raises(ValueError, match=words):
        TWO.scatter(Entries(0, np.ones(8, np.float32)), tensors)
    assert not tensors["v"].any()
    assert TWO.gather(tensors, 0, 2).tolist() == [0, 0]


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (2, 2), (3, 2), (0, 9)])
def test_ranges_outside_the_keys_are_refused(first, last):
    with pytest.raises(ValueError, match=f"a range within keys 0 to 8, got {first} to {last}"):
        TWO.gather({"v": V, "w": W}, first, last)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Entries(0, np.ones(8)), r"one number of float32 per key, got float64 of shape \(8,\)"),
        (
            Entries(0, np.ones((8, 1), np.float32)),
            r"one number of float32 per key, got float32 of shape \(8, 1\)",
        ),
        (Entries(1, np.ones(8, np.float32)), "keys within 0 to 8, got 1 to 9"),
        (Entries(-1, np.ones(2, np.float32)), "keys within 0 to 8, got -1 to 1"),
        (Entries(0, np.ones(1, np.float32), np.array([8])), "keys from 0 to below 8, got 8 to 8"),
        (Entries(0, np.ones(2, np.float32), np.array([3, 3])), "ascending keys, each once, got 3 before 3"),
        (Entries(0, np.ones(1, np.float32), np.array([3, 4])), "values of 2 keys, got 1"),
    ],
)
def test_values_that_do_not_fit_are_refused(content, words):
    with pytest.raises(ValueError, match=words):
        TWO.scatter(content, {"v": V, "w": W})
    assert not V.any()
    assert not W.any()
