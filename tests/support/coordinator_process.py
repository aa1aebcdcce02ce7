"""A coordinator in a process of its own, and peers that exchange messages with it."""

import json
import queue
import subprocess
import sys
from contextlib import contextmanager

import msgspec

from offbeat.errors import LinkError
from offbeat.events import (
    AbortJob,
    Joined,
    Left,
    PeerList,
    Ready,
    RejectPeer,
)
from offbeat.policies.membership.group_protocol import GroupProtocol
from offbeat.runtime.control.client import CoordinatorClient
from offbeat.runtime.control.configuration import COORDINATOR, CoordinatorConfiguration, PolicySpec
from offbeat.runtime.control.rendezvous import RendezvousInfo
from offbeat.runtime.transport.endpoint import Endpoint
from offbeat.wire.codec import decode_actions, encode_events

DEADLINE_S = 20.0


def open_client(addresses, worker, on_failure, *, world, start_s=0.0):
    """A worker's client of the coordinator at some addresses, outside a session."""
    info = RendezvousInfo(
        job="job",
        token="secret",
        host="127.0.0.1",
        coordinator=tuple(addresses),
        store=None,
        hosts_store=False,
        worker=worker,
        world=world,
        start_s=start_s,
        deadline_s=start_s,
    )
    return CoordinatorClient(info, worker, GroupProtocol(worker), on_failure, steps_finished=lambda: 0)


class Process:
    """A coordinator in a process of its own."""

    def __init__(self, world, log, *, prelude="", policy="membership.lockstep:Lockstep", **options):
        names = ["membership.assembly:Assembly", policy]
        arguments = {"world": world}
        policies = tuple(PolicySpec(path=f"offbeat.policies.{n}", arguments=arguments) for n in names)
        configuration = CoordinatorConfiguration(
            job="job",
            token="secret",
            host="127.0.0.1",
            policies=policies,
            log_path=None if log is None else str(log),
            **options,
        )
        code = (
            f"{prelude}\nimport sys\nfrom offbeat.runtime.control.coordinator import main\nsys.exit(main())"
        )
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.process.stdin.write(msgspec.json.encode(configuration) + b"\n")
        self.process.stdin.close()
        self.answer = json.loads(self.process.stdout.readline())

    @property
    def addresses(self):
        return self.answer["addresses"]

    def ended(self):
        """Waits for its end; returns the exit code and what it wrote to standard error."""
        code = self.process.wait(DEADLINE_S)
        return code, self.process.stderr.read().decode()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


@contextmanager
def coordinator(world, log=None, **options):
    process = Process(world, log, **options)
    try:
        yield process
    finally:
        process.close()


class Peer:
    """Somebody who knows the job's token."""

    def __init__(self, name, process, *, worker=None, token="secret", job="job", line=None, listens=True):
        self.name = name
        self.inbox = queue.SimpleQueue()
        self.worker = worker
        self.links = Endpoint(
            name,
            job=job,
            token=token,
            on_message=lambda _, payload: [self.inbox.put(action) for action in decode_actions(payload)],
            on_lost=self.inbox.put,
            on_left=lambda peer: self.inbox.put(f"{peer} left"),
            on_error=self.inbox.put,
            listeners=None if listens else [],
        )
        self.links.add_peer(COORDINATOR, [line.address] if line else process.addresses)

    def send(self, *events):
        self.links.send(COORDINATOR, encode_events(events))

    def send_bytes(self, data):
        self.links.send(COORDINATOR, data)

    def receive(self):
        return self.inbox.get(timeout=DEADLINE_S)

    def receive_until(self, kind):
        while not isinstance(received := self.receive(), kind):
            pass
        return received

    def join(self, world, worker=None):
        self.send(joined(self, world, self.worker if worker is None else worker))
        return self

    def leave(self, step=0):
        self.send(Left(now_s=0.0, worker=self.worker, step=step))
        self.links.flush(DEADLINE_S)
        self.links.close()


def joined(peer, world, worker):
    return Joined(
        now_s=0.0,
        worker=worker,
        world=world,
        peer=peer.name,
        location="here",
        addresses=peer.links.addresses,
        model_signature=("weight",),
        strategy="bsp",
    )


def ready(worker, round_=0):
    return Ready(
        now_s=0.0,
        worker=worker,
        generation=0,
        epoch=0,
        step=round_,
        round=round_,
        compute_s=0.1,
        samples=1,
        blocks=(),
    )


@contextmanager
def running_job(world, log=None, **options):
    """A coordinator and its workers, all joined."""
    with coordinator(world, log, **options) as process:
        peers = [Peer(f"w{worker}", process, worker=worker).join(world) for worker in range(world)]
        try:
            for peer in peers:
                peer.receive_until(PeerList)
            yield process, peers
        finally:
            for peer in peers:
                peer.links.close()


def goes_on(peers, process):
    """The job is as it was: no worker was told to stop, and all leave in order."""
    for peer in peers:
        peer.send(ready(peer.worker))
    for peer in peers:
        peer.leave(1)
    code, errors = process.ended()
    assert (code, errors) == (0, "")
    for peer in peers:
        while not peer.inbox.empty():
            assert not isinstance(peer.inbox.get(), AbortJob | RejectPeer | LinkError)
