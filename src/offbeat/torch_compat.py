"""Every private name of torch that offbeat uses, each behind a function that says what it is for.

Where a version of torch renames one of them, this module and its test are what breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import nn
from torch._C import (
    _current_graph_task_id,
    _get_dispatch_mode,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C._functorch import maybe_current_level
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch.nn.modules import module as _modules
from torch.optim import optimizer as _optimizers
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store

_P = ParamSpec("_P")
_T = TypeVar("_T")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def backward_pass_id() -> int:
    """Return the number of the backward pass that autograd runs in this thread, -1 outside of one."""
    return _current_graph_task_id()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call `callback` when the backward pass that it runs now has ended; not if it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_hooks(module: nn.Module) -> list[Mapping[int, Any]]:
    """Return the backward hooks of a module: mappings that stay those of the module."""
    return [getattr(module, name, {}) for name in _BACKWARD_HOOKS]


def global_backward_hooks() -> list[Mapping[int, Any]]:
    """Return the backward hooks of all modules: mappings that stay the global ones."""
    return [getattr(_modules, f"_global{name}") for name in _BACKWARD_HOOKS]


def has_forward_hooks(module: nn.Module) -> bool:
    """Say whether a module's forward pass calls hooks: its own, its submodules' or global ones."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    return any(getattr(_modules, f"_global{name}") for name in names) or any(
        getattr(one, name) for one in module.modules() for name in names
    )


def is_operator(target: object) -> TypeGuard[OpOverload]:
    """Say whether something is an operator of torch's dispatcher, such as one of ATen's."""
    return isinstance(target, OpOverload)


def written_tensors(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the arguments of a call that the operator writes to, as it declares."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
    return written


def has_global_step_hooks() -> bool:
    """Say whether there are step hooks of all optimizers."""
    return bool(_optimizers._global_optimizer_pre_hooks or _optimizers._global_optimizer_post_hooks)


def is_traced_by_jit() -> bool:
    """Say whether torch.jit.trace records the operations of this thread."""
    return _get_tracing_state() is not None


def is_traced_by_proxies() -> bool:
    """Say whether make_fx or a compiler records the operations of this thread with proxies of tensors."""
    return _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None


def is_observed_by_tool() -> bool:
    """Say whether a tracer, a dispatch mode or a torch.func transformation sees this thread's operations."""
    return (  # written out: every hook of a forward pass asks
        _get_tracing_state() is not None
        or bool(_len_torch_dispatch_stack())
        or maybe_current_level() is not None
    )


def without_transformations() -> AbstractContextManager[Any]:
    """Return a context in which operations are not seen by the transformations of torch.func under way."""
    return temporarily_clear_interpreter_stack()


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that torch.compile calls as it is, between two graphs.

    Unlike `torch.compiler.disable`, it imports the compiler only where one is used.
    """
    return _disable_dynamo(function)


def without_subclass_functions() -> AbstractContextManager[Any]:
    """Return a context in which `__torch_function__` of subclasses of tensors is not called."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_use_count(tensor: torch.Tensor) -> int:
    """Return how many tensors, and others, hold the storage of a tensor."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the target of the same position, in as few kernels as possible."""
    torch._foreach_copy_(list(targets), list(sources))


def active_ddp() -> nn.parallel.DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward pass is under way."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


def group_of_one(device: torch.device) -> ProcessGroup:
    """Return a process group of this process alone, for tensors on a device; it needs no default group."""
    from datetime import timedelta

    from torch._C._distributed_c10d import HashStore, ProcessGroup, ProcessGroupGloo

    store, kind = HashStore(), ProcessGroup.BackendType.GLOO
    group = ProcessGroup(store, 0, 1)
    group._set_default_backend(kind)
    group._register_backend(device, kind, ProcessGroupGloo(store, 0, 1, timedelta(seconds=30)))
    return group


def default_store() -> Store:
    """Return the store of the default process group of torch.distributed.

    Raises:
        ValueError: there is no process group.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def abort_process_groups() -> None:
    """Abort all process groups of this process at once, so that none waits for the kernels of another.

    It may block for as long as an exchange that hangs. Afterwards there is no process group.
    """
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()
