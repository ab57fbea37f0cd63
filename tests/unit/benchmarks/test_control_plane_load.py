"""The load of the control plane's benchmark counts what comes, however the network cuts it."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.control_plane_load import Load, Measured, measure

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LOAD = Load(num_clients=2, num_tokens=3, num_words=4, warm_s=0.0, measure_s=0.3)


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


THREE = HEAD + chunked(b'data: {"a":1}\n\n', b'data: {"a":2}\n\ndata: {"a":3}\n\n', b"data: [DONE]\n\n")


@asynccontextmanager
async def serving(pieces: Callable[[], list[bytes]]) -> AsyncIterator[tuple[int, list[bytes]]]:
    """(port, requests): a server that answers each request with these pieces, a packet each."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                requests.append(await reader.readexactly(size))
                for piece in pieces():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], requests


async def run(pieces: Callable[[], list[bytes]]) -> tuple[Measured, list[bytes]]:
    async with serving(pieces) as (port, requests):
        return await measure("127.0.0.1", [port], "m", LOAD, {"self": os.getpid()}), requests


@pytest.mark.parametrize("size", [1, 5, 7, len(THREE)])
async def test_events_are_counted_across_packets(size: int) -> None:
    cut = [THREE[i : i + size] for i in range(0, len(THREE), size)]
    measured, requests = await run(lambda: cut)
    assert measured.num_failed == 0
    assert measured.answers
    assert {answer.num_events for answer in measured.answers} == {3}
    assert measured.tokens_per_s == pytest.approx(3 * measured.requests_per_s)
    assert len(requests) >= len(measured.answers)
    assert b'"max_tokens": 3' in requests[0]


async def test_an_answer_with_too_few_events_has_failed() -> None:
    measured, _ = await run(lambda: [HEAD + chunked(b'data: {"a":1}\n\n', b"data: [DONE]\n\n")])
    assert not measured.answers
    assert measured.num_failed > 0


async def test_a_refused_client_is_an_error() -> None:
    refusal = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
    with pytest.raises(RuntimeError, match="refused"):
        await run(lambda: [refusal])
