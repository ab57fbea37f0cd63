"""Tokens on their way to the gateways, and kept until a gateway has said that it has them all.

One owner: the worker's event loop. `append` and `finish` only record; `flush`, once a step, publishes one TokenBatch
for each gateway with whatever its sequences gained. A batch that gets lost costs nothing but time: the gateway sees
the gap by the output positions and asks (`since`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import BusError, DistServeError, PayloadTooLarge, to_wire
from distserve.messages import FinishReason, SequenceKey, Timings, TokenBatch, TokenChunk, TokenLogprob, encode

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Output:
    """An output's tokens [first, first + len(token_ids)) by output position; those before `first` were known to the
    gateway when it submitted."""

    gateway: str
    first: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0
    num_published: int = 0
    finish_reason: FinishReason | None = None
    error: DistServeError | None = None
    timings: Timings | None = None
    finished_at: float = 0.0

    def chunk(self, key: SequenceKey, position: int) -> TokenChunk:
        """Everything from output position `position` on, with the end if it is reached."""
        at = max(0, position - self.first)
        return TokenChunk(
            key=key,
            start=self.first + at,
            token_ids=self.token_ids[at:],
            finish_reason=self.finish_reason,
            logprobs=None if self.logprobs is None else self.logprobs[at:],
            error=None if self.error is None else to_wire(self.error),
            timings=self.timings,
            prompt_logprobs=self.prompt_logprobs if at == 0 else None,
            num_cached_tokens=self.num_cached_tokens if at == 0 else 0,
        )


class Outbox:
    def __init__(
        self, bus: Bus, worker_id: str, *, forget_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self.worker_id = worker_id
        self._forget_s = forget_s
        self._clock = clock
        self._outputs: dict[SequenceKey, _Output] = {}
        self._changed: dict[SequenceKey, None] = {}
        self._serials: dict[str, int] = {}
        self._flushing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._outputs

    def open(self, key: SequenceKey, gateway: str, *, first: int = 0, with_logprobs: bool = False) -> None:
        """A new output; its first token will stand at output position `first`."""
        self._outputs[key] = _Output(gateway=gateway, first=first, logprobs=[] if with_logprobs else None)

    def append(
        self,
        key: SequenceKey,
        token_id: int,
        logprob: TokenLogprob | None = None,
        *,
        prompt_logprobs: list[TokenLogprob] | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        out = self._outputs[key]
        out.token_ids.append(token_id)
        if out.logprobs is not None and logprob is not None:
            out.logprobs.append(logprob)
        if prompt_logprobs is not None:
            out.prompt_logprobs = prompt_logprobs
        if num_cached_tokens:
            out.num_cached_tokens = num_cached_tokens
        self._changed[key] = None

    def finish(
        self,
        key: SequenceKey,
        reason: FinishReason,
        *,
        error: DistServeError | None = None,
        timings: Timings | None = None,
    ) -> None:
        """The end, published with the next flush. The first end counts."""
        out = self._outputs.get(key)
        if out is None or out.finish_reason is not None:
            return
        out.finish_reason, out.error, out.timings = reason, error, timings
        out.finished_at = self._clock()
        self._changed[key] = None

    def is_finished(self, key: SequenceKey) -> bool:
        out = self._outputs.get(key)
        return out is not None and out.finish_reason is not None

    def since(self, key: SequenceKey, position: int) -> TokenChunk | None:
        """What a gateway lacks that has the tokens before output position `position`; None if nothing."""
        out = self._outputs.get(key)
        if out is None:
            return None
        if position >= out.first + len(out.token_ids) and out.finish_reason is None:
            return None
        return out.chunk(key, position)

    def drop(self, keys: Iterable[SequenceKey]) -> None:
        """Forget: acknowledged, cancelled, or handed to another worker."""
        for key in keys:
            self._outputs.pop(key, None)
            self._changed.pop(key, None)

    def forget_old(self) -> None:
        """Drop ends that no gateway acknowledged in time."""
        horizon = self._clock() - self._forget_s
        self.drop([k for k, o in self._outputs.items() if o.finish_reason is not None and o.finished_at < horizon])

    async def flush(self) -> None:
        """Publish what changed, one message a gateway. A bus that is cut off is no error here: gateways ask later.

        One at a time: what changes while one is under way leaves after it, so that no token overtakes another.
        """
        async with self._flushing:
            changed, self._changed = self._changed, {}
            by_gateway: dict[str, list[TokenChunk]] = {}
            for key in changed:
                out = self._outputs[key]
                by_gateway.setdefault(out.gateway, []).append(out.chunk(key, out.first + out.num_published))
                out.num_published = len(out.token_ids)
            for gateway, chunks in by_gateway.items():
                await self._send(gateway, chunks)

    async def _send(self, gateway: str, chunks: list[TokenChunk]) -> None:
        serial = self._serials[gateway] = self._serials.get(gateway, 0) + 1
        batch = TokenBatch(worker=self.worker_id, serial=serial, chunks=chunks)
        try:
            await self._bus.publish(subjects.stream(gateway), encode(batch))
        except PayloadTooLarge as e:
            if len(chunks) > 1:  # one that is too large must not take the others with it
                for chunk in chunks:
                    await self._send(gateway, [chunk])
            elif (out := self._outputs.get(chunks[0].key)) is not None and out.error is None:
                self._fail(chunks[0].key, out, e)
                await self._send(gateway, [out.chunk(chunks[0].key, out.first + len(out.token_ids))])
        except BusError as e:
            log.warning("tokens for %s wait until it asks for them: %s", gateway, e)

    def _fail(self, key: SequenceKey, out: _Output, error: PayloadTooLarge) -> None:
        """Its news fit no message of the bus: what made it so large is dropped, and it ends with the reason. (The
        gateway then cancels it at its worker.)"""
        log.warning("%s ends: %s", key, error)
        out.prompt_logprobs = out.logprobs = None
        out.finish_reason, out.error, out.finished_at = "error", error, self._clock()
