"""What must hold in a simulated job: each function returns what is wrong, or None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from offbeat.events import Action, ConsumedSamples, Group, Halt
from offbeat.policies.data.block_scheduler import BlockScheduler
from offbeat.simulator.training.sample_loop import SampleSetting


def group_violation(
    group: Group, before: Group | None, joined: Collection[int], silent: Collection[int]
) -> str | None:
    """Check a new group: present members in order, one with the state, and no decision of a minority.

    Args:
        group: the new group.
        before: the last one, if any.
        joined: the workers that the coordinator has a connection to.
        silent: those from which it has received nothing for so long that it was reported.
    """
    members, generation = group.members, group.generation
    if not members or tuple(sorted(set(members))) != members:
        return f"generation {generation}: expected sorted, distinct members, got {members}"
    if not set(members) <= set(joined):
        return f"generation {generation} has absent members: {set(members) - set(joined)}"
    if not set(group.joining) < set(members):
        return f"members {members}: expected some of them to join, got {group.joining}; none has the state"
    if len(group.weights) != len(members) or abs(sum(group.weights) - 1) > 1e-9 or min(group.weights) < 0:
        return f"generation {generation} has the weights {group.weights}"
    if before is None:
        return None
    present = [member for member in before.members if member in joined]
    if 2 * len(set(present) & set(silent)) > len(present) and not set(present) <= set(members):
        return f"generation {generation} has {members} alone, and most others are unreachable"
    if generation <= before.generation:
        return f"generation {generation} follows {before.generation}"
    return None


def halt_violation(halt: Halt, last_actions: Iterable[Action]) -> str | None:
    """Check that a Halt is for a later generation than the last actions that go to all workers."""
    last = max([last.generation for last in last_actions if isinstance(last, Halt | Group)], default=-1)
    if halt.generation <= last:
        return f"a Halt for generation {halt.generation} follows generation {last}"
    return None


def repeated_use(worker: int, uses: Counter[tuple[int, int]]) -> str | None:
    """Check that a worker's state contains each position of an epoch once at most."""
    for (epoch, position), count in uses.items():
        if count > 1:
            return f"worker {worker} has position {position} of epoch {epoch} {count} times"
    return None


def checkpoint_violation(
    answer: ConsumedSamples, uses: Counter[tuple[int, int]], samples: SampleSetting
) -> str | None:
    """Check that a saved state contains exactly the samples that the policies attribute to it."""
    claimed = {
        (epoch, position)
        for epoch, ranges in answer.consumed
        for start, stop in ranges
        for position in range(start, stop)
    }
    is_exact = samples.break_after_rounds is None  # else abandoned samples are reported as used, too
    if is_exact:
        claimed |= {(e, position) for e in range(answer.epoch) for position in range(samples.epoch_samples)}
    held = {use for use in uses if is_exact or use[0] in dict(answer.consumed)}
    if claimed == held if is_exact else claimed >= held:
        return None
    odd = sorted(claimed ^ held)
    return (
        f"worker {answer.worker}: the state after {answer.round} rounds and its answer differ in "
        f"{len(odd)} samples, from position {odd[0][1]} of epoch {odd[0][0]}"
    )


def count_violation(
    scheduler: BlockScheduler, uses: Counter[tuple[int, int]], samples: SampleSetting, *, is_complete: bool
) -> str | None:
    """Check a scheduler's counts against what the replicas used; in a complete job, that all was used."""
    of_epoch = Counter(epoch for epoch, _ in uses)
    epochs = scheduler.epochs
    epoch = 0
    while epochs.is_finished(epoch):
        if of_epoch[epoch] != samples.epoch_samples:
            return f"epoch {epoch} is finished with {of_epoch[epoch]} of {samples.epoch_samples} samples"
        epoch += 1
    for number in epochs.numbers():
        if epochs.used_count(number) > of_epoch[number]:
            return (
                f"{epochs.used_count(number)} samples of epoch {number} count as used, "
                f"{of_epoch[number]} were"
            )
        epoch = number
    if is_complete and epoch != samples.epochs:
        return f"the job ended with {epoch} of {samples.epochs} epochs finished"
    return None
