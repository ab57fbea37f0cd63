"""Offers cut into pieces, and what an offer may say."""

from __future__ import annotations

import pytest

from distserve.errors import MalformedMessage
from distserve.messages import ChainRun
from distserve_kvstore.offers import Piece, checked, pieces


def name(i: int) -> bytes:
    return bytes([i]) * 32


def run(start: int, first: int, n: int) -> ChainRun:
    return ChainRun(start=start, hashes=b"".join(name(i) for i in range(first, first + n)), parent=name(first - 1))


def test_pieces_are_cut_where_a_block_is_left_out_and_where_a_run_ends() -> None:
    runs = [run(0, 10, 4), run(64, 20, 3)]
    hashes = [[name(10 + i) for i in range(4)], [name(20 + i) for i in range(3)]]
    found = pieces(runs, hashes, [0, 1, 3, 4, 6], [91, 92, 93, 94, 95])
    assert found == [
        Piece(parent=name(9), start=0, hashes=name(10) + name(11), blocks=[91, 92]),
        Piece(parent=name(12), start=3, hashes=name(13), blocks=[93]),
        Piece(parent=name(19), start=64, hashes=name(20), blocks=[94]),
        Piece(parent=name(21), start=66, hashes=name(22), blocks=[95]),
    ]


def test_all_of_two_runs_are_two_pieces_and_none_are_none() -> None:
    runs = [run(0, 10, 2), run(2, 12, 2)]
    hashes = [[name(10), name(11)], [name(12), name(13)]]
    assert [p.blocks for p in pieces(runs, hashes, [0, 1, 2, 3], [5, 6, 7, 8])] == [[5, 6], [7, 8]]
    assert pieces(runs, hashes, [], []) == []


@pytest.mark.parametrize(
    "bad", [ChainRun(start=0, hashes=b"x" * 33, parent=name(1)), ChainRun(start=0, hashes=name(1), parent=b"")]
)
def test_an_offer_without_whole_hashes_or_parent_is_refused(bad: ChainRun) -> None:
    with pytest.raises(MalformedMessage, match="parent of"):
        checked(bad)
