"""On a line of 1 Gbit/s between two network namespaces, an urgent message overtakes a big one in flight.

The only assertion is about order: how much of the big message is missing when the urgent one is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

DEADLINE_S = 60.0
MIB = 1024 * 1024

RECEIVER = """
import json, sys, threading
from offbeat.runtime.transport.endpoint import Endpoint

BIG, URGENT = int(sys.argv[2]), int(sys.argv[3])
big, urgent = bytearray(BIG), bytearray(URGENT)
received = {1: 0, 2: 0}
answer = {}
complete = threading.Event()

def on_data(tag, offset, length):
    first = not received[tag]
    received[tag] += length
    if tag == 1 and first:
        links.send("sender", b"the big one is in flight")
    if tag == 2 and received[2] == URGENT:
        answer["big_missing_bytes"] = BIG - received[1]
    if received == {1: BIG, 2: URGENT}:
        complete.set()

links = Endpoint("receiver", job="job", token="secret", on_message=lambda *_: None, on_lost=print,
                 host=sys.argv[1])
links.post_receive("sender", 1, memoryview(big), lambda *piece: on_data(1, *piece))
links.post_receive("sender", 2, memoryview(urgent), lambda *piece: on_data(2, *piece))
print(json.dumps(links.addresses), flush=True)
assert complete.wait(50)
answer["exact"] = big == b"b" * BIG and urgent == b"u" * URGENT
print(json.dumps(answer), flush=True)
links.close()
"""

SENDER = """
import json, sys, threading
from offbeat.runtime.transport.endpoint import Endpoint

BIG, URGENT = int(sys.argv[2]), int(sys.argv[3])
urgent = memoryview(b"u" * URGENT)
left = threading.Event()

def on_message(peer, message):
    links.send_tensor("receiver", 2, urgent, priority=0)

links = Endpoint("sender", job="job", token="secret", on_message=on_message, on_lost=print,
                 on_left=lambda peer: left.set(), host=sys.argv[1])
links.add_peer("receiver", json.loads(sys.argv[4]))
links.send_tensor("receiver", 1, memoryview(b"b" * BIG), priority=1)
assert left.wait(50)
links.close()
"""


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=DEADLINE_S)


@pytest.fixture
def line() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces joined by a line of 1 Gbit/s: their names and addresses."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces and traffic shaping need root, ip and tc")
    number = os.getpid() % 250
    ends = [(f"offbeat-{os.getpid()}-{side}", f"10.77.{number}.{side}") for side in (1, 2)]
    devices = [f"ob{os.getpid()}.{side}" for side in (1, 2)]
    made: list[str] = []
    try:
        try:
            for name, _ in ends:
                run(f"ip netns add {name}")
                made.append(name)
            run(f"ip link add {devices[0]} netns {made[0]} type veth peer name {devices[1]} netns {made[1]}")
            for (name, address), device in zip(ends, devices, strict=True):
                run(f"ip -n {name} addr add {address}/24 dev {device}")
                run(f"ip -n {name} link set {device} up")
                run(f"tc -n {name} qdisc add dev {device} root tbf rate 1gbit burst 128kb latency 20ms")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made or shaped here: {error.stderr.decode().strip()}")
        yield ends
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=DEADLINE_S)


def test_an_urgent_message_overtakes_a_big_one_on_a_shaped_line(line: list[tuple[str, str]]) -> None:
    big, urgent = 64 * MIB, MIB
    (near, near_address), (far, far_address) = line
    python = ["ip", "netns", "exec"]
    sizes = [str(big), str(urgent)]
    with subprocess.Popen(
        [*python, far, sys.executable, "-c", RECEIVER, far_address, *sizes], stdout=subprocess.PIPE, text=True
    ) as receiver:
        try:
            assert receiver.stdout is not None
            addresses = receiver.stdout.readline()
            assert len(json.loads(addresses)) == 2  # for the sender, the Unix socket belongs to another host
            subprocess.run(
                [*python, near, sys.executable, "-c", SENDER, near_address, *sizes, addresses],
                check=True,
                timeout=DEADLINE_S,
            )
            answer = json.loads(receiver.stdout.readline())
        finally:
            receiver.kill()
    print(f"{answer['big_missing_bytes'] / MIB:.1f} MiB of {big // MIB} were missing")
    assert answer["exact"]
    assert answer["big_missing_bytes"] > big // 2
