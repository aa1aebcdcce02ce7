"""`offbeat doctor`: what on this machine, or in this job, would stop a training or slow it down.

Each check looks at one thing as a training would use it, and returns a `Finding`. Nothing here prints,
changes anything, or takes longer than some seconds.
"""

from __future__ import annotations

import difflib
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Literal, TypeAlias

import offbeat
from offbeat.errors import OffbeatError, describe_os_error
from offbeat.runtime.control import environment as settings
from offbeat.runtime.control.environment import available_cores, read_environment
from offbeat.runtime.processes.threads import run_with_deadline
from offbeat.runtime.transport.addresses import PROBE_ADDRESS, own_address
from offbeat.runtime.transport.descriptors import require_descriptors
from offbeat.runtime.transport.shared_memory import HAS_SHARED_MEMORY, allocate_memory

Level: TypeAlias = Literal["ok", "advice", "problem"]

_FILES_ENOUGH: Final = 1024
_SHM_BYTES_ENOUGH: Final = 512 * 2**20
_DISK_BYTES_MIN: Final = 100 * 2**20
_CONNECT_S: Final = 5.0
_LOOKUP_S: Final = 5.0
_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_INTERFACES: Final = Path("/sys/class/net")
_DRIVERS: Final = {"NVIDIA": Path("/proc/driver/nvidia/version"), "AMD": Path("/dev/kfd")}
_QUOTA_V2: Final = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1: Final = Path("/sys/fs/cgroup/cpu")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check has found.

    Attributes:
        check: what was looked at, in one or two words.
        level: "ok"; "advice" for what slows down or stops some trainings; "problem" for what stops them all.
        found: what was found.
        advice: what to do about it, "" if nothing.
    """

    check: str
    level: Level
    found: str
    advice: str = ""


def exit_code(findings: Sequence[Finding]) -> int:
    """Return the exit code of a command that has found this: 1 if there is a problem, else 0."""
    return int(any(one.level == "problem" for one in findings))


def installed_versions() -> tuple[str, str, str]:
    """Return those of Python, offbeat and torch that have to be equal on all hosts; "" without torch."""
    torch_version = ""
    with suppress(ImportError, OSError):
        import torch

        torch_version = str(torch.__version__).partition("+")[0]
    python = ".".join(platform.python_version_tuple()[:2])
    return python, offbeat.__version__, torch_version


def check_machine(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield the findings on this machine and on the environment that a launcher has set.

    Args:
        environ: the variables of the environment.
    """
    yield _check_versions()
    yield _check_settings(environ)
    yield from _check_launcher(environ)
    yield _check_cores()
    yield check_accelerators()
    yield _check_open_files(environ)
    yield _check_links_memory()
    yield _check_loader_memory()
    yield from _check_folders(environ)
    yield _check_interfaces()
    yield _check_host_name()
    yield _check_ports(environ)


def _check_versions() -> Finding:
    own = f"Python {platform.python_version()}, offbeat {offbeat.__version__}"
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return Finding(
            check="versions",
            level="problem",
            found=f"{own}; torch cannot be imported: {error}",
            advice="install torch as https://pytorch.org/get-started describes for this machine",
        )
    found = f"{own}, torch {torch.__version__}"
    if not dist.is_available():
        return Finding(
            check="versions",
            level="problem",
            found=f"{found}, which was built without torch.distributed",
            advice="install a build of torch with it",
        )
    return Finding(check="versions", level="ok", found=found)


def _check_settings(environ: Mapping[str, str]) -> Finding:
    named = (value for name, value in vars(settings).items() if name.endswith("_VARIABLE"))
    known = [*named, *settings.TLS_VARIABLES]
    given = sorted(name for name in environ if name.startswith("OFFBEAT_"))
    unknown = [name for name in given if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, 1)
        meant = f" (is {close[0]} meant?)" if close else ""
        return Finding(
            check="settings",
            level="advice",
            found=f"{', '.join(unknown)}: offbeat has no such variable{meant}",
            advice="correct the name, or remove the variable",
        )
    try:
        read_environment(environ)
        settings.load_tls(environ)
        if token := environ.get(settings.TOKEN_FILE_VARIABLE):
            settings.read_token(token)
    except OffbeatError as error:
        return Finding(check="settings", level="problem", found=str(error), advice="correct the variable")
    return Finding(check="settings", level="ok", found=", ".join(given) or "no variable of offbeat is set")


