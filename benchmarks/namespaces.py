"""Several hosts on one machine: network namespaces joined by a bridge, with lines of a given rate.

Theory of operation. A host is a network namespace with one interface and one address. The bridge that joins
the hosts lives in a namespace of its own, so the machine's own network is never changed, and runs cannot
affect each other: every run has its own names and its own, unconnected network (so all use the same
addresses).

A line is full duplex. `tc tbf` shapes it at both ends: at the host, as its network card would, and at the
bridge's port, as a switch would, so that several hosts that send to one share its line. Excess traffic is
queued at the bridge's port for up to 8 ms (1 MB at 1 Gbit/s, an ordinary switch's buffer), then dropped.

The size of the token bucket (`burst`) is a compromise. If it is too small, the rate is not reached, because
the kernel's timers are late by some 0.1 ms and tokens beyond the bucket's capacity are lost: at 1 Gbit/s,
four hosts sending at once on 2 cores got 908 Mbit/s each with 18 KB, 951 with 24 KB, 954 with 70 KB (TCP's
maximum is 956: 1448 of 1514 bytes). If it is too large, a small message after a pause crosses in no time.
The default is 25 KB (0.2 ms of the rate), with segments limited to 16 KB so that they fit into it. So a
message after a pause arrives up to 0.2 ms early; the next ones do not.

Small segments cost processor time, since both ends of a line wake up for each of them, on cores that all
hosts share: a step of AlexNet over four lines of 1 Gbit/s took each worker 1.33 s of processor time with
25 KB and 0.55 s with 98 KB. Where pauses are few, and the measured times are seconds, `early_s` allows larger
buckets: segments then have 64 KB, as with network cards, and TCP gets 955 Mbit/s instead of 948 to 952.

Faults on demand: `cut` takes hosts off the switch, `split` puts them on a second switch, `block` drops what
one host sends to another, `reset` breaks the connections between two hosts, and `mend` repairs all of these
but the connections. `slow_down` gives a host a slow line for the rest of the run. Data on a broken line are
lost silently: no connection is notified.

Not emulated: propagation delay and random loss (netem is not in every kernel), and anything about hosts but
their network: they share cores, memory and the file system. A Unix socket with a path therefore still joins
two hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from offbeat.errors import OffbeatError

INTERFACE = "eth0"
FREE = "free"
_SWITCH, _OTHER_SWITCH = "br0", "br1"
_UNUSED_MAC = "02:00:00:00:00:01"  # a hardware address that no host has
_HOSTS_MAX = 250
_RATE_MIN_BIT_PER_S = 1_000_000
_FRAME_BYTES = 1514
_EARLY_S = 200e-6
_BUFFER_S = 8e-3
_CARD_QUEUE_S = 32e-3  # longer than TCP itself lets a sender's queue become
_SEGMENT_BYTES_MAX = 65_536
_COMMAND_LIMIT_S = 30.0
_CAP_NET_ADMIN = 12
_CAP_SYS_ADMIN = 21
_NAME = re.compile(r"offbeat-(?P<pid>\d+)-(?P<start>\d+)-\d+-(switch|\d+)")
_runs = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a run.

    Attributes:
        name: of its network namespace.
        address: its IPv4 address in the run's network.
        interface: its network interface (for GLOO_SOCKET_IFNAME).
        congestion_control: the TCP congestion control in force.
        rate_bit_per_s: of its line, each way; None for no limit.
        burst_bytes: capacity of its line's token bucket, which a message after a pause may use at once; None
            for no limit.
    """

    name: str
    address: str
    interface: str
    congestion_control: str
    rate_bit_per_s: int | None
    burst_bytes: int | None

    @property
    def prefix(self) -> list[str]:
        """Arguments to put before a command to run it on this host."""
        return ["ip", "netns", "exec", self.name]

    @property
    def switch(self) -> str:
        """Network namespace of the switch that joins the run's hosts."""
        return f"{self.name.rpartition('-')[0]}-switch"

    @property
    def port(self) -> str:
        """Interface of this host at the switch."""
        return f"port{self.name.rpartition('-')[2]}"


def parse_rate(text: str) -> int | None:
    """Return the rate of a line in Mbit/s, None for `FREE`: no limit.

    Raises:
        ValueError: the text is neither.
    """
    if text == FREE:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"expected a line's rate in Mbit/s or {FREE}, got {text!r}")
    return int(text)


