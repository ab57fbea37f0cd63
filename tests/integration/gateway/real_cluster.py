"""The gateway behind a real HTTP server, and scripted workers, over a real nats-server."""

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from distserve.bus.nats import NatsBus
from distserve_gateway import server
from tests.unit.gateway.scripted import Cluster, Script

_buckets = itertools.count()


@asynccontextmanager
async def serving_http(nats_url: str, script: Script, **options: Any) -> AsyncIterator[tuple[Cluster, str]]:
    """(cluster, the HTTP server's base URL), with prefill worker `p0` and decode worker `d0`."""
    bucket = f"gateway_tests_{os.getpid()}_{next(_buckets)}"

    async def connect(name: str) -> NatsBus:
        return await NatsBus.connect(nats_url, name=name, registry_bucket=bucket)

    cluster = Cluster(connect)
    try:
        await cluster.add("decode", "d0", script)
        await cluster.add("prefill", "p0", script)
        await cluster.start_gateway(**options)
        await cluster.see("p0", "d0")
        listener = server.bind("127.0.0.1", 0)
        async with server.serving(cluster.app, listener):
            yield cluster, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await cluster.close()
