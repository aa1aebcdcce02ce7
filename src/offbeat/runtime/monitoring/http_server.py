"""Answers GET requests over HTTP, from texts that are made when they are asked for.

A connection is for one request and its answer. It is closed when it takes longer than `REQUEST_S`, and
refused where `CONNECTIONS_MAX` are open, so that a client can neither hold a thread for long nor start many.

This module never changes what it answers from, and reads nothing of a request but its path.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final, NamedTuple

from offbeat.runtime.processes.threads import start_thread

CONNECTIONS_MAX: Final = 8  # Prometheus needs one, and a person with a browser another
REQUEST_S: Final = 5.0
_CHECK_S: Final = 0.5  # how often deadlines are checked


class Page(NamedTuple):
    """What is answered at a path.

    Attributes:
        content_type: as in the header of the answer.
        make: returns the text; called in a thread of its connection.
    """

    content_type: str
    make: Callable[[], str]


class HttpServer(HTTPServer):
    """Serves pages at a socket that listens already, in threads of its own, until the process ends.

    Args:
        listener: the socket.
        pages: by path.
    """

    def __init__(self, listener: socket.socket, pages: Mapping[str, Page]) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.pages = pages
        self._deadlines: dict[socket.socket, float] = {}  # of open connections

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; after a failure, such as too many open files, not again at once."""
        try:
            return self.socket.accept()
        except OSError:
            time.sleep(_CHECK_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or refuse where too many connections are open."""
        if len(self._deadlines) >= CONNECTIONS_MAX:
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + REQUEST_S

        def answer() -> None:
            try:
                self.finish_request(request, client_address)
            finally:
                del self._deadlines[request]
                self.shutdown_request(request)

        start_thread("offbeat-http", answer, on_failure=lambda error: None)  # the client sees the end

    def service_actions(self) -> None:
        """End connections whose time is over; called at least every `_CHECK_S`."""
        now_s = time.monotonic()
        for request, until_s in list(self._deadlines.items()):
            if now_s > until_s:
                with suppress(OSError):  # it has just been closed
                    request.shutdown(socket.SHUT_RDWR)

    def start(self, on_failure: Callable[[BaseException], object]) -> None:
        """Start serving; `on_failure` gets what ends it."""
        start_thread("offbeat-http", lambda: self.serve_forever(_CHECK_S), on_failure)


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    server_version = "offbeat"

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(404, f"expected one of {', '.join(self.server.pages)}")
            return
        try:
            body = page.make().encode("utf-8", "backslashreplace")
        except Exception as error:
            self.send_error(500, f"{type(error).__name__}: {error}")
            return
        self.send_response(200)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape every few seconds is no news."""
