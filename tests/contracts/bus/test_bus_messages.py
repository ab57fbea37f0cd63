"""The bus contract on messages: their order and what they carry, groups, callbacks that are slow or fail, limits."""

import asyncio

import pytest

from distserve.bus.base import Bus, Delivery
from distserve.errors import BusError, PayloadTooLarge
from tests.contracts.bus.conftest import Fabric
from tests.waiting import until


async def test_messages_arrive_in_the_order_they_were_published(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    got: list[bytes] = []

    async def callback(delivery: Delivery) -> None:
        got.append(delivery.data)

    async with await there.subscribe("order.x", callback):
        for i in range(500):
            await here.publish("order.x", b"%d" % i)
        await until(lambda: len(got) == 500)
    assert got == [b"%d" % i for i in range(500)]


async def test_inline_callbacks_run_one_after_another_in_order(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    got: list[bytes] = []
    running = 0

    async def callback(delivery: Delivery) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        got.append(delivery.data)
        running -= 1

    async with await there.subscribe("inline.x", callback, inline=True):
        for i in range(200):
            await here.publish("inline.x", b"%d" % i)
        await until(lambda: len(got) == 200)
    assert got == [b"%d" % i for i in range(200)]
    assert there.stats.callback_errors == 0


async def test_a_delivery_carries_subject_reply_and_headers(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    got: list[Delivery] = []

    async def callback(delivery: Delivery) -> None:
        got.append(delivery)

    async with await there.subscribe("wild.*.>", callback):
        await here.publish("wild.a.b.c", b"x", reply="back.here", headers={"traceparent": "00-ab-cd-01"})
        await here.publish("wild.a", b"not this one")
        await here.publish("wild.a.b", b"y")
        await until(lambda: len(got) == 2)
    assert (got[0].subject, got[0].data, got[0].reply) == ("wild.a.b.c", b"x", "back.here")
    assert got[0].headers["traceparent"] == "00-ab-cd-01"
    assert (got[1].data, got[1].reply, dict(got[1].headers)) == (b"y", None, {})


async def test_everybody_subscribed_gets_a_message_but_only_one_member_of_a_group(fabric: Fabric) -> None:
    sender = await fabric.bus()
    counts = {"plain": 0, "a": 0, "b": 0}
    for who, queue in (("plain", None), ("a", "group"), ("b", "group")):

        async def callback(delivery: Delivery, who: str = who) -> None:
            counts[who] += 1

        await (await fabric.bus(who)).subscribe("shared.x", callback, queue=queue)
    for _ in range(300):
        await sender.publish("shared.x", b"")
    await until(lambda: counts["plain"] == 300 and counts["a"] + counts["b"] == 300)
    assert counts["a"] > 0
    assert counts["b"] > 0


async def test_a_message_over_the_limit_is_refused_before_sending_naming_both_sizes(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    got: list[int] = []

    async def callback(delivery: Delivery) -> None:
        got.append(len(delivery.data))

    limit = here.max_payload_bytes
    async with await there.subscribe("large.x", callback):
        for attempt in (
            here.publish("large.x", bytes(limit + 1)),
            here.request("large.x", bytes(limit + 1), timeout_s=5),
        ):
            with pytest.raises(PayloadTooLarge, match=rf"{limit + 1} bytes.*{limit}") as caught:
                await attempt
            assert caught.value.fields == {"subject": "large.x", "size_bytes": limit + 1, "limit_bytes": limit}
        with pytest.raises(PayloadTooLarge):  # headers count on the wire
            await here.publish("large.x", bytes(limit - 10), headers={"traceparent": "0" * 55})
        await here.publish("large.x", bytes(limit))
        await until(lambda: got == [limit])
    assert here.connected
    assert here.stats.reconnects == 0


async def test_a_slow_callback_does_not_hold_up_the_others(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    gate = asyncio.Event()
    started: list[bytes] = []
    finished: list[bytes] = []

    async def callback(delivery: Delivery) -> None:
        started.append(delivery.data)
        if delivery.data == b"0":
            await gate.wait()
        finished.append(delivery.data)

    async with await there.subscribe("slow.x", callback):
        for i in range(10):
            await here.publish("slow.x", b"%d" % i)
        await until(lambda: len(finished) == 9)
        assert started == [b"%d" % i for i in range(10)]
        gate.set()
        await until(lambda: len(finished) == 10)
    assert finished[-1] == b"0"


async def test_a_callback_that_fails_is_counted_logged_and_does_not_stop_the_rest(
    buses: tuple[Bus, Bus], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = buses
    got: list[bytes] = []

    async def callback(delivery: Delivery) -> None:
        if delivery.data == b"bad":
            raise ValueError("spoilt")
        got.append(delivery.data)

    for subject, inline in (("fail.task", False), ("fail.inline", True)):
        async with await there.subscribe(subject, callback, inline=inline):
            await here.publish(subject, b"bad")
            await here.publish(subject, subject.encode())
            await until(lambda: len(got) == 1)
        assert got.pop() == subject.encode()
        assert subject in caplog.text
    assert there.stats.callback_errors == 2
    assert "spoilt" in caplog.text


async def test_a_bad_subject_is_a_bus_error(buses: tuple[Bus, Bus]) -> None:
    with pytest.raises(BusError, match="no valid subject"):
        await buses[0].publish("with space", b"")
