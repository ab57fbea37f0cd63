"""What is noted of a decode worker's sequences and passes: for its /metrics always, for traces where there are any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from distserve.bus import subjects
from distserve.engine.batching import Batch, Sampled
from distserve.engine.sequence import Sequence
from distserve.errors import DistServeError
from distserve.messages import SequenceKey, Slo
from distserve.telemetry import NO_SPAN, Attributes, Span, begin, finish
from distserve.worker.figures import Outcome, WorkerFigures
from distserve.worker.untold import Untold
from distserve_decode.live import Live
from distserve_decode.stay import Stay


class Record:
    """Belongs to the event loop. Where nothing is traced a pass costs its figures, and a look at an empty dict."""

    def __init__(self, figures: WorkerFigures, worker_id: str) -> None:
        self.figures = figures
        self.untold = Untold()
        self._worker_id = worker_id
        self._stays: dict[Sequence, Stay] = {}

    # ------------------------------------------------------------ they come

    def asked(self, key: SequenceKey, parent: Span) -> Span:
        """For room, by the hand-over whose span `parent` is. The caller ends it."""
        return self._consumer("lease", key, parent)

    @contextmanager
    def coming(self, key: SequenceKey, slo: Slo, parent: Span) -> Iterator[Span]:
        """A stay begins, below `parent`: its span goes to came(). Where what is inside raises it has ended."""
        span = self._consumer("process decode", key, parent, {"distserve.priority": slo.priority})
        try:
            yield span
        except BaseException as e:
            finish(span, attributes={"distserve.outcome": "error"}, error=e)
            raise

    def _consumer(self, name: str, key: SequenceKey, parent: Span, more: Attributes | None = None) -> Span:
        if parent is NO_SPAN:
            return NO_SPAN
        attributes = {
            "messaging.system": "nats",
            "messaging.operation.type": "process",
            "messaging.destination.name": subjects.worker("decode", self._worker_id),
            "distserve.request_id": key.request_id,
            "distserve.worker": self._worker_id,
        }
        return begin(name, parent, kind="consumer", attributes={**attributes, **(more or {})})

    def came(self, live: Live, span: Span) -> None:
        """It is here. left() follows."""
        if span.is_recording():
            if live.timings.transport:
                span.set_attributes(
                    {
                        "distserve.transfer.bytes": live.timings.kv_bytes,
                        "distserve.transfer.transport": live.timings.transport,
                    }
                )
            self._stays[live.sequence] = Stay(span, live, self.untold)

    # ------------------------------------------------------------ what becomes of them

    def passed(self, batch: Batch, num_tokens: int, since: float, until: float) -> None:
        """A pass over so many tokens, of which nothing has been taken yet."""
        num = len(batch.work)
        passes = self.figures.steps if num_tokens == num else self.figures.prompts
        passes.note(until - since, num_sequences=num, num_tokens=num_tokens)
        if self._stays:
            for work in batch.work:
                stay = self._stays.get(work.sequence)
                if stay is not None and not stay.live.cancelled:
                    stay.passed(work, batch, since, until)

    def drew(self, sampled: Sampled) -> None:
        """The first token of one that was adopted without."""
        if (stay := self._stays.get(sampled.sequence)) is not None:
            stay.drew(time.monotonic())

    def preempted(self, sequence: Sequence, *, given: bool) -> None:
        """given: blocks of it go to the store."""
        if (stay := self._stays.get(sequence)) is not None:
            stay.preempted("offload" if given else "recompute", time.monotonic())

    def brought(self, sequence: Sequence) -> None:
        """What it lost is being fetched."""
        if (stay := self._stays.get(sequence)) is not None:
            stay.brought()

    def span_of(self, sequence: Sequence) -> Span:
        """Of its stay; NO_SPAN if it is not traced."""
        stay = self._stays.get(sequence)
        return NO_SPAN if stay is None else stay.span

    def fault(self, error: Exception) -> None:
        """It ended a lease, and no sequence of ours."""
        if isinstance(error, DistServeError):
            self.figures.fault(error)

    # ------------------------------------------------------------ they leave

    def left(self, live: Live) -> None:
        now = time.monotonic()
        outcome: Outcome = "error" if live.error is not None else "cancelled" if live.cancelled else "finished"
        figures = self.figures
        figures.ended(outcome, live.error)
        decode_since = live.first_token_at
        if live.timings.transport:
            decode_since = live.came_at
        elif live.started_at:
            figures.queue.observe(live.started_at - live.came_at)
            if decode_since:
                figures.prefill.observe(decode_since - live.started_at)
        if decode_since:
            figures.decode.observe(now - decode_since)
        if (stay := self._stays.pop(live.sequence, None)) is not None:
            stay.end(outcome, live.error, now)
