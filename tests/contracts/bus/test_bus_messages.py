"""The bus contract on messages: publish, subscribe, groups, requests, streams, limits, closing."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest

from distserve.bus.base import Bus, Delivery
from distserve.errors import (
    BusError,
    BusTimeout,
    ContextLengthExceeded,
    DistServeError,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
)
from distserve.messages import SubmitReply, decode_as, encode
from tests.contracts.bus.conftest import Fabric
from tests.waiting import until


@pytest.fixture
async def buses(fabric: Fabric) -> tuple[Bus, Bus]:
    return await fabric.bus("one"), await fabric.bus("other")


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


async def test_a_request_is_answered(buses: tuple[Bus, Bus]) -> None:
    here, there = buses

    async def responder(delivery: Delivery) -> bytes:
        return delivery.data.upper() + delivery.headers.get("suffix", "").encode()

    async with await there.serve("ask.x", responder):
        assert await here.request("ask.x", b"hello", timeout_s=5, headers={"suffix": "!"}) == b"HELLO!"
        answers = await asyncio.gather(*(here.request("ask.x", b"n%d" % i, timeout_s=5) for i in range(100)))
    assert answers == [b"N%d" % i for i in range(100)]


async def test_a_request_without_a_subscriber_fails_at_once(buses: tuple[Bus, Bus]) -> None:
    began = time.monotonic()
    with pytest.raises(NoResponders, match=r"nobody\.home") as caught:
        await buses[0].request("nobody.home", b"", timeout_s=30)
    assert time.monotonic() - began < 5
    assert caught.value.subject == "nobody.home"


async def test_a_request_that_nobody_answers_in_time_times_out(buses: tuple[Bus, Bus]) -> None:
    here, there = buses

    async def silent(delivery: Delivery) -> None:
        pass

    async with await there.subscribe("silent.x", silent):
        with pytest.raises(BusTimeout, match=r"silent\.x") as caught:
            await here.request("silent.x", b"", timeout_s=0.1)
    assert caught.value.fields == {"subject": "silent.x", "timeout_s": 0.1}


async def test_an_error_crosses_as_the_same_class_with_its_fields(buses: tuple[Bus, Bus]) -> None:
    here, there = buses

    async def refuse(delivery: Delivery) -> bytes:
        if delivery.data == b"busy":
            raise Overloaded("the queue is full", retry_after_s=0.5, num_waiting=64)
        raise ContextLengthExceeded("too long", num_prompt_tokens=9000, max_tokens=1, limit=4096)

    async with await there.serve("refuse.x", refuse):
        with pytest.raises(Overloaded, match="the queue is full") as busy:
            decode_as(SubmitReply, await here.request("refuse.x", b"busy", timeout_s=5))
        with pytest.raises(ContextLengthExceeded) as too_long:
            decode_as(SubmitReply, await here.request("refuse.x", b"long", timeout_s=5))
    assert busy.value.fields == {"retry_after_s": 0.5, "num_waiting": 64}
    assert too_long.value.limit == 4096


async def test_a_foreign_exception_is_answered_and_logged_with_its_traceback(
    buses: tuple[Bus, Bus], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = buses

    async def broken(delivery: Delivery) -> bytes:
        return encode(SubmitReply(num_waiting=1 // (len(delivery.data) - 1)))

    async with await there.serve("broken.x", broken):
        with pytest.raises(DistServeError, match="ZeroDivisionError") as caught:
            decode_as(SubmitReply, await here.request("broken.x", b"1", timeout_s=5))
        assert decode_as(SubmitReply, await here.request("broken.x", b"12", timeout_s=5)).num_waiting == 1
    assert type(caught.value) is DistServeError
    [record] = [r for r in caplog.records if "broken.x" in r.getMessage()]
    assert record.exc_info is not None
    assert record.levelno == logging.ERROR


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


async def test_an_answer_over_the_limit_becomes_an_error_for_the_asker(buses: tuple[Bus, Bus]) -> None:
    here, there = buses

    async def chatty(delivery: Delivery) -> bytes:
        return bytes(there.max_payload_bytes + 1)

    async with await there.serve("chatty.x", chatty):
        with pytest.raises(PayloadTooLarge):
            decode_as(SubmitReply, await here.request("chatty.x", b"", timeout_s=5))


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


async def test_a_bad_subject_is_a_bus_error(buses: tuple[Bus, Bus]) -> None:
    with pytest.raises(BusError, match="no valid subject"):
        await buses[0].publish("with space", b"")


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


# ---------------------------------------------------------------- streams


async def collect(stream: AsyncIterator[bytes]) -> list[bytes]:
    return [part async for part in stream]


async def test_a_stream_yields_answers_until_the_empty_one(buses: tuple[Bus, Bus]) -> None:
    here, there = buses

    async def tell(delivery: Delivery) -> None:
        assert delivery.reply is not None
        for i in range(3000):  # more than may wait for the reader
            await there.publish(delivery.reply, delivery.data + b"%d" % i)
        await there.publish(delivery.reply, b"")
        await there.publish(delivery.reply, b"after the end")

    async with await there.subscribe("tell.x", tell):
        got = await collect(here.stream("tell.x", b"n", timeout_s=5))
    assert got == [b"n%d" % i for i in range(3000)]


async def test_a_stream_that_falls_silent_times_out_after_what_came(buses: tuple[Bus, Bus]) -> None:
    here, there = buses
    got: list[bytes] = []

    async def tell(delivery: Delivery) -> None:
        assert delivery.reply is not None
        await there.publish(delivery.reply, b"first")
        await there.publish(delivery.reply, b"second")

    async def listen() -> None:
        async for part in here.stream("hush.x", b"", timeout_s=0.3):
            got.append(part)

    async with await there.subscribe("hush.x", tell):
        with pytest.raises(BusTimeout, match=r"hush\.x"):
            await listen()
    assert got == [b"first", b"second"]


async def test_a_stream_from_nobody_fails_at_once(buses: tuple[Bus, Bus]) -> None:
    began = time.monotonic()
    with pytest.raises(NoResponders):
        await collect(buses[0].stream("nobody.tells", b"", timeout_s=30))
    assert time.monotonic() - began < 5


# ---------------------------------------------------------------- cuts


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
