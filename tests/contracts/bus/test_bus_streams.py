"""The bus contract on streams: many answers to one request, until the empty one."""

import time
from collections.abc import AsyncIterator

import pytest

from distserve.bus.base import Bus, Delivery
from distserve.errors import BusTimeout, NoResponders


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
