"""`TaskGraph` and `IterationScheduler` against an adversary and a model that recomputes every state."""

from __future__ import annotations

import json
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.policies.ps.task_graph import (
    IterationScheduler,
    TaskFinished,
    TaskGraph,
    TaskNeedsCallees,
    TaskRun,
    TaskWithdrawn,
)


class Trial:
    """A random cluster, and the actions that the definitions demand of the graph, recomputed from everything.

    Attributes:
        starts: number of the graph's actions, by kind.
        after: by task, all that has to finish before, whether it is given as an edge or follows from tau.
        calls: by open task and callee, its state.
        needy: the tasks that are to be issued again.
        late_calls: calls that were dropped or withdrawn while they ran.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.graph = TaskGraph()
        self.tau = self.random.choice([0, 1, 2, None])
        self.iterations = IterationScheduler(self.graph, self.tau)
        self.up = ["n0", "n1", "n2", "n3"]
        self.nodes = 4
        self.after, self.parent, self.calls = {}, {}, {}
        self.over, self.needy, self.late_calls = set(), [], []
        self.numbers = []  # of the iterations
        self.taus = []
        self.starts = Counter()

    def runs(self, state):
        return [TaskRun(n, c) for n, calls in self.calls.items() for c, now in calls.items() if now == state]

    def nodes_some(self):
        return self.random.sample(self.up, self.random.randint(1, min(3, len(self.up))))

    def some(self, numbers):
        return self.random.sample(numbers, self.random.randint(0, min(3, len(numbers))))

    # Events; each returns the graph's actions, and those that it had to emit beyond the definitions below.

    def add(self):
        peers = [n for n, parent in self.parent.items() if parent is None or n in self.over]
        after, callees = self.some(peers), self.nodes_some()
        number, starts = self.graph.add(callees, after=after)
        self.know(number, None, after, callees)
        return starts, []

    def add_subtask(self, parent):
        peers = [n for n, one in self.parent.items() if one == parent or n in self.over]
        after, callees = self.some(peers), self.nodes_some()
        number, starts = self.graph.add(callees, after=after, parent=parent)
        self.know(number, parent, after, callees)
        return starts, []

    def issue(self):
        callees = self.nodes_some()
        number, starts = self.iterations.issue(callees)
        before = 0 if self.tau is None else max(0, len(self.numbers) - self.tau)
        self.know(number, None, self.numbers[:before], callees)
        self.numbers.append(number)
        self.taus.append(self.tau)
        return starts, []

    def know(self, number, parent, after, callees):
        assert number not in self.after
        self.after[number], self.parent[number] = set(after), parent
        self.calls[number] = dict.fromkeys(callees, "issued")

    def set_tau(self):
        self.tau = self.random.choice([0, 1, 2, 5, None])
        self.iterations.set_tau(self.tau)
        return [], []

    def start(self, run):
        self.graph.on_started(*run)
        self.calls[run.task][run.callee] = "running"
        return [], []

    def finish(self, run):
        self.calls[run.task][run.callee] = "returned"
        return self.graph.on_returned(*run), []

    def kill(self):
        node = self.up.pop(self.random.randrange(len(self.up)))
        if self.random.random() < 0.7:
            self.up.append(f"n{self.nodes}")
            self.nodes += 1
        lost = [TaskRun(n, c) for n, calls in self.calls.items() for c, now in calls.items()]
        lost = [run for run in lost if run.callee == node and self.calls[run.task][node] != "finished"]
        withdrawn = set()
        for number, parent in self.parent.items():  # parents first
            if number in self.calls and (parent in lost or (parent and parent.task in withdrawn)):
                withdrawn.add(number)
        for number in withdrawn:
            self.late_calls += [
                TaskRun(number, c) for c, now in self.calls.pop(number).items() if now == "running"
            ]
            self.over.add(number)
        self.needy = [number for number in self.needy if number not in withdrawn]
        needy = []
        for number, _ in lost:
            if number not in withdrawn:
                if self.calls[number].pop(node) == "running":
                    self.late_calls.append(TaskRun(number, node))
                if not self.calls[number]:
                    needy.append(number)
        self.needy += needy
        starts = self.graph.on_node_lost(node)
        assert self.graph.on_node_lost(node) == []
        return starts, [*map(TaskWithdrawn, withdrawn), *map(TaskNeedsCallees, needy)]

    def issue_again(self, number):
        self.needy.remove(number)
        callees = self.nodes_some()
        self.calls[number] = dict.fromkeys(callees, "issued")
        return self.graph.reassign(number, callees), []

    def deliver_late(self, run):
        self.graph.on_started(*run)
        return self.graph.on_returned(*run), []

    def save_and_load(self):
        saved = json.loads(json.dumps((self.graph.state_dict(), self.iterations.state_dict())))
        self.graph = TaskGraph()
        self.iterations = IterationScheduler(self.graph, 0)
        self.graph.load_state_dict(saved[0])
        self.iterations.load_state_dict(saved[1])
        assert json.loads(json.dumps((self.graph.state_dict(), self.iterations.state_dict()))) == saved
        return [], []

    def step(self, is_ending):
        ready, running = self.runs("ready"), self.runs("running")
        able = []
        able += 4 * [(self.start, ready)] + 4 * [(self.finish, running)]
        able += [(self.issue_again, self.needy), (self.deliver_late, self.late_calls)]
        possible = [(operation, arguments) for operation, arguments in able if arguments]
        if not is_ending:
            possible += 2 * [(self.add_subtask, running)] if running else []
            possible += [(operation, None) for operation in (self.add, self.issue, self.issue, self.set_tau)]
            possible += [(self.save_and_load, None)] + ([(self.kill, None)] if len(self.up) > 1 else [])
        operation, arguments = self.random.choice(possible)
        starts, also = operation() if arguments is None else operation(self.random.choice(arguments))
        self.check(starts, also)

    # Invariants.

    def check(self, starts, also):
        self.starts.update(type(one) for one in starts)
        for one in starts:  # in the order of emission
            if isinstance(one, TaskFinished):
                assert one.number not in self.over
                self.over.add(one.number)
            elif isinstance(one, TaskRun):
                assert self.after[one.task] <= self.over  # no task starts before its dependencies finished
                assert one.callee in self.up
        assert sorted(map(repr, starts)) == sorted(map(repr, [*also, *self.due()]))
        for number, calls in self.calls.items():
            assert self.graph.is_unfinished(number)
            assert {c: self.graph.state(number, c) for c in calls} == calls
        flying = {
            t: number
            for t, number in enumerate(self.numbers)
            if number in self.calls and self.after[number] <= self.over
        }
        assert self.iterations.in_flight == flying
        for place, t in enumerate(flying):
            assert self.taus[t] is None or place + 1 <= self.taus[t] + 1

    def due(self):
        """Bring `calls` up to date by the definitions, until nothing changes; return the actions due."""
        due = []
        while True:
            before = len(due)
            for number, calls in list(self.calls.items()):
                for callee, now in calls.items():
                    if now == "issued" and not self.after[number] & self.calls.keys():
                        calls[callee] = "ready"
                        due.append(TaskRun(number, callee))
                    if now == "returned" and not any(
                        self.parent[n] == TaskRun(number, callee) for n in self.calls
                    ):
                        calls[callee] = "finished"
                if calls and set(calls.values()) == {"finished"}:
                    del self.calls[number]
                    due.append(TaskFinished(number))
            if len(due) == before:
                return due


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 2**32 - 1))
def test_invariants_hold_and_all_tasks_finish_when_nodes_are_lost_and_taus_change(seed):
    """Random graphs, returns, deaths, additions and taus; the specification's invariants, section 5.2."""
    run_trial(seed)


def test_the_adversary_causes_every_kind_of_action():
    """Otherwise the test above would show nothing."""
    starts = sum((run_trial(seed).starts for seed in range(20)), Counter())
    assert min(starts[kind] for kind in (TaskRun, TaskFinished, TaskNeedsCallees, TaskWithdrawn)) >= 20


def run_trial(seed):
    trial = Trial(seed)
    for _ in range(trial.random.choice([20, 80])):
        trial.step(is_ending=False)
    trial.late_calls.clear()
    while trial.calls:
        trial.step(is_ending=True)
    assert trial.over == trial.after.keys()
    assert not trial.graph.state_dict()["tasks"]
    return trial
