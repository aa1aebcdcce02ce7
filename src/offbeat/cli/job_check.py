"""The check of a job, in one of its workers: what `offbeat run --check` starts.

Workers meet in the job's store, send each other what they have found on their hosts, and connect to each
other as in a training. Then pairs of workers measure latency and rate of their connection, each worker in one
pair at a time. All of them learn what was found, and rank 0 prints it.

Latency is that of a control message and its answer, halved. The rate is that of bytes that are received into
memory, in one direction; between workers of one host they go through a Unix socket. In training either of two
workers may connect to the other, so the second of a pair tries that, too.

The check opens more files than a training would, so it raises this process's limit; what it says of the limit
is what it found before.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Final

from offbeat.cli import entry, output
from offbeat.cli.doctor import Finding, check_machine, exit_code, installed_versions
from offbeat.cli.tables import findings_lines
from offbeat.errors import LinkError, OffbeatError, describe_os_error
from offbeat.runtime.control.environment import load_tls, read_environment
from offbeat.runtime.control.meeting import Meeting, meet
from offbeat.runtime.control.rendezvous import descriptors_needed
from offbeat.runtime.transport import descriptors
from offbeat.runtime.transport.addresses import parse_address
from offbeat.runtime.transport.endpoint import Endpoint

PARTICIPANTS_MAX: Final = 32  # in pairs: as many rounds of measurements
_ON_ONE_HOST_MAX: Final = 4
_PINGS: Final = 20
_TRIAL_BYTES: Final = 2**16
_BYTES_MAX: Final = 2**26
_TRANSFER_S: Final = 0.3
_CONNECT_S: Final = 10.0
_MEASURE_S: Final = 45.0  # a pair: 64 KiB twice, and some messages
_ROUND_S: Final = 60.0  # as long as a pair may take, and some more
_REPORT_S: Final = 30.0
_SLOW_RATIO: Final = 0.5
_CLOCK_ERROR_S: Final = 1.0
_PING, _PONG, _TAKE, _TAKEN = b"i", b"o", b"t", b"d"


@dataclass(frozen=True, kw_only=True)
class Connection:
    """What a worker has measured of its connection to another one.

    Attributes:
        first, second: the workers; the first has measured.
        latency_s: of a message, in one direction.
        bytes_per_s: from the first to the second.
        clock_error_s: what the second's wall clock is ahead of the first's.
        error: why nothing could be measured, "" if it could.
    """

    first: int
    second: int
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    clock_error_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker reports of itself to the others.

    Attributes:
        worker: its id.
        host: the name of its host.
        address: where other hosts reach its host.
        addresses: where its links listen; none if they could not be opened.
        versions: of Python, offbeat and torch.
        findings: on its machine.
    """

    worker: int
    host: str
    address: str
    addresses: tuple[str, ...]
    versions: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def name(self) -> str:
        """The worker and its host."""
        return f"worker {self.worker} ({self.host}, {self.address})"


def main() -> int:
    """Check the job as one of its workers; return the exit code, which is 1 if there is a problem.

    Raises:
        OffbeatError: the other workers were not met, or a worker did not take part in time.
    """
    environment = read_environment()
    if environment.coordinator is not None or environment.is_newcomer:
        raise OffbeatError(
            "the check of a job looks at the workers that it begins with, and needs no coordinator: unset "
            "OFFBEAT_COORDINATOR and OFFBEAT_NEWCOMER, and start it on all workers"
        )
    findings = [*check_machine()]
    with descriptors.raised_descriptor_limit():
        descriptors.require_descriptors(descriptors_needed(environment))
        with meet(environment) as meeting:
            findings = _check_job(meeting, findings)
            if not meeting.worker:
                output.print_output(*findings_lines(findings))
    return exit_code(findings)


def _check_job(meeting: Meeting, findings: Sequence[Finding]) -> list[Finding]:
    """Measure the connections of all participants; return what was found on all workers and between them.

    Nothing is measured if a worker cannot open its links.

    Args:
        meeting: of the workers.
        findings: on this worker's machine.

    Raises:
        WorkerError: a worker did not take part in time.
    """
    links: _Links | None = None
    with ExitStack() as stack:
        try:
            links = _Links(meeting)
            stack.callback(links.endpoint.close)
        except (OffbeatError, OSError) as error:
            reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
            if reason not in [one.found for one in findings]:
                findings = [*findings, Finding(check="links", level="problem", found=reason)]
        own = Report(
            worker=meeting.worker,
            host=socket.gethostname(),
            address=meeting.host,
            addresses=() if links is None else links.endpoint.addresses,
            versions=installed_versions(),
            findings=tuple(findings),
        )
        texts = meeting.gather("report", json.dumps(asdict(own)), _REPORT_S)
        reports = [_parse_report(text) for text in texts]
        measured: list[Connection] = []
        if links is not None and all(report.addresses for report in reports):
            measured = _measure_pairs(meeting, links, reports)
    return summarize_machines(reports) + summarize_connections(reports, measured)


