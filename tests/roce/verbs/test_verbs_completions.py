"""The completion queue: when its descriptor wakes a reactor, and how it grows."""

import select

from distserve.transport.rdma import device, verbs
from distserve.transport.rdma.device import PairOptions
from tests.roce.verbs.loopback import (
    FLUSHED,
    ON_A_DEVICE,
    TARGET,
    TIMEOUT_S,
    Memory,
    completions,
    several,
    wired,
    write,
)

pytestmark = ON_A_DEVICE


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
