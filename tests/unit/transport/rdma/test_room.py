"""Who gets room in the landing, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.errors import TransportError
from distserve.kv.layout import layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory
from distserve.transport.inbound import InboundLease
from distserve.transport.landing import Landing
from distserve.transport.rdma.room import LandingRoom, Place, PoolRoom
from distserve.transport.rows import PoolShape
from distserve.transport.spans import as_ids
from distserve.transport.staging_ring import HostCopier

LAYOUT = KVLayout(weights="test", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, rope="{}")
SHAPE = PoolShape(50, LAYOUT)


class Turns:
    """A reactor whose thread is the test's: what is called is done when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def call(self, run: Callable[[], object]) -> bool:
        self.calls.append(run)
        return True

    def take(self) -> None:
        calls, self.calls = self.calls, []
        for run in calls:
            run()


@pytest.fixture
def landing() -> Iterator[Landing]:
    blocks = np.zeros((50, LAYOUT.num_layers, layer_block_bytes(LAYOUT)), np.uint8)
    landing = Landing(HostCopier(PoolMemory(LAYOUT, blocks)), LAYOUT, 6)
    yield landing
    landing.check()
    landing.close()


def lease(number: int, count: int) -> InboundLease:
    return InboundLease(number, 1, as_ids(range(1, count + 1)), SHAPE)


def test_a_small_lease_does_not_overtake_a_large_one_that_waits(landing: Landing):
    turns, ready = Turns(), []
    room = LandingRoom(landing, turns)  # type: ignore[arg-type]
    places = [room.ask(lease(i, count), lambda _, i=i: ready.append(i)) for i, count in enumerate((4, 5, 2, 2))]
    assert ready == [0]
    assert room.num_waiting == 3
    places[0].leave()
    turns.take()
    assert ready == [0, 1]
    places[1].leave()
    turns.take()
    assert ready == [0, 1, 2, 3]
    for place in places:
        place.leave()
        place.leave()
    assert landing.num_free == 6


def test_who_leaves_while_waiting_is_not_told_and_makes_way(landing: Landing):
    turns, ready = Turns(), []
    room = LandingRoom(landing, turns)  # type: ignore[arg-type]
    first = room.ask(lease(0, 4), lambda _: ready.append(0))
    second = room.ask(lease(1, 6), lambda _: ready.append(1))
    third = room.ask(lease(2, 6), lambda _: ready.append(2))
    second.leave()
    first.leave()
    turns.take()
    assert ready == [0, 2]
    taken = third.take()
    third.leave()
    assert sorted(taken.tolist()) == [1, 2, 3, 4, 5, 6]
    assert not landing.num_free  # whoever took them gives them back
    landing.release(tuple(taken.tolist()))


def test_a_lease_that_cannot_be_opened_keeps_nobody_waiting(landing: Landing):
    turns, ready = Turns(), []
    room = LandingRoom(landing, turns)  # type: ignore[arg-type]

    def fails(_: Place) -> None:
        raise RuntimeError("on purpose")

    first = room.ask(lease(0, 6), lambda _: ready.append(0))
    second = room.ask(lease(1, 1), fails)
    third = room.ask(lease(2, 1), lambda _: ready.append(2))
    first.leave()
    turns.take()
    assert ready == [0, 2]
    for place in (second, third):
        place.leave()


def test_a_lease_that_can_never_have_room_is_refused_and_one_of_nothing_needs_none(landing: Landing):
    room = LandingRoom(landing, Turns())  # type: ignore[arg-type]
    with pytest.raises(TransportError, match=r"has 7 blocks, .* has 6: raise landing_bytes"):
        room.ask(lease(0, 7), lambda _: None)
    ready = []
    room.ask(lease(1, 0), ready.append)
    assert len(ready) == 1


def test_in_a_pool_that_peers_write_themselves_a_lease_lands_in_its_own_blocks():
    ready: list[Place] = []
    asked = lease(3, 5)
    place = PoolRoom().ask(asked, ready.append)
    assert ready == [place]
    assert place.ids is asked.block_ids
    place.leave()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 20)), max_size=30))
def test_blocks_are_in_one_place_and_every_lease_is_served_in_its_turn(steps: list[tuple[int, bool, int]]):
    blocks = np.zeros((50, LAYOUT.num_layers, layer_block_bytes(LAYOUT)), np.uint8)
    landing, turns = Landing(HostCopier(PoolMemory(LAYOUT, blocks)), LAYOUT, 6), Turns()
    room = LandingRoom(landing, turns)  # type: ignore[arg-type]
    served: list[int] = []
    open_places: list[Place] = []
    left: set[int] = set()
    numbers: dict[int, int] = {}
    for number, (count, leaves, which) in enumerate(steps):
        place = room.ask(lease(number, count), lambda _, n=number: served.append(n))
        open_places.append(place)
        numbers[id(place)] = number
        if leaves:
            gone = open_places.pop(which % len(open_places))
            if numbers[id(gone)] not in served:
                left.add(numbers[id(gone)])
            gone.leave()
            turns.take()
        held = [i for place in open_places for i in place.ids.tolist()]
        assert len(set(held)) == len(held)
        assert landing.num_free == 6 - len(held)
        landing.check()
    for place in open_places:
        place.leave()
        turns.take()
    assert served == sorted(served)
    assert not set(served) & left
    landing.close()
