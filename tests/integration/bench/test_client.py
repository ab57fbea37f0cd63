"""Connections of the client."""

import asyncio
import socket

from distserve.bench.client import Pool, parse_url
from distserve.bench.wire import request
from tests.integration.bench.scripted import Scripted, serving, streaming


async def test_small_writes_are_sent_at_once() -> None:
    """TCP_NODELAY is on, whatever the event loop does by itself."""
    async with serving(Scripted(streaming())) as server:
        pool = Pool(parse_url("URL", server.url))
        async with asyncio.timeout(10):
            exchange = await pool.ask(request("GET", "/version", {"Host": "x"}), 5.0)
        assert exchange.reading.status == 200
        [connection] = pool._idle
        assert connection._transport is not None
        opened = connection._transport.get_extra_info("socket")
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        pool.close()


async def test_requests_at_once_have_a_connection_each_and_leave_it_to_the_next() -> None:
    async with serving(Scripted(streaming())) as server:
        pool = Pool(parse_url("URL", server.url))
        for _ in range(3):
            async with asyncio.timeout(10):
                asks = [pool.ask(request("GET", "/version", {"Host": "x"}), 5.0) for _ in range(5)]
                assert all(e.reading.whole for e in await asyncio.gather(*asks))
        assert pool.num_opened == server.num_connections == 5
        pool.close()
