"""What the client costs itself: it is measured against a server that only writes ready answers.

    python -m distserve.bench.floor --tokens 64

prints a port and serves there until its standard input is closed: every POST has an answer of so many events, each in a
chunk and a write of its own, as fast as the client reads.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from distserve.bench.answers import result
from distserve.bench.body import Form
from distserve.bench.client import Pool, parse_url
from distserve.bench.drive import Limits, drive
from distserve.bench.lengths import Fixed
from distserve.bench.prompts import UNCHECKED
from distserve.bench.quantiles import percentile
from distserve.bench.traffic import Traffic

TOKENS = 64
MEASURE_S, WARM_S = 1.0, 0.2
START_S = 20.0


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """`concurrency` streams at once. `events_per_s`: that came, with a server that was as fast as it could be on its
    own core; `cpu_us_per_event`: of the client, all it does included."""

    concurrency: int
    ttft_p50_s: float
    ttft_p99_s: float
    events_per_s: float
    cpu_us_per_event: float


async def measure_floor(concurrency: int) -> Floor | None:
    """Takes a little over a second. None if the server could not be started."""
    try:
        async with serving(TOKENS) as port:
            pool = Pool(parse_url("", f"http://127.0.0.1:{port}"))
            form = Form(pool.address, "completions", "floor")
            traffic = Traffic("closed", concurrency=concurrency, input=Fixed(64), output=Fixed(TOKENS))
            limits = Limits(duration_s=MEASURE_S, warm_s=WARM_S, deadline_s=10.0)
            cpu_s = time.thread_time()
            course = await drive(pool, traffic, lambda ask: form.ask(UNCHECKED, ask), limits)
            cpu_s = time.thread_time() - cpu_s
            pool.close()
    except (OSError, TimeoutError, ValueError):
        return None
    found = [result(a, e, due_s=due, began_s=course.began_s) for a, due, e in course.done]
    ttfts = [ttft for r in found if r.ok and r.due_s >= 0 and (ttft := r.ttft_s()) is not None]
    num_events = sum(len(r.times_s) for r in found)
    if not ttfts:
        return None
    return Floor(
        concurrency=concurrency,
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        events_per_s=sum(0 <= at < MEASURE_S for r in found for at in r.times_s) / MEASURE_S,
        cpu_us_per_event=1e6 * cpu_s / num_events,
    )


@asynccontextmanager
async def serving(tokens: int) -> AsyncIterator[int]:
    """The server's port, while it serves in a process of its own. Raises OSError, TimeoutError, ValueError."""
    command = [sys.executable, "-m", "distserve.bench.floor", "--tokens", str(tokens)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            port = int(await process.stdout.readline())
        yield port
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class _Server(asyncio.Protocol):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._seen = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while (end := self._seen.find(b"\r\n\r\n")) >= 0:
            head = self._seen[:end].lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            if len(self._seen) < end + 4 + length:
                return
            self._seen = self._seen[end + 4 + length :]
            for piece in self._pieces:
                self._transport.write(piece)


def answer(tokens: int) -> list[bytes]:
    """Its writes: a head, an event a token, the end."""
    choice = b'{"id":"cmpl-0","object":"text_completion","model":"floor","choices":[{"index":0,"text":" word"}],'
    usage = b'"usage":{"prompt_tokens":64,"completion_tokens":%d}}'
    events = [b"data: %b%b\n\n" % (choice, usage % (i + 1)) for i in range(tokens)]
    chunks = [b"%x\r\n%b\r\n" % (len(e), e) for e in [*events, b"data: [DONE]\n\n"]]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head, *chunks, b"0\r\n\r\n"]


async def serve(tokens: int) -> None:
    loop = asyncio.get_running_loop()
    pieces = answer(tokens)
    server = await loop.create_server(lambda: _Server(pieces), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    asyncio.run(serve(parser.parse_args().tokens))


if __name__ == "__main__":
    main()
