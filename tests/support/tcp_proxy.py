"""A line between two nodes that a test can break: a proxy for the TCP connections that go through it."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is under way is lost, and both ends are reset


def random_resets(chance: random.Random, sizes: list[int], count: int = 30) -> Callable[[], int | None]:
    """For `reset_after`: the next `count` connections are reset after about one of these sizes, in bytes."""
    left = count

    def reset_after() -> int | None:
        nonlocal left
        left -= 1
        return chance.choice(sizes) + chance.randrange(1000) if left >= 0 else None

    return reset_after


class Line:
    """Carries what is sent to `address` on to `to`, until it is told otherwise.

    Args:
        to: host and port.
        reset_after: how many bytes the next connection carries before it is reset; None for any number.
        keeps: whether to keep what is carried.

    Attributes:
        carried: what was carried both ways, if that is kept.
    """

    def __init__(
        self,
        to: tuple[str, int],
        reset_after: Callable[[], int | None] = lambda: None,
        *,
        keeps: bool = False,
    ) -> None:
        self._to, self._reset_after, self._keeps = to, reset_after, keeps
        self.carried = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._cut: set[socket.socket] = set()  # nothing is carried from these
        self._is_cut = self._is_over = False
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Reset every connection; what is under way is lost."""
        with self._lock:
            for pair in self._pairs:
                self._end(pair)
            self._pairs.clear()

    def cut(self, *, new_ones_too: bool) -> None:
        """Carry nothing more on the connections that there are, without closing them; nor on new ones."""
        with self._lock:
            self._is_cut = new_ones_too
            for pair in self._pairs:
                self._cut.update(pair)

    def mend(self) -> None:
        """Carry new connections again; those that were cut stay so."""
        self._is_cut = False

    def close(self) -> None:
        """Refuse connections from now on, and reset those that there are."""
        self._is_over = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            if self._is_cut:
                with self._lock:
                    self._pairs.append((near, near))  # never answered
                continue
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
                self.connections += 1
            threading.Thread(target=self._carry, args=(near, far, self._reset_after()), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket, left: int | None) -> None:
        other = {near: far, far: near}
        try:
            while True:
                for sock in _wait_for_readable(near, far):
                    data = sock.recv(65536 if left is None else max(1, min(65536, left)))
                    if sock in self._cut:
                        continue
                    if not data:
                        return
                    if self._keeps:
                        self.carried += data
                    other[sock].sendall(data)
                    if left is not None:
                        left -= len(data)
                        if left <= 0:
                            return
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._end((near, far))

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        for sock in pair:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()


def _wait_for_readable(*socks: socket.socket) -> list[socket.socket]:
    """Wait until any of these has something to read, or its end; return those.

    Raises:
        ValueError: one is closed.
    """
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    return [sock for sock in socks if sock.fileno() in ready]
