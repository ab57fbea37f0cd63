"""One token through the gateway: where the microseconds go.

    python -m benchmarks.control_plane_token [--rounds 30]

Each stage of a token's way is run by itself, on the gateway's own objects and with everything in the caches, for steps
of 1 and of 16 sequences; the least of the rounds is taken. `whole` is the way from a message's bytes to the server's
send(), run as it is: what it has beyond its stages is the waking of the request's task. In a cluster the caches are
shared with the kernel and three other processes, so that a token there costs more than the sum.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import uvloop
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from benchmarks.null_engine.model import FIRST_TOKEN, MAX_MODEL_LEN, make_model
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.messages import SequenceKey, TokenBatch, TokenChunk, decode_as, encode
from distserve_gateway.admission import Admission
from distserve_gateway.affinity import Affinity
from distserve_gateway.answer import Answer
from distserve_gateway.intake import Intake
from distserve_gateway.kv_index import KVIndex
from distserve_gateway.metrics import Metrics
from distserve_gateway.middleware import RequestIds
from distserve_gateway.prefixes import Prefixes
from distserve_gateway.rendering import CompletionRenderer, Renderer
from distserve_gateway.responses import StreamResponse, events
from distserve_gateway.streams import Streams
from distserve_gateway.submission import Submission
from distserve_gateway.tokenizing import ModelTokenizer
from distserve_gateway.workers import Workers

NUM_TOKENS = 64
FRAME_BYTES = 230  # of an event with its chunk's frame, about


class AcceptsAll:
    """In place of a Dispatch: every sequence is taken at once."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    async def submit(self, sequence: Any) -> None:
        sequence.place("p", "d")
        self._streams.placed(sequence, sequence.num_prompt_tokens)
        self._streams.accepted(sequence)


class Desk:
    """The gateway's objects, without server and cluster."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        watch = SimpleNamespace(snapshot=MappingProxyType({}), on_event=lambda callback: None)
        workers = Workers(watch, "m")  # type: ignore[arg-type]
        self.streams = Streams(MemoryBus(MemoryHub()), "gateway", workers)
        self.metrics = Metrics("m", lambda: len(self.streams))
        self._tokenizer = tokenizer
        admission = Admission(4096)
        self._submission = Submission(
            self.streams,
            AcceptsAll(self.streams),  # type: ignore[arg-type]
            admission,
            prefixes=Prefixes(KVIndex(), workers),
            affinity=Affinity(),
        )
        self._intake = Intake("m", tokenizer, None, admission, lambda: MAX_MODEL_LEN, lambda: 1 << 20)

    async def begin(self) -> Renderer:
        body = {"model": "m", "prompt": "import this", "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
        call = await self._intake.completion(json.dumps(body).encode())
        answer = Answer(call, self._tokenizer, self._submission, self.metrics)
        await answer.start()
        return CompletionRenderer(answer)


def step(renderers: list[Renderer], position: int, serial: int) -> bytes:
    """The message of one step: a token of each."""
    last = "length" if position == NUM_TOKENS - 1 else None
    chunks = [
        TokenChunk(SequenceKey(r.call.request_id), position, [FIRST_TOKEN + position], last)  # type: ignore[arg-type]
        for r in renderers
    ]
    return encode(TokenBatch(worker="d", serial=serial, chunks=chunks))


async def whole(desk: Desk, width: int) -> float:
    """Seconds a token from the message to the server's send()."""
    renderers = [await desk.begin() for _ in range(width)]

    async def send(message: Any) -> None:
        pass

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "state": {"request_id": "r"}}
    tasks = [asyncio.create_task(StreamResponse(r, 600.0)(scope, receive, send)) for r in renderers]
    await asyncio.sleep(0)
    steps = [Delivery("s", step(renderers, i, i + 1)) for i in range(NUM_TOKENS)]
    began = time.process_time()
    for delivery in steps:
        await desk.streams._on_batch(delivery)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return (time.process_time() - began) / NUM_TOKENS / width


