"""Common setup of all tests, however they are started, and the mark of long ones.

One thread a process computes: several tests run at a time, and threads of torch that wait for each other
burn the cores on which the others run. Ctrl-C and SIGHUP end processes that the tests start: a shell script's
background process, or nohup, would pass on that these signals are ignored.

`@pytest.mark.long` marks a test that `make test` leaves to `make test-long`: a whole benchmark, a job of many
seconds. Of a test with many parameters, `@pytest.mark.long(after=2)` leaves those after the first two to it.

An example of a property test may take as long as it likes: that depends on what else the machine does.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and numpy are imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

hypothesis.settings.register_profile("any machine", hypothesis.settings(deadline=None))
hypothesis.settings.load_profile("any machine")
pytest.register_assert_rewrite("support")  # failed assertions there show values, too


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kept: Counter[str] = Counter()
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name == "long" and mark.kwargs]:
            test = item.nodeid.split("[")[0]
            kept[test] += 1
            if kept[test] <= mark.kwargs["after"]:
                item.own_markers.remove(mark)
