"""Requests that are ended by name, while other gateways that are asked for them fail in one way or another."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.errors import DistServeError, MalformedMessage
from distserve.messages import WorkerInfo
from distserve_gateway import stopping
from tests.unit.gateway.scripted import MODEL, Cluster
from tests.unit.gateway.test_running import STREAM, asking, delete, error_of, halted, headers, last_error, tokens_came


class Peer:
    """Another gateway, which answers with an error."""

    def __init__(self, error: DistServeError) -> None:
        self.error = error
        self.num_asked = 0

    async def __call__(self, delivery: Delivery) -> bytes:
        self.num_asked += 1
        raise self.error


@asynccontextmanager
async def beside(cluster: Cluster, error: DistServeError) -> AsyncIterator[Peer]:
    bus = await cluster._stack.enter_async_context(await cluster._connect("gw9"))
    peer = Peer(error)
    async with await bus.serve(subjects.worker("gateway", "gw9"), peer):
        await bus.registry().put(WorkerInfo(worker_id="gw9", role="gateway", model=MODEL, status="ok"))
        await cluster.see("gw9")
        yield peer


async def test_a_gateway_that_ends_nothing_by_name_has_nothing_to_end() -> None:
    """Of an older version: it says at once that it does not know the message."""
    async with halted() as cluster, beside(cluster, MalformedMessage("unknown message StopRequest")) as peer:
        assert error_of(await delete(cluster, "mine")) == (404, "request_not_found")
        assert peer.num_asked == 1


async def test_what_has_ended_here_is_told_whatever_becomes_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with halted() as cluster, beside(cluster, DistServeError("internal error")) as peer:
        for num_asked, most in ((1, stopping.MAX_ASKING), (1, 0)):
            monkeypatch.setattr(stopping, "MAX_ASKING", most)
            async with asking(cluster, STREAM, headers("mine")) as answer:
                await tokens_came(cluster)
                response = await delete(cluster, "mine")
                assert (response.status_code, response.json()["num_outputs"]) == (200, 1)
                assert last_error(await answer) == "cancelled"
            assert peer.num_asked == num_asked
        assert error_of(await delete(cluster, "mine")) == (503, "overloaded")
        monkeypatch.undo()
        assert error_of(await delete(cluster, "mine")) == (503, "unavailable")
