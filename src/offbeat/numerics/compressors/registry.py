"""Methods of compression by name."""

from __future__ import annotations

import torch

from offbeat.numerics.compressors.cast import Cast
from offbeat.numerics.compressors.chunked_topk import ChunkedTopK
from offbeat.numerics.compressors.interface import CompressionMethod
from offbeat.numerics.compressors.powersgd import PowerSGD
from offbeat.numerics.compressors.topk import TopK

_EXPECTED = (
    "expected compress to be bf16, fp16, powersgd:RANK, topk:RATIO or chunks:RATIO, such as powersgd:2 or "
    "topk:0.01"
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
            case "powersgd":
                return PowerSGD(int(option))
            case "topk":
                return TopK(float(option))
            case "chunks":
                return ChunkedTopK(float(option))
    except ValueError as error:
        raise ValueError(f"{_EXPECTED}, got {text!r} ({error})") from None
    raise ValueError(f"{_EXPECTED}, got {text!r}")
