"""What is told of a transfer, for traces: on every transport."""

from __future__ import annotations

import asyncio
import time

import pytest

from distserve.errors import DistServeError
from distserve.messages import TrafficClass
from distserve.transport.base import Lease, Span
from distserve.transport.meter import Meter
from distserve.transport.options import DSCP
from distserve.transport.tcp import TcpReceiver, TcpSender
from tests.contracts.transport.conftest import FAST, Rig, everything
from tests.contracts.transport.pools import SMALL, pool

BLOCK_BYTES = 8192


@pytest.mark.parametrize("traffic_class", ["decode", "prefill", "background"])
async def test_facts_name_the_transport_the_class_and_its_mark(rig: Rig, traffic_class: TrafficClass) -> None:
    began = time.monotonic()
    transfer = await rig.sender.open(rig.grant([7, 8, 9]), timeout_s=5, traffic_class=traffic_class)
    transfer.write(everything([1, 2, 3]))
    moved = await transfer.commit(b"", timeout_s=5)
    facts, whole_s = transfer.facts, time.monotonic() - began
    assert (facts.kind, facts.traffic_class, facts.dscp) == (rig.kind, traffic_class, DSCP[traffic_class])
    assert (facts.num_blocks, facts.num_bytes) == (3, moved) == (3, 3 * BLOCK_BYTES)
    assert facts.wait_s > 0
    assert facts.wire_s > 0
    assert facts.wait_s + facts.wire_s <= whole_s


async def test_a_pause_between_two_spans_is_not_time_on_the_wire(rig: Rig) -> None:
    await _moved(rig, [1])  # the connection is there
    transfer = await rig.open(rig.grant([7]))
    for layer in range(SMALL.num_layers):
        transfer.write([Span(layer, layer + 1, (1,), (0,))])
        await asyncio.sleep(0.2)
    began = time.monotonic()
    await transfer.commit(b"", timeout_s=5)
    assert transfer.facts.wire_s <= 0.2 * SMALL.num_layers / 2 + (time.monotonic() - began)


async def test_what_the_receivers_owner_takes_for_adopting_is_in_it(rig: Rig) -> None:
    await _moved(rig, [1])
    rig.on_commit = lambda commit: time.sleep(0.3)
    transfer = await rig.open(rig.grant([7]))
    transfer.write(everything([1]))
    await transfer.commit(b"", timeout_s=5)
    assert transfer.facts.wire_s >= 0.3
    assert transfer.facts.wait_s < 0.3


async def test_one_that_was_given_up_has_moved_nothing_that_counts(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([7, 8]))
    transfer.write([Span(0, 1, (1, 2), (0, 1))])
    await transfer.abort("the sequence was cancelled")
    with pytest.raises(DistServeError):
        await transfer.commit(b"", timeout_s=5)
    facts = transfer.facts
    assert (facts.num_blocks, facts.num_bytes) == (2, 0)
    assert 0 < facts.wait_s < 5
    assert 0 <= facts.wire_s < 5


async def _moved(rig: Rig, sources: list[int]) -> int:
    transfer = await rig.open(rig.grant([40 + i for i in range(len(sources))]))
    transfer.write(everything(sources))
    return await transfer.commit(b"", timeout_s=5)


async def test_segments_of_both_ends_are_counted_and_stay_so_after_the_connections_end() -> None:
    sending, receiving = Meter(), Meter()
    with pool(8, SMALL, seed=1) as source, pool(8, SMALL) as target:
        receiver = TcpReceiver(target, options=FAST, meter=receiving)
        await receiver.start(lambda commit: None, lambda lease_id, epoch, error: None)
        sender = TcpSender(source, sender_id="p0", options=FAST, meter=sending)
        try:
            transfer = await sender.open(receiver.grant(Lease(1, 1, [3, 4], 5.0)), timeout_s=5)
            transfer.write(everything([1, 2]))
            await transfer.commit(b"", timeout_s=5)
            live = sending.packets.snapshot()["tcp"], receiving.packets.snapshot()["tcp"]
        finally:
            await sender.stop()
            await receiver.stop()
    assert all((packets.num_sent or 0) > 0 for packets in live)
    assert not sending.packets._connections
    assert not receiving.packets._connections
    after = sending.packets.snapshot()["tcp"], receiving.packets.snapshot()["tcp"]
    for now, before in zip(after, live, strict=True):
        assert (now.num_sent or 0) >= (before.num_sent or 0)
        assert now.num_sent_again == 0
