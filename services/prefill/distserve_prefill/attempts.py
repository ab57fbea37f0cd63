"""What a trace shows of one hand-over: a span for each lease that is asked for, until decode has adopted or it failed.
One that is tried again links to the one before it, whose error is then a fault that ended nothing."""

import time
from collections.abc import Callable

from distserve.bus import subjects
from distserve.errors import DistServeError
from distserve.messages import LeaseGrant
from distserve.telemetry import NO_SPAN, Span, begin, finish, headers_of
from distserve.transport.base import Transfer


class Attempts:
    """Belongs to the event loop. One at a time: it ends before the next is asked for, or is ended by that."""

    def __init__(
        self,
        stay: Span = NO_SPAN,
        on_fault: Callable[[DistServeError], None] = lambda error: None,
    ) -> None:
        """stay: what the spans are below. on_fault: told the error of each that is followed by another."""
        self._stay = stay
        self._on_fault = on_fault
        self._num = 0
        self._span = NO_SPAN
        self._asked_at = 0.0
        self._lease_s = 0.0  # from then to the grant
        self._transfer: Transfer | None = None
        self._error: DistServeError | None = None

    def ask(self, worker: str) -> dict[str, str] | None:
        """The next begins, with a decode worker that is asked for a lease: what goes with the question."""
        before, error = self._span, self._error
        if error is not None:
            self._on_fault(error)
        self.end()
        self._error = self._transfer = None
        self._num += 1
        self._asked_at = time.monotonic()
        if not self._stay.is_recording():
            return None
        self._span = begin(
            "handoff",
            self._stay,
            kind="client",
            at=self._asked_at,
            links=(before,),
            attributes={
                "messaging.system": "nats",
                "messaging.operation.type": "send",
                "messaging.destination.name": subjects.worker("decode", worker),
                "distserve.attempt": self._num,
                "distserve.route.decode_worker": worker,
            },
        )
        return headers_of(self._span)

    def granted(self, grant: LeaseGrant) -> None:
        """What is waited for from now on is the connection."""
        self._lease_s = time.monotonic() - self._asked_at
        if self._span.is_recording():
            self._span.set_attribute("distserve.transfer.transport", grant.region.endpoint.kind)
            self._span.set_attribute("distserve.transfer.hit_blocks", grant.num_hit_blocks)

    def opened(self, transfer: Transfer) -> None:
        """What is waited for from now on is the bytes."""
        self._transfer = transfer

    def failed(self, error: Exception) -> None:
        self.end(error)
        self._error = error if isinstance(error, DistServeError) else None

    def end(self, error: Exception | None = None) -> None:
        """Decode has adopted, or nobody waits for that any more; the transfer, if there is one, has ended. Without
        effect on one that has ended."""
        if self._span.is_recording() and self._transfer is not None:
            facts = self._transfer.facts
            self._span.set_attributes(
                {
                    "distserve.transfer.traffic_class": facts.traffic_class,
                    "distserve.transfer.dscp": facts.dscp,
                    "distserve.transfer.blocks": facts.num_blocks,
                    "distserve.transfer.bytes": facts.num_bytes,
                    "distserve.transfer.wait_s": self._lease_s + facts.wait_s,
                    "distserve.transfer.wire_s": facts.wire_s,
                }
            )
        finish(self._span, error=error)
