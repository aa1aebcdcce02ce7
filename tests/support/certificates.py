"""Certificate authorities that tests make with the program openssl, and the certificates that they issue."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from offbeat.runtime.transport.tls import TlsCredentials, load_credentials

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Issued:
    """The files of a node: its certificate, its key, and the certificate of the authority that it trusts."""

    ca: str
    certificate: str
    key: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "OFFBEAT_TLS_CA": self.ca,
            "OFFBEAT_TLS_CERT": self.certificate,
            "OFFBEAT_TLS_KEY": self.key,
        }

    def load(self) -> TlsCredentials:
        return load_credentials(self.ca, self.certificate, self.key)


class Authority:
    """A certificate authority, whose files are in a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self.certificate, self._key = str(self._folder / "ca.pem"), str(self._folder / "ca.key")
        subject = ("-subj", f"/CN={name}")
        _openssl("req", "-x509", *_NEW_KEY, *subject, "-keyout", self._key, "-out", self.certificate)

    def issue(self, name: str, *, days: int = 2, trusts: Authority | None = None) -> Issued:
        """Issue a certificate, which has expired where `days` is negative."""
        key, request, certificate = (str(self._folder / f"{name}.{kind}") for kind in ("key", "csr", "pem"))
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        signer = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", str(days))
        _openssl("x509", "-req", "-in", request, *signer, "-out", certificate)
        return Issued((trusts or self).certificate, certificate, key)


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
