"""Rate of plain sockets to a process that adds: a lower bound for a parameter server on the same machine."""

from __future__ import annotations

import socket
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.children import Child, Lines, request_all

_HOST = "127.0.0.1"
_PIECE_BYTES = 4_000_000  # of which at most the receiver adds at once
_LIMIT_S = 60.0
REPETITIONS = 5


def sockets_per_s(size_bytes: int, in_flight: int, seconds: float) -> float:
    """Return how many messages of float32 one connection carries per second to a process that adds them.

    Both sides know the sizes. Only the data are sent, and one byte in reply to each message.

    Args:
        size_bytes: of a message.
        in_flight: messages without a reply.
        seconds: minimum measuring time.
    """
    with Child("benchmarks.adding", name="the process that adds") as child:
        (port,) = request_all([child], size_bytes)
        with socket.create_connection((_HOST, port), timeout=_LIMIT_S) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            message = np.ones(size_bytes // 4, np.float32).data.cast("B")
            _carry(line, message, in_flight, 2 * in_flight)
            count = in_flight
            rates: list[float] = []
            while len(rates) < REPETITIONS:
                began_s = perf_counter()
                _carry(line, message, in_flight, count)
                took_s = perf_counter() - began_s
                if took_s * REPETITIONS < seconds and not rates:
                    count *= 2
                else:
                    rates.append(count / took_s)
            return median(rates)


def _carry(line: socket.socket, message: memoryview, in_flight: int, count: int) -> None:
    sent = answered = 0
    while answered < count:
        while sent < count and sent - answered < in_flight:
            line.sendall(message)
            sent += 1
        answered += len(line.recv(4096))


def main() -> None:
    """Receive float32 numbers and add them to an array."""
    lines = Lines.to_parent()
    size_bytes = lines.receive()
    listener = socket.create_server((_HOST, 0))
    lines.send(listener.getsockname()[1])
    line = listener.accept()[0]
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    total = np.zeros(size_bytes // 4, np.float32)
    came = np.empty(min(size_bytes, _PIECE_BYTES) // 4, np.float32)
    memory, numbers = came.data.cast("B"), len(came)
    begin = 0
    while True:
        rest = memory[: 4 * min(numbers, len(total) - begin)]
        got = 0
        while got < len(rest):
            received = line.recv_into(rest[got:])
            if not received:
                return
            got += received
        total[begin : begin + got // 4] += came[: got // 4]
        begin += got // 4
        if begin == len(total):
            begin = 0
            line.sendall(b"\0")


if __name__ == "__main__":
    main()
