"""One sequence's stay on a decode worker."""

import math
import time
from dataclasses import dataclass, field

import msgspec

from distserve.engine.sequence import Sequence
from distserve.messages import SequenceKey, Timings, TokenLogprob


@dataclass(slots=True, eq=False)
class Arrival:
    """What came with the KV. token_id: token 0, or None if it is still to be drawn from `hidden`, [hidden_size] of
    the last prompt token after the final norm."""

    token_id: int | None
    logprob: TokenLogprob | None
    prompt_logprobs: list[TokenLogprob] | None
    num_cached_tokens: int
    hidden: bytes
    hidden_dtype: str


@dataclass(slots=True, eq=False)
class Live:
    sequence: Sequence
    gateway: str
    deadline: float = math.inf  # on the monotonic clock
    timings: Timings = field(default_factory=Timings)  # what was known when it came
    came_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0  # colocated: its first chunk
    first_token_at: float = 0.0
    cancelled: bool = False
    arrival: Arrival | None = None  # of a hand-over, until token 0 is in the outbox

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key

    def note_start(self, now: float) -> None:
        """A pass begins that computes its first tokens: here from the start, unless it came by hand-over."""
        if not self.timings.transport:
            self.started_at = self.started_at or now

    def final_timings(self) -> Timings:
        now = time.monotonic()
        if self.started_at:  # computed here from the start
            return Timings(
                queue_s=self.started_at - self.came_at,
                prefill_s=max(0.0, self.first_token_at - self.started_at),
                decode_s=now - (self.first_token_at or now),
            )
        return msgspec.structs.replace(self.timings, decode_s=now - self.came_at)
