"""What workers may say wrongly, by mistake or on purpose, and what it must not cost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from distserve.errors import KVError, MalformedMessage
from distserve.messages import ChainRun, FetchRequest, PinRequest, PrefixRequest, decode, encode
from distserve.messages.store import MAX_DEPTH
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.offers import Owner, Piece, checked, require_short
from tests.unit.kvstore.tier_parts import ROOT, names, parts
from tests.waiting import until

FORGED = [MAX_DEPTH - 1, MAX_DEPTH, 2**31, 2**32 - 1, 2**63 - 1, 2**63]


@pytest.mark.parametrize("start", FORGED)
def test_a_chain_deeper_than_any_is_refused_and_nothing_changes(start: int) -> None:
    index = BlockIndex(64)
    with pytest.raises(KVError, match="must lie between 0"):
        index.insert(names(1, 2, 3), names(9), start, "t", "c")
    assert len(index) == 0
    index.check()
    run = ChainRun(start=start, hashes=names(1, 2, 3), parent=names(9))
    with pytest.raises(MalformedMessage, match="starts at depth"):
        checked(run)


def test_the_deepest_chain_that_may_be_is_taken() -> None:
    index = BlockIndex(64)
    index.insert(names(1, 2, 3), names(9), MAX_DEPTH - 3)
    index.check()
    assert checked(ChainRun(start=MAX_DEPTH - 3, hashes=names(1, 2, 3), parent=names(9))) == names(1, 2, 3)


async def test_the_rows_of_an_offer_that_the_index_refuses_for_whatever_reason_are_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parts(tmp_path, write_through=False) as at:

        def refuse(*args: object, **more: object) -> None:
            raise OverflowError("too large for C")

        monkeypatch.setattr(at.holdings.index, "insert", refuse)
        pieces = [Piece(ROOT, 0, names(1), at.arena.allocate(1)), Piece(ROOT, 0, names(2), at.arena.allocate(1))]
        with pytest.raises(OverflowError):
            at.grants._adopt(pieces, Owner())
        assert at.arena.num_used == 0


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e12])
def test_times_that_are_none_are_no_messages(seconds: float) -> None:
    for message in (
        PinRequest(tenant="t", conversation="c", ttl_s=seconds),
        PrefixRequest(asker="a", layout="l", runs=[], pin_s=seconds),
    ):
        with pytest.raises(MalformedMessage):
            decode(encode(message))
    assert FetchRequest.__annotations__["timeout_s"] is PinRequest.__annotations__["ttl_s"]


def test_a_forged_depth_is_no_message() -> None:
    with pytest.raises(MalformedMessage):
        decode(encode(PrefixRequest(asker="a", layout="l", runs=[ChainRun(start=MAX_DEPTH + 1, hashes=b"")])))


def test_a_conversation_pinned_again_and_again_is_remembered_once() -> None:
    index = BlockIndex(64)
    index.insert(names(1, 2), ROOT, 0, "t", "c")
    for i in range(10_000):
        index.conversations.pin("t", "c", 100.0 + i)
    assert len(index.conversations._by_expiry) < 100
    assert index.conversations.expire(100.0 + 9_998) == []
    assert [one.name for one in index.conversations.expire(100.0 + 9_999)] == ["c"]
    index.check()


def test_names_that_no_record_has_room_for_are_refused_by_name() -> None:
    require_short("t" * 256, "c" * 1024)
    with pytest.raises(MalformedMessage, match="a tenant of 257 bytes"):
        require_short("t" * 257, "")
    with pytest.raises(MalformedMessage, match="a conversation of 1026 bytes"):
        require_short("", "ü" * 513)


async def test_a_block_that_cannot_be_written_keeps_no_other_from_the_disk(tmp_path: Path) -> None:
    async with parts(tmp_path) as at:
        at.adopt(*range(1, 6))
        at.adopt(11, 12, owner=Owner("t", "x" * 2000))
        at.adopt(*range(21, 26))
        writing = asyncio.create_task(at.write_back.run())
        await until(lambda: not len(at.write_back), what="an empty queue")
        writing.cancel()
        await asyncio.wait({writing})
        assert at.holdings.num_blocks["disk"] == 10
        assert at.holdings.is_here(names(11, 12)) == [False, False]
        assert at.states["disk"].state == "ok"
    assert sum(len(run.places) for run in at.found_on_disk()) == 10


async def test_with_nothing_written_yet_no_victim_is_looked_for_and_behind_many_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    async with parts(tmp_path, num_rows=8000, write_through=False) as at:
        for first in range(1, 8000, 100):
            at.adopt(*range(first, min(first + 100, 8001)))
        victims = at.holdings.policy.victims

        def count(n: int, tier: str) -> object:
            asked.append(n)
            return victims(n, tier)  # type: ignore[arg-type]

        monkeypatch.setattr(at.holdings.policy, "victims", count)
        assert at.holdings.make_room(64) == 0
        assert asked == []
        newest = at.holdings.index.find(names(8000))
        at.holdings.enter(newest, "object", [at.objects.number_of("o", 0)])
        assert at.holdings.make_room(64) == 0
        assert sum(asked) < 4000
        at.holdings.leave(newest, "object", "test")


async def test_a_block_whose_copy_on_disk_is_damaged_is_written_again_while_memory_has_it(tmp_path: Path) -> None:
    async with parts(tmp_path) as at:
        entries = at.adopt(1, 2, 3)
        writing = asyncio.create_task(at.write_back.run())
        await until(lambda: at.holdings.num_blocks["disk"] == 3)
        at.holdings.leave(entries[1:2], "disk", "damaged")
        await until(lambda: at.holdings.num_blocks["disk"] == 3, what="the second copy")
        writing.cancel()
        await asyncio.wait({writing})
