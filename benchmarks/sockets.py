"""Throughput of plain sockets over a line: a lower bound for an exchange that moves the same bytes."""

from __future__ import annotations

import socket
import threading
from types import TracebackType

_PIECE_BYTES = 1 << 20


class SocketRing:
    """One worker's position in a ring of plain TCP connections; a context manager that closes them.

    Every worker sends to the next one and receives from the previous one. The data are ready from the start,
    and received data are discarded. An exchange that moves as many bytes over one connection each way has at
    least this much work.

    Args:
        listener: where the previous worker connects; closed here.
        next_address: host and port of the next worker's listener.
        limit_s: timeout of the connections and of every transfer, in seconds.

    Raises:
        OSError: a neighbour did not connect in time.
    """

    def __init__(self, listener: socket.socket, next_address: tuple[str, int], *, limit_s: float) -> None:
        with listener:
            listener.settimeout(limit_s)
            self._next = socket.create_connection(next_address, timeout=limit_s)
            self._before = listener.accept()[0]
        self._before.settimeout(limit_s)
        for connection in (self._next, self._before):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent, self._received = memoryview(bytes(_PIECE_BYTES)), memoryview(bytearray(_PIECE_BYTES))

    def move(self, nbytes: int) -> None:
        """Send and receive `nbytes` at the same time.

        Raises:
            OSError: a neighbour has closed its connection or did not transfer its bytes in time.
        """
        sender = threading.Thread(target=self._send, args=(nbytes,))
        sender.start()
        try:
            while nbytes:
                received = self._before.recv_into(self._received[: min(nbytes, _PIECE_BYTES)])
                if not received:
                    raise ConnectionResetError("the previous worker closed its connection")
                nbytes -= received
        finally:
            sender.join()

    def _send(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= self._next.send(self._sent[: min(nbytes, _PIECE_BYTES)])

    def close(self) -> None:
        """Close both connections."""
        self._next.close()
        self._before.close()

    def __enter__(self) -> SocketRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
