"""Where a request is served, and the answer that serves it there."""

import asyncio
import time
from dataclasses import dataclass
from typing import Literal

from distserve.errors import Shed
from distserve_gateway import first_token
from distserve_gateway.answer import Answer
from distserve_gateway.breaker_metrics import BreakerMetrics
from distserve_gateway.calls import Call
from distserve_gateway.envelope import Envelope
from distserve_gateway.fallback import Fallback
from distserve_gateway.fallback_answer import FallbackAnswer
from distserve_gateway.fallback_body import fits
from distserve_gateway.metrics import Metrics
from distserve_gateway.permits import Permit
from distserve_gateway.promises import overdue
from distserve_gateway.running import Run
from distserve_gateway.same_tokenizer import FAILED_KEPT_S, SameTokenizer
from distserve_gateway.submission import Submission
from distserve_gateway.tokenizing import ModelTokenizer
from distserve_gateway.trials import UNTRIED, Trial, Trials


@dataclass(frozen=True, slots=True)
class Placed:
    """`both`: the first token here, the rest by the fallback. `trial` is the answer's to end."""

    where: Literal["here", "fallback", "both"]
    trial: Trial = UNTRIED


HERE = Placed("here")


class Placement:
    """`fallback`: None where there is none."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        submission: Submission,
        metrics: Metrics,
        trials: Trials,
        breaker_metrics: BreakerMetrics,
        fallback: Fallback | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._submission = submission
        self._metrics = metrics
        self._trials = trials
        self._breaker_metrics = breaker_metrics
        self._fallback = fallback
        self._same_tokenizer = None if fallback is None else SameTokenizer(fallback, tokenizer)

    def close(self) -> None:
        if self._same_tokenizer is not None:
            self._same_tokenizer.close()

    async def of(self, call: Call, envelope: Envelope, run: Run) -> Placed:
        """As X-First-Token and the breaker say. Raises Shed, InvalidRequest for a header that can't be honoured,
        Unavailable if the fallback can't be asked about it or may get no more, SloUnattainable if it can't be asked
        within the promise, and what the run is cancelled with."""
        wanted = first_token.wanted(envelope)
        if not call.needs_worker:
            return HERE
        if wanted:
            await self._check_both(call, run)
        try:
            keep_here = wanted is not None or not fits(call)
            place = self._trials.breaker.place(call.terms.priority, keep_here=keep_here)
        except Shed:
            self._breaker_metrics.placed("shed")
            raise
        self._breaker_metrics.placed("both" if wanted else place)
        if place == "fallback":
            return Placed("fallback")
        trial = self._trials.begin(call.received_at, call.terms.priority, probe=place == "probe")
        return Placed("both" if wanted else "here", trial)

    def answer(self, placed: Placed, call: Call, body: bytes, run: Run, permit: Permit) -> Answer:
        """Not started. `body`: the call's, as the client sent it."""
        behind = call, self._tokenizer, self._submission, self._metrics, run, permit, placed.trial
        if placed.where == "here" or self._fallback is None:
            return Answer(*behind)
        if placed.where == "both":
            return first_token.HandedOn(*behind, fallback=self._fallback)
        return FallbackAnswer(*behind, fallback=self._fallback, body=body)

    async def _check_both(self, call: Call, run: Run) -> None:
        if self._same_tokenizer is None or self._fallback is None:
            raise first_token.refused("'true', which needs a fallback server: this gateway has no breaker.fallback_url")
        first_token.check(call)
        ttft_s = call.terms.ttft_s
        left_s = None if ttft_s is None else call.received_at + ttft_s - time.monotonic()
        async with run.starting():
            try:
                async with asyncio.timeout(left_s):
                    await self._same_tokenizer.check()
            except TimeoutError:
                unsaid = f"the fallback server {self._fallback.name} had not shown its tokenizer"
                raise overdue(ttft_s or 0.0, unsaid, FAILED_KEPT_S) from None
        self._fallback.admit(1)
