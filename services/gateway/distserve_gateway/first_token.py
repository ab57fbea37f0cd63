"""X-First-Token: who draws which tokens of an answer.

    true     the first one is drawn here, the rest by the fallback server, from the ids of prompt and first token
    false    all here: the breaker may refuse it, and sends it nowhere else
    absent   as the breaker says

The time to first token is this service's then, and its decode workers do nothing for the request.
"""

from dataclasses import replace
from typing import Any

from distserve.errors import InvalidRequest
from distserve_gateway.answer import Answer
from distserve_gateway.calls import Call
from distserve_gateway.envelope import Envelope
from distserve_gateway.fallback import Fallback
from distserve_gateway.fallback_body import COMPLETIONS, first_token_only, handed_on
from distserve_gateway.fallback_chunk import Choice
from distserve_gateway.live import Gain
from distserve_gateway.output import Piece
from distserve_gateway.relay import ENDED, Relay

HEADER = "X-First-Token"


def wanted(envelope: Envelope) -> bool | None:
    """None: absent. Raises InvalidRequest."""
    given = envelope.first_token.strip().lower()
    if given not in ("", "true", "false"):
        raise refused(f"{given[:60]!r}, must be 'true' or 'false'")
    return None if not given else given == "true"


def refused(problem: str) -> InvalidRequest:
    """The header can't be honoured. `problem` goes on from "X-First-Token is "."""
    return InvalidRequest(f"{HEADER} is {problem}", param=HEADER)


def check(call: Call) -> None:
    """Raises InvalidRequest for what can't be handed on."""
    if call.num_logprobs is not None:
        raise refused("'true' with logprobs, must come without: those of two servers are not of one kind")
    if call.num_outputs != 1:
        raise refused(f"'true' with {len(call.prompts)} prompts and n = {call.n}, must come with one prompt and n = 1")


class HandedOn(Answer):
    """The fallback's tokens come as ids (same_tokenizer.py has made sure that they mean the same) and go through the
    same output as the first one: characters and stop strings across the seam are as they would be without it."""

    served_by = "distserve, fallback"

    def __init__(self, *behind: Any, fallback: Fallback, **options: Any) -> None:
        super().__init__(*behind, **options)
        self._fallback = fallback
        self._relay = Relay(fallback, self.run, self._inbox, self._gains_of, reason="first_token")
        self._is_handed_on = False

    def close(self) -> None:
        self._relay.close()
        super().close()

    async def _begin(self) -> None:
        await self._run_here(first_token_only(self.call))
        self._outputs = [self._output(0)]

    def _feed(self, gain: Gain) -> Piece | None:
        if gain.index == ENDED:
            raise self._fallback.unavailable(f"broke off after {self.num_output_tokens} tokens")
        drawn = self._sequences[0].token_ids
        is_last_here = gain.finish_reason == "length" and len(drawn) < self.call.prompts[0].max_tokens
        if self._is_handed_on or not is_last_here:
            return super()._feed(gain)
        piece = super()._feed(replace(gain, finish_reason=None))
        if self._outputs[0].finish_reason is None:
            self._is_handed_on = True
            self._relay.start(COMPLETIONS, handed_on(self.call, drawn, self._fallback.model))
        return piece

    def _gains_of(self, choice: Choice) -> list[Gain]:
        if not choice.token_ids and choice.content:
            raise self._fallback.unavailable("gives no token ids")
        return [Gain(0, choice.token_ids or [], None, choice.end)]