def bytes_sent(interface: str) -> int:
    """Return the bytes that this process's host has sent over an interface, headers included.

    Raises:
        ValueError: there is no such interface.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise ValueError(f"expected the network interface {interface}, found none: see `ip link`")


def missing() -> str | None:
    """Return in words what this process lacks to make hosts, or None."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"the command{'s' if len(tools) > 1 else ''} {' and '.join(tools)} (package iproute2)"
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
        capabilities = int(found[1], 16) if found else 0
        if capabilities >> _CAP_NET_ADMIN & capabilities >> _CAP_SYS_ADMIN & 1:
            return None
    return "the rights of root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"


@contextlib.contextmanager
def hosts(
    count: int, *, rate_bit_per_s: int | None = None, early_s: float = _EARLY_S
) -> Iterator[list[Host]]:
    """Create `count` hosts, joined by a switch, for the duration of the context.

    At the end they are removed, and processes in them are killed. This includes an end by an exception,
    Ctrl-C, SIGTERM or SIGHUP (which become SystemExit in the main thread, unless they have handlers already).
    After SIGKILL, the next run of any process removes them.

    The congestion control is cubic, the usual one, where the kernel lets a namespace have it: cubic must be
    in the machine's net.ipv4.tcp_allowed_congestion_control. Otherwise it is reno, which fills a line just as
    well, and not the machine's default, which may pace (BBR).

    Args:
        count: 1 to 250.
        rate_bit_per_s: of each host's line, each way, at least 1,000,000; None for no limit.
        early_s: how much too early a message may be after a pause, in seconds, at least 0.2 ms. Larger values
            have an effect up to what segments of 64 KB need.

    Raises:
        ValueError: a bad argument.
        OffbeatError: no root, no `ip` or `tc`, or one of them failed.
    """
    if not 1 <= count <= _HOSTS_MAX:
        raise ValueError(f"count must be from 1 to {_HOSTS_MAX}, not {count}")
    if rate_bit_per_s is not None and rate_bit_per_s < _RATE_MIN_BIT_PER_S:
        raise ValueError(f"rate_bit_per_s must be at least {_RATE_MIN_BIT_PER_S}, not {rate_bit_per_s}")
    if early_s < _EARLY_S:
        raise ValueError(f"early_s must be at least {_EARLY_S}, not {early_s}")
    lack = missing()
    if lack is not None:
        raise OffbeatError(f"making hosts on this machine needs {lack}")
    remove_stale()
    run = f"offbeat-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_runs)}"
    with _ended_by_signals():
        try:
            yield _make(run, count, rate_bit_per_s, early_s)
        finally:
            with _uninterrupted():
                for name in sorted(_names(), reverse=True):  # the switch first, which removes every line
                    if name.startswith(f"{run}-"):
                        _remove(name)


def remove_stale() -> None:
    """Remove the hosts of runs whose process has ended."""
    for name in _names():
        found = _NAME.fullmatch(name)
        if found is not None and _start_ticks(int(found["pid"])) != found["start"]:
            with contextlib.suppress(OffbeatError):  # another process may be removing it too
                _remove(name)


def cut(*isolated: Host) -> None:
    """Take hosts off the switch: they can neither send nor receive until `mend`.

    Raises:
        OffbeatError: `ip` failed, here as in the functions below.
    """
    _change_ports(*isolated, what="down")


def split(*moved: Host) -> None:
    """Put hosts on a second switch until `mend`: they reach each other, but not the hosts on the first."""
    _change_ports(*moved, what=f"master {_OTHER_SWITCH}")


def block(source: Host, target: Host) -> None:
    """Drop what one host sends to another until `mend`, in this direction only."""
    _command(
        *("ip", "-n", source.name, "neighbour", "replace", target.address),
        *("lladdr", _UNUSED_MAC, "nud", "permanent", "dev", INTERFACE),
    )


def mend(*broken: Host) -> None:
    """Repair what `cut`, `split` and `block` did to hosts; connections are left as they are."""
    _change_ports(*broken, what=f"master {_SWITCH} up")
    for host in broken:
        _command("ip", "-n", host.name, "neighbour", "flush", "nud", "permanent", "dev", INTERFACE)


def reset(one: Host, other: Host) -> None:
    """Break all TCP connections between two hosts with a reset at both ends, as a firewall would.

    Raises:
        OffbeatError: `ss` failed; the kernel needs CONFIG_INET_DIAG_DESTROY.
    """
    _command(*one.prefix, "ss", "--kill", "--tcp", "dst", other.address)


def slow_down(slowed: Host, rate_bit_per_s: int) -> None:
    """Give a host that has a line without a limit one of this rate, each way."""
    burst = _burst_bytes(rate_bit_per_s, _EARLY_S)
    _shape(slowed.name, INTERFACE, rate_bit_per_s, burst, _CARD_QUEUE_S)
    _shape(slowed.switch, slowed.port, rate_bit_per_s, burst, _BUFFER_S)


