"""Environments of other libraries, which benchmarks compare offbeat with.

Each library has a virtual environment of its own, made once in a cache folder. What it does not bring itself,
torch above all, is taken from the environment of this process, so all compared programs use the same torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.workers import print_progress
from offbeat.errors import OffbeatError

DEFAULT_DIR = Path("~/.cache/offbeat-benchmarks")
_INSTALL_S = 900.0
_MARKER = "complete"


def interpreter_with(requirement: str, folder: Path = DEFAULT_DIR) -> Path:
    """Return the interpreter of an environment that has a library, which is installed if it is missing.

    Args:
        requirement: the library and its version, in pip's form, such as `decent-dp==0.2.3`.
        folder: of the environments.

    Raises:
        OffbeatError: the library could not be installed; says why.
    """
    host = sysconfig.get_path("purelib")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = folder.expanduser() / f"{requirement.replace('==', '-')}-py{version}"
    interpreter, marker = environment / "bin" / "python", environment / _MARKER
    if marker.exists() and marker.read_text() == host:
        return interpreter
    print_progress(f"installing {requirement}")
    shutil.rmtree(environment, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(environment)], requirement)
    packages = environment / "lib" / f"python{version}" / "site-packages"
    # Unlike a plain line, this reads the .pth files of that folder too: offbeat may be installed by one.
    (packages / "host.pth").write_text(f"import site; site.addsitedir({host!r})\n")
    _run([str(interpreter), "-m", "pip", "install", "--quiet", requirement], requirement)
    marker.write_text(host)
    return interpreter


def _run(command: list[str], requirement: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        reason = f"timed out after {_INSTALL_S:g} s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout).strip().rpartition("\n")[2] or f"exit code {error.returncode}"
    except OSError as error:
        reason = str(error)
    else:
        return
    raise OffbeatError(f"cannot install {requirement}: {reason}; leave out what needs it")
