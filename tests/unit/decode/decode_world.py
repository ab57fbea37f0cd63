"""A decode worker with an engine that computes nothing, leases that nobody writes under and a store that does as a test
says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.kv.block_pool import BlockPool
from distserve.kv.hashing import block_hashes, pack
from distserve.kv.layout import fingerprint
from distserve.kv.lease import LeaseTable
from distserve.messages import (
    LeaseGrant,
    LeaseRequest,
    SamplingParams,
    SequenceKey,
    SequenceState,
    SubmitRequest,
    TokenBatch,
    TokenChunk,
    decode_as,
    encode,
)
from distserve.transport.base import Commit
from distserve.transport.select import Choice
from distserve.worker.engine_thread import EngineThread
from distserve.worker.fetching import Fetching
from distserve.worker.figures import WorkerFigures
from distserve.worker.outbox import Outbox
from distserve.worker.prefixes import Prefixes
from distserve_decode.limits import Limits
from distserve_decode.record import Record
from distserve_decode.reservations import Reservations
from distserve_decode.scheduler import Scheduler
from distserve_decode.turns import Turns
from distserve_decode.worker import DecodeWorker
from tests.unit.decode.store_side import ScriptedStore
from tests.unit.decode.test_reservations import SlowFence, ask
from tests.unit.worker.fakes import EOS, LAYOUT, FakeRunner
from tests.waiting import until


def names_of(token_ids: list[int], salt: str = "") -> list[bytes]:
    """Of its full blocks."""
    return block_hashes(token_ids, LAYOUT.block_size, fingerprint(LAYOUT), salt)


def ask_for(name: str, prompt: list[int], salt: str = "", wait_s: float = 5.0) -> LeaseRequest:
    """A lease for this prompt, with its blocks' names."""
    request = ask(name, 1, wait_s)
    return msgspec.structs.replace(request, num_tokens=len(prompt), hashes=pack(names_of(prompt, salt)))


