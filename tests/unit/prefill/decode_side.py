"""Decode workers to hand over to: real leases, real transports, real messages; only nothing is computed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import numpy as np

from distserve import telemetry
from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.errors import PeerLost
from distserve.kv.block_pool import BlockPool
from distserve.kv.lease import LeaseTable
from distserve.messages import (
    LeaseGrant,
    LeaseRequest,
    Message,
    RemoteRegion,
    SamplingParams,
    SequenceKey,
    SequenceState,
    Slo,
    TrafficClass,
    decode,
    encode,
)
from distserve.transport.base import Sender, Span, Transfer, TransferFacts
from distserve.transport.factory import make_receiver, make_sender
from distserve.transport.meter import Meter
from distserve.transport.options import StreamOptions
from distserve.transport.select import choose, host_key
from distserve.worker.door import Door
from distserve.worker.engine_thread import EngineThread
from distserve.worker.fetching import Fetching
from distserve.worker.figures import WorkerFigures
from distserve.worker.in_use import InUse
from distserve.worker.outbox import Outbox
from distserve.worker.prefixes import Prefixes
from distserve_decode.limits import Limits
from distserve_decode.main import leases
from distserve_decode.record import Record
from distserve_decode.reservation import Reservation
from distserve_decode.reservations import Reservations
from distserve_decode.scheduler import Scheduler
from distserve_decode.worker import DecodeWorker
from distserve_prefill.attempts import Attempts
from distserve_prefill.fallbacks import Fallbacks
from distserve_prefill.handoff import Handoff, Shipped
from tests.contracts.transport.pools import SMALL, pool
from tests.unit.decode.store_side import ScriptedStore
from tests.unit.worker.fakes import EOS, FakeRunner
from tests.waiting import until

KEY = SequenceKey("a")
SOURCES = (3, 9, 5)  # the prompt's blocks in prefill's pool
NUM_TOKENS = 40  # they hold
MARK = 0xAB  # no block of random bytes is full of it
FAST = StreamOptions(connect_timeout_s=2, peer_timeout_s=2, abort_timeout_s=1, backoff_s=0.01, max_backoff_s=0.1)


class DecodeSide:
    """One decode worker. Its loop does not run: what it adopts stays as it came."""

    def __init__(self, worker_id: str, hub: MemoryHub, kind: str, stack: AsyncExitStack) -> None:
        self.worker_id = worker_id
        self.memory = stack.enter_context(pool(10, SMALL))
        self.pool = BlockPool(10)
        self.bus = MemoryBus(hub)
        self.heard: list[Message] = []
        self.heard_from: list[telemetry.Span] = []  # whose part each of these is
        self.in_use = InUse()
        self.before_answer: Callable[[], object] = lambda: None
        self._stack = stack
        self._outbox = Outbox(self.bus, worker_id, forget_s=60)
        engine = EngineThread()
        stack.callback(engine.close)
        prefixes, store = Prefixes(self.pool, SMALL, keep=True), ScriptedStore(self.pool)
        self.receiver = make_receiver(kind, self.memory, options=FAST)
        self.receivers = {kind: self.receiver}
        self.reservations = Reservations(
            self.pool,
            LeaseTable(),
            self.receivers,
            SMALL,
            choose=choose,
            in_use=self.in_use,
            growth_blocks=1,
            ttl_s=60,  # nothing expires in these tests: who holds a lease says that it is over
            may_grant=lambda: self.worker.may_grant(),
            on_freed=lambda: self.worker.on_freed(),
        )
        self.worker = DecodeWorker(
            runner=FakeRunner(),  # type: ignore[arg-type]
            engine=engine,
            pool=self.pool,
            scheduler=Scheduler(self.pool, prefixes, block_size=SMALL.block_size, max_num_seqs=8, chunk_tokens=32),
            prefixes=prefixes,
            fetching=Fetching(
                self.pool,
                prefixes,
                store,  # type: ignore[arg-type]
                min_blocks=1,
                timeout_s=1,
                num_spoken_for=lambda: 0,
            ),
            store=store,  # type: ignore[arg-type]
            reservations=self.reservations,
            outbox=self._outbox,
            record=Record(WorkerFigures("decode", "tiny", self.pool), self.worker_id),
            limits=Limits((EOS,), max_model_len=128, max_waiting=8, block_size=SMALL.block_size, colocated=False),
        )
        self.worker.status = "ok"

    async def start(self) -> None:
        await self.receiver.start(self.worker.on_commit, self.worker.on_lost)
        self._stack.push_async_callback(self.receiver.stop)
        door = Door(self.worker, self._outbox, also=lambda message: leases(self.worker, message))

        async def respond(delivery: Delivery) -> bytes:
            self.heard.append(decode(delivery.data))
            self.heard_from.append(telemetry.receive(delivery.headers))
            answer = await door(delivery)
            self.before_answer()
            return answer

        await self.bus.serve(subjects.worker("decode", self.worker_id), respond)

    @property
    def has_it(self) -> bool:
        return self.worker.status_of(KEY, 0).phase == "decode"

    @property
    def blocks(self) -> list[int]:
        """Those of the one lease that is granted."""
        return self.grant.lease.block_ids

    @property
    def grant(self) -> Reservation:
        [reservation] = self.reservations._granted.values()
        return reservation

    def num_heard(self, kind: type[Message]) -> int:
        return sum(isinstance(m, kind) for m in self.heard)

    async def fill(self) -> LeaseGrant:
        """Leave too little room for the prompt: another sequence has it."""
        return await self.reservations.grant(ask(self.receiver.kind, SequenceKey("other"), num_tokens=6 * 16))

    def empty(self, filling: LeaseGrant) -> None:
        self.reservations.release(filling.region.lease_id, filling.region.epoch, "test")

    def drop_adopted(self) -> None:
        self.worker.cancel(KEY)

    async def holds_nothing(self) -> None:
        """No lease, nobody waiting, every block free, and that without any time-out."""
        await until(lambda: len(self.reservations) == 0 and self.pool.num_used == 0, 5, f"{self.worker_id} is empty")
        self.worker.check()


def ask(
    kind: str, key: SequenceKey = KEY, num_tokens: int = NUM_TOKENS, wait_s: float = 20.0, slo: Slo = Slo()
) -> LeaseRequest:
    return LeaseRequest(
        key=key,
        prefill_worker="p",
        num_tokens=num_tokens,
        layout=SMALL,
        transports=[kind],
        host_key=host_key(),
        wait_s=wait_s,
        slo=slo,
    )


def state() -> bytes:
    return encode(
        SequenceState(
            key=KEY,
            model="m",
            gateway="g",
            prefill_worker="p",
            token_ids=[7] * NUM_TOKENS + [100],
            num_prompt_tokens=NUM_TOKENS,
            num_computed_tokens=NUM_TOKENS,
            sampling=SamplingParams(max_tokens=8),
            cache_salt="",
        )
    )


def layers(start: int = 0, stop: int = SMALL.num_layers) -> list[Span]:
    return [Span(i, i + 1, SOURCES, (0, 1, 2)) for i in range(start, stop)]


class NotingTransfer(Transfer):
    """A real one that remembers what was written, and whose end a test can hold up."""

    def __init__(self, real: Transfer, sender: NotingSender) -> None:
        self._real = real
        self._sender = sender
        self.written: list[Span] = []
        self.awaited: list[Span] = []  # of these: the ones that decode waits for

    @property
    def failure(self) -> Exception | None:  # type: ignore[override]
        return self._real.failure

    @property
    def facts(self) -> TransferFacts:
        return self._real.facts

    def write(self, spans: Sequence[Span], *, awaited: bool = False) -> None:
        self.written += spans
        self.awaited += spans if awaited else ()
        self._real.write(spans, awaited=awaited)

    async def commit(self, state: bytes, *, timeout_s: float) -> int:
        moved = await self._real.commit(state, timeout_s=timeout_s)
        if self._sender.lose_answers:
            self._sender.lose_answers -= 1
            raise PeerLost("the connection broke while the answer was on its way")
        return moved

    async def abort(self, reason: str) -> None:
        self._sender.aborting.set()
        await self._sender.may_abort.wait()
        await self._real.abort(reason)
        self._sender.num_aborted += 1


class NotingSender(Sender):
    def __init__(self, real: Sender) -> None:
        self.kind = real.kind
        self._real = real
        self.transfers: list[NotingTransfer] = []
        self.lose_answers = 0  # commits that work and look as if they had not
        self.aborting = asyncio.Event()
        self.may_abort = asyncio.Event()
        self.may_abort.set()
        self.num_aborted = 0

    async def open(
        self, region: RemoteRegion, *, timeout_s: float, traffic_class: TrafficClass = "prefill", peer: str = ""
    ) -> Transfer:
        opened = await self._real.open(region, timeout_s=timeout_s, traffic_class=traffic_class, peer=peer)
        transfer = NotingTransfer(opened, self)
        self.transfers.append(transfer)
        return transfer

    async def stop(self) -> None:
        await self._real.stop()


class World:
    """A prefill worker's pool and sender, and decode workers "A" and "B", asked in this order."""

    def __init__(self, kind: str, stack: AsyncExitStack) -> None:
        self.kind = kind
        self._stack = stack
        self.hub = MemoryHub()
        self.bus = MemoryBus(self.hub)
        self.source = stack.enter_context(pool(16, SMALL, seed=1))
        self.a = DecodeSide("A", self.hub, kind, stack)
        self.b = DecodeSide("B", self.hub, kind, stack)
        self.order = ["A", "B"]
        self.fallbacks = Fallbacks([kind])
        self.in_use = InUse()
        self.meter = Meter()
        self.attempts = Attempts()  # of the next hand-over

    async def start(self) -> World:
        real = make_sender(self.kind, self.source, sender_id="p", options=FAST, meter=self.meter)
        self.sender = NotingSender(real)
        self._stack.push_async_callback(self.sender.stop)
        self.senders: dict[str, Sender] = {self.kind: self.sender}
        await self.a.start()
        await self.b.start()
        return self

    def handoff(self, wait_s: float = 20.0, give_up_s: float = 5.0, slo: Slo = Slo()) -> Handoff:
        handoff = Handoff(
            self.bus,
            ask(self.kind, wait_s=wait_s, slo=slo),
            lambda tried: next((w for w in self.order if w not in tried), None),
            lambda kind: self.senders[kind],
            self.fallbacks,
            self.in_use,
            connect_timeout_s=2,
            commit_timeout_s=5,
            give_up_s=give_up_s,
            attempts=self.attempts,
        )
        handoff.start()
        return handoff

    async def compute(self, handoff: Handoff, spans: list[Span]) -> None:
        """As the pass of a prompt's last chunk reports them on the engine's thread."""
        for span in spans:
            ready = functools.partial(handoff.layers_ready, span, awaited=span.layer_stop == SMALL.num_layers)
            await asyncio.get_running_loop().run_in_executor(None, ready)

    def has_come(self, side: DecodeSide, blocks: list[int], spans: list[Span]) -> bool:
        return all(
            np.array_equal(side.memory.blocks[blocks, s.layer_start], self.source.blocks[list(SOURCES), s.layer_start])
            for s in spans
        )

    def overwrite(self) -> None:
        """The source blocks have a new owner."""
        self.source.blocks[list(SOURCES)] = MARK

    def saw_overwriting(self, side: DecodeSide) -> bool:
        return bool((side.memory.blocks == MARK).all(axis=2).any())

    async def adopted(self, side: DecodeSide, shipped: Shipped) -> None:
        """That worker, and no other, has the sequence, with every byte of it."""
        assert shipped.decode_worker == side.worker_id
        assert side.has_it
        live = side.worker._live.get(KEY)
        assert live is not None
        assert self.has_come(side, live.sequence.block_table[: len(SOURCES)], layers())
        for other in (self.a, self.b):
            if other is not side:
                assert not other.has_it
                await other.holds_nothing()
