"""The filters of a node: encoding of messages before they are sent, and decoding of received ones.

A namespace defines its filters. For each pair of nodes, namespace and kind of message there is a chain at
either end; the two stay in the same state, as messages between two nodes arrive in order and exactly once.
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
    FilterBytes,
    FilterChain,
    FilterMessage,
    KeyCaching,
    UnknownKeysError,
)
from offbeat.numerics.ps.spaces import NO_FILTERS, NamespaceFilters, decode_filters
from offbeat.policies.ps.hash_ring import NamespaceSpec
from offbeat.policies.ps.messages import (
    InspectResult,
    Operation,
    Pull,
    PullResult,
    Push,
    Rejected,
    Replicate,
    WrongMaster,
)
from offbeat.runtime.ps.packing import EncodedValues

_RequestPart: TypeAlias = tuple[int, int, int]  # of a request: its number, first key and last key + 1

_LISTS_MAX: Final = 256  # of keys that pulls list, remembered for each node and namespace


class NodeFilters:
    """The filter chains of one node.

    Clients' pushes go through the namespace's filters for pushes, and their copies from servers to replicas
    through those that are lossless; servers' answers to pulls go through the filters for pulls. Answers are
    sent without keys, as the client remembers what it requested until each answer has arrived. The lists of
    keys in pulls are cached where key caching is a filter of pulls. What a filter cannot encode, such as
    values that are not finite with fixed point, is sent unchanged; so are values together with states.

    A KKT filter of pushes is one for all servers, and learns from answers (`update_kkt`).

    A chain that is recreated at a sender counts nothing as sent, so its receiver may continue with the old
    one. A node that replaces a lost node has chains of its own.

    Args:
        seed: of this node's random numbers; different for each node.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._definitions: dict[str, Any] = {}  # by namespace
        self._filters: dict[str, NamespaceFilters] = {}  # by namespace, created on first use
        self._chains: dict[tuple[str, str, str], FilterChain] = {}  # by node, namespace and kind
        self._kkts: dict[str, KKT] = {}  # by namespace, where it is among the filters
        self._cachings: dict[tuple[str, str, str], KeyCaching] = {}  # by node, namespace and kind
        # By node, the requests that it has not answered: the namespace, and the keys that are listed.
        self._unanswered: dict[str, dict[_RequestPart, list[tuple[str, Keys | None]]]] = {}
        self._bytes_passed: dict[
            tuple[str, str], dict[str, FilterBytes]
        ] = {}  # of removed chains and of key caching
        self._recreated = 0

    def add_namespaces(self, spaces: Mapping[str, NamespaceSpec]) -> None:
        """Store the definitions of namespaces; invalid filters raise on first use, not here."""
        for name in spaces.keys() - self._definitions.keys():
            self._definitions[name] = spaces[name].spec

    def knows(self, namespace: str) -> bool:
        """Whether the namespace was passed to `add_namespaces`."""
        return namespace in self._definitions

    def kkt(self, namespace: str) -> KKT:
        """Return the KKT filter of a namespace.

        Raises:
            ValueError: it has none.
        """
        self._of(namespace)
        if namespace not in self._kkts:
            raise ValueError(f"expected a namespace with a KKT filter of pushes, got {namespace}")
        return self._kkts[namespace]

    def update_kkt(self, message: PullResult) -> None:
        """Update a KKT filter, if there is one, from the weights and gradients in an answer.

        Raises:
            ProtocolError: the rows are not those of `BlockProximal`.
        """
        kkt, pulled = self._kkts.get(message.namespace), message.content
        if kkt is None:
            return
        if pulled.values.shape[1:] != (2,):
            raise ProtocolError(f"expected rows of weight and gradient, got values of {pulled.values.shape}")
        kkt.update_skipped(pulled.key_array(), pulled.values[:, 0], pulled.values[:, 1])

    def on_node_gone(self, node: str) -> None:
        """Drop the state kept for a node that is gone."""
        for key in [key for key in self._chains if key[0] == node]:
            self._end(key)
        for key in [key for key in self._cachings if key[0] == node]:
            del self._cachings[key]
        self._unanswered.pop(node, None)

    def report(self, namespace: str) -> dict[str, dict[str, FilterBytes]]:
        """Return the bytes before and after each filter of a namespace at this node, by kind and name."""
        found = {
            kind: dict(passed) for (name, kind), passed in self._bytes_passed.items() if name == namespace
        }
        for (_, name, kind), chain in self._chains.items():
            if name == namespace:
                _accumulate(found.setdefault(kind, {}), chain.report())
        return found

    def encode(self, node: str, message: Any) -> Any:
        """Return a message as it is to be sent."""
        if isinstance(message, Push) and message.returns_values:
            self._note_request(node, message, None)
        match message:
            case Push() if self._of(message.namespace).push:
                return replace(message, content=self._encode_values(node, "push", message, message.time))
            case Replicate() if self._of(message.operation.namespace).replica_filters:
                one = message.operation
                content = self._encode_values(node, "copy", one, 0)
                return replace(message, operation=replace(one, content=content))
            case Pull():
                self._note_request(node, message, message.keys)
                if message.keys is not None and self._of(message.namespace).caches_pull_keys:
                    return replace(message, keys=self._encode_keys(node, message, message.keys))
            case PullResult() if message.content.keys is not None or self._of(message.namespace).pull:
                return _with_content(message, self._encode_answer(node, message))
        return message

    def decode(self, node: str, message: Any) -> Any:
        """Return a received message with its filters undone, as far as they can be.

        Raises:
            ProtocolError: no node with the same filters sends such a message.
        """
        match message:
            case Push() if isinstance(message.content, EncodedValues):
                chain = self._chain(node, message.namespace, "push received")
                return replace(message, content=_decode(chain, message, message.content, message.time))
            case Replicate() if isinstance(message.operation.content, EncodedValues):
                one = message.operation
                content = _decode(self._chain(node, one.namespace, "copy received"), one, one.content, 0)
                return replace(message, operation=replace(one, content=content))
            case Pull() if isinstance(message.keys, EncodedValues):
                if not self._of(message.namespace).caches_pull_keys:
                    raise ProtocolError(f"expected unencoded keys of {message.namespace}, got encoded ones")
                return replace(message, keys=self._decode_keys(node, message, message.keys))
            case PullResult():
                return _with_content(message, self._decode_answer(node, message))
            case WrongMaster() | Rejected():
                self._pop_request(node, message)
        return message

    def _encode(self, key: tuple[str, str, str], message: FilterMessage) -> EncodedValues | Entries:
        try:
            return _encoded_from(self._chain(*key).encode(message))
        except ValueError:  # its filters may count unsent data as sent; a new chain starts empty
            self._end(key)
            return message.entries

    def _encode_values(
        self, node: str, kind: str, part: Push | Operation, time: int
    ) -> EncodedValues | Entries:
        """Encode values for a node; a replacement (`put`) is sent unchanged and ends the filters' chain."""
        key = node, part.namespace, kind
        content: Entries = part.content
        if content.is_replacement:
            if key in self._chains:  # it removes values that the filters count as sent
                self._end(key)
            return content
        encoded = self._encode(
            key, FilterMessage.from_entries(part.namespace, part.first, part.last, content, time=time)
        )
        encoded.meta = content.meta
        return encoded

    def _encode_answer(self, node: str, message: PullResult) -> EncodedValues | Entries:
        content, filters = message.content, self._of(message.namespace)
        if not filters.pull or not len(content) or content.meta is not None:
            return Entries(message.first, content.values, None, content.meta)
        known = content.key_array() if filters.needs_pull_keys else None
        answer = FilterMessage.response(message.namespace, content.values, known)
        return self._encode((node, message.namespace, "pull"), answer)

    def _decode_answer(self, node: str, message: PullResult) -> Entries:
        namespace, keys = self._pop_request(node, message)
        if namespace != message.namespace:
            raise ProtocolError(f"expected rows that were requested, got rows of {message.namespace}")
        content = message.content
        rows = message.last - message.first if keys is None else len(keys)
        if isinstance(content, EncodedValues):
            known = None
            if self._of(message.namespace).needs_pull_keys:
                known = np.arange(message.first, message.last) if keys is None else keys
            arrived = _message_from(message.namespace, 0, max(1, rows), 0, content, known)
            content = _decode_with(self._chain(node, message.namespace, "pull received"), arrived).entries
        if not isinstance(content, Entries) or len(content) != rows:
            raise ProtocolError(f"expected {rows} rows of {message.namespace}, got {content}")
        states = {} if content.meta is None else content.meta.states or {}
        if any(one.shape != content.values.shape for one in states.values()):
            raise ProtocolError(
                f"expected states of {message.namespace} with the shape of its values, got another shape"
            )
        return Entries(message.first, content.values, keys, content.meta)

    def _note_request(self, node: str, message: Push | Pull, keys: Keys | None) -> None:
        part = message.request, message.first, message.last
        self._unanswered.setdefault(node, {}).setdefault(part, []).append((message.namespace, keys))

    def _pop_request(
        self, node: str, message: PullResult | WrongMaster | Rejected
    ) -> tuple[str | None, Keys | None]:
        """Return the namespace and the keys of the request that this answers, if any; each once."""
        requests = self._unanswered.get(node, {})
        part = message.request, message.first, message.last
        if part not in requests:
            return None, None
        request = requests[part].pop(0)
        if not requests[part]:
            del requests[part]
        return request

    def _encode_keys(self, node: str, pull: Pull, keys: Keys) -> EncodedValues:
        caching = self._caching(node, pull.namespace, "asked")
        listing = FilterMessage(
            namespace=pull.namespace, first=pull.first, last=pull.last, keys=keys, values=None
        )
        encoded = caching.encode(listing)
        self._count_bytes(pull.namespace, "ask", caching, listing, encoded)
        return _encoded_from(encoded)

    def _decode_keys(self, node: str, pull: Pull, keys: EncodedValues) -> Keys | None:
        caching = self._caching(node, pull.namespace, "asked here")
        arrived = _message_from(pull.namespace, pull.first, pull.last, 0, keys)
        listing = _decode_with(caching, arrived)
        self._count_bytes(pull.namespace, "ask received", caching, arrived, listing)
        return listing.keys

    def _count_bytes(
        self, namespace: str, kind: str, one: Filter, before: FilterMessage, after: FilterMessage
    ) -> None:
        _accumulate(
            self._bytes_passed.setdefault((namespace, kind), {}),
            {one.name: FilterBytes(before.size_bytes, after.size_bytes)},
        )

    def _end(self, key: tuple[str, str, str]) -> None:
        _accumulate(self._bytes_passed.setdefault(key[1:], {}), self._chains.pop(key).report())
        self._recreated += 1

    def _of(self, namespace: str) -> NamespaceFilters:
        found = self._filters.get(namespace)
        if found is None:
            if namespace not in self._definitions:
                return NO_FILTERS
            found = self._filters[namespace] = decode_filters(self._definitions[namespace])
            for spec in found.push:
                if spec.kind == "KKT":
                    self._kkts[namespace] = KKT(**spec.arguments)
        return found

    def _chain(self, node: str, namespace: str, kind: str) -> FilterChain:
        chain = self._chains.get((node, namespace, kind))
        if chain is None:
            if not self.knows(namespace):
                raise ProtocolError(f"expected a namespace that was opened, got {namespace}")
            filters = self._of(namespace)
            specs = {"push": filters.push, "copy": filters.replica_filters, "pull": filters.pull}
            seed = crc32(f"{self._seed} {self._recreated} {node} {namespace} {kind}".encode())
            made = [
                self._kkts[namespace] if spec.kind == "KKT" else spec.build(seed)
                for spec in specs[kind.partition(" ")[0]]
            ]
            chain = FilterChain(made)
            self._chains[node, namespace, kind] = chain
        return chain

    def _caching(self, node: str, namespace: str, kind: str) -> KeyCaching:
        caching = self._cachings.get((node, namespace, kind))
        if caching is None:
            caching = self._cachings[node, namespace, kind] = KeyCaching(_LISTS_MAX)
        return caching


