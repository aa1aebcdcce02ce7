"""Rules that a program can check: imports between modules, effects of importing, forbidden constructs.

Sizes are only warned about: a file of more than 500 lines, a class of more than 450 lines or 25 attributes,
or a function of more than 60 lines wants a reason, and may have one.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.source_files import (
    PACKAGE,
    ROOT,
    attributes,
    calls,
    dotted,
    imports,
    modules,
    name_of,
    nodes_of,
    tree_of,
)

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
CLASS_LINES_MAX = 450
CLASS_ATTRIBUTES_MAX = 25

# Not for decisions: clocks, the outside world, other threads of control, printing.
NOT_FOR_DECISIONS = {
    *("asyncio", "concurrent", "ctypes", "datetime", "fcntl", "io", "logging", "mmap", "multiprocessing"),
    *("os", "pathlib", "queue", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket"),
    *("socketserver", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid"),
}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}

# Layer: the parts of offbeat that its modules may import. A layer is a folder, or a module of the root.
LAYERS = {
    "events": ("events",),
    "errors": (),
    "policies": ("errors", "events", "policies"),
    "numerics": ("errors", "numerics"),
    "wire": ("errors", "events", "policies", "wire"),
    "models": (),
    "torch_compat": (),
    "data": ("errors", "data"),
    "apps": ("errors", "numerics", "apps"),
    "runtime": ("errors", "events", "policies", "numerics", "wire", "torch_compat", "runtime"),
    "ps": ("numerics", "runtime"),
    "nimble": ("numerics", "runtime"),
    "keras": ("errors", "numerics", "policies", "runtime"),  # a door of its own, for loops that Keras runs
    "lightning": ("errors", "runtime", "strategies"),  # a door of its own, for loops that Lightning runs
    "ray": ("errors", "ray", "runtime"),  # a door of its own, for loops that Ray Train runs
    "transformers": ("errors", "runtime"),  # a door of its own, for loops of the Trainer
    "accelerate": ("errors", "runtime"),  # a door of its own, for loops with Accelerate
    "strategies": ("errors", "events", "policies", "numerics", "wire", "runtime", "strategies"),
    "simulator": ("errors", "events", "policies", "numerics", "wire", "simulator"),
}

# Room: a folder of a layer, and the other rooms of the same layer that its modules may import.
ROOMS = {
    "policies": {
        "stragglers": (),
        "data": (),
        "validation": (),
        "ps": (),
        "membership": ("data", "stragglers"),
        "staleness": ("data", "stragglers", "ps"),
        "model_averaging": ("data", "membership", "stragglers"),
    },
    "numerics": {"collectives": (), "compressors": (), "nimble": (), "ps": ()},
    "runtime": {
        "processes": (),
        "transport": ("processes",),
        "monitoring": ("processes", "transport"),
        "control": ("processes", "transport", "monitoring"),
        "devices": ("processes",),
        "nimble": ("processes",),
        "collectives": ("processes", "transport", "devices"),
        "launching": ("processes", "control"),
        "data": ("control", "devices"),
        "training": ("control", "collectives", "data", "devices"),
        "validation": ("processes", "transport", "control", "devices", "nimble"),
        "ps": ("processes", "transport", "control"),
        "averaging": ("control", "collectives", "data", "training", "devices"),
        "hybrid": ("collectives", "training", "averaging", "devices"),
        "staleness": ("processes", "transport", "control", "data", "training", "ps", "devices"),
        "model_averaging": ("control", "collectives", "data", "training", "devices"),
    },
    "simulator": {
        "core": (),
        "training": ("core",),
        "ps": ("core", "training"),
        "staleness": ("core", "training"),
        "model_averaging": ("core", "training"),
    },
}

# Modules that a program may import; everything else may change with any version.
PUBLIC = {
    *("", "strategies", "ps", "nimble", "data", "apps"),
    *("accelerate", "keras", "lightning", "ray", "transformers"),
}

# Modules other than strategies that may import strategies, and why.
STRATEGIES_FOR = {
    "__init__.py": "the public names",
    "cli/simulation.py": "the command line",
    "cli/training_worker.py": "a worker of the command line: an ordinary user of the public names",
    "lightning.py": "which of them Lightning's loop can use",
}

# Modules that may start threads, and where their failures are reported.
STARTS_FOR = {
    "runtime/processes/threads.py": "the caller passes the function that reports a failure",
    "runtime/ps/cluster.py": "an executor, whose results are all read",
    "cli/training_worker.py": "an executor, whose results are all read",
}
STARTS = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "start_joinable_thread", "to_thread"}

# Folders of tests/ other than the rooms of the library: tests of all of it, helpers, tests of the benchmarks.
OTHER_TEST_ROOMS = (".", "scenarios", "support", "benchmarks")

# Test files that may sleep or replace something, and why.
SLEEPS_FOR = {
    "run_logs.py": "polls until a deadline, and leaves the machine to others",
    "group_training.py": "takes the time of a computation, and leaves the machine to others",
}
REPLACES_FOR = {"test_launch.py": "pretends to run on another system"}


@functools.cache
def files_of_tests() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "tests").rglob("*.py")))


def none(faults: Iterable[str]) -> None:
    """Fails with all the faults that there are."""
    found = list(faults)
    assert not found, "\n".join(["", *found])


def layers_used(path: Path) -> set[str]:
    """The layers that a file imports: "runtime" for offbeat.runtime.transport.framing."""
    pieces = [name.split(".") for name in imports(path)]
    return {piece[1] for piece in pieces if piece[0] == "offbeat" and len(piece) > 1}


@functools.cache
def modules_used(path: Path) -> frozenset[str]:
    """The modules of offbeat that a file imports, dotted; of a module in a package, not the package too."""
    known = names_of_modules()
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return frozenset(found & known)


@functools.cache
def names_of_modules() -> frozenset[str]:
    return frozenset(dotted_name(path) for path in modules())


def dotted_name(path: Path) -> str:
    name = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


def layer_of(name: str) -> str:
    """The layer of a path in the package: "runtime" for runtime/session.py, "errors" for errors.py."""
    return name.split("/")[0].removesuffix(".py")


def outside(path: Path) -> set[str]:
    """The other packages that a file imports, by their first names."""
    return {name.split(".")[0] for name in imports(path)} - {"offbeat", "__future__"}


def files_under(*layers: str) -> list[Path]:
    """Every module of some layers, however deep in their rooms."""
    return [path for path in modules() if layer_of(name_of(path)) in layers]


def from_root(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Layers -------------------------------------------------------------------------------------------------


def test_imports_point_down():
    none(
        f"{name_of(path)} imports {sorted(others)}: a module of {layer} may import {LAYERS[layer]} of offbeat"
        for path in modules()
        if (layer := layer_of(name_of(path))) in LAYERS and (others := layers_used(path) - set(LAYERS[layer]))
    )


def rooms_above(path: Path) -> list[str]:
    """The modules of its layer that a module imports though its room may not."""
    layer, *rest = name_of(path).split("/")
    if layer not in ROOMS or len(rest) < 2:
        return []
    used = [name for name in modules_used(path) if name.split(".")[1] == layer and name.count(".") > 1]
    return [name for name in used if name.split(".")[2] not in (rest[0], *ROOMS[layer][rest[0]])]


def test_rooms_import_only_the_rooms_below_them():
    """A file at the root of a layer may import all of its rooms, and no room may import such a file."""
    none(
        f"{name_of(path)}: its room may not import {name}" for path in modules() for name in rooms_above(path)
    )


def test_every_folder_of_a_layer_is_a_room():
    for layer, rooms in ROOMS.items():
        folders = {path.parent.relative_to(PACKAGE / layer).as_posix() for path in files_under(layer)} - {"."}
        assert folders == set(rooms), f"{layer}/: give each folder a line in ROOMS"


def test_no_modules_import_each_other_in_a_circle():
    below = {dotted_name(path): modules_used(path) - {dotted_name(path)} for path in modules()}
    while free := {name for name, used in below.items() if not used & below.keys()}:
        below = {name: used for name, used in below.items() if name not in free}
    circles = {name: sorted(used & below.keys()) for name, used in below.items()}
    assert not circles, "these modules import each other in a circle, or import some that do"


def private_imports(path: Path) -> Iterator[str]:
    """The names of other modules of offbeat that a file imports though they begin with an underscore."""
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "offbeat" and any(re.match(r"_[^_]", piece) for piece in rest):
            yield name


def test_private_names_stay_in_their_module():
    files = [*modules(), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    none(f"{from_root(path)} imports {name}" for path in files for name in private_imports(path))


def test_examples_import_public_modules_only():
    files = (ROOT / "examples").glob("*.py")
    none(f"{path.name} imports {layers_used(path) - PUBLIC}" for path in files if layers_used(path) - PUBLIC)


def test_policies_use_the_standard_library_without_clocks_or_the_outside_world():
    allowed = sys.stdlib_module_names - NOT_FOR_DECISIONS
    none(
        f"{name_of(path)} imports {outside(path) - allowed}"
        for path in files_under("policies", "events", "errors")
        if outside(path) - allowed
    )


def test_randomness_is_an_argument_or_has_a_seed():
    """`random.Random(seed)` is a generator of one's own; every other name of the module is the global one."""
    for path in files_under("policies", "numerics"):
        for line, name in attributes(path):
            assert not re.match(r"random\.(?!Random\b)", name), f"{name_of(path)}:{line}: {name} is global"
        assert not {name for name in imports(path) if re.match(r"random\.(?!Random\b)", name)}, name_of(path)