def _change_ports(*changed: Host, what: str) -> None:
    """Change the ports of hosts at the switch, within some 0.1 ms each."""
    lines = "".join(f"link set {host.port} {what}\n" for host in changed)
    _command("ip", "-n", changed[0].switch, "-batch", "-", stdin=lines)


def _make(run: str, count: int, rate_bit_per_s: int | None, early_s: float) -> list[Host]:
    switch = f"{run}-switch"
    burst = None if rate_bit_per_s is None else _burst_bytes(rate_bit_per_s, early_s)
    _command("ip", "netns", "add", switch)
    for bridge in (_SWITCH, _OTHER_SWITCH):
        _command("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        _command("ip", "-n", switch, "link", "set", bridge, "up")
    created = []
    for index in range(count):
        name, port, address = f"{run}-{index}", f"port{index}", f"10.90.0.{index + 1}"
        _command("ip", "netns", "add", name)
        line = (
            "link",
            "add",
            INTERFACE,
            "netns",
            name,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            switch,
        )
        _command("ip", *line)
        congestion_control = _configure_tcp(name)
        if rate_bit_per_s is not None and burst is not None:
            _shape(name, INTERFACE, rate_bit_per_s, burst, _CARD_QUEUE_S)
            _shape(switch, port, rate_bit_per_s, burst, _BUFFER_S)
        _command("ip", "-n", switch, "link", "set", port, "master", _SWITCH, "up")
        _command("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
        _command("ip", "-n", name, "link", "set", "lo", "up")
        _command("ip", "-n", name, "link", "set", INTERFACE, "up")
        host = Host(
            name=name,
            address=address,
            interface=INTERFACE,
            congestion_control=congestion_control,
            rate_bit_per_s=rate_bit_per_s,
            burst_bytes=burst,
        )
        created.append(host)
    return created


def _burst_bytes(rate_bit_per_s: int, early_s: float) -> int:
    """Return the bucket capacity of a line: at least one and a half segments."""
    bytes_per_s = rate_bit_per_s / 8
    wanted = min(bytes_per_s * early_s, 3 / 2 * _SEGMENT_BYTES_MAX)
    return round(max(4 * _FRAME_BYTES, bytes_per_s * _EARLY_S, wanted))


def _shape(namespace: str, interface: str, rate_bit_per_s: int, burst: int, queue_s: float) -> None:
    segment = min(_SEGMENT_BYTES_MAX, burst * 2 // 3)
    limit = max(2 * burst, round(rate_bit_per_s / 8 * queue_s))
    _command("ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(segment))
    bucket = ("tbf", "rate", f"{rate_bit_per_s}bit", "burst", f"{burst}b", "limit", f"{limit}b")
    _command("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)


def _configure_tcp(namespace: str) -> str:
    """Configure the namespace's TCP; return the congestion control in force."""
    script = """
        cd /proc/sys/net
        echo 1 > ipv4/tcp_no_metrics_save  # else a connection inherits metrics of earlier ones
        [ ! -e ipv6/conf/all/disable_ipv6 ] || echo 1 > ipv6/conf/all/disable_ipv6
        { echo cubic || echo reno; } 2>/dev/null > ipv4/tcp_congestion_control
        cat ipv4/tcp_congestion_control
    """
    return _command("ip", "netns", "exec", namespace, "sh", "-c", script).strip()


def _names() -> list[str]:
    return [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line.strip()]


def _remove(name: str) -> None:
    for pid in _command("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _command("ip", "netns", "delete", name)


def _start_ticks(pid: int) -> str:
    """Return the start time of a process in kernel ticks after boot, or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _command(*command: str, stdin: str = "") -> str:
    # In a session of its own: the Ctrl-C that ends the run must not end its clean-up commands.
    try:
        completed = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OffbeatError(f"`{' '.join(command)}` did not end within {_COMMAND_LIMIT_S:g} s") from None
    if completed.returncode != 0:
        errors = completed.stderr.strip().splitlines()
        raise OffbeatError(f"`{' '.join(command)}` failed: {errors[-1] if errors else completed.returncode}")
    return completed.stdout


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the context as Ctrl-C does, unless they have handlers already."""

    def exit_on(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    installed = [n for n in numbers if is_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in installed:
        signal.signal(number, exit_on)
    try:
        yield
    finally:
        for number in installed:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C (often pressed twice), SIGTERM and SIGHUP to the end of the context, a short one."""
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: handler for n in numbers if is_main and (handler := signal.getsignal(n)) is not None}
    for number in before:
        signal.signal(number, lambda signal_number, _frame: received.append(signal_number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
