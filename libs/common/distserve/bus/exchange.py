"""What every bus does alike around one message: the size check, answering, reading a stream of answers."""

import asyncio
import logging
from collections.abc import AsyncIterator

from distserve.bus.base import Bus, Delivery, Headers, Responder
from distserve.errors import BusTimeout, DistServeError, NoResponders, PayloadTooLarge
from distserve.messages import ErrorReply, encode

STREAM_WINDOW = 1024
"""Answers of one stream that may wait for its reader; more wait in the subscription's pending queue."""

_log = logging.getLogger(__name__)


def check_payload(subject: str, data: bytes, headers: Headers | None, limit_bytes: int) -> None:
    """Raises PayloadTooLarge if the server would refuse the message; headers count as they lie on the wire."""
    size = len(data)
    if headers:
        size += len("NATS/1.0\r\n\r\n") + sum(
            len(k.encode()) + len(v.encode()) + len(": \r\n") for k, v in headers.items()
        )
    if size > limit_bytes:
        raise PayloadTooLarge(
            f"the message to {subject} has {size} bytes, the server takes at most {limit_bytes}",
            subject=subject,
            size_bytes=size,
            limit_bytes=limit_bytes,
        )


def nobody_answers(subject: str) -> NoResponders:
    return NoResponders(f"nobody answers on {subject}", subject=subject)


def timed_out(subject: str, timeout_s: float, what: str = "no answer") -> BusTimeout:
    return BusTimeout(f"{what} from {subject} within {timeout_s:g} s", subject=subject, timeout_s=timeout_s)


def says_nobody_answers(answer: Delivery) -> bool:
    """The server's own answer to a request without a subscriber: empty, with status 503."""
    return not answer.data and answer.headers.get("Status") == "503"


async def answer(bus: Bus, responder: Responder, delivery: Delivery) -> None:
    """Run the responder and send what it returns, or its exception as an ErrorReply. A foreign exception, which no
    caller can be expected to understand, is logged here with its traceback."""
    try:
        data = await responder(delivery)
    except DistServeError as e:
        data = encode(ErrorReply.of(e))
    except Exception as e:
        _log.exception("answering a request to %s failed", delivery.subject)
        data = encode(ErrorReply.of(e))
    if delivery.reply is None:
        return
    try:
        await bus.publish(delivery.reply, data)
    except PayloadTooLarge as e:
        _log.error("the answer to a request to %s is too large: %s", delivery.subject, e)
        await bus.publish(delivery.reply, encode(ErrorReply.of(e)))


async def stream_answers(
    bus: Bus, inbox: str, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None
) -> AsyncIterator[bytes]:
    """Send `data` with `inbox` as its reply subject and yield what comes there until an empty message."""
    answers: asyncio.Queue[Delivery] = asyncio.Queue(STREAM_WINDOW)
    async with await bus.subscribe(inbox, answers.put, inline=True):
        await bus.publish(subject, data, reply=inbox, headers=headers)
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    got = await answers.get()
            except TimeoutError:
                raise timed_out(subject, timeout_s, "no further answer") from None
            if says_nobody_answers(got):
                raise nobody_answers(subject)
            if not got.data:
                return
            yield got.data
