"""Streams over real sockets and a real nats-server: tokens as they come, clients that leave, servers that fail."""

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from distserve.bus.embedded import EmbeddedNats
from distserve_gateway import server
from distserve_gateway.server import NoDelayProtocol
from tests.integration.gateway.real_cluster import serving_http
from tests.unit.gateway.scripted import TOKENIZER, says
from tests.waiting import until

TEXT = "The capital of France is Paris, and the rest of this answer is here too. 你好 🙂"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 120, "stream": True}


def content(line: str) -> str:
    event = json.loads(line.removeprefix("data: "))
    return "".join(choice["delta"].get("content", "") for choice in event.get("choices", []))


async def stream(url: str, body: dict[str, Any], timeout_s: float = 20.0) -> list[str]:
    """The data lines of a streamed answer."""
    async with httpx.AsyncClient(timeout=timeout_s) as client:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            return [line async for line in response.aiter_lines() if line]


async def test_tokens_leave_as_they_come(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url):
        cluster.workers["d0"].gate_at = 4
        begun = TOKENIZER.encode(TEXT, add_special_tokens=False)[:4]
        async with httpx.AsyncClient(timeout=20) as client:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as response:
                lines = (line async for line in response.aiter_lines() if line)
                said = ""
                while said != TOKENIZER.decode(begun, skip_special_tokens=True):
                    said += content(await anext(lines))
                cluster.workers["d0"].gate.set()
                rest = [line async for line in lines]
        assert rest.pop() == "data: [DONE]"
        assert said + "".join(map(content, rest)) == TEXT


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_its_sequences_at_once(nats_url: str, streamed: bool) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url):
        p0, d0 = cluster.workers["p0"], cluster.workers["d0"]
        d0.gate_at = 3
        async with httpx.AsyncClient(timeout=20) as client:
            body = CHAT | {"stream": streamed, "n": 3}
            request = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body))
            await until(lambda: len(d0.submitted) == 3)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        began = time.monotonic()
        await until(lambda: len(d0.cancelled) == 3 and len(p0.cancelled) == 3, what="both told of all three")
        assert time.monotonic() - began < 1.0
        assert len(cluster.gateway.streams) == 0
        assert cluster.gateway.workers.in_flight == {}


async def test_a_client_that_leaves_before_the_first_token_frees_its_sequence(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url):
        p0 = cluster.workers["p0"]
        p0.gate_at = 0
        async with httpx.AsyncClient(timeout=20) as client:
            request = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=CHAT))
            await until(lambda: len(p0.submitted) == 1)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await until(lambda: p0.cancelled == [p0.submitted[0].key], what="prefill told")


async def test_a_worker_killed_in_mid_answer_is_an_error_event_within_three_seconds(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url):
        cluster.workers["d0"].gate_at = 3
        running = [asyncio.create_task(stream(url, CHAT)) for _ in range(8)]
        await until(lambda: len(cluster.workers["d0"].submitted) == 8)
        began = time.monotonic()
        await cluster.workers["d0"].die()
        for lines in await asyncio.gather(*running):
            assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "worker_lost"
        assert time.monotonic() - began < 3.0
        await cluster.add("decode", "d1", says(TEXT))
        await cluster.gateway.watch.wait_for(lambda seen: "d1" in seen and "d0" not in seen, 10.0)
        assert "".join(map(content, (await stream(url, CHAT))[:-1])) == TEXT


async def test_two_hundred_streams_at_once_are_complete(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url):
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:

            async def one() -> str:
                async with client.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as response:
                    lines = [line async for line in response.aiter_lines() if line]
                assert lines.pop() == "data: [DONE]"
                return "".join(map(content, lines))

            said = await asyncio.gather(*(one() for _ in range(200)))
        assert set(said) == {TEXT}
        assert len(cluster.gateway.streams) == 0
        assert cluster.gateway.workers.in_flight == {}
        await until(lambda: len(cluster.workers["d0"].outbox) == 0, what="every end acknowledged")


async def test_a_restart_of_nats_ends_no_running_answer(nats_server: EmbeddedNats) -> None:
    async with serving_http(nats_server.url, says(TEXT)) as (cluster, url):
        cluster.workers["d0"].gate_at = 3
        running = asyncio.create_task(stream(url, CHAT, timeout_s=40))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        port = nats_server.port
        nats_server.kill()
        await until(lambda: not cluster.gateway_bus.connected)
        cluster.workers["d0"].gate.set()
        with EmbeddedNats(port=port):  # with an empty store
            lines = await running
            assert lines.pop() == "data: [DONE]"
            assert "".join(map(content, lines)) == TEXT
            await cluster.see("p0", "d0")
            assert "".join(map(content, (await stream(url, CHAT))[:-1])) == TEXT
            await cluster.close()


async def test_a_body_over_the_limit_is_refused_before_it_is_all_sent(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT), max_body_bytes=50_000) as (_, url):
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        part = b"2710\r\n" + b"a" * 10_000 + b"\r\n"
        for _ in range(6):  # 60 kB, and the end of the body never comes
            writer.write(part)
        await writer.drain()
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer.lower()
        writer.close()


def test_every_connection_has_nodelay_set() -> None:
    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return near if name == "socket" else default

    listener = server.bind("127.0.0.1", 0)
    listener.listen()
    near = socket.create_connection(listener.getsockname())
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)

    async def connect() -> None:
        import uvicorn

        config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
        config.load()
        NoDelayProtocol(config, uvicorn.server.ServerState(), {}).connection_made(Transport())

    asyncio.run(connect())
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    near.close()
    listener.close()
