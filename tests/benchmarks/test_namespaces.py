"""Promises of `benchmarks.namespaces`, kept with real ones (which needs root, `ip` and `tc`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.namespaces import (
    Host,
    block,
    bytes_sent,
    cut,
    hosts,
    mend,
    missing,
    parse_rate,
    remove_stale,
    reset,
    split,
)
from offbeat.errors import OffbeatError
from offbeat.runtime.launch import launch
from offbeat.runtime.launching.outcomes import outcome_summary
from offbeat.runtime.processes.waiting import wait_until_readable

LIMIT_S = 60.0
needs_root = pytest.mark.skipif(
    missing() is not None, reason=f"making hosts on this machine needs {missing()}"
)
PAUSE_LOOP = "import signal\nwhile True: signal.pause()"


def out(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def names(pid: int) -> list[str]:
    """Return the namespaces that a process made and that still exist."""
    return [name for name in out("ip", "netns", "list").split() if name.startswith(f"offbeat-{pid}-")]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def maker(then: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Start a process that makes two hosts and then does something in their context."""
    code = (
        "from benchmarks.namespaces import hosts\n"
        "with hosts(2, rate_bit_per_s=10**9) as hs:\n"
        "    print('made', flush=True)\n"
        f"    {then}"
    )
    process = subprocess.Popen(python(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    made = names(process.pid)
    assert len(made) == 3
    return process, made


@needs_root
def test_every_host_reaches_every_other_at_its_own_address() -> None:
    code = (
        "import os, socket, sys\n"
        "rank, addresses = int(os.environ['RANK']), sys.argv[1:]\n"
        "with socket.create_server((addresses[rank], 7000)) as server:\n"
        "    out = []\n"
        "    for address in addresses:\n"
        "        while True:\n"
        "            try: out.append(socket.create_connection((address, 7000), timeout=5)); break\n"
        "            except ConnectionRefusedError: pass\n"
        "    callers = sorted(server.accept()[1][0] for _ in addresses)\n"
        "print(*callers)\n"
    )
    outputs: list[tuple[int, str]] = []
    with hosts(3) as hs:
        addresses = [h.address for h in hs]
        with launch(
            [*python(code), *addresses],
            3,
            prefix=[h.prefix for h in hs],
            on_output=lambda *x: outputs.append(x),
        ) as workers:
            assert outcome_summary(workers.wait(LIMIT_S)) == "3 workers ended well"
    assert len(set(addresses)) == 3
    assert sorted(outputs) == [(rank, " ".join(sorted(addresses))) for rank in range(3)]


@pytest.mark.long
@needs_root
def test_gloo_works_across_hosts() -> None:
    code = (
        "import os, sys, torch\n"
        "from benchmarks.gloo import GlooSide\n"
        "env = os.environ\n"
        "rank, port = int(env['RANK']), int(env['MASTER_PORT'])\n"
        "with GlooSide(rank, 2, env['MASTER_ADDR'], port, interface=sys.argv[1]) as side:\n"
        "    x = torch.full((5,), rank + 1.0)\n"
        "    side.all_reduce(x)\n"
        "    print(x.tolist(), len(side.times_s(35_000, 4)), 'GLOO_SOCKET_IFNAME' in env)"
    )
    outputs: list[tuple[int, str]] = []
    with hosts(2, rate_bit_per_s=10**9) as hs:
        with launch(
            [*python(code), hs[0].interface],
            2,
            prefix=[h.prefix for h in hs],
            master_addr=hs[0].address,
            env={"TORCH_CPP_LOG_LEVEL": "ERROR"},
            on_output=lambda *x: outputs.append(x),
        ) as workers:
            assert outcome_summary(workers.wait(LIMIT_S)) == "2 workers ended well"
    assert sorted(outputs) == [(rank, "[3.0, 3.0, 3.0, 3.0, 3.0] 4 False") for rank in range(2)]


def qdiscs(*where: str) -> list[tuple[str, int | None]]:
    found = json.loads(out("tc", *where, "-json", "qdisc"))
    return sorted((q["dev"], q["options"].get("rate")) for q in found if q["kind"] == "tbf")


@needs_root
def test_lines_are_shaped_at_both_ends() -> None:
    with hosts(2, rate_bit_per_s=400_000_000) as hs:
        switch = next(name for name in names(os.getpid()) if name.endswith("switch"))
        assert [qdiscs("-n", h.name) for h in hs] == [[("eth0", 50_000_000)]] * 2  # tc counts bytes
        assert qdiscs("-n", switch) == [("port0", 50_000_000), ("port1", 50_000_000)]
    with hosts(1) as hs:
        assert qdiscs("-n", hs[0].name) == []


@needs_root
@pytest.mark.parametrize(
    ("rate_bit_per_s", "early_s", "burst", "segment"),
    [
        (10**9, 200e-6, 25_000, 16_666),
        (10**9, 800e-6, 98_304, 65_536),  # not 100,000
        (10**8, 800e-6, 10_000, 6_666),
        (10**10, 800e-6, 250_000, 65_536),  # 0.2 ms is more than that
    ],
)
def test_buckets_hold_segments_as_large_as_may_be_early(
    rate_bit_per_s: int, early_s: float, burst: int, segment: int
) -> None:
    with hosts(1, rate_bit_per_s=rate_bit_per_s, early_s=early_s) as (host,):
        assert host.burst_bytes == burst
        switch = next(name for name in names(os.getpid()) if name.endswith("switch"))
        for namespace, interface in ((host.name, "eth0"), (switch, "port0")):
            (found,) = json.loads(out("tc", "-n", namespace, "-json", "qdisc", "show", "dev", interface))
            assert found["options"]["burst"] == pytest.approx(burst, rel=0.01)  # it is kept as a time
            (link,) = json.loads(out("ip", "-n", namespace, "-json", "-details", "link", "show", interface))
            assert link["gso_max_size"] == segment


@pytest.mark.long(after=1)
@needs_root
@pytest.mark.parametrize("rate_bit_per_s", [1_000_000, 100_000_000, 100_000_000_000])
def test_lines_of_every_rate_carry_full_segments(rate_bit_per_s: int) -> None:
    """A bucket smaller than a segment would never pass it."""
    code = (
        "import os, socket, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    with socket.create_server(('', 7000)) as server:\n"
        "        caller, _ = server.accept()\n"
        "        got = 0\n"
        "        while data := caller.recv(1 << 16): got += len(data)\n"
        "        print(got)\n"
        "else:\n"
        "    while True:\n"
        "        try: out = socket.create_connection((sys.argv[1], 7000)); break\n"
        "        except ConnectionRefusedError: pass\n"
        "    out.sendall(bytes(200_000))"
    )
    outputs: list[tuple[int, str]] = []
    with hosts(2, rate_bit_per_s=rate_bit_per_s) as hs:
        with launch(
            [*python(code), hs[0].address],
            2,
            prefix=[h.prefix for h in hs],
            on_output=lambda *x: outputs.append(x),
        ) as workers:
            assert outcome_summary(workers.wait(LIMIT_S)) == "2 workers ended well"
    assert outputs == [(0, "200000")]


def test_a_rate_is_a_whole_number_of_mbit_per_s_or_free() -> None:
    assert parse_rate("100") == 100
    assert parse_rate("free") is None
    for text in ("", "0", "-1", "1.5", "fast"):
        with pytest.raises(ValueError, match=f"a line's rate in Mbit/s or free, got '{text}'"):
            parse_rate(text)


@needs_root
def test_the_bytes_of_a_host_are_counted_with_their_headers() -> None:
    code = (
        "import socket, sys\n"
        "from benchmarks.namespaces import bytes_sent\n"
        "before = bytes_sent(sys.argv[2])\n"
        "with socket.socket(type=socket.SOCK_DGRAM) as outbox:\n"
        "    for _ in range(10): outbox.sendto(bytes(1000), (sys.argv[1], 7000))\n"
        "print(bytes_sent(sys.argv[2]) - before)\n"
    )
    with hosts(2) as (a, b):
        a_neighbour = ("dev", a.interface, "lladdr", "02:00:00:00:00:02", "nud", "permanent")
        out("ip", "-n", a.name, "neighbour", "replace", b.address, *a_neighbour)
        assert int(out(*a.prefix, *python(code), b.address, a.interface)) == 10 * (14 + 20 + 8 + 1000)


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="expected the network interface none, found none"):
        bytes_sent("none")


@needs_root
def test_the_congestion_control_in_force_is_reported() -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    with hosts(1) as hs:
        assert hs[0].congestion_control == ("cubic" if "cubic" in allowed else "reno")
        assert out(*hs[0].prefix, "cat", "/proc/sys/net/ipv4/tcp_congestion_control").strip() == (
            hs[0].congestion_control
        )


@needs_root
def test_the_machines_own_network_is_not_touched() -> None:
    def own() -> tuple[str, str, str]:
        links = re.sub(r"\d+(?= bytes| pkt)", "", out("ip", "-brief", "link"))
        return links, out("ip", "-brief", "address"), out("ip", "route")

    before = own()
    with hosts(3, rate_bit_per_s=10**9):
        assert own() == before
    assert own() == before


@needs_root
def test_everything_is_removed_after_an_exception_and_processes_inside_are_killed() -> None:
    class StopError(Exception):
        pass

    left: list[subprocess.Popen[bytes]] = []

    def fail(hs: list[Host]) -> None:
        left.append(
            subprocess.Popen(
                [*hs[1].prefix, *python(f"print(flush=True)\n{PAUSE_LOOP}")], stdout=subprocess.PIPE
            )
        )
        assert left[0].stdout is not None
        left[0].stdout.readline()
        raise StopError

    with pytest.raises(StopError), hosts(2, rate_bit_per_s=10**9) as hs:
        fail(hs)
    assert names(os.getpid()) == []
    with left[0] as process:
        assert process.wait(LIMIT_S) == -signal.SIGKILL


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_everything_is_removed_after_a_signal(number: int) -> None:
    process, _ = maker("import signal; signal.pause()")
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == (-number if number == signal.SIGINT else 128 + number)
    assert names(process.pid) == []


@needs_root
def test_another_ctrl_c_while_cleaning_up_changes_nothing(tmp_path: Path) -> None:
    """A terminal sends it to the whole process group, including the commands that clean up."""
    real = shutil.which("ip")
    wrapper = f"""#!/bin/sh
        case "$*" in *delete*) kill -s INT -- -$GROUP; echo "$@" >> {tmp_path}/deleted;; esac
        exec {real} "$@"
    """
    (tmp_path / "ip").write_text(wrapper.strip())
    (tmp_path / "ip").chmod(0o755)
    code = (
        "import os, signal\n"
        "from benchmarks import namespaces\n"
        "os.environ['GROUP'] = str(os.getpgrp())\n"
        "with namespaces.hosts(2):\n"
        "    print(os.getpid(), flush=True)\n"
        "    raise KeyboardInterrupt"
    )
    done = subprocess.run(
        python(code),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
        check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.returncode == -signal.SIGINT
    assert names(int(done.stdout)) == []
    assert len((tmp_path / "deleted").read_text().splitlines()) >= 3


@needs_root
def test_signal_handlers_are_restored_afterwards_and_handlers_of_others_are_kept() -> None:
    def own(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        with hosts(1):
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


@needs_root
def test_the_next_run_removes_the_remains_of_a_killed_one_and_nothing_else() -> None:
    killed, _ = maker("import signal; signal.pause()")
    other, others = maker("import signal; signal.pause()")
    reused = f"offbeat-{os.getpid()}-1-0-switch"  # the id of a living process, which began at another time
    try:
        out("ip", "netns", "add", reused)
        killed.kill()
        killed.communicate(timeout=LIMIT_S)
        with hosts(1):
            assert names(killed.pid) == []
            assert names(other.pid) == others
            assert reused not in names(os.getpid())
    finally:
        other.terminate()
        other.communicate(timeout=LIMIT_S)
        remove_stale()
    assert names(other.pid) == []


@needs_root
def test_concurrent_runs_are_isolated_from_each_other() -> None:
    """They have the same addresses; each reaches its own only."""
    answer = (
        "import socket, sys\n"
        "with socket.create_server(('', 7000)) as server:\n"
        "    print('ready', flush=True)\n"
        "    while True: server.accept()[0].sendall(sys.argv[1].encode())"
    )
    query = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 5).recv(100).decode())"
    with ExitStack() as stack:
        runs = [stack.enter_context(hosts(2)) for _ in range(2)]
        assert [h.address for h in runs[0]] == [h.address for h in runs[1]]
        for at, run in enumerate(runs):
            process = subprocess.Popen([*run[1].prefix, *python(answer), f"run {at}"], stdout=subprocess.PIPE)
            stack.callback(process.communicate, timeout=LIMIT_S)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert wait_until_readable(process.stdout, LIMIT_S)
        for at, run in enumerate(runs):
            assert out(*run[0].prefix, *python(query), run[1].address).strip() == f"run {at}"


def test_missing_commands_are_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        OffbeatError, match=r"^making hosts .* needs the commands ip and tc \(package iproute2\)$"
    ):
        with hosts(2):
            pass
    for tool in ("ip", "tc"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'RTNETLINK: no such luck' >&2; exit 2\n")
        (tmp_path / tool).chmod(0o755)
    assert missing() in (None, "the rights of root (CAP_NET_ADMIN and CAP_SYS_ADMIN)")


@needs_root
def test_a_failing_command_is_reported_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'no such luck' >&2; exit 2\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(OffbeatError, match=r"^`tc -n .* tbf .*` failed: no such luck$"):
        with hosts(2, rate_bit_per_s=10**9):
            pass
    assert names(os.getpid()) == []


@needs_root
def test_missing_root_rights_are_reported() -> None:
    """Dropped in a process of its own, as a container does."""
    code = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "import struct\n"
        "header = ctypes.create_string_buffer(struct.pack('Ii', 0x20080522, 0))\n"
        "data = ctypes.create_string_buffer(24)\n"
        "assert libc.capset(header, data) == 0\n"
        "from benchmarks.namespaces import hosts\n"
        "with hosts(2): pass"
    )
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert "needs the rights of root (CAP_NET_ADMIN and CAP_SYS_ADMIN)" in done.stderr.splitlines()[-1]


