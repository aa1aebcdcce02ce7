"""The errors that offbeat raises of its own; every text says what was expected, what came and what to do."""

from __future__ import annotations

import errno
import resource
from typing import Literal, TypeAlias

# A session that was open broke, or the peer broke the protocol, or another session with it begins at this
# moment; or dialling failed: the peer's process has ended, nothing answers, or another process does, or one
# that does not want this node; or the peer can open no more files, or this node cannot.
LinkFailure: TypeAlias = Literal[
    "broken", "protocol", "replaced", "ended", "unreachable", "refused", "peer has no files", "no files"
]


def explain(error: OSError) -> str:
    """Return what the operating system says, and what to do about it where that is known."""
    match error.errno:
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"too many open files: raise `ulimit -n`, which is {limit}"
        case errno.ENFILE:
            return "too many open files on this machine: raise the kernel's fs.file-max"
        case _:
            return str(error)


class OffbeatError(Exception):
    """The base of offbeat's own errors."""


class ProtocolError(OffbeatError):
    """Something arrived that the protocol does not allow."""


class LinkError(OffbeatError):
    """A link to a peer could not be opened or broke.

    Attributes:
        peer: the link name of the peer, or the address dialled where the name is not known yet.
        failure: what has become of the link.
    """

    def __init__(self, peer: str, message: str, *, failure: LinkFailure = "broken") -> None:
        super().__init__(message)
        self.peer = peer
        self.failure = failure

    @property
    def was_open(self) -> bool:
        """Whether there was a session, and another one may follow; else dialling the peer has failed."""
        return self.failure in ("broken", "protocol", "replaced")


class WorkerError(OffbeatError):
    """The job ends because of a worker.

    Attributes:
        worker: the id of the worker that caused it, None where no single worker did.
        step: the step that worker was in, None before the first.
    """

    def __init__(self, message: str, *, worker: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.step = step


class LostKeysError(OffbeatError):
    """All servers that had the values of some keys of the parameter server are gone.

    Attributes:
        namespace: of these keys.
        ranges: the first of them and the one behind the last of each; where there are many, not all.
        servers: the last ones that had them.
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
    """A data set is missing, damaged or could not be fetched; the text says what, where and what to do."""
