"""The bus contract on what waits: messages that have come and were not begun, and those that are unsent."""

import asyncio

from distserve.bus.base import Delivery, Pending
from tests.contracts.bus.conftest import Fabric
from tests.waiting import until


async def test_what_waits_for_its_turn_is_counted_until_it_has_it(fabric: Fabric) -> None:
    here, there = await fabric.bus("here"), await fabric.bus("there")
    gate, begun = asyncio.Event(), asyncio.Event()
    got: list[bytes] = []

    async def slow(delivery: Delivery) -> None:
        begun.set()
        await gate.wait()
        got.append(delivery.data)

    await there.subscribe("pending.x", slow, inline=True)
    assert there.pending == Pending()
    await here.publish("pending.x", b"first")
    await asyncio.wait_for(begun.wait(), 5)
    for i in range(10):
        await here.publish("pending.x", b"%04d" % i)
    await until(lambda: there.pending == Pending(10, 40))
    gate.set()
    await until(lambda: len(got) == 11)
    assert there.pending == Pending()


async def test_what_is_unsent_is_counted_until_it_has_left(fabric: Fabric) -> None:
    bus = await fabric.bus()
    await fabric.go_down()
    await until(lambda: not bus.connected)
    before = bus.pending
    for _ in range(5):
        await bus.publish("pending.y", bytes(100))
    waiting = bus.pending
    assert waiting.messages >= before.messages + 5
    assert waiting.num_bytes >= before.num_bytes + 500
    await fabric.come_back()
    await until(lambda: bus.connected and bus.pending == Pending())
