"""Workers without a model: they speak the workers' protocol over a real bus and say what a script tells them."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from starlette.types import ASGIApp

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.errors import DistServeError, MalformedMessage
from distserve.kv.hashing import block_hashes
from distserve.kv.layout import fingerprint
from distserve.messages import (
    EVENT_HASH_BYTES,
    KVEvents,
    KVLayout,
    KVSnapshot,
    KVSnapshotRequest,
    Load,
    Message,
    Role,
    SequenceKey,
    SequenceStatus,
    SubmitReply,
    SubmitRequest,
    Timings,
    TokenLogprob,
    WorkerInfo,
    WorkerStatus,
    encode,
)
from distserve.worker.door import Door
from distserve.worker.membership import Membership
from distserve.worker.outbox import Outbox
from distserve.worker.store.snapshots import Snapshots
from distserve_gateway.app import build_app
from distserve_gateway.chat_template import ChatTemplate
from distserve_gateway.gateway import Gateway, GatewayOptions
from distserve_gateway.held_blocks import words
from distserve_gateway.tokenizing import ModelTokenizer
from tests.unit.gateway import vocabularies

MODEL = "tiny"
MAX_MODEL_LEN = 256
LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, rope="{}")
TOKENIZER = ModelTokenizer(vocabularies.byte_level())

Script = Callable[[SubmitRequest], list[int]]


def says(text: str, *, ends: bool = True) -> Script:
    """Always this text, and eos if it `ends`."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return lambda request: ids + [vocabularies.EOS_ID] * ends


def names(token_ids: list[int], cache_salt: str = "") -> list[bytes]:
    """What events say of the full blocks of these tokens."""
    hashes = block_hashes(token_ids, LAYOUT.block_size, fingerprint(LAYOUT), cache_salt)
    return [name[:EVENT_HASH_BYTES] for name in hashes]


class ScriptedBlocks:
    """The blocks that a worker says it holds: an event publisher that can lose, double and hold back its messages."""

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self.serial = 0
        self.page_size = 1000
        self.asked: list[int] = []  # offsets of the snapshots asked for
        self.before_page: Callable[[int], Awaitable[None]] | None = None
        self._bus = bus
        self._worker_id = worker_id
        self._held: dict[bytes, None] = {}
        self._snapshots = Snapshots(lambda: b"".join(self._held))
        self.forgets = False  # keeps no moment from one page to the next

    def change(self, stored: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> KVEvents:
        """The message that says so, not sent."""
        stored, removed = list(stored), list(removed)
        for name in removed:
            del self._held[name]
        self._held |= dict.fromkeys(stored)
        self.serial += 1
        return KVEvents(worker=self._worker_id, serial=self.serial, stored=b"".join(stored), removed=b"".join(removed))

    async def send(self, *messages: KVEvents) -> None:
        for message in messages:
            await self._bus.publish(subjects.kv_events(), encode(message))

    async def store(self, *stored: bytes) -> None:
        await self.send(self.change(stored))

    @property
    def numbers(self) -> dict[int, None]:
        return dict.fromkeys(words(b"".join(self._held)))

    async def answer(self, message: Message) -> Message:
        if not isinstance(message, KVSnapshotRequest):
            raise MalformedMessage(f"no answer to {type(message).__name__}")
        self.asked.append(message.offset)
        if self.before_page is not None:
            await self.before_page(message.offset)
        if self.forgets:
            self._snapshots.drop_old(math.inf)
        serial, packed = self._snapshots.of(message.serial, self.serial, time.monotonic())
        start, size = message.offset * EVENT_HASH_BYTES, self.page_size * EVENT_HASH_BYTES
        total = len(packed) // EVENT_HASH_BYTES
        return KVSnapshot(worker=self._worker_id, serial=serial, total=total, stored=packed[start : start + size])


@dataclass(eq=False)
class ScriptedWorker:
    """A worker of either role. `open_gate` lets tokens from position `gate_at` on pass; before, they wait there."""

    bus: Bus
    role: Role
    worker_id: str
    script: Script
    peers: "dict[str, ScriptedWorker]" = field(default_factory=dict)
    colocated: bool = False
    layout: KVLayout = LAYOUT
    gate_at: int | None = None
    refusal: DistServeError | None = None
    redirect: str = ""  # hand over to this decode worker instead of the one that was asked for
    status: WorkerStatus = "ok"
    reasons: list[str] = field(default_factory=list)
    load: Load = field(default_factory=lambda: Load(free_blocks=100, total_blocks=100))
    num_cached: Callable[[SubmitRequest], int] = lambda request: 0
    tells_blocks: bool = True

    def __post_init__(self) -> None:
        self.blocks = ScriptedBlocks(self.bus, self.worker_id)
        self.outbox = Outbox(self.bus, self.worker_id, forget_s=60)
        self.submitted: list[SubmitRequest] = []
        self.cancelled: list[SequenceKey] = []
        self.gate = asyncio.Event()
        self._tasks: dict[SequenceKey, asyncio.Task[None]] = {}
        self._stack = AsyncExitStack()

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            model=MODEL,
            status=self.status,
            reasons=self.reasons,
            layout=self.layout,
            transports=["shm", "tcp"],
            transports_in_use=["shm"],
            http_url=f"http://127.0.0.1/{self.worker_id}",
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[vocabularies.EOS_ID],
            colocated=self.colocated,
            load=self.load,
        )

    async def __aenter__(self) -> Self:
        door = Door(self, self.outbox, self.blocks.answer if self.tells_blocks else None)
        await self._stack.enter_async_context(await self.bus.serve(subjects.worker(self.role, self.worker_id), door))
        await self._stack.enter_async_context(Membership(self.bus.registry(), self.info, beat_s=0.5))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stop_all()
        await self._stack.aclose()

    def _stop_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def die(self) -> None:
        """As kill -9: nothing is said, the connection is gone, the registry entry expires."""
        self._stop_all()
        await self.bus.close()

    # ------------------------------------------------------------ the protocol

    def submit(self, request: SubmitRequest) -> SubmitReply:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)
        self._open(request)
        self._tasks[request.key] = asyncio.create_task(self._run(request, 0))
        return SubmitReply()

    def adopt(self, request: SubmitRequest) -> None:
        self.submitted.append(request)
        self._open(request)
        self._tasks[request.key] = asyncio.create_task(self._run(request, 0))

    def _open(self, request: SubmitRequest) -> None:
        first = len(request.token_ids) - request.num_prompt_tokens
        self.outbox.open(request.key, request.gateway, first=first, with_logprobs=request.sampling.logprobs is not None)

    def status_of(self, key: SequenceKey, position: int) -> SequenceStatus:
        if key not in self.outbox:
            return SequenceStatus(key, "unknown")
        phase = "finished" if self.outbox.is_finished(key) else "decode" if self.role == "decode" else "prefill"
        return SequenceStatus(key, phase, self.outbox.since(key, position))

    def cancel(self, key: SequenceKey, error: DistServeError | None = None) -> None:
        self.cancelled.append(key)
        self.outbox.drop([key])
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    async def _run(self, request: SubmitRequest, start: int) -> None:
        tokens = self.script(request)[: request.sampling.max_tokens]
        stops = {vocabularies.EOS_ID, *request.sampling.stop_token_ids}
        for i, token in enumerate(tokens):
            if self.gate_at is not None and i >= self.gate_at:
                await self.gate.wait()
            prompt_logprobs = None
            if i == 0 and request.sampling.prompt_logprobs is not None:
                prompt_logprobs = [_logprob(t, request.sampling.prompt_logprobs) for t in request.token_ids[1:]]
            logprob = None if request.sampling.logprobs is None else _logprob(token, request.sampling.logprobs)
            self.outbox.append(
                request.key,
                token,
                logprob,
                prompt_logprobs=prompt_logprobs,
                num_cached_tokens=self.num_cached(request) if i == 0 else 0,
            )
            if token in stops or i == len(tokens) - 1:
                timings = Timings(
                    queue_s=0.1,
                    prefill_s=0.2,
                    transfer_s=0.3,
                    decode_s=0.4,
                    kv_bytes=512,
                    transport="shm",
                    traffic_class=request.traffic_class,
                )
                self.outbox.finish(request.key, "stop" if token in stops else "length", timings=timings)
                break
            if self.role == "prefill":
                await self.outbox.flush()
                self.peers[self.redirect or request.decode_worker or ""].adopt(request)
                self.outbox.drop([request.key])
                return
            await self.outbox.flush()
            await asyncio.sleep(0)
        await self.outbox.flush()


