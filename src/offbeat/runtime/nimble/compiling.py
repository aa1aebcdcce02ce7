"""Compiles a module's forward pass for inputs of fixed shape, and uses the result only where it is faster."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offbeat.errors import OffbeatError
from offbeat.numerics.nimble.stream_assignment import StreamAssignment, assign_one_stream, assign_streams
from offbeat.runtime.nimble.executors import Executor, GraphExecutor, ThreadExecutor
from offbeat.runtime.nimble.program import TracedProgram, same_values, trace
from offbeat.torch_compat import has_forward_hooks

Signature: TypeAlias = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
Choose: TypeAlias = Callable[[Mapping[str, float]], str]

MODULE: Final = "module"
THREADS: Final = "threads"
GRAPH: Final = "graph on one stream"
STREAMS: Final = "graph on several streams"

_GAIN_MIN: Final = 0.05
_BLOCKS: Final = 7
_BLOCK_S: Final = 0.03

_log = logging.getLogger("offbeat")


class CompiledModule:
    """A module's forward pass for inputs of fixed shape; see `compile_module`.

    Outputs are new tensors without gradients. Values that the module's parameters and buffers get in place,
    by an optimizer or `load_state_dict`, are used; other changes of the module are not.

    Attributes:
        module: what was compiled.
        choice: what computes: "module", "threads", "graph on one stream" or "graph on several streams".
        reason: for the choice.
        times_s: median time of a call, for each possible choice, in seconds.
        stream_count: number of streams to which operators are assigned.
        synchronization_count: how often one of them waits for another in a call.
        operator_count: operators in a call.
    """

    def __init__(
        self,
        module: nn.Module,
        program: TracedProgram,
        assignment: StreamAssignment,
        inputs: Sequence[Tensor],
        *,
        executor: Executor | None,
        times_s: Mapping[str, float],
        choice: str,
        reason: str,
    ) -> None:
        self.module, self.choice, self.reason, self.times_s = module, choice, reason, dict(times_s)
        self.stream_count = assignment.stream_count
        self.synchronization_count = len(assignment.synchronizations)
        self.operator_count = len(program.operators)
        self.signature = signature_of(inputs)
        self._strides = [tensor.stride() for tensor in inputs]
        self._output_structure = program.output_structure
        self._places = [(tensor, tensor.data_ptr()) for tensor in program.constants.values()]
        self._executor = executor
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether a schedule computes, not the module itself."""
        return self._executor is not None

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the module's output for inputs of the shapes, dtypes and device of the example.

        Raises:
            ValueError: inputs differ from the example.
            OffbeatError: the module is in training mode, or its parameters have moved.
        """
        if signature_of(inputs) != self.signature:
            raise ValueError(
                f"expected inputs like the example, {_describe(self.signature)}, got "
                f"{_describe(signature_of(inputs))}: call the module itself, or compile it for these, too"
            )
        if self.module.training:
            raise OffbeatError("the compiled module is in training mode now: call its eval() first")
        with self._lock, torch.no_grad():
            if self._executor is None:
                return self.module(*inputs)
            if any(tensor.data_ptr() != place for tensor, place in self._places):
                raise OffbeatError(
                    "the module's parameters or buffers have moved since it was compiled: compile it again"
                )
            given = map(_with_strides, inputs, self._strides)
            return tree_unflatten(self._executor.run([*given]), self._output_structure)

    def close(self) -> None:
        """End threads and release the graph's memory; the module itself computes from now on."""
        with self._lock:
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.close()
                self.choice, self.reason = MODULE, "it was closed"


def compile_module(
    module: nn.Module, example_inputs: Sequence[Tensor], *, choose: Choose | None = None
) -> CompiledModule:
    """Schedule a module's forward pass ahead of time, and measure whether that is faster.

    The forward pass is traced to ATen's operators. They are assigned to streams, so that operators that do
    not depend on one another are on different ones. On a CUDA GPU all launches are captured in a graph, on
    one stream and on several; on the CPU a thread calls the operators of a stream. What is measured as the
    fastest is used; the module itself, unless something else is at least 5 % faster.

    Source: Kwon, Yu, Jeong and Chun 2020, "Nimble: lightweight and parallel GPU task scheduling for deep
    learning", NeurIPS. Deviations: inference only; streams are shared as `assign_streams` describes; graphs
    are captured instead of recorded by an own interceptor.

    Args:
        module: in evaluation mode, without hooks, with parameters and inputs on one device. What its forward
            pass reads from elsewhere, such as numbers in attributes, stays as it is now.
        example_inputs: the arguments of its forward pass: tensors.
        choose: from times of a call, in seconds, by choice; by default `choose_fastest`.

    Raises:
        ValueError: the arguments are not as described.
        OffbeatError: the forward pass is no fixed list of operators: it decides by values of tensors, writes
            to buffers or inputs, draws random numbers, sets attributes or calls hooks. The message says
            which.
    """
    inputs = _check(module, example_inputs)
    with torch.no_grad():
        expected = tree_flatten(_call_checked(module, inputs))[0]
        program = trace(module, inputs)
        assignment = assign_streams(program.successors)
        executors: dict[str, Executor] = {}
        excluded: list[str] = []
        for name, make in _candidates(program, assignment, inputs):
            try:
                executors[name] = _make_checked(make, inputs, expected)
            except OffbeatError as error:
                excluded.append(f"not {name}: {error}")
        calls = {name: partial(executor.run, inputs) for name, executor in executors.items()}
        times_s = _measure({MODULE: partial(module, *inputs), **calls}, inputs[0].device)
    choice = (choose or choose_fastest)(times_s)
    for name, executor in executors.items():
        if name != choice:
            executor.close()
    reason = "; ".join([_explain(choice, times_s, assignment), *excluded])
    _log.info("a forward pass of %s: %s", _describe(signature_of(inputs)), reason)
    return CompiledModule(
        module,
        program,
        assignment,
        inputs,
        executor=executors.get(choice),
        times_s=times_s,
        choice=choice,
        reason=reason,
    )


