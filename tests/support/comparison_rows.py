"""Rows and time sheets of a comparison."""

from offbeat.cli.comparison import ComparisonCase, ComparisonRow
from offbeat.cli.timesheet import TimeSheet
from offbeat.events import Evaluated, StepsTimed
from support.round_events import times_of_step


def row(strategy="bsp", slow=(), epoch_s=1.0, wait_share=0.1, accuracy=0.9, workers=4):
    case = ComparisonCase(strategy=strategy, slow=slow)
    return ComparisonRow(
        case=case, workers=workers, epoch_s=epoch_s, wait_share=wait_share, accuracy=accuracy
    )


def sheet_of_three_epochs(waits):
    """The first epoch takes 100 s, the others 2 s and 4 s, of which each worker waits its own share."""
    sheet = TimeSheet()
    for epoch, wall_s in enumerate((100.0, 2.0, 4.0)):
        for worker, wait in enumerate(waits):
            parts_s = {"wait_s": wait * wall_s, "compute_s": (1 - wait) * wall_s}
            times = times_of_step(epoch, samples=1, wall_s=wall_s, **parts_s)
            sheet.add(StepsTimed(now_s=0.0, worker=worker, steps=(times,)))
            metrics = {"accuracy": 0.5 + epoch / 10} if worker == 0 else {}
            sheet.add(Evaluated(now_s=0.0, worker=worker, epoch=epoch, metrics=metrics))
    return sheet
