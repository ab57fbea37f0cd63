"""What a trace shows of blocks that are looked up, fetched and offered: the names that both sides use.

kvstore lookup | fetch | offer    CLIENT: one for each source that is asked, from the question to the end
  process lookup | fetch | offer  CONSUMER: at that source
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from distserve.errors import DistServeError
from distserve.messages import TIERS, PrefixReply, Tier
from distserve.telemetry import NO_SPAN, Span, begin, finish
from distserve.transport.base import TransferFacts
from distserve.worker.store.found import Source

Deed = Literal["lookup", "fetch", "offer"]


def asking(deed: Deed, parent: Span, num_blocks: int, source: Source | None = None) -> Span:
    """Ours, of one source, if it is known whose turn it is: sent_to() says so later."""
    if parent is NO_SPAN:
        return NO_SPAN
    span = begin(f"kvstore {deed}", parent, kind="client", attributes={"distserve.kv.sought_blocks": num_blocks})
    if source is not None:
        sent_to(span, source)
    return span


def sent_to(span: Span, source: Source) -> None:
    if span.is_recording():
        span.set_attributes(
            {
                "messaging.system": "nats",
                "messaging.operation.type": "send",
                "messaging.destination.name": source.subject,
                "distserve.kv.node": source.worker_id,
            }
        )


def processing(deed: Deed, parent: Span, worker_id: str) -> Span:
    """Theirs: begun by a message to worker_id."""
    if parent is NO_SPAN:
        return NO_SPAN
    attributes = {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "distserve.worker": worker_id,
    }
    return begin(f"process {deed}", parent, kind="consumer", attributes=attributes)


@contextmanager
def until_over(span: Span) -> Iterator[Span]:
    """Ends it with what is inside, and with the error that leaves that."""
    try:
        yield span
    except BaseException as e:
        finish(span, error=e)
        raise
    finish(span)


async def followed(
    span: Span,
    deed: Coroutine[Any, Any, DistServeError | None],
    attributes: Callable[[], Mapping[str, str | int | float]],
) -> None:
    """The deed, and the span's end with what comes of it: the error that it returns, or raises."""
    error: BaseException | None = None
    try:
        error = await deed
    except BaseException as e:
        error = e
        raise
    finally:
        if span.is_recording():
            finish(span, attributes=attributes(), error=error)


def by_tier(num_blocks: Mapping[Tier, int]) -> dict[str, str | int]:
    """distserve.kv.blocks, of those each tier's, and the tiers' names, the fastest first."""
    held = {tier: num for tier in TIERS if (num := num_blocks.get(tier, 0))}
    made: dict[str, str | int] = {"distserve.kv.blocks": sum(held.values())}
    if held:
        made["distserve.kv.tier"] = ",".join(held)
    return made | {f"distserve.kv.{tier}_blocks": num for tier, num in held.items()}


def of_answer(reply: PrefixReply) -> dict[str, str | int]:
    """What a lookup has found, as by_tier(). What it does not say the tier of is only counted."""
    places = b"".join(reply.tiers)
    held: dict[Tier, int] = {tier: places.count(place) for place, tier in enumerate(TIERS)}
    return by_tier(held) | {"distserve.kv.blocks": sum(reply.num_found)}


def of_transfer(facts: TransferFacts) -> dict[str, str | int | float]:
    return {
        "distserve.kv.bytes": facts.num_bytes,
        "distserve.transfer.transport": facts.kind,
        "distserve.transfer.traffic_class": facts.traffic_class,
        "distserve.transfer.dscp": facts.dscp,
        "distserve.transfer.wait_s": facts.wait_s,
        "distserve.transfer.wire_s": facts.wire_s,
    }
