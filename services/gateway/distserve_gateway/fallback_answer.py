"""An answer by the fallback server: its text in our pieces, so that the client sees our frames, id and names."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from distserve.errors import DistServeError
from distserve_gateway.answer import Answer
from distserve_gateway.fallback import Fallback
from distserve_gateway.fallback_body import PATHS, passed_on
from distserve_gateway.fallback_chunk import Choice
from distserve_gateway.live import Gain
from distserve_gateway.logprobs_json import LogprobsJson
from distserve_gateway.output import Output, Piece
from distserve_gateway.relay import ENDED, Relay
from distserve_gateway.relayed_logprobs import RelayedLogprobs, relayed_entries

TAIL_S = 1.0  # after the last text, for the usage


@dataclass(slots=True)
class _Relayed(Gain):
    choice: Choice | None = None


class _Output(Output):
    """Text comes whole and scanned: what is left is to count."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason = None


class FallbackAnswer(Answer):
    """`body`: as the client sent it. The prompt's tokens are counted here, the output's by the fallback; where it
    doesn't, each chunk with text is one."""

    served_by = "fallback"

    def __init__(self, *behind: Any, fallback: Fallback, body: bytes, **options: Any) -> None:
        super().__init__(*behind, **options)
        self._fallback = fallback
        self._body = body
        self._relay = Relay(fallback, self.run, self._inbox, self._gains_of, reason="breaker")
        self._num_unfinished = self.call.num_outputs

    def close(self) -> None:
        self._relay.close()
        super().close()

    def _abort(self, error: DistServeError) -> bool:
        return self._num_unfinished > 0 and super()._abort(error)

    async def _begin(self) -> None:
        """Returns with the first chunk. Raises Unavailable, which names the fallback, and what admission raises."""
        self._fallback.admit(self.call.num_outputs)
        async with self.run.starting():
            self._relay.start(PATHS[self.call.kind], passed_on(self.call, self._body, self._fallback.model))
            await self._relay.begun.wait()
        if self._relay.problem is not None:
            raise self._relay.problem
        self._outputs = [_Output(i) for i in range(self.call.num_outputs)]

    def _gains_of(self, choice: Choice) -> Iterable[Gain]:
        if not 0 <= choice.index < self.call.num_outputs:
            raise self._fallback.unavailable(f"gave choice {choice.index}, of {self.call.num_outputs}")
        yield _Relayed(choice.index, choice.token_ids or [], choice=choice)

    async def _gains(self) -> list[Gain]:
        if self._num_unfinished:
            return await self._inbox.take()
        try:
            async with asyncio.timeout(TAIL_S):
                return await self._inbox.take()
        except TimeoutError:
            return [Gain(ENDED, [])]

    def _feed(self, gain: Gain) -> Piece | None:
        if not isinstance(gain, _Relayed):
            self._end(gain)
            return None
        assert gain.choice is not None
        choice, output = gain.choice, self._outputs[gain.index]
        if output.finish_reason is not None:
            return None
        text = choice.content
        num_tokens = len(gain.token_ids) or int(bool(text))
        if num_tokens:
            self._note_tokens(gain.index, num_tokens)
            output.num_tokens += num_tokens
        output.finish_reason = choice.end
        if choice.end is not None:
            self._num_unfinished -= 1
        entries = relayed_entries(choice.logprobs)
        if not (text or entries or gain.token_ids or choice.end):
            return None  # a chat's opening: ours is made here
        return Piece(gain.index, text, choice.end, entries, gain.token_ids)

    def _end(self, gain: Gain) -> None:
        """Nothing more will come; what went wrong after the last text is no matter."""
        if self._num_unfinished:
            raise gain.error or self._fallback.unavailable(f"broke off after {self.num_output_tokens} tokens")
        self._num_open = 0

    @property
    def num_output_tokens(self) -> int:
        counted = self._relay.num_output_tokens
        return super().num_output_tokens if counted is None else counted

    @property
    def num_cached_tokens(self) -> int:
        return self._relay.num_cached_tokens

    def logprobs_json(self, num_top: int) -> LogprobsJson:
        return RelayedLogprobs()
