"""Which segment is emptied next: a pure choice."""

from pathlib import Path

import numpy as np

from distserve_kvstore.disk.compaction import emptiest
from distserve_kvstore.disk.segment import Segment

SLOTS = 100


def segment(number: int, num_records: int, num_live: int, *, forgotten: int = 0, damage: str = "") -> Segment:
    return Segment(
        number,
        0,
        Path(f"{number}.seg"),
        np.full(num_records, -1, np.int32),
        num_records,
        num_live,
        num_forgotten=forgotten,
        damage=damage,
    )


def chosen(*segments: Segment, pressed: bool = False) -> int | None:
    found = emptiest(segments, SLOTS, 0.5, pressed=pressed)
    return None if found is None else found.number


def test_full_segments_are_left_alone():
    assert chosen() is None
    assert chosen(segment(1, 100, 100), segment(2, 100, 100), pressed=True) is None


def test_the_emptiest_goes_first_and_only_if_it_is_worth_it():
    assert chosen(segment(1, 100, 40), segment(2, 100, 30), segment(3, 100, 90)) == 2
    assert chosen(segment(1, 100, 60), segment(2, 100, 50)) is None


def test_when_room_is_short_any_dead_block_is_worth_it():
    assert chosen(segment(1, 100, 100), segment(2, 100, 97), segment(3, 100, 95), pressed=True) == 3


def test_forgotten_and_damaged_blocks_go_before_all():
    assert chosen(segment(1, 100, 10), segment(2, 100, 99, forgotten=1)) == 2
    assert chosen(segment(1, 100, 10), segment(2, 100, 99, damage="record 5")) == 2


def test_small_segments_are_put_together_but_one_is_not_moved_for_nothing():
    assert chosen(segment(1, 20, 20), segment(2, 10, 10), segment(3, 100, 100)) == 2
    assert chosen(segment(1, 20, 20), segment(3, 100, 100)) is None
