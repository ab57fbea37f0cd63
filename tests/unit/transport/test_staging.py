"""The staging ring's arithmetic and order, with a copier whose copies end when the test says so."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.errors import ConfigError, DistServeError, TransportError
from distserve.kv.checksum import block_sums, partial_sums
from distserve.kv.layout import layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import PoolMemory, Span
from distserve.transport.fence import Fence
from distserve.transport.staging import device_sums
from distserve.transport.staging_ring import HostCopier, Staged, StagingRing

LAYOUT = KVLayout(weights="test", dtype="float32", num_layers=4, num_kv_heads=1, head_dim=2, block_size=4, rope="{}")
LAYER_BYTES = layer_block_bytes(LAYOUT)  # 64
NUM_BLOCKS = 24


def host_pool(seed: int = 0, num_blocks: int = NUM_BLOCKS) -> PoolMemory:
    shape = (num_blocks, LAYOUT.num_layers, LAYER_BYTES)
    return PoolMemory(LAYOUT, np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within 10 s"
        time.sleep(0.001)


@contextmanager
def ring_on(copier: HostCopier, num_slots: int, slot_bytes: int) -> Iterator[StagingRing]:
    ring = StagingRing(copier, LAYOUT, num_slots=num_slots, slot_bytes=slot_bytes)
    try:
        yield ring
    finally:
        ring.close()


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[Staged] = []
        self.errors: list[DistServeError] = []

    def staged(self, staged: Staged) -> None:
        self.pieces.append(staged)

    def failed(self, error: DistServeError) -> None:
        self.errors.append(error)


class GatedCopier(HostCopier):
    """Each copy reads the pool only when the test lets it, as a GPU might."""

    def __init__(self, memory: PoolMemory) -> None:
        super().__init__(memory)
        self.begun: list[Span] = []
        self.gates: list[threading.Event] = []

    def fetch(self, piece, rows, after):
        gate = threading.Event()
        read = super().fetch

        class Later:
            def wait(self):
                assert gate.wait(10)
                return read(piece, rows, after).wait()

        self.begun.append(piece)
        self.gates.append(gate)
        return Later()


def rows_of(ring: StagingRing, staged: Staged) -> np.ndarray:
    raw = ring.memory[staged.offset : staged.offset + staged.length]
    return raw.reshape(len(staged.piece.source_blocks), -1, LAYER_BYTES)


def one_block_spans(*blocks: int) -> list[Span]:
    return [Span(0, LAYOUT.num_layers, (b,), (i,)) for i, b in enumerate(blocks)]


class Writer:
    """A sink that lets slots go in any order and late, from a thread of its own, and looks at the bytes only then:
    a slot that was filled again too early shows."""

    def __init__(self, pool: PoolMemory, ring: StagingRing, seed: int) -> None:
        self.cells: list[tuple[int, int, int]] = []  # layer, source, target, in order
        self.sums = np.zeros(NUM_BLOCKS, np.uint64)
        self.wrong = 0
        self._pool, self._ring = pool, ring
        self._random = random.Random(seed)
        self._held: list[Staged] = []
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._release, daemon=True)
        self._thread.start()

    def staged(self, staged: Staged) -> None:
        p = staged.piece
        with self._lock:
            self._held.append(staged)
            self.sums[list(p.targets)] += staged.sums
            for layer in range(p.layer_start, p.layer_stop):
                self.cells += [(layer, s, t) for s, t in zip(p.source_blocks, p.targets, strict=True)]

    def failed(self, error: DistServeError) -> None:
        raise AssertionError(error)

    def _release(self) -> None:
        while True:
            with self._lock:
                if not self._held and self._ended:
                    return
                one = self._held.pop(self._random.randrange(len(self._held))) if self._held else None
            if one is None:
                time.sleep(0.0002)
                continue
            p = one.piece
            expected = self._pool.blocks[list(p.source_blocks), p.layer_start : p.layer_stop]
            self.wrong += not np.array_equal(rows_of(self._ring, one), expected)
            one.release()
            one.release()  # a completion and an abort

    def end(self) -> None:
        self._ended = True
        self._thread.join(10)
        assert not self._thread.is_alive()


spans = st.builds(
    lambda layers, blocks: Span(layers[0], layers[1], tuple(blocks), tuple(range(len(blocks)))),
    st.tuples(st.integers(0, 3), st.integers(1, 4)).map(sorted).filter(lambda x: x[0] < x[1]),
    st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(spans, max_size=5), min_size=1, max_size=4),
    st.integers(2, 5),
    st.integers(LAYER_BYTES, 2 * 4096),
    st.integers(0, 2**16),
)
def test_every_cell_of_every_transfer_comes_once_in_order_with_its_sums(transfers, num_slots, slot_bytes, seed):
    pool = host_pool(seed)
    with ring_on(HostCopier(pool), num_slots, slot_bytes) as ring:
        writers = [Writer(pool, ring, seed + i) for i in range(len(transfers))]
        counts = [ring.submit(s, Fence(), w) for s, w in zip(transfers, writers, strict=True)]
        for writer, asked in zip(writers, transfers, strict=True):
            num_cells = sum((s.layer_stop - s.layer_start) * len(s.targets) for s in asked)
            eventually(lambda w=writer, n=num_cells: len(w.cells) == n, "every cell")
            ring.check()
            writer.end()
            assert not writer.wrong
            cells = [(x, *p) for s in asked for p in zip(s.source_blocks, s.targets, strict=True)
                     for x in range(s.layer_start, s.layer_stop)]  # fmt: skip
            assert sorted(writer.cells) == sorted(cells)
            sums = np.zeros(NUM_BLOCKS, np.uint64)
            for s in (s for s in asked if s.targets):
                words = pool.blocks[list(s.source_blocks), s.layer_start : s.layer_stop].reshape(len(s.targets), -1)
                first = s.layer_start * LAYER_BYTES // 8
                sums[: len(s.targets)] += partial_sums(words.view(np.uint64), first, 4 * LAYER_BYTES // 8)
            assert (writer.sums == sums).all()
        assert ring.num_free == num_slots
        assert all(n >= len([s for s in t if s.targets]) for n, t in zip(counts, transfers, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(0, 30), st.integers(0, 2**16))
def test_transfers_aborted_at_any_moment_give_every_slot_back_and_the_others_lose_nothing(num_slots, moment, seed):
    pool = host_pool(seed)
    whole = [Span(0, 4, tuple(range(NUM_BLOCKS)), tuple(range(NUM_BLOCKS)))]
    with ring_on(HostCopier(pool), num_slots, 4 * LAYER_BYTES) as ring:
        aborted, kept = Writer(pool, ring, seed), Writer(pool, ring, seed + 1)
        fence = Fence()
        ring.submit(whole, fence, aborted)
        ring.submit(whole, Fence(), kept)
        eventually(lambda: len(aborted.cells) >= min(moment, 20) * 4, "the moment")
        asyncio.run(fence.shut())
        cells_at_abort = len(aborted.cells)
        eventually(lambda: len(kept.cells) == 4 * NUM_BLOCKS, "the other transfer")
        ring.close()  # nothing comes from now on
        for writer in (aborted, kept):
            writer.end()
            assert not writer.wrong
        # One that was past the fence may still have been on its way to the sink when it was shut.
        assert len(aborted.cells) <= cells_at_abort + 4
        assert (kept.sums == block_sums(pool.blocks)).all()
        ring.check()
        assert ring.num_free == num_slots


def test_the_next_copies_are_begun_while_the_first_is_written():
    copier = GatedCopier(host_pool())
    with ring_on(copier, 3, 4 * LAYER_BYTES) as ring:
        sink = Kept()
        assert ring.submit([Span(0, 4, (5, 6, 7, 8, 9), (0, 1, 2, 3, 4))], Fence(), sink) == 5
        eventually(lambda: len(copier.begun) == 3, "as many copies as slots")  # before any is over
        assert not sink.pieces
        copier.gates[0].set()
        eventually(lambda: len(sink.pieces) == 1, "the first piece")
        time.sleep(0.02)
        assert len(copier.begun) == 3  # its slot is still the writer's
        sink.pieces[0].release()
        eventually(lambda: len(copier.begun) == 4, "the fourth copy, into the slot that came back")
        copier.gates[1].set()
        eventually(lambda: len(sink.pieces) == 2, "the second piece")
        sink.pieces[1].release()
        eventually(lambda: len(copier.begun) == 5, "the last copy")
        for gate in copier.gates:
            gate.set()
        eventually(lambda: len(sink.pieces) == 5, "all pieces")
        assert [p.piece.source_blocks for p in sink.pieces] == [(5,), (6,), (7,), (8,), (9,)]
        assert sink.pieces[0].offset == sink.pieces[3].offset  # wrapped round


async def test_a_shut_fence_means_that_no_copy_reads_the_pool():
    pool = host_pool()
    copier = GatedCopier(pool)
    with ring_on(copier, 2, 4 * LAYER_BYTES) as ring:
        sink, fence = Kept(), Fence()
        ring.submit(one_block_spans(1, 2, 3), fence, sink)
        eventually(lambda: len(copier.begun) == 2, "two copies under way")
        shut = asyncio.create_task(fence.shut())
        await asyncio.sleep(0.02)
        assert not shut.done()
        copier.gates[0].set()
        await asyncio.sleep(0.02)
        assert not shut.done()  # one is still at it
        copier.gates[1].set()
        async with asyncio.timeout(10):
            await shut
        eventually(lambda: ring.num_free == 2, "the slots")
        assert len(copier.begun) == 2  # the third was skipped
        assert not sink.pieces
        assert not sink.errors


@pytest.mark.parametrize("when", ["begun", "waited for"])
def test_a_copy_that_fails_fails_its_transfer_and_no_other(when: str):
    pool = host_pool()

    class Failing(HostCopier):
        def fetch(self, piece, rows, after):
            if piece.source_blocks != (13,):
                return super().fetch(piece, rows, after)
            if when == "begun":
                raise RuntimeError("out of memory")

            class Broken:
                def wait(self):
                    raise TransportError("illegal address")

            return Broken()

    with ring_on(Failing(pool), 2, 4 * LAYER_BYTES) as ring:
        bad, good, fence = Kept(), Kept(), Fence()
        ring.submit(one_block_spans(13), fence, bad)
        ring.submit(one_block_spans(1, 2), Fence(), good)
        eventually(lambda: len(good.pieces) == 2 and len(bad.errors) == 1, "both outcomes")
        assert isinstance(bad.errors[0], TransportError)
        assert not bad.pieces
        assert not good.errors
        asyncio.run(fence.shut())  # left, though it failed
        for piece in good.pieces:
            piece.release()
        ring.check()
        assert ring.num_free == 2


def test_a_sink_that_fails_loses_its_slot_and_hears_of_it():
    class Refusing(Kept):
        def staged(self, staged: Staged) -> None:
            raise ValueError("no more")

    with ring_on(HostCopier(host_pool()), 2, 4096) as ring:
        sink = Refusing()
        ring.submit(one_block_spans(1), Fence(), sink)
        eventually(lambda: bool(sink.errors), "the failure")
        assert "no more" in sink.errors[0].message
        assert ring.num_free == 2


def test_closing_fails_what_is_queued_and_leaves_no_descriptor():
    copier = GatedCopier(host_pool())
    ring = StagingRing(copier, LAYOUT, num_slots=2, slot_bytes=4 * LAYER_BYTES)
    sink = Kept()
    ring.submit(one_block_spans(1, 2, 3), Fence(), sink)
    eventually(lambda: len(copier.begun) == 2, "both slots in use")
    with pytest.raises(TransportError, match="did not finish"):
        ring.close(0.05)  # the device is stuck
    for gate in copier.gates:
        gate.set()
    ring.close()
    assert len(sink.pieces) == 2  # what was under way
    assert [e.message for e in sink.errors] == ["the staging ring was closed"]
    with pytest.raises(TransportError, match="closed"):
        ring.submit(one_block_spans(1), Fence(), sink)

    quick = StagingRing(HostCopier(host_pool()), LAYOUT)
    fd = quick.fd
    quick.close()
    quick.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_copy_waits_for_what_the_device_was_given_before_it_was_submitted_or_before_the_mark_it_is_given():
    class Marking(HostCopier):
        given = 0

        def mark(self):
            return self.given

        def fetch(self, piece, rows, after):
            waited_for.append(after)
            return super().fetch(piece, rows, after)

    waited_for: list[object] = []
    copier = Marking(host_pool())
    with ring_on(copier, 2, 4 * LAYER_BYTES) as ring:
        sink = Kept()
        for copier.given in (5, 6):
            ring.submit(one_block_spans(1), Fence(), sink)
            eventually(lambda: len(sink.pieces) == 1, "the piece")
            sink.pieces.pop().release()
        ring.submit(one_block_spans(1), Fence(), sink, 3)
        eventually(lambda: len(sink.pieces) == 1, "the piece")
    assert waited_for == [5, 6, 3]


def test_staged_bytes_are_where_their_address_says_and_a_peer_can_map_them():
    pool = host_pool()
    with ring_on(HostCopier(pool), 2, 3 * 4096) as ring:
        sink = Kept()
        ring.submit([Span(1, 3, (7, 2), (0, 1))], Fence(), sink)
        eventually(lambda: bool(sink.pieces), "the piece")
        staged = sink.pieces[0]
        assert staged.length == 2 * staged.row_bytes == 4 * LAYER_BYTES
        assert staged.address == ring.memory.ctypes.data + staged.offset
        assert staged.address % 4096 == 0
        assert os.pread(ring.fd, staged.length, staged.offset) == pool.blocks[[7, 2], 1:3].tobytes()


@pytest.mark.parametrize(("key", "args"), [("num_slots", {"num_slots": 1}), ("slot_bytes", {"slot_bytes": 63})])
def test_a_ring_that_could_not_work_is_refused_by_name(key: str, args: dict[str, int]):
    with pytest.raises(ConfigError, match=key) as caught:
        StagingRing(HostCopier(host_pool()), LAYOUT, **args)
    assert caught.value.fields["key"] == key


@given(st.integers(1, 5), st.integers(0, 16), st.integers(0, 16), st.integers(0, 2**32 - 1))
def test_torch_sums_what_numpy_sums_bit_for_bit(n: int, a: int, b: int, seed: int):
    first, stop = min(a, b), max(a, b)
    rows = np.random.default_rng(seed).integers(0, 2**64, (n, stop - first), dtype=np.uint64)
    found = device_sums(torch.from_numpy(rows.view(np.int64)), first, 16).numpy().view(np.uint64)
    assert (found == partial_sums(rows, first, 16)).all()


def test_torch_sums_wrap_round_at_the_extremes():
    rows = np.array([[2**64 - 1] * 16, [2**63] * 16, [0] * 16, [2**63 - 1] * 16], np.uint64)
    found = device_sums(torch.from_numpy(rows.view(np.int64)), 0, 16).numpy().view(np.uint64)
    assert (found == partial_sums(rows, 0, 16)).all()


def test_staging_is_imported_without_torch():
    code = "import sys, distserve.transport.staging, distserve.transport.rdma.memory; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
