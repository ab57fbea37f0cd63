"""The one pipeline behind both doors: a Call in, pieces of text out."""

import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import ClassVar, Self

from distserve.errors import DistServeError
from distserve.messages import Timings, TokenLogprob
from distserve_gateway.calls import Call
from distserve_gateway.ended import Ended
from distserve_gateway.live import Gain, Inbox, LiveSequence, merge_timings
from distserve_gateway.logprobs_json import LogprobsJson
from distserve_gateway.metrics import Metrics
from distserve_gateway.output import LogprobEntry, Output, Piece
from distserve_gateway.permits import Permit
from distserve_gateway.running import Run
from distserve_gateway.stop_strings import StopScanner, StopStrings
from distserve_gateway.submission import Submission
from distserve_gateway.tokenizing import ModelTokenizer
from distserve_gateway.trials import UNTRIED, Trial


class Answer:
    """`async with` it: whatever still runs when it is left is cancelled. start() submits, pieces() gives the text."""

    served_by: ClassVar[str] = ""  # empty: this service alone

    def __init__(
        self,
        call: Call,
        tokenizer: ModelTokenizer,
        submission: Submission,
        metrics: Metrics,
        run: Run | None = None,
        permit: Permit | None = None,
        trial: Trial = UNTRIED,
    ) -> None:
        self.call = call
        self.run = run or Run(call)  # of nobody's registry
        self._permit = permit  # closed with the answer
        self._trial = trial  # ended with the answer
        self._tokenizer = tokenizer
        self._submission = submission
        self._metrics = metrics
        self._inbox = Inbox()
        self._sequences: list[LiveSequence] = []
        self._outputs: list[Output] = []
        self._stops = StopStrings(call.stops) if call.stops else None
        self._began = call.received_at
        self._first_token_at = [0.0] * call.num_outputs
        self._last_token_at = [0.0] * call.num_outputs
        self._num_open = call.num_outputs
        self._outcome = "cancelled"
        self._error: DistServeError | None = None  # what ended it early
        self._is_begun = False
        self._aborted: DistServeError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs and count the request. Idempotent."""
        self._submission.close(self._sequences, self._aborted.message if self._aborted else "client gone")
        self.run.close()
        self._trial.left()
        if self._permit is not None:
            ran = bool(self._outputs)
            self._permit.close(self.call.num_prompt_tokens + self.num_output_tokens if ran else None)
        if self._num_open >= 0:
            self._num_open = -1
            ended = self._ended()
            self._metrics.ended(ended)
            self.call.trace.ended(ended)

    async def start(self) -> None:
        """Returns when a worker has accepted every output. Raises what Dispatch.submit and admission raise, and what
        its run is cancelled with."""
        try:
            await self._begin()
            self._is_begun = True
            self.run.carried_by(self._abort, lambda: self.num_output_tokens)
        except BaseException as e:
            self._note_failure(e)
            self.close()
            raise

    async def _begin(self) -> None:
        if self.call.needs_worker:
            await self._run_here(self.call)
        self._outputs = [self._output(i) for i in range(self.call.num_outputs)]

    async def _run_here(self, call: Call) -> None:
        self._sequences = self._submission.open(call, self._inbox)
        async with self.run.starting():
            await self._submission.submit(self._sequences)

    def _abort(self, error: DistServeError) -> bool:
        """Let go of everything now: who waits for pieces() may be held up by a client that does not read. False, and
        no effect, if every output has ended."""
        if self._num_open <= 0:
            return False
        self._aborted = error
        self._fail(error)
        self.close()
        self._inbox.put(Gain(0, []))
        return True

    def _fail(self, error: DistServeError) -> None:
        self._outcome, self._error = error.code, error
        self._trial.failed(error)

    def _note_failure(self, e: BaseException) -> None:
        """What a start or an answer is left with; a cancelled task, or a reader that stops, is no failure."""
        if isinstance(e, Exception):
            self._fail(e if isinstance(e, DistServeError) else DistServeError("internal error"))

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What each wake-up brings, until every output has ended. Raises the error that ended one early."""
        try:
            while self._num_open > 0 or self._aborted is not None:
                gains = await self._gains()
                if self._aborted is not None:
                    raise self._aborted
                pieces = [piece for gain in gains if (piece := self._feed(gain)) is not None]
                if pieces:
                    yield pieces
            self._outcome = "ok"
        except BaseException as e:
            self._note_failure(e)
            raise
        finally:
            self.close()

    async def _gains(self) -> list[Gain]:
        if not self._sequences:
            return [Gain(i, [], None, "length") for i in range(self.call.num_outputs)]
        return await self._inbox.take()

    def _feed(self, gain: Gain) -> Piece | None:
        output = self._outputs[gain.index]
        if output.finish_reason is not None:
            return None
        if gain.error is not None:
            raise gain.error
        if gain.token_ids:
            self._note_tokens(gain.index, len(gain.token_ids))
        piece = output.feed(gain.token_ids, gain.logprobs, gain.finish_reason)
        if output.finish_reason is not None:
            self._num_open -= 1
            if self._sequences:
                self._submission.stop(self._sequences[gain.index], "stop string")
        return piece

    def _note_tokens(self, index: int, num_tokens: int) -> None:
        now = time.monotonic()
        if self._last_token_at[index]:
            self._metrics.gap(now - self._last_token_at[index], num_tokens)
        else:
            self._first_token_at[index] = now
            self._metrics.first_token(now - self._began, num_tokens)
            self._trial.first_token()
            promised_s = self.call.terms.ttft_s
            if promised_s is not None and now - self._began > promised_s:
                self.call.trace.late()
        self._last_token_at[index] = now

    def _output(self, index: int) -> Output:
        call = self.call
        prompt = call.prompts[index // call.n]
        detokenizer = self._tokenizer.detokenizer(
            skip_special_tokens=call.skip_special_tokens, context_ids=prompt.token_ids
        )
        stop_ids = frozenset(prompt.sampling.stop_token_ids)
        if self._sequences and not prompt.sampling.ignore_eos:
            stop_ids |= self._submission.eos_token_ids(self._sequences[index])
        return Output(
            index,
            detokenizer,
            StopScanner(self._stops) if self._stops else None,
            stop_ids,
            min_tokens=prompt.sampling.min_tokens,
            max_tokens=prompt.max_tokens,
            offset=len(self.prompt_text(index)) if call.echo else 0,
        )

    # ------------------------------------------------------------ what renderers ask for

    def prompt_text(self, index: int) -> str:
        """The prompt of choice `index` as text, for echo."""
        prompt = self.call.prompts[index // self.call.n]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self.call.skip_special_tokens)

    def prompt_token_ids(self, index: int) -> list[int]:
        return self.call.prompts[index // self.call.n].token_ids

    def prompt_logprobs(self, index: int) -> list[LogprobEntry]:
        """An entry for every prompt token; the first has no logprob."""
        prompt = self.call.prompts[index // self.call.n]
        known: list[TokenLogprob | None] = [None]
        known += (self._sequences[index].prompt_logprobs if self._sequences else None) or []
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=self.call.skip_special_tokens)
        entries, offset = [], 0
        for i, token_id in enumerate(prompt.token_ids):
            entries.append(LogprobEntry(token_id, known[i] if i < len(known) else None, offset))
            offset += len(detokenizer.feed(token_id))
        return entries

    def logprobs_json(self, num_top: int) -> LogprobsJson:
        return LogprobsJson(self._tokenizer, num_top)

    @property
    def num_output_tokens(self) -> int:
        return sum(output.num_tokens for output in self._outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute for this request. Of a prompt's n outputs one may have computed what
        the others then found, so the least of them counts; one without a token yet has told nothing."""
        n, sequences = self.call.n, self._sequences
        return sum(
            min((s.num_cached_tokens for s in sequences[i : i + n] if s.token_ids), default=0)
            for i in range(0, len(sequences), n)
        )

    @property
    def num_looked_up_tokens(self) -> int:
        """Prompt tokens that workers here looked for in KV: of prompts that have brought forth a token."""
        n, sequences = self.call.n, self._sequences
        return sum(
            len(self.call.prompts[i // n].token_ids)
            for i in range(0, len(sequences), n)
            if any(s.token_ids for s in sequences[i : i + n])
        )

    def _merged_timings(self) -> Timings:
        merged = Timings()
        for sequence in self._sequences:
            merged = merge_timings(merged, sequence.timings)
        return merged

    def _spans(self) -> list[tuple[float, float, int]]:
        """Of each output with a token: when its first and its last came, and how many it has."""
        return [
            (first, last, output.num_tokens)
            for first, last, output in zip(self._first_token_at, self._last_token_at, self._outputs, strict=False)
            if first
        ]

    def _ended(self) -> Ended:
        spans = self._spans()
        return Ended(
            call=self.call,
            outcome=self._outcome,
            error=self._error,
            begun=self._is_begun,
            e2e_s=time.monotonic() - self._began,
            ttft_s=max(first for first, _, _ in spans) - self._began if len(spans) == self.call.num_outputs else None,
            tpots_s=[(last - first) / (n - 1) for first, last, n in spans if n > 1],
            num_output_tokens=self.num_output_tokens,
            num_looked_up_tokens=self.num_looked_up_tokens,
            num_cached_tokens=self.num_cached_tokens,
            finish_reasons=[output.finish_reason for output in self._outputs if output.finish_reason is not None],
            timings=self._merged_timings(),
        )

    def timings(self) -> dict[str, float | int | str]:
        """Where the time went, s. Of several outputs the slowest of each; kv_bytes is their sum."""
        merged, spans = self._merged_timings(), self._spans()
        return {
            "queue_s": round(merged.queue_s, 6),
            "prefill_s": round(merged.prefill_s, 6),
            "transfer_s": round(merged.transfer_s, 6),
            "decode_s": round(merged.decode_s, 6),
            "kv_bytes": sum(sequence.timings.kv_bytes for sequence in self._sequences),
            "transport": merged.transport,
            "traffic_class": merged.traffic_class,
            "ttft_s": round(max((first - self._began for first, _, _ in spans), default=0.0), 6),
            "tpot_s": round(max(((last - first) / max(1, n - 1) for first, last, n in spans), default=0.0), 6),
            "total_s": round(time.monotonic() - self._began, 6),
        }
