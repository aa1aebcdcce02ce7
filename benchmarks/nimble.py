"""`python -m benchmarks nimble`: forward passes on several streams against one stream and the module itself.

Two networks with many branches classify images: one of Inception's cells (four branches of one to three
convolutions), one of NASNet's (ten branches of separable convolutions, added in pairs). On a GPU the module
is measured against CUDA graphs on one stream and on several; elsewhere against a thread per stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.commands import NimbleOptions
from benchmarks.workers import print_progress
from offbeat.cli.result import Result
from offbeat.nimble import compile
from offbeat.runtime.nimble.compiling import GRAPH, MODULE, STREAMS, THREADS

CHANNELS, CLASSES = 64, 10
_NAMES = {THREADS: "threads", GRAPH: "one_stream", STREAMS: "streams"}


def run(options: NimbleOptions, *, command: str) -> Result:
    """Measure each network with each batch size."""
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name, kind in NETWORKS.items():
        network = kind(options.cells).eval().to(device)
        for batch_size in options.batch_size or [1, 32]:
            print_progress(f"{name}, batches of {batch_size}")
            images = torch.randn(batch_size, 3, 32, 32, device=device)
            compiled = compile(network, (images,))
            times_s, where = compiled.times_s, f"{name}_b{batch_size}"
            figures[f"module_ms_{where}"] = times_s[MODULE] * 1e3
            for choice in times_s.keys() - {MODULE}:
                figures[f"ratio_{_NAMES[choice]}_to_module_{where}"] = times_s[choice] / times_s[MODULE]
            if STREAMS in times_s and GRAPH in times_s:
                figures[f"ratio_streams_to_one_stream_{where}"] = times_s[STREAMS] / times_s[GRAPH]
            rows.append(
                {
                    "network": name,
                    "batch": batch_size,
                    "operators": compiled.operator_count,
                    "streams": compiled.stream_count,
                    "synchronizations": compiled.synchronization_count,
                    **{f"{choice} ms": time_s * 1e3 for choice, time_s in times_s.items()},
                    "choice": compiled.choice,
                }
            )
            compiled.close()
    return Result(name="nimble", command=command, kind="real", seed=options.seed, figures=figures, rows=rows)


def _convolution(inputs: int, outputs: int, size: int, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class InceptionCell(nn.Module):
    """Four branches of different depth, concatenated; (B, C, H, W) to the same.

    Source: Szegedy et al. 2015, "Going deeper with convolutions", CVPR, figure 2, with two convolutions of
    3x3 in the place of one of 5x5.
    """

    def __init__(self) -> None:
        super().__init__()
        part = CHANNELS // 4
        self.branches = nn.ModuleList(
            [
                _convolution(CHANNELS, part, 1),
                nn.Sequential(_convolution(CHANNELS, part, 1), _convolution(part, part, 3)),
                nn.Sequential(
                    _convolution(CHANNELS, part, 1), _convolution(part, part, 3), _convolution(part, part, 3)
                ),
                nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _convolution(CHANNELS, part, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' results side by side."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class NasCell(nn.Module):
    """Five sums of two separable convolutions each, concatenated and reduced; (B, C, H, W) to the same.

    Source: Zoph et al. 2018, "Learning transferable architectures for scalable image recognition", CVPR,
    figure 4; here all operations are separable convolutions of one input.
    """

    def __init__(self) -> None:
        super().__init__()
        part = CHANNELS // 4
        self.narrow = _convolution(CHANNELS, part, 1)
        self.branches = nn.ModuleList(
            [
                nn.Sequential(_convolution(part, part, size, groups=part), _convolution(part, part, 1))
                for size in (3, 5) * 5
            ]
        )
        self.widen = _convolution(5 * part, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sums of pairs, mixed to as many channels as came in."""
        narrow = self.narrow(x)
        found = [branch(narrow) for branch in self.branches]
        pairs = zip(found[::2], found[1::2], strict=True)
        mixed: Tensor = self.widen(torch.cat([one + other for one, other in pairs], 1))
        return mixed


class _Network(nn.Module):
    """A convolution, cells and a linear classifier of images (B, 3, H, W)."""

    cell: type[nn.Module]

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.begin = _convolution(3, CHANNELS, 3)
        self.cells = nn.Sequential(*(self.cell() for _ in range(cells)))
        self.classify = nn.Linear(CHANNELS, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, CLASSES)."""
        logits: Tensor = self.classify(self.cells(self.begin(images)).mean((2, 3)))
        return logits


class Inception(_Network):
    """A network of Inception cells."""

    cell = InceptionCell


class Nas(_Network):
    """A network of NASNet cells."""

    cell = NasCell


NETWORKS: dict[str, type[_Network]] = {"inception": Inception, "nas": Nas}