def test_bad_arguments_are_reported() -> None:
    for count in (0, 251):
        with pytest.raises(ValueError, match=f"count must be from 1 to 250, not {count}"):
            with hosts(count):
                pass
    with pytest.raises(ValueError, match="rate_bit_per_s must be at least 1000000, not 1000"):
        with hosts(2, rate_bit_per_s=1000):
            pass
    with pytest.raises(ValueError, match=r"early_s must be at least 0.0002, not 0.0001"):
        with hosts(2, rate_bit_per_s=10**9, early_s=1e-4):
            pass


REACH = (
    "import os, socket, sys\n"
    "try: socket.create_connection((sys.argv[1], 7000), timeout=0.5)\n"
    "except TimeoutError: print('silence')\n"
    "else: print('there')\n"
)
ACCEPT = (
    "import socket\n"
    "with socket.create_server(('', 7000)) as server:\n"
    "    print('ready', flush=True)\n"
    "    callers = []\n"
    "    while True: callers.append(server.accept())\n"
)


def reachable(source: Host, target: Host) -> bool:
    return out(*source.prefix, *python(REACH), target.address) == "there\n"


@needs_root
def test_a_broken_network_drops_traffic_on_just_the_broken_lines_until_it_is_mended() -> None:
    with hosts(4) as hs:
        a, b, c, d = hs
        for host in hs:
            server = subprocess.Popen([*host.prefix, *python(ACCEPT)], stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        assert reachable(a, b)
        cut(b)
        assert not reachable(a, b)
        assert reachable(a, c)
        mend(b)
        assert reachable(a, b)
        split(c, d)
        assert not reachable(a, c)
        assert reachable(c, d)
        assert reachable(a, b)
        mend(c, d)
        assert reachable(a, c)
        block(a, b)
        assert not reachable(a, b)
        assert not reachable(b, a)  # its answers are dropped
        assert reachable(a, c)
        assert reachable(c, b)
        mend(a)
        assert reachable(a, b)


@needs_root
def test_a_blocked_direction_leaves_the_other_as_it_is() -> None:
    receive = (
        "import socket\n"
        "with socket.socket(type=socket.SOCK_DGRAM) as inbox:\n"
        "    inbox.bind(('', 7000))\n"
        "    print('ready', flush=True)\n"
        "    print(inbox.recv(10).decode(), flush=True)\n"
    )
    send = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(b'%s', (sys.argv[1], 7000))"
    with hosts(2) as (a, b):
        inboxes = []
        for host in (a, b):
            inbox = subprocess.Popen([*host.prefix, *python(receive)], stdout=subprocess.PIPE, text=True)
            assert inbox.stdout is not None
            assert inbox.stdout.readline() == "ready\n"
            inboxes.append(inbox.stdout)
        block(a, b)
        out(*a.prefix, *python(send % "lost"), b.address)
        out(*b.prefix, *python(send % "arrived"), a.address)
        assert inboxes[0].readline() == "arrived\n"
        mend(a)
        out(*a.prefix, *python(send % "mended"), b.address)
        assert inboxes[1].readline() == "mended\n"


@needs_root
def test_a_reset_connection_is_broken_at_both_ends() -> None:
    accept = (
        "import socket\n"
        "with socket.create_server(('', 7000)) as server:\n"
        "    print('ready', flush=True)\n"
        "    caller, _ = server.accept()\n"
        "    print('accepted', flush=True)\n"
        "    try: caller.recv(1)\n"
        "    except ConnectionError: print('broken', flush=True)\n"
    )
    connect = (
        "import socket, sys\n"
        "caller = socket.create_connection((sys.argv[1], 7000))\n"
        "try: caller.recv(1)\n"
        "except ConnectionError: print('broken', flush=True)\n"
    )
    with hosts(2) as (a, b):
        acceptor = subprocess.Popen([*b.prefix, *python(accept)], stdout=subprocess.PIPE, text=True)
        assert acceptor.stdout is not None
        assert acceptor.stdout.readline() == "ready\n"
        command = [*a.prefix, *python(connect), b.address]
        connector = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert connector.stdout is not None
        assert acceptor.stdout.readline() == "accepted\n"
        reset(a, b)
        assert acceptor.stdout.readline() == "broken\n"
        assert connector.stdout.readline() == "broken\n"
