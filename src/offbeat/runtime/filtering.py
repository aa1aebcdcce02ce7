"""What a node's filters make of messages before they go out, and how they are undone where they come.

A namespace says which filters it has. For each other node, namespace and kind of message there is a chain at
either end; they stay alike, for messages between two nodes come in order and once each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from zlib import crc32

from offbeat.errors import ProtocolError
from offbeat.numerics.entries import Entries, Keys, Rows
from offbeat.numerics.filters import FilterChain, KeyCaching, Message, Passed, UnknownKeysError
from offbeat.numerics.spaces import NO_FILTERS, Filters, make_filters
from offbeat.policies.parcels import Copy, Operation, Pull, Pulled, Push
from offbeat.policies.placement import Space
from offbeat.runtime.parcelling import Encoded

_LISTS_MAX: Final = 256  # of keys that pulls list, remembered for each node and namespace


class Filtering:
    """The chains of one node.

    What clients push goes through the namespace's filters for pushes, and what servers tell replicas of it
    through those that lose nothing; what servers answer to pulls through the filters for pulls. The lists of
    keys that pulls ask for are cached where there are filters for pulls. What a filter cannot send, such as
    values that are not finite through fixed point, travels as it is.

    Args:
        seed: of this node's chance, its own.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._abouts: dict[str, Any] = {}  # by namespace
        self._filters: dict[str, Filters] = {}  # likewise, as far as they were asked for
        self._chains: dict[tuple[str, str, str], FilterChain] = {}  # by node, namespace and kind
        self._cachings: dict[tuple[str, str, str], KeyCaching] = {}  # likewise
        self._passed: dict[tuple[str, str], dict[str, Passed]] = {}  # in chains that ended, without the node
        self._ended = 0

    def learn(self, spaces: Mapping[str, Space]) -> None:
        """Take note of namespaces; who uses one whose filters are none is to blame, not who tells of it."""
        for name in spaces.keys() - self._abouts.keys():
            self._abouts[name] = spaces[name].about

    def knows(self, namespace: str) -> bool:
        """Whether it is one that was learned."""
        return namespace in self._abouts

    def forget(self, node: str) -> None:
        """A node is gone."""
        for key in [key for key in self._chains if key[0] == node]:
            self._end(key)
        for key in [key for key in self._cachings if key[0] == node]:
            del self._cachings[key]

    def report(self, namespace: str) -> dict[str, dict[str, Passed]]:
        """Return how many bytes each filter of a namespace was given and gave here, by kind and name."""
        found = {kind: dict(passed) for (name, kind), passed in self._passed.items() if name == namespace}
        for (_, name, kind), chain in self._chains.items():
            if name == namespace:
                _add(found.setdefault(kind, {}), chain)
        return found

    def encoded(self, node: str, message: Any) -> Any:
        """Return a message as it is to travel."""
        match message:
            case Push() if self._of(message.namespace).push:
                key = node, message.namespace, "push"
                content = self._encode(key, message.first, message.last, message.content, message.time)
                return replace(message, content=content)
            case Copy() if self._of(message.operation.namespace).copy:
                one = message.operation
                content = self._encode((node, one.namespace, "copy"), one.first, one.last, one.content, 0)
                return replace(message, operation=replace(one, content=content))
            case Pull() if message.keys is not None and self._of(message.namespace).caches_keys:
                caching = self._caching(node, message.namespace, "asked")
                return replace(message, keys=_travelling(caching.encode(_asked(message, message.keys))))
            case Pulled() if self._of(message.namespace).pull and len(message.content):
                key, rows = (node, message.namespace, "pull"), message.content.values
                return replace(message, content=self._encode(key, 0, len(rows), Entries(0, rows), 0))
        return message

    def decoded(self, node: str, message: Any) -> Any:
        """Return a message as it was before `encoded`, as far as filters can be undone; but see `answer`.

        Raises:
            ProtocolError: no node with the same filters says that.
        """
        match message:
            case Push() if isinstance(message.content, Encoded):
                chain = self._chain(node, message.namespace, "push heard")
                return replace(message, content=_decode(chain, message, message.content, message.time))
            case Copy() if isinstance(message.operation.content, Encoded):
                one = message.operation
                content = _decode(self._chain(node, one.namespace, "copy heard"), one, one.content, 0)
                return replace(message, operation=replace(one, content=content))
            case Pull() if isinstance(message.keys, Encoded):
                if not self._of(message.namespace).caches_keys:
                    raise ProtocolError(f"expected keys of {message.namespace} as they are, got encoded ones")
                caching = self._caching(node, message.namespace, "asked here")
                arrived = _arrived(message.namespace, message.first, message.last, 0, message.keys)
                return replace(message, keys=_undone(caching, arrived).keys)
        return message

    def answer(self, node: str, message: Pulled, rows: int) -> Rows:
        """Return the rows of a Pulled, of which there must be so many, as they were before `encoded`.

        Raises:
            ProtocolError: no node with the same filters says that.
        """
        content = message.content
        if isinstance(content, Encoded):
            chain = self._chain(node, message.namespace, "pull heard")
            content = _undone(chain, _arrived(message.namespace, 0, max(1, rows), 0, content)).entries
        if not isinstance(content, Entries) or len(content) != rows:
            raise ProtocolError(f"expected {rows} rows of {message.namespace}, got {content}")
        found: Rows = content.values
        return found

    def _encode(
        self, key: tuple[str, str, str], first: int, last: int, content: Entries, time: int
    ) -> Encoded | Entries:
        message = Message.of(key[1], first, last, content, time=time)
        try:
            return _travelling(self._chain(*key).encode(message))
        except ValueError:  # its filters may count as sent what is not; a new one begins with nothing sent
            self._end(key)
            return content

    def _end(self, key: tuple[str, str, str]) -> None:
        _add(self._passed.setdefault(key[1:], {}), self._chains.pop(key))
        self._ended += 1

    def _of(self, namespace: str) -> Filters:
        found = self._filters.get(namespace)
        if found is None:
            if namespace not in self._abouts:
                return NO_FILTERS
            found = self._filters[namespace] = make_filters(self._abouts[namespace])
        return found

    def _chain(self, node: str, namespace: str, kind: str) -> FilterChain:
        chain = self._chains.get((node, namespace, kind))
        if chain is None:
            if not self.knows(namespace):
                raise ProtocolError(f"expected a namespace that was opened, got {namespace}")
            filters = getattr(self._of(namespace), kind.partition(" ")[0])
            seed = crc32(f"{self._seed} {self._ended} {node} {namespace} {kind}".encode())
            chain = FilterChain([spec.make(seed) for spec in filters])
            self._chains[node, namespace, kind] = chain
        return chain

    def _caching(self, node: str, namespace: str, kind: str) -> KeyCaching:
        caching = self._cachings.get((node, namespace, kind))
        if caching is None:
            caching = self._cachings[node, namespace, kind] = KeyCaching(_LISTS_MAX)
        return caching