class World:
    def __init__(
        self,
        num_blocks: int = 20,
        *,
        colocated: bool = True,
        max_local: int = 0,
        keep: bool = True,
        chunk_tokens: int = 32,
        max_num_seqs: int = 8,
        max_waiting: int = 8,
        block_bytes: int = 0,
    ) -> None:
        self.runner = FakeRunner()
        self.pool = BlockPool(num_blocks + 1, keep=keep)
        self.bus = MemoryBus(MemoryHub())
        self.outbox = Outbox(self.bus, "d", forget_s=60)
        self.figures = WorkerFigures("decode", "m", self.pool)
        self.engine = EngineThread()
        self.store = ScriptedStore(self.pool)
        self.prefixes = Prefixes(self.pool, LAYOUT, keep=keep)
        self.scheduler = Scheduler(
            self.pool, self.prefixes, block_size=16, max_num_seqs=max_num_seqs, chunk_tokens=chunk_tokens
        )
        turns = Turns(self.scheduler, by_class=True)
        self.reservations = Reservations(
            self.pool,
            LeaseTable(),
            {"shm": SlowFence()},
            LAYOUT,
            choose=lambda offered, kinds, host, num_bytes: Choice(offered[0], ""),
            growth_blocks=0,
            ttl_s=60,
            may_grant=lambda: self.worker.may_grant(),
            on_freed=lambda: self.worker.on_freed(),
            beside=turns,
        )
        turns.first_lease = lambda: self.reservations.first_waiting
        self.scheduler.may_begin = turns.may_begin
        self.worker = DecodeWorker(
            runner=self.runner,  # type: ignore[arg-type]
            engine=self.engine,
            pool=self.pool,
            scheduler=self.scheduler,
            prefixes=self.prefixes,
            fetching=Fetching(
                self.pool,
                self.prefixes,
                self.store,  # type: ignore[arg-type]
                min_blocks=1,
                timeout_s=20,
                num_spoken_for=lambda: self.scheduler.num_spoken_for,
            ),
            store=self.store,  # type: ignore[arg-type]
            reservations=self.reservations,
            outbox=self.outbox,
            record=Record(self.figures, "d"),
            limits=Limits(
                (EOS,),
                max_model_len=320,
                max_waiting=max_waiting,
                block_size=16,
                colocated=colocated,
                max_local_prefill_tokens=max_local,
                block_bytes=block_bytes,
            ),
        )
        self.chunks: list[TokenChunk] = []

    async def on_batch(self, delivery: Delivery) -> None:
        self.chunks += decode_as(TokenBatch, delivery.data).chunks

    def tokens(self, name: str) -> list[int]:
        out: dict[int, int] = {}
        for c in self.chunks:
            if c.key.request_id == name:
                out |= {c.start + i: t for i, t in enumerate(c.token_ids)}
        return [out[i] for i in sorted(out)]

    def end(self, name: str) -> TokenChunk | None:
        return next((c for c in self.chunks if c.key.request_id == name and c.finish_reason), None)

    async def hand_over(self, name: str, num_tokens: int = 20, **state: Any) -> LeaseGrant:
        """A prefill worker's part: lease, then commit."""
        grant = await self.worker.lease(ask(name, -(-num_tokens // 16)))
        self.commit(name, grant, num_tokens, **state)
        return grant

    async def hand_over_prompt(self, name: str, prompt: list[int], *, salt: str = "", **state: Any) -> LeaseGrant:
        """As hand_over(), of a prompt whose blocks may be here already."""
        grant = await self.worker.lease(ask_for(name, prompt, salt))
        token_ids = [*prompt, 100]
        self.commit(name, grant, len(prompt), **({"token_ids": token_ids, "cache_salt": salt} | state))
        return grant

    def submit(self, name: str, prompt: list[int], *, max_tokens: int = 8, **more: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=more.pop("prompt_logprobs", None))
        self.worker.submit(
            SubmitRequest(
                key=SequenceKey(name),
                model="m",
                gateway="g",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                **more,
            )
        )

    async def ended(self, *names: str) -> None:
        await until(lambda: all(self.end(name) is not None for name in names), what=f"{names} have ended")

    def cached(self, name: str) -> int:
        """Prompt tokens that its first chunk says were not computed."""
        return next(c.num_cached_tokens for c in self.chunks if c.key.request_id == name and c.start == 0)

    def found(self, token_ids: list[int], salt: str = "") -> int:
        """Blocks of these tokens that can be found in the pool."""
        return len(self.pool.find(names_of(token_ids, salt)))

    def commit(self, name: str, grant: LeaseGrant, num_tokens: int = 20, max_tokens: int = 8, **more: Any) -> None:
        state: dict[str, Any] = {
            "key": SequenceKey(name),
            "model": "m",
            "gateway": "g",
            "prefill_worker": "p",
            "token_ids": [7] * num_tokens + [100],
            "num_prompt_tokens": num_tokens,
            "num_computed_tokens": num_tokens,
            "sampling": SamplingParams(max_tokens=max_tokens),
            "cache_salt": "",
        }
        encoded = encode(SequenceState(**state | more))
        self.worker.on_commit(Commit(grant.region.lease_id, grant.region.epoch, encoded, 0))

    async def idle(self) -> None:
        await until(lambda: self.worker.load().num_running == 0 and self.pool.num_used == 0, what="all blocks are free")
        self.worker.check()


@asynccontextmanager
async def running(w: World, reap_s: float = 0.02) -> AsyncIterator[World]:
    await w.bus.subscribe(subjects.stream("g"), w.on_batch, inline=True)
    tasks = [asyncio.create_task(w.worker.run()), asyncio.create_task(w.worker.reap(reap_s))]
    w.worker.status = "ok"
    yield w
    w.runner.gate.set()
    for t in tasks:
        t.cancel()
    await asyncio.wait(tasks)
    w.engine.close()
