"""The server of the metrics answers, refuses, and is held by no client."""

import http.client
import queue
import socket
from contextlib import contextmanager

import pytest

from offbeat.runtime.monitoring.http_server import CONNECTIONS_MAX, HttpServer, Page
from offbeat.runtime.processes.waiting import wait_until_readable
from offbeat.runtime.transport.addresses import listen_at

DEADLINE_S = 20.0


def fail():
    raise ValueError("no number")


@contextmanager
def serving():
    """A server; yields its port."""
    listener, _ = listen_at("127.0.0.1", 0)
    errors = queue.SimpleQueue()
    pages = {"/text": Page("text/plain", lambda: "héllo \ud800"), "/bad": Page("text/plain", fail)}
    server = HttpServer(listener, pages)
    server.start(errors.put)
    try:
        yield listener.getsockname()[1]
    finally:
        server.shutdown()
        server.server_close()
        assert errors.empty()


def ask(port, path, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.reason, answer.read()
    finally:
        connection.close()


def is_closed(connection):
    """Waits for the end of a connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_page_is_made_for_each_request_and_what_utf_8_lacks_is_escaped():
    with serving() as port:
        assert ask(port, "/text?format=x") == (200, "OK", "héllo \\ud800".encode())


@pytest.mark.parametrize(
    ("path", "method", "status", "words"),
    [
        ("/", "GET", 404, "expected one of /text, /bad"),
        ("/bad", "GET", 500, "ValueError: no number"),
        ("/text", "POST", 501, "Unsupported method ('POST')"),
    ],
)
def test_a_request_without_an_answer_is_told_why(path, method, status, words):
    with serving() as port:
        assert ask(port, path, method)[:2] == (status, words)


def test_silent_clients_are_refused_beyond_a_number_and_lose_their_connections():
    with serving() as port:
        silent = [socket.create_connection(("127.0.0.1", port), DEADLINE_S) for _ in range(CONNECTIONS_MAX)]
        one_more = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        assert is_closed(one_more)
        assert not any(wait_until_readable(connection.fileno(), 0.0) for connection in silent)
        silent[0].send(b"GET /te")  # half a request does not count
        assert all(map(is_closed, silent))
        assert ask(port, "/text")[0] == 200
        for connection in (*silent, one_more):
            connection.close()
