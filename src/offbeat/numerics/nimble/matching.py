"""Maximum matching in a bipartite graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence


def maximum_matching(neighbours: Sequence[Sequence[int]], right_count: int) -> list[int | None]:
    """Return a maximum matching of a bipartite graph.

    Source: Hopcroft and Karp 1973, "An n^(5/2) algorithm for maximum matchings in bipartite graphs", SIAM J.
    Comput. 2(4): O(E sqrt(V)).

    Args:
        neighbours: for each vertex on the left, the vertices on the right that it may be matched with.
        right_count: number of vertices on the right.

    Returns:
        For each vertex on the left, its partner on the right, or None.
    """
    partner_of_left: list[int | None] = [None] * len(neighbours)
    partner_of_right: list[int | None] = [None] * right_count
    while True:
        depths = _depths(neighbours, partner_of_left, partner_of_right)
        unmatched = [left for left, partner in enumerate(partner_of_left) if partner is None]
        if not sum(
            _augment(left, neighbours, depths, partner_of_left, partner_of_right) for left in unmatched
        ):
            return partner_of_left


def _depths(
    neighbours: Sequence[Sequence[int]],
    partner_of_left: Sequence[int | None],
    partner_of_right: Sequence[int | None],
) -> list[int | None]:
    """Return how many matched edges lead to each vertex on the left from an unmatched one, if any do."""
    depths = [0 if partner is None else None for partner in partner_of_left]
    queue = deque(left for left, depth in enumerate(depths) if depth == 0)
    while queue:
        left = queue.popleft()
        depth = depths[left]
        assert depth is not None
        for right in neighbours[left]:
            following = partner_of_right[right]
            if following is not None and depths[following] is None:
                depths[following] = depth + 1
                queue.append(following)
    return depths


def _augment(
    start: int,
    neighbours: Sequence[Sequence[int]],
    depths: list[int | None],
    partner_of_left: list[int | None],
    partner_of_right: list[int | None],
) -> bool:
    """Match `start` by a path of unmatched and matched edges, if there is one; no vertex is visited twice.

    Depth-first, without recursion: a path may be as long as the graph.
    """
    path: list[tuple[int, Iterator[int]]] = [(start, iter(neighbours[start]))]
    chosen: list[int] = []  # the vertex on the right that leads from each vertex of the path to the next
    while path:
        left, candidates = path[-1]
        depth = depths[left]
        for right in candidates:
            following = partner_of_right[right]
            if following is None:
                for (one, _), partner in zip(path, [*chosen, right], strict=True):
                    partner_of_left[one], partner_of_right[partner] = partner, one
                    depths[one] = None
                return True
            if depth is not None and depths[following] == depth + 1:
                path.append((following, iter(neighbours[following])))
                chosen.append(right)
                break
        else:
            depths[left] = None
            path.pop()
            if chosen:
                chosen.pop()
    return False