def choose_fastest(times_s: Mapping[str, float]) -> str:
    """Return the fastest choice; the module itself, unless that is at least 5 % slower."""
    fastest = min(times_s, key=times_s.__getitem__)
    return fastest if times_s[fastest] <= (1 - _GAIN_MIN) * times_s[MODULE] else MODULE


def signature_of(inputs: Sequence[Any]) -> Signature:
    """Return what must not change from call to call; empty if not all inputs are tensors."""
    if not all(isinstance(one, Tensor) for one in inputs):
        return ()
    return tuple((one.shape, one.dtype, one.device) for one in inputs)


def _check(module: nn.Module, example_inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs, detached.

    Raises:
        ValueError, OffbeatError: see `compile_module`.
    """
    if isinstance(example_inputs, Tensor) or not example_inputs or not signature_of(example_inputs):
        raise ValueError(
            "expected a tuple of tensors, the positional arguments of the forward pass, got "
            f"{type(example_inputs).__name__}"
        )
    tensors = [*example_inputs, *module.parameters(), *module.buffers()]
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(f"expected parameters and inputs on one device, got {sorted(map(str, devices))}")
    if any(one.training for one in module.modules()):
        raise ValueError(
            "expected a module in evaluation mode, got one in training mode: call its eval() first"
        )
    if has_forward_hooks(module):
        raise OffbeatError("the module has forward hooks, which a schedule would not call: remove them")
    return [tensor.detach() for tensor in example_inputs]


def _call_checked(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """Return the module's output.

    Raises:
        OffbeatError: the forward pass sets an attribute of a module; it has done so now, as in any call.
    """
    before = _attributes(module)
    output = module(*inputs)
    after = _attributes(module)
    changed = [
        name
        for name in {**before, **after}
        if len(before.get(name, [])) != len(after.get(name, []))
        or any(one is not other for one, other in zip(before[name], after[name], strict=True))
    ]
    if changed:
        raise OffbeatError(
            f"the forward pass changes {changed[0]}, an attribute of the module, which a schedule would not"
        )
    return output


def _attributes(module: nn.Module) -> dict[str, list[Any]]:
    """Return the attributes of a module and its submodules by name; of collections, what they hold."""
    found: dict[str, list[Any]] = {}
    for prefix, one in module.named_modules():
        for name, value in vars(one).items():
            held = value.values() if isinstance(value, dict) else value
            is_collection = isinstance(value, dict | list | tuple | set)
            found[f"{prefix}.{name}".lstrip(".")] = [*held] if is_collection else [value]
    return found


def _candidates(
    program: TracedProgram, assignment: StreamAssignment, inputs: Sequence[Tensor]
) -> Iterator[tuple[str, Callable[[], Executor]]]:
    """Yield what can run a program on the device of the inputs."""
    device = inputs[0].device
    if device.type == "cuda":
        one_stream = assign_one_stream(program.successors)
        yield GRAPH, partial(GraphExecutor, program, one_stream, inputs)
        if assignment.stream_count > 1:
            yield STREAMS, partial(GraphExecutor, program, assignment, inputs)
    elif device.type == "cpu" and assignment.stream_count > 1:
        yield THREADS, partial(ThreadExecutor, program, assignment)


def _make_checked(
    make: Callable[[], Executor], inputs: Sequence[Tensor], expected: Sequence[Any]
) -> Executor:
    """Return an executor whose results are the module's.

    Raises:
        OffbeatError: it cannot be made, or its results differ.
    """
    executor = make()
    for _ in range(2):
        found = executor.run(inputs)
        if len(found) != len(expected) or not all(map(_are_same, found, expected)):
            executor.close()
            raise OffbeatError("its results differ from the module's")
    return executor


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_values(one, other)
    return bool(one == other)


def _measure(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the median time of a call, in seconds, from alternating blocks of calls."""

    def block_s(call: Callable[[], object], repetitions: int) -> float:
        _synchronize(device)
        begin_s = time.perf_counter()
        for _ in range(repetitions):
            call()
        _synchronize(device)
        return (time.perf_counter() - begin_s) / repetitions

    repetitions = {name: math.ceil(_BLOCK_S / block_s(call, 2)) for name, call in calls.items()}
    blocks = [
        {name: block_s(call, repetitions[name]) for name, call in calls.items()} for _ in range(_BLOCKS)
    ]
    return {name: median(block[name] for block in blocks) for name in calls}


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def _explain(choice: str, times_s: Mapping[str, float], assignment: StreamAssignment) -> str:
    times = ", ".join(f"{name} {time_s * 1e3:.3g} ms" for name, time_s in times_s.items())
    if len(times_s) == 1 and assignment.stream_count <= 1:
        return "the module itself: no two operators are independent, so that nothing can run at the same time"
    name = "the module itself" if choice == MODULE else choice
    return f"{name} ({assignment.stream_count} streams; a call takes: {times})"


def _describe(signature: Signature) -> str:
    return ", ".join(f"{[*shape]} {dtype} on {device}" for shape, dtype, device in signature) or "no tensors"


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor with these strides: kernels may round differently for another layout."""
    tensor = tensor.detach()
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