def _measure_pairs(meeting: Meeting, links: _Links, reports: Sequence[Report]) -> list[Connection]:
    """Return what the participants have measured.

    Raises:
        WorkerError: a worker did not take part in time.
    """
    chosen = choose_participants(reports)
    for worker in chosen:
        if worker != meeting.worker:
            links.endpoint.add_peer(_node(worker), reports[worker].addresses)
    measured = []
    for number, pairs in enumerate(rounds_of_pairs(chosen)):
        mine = []
        for first, second in pairs:
            if first == meeting.worker:
                mine.append(links.measure(first, second))
            elif second == meeting.worker:
                mine += connect_back(second, reports[first])
        for text in meeting.gather(f"round {number}", json.dumps([asdict(one) for one in mine]), _ROUND_S):
            measured += [Connection(**one) for one in json.loads(text)]
    return measured


def connect_back(worker: int, target: Report) -> list[Connection]:
    """Connect from a worker to another one as in training; return the connection if that fails.

    Args:
        worker: this worker.
        target: of the other one; nothing is tried if they are on one host.
    """
    places = [parse_address(text) for text in target.addresses]
    if any(place.socket_name and not place.unusable_reason() for place in places):
        return []  # on one host
    for place in places:
        if not place.unusable_reason():
            try:
                socket.create_connection((place.host, place.port), _CONNECT_S).close()
            except OSError as error:
                reason = f"{place.text} cannot be reached from worker {worker}: {describe_os_error(error)}"
                return [Connection(first=worker, second=target.worker, error=reason)]
    return []


def _parse_report(text: str) -> Report:
    plain: dict[str, Any] = json.loads(text)
    findings = tuple(Finding(**one) for one in plain.pop("findings"))
    plain |= {name: tuple(plain[name]) for name in ("addresses", "versions")}
    return Report(**plain, findings=findings)


def choose_participants(reports: Sequence[Report]) -> list[int]:
    """Return the workers between which connections are measured.

    Of several hosts the first worker of each, and of one host the first four; at most `PARTICIPANTS_MAX`.
    """
    first = {report.address: report.worker for report in reversed(reports)}
    if len(first) == 1:
        return [report.worker for report in reports[:_ON_ONE_HOST_MAX]]
    return sorted(first.values())[:PARTICIPANTS_MAX]


