"""A gateway whose traces go to a receiver, over a real nats-server; its scripted workers make no spans of their own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.messages import TracesKept, decode_as
from distserve.telemetry import setup_tracing
from tests.integration.gateway.real_cluster import serving_http
from tests.otlp import Node, Received, Receiver
from tests.unit.gateway.scripted import Cluster, Script

T = TypeVar("T")

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TEXT = "The capital of France is Paris."
CHAT = {"messages": [{"role": "user", "content": "a secret word"}], "max_tokens": 99}
ROOTS = ("chat tiny", "text_completion tiny", "generate tiny")


class Traced:
    def __init__(self, cluster: Cluster, url: str, receiver: Receiver) -> None:
        self.cluster = cluster
        self.url = url
        self.receiver = receiver
        self.kept: list[bytes] = []  # trace ids, as gateways told everybody
        self.headers: list[dict[str, str]] = []  # of what prefill worker p0 was asked

    async def wait_for(self, condition: Callable[[Receiver], T]) -> T:
        return await asyncio.to_thread(self.receiver.wait_for, condition)

    async def root(self, trace_id: str = "") -> Node:
        """The tree of the one request that there was."""

        def roots(receiver: Receiver) -> list[Received]:
            return [span for span in receiver.spans(trace_id) if span.name in ROOTS]

        [root] = await self.wait_for(roots)
        return self.receiver.tree(root.trace_id)

    async def heard(self, delivery: Delivery) -> None:
        self.kept += decode_as(TracesKept, delivery.data).trace_ids

    async def asked(self, delivery: Delivery) -> None:
        if delivery.headers:
            self.headers.append(dict(delivery.headers))


async def post(found: Traced, path: str, body: Any, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=found.url, timeout=20) as client:
        return await client.post(path, json=body, **options)


@asynccontextmanager
async def traced(
    nats_url: str, script: Script, *, ratio: float = 1.0, endpoint: str = "", **options: Any
) -> AsyncIterator[Traced]:
    """`endpoint`: instead of the receiver's."""
    with Receiver() as receiver:
        end = setup_tracing("gw", endpoint or receiver.url, role="gateway", ratio=ratio)
        try:
            async with serving_http(nats_url, script, **options) as (cluster, url):
                found = Traced(cluster, url, receiver)
                bus = await cluster._stack.enter_async_context(await cluster._connect("listener"))
                async with await bus.subscribe(subjects.traces(), found.heard, inline=True):
                    async with await bus.subscribe(subjects.worker("prefill", "p0"), found.asked, inline=True):
                        await bus.flush()
                        yield found
        finally:
            await asyncio.to_thread(end)