def test_numerics_compute_and_do_not_communicate():
    zstd = {"backports", "compression"}  # `compression` is of the standard library from Python 3.14
    computing = (sys.stdlib_module_names - NOT_FOR_DECISIONS) | {"numpy", "torch", "sys"} | zstd
    for path in files_under("numerics"):
        assert outside(path) <= computing, f"{name_of(path)} imports {outside(path) - computing}"
        for line, name in attributes(path):  # which module is imported may depend on Python's version
            assert name == "sys.version_info" or not name.startswith("sys."), (
                f"{name_of(path)}:{line}: {name}"
            )
        others = [
            name for name in imports(path) if re.match(r"sys\.|torch\.(distributed|multiprocessing)", name)
        ]
        assert not others, f"{name_of(path)} imports {others}"


def test_only_the_root_and_the_command_line_import_strategies():
    none(
        name_of(path)
        for path in modules()
        if "strategies" in layers_used(path)
        and not name_of(path).startswith(("strategies/", *STRATEGIES_FOR))
    )


def test_private_names_of_torch_are_in_one_module():
    allowed = (
        "torch.utils._pytree",
        "torch.__version__",
    )  # the one is used by all modules, the other is public
    for path in modules():
        names = imports(path) | {name for _, name in attributes(path)}
        private = {
            name for name in names if re.match(r"torch(\.\w+)*\._", name) and not name.startswith(allowed)
        }
        assert not private or name_of(path) == "torch_compat.py", f"{name_of(path)} uses {private}"


