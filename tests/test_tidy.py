"""The rules of the house that a program can check: who imports whom, what importing does, what must not be.

Sizes are only warned about: a file of more than 500 lines, a class of more than 450 lines or 25 attributes,
or a function of more than 60 lines wants a reason, and may have one.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.source_files import PACKAGE, ROOT, imports, modules, name_of, tree_of

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
CLASS_LINES_MAX = 450
CLASS_ATTRIBUTES_MAX = 25
PUBLIC_NAMES_MAX = 30

# What a decision must not have within reach: clocks, the world outside, other threads of control, printing.
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
    "keras": ("errors", "numerics", "policies", "runtime"),  # a door of its own, for loops that Keras runs
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
        "model_averaging": ("data", "membership"),
    },
    "numerics": {"collectives": (), "ps": ()},
    "runtime": {
        "processes": (),
        "transport": ("processes",),
        "control": ("processes", "transport"),
        "collectives": ("processes", "transport"),
        "data": ("control",),
        "training": ("control", "collectives", "data"),
        "validation": ("processes", "transport", "control"),
        "ps": ("processes", "transport", "control"),
        "averaging": ("control", "collectives", "data", "training"),
        "hybrid": ("collectives", "training", "averaging"),
        "staleness": ("processes", "control", "data", "training", "ps"),
        "model_averaging": ("control", "collectives", "data", "training"),
    },
    "simulator": {
        "core": (),
        "training": ("core",),
        "ps": ("core", "training"),
        "staleness": ("core", "training"),
        "model_averaging": ("core", "training"),
    },
}

# Modules that need an extra, which `make test` does not install.
EXTRAS = {"keras.py": "keras"}

# Who may import strategies besides strategies themselves, and why.
STRATEGIES_FOR = {
    "__init__.py": "the door",
    "cli/simulation.py": "the command line",
    "cli/training_worker.py": "what the command line runs as a worker: an ordinary user of the door",
}

# Where threads may be started, and who hears what they raise.
STARTS_FOR = {
    "runtime/processes/threads.py": "whoever starts a thread says who hears of its failure",
    "runtime/ps/cluster.py": "an executor, whose every result is asked for",
    "cli/training_worker.py": "an executor, whose every result is asked for",
}
STARTS = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "start_joinable_thread", "to_thread"}

# Folders of tests/ besides the rooms of the library: tests of all of it, helpers, tests of the benchmarks.
OTHER_TEST_ROOMS = (".", "scenarios", "support", "benchmarks")

# Test files that may sleep or replace something, and why.
SLEEPS_FOR = {
    "run_logs.py": "looks again and again until a deadline, and leaves others the machine",
    "group_training.py": "takes the time of a computation, and leaves others the machine",
}
REPLACES_FOR = {"test_launch.py": "says that it runs on another system, of which there is none here"}


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def layers_used(path: Path) -> set[str]:
    """The layers that a file imports: "runtime" for offbeat.runtime.transport.framing."""
    pieces = [name.split(".") for name in imports(path)]
    return {piece[1] for piece in pieces if piece[0] == "offbeat" and len(piece) > 1}


def modules_used(path: Path) -> set[str]:
    """The modules of offbeat that a file imports, dotted; of a module in a package, not the package too."""
    known = {dotted_name(module) for module in modules()}
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return found & known


def dotted_name(path: Path) -> str:
    name = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


def layer_of(name: str) -> str:
    """The layer of a path in the package: "runtime" for runtime/session.py, "errors" for errors.py."""
    return name.split("/")[0].removesuffix(".py")


def outside(path: Path) -> set[str]:
    """The other packages that a file imports, by their first names."""
    return {name.split(".")[0] for name in imports(path)} - {"offbeat", "__future__"}


# Layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_point_down(path):
    allowed = LAYERS.get(layer_of(name_of(path)))
    if allowed is not None:
        assert layers_used(path) <= set(allowed), f"{name_of(path)} may import only {allowed} of offbeat"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_rooms_import_only_the_rooms_below_them(path):
    """A file at the root of a layer may import all of its rooms, and no room may import such a file."""
    layer, *rest = name_of(path).split("/")
    if layer not in ROOMS or len(rest) < 2:
        return
    room = rest[0]
    for name in modules_used(path):
        pieces = name.split(".")
        if pieces[1] == layer and len(pieces) > 2 and pieces[2] != room:
            assert pieces[2] in ROOMS[layer][room], f"{name_of(path)}: {layer}/{room} may not import {name}"


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


def files_under(layer: str) -> list[Path]:
    """Every module of a layer, however deep in its rooms."""
    return sorted((PACKAGE / layer).rglob("*.py"))


@pytest.mark.parametrize("path", files_under("policies"), ids=name_of)
def test_policies_are_made_of_the_standard_library_without_clocks_and_the_world(path):
    assert outside(path) <= sys.stdlib_module_names
    assert not outside(path) & NOT_FOR_DECISIONS


@pytest.mark.parametrize("path", [*files_under("events"), PACKAGE / "errors.py"], ids=name_of)
def test_events_and_errors_are_made_of_the_standard_library(path):
    assert outside(path) <= sys.stdlib_module_names - NOT_FOR_DECISIONS


@pytest.mark.parametrize("path", [*files_under("policies"), *files_under("numerics")], ids=name_of)
def test_chance_comes_as_an_argument_or_from_a_seed(path):
    """`random.Random(seed)` is a generator of one's own; every other name of the module is the global one."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            assert node.attr == "Random", f"line {node.lineno}: random.{node.attr} is shared by everybody"
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            assert {alias.name for alias in node.names} <= {"Random"}


