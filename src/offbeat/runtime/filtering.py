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
from offbeat.numerics.filters import FilterChain, KeyCaching, Message, Passed
from offbeat.numerics.spaces import NO_FILTERS, Filters, make_filters
from offbeat.policies.parcels import Copy, Operation, Pull, Pulled, Push
from offbeat.policies.placement import Space
from offbeat.runtime.parcelling import Encoded

_LISTS_MAX: Final = 256  # of keys that pulls list, remembered for each node and namespace


class Filtering:
    """The chains of one node.

    What clients push goes through the namespace's filters for pushes, and what servers tell replicas of it
    through those that lose nothing; what servers answer to pulls through the filters for pulls. The lists of
    keys that pulls ask for are cached where there are filters for pulls.

    Args:
        seed: of this node's chance, its own.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._filters: dict[str, Filters] = {}  # by namespace
        self._chains: dict[tuple[str, str, str], FilterChain] = {}  # by node, namespace and kind
        self._cachings: dict[tuple[str, str, str], KeyCaching] = {}  # likewise

    def learn(self, spaces: Mapping[str, Space]) -> None:
        """Take note of namespaces.

        Raises:
            ProtocolError: the filters of one are none.
        """
        for name in spaces.keys() - self._filters.keys():
            self._filters[name] = make_filters(spaces[name].about)

    def forget(self, node: str) -> None:
        """A node is gone."""
        for known in (self._chains, self._cachings):
            for key in [key for key in known if key[0] == node]:
                del known[key]

    def report(self, namespace: str) -> dict[str, dict[str, Passed]]:
        """Return how many bytes each filter of a namespace was given and gave here, by kind and name."""
        found: dict[str, dict[str, Passed]] = {}
        for (_, name, kind), chain in self._chains.items():
            if name == namespace:
                so_far = found.setdefault(kind, {})
                for one, passed in chain.report().items():
                    before = so_far.get(one, Passed(0, 0))
                    so_far[one] = Passed(*(a + b for a, b in zip(before, passed, strict=True)))
        return found

    def encoded(self, node: str, message: Any) -> Any:
        """Return a message as it is to travel."""
        match message:
            case Push() if self._of(message.namespace).push:
                chain = self._chain(node, message.namespace, "push")
                content = _encode(chain, message, message.content, message.time)
                return replace(message, content=content)
            case Copy() if self._of(message.operation.namespace).copy:
                one = message.operation
                content = _encode(self._chain(node, one.namespace, "copy"), one, one.content, 0)
                return replace(message, operation=replace(one, content=content))
            case Pull() if message.keys is not None and self._of(message.namespace).caches_keys:
                caching = self._caching(node, message.namespace, "asked")
                return replace(message, keys=_travelling(caching.encode(_asked(message, message.keys))))
            case Pulled() if self._of(message.namespace).pull and len(message.content):
                chain, rows = self._chain(node, message.namespace, "pull"), message.content.values
                encoded = chain.encode(Message.of(message.namespace, 0, len(rows), Entries(0, rows)))
                return replace(message, content=_travelling(encoded))
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
                caching = self._caching(node, message.namespace, "asked here")
                arrived = _arrived(message.namespace, message.first, message.last, 0, message.keys)
                return replace(message, keys=caching.decode(arrived).keys)
        return message

    def answer(self, node: str, message: Pulled, rows: int) -> Rows:
        """Return the rows of a Pulled, of which there must be so many, as they were before `encoded`.

        Raises:
            ProtocolError: no node with the same filters says that.
        """
        content = message.content
        if isinstance(content, Encoded):
            chain = self._chain(node, message.namespace, "pull heard")
            content = chain.decode(_arrived(message.namespace, 0, max(1, rows), 0, content)).entries
        if not isinstance(content, Entries) or len(content) != rows:
            raise ProtocolError(f"expected {rows} rows of {message.namespace}, got {content}")
        found: Rows = content.values
        return found

    def _of(self, namespace: str) -> Filters:
        return self._filters.get(namespace, NO_FILTERS)

    def _chain(self, node: str, namespace: str, kind: str) -> FilterChain:
        chain = self._chains.get((node, namespace, kind))
        if chain is None:
            filters = getattr(self._of(namespace), kind.partition(" ")[0])
            seed = crc32(f"{self._seed} {node} {namespace} {kind}".encode())
            chain = FilterChain([spec.make(seed) for spec in filters])
            self._chains[node, namespace, kind] = chain
        return chain

    def _caching(self, node: str, namespace: str, kind: str) -> KeyCaching:
        caching = self._cachings.get((node, namespace, kind))
        if caching is None:
            caching = self._cachings[node, namespace, kind] = KeyCaching(_LISTS_MAX)
        return caching


def _encode(chain: FilterChain, what: Push | Operation, content: Entries, time: int) -> Encoded:
    return _travelling(chain.encode(Message.of(what.namespace, what.first, what.last, content, time=time)))


def _decode(chain: FilterChain, what: Push | Operation, content: Encoded, time: int) -> Entries:
    return chain.decode(_arrived(what.namespace, what.first, what.last, time, content)).entries


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
