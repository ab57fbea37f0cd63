"""What gateways may say to any worker, answered the same way in prefill and decode."""

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from distserve.bus.base import Delivery
from distserve.errors import DistServeError, MalformedMessage
from distserve.messages import (
    CancelRequest,
    ClockRequest,
    FinishedAck,
    Message,
    ReportReply,
    ReportRequest,
    SequenceKey,
    SequenceStatus,
    StatusReply,
    StatusRequest,
    SubmitReply,
    SubmitRequest,
    decode,
    encode,
)
from distserve.telemetry import entered, receive
from distserve.worker.clock import now_ns, told
from distserve.worker.outbox import Outbox

log = logging.getLogger(__name__)


class Worker(Protocol):
    def submit(self, request: SubmitRequest) -> SubmitReply: ...

    def status_of(self, key: SequenceKey, position: int) -> SequenceStatus: ...

    def cancel(self, key: SequenceKey, error: DistServeError | None = None) -> None: ...


class Door:
    """A responder for `subjects.worker(role, id)`. `also` answers the role's own messages; it returns None for one that
    wants no answer, and raises MalformedMessage for one that it does not know. `report` tells its figures."""

    def __init__(
        self,
        worker: Worker,
        outbox: Outbox,
        also: Callable[[Message], Awaitable[Message | None]] | None = None,
        *,
        report: Callable[[], Awaitable[ReportReply]] | None = None,
    ) -> None:
        self._worker = worker
        self._outbox = outbox
        self._also = also
        self._report = report

    async def __call__(self, delivery: Delivery) -> bytes:
        received_ns = now_ns()
        message = decode(delivery.data)
        if isinstance(message, ClockRequest):
            return encode(told(received_ns))
        with entered(receive(delivery.headers)):  # current() is who asks
            answer = await self._answer(message)
        return b"" if answer is None else encode(answer)

    async def _answer(self, message: Message) -> Message | None:
        match message:
            case SubmitRequest():
                return self._worker.submit(message)
            case StatusRequest():
                return StatusReply(sequences=[self._worker.status_of(k, n) for k, n in message.sequences])
            case CancelRequest():
                for key in message.keys:
                    self._worker.cancel(key)
                return None
            case FinishedAck():
                self._outbox.drop([k for k in message.keys if self._outbox.is_finished(k)])
                return None
            case ReportRequest() if self._report is not None:
                return await self._report()
        if self._also is None:
            raise MalformedMessage(
                f"this worker has no answer to {type(message).__name__}", kind=type(message).__name__
            )
        return await self._also(message)
