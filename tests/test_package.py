"""The result of `make package`: contents and descriptions of the wheel and the source distribution."""

import os
import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import offbeat

FOLDER = os.environ.get("OFFBEAT_TEST_PACKAGE", "")
ROOT = Path(__file__).resolve().parents[1]
BASE = f"offbeat-{offbeat.__version__}"

pytestmark = pytest.mark.skipif(not FOLDER, reason="make package builds the packages and runs these tests")


@pytest.fixture
def wheel():
    with zipfile.ZipFile(Path(FOLDER) / f"{BASE}-py3-none-any.whl") as opened:
        yield opened


@pytest.fixture
def files_of_source():
    with tarfile.open(Path(FOLDER) / f"{BASE}.tar.gz") as opened:
        return {member.name.removeprefix(f"{BASE}/") for member in opened.getmembers() if member.isfile()}


def test_the_tests_run_with_the_installed_wheel():
    assert "site-packages" in Path(offbeat.__file__).parts


def test_the_wheel_holds_the_modules_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if not name.startswith(f"{BASE}.dist-info/")}
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/offbeat").rglob("*.py")}
    assert names == modules | {"offbeat/py.typed"}


def test_the_description_links_to_no_file(wheel):
    metadata = Parser().parsestr(wheel.read(f"{BASE}.dist-info/METADATA").decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert "SECURITY.md" in description
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert links
    assert all(re.match(r"https://|#", link) for link in links), links


def test_the_source_distribution_holds_a_checkout_and_no_generated_files(files_of_source):
    top = {name.split("/")[0] for name in files_of_source if not name.startswith("src/offbeat.egg-info/")}
    assert top == {
        *(".ci", "benchmarks", "deploy", "docs", "examples", "src", "tests"),
        *("ARCHITECTURE.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in"),
        *("Makefile", "PKG-INFO", "README.md", "SECURITY.md", "constraints.txt", "pyproject.toml"),
        *("setup.cfg", "setup.py"),
    }
    made = re.compile(r"(^|/)(__pycache__|\.[a-z_]+_cache|\.hypothesis|build|dist|\.venv[^/]*)/")
    assert not {name for name in files_of_source if made.search(name)}
