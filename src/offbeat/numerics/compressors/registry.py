"""Methods of compression by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from offbeat.numerics.compressors.cast import Cast
from offbeat.numerics.compressors.chunked_topk import ChunkedTopK
from offbeat.numerics.compressors.csc import CSC
from offbeat.numerics.compressors.dgc import DGC
from offbeat.numerics.compressors.identity import Identity
from offbeat.numerics.compressors.int8 import Int8
from offbeat.numerics.compressors.interface import CompressionMethod, EncodingMethod
from offbeat.numerics.compressors.powersgd import PowerSGD
from offbeat.numerics.compressors.qsgd import QSGD
from offbeat.numerics.compressors.randomk import RandomK
from offbeat.numerics.compressors.sign import Sign
from offbeat.numerics.compressors.topk import TopK

AUTO: Final = "auto"
"""In a strategy's options: the job finds the method that makes its steps shortest."""

_EXPECTED = (
    "expected compress to be bf16, fp16, int8, sign, powersgd:RANK, qsgd:LEVELS, randomk:RATIO, topk:RATIO, "
    "chunks:RATIO, dgc:RATIO or csc:RATIO, such as powersgd:2, topk:0.01 or dgc:0.001:warmup=500:clip=2"
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
            case "chunks":
                return ChunkedTopK(float(option))
            case "dgc" | "csc":
                ratio, *more = option.split(":")
                method = DGC if name == "dgc" else CSC
                return method(ratio=float(ratio), **_options(more))
    except ValueError as error:
        raise ValueError(f"{_EXPECTED}, got {text!r} ({error})") from None
    raise ValueError(f"{_EXPECTED}, got {text!r}")


def parse_encoding(text: str | None) -> EncodingMethod:
    """Parse a method that has an encoder, such as `topk:0.01`; None sends vectors as they are.

    Raises:
        ValueError: the text is not a method, its option is out of range, or its method sums vectors without
            a code of each one; one line with what was expected and what was given.
    """
    if text is None:
        return Identity()
    method = parse_compression(text)
    if isinstance(method, Sign | QSGD | RandomK | TopK):
        return method
    raise ValueError(
        "expected compress to be sign, qsgd:LEVELS, randomk:RATIO or topk:RATIO, such as topk:0.01, as other "
        f"methods only compress sums, got {text!r}"
    )


def _options(parts: Sequence[str]) -> dict[str, Any]:
    """Return the options `warmup=ROUNDS` and `clip=NORM`, each at most once, by name."""
    kinds: dict[str, type[int | float]] = {"warmup": int, "clip": float}
    options: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in kinds or key in options:
            raise ValueError(f"expected warmup=ROUNDS or clip=NORM, each once, got {part}")
        options[key] = kinds[key](value)
    return options
