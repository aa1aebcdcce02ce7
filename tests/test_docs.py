"""Names in the documents exist: links, files, tests, commands, make targets, public names; loops run."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.cli.main import main
from support.source_files import PACKAGE, ROOT, tree_of

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
PATH = re.compile(r"[\w./-]*\w\.(?:py|md|toml|txt|jsonl|svg)|(?:src|tests|docs|examples|benchmarks)/[\w./-]*")
TEST = re.compile(r"(?:scenarios/)?test_\w+\.py::test_\w+")
FENCE = re.compile(r"^```.*?^```$|^(?:    [^\n]*\n)+", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
STATES = ("here", "in part", "not there yet")
MAP_BYTES_MAX = 12_000
GLOSSARY_ROWS_MAX = 45
DOORS = {  # modules whose names are public
    "offbeat": "__init__.py",
    "offbeat.strategies": "strategies/__init__.py",
    "offbeat.ps": "ps.py",
    "offbeat.nimble": "nimble.py",
    "offbeat.keras": "keras.py",
    "offbeat.lightning": "lightning.py",
    "offbeat.ray": "ray/__init__.py",
    "offbeat.transformers": "transformers.py",
    "offbeat.accelerate": "accelerate.py",
    "offbeat.data": "data/__init__.py",
}
ENTRY = re.compile(r"^\.\. (?:auto)?(?:class|exception|function|data):: (\w+)$", re.MULTILINE)


def from_root(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def functions_of(name: str) -> frozenset[str]:
    """The names of the test functions of a file in tests/, whatever folder it is in."""
    paths = [path for path in (ROOT / "tests").rglob(Path(name).name) if path.as_posix().endswith(f"/{name}")]
    assert len(paths) == 1, f"there is no tests/{name}, or more than one"
    return frozenset(node.name for node in tree_of(paths[0]).body if isinstance(node, ast.FunctionDef))


def assert_is_a_test(reference: str) -> None:
    name, _, function = reference.partition("::")
    assert function in functions_of(name), f"there is no test {reference}"


@cache
def defined_in(path: Path) -> frozenset[str]:
    """The functions and methods that a module defines."""
    return frozenset(node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef))


def sections(document: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    pieces = re.split(r"^## (.*)\n", (ROOT / document).read_text(), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


JOURNEYS = {head: text for head, text in sections("ARCHITECTURE.md").items() if head.startswith("Journey")}


def rows(document: str) -> list[list[str]]:
    """The cells of every table's rows, headings left out."""
    lines = [line for line in (ROOT / document).read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set("".join(row)) <= set("-: ")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=from_root)
def test_relative_links_have_a_target(path):
    for target in LINK.findall(path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{target} does not exist"


@pytest.mark.parametrize("path", DOCUMENTS, ids=from_root)
def test_files_that_are_named_exist(path):
    """In backticks, seen from the root, the package, tests/ or docs/; words in capitals stand for others."""
    for quoted in CODE.findall(FENCE.sub("", path.read_text())):
        for name in PATH.findall(quoted.partition("::")[0]):
            if name != quoted.partition("::")[0] or re.search(r"[A-Z]{4,}(?!\.md|TECTURE|TRIBUTING)", name):
                continue
            places = (ROOT, PACKAGE, ROOT / "tests", ROOT / "docs")
            is_test = name.startswith("test_") and any((ROOT / "tests").rglob(name))
            assert is_test or any((place / name).exists() for place in places), f"{name} does not exist"


@pytest.mark.parametrize("path", DOCUMENTS, ids=from_root)
def test_tests_that_are_named_exist(path):
    for reference in TEST.findall(path.read_text()):
        assert_is_a_test(reference)


@pytest.mark.parametrize("path", DOCUMENTS, ids=from_root)
def test_no_place_of_one_machine_is_named(path):
    assert not re.search(r"(?<![\w.:/])/(?:home|root|work|tmp|Users)/", path.read_text())


def test_every_layer_and_every_room_is_on_the_map():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    modules = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    layers = {path.relative_to(PACKAGE).parts[0] for path in modules}
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in modules} - {"."}
    for name in sorted(layers | rooms):
        shown = name if name.endswith(".py") else f"{name}/"
        assert f"`{shown}`" in text, f"ARCHITECTURE.md does not describe {shown}"


def test_every_folder_on_the_map_exists():
    for quoted in CODE.findall(FENCE.sub("", (ROOT / "ARCHITECTURE.md").read_text())):
        if quoted.endswith("/"):
            assert (PACKAGE / quoted).is_dir(), f"there is no folder {quoted}"


def test_the_map_stays_small():
    assert (ROOT / "ARCHITECTURE.md").stat().st_size <= MAP_BYTES_MAX


def test_the_rules_name_tests_that_exist():
    named = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", sections("ARCHITECTURE.md")["Rules"])
    assert len(named) >= 10
    for file, function in named:
        assert_is_a_test(f"{file or 'test_tidy.py'}::{function}")


def test_there_are_three_journeys():
    assert len(JOURNEYS) == 3
    for text in JOURNEYS.values():
        assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) >= 8


