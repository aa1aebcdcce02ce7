"""Placement of keys: a ring of servers, and the ranges that each of them is responsible for.

Nothing here knows what is stored, or which servers are alive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, NamedTuple

RING_SIZE: Final = 2**62  # places on the ring are 0 to RING_SIZE - 1, the upper bits of a hash


class NamespaceSpec(NamedTuple):
    """A namespace: keys 0 to `keys` - 1, in blocks of `block_keys` neighbours that are stored together.

    Attributes:
        spec: the type of its values and its update, in a form that the servers' stores understand.
        aggregates: whether the pushes of all participants at one time are summed into one operation.
    """

    name: str
    keys: int
    block_keys: int
    spec: Any = None
    aggregates: bool = False

    def blocks_of_range(self, first: int, last: int) -> range:
        """Return the numbers of the blocks that contain any of keys `first` to `last` - 1."""
        return range(first // self.block_keys, (last - 1) // self.block_keys + 1)

    def block_range(self, block: int) -> tuple[int, int]:
        """Return the first key of a block and the key after its last."""
        return block * self.block_keys, min((block + 1) * self.block_keys, self.keys)


class KeySpan(NamedTuple):
    """Keys `first` to `last` - 1 of a namespace, with the servers that hold them: master, then replicas."""

    first: int
    last: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class ArcMove:
    """Places `first` to `last` - 1 on the ring whose holders change."""

    first: int
    last: int
    before: tuple[int, ...]
    after: tuple[int, ...]


class HashRing:
    """A consistent-hash ring; a block of keys belongs to the first point at or after its own place.

    Each server has many points. A block is a range of neighbouring keys of one namespace: hashing blocks
    keeps ranges together, unlike hashing single keys. The block's master is the server at that point, its
    replicas are the next distinct servers after it. So when a server leaves, the new master of each of its
    blocks already has a copy, and adding or removing one server changes nothing where it holds nothing.

    Source: the parameter server of OSDI'14, section 4.3 (consistent hashing with virtual nodes, a "direct
    mapped" ring). Deviation: blocks in place of keys.

    Args:
        servers: their ids.
        virtual_nodes: points per server; with S servers and V points each, the load of the busiest is about
            1 + sqrt(2 ln S / V) times the mean.
        replicas: how many replicas each block has, as far as there are servers.

    Attributes:
        servers: their ids, ascending.

    Raises:
        ValueError: an argument out of range, or a server twice.
    """

    def __init__(self, servers: Iterable[int], *, virtual_nodes: int = 16, replicas: int = 2) -> None:
        self.servers = tuple(sorted(servers))
        if len(set(self.servers)) < len(self.servers):
            raise ValueError(f"expected every server once, got {self.servers}")
        for name, value, least in (
            ("virtual_nodes", virtual_nodes, 1),
            ("replicas", replicas, 0),
        ):
            if value < least:
                raise ValueError(f"expected {name} of at least {least}, got {value}")
        self.virtual_nodes, self.replicas = virtual_nodes, replicas
        nodes = sorted(
            (_virtual_node_point(server, v), server) for server in self.servers for v in range(virtual_nodes)
        )
        self._points = [point for point, _ in nodes]
        self._owners = [server for _, server in nodes]
        self._holders: dict[int, tuple[int, ...]] = {}  # by index into `_points`

    def holders_at(self, point: int) -> tuple[int, ...]:
        """Return the servers that hold the data at a place of the ring: the master first, then the replicas.

        They are fewer than `replicas` + 1 if there are fewer servers; none without servers.
        """
        if not self._points:
            return ()
        index = bisect_left(self._points, point) % len(self._points)
        found = self._holders.get(index)
        if found is None:
            found = self._holders[index] = self._walk(index)
        return found

    def holders(self, space: NamespaceSpec, key: int) -> tuple[int, ...]:
        """Return the servers that hold a key: the master first, then the replicas."""
        return self.holders_at(block_point(space.name, key // space.block_keys))

    def spans(self, space: NamespaceSpec, first: int, last: int) -> Iterator[KeySpan]:
        """Yield the keys `first` to `last` - 1 as maximal ranges with the same holders, ascending.

        Linear in the number of blocks.

        Raises:
            ValueError: no such range of keys.
        """
        if not 0 <= first < last <= space.keys:
            raise ValueError(
                f"expected a range of keys within 0 to {space.keys} in {space.name}, got {first} to {last}"
            )
        return spans_of(space, first, last, self.holders_at)

    @property
    def stretch_starts(self) -> tuple[int, ...]:
        """Where stretches with the same holders begin, ascending; the last one continues at 0."""
        return tuple(point + 1 for point in self._points)

    def with_server(self, server: int) -> HashRing:
        """Return the ring with one more server."""
        return self._with_servers((*self.servers, server))

    def without_server(self, server: int) -> HashRing:
        """Return the ring without a server."""
        if server not in self.servers:
            raise ValueError(f"expected one of the servers {self.servers}, got {server}")
        return self._with_servers(other for other in self.servers if other != server)

    def moves(self, after: HashRing) -> list[ArcMove]:
        """Return the stretches whose holders differ between this ring and another, ascending.

        Neighbours with the same change are merged.
        """
        bounds = sorted({0, *self.stretch_starts, *after.stretch_starts, RING_SIZE})
        found: list[ArcMove] = []
        for first, last in pairwise(bounds):
            before, holders = self.holders_at(first), after.holders_at(first)
            if before == holders:
                continue
            if found and (found[-1].last, found[-1].before, found[-1].after) == (first, before, holders):
                found[-1] = ArcMove(found[-1].first, last, before, holders)
            else:
                found.append(ArcMove(first, last, before, holders))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments that create the same ring, as plain data."""
        return {
            "servers": list(self.servers),
            "virtual_nodes": self.virtual_nodes,
            "replicas": self.replicas,
        }

    def _walk(self, index: int) -> tuple[int, ...]:
        wanted = min(self.replicas + 1, len(self.servers))
        found: list[int] = []
        while len(found) < wanted:
            if self._owners[index] not in found:
                found.append(self._owners[index])
            index = (index + 1) % len(self._owners)
        return tuple(found)

    def _with_servers(self, servers: Iterable[int]) -> HashRing:
        return HashRing(servers, virtual_nodes=self.virtual_nodes, replicas=self.replicas)


def spans_of(
    space: NamespaceSpec, first: int, last: int, holders_at: Callable[[int], tuple[int, ...]]
) -> Iterator[KeySpan]:
    """Yield the keys `first` to `last` - 1 as maximal ranges with the same holders, ascending.

    Args:
        holders_at: returns the holders at a place of the ring.
    """
    start, blocks = first, space.blocks_of_range(first, last)
    holders = holders_at(block_point(space.name, blocks[0]))
    for block in blocks[1:]:
        next_holders = holders_at(block_point(space.name, block))
        if next_holders != holders:
            bound, _ = space.block_range(block)
            yield KeySpan(start, bound, holders)
            start, holders = bound, next_holders
    yield KeySpan(start, last, holders)


@lru_cache(maxsize=2**16)
def block_point(namespace: str, block: int) -> int:
    """Return the place of a block on the ring."""
    return _hash(f"{namespace}:{block}")


def _virtual_node_point(server: int, virtual: int) -> int:
    return _hash(f"server {server}.{virtual}")


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
