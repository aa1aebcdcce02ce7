"""Configuration of the documentation site; `make docs` builds it.

Pages are Markdown. Links between files are those of the repository, so that they work there too: where a file
has a page, its link leads to the page (`PAGES`), and a link to another file outside of docs/ is its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

import offbeat

ROOT = Path(__file__).resolve().parents[1]
# Files of the repository, and the page on which each of them is shown.
PAGES = {
    "README.md": "docs/index.md",
    "ARCHITECTURE.md": "docs/architecture.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "CHANGELOG.md": "docs/changelog.md",
    "SECURITY.md": "docs/security.md",
    "benchmarks/README.md": "docs/benchmarks.md",
    "docs/decisions": "docs/decisions/index.md",
    "examples": "docs/examples.md",
}

project = "offbeat"
author = "offbeat maintainers"
version = release = offbeat.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = f"offbeat {release}"
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

os.environ.setdefault("KERAS_BACKEND", "torch")  # autodoc imports offbeat.keras
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
nitpick_ignore_regex = [
    ("py:class", r"(collections|contextlib|keras|numpy|os|pathlib|torch)\..*"),  # of other libraries
    ("py:class", r"offbeat\.(events|numerics|policies|runtime)\..*"),  # private
    ("py:class", r"(nn\.)?[A-Z]\w+"),  # imported or defined for type checkers only
]
napoleon_numpy_docstring = False
napoleon_use_rtype = False
suppress_warnings = ["misc.highlighting_failure"]  # an ellipsis in an example is no Python

_INCLUDE = re.compile(r"^```\{include\} (\S+)\n((?::\S+: .*\n)*)```$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")
_CODE = re.compile(r"(?<![`:\w])`([^`\n]+)`(?!`)")


def _moved(text: str, source: str, page: str) -> str:
    """Return Markdown of the file `source` with links that are right on `page`; paths are from the root."""

    def link(found: re.Match[str]) -> str:
        mark, label, path, anchor = found[1], found[2], found[3], found[4] or ""
        target = normpath(join(source, "..", path))
        shown = PAGES.get(target, PAGES.get(target.partition("/")[0], target))
        if mark or shown.startswith("docs/"):
            return f"{mark}[{label}]({relpath(shown, join(page, '..'))}{anchor})"
        return f"`{target}`" if label == target else f"{label} (`{target}`)"

    return _LINK.sub(link, text)


def _between(text: str, options: str) -> str:
    """Return the part of an included text that the options of the directive name."""
    for name, value in re.findall(r'^:(\S+): "(.*)"$', options, re.MULTILINE):
        value = value.replace(r"\n", "\n")
        before, _, after = text.partition(value)
        assert after, f"an included file has no {value!r}"
        text = after if name == "start-after" else before
    return text


def _read(app: Any, name: str, content: list[str]) -> None:
    """Put included files of the repository in their places, and lead links to pages."""
    page = f"docs/{name}.md"

    def included(found: re.Match[str]) -> str:
        path = normpath(join(page, "..", found[1]))
        app.env.note_dependency(str(ROOT / path))
        return _moved(_between((ROOT / path).read_text(encoding="utf-8"), found[2]), path, page)

    content[0] = _INCLUDE.sub(included, _moved(content[0], page, page))


def _escaped(line: str) -> str:
    """Return a docstring's line in reStructuredText: backticks are literals, other signs are themselves."""
    pieces = line.split("`")  # what is between backticks has an odd number
    pieces[::2] = [re.sub(r"([*|])", r"\\\1", piece) for piece in pieces[::2]]
    return _CODE.sub(r"``\1``\\ ", "`".join(pieces))


def _plain(app: Any, what: str, name: str, it: Any, options: Any, lines: list[str]) -> None:
    """Make a docstring reStructuredText; an indented paragraph is code, except in a section or a list."""
    given, lines[:] = list(lines), []
    if what in ("attribute", "property"):
        lines += ["..", ""]  # a comment: napoleon takes what is before a colon in the first line for the type
    before, is_after_blank, is_code = "", False, False
    for line in given:
        is_indented = line.startswith("    ")
        if is_indented and is_after_blank and not before.startswith((" ", "-")):
            lines += ["::", ""]
            is_code = True
        is_code = is_code and (is_indented or not line.strip())
        lines.append(line if is_code else _escaped(line))
        before, is_after_blank = (line, False) if line.strip() else (before, True)


def setup(app: Any) -> None:
    """Connect the changes above to the build."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _plain, priority=400)  # before napoleon's, at 500
