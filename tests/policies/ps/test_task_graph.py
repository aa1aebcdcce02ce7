"""`TaskGraph` and `IterationScheduler` against the sentences of their docstrings and of the paper."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ProtocolError
from offbeat.policies.ps.task_graph import (
    CallState,
    IterationScheduler,
    TaskFinished,
    TaskGraph,
    TaskNeedsCallees,
    TaskRun,
    TaskWithdrawn,
)


def do(graph, number, *callees):
    """Run a task at these callees and return what follows."""
    starts = []
    for callee in callees:
        graph.on_started(number, callee)
        starts += graph.on_returned(number, callee)
    return starts


def begun(graph, *callees, **how):
    number, _ = graph.add(callees, **how)
    for callee in callees:
        graph.on_started(number, callee)
    return number


# One by one ---------------------------------------------------------------------------------------------


def test_a_task_goes_from_issued_to_ready_to_running_to_returned_to_finished():
    graph = TaskGraph()
    first, starts = graph.add(["a"])
    assert starts == [TaskRun(first, "a")]
    number, starts = graph.add(["a"], after=[first])
    assert (starts, graph.state(number, "a"), graph.pending_tasks(number)) == ([], CallState.ISSUED, (first,))
    assert do(graph, first, "a") == [TaskFinished(first), TaskRun(number, "a")]
    assert (graph.state(number, "a"), graph.pending_tasks(number)) == (CallState.READY, ())
    graph.on_started(number, "a")
    assert graph.state(number, "a") is CallState.RUNNING
    subtask, _ = graph.add(["b"], parent=TaskRun(number, "a"))
    assert graph.on_returned(number, "a") == []
    assert graph.state(number, "a") is CallState.RETURNED
    assert do(graph, subtask, "b") == [TaskFinished(subtask), TaskFinished(number)]
    assert graph.state(number, "a") is None
    assert not graph.is_unfinished(number)


def test_tasks_that_wait_for_nothing_may_all_run_at_once():
    """Section 3.4: by default, callees execute tasks in parallel."""
    graph = TaskGraph()
    assert [graph.add(["a"])[1] for _ in range(3)] == [
        [TaskRun(0, "a")],
        [TaskRun(1, "a")],
        [TaskRun(2, "a")],
    ]


def test_iteration_12_waits_for_iteration_11_and_that_for_nothing():
    """Section 3.4, figure 5: 10 and 11 are independent, 12 depends on 11."""
    graph = TaskGraph()
    ten, eleven = (graph.add(["worker"])[0] for _ in range(2))
    twelve, starts = graph.add(["worker"], after=[eleven])
    assert starts == []
    assert do(graph, eleven, "worker") == [TaskFinished(eleven), TaskRun(twelve, "worker")]
    assert graph.is_unfinished(ten)


def test_a_task_waits_for_all_of_several_and_for_one_that_is_named_twice_once():
    graph = TaskGraph()
    first, second = (graph.add(["a"])[0] for _ in range(2))
    both, _ = graph.add(["b"], after=[first, second, first])
    assert do(graph, second, "a") == [TaskFinished(second)]
    assert do(graph, first, "a") == [TaskFinished(first), TaskRun(both, "b")]


def test_a_task_added_after_its_dependencies_have_finished_is_ready_at_once():
    graph = TaskGraph()
    first, _ = graph.add(["a"])
    do(graph, first, "a")
    assert graph.add(["b"], after=[first]) == (1, [TaskRun(1, "b")])


def test_a_group_task_has_finished_when_it_has_at_every_callee():
    graph = TaskGraph()
    group, starts = graph.add(["a", "b", "c"])
    after, _ = graph.add(["a"], after=[group])
    assert starts == [TaskRun(group, "a"), TaskRun(group, "b"), TaskRun(group, "c")]
    assert do(graph, group, "c", "a") == []
    assert graph.state(group, "a") is CallState.FINISHED
    assert do(graph, group, "b") == [TaskFinished(group), TaskRun(after, "a")]


def test_a_subtask_delays_only_the_callee_that_issued_it():
    graph = TaskGraph()
    group = begun(graph, "a", "b")
    subtask, starts = graph.add(["a"], parent=TaskRun(group, "b"))
    assert starts == [TaskRun(subtask, "a")]
    graph.on_returned(group, "a")
    graph.on_returned(group, "b")
    assert (graph.state(group, "a"), graph.state(group, "b")) == (CallState.FINISHED, CallState.RETURNED)
    assert do(graph, subtask, "a") == [TaskFinished(subtask), TaskFinished(group)]


def test_a_parent_whose_subtasks_finish_first_waits_for_its_own_return():
    graph = TaskGraph()
    parent = begun(graph, "a")
    child = begun(graph, "b", parent=TaskRun(parent, "a"))
    grandchild = begun(graph, "c", parent=TaskRun(child, "b"))
    assert graph.on_returned(child, "b") == []
    assert graph.on_returned(grandchild, "c") == [TaskFinished(grandchild), TaskFinished(child)]
    assert graph.on_returned(parent, "a") == [TaskFinished(parent)]


# Refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [-1, 1, 2])
def test_waiting_for_an_unknown_task_or_for_itself_is_refused(earlier):
    graph = TaskGraph()
    graph.add(["a"])
    with pytest.raises(
        ValueError, match=rf"expected task 1 to wait for tasks .* issued before it, got {earlier}$"
    ):
        graph.add(["a"], after=[0, earlier])
    assert graph.add(["a"], after=[0]) == (1, [])  # the refused tasks left no trace


def test_a_subtask_that_waits_for_its_caller_is_refused():
    """It could never finish: a cycle."""
    graph = TaskGraph()
    parent = begun(graph, "a")
    later, _ = graph.add(["b"], after=[parent])
    for end in (parent, later):
        with pytest.raises(
            ValueError, match=rf"to wait for tasks of its caller, got {end}, which is no task's"
        ):
            graph.add(["c"], after=[end], parent=TaskRun(parent, "a"))


def test_a_task_waits_for_subtasks_of_the_same_call_and_of_no_other():
    graph = TaskGraph()
    parent = begun(graph, "a", "b")
    subtask, _ = graph.add(["c"], parent=TaskRun(parent, "a"))
    assert graph.add(["c"], parent=TaskRun(parent, "a"), after=[subtask])[1] == []
    with pytest.raises(
        ValueError, match=r"expected task 3, issued by Tas.*'b'.*, got 1, issued by TaskRun.*'a'"
    ):
        graph.add(["c"], parent=TaskRun(parent, "b"), after=[subtask])
    with pytest.raises(ValueError, match=r"expected task 3, which is no task's subtask, .* got 1"):
        graph.add(["c"], after=[subtask])


def test_only_a_running_call_issues_subtasks():
    graph = TaskGraph()
    number, _ = graph.add(["a"])
    for parent, why in (
        (TaskRun(0, "a"), "ready"),
        (TaskRun(0, "b"), "not there"),
        (TaskRun(7, "a"), "not there"),
    ):
        with pytest.raises(ValueError, match=rf"expected a parent that is running, got .*: it is {why}"):
            graph.add(["b"], parent=parent)
    do(graph, number, "a")
    with pytest.raises(ValueError, match=r"expected a parent that is running"):
        graph.add(["b"], parent=TaskRun(number, "a"))
    assert graph.add(["b"])[0] == 1


def test_callees_have_to_be_up():
    graph = TaskGraph()
    graph.on_node_lost("a")
    for callees, got in (([], "none"), (["b", "a"], "b, a")):
        with pytest.raises(ValueError, match=rf"expected one callee or more that are up, got {got}$"):
            graph.add(callees)


def test_only_a_ready_call_starts_and_only_a_running_call_returns():
    graph = TaskGraph()
    first, _ = graph.add(["a"])
    second, _ = graph.add(["a"], after=[first])
    for impossible in (
        lambda: graph.on_returned(first, "a"),
        lambda: graph.on_started(second, "a"),
        lambda: graph.on_started(first, "b"),
        lambda: graph.on_started(2, "a"),
        lambda: graph.on_returned(2, "a"),
    ):
        with pytest.raises(
            ProtocolError, match=r"expected TaskRun\(task=\d, callee='[ab]'\) to be r\w+: it is"
        ):
            impossible()
    graph.on_started(first, "a")
    with pytest.raises(ProtocolError, match=r"to be ready: it is running"):
        graph.on_started(first, "a")


# Deaths -------------------------------------------------------------------------------------------------


def test_a_group_task_continues_without_lost_callees():
    graph = TaskGraph()
    group = begun(graph, "a", "b")
    after, _ = graph.add(["a"], after=[group])
    graph.on_returned(group, "a")
    assert graph.on_node_lost("b") == [TaskFinished(group), TaskRun(after, "a")]


def test_a_call_that_finished_before_its_node_was_lost_stays_finished():
    graph = TaskGraph()
    group = begun(graph, "a", "b")
    graph.on_returned(group, "a")
    assert graph.on_node_lost("a") == []
    assert graph.state(group, "a") is CallState.FINISHED
    assert graph.on_node_lost("b") == [TaskFinished(group)]


def test_a_task_without_callees_is_reissued_once_and_messages_of_its_lost_callee_are_ignored():
    graph = TaskGraph()
    number = begun(graph, "a")
    after, _ = graph.add(["c"], after=[number])
    assert graph.on_node_lost("a") == [TaskNeedsCallees(number)]
    assert graph.on_node_lost("a") == []
    assert graph.on_returned(number, "a") == []
    assert graph.reassign(number, ["b"]) == [TaskRun(number, "b")]
    with pytest.raises(ValueError, match=r"expected a task that has lost all its callees, got 0"):
        graph.reassign(number, ["c"])
    assert do(graph, number, "b") == [TaskFinished(number), TaskRun(after, "c")]


def test_a_task_that_has_not_begun_is_also_reissued_and_keeps_waiting():
    graph = TaskGraph()
    first, _ = graph.add(["a"])
    second, _ = graph.add(["b", "c"], after=[first])
    assert graph.on_node_lost("b") == []
    assert graph.on_node_lost("c") == [TaskNeedsCallees(second)]
    assert do(graph, first, "a") == [TaskFinished(first)]
    third, _ = graph.add(["d"], after=[second])
    fourth, _ = graph.add(["e"], after=[third])
    assert graph.on_node_lost("e") == [TaskNeedsCallees(fourth)]
    assert graph.reassign(fourth, ["a"]) == []
    assert graph.reassign(second, ["a", "d"]) == [TaskRun(second, "a"), TaskRun(second, "d")]


def test_subtasks_of_a_lost_callee_are_withdrawn_with_theirs_and_those_of_others_continue():
    graph = TaskGraph()
    group = begun(graph, "a", "b")
    child = begun(graph, "c", parent=TaskRun(group, "a"))
    sibling, _ = graph.add(["a"], parent=TaskRun(group, "a"), after=[child])
    grandchild = begun(graph, "c", parent=TaskRun(child, "c"))
    other = begun(graph, "c", parent=TaskRun(group, "b"))
    assert graph.on_node_lost("a") == [
        TaskWithdrawn(child),
        TaskWithdrawn(grandchild),
        TaskWithdrawn(sibling),
    ]
    assert graph.on_returned(child, "c") == []  # it returned before it learned of the withdrawal
    with pytest.raises(ValueError, match=r"expected a parent that is running, got .*: it is not there"):
        graph.add(["c"], parent=TaskRun(child, "c"))
    graph.on_returned(group, "b")
    assert graph.on_returned(other, "c") == [TaskFinished(other), TaskFinished(group)]


def test_a_reissued_task_issues_its_subtasks_again():
    graph = TaskGraph()
    parent = begun(graph, "a")
    old = begun(graph, "b", parent=TaskRun(parent, "a"))
    assert graph.on_node_lost("a") == [TaskWithdrawn(old), TaskNeedsCallees(parent)]
    graph.reassign(parent, ["b"])
    graph.on_started(parent, "b")
    new = begun(graph, "b", parent=TaskRun(parent, "b"))
    graph.on_returned(parent, "b")
    assert graph.on_returned(new, "b") == [TaskFinished(new), TaskFinished(parent)]


# Iterations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tau", "waits"),
    [
        (0, [(), (0,), (1,), (2,), (3,), (4,)]),  # sequential: {t-1}, and so all earlier ones
        (1, [(), (), (0,), (0, 1), (1, 2), (2, 3)]),  # the specification's example, appendix C
        (2, [(), (), (), (0,), (0, 1), (0, 1, 2), (1, 2, 3)]),
        (None, [(), (), (), ()]),
    ],
)
def test_iteration_t_waits_for_iterations_t_minus_2_tau_minus_1_up_to_t_minus_tau(tau, waits):
    """t waits for [t - 2 tau - 1, t - tau): the golden values."""
    graph = TaskGraph()
    iterations = IterationScheduler(graph, tau)
    numbers = [iterations.issue(["a"])[0] for _ in waits]
    assert [graph.pending_tasks(number) for number in numbers] == waits
    assert list(iterations.in_flight) == list(range(len(waits) if tau is None else tau + 1))


@given(st.lists(st.integers(0, 4) | st.none(), min_size=1, max_size=12))
def test_edges_reach_all_earlier_iterations_that_must_be_finished_and_no_others(taus):
    """All tasks < t - tau, through other iterations or directly, whatever tau they had."""
    graph = TaskGraph()
    iterations = IterationScheduler(graph, 0)
    reached = []
    for t, tau in enumerate(taus):
        iterations.set_tau(tau)
        number, _ = iterations.issue(["a"])
        direct = graph.pending_tasks(number)
        reached.append(set(direct).union(*(reached[one] for one in direct)))
        assert reached[t] == set(range(0 if tau is None else t - tau))


def test_tau_may_shrink_and_grow_for_iterations_issued_later():
    graph = TaskGraph()
    iterations = IterationScheduler(graph, 1)
    for _ in range(3):
        iterations.issue(["a"])
    iterations.set_tau(0)
    assert iterations.issue(["a"]) == (3, [])
    iterations.set_tau(None)
    assert iterations.issue(["a"]) == (4, [TaskRun(4, "a")])
    assert [graph.pending_tasks(number) for number in range(5)] == [(), (), (0,), (1, 2), ()]
    assert iterations.in_flight == {0: 0, 1: 1, 4: 4}


def test_other_tasks_of_the_graph_are_no_iterations():
    graph = TaskGraph()
    graph.add(["a"])
    iterations = IterationScheduler(graph, 0)
    first, _ = iterations.issue(["a"])
    graph.add(["a"], after=[first])
    second, _ = iterations.issue(["a"])
    assert (first, second, graph.pending_tasks(second)) == (1, 3, (1,))
    assert (iterations.issued_count, iterations.in_flight) == (2, {0: 1})


def test_a_refused_iteration_is_not_counted():
    iterations = IterationScheduler(TaskGraph(), 0)
    with pytest.raises(ValueError, match=r"expected one callee or more"):
        iterations.issue([])
    assert (iterations.issued_count, iterations.issue(["a"])) == (0, (0, [TaskRun(0, "a")]))


def test_tau_is_not_negative():
    iterations = IterationScheduler(TaskGraph(), 3)
    for wrong in (lambda: iterations.set_tau(-1), lambda: IterationScheduler(TaskGraph(), -1)):
        with pytest.raises(ValueError, match=r"expected a tau of at least 0 iterations, .* got -1"):
            wrong()
    assert iterations.tau == 3


# Memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, 3, None])
def test_the_size_of_the_graph_does_not_grow_with_finished_tasks(tau):
    """A task that never finishes has subtasks that do; others come one after the other."""
    graph = TaskGraph()
    stuck = begun(graph, "z")
    iterations = IterationScheduler(graph, tau)
    if tau is None:
        iterations.issue(["z"])  # it never finishes either
    sizes = []
    for _ in range(400):
        number, _ = iterations.issue(["a", "b"])
        after, _ = graph.add(["b"], after=[number])
        subtask = begun(graph, "c", parent=TaskRun(stuck, "z"))
        graph.on_started(number, "a")
        child = begun(graph, "c", parent=TaskRun(number, "a"))
        for other, callee in ((subtask, "c"), (child, "c"), (number, "a")):
            graph.on_returned(other, callee)
        do(graph, number, "b")
        do(graph, after, "b")
        sizes.append(len(pickle.dumps((graph, iterations))))  # all that they hold
    assert len(set(sizes[260:])) == 1  # from then on numbers take two bytes each
