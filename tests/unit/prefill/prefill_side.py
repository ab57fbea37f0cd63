"""A prefill worker with an engine that computes nothing, hand-overs and a store that do as a test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.errors import DistServeError
from distserve.kv.block_pool import BlockPool
from distserve.messages import (
    SamplingParams,
    SequenceKey,
    SequenceState,
    SubmitReply,
    SubmitRequest,
    TokenBatch,
    TokenChunk,
    decode_as,
)
from distserve.transport.base import Span
from distserve.worker.engine_thread import EngineThread
from distserve.worker.fetching import Fetching
from distserve.worker.figures import WorkerFigures
from distserve.worker.outbox import Outbox
from distserve.worker.pass_model import PassModel
from distserve.worker.prefixes import Prefixes
from distserve_prefill.handoff import Shipped
from distserve_prefill.job import Job
from distserve_prefill.limits import Limits
from distserve_prefill.recorder import Recorder
from distserve_prefill.scheduler import Scheduler
from distserve_prefill.worker import PrefillWorker
from tests.unit.prefill.clockwork import WEIGHTS
from tests.unit.prefill.store_side import ScriptedStore
from tests.unit.worker.fakes import EOS, LAYOUT, FakeRunner
from tests.waiting import until


class ScriptedHandoff:
    """Commits when `may_commit` is set, or fails with `error`."""

    def __init__(self) -> None:
        self.may_commit = asyncio.Event()
        self.error: DistServeError | None = None
        self.spans: list[Span] = []
        self.started = False
        self.states: list[SequenceState] = []
        self.aborted: list[str] = []

    def start(self) -> None:
        self.started = True

    def layers_ready(self, span: Span, *, awaited: bool = False) -> None:
        self.spans.append(span)

    async def commit(self, state: Callable[[], bytes]) -> Shipped:
        await self.may_commit.wait()
        if self.error is not None:
            raise self.error
        self.states.append(decode_as(SequenceState, state()))
        return Shipped("d", "shm", 1, 0.0)

    async def abort(self, reason: str) -> None:
        self.aborted.append(reason)

    def peer_gone(self, worker_id: str) -> None: ...


class World:
    def __init__(
        self,
        *,
        sample_on_decode: bool = False,
        fetch_timeout_s: float = 20.0,
        keep: bool = True,
        model: PassModel | None = None,
    ) -> None:
        self.runner = FakeRunner()
        self.pool = BlockPool(21, keep=keep)
        self.bus = MemoryBus(MemoryHub())
        self.outbox = Outbox(self.bus, "p", forget_s=60)
        self.engine = EngineThread()
        self.store = ScriptedStore()
        self.prefixes = Prefixes(self.pool, LAYOUT, keep=keep)
        self.model = PassModel() if model is None else model
        scheduler = Scheduler(
            self.pool,
            self.prefixes,
            block_size=16,
            max_batch_tokens=64,
            chunk_tokens=32,
            policy="slo",
            weights=WEIGHTS,
            model=self.model,
        )
        self.handoffs: dict[str, ScriptedHandoff] = {}
        self.figures = WorkerFigures("prefill", "m", self.pool)
        self.worker = PrefillWorker(
            runner=self.runner,  # type: ignore[arg-type]
            engine=self.engine,
            pool=self.pool,
            scheduler=scheduler,
            prefixes=self.prefixes,
            fetching=Fetching(
                self.pool,
                self.prefixes,
                self.store,  # type: ignore[arg-type]
                min_blocks=2,
                timeout_s=fetch_timeout_s,
                num_spoken_for=lambda: scheduler.num_spoken_for,
            ),
            store=self.store,  # type: ignore[arg-type]
            outbox=self.outbox,
            recorder=Recorder(self.figures, "p"),
            layout=LAYOUT,
            limits=Limits(
                (EOS,),
                max_model_len=400,
                max_waiting=3,
                span_bytes=1,
                sample_on_decode=sample_on_decode,
                hidden_dtype="float32",
            ),
            make_handoff=self.make_handoff,  # type: ignore[arg-type]
        )
        self.worker.status = "ok"
        self.chunks: list[TokenChunk] = []

    def make_handoff(self, job: Job) -> ScriptedHandoff:
        self.handoffs[job.key.request_id] = handoff = ScriptedHandoff()
        return handoff

    async def on_batch(self, delivery: Delivery) -> None:
        self.chunks += decode_as(TokenBatch, delivery.data).chunks

    def submit(self, name: str, num_tokens: int = 20, **more: Any) -> SubmitReply:
        fields: dict[str, Any] = {
            "key": SequenceKey(name),
            "model": "m",
            "gateway": "g",
            "token_ids": [7] * num_tokens,
            "num_prompt_tokens": num_tokens,
            "sampling": SamplingParams(max_tokens=8),
            "decode_worker": "d",
        }
        return self.worker.submit(SubmitRequest(**fields | more))

    def chunk(self, name: str, *, ended: bool = False) -> TokenChunk | None:
        return next(
            (c for c in self.chunks if c.key.request_id == name and (c.finish_reason is not None or not ended)), None
        )

    async def error_of(self, name: str) -> str:
        await until(lambda: self.chunk(name, ended=True) is not None, what=f"{name} ends")
        chunk = self.chunk(name, ended=True)
        assert chunk is not None
        assert chunk.error is not None
        return chunk.error[0] + ": " + chunk.error[1]

    async def idle(self) -> None:
        def nothing_left() -> bool:
            load = self.worker.load()
            return load.num_running == load.num_waiting == self.pool.num_used == 0

        await until(nothing_left, what="no sequence is here and all blocks are free")
        self.worker.check()


@asynccontextmanager
async def running(w: World, reap_s: float = 0.02) -> AsyncIterator[World]:
    await w.bus.subscribe(subjects.stream("g"), w.on_batch, inline=True)
    tasks = [asyncio.create_task(w.worker.run()), asyncio.create_task(w.worker.reap(reap_s))]
    yield w
    w.runner.gate.set()
    for t in tasks:
        t.cancel()
    await asyncio.wait(tasks)
    w.engine.close()
