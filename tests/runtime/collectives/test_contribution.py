"""Contributions whose elements lie in several places."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.runtime.collectives.contribution import Contribution, ExternalElements


@st.composite
def cases(draw):
    """A length, runs of it that lie elsewhere, and a run to use."""
    length = draw(st.integers(1, 40))
    bounds = sorted(draw(st.sets(st.integers(0, length), max_size=8)))
    parts = [pair for pair in pairwise(bounds) if draw(st.booleans())]
    start = draw(st.integers(0, length))
    return length, draw(st.permutations(parts)), start, draw(st.integers(start, length))


def made(length, bounds, factor):
    """A contribution, and what it is: whole numbers, which are not in `flat` where parts lie elsewhere."""
    whole = torch.arange(1.0, length + 1) * factor
    flat, parts = whole.clone(), []
    for start, stop in bounds:
        flat[start:stop] = -1000.0
        parts.append(ExternalElements(start, torch.arange(start + 1.0, stop + 1), factor))
    return Contribution(flat, parts), whole


@settings(max_examples=300, deadline=None)
@given(case=cases(), in_place=st.booleans())
def test_what_is_added_is_the_contribution_wherever_it_lies(case, in_place):
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
def test_a_run_that_is_settled_lies_in_the_flat_tensor_and_nothing_else_is_written(case):
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
def test_what_is_settled_is_scaled_as_multiplying_rounds(dtype):
    values = torch.linspace(-3, 3, 1001).to(dtype)
    own = Contribution(torch.zeros(1001, dtype=dtype), [ExternalElements(0, values, 1 / 3)])
    own.materialize()
    assert torch.equal(own.flat, values * (1 / 3))
