"""Initialization of msgspec's type information before threads use it."""

from __future__ import annotations

import msgspec


def prime_msgspec_types(*types: type) -> None:
    """Build msgspec's information on `types` now; to be called at import time of a module.

    Otherwise msgspec builds it at a type's first use; if two threads are first at the same time, one of them
    works with information that the other has only half filled in, and the process ends with a segmentation
    fault (seen with msgspec 0.22).
    """
    msgspec.msgpack.Decoder(tuple[types])  # type: ignore[valid-type]
