"""verbs.py on a real device, or Soft-RoCE: pairs of one port that talk to each other."""

import ctypes
import errno
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from distserve.transport.rdma import device, ports, verbs
from distserve.transport.rdma.device import Completion, PairAddress, PairOptions, Verb, Write

pytestmark = [
    pytest.mark.roce,
    pytest.mark.skipif(bool(verbs.available()), reason=f"no RDMA here: {verbs.available()}"),
]

BLOCK = 4096
NUM_BLOCKS = 256
REMOTE_ACCESS_ERROR, FLUSHED = 10, 5
TIMEOUT_S = 20.0  # Soft-RoCE in an emulated machine
IS_SOFTWARE = not any(os.path.exists(f"/sys/class/infiniband/{port.device}/device") for port in ports.discover())


class Memory:
    """An anonymous file, mapped as a pool's is: blocks to write from and blocks to write to."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, NUM_BLOCKS * BLOCK)
        self._map = mmap.mmap(self.fd, NUM_BLOCKS * BLOCK)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.length = len(self.bytes)
        self.bytes[: self.length // 2] = np.random.default_rng(0).integers(0, 256, self.length // 2, np.uint8)

    def block(self, index: int) -> np.ndarray:
        return self.bytes[index * BLOCK :][:BLOCK]

    def at(self, index: int) -> int:
        return self.address + index * BLOCK


TARGET = NUM_BLOCKS // 2  # blocks from here on are written to


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


@pytest.fixture
def port() -> ports.Port:
    return ports.choose_ports(ports.discover())[0]


@pytest.fixture
def nic(port: ports.Port, memory: Memory) -> Iterator[verbs.Nic]:
    memory.bytes[TARGET * BLOCK :] = 0
    nic = verbs.open_nic(port)
    yield nic
    nic.close()
    assert nic.counts() == {"pairs": 0, "regions": 0, "windows": 0}


def completions(nic: device.Nic, enough: Callable[[list[Completion]], bool]) -> list[Completion]:
    """All that complete until it is enough, awaited as a reactor does: poll, arm, poll, sleep on the descriptor."""
    came: list[Completion] = []
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        came += nic.poll()
        if enough(came):
            return came
        nic.arm()
        if more := nic.poll():
            came += more
            continue
        assert time.monotonic() < deadline, f"only {came} within {TIMEOUT_S} s"
        select.select([nic.fd], [], [], deadline - time.monotonic())


def several(number: int) -> Callable[[list[Completion]], bool]:
    return lambda came: len(came) >= number


def connect(nic: verbs.Nic, a: device.Pair, b: device.Pair, mtu: int = 0) -> None:
    gid = ports.choose_gid(nic.port)
    mtu = mtu or nic.mtu
    for one, other in ((a, b), (b, a)):
        one.connect(gid.index, PairAddress(gid.gid, other.qp_num, other.psn, nic.mtu), mtu=mtu)


@pytest.fixture
def region(nic: verbs.Nic, memory: Memory) -> device.Region:
    return nic.register(memory.address, memory.length, remote_write=True)


@pytest.fixture
def closed_region(nic: verbs.Nic, memory: Memory) -> device.Region:
    return nic.register(memory.address, memory.length, remote_write=False)


@pytest.fixture
def pair(nic: verbs.Nic, region: device.Region, memory: Memory) -> tuple[device.Pair, device.Pair]:
    """Connected, with 8 receives of 64 bytes posted on the second, wr_id 100 .. 107."""
    return wired(nic, region, memory)


def wired(
    nic: verbs.Nic, region: device.Region, memory: Memory, options: PairOptions | None = None, mtu: int = 0
) -> tuple[device.Pair, device.Pair]:
    a, b = (nic.pair(options or PairOptions(depth=128)) for _ in range(2))
    for index in range(8):
        b.post_receive(100 + index, memory.at(NUM_BLOCKS - 1) + 64 * index, 64, region.lkey)
    connect(nic, a, b, mtu)
    return a, b


def write(memory: Memory, region_key: int, source: int, target: int, **fields: object) -> Write:
    return Write(
        **({"wr_id": 1, "signaled": True} | fields),  # type: ignore[arg-type]
        address=memory.at(source),
        length=BLOCK,
        remote_address=memory.at(target),
        rkey=region_key,
    )


def test_a_port_says_what_it_is(nic: verbs.Nic, port: ports.Port) -> None:
    assert nic.name == port.name
    assert nic.mtu == port.mtu_bytes
    assert nic.max_depth >= 128
    assert ports.traffic_class_override(port) is None


def test_a_chain_of_writes_lands_and_its_number_comes_after_them(
    nic: verbs.Nic, region: device.Region, memory: Memory, pair: tuple[device.Pair, device.Pair]
) -> None:
    a, b = pair
    chain = [write(memory, region.rkey, i, TARGET + 63 - i, wr_id=i, signaled=False, immediate=None) for i in range(63)]
    chain.append(write(memory, region.rkey, 63, TARGET, wr_id=2**63 + 5, immediate=0xC0FFEE12))
    a.post_writes(chain, region.lkey)
    came = {c.qp_num: c for c in completions(nic, several(2))}
    assert came[a.qp_num] == Completion(a.qp_num, 2**63 + 5, 0, Verb.WRITE, 0, 0, "success")
    arrived = came[b.qp_num]
    assert (arrived.verb, arrived.wr_id, arrived.immediate, arrived.num_bytes) == (
        Verb.RECEIVE_IMMEDIATE,
        100,
        0xC0FFEE12,
        BLOCK,
    )
    for i in range(64):
        assert (memory.block(TARGET + 63 - i) == memory.block(i)).all()
    # A shorter chain afterwards has nothing left over of the longer one; one number alone carries no byte.
    a.post_writes([Write(wr_id=9, address=memory.at(0), length=0, remote_address=0, rkey=0, immediate=0)], region.lkey)
    (only,) = completions(nic, several(1))
    assert (only.qp_num, only.verb, only.immediate, only.wr_id) == (b.qp_num, Verb.RECEIVE_IMMEDIATE, 0, 101)


def test_messages_come_into_the_posted_buffers_in_order(
    nic: verbs.Nic, region: device.Region, memory: Memory, pair: tuple[device.Pair, device.Pair]
) -> None:
    a, b = pair
    a.post_send(1, memory.at(0), 64, region.lkey, signaled=False)
    a.post_send(2, memory.at(1), 10, region.lkey)
    came = completions(nic, several(3))
    assert [(c.wr_id, c.num_bytes) for c in came if c.verb is Verb.RECEIVE and c.qp_num == b.qp_num] == [
        (100, 64),
        (101, 10),
    ]
    assert [c.wr_id for c in came if c.verb is Verb.SEND] == [2]
    received = memory.block(NUM_BLOCKS - 1)
    assert (received[:64] == memory.block(0)[:64]).all()
    assert (received[64:74] == memory.block(1)[:10]).all()


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


def test_the_descriptor_is_readable_only_when_something_came_since_it_was_armed(
    nic: verbs.Nic, region: device.Region, memory: Memory, pair: tuple[device.Pair, device.Pair]
) -> None:
    def readable(timeout_s: float) -> bool:
        return bool(select.select([nic.fd], [], [], timeout_s)[0])

    a, _ = pair
    assert nic.poll() == []
    nic.arm()
    assert nic.poll() == []
    assert not readable(0)
    a.post_writes([write(memory, region.rkey, 0, TARGET)], region.lkey)
    assert readable(TIMEOUT_S)
    assert len(nic.poll()) == 1
    assert not readable(0)
    nic.arm()
    nic.arm()
    a.post_send(1, memory.at(0), 1, region.lkey)
    assert readable(TIMEOUT_S)
    completions(nic, several(2))
    nic.poll()
    assert not readable(0)


@pytest.mark.parametrize("mtu", [256, 1024])
def test_a_pair_runs_at_the_smaller_mtu(nic: verbs.Nic, region: device.Region, memory: Memory, mtu: int) -> None:
    assert mtu < nic.mtu
    a, _ = wired(nic, region, memory, mtu=mtu)
    a.post_writes([write(memory, region.rkey, 3, TARGET)], region.lkey)
    assert [c.status for c in completions(nic, several(1))] == [0]
    assert (memory.block(TARGET) == memory.block(3)).all()
    with pytest.raises(OSError, match="mtu is 1500, must be one of 256, 512"):
        a.connect(0, PairAddress("::", 1, 1, 1024), mtu=1500)


@pytest.mark.parametrize("dscp", [48, 34, 0])
def test_the_device_has_the_traffic_class_that_was_asked_for(
    nic: verbs.Nic, region: device.Region, memory: Memory, dscp: int
) -> None:
    a, b = wired(nic, region, memory, PairOptions(depth=16, traffic_class=dscp << 2))
    assert isinstance(a, verbs.Pair)
    assert isinstance(b, verbs.Pair)
    assert (a.traffic_class(), b.traffic_class()) == (dscp << 2, dscp << 2)


def test_a_failed_pair_flushes_what_is_posted_and_closing_it_drops_what_was_not_polled(
    nic: verbs.Nic, region: device.Region, memory: Memory, pair: tuple[device.Pair, device.Pair]
) -> None:
    a, b = pair
    b.fail()
    b.fail()
    came = completions(nic, several(8))
    assert [(c.qp_num, c.wr_id, c.status) for c in came] == [(b.qp_num, 100 + i, FLUSHED) for i in range(8)]
    b.post_receive(7, memory.at(0), 1, region.lkey)  # flushed at once
    c, d = wired(nic, region, memory)
    c.post_writes([write(memory, region.rkey, 0, TARGET, wr_id=70)], region.lkey)
    completed = completions(nic, lambda came: any(one.wr_id == 70 for one in came))
    assert [one.status for one in completed if one.wr_id == 70] == [0]
    c.post_writes([write(memory, region.rkey, 0, TARGET, wr_id=71)], region.lkey)
    d.fail()
    b.close()
    d.close()
    d.close()
    d.fail()
    kept = completions(nic, several(1))  # lost or late, the write of the open one is told of, and nothing of d
    assert {one.qp_num for one in kept} == {c.qp_num}
    assert nic.counts() == {"pairs": 2, "regions": 1, "windows": 0}
    a.close()


def test_a_peer_that_is_gone_is_noticed_by_retries(nic: verbs.Nic, region: device.Region, memory: Memory) -> None:
    a, b = wired(nic, region, memory, PairOptions(depth=16, ack_timeout=10, retry=3))
    b.close()
    a.post_writes([write(memory, region.rkey, 0, TARGET)], region.lkey)
    (failed,) = completions(nic, several(1))
    assert (failed.status, failed.reason) == (12, "transport retries exceeded")


def test_the_completion_queue_grows_with_the_pairs_and_loses_nothing(
    nic: verbs.Nic, region: device.Region, memory: Memory
) -> None:
    a, b = wired(nic, region, memory)
    a.post_writes([write(memory, region.rkey, 0, TARGET, wr_id=5)], region.lkey)
    assert select.select([nic.fd], [], [], 0)[0] == []  # not armed
    many = [nic.pair(PairOptions(depth=512)) for _ in range(6)]
    assert sum(pair.capacity for pair in nic.pairs.values()) > verbs.FIRST_CQ_ENTRIES
    for pair in many:
        for index in range(512):
            pair.post_receive(index, memory.at(0), 1, region.lkey)
        pair.fail()
    came = completions(nic, several(6 * 512 + 1))
    assert [c.status for c in came if c.wr_id == 5 and c.qp_num == a.qp_num] == [0]
    assert sum(c.status == FLUSHED for c in came) == 6 * 512
    b.close()


def test_wrong_use_says_what_was_tried(nic: verbs.Nic, port: ports.Port, memory: Memory) -> None:
    with pytest.raises(OSError, match=r"depth is 0, .* has queues of 1 to"):
        nic.pair(PairOptions(depth=0))
    with pytest.raises(OSError, match="depth is"):
        nic.pair(PairOptions(depth=nic.max_depth + 1))
    with pytest.raises(OSError, match=r"can't register 4096 bytes at 0x1000 with") as caught:
        nic.register(0x1000, 4096, remote_write=False)
    assert caught.value.errno in (errno.EFAULT, errno.ENOMEM)  # the latter is Soft-RoCE's word for it
    with pytest.raises(OSError, match="length 0"):
        nic.register(memory.address, 0, remote_write=False)
    a = nic.pair(PairOptions(depth=4))
    with pytest.raises(OSError, match=r"can't connect queue pair \d+ of .* to 1 at"):
        a.connect(200, PairAddress(ports.choose_gid(port).gid, 1, 1, 1024), mtu=1024)
    assert nic.counts()["pairs"] == 1


def test_a_hundred_openings_leave_nothing_behind(port: ports.Port, memory: Memory) -> None:
    def cycle() -> None:
        nic = verbs.open_nic(port)
        region = nic.register(memory.address, memory.length, remote_write=False)
        _, b = wired(nic, region, memory, PairOptions(depth=16))
        if nic.has_windows:
            b.post_binds([(1, nic.window(), memory.address, BLOCK)], region)
            completions(nic, several(1))
        nic.arm()
        b.fail()
        assert select.select([nic.fd], [], [], TIMEOUT_S)[0]
        nic.close()  # an event and its completions unread
        nic.close()
        assert set(nic.counts().values()) == {0}
        for use in (
            nic.poll,
            nic.arm,
            nic.window,
            lambda: nic.pair(PairOptions()),
            lambda: nic.register(memory.address, BLOCK, remote_write=False),
            lambda: b.post_receive(1, memory.address, 1, 1),
            lambda: b.post_send(1, memory.address, 1, 1),
        ):
            with pytest.raises(OSError, match="is closed"):
                use()
        b.fail()

    def descriptors() -> list[str]:
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                pass
        return sorted(link for link in links if "/proc/" not in link)

    cycle()
    before = descriptors()
    for _ in range(100):
        cycle()
    assert descriptors() == before