def _add(so_far: dict[str, Passed], chain: FilterChain) -> None:
    for name, passed in chain.report().items():
        before = so_far.get(name, Passed(0, 0))
        so_far[name] = Passed(before.in_bytes + passed.in_bytes, before.out_bytes + passed.out_bytes)


def _decode(chain: FilterChain, what: Push | Operation, content: Encoded, time: int) -> Entries:
    return _undone(chain, _arrived(what.namespace, what.first, what.last, time, content)).entries


def _undone(filters: FilterChain | KeyCaching, arrived: Message) -> Message:
    try:
        return filters.decode(arrived)
    except UnknownKeysError as error:  # nothing is lost between two nodes, so they were never sent
        raise ProtocolError(str(error)) from error


def _asked(pull: Pull, keys: Keys) -> Message:
    return Message(namespace=pull.namespace, first=pull.first, last=pull.last, keys=keys, values=None)


def _travelling(message: Message) -> Encoded:
    return Encoded(message.keys, message.values, message.body, message.notes)


def _arrived(namespace: str, first: int, last: int, time: int, content: Encoded) -> Message:
    try:
        return Message(
            namespace=namespace,
            first=first,
            last=last,
            time=time,
            keys=content.keys,
            values=content.values,
            body=content.body,
            notes=content.notes,
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"expected a message that filters have encoded: {error}") from error
