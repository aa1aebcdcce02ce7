"""Averagings counted in a run log."""

from offbeat.events import AverageModels, CancelAveraging, Lost, ModelsAveraged
from offbeat.wire.averagings import count_averagings


def averaging(exchange_id, members, joining=()):
    group = [member for member in members if member not in joining]
    return AverageModels(
        exchange_id=exchange_id,
        members=members,
        joining=joining,
        weights=tuple(0.0 if member in joining else 1 / len(group) for member in members),
        steps=(1,) * len(members),
        includes_buffers=False,
        outer_step=None,
        leader=0,
        reason="",
    )


def ended(exchange_id, worker, *, has_mean=True):
    return ModelsAveraged(now_s=0.0, worker=worker, exchange_id=exchange_id, model_steps=1, has_mean=has_mean)


def test_an_averaging_is_incomplete_if_only_some_members_have_received_the_mean():
    lost = Lost(now_s=0.0, worker=2, cause="")
    cancelled = CancelAveraging(exchange_id=8, members=(0, 1, 2), reason="")
    complete = [averaging(0, (0, 1)), ended(0, 0), ended(0, 1)]
    without_mean = [
        averaging(8, (0, 1, 2)),
        lost,
        cancelled,
        *(ended(8, one, has_mean=False) for one in (0, 1)),
    ]
    in_part = [averaging(16, (0, 1)), ended(16, 0), ended(16, 1, has_mean=False)]
    with_a_loss = [averaging(24, (0, 2)), ended(24, 0), lost]
    alone = [averaging(32, (0, 3), joining=(3,)), ended(32, 0), ended(32, 3, has_mean=False)]
    assert count_averagings(complete) == (1, 0)
    assert count_averagings(without_mean) == (1, 0)
    assert count_averagings(in_part) == (1, 1)
    assert count_averagings(with_a_loss) == (1, 1)
    assert count_averagings(alone) == (0, 0)
    assert count_averagings(complete + without_mean + in_part + with_a_loss + alone) == (4, 2)
