"""The small parts of a store node: arena, pins, heat, tier state, threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from distserve.errors import ConfigError, DiskFailed, DiskFull, KVError, PoolExhausted
from distserve.kv.hashing import pack
from distserve.kv.layout import block_bytes
from distserve_kvstore.arena import PAGE_BYTES, Arena
from distserve_kvstore.heat import MAX_SEGMENTS, Heat
from distserve_kvstore.index import BlockIndex
from distserve_kvstore.io_threads import IoThreads
from distserve_kvstore.pins import MAX_PIN_S, Pins
from distserve_kvstore.tier_state import TierState
from tests.contracts.transport.pools import SMALL
from tests.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(SMALL, 20)
    yield made
    made.check()
    made.close()


def test_rows_are_page_aligned_and_written_through_to_what_transports_see(arena: Arena) -> None:
    for block in arena.allocate(3):
        row = np.frombuffer(arena.row(block), np.uint8)
        assert row.ctypes.data % PAGE_BYTES == 0
        assert len(row) == block_bytes(SMALL)
        arena.row(block)[:4] = b"abcd"
        assert bytes(arena.memory.blocks[block].reshape(-1)[:4]) == b"abcd"


def test_what_comes_together_lies_together_and_block_0_is_nobodys(arena: Arena) -> None:
    first = arena.allocate(8)
    assert first == list(range(1, 9))
    arena.free(first[2:4])
    assert arena.allocate(10) == list(range(9, 19))  # not into the holes while there is more behind
    assert arena.allocate(4) == [19, 20, 3, 4]
    assert arena.num_free == 0
    with pytest.raises(PoolExhausted, match="1 blocks wanted, 0 of 20"):
        arena.allocate(1)


@pytest.mark.parametrize("blocks", [[3, 3], [0], [21], [7]])
def test_a_block_is_not_freed_twice(arena: Arena, blocks: list[int]) -> None:
    arena.allocate(5)
    with pytest.raises(KVError, match="twice"):
        arena.free(blocks)
    assert arena.num_used == 5


def test_an_arena_too_small_for_a_block_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"kvstore\.dram_bytes"):
        Arena(SMALL, 0)


# ---------------------------------------------------------------- pins


def index_of(n: int) -> BlockIndex:
    index = BlockIndex(64)
    hashes = pack([bytes([i]) * 32 for i in range(1, n + 1)])
    entries = index.insert(hashes, bytes(32), 0)
    index.dram[entries] = np.arange(n)
    return index


def test_a_pin_ends_by_release_by_time_and_with_its_asker_and_holds_count_beside_it() -> None:
    index, over = index_of(6), []
    pins = Pins(index, lambda entries: over.extend(entries.tolist()))
    a, b = np.array([0, 1, 1], np.int32), np.array([1, 2], np.int32)
    first = pins.pin("x", a, 5.0, now=0)
    second = pins.pin("y", b, 5.0, now=0)
    pins.hold(b)
    pins.check()
    assert index.num_pins[:4].tolist() == [1, 4, 2, 0]
    assert not pins.release("y", first)  # another's
    assert pins.release("x", first)
    assert not pins.release("x", first)
    assert over == [0]
    assert pins.expire(4.9) == 0
    assert pins.expire(5.0) == 1
    assert not pins.release("y", second)
    pins.unhold(b)
    assert sorted(over) == [0, 1, 2]
    third = pins.pin("z", b, 10_000.0, now=0)
    assert third
    assert pins.asker_gone("z") == 1
    pins.pin("z", b, 10_000.0, now=0)
    assert pins.expire(MAX_PIN_S) == 1  # nobody pins for longer
    assert not index.num_pins.any()
    pins.check()


def test_nothing_found_is_no_pin() -> None:
    pins = Pins(index_of(1))
    assert pins.pin("x", np.zeros(0, np.int32), 5.0, now=0) == 0
    assert len(pins) == 0


# ---------------------------------------------------------------- heat


def test_a_segment_is_hot_once_it_is_asked_for_often_for_a_while() -> None:
    heat = Heat(5.0)
    assert not any(heat.asked(b"burst", 0.0) for _ in range(40))  # 40 at once are 4 a second over ten
    called = [i / 10 for i in range(600) if heat.asked(b"hot", i / 10)]  # ten a second for a minute
    assert len(called) == 1
    assert 5 < called[0] < 15
    assert not any(heat.asked(b"cold", float(i)) for i in range(60))
    assert heat.per_s(b"hot", 60) == pytest.approx(10, rel=0.1)


def test_what_is_hot_for_long_is_called_so_again_and_what_is_cold_is_forgotten() -> None:
    heat = Heat(5.0)
    called = [i / 10 for i in range(2000) if heat.asked(b"hot", i / 10)]
    assert [round(at) for at in called] == [7, 67, 127, 187]
    for i in range(1000):
        heat.asked(b"%d" % i, 200.0)
    heat.forget_cold(240.0)
    assert len(heat) == 1  # quiet now, and still remembered as called hot
    heat.forget_cold(1000.0)
    assert len(heat) == 0


def test_the_memory_for_heat_is_bounded() -> None:
    heat = Heat(5.0)
    for i in range(MAX_SEGMENTS + 100):
        heat.asked(b"%d" % i, 1.0)
    assert len(heat) <= MAX_SEGMENTS


# ---------------------------------------------------------------- the state of a tier


def test_a_failing_operation_is_left_alone_for_longer_and_longer_and_one_success_ends_that() -> None:
    clock = Clock()
    state = TierState("disk", clock=clock)
    for pause in (1.0, 2.0, 4.0):
        with pytest.raises(DiskFull), state.operation("write"):
            raise DiskFull("no room", folder="/", wanted_bytes=1, reason="capacity")
        assert state.trouble("write") == "no room"
        assert not state.trouble("read")
        clock.now += pause - 0.01
        assert state.trouble("write")
        clock.now += 0.02
        assert not state.trouble("write")
        assert state.failing("write")
    assert state.reasons == ["disk: writes fail: no room"]
    with state.operation("write"):
        clock.now += 0.25
    assert (state.state, state.num_errors, state.latency["write"].num) == ("ok", 3, 1)
    assert not state.failing("write")


def test_a_call_that_does_not_come_back_is_trouble_for_everything_until_it_does() -> None:
    clock = Clock()
    state = TierState("disk", stuck_s=2.0, clock=clock)
    with state.operation("read"):
        clock.now += 1.9
        assert state.state == "ok"
        clock.now += 2.0
        assert "a read has not come back for 4 s" in state.trouble("write")
        assert state.trouble("read")
    assert state.state == "ok"


def test_a_tier_that_could_not_be_opened_stays_out(caplog: pytest.LogCaptureFixture) -> None:
    state = TierState("disk")
    state.broken = "read-only file system"
    state.say()
    state.say()
    assert state.trouble("read") == state.trouble("write") == "read-only file system"
    assert len([r for r in caplog.records if "read-only" in r.message]) == 1  # said once


# ---------------------------------------------------------------- threads


async def test_calls_run_beside_each_other_and_bring_results_and_errors() -> None:
    threads = IoThreads("t", 2)
    both = threading.Barrier(2, timeout=5)
    assert len(await asyncio.gather(threads.run(both.wait), threads.run(both.wait))) == 2

    def fail() -> None:
        raise DiskFailed("broken", path="/", operation="read", errno=5)

    with pytest.raises(DiskFailed, match="broken"):
        await threads.run(fail)
    threads.close()


async def test_a_call_that_hangs_holds_up_neither_others_nor_a_cancel() -> None:
    threads = IoThreads("t", 2)
    gate = threading.Event()
    hanging = asyncio.create_task(threads.run(lambda: gate.wait(30)))
    started = time.monotonic()
    assert await threads.run(lambda: 7) == 7
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert time.monotonic() - started < 5
    gate.set()
    threads.close()
    await until(lambda: not any(t.name.startswith("t-") for t in threading.enumerate()), what="the threads' end")
