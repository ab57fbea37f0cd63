"""One sequence that runs somewhere, as the gateway follows it, and the inbox of the request that waits for it."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

from distserve.errors import DistServeError, WorkerLost, from_wire
from distserve.messages import (
    FinishReason,
    SamplingParams,
    SequenceKey,
    Timings,
    TokenChunk,
    TokenLogprob,
    TrafficClass,
)
from distserve.telemetry import NO_SPAN, Span
from distserve_gateway.calls import Terms
from distserve_gateway.predicting import Sent, Standing

NO_TERMS = Terms()


@dataclass(slots=True)
class Gain:
    """What one sequence gained: in order, without gaps or doubles. `error` ends it."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: DistServeError | None = None


class Inbox:
    """Gains of one request's sequences, taken all at once. One reader; a reader that is slow finds more."""

    __slots__ = ("_gains", "_waiter")

    def __init__(self) -> None:
        self._gains: list[Gain] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, gain: Gain) -> None:
        self._gains.append(gain)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Gain]:
        """Everything that has come, at least one. Each sequence's deadline puts an error here, which bounds it."""
        if not self._gains:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        gains, self._gains = self._gains, []
        return gains


class LiveSequence:
    """Owned by Streams. `token_ids` are the output tokens so far: what a resubmission needs.

        output  |<- token_ids: delivered ->|  gap  |<- waiting: chunks that came early ->|

    `owner` is the role that should have the sequence: prefill until decode is seen or known to hold it. Times are
    time.monotonic() seconds.
    """

    __slots__ = (
        "accepted",
        "ask_at",
        "asking",
        "attempt",
        "cache_salt",
        "conversation",
        "deadline",
        "decode_seen",
        "decode_worker",
        "done",
        "error",
        "held",
        "inbox",
        "index",
        "last_heard",
        "last_send",
        "load_on",
        "num_cached_tokens",
        "num_prompt_tokens",
        "owner",
        "prefill_worker",
        "prefilling",
        "prompt_ids",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "sent",
        "soft_strikes",
        "standing",
        "steady",
        "strikes",
        "suspect",
        "terms",
        "timings",
        "token_ids",
        "trace",
        "traffic_class",
        "tried",
        "waiting",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_ids: list[int],
        sampling: SamplingParams,
        inbox: Inbox,
        deadline: float,
        *,
        traffic_class: TrafficClass = "prefill",
        cache_salt: str = "",
        conversation: str = "",
        terms: Terms = NO_TERMS,
        received_at: float = 0.0,
        trace: Span = NO_SPAN,
    ) -> None:
        """`terms`, of which the first token is due counted from received_at. `trace`: its request's span."""
        self.terms = terms
        self.standing = Standing(terms.priority, math.inf if terms.ttft_s is None else received_at + terms.ttft_s)
        self.traffic_class = traffic_class
        self.cache_salt = cache_salt  # a secret (identity.py)
        self.conversation = conversation
        self.trace = trace
        self.last_send: Span | None = None  # the last attempt's
        self.held: Mapping[str, int] = {}  # leading prompt tokens that each worker seemed to hold at the submission
        self.request_id = request_id
        self.index = index
        self.prompt_ids = prompt_ids
        self.num_prompt_tokens = len(prompt_ids)
        self.sampling = sampling
        self.inbox = inbox
        self.deadline = deadline
        self.attempt = 0
        self.prefill_worker: str | None = None
        self.decode_worker = ""
        self.owner = "prefill"
        self.load_on: dict[str, int] = {}  # workers that count it in Workers.in_flight, and for how many tokens
        self.prefilling: tuple[str, int] | None = None  # who counts it in Workers.prefilling, and for how many
        self.sent: tuple[str, Sent] | None = None  # who computes its prompt, as Workers.beats has it
        self.suspect = ""  # the prefill worker, once it is thought lost
        self.decode_seen = False  # tokens have come from the decode worker, so it is the right one
        self.steady = ""  # the decode worker, once its tokens come and nothing else is left to note (see extend)
        self.tried: list[str] = []  # decode workers that do not know it
        self.accepted = False
        self.done = False
        self.error: DistServeError | None = None  # why it is done, if not by its last token
        self.token_ids: list[int] = []
        self.waiting: list[TokenChunk] = []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.timings = Timings()
        self.num_cached_tokens = 0
        self.last_heard = 0.0
        self.ask_at = float("inf")
        self.asking = False
        self.strikes = 0  # answers in a row that say the worker, or the sequence on it, is gone
        self.soft_strikes = 0  # unanswered, though the worker's heartbeat goes on

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.request_id, self.index, self.attempt)

    @property
    def owner_worker(self) -> str:
        return self.decode_worker if self.owner == "decode" or self.prefill_worker is None else self.prefill_worker

    def place(self, prefill_worker: str | None, decode_worker: str) -> None:
        """Set where the current attempt goes; without a prefill worker decode does both phases."""
        self.prefill_worker = prefill_worker
        self.decode_worker = decode_worker
        self.owner = "decode" if prefill_worker is None else "prefill"

    def withdraw(self) -> None:
        """Void the current attempt and what came early of it: the next one goes elsewhere."""
        self.attempt += 1
        self.prefill_worker, self.decode_worker, self.steady = None, "", ""
        self.waiting = []
        self.num_cached_tokens = 0
        self.ask_at = float("inf")

    def lost(self) -> WorkerLost:
        worker, role = self.owner_worker, self.owner
        if self.suspect:
            worker, role = self.suspect, "prefill"
        elif self.tried:
            worker = self.tried[0]
        return WorkerLost(
            f"{role} worker {worker!r} died or stopped answering after {len(self.token_ids)} tokens",
            worker=worker,
            role=role,
        )

    def extend(self, chunk: TokenChunk, worker: str) -> bool:
        """The usual case of accept(), which is nearly every token: the next tokens and nothing else, from the worker
        that the last ones came from. False, and nothing has changed, if this is not it."""
        if (
            worker != self.steady
            or chunk.start != len(self.token_ids)
            or chunk.key.attempt != self.attempt
            or chunk.finish_reason is not None
            or not chunk.token_ids
            or self.waiting
            or chunk.prompt_logprobs is not None
            or chunk.num_cached_tokens
            or chunk.timings is not None
        ):
            return False
        self.token_ids += chunk.token_ids
        self.inbox.put(Gain(self.index, chunk.token_ids, chunk.logprobs))
        return True

    def accept(self, chunk: TokenChunk, worker: str) -> bool:
        """Deliver what is new in a chunk. True if the sequence has ended with it.

        Doubles and older attempts are dropped. A chunk that starts behind a gap waits until the gap is filled.
        """
        if self.done or chunk.key.attempt != self.attempt:
            return self.done
        if worker != self.prefill_worker:
            # Prefill may have handed over to another decode worker than the one it was told.
            self.owner, self.decode_worker, self.decode_seen = "decode", worker, True
        self._keep_facts(chunk)
        if chunk.start > len(self.token_ids) and chunk.error is None:
            self.waiting.append(chunk)
            return False
        self._deliver(chunk)
        while self.waiting and not self.done:
            ready = [c for c in self.waiting if c.start <= len(self.token_ids)]
            if not ready:
                break
            self.waiting = [c for c in self.waiting if c.start > len(self.token_ids)]
            for early in ready:
                self._deliver(early)
        return self.done

    def _keep_facts(self, chunk: TokenChunk) -> None:
        if chunk.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = chunk.prompt_logprobs
        if chunk.num_cached_tokens:
            self.num_cached_tokens = chunk.num_cached_tokens
        if chunk.timings is not None:
            self.timings = merge_timings(self.timings, chunk.timings)

    def _deliver(self, chunk: TokenChunk) -> None:
        num_known = len(self.token_ids) - chunk.start
        if self.done or num_known > len(chunk.token_ids):
            return  # old news: something later has come already
        ids = chunk.token_ids[num_known:] if num_known > 0 else chunk.token_ids
        logprobs = chunk.logprobs
        if logprobs is not None and num_known > 0:
            logprobs = logprobs[num_known:]
        error = None
        if chunk.error is not None:
            error = from_wire(*chunk.error)
        elif chunk.finish_reason in ("error", "abort"):
            error = DistServeError(f"the worker ended the sequence: {chunk.finish_reason}")
        if num_known < 0:
            ids, logprobs = [], None  # an error that came ahead of tokens that never will
        elif not ids and chunk.finish_reason is None:
            return
        self.token_ids += ids
        self.done = chunk.finish_reason is not None
        self.error = error
        self.inbox.put(Gain(self.index, ids, logprobs, None if error else chunk.finish_reason, error))


def merge_timings(one: Timings, other: Timings) -> Timings:
    """Each side fills in what it saw: the larger value of each field."""
    return Timings(
        queue_s=max(one.queue_s, other.queue_s),
        prefill_s=max(one.prefill_s, other.prefill_s),
        transfer_s=max(one.transfer_s, other.transfer_s),
        decode_s=max(one.decode_s, other.decode_s),
        kv_bytes=max(one.kv_bytes, other.kv_bytes),
        transport=one.transport or other.transport,
        traffic_class=one.traffic_class or other.traffic_class,
    )
