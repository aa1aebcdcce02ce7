"""The errors that offbeat raises; each message states what was expected, what came and what to do."""

from __future__ import annotations

import errno
import resource
from typing import Literal, TypeAlias

# An open session broke ("broken"), the peer violated the protocol ("protocol"), or a new session with the
# peer takes its place ("replaced"). Or connecting failed: the peer's process has ended ("ended"); nothing
# answers ("unreachable"); another process answers, or one that rejects this node ("refused"); the peer can
# open no more files ("peer has no files"), or this node cannot ("no files").
LinkFailure: TypeAlias = Literal[
    "broken", "protocol", "replaced", "ended", "unreachable", "refused", "peer has no files", "no files"
]


def describe_os_error(error: OSError) -> str:
    """Return the operating system's message, and the remedy where one is known."""
    match error.errno:
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"too many open files: raise `ulimit -n`, which is {limit}"
        case errno.ENFILE:
            return "too many open files on this machine: raise the kernel's fs.file-max"
        case _:
            return str(error)


class OffbeatError(Exception):
    """The base class of offbeat's own errors."""


class ProtocolError(OffbeatError):
    """A message arrived that the protocol does not allow."""


class LinkError(OffbeatError):
    """A link to a peer could not be opened, or it broke.

    Attributes:
        peer: the link name of the peer, or the address that was tried where the name is not known yet.
        failure: the kind of failure.
    """

    def __init__(self, peer: str, message: str, *, failure: LinkFailure = "broken") -> None:
        super().__init__(message)
        self.peer = peer
        self.failure = failure

    @property
    def was_open(self) -> bool:
        """Whether a session was open, and another one may follow; otherwise connecting to the peer failed."""
        return self.failure in ("broken", "protocol", "replaced")


class WorkerError(OffbeatError):
    """The job ends because of a worker.

    Attributes:
        worker: the id of the worker that caused it, None where no single worker did.
        step: the step that the worker was in, None before the first.
    """

    def __init__(self, message: str, *, worker: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.step = step


class LostKeysError(OffbeatError):
    """All servers that held the values of some keys of the parameter server are gone.

    Attributes:
        namespace: the namespace of these keys.
        ranges: the lost keys as (first, one past the last); not all of them where there are many.
        servers: the last servers that held them.
    """

    def __init__(
        self,
        message: str,
        *,
        namespace: str = "",
        ranges: tuple[tuple[int, int], ...] = (),
        servers: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.namespace, self.ranges, self.servers = namespace, ranges, servers


class DataError(OffbeatError):
    """A data set is missing, damaged or could not be fetched; the message names it and states a remedy."""
