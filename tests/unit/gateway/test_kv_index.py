"""What routing remembers of all workers: bounded, and only of those that are there."""

import gc
import os
import random
import tracemalloc

from distserve.messages import KVEvents, KVSnapshot
from distserve_gateway.kv_index import KVIndex
from tests.unit.gateway.test_held_blocks import packed


def snapshot(worker: str, *numbers: int, serial: int = 0) -> KVSnapshot:
    return KVSnapshot(worker=worker, serial=serial, total=len(numbers), stored=packed(*numbers))


def joined(index: KVIndex, worker: str, *numbers: int) -> None:
    assert index.restore(worker, index.join(worker), [snapshot(worker, *numbers)])


def test_a_worker_that_left_is_forgotten_and_its_late_events_are_ignored() -> None:
    index = KVIndex()
    joined(index, "a", 1, 2, 3)
    joined(index, "b", 1)
    index.leave("a")
    index.leave("a")
    index.note(KVEvents(worker="a", serial=1, stored=packed(4)))
    assert index.holders.keys() == {"b"}
    assert "a" not in index
    assert index.num_hints == 1
    index.check()


def test_a_snapshot_of_an_earlier_life_is_not_taken() -> None:
    index = KVIndex()
    earlier = index.join("a")
    later = index.join("a")
    assert not index.restore("a", earlier, [snapshot("a", 1)])
    assert not index.holders
    assert index.lacks("a") is later
    index.leave("a")
    assert not index.restore("a", later, [snapshot("a", 1)])
    assert index.lacks("a") is None


def test_over_the_bound_the_worker_without_news_for_longest_is_left_out() -> None:
    index = KVIndex(max_hints=10)
    joined(index, "a", *range(4))
    joined(index, "b", *range(4))
    index.note(KVEvents(worker="a", serial=1, stored=packed(10)))  # b is the oldest now
    joined(index, "c", 1)
    assert index.holders.keys() == {"a", "b", "c"}
    index.note(KVEvents(worker="c", serial=1, stored=packed(10)))
    assert {w: len(blocks) for w, blocks in index.holders.items()} == {"a": 5, "c": 2}
    assert (index.num_hints, index.num_dropped) == (7, 4)
    index.note(KVEvents(worker="b", serial=1, stored=packed(11)))  # nothing of it is kept
    assert index.lacks("b") is None
    index.check()


def test_one_left_out_is_asked_again_once_there_is_room() -> None:
    index = KVIndex(max_hints=10)
    joined(index, "a", *range(4))
    joined(index, "b", *range(7))
    assert index.holders.keys() == {"b"}
    assert index.readmit() == []
    index.note(KVEvents(worker="b", serial=1, removed=packed(*range(4))))
    assert index.readmit() == ["a"]
    assert index.lacks("a") is not None
    assert index.readmit() == []
    index.check()


def test_a_worker_with_more_than_all_may_hold_is_left_out_without_touching_others() -> None:
    index = KVIndex(max_hints=10)
    joined(index, "a", *range(4))
    index.join("b")
    assert index.fits("a", 10)
    assert not index.fits("b", 11)
    assert index.lacks("b") is None
    assert index.readmit() == []
    assert index.holders.keys() == {"a"}
    index.leave("b")
    index.check()


def test_memory_stays_within_the_bound_whatever_comes() -> None:
    draw = random.Random(7)
    index = KVIndex(max_hints=2000)
    serials = dict.fromkeys("abcdef", 0)
    for worker in serials:
        joined(index, worker)
    for _ in range(2000):
        worker = draw.choice("abcdef")
        serials[worker] += 1
        stored = packed(*(draw.randrange(2**40) for _ in range(draw.randrange(30))))
        index.note(KVEvents(worker=worker, serial=serials[worker], stored=stored))
        index.check()
        for back in index.readmit():
            serials[back] = 0
            assert index.restore(back, index.lacks(back), [snapshot(back)])  # type: ignore[arg-type]
    assert index.num_dropped > 10_000


def test_a_hint_costs_at_most_a_hundred_bytes_and_the_collector_does_not_look_at_it() -> None:
    num_hints = 50_000
    index = KVIndex()
    joined(index, "a")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for serial in range(1, num_hints // 50 + 1):
        index.note(KVEvents(worker="a", serial=serial, stored=os.urandom(50 * 8)))
    size = (tracemalloc.get_traced_memory()[0] - before) / num_hints
    tracemalloc.stop()
    assert index.num_hints == num_hints
    assert 8 < size < 100, f"{size:.0f} bytes a hint"
    gc.collect()
    assert not gc.is_tracked(index.holders["a"])
