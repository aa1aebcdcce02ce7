"""Results of requests, and waiting for them."""

import pytest

from offbeat.errors import OffbeatError
from offbeat.runtime.ps.future import Future


def pull():
    return Future("a pull", lambda: "server 0 has not answered", lambda wait, _, timeout_s: wait(timeout_s))


def test_an_answer_that_arrives_during_the_check_of_a_waiter_is_returned():
    future = pull()
    assert future.result_while(lambda: future.set_result(5, None), 60.0) == 5


def test_the_check_of_a_waiter_may_end_the_wait():
    def check():
        raise KeyError("the job has failed")

    with pytest.raises(KeyError):
        pull().result_while(check, 60.0)


def test_a_wait_that_times_out_names_the_server_that_has_not_answered():
    with pytest.raises(OffbeatError, match=r"a pull is not done after 0\.3 s: server 0 has not answered"):
        pull().result_while(lambda: None, 0.3)


def test_an_error_is_raised_and_a_finished_result_is_returned_without_waiting():
    failed, done = pull(), pull()
    failed.set_result(None, OffbeatError("its server is gone"))
    with pytest.raises(OffbeatError, match="its server is gone"):
        failed.result_while(lambda: None, 60.0)
    done.set_result(7, None)
    assert done.result_while(lambda: None, 0.0) == 7


def test_a_waiting_thread_does_the_work_that_produces_the_result():
    def work(wait, is_over, timeout_s):
        assert not is_over()
        future.set_result(6, None)
        return is_over()

    future = Future("a pull", lambda: "nobody", work)
    assert future.result() == 6
