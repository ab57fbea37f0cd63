"""The bus contract on requests: answers, silence, nobody there, errors that cross."""

import asyncio
import logging
import time

import pytest

from distserve.bus.base import Bus, Delivery
from distserve.errors import (
    BusTimeout,
    ContextLengthExceeded,
    DistServeError,
    NoResponders,
    Overloaded,
    PayloadTooLarge,
)
from distserve.messages import SubmitReply, decode_as, encode


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


async def test_an_answer_over_the_limit_becomes_an_error_for_the_asker(buses: tuple[Bus, Bus]) -> None:
    here, there = buses

    async def chatty(delivery: Delivery) -> bytes:
        return bytes(there.max_payload_bytes + 1)

    async with await there.serve("chatty.x", chatty):
        with pytest.raises(PayloadTooLarge):
            decode_as(SubmitReply, await here.request("chatty.x", b"", timeout_s=5))
