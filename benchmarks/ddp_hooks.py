"""What `python -m benchmarks compression` compares: strategies of offbeat, and PyTorch's DDP with its hooks.

DDP is `ddp`, `ddp:fp16` (`fp16_compress_hook`) or `ddp:powersgd:RANK` (`powerSGD_hook`). Its gradients are
views of its buckets (`gradient_as_bucket_view`): this saves a copy of all gradients. The buckets have the
default size, but with `powerSGD_hook` one bucket has all gradients: the hook begins all-reduces in the
callbacks of others, and gloo takes them in the order in which they begin, which with several buckets is not
the same on all workers. (With two, torch 2.13 hangs or ends with "collective mismatch".)
"""

from __future__ import annotations

import math
import re
from typing import Final

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from offbeat.strategies import parse_strategy

DENSE: Final = "bsp"
AUTO: Final = "bsp:compress=auto"
DDP: Final = "ddp"
DDP_FP16: Final = "ddp:fp16"
METHODS: Final = (
    *(DENSE, DDP),
    *("bsp:compress=bf16", "bsp:compress=fp16", DDP_FP16),
    *("bsp:compress=powersgd:2", "ddp:powersgd:2"),
    AUTO,
)
_DDP_POWERSGD = re.compile(r"ddp:powersgd:([1-9]\d*)")
_COMPRESSED = re.compile(r"[:,]compress=([^,]+)")
_FIRST_POWERSGD_STEP = 2  # the least that torch's hook takes with error feedback and warm start


def is_ddp(method: str) -> bool:
    """Return whether a method is DDP, not a strategy."""
    return method.partition(":")[0] == DDP


def check_method(method: str) -> None:
    """Check that a text is a strategy, or DDP with one of its hooks.

    Raises:
        ValueError: it is neither.
    """
    if not is_ddp(method):
        parse_strategy(method)
    elif method not in (DDP, DDP_FP16) and not _DDP_POWERSGD.fullmatch(method):
        raise ValueError(f"expected {DDP}, {DDP_FP16} or ddp:powersgd:RANK, got {method!r}")


def hook_like(strategy: str) -> str | None:
    """Return the method of DDP that compresses as a strategy does, None if there is none."""
    found = _COMPRESSED.search(strategy)
    if found is None:
        return DDP
    if found[1] in ("bf16", "fp16"):
        return DDP_FP16
    return f"{DDP}:{found[1]}" if found[1].startswith("powersgd:") else None


def wrap(model: nn.Module, method: str) -> DistributedDataParallel:
    """Return a model with the DDP and the hook that a method names."""
    powersgd = _DDP_POWERSGD.fullmatch(method)
    all_mb = math.ceil(sum(one.nbytes for one in model.parameters()) / 2**20)
    bucket_mb = None if powersgd is None else all_mb
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    if powersgd is not None:
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(powersgd[1]),
            start_powerSGD_iter=_FIRST_POWERSGD_STEP,
        )
        wrapped.register_comm_hook(state, powerSGD_hook)
    elif method == DDP_FP16:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped
