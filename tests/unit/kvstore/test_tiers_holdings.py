"""Entries entering and leaving tiers: what may go, what is lost, what is deleted while it is in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from distserve.kv.hashing import pack
from distserve.messages import Tier
from distserve_kvstore.arena import Arena
from distserve_kvstore.columns import Entries
from distserve_kvstore.demotion import Watermarks
from distserve_kvstore.eviction import make_policy
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.offers import Owner, Piece
from distserve_kvstore.tier_state import TierState
from tests.contracts.transport.pools import SMALL

ROOT = bytes(32)


def names(*numbers: int) -> bytes:
    return pack([n.to_bytes(32, "little") for n in numbers])


class Setting:
    def __init__(self, num_rows: int = 16) -> None:
        self.arena = Arena(SMALL, num_rows)
        index = BlockIndex(256)
        tiers: tuple[Tier, ...] = ("dram", "disk", "object")
        policy = make_policy("lru", index, dict.fromkeys(tiers, 64), 0.0)
        self.states = {tier: TierState(tier) for tier in tiers}
        self.holdings = Holdings(self.arena, index, policy, self.states)
        self.freed: list[int] = []
        self.lower_tier = True
        self.holdings.free_places = self.freed.extend
        self.holdings.may_drop_dirty = lambda: not self.lower_tier

    def adopt(self, *numbers: int, parent: bytes = ROOT, start: int = 0, owner: Owner = Owner()) -> Entries:
        rows = self.arena.allocate(len(numbers))
        self.holdings.adopt(Piece(parent, start, names(*numbers), rows), owner, 0.0)
        return self.holdings.index.find(names(*numbers))

    def to_disk(self, entries: Entries, places: Sequence[int]) -> None:
        self.holdings.enter(entries, "disk", list(places))


@pytest.fixture
def at() -> Iterator[Setting]:
    made = Setting()
    yield made
    made.holdings.check()
    assert made.arena.num_used == made.holdings.num_blocks["dram"]
    made.arena.close()


def test_only_what_a_lower_tier_has_makes_room_while_there_is_a_lower_tier(at: Setting) -> None:
    entries = at.adopt(1, 2, 3, 4)
    assert at.holdings.make_room(16) == 12
    at.to_disk(entries[:2], [7, 8])
    # The chain is cut from its end, and its end is in memory alone.
    assert at.holdings.make_room(16) == 12
    at.to_disk(entries[2:], [9, 10])
    assert at.holdings.make_room(14) == 14
    assert at.holdings.prefix(names(1, 2, 3, 4), ("disk",)).tolist() == entries.tolist()
    assert at.holdings.fastest(entries).tolist() == [1, 1, 2, 2]


def test_without_a_lower_tier_room_is_made_by_forgetting(at: Setting) -> None:
    at.adopt(1, 2, 3, 4)
    at.lower_tier = False
    assert at.holdings.make_room(14) == 14
    assert at.holdings.is_here(names(1, 2, 3, 4)) == [True, True, False, False]
    assert at.states["dram"].num_evicted == {"room": 2}


def test_what_is_pinned_makes_no_room(at: Setting) -> None:
    entries = at.adopt(1, 2)
    at.lower_tier = False
    at.holdings.pins.hold(entries[1:])
    assert at.holdings.make_room(16) == 14
    at.holdings.pins.unhold(entries[1:])
    assert at.holdings.make_room(16) == 16


def test_a_chain_makes_no_room_for_its_own_end(at: Setting) -> None:
    mine = at.adopt(*range(1, 9))
    at.adopt(*range(11, 19))
    at.lower_tier = False
    assert at.holdings.make_room(4, around=names(*range(1, 13))) == 4
    assert all(at.holdings.is_here(names(*range(1, 9))))
    assert at.holdings.make_room(8, around=names(*range(1, 19))) == 4
    assert not at.holdings.index.num_pins[mine].any()


def test_a_block_lost_in_the_middle_ends_what_is_found_and_is_wanted_again(at: Setting) -> None:
    entries = at.adopt(1, 2, 3)
    at.holdings.leave(entries[1:2], "dram", "damaged")
    assert len(at.holdings.prefix(names(1, 2, 3), ("dram",))) == 1
    assert at.holdings.is_here(names(1, 2, 3)) == [True, False, True]
    at.adopt(2, parent=names(1), start=1)
    assert len(at.holdings.prefix(names(1, 2, 3), ("dram",))) == 3


def test_a_tier_that_cannot_be_read_is_a_miss(at: Setting) -> None:
    entries = at.adopt(1, 2, 3)
    at.to_disk(entries, [1, 2, 3])
    at.holdings.leave(entries[2:], "dram", "room")
    assert len(at.holdings.prefix(names(1, 2, 3), ("dram", "disk"))) == 3
    assert len(at.holdings.prefix(names(1, 2, 3), ("dram",))) == 2


def test_what_came_twice_keeps_the_first_row(at: Setting) -> None:
    entries = at.adopt(1, 2)
    rows = at.holdings.index.dram[entries].tolist()
    assert at.adopt(1, 2, 3).tolist()[:2] == entries.tolist()
    assert at.holdings.index.dram[entries].tolist() == rows
    assert at.arena.num_used == 3


def test_deleted_while_it_is_sent_it_is_found_no_more_and_goes_when_that_has_ended(at: Setting) -> None:
    entries = at.adopt(1, 2, 3)
    at.to_disk(entries, [4, 5, 6])
    at.holdings.pins.hold(entries[:2])
    at.holdings.doomed.add(entries[::-1])
    assert at.holdings.is_here(names(1, 2, 3)) == [False] * 3  # at once, the rest follows in slices
    removed = at.holdings.remove_doomed(entries[::-1])
    assert (removed.num_blocks, sorted(removed.places)) == (3, [4, 5, 6])
    assert at.freed == []  # forgotten by who deletes, not merely freed
    assert at.holdings.is_here(names(1, 2, 3)) == [False] * 3
    assert len(at.holdings.prefix(names(1), ("dram", "disk"))) == 0
    assert at.arena.num_used == 2
    at.holdings.pins.unhold(entries[:2])
    assert at.arena.num_used == 0
    assert len(at.holdings.index) == 0


def test_deleted_and_offered_again_while_it_is_sent_it_stays(at: Setting) -> None:
    entries = at.adopt(1, 2)
    at.holdings.pins.hold(entries)
    at.holdings.doomed.add(entries[::-1])
    at.holdings.remove_doomed(entries[::-1])
    at.adopt(1, 2)
    at.holdings.pins.unhold(entries)
    assert at.holdings.is_here(names(1, 2)) == [True, True]
    assert at.arena.num_used == 2


def test_leaving_the_disk_frees_its_places_and_what_was_only_there_is_gone(at: Setting) -> None:
    entries = at.adopt(1, 2)
    at.to_disk(entries, [4, 5])
    at.holdings.leave(entries[1:], "dram", "room")
    at.holdings.leave(entries[::-1], "disk", "watermark")
    assert sorted(at.freed) == [4, 5]
    assert at.holdings.is_here(names(1, 2)) == [True, False]
    assert len(at.holdings.index) == 1


def test_new_blocks_are_said_to_be_dirty_once(at: Setting) -> None:
    said: list[int] = []
    at.holdings.on_dirty = lambda entries: said.extend(entries.tolist())
    entries = at.adopt(1, 2)
    at.to_disk(entries, [1, 2])
    at.adopt(1, 2, 3)
    assert said == [*entries.tolist(), int(at.holdings.index.find(names(3))[0])]


def test_watermarks_have_hysteresis() -> None:
    marks = Watermarks(0.5, 0.8)
    assert marks.excess(80, 100) == 0
    assert marks.excess(81, 100) == 31
    assert marks.excess(60, 100) == 10  # on the way down
    assert marks.excess(50, 100) == 0
    assert marks.excess(60, 100) == 0  # on the way up
    marks.begin()
    assert marks.excess(60, 100) == 10
    assert Watermarks(0.9, 0.8).excess(81, 100) == 1  # low is never above high


def test_victims_above_one_that_stays_stay_too(at: Setting) -> None:
    entries = at.adopt(1, 2, 3)
    other = at.adopt(9)
    victims = np.array([*entries[::-1], *other], np.int32)
    stays = np.array([False, True, False, False])
    assert at.holdings.without(victims, stays).tolist() == [int(entries[2]), int(other[0])]
