"""What a node's filters make of messages before they go out, and how they are undone where they come.

A namespace says which filters it has. For each other node, namespace and kind of message there is a chain at
either end; they stay alike, for messages between two nodes come in order and once each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias
from zlib import crc32

import numpy as np

from offbeat.errors import ProtocolError
from offbeat.numerics.ps.entries import Entries, Keys
from offbeat.numerics.ps.filters import (
    KKT,
    Filter,
    FilterChain,
    KeyCaching,
    Message,
    Passed,
    UnknownKeysError,
)
from offbeat.numerics.ps.spaces import NO_FILTERS, Filters, make_filters
from offbeat.policies.ps.hash_ring import Space
from offbeat.policies.ps.messages import Copy, Inspected, Operation, Pull, Pulled, Push, Refused, Stale
from offbeat.runtime.ps.packing import Encoded

_Part: TypeAlias = tuple[int, int, int]  # of a request: its number, the first key and the one behind the last

_LISTS_MAX: Final = 256  # of keys that pulls list, remembered for each node and namespace


class Filtering:
    """The chains of one node.

    What clients push goes through the namespace's filters for pushes, and what servers tell replicas of it
    through those that lose nothing; what servers answer to pulls through the filters for pulls. Answers come
    without keys, for the client remembers what it asked for until each answer has come. The lists of keys
    that pulls ask for are cached where key caching is a filter of pulls. What a filter cannot send, such as
    values that are not finite through fixed point, travels as it is; so do values together with states.

    Where KKT is a filter of pushes, it is one for all servers, and learns from answers (`observe`).

    A chain that begins anew at a sender counts nothing as sent, so its receiver may go on with an older one.
    Whoever takes the place of a lost node has chains of its own.

    Args:
        seed: of this node's chance, its own.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._abouts: dict[str, Any] = {}  # by namespace
        self._filters: dict[str, Filters] = {}  # likewise, as far as they were asked for
        self._chains: dict[tuple[str, str, str], FilterChain] = {}  # by node, namespace and kind
        self._kkts: dict[str, KKT] = {}  # by namespace, where it is among the filters
        self._cachings: dict[tuple[str, str, str], KeyCaching] = {}  # likewise
        # By node, what it has not answered: the namespaces, and the keys that are listed.
        self._asked: dict[str, dict[_Part, list[tuple[str, Keys | None]]]] = {}
        self._passed: dict[tuple[str, str], dict[str, Passed]] = {}  # in no chain that is here, by the others
        self._ended = 0

    def learn(self, spaces: Mapping[str, Space]) -> None:
        """Take note of namespaces; who uses one whose filters are none is to blame, not who tells of it."""
        for name in spaces.keys() - self._abouts.keys():
            self._abouts[name] = spaces[name].about

    def knows(self, namespace: str) -> bool:
        """Whether it is one that was learned."""
        return namespace in self._abouts

    def kkt(self, namespace: str) -> KKT:
        """Return the KKT filter of a namespace.

        Raises:
            ValueError: it has none.
        """
        self._of(namespace)
        if namespace not in self._kkts:
            raise ValueError(f"expected a namespace with a KKT filter of pushes, got {namespace}")
        return self._kkts[namespace]

    def observe(self, message: Pulled) -> None:
        """Let a KKT filter, where there is one, see an answer that counts: weights and gradients.

        Raises:
            ProtocolError: they are not rows as `BlockProximal` has them.
        """
        kkt, pulled = self._kkts.get(message.namespace), message.content
        if kkt is None:
            return
        if pulled.values.shape[1:] != (2,):
            raise ProtocolError(f"expected rows of weight and gradient, got values of {pulled.values.shape}")
        kkt.learn(pulled.listed(), pulled.values[:, 0], pulled.values[:, 1])

    def forget(self, node: str) -> None:
        """A node is gone."""
        for key in [key for key in self._chains if key[0] == node]:
            self._end(key)
        for key in [key for key in self._cachings if key[0] == node]:
            del self._cachings[key]
        self._asked.pop(node, None)

    def report(self, namespace: str) -> dict[str, dict[str, Passed]]:
        """Return how many bytes each filter of a namespace was given and gave here, by kind and name."""
        found = {kind: dict(passed) for (name, kind), passed in self._passed.items() if name == namespace}
        for (_, name, kind), chain in self._chains.items():
            if name == namespace:
                _add(found.setdefault(kind, {}), chain.report())
        return found

    def encoded(self, node: str, message: Any) -> Any:
        """Return a message as it is to travel."""
        if isinstance(message, Push) and message.wants_values:
            self._ask(node, message, None)
        match message:
            case Push() if self._of(message.namespace).push:
                return replace(message, content=self._encode_values(node, "push", message, message.time))
            case Copy() if self._of(message.operation.namespace).copy:
                one = message.operation
                content = self._encode_values(node, "copy", one, 0)
                return replace(message, operation=replace(one, content=content))
            case Pull():
                self._ask(node, message, message.keys)
                if message.keys is not None and self._of(message.namespace).caches_keys:
                    return replace(message, keys=self._encode_keys(node, message, message.keys))
            case Pulled() if message.content.keys is not None or self._of(message.namespace).pull:
                return _answer(message, self._encode_answer(node, message))
        return message

    def decoded(self, node: str, message: Any) -> Any:
        """Return a message as it was before `encoded`, as far as filters can be undone.

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
                return replace(message, keys=self._decode_keys(node, message, message.keys))
            case Pulled():
                return _answer(message, self._decode_answer(node, message))
            case Stale() | Refused():
                self._answered(node, message)
        return message

    def _encode(self, key: tuple[str, str, str], message: Message) -> Encoded | Entries:
        try:
            return _travelling(self._chain(*key).encode(message))
        except ValueError:  # its filters may count as sent what is not; a new one begins with nothing sent
            self._end(key)
            return message.entries

    def _encode_values(self, node: str, kind: str, what: Push | Operation, time: int) -> Encoded | Entries:
        key = node, what.namespace, kind
        content: Entries = what.content
        if content.replaces:
            if key in self._chains:  # what its filters count as sent is not there any more
                self._end(key)
            return content
        encoded = self._encode(key, Message.of(what.namespace, what.first, what.last, content, time=time))
        encoded.terms = content.terms
        return encoded

    def _encode_answer(self, node: str, message: Pulled) -> Encoded | Entries:
        content, filters = message.content, self._of(message.namespace)
        if not filters.pull or not len(content) or content.terms is not None:
            return Entries(message.first, content.values, None, content.terms)
        known = content.listed() if filters.knows_keys else None
        answer = Message.answering(message.namespace, content.values, known)
        return self._encode((node, message.namespace, "pull"), answer)

    def _decode_answer(self, node: str, message: Pulled) -> Entries:
        namespace, keys = self._answered(node, message)
        if namespace != message.namespace:
            raise ProtocolError(f"expected rows that were asked for, got some of {message.namespace}")
        content = message.content
        rows = message.last - message.first if keys is None else len(keys)
        if isinstance(content, Encoded):
            known = None
            if self._of(message.namespace).knows_keys:
                known = np.arange(message.first, message.last) if keys is None else keys
            arrived = _arrived(message.namespace, 0, max(1, rows), 0, content, known)
            content = _undone(self._chain(node, message.namespace, "pull heard"), arrived).entries
        if not isinstance(content, Entries) or len(content) != rows:
            raise ProtocolError(f"expected {rows} rows of {message.namespace}, got {content}")
        states = {} if content.terms is None else content.terms.states or {}
        if any(one.shape != content.values.shape for one in states.values()):
            raise ProtocolError(f"expected states of {message.namespace} beside its values, got others")
        return Entries(message.first, content.values, keys, content.terms)

    def _ask(self, node: str, message: Push | Pull, keys: Keys | None) -> None:
        part = message.number, message.first, message.last
        self._asked.setdefault(node, {}).setdefault(part, []).append((message.namespace, keys))

    def _answered(self, node: str, message: Pulled | Stale | Refused) -> tuple[str | None, Keys | None]:
        """Return the namespace and the keys of what this answers, if it answers something; each once."""
        asked = self._asked.get(node, {})
        part = message.number, message.first, message.last
        if part not in asked:
            return None, None
        answered = asked[part].pop(0)
        if not asked[part]:
            del asked[part]
        return answered

    def _encode_keys(self, node: str, pull: Pull, keys: Keys) -> Encoded:
        caching = self._caching(node, pull.namespace, "asked")
        asked = Message(namespace=pull.namespace, first=pull.first, last=pull.last, keys=keys, values=None)
        encoded = caching.encode(asked)
        self._count(pull.namespace, "ask", caching, asked, encoded)
        return _travelling(encoded)

    def _decode_keys(self, node: str, pull: Pull, keys: Encoded) -> Keys | None:
        caching = self._caching(node, pull.namespace, "asked here")
        arrived = _arrived(pull.namespace, pull.first, pull.last, 0, keys)
        asked = _undone(caching, arrived)
        self._count(pull.namespace, "ask heard", caching, arrived, asked)
        return asked.keys

    def _count(self, namespace: str, kind: str, one: Filter, before: Message, after: Message) -> None:
        _add(
            self._passed.setdefault((namespace, kind), {}),
            {one.name: Passed(before.size_bytes, after.size_bytes)},
        )

    def _end(self, key: tuple[str, str, str]) -> None:
        _add(self._passed.setdefault(key[1:], {}), self._chains.pop(key).report())
        self._ended += 1

    def _of(self, namespace: str) -> Filters:
        found = self._filters.get(namespace)
        if found is None:
            if namespace not in self._abouts:
                return NO_FILTERS
            found = self._filters[namespace] = make_filters(self._abouts[namespace])
            for spec in found.push:
                if spec.kind == "KKT":
                    self._kkts[namespace] = KKT(**spec.arguments)
        return found

    def _chain(self, node: str, namespace: str, kind: str) -> FilterChain:
        chain = self._chains.get((node, namespace, kind))
        if chain is None:
            if not self.knows(namespace):
                raise ProtocolError(f"expected a namespace that was opened, got {namespace}")
            filters = getattr(self._of(namespace), kind.partition(" ")[0])
            seed = crc32(f"{self._seed} {self._ended} {node} {namespace} {kind}".encode())
            made = [self._kkts[namespace] if spec.kind == "KKT" else spec.make(seed) for spec in filters]
            chain = FilterChain(made)
            self._chains[node, namespace, kind] = chain
        return chain

    def _caching(self, node: str, namespace: str, kind: str) -> KeyCaching:
        caching = self._cachings.get((node, namespace, kind))
        if caching is None:
            caching = self._cachings[node, namespace, kind] = KeyCaching(_LISTS_MAX)
        return caching


def _add(so_far: dict[str, Passed], more: Mapping[str, Passed]) -> None:
    for name, passed in more.items():
        before = so_far.get(name, Passed(0, 0))
        so_far[name] = Passed(before.in_bytes + passed.in_bytes, before.out_bytes + passed.out_bytes)


def _decode(chain: FilterChain, what: Push | Operation, content: Encoded, time: int) -> Entries:
    entries = _undone(chain, _arrived(what.namespace, what.first, what.last, time, content)).entries
    entries.terms = content.terms
    return entries


def _undone(filters: FilterChain | KeyCaching, arrived: Message) -> Message:
    try:
        return filters.decode(arrived)
    except UnknownKeysError as error:  # nothing is lost between two nodes, so they were never sent
        raise ProtocolError(str(error)) from error


def _answer(message: Pulled, content: Encoded | Entries) -> Pulled:
    if isinstance(message, Inspected):
        return replace(message, content=content)
    return Pulled(
        number=message.number,
        namespace=message.namespace,
        first=message.first,
        last=message.last,
        content=content,
    )


def _travelling(message: Message) -> Encoded:
    return Encoded(message.keys, message.values, message.body, message.notes)


def _arrived(
    namespace: str, first: int, last: int, time: int, content: Encoded, known: Keys | None = None
) -> Message:
    try:
        return Message(
            namespace=namespace,
            first=first,
            last=last,
            time=time,
            keys=content.keys,
            known=known,
            values=content.values,
            body=content.body,
            notes=content.notes,
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"expected a message that filters have encoded: {error}") from error