def rounds_of_pairs(workers: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds in which each worker is in at most one pair; each pair, lower first, is in one round.

    Source: the circle method of round-robin tournaments.
    """
    seats: list[int | None] = [*workers, *([None] if len(workers) % 2 else [])]
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        yield sorted((min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None)
        seats.insert(1, seats.pop())


class _Links:
    """One worker's connections: it answers the others at any time, and measures when `measure` is called."""

    def __init__(self, meeting: Meeting) -> None:
        self._answers: queue.SimpleQueue[tuple[str, bytes | LinkError]] = queue.SimpleQueue()
        self._tag = meeting.worker << 32
        self.endpoint = Endpoint(
            _node(meeting.worker),
            job=meeting.job,
            token=meeting.token,
            on_message=self._on_message,
            on_lost=lambda error: self._answers.put((error.peer, error)),
            host=meeting.host,
            connect_s=_CONNECT_S,
            tls=load_tls(),
        )

    def measure(self, first: int, second: int) -> Connection:
        """Measure the connection to the second worker, as the first."""
        peer, limit_s = _node(second), time.monotonic() + _MEASURE_S
        try:
            latencies_s, errors_s = [], []
            for _ in range(_PINGS):
                began_s, began_at = time.perf_counter(), time.time()
                (clock,) = struct.unpack("!d", self._ask(peer, _PING, limit_s)[1:])
                latencies_s.append((time.perf_counter() - began_s) / 2)
                errors_s.append(clock - (began_at + time.time()) / 2)
            latency_s = median(latencies_s)
            rate = self._rate(peer, _TRIAL_BYTES, latency_s, limit_s)
            size = int(min(max(rate * _TRANSFER_S, _TRIAL_BYTES), _BYTES_MAX))
            return Connection(
                first=first,
                second=second,
                latency_s=latency_s,
                bytes_per_s=self._rate(peer, size, latency_s, limit_s),
                clock_error_s=median(errors_s),
            )
        except LinkError as error:
            return Connection(first=first, second=second, error=str(error))

    def _rate(self, peer: str, size: int, latency_s: float, limit_s: float) -> float:
        self._tag += 1
        began_s = time.perf_counter()
        self.endpoint.send_tensor(peer, self._tag, memoryview(bytes(size)))
        self._ask(peer, _TAKE + struct.pack("!QQ", self._tag, size), limit_s)
        return size / max(time.perf_counter() - began_s - latency_s, 1e-9)

    def _ask(self, peer: str, message: bytes, limit_s: float) -> bytes:
        """Send a message to a peer and return its answer.

        Raises:
            LinkError: the peer was not reached, was lost, or did not answer in time.
        """
        self.endpoint.send(peer, message)
        while True:
            try:
                sender, answer = self._answers.get(timeout=max(0.0, limit_s - time.monotonic()))
            except queue.Empty:
                raise LinkError(peer, f"{peer} did not answer within {_MEASURE_S:g} s") from None
            if sender != peer:  # one that was lost earlier, or answers late
                continue
            if isinstance(answer, LinkError):
                raise answer
            return answer

    def _on_message(self, peer: str, message: bytes) -> None:
        kind = message[:1]
        if kind == _PING:
            self.endpoint.send(peer, _PONG + struct.pack("!d", time.time()))
        elif kind == _TAKE:
            tag, size = struct.unpack("!QQ", message[1:])
            missing = [size]
            on_data = partial(self._on_data, peer, missing)
            self.endpoint.post_receive(peer, tag, memoryview(bytearray(size)), on_data)
        else:
            self._answers.put((peer, message))

    def _on_data(self, peer: str, missing: list[int], offset: int, length: int) -> None:
        missing[0] -= length
        if not missing[0]:
            self.endpoint.send(peer, _TAKEN)


def _node(worker: int) -> str:
    return f"worker-{worker}"


# What it means ---------------------------------------------------------------------------------------------


def summarize_machines(reports: Sequence[Report]) -> list[Finding]:
    """Return the findings of all workers, equal ones of several workers as one."""
    workers_of: dict[Finding, list[int]] = {}
    for report in reports:
        for finding in report.findings:
            workers_of.setdefault(finding, []).append(report.worker)
    checks = list(dict.fromkeys(finding.check for finding in workers_of))
    merged = []
    for finding in sorted(workers_of, key=lambda one: checks.index(one.check)):
        workers = workers_of[finding]
        of = "" if len(workers) == len(reports) else f" (workers {', '.join(map(str, workers))})"
        merged.append(replace(finding, found=finding.found + of))
    return merged + _compare_versions(reports)


def _compare_versions(reports: Sequence[Report]) -> list[Finding]:
    found = {one.versions for one in reports}
    if len(found) == 1:
        return []
    return [
        Finding(
            check="versions",
            level="advice",
            found=f"{len(found)} different combinations of Python, offbeat and torch",
            advice="install the same on all hosts: results differ by version, and workers of versions that "
            "cannot talk to each other refuse to start",
        )
    ]


def summarize_connections(reports: Sequence[Report], measured: Sequence[Connection]) -> list[Finding]:
    """Return what the connections between workers mean for a training."""
    by_worker: Mapping[int, Report] = {report.worker: report for report in reports}
    failed = {(one.first, one.second) for one in measured if one.error}
    findings = [
        Finding(
            check="connections",
            level="problem",
            found=f"{by_worker[one.first].name} and {by_worker[one.second].name}: {one.error}",
            advice="allow connections between these hosts on all ports above 1024: look at their firewalls",
        )
        for one in measured
        if one.error and (one.first < one.second or (one.second, one.first) not in failed)
    ]
    good = [one for one in measured if not one.error]
    if not good:
        return findings
    slowest = min(good, key=lambda one: one.bytes_per_s)
    latest = max(good, key=lambda one: one.latency_s)
    of_all = median(one.bytes_per_s for one in good)
    findings.append(
        Finding(
            check="connections",
            level="ok",
            found=f"{_mbit(of_all)} and {median(one.latency_s for one in good) * 1e3:.2f} ms at the median "
            f"of {len(good)}; the slowest, of workers {slowest.first} and {slowest.second}, "
            f"{_mbit(slowest.bytes_per_s)}; the longest, of workers {latest.first} and {latest.second}, "
            f"{latest.latency_s * 1e3:.2f} ms",
        )
    )
    return findings + _find_slow_workers(by_worker, good) + _find_wrong_clocks(by_worker, good)


def _find_slow_workers(by_worker: Mapping[int, Report], good: Sequence[Connection]) -> list[Finding]:
    """Return the workers whose fastest connection is slower than half the usual; of two workers, neither."""
    workers = sorted({one for connection in good for one in (connection.first, connection.second)})
    if len(workers) < 3:
        return []
    fastest = {
        worker: max(one.bytes_per_s for one in good if worker in (one.first, one.second))
        for worker in workers
    }
    usual = median(fastest.values())
    return [
        Finding(
            check="connections",
            level="advice",
            found=f"{by_worker[worker].name} is connected to no other by more than {_mbit(rate)}, where the "
            f"median is {_mbit(usual)}",
            advice="look at the line and the other work of this host",
        )
        for worker, rate in fastest.items()
        if rate < _SLOW_RATIO * usual
    ]


def _find_wrong_clocks(by_worker: Mapping[int, Report], good: Sequence[Connection]) -> list[Finding]:
    wrong = [one for one in good if abs(one.clock_error_s) > _CLOCK_ERROR_S]
    if not wrong:
        return []
    worst = max(wrong, key=lambda one: abs(one.clock_error_s))
    return [
        Finding(
            check="clocks",
            level="advice",
            found=f"those of {by_worker[worst.first].name} and {by_worker[worst.second].name} differ by "
            f"{abs(worst.clock_error_s):.1f} s",
            advice="synchronise them (NTP): certificates and the times in outputs depend on them",
        )
    ]


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OffbeatError as failure:
        sys.exit(entry.print_error(str(failure), entry.FAILED))
