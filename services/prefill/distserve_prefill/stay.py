"""What a trace shows of one sequence's stay on a prefill worker. A job that is not traced has none."""

from functools import partial

from distserve.bus import subjects
from distserve.engine.batching import Batch, Work
from distserve.messages import SubmitRequest
from distserve.telemetry import NO_SPAN, Attributes, Span, begin, current, finish, stage
from distserve.worker.figures import Outcome
from distserve.worker.untold import Untold


class Stay:
    """`span` goes from receipt to release. What is below it is over when it is told, so that nothing but `span` is ever
    open, and waits in `untold`, as its end does: between two passes nobody has time for it. Hand-overs have spans of
    their own (attempts.py)."""

    __slots__ = ("_begun", "_received_at", "_untold", "span")

    def __init__(self, span: Span, received_at: float, untold: Untold) -> None:
        self.span = span
        self._untold = untold
        self._received_at = received_at
        self._begun = False

    def begin(self, at: float) -> None:
        """Its first pass does, at this time of the monotonic clock."""
        self._begun = True
        self._tell("queue", self._received_at, at)

    def passed(self, work: Work, batch: Batch, lasted: tuple[float, float], error: BaseException | None) -> None:
        """A pass of which `work` was its part."""
        attributes = {
            "distserve.chunk.tokens": work.num_tokens,
            "distserve.chunk.start": work.start,
            "distserve.batch.sequences": len(batch.work),
            "distserve.batch.tokens": batch.num_tokens,
            "distserve.kv.cached_tokens": work.sequence.num_cached_tokens,
        }
        self._tell("prefill chunk", *lasted, attributes, error)

    def end(self, outcome: Outcome, error: BaseException | None, at: float) -> None:
        """It holds nothing here any more."""
        if not self._begun:
            self._tell("queue", self._received_at, at)
        said = {"distserve.outcome": outcome}
        self._untold.add(partial(finish, self.span, at=at, attributes=said, error=error))

    def _tell(
        self,
        name: str,
        since: float,
        until: float,
        attributes: Attributes | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._untold.add(partial(stage, name, self.span, since, until, attributes, error=error))


def stay_of(request: SubmitRequest, worker_id: str, received_at: float, untold: Untold) -> Stay | None:
    """Begun, below the span that the request came with; None if that is not traced."""
    if (asked := current()) is NO_SPAN:
        return None
    attributes: dict[str, str | float] = {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "messaging.destination.name": subjects.worker("prefill", worker_id),
        "distserve.request_id": request.key.request_id,
        "distserve.worker": worker_id,
        "distserve.priority": request.slo.priority,
    }
    if request.slo.ttft_s is not None:
        attributes["distserve.ttft_slo_s"] = request.slo.ttft_s
    span = begin("process prefill", asked, kind="consumer", at=received_at, attributes=attributes)
    return Stay(span, received_at, untold) if span.is_recording() else None