def test_nothing_that_could_unpickle_is_imported():
    none(name_of(path) for path in modules() if outside(path) & PICKLES)


# Forbidden constructs -----------------------------------------------------------------------------------


def unfinished(path: Path) -> Iterator[str]:
    """Unfinished parts of a file, and exceptions that it catches without naming them."""
    for node in nodes_of(path):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{from_root(path)}:{node.lineno}: say which exception"
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield f"{from_root(path)}:{node.lineno}: finish it or leave it out"
    text = path.read_text()
    if not re.search("todo|fixme|xxx", text, re.IGNORECASE):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.upper().replace(":", " ").split()
            if {"TODO", "FIXME", "XXX"} & set(words):
                yield f"{from_root(path)}:{token.start[0]}: {token.string}"


def test_no_bare_except_and_no_unfinished_code():
    others = [path for folder in ("examples", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    none(fault for path in [*modules(), *files_of_tests(), *others] for fault in unfinished(path))


def threads_started(path: Path) -> list[int]:
    """The lines on which a file starts threads, or derives a class from one that does."""
    derived = [
        node.lineno
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and {dotted(base).split(".")[-1] for base in node.bases} & STARTS
    ]
    return derived + [line for line, name in calls(path) if name.split(".")[-1] in STARTS]


def test_every_thread_is_started_where_its_failure_is_reported():
    none(
        f"{name_of(path)}:{threads_started(path)}: use Member.start_thread or start_thread"
        for path in modules()
        if threads_started(path) and not name_of(path).startswith(tuple(STARTS_FOR))
    )


def test_no_module_waits_on_a_lock_that_a_signal_handler_could_leave_held():
    locks = {"threading.Condition", "threading.Event"}
    none(
        f"{name_of(path)}: use offbeat.runtime.processes.waiting in place of {used}"
        for path in modules()
        if (used := locks & (imports(path) | {name for _, name in attributes(path)}))
    )


def test_tests_do_not_sleep_until_something_has_happened():
    none(
        f"{from_root(path)}:{line}: wait for the thing itself"
        for path in files_of_tests()
        if path.name not in SLEEPS_FOR
        for line, name in calls(path)
        if name.split(".")[-1] == "sleep"
    )


def test_tests_do_not_mock():
    none(
        f"{from_root(path)}: test the real thing"
        for path in files_of_tests()
        if {"mock", "pytest_mock"} & outside(path) or "unittest.mock" in imports(path)
    )
    none(
        f"{from_root(path)}:{line}: test the real thing"
        for path in files_of_tests()
        if path.name not in REPLACES_FOR
        for line, name in calls(path)
        if name.endswith((".setattr", ".patch"))
    )


def test_exceptions_from_the_rules_are_still_needed():
    starting = [name_of(path) for path in modules() if threads_started(path)]
    assert all(any(name.startswith(allowed) for name in starting) for allowed in STARTS_FOR)
    by_name = {path.name: path for path in files_of_tests()}
    for name in SLEEPS_FOR:
        assert any(called.endswith("sleep") for _, called in calls(by_name[name])), f"{name} can be removed"
    for name in REPLACES_FOR:
        assert any(called.endswith(".setattr") for _, called in calls(by_name[name])), (
            f"{name} can be removed"
        )


# Tests ---------------------------------------------------------------------------------------------------


def room_of(path: Path) -> str:
    """The folder of a test file, as seen from tests/: "policies/data"; "." for the root."""
    return path.parent.relative_to(ROOT / "tests").as_posix()


def test_a_test_file_is_in_a_room_of_the_library():
    for path in files_of_tests():
        room = room_of(path)
        assert room in OTHER_TEST_ROOMS or (PACKAGE / room).is_dir(), f"src/offbeat has no room {room}"
        if room == "support":
            assert not path.name.startswith("test_"), f"{path.name}: tests belong in a room"
        elif room != ".":
            assert path.name.startswith("test_"), f"{path.name}: shared helpers belong in tests/support"


def test_every_test_file_has_a_name_of_its_own():
    """pytest imports a test file by its name without the folder: a second one of that name would not run."""
    names = [path.name for path in files_of_tests() if path.name.startswith("test_")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def names_defined_twice(path: Path) -> list[str]:
    """Names of functions and classes of a file that a later definition replaces."""
    defined = [
        node.name
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and "overload" not in map(dotted, node.decorator_list)
    ]
    return sorted({name for name in defined if defined.count(name) > 1})


def test_no_function_replaces_another_of_its_name():
    """Of two tests of one name in a file only the second would run."""
    none(
        f"{from_root(path)} defines {names} twice"
        for path in [*modules(), *files_of_tests()]
        if (names := names_defined_twice(path))
    )


def test_no_test_file_imports_another():
    tests = {path.stem for path in files_of_tests() if path.name.startswith("test_")}
    none(
        f"{from_root(path)} imports {used}: shared helpers belong in tests/support"
        for path in files_of_tests()
        if (used := tests & {name.split(".")[-1] for name in imports(path)})
    )


def test_decisions_and_computation_are_tested_without_the_runtime():
    none(
        from_root(path)
        for path in files_of_tests()
        if room_of(path).split("/")[0] in ("policies", "numerics")
        and layers_used(path) & {"runtime", "strategies", "cli"}
    )


# Docstrings and sizes -----------------------------------------------------------------------------------


def public(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Modules, classes, functions and methods that others may use; the content of a private one is not."""
    yield name, node
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_") or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            yield from public(child, f"{name}.{child.name}")


def test_public_names_have_a_docstring_that_begins_with_a_sentence():
    for path in modules():
        for name, node in public(tree_of(path)):
            text = ast.get_docstring(node)  # type: ignore[arg-type]
            assert text, f"{name_of(path)}: {name or 'the module'} has no docstring"
            first = text.split("\n\n")[0].rstrip()
            assert first[-1] in ".:;?", f"{name_of(path)}: {name or 'the module'}: no sentence: {first!r}"


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The attributes that a class's methods assign to self, and the fields that its body declares."""
    assigned = {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
    fields = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    return assigned | fields


def lines_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def sizes(path: Path) -> Iterator[str]:
    """The parts of a file that have grown large."""
    lines = len(path.read_text().splitlines())
    if lines > FILE_LINES_MAX:
        yield f"{from_root(path)} has {lines} lines"
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            length, where = lines_of(node), f"{from_root(path)}:{node.lineno} {node.name}"
            if length > (CLASS_LINES_MAX if isinstance(node, ast.ClassDef) else FUNCTION_LINES_MAX):
                yield f"{where} has {length} lines"
            if isinstance(node, ast.ClassDef) and len(attributes_of(node)) > CLASS_ATTRIBUTES_MAX:
                yield f"{where} has {len(attributes_of(node))} attributes"


def test_large_classes_say_why_in_their_docstring():
    """A paragraph of the docstring that begins with "Size:"."""
    without_reason = [
        f"{from_root(path)}:{node.lineno} {node.name}"
        for path in modules()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        and (lines_of(node) > CLASS_LINES_MAX or len(attributes_of(node)) > CLASS_ATTRIBUTES_MAX)
        and "\n\nSize: " not in (ast.get_docstring(node) or "")
    ]
    assert not without_reason


def test_large_files_and_classes_are_warned_about():
    """Never fails; warns about large files, classes and functions."""
    for path in [*modules(), *files_of_tests()]:
        for size in sizes(path):
            warnings.warn(size, stacklevel=1)