async def stages(desk: Desk, width: int) -> dict[str, float]:
    """Seconds a token in each stage."""
    renderers = [await desk.begin() for _ in range(width)]
    spent = dict.fromkeys(
        ("decode the message", "find the sequence, note the token", "to text", "to JSON", "to SSE"), 0.0
    )
    for i in range(NUM_TOKENS):
        data = step(renderers, i, i + 1)
        marks = [time.perf_counter()]
        decode_as(TokenBatch, data)
        marks.append(time.perf_counter())
        await desk.streams._on_batch(Delivery("s", data))
        marks.append(time.perf_counter())
        gains = [await r.answer._inbox.take() for r in renderers]
        marks.append(time.perf_counter())
        pieces = [[r.answer._feed(g) for g in gained] for r, gained in zip(renderers, gains, strict=True)]
        marks.append(time.perf_counter())
        chunks = [r.chunks(made) for r, made in zip(renderers, pieces, strict=True)]  # type: ignore[arg-type]
        marks.append(time.perf_counter())
        for made in chunks:
            events(made)
        marks.append(time.perf_counter())
        decoded, noted, _, fed, rendered, framed = (b - a for a, b in itertools.pairwise(marks))
        for name, seconds in zip(spent, (decoded, noted - decoded, fed, rendered, framed), strict=True):
            spent[name] += seconds / NUM_TOKENS / width
    for r in renderers:
        r.answer.close()
    return spent


async def of_server() -> float:
    """The layers around send(): the request's id, and uvicorn's, with a transport that throws the bytes away."""
    transport = SimpleNamespace(write=lambda data: None, is_closing=lambda: False)
    cycle = RequestResponseCycle.__new__(RequestResponseCycle)
    cycle.flow = FlowControl(transport)  # type: ignore[arg-type]
    cycle.transport = transport  # type: ignore[assignment]
    cycle.disconnected = cycle.response_complete = False
    cycle.response_started = cycle.chunked_encoding = True
    cycle.scope = {"method": "POST"}  # type: ignore[typeddict-item]
    seconds = 0.0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal seconds
        began = time.perf_counter()
        for _ in range(200):
            await send({"type": "http.response.body", "body": b"x" * FRAME_BYTES, "more_body": True})
        seconds = (time.perf_counter() - began) / 200

    await RequestIds(app)({"type": "http", "headers": []}, None, cycle.send)  # type: ignore[arg-type]
    return seconds


def read_all(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


class Wire:
    """A TCP connection over loopback to a process that waits in recv(): sending wakes it, as it would a client."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._sender = socket.create_connection(server.getsockname())
            receiver, _ = server.accept()
        self._sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._process = multiprocessing.get_context("fork").Process(target=read_all, args=(receiver,), daemon=True)
        self._process.start()
        receiver.close()

    def seconds(self) -> float:
        """CPU of one send, its share of the kernel's work included."""
        began = time.process_time()
        for _ in range(200):
            self._sender.send(b"x" * FRAME_BYTES)
            time.sleep(0.0001)  # the reader is asleep again, as it is between two tokens
        paused = time.process_time() - began
        began = time.process_time()
        for _ in range(200):
            time.sleep(0.0001)
        return (paused - (time.process_time() - began)) / 200

    def close(self) -> None:
        self._process.kill()
        self._process.join(5)
        self._sender.close()


def timed(function: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - began) / times


async def measured(desk: Desk, width: int, rounds: int, wire: Wire) -> dict[str, float]:
    """us a token, by stage: the least of the rounds."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        row = await stages(desk, width)
        row["of which metrics"] = timed(lambda: desk.metrics.gap(0.013, 1), 200)
        row["whole, bytes to send()"] = await whole(desk, width)
        row["server: request id, chunk's frame"] = await of_server()
        row["the kernel's send"] = wire.seconds()
        for name, seconds in row.items():
            found.setdefault(name, []).append(1e6 * seconds)
    return {name: min(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    wire = Wire()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        desk = Desk(ModelTokenizer.from_folder(make_model(Path(folder))))
        by_width = {width: runner.run(measured(desk, width, rounds, wire)) for width in (1, 16)}
    wire.close()
    print("| us a token | steps of 1 | steps of 16 |\n|---|---|---|")
    for name in by_width[1]:
        print(f"| {name} | {by_width[1][name]:.2f} | {by_width[16][name]:.2f} |")


if __name__ == "__main__":
    main()
