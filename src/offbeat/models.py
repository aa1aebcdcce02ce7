"""The built-in models of the commands and benchmarks, initialised from a seed.

Shapes: B samples, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "mlp": "one hidden layer of 128 units; any sample shape",
        "cnn2": "two 5x5 convolutions and two fully connected layers; any image of 4x4 pixels or more",
        "alexnet": "the 227-pixel, 1000-class AlexNet in one tower; resizes its images itself",
        "resnet18": "ResNet-18 with the CIFAR stem (3x3 convolution, no max-pool)",
        "resnet50": "the 224-pixel, 1000-class ResNet-50; resizes its images itself",
        "bert_small": "BERT's encoder with 4 layers of 512 units; reads the values of any sample as tokens",
    }
)
"""What `build_model` can build: name -> one line of description."""


class Mlp(nn.Module):
    """A perceptron with one hidden layer: flatten, linear, ReLU, linear.

    Source: textbook; the width of 128 keeps the digits model at 9,610 parameters (38 kB), about the smallest
    message that an all-reduce is benchmarked with.
    """

    def __init__(self, *, inputs: int, classes: int, hidden: int = 128) -> None:
        """Initialise the weights.

        Args:
            inputs: values a sample, all its dimensions together.
            classes: K.
            hidden: units of the hidden layer.
        """
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) for samples (B, ...)."""
        logits: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return logits


class Cnn2(nn.Module):
    """Two convolutions with max-pooling, then two fully connected layers.

    Source: McMahan, Moore, Ramage, Hampson and Agüera y Arcas 2017, "Communication-Efficient Learning of Deep
    Networks from Decentralized Data", section 3: 5x5 convolutions of 32 and 64 channels, each followed by 2x2
    max-pooling, 512 units with ReLU, a softmax layer; 1,663,370 parameters for 28x28 MNIST, as here. The
    padding that this count implies (2 pixels) is not stated there; the ReLU after each convolution is ours.
    """

    def __init__(self, *, channels: int, height: int, width: int, classes: int) -> None:
        """Initialise the weights.

        Args:
            channels: C.
            height: H in pixels, at least 4.
            width: W in pixels, at least 4.
            classes: K.
        """
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.hidden = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.head = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, K)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return logits


class AlexNet(nn.Module):
    """AlexNet for 227 x 227 images and 1000 classes: 62,378,344 parameters with the defaults.

    Images of another size are resized inside (bilinear), so that CIFAR images go in as they are.

    Source: Krizhevsky, Sutskever and Hinton 2012, "ImageNet Classification with Deep Convolutional Neural
    Networks", section 3.5. Deviations: one tower instead of two grouped halves (which is what the usual count
    of 62,378,344 belongs to; the grouped network has 60,965,224); 227 pixels where the paper says 224,
    because only 227 gives its 55 x 55 first map; no local response normalisation, as in most later versions;
    PyTorch's default initialisation instead of N(0, 0.01) with biases of 1.
    """

    def __init__(self, *, channels: int = 3, classes: int = 1000) -> None:
        """Initialise the weights.

        Args:
            channels: C.
            classes: K, the width of the last layer.
        """
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 96, 11, stride=4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(96, 256, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(256, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) of any size to logits (B, K)."""
        logits: Tensor = self.classifier(self.features(_resize(images, 227)).flatten(1))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut: the identity, or a 1x1 convolution to a new shape.

    Source: He, Zhang, Ren and Sun 2016, "Deep Residual Learning for Image Recognition", figure 5 (left),
    shortcut option B of section 3.3.
    """

    def __init__(self, *, channels_in: int, channels: int, stride: int) -> None:
        """Initialise the weights.

        Args:
            channels_in: channels of the input.
            channels: channels of the output.
            stride: of the first convolution and of the shortcut.
        """
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(channels_in, channels, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, channels_in, H, W) to maps (B, channels, H / stride, W / stride), rounded up."""
        x = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(x)) + self.shortcut(images))


class ResNet18(nn.Module):
    """ResNet-18 with the CIFAR stem: 11,173,962 parameters for 3 channels and 10 classes.

    Source: He, Zhang, Ren and Sun 2016, "Deep Residual Learning for Image Recognition", table 1 (18-layer).
    Deviation, as is usual for 32 x 32 images and as section 4.2 does for its own CIFAR networks: the stem is
    a 3x3 convolution of stride 1 without max-pooling. Convolutions are initialised as in its reference
    [13] (He et al. 2015, Kaiming normal, fan out).
    """

    def __init__(self, *, channels: int = 3, classes: int = 10) -> None:
        """Initialise the weights.

        Args:
            channels: C.
            classes: K.
        """
        super().__init__()
        self.stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        widths = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(channels_in=c_in if i == 0 else c, channels=c, stride=stride if i == 0 else 1)
                for c_in, c, stride in widths
                for i in range(2)
            )
        )
        self.head = nn.Linear(512, classes)
        _init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, K)."""
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution with batch norm and a shortcut, as in `ResidualBlock`.

    Source: He, Zhang, Ren and Sun 2016, figure 5 (right). Deviation, usual since torchvision: the 3x3
    convolution has the stride, not the first one.
    """

    def __init__(self, *, channels_in: int, width: int, stride: int) -> None:
        """Initialise the weights.

        Args:
            channels_in: channels of the input.
            width: of the 3x3 convolution; the output has 4 times as many channels.
            stride: of that convolution and of the shortcut.
        """
        super().__init__()
        channels = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(channels_in, channels, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, channels_in, H, W) to maps (B, 4 width, H / stride, W / stride), rounded up."""
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x)))
        return F.relu(self.norm3(self.conv3(x)) + self.shortcut(images))


