"""The bus contract on subscriptions: reachable once they have begun, closed without a loss, ended with their bus."""

import asyncio
import time

import pytest

from distserve.bus.base import Bus, Delivery
from distserve.errors import BusError, BusTimeout, NoResponders
from tests.contracts.bus.conftest import Fabric
from tests.waiting import until


async def test_who_subscribes_is_reachable_from_everywhere_as_soon_as_subscribe_returns(fabric: Fabric) -> None:
    here, there = await fabric.bus(), await fabric.bus()

    async def responder(delivery: Delivery) -> bytes:
        return b"here"

    for i in range(300):
        subject = f"at.once.{i}"
        await there.publish("noise.x", bytes(2000))  # something unsent before it
        async with await there.serve(subject, responder):
            assert await here.request(subject, b"", timeout_s=5) == b"here"
        with pytest.raises(NoResponders):  # and unreachable as soon as close() has returned
            await here.request(subject, b"", timeout_s=5)


async def test_no_callback_starts_once_close_has_returned(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    got: list[bytes] = []
    afterwards: list[bytes] = []
    closed = False

    async def callback(delivery: Delivery) -> None:
        (afterwards if closed else got).append(delivery.data)

    async def other(delivery: Delivery) -> None:
        got.append(delivery.data)

    subscription = await there.subscribe("closing.x", callback)
    await there.subscribe("after.x", other)
    for i in range(2000):
        await here.publish("closing.x", b"%d" % i)
    await here.flush()
    await until(lambda: len(got) > 0)
    await subscription.close()
    closed = True
    await subscription.close()  # idempotent
    for _ in range(50):
        await here.publish("closing.x", b"late")
    await here.publish("after.x", b"after")
    await until(lambda: b"after" in got)  # by then the late ones would have come
    assert afterwards == []


async def test_requests_that_come_while_a_subscription_closes_are_answered_or_told_that_nobody_answers(
    fabric: Fabric,
) -> None:
    here, there = await fabric.bus("here"), await fabric.bus("there")
    outcomes: list[str] = []

    async def responder(delivery: Delivery) -> bytes:
        await asyncio.sleep(0.001)
        return delivery.data

    async def ask(subject: str, i: int) -> None:
        try:
            outcomes.append(
                "answered" if await here.request(subject, b"%d" % i, timeout_s=20) == b"%d" % i else "wrong"
            )
        except NoResponders:
            outcomes.append("nobody")
        except BusTimeout:
            outcomes.append("lost")

    async def keep_asking(subject: str, closed: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            i = 0
            while not closed.is_set() or i % 20:
                tasks.create_task(ask(subject, i))
                i += 1
                if i % 20 == 0:
                    await asyncio.sleep(0)

    for attempt in range(10):
        subject, closed = f"leaving.{attempt}", asyncio.Event()
        subscription = await there.serve(subject, responder, queue="group")
        asking = asyncio.create_task(keep_asking(subject, closed))
        await until(lambda n=len(outcomes): len(outcomes) > n, what="the first answer")
        await subscription.close()
        closed.set()
        await asking
        with pytest.raises(NoResponders):
            await here.request(subject, b"", timeout_s=5)
    assert "answered" in outcomes
    assert {"lost", "wrong"}.isdisjoint(outcomes)


async def test_a_member_that_leaves_its_group_loses_no_request(fabric: Fabric) -> None:
    here = await fabric.bus("here")

    async def responder(delivery: Delivery) -> bytes:
        return delivery.data

    stays = await (await fabric.bus("stays")).serve("group.x", responder, queue="group")
    for _ in range(5):
        leaving = await (await fabric.bus("leaves")).serve("group.x", responder, queue="group")
        asking = [asyncio.create_task(here.request("group.x", b"%d" % i, timeout_s=3)) for i in range(400)]
        await asyncio.sleep(0)
        await leaving.close()
        assert await asyncio.gather(*asking) == [b"%d" % i for i in range(400)]
    await stays.close()


async def test_an_inline_callback_that_waits_does_not_hold_up_close(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    full: asyncio.Queue[bytes] = asyncio.Queue(1)

    async def callback(delivery: Delivery) -> None:
        await full.put(delivery.data)

    subscription = await there.subscribe("full.x", callback, inline=True)
    for _ in range(5):
        await here.publish("full.x", b"")
    await here.flush()
    await until(full.full)
    began = time.monotonic()
    await subscription.close()
    assert time.monotonic() - began < 1.0


async def test_closing_the_bus_ends_running_callbacks_and_refuses_further_use(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    began = asyncio.Event()
    ended: list[str] = []

    async def callback(delivery: Delivery) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    await there.subscribe("life.x", callback)
    await here.publish("life.x", b"")
    await asyncio.wait_for(began.wait(), 5)
    await there.close()
    assert ended == ["cancelled"]
    assert not there.connected
    for attempt in (
        there.publish("life.x", b""),
        there.request("life.x", b"", timeout_s=1),
        there.subscribe("life.x", callback),
        there.flush(),
    ):
        with pytest.raises(BusError, match="closed"):
            await attempt
    with pytest.raises(NoResponders):
        await here.request("life.x", b"", timeout_s=5)


async def test_a_bus_may_be_unsubscribed_from_within_a_callback(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    done = asyncio.Event()

    async def once(delivery: Delivery) -> None:
        await subscription.close()
        done.set()

    subscription = await there.subscribe("once.x", once)
    await here.publish("once.x", b"")
    await asyncio.wait_for(done.wait(), 5)
    with pytest.raises(NoResponders):
        await here.request("once.x", b"", timeout_s=5)
