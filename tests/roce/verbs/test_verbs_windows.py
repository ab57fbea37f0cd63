"""Memory windows: which writes their keys let through, and which not."""

import os
import time

import pytest

from distserve.transport.rdma import device, ports, verbs
from distserve.transport.rdma.device import Verb
from tests.roce.verbs.loopback import (
    BLOCK,
    FLUSHED,
    ON_A_DEVICE,
    TARGET,
    Memory,
    completions,
    several,
    wired,
    write,
)

pytestmark = ON_A_DEVICE
REMOTE_ACCESS_ERROR = 10
IS_SOFTWARE = not any(os.path.exists(f"/sys/class/infiniband/{port.device}/device") for port in ports.discover())


class TestWindows:
    @pytest.fixture(autouse=True)
    def has_windows(self, nic: verbs.Nic) -> None:
        if not nic.has_windows:
            pytest.skip(f"{nic.name} has no memory windows of type 2B")

    def bound(
        self, nic: verbs.Nic, b: device.Pair, region: device.Region, memory: Memory, *ranges: tuple[int, int]
    ) -> list[verbs.Window]:
        """A window on each (first block, number of blocks), bound on b."""
        windows = [nic.window() for _ in ranges]
        b.post_binds(
            [(50 + i, w, memory.at(at), n * BLOCK) for i, (w, (at, n)) in enumerate(zip(windows, ranges, strict=True))],
            region,
        )
        (last,) = completions(nic, several(1))
        assert (last.qp_num, last.wr_id, last.status, last.verb) == (b.qp_num, 49 + len(ranges), 0, Verb.BIND)
        return windows

    def refused(
        self, nic: verbs.Nic, a: device.Pair, b: device.Pair, memory: Memory, rkey: int, target: int, lkey: int
    ) -> None:
        """The write does not land, and both pairs are in error."""
        before = memory.bytes.copy()
        assert not nic.poll()
        a.post_writes([write(memory, rkey, 1, target, wr_id=77)], lkey)
        came = completions(
            nic,
            lambda came: (
                any(c.wr_id == 77 and not c.status for c in came)
                or {c.qp_num for c in came if c.status} == {a.qp_num, b.qp_num}
            ),
        )
        (failed,) = [c for c in came if c.qp_num == a.qp_num]
        assert (failed.wr_id, failed.status, failed.reason) == (77, REMOTE_ACCESS_ERROR, "remote access error")
        assert {(c.status, c.reason) for c in came if c.qp_num == b.qp_num} == {(FLUSHED, "flushed")}
        assert (memory.bytes == before).all()

    def test_a_write_lands_through_a_window_until_it_is_invalidated(
        self,
        nic: verbs.Nic,
        region: device.Region,
        closed_region: device.Region,
        memory: Memory,
        pair: tuple[device.Pair, device.Pair],
    ) -> None:
        a, b = pair
        first, second, third = self.bound(nic, b, closed_region, memory, (TARGET, 1), (TARGET + 2, 4), (TARGET + 8, 1))
        assert len({first.rkey, second.rkey, third.rkey, closed_region.rkey}) == 4
        a.post_writes(
            [
                write(memory, first.rkey, 0, TARGET, signaled=False),
                write(memory, second.rkey, 1, TARGET + 5),
            ],
            region.lkey,
        )
        assert [c.status for c in completions(nic, several(1))] == [0]
        assert (memory.block(TARGET) == memory.block(0)).all()
        assert (memory.block(TARGET + 5) == memory.block(1)).all()

        b.post_invalidates([(60, first), (61, second)])
        (done,) = completions(nic, several(1))
        assert (done.qp_num, done.wr_id, done.status, done.verb) == (b.qp_num, 61, 0, Verb.INVALIDATE)
        first.close()
        second.close()
        a.post_writes([write(memory, third.rkey, 2, TARGET + 8)], region.lkey)  # the third is as it was
        assert [c.status for c in completions(nic, several(1))] == [0]
        self.refused(nic, a, b, memory, second.rkey, TARGET + 2, region.lkey)

    @pytest.mark.xfail(
        IS_SOFTWARE,
        reason="Soft-RoCE checks only the region's range (check_rkey in rxe_resp.c)",
        raises=AssertionError,
    )
    @pytest.mark.parametrize("target", [TARGET - 1, TARGET + 4])
    def test_a_write_outside_its_range_is_refused(
        self,
        nic: verbs.Nic,
        region: device.Region,
        closed_region: device.Region,
        memory: Memory,
        pair: tuple[device.Pair, device.Pair],
        target: int,
    ) -> None:
        (window,) = self.bound(nic, pair[1], closed_region, memory, (TARGET, 4))
        self.refused(nic, *pair, memory, window.rkey, target, region.lkey)

    def test_a_write_outside_its_region_is_refused(
        self, nic: verbs.Nic, region: device.Region, memory: Memory, pair: tuple[device.Pair, device.Pair]
    ) -> None:
        part = nic.register(memory.at(TARGET), 4 * BLOCK, remote_write=False)
        (window,) = self.bound(nic, pair[1], part, memory, (TARGET, 4))
        self.refused(nic, *pair, memory, window.rkey, TARGET + 4, region.lkey)

    def test_closing_one_is_enough_to_refuse_its_key(
        self,
        nic: verbs.Nic,
        region: device.Region,
        closed_region: device.Region,
        memory: Memory,
        pair: tuple[device.Pair, device.Pair],
    ) -> None:
        window, _ = self.bound(nic, pair[1], closed_region, memory, (TARGET, 4), (TARGET + 4, 4))
        window.close()
        window.close()
        self.refused(nic, *pair, memory, window.rkey, TARGET, region.lkey)
        assert nic.counts()["windows"] == 1
        started = time.monotonic()
        pair[1].close()  # with what is still bound on it
        assert nic.counts() == {"pairs": 1, "regions": 2, "windows": 0}
        assert time.monotonic() - started < 10

    def test_another_pair_cannot_use_it(
        self,
        nic: verbs.Nic,
        region: device.Region,
        closed_region: device.Region,
        memory: Memory,
        pair: tuple[device.Pair, device.Pair],
    ) -> None:
        (window,) = self.bound(nic, pair[1], closed_region, memory, (TARGET, 4))
        stranger, its_peer = wired(nic, region, memory)
        self.refused(nic, stranger, its_peer, memory, window.rkey, TARGET, region.lkey)
        pair[0].post_writes([write(memory, window.rkey, 0, TARGET)], region.lkey)  # while its own pair can
        assert completions(nic, lambda came: any(c.qp_num == pair[0].qp_num for c in came))[-1].status == 0

    def test_memory_registered_without_remote_write_refuses_its_own_key(
        self,
        nic: verbs.Nic,
        region: device.Region,
        closed_region: device.Region,
        memory: Memory,
        pair: tuple[device.Pair, device.Pair],
    ) -> None:
        self.refused(nic, *pair, memory, closed_region.rkey, TARGET, region.lkey)
