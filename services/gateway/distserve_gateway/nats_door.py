"""The front door on NATS: `requests.<model>`, JSON in, a stream of JSON messages back, ended by an empty one.

The body is that of /v1/chat/completions if it has `messages`, else of /v1/completions. Each message is a chunk as
over SSE with an `index` (0, 1, 2, …) before its other fields; `stream` defaults to true here, and `false` makes the
whole answer one message. An error is a message `{"index": …, "error": {…}}`, then the end.

An asker that is gone is noticed with the first message that nobody takes (askers.py); before there is one, a word on
`cancel.<model>` (stopping.py) or the request's deadline ends it.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial

import msgspec

from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery, Subscription
from distserve.errors import BusError, DeadlineExceeded, DistServeError
from distserve.telemetry import entered
from distserve_gateway.askers import Askers
from distserve_gateway.calls import Kind
from distserve_gateway.client import ClientGone
from distserve_gateway.envelope import Envelope, envelope
from distserve_gateway.errors_http import INTERNAL_ERROR, error_json
from distserve_gateway.middleware import usable_id
from distserve_gateway.pipeline import Pipeline
from distserve_gateway.rendering import Renderer
from distserve_gateway.request_trace import NO_TRACE
from distserve_gateway.traces import Traces

log = logging.getLogger(__name__)

QUEUE = "gateways"


class _Shape(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class NatsDoor:
    """`pipeline` streams by default. `limit_s` bounds an answer. `traces`: None if requests are not traced."""

    def __init__(
        self, bus: Bus, pipeline: Pipeline, askers: Askers, *, limit_s: float, traces: Traces | None = None
    ) -> None:
        self._bus = bus
        self._traces = traces
        self._pipeline = pipeline
        self._askers = askers
        self._limit_s = limit_s

    async def open(self) -> Subscription:
        """Takes requests until the subscription is closed; what runs then goes on."""
        subject = subjects.requests(self._pipeline.intake.model)
        return await self._bus.subscribe(subject, self._on_request, queue=QUEUE)

    async def _on_request(self, delivery: Delivery) -> None:
        if delivery.reply is None:
            log.warning("dropped a request on %s: it has no reply subject", delivery.subject)
            return
        reply = _Reply(self._bus, delivery.reply)
        try:
            await self._answer(delivery, reply)
        except BusError as e:
            log.warning("could not answer a request on %s: %s", delivery.subject, e)

    async def _answer(self, delivery: Delivery, reply: "_Reply") -> None:
        kind: Kind = "chat" if _is_chat(delivery.data) else "completion"
        headers = {name.lower(): value for name, value in delivery.headers.items()}
        beside = envelope(headers.get)
        trace = NO_TRACE
        if self._traces is not None:
            trace = self._traces.begin(kind, headers, _attributes(delivery.subject))
        beside = replace(beside, request_id=usable_id(beside.request_id), trace=trace)
        with entered(trace.root):
            try:
                await self._answer_to(kind, delivery, beside, reply)
            finally:
                trace.finish()

    async def _answer_to(self, kind: Kind, delivery: Delivery, beside: Envelope, reply: "_Reply") -> None:
        trace = beside.trace
        try:
            async with asyncio.timeout(self._limit_s):
                renderer = await self._pipeline.begin(kind, delivery.data, beside)
                gone = partial(renderer.answer.run.cancel, ClientGone("the asker is gone"))
                async with renderer.answer:
                    with self._askers.followed(gone) as reply.followed_at:
                        await self._send(renderer, reply)
        except ClientGone as e:
            log.debug("%s: %s", delivery.subject, e)
            return
        except DistServeError as e:
            trace.failed(e)
            await reply.send(error_json(e))
        except TimeoutError:
            late = DeadlineExceeded(f"the answer took longer than {self._limit_s:g} s, the limit of this gateway")
            trace.failed(late)
            log.warning("a request on NATS ended early: %s", late)
            await reply.send(error_json(late))
        except Exception as e:
            trace.failed(e)
            log.exception("a request on NATS failed")
            await reply.send(INTERNAL_ERROR)
        await reply.end()

    async def _send(self, renderer: Renderer, reply: "_Reply") -> None:
        stream = renderer.call.stream
        async for pieces in renderer.answer.pieces():
            if not stream:
                renderer.collect(pieces)
                continue
            for chunk in renderer.chunks(pieces):
                await reply.send(chunk)
        for chunk in renderer.last_chunks() if stream else [renderer.whole()]:
            await reply.send(chunk)


class _Reply:
    """Numbers the messages to one asker."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject
        self._index = 0
        self.followed_at: str | None = None  # named in each message, while its asker is followed

    async def send(self, chunk: bytes) -> None:
        """Raises PayloadTooLarge, before anything is sent, for a message that NATS would not take."""
        await self._bus.publish(self._subject, b'{"index":%d,' % self._index + chunk[1:], reply=self.followed_at)
        self._index += 1

    async def end(self) -> None:
        await self._bus.publish(self._subject, b"")


def _attributes(subject: str) -> dict[str, str]:
    return {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "messaging.destination.name": subject,
    }


def _is_chat(body: bytes) -> bool:
    try:
        return msgspec.json.decode(body, type=_Shape).messages is not msgspec.UNSET
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the pipeline says what is wrong