@pytest.mark.parametrize("journey", JOURNEYS)
def test_the_functions_of_a_journey_are_in_its_files(journey):
    quoted = CODE.findall(JOURNEYS[journey])
    files = [PACKAGE / name for name in quoted if name.endswith(".py")]
    known = frozenset[str]().union(*map(defined_in, files))
    called = [found[1] for name in quoted if (found := re.fullmatch(r"(?:\w+\.)?(\w+)\(\)", name))]
    assert len(called) >= 10
    for name in called:
        assert name in known, f"no file of this journey defines {name}"


def test_every_method_has_a_state_and_each_implemented_one_a_module_and_tests():
    methods = [row for row in rows("docs/papers.md") if row[0] != "method"]
    assert len(methods) >= 40
    for method, _, module, tests, state in methods:
        assert state.startswith(STATES), f"{method}: {state}"
        is_implemented = not state.startswith("not there yet")
        assert (CODE.search(module) is not None) == is_implemented, f"{method} is {state} and in {module}"
        assert (TEST.search(tests) is not None) == is_implemented, (
            f"{method} is {state}, its tests are {tests}"
        )


def test_the_glossary_stays_small():
    words = [row for row in rows("docs/glossary.md") if row[0] != "term"]
    assert 20 <= len(words) <= GLOSSARY_ROWS_MAX


def test_every_strategy_is_named_in_the_readme():
    from offbeat.strategies import STRATEGIES

    text = (ROOT / "README.md").read_text()
    for name, kind in STRATEGIES.items():
        assert f"`{name}`" in text
        assert f"`{kind.__name__}`" in text


def last_python_of(document: str) -> str:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)[-1]


@pytest.fixture
def in_a_world_of_one(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_loop_of_the_quick_start_runs_and_learns(in_a_world_of_one):
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 2)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "train_set": TensorDataset(x, (x[:, 0] > 0).long()),
    }
    exec(compile(last_python_of("docs/quick-start.md"), "quick-start.md", "exec"), names)
    assert names["session"].step == 30
    saved = nn.Linear(4, 2)
    saved.load_state_dict(torch.load("model.pt", weights_only=True))
    assert (saved(x).argmax(1) == (x[:, 0] > 0)).float().mean() > 0.9


def test_the_loop_of_the_readme_runs_in_a_world_of_one_and_learns(in_a_world_of_one):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, generator=generator)
    model = nn.Linear(4, 2)
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "train_set": TensorDataset(x, (x[:, 0] > 0).long()),
        "validation_set": TensorDataset(x),
        "evaluate": lambda model, part: {"positive": int((model(part.tensors[0])[:, 1] > 0).sum())},
    }
    exec(compile(last_python_of("README.md"), "README.md", "exec"), names)
    assert names["session"].epoch == 10
    assert names["session"].step == 30
    assert list(names["session"].validator.history) == list(range(10))
    assert (model(x).argmax(1) == (x[:, 0] > 0)).float().mean() > 0.9


def test_the_commands_of_the_readme_exist(capsys):
    text = (ROOT / "README.md").read_text()
    quoted_text = "\n".join(CODE.findall(text) + FENCE.findall(text))
    commands = set(re.findall(r"\boffbeat (train|compare|run|replay|simulate|serve)\b", quoted_text))
    assert {"train", "compare", "run", "replay"} <= commands
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in commands:
        assert re.search(rf"^\W*{command}\b", shown, re.MULTILINE), f"offbeat --help does not name {command}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=from_root)
def test_make_targets_that_are_named_exist(path):
    text = path.read_text()
    quoted_text = "\n".join(CODE.findall(text) + FENCE.findall(text))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^\s*make ([\w-]+)", quoted_text, re.MULTILINE)) <= targets


def test_the_changelog_and_the_citation_name_the_version():
    assert f"## [{offbeat.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {offbeat.__version__}\n" in (ROOT / "CITATION.cff").read_text()


# The site -----------------------------------------------------------------------------------------------


def public_names(door: str) -> list[str]:
    """`__all__` of a module, which is read and not imported: one of them needs an extra."""
    for node in tree_of(PACKAGE / DOORS[door]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{door} has no __all__")


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_and_no_other_has_an_entry_in_the_reference(door):
    page = (ROOT / "docs" / "reference" / f"{door.rpartition('.')[2]}.md").read_text()
    assert set(re.findall(r"^\.\. currentmodule:: (\S+)$", page, re.MULTILINE)) == {door}
    assert sorted(ENTRY.findall(page)) == sorted(public_names(door))


def test_every_page_is_in_one_table_of_contents():
    named = []
    for path in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line for line in block.splitlines() if line and not line.startswith(":")]
            found = [page for line in lines for page in path.parent.glob(f"{line}.md")]
            assert len(found) >= len(lines), f"{from_root(path)} names a page that does not exist"
            named += found
    assert sorted(named) == sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "index.md"})


def test_included_files_exist_and_every_example_is_included():
    included = {
        (path.parent / name).resolve()
        for path in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"^```\{(?:literal)?include\} (\S+)$", path.read_text(), re.MULTILINE)
    }
    assert all(path.is_file() for path in included)
    assert set((ROOT / "examples").glob("*.py")) <= included
