"""Addresses at which nodes listen: `unix:///name?host=…`, `tcp://host:port`, and `file:///path`.

A Unix socket here has a name in the kernel's abstract namespace (Linux) and no file: it is gone with its
process, however that ends, can be reached from its network namespace only, and needs no folder. A file's
permissions would keep other users from connecting; but the handshake does that, as it does for TCP.

A file holds the HOST:PORT at which a node listens now. It is read at every connection: a node that is started
again on another host is found there. It is for folders that all hosts share.

This module never sends or receives a byte and never blocks, except to look up the name of a host or to read a
file in `resolve`, `listen`, `listen_tcp` and `own_address`.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from offbeat.errors import OffbeatError, describe_os_error
from offbeat.runtime.transport.descriptors import is_out_of_descriptors

BACKLOG = 512
HAS_ABSTRACT_SOCKETS = sys.platform == "linux"  # elsewhere sockets have no abstract names

PROBE_ADDRESS = "192.0.2.1"  # reserved for documentation (RFC 5737): not in use, and nothing is sent to it

SocketAddress = str | tuple[str, int]


@dataclass(frozen=True)
class Address:
    """One way to reach a node: the Unix socket `socket_name` of a host, or TCP to `host` and `port`.

    With a `path`, TCP to the host and port that the file there holds at that time.
    """

    text: str
    socket_name: str = ""
    host_id: str = ""
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def needs_lookup(self) -> bool:
        """Whether `resolve` blocks: it looks up a host's name or reads a file."""
        if self.path:
            return True
        if self.socket_name:
            return False
        try:
            ip_address(self.host.partition("%")[0])
        except ValueError:
            return True
        return False

    def unusable_reason(self) -> str | None:
        """Return why this host cannot connect to this address; None if it can."""
        return (
            "a Unix socket of another host" if self.socket_name and self.host_id != this_host_id() else None
        )

    def resolve(self) -> tuple[socket.AddressFamily, SocketAddress]:
        """Return the address family and the socket address to connect to.

        Raises:
            OSError: the host's name is unknown, or the file cannot be read or holds no HOST:PORT.
        """
        if self.socket_name:
            return socket.AF_UNIX, f"\0{self.socket_name}"
        host, port = read_host_and_port(self.path) if self.path else (self.host, self.port)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        return family, where  # type: ignore[return-value]


def parse_address(text: str) -> Address:
    """Parse an address.

    Raises:
        ValueError: it is none of `unix:///name?host=…`, `tcp://host:port` and `file:///path`.
    """
    try:
        url = urlsplit(text)
        if url.scheme == "tcp" and url.hostname and url.port:
            return Address(text, host=url.hostname, port=url.port)
        if url.scheme == "file" and url.path.startswith("/") and not url.netloc:
            return Address(text, path=unquote(url.path))
        if url.scheme == "unix" and url.path[1:] and url.query.startswith("host="):
            place = unquote(url.query.removeprefix("host="))
            return Address(text, socket_name=unquote(url.path[1:]), host_id=place)
    except ValueError:
        pass
    raise ValueError(
        f"expected an address as tcp://host:port, unix:///name?host=… or file:///path, got {text!r}"
    )


def split_host_and_port(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT.

    Raises:
        ValueError: it is neither, or the port is above 65535.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return host, int(port)


def read_host_and_port(path: str) -> tuple[str, int]:
    """Return the host and the port that a file holds as HOST:PORT.

    Raises:
        OSError: it cannot be read, or holds something else.
    """
    text = Path(path).read_text(errors="replace").strip()
    try:
        return split_host_and_port(text)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"{error} in {path}") from error


def write_host_and_port(path: Path, host: str, port: int) -> None:
    """Write HOST:PORT to a file; a reader finds all of the old text or all of the new one.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    part.write_text(f"{_shown(host)}:{port}\n")
    part.replace(path)


@cache
def this_host_id() -> str:
    """Return an id of this host, boot and network namespace.

    Raises:
        OSError: this process can open no more files.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}.{os.stat('/proc/self/ns/net').st_ino}"
    except OSError as error:
        if is_out_of_descriptors(error):
            raise  # the fallback would be the id of another host
        return f"{socket.gethostname()}.{uuid.getnode():x}"


def listen(host: str | None, port: int = 0, *, unix: bool = True) -> list[tuple[socket.socket, str]]:
    """Listen with TCP and on a Unix socket; return the sockets and their addresses, best first.

    Args:
        host: the address to listen on with TCP, and to advertise; None for no TCP.
        port: to listen on; 0 for any free one.
        unix: also listen on a Unix socket, where abstract names exist (Linux).

    Raises:
        ValueError: `host` is a wildcard address, to which no peer can connect.
        OSError: an address cannot be bound.
    """
    found: list[tuple[socket.socket, str]] = []
    try:
        if host is not None:
            found.append(listen_tcp(host, port))
        if unix and HAS_ABSTRACT_SOCKETS:
            found.insert(0, listen_unix())
    except BaseException:
        for sock, _ in found:
            sock.close()
        raise
    return found


def listen_tcp(host: str, port: int) -> tuple[socket.socket, str]:
    """Listen on `host`, the address that peers connect to; return the socket and its `tcp://` address.

    Port 0 means any free one.

    Raises:
        ValueError: `host` is a wildcard address, to which no peer can connect.
        OSError: the address cannot be bound.
    """
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"expected the address at which other nodes reach this one, got {host!r}")
    return listen_at(host, port)


def listen_at(host: str, port: int) -> tuple[socket.socket, str]:
    """Listen with TCP on a host's address, or on all addresses; return the socket and its `tcp://` address.

    Raises:
        OSError: the address cannot be bound.
    """
    family, where = Address("", host=host, port=port).resolve()
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock, f"tcp://{_shown(host)}:{sock.getsockname()[1]}"


def listen_unix() -> tuple[socket.socket, str]:
    """Listen on a Unix socket of a new name; return the socket and its address."""
    name, host = f"offbeat-{secrets.token_hex(8)}", this_host_id()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0{name}")
    sock.listen(BACKLOG)
    return sock, f"unix:///{name}?host={quote(host)}"


def own_address(master_addr: str) -> str:
    """Return the address at which other hosts reach this one.

    It is the address of the interface with the route to the master (MASTER_ADDR, or the manager). On the
    master itself, many systems' /etc/hosts map its own name to 127.0.1.1, which other hosts cannot reach:
    then, that of the default route.
    """
    try:
        address = _source_address(master_addr)
    except OSError as error:
        raise OffbeatError(
            f"cannot find a route to {master_addr!r} (MASTER_ADDR, or the manager): "
            f"{describe_os_error(error)}"
        ) from error
    if ip_address(address).is_loopback and master_addr != "localhost" and not _is_address(master_addr):
        with suppress(OSError):
            return _source_address(PROBE_ADDRESS)
    return address


def _source_address(target: str) -> str:
    """Return the source address of packets to `target`; connecting a UDP socket sends nothing."""
    family, _, _, _, where = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        ip_address(text)
        return True
    return False
