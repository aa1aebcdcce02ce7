"""Promises of the certificates that are made for one job."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.processes.job_certificates import job_certificates
from offbeat.runtime.transport.tls import load_credentials


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files."""
    usual, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    yield tmp_path
    tempfile.tempdir = usual


def test_the_files_fit_and_only_their_owner_can_read_them_and_they_are_gone_at_the_end(folder: Path) -> None:
    with job_certificates() as (ca, certificate, key):
        load_credentials(ca, certificate, key)
        (made,) = folder.iterdir()
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert {path.parent for path in map(Path, (ca, certificate, key))} == {made}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in made.iterdir())
    assert not list(folder.iterdir())


def test_the_key_of_the_authority_is_gone_at_once(folder: Path) -> None:
    with job_certificates() as (_, _, key):
        keys = [path for path in Path(key).parent.iterdir() if "PRIVATE KEY" in path.read_text()]
        assert keys == [Path(key)]


def test_two_jobs_have_different_certificates(folder: Path) -> None:
    with job_certificates() as one, job_certificates() as other:
        assert load_credentials(*one).certificate_digest != load_credentials(*other).certificate_digest


def test_the_files_are_gone_after_an_error(folder: Path) -> None:
    with pytest.raises(KeyError), job_certificates():
        raise KeyError
    assert not list(folder.iterdir())


def test_without_openssl_it_is_refused_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(OffbeatError, match="without the program openssl: install it"), job_certificates():
        pass


def test_a_failure_of_openssl_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = folder / "bin"
    programs.mkdir()
    (programs / "openssl").write_text("#!/bin/sh\necho no entropy >&2\nexit 1\n")
    (programs / "openssl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:/bin")
    with pytest.raises(OffbeatError, match="failed: no entropy"), job_certificates():
        pass
    assert list(folder.iterdir()) == [programs]
