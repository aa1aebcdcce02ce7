"""The description of the packages: the README, without links to files that a package index does not have.

Everything else about the packages is in pyproject.toml. No address of a repository is known here, so a link
to a file becomes the file's name in the source distribution, and a picture of the repository is left out.
"""

import re
from pathlib import Path

from setuptools import setup

_PICTURE = re.compile(r"!\[[^\]]*\]\((?!\w+://)[^)]*\)\n*")
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+://)([^)#]+)[^)]*\)")


def _named(link: re.Match[str]) -> str:
    label, path = link.groups()
    return f"`{path}`" if label == path else f"{label} (`{path}`)"


def description() -> str:
    """Return the README with names of files in the place of links to them."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = _LINK.sub(_named, _PICTURE.sub("", text))
    return f"{text}\nThe files named here are part of the source distribution.\n"


setup(long_description=description(), long_description_content_type="text/markdown")
