"""A module's forward pass as a graph of operators.

`torch.export` traces it to ATen's operators, those that the module itself calls: their results are the
module's, bit for bit. (Its functional form, without operators that write in place, replaces some by others
with other kernels.) What depends on what is then observed in one run with all values alive: which memory each
operator reads and writes. Declarations would not do, since some operators return their argument or a new
tensor, as it happens: `dropout` in evaluation mode returns its argument, which a later operator may write in
place.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import map_arg
from torch.utils._pytree import TreeSpec, tree_leaves

from offbeat.errors import OffbeatError
from offbeat.numerics.nimble.stream_assignment import StreamAssignment
from offbeat.torch_compat import is_operator, written_tensors

Releases = Sequence[Sequence[fx.Node]]
"""For each operator, the values that are dropped once it has been called."""


@dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """The operators of a forward pass for inputs of fixed shapes.

    Attributes:
        operators: in the order of the module's calls.
        successors: for each operator, those that depend on it.
        constants: the module's parameters and buffers, and other tensors that it reads.
        input_nodes: stand for the inputs.
        results: the outputs, flat; nodes stand for values.
        output_structure: of the module's output.
    """

    operators: tuple[fx.Node, ...]
    successors: tuple[frozenset[int], ...]
    constants: Mapping[fx.Node, Tensor]
    input_nodes: tuple[fx.Node, ...]
    results: tuple[Any, ...]
    output_structure: TreeSpec

    def find_releases(self, assignment: StreamAssignment) -> Releases:
        """Return when values are dropped: after the last use, if all uses are on the stream that made them.

        Memory that is dropped may be given to the next operator of its stream. What another stream uses may
        still be in use there, so it is kept to the end.
        """
        stream_of, place_of = [0] * len(self.operators), [0] * len(self.operators)
        for place, launch in enumerate(assignment.launches):
            stream_of[launch.node], place_of[launch.node] = launch.stream, place
        number_of = {node: number for number, node in enumerate(self.operators)}
        results = set(self.results)
        releases: list[list[fx.Node]] = [[] for _ in self.operators]
        for number, node in enumerate(self.operators):
            uses = [number, *(number_of[user] for user in node.users if user in number_of)]
            if node not in results and {stream_of[use] for use in uses} == {stream_of[number]}:
                releases[max(uses, key=place_of.__getitem__)].append(node)
        return releases


class ProgramRun:
    """One run of a program: operators are called one by one, in any order that respects the dependencies.

    Args:
        program: to run.
        releases: when values are dropped.
        inputs: of the shapes, strides, dtypes and device that were traced.
    """

    def __init__(self, program: TracedProgram, releases: Releases, inputs: Sequence[Tensor]) -> None:
        self._program, self._releases = program, releases
        self._values: dict[fx.Node, Any] = {
            **program.constants,
            **dict(zip(program.input_nodes, inputs, strict=True)),
        }

    def call(self, number: int) -> None:
        """Call an operator, on the current stream."""
        node, values = self._program.operators[number], self._values
        assert callable(node.target)
        values[node] = node.target(
            *map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__)
        )
        for unused in self._releases[number]:
            del values[unused]

    def outputs(self) -> list[Any]:
        """Return the outputs, flat, once all operators have been called."""
        return list(map_arg(self._program.results, self._values.__getitem__))


@torch.no_grad()
def trace(module: nn.Module, inputs: Sequence[Tensor]) -> TracedProgram:
    """Return a module's forward pass for inputs like these.

    The module's forward pass is traced once and its operators are run once; neither changes the module.

    Raises:
        OffbeatError: the forward pass cannot be repeated as a fixed list of operators: the message says why.
    """
    try:
        exported = torch.export.export(module, tuple(inputs), strict=False)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise OffbeatError(
            "the forward pass cannot be traced by torch.export, for example because it decides by values of "
            f"tensors: {type(error).__name__}: {reason}"
        ) from error
    operators = tuple(node for node in exported.graph.nodes if node.op == "call_function")
    for node in exported.graph.nodes:
        _check_node(node)
    constants, input_nodes = _placeholders(module, exported)
    if len(input_nodes) != len(inputs):
        raise OffbeatError(f"expected a forward pass of {len(inputs)} tensors, got one of {len(input_nodes)}")
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    structure = exported.call_spec.out_spec
    assert structure is not None
    successors = _observe_dependencies(operators, constants, dict(zip(input_nodes, inputs, strict=True)))
    return TracedProgram(
        operators=operators,
        successors=tuple(map(frozenset, successors)),
        constants=constants,
        input_nodes=tuple(input_nodes),
        results=tuple(output.args[0]),
        output_structure=structure,
    )


def _check_node(node: fx.Node) -> None:
    """Check that a node can be repeated without the host.

    Raises:
        OffbeatError: it cannot.
    """
    if node.op in ("placeholder", "output"):
        return
    may_be_called = is_operator(node.target) or node.target is operator.getitem
    if node.op != "call_function" or not may_be_called:
        raise OffbeatError(
            f"expected a forward pass of ATen operators only, got {node.target}: control flow that depends "
            "on values of tensors, and changes of modes, cannot be scheduled ahead of time"
        )
    if any(
        isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) for value in _traced_values(node)
    ):
        raise OffbeatError(
            f"{node.target} gives a number or a shape that depends on values of tensors: the forward pass "
            "must have fixed shapes, and read no value of a tensor in Python"
        )


def _traced_values(node: fx.Node) -> list[Any]:
    """Return what a node gave while it was traced: tensors, their sizes, numbers."""
    leaves = tree_leaves(node.meta.get("val"))
    return [*leaves, *(size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape)]


def _placeholders(
    module: nn.Module, exported: ExportedProgram
) -> tuple[dict[fx.Node, Tensor], list[fx.Node]]:
    """Return the tensors that the placeholders of a graph stand for, and those that stand for inputs."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    constants: dict[fx.Node, Tensor] = {}
    inputs: list[fx.Node] = []
    for spec in exported.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
        elif spec.kind is InputKind.PARAMETER:
            constants[node] = module.get_parameter(str(spec.target))
        elif spec.kind is InputKind.BUFFER:
            constants[node] = module.get_buffer(str(spec.target))
        else:
            value = exported.constants[str(spec.target)]
            if not isinstance(value, Tensor):
                raise OffbeatError(f"expected a forward pass that reads tensors only, got {spec.target}")
            constants[node] = value
    return constants, inputs


