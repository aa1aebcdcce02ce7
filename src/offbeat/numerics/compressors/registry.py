"""Methods of compression by name."""

from __future__ import annotations

import torch

from offbeat.numerics.compressors.cast import Cast
from offbeat.numerics.compressors.int8 import Int8
from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.numerics.compressors.powersgd import PowerSGD
from offbeat.numerics.compressors.qsgd import QSGD
from offbeat.numerics.compressors.randomk import RandomK
from offbeat.numerics.compressors.sign import Sign
from offbeat.numerics.compressors.topk import TopK

_EXPECTED = (
    "expected compress to be bf16, fp16, int8, sign, powersgd:RANK, qsgd:LEVELS, randomk:RATIO or "
    "topk:RATIO, such as powersgd:2 or topk:0.01"
)


def parse_compression(text: str) -> CompressionMethod:
    """Parse a method from its form in a strategy's options, such as `powersgd:2`.

    Raises:
        ValueError: the text is not a method, or its option is out of range; one line with what was expected
            and what was given.
    """
    name, _, option = text.partition(":")
    try:
        match name:
            case "bf16" | "fp16" if name == text:
                return Cast(torch.bfloat16 if name == "bf16" else torch.float16)
            case "int8" if name == text:
                return Int8()
            case "sign" if name == text:
                return Sign()
            case "powersgd":
                return PowerSGD(int(option))
            case "qsgd":
                return QSGD(int(option))
            case "randomk":
                return RandomK(float(option))
            case "topk":
                return TopK(float(option))
    except ValueError as error:
        raise ValueError(f"{_EXPECTED}, got {text!r} ({error})") from None
    raise ValueError(f"{_EXPECTED}, got {text!r}")