def _accumulate(totals: dict[str, FilterBytes], more: Mapping[str, FilterBytes]) -> None:
    for name, passed in more.items():
        before = totals.get(name, FilterBytes(0, 0))
        totals[name] = FilterBytes(before.in_bytes + passed.in_bytes, before.out_bytes + passed.out_bytes)


def _decode(chain: FilterChain, part: Push | Operation, content: EncodedValues, time: int) -> Entries:
    entries = _decode_with(chain, _message_from(part.namespace, part.first, part.last, time, content)).entries
    entries.meta = content.meta
    return entries


def _decode_with(filters: FilterChain | KeyCaching, arrived: FilterMessage) -> FilterMessage:
    try:
        return filters.decode(arrived)
    except UnknownKeysError as error:  # channels lose nothing, so the peer never sent these keys
        raise ProtocolError(str(error)) from error


def _with_content(message: PullResult, content: EncodedValues | Entries) -> PullResult:
    if isinstance(message, InspectResult):
        return replace(message, content=content)
    return PullResult(
        request=message.request,
        namespace=message.namespace,
        first=message.first,
        last=message.last,
        content=content,
    )


def _encoded_from(message: FilterMessage) -> EncodedValues:
    return EncodedValues(message.keys, message.values, message.body, message.notes)


def _message_from(
    namespace: str, first: int, last: int, time: int, content: EncodedValues, known: Keys | None = None
) -> FilterMessage:
    try:
        return FilterMessage(
            namespace=namespace,
            first=first,
            last=last,
            time=time,
            keys=content.keys,
            known_keys=known,
            values=content.values,
            body=content.body,
            notes=content.notes,
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"expected a message that filters have encoded: {error}") from error
