"""What other services ask of a gateway, by its id: to end a request that may run there, its figures, and what time its
clock has."""

from collections.abc import Callable

from distserve.bus.base import Delivery
from distserve.messages import ReportReply, ReportRequest, StopRequest, decode, encode
from distserve.worker.clock import tell_time
from distserve_gateway.stopping import Stopping


class PeerDoor:
    """A responder for `gateway.<gateway>`. Raises MalformedMessage for anything else."""

    def __init__(self, stopping: Stopping, report: Callable[[], ReportReply]) -> None:
        self._stopping = stopping
        self._report = report

    async def __call__(self, delivery: Delivery) -> bytes:
        message = decode(delivery.data)
        if isinstance(message, StopRequest):
            return encode(self._stopping.here(message))
        if isinstance(message, ReportRequest):
            return encode(self._report())
        return await tell_time(delivery)
