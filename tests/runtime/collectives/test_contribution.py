"""Contributions whose elements lie in several tensors."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.runtime.collectives.contribution import Contribution, ExternalElements


@st.composite
def cases(draw):
    """A length, ranges of it that lie in other tensors, and a range to use."""
    length = draw(st.integers(1, 40))
    bounds = sorted(draw(st.sets(st.integers(0, length), max_size=8)))
    parts = [pair for pair in pairwise(bounds) if draw(st.booleans())]
    start = draw(st.integers(0, length))
    return length, draw(st.permutations(parts)), start, draw(st.integers(start, length))


def made(length, bounds, factor):
    """A contribution and its elements: whole numbers, absent from `flat` where parts lie in other tensors."""
    whole = torch.arange(1.0, length + 1) * factor
    flat, parts = whole.clone(), []
    for start, stop in bounds:
        flat[start:stop] = -1000.0
        parts.append(ExternalElements(start, torch.arange(start + 1.0, stop + 1), factor))
    return Contribution(flat, parts), whole


@settings(max_examples=300, deadline=None)
@given(case=cases(), in_place=st.booleans())
def test_add_uses_in_place_elements_without_materializing_them(case, in_place):
    length, bounds, start, stop = case
    own, whole = made(length, bounds, 0.25)
    theirs = torch.arange(float(stop - start)) * 3
    expected = theirs + whole[start:stop]
    out = theirs if in_place else torch.empty_like(theirs)
    own.add(theirs, start, stop, out=out)
    assert torch.equal(out, expected)
    assert own.is_materialized == (not bounds)


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_materialize_writes_the_given_range_of_the_flat_tensor_and_nothing_else(case):
    length, bounds, start, stop = case
    own, whole = made(length, bounds, 0.25)
    before = own.flat.clone()
    own.materialize(start, stop)
    before[start:stop] = whole[start:stop]
    assert torch.equal(own.flat, before)
    own.materialize()
    assert own.is_materialized
    assert torch.equal(own.flat, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_materialized_elements_are_scaled_with_the_rounding_of_a_multiplication(dtype):
    values = torch.linspace(-3, 3, 1001).to(dtype)
    own = Contribution(torch.zeros(1001, dtype=dtype), [ExternalElements(0, values, 1 / 3)])
    own.materialize()
    assert torch.equal(own.flat, values * (1 / 3))
