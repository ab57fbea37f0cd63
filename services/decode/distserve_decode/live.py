"""One sequence's stay on a decode worker."""

import math
import time
from dataclasses import dataclass, field

import msgspec

from distserve.engine.sequence import Sequence
from distserve.errors import DistServeError
from distserve.messages import SequenceKey, Slo, SubmitRequest, Timings, TokenLogprob
from distserve.worker.store.offers import Label


@dataclass(slots=True, eq=False)
class Arrival:
    """What came with the KV. token_id: token 0, or None if it is still to be drawn from `hidden`, [hidden_size] of
    the last prompt token after the final norm."""

    token_id: int | None
    logprob: TokenLogprob | None
    prompt_logprobs: list[TokenLogprob] | None
    hidden: bytes
    hidden_dtype: str


@dataclass(slots=True, eq=False)
class Live:
    sequence: Sequence
    gateway: str
    deadline: float = math.inf  # on the monotonic clock
    timings: Timings = field(default_factory=Timings)  # what was known when it came
    label: Label = field(default_factory=Label)  # of its blocks, for the store
    slo: Slo = field(default_factory=Slo)
    num_offered_blocks: int = 0  # from the first on, those that others gave to the store, or had from it
    came_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0  # computed here from the start: its first chunk
    first_token_at: float = 0.0
    cancelled: bool = False
    error: DistServeError | None = None  # why it ended, unless it ended well or was merely cancelled
    arrival: Arrival | None = None  # of a hand-over, until token 0 is in the outbox

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key

    def note_pass(self, now: float) -> None:
        """A pass begins that computes some of it: its start, if it is the first and it did not come by hand-over."""
        if not self.started_at and not self.timings.transport:
            self.started_at = now
            self.num_offered_blocks = self.sequence.num_named_blocks

    def final_timings(self) -> Timings:
        now = time.monotonic()
        if self.started_at:  # computed here from the start
            return Timings(
                queue_s=self.started_at - self.came_at,
                prefill_s=max(0.0, self.first_token_at - self.started_at),
                decode_s=now - (self.first_token_at or now),
            )
        return msgspec.structs.replace(self.timings, decode_s=now - self.came_at)


def submitted(request: SubmitRequest, sequence: Sequence) -> Live:
    """One that is to be computed here from the start."""
    return Live(
        sequence,
        request.gateway,
        deadline_at(request.deadline_s),
        label=Label.of(request.cache_salt, request.conversation, request.traffic_class),
        slo=request.slo,
    )


def deadline_at(deadline_s: float | None) -> float:
    """What is left of it, as a time of the monotonic clock."""
    return math.inf if deadline_s is None else time.monotonic() + deadline_s
