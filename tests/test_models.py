"""The built-in models: sizes as published, weights by seed, no global generator touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.models import MODELS, build_model


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "sample_shape", "count"),
    [
        ("mlp", (1, 8, 8), 64 * 128 + 128 + 128 * 10 + 10),
        ("cnn2", (1, 28, 28), 1_663_370),  # McMahan et al. 2017, section 3
        ("alexnet", (3, 32, 32), 62_378_344),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("resnet50", (3, 32, 32), 25_557_032),
        ("bert_small", (3, 32, 32), 28_499_968 + 5130),
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, sample_shape: tuple[int, ...], count: int
) -> None:
    assert parameters(build_model(name, sample_shape=sample_shape, classes=10, seed=0)) == count


@pytest.mark.long(after=3)
@pytest.mark.parametrize(
    ("name", "sample_shape", "classes", "logits"),
    [
        ("mlp", (1, 8, 8), 10, 10),
        ("mlp", (123,), 2, 2),
        ("cnn2", (1, 8, 8), 10, 10),
        ("cnn2", (1, 4, 5), 3, 3),
        ("cnn2", (3, 33, 30), 7, 7),
        ("alexnet", (3, 32, 32), 10, 1000),
        ("alexnet", (1, 28, 28), 10, 1000),
        ("alexnet", (3, 227, 227), 1000, 1000),
        ("resnet18", (3, 32, 32), 100, 100),
        ("resnet18", (1, 8, 8), 10, 10),
        ("resnet50", (1, 8, 8), 10, 1000),
        ("bert_small", (7,), 10, 10),
    ],
)
def test_a_model_maps_samples_to_logits_and_has_finite_gradients(
    name: str, sample_shape: tuple[int, ...], classes: int, logits: int
) -> None:
    model = build_model(name, sample_shape=sample_shape, classes=classes, seed=0)
    assert model.training
    out = model(torch.zeros(2, *sample_shape))
    assert out.shape == (2, logits)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_alexnet_resizes_bilinearly() -> None:
    model = build_model("alexnet", sample_shape=(3, 32, 32), classes=10, seed=0).eval()
    small = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    large = nn.functional.interpolate(small, size=(227, 227), mode="bilinear")
    assert torch.equal(model(small), model(large))


@pytest.mark.parametrize("name", ["mlp", "cnn2", "resnet18", "bert_small"])
def test_the_seed_decides_the_weights(name: str) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        return build_model(name, sample_shape=(3, 8, 8), classes=10, seed=seed).state_dict()

    first, again, other = weights(7), weights(7), weights(8)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["mlp", "cnn2", "resnet18", "bert_small"])
def test_building_neither_changes_nor_uses_the_global_generator(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(name, sample_shape=(1, 8, 8), classes=10, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = build_model(name, sample_shape=(1, 8, 8), classes=10, seed=3).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_models_are_built_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        model = build_model("resnet18", sample_shape=(1, 8, 8), classes=10, seed=3)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "sample_shape", "classes", "text"),
    [
        (
            "vgg",
            (3, 32, 32),
            10,
            "unknown model 'vgg'; expected one of mlp, cnn2, alexnet, resnet18, resnet50",
        ),
        ("mlp", (), 10, r"sample_shape must hold positive sizes, got \(\)"),
        ("mlp", (1, 0, 8), 10, "positive sizes"),
        ("cnn2", (64,), 10, r"cnn2 needs images, sample_shape \(channels, height, width\); got \(64,\)"),
        ("resnet18", (8, 8), 10, "needs images"),
        ("cnn2", (1, 3, 8), 10, "at least 4 x 4 pixels"),
        ("mlp", (4,), 0, "classes must be at least 1 for mlp, got 0"),
        ("alexnet", (3, 32, 32), 1001, r"classes must be in 1\.\.1000 for alexnet, got 1001"),
    ],
)
def test_bad_arguments_are_refused_with_a_message(
    name: str, sample_shape: tuple[int, ...], classes: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        build_model(name, sample_shape=sample_shape, classes=classes, seed=0)


def test_every_model_is_described() -> None:
    assert list(MODELS) == ["mlp", "cnn2", "alexnet", "resnet18", "resnet50", "bert_small"]
    assert all(text and "\n" not in text for text in MODELS.values())


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("name", "steps"), [("mlp", 60), ("cnn2", 60), ("resnet18", 15), ("bert_small", 10)])
def test_a_model_halves_the_loss_of_a_batch(name: str, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(20, 1, 8, 8, generator=generator)
    labels = torch.arange(20) % 10
    model = build_model(name, sample_shape=(1, 8, 8), classes=10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
