"""One output of an answer: tokens in, text out, with stop strings found, usage counted and logprobs kept in step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from distserve.messages import FinishReason, TokenLogprob
from distserve_gateway.detokenizing import Detokenizer
from distserve_gateway.stop_strings import StopScanner


@dataclass(slots=True)
class LogprobEntry:
    """A token's logprob (None: unknown, the first of a prompt) and where its text starts, in characters."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int


@dataclass(slots=True)
class Piece:
    """What an output adds: text, ids and logprobs of the tokens that have come since the last piece, and its end."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: list[LogprobEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Output:
    """Feed it gains in order. After a piece with a finish_reason it takes nothing more.

    `num_tokens` counts up to the token that completes a stop string, that one included. The text of a token that
    ends the answer (eos, a stop id) is not part of it.
    """

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_ids",
        "_limit",
        "_min_tokens",
        "_offset",
        "_scanner",
        "_stop_ids",
        "finish_reason",
        "index",
        "num_tokens",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        scanner: StopScanner | None,
        stop_ids: frozenset[int],
        *,
        min_tokens: int = 0,
        max_tokens: int = 1,
        offset: int = 0,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._limit = max_tokens
        self._offset = offset  # characters before the next token's text
        self._entries: list[LogprobEntry] = []
        self._ids: list[int] = []

    def feed(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, finish_reason: FinishReason | None
    ) -> Piece | None:
        """The piece that these tokens make; None if they only complete the beginning of something."""
        plain = logprobs is None and self._scanner is None and finish_reason is None
        if plain and len(ids) == 1 and self.num_tokens < self._limit:
            return self._feed_one(ids[0])
        if len(ids) > self._limit - self.num_tokens:  # max_tokens 0: the one that had to be drawn is not wanted
            ids = ids[: self._limit - self.num_tokens]
            finish_reason = "length"
        texts = []
        matched = False
        for i, token_id in enumerate(ids):
            self.num_tokens += 1
            self._ids.append(token_id)
            if logprobs is not None:
                self._entries.append(LogprobEntry(token_id, logprobs[i], self._offset))
            ends = token_id in self._stop_ids or (finish_reason == "stop" and i == len(ids) - 1)
            text = "" if ends else self._detokenizer.feed(token_id)
            self._offset += len(text)
            if self._scanner is not None:
                text, matched = self._scanner.feed(text, armed=self.num_tokens >= self._min_tokens)
            texts.append(text)
            if matched:
                finish_reason = "stop"
                break
        if finish_reason is not None and not matched:
            texts.append(self._tail())
        text = "".join(texts)
        self.finish_reason = finish_reason
        if not text and finish_reason is None:
            return None
        entries, self._entries = self._entries, []
        token_ids, self._ids = self._ids, []
        return Piece(self.index, text, finish_reason, entries, token_ids)

    def _feed_one(self, token_id: int) -> Piece | None:
        """feed() of one token without logprobs, stop strings or an end, which is nearly every call."""
        self.num_tokens += 1
        self._ids.append(token_id)
        text = "" if token_id in self._stop_ids else self._detokenizer.feed(token_id)
        if not text:
            return None
        self._offset += len(text)
        token_ids, self._ids = self._ids, []
        return Piece(self.index, text, None, [], token_ids)

    def _tail(self) -> str:
        tail = self._detokenizer.flush()
        if self._scanner is None:
            return tail
        text, matched = self._scanner.feed(tail)
        return text if matched else text + self._scanner.flush()
