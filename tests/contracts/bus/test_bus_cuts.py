"""The bus contract on cuts: what is ridden out, and how much is kept for afterwards."""

import asyncio

import pytest

from distserve.bus.base import Delivery
from distserve.errors import BusError, BusTimeout, NoResponders
from tests.contracts.bus.conftest import Fabric
from tests.waiting import until


async def test_a_cut_is_ridden_out_subscriptions_requests_and_unsent_messages_live_on(fabric: Fabric) -> None:
    here, there = await fabric.bus("here"), await fabric.bus("there")
    got: list[bytes] = []

    async def callback(delivery: Delivery) -> None:
        got.append(delivery.data)

    async def responder(delivery: Delivery) -> bytes:
        return b"yes"

    await there.subscribe("cut.x", callback)
    await there.serve("cut.ask", responder)
    await fabric.go_down()
    await until(lambda: not here.connected and not there.connected)
    for i in range(20):
        await here.publish("cut.x", b"%d" % i)
    with pytest.raises(BusTimeout, match="cut off"):
        await here.request("cut.ask", b"", timeout_s=0.1)
    asking = asyncio.create_task(here.request("cut.ask", b"", timeout_s=20))
    await fabric.come_back()
    try:
        assert await asking == b"yes"
    except NoResponders:  # the asker was back before the responder
        await until(lambda: there.connected)
        assert await here.request("cut.ask", b"", timeout_s=5) == b"yes"
    assert here.stats.reconnects == 1
    await here.publish("cut.x", b"back")
    await until(lambda: b"back" in got)
    assert got == sorted(got, key=lambda data: int(data) if data.isdigit() else 99)


async def test_publishing_into_a_cut_is_bounded(fabric: Fabric) -> None:
    bus = await fabric.bus()
    await fabric.go_down()
    await until(lambda: not bus.connected)
    with pytest.raises(BusError, match="unsent bytes"):
        await asyncio.gather(*(bus.publish("bounded.x", bytes(100_000)) for _ in range(100)))
