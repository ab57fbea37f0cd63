"""Ends requests before their time, by name, wherever they run: on this gateway, else on any other of its model. Asked
by `DELETE /v1/requests/{id}`, on `cancel.<model>` of NATS, and by other gateways.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery, Subscription
from distserve.errors import (
    BusError,
    Cancelled,
    DistServeError,
    MalformedMessage,
    NoResponders,
    Overloaded,
    RequestNotFound,
    Unavailable,
)
from distserve.messages import StopReply, StopRequest, decode_as, encode
from distserve_gateway.decoding import decode_body
from distserve_gateway.errors_http import INTERNAL_ERROR, error_json
from distserve_gateway.middleware import usable_id
from distserve_gateway.running import Running
from distserve_gateway.schema import Body
from distserve_gateway.workers import Workers

log = logging.getLogger(__name__)

QUEUE = "gateways"
ASK_S = 1.0  # for another gateway to answer
MAX_ASKING = 64  # names that others are asked for at once: each costs a message to every gateway


class StopBody(Body):
    id: str  # an answer's, or the asker's own


class Stopping:
    """`tenant_of(authorization)`: whose the header Authorization is; raises Unauthorized."""

    def __init__(
        self,
        bus: Bus,
        running: Running,
        workers: Workers,
        gateway_id: str,
        *,
        tenant_of: Callable[[str], str] = lambda authorization: "",
    ) -> None:
        self._bus = bus
        self._running = running
        self._workers = workers
        self._gateway_id = gateway_id
        self._tenant_of = tenant_of
        self._num_asking = 0

    async def open(self) -> Subscription:
        """Answers on NATS until the subscription is closed."""
        return await self._bus.subscribe(subjects.cancel(self._workers.model), self._on_cancel, queue=QUEUE)

    def here(self, request: StopRequest) -> StopReply:
        """Of those on this gateway."""
        return self._running.stop(request.tenant, request.name, Cancelled("the request was cancelled by its owner"))

    async def stop(self, tenant: str, name: str) -> bytes:
        """What is answered then, JSON. Raises RequestNotFound, the same for a name that nobody has and for another
        tenant's. Where nothing has ended and another gateway may have it: Overloaded if none can be asked now, and
        Unavailable if one does not answer."""
        silent: list[str] = []
        stopped = StopReply()
        if usable_id(name):
            elsewhere = not self._running.is_id(tenant, name)
            request = StopRequest(tenant=tenant, name=name)
            stopped = self.here(request)
            if elsewhere and (others := self._others()):
                try:
                    more, silent = await self._ask(others, request)
                    stopped = stopped.plus(more)
                except Overloaded as e:
                    if not stopped.num_requests:
                        raise
                    log.warning("%s: cancelled here, others were not asked: %s", name, e)
        if stopped.num_requests:
            log.info("%s: %d requests cancelled by their owner", name, stopped.num_requests)
            return msgspec.json.encode(
                {
                    "id": name,
                    "object": "request",
                    "cancelled": True,
                    "num_outputs": stopped.num_outputs,
                    "num_output_tokens": stopped.num_output_tokens,
                }
            )
        if silent:
            raise Unavailable(
                f"request {name!r} does not run on this gateway, and {', '.join(silent)} did not answer within "
                f"{ASK_S:g} s: try again",
                retry_after_s=1.0,
            )
        raise RequestNotFound(f"no request {name[:128]!r} of yours runs", param="id", value=name[:128])

    def _others(self) -> list[str]:
        return [w.worker_id for w in self._workers.of_role("gateway") if w.worker_id != self._gateway_id]

    async def _ask(self, gateways: list[str], request: StopRequest) -> tuple[StopReply, list[str]]:
        """What they have ended, and those that did not answer. Raises Overloaded."""
        if self._num_asking >= MAX_ASKING:
            raise Overloaded(f"{MAX_ASKING} other requests are being looked for", retry_after_s=ASK_S)
        self._num_asking += 1
        try:
            replies = await asyncio.gather(*(self._ask_one(gateway, request) for gateway in gateways))
        finally:
            self._num_asking -= 1
        stopped = StopReply()
        for reply in replies:
            stopped = stopped.plus(reply or StopReply())
        return stopped, [g for g, reply in zip(gateways, replies, strict=True) if reply is None]

    async def _ask_one(self, gateway: str, request: StopRequest) -> StopReply | None:
        """None: it does not say."""
        subject = subjects.worker("gateway", gateway)
        try:
            return decode_as(StopReply, await self._bus.request(subject, encode(request), timeout_s=ASK_S))
        except NoResponders:
            return StopReply()  # gone, and all that ran there with it
        except MalformedMessage:
            return StopReply()  # of a version that ends nothing by name: asking again would not help
        except DistServeError as e:
            log.warning("gateway %s does not say whether it has request %s: %s", gateway, request.name, e)
            return None

    async def _on_cancel(self, delivery: Delivery) -> None:
        headers = {name.lower(): value for name, value in delivery.headers.items()}
        try:
            tenant = self._tenant_of(headers.get("authorization", ""))
            body = decode_body(StopBody, delivery.data)
            answer = await self.stop(tenant, body.id)
        except DistServeError as e:
            answer = error_json(e)
        except Exception:
            log.exception("a message on %s failed", delivery.subject)
            answer = INTERNAL_ERROR
        if delivery.reply is None:
            return
        try:
            await self._bus.publish(delivery.reply, answer)
        except BusError as e:
            log.warning("could not answer on %s: %s", delivery.subject, e)
