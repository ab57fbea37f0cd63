"""A closed loop of streamed completions: every client has one connection and one request at a time.

Plain sockets on one event loop and a protocol that only counts events: HTTP client libraries cost more for a token
than the servers that are measured here.
"""

import asyncio
import itertools
import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.control_plane_cpu import Usage, busy_s, own_s

_WORDS = "def return self import class for if else None True name value path data list dict error raise with open"
_OK, _EVENT, _END = b"HTTP/1.1 200", b"data: {", b"0\r\n\r\n"
_TAIL = len(_EVENT) - 1  # bytes of a read that may begin an event which the next one completes
NUM_BODIES = 2_000  # different prompts, so that no side finds one in a cache of prefixes
DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """`num_tokens` are asked of each request, whose prompt has `num_words` words (about as many tokens)."""

    num_clients: int
    num_tokens: int
    num_words: int = 128
    warm_s: float = 0.7
    measure_s: float = 2.5
    quick_ack: bool = False  # acknowledge each packet at once: what a server with Nagle's algorithm would wait for


@dataclass(slots=True)
class Answered:
    """One request, seconds. `gap_s`: mean time from one event to the next."""

    at: float
    ttft_s: float
    gap_s: float
    whole_s: float
    num_events: int


@dataclass(slots=True)
class Measured:
    """What came of one load on one side. CPU is in seconds, over `seconds` of wall time."""

    load: Load
    seconds: float = 0.0
    answers: list[Answered] = field(default_factory=list)
    num_failed: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)  # by process
    client_s: float = 0.0
    foreign_cores: float = 0.0  # kept busy by processes of neither

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.requests_per_s * self.load.num_tokens

    @property
    def cpu_us_per_request(self) -> float:
        return 1e6 * sum(self.cpu_s.values()) / max(1, len(self.answers))

    @property
    def tokens_per_cpu_s(self) -> float:
        return len(self.answers) * self.load.num_tokens / max(1e-9, sum(self.cpu_s.values()))

    def ttft_ms(self, quantile: float) -> float:
        ordered = sorted(a.ttft_s for a in self.answers)
        return 1e3 * ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else float("nan")


def bodies(model: str, load: Load, seed: int) -> Iterator[bytes]:
    """Whole HTTP requests, over and over."""
    rng, words = random.Random(seed), _WORDS.split()
    made = []
    for _ in range(NUM_BODIES):
        prompt = " ".join(rng.choices(words, k=load.num_words))
        body = json.dumps(
            {"model": model, "prompt": prompt, "max_tokens": load.num_tokens, "stream": True, "ignore_eos": True}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        made.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    return itertools.cycle(made)


class _Client(asyncio.Protocol):
    """Sends the next request when an answer is whole, until the run has ended."""

    def __init__(self, run: "_Run") -> None:
        self._run = run
        self._begun = self._first = self._last = 0.0
        self._num_events = 0
        self._head = self._tail = b""
        self._ok = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next()

    def _next(self) -> None:
        if self._run.ended:
            self._transport.close()
            return
        self._num_events, self._tail, self._head = 0, b"", b""
        self._acknowledge()
        self._begun = time.perf_counter()
        self._transport.write(next(self._run.requests))

    def _acknowledge(self) -> None:
        if self._run.load.quick_ack:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._acknowledge()
        if len(self._head) < len(_OK):
            self._head += data[: len(_OK)]
            self._ok = self._head.startswith(_OK[: len(self._head)])
        seen = self._tail + data
        num = seen.count(_EVENT)
        if num:
            if not self._num_events:
                self._first = now
            self._num_events += num
            self._last = now
        self._tail = seen[-_TAIL:]
        if seen.endswith(_END) or not self._ok:
            self._answered(now)

    def _answered(self, now: float) -> None:
        num = self._num_events
        if self._ok and num >= self._run.load.num_tokens:
            gap = (self._last - self._first) / max(1, num - 1)
            self._run.answers.append(Answered(now, self._first - self._begun, gap, now - self._begun, num))
        else:
            self._run.num_failed += 1
            if not self._ok:  # an error without a body of chunks: start afresh on a new one
                self._run.num_lost += 1
                self._transport.abort()
                return
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self._run.num_open -= 1
        if not self._run.num_open:
            self._run.all_closed.set()


class _Run:
    def __init__(self, load: Load, requests: Iterator[bytes]) -> None:
        self.load = load
        self.requests = requests
        self.answers: list[Answered] = []
        self.num_failed = self.num_lost = 0
        self.num_open = load.num_clients
        self.ended = False
        self.all_closed = asyncio.Event()


async def measure(
    host: str, ports: Sequence[int], model: str, load: Load, pids: dict[str, int], seed: int = 1
) -> Measured:
    """Run it, the clients spread over the ports. `pids`: the side's processes, whose CPU is summed.

    Raises RuntimeError if a client was refused."""
    run = _Run(load, bodies(model, load, seed))
    loop = asyncio.get_running_loop()
    for i in range(load.num_clients):
        await loop.create_connection(lambda: _Client(run), host, ports[i % len(ports)])
    await asyncio.sleep(load.warm_s)
    usage = {name: Usage(pid) for name, pid in pids.items()}
    began, busy, own = time.perf_counter(), busy_s(), own_s()
    await asyncio.sleep(load.measure_s)
    ended = time.perf_counter()
    measured = Measured(load, ended - began)
    measured.cpu_s = {name: u.spent_s() for name, u in usage.items()}
    measured.client_s = own_s() - own
    others = busy_s() - busy - measured.client_s - sum(measured.cpu_s.values())
    measured.foreign_cores = max(0.0, others / measured.seconds)
    run.ended = True
    measured.answers = [a for a in run.answers if began <= a.at < ended]
    async with asyncio.timeout(DRAIN_S):
        await run.all_closed.wait()
    measured.num_failed = run.num_failed
    if run.num_lost:
        raise RuntimeError(f"{run.num_lost} of {load.num_clients} clients were refused")
    return measured


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
