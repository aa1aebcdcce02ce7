"""Types that threads decode are primed: the first decode may run in several threads at once."""

import sys
import threading

import pytest

from offbeat.strategies.registry import STRATEGIES, parse_strategy
from offbeat.wire.codec import decode_actions, decode_events, encode_actions, encode_events
from support.every_event import ACTIONS, EVENTS
from support.processes import run, values

THREADS, PROCESSES = 16, 6


def record():
    for event in EVENTS:
        decode_events(encode_events([event]), event.now_s)
    for action in ACTIONS:
        decode_actions(encode_actions([action]))


def spelling():
    for name in STRATEGIES:
        parse_strategy(name if name != "dpar" else "dpar:threshold_ms=1")


def decode_first(rank, emit, decode):
    """In many threads at once, which the interpreter changes between as often as it can."""
    sys.setswitchinterval(1e-6)
    together = threading.Barrier(THREADS)

    def work():
        together.wait()
        decode()
        decoded.append(1)

    decoded = []
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(decoded)


@pytest.mark.long
@pytest.mark.parametrize("decode", [record, spelling], ids=lambda decode: decode.__name__)
def test_threads_may_be_the_first_to_decode_at_once(decode):
    """Each in a process where nothing has been decoded yet."""
    assert values(run(decode_first, PROCESSES, decode)) == [THREADS] * PROCESSES
