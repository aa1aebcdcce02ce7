"""The modules of the library, and what a file imports, calls and names."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "offbeat"


@functools.cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports anywhere, dotted; of `from a import b` both a and a.b."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write imports in full"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def dotted(node: ast.AST) -> str:
    """The text of a dotted name, "threading.Event"; after another expression it begins with a dot."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    names.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(names))


@functools.cache
def calls(path: Path) -> tuple[tuple[int, str], ...]:
    """Every call of a file, by its line and dotted name."""
    return tuple((node.lineno, dotted(node.func)) for node in nodes_of(path) if isinstance(node, ast.Call))


@functools.cache
def attributes(path: Path) -> tuple[tuple[int, str], ...]:
    """Every attribute that a file names, by its line and dotted name."""
    return tuple((node.lineno, dotted(node)) for node in nodes_of(path) if isinstance(node, ast.Attribute))
