"""Addresses in a file: read at every attempt to connect."""

import queue
import socket

import pytest

from offbeat.runtime.transport.addresses import parse_address, write_host_and_port
from offbeat.runtime.transport.endpoint import Endpoint

DEADLINE_S = 60.0


def endpoint(name, received):
    def on_message(peer, payload):
        received.put(payload)

    return Endpoint(
        name, job="job", token="token", on_message=on_message, on_lost=received.put, connect_s=DEADLINE_S
    )


def test_a_node_is_found_where_the_file_says_at_last(tmp_path):
    place, received = tmp_path / "address", queue.SimpleQueue()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        write_host_and_port(place, "127.0.0.1", nobody.getsockname()[1])
        dialler = endpoint("dialler", received)
        dialler.add_peer("node", [place.as_uri()])
        dialler.send("node", b"found")
        with pytest.raises(queue.Empty):
            received.get(timeout=0.5)
        node = endpoint("node", received)
        try:
            (tcp,) = [parse_address(one) for one in node.addresses if one.startswith("tcp:")]
            write_host_and_port(place, tcp.host, tcp.port)
            assert received.get(timeout=DEADLINE_S) == b"found"
        finally:
            dialler.close()
            node.close()


def test_a_file_without_a_host_and_a_port_is_an_error_that_names_it(tmp_path):
    place = tmp_path / "an address"
    address = parse_address(place.as_uri())
    with pytest.raises(FileNotFoundError):
        address.resolve()
    place.write_text("somewhere\n")
    with pytest.raises(OSError, match=f"expected HOST:PORT, got 'somewhere' in {place}"):
        address.resolve()
    write_host_and_port(place, "::1", 80)
    assert place.read_text() == "[::1]:80\n"
    assert address.resolve()[1][:2] == ("::1", 80)