# Dependencies --------------------------------------------------------------------------------------------


def _observe_dependencies(
    operators: Sequence[fx.Node], constants: Mapping[fx.Node, Tensor], inputs: Mapping[fx.Node, Tensor]
) -> list[set[int]]:
    """Run all operators in order; return for each those that depend on it.

    An operator depends on those whose values it gets, on the last one that has written memory that it
    touches, and, if it writes, on all that have read this memory since.

    Raises:
        OffbeatError: one writes to a constant or an input, or draws random numbers.
    """
    values: dict[fx.Node, Any] = {**constants, **inputs}
    names = {storage: node.name for node, value in values.items() for storage in _storages(value)}
    number_of = {node: number for number, node in enumerate(operators)}
    successors: list[set[int]] = [set() for _ in operators]
    last_writer: dict[int, int] = {}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    saved = {node: value.clone() for node, value in constants.items() if not isinstance(value, nn.Parameter)}
    random_states = _random_states(value.device for value in values.values())
    for number, node in enumerate(operators):
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        written = _storages(written_tensors(node.target, args, kwargs) if is_operator(node.target) else ())
        if written & names.keys():
            raise OffbeatError(
                f"{node.target} writes to {names[(written & names.keys()).pop()]}, a parameter, a buffer or "
                "an input: the forward pass must only read them"
            )
        touched = _storages((args, kwargs))
        earlier = {number_of[one] for one in node.all_input_nodes if one in number_of}
        earlier.update(last_writer[storage] for storage in touched if storage in last_writer)
        earlier.update(reader for storage in written for reader in readers[storage])
        for one in earlier:
            successors[one].add(number)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        for storage in written | (_storages(values[node]) - touched):
            last_writer[storage] = number
            readers[storage].clear()
        for storage in touched - written:
            readers[storage].append(number)
    _check_unchanged(saved, values, random_states)
    return successors


def _storages(values: Any) -> set[int]:
    """Return the addresses of the memory of all tensors in some values; none for tensors without elements."""
    try:
        storages = [one.untyped_storage() for one in tree_leaves(values) if isinstance(one, Tensor)]
        return {storage.data_ptr() for storage in storages if storage.nbytes()}
    except RuntimeError as error:
        raise OffbeatError(f"expected dense tensors only: {error}") from error


def _random_states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """Return the states of torch's global generators on the CPU and on some devices."""
    accelerators = {*devices} - {torch.device("cpu")}
    states = {device: torch.get_device_module(device).get_rng_state(device) for device in accelerators}
    return {torch.device("cpu"): torch.get_rng_state(), **states}


def _restore_random_states(states: Mapping[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _check_unchanged(
    saved: Mapping[fx.Node, Tensor], values: Mapping[fx.Node, Any], states: Mapping[torch.device, Tensor]
) -> None:
    """Check that operators have changed neither buffers nor generators, and undo it where they have.

    Args:
        saved: copies of the buffers.
        values: of all nodes now.
        states: of the generators before.

    Raises:
        OffbeatError: they have.
    """
    changed = [node for node, value in saved.items() if not same_values(values[node], value)]
    for node in changed:
        values[node].copy_(saved[node])
    if changed:
        raise OffbeatError(
            f"the forward pass changes {changed[0].name}, a buffer of the module: it must only read it, as "
            "normalization does in evaluation mode"
        )
    states_now = _random_states(states)
    has_drawn = any(not torch.equal(state, states_now[device]) for device, state in states.items())
    _restore_random_states(states)
    if has_drawn:
        raise OffbeatError(
            "the forward pass draws random numbers, which would be the same in each repetition: expected a "
            "module in evaluation mode, without dropout"
        )


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and values; NaN is the same as NaN."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
