"""A model as it was at one moment."""

from __future__ import annotations

import copy
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.runtime.validation.snapshot import Snapshot, load_model, unwrap


class Odd(nn.Module):
    """Everything that models have: tied weights, buffers, other layouts and types, plain attributes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.tensor([1 + 2j]), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.table = torch.arange(3.0)  # an attribute that is no buffer
        self.scale = 2.0
        self.noted = None

    def forward(self, images):
        self.noted = self.norm(self.first(images)).mean((2, 3)) * self.scale
        return self.head(self.noted)


def trained_a_bit(model):
    torch.manual_seed(3)
    model.train()
    model(torch.randn(6, 3, 8, 8)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    return model


def same(one, other):
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    mine |= dict(one.named_buffers())
    theirs |= dict(other.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.stride() == theirs[name].stride(), name
        assert tensor.dtype == theirs[name].dtype, name
        assert type(tensor) is type(theirs[name]), name


@pytest.mark.parametrize("shared", [False, True])
def test_it_is_the_model_of_then_whatever_becomes_of_the_model(shared):
    model = trained_a_bit(Odd())
    assert not model.noted.is_leaf  # which torch refuses to copy
    values = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = Snapshot(shared=shared)
    snapshot.capture(model)
    taken = snapshot.model()
    trained_a_bit(model)
    model.scale = 7.0
    model.table += 1
    assert not taken.training
    assert model.training
    assert taken.scale == 2.0
    assert torch.equal(taken.table, torch.arange(3.0))
    assert taken.head.weight is taken.embedding.weight
    assert not any(parameter.requires_grad for parameter in taken.parameters())
    assert all(torch.equal(value, values[name]) for name, value in taken.state_dict().items())
    assert all(torch.equal(value, values[name]) for name, value in snapshot.state_dict().items())
    assert snapshot.state_dict().keys() == model.state_dict().keys()


def test_layouts_and_types_stay_what_they_are():
    model = trained_a_bit(Odd())
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    same(model, snapshot.model())


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_are_aligned_as_those_of_torch_are(shared):
    """Kernels may compute otherwise where they are not, and metrics would differ in their last bits."""
    snapshots = [Snapshot(shared=shared) for _ in range(8)]  # one alone may lie well by chance
    for snapshot in snapshots:
        snapshot.capture(Odd())
        tensors = [place.view(snapshot.blocks) for place in snapshot.places]
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_what_changes_from_epoch_to_epoch_is_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    first_room = snapshot.layout_id
    model[1].p = 0.7
    snapshot.capture(model)
    assert snapshot.model()[1].p == 0.7
    assert snapshot.layout_id == first_room  # the same memory again
    model.append(nn.Linear(2, 3))
    snapshot.capture(model)
    same(model, snapshot.model())
    assert snapshot.layout_id != first_room


def test_what_was_empty_is_the_copys_own_and_what_was_one_stays_one():
    model = nn.Linear(2, 2)
    model.seen, model.known = {}, {}
    model.also_seen = model.seen
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    model.register_forward_hook(lambda *_: pytest.fail("a hook that came later"))
    model.seen["later"] = 1
    copied = snapshot.model()
    copied(torch.zeros(1, 2))
    copied.register_forward_pre_hook(lambda *_: pytest.fail("a hook of the copy's"))
    copied.seen["here"] = copied.known["here"] = 2
    assert copied.seen is copied.also_seen
    assert copied.seen is not copied.known
    assert (model.seen, model.known) == ({"later": 1}, {})
    assert snapshot.model().seen == {}
    snapshot.model()(torch.zeros(1, 2))


def test_threads_have_modules_of_their_own_and_values_in_common():
    model = Odd()
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    one, other = snapshot.model(), snapshot.model()
    assert one.first is not other.first
    assert one.first.weight.data_ptr() == other.first.weight.data_ptr()
    one(torch.zeros(1, 3, 8, 8))
    assert other.noted is None


def test_going_back_restores_every_value():
    model = trained_a_bit(Odd())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    trained_a_bit(model)
    assert not torch.equal(model.small, values["small"])
    snapshot.restore_to(model)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    model.more = nn.Linear(1, 1)
    with pytest.raises(OffbeatError, match="has different parameters or buffers than when"):
        snapshot.restore_to(model)


def test_another_process_reads_the_values_where_they_are():
    """Here the reader is this process: what it is sent is the structure, without a single value."""
    model = trained_a_bit(Odd())
    snapshot = Snapshot(shared=True)
    snapshot.capture(model)
    read = load_model(snapshot.structure, snapshot.places, snapshot.blocks)
    same(model, read)
    assert not read.training
    theirs = ForkingPickler.loads(ForkingPickler.dumps(snapshot.exported))
    same(model, load_model(snapshot.structure, snapshot.places, theirs))
    assert not any(parameter.is_shared() for parameter in model.parameters())
    assert not model.table.is_shared()
    starts = {block.data_ptr() for block in snapshot.blocks.values()}
    assert {parameter.untyped_storage().data_ptr() for parameter in read.parameters()} == starts
    again = load_model(snapshot.structure, snapshot.places, snapshot.blocks)  # as other processes do
    same(model, again)
    assert torch.equal(again.table, model.table)
    assert len(snapshot.structure) < 20_000
    for device, block in snapshot.blocks.items():
        block.fill_(7)
        assert theirs[device].eq(7).all()  # the same memory


def test_a_model_that_cannot_be_copied_says_why():
    model = nn.Linear(1, 1)
    model.lock = threading.Lock()
    with pytest.raises(OffbeatError, match=r"cannot be copied \(TypeError: .*lock"):
        Snapshot(shared=False).capture(model)


def test_wrappers_are_taken_off():
    model = nn.Linear(2, 2)
    assert unwrap(torch.compile(model)) is model
    assert unwrap(torch.compile(nn.DataParallel(model))) is model
    assert unwrap(model) is model


def test_a_model_without_shapes_is_refused():
    with pytest.raises(OffbeatError, match="weight has no shape yet: run one batch"):
        unwrap(nn.LazyLinear(3))


def test_a_digest_tells_snapshots_apart_by_every_bit_and_by_nothing_else():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    first, second = Snapshot(shared=False), Snapshot(shared=True)
    first.capture(model)
    second.capture(copy.deepcopy(model))
    assert first.digest() == second.digest()
    with torch.no_grad():
        model[1].running_mean[4] += 1e-6
    second.capture(model)
    assert first.digest() != second.digest()
    second.overwrite(first.to_bytes())
    assert first.digest() == second.digest()
    assert torch.equal(second.model()[1].running_mean, first.model()[1].running_mean)


def test_a_shared_snapshot_lies_in_memory_without_a_file():
    def mapped(what):
        return sum(what in line for line in Path("/proc/self/maps").read_text().splitlines())

    files, memory = mapped("/dev/shm/"), mapped("memfd:offbeat")
    snapshot = Snapshot(shared=True)
    snapshot.capture(Odd())
    assert (mapped("/dev/shm/"), mapped("memfd:offbeat")) == (files, memory + 1)
