"""Promises of jobs with TLS: they train as without, and a process without a certificate does not take part.

A job's workers encrypt what leaves their host; so here each has a host of its own, a network namespace, which
needs root. A coordinator that belongs to no worker is reached over TCP from its own host, too.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import Host, hosts, missing, reset
from offbeat.runtime.control.rendezvous import open_store
from offbeat.runtime.launch import find_free_port
from offbeat.runtime.transport.endpoint import _endpoints
from offbeat.runtime.transport.tls import TlsSocket
from offbeat.strategies import SSP, AllReduce, PartialAllReduce
from support.certificates import Authority, Issued
from support.coordinator_service import service
from support.group_training import agree, train
from support.network_faults import enter, listening, training
from support.processes import run, start, values

needs_hosts = pytest.mark.skipif(
    missing() is not None, reason=f"making hosts on this machine needs {missing()}"
)
STEADY = PartialAllReduce(limit=10**6)  # no worker is excluded for being slow


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Issued:
    return authority.issue("worker")


def train_on_host(rank: int, emit: Any, names: list[str], strategy: Any) -> tuple[Any, set[tuple[str, bool]]]:
    """Train on a host; return what `train` does, and the families of all connections and if they encrypt."""
    enter(names[rank])
    found: set[tuple[str, bool]] = set()

    def look(session: Any) -> None:
        if session.step >= 2:
            for endpoint in list(_endpoints):
                links = [peer.link for peer in list(endpoint._sessions.peers.values())]
                socks = [link.sock for link in links if link is not None and link.sock is not None]
                found.update((sock.family.name, isinstance(sock, TlsSocket)) for sock in socks)

    return train(rank, emit, strategy, epochs=2, before_step=look), found


def train_on_hosts(strategy: Any, env: dict[str, str]) -> tuple[list[Any], set[tuple[str, bool]]]:
    """Train three workers, each on a host of its own; return what each found, and all connections."""
    with hosts(3) as places:
        variables = {"MASTER_ADDR": places[0].address, "OFFBEAT_SERVERS": "3", **env}
        ended = run(train_on_host, 3, [place.name for place in places], strategy, env=variables)
    found = values(ended)
    return [result for result, _ in found], set().union(*(links for _, links in found))


@pytest.mark.long
@needs_hosts
def test_a_lockstep_job_with_tls_ends_with_the_same_bits_as_without(issued: Issued) -> None:
    plain, plain_links = train_on_hosts(AllReduce(), {})
    encrypted, links = train_on_hosts(AllReduce(), issued.env)
    assert plain_links == {("AF_INET", False), ("AF_UNIX", False)}  # rank 0 and the coordinator share a host
    assert links == {("AF_INET", True), ("AF_UNIX", False)}
    agree(plain + encrypted)


@pytest.mark.long
@needs_hosts
@pytest.mark.parametrize("strategy", [STEADY, SSP()], ids=lambda one: one.name)
def test_a_job_in_groups_and_one_on_servers_train_to_the_end_with_tls(issued: Issued, strategy: Any) -> None:
    results, links = train_on_hosts(strategy, issued.env)
    assert links == {("AF_INET", True), ("AF_UNIX", False)}
    if strategy is STEADY:
        agree(results)


@pytest.mark.long
@needs_hosts
def test_broken_connections_with_tls_are_opened_again_and_end_no_job_in_lockstep(
    tmp_path: Path, issued: Issued
) -> None:
    with training(AllReduce(), 3, tmp_path, env=issued.env) as job:
        reset(job.places[0], job.places[1])
        reset(job.places[1], job.places[2])
        job.all_train_together()


@pytest.mark.long
def test_a_job_whose_coordinator_is_apart_trains_to_the_end_with_tls(
    tmp_path: Path, issued: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in issued.env.items():
        monkeypatch.setenv(name, path)
    with service(tmp_path) as running:
        agree(values(run(train, 3, STEADY, 2, env={**running.env, **issued.env})))
        code, errors = running.ended()
    assert code == 0
    assert "refused" not in errors


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "here", "there"),
    [
        ("none", "this node uses TLS, and the other one does not", "it does not use TLS"),
        ("another authority's", "alert: unknown ca", "not accepted: unable to get local issuer certificate"),
        ("expired", "alert: certificate expired", "not accepted: certificate has expired"),
    ],
)
def test_a_worker_without_a_valid_certificate_is_refused_with_the_reason_on_both_sides(
    tmp_path: Path,
    authority: Authority,
    issued: Issued,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    here: str,
    there: str,
) -> None:
    certificates = {
        "none": dict,
        "another authority's": lambda: Authority(tmp_path, "another").issue("forged", trusts=authority).env,
        "expired": lambda: authority.issue("expired", days=-1).env,
    }
    for name, path in issued.env.items():
        monkeypatch.setenv(name, path)
    with service(tmp_path) as running:
        cleared = dict.fromkeys(issued.env, "")
        env = {**running.env, "OFFBEAT_START_S": "20", **cleared, **certificates[kind]()}
        for one in run(train, 2, STEADY, 2, env=env):
            assert one.error is not None
            assert f"the coordinator at tcp://{running.address}" in one.error
            assert here in one.error
        running.process.terminate()
        _, errors = running.ended()
    assert "refused a connection from 127.0.0.1:" in errors
    assert there in errors


def warned(rank: int, emit: Any, name: str | None = None, token: str | None = None) -> list[str]:
    """Train; return the warnings of the library about the token."""
    if name is not None:
        enter(name)
    if token is not None:
        os.environ["OFFBEAT_TOKEN_FILE"] = token
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    train(rank, emit, AllReduce(), epochs=1)
    return [line for line in records if "secret" in line]


@pytest.mark.long
@needs_hosts
def test_one_worker_warns_where_the_token_travels_through_a_store_that_others_can_reach(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text("a secret")
    with hosts(1) as (place,):
        env = {"MASTER_ADDR": place.address, "OFFBEAT_TOKEN_FILE": ""}
        (line,) = [line for lines in values(run(warned, 2, place.name, env=env)) for line in lines]
        assert f"the job's secret is in the store at {place.address}:" in line
        assert "OFFBEAT_COORDINATOR" in line
        assert "OFFBEAT_TOKEN_FILE" in line
        assert values(run(warned, 2, place.name, str(tmp_path / "token"), env=env)) == [[], []]
    assert values(run(warned, 2)) == [[], []]


@pytest.mark.long
def test_a_token_of_a_file_is_not_in_the_store(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a secret")
    port = find_free_port()
    store = open_store("127.0.0.1", port, is_host=True)
    where = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    agree(values(run(train, 2, STEADY, 1, env={**where, "OFFBEAT_TOKEN_FILE": str(tmp_path / "token")})))
    kept = {key: store.get(key) for key in ("offbeat/running", "offbeat/job//0/1/0/coordinator")}
    assert [json.loads(content)["token"] for content in kept.values()] == [None, None]


def train_with_own_file(rank: int, emit: Any, paths: list[str]) -> Any:
    os.environ["OFFBEAT_TOKEN_FILE"] = paths[rank]
    return train(rank, emit, STEADY, 1)


@pytest.mark.long
@pytest.mark.parametrize("owner", [0, 1])
def test_a_token_file_that_only_one_worker_has_is_an_error(tmp_path: Path, owner: int) -> None:
    (tmp_path / "token").write_text("a secret")
    paths = ["", ""]
    paths[owner] = str(tmp_path / "token")
    ended = run(train_with_own_file, 2, paths, env={"OFFBEAT_START_S": "10"})
    assert ended[1].error is not None
    assert "OFFBEAT_TOKEN_FILE is" in ended[1].error
    assert "for rank 0: set it for all workers" in ended[1].error
    assert ended[0].error is not None


@pytest.mark.long
@pytest.mark.parametrize("name", ["OFFBEAT_TLS_CA", "OFFBEAT_TLS_CERT", "OFFBEAT_TLS_KEY"])
def test_a_variable_that_is_not_set_is_named_by_every_worker(issued: Issued, name: str) -> None:
    for one in run(train, 2, STEADY, 2, env={**issued.env, name: ""}):
        assert one.error is not None
        assert f"{name} is not set: for TLS, set all of" in one.error


def wait_at_the_end(rank: int, emit: Any, name: str | None) -> None:
    if name is not None:
        enter(name)

    def say(session: Any) -> None:
        if session.step == 3:
            emit([address for endpoint in list(_endpoints) for address in endpoint.addresses])

    train(rank, emit, SSP(), epochs=2, before_step=say, compute_s=0.05)


def ports(addresses: list[str]) -> set[int]:
    return {int(text.rpartition(":")[2]) for text in addresses if text.startswith("tcp://")}


@pytest.mark.long
def test_a_job_on_the_loopback_address_listens_there_only() -> None:
    with start(wait_at_the_end, 2, None) as cluster:
        found = [port for rank in range(2) for port in ports(cluster.receive(rank, 60.0))]
        assert len(found) >= 4  # of a worker and its client of the servers, each
        for port in found:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)
        values(cluster.ends(60.0))


_TRY = """
import socket, sys
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        print("refused")
    else:
        print("accepted")
"""


@pytest.mark.long
@needs_hosts
def test_the_processes_of_a_job_listen_on_the_address_that_the_others_are_told_only() -> None:
    with hosts(2) as places:
        env = {"MASTER_ADDR": places[0].address}
        with _on_hosts(places, env) as cluster:
            told = [ports(cluster.receive(rank, 60.0)) for rank in range(2)]
            for place, numbers in zip(places, told, strict=True):
                open_ports = {int(address.rpartition(":")[2]) for address in listening(place)}
                assert numbers <= open_ports
                arguments = [
                    text
                    for port in sorted(open_ports)
                    for host in (place.address, "127.0.0.1")
                    for text in (host, str(port))
                ]
                done = subprocess.run(
                    [*place.prefix, sys.executable, "-c", _TRY, *arguments],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=True,
                )
                assert done.stdout.split() == ["accepted", "refused"] * len(open_ports)
            values(cluster.ends(60.0))


def _on_hosts(places: list[Host], env: dict[str, str]) -> Any:
    return start(_wait_on, 2, [place.name for place in places], env=env)


def _wait_on(rank: int, emit: Any, names: list[str]) -> None:
    wait_at_the_end(rank, emit, names[rank])
