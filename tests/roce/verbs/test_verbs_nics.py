"""A device that is opened: what it says of itself, refuses, and leaves behind."""

import errno
import os
import select

import pytest

from distserve.transport.rdma import ports, verbs
from distserve.transport.rdma.device import PairAddress, PairOptions
from tests.roce.verbs.loopback import BLOCK, ON_A_DEVICE, TIMEOUT_S, Memory, completions, several, wired

pytestmark = ON_A_DEVICE


def test_a_port_says_what_it_is(nic: verbs.Nic, port: ports.Port) -> None:
    assert nic.name == port.name
    assert nic.mtu == port.mtu_bytes
    assert nic.max_depth >= 128
    assert ports.traffic_class_override(port) is None


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
