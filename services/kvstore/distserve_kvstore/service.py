"""The node's door on the bus: what others may say to it, and which part of it answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from distserve.bus.base import Delivery
from distserve.errors import MalformedMessage, Unavailable
from distserve.messages import (
    BlocksReleased,
    ClockRequest,
    DeleteRequest,
    FetchRequest,
    Message,
    OfferReleased,
    OfferRequest,
    PinRequest,
    PrefixReply,
    PrefixRequest,
    ReportReply,
    ReportRequest,
    StoreList,
    StoreListRequest,
    StorePruneRequest,
    StoreStats,
    StoreStatsRequest,
    StoreVerifyRequest,
    TouchRequest,
    UnpinRequest,
    decode,
    encode,
)
from distserve.telemetry import current, entered, receive
from distserve.worker.clock import now_ns, told
from distserve.worker.store.traced import of_answer, processing, until_over
from distserve_kvstore.node import Node


class Door:
    """A responder for `subjects.worker("kvstore", id)`. `node` is None until a layout is known: then nothing is found
    and nothing taken. `report` tells its figures, also then."""

    def __init__(self, node_id: str = "", *, report: Callable[[], Awaitable[ReportReply]] | None = None) -> None:
        self.node: Node | None = None
        self._node_id = node_id
        self._report = report
        self._began = time.monotonic()

    async def __call__(self, delivery: Delivery) -> bytes:
        received_ns = now_ns()
        message = decode(delivery.data)
        if isinstance(message, ClockRequest):
            return encode(told(received_ns))
        if isinstance(message, ReportRequest) and self._report is not None:
            return encode(await self._report())
        with entered(receive(delivery.headers)):  # current() is who asks
            answer = await self._answer(message) if self.node is None else await answer_of(self.node, message)
        return b"" if answer is None else encode(answer)

    async def _answer(self, message: Message) -> Message | None:
        match message:
            case PrefixRequest():
                return PrefixReply(num_found=[0] * len(message.runs))
            case BlocksReleased() | OfferReleased():
                return None
            case StoreStatsRequest():
                return self._nothing_yet()
            case StoreListRequest():
                return StoreList(conversations=[])
        raise Unavailable("this store node knows no model's layout yet", retry_after_s=1.0)

    def _nothing_yet(self) -> StoreStats:
        return StoreStats(
            node=self._node_id,
            layout="",
            num_blocks=0,
            num_conversations=0,
            num_pinned=0,
            num_leases=0,
            num_lookups=0,
            num_looked_up_blocks=0,
            num_hit_blocks=0,
            uptime_s=time.monotonic() - self._began,
        )


async def answer_of(node: Node, message: Message) -> Message | None:
    """None for a message that wants no answer. Raises MalformedMessage for one that a store node does not know."""
    match message:
        case PrefixRequest():
            with until_over(processing("lookup", current(), node.node_id)) as span:
                found = node.lookup(message)
                if span.is_recording():
                    span.set_attributes(of_answer(found))
                return found
        case FetchRequest():
            with until_over(processing("fetch", current(), node.node_id)) as span:
                return await node.fetches.serve(message, span)
        case BlocksReleased():
            node.holdings.pins.release(message.asker, message.pin_id)
            return None
        case OfferRequest():
            with until_over(processing("offer", current(), node.node_id)) as span:
                grant = node.grants.grant(message)
                if span.is_recording():
                    span.set_attribute("distserve.kv.blocks", len(grant.wanted))
                return grant
        case OfferReleased():
            node.grants.release(message.worker, message.lease_id, message.epoch, message.reason)
            return None
        case TouchRequest():
            return node.touch(message)
        case PinRequest():
            return node.pin(message)
        case UnpinRequest():
            return node.unpin(message)
        case DeleteRequest():
            return await node.delete(message)
        case StoreStatsRequest():
            return node.stats()
        case StoreListRequest():
            return node.list(message)
        case StorePruneRequest():
            return await node.prune(message)
        case StoreVerifyRequest():
            return await node.verify()
    raise MalformedMessage(f"a store node has no answer to {type(message).__name__}", kind=type(message).__name__)
