"""Snapshots of a model."""

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
    """A model with tied weights, buffers, several layouts and types, and plain attributes."""

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
        self.table = torch.arange(3.0)  # an attribute, not a buffer
        self.scale = 2.0
        self.noted = None

    def forward(self, images):
        self.noted = self.norm(self.first(images)).mean((2, 3)) * self.scale
        return self.head(self.noted)


def trained_briefly(model):
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
def test_a_snapshot_does_not_change_when_the_model_changes(shared):
    model = trained_briefly(Odd())
    assert not model.noted.is_leaf  # torch refuses to copy such a tensor
    values = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = Snapshot(shared=shared)
    snapshot.capture(model)
    copied = snapshot.model()
    trained_briefly(model)
    model.scale = 7.0
    model.table += 1
    assert not copied.training
    assert model.training
    assert copied.scale == 2.0
    assert torch.equal(copied.table, torch.arange(3.0))
    assert copied.head.weight is copied.embedding.weight
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert all(torch.equal(value, values[name]) for name, value in copied.state_dict().items())
    assert all(torch.equal(value, values[name]) for name, value in snapshot.state_dict().items())
    assert snapshot.state_dict().keys() == model.state_dict().keys()


def test_a_snapshot_keeps_layouts_and_types():
    model = trained_briefly(Odd())
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    same(model, snapshot.model())


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_of_a_snapshot_are_aligned_like_torchs(shared):
    """Kernels may compute unaligned tensors differently, so that metrics would differ in their last bits."""
    snapshots = [Snapshot(shared=shared) for _ in range(8)]  # a single one may be aligned by chance
    for snapshot in snapshots:
        snapshot.capture(Odd())
        tensors = [place.view(snapshot.blocks) for place in snapshot.places]
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_a_second_capture_takes_changed_attributes_and_layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    first_layout = snapshot.layout_id
    model[1].p = 0.7
    snapshot.capture(model)
    assert snapshot.model()[1].p == 0.7
    assert snapshot.layout_id == first_layout  # the memory is reused
    model.append(nn.Linear(2, 3))
    snapshot.capture(model)
    same(model, snapshot.model())
    assert snapshot.layout_id != first_layout


def test_containers_are_copied_and_shared_containers_stay_shared():
    model = nn.Linear(2, 2)
    model.seen, model.known = {}, {}
    model.also_seen = model.seen
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    model.register_forward_hook(lambda *_: pytest.fail("a hook that was registered later"))
    model.seen["later"] = 1
    copied = snapshot.model()
    copied(torch.zeros(1, 2))
    copied.register_forward_pre_hook(lambda *_: pytest.fail("a hook of the copy"))
    copied.seen["here"] = copied.known["here"] = 2
    assert copied.seen is copied.also_seen
    assert copied.seen is not copied.known
    assert (model.seen, model.known) == ({"later": 1}, {})
    assert snapshot.model().seen == {}
    snapshot.model()(torch.zeros(1, 2))


def test_models_of_a_snapshot_have_separate_modules_and_share_values():
    model = Odd()
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    one, other = snapshot.model(), snapshot.model()
    assert one.first is not other.first
    assert one.first.weight.data_ptr() == other.first.weight.data_ptr()
    one(torch.zeros(1, 3, 8, 8))
    assert other.noted is None


def test_restore_to_restores_every_value():
    model = trained_briefly(Odd())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = Snapshot(shared=False)
    snapshot.capture(model)
    trained_briefly(model)
    assert not torch.equal(model.small, values["small"])
    snapshot.restore_to(model)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    model.more = nn.Linear(1, 1)
    with pytest.raises(OffbeatError, match="has different parameters or buffers than when"):
        snapshot.restore_to(model)


def test_another_process_reads_the_values_in_place():
    """Here the reader is this process; it receives the structure, which contains no values."""
    model = trained_briefly(Odd())
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
    again = load_model(snapshot.structure, snapshot.places, snapshot.blocks)  # like another process
    same(model, again)
    assert torch.equal(again.table, model.table)
    assert len(snapshot.structure) < 20_000
    for device, block in snapshot.blocks.items():
        block.fill_(7)
        assert theirs[device].eq(7).all()  # the same memory


def test_a_model_that_cannot_be_copied_is_refused_with_the_cause():
    model = nn.Linear(1, 1)
    model.lock = threading.Lock()
    with pytest.raises(OffbeatError, match=r"cannot be copied \(TypeError: .*lock"):
        Snapshot(shared=False).capture(model)


def test_unwrap_removes_wrappers():
    model = nn.Linear(2, 2)
    assert unwrap(torch.compile(model)) is model
    assert unwrap(torch.compile(nn.DataParallel(model))) is model
    assert unwrap(model) is model


def test_a_model_without_shapes_is_refused():
    with pytest.raises(OffbeatError, match="weight has no shape yet: run one batch"):
        unwrap(nn.LazyLinear(3))


def test_a_digest_depends_on_every_bit_of_the_values_and_on_nothing_else():
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


def test_a_shared_snapshot_is_in_memory_without_a_file():
    def mapped(what):
        return sum(what in line for line in Path("/proc/self/maps").read_text().splitlines())

    files, memory = mapped("/dev/shm/"), mapped("memfd:offbeat")
    snapshot = Snapshot(shared=True)
    snapshot.capture(Odd())
    assert (mapped("/dev/shm/"), mapped("memfd:offbeat")) == (files, memory + 1)
