"""Certificates for one job on this host, from a certificate authority that is thrown away at once.

The program openssl makes them: Python's standard library cannot. The authority's key is deleted when it has
signed the job's certificate, so nobody can add to the job's certificates; all its processes use the same one.

This module leaves nothing behind, except where it is killed: then files that only their owner can read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import OffbeatError

DAYS = 365  # after which a job that still runs could open no connection any more
_LIMIT_S = 30.0
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@contextmanager
def job_certificates() -> Iterator[tuple[str, str, str]]:
    """Make certificates for one job; yield the paths of the authority's, the job's, and of its key.

    The files are in a folder that only its owner can read, and that is removed at the end.

    Raises:
        OffbeatError: there is no program openssl, or it failed.
    """
    if shutil.which("openssl") is None:
        raise OffbeatError(
            "cannot make certificates without the program openssl: install it, or make them elsewhere and "
            "set OFFBEAT_TLS_CA, OFFBEAT_TLS_CERT and OFFBEAT_TLS_KEY in place of --tls"
        )
    with tempfile.TemporaryDirectory(prefix="offbeat-tls-") as name:
        folder = Path(name)
        ca, ca_key, certificate, key, request = (
            str(folder / file) for file in ("ca.pem", "ca.key", "job.pem", "job.key", "job.csr")
        )
        days = ("-days", str(DAYS))
        _openssl("req", "-x509", *_NEW_KEY, *days, "-subj", "/CN=offbeat", "-keyout", ca_key, "-out", ca)
        _openssl("req", *_NEW_KEY, "-subj", "/CN=job", "-keyout", key, "-out", request)
        signer = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signer, *days, "-out", certificate)
        os.unlink(ca_key)
        yield ca, certificate, key


def _openssl(*arguments: str) -> None:
    command = ["openssl", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
            umask=0o077,
        )
    except subprocess.TimeoutExpired:
        raise OffbeatError(f"`{' '.join(command)}` did not end within {_LIMIT_S:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise OffbeatError(f"`{' '.join(command)}` failed: {lines[-1] if lines else done.returncode}")
