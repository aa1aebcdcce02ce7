"""Promises of the window that bounds requests in flight, in random histories."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from offbeat.runtime.ps.inflight_window import RequestWindow

MAX = 100
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abc"), st.integers(0, 2 * MAX)),
        st.tuples(st.just("answer"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("give up"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


class History:
    """Requests (account, number, bytes) in the order of a client."""

    def __init__(self):
        self.window = RequestWindow(MAX)
        self.asked = Counter()
        self.under_way = []
        self.held = []

    def ask(self, account, size_bytes):
        request = account, self.asked[account], size_bytes
        self.asked[account] += 1
        if self.window.admit(account, size_bytes):
            self.under_way.append(request)
        else:
            self.window.hold(account, size_bytes, request)
            self.held.append(request)

    def answer(self, place):
        if self.under_way:
            account, _, size_bytes = self.under_way.pop(place % len(self.under_way))
            self.window.release(account, size_bytes)
            self.admit_held()

    def give_up(self, place):
        if self.held:
            request = self.held.pop(place % len(self.held))
            assert self.window.drop(request[0], request)
            assert not self.window.drop(request[0], request)
            self.admit_held()

    def admit_held(self):
        for request in self.window.admit_held():
            account, number, _ = request
            first = min(other for of, other, _ in self.held if of == account)
            assert number == first, "a request overtook an earlier one of its account"
            self.held.remove(request)
            self.under_way.append(request)

    def go(self, steps):
        for what, how, size_bytes in steps:
            if what == "ask":
                self.ask(how, size_bytes)
            elif what == "answer":
                self.answer(how)
            else:
                self.give_up(how)
            yield


@given(STEPS)
def test_bytes_in_flight_are_bounded_except_for_one_request_per_account(steps):
    history = History()
    for _ in history.go(steps):
        sizes = [size_bytes for _, _, size_bytes in history.under_way]
        assert history.window.unacked_bytes == sum(sizes)
        accounts = {account for account, _, _ in history.under_way}
        largest = [max(size for of, _, size in history.under_way if of == one) for one in accounts]
        assert sum(sizes) <= MAX + sum(largest)


@given(STEPS)
def test_requests_of_one_account_are_within_the_bound_or_sent_alone(steps):
    history = History()
    for _ in history.go((what, "a" if what == "ask" else first, size) for what, first, size in steps):
        assert history.window.unacked_bytes <= MAX or len(history.under_way) == 1


@given(STEPS)
def test_a_request_is_held_only_without_room_and_behind_a_request_of_its_account(steps):
    history = History()
    for _ in history.go(steps):
        assert history.window.has_held == bool(history.held)
        waiting = {account for account, _, _ in history.held}
        assert waiting <= {account for account, _, _ in history.under_way}
        for account in waiting:
            first = min(one for one in history.held if one[0] == account)
            assert history.window.unacked_bytes + first[2] > MAX


def test_a_request_does_not_overtake_a_larger_one_of_its_account_that_is_held():
    window = RequestWindow(MAX)
    assert window.admit("a", 90)
    window.hold("a", 20, "large")
    assert not window.admit("a", 1)
    assert window.admit("b", 1)