class ResNet50(nn.Module):
    """ResNet-50 for 224 x 224 images and 1000 classes: 25,557,032 parameters with the defaults.

    Images of another size are resized inside (bilinear).

    Source: He, Zhang, Ren and Sun 2016, "Deep Residual Learning for Image Recognition", table 1 (50-layer).
    """

    def __init__(self, *, channels: int = 3, classes: int = 1000) -> None:
        """Initialise the weights.

        Args:
            channels: C.
            classes: K.
        """
        super().__init__()
        self.stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks, channels_in = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(count):
                blocks.append(
                    Bottleneck(channels_in=channels_in, width=width, stride=stride if i == 0 else 1)
                )
                channels_in = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels_in, classes)
        _init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) of any size to logits (B, K)."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(_resize(images, 224)))), 3, 2, padding=1)
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


class EncoderLayer(nn.Module):
    """Self-attention and a perceptron, each followed by its residual connection and layer norm.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.1, with BERT's GELU. There is no
    dropout.
    """

    def __init__(self, *, width: int, heads: int, is_causal: bool = False) -> None:
        """Initialise the weights.

        Args:
            width: size of a token, a multiple of `heads`; the hidden layer of the perceptron has 4 times as
                many units.
            heads: number of attention heads.
            is_causal: a token attends to itself and earlier ones only.
        """
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T, width) to tokens of the same shape."""
        b, t, width = tokens.shape
        q, k, v = self.qkv(tokens).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        attended = attended.transpose(1, 2).reshape(b, t, width)
        x = self.norm1(tokens + self.attention_out(attended))
        normed: Tensor = self.norm2(x + self.mlp_out(F.gelu(self.hidden(x))))
        return normed


class BertSmall(nn.Module):
    """A small BERT encoder, 4 layers of 512 units, with a head on the first token.

    It has 28,499,968 parameters and those of the head. Samples may have any shape and type: their first 128
    values become tokens, the fractional part of a value times the size of the vocabulary. So the model runs
    on any data set, without learning anything useful.

    Source: Devlin et al. 2019, "BERT", section 3; the size called BERT-Small by Turc et al. 2019,
    "Well-Read Students Learn Better" (there 28.8 million, with the pooler). Deviations: no segments, no
    pooler, PyTorch's default initialisation, no dropout.
    """

    VOCABULARY = 30_522
    TOKENS = 128

    def __init__(self, *, classes: int) -> None:
        """Initialise the weights.

        Args:
            classes: K.
        """
        super().__init__()
        self.token_embedding = nn.Embedding(self.VOCABULARY, 512)
        self.position_embedding = nn.Embedding(512, 512)
        self.norm = nn.LayerNorm(512)
        self.layers = nn.Sequential(*(EncoderLayer(width=512, heads=8) for _ in range(4)))
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) for samples (B, ...)."""
        values = x.flatten(1)[:, : self.TOKENS].double()
        tokens = ((values - values.floor()) * self.VOCABULARY).long().clamp(max=self.VOCABULARY - 1)
        places = torch.arange(tokens.shape[1], device=x.device)
        embedded = self.norm(self.token_embedding(tokens) + self.position_embedding(places))
        logits: Tensor = self.head(self.layers(embedded)[:, 0])
        return logits


