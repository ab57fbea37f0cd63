"""What sequences say, on its way to their gateways, and their ends."""

import time

from distserve.engine.batching import Sampled
from distserve.engine.stopping import finish_reason
from distserve.messages import TokenLogprob
from distserve.worker.outbox import Outbox
from distserve_decode.limits import Limits
from distserve_decode.live import Live


class Tokens:
    def __init__(self, outbox: Outbox, limits: Limits) -> None:
        self._outbox = outbox
        self._limits = limits

    def open(self, live: Live) -> None:
        """It is here."""
        sequence = live.sequence
        self._outbox.open(
            live.key,
            live.gateway,
            first=sequence.num_output_tokens,
            with_logprobs=sequence.sampling.logprobs is not None,
        )

    def take(self, live: Live, sampled: Sampled) -> bool:
        """Its next token is drawn, and is a token. True: it was the last."""
        live.first_token_at = live.first_token_at or time.monotonic()
        end = finish_reason(live.sequence, sampled.token_id, self._limits.eos_token_ids, self._limits.max_model_len)
        self.note(live, sampled.token_id, sampled.logprob, sampled.prompt_logprobs)
        if end is not None:
            self._outbox.finish(live.key, end, timings=live.final_timings())
        return end is not None

    def note(
        self,
        live: Live,
        token_id: int,
        logprob: TokenLogprob | None,
        prompt_logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        """It is the sequence's next token. With the first goes what came by hand-over."""
        arrival, live.arrival = live.arrival, None
        live.sequence.token_ids.append(token_id)
        self._outbox.append(
            live.key,
            token_id,
            logprob,
            prompt_logprobs=arrival.prompt_logprobs if arrival else prompt_logprobs,
            num_cached_tokens=live.sequence.num_cached_tokens,
        )
