"""What a request will have come to, and who waits for it."""

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.ps.future import Future


def pull():
    return Future("a pull", lambda: "server 0 has not answered", lambda wait, _, timeout_s: wait(timeout_s))


def test_an_answer_that_comes_while_the_waiter_looks_whether_to_go_on_is_no_error():
    future = pull()
    assert future.result_while(lambda: future.set_result(5, None), 60.0) == 5


def test_whoever_looks_may_end_the_wait():
    def check():
        raise KeyError("the job has failed")

    with pytest.raises(KeyError):
        pull().result_while(check, 60.0)


def test_a_wait_ends_with_who_has_not_answered():
    with pytest.raises(OffbeatError, match=r"a pull is not done after 0\.3 s: server 0 has not answered"):
        pull().result_while(lambda: None, 0.3)


def test_what_failed_is_raised_and_what_is_done_is_not_waited_for():
    failed, done = pull(), pull()
    failed.set_result(None, OffbeatError("its server is gone"))
    with pytest.raises(OffbeatError, match="its server is gone"):
        failed.result_while(lambda: None, 60.0)
    done.set_result(7, None)
    assert done.result_while(lambda: None, 0.0) == 7


def test_who_waits_does_meanwhile_what_the_result_waits_for():
    def work(wait, is_over, timeout_s):
        assert not is_over()
        future.set_result(6, None)
        return is_over()

    future = Future("a pull", lambda: "nobody", work)
    assert future.result() == 6
