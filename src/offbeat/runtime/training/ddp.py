"""A DistributedDataParallel that leaves gradients alone, for programs that insist on one.

Nothing here communicates: the session of the module inside averages the gradients.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.errors import OffbeatError
from offbeat.torch_compat import group_of_one


class _Session(Protocol):
    def no_sync(self) -> AbstractContextManager[None]: ...


sessions_of: weakref.WeakKeyDictionary[Optimizer | nn.Module, _Session] = weakref.WeakKeyDictionary()
"""The sessions of this process, by each optimizer, and each module with parameters, that is in one."""


def session_of(model: nn.Module) -> _Session | None:
    """Return the session that a model, or a part of it, is in; None if there is none."""
    return next((sessions_of[one] for one in model.modules() if one in sessions_of), None)


class SessionDDP(DistributedDataParallel):
    """What `ddp` returns."""

    def __init__(self, module: nn.Module) -> None:
        device = next((one.device for one in module.parameters() if one.requires_grad), None)
        if device is None:
            raise OffbeatError("expected a model with parameters that require a gradient, got none")
        super().__init__(module, process_group=group_of_one(device), init_sync=False)
        self.require_backward_grad_sync = False  # so that its hooks do nothing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Session.no_sync`, of the session of the module; without one it has no effect."""
        session = session_of(self.module)
        if session is None:
            yield
            return
        with session.no_sync():
            yield

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return SessionDDP, (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionDDP:
        return SessionDDP(copy.deepcopy(self.module, memo))


def ddp(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model in a DistributedDataParallel that exchanges nothing, for code that insists on one.

    Join the session with what this returns, or with the model; in the first case its states have the names
    that DistributedDataParallel gives them. The session averages the gradients, as its strategy says. The
    wrapper has `module` and `no_sync` (the session's). It needs no `init_process_group`.

    Args:
        model: on the device on which it is trained, with parameters that require a gradient.

    Raises:
        OffbeatError: no parameter requires a gradient.
    """
    return SessionDDP(model)


def check_not_in_other_ddp(active: DistributedDataParallel | None) -> None:
    """Refuse a forward pass within a DistributedDataParallel that averages gradients, too.

    Args:
        active: the one whose forward pass is under way.

    Raises:
        OffbeatError: there is one.
    """
    if active is not None and not isinstance(active, SessionDDP):
        raise OffbeatError(
            "the model of the session runs within DistributedDataParallel, which would average its gradients "
            "once more: call the bare model, or wrap it in offbeat.ddp"
        )
