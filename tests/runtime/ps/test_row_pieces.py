"""Neighbouring rows travel in pieces."""

from __future__ import annotations

import numpy as np

from offbeat.numerics.ps.entries import Entries
from offbeat.runtime.ps.row_pieces import RowPieces


def test_contiguous_rows_are_sent_in_pieces_and_listed_rows_at_once():
    keys = 3_000_000
    pieces = RowPieces()
    pieces.set_row_bytes("w", 4)
    pushed, listed = Entries(0, np.zeros(keys, np.float32)), np.arange(keys)
    for content, piece_bytes in ((pushed, 4 * 1024 * 1024), (None, 2 * 1024 * 1024)):
        cut = [*pieces.split("w", content, 0, keys)]
        assert [first for first, _ in cut] == [0, *(last for _, last in cut[:-1])]
        assert cut[-1][1] == keys
        assert {4 * (last - first) for first, last in cut[:-1]} == {piece_bytes}
    assert [*pieces.split("w", listed, 0, keys)] == [(0, keys)]
    assert [*pieces.split("w", Entries(0, pushed.values, listed), 0, keys)] == [(0, keys)]


def test_rows_of_an_unknown_size_are_sent_at_once():
    assert [*RowPieces().split("w", None, 3, 3_000_000)] == [(3, 3_000_000)]