@pytest.mark.parametrize("path", files_under("numerics"), ids=name_of)
def test_numerics_compute_and_do_not_communicate(path):
    zstd = {"backports", "compression"}  # `compression` is of the standard library from Python 3.14
    computing = (sys.stdlib_module_names - NOT_FOR_DECISIONS) | {"numpy", "torch", "sys"} | zstd
    assert outside(path) <= computing
    for node in ast.walk(tree_of(path)):  # which module is imported may depend on Python's version
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys":
            assert node.attr == "version_info", f"line {node.lineno}: sys.{node.attr} is the environment"
        if isinstance(node, ast.ImportFrom):
            assert node.module != "sys"
    assert not any(name.startswith(("torch.distributed", "torch.multiprocessing")) for name in imports(path))


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_strategies_are_imported_by_the_door_and_the_command_line_only(path):
    name = name_of(path)
    if name.startswith(("strategies/", *STRATEGIES_FOR)):
        return
    assert "strategies" not in layers_used(path)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_private_names_of_torch_are_in_one_module(path):
    if name_of(path) == "torch_compat.py":
        return
    names = imports(path) | {
        ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)
    }
    allowed = (
        "torch.utils._pytree",
        "torch.__version__",
    )  # the one is used by everybody, the other is public
    private = {name for name in names if re.match(r"torch(\.\w+)*\._", name)}
    assert not {name for name in private if not name.startswith(allowed)}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_that_could_unpickle_is_imported(path):
    assert not outside(path) & PICKLES


# What importing does ------------------------------------------------------------------------------------


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_offbeat_loads_no_torch_starts_no_thread_and_sets_up_no_logging():
    code = (
        "import logging, sys, threading\n"
        "import offbeat\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('offbeat').handlers\n"
        "print('quiet')"
    )
    assert in_a_fresh_process(code) == "quiet"


def test_importing_every_module_starts_no_thread():
    names = ["offbeat." + name_of(path).removesuffix(".py").replace("/", ".") for path in modules()]
    names = [name for name in names if name.removeprefix("offbeat.") + ".py" not in EXTRAS]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, threading\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert threading.active_count() == 1, name\n"
        "print('quiet')"
    )
    assert in_a_fresh_process(code) == "quiet"


