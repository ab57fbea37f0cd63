"""Every live sequence of this gateway, and the tokens that come for them.

The token path is one subscription: a TokenBatch is decoded once, each chunk goes to its sequence, each request wakes
once. A sequence ends exactly once, in `_end`, whatever ended it.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery
from distserve.errors import Cancelled, DistServeError
from distserve.messages import SequenceKey, TokenBatch, TokenChunk, decode_as
from distserve_gateway.live import Gain, LiveSequence
from distserve_gateway.outbox import Outbox
from distserve_gateway.predicting import Need
from distserve_gateway.workers import Workers

log = logging.getLogger(__name__)

MAX_TOLD = 10_000


class Streams:
    """`async with` it before the gateway advertises itself: tokens need the subscription."""

    def __init__(self, bus: Bus, gateway_id: str, workers: Workers, *, silence_s: float = 0.5) -> None:
        self.gateway_id = gateway_id
        self.workers = workers
        self.silence_s = silence_s
        self._bus = bus
        self._outbox = Outbox(bus)
        self._live: dict[tuple[str, int], LiveSequence] = {}
        self._serials: dict[str, int] = {}
        self._told: dict[tuple[SequenceKey, str], float] = {}  # ended sequences, and when each worker was told
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._stack = AsyncExitStack()
        workers.on_gone = self.ask_soon

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            sender = asyncio.create_task(self._outbox.run(), name="outbox")
            stack.callback(sender.cancel)
            subject = subjects.stream(self.gateway_id)
            await stack.enter_async_context(await self._bus.subscribe(subject, self._on_batch, inline=True))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        try:
            async with asyncio.timeout(2.0):
                await self._outbox.close()
        except TimeoutError:
            log.warning("left without telling every worker which sequences have ended")

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(list(self._live.values()))

    async def wait_empty(self, timeout_s: float) -> bool:
        """True once no sequence lives; False if some still do after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()
            return True
        except TimeoutError:
            return False

    def add(self, sequence: LiveSequence) -> None:
        """Follow it from now on: before the submission, since tokens may overtake its reply."""
        self._live[sequence.request_id, sequence.index] = sequence
        self._emptied.clear()

    def placed(self, sequence: LiveSequence, num_uncached: int, *, local: bool = False) -> None:
        """It is about to be submitted to the workers it names: prefill counts what it will compute as load
        (`num_uncached`), decode the whole prompt, and what it computes itself (`local`) once more until the first
        token."""
        if sequence.prefill_worker:
            sequence.load_on[sequence.prefill_worker] = num_uncached
        sequence.load_on[sequence.decode_worker] = sequence.num_prompt_tokens
        for worker, num_tokens in sequence.load_on.items():
            self.workers.sent(worker, num_tokens)
        if local:
            sequence.prefilling = sequence.decode_worker, num_uncached
            self.workers.prefill_sent(sequence.decode_worker, num_uncached)
        need = Need(num_uncached, sequence.num_prompt_tokens - num_uncached)
        computed_by = sequence.prefill_worker or sequence.decode_worker
        if (sent := self.workers.prompt_sent(computed_by, need, sequence.standing)) is not None:
            sequence.sent = computed_by, sent

    def displaced(self, sequence: LiveSequence, *, cancel: bool) -> None:
        """Its submission failed. `cancel`: the worker may have got it all the same."""
        self._relieve_all(sequence)
        if cancel:
            self._cancel(sequence, "submitted elsewhere")

    def accepted(self, sequence: LiveSequence) -> None:
        sequence.accepted = True
        self._heard(sequence)
        sequence.ask_at = min(sequence.ask_at, sequence.last_heard + self.silence_s)  # tokens may have overtaken it

    def note_life(self, sequence: LiveSequence) -> None:
        """It goes on as it should: it may be silent for a while from now."""
        self._heard(sequence)
        sequence.ask_at = sequence.last_heard + self.silence_s

    def _heard(self, sequence: LiveSequence) -> None:
        sequence.last_heard = time.monotonic()
        sequence.strikes = sequence.soft_strikes = 0

    def stop(self, sequence: LiveSequence, reason: str) -> None:
        """The gateway wants no more of it: stop string, client gone. Nothing is put in the inbox. Idempotent."""
        if self._live.get((sequence.request_id, sequence.index)) is sequence:
            sequence.error = Cancelled(f"the request was cancelled: {reason}")
            self._end(sequence)
            self._cancel(sequence, reason)

    def fail(self, sequence: LiveSequence, error: DistServeError) -> None:
        """End it with an error, which its reader gets. Idempotent."""
        if self._live.get((sequence.request_id, sequence.index)) is sequence:
            sequence.error = error
            self._end(sequence)
            self._cancel(sequence, error.code)
            sequence.inbox.put(Gain(sequence.index, [], error=error))

    def fail_all(self, error: DistServeError) -> None:
        for sequence in self:
            self.fail(sequence, error)

    def receive(self, chunk: TokenChunk, worker: str) -> None:
        """One chunk, from a batch or a status reply."""
        sequence = self._live.get((chunk.key.request_id, chunk.key.output_index))
        if sequence is None or chunk.key.attempt != sequence.attempt:
            self._stray(chunk, worker)
            return
        num_before = len(sequence.token_ids)
        ended = sequence.accept(chunk, worker)
        if len(sequence.token_ids) > num_before:
            self.note_life(sequence)
        else:  # a chunk behind a gap, or a double, must not put off the question after what is missing
            self._heard(sequence)
        if sequence.owner == "decode" and sequence.prefill_worker in sequence.load_on and not ended:
            self._relieve(sequence, sequence.prefill_worker)
        if sequence.token_ids:
            self._prefilled(sequence)
        sequence.steady = worker if sequence.decode_seen and worker == sequence.decode_worker else ""
        if ended:
            self._end(sequence)
            if chunk.error is not None:
                self._cancel(sequence, "error")
            role = "prefill" if worker == sequence.prefill_worker else "decode"
            self._outbox.acknowledge(role, worker, sequence.key)
        elif sequence.waiting:
            sequence.ask_at = min(sequence.ask_at, sequence.last_heard + self.silence_s / 10)  # tokens are missing

    async def _on_batch(self, delivery: Delivery) -> None:
        try:
            batch = decode_as(TokenBatch, delivery.data)
        except DistServeError as e:
            log.error("dropped a message on %s: %s", delivery.subject, e)
            return
        worker = batch.worker
        self.workers.heard(worker)
        last = self._serials.get(worker)
        self._serials[worker] = batch.serial
        if last is not None and batch.serial > last + 1:
            self.ask_soon(worker)  # before the chunks: a sequence that goes on without a gap has lost nothing
        live, now = self._live, time.monotonic()
        for chunk in batch.chunks:
            sequence = live.get((chunk.key.request_id, chunk.key.output_index))
            if sequence is not None and sequence.extend(chunk, worker):
                sequence.last_heard = now
                sequence.ask_at = now + self.silence_s
                sequence.strikes = sequence.soft_strikes = 0
            else:
                self.receive(chunk, worker)

    def ask_soon(self, worker: str) -> None:
        """A batch of this worker got lost, or it is gone: any of its sequences may lack tokens, or its end."""
        now = time.monotonic()
        for sequence in self._live.values():
            if worker in (sequence.decode_worker, sequence.prefill_worker):
                sequence.ask_at = min(sequence.ask_at, now)

    def _relieve(self, sequence: LiveSequence, worker: str) -> None:
        self.workers.relieved(worker, sequence.load_on.pop(worker))

    def _prefilled(self, sequence: LiveSequence) -> None:
        if sequence.sent is not None:
            sequence.sent[1].done = True
            sequence.sent = None
        if sequence.prefilling is not None:
            self.workers.prefill_done(*sequence.prefilling)
            sequence.prefilling = None

    def _relieve_all(self, sequence: LiveSequence) -> None:
        for worker in list(sequence.load_on):
            self._relieve(sequence, worker)
        if sequence.sent is not None:
            self.workers.prompt_withdrawn(*sequence.sent)
            sequence.sent = None
        self._prefilled(sequence)

    def _stray(self, chunk: TokenChunk, worker: str) -> None:
        """A chunk of a sequence that is not live here, so its worker missed a word: say it again, once a second."""
        info = self.workers.snapshot.get(worker)
        now = time.monotonic()
        if info is None or now < self._told.get((chunk.key, worker), 0.0) + 1.0:
            return
        self._note_told(chunk.key, worker, now)
        if chunk.finish_reason is not None:
            self._outbox.acknowledge(info.role, worker, chunk.key)
        else:
            self._outbox.cancel(info.role, worker, chunk.key, "not live at the gateway")

    def _cancel(self, sequence: LiveSequence, reason: str) -> None:
        now = time.monotonic()
        for role, worker in (("prefill", sequence.prefill_worker), ("decode", sequence.decode_worker)):
            if worker:
                self._note_told(sequence.key, worker, now)
                self._outbox.cancel(role, worker, sequence.key, reason)

    def _note_told(self, key: SequenceKey, worker: str, now: float) -> None:
        """Forgets the oldest beyond MAX_TOLD: at worst a worker is told once more."""
        self._told.pop((key, worker), None)
        self._told[key, worker] = now
        if len(self._told) > MAX_TOLD:
            del self._told[next(iter(self._told))]

    def _end(self, sequence: LiveSequence) -> None:
        sequence.done = True
        del self._live[sequence.request_id, sequence.index]
        self._relieve_all(sequence)
        if not self._live:
            self._emptied.set()