def _check_launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether the launcher, if there is one, ends workers because another one has died."""
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "Slurm" if "SLURM_STEP_ID" in environ else ""
    if not name:
        return
    with suppress(OffbeatError):  # reported as one of the settings
        if name == "torchrun" and read_environment(environ).ends_together:
            yield Finding(
                check="launcher",
                level="advice",
                found="torchrun: it ends all workers of a host when one of them dies",
                advice="start the script with 'offbeat run', if the strategy survives deaths",
            )
            return
    if name == "Slurm" and environ.get("SLURM_KILL_BAD_EXIT") == "1":
        yield Finding(
            check="launcher",
            level="advice",
            found="Slurm with SLURM_KILL_BAD_EXIT=1: it ends all tasks when one of them fails",
            advice="use srun --kill-on-bad-exit=0, if the strategy survives deaths",
        )
        return
    yield Finding(check="launcher", level="ok", found=name)


def _check_cores() -> Finding:
    cores, quota = available_cores(), _cpu_quota()
    if quota is not None and quota < cores:
        return Finding(
            check="cores",
            level="advice",
            found=f"{cores}, of which this container may use {quota:g} at a time",
            advice=f"set OMP_NUM_THREADS so that all workers of this host have {max(1, int(quota))} threads "
            "together",
        )
    return Finding(check="cores", level="ok", found=str(cores))


def _cpu_quota() -> float | None:
    """Return how many cores the control group may use at a time; None if it has no limit."""
    with suppress(OSError, ValueError):
        quota, period = _QUOTA_V2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        microseconds = int((_QUOTA_V1 / "cpu.cfs_quota_us").read_text())
        return None if microseconds < 0 else microseconds / int((_QUOTA_V1 / "cpu.cfs_period_us").read_text())
    return None


def check_accelerators(drivers: Mapping[str, Path] = _DRIVERS) -> Finding:
    """Find the accelerators that torch can use, and whether this host has others.

    Args:
        drivers: files that are there where a driver is, by the name of its devices.
    """
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError):
        return Finding(check="accelerators", level="ok", found="not looked for: torch cannot be imported")
    if not torch.accelerator.is_available():
        unused = [name for name, file in drivers.items() if file.exists()]
        if unused:
            return Finding(
                check="accelerators",
                level="advice",
                found=f"none that torch {torch.__version__} can use, and a driver for those of {unused[0]}",
                advice="if models are to be trained on them, install a build of torch for this driver: "
                "https://pytorch.org/get-started",
            )
        return Finding(check="accelerators", level="ok", found="none, models are trained on the processor")
    kind, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    found = f"{count} of kind {kind.type if kind else 'unknown'}"
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        found = f"{count}: {', '.join(names)}"
        if not (dist.is_available() and dist.is_nccl_available()):
            return Finding(
                check="accelerators",
                level="advice",
                found=f"{found}; this torch has no NCCL",
                advice="nothing is wrong, but NCCL is faster under bsp: install a build of torch with it",
            )
        found += f"; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return Finding(check="accelerators", level="ok", found=found)


def _check_open_files(environ: Mapping[str, str]) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "a process may have any number open"
    if soft != resource.RLIM_INFINITY:
        found = f"a process may have {soft:,} open"
    most = "" if hard == resource.RLIM_INFINITY else f" (here up to {hard:,})"
    advice = f"raise `ulimit -n`{most}: connections, the files of DataLoaders and checkpoints need some"
    try:
        require_descriptors(_descriptors_needed(environ))
    except OffbeatError as error:
        return Finding(check="open files", level="problem", found=str(error), advice=advice)
    if soft != resource.RLIM_INFINITY and soft < _FILES_ENOUGH:
        return Finding(check="open files", level="advice", found=found, advice=advice)
    return Finding(check="open files", level="ok", found=found)


def _descriptors_needed(environ: Mapping[str, str]) -> int:
    """Return how many more files a worker opens for its start; 0 where that cannot be said."""
    try:
        from offbeat.runtime.control.rendezvous import descriptors_needed

        return descriptors_needed(read_environment(environ))
    except (ImportError, OSError, OffbeatError):  # reported with the versions and with the settings
        return 0


def _check_links_memory() -> Finding:
    if not HAS_SHARED_MEMORY:
        return Finding(
            check="shared memory",
            level="advice",
            found="this system has no memfd_create",
            advice="workers of one host are connected by sockets, which are slower: use Linux",
        )
    try:
        descriptor, _ = allocate_memory(2**20)
        os.close(descriptor)
    except OSError as error:
        return Finding(
            check="shared memory",
            level="advice",
            found=f"1 MiB between workers of one host cannot be had: {describe_os_error(error)}",
            advice="workers of one host are connected by sockets, which are slower: free memory",
        )
    return Finding(check="shared memory", level="ok", found="workers of one host can share memory")


def _check_loader_memory() -> Finding:
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(
            check="/dev/shm",
            level="advice",
            found=describe_os_error(error),
            advice="mount it, or use no worker processes in DataLoaders (num_workers=0): they pass batches "
            "through it",
        )
    free = status.f_bavail * status.f_frsize
    found = f"{_size(free)} free of {_size(status.f_blocks * status.f_frsize)}"
    if free < _SHM_BYTES_ENOUGH:
        return Finding(
            check="/dev/shm",
            level="advice",
            found=found,
            advice="worker processes of DataLoaders pass batches through it: start the container with "
            "--shm-size=1g or --ipc=host, or use num_workers=0",
        )
    return Finding(check="/dev/shm", level="ok", found=found)


def _check_folders(environ: Mapping[str, str]) -> Iterator[Finding]:
    folders = {}
    try:
        folders["temporary files"] = environ.get("TMPDIR") or tempfile.gettempdir()
    except OSError as error:
        yield Finding(
            check="temporary files", level="problem", found=describe_os_error(error), advice="set TMPDIR"
        )
    with suppress(ImportError, OSError):  # of torch, which is reported with the versions
        from offbeat.data import resolve_data_dir

        folders["data sets"] = resolve_data_dir(None)
    for check, folder in folders.items():
        where = Path(folder)
        is_made_later = check == "data sets"
        while is_made_later and not os.path.exists(where) and where != where.parent:
            where = where.parent
        if not os.access(where, os.W_OK | os.X_OK):
            yield Finding(
                check=check,
                level="advice",
                found=f"{folder} " + ("cannot be written" if where.exists() else "does not exist"),
                advice=f"make {where} writable, or "
                + ("set TMPDIR" if check == "temporary files" else "name another folder with --data-dir"),
            )
            continue
        free = shutil.disk_usage(where).free
        is_enough = free >= _DISK_BYTES_MIN
        yield Finding(
            check=check,
            level="ok" if is_enough else "advice",
            found=f"{folder}: {_size(free)} free",
            advice="" if is_enough else "free some space there: run logs and data need it",
        )


def _check_interfaces() -> Finding:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    shown = ", ".join(map(_describe_interface, names)) or "only the loopback interface"
    try:
        address = own_address(PROBE_ADDRESS)
    except OffbeatError:
        return Finding(
            check="network",
            level="advice",
            found=f"{shown}; no default route",
            advice="only hosts in the networks of these interfaces can be reached",
        )
    return Finding(check="network", level="ok", found=f"{shown}; {address} on the way to other hosts")


def _describe_interface(name: str) -> str:
    parts = []
    with suppress(OSError, ValueError):
        if (speed := int((_INTERFACES / name / "speed").read_text())) > 0:
            parts.append(f"{speed:,} Mbit/s")
    with suppress(OSError, ValueError):
        parts.append(f"MTU {int((_INTERFACES / name / 'mtu').read_text())}")
    return f"{name} ({', '.join(parts)})" if parts else name


def _check_host_name() -> Finding:
    name = socket.gethostname()
    advice = "with several hosts give MASTER_ADDR as a number; `offbeat run --check` shows what workers found"

    def look_up() -> list[str]:
        return sorted({str(where[0]) for *_, where in socket.getaddrinfo(name, None)})

    try:
        addresses = run_with_deadline(look_up, time.monotonic() + _LOOKUP_S)
    except OSError as error:
        slowly = f" within {_LOOKUP_S:g} s" if isinstance(error, TimeoutError) else ""
        return Finding(
            check="host name",
            level="advice",
            found=f"{name} does not resolve to an address{slowly}",
            advice=f"add it to /etc/hosts; {advice}",
        )
    found = f"{name} is {', '.join(addresses)}"
    if all(ip_address(one.partition("%")[0]).is_loopback for one in addresses):
        return Finding(
            check="host name",
            level="advice",
            found=f"{found}, where other hosts do not reach this one",
            advice=advice,
        )
    return Finding(check="host name", level="ok", found=found)


def _check_ports(environ: Mapping[str, str]) -> Finding:
    """Find whether processes of this host reach each other by the address that other hosts use."""
    try:
        host = own_address(PROBE_ADDRESS)
    except OffbeatError:
        host = "127.0.0.1"
    try:
        with socket.create_server((host, 0), family=_family(host)) as server:
            with socket.create_connection(server.getsockname()[:2], _CONNECT_S):
                pass
    except OSError as error:
        return Finding(
            check="ports",
            level="problem",
            found=f"a connection to a free port of {host} fails: {describe_os_error(error)}",
            advice="allow connections between the ports of this host: look at its firewall",
        )
    free = "free ports"
    with suppress(OSError, ValueError):
        first, last = _PORTS.read_text().split()
        free = f"free ports from {first} to {last}"
    port = environ.get("MASTER_PORT")
    store = f", and rank 0 or its launcher on MASTER_PORT, {port}" if port else ""
    return Finding(
        check="ports",
        level="ok",
        found=f"workers listen on {free}{store}, which hosts must allow each other",
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.0f} MiB"
