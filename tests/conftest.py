"""What all tests begin with, however they were started.

One thread a process computes: several tests run at a time, and threads of torch that wait for each other
burn the cores on which the others run. And Ctrl-C and SIGHUP end what the tests start: whoever runs them in
the background of a shell script, or under nohup, hands on that they are ignored.
"""

import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and numpy are imported
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest.register_assert_rewrite("support")  # failed assertions there show values, too
