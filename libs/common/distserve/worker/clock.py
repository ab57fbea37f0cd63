"""What time it is at a service, for whoever measures how far two hosts' clocks are apart (`distserve doctor`)."""

import time

from distserve.bus.base import Delivery
from distserve.messages import ClockReply, ClockRequest, decode_as, encode


def now_ns() -> int:
    """The wall clock, nanoseconds of Unix time."""
    return time.time_ns()


def told(received_ns: int) -> ClockReply:
    """The answer to a ClockRequest that came at received_ns; to be sent at once."""
    return ClockReply(received_unix_ns=received_ns, sent_unix_ns=now_ns())


async def tell_time(delivery: Delivery) -> bytes:
    """A responder for a subject on which nothing else is asked. Raises MalformedMessage for anything else."""
    received_ns = now_ns()
    decode_as(ClockRequest, delivery.data)
    return encode(told(received_ns))
