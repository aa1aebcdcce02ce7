"""A namespace of a parameter server as programs use it: pushes, pulls, filters and participation.

It checks the program's arguments and turns them into requests. It knows no servers, and not which requests
are in flight.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import OffbeatError
from offbeat.numerics.ps.entries import (
    Entries,
    Keys,
    PushMeta,
    Rows,
    UpdateSettings,
    find_problem,
    find_rows_problem,
)
from offbeat.numerics.ps.filters import FilterBytes
from offbeat.numerics.ps.spaces import UserFunction
from offbeat.numerics.ps.tables import check_states, check_weight
from offbeat.numerics.ps.updates import Update, with_settings
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.runtime.ps.future import TIMEOUT_S, Future
from offbeat.runtime.ps.packing import ARRAY_BYTES_MAX
from offbeat.runtime.ps.push_coalescer import SMALL_BYTES_MAX
from offbeat.runtime.ps.requests import InflightRequests


class Namespace:
    """Keys 0 to `keys` - 1 of a parameter server, with a row of numbers each; `PS.namespace` creates it.

    Attributes:
        name, keys: of the namespace.
    """

    def __init__(
        self,
        requests: InflightRequests,
        space: NamespaceSpec,
        update: Update | UserFunction,
        *,
        width: int,
        dtype: str,
        combines: bool,
    ) -> None:
        self.name, self.keys = space.name, space.keys
        self._aggregates, self._update, self._combines = space.aggregates, update, combines
        self._requests = requests
        self._shape = (width,) if width else ()
        self._dtype = np.dtype(dtype)
        self._values_bytes = self._dtype.itemsize * max(width, 1)  # of a row
        self._row_bytes = max(self._values_bytes, np.dtype(np.int64).itemsize)  # or of its key, if larger
        self._push_label = f"a push to {self.name}"
        requests.row_pieces.set_row_bytes(self.name, self._values_bytes)

    def push(
        self,
        values: ArrayLike,
        *,
        keys: ArrayLike | None = None,
        first: int = 0,
        last: int | None = None,
        weight: float = 1.0,
        settings: UpdateSettings | None = None,
        time: int | None = None,
        after: Iterable[Future] = (),
        may_wait: bool = True,
    ) -> Future:
        """Send rows for some keys.

        It returns at once, unless more than 128 MiB that this client has pushed are not acknowledged: then it
        waits until there is room for this push, 60 s at most. A larger push goes alone, and a push to a
        namespace that aggregates does not wait for pushes to other namespaces. It does not wait in functions
        that `when_done` calls, nor for the requests in `after`.

        Args:
            values: one row per key, (K,) or (K, width). They must not change until the push is done.
            keys: (K,) integers, ascending, without duplicates; by default neighbours from `first` on.
            first, last: the range of the push, keys `first` to `last` - 1, of which `keys` may list some or
                none; by default from the first to the last key that is listed. Where pushes are aggregated,
                all participants have to push this range.
            weight: where pushes are aggregated, how many pushes the rows already are the sum of: a mean is
                divided by the sum of all weights, with "each" a push by its own. With 0, and no keys of a
                whole range, this client contributes nothing at this time; if no client contributes, nothing
                is applied.
            settings: numbers of the namespace's update that apply to this push, such as `{"lr": 0.05}`; by
                default those with which the namespace was created. For a sum or a mean, those of the first
                client, by number, with a weight above 0 apply.
            time: of this push, later than those of all previous pushes of this client to the namespace; by
                default the next one. Where pushes are aggregated, pushes of one time are summed; a client
                that skips a time and pushes later contributes nothing to it, so all clients may push at a
                clock's time what they have for that clock. The future fails if other clients began without
                this one and are beyond that time, or if an earlier request with a later time was sent first.
            after: requests that have to be done before this one is sent.
            may_wait: wait for room as above; otherwise a push without room is kept in this client's memory.

        Raises:
            ValueError: rows or keys that the namespace does not have, or more than 2 GiB with `keys`; a
                weight below 0, or one other than 1 where nothing is aggregated; settings that the update does
                not have, or any for a function; a time below 1.
            OffbeatError: this client is disconnected from the parameter server; there was no room in 60 s,
                and nothing was pushed; names the servers that have not answered.
        """
        rows = self._rows(values)
        is_plain = keys is None and last is None and time is None and weight == 1.0 and settings is None
        if is_plain and may_wait and after == () and self._combines and rows.nbytes <= SMALL_BYTES_MAX:
            is_within = 0 <= first < first + len(rows) <= self.keys
            if is_within and self._requests.iterations.current is None:  # the fast path: such pushes are many
                return self._requests.push_fast(self._push_label, self.name, Entries(first, rows))
        self._check_size(1 if keys is None else len(rows))
        listed = None if keys is None else self._listed(keys)
        if listed is not None and len(listed) != len(rows):
            raise ValueError(f"expected a row for each key, got {len(listed)} keys and {len(rows)} rows")
        if last is None:
            if not len(rows):
                return self._finished(None, after)
            first, last = (first, first + len(rows)) if listed is None else _bounds(listed)
        begin, end = self._range(first, last)
        content = Entries(begin, rows, listed)
        if listed is None:
            problem = find_rows_problem(content, begin, end)
        elif not len(listed) or (begin <= listed[0] and listed[-1] < end):
            problem = ""
        else:
            problem = f"expected keys from {begin} to below {end}, got {listed[0]} to {listed[-1]}"
        if problem:
            raise ValueError(problem)
        if weight != 1.0 or settings is not None:
            content.meta = self._push_meta(weight, settings)
        return self._push(content, begin, end, time, after, may_wait=may_wait)

    def put(
        self,
        values: ArrayLike,
        *,
        first: int = 0,
        states: Mapping[str, ArrayLike] | None = None,
        time: int | None = None,
        after: Iterable[Future] = (),
    ) -> Future:
        """Replace the rows of neighbouring keys, and the states that the update keeps for them.

        It counts as one of this client's pushes of these keys: it is applied after the previous ones, once,
        and on all replicas. Where pushes are aggregated, it is this client's push of its time: if any push of
        that time is a put, the put of the first client, by number, is applied, and nothing else of that time.

        Args:
            values: one row per key, (K,) or (K, width). They must not change until it is done.
            first: the first key.
            states: by the update's names for them, rows of the same shape as `values`; zero for those that
                are left out.
            time: as for `push`.
            after: requests that have to be done before this one is sent.

        Raises:
            ValueError: rows, keys or states that the namespace does not have; a time below 1.
            OffbeatError: as for `push`.
        """
        rows = self._rows(values)
        self._check_size(1)
        given = {name: _array(one, name, self._dtype) for name, one in (states or {}).items()}
        for name, one in given.items():
            if one.shape != rows.shape:
                raise ValueError(f"expected {name} of shape {rows.shape}, like the values, got {one.shape}")
        if not isinstance(self._update, UserFunction):
            check_states(self._update, given)
        if not len(rows):
            return self._finished(None, after)
        begin, end = self._range(first, first + len(rows))
        return self._push(Entries(begin, rows, None, PushMeta(states=given)), begin, end, time, after)

    def pull(
        self,
        *,
        keys: ArrayLike | None = None,
        first: int = 0,
        last: int | None = None,
        states: bool = False,
        times: bool = False,
        after: Iterable[Future] = (),
    ) -> Future:
        """Fetch the rows of some keys; those of keys that were never pushed are zero.

        It waits for room as `push` does, while more than 128 MiB have been requested and have not arrived.

        Args:
            keys: (K,) integers, ascending, without duplicates; by default all from `first` to `last` - 1.
            first, last: see `keys`; by default all keys.
            states: also return the states that the update keeps, by name, and the rows as "values": the
                result is a dictionary instead of the rows.
            times: also return the times of this client's own pushes that are contained in these rows. The
                future is then of a pair whose second item are `ClockRange`s (start, stop, time), ascending:
                keys `start` to `stop` - 1 contain this client's pushes up to `time`. Keys without any are in
                no piece. If keys are listed, pieces also cover those between them.
            after: requests that have to be done before this one is sent.

        Returns:
            A future of the rows, (K,) or (K, width); or as `states` and `times` specify.

        Raises:
            ValueError: keys that the namespace does not have, or more than 2 GiB with `keys`.
            OffbeatError: this client is disconnected from the parameter server; there was no room in 60 s.
        """
        given = None if keys is None else _array(keys, "keys")
        arrays = 1 + len(self._states) if states else 1
        self._check_size((1 if given is None else given.size) * arrays)
        listed = None if given is None else self._listed(given)
        if listed is not None and not len(listed):
            rows = np.zeros((0, *self._shape), self._dtype)
            empty = dict.fromkeys(("values", *self._states), rows) if states else rows
            return self._finished((empty, ()) if times else empty, after)
        begin, end = (
            self._range(first, self.keys if last is None else last) if listed is None else _bounds(listed)
        )
        return self._requests.pull(
            f"a pull from {self.name}",
            self.name,
            begin,
            end,
            listed,
            after,
            shape=self._shape,
            dtype=self._dtype,
            states=states,
            times=times,
            size_bytes=(end - begin if listed is None else len(listed)) * arrays * self._values_bytes,
        )

    def filter_report(self) -> dict[str, dict[str, FilterBytes]]:
        """Return the bytes before and after each filter at this client, by kind of message and filter.

        The kinds are "push"; "ask" for the keys that pulls list; "pull received" for filters that are undone
        here.
        """
        found: dict[str, dict[str, FilterBytes]] = self._requests.call_in_order(
            lambda: self._requests.node.filtering.report(self.name)
        )
        return found

    def set_margin(self, margin: float) -> None:
        """Set the margin of the KKT filter for values pulled from now on; see `KKT.set_margin`.

        Where pushes are aggregated, all participants have to skip the same keys: a sum that lacks one
        participant's share is no gradient. They do if each key is pushed and then pulled once between two
        changes of the margin, and each participant waits for all of it before the next change.

        Args:
            margin: at least 0; infinite, the initial value, skips nothing.

        Raises:
            ValueError: the namespace has no such filter, or the margin is invalid.
            OffbeatError: this client is disconnected from the parameter server.
        """
        self._requests.call_in_order(lambda: self._requests.node.filtering.kkt(self.name).set_margin(margin))

    def is_active(self, keys: ArrayLike) -> NDArray[np.bool_]:
        """Return a mask of shape (K,), True for keys that the KKT filter does not skip in pushes.

        The other keys need no computation. Keys that are not pushed at all do not count as skipped in the
        report.

        Args:
            keys: (K,), ascending, without duplicates.

        Raises:
            ValueError: keys that the namespace does not have, or it has no such filter.
            OffbeatError: this client is disconnected from the parameter server.
        """
        listed = self._listed(keys)
        found: NDArray[np.bool_] = self._requests.call_in_order(
            lambda: self._requests.node.filtering.kkt(self.name).is_active(listed)
        )
        return found

    def join_aggregation(self, clients: int = 1, timeout_s: float = TIMEOUT_S) -> int:
        """Take part in a namespace that aggregates, and wait for so many participants, this one included.

        A client that pushes without this call takes part from then on. Clients that are to begin together
        call this before any of them pushes.

        Returns:
            The time of this client's first push: 1 if nothing was pushed before, otherwise one that is later
            than those of all pushes of other clients.

        Raises:
            OffbeatError: the namespace does not aggregate, this client has left it, or there were fewer
                participants after `timeout_s` seconds.
        """
        requests, views, name = self._requests, self._requests.cluster_state, self.name

        def is_complete() -> bool:
            participants = views.participants(name)
            return requests.client_id in participants and len(participants) >= clients

        requests.join_aggregation(name).result(timeout_s)
        views.wait_unless_refused(
            name,
            is_complete,
            f"{clients} clients to take part in {name}",
            timeout_s,
            problem=f"cannot take part in {name}",
        )
        return views.participants(name)[requests.client_id]

    @property
    def participants(self) -> tuple[int, ...]:
        """The numbers of the clients that take part in a namespace that aggregates, ascending."""
        return tuple(sorted(self._requests.cluster_state.participants(self.name)))

    def wait_for_all_left(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until no participant is left: everything that was pushed is done then.

        Raises:
            OffbeatError: that took longer than `timeout_s` seconds; names the participants that are left.
        """
        try:
            self._requests.cluster_state.wait_for(
                lambda: not self.participants, f"all participants to leave {self.name}", timeout_s
            )
        except OffbeatError as error:
            left = ", ".join(f"client {one}" for one in self.participants)
            raise OffbeatError(f"{error}; participants left: {left or 'none'}") from None

    def leave_aggregation(self, timeout_s: float = TIMEOUT_S) -> None:
        """Leave a namespace that aggregates, so that its sums no longer wait for this client.

        Returns when the manager has been asked. This client cannot take part again. To wait for pushes first,
        see `leave_aggregation_after`.

        Raises:
            OffbeatError: pushes of this client to the namespace are not done.
        """
        self._requests.leave_aggregation(self.name).result(timeout_s)

    def leave_aggregation_after(self, requests: Iterable[Future]) -> Future:
        """Leave once these requests are done, without blocking; the future fails if one of them fails."""
        return self._requests.leave_aggregation(self.name, requests)

    def _push(
        self,
        content: Entries,
        first: int,
        last: int,
        time: int | None,
        after: Iterable[Future],
        *,
        may_wait: bool = True,
    ) -> Future:
        if time is not None and not 1 <= operator.index(time) < 2**63:
            raise ValueError(f"expected a time of 1 to 2**63 - 1, got {time}")
        chosen = None if time is None else operator.index(time)
        return self._requests.push(
            self._push_label,
            self.name,
            content,
            first,
            last,
            chosen,
            after,
            may_combine=self._combines and chosen is None and content.keys is None and content.meta is None,
            may_wait=may_wait,
        )

    def _rows(self, values: ArrayLike) -> Rows:
        rows: Rows = _array(values, "values", self._dtype)
        if rows.shape[1:] != self._shape or rows.ndim != 1 + len(self._shape):
            raise ValueError(f"expected rows of shape {self._shape}, got values of {rows.shape}")
        return rows

    def _push_meta(self, weight: float, settings: UpdateSettings | None) -> PushMeta:
        check_weight(weight)
        if weight != 1.0 and not self._aggregates:
            raise ValueError(f"expected no weight where pushes are not aggregated, got {weight}")
        if settings is None:
            return PushMeta(float(weight))
        if isinstance(self._update, UserFunction):
            raise ValueError(f"expected no settings for a user-defined function, got {dict(settings)}")
        changed = with_settings(self._update, settings)
        return PushMeta(float(weight), {name: getattr(changed, name) for name in settings})

    def _check_size(self, rows: int) -> None:
        """Check that so many rows, or their keys, fit into one array; ranges travel in pieces anyway."""
        if rows * self._row_bytes > ARRAY_BYTES_MAX:
            raise ValueError(
                f"expected at most {ARRAY_BYTES_MAX} bytes of rows or of keys at once, "
                f"got {rows * self._row_bytes}; push or pull smaller ranges of keys, one after the other"
            )

    def _listed(self, keys: ArrayLike) -> Keys:
        found = _array(keys, "keys")
        if found.dtype.kind not in "iu" and len(found):
            raise ValueError(f"expected integers as keys, got {found.dtype}")
        listed: Keys = found.astype(np.int64, copy=False)
        if problem := find_problem(Entries(0, listed, listed), 0, self.keys):
            raise ValueError(f"{problem}; sort the keys, and add up rows of equal keys")
        return listed

    def _range(self, first: int, last: int) -> tuple[int, int]:
        if not 0 <= first < last <= self.keys:
            raise ValueError(f"expected keys from 0 to {self.keys - 1}, got {first} to {last - 1}")
        return first, last

    @property
    def _states(self) -> tuple[str, ...]:
        """Names of the states that the update keeps; none for a function, whose states are unknown here."""
        return () if isinstance(self._update, UserFunction) else tuple(self._update.states)

    def _finished(self, value: Any, after: Iterable[Future]) -> Future:
        return self._requests.when_done(after, lambda: value)


def _array(given: ArrayLike, name: str, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Return keys or numbers as an array; of a tensor its values, whether it requires a gradient or not."""
    try:
        return np.ascontiguousarray(given.detach() if hasattr(given, "detach") else given, dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(given).__name__
        what = f"expected {name} as an array or a tensor on the CPU, of a type that numpy has"
        raise ValueError(f"{what}, got a {kind}: {error}") from error


def _bounds(listed: Keys) -> tuple[int, int]:
    return int(listed[0]), int(listed[-1]) + 1
