"""Queue pairs: what they carry, how they are set, and how they end."""

import pytest

from distserve.transport.rdma import device, verbs
from distserve.transport.rdma.device import Completion, PairAddress, PairOptions, Verb, Write
from tests.roce.verbs.loopback import (
    BLOCK,
    FLUSHED,
    NUM_BLOCKS,
    ON_A_DEVICE,
    TARGET,
    Memory,
    completions,
    several,
    wired,
    write,
)

pytestmark = ON_A_DEVICE


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
