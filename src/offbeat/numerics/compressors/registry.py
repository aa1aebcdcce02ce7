"""Methods of compression by name."""

from __future__ import annotations

import torch

from offbeat.numerics.compressors.cast import Cast
from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.numerics.compressors.powersgd import PowerSGD

_EXPECTED = "expected compress to be bf16, fp16 or powersgd:RANK, such as powersgd:2"


def parse_compression(text: str) -> CompressionMethod:
    """Parse a method from its form in a strategy's options, such as `powersgd:2`.

    Raises:
        ValueError: the text is not a method; one line with what was expected and what was given.
    """
    name, _, option = text.partition(":")
    if text in ("bf16", "fp16"):
        return Cast(torch.bfloat16 if text == "bf16" else torch.float16)
    if name != "powersgd" or not option.isdecimal():
        raise ValueError(f"{_EXPECTED}, got {text!r}")
    return PowerSGD(int(option))