def _logprob(token: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, tuple((i, -0.5 - i) for i in range(num_top)))


class Cluster:
    """One prefill and one decode worker by default, and a gateway, each with a bus of its own."""

    def __init__(self, connect: Callable[[str], Any]) -> None:
        self._connect = connect
        self._stack = AsyncExitStack()
        self.workers: dict[str, ScriptedWorker] = {}
        self.gateway: Gateway
        self.app: ASGIApp

    async def add(self, role: Role, worker_id: str, script: Script, **options: Any) -> ScriptedWorker:
        bus = await self._stack.enter_async_context(await self._connect(worker_id))
        worker = ScriptedWorker(bus, role, worker_id, script, self.workers, **options)
        self.workers[worker_id] = worker
        await self._stack.enter_async_context(worker)
        return worker

    async def start_gateway(self, *, template: ChatTemplate | None = None, **options: Any) -> Gateway:
        self.gateway_bus = await self._stack.enter_async_context(await self._connect("gateway"))
        settings: dict[str, Any] = {
            "gateway_id": "gw",
            "model": MODEL,
            "context_length": MAX_MODEL_LEN,
            "submit_timeout_s": 1.0,
            "ttl_s": self.gateway_bus.registry().ttl_s,
        }
        template = template or ChatTemplate(vocabularies.CHATML)
        self.gateway = Gateway(self.gateway_bus, TOKENIZER, template, GatewayOptions(**(settings | options)))
        await self._stack.enter_async_context(self.gateway)
        self.app = build_app(self.gateway)
        return self.gateway

    async def see(self, *worker_ids: str) -> None:
        """Wait until the gateway's snapshot has these."""
        await self.gateway.watch.wait_for(lambda snapshot: set(worker_ids) <= snapshot.keys(), 5.0)

    async def close(self) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """HTTP straight into the application. Responses come whole."""
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=20) as client:
            yield client


def memory_cluster(*, registry_ttl_s: float = 2.5, max_payload_bytes: int = 1024 * 1024) -> Cluster:
    hub = MemoryHub(max_payload_bytes=max_payload_bytes)

    async def connect(name: str) -> MemoryBus:
        return MemoryBus(hub, name=name, registry_ttl_s=registry_ttl_s)

    cluster = Cluster(connect)
    cluster.hub = hub  # type: ignore[attr-defined]
    return cluster


@asynccontextmanager
async def serving(script: Script, **options: Any) -> AsyncIterator[Cluster]:
    """prefill `p0`, decode `d0` and a gateway that has seen both, over one memory hub."""
    cluster = memory_cluster()
    try:
        await cluster.add("decode", "d0", script)
        await cluster.add("prefill", "p0", script)
        await cluster.start_gateway(**options)
        await cluster.see("p0", "d0")
        yield cluster
    finally:
        await cluster.close()