def build_model(name: str, *, sample_shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Build a model on the CPU: the same arguments give the same weights; global generators are not advanced.

    `alexnet` and `resnet50` keep their 1000-way last layer, and with it their 62,378,344 and 25,557,032
    parameters for 3 channels, even if the data has fewer classes: labels 0..classes-1 use the first outputs,
    and training lowers the others.

    Args:
        name: a key of `MODELS`.
        sample_shape: the shape of one sample without the batch dimension; (C, H, W) for all but `mlp` and
            `bert_small`.
        classes: K, the number of classes of the data; at most 1000 for `alexnet` and `resnet50`.
        seed: seed of the weights.

    Returns:
        A module in training mode that maps (B, *sample_shape) to logits (B, K), for `alexnet` and
        `resnet50` (B, 1000).

    Raises:
        ValueError: unknown name, or a sample shape or number of classes that the model does not accept.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; expected one of {', '.join(MODELS)}")
    if not sample_shape or min(sample_shape) < 1:
        raise ValueError(f"sample_shape must hold positive sizes, got {sample_shape}")
    if name not in ("mlp", "bert_small") and len(sample_shape) != 3:
        raise ValueError(f"{name} needs images, sample_shape (channels, height, width); got {sample_shape}")
    if name == "cnn2" and min(sample_shape[1:]) < 4:
        raise ValueError(f"cnn2 needs images of at least 4 x 4 pixels, got sample_shape {sample_shape}")
    if classes < 1:
        raise ValueError(f"classes must be at least 1 for {name}, got {classes}")
    if name in ("alexnet", "resnet50") and classes > 1000:
        raise ValueError(f"classes must be in 1..1000 for {name}, got {classes}")
    # Only the CPU generator is forked and seeded: torch.manual_seed would reseed the GPUs as well.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return _new_model(name, sample_shape, classes)


def _resize(images: Tensor, pixels: int) -> Tensor:
    """Resize images to squares of `pixels` pixels a side; those of that size are returned unchanged."""
    if images.shape[-2:] == (pixels, pixels):
        return images
    return F.interpolate(images, size=(pixels, pixels), mode="bilinear", align_corners=False)


def _shortcut(channels_in: int, channels: int, stride: int) -> nn.Sequential:
    """Return a block's shortcut: the identity if the shape stays, else a 1x1 convolution to the new one."""
    if stride == 1 and channels_in == channels:
        return nn.Sequential()
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
    )


def _init_convolutions(model: nn.Module) -> None:
    """Initialise the weights of all convolutions: Kaiming normal, fan out."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _new_model(name: str, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
    match name:
        case "mlp":
            return Mlp(inputs=math.prod(sample_shape), classes=classes)
        case "cnn2":
            channels, height, width = sample_shape
            return Cnn2(channels=channels, height=height, width=width, classes=classes)
        case "alexnet":
            return AlexNet(channels=sample_shape[0])
        case "resnet18":
            return ResNet18(channels=sample_shape[0], classes=classes)
        case "resnet50":
            return ResNet50(channels=sample_shape[0])
        case "bert_small":
            return BertSmall(classes=classes)
        case _:
            raise AssertionError(name)  # `build_model` checked it against MODELS
