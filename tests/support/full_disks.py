"""Disks that are full, and other places where no more can be written: real ones."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DISK_BYTES = 256 * 1024


def _can_mount() -> bool:
    """Whether a disk can be made here: whether this is root, and not in a container without its rights."""
    if os.geteuid() or not shutil.which("unshare"):
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]  # seen by nobody else
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


needs_disk = pytest.mark.skipif(not _can_mount(), reason="making a small disk on this machine needs root")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Makes the folder a disk of its own on which `DISK_BYTES` are free."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True, timeout=60
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)


def fill(disk: Path) -> None:
    """Writes until the disk is full; files on it may still grow to the end of their last page."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """In this process no file can grow beyond so many bytes (EFBIG); needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
