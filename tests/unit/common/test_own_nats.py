"""A cluster's own NATS server outlives its deaths."""

import asyncio
import os
import signal

import psutil
import pytest

from distserve.bus.nats import NatsBus
from distserve.own_nats import OwnNats
from distserve.supervisor import Backoff
from tests.waiting import until


async def test_a_server_that_dies_comes_back_at_its_url_and_clients_with_it() -> None:
    said: list[str] = []
    async with OwnNats(lambda name, line: said.append(line), Backoff(first_s=0.05)) as server:
        first, url = server.pid, server.url
        assert first is not None
        async with await NatsBus.connect(url, name="client") as bus:
            got = asyncio.Event()

            async def on_message(delivery: object) -> None:
                got.set()

            await bus.subscribe("own.test", on_message)
            os.kill(first, signal.SIGKILL)
            await until(lambda: server.pid not in (None, first), 20, "a new server runs")
            await until(lambda: bus.connected, 20, "the client is back")
            assert server.url == url
            async with asyncio.timeout(20):
                while not got.is_set():  # until the subscription is there again
                    await bus.publish("own.test", b"x")
                    await asyncio.sleep(0.02)
        second = server.pid
    assert said == [f"the NATS server died: again at {url} in 0.05 s"]
    assert second is not None
    assert server.pid is None
    assert not psutil.pid_exists(second)


@pytest.mark.parametrize(("healthy_s", "second_s"), [(0.0, "0.05"), (3600.0, "0.1")])
async def test_a_healthy_life_forgets_earlier_deaths(healthy_s: float, second_s: str) -> None:
    said: list[str] = []
    backoff = Backoff(first_s=0.05, healthy_s=healthy_s)
    async with OwnNats(lambda name, line: said.append(line), backoff) as server:
        for _ in range(2):
            pid = server.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: server.pid not in (None, pid), 20, "a new server runs")
    assert [line.rpartition(" in ")[2] for line in said] == ["0.05 s", f"{second_s} s"]


async def test_one_that_lives_is_left_alone() -> None:
    said: list[str] = []
    async with OwnNats(lambda name, line: said.append(line)) as server:
        first = server.pid
        await asyncio.sleep(0.6)  # two looks
        assert server.pid == first
    assert said == []
