"""Makes types known to msgspec before threads use them."""

from __future__ import annotations

import msgspec


def make_known(*types: type) -> None:
    """Have msgspec find out now what it has to know of `types`; to be called where a module is imported.

    Else it finds that out at a type's first use; and where two threads are the first at once, one of them
    works with what the other has only half filled in, and the process ends with a segmentation fault (seen
    with msgspec 0.22).
    """
    msgspec.msgpack.Decoder(tuple[types])  # type: ignore[valid-type]