@pytest.mark.parametrize("name", EXTRAS)
def test_a_module_that_needs_an_extra_says_so_where_it_is_not_there(name):
    code = (
        "import importlib, sys\n"
        f"sys.modules[{EXTRAS[name]!r}] = None\n"
        "try:\n"
        f"    importlib.import_module('offbeat.{name.removesuffix('.py')}')\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    assert f"pip install offbeat[{EXTRAS[name]}]" in in_a_fresh_process(code)


def test_the_coordinator_needs_no_torch():
    code = (
        "import sys, offbeat.runtime.control.coordinator\n"
        "import offbeat.policies.membership.assembly, offbeat.policies.membership.lockstep\n"
        "print('torch' in sys.modules)"
    )
    assert in_a_fresh_process(code) == "False"


def test_a_parameter_server_needs_no_torch_until_somebody_has_tensors():
    code = "import sys, offbeat, offbeat.runtime.ps.server\noffbeat.PS\nprint('torch' in sys.modules)"
    assert in_a_fresh_process(code) == "False"


def test_the_public_parameter_server_needs_torch_for_its_translations_only():
    code = (
        "import sys, offbeat.ps\n"
        "assert 'torch' not in sys.modules\n"
        "print(all(hasattr(offbeat.ps, name) for name in offbeat.ps.__all__))"
    )
    assert in_a_fresh_process(code) == "True"


def test_sparse_logistic_regression_needs_no_torch():
    code = "import sys, benchmarks.sparse_lr, offbeat.apps.sparse_lr.libsvm\nprint('torch' in sys.modules)"
    assert in_a_fresh_process(code) == "False"


def test_the_root_exports_few_names_and_all_of_them_are_there():
    import offbeat

    assert len(offbeat.__all__) <= PUBLIC_NAMES_MAX
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None


# What must not occur ------------------------------------------------------------------------------------


def written_by_us() -> list[Path]:
    others = [path for folder in ("examples", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    return sorted([*modules(), *files_of_tests(), *others])


def from_root(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", written_by_us(), ids=from_root)
def test_no_bare_except_and_nothing_left_undone(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: say which exception"
        if isinstance(node, ast.Name):
            assert node.id != "NotImplementedError", f"line {node.lineno}: finish it or leave it out"
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.upper().replace(":", " ").split()
            assert not {"TODO", "FIXME", "XXX"} & set(words), f"line {token.start[0]}: {token.string}"


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """Every call of a file, by its line and dotted name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_every_thread_is_started_where_its_failure_is_reported(path):
    started = [line for line, name in calls(path) if name.split(".")[-1] in STARTS]
    derived = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base).split(".")[-1] for base in node.bases} & STARTS
    ]
    if name_of(path).startswith(tuple(STARTS_FOR)):
        return
    assert not started + derived, f"line {started + derived}: use Member.start_thread or start_thread"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nobody_waits_on_a_lock_that_a_signal_handler_could_leave_held(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "threading":
            assert not {alias.name for alias in node.names} & {"Condition", "Event"}, f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            assert name not in ("threading.Condition", "threading.Event"), (
                f"line {node.lineno}: use offbeat.runtime.processes.waiting in place of {name}"
            )


@pytest.mark.parametrize("path", files_of_tests(), ids=from_root)
def test_tests_do_not_sleep_until_something_has_happened(path):
    if path.name in SLEEPS_FOR:
        return
    for line, name in calls(path):
        assert name.split(".")[-1] != "sleep", f"line {line}: wait for the thing itself"


@pytest.mark.parametrize("path", files_of_tests(), ids=from_root)
def test_tests_do_not_mock(path):
    assert not {"mock", "pytest_mock"} & outside(path)
    assert "unittest.mock" not in imports(path)
    if path.name in REPLACES_FOR:
        return
    for line, name in calls(path):
        assert not name.endswith((".setattr", ".patch")), f"line {line}: test the real thing"


def test_exceptions_from_the_rules_are_still_needed():
    starting = [
        name_of(path) for path in modules() if STARTS & {one.split(".")[-1] for _, one in calls(path)}
    ]
    assert all(any(name.startswith(allowed) for name in starting) for allowed in STARTS_FOR)
    names = {path.name for path in files_of_tests()}
    assert set(SLEEPS_FOR) | set(REPLACES_FOR) <= names
    for path in files_of_tests():
        if path.name in REPLACES_FOR:
            assert any(name.endswith(".setattr") for _, name in calls(path)), f"{path.name} may go"


# Tests ---------------------------------------------------------------------------------------------------


def room_of(path: Path) -> str:
    """The folder of a test file, as seen from tests/: "policies/data"; "." for the root."""
    return path.parent.relative_to(ROOT / "tests").as_posix()


def files_of_tests_in(*layers: str) -> list[Path]:
    """The test files of some layers, however deep in their rooms."""
    return [path for path in files_of_tests() if room_of(path).split("/")[0] in layers]


@pytest.mark.parametrize("path", files_of_tests(), ids=from_root)
def test_a_test_file_is_in_a_room_of_the_library(path):
    room = room_of(path)
    assert room in OTHER_TEST_ROOMS or (PACKAGE / room).is_dir(), f"src/offbeat has no room {room}"
    if room == "support":
        assert not path.name.startswith("test_"), "tests belong in a room"
    elif room != ".":
        assert path.name.startswith("test_"), "shared helpers belong in tests/support"


def test_every_test_file_has_a_name_of_its_own():
    """pytest imports a test file by its name without the folder: a second one of that name would not run."""
    names = [path.name for path in files_of_tests() if path.name.startswith("test_")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


@pytest.mark.parametrize("path", files_of_tests(), ids=from_root)
def test_no_test_file_imports_another(path):
    names = {path.stem for path in files_of_tests() if path.name.startswith("test_")}
    assert not names & {name.split(".")[-1] for name in imports(path)}, (
        "shared helpers belong in tests/support"
    )


@pytest.mark.parametrize("path", files_of_tests_in("policies", "numerics"), ids=from_root)
def test_decisions_and_computation_are_tested_without_the_runtime(path):
    assert not layers_used(path) & {"runtime", "strategies", "cli"}


# Docstrings and sizes -----------------------------------------------------------------------------------


def public(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Modules, classes, functions and methods that others may use; what is inside a private one is not."""
    yield name, node
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_") or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            yield from public(child, f"{name}.{child.name}")


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_what_is_public_has_a_docstring_that_begins_with_a_sentence(path):
    for name, node in public(tree_of(path)):
        text = ast.get_docstring(node)  # type: ignore[arg-type]
        assert text, f"{name or 'the module'} has no docstring"
        first = text.split("\n\n")[0].rstrip()
        assert first[-1] in ".:;?", f"{name or 'the module'}: the first paragraph is no sentence: {first!r}"


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


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_sizes_of_classes(path):
    """Never fails; says which classes have grown large."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            assert node.end_lineno is not None
            lines, attributes = node.end_lineno - node.lineno + 1, len(attributes_of(node))
            if lines > CLASS_LINES_MAX or attributes > CLASS_ATTRIBUTES_MAX:
                warnings.warn(
                    f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines, {attributes} attributes",
                    stacklevel=1,
                )


def test_sizes():
    """Never fails; says what has grown large."""
    for path in [*modules(), *files_of_tests()]:
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES_MAX:
            warnings.warn(f"{from_root(path)} has {lines} lines", stacklevel=1)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    where = f"{from_root(path)}:{node.lineno}"
                    warnings.warn(f"{where} {node.name} has {length} lines", stacklevel=1)
