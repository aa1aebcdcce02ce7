"""Bounded staleness on a parameter server: who may start the next step, with whose samples.

Nothing here knows where parameters are, nor how they are pushed and pulled.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias, assert_never

from offbeat.errors import ProtocolError
from offbeat.events import (
    Action,
    Brought,
    Clocked,
    CloseServers,
    Deal,
    Dismiss,
    Evaluated,
    Event,
    Failed,
    Finished,
    Grant,
    Halted,
    Joined,
    Left,
    LeftOut,
    Lost,
    NodeEvent,
    PeerReachable,
    PeerUnreachable,
    Preempted,
    Ready,
    Recalled,
    Refuse,
    Saving,
    ServerMissed,
    ServerReached,
    StepTimed,
    Stop,
    Tick,
    ValidationEvent,
    Wants,
)
from offbeat.policies.data.worker_assigner import SoloDealing
from offbeat.policies.ps.manager import client_of
from offbeat.policies.staleness.adaptive_bound import LprController
from offbeat.policies.staleness.clock_gate import ConsistencyGate, Counts, Opened
from offbeat.policies.stragglers.classifier import StragglerClassifier

_FIRST: Final = 0  # the worker whose parameters all begin with
_NEVER: Final = 2**62  # a clock
_MISSED_S: Final = 15.0  # longer than the manager needs until one of two servers that are apart is out

Shards: TypeAlias = Literal["dynamic", "equal"]


@dataclass(kw_only=True, slots=True)
class _Worker:
    """What is known of a worker that is not gone.

    Attributes:
        peer: its link name.
        place: where its process is.
        has_begun: it could take steps.
        has_finished: its loop is over.
        epoch: of its last step.
        iteration: of that step in its epoch.
    """

    peer: str
    place: str
    has_begun: bool = False
    has_finished: bool = False
    epoch: int = -1
    iteration: int = -1


class BoundedStaleness:
    """Answers every finished step with the clock of the next, and says when that may start.

    Nobody starts before all workers of the start could, or are gone. With s = 0 training is bulk-synchronous
    (BSP), with no bound asynchronous (ASP), in between stale-synchronous (SSP); with `dynamic` the bound
    follows the loss (DTSSP). When a version of the parameters is complete, first its losses count and the
    bound changes, and then those are let go whom that bound lets go.

    Who is dealt samples and has none rests (see `ConsistencyGate`): so the end of an epoch, whose last
    blocks are with a slow worker, holds nobody back, and who has nothing holds nobody back either. A Grant
    says so, and another one comes with the next samples.

    The job goes on with whoever is left, unless worker 0 goes before it could take steps: all begin with its
    parameters. Who leaves without having finished, is lost or fails hands back the samples that it had. Who
    keeps others waiting for too long is refused; a worker that the coordinator does not hear is not late.
    So is one that has not reached a server for `_MISSED_S`, unless most processes miss that server: of
    several, the one that misses most servers, else the last. Where there is a bound, others wait for what it
    cannot push; where there is none, it is out only if others wait for it.

    When a worker is about to be taken away, all go on up to the latest clock that is under way, and are told
    with the Grant of their next one (`Grant.is_preempted`); without a bound, with their next Grant.

    With a *warm start* the first worker, or who is the first once it is gone, takes some steps alone, while
    the others rest. It is over early where the others have been dealt all samples that are left.

    Source: those of `ConsistencyGate` and `LprController`. Deviations: theirs; workers that come and go;
    samples that are dealt as they are needed; stragglers, whom others may leave further behind.

    Args:
        world: how many workers make up the job at the start; their ids are 0 to `world` - 1.
        s: the bound, at least 0; None for none. With `dynamic`, the bound at first.
        counts: what a clock is (see `ConsistencyGate`).
        deadline_s: how long others wait for a step of a worker, in seconds.
        shards: "dynamic" deals samples as they are needed; with "equal" nothing is dealt.
        dynamic: arguments of `LprController`; None for a bound that stays.
        detector: arguments of `StragglerClassifier`, whose stragglers hold others back only beyond the
            largest bound of `dynamic`, which it needs; None makes no difference between workers.
        warm_start: steps that the first worker takes alone, at least 0.

    Raises:
        ValueError: an argument out of range, or two that contradict each other.
    """

    def __init__(
        self,
        world: int,
        *,
        s: int | None = 3,
        counts: Counts = "own",
        deadline_s: float = 600.0,
        shards: Shards = "dynamic",
        dynamic: dict[str, Any] | None = None,
        detector: dict[str, Any] | None = None,
        warm_start: int = 0,
    ) -> None:
        if world < 1:
            raise ValueError(f"expected a world of at least 1 worker, got {world}")
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"expected a finite deadline of more than 0 s, got {deadline_s}")
        if shards not in ("dynamic", "equal"):
            raise ValueError(f"expected shards dynamic or equal, got {shards!r}")
        if warm_start < 0:
            raise ValueError(f"expected a warm start of at least 0 steps, got {warm_start}")
        if dynamic is not None and s is None:
            raise ValueError("expected a bound that may change, got none at all: give s or leave out dynamic")
        if detector is not None and dynamic is None:
            raise ValueError("expected dynamic along with detector: its s_max bounds how far stragglers fall")
        self._world, self._deadline_s = world, deadline_s
        self._controller = None if dynamic is None or s is None else LprController(s, **dynamic)
        s_max = None if self._controller is None else self._controller.s_max
        self._gate = ConsistencyGate(s, counts, s_max)
        self._dealing = SoloDealing() if shards == "dynamic" else None
        self._classifier = None if detector is None else StragglerClassifier(**detector)
        self._workers: dict[int, _Worker] = {}
        self._gone: set[int] = set()
        self._has_started = False
        self._awaited: set[int] = set()  # of the start, and could not take a step yet
        self._since_s: dict[int, float] = {}  # who keeps others waiting, since when
        self._unheard: set[int] = set()  # workers that the coordinator does not hear
        self._missed: dict[tuple[int, int], float] = {}  # by worker and server that it misses: since when
        self._is_over = False  # everybody has been dismissed, or is gone
        self._alone_steps = warm_start  # that are left to be taken by one worker
        self._alone: int | None = None  # who takes them, None where that is nobody
        self._preempted_clock: int | None = None  # after which `Grant.is_preempted`

    def handle(self, event: Event) -> list[Action]:
        """Answer with Grants, Deals, a Refuse, a Dismiss, a CloseServers or nothing.

        Raises:
            ProtocolError: a message that no worker of a running job can send.
        """
        if self._is_over:
            return self._end(event)
        match event:
            case Joined():
                return self._joined(event)
            case Clocked():
                return self._clocked(event)
            case Wants():
                return self._wants(event)
            case Saving():
                return self._saving(event)
            case Finished():
                return self._finished(event)
            case Left() | Lost() | Failed():
                return self._left(event)
            case Tick():
                return self._tick(event.now_s)
            case Ready() | Halted() | Recalled() | Brought():
                raise ProtocolError(
                    f"expected nothing about groups, of which there are none, got {_said(event)}"
                )
            case ServerMissed() | ServerReached():
                self._note_whom_it_misses(event)
                return []
            case Preempted():
                if self._preempted_clock is None:
                    self._preempted_clock = -1 if self._gate.s is None else self._gate.latest
                return []
            case LeftOut() | StepTimed() | Evaluated() | NodeEvent() | ValidationEvent():
                return []
            case PeerUnreachable() | PeerReachable():
                if event.worker is None and event.peer in self._workers:
                    self._hears(event.peer, isinstance(event, PeerReachable))
                return []
            case _:
                assert_never(event)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is not an argument of the constructor, as plain data."""
        return {
            "controller": None if self._controller is None else self._controller.state_dict(),
            "gate": self._gate.state_dict(),
            "dealing": None if self._dealing is None else self._dealing.state_dict(),
            "classifier": None if self._classifier is None else self._classifier.state_dict(),
            "workers": [[worker, asdict(one)] for worker, one in self._workers.items()],
            "gone": sorted(self._gone),
            "has_started": self._has_started,
            "awaited": sorted(self._awaited),
            "since_s": [list(one) for one in self._since_s.items()],
            "unheard": sorted(self._unheard),
            "missed": [[*pair, since_s] for pair, since_s in self._missed.items()],
            "is_over": self._is_over,
            "alone_steps": self._alone_steps,
            "alone": self._alone,
            "preempted_clock": self._preempted_clock,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a policy with the same arguments."""
        for part, name in (
            (self._controller, "controller"),
            (self._gate, "gate"),
            (self._dealing, "dealing"),
            (self._classifier, "classifier"),
        ):
            if part is not None:
                part.load_state_dict(state[name])
        self._workers = {worker: _Worker(**one) for worker, one in state["workers"]}
        self._gone, self._awaited = set(state["gone"]), set(state["awaited"])
        self._has_started, self._is_over = state["has_started"], state["is_over"]
        self._since_s = dict(state["since_s"])
        self._unheard = set(state["unheard"])
        self._missed = {(worker, server): since_s for worker, server, since_s in state["missed"]}
        self._alone_steps, self._alone = state["alone_steps"], state["alone"]
        self._preempted_clock = state["preempted_clock"]

    # Coming and going ------------------------------------------------------------------------------------

    def _joined(self, event: Joined) -> list[Action]:
        if event.worker in self._workers or event.worker in self._gone:
            return []  # the assembly answers
        self._workers[event.worker] = _Worker(peer=event.peer, place=event.place)
        if self._dealing is not None:
            self._dealing.joined(event.worker)
        if not self._has_started and len(self._workers) == self._world:
            self._has_started = True
            self._awaited = set(self._workers)
        return []

    def _finished(self, event: Finished) -> list[Action]:
        one = self._known(event)
        self._ends(event.worker, one)
        one.has_finished = True
        if self._dealing is not None:
            self._dealing.finished(event.worker)
        return self._go_on() + self._dismiss()

    def _left(self, event: Left | Lost | Failed) -> list[Action]:
        if event.worker not in self._workers:
            if event.worker in self._gone or not self._has_started:
                return []
            raise ProtocolError(f"expected a worker that has joined, got {_said(event)}")
        if self._has_not_given([event.worker]) and len(self._workers) > 1:
            return self._stop(_why_gone(event))
        self._part(event.worker)
        return self._go_on() + self._dismiss()

    def _has_not_given(self, going: list[int]) -> bool:
        """Whether the one whose parameters all begin with is among these, and has not given them yet."""
        return _FIRST in going and _FIRST in self._awaited

    def _stop(self, cause: str) -> list[Action]:
        self._part(_FIRST)
        self._is_over = True
        reason = f"worker {_FIRST} is out, and the others have not got its parameters to begin with: {cause}"
        return [Stop(worker=_FIRST, step=None, reason=reason)]

    def _part(self, worker: int) -> None:
        self._ends(worker, self._workers.pop(worker))
        self._gone.add(worker)
        self._unheard.discard(worker)
        self._missed = {pair: since_s for pair, since_s in self._missed.items() if pair[0] != worker}
        if self._dealing is not None:
            self._dealing.gone(worker)

    def _ends(self, worker: int, one: _Worker) -> None:
        """The worker takes no further step."""
        self._awaited.discard(worker)
        if worker not in self._gate:
            return
        self._gate.leave(worker)
        if self._classifier is not None:
            self._classifier.remove(worker)
            self._gate.set_stragglers(self._classifier.stragglers)

    def _dismiss(self) -> list[Action]:
        """Let everybody go once all have finished who have ever begun."""
        if not self._has_started or self._awaited:
            return []
        if not self._workers:
            self._is_over = True
            return [_close_servers()]
        begun = [one for one in self._workers.values() if one.has_begun or one.has_finished]
        if not begun or not all(one.has_finished for one in begun):
            return []
        self._is_over = True
        return [Dismiss(reason="everybody has finished")]

    def _end(self, event: Event) -> list[Action]:
        """Everybody has been dismissed, or is gone."""
        if isinstance(event, Joined):
            return [_turn_away(event.worker, event.peer)]
        if isinstance(event, Clocked) and event.worker in self._workers:
            refused = _turn_away(event.worker, self._workers.pop(event.worker).peer)
            return [refused] if self._workers else [refused, _close_servers()]
        if not isinstance(event, Left | Lost | Failed) or self._workers.pop(event.worker, None) is None:
            return []
        return [] if self._workers else [_close_servers()]

    # Steps and samples -----------------------------------------------------------------------------------

    def _clocked(self, event: Clocked) -> list[Action]:
        worker, one = event.worker, self._known(event)
        if event.clock is None:
            if one.has_begun:
                raise ProtocolError(f"expected a clock, for it has begun, got {_said(event)}")
            one.has_begun = True
            self._awaited.discard(worker)
            self._gate.enter(worker, event.version)
            if self._classifier is not None:
                self._classifier.add(worker)
            return self._go_on(event)
        self._check_step(event, event.clock)
        self._since_s.pop(worker, None)
        if self._dealing is not None:
            self._dealing.stepped(worker, event.clock, event.blocks)
        if self._controller is not None and event.loss is not None:
            self._controller.stepped(event.clock, event.samples, event.loss)
        self._observe(event, one)
        self._alone_steps = max(0, self._alone_steps - 1)
        return self._go_on(event)

    def _check_step(self, event: Clocked, clock: int) -> None:
        worker, gate = event.worker, self._gate
        required = gate.required(worker) if worker in gate and gate.runs(worker) else None
        if required is None or clock != gate.clock(worker):
            may = f"might start at {gate.clock(worker)}" if required is not None else "might not start"
            raise ProtocolError(f"expected no step at clock {clock} of worker {worker}, which {may}")
        if event.version < required:
            raise ProtocolError(
                f"expected worker {worker} to take its step at clock {clock} with version {required} of the "
                f"parameters at least, got {event.version}"
            )
        if event.blocks and self._dealing is None:
            raise ProtocolError(f"expected no blocks, for none are dealt, got {_said(event)}")

    def _observe(self, event: Clocked, one: _Worker) -> None:
        if self._classifier is None:
            return
        one.iteration = one.iteration + 1 if one.epoch == event.epoch else 0
        one.epoch = event.epoch
        verdicts = self._classifier.observe(
            event.worker, epoch=event.epoch, iteration=one.iteration, compute_s=event.compute_s
        )
        if verdicts:
            self._gate.set_stragglers(self._classifier.stragglers)

    def _wants(self, event: Wants) -> list[Action]:
        self._known(event)
        self._dealt(event).wants(event)
        return self._go_on(event)

    def _saving(self, event: Saving) -> list[Action]:
        self._known(event)
        self._dealt(event).saving(event)
        return self._go_on()

    def _dealt(self, event: Wants | Saving) -> SoloDealing:
        if self._dealing is None:
            raise ProtocolError(f"expected nothing about samples, for none are dealt, got {_said(event)}")
        return self._dealing

    # What follows ----------------------------------------------------------------------------------------

    def _go_on(self, event: Clocked | Wants | None = None) -> list[Action]:
        """Say who gets which samples, and who may start."""
        deals = [] if self._dealing is None else self._dealing.deals()
        concerned = {deal.worker for deal in deals if isinstance(deal, Deal)}
        told = set()
        if event is not None:
            concerned.add(event.worker)
        if (alone := self._who_is_alone()) != self._alone:
            self._alone = alone
            concerned |= self._workers.keys()
        if isinstance(event, Clocked):
            told.add(event.worker)
            if event.clock is not None and self._may_compute(event.worker):
                self._gate.advance(event.worker)
        told |= {worker for worker in sorted(concerned) if self._has_turned(worker)}
        why = self._complete()
        if self._dealing is not None:
            self._dealing.passed(_NEVER if self._gate.s is None else self._gate.version)
        return [*self._grants(told, why), *deals]

    def _has_turned(self, worker: int) -> bool:
        """Let a worker run as long as it may compute, and rest otherwise; returns whether it now does so."""
        gate = self._gate
        if worker not in gate or gate.runs(worker) == self._may_compute(worker):
            return False
        if gate.runs(worker):
            gate.rest(worker)
        else:
            gate.enter(worker)
        return True

    def _may_compute(self, worker: int) -> bool:
        if self._alone is not None and worker != self._alone:
            return False
        return self._dealing is None or self._dealing.may_compute(worker)

    def _who_is_alone(self) -> int | None:
        """Who takes the steps of the warm start now; None where that is over."""
        if not self._alone_steps:
            return None
        first = min((worker for worker in self._workers if worker in self._gate), default=None)
        if self._dealing is not None and first in self._dealing.waiting and self._dealing.holders():
            self._alone_steps = 0
            return None
        return first

    def _complete(self) -> list[str]:
        """Versions may be complete now: their losses say which bound holds from now on; returns why."""
        if self._controller is None:
            return []
        why = self._controller.completed(self._gate.version)
        if why:
            self._gate.set_bound(self._controller.s)
        return why

    def _grants(self, told: set[int], why: list[str]) -> list[Action]:
        """Tell these, who may start now, and who rests while the others go on."""
        opened = {one.worker: one for one in self._gate.opened()} if self._may_open() else {}
        told = {*told, *opened, *self._gate.moved()}
        return [
            self._let_go(opened[worker], why) if worker in opened else self._keep(worker)
            for worker in sorted(told)
        ]

    def _may_open(self) -> bool:
        return self._has_started and not self._awaited

    def _let_go(self, opened: Opened, why: list[str]) -> Grant:
        ahead = opened.clock - self._gate.version
        bound = "there is no bound" if opened.bound is None else f"the bound is {opened.bound}"
        if opened.bound != self._gate.s:
            bound += " for a straggler"
        return Grant(
            worker=opened.worker,
            clock=opened.clock,
            version=opened.version,
            complete=self._gate.version,
            bound=opened.bound,
            may_start=True,
            leads=self._leads(opened.worker),
            is_preempted=self._is_preempted(opened.clock),
            reason="; ".join([f"it is {ahead} ahead of the slowest", bound, *why]),
        )

    def _keep(self, worker: int) -> Grant:
        gate, clock = self._gate, self._gate.clock(worker)
        if self._alone is not None and worker != self._alone:
            reason = f"worker {self._alone} takes {self._alone_steps} more steps alone"
        elif not gate.runs(worker):
            reason = "it has no samples"
        elif not self._may_open():
            reason = "not everybody is here yet"
        else:
            reason = f"it is {clock - gate.version} ahead of the slowest, and the bound is {gate.s}"
        return Grant(
            worker=worker,
            clock=clock,
            version=0 if gate.s is None else max(0, clock - gate.s),
            complete=gate.version,
            bound=gate.s,
            may_start=False,
            leads=self._leads(worker),
            is_preempted=self._is_preempted(clock),
            reason=reason,
        )

    def _is_preempted(self, clock: int) -> bool:
        return self._preempted_clock is not None and clock > self._preempted_clock

    def _leads(self, worker: int) -> bool:
        return worker == min(self._workers)

    # Who keeps others waiting ----------------------------------------------------------------------------

    def _hears(self, worker: int, is_heard: bool) -> None:
        if is_heard:
            self._unheard.discard(worker)
        else:
            self._unheard.add(worker)

    def _tick(self, now_s: float) -> list[Action]:
        holding = self._holding() - self._unheard if self._has_started else set()
        self._since_s = {worker: self._since_s.get(worker, now_s) for worker in sorted(holding)}
        late = [worker for worker, since_s in self._since_s.items() if now_s - since_s > self._deadline_s]
        if late:
            return self._refuse(late, f"others have waited for it for more than {self._deadline_s:g} s")
        cut_off = self._most_cut_off(
            now_s, holding | self._stepping() if self._gate.s is not None else holding
        )
        if cut_off is None:
            return []
        worker, servers = cut_off
        self._missed = dict.fromkeys(self._missed, now_s)  # without this one, the others may reach all
        missed = ", ".join(f"server-{server}" for server in servers)
        reason = f"it has not reached {missed} for more than {_MISSED_S:g} s, and others need what it pushes"
        return self._refuse([worker], reason)

    def _refuse(self, workers: list[int], reason: str) -> list[Action]:
        if self._has_not_given(workers):
            return self._stop(reason)
        refused = [
            Refuse(peer=self._workers[worker].peer, reason=f"worker {worker} is out: {reason}")
            for worker in workers
        ]
        for worker in workers:
            self._part(worker)
        return [*refused, *self._go_on(), *self._dismiss()]

    def _note_whom_it_misses(self, event: ServerMissed | ServerReached) -> None:
        worker = client_of(event.node)
        if worker is None or worker not in self._workers:
            return
        if isinstance(event, ServerMissed):
            self._missed.setdefault((worker, event.server), event.now_s)
        else:
            self._missed.pop((worker, event.server), None)

    def _stepping(self) -> set[int]:
        """Who takes a step now, or waits to start one, as far as the coordinator hears them."""
        heard = self._workers.keys() - self._unheard
        return {worker for worker in heard if worker in self._gate and self._gate.runs(worker)}

    def _most_cut_off(self, now_s: float, workers: set[int]) -> tuple[int, list[int]] | None:
        """Return, of these, the one that misses most servers, else the last, with the servers.

        A server that most processes miss is not held against them.
        """
        missing = Counter(server for _, server in self._missed)  # a process reports for all its workers
        processes = len({one.place for one in self._workers.values()})
        found: dict[int, list[int]] = {}
        for (worker, server), since_s in sorted(self._missed.items()):
            is_held_against = 2 * missing[server] <= processes
            if worker in workers and is_held_against and now_s - since_s > _MISSED_S:
                found.setdefault(worker, []).append(server)
        if not found:
            return None
        worker = max(found, key=lambda one: (len(found[one]), one))
        return worker, found[worker]

    def _holding(self) -> set[int]:
        """Who could take a step for which others wait: to begin, at the gate, for samples, to end."""
        if self._awaited:
            return self._awaited
        holding = set(self._gate.holding())
        idle = set(self._gate.waiting)
        if self._alone is not None:
            idle |= self._workers.keys() - {self._alone}
        if self._dealing is not None:
            holding |= self._dealing.holders() - idle
            idle |= self._dealing.waiting
        if self._alone is not None and len(self._workers) > 1:
            holding |= {self._alone} - idle
        if any(one.has_finished for one in self._workers.values()):
            working = {
                worker for worker, one in self._workers.items() if one.has_begun and not one.has_finished
            }
            holding |= working - idle
        return holding

    def _known(self, event: Clocked | Wants | Saving | Finished) -> _Worker:
        one = self._workers.get(event.worker)
        if one is None or not self._has_started or one.has_finished:
            raise ProtocolError(f"expected a worker that takes part in a running job, got {_said(event)}")
        return one


def _close_servers() -> CloseServers:
    return CloseServers(reason="all workers are gone")


def _turn_away(worker: int, peer: str) -> Refuse:
    return Refuse(peer=peer, reason=f"worker {worker} cannot take part: it came when all others were done")


def _why_gone(event: Left | Lost | Failed) -> str:
    match event:
        case Left():
            return "it has left"
        case Lost():
            return event.cause
        case Failed():
            return f"it failed after {event.step} steps: {event.error}"


def _said(event: Event) -> str:
    return f"{type(event).__name__} of worker {getattr(event, 'worker', None)}"
