"""One worker's events in any order, doubled and lost, and the snapshots that make up for the lost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import MalformedMessage
from distserve.messages import KVEvents, KVSnapshot
from distserve_gateway.held_blocks import MAX_EARLY_BYTES, HeldBlocks, words


def packed(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers)


def held_numbers(*numbers: int) -> set[int]:
    return set(words(packed(*numbers)))


def events(serial: int, stored: tuple[int, ...] = (), removed: tuple[int, ...] = ()) -> KVEvents:
    return KVEvents(worker="w", serial=serial, stored=packed(*stored), removed=packed(*removed))


def page(serial: int, total: int, *stored: int) -> KVSnapshot:
    return KVSnapshot(worker="w", serial=serial, total=total, stored=packed(*stored))


def history(draw: random.Random, length: int) -> list[tuple[KVEvents, set[int]]]:
    """Each event, and what is held after it."""
    now: set[int] = set()
    made = []
    for serial in range(1, length + 1):
        removed = {n for n in now if draw.random() < 0.3}
        stored = set(draw.sample(range(40), 4)) - now
        now = (now - removed) | stored
        made.append((events(serial, tuple(stored), tuple(removed)), set(now)))
    return made


@given(seed=st.integers(0, 2**32), length=st.integers(1, 20))
def test_doubled_and_reordered_events_end_in_what_the_worker_holds(seed: int, length: int) -> None:
    draw = random.Random(seed)
    made = history(draw, length)
    sent = [e for e, _ in made] + [draw.choice(made)[0] for _ in range(5)]
    draw.shuffle(sent)
    held = HeldBlocks()
    assert held.needs_snapshot
    held.restore([page(0, 0)])
    for e in sent:
        held.note(e)
    assert set(held.blocks) == held_numbers(*made[-1][1])
    assert not held.needs_snapshot


@given(seed=st.integers(0, 2**32), length=st.integers(2, 20))
def test_after_lost_events_a_snapshot_of_any_later_moment_makes_it_right(seed: int, length: int) -> None:
    draw = random.Random(seed)
    made = history(draw, length)
    lost = draw.randrange(length - 1)
    held = HeldBlocks()
    held.restore([page(0, 0)])
    for i, (e, _) in enumerate(made):
        if i != lost:
            held.note(e)
    assert held.needs_snapshot
    at = draw.randrange(lost, length)
    before = dict(held.blocks)
    if lost:  # one of before the loss can't
        held.restore([page(lost, len(made[lost - 1][1]), *made[lost - 1][1])])
        assert held.needs_snapshot
        assert held.blocks == before
    held.restore([page(at + 1, len(made[at][1]), *made[at][1])])
    assert not held.needs_snapshot
    assert set(held.blocks) == held_numbers(*made[-1][1])


@given(seed=st.integers(0, 2**32), length=st.integers(1, 12))
def test_a_snapshot_may_come_before_between_and_after_events_in_any_order(seed: int, length: int) -> None:
    """One that was overtaken by the event that was missing, and by others behind it, takes nothing back."""
    draw = random.Random(seed)
    made = history(draw, length)
    at = draw.randrange(length)
    coming: list[KVEvents | KVSnapshot] = [e for e, _ in made]
    draw.shuffle(coming)
    coming.insert(draw.randrange(length + 1), page(at + 1, len(made[at][1]), *made[at][1]))
    held = HeldBlocks()
    held.restore([page(0, 0)])
    for one in coming:
        held.restore([one]) if isinstance(one, KVSnapshot) else held.note(one)
    assert set(held.blocks) == held_numbers(*made[-1][1])
    assert held.serial == length
    assert not held.needs_snapshot


def test_the_pages_of_a_snapshot_make_one_list() -> None:
    held = HeldBlocks()
    held.note(events(5, stored=(9,)))
    held.note(events(6, stored=(7,), removed=(1,)))
    held.restore([page(5, 3, 1, 2), page(5, 3, 9)])
    assert set(held.blocks) == held_numbers(2, 7, 9)
    assert held.serial == 6


def test_what_a_later_snapshot_does_not_reach_is_of_another_life() -> None:
    held = HeldBlocks()
    held.restore([page(1, 0)])
    held.note(events(5000, stored=(9,)))
    early = held.early
    held.note(events(4, stored=(3,)))  # came while it was asked
    held.forget_unreached(early, 3)
    held.restore([page(3, 1, 2)])
    assert set(held.blocks) == held_numbers(2, 3)
    assert not held.needs_snapshot


def test_hints_from_before_a_gap_serve_until_the_snapshot_comes() -> None:
    held = HeldBlocks()
    held.restore([page(1, 2, 1, 2)])
    held.note(events(3, stored=(3,)))
    assert held.needs_snapshot
    assert set(held.blocks) == held_numbers(1, 2)


def test_events_that_wait_are_bounded_and_the_latest_are_kept() -> None:
    held = HeldBlocks()
    held.restore([page(0, 0)])
    big = tuple(range(1000))
    for serial in range(2, 400):
        held.note(events(serial, stored=big))
    assert held._num_early_bytes <= MAX_EARLY_BYTES
    assert 100 < len(held._early) < 398
    held.restore([page(399, 1, 5)])
    held.note(events(401))
    held.note(events(400, stored=(9,)))
    assert set(held.blocks) == held_numbers(5, 9)
    assert held._num_early_bytes == 0


def test_what_is_no_list_of_hashes_changes_nothing() -> None:
    held = HeldBlocks()
    held.restore([page(0, 0)])
    with pytest.raises(MalformedMessage, match="multiple of 8"):
        held.note(KVEvents(worker="w", serial=1, stored=b"123"))
    with pytest.raises(MalformedMessage, match="multiple of 8"):
        held.restore([page(1, 1, 1), KVSnapshot(worker="w", serial=1, total=2, stored=b"1")])
    assert (held.serial, held.blocks) == (0, {})
