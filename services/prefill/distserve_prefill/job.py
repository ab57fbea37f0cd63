"""One sequence's stay on a prefill worker."""

import asyncio
import time
from dataclasses import dataclass, field

from distserve.engine.sequence import Sequence
from distserve.errors import DistServeError
from distserve.messages import Phase, SequenceKey, Slo, SubmitRequest, Timings
from distserve.telemetry import NO_SPAN, Span
from distserve.worker.figures import Outcome
from distserve.worker.store.giving import LayerSink
from distserve_prefill.handoff import Handoff, Shipped
from distserve_prefill.order import Place
from distserve_prefill.promise import after
from distserve_prefill.stay import Stay


@dataclass(slots=True, eq=False)
class Job:
    """queued (while others' blocks are fetched for it, then in the queue) -> prefill (from its first chunk to its last)
    -> handoff (until decode has adopted it) -> gone.

    Its blocks belong to it from admission to the end of the hand-over, which outlasts the forward pass.
    """

    request: SubmitRequest
    sequence: Sequence
    deadline: float  # on the monotonic clock; inf if there is none
    phase: Phase = "queued"
    place: Place | None = None  # in the queue, or where it will be there
    fetching: asyncio.Task[None] | None = None  # before it joins the queue
    offer: LayerSink | None = None  # to the store, of what is being computed
    handoff: Handoff | None = None
    committing: asyncio.Task[Shipped] | None = None
    ending: asyncio.Task[None] | None = None  # hands over or releases; started once
    cancelled: bool = False
    outcome: Outcome = "cancelled"  # how it leaves, and why: as who ended it last has said
    error: DistServeError | None = None
    shipped: Shipped | None = None  # by a hand-over that worked
    stay: Stay | None = None  # if it is traced
    accepted_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    sampled_at: float = 0.0

    @property
    def key(self) -> SequenceKey:
        return self.request.key

    @property
    def slo(self) -> Slo:
        """What is left of what was promised."""
        return after(self.request.slo, time.monotonic() - self.accepted_at)

    @property
    def span(self) -> Span:
        """What others' spans about it are below."""
        return self.stay.span if self.stay else NO_SPAN

    @property
    def needs_handoff(self) -> bool:
        """A sequence that ends with its first token stays here."""
        return self.request.sampling.max_tokens - self.sequence.num_output_tokens > 1

    @property
    def is_over(self) -> bool:
        """What has become of it is settled: only what it holds is still to be released."""
        return self.outcome == "finished" if self.committing is None else self.committing.done()

    def ends(self, outcome: Outcome, error: DistServeError | None = None) -> None:
        self.outcome, self.error = outcome, error

    def end_offer(self, *, computed: bool) -> None:
        """computed: all of the prompt is, and is right. Without an offer under way, no effect."""
        offer, self.offer = self.offer, None
        if offer is not None:
            offer.finished() if computed else offer.abandoned()

    def timings(self) -> Timings:
        return Timings(
            queue_s=max(0.0, self.started_at - self.accepted_at),
            prefill_s=max(0.0, self.sampled_at - self.started_at),
            traffic_class=self.request.traffic_class,
        )
