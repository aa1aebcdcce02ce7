"""Common models beside torchft's: the figure, what is refused, and offbeat's side for real."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from benchmarks.anchors_worker import AnchorSettings
from benchmarks.diloco_anchors import compare, train
from benchmarks.peers import equal_shards
from offbeat.models import build_model
from offbeat.numerics.outer_optimizer import OuterOptimizer


def test_a_difference_is_relative_to_what_training_has_changed_so_far():
    anchors = torch.tensor([[100.0, 50.0], [104.0, 51.0], [92.0, 50.0]], dtype=torch.float64)
    others = anchors + torch.tensor([[0.0, 0.0], [0.01, -0.02], [0.0, -0.2]], dtype=torch.float64)
    found = compare(anchors, others)
    assert [one.number for one in found] == [1, 2]
    assert [one.difference_ratio for one in found] == pytest.approx([0.02 / 4, 0.2 / 8])


def test_trainings_that_began_with_different_models_are_not_compared():
    anchors = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="the same first model"):
        compare(anchors, anchors + 1)
    with pytest.raises(ValueError, match="the same first model and rounds"):
        compare(anchors, anchors[:2])


@pytest.mark.long
def test_the_common_models_of_offbeat_are_those_of_its_optimizers_in_one_process(tmp_path):
    torch.manual_seed(0)
    samples, labels = torch.randn(24, 5), torch.randint(3, (24,))
    torch.save([samples, labels], tmp_path / "train.pt")
    settings = AnchorSettings(
        peer=None,
        data=str(tmp_path / "train.pt"),
        sample_shape=(5,),
        classes=3,
        dtype="float64",
        workers=2,
        rounds=3,
        every=2,
        batch_size=4,
        lr=0.1,
        seed=1,
        folder=str(tmp_path),
    )
    anchors = train(settings, None)
    models = [build_model("mlp", sample_shape=(5,), classes=3, seed=1).double() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    shards = [equal_shards((samples.double(), labels), rank, 2, 4, 1) for rank in range(2)]
    anchor = parameters_to_vector(models[0].parameters()).detach()
    expected, momentum = [anchor], torch.zeros_like(anchor)
    for number in range(3):
        for model, optimizer, shard in zip(models, optimizers, shards, strict=True):
            torch.nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                inputs, targets = next(shard)
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        flats = [parameters_to_vector(model.parameters()).detach() for model in models]
        anchor, momentum = OuterOptimizer().step(anchor, anchor - sum(flats) / 2, (momentum,), number)
        expected.append(anchor)
    torch.testing.assert_close(anchors, torch.stack(expected), rtol=0, atol=1e-12)
