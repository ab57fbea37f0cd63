"""Requests under way at a real cluster, by every door, ended in every way; and what is held for them anywhere."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from distserve.bus import subjects
from distserve.bus.nats import NatsBus
from distserve.messages import SequenceKey, StatusReply, StatusRequest, decode_as, encode
from tests.cluster import Cluster

Door = Literal["stream", "whole", "nats"]
Way = Literal["leave", "delete", "word", "deadline"]
HELD_S = 5.0  # for everything to be free; it is measured how much of this is taken

_HELD = {
    "prefill": ("distserve_worker_running_sequences", "distserve_worker_waiting_sequences"),
    "decode": ("distserve_worker_running_sequences", "distserve_worker_waiting_sequences"),
    "kvstore": ("distserve_kvstore_leases", "distserve_kvstore_pins", "distserve_kvstore_fetches"),
}
_names = (f"ask-{i}" for i in itertools.count())


class Ask:
    """One completion, on a task of its own. `error`: the code that it ended with."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.name = next(_names)  # its X-Request-Id
        self.status = 0
        self.error = self.message = ""
        self.num_chunks = 0
        self.token_ids: list[int] = []
        self.complete = False
        self.task: asyncio.Task[None]

    def take(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            self.error, self.message = event["error"]["code"], event["error"]["message"]
        self.num_chunks += bool(event.get("choices"))
        for choice in event.get("choices", ()):
            self.token_ids += choice["token_ids"]

    async def ended(self) -> None:
        async with asyncio.timeout(20.0):
            await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.result()

    async def leave(self) -> None:
        """Close its connection."""
        self.task.cancel()
        await self.ended()


class World:
    """`async with World.of(cluster, key)`: a client of a running cluster."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, bus: NatsBus, key: str) -> None:
        self.cluster, self.http, self.bus = cluster, http, bus
        self.urls = [cluster.url]  # of all gateways; the first is asked where a test names none
        self.headers = {"authorization": f"Bearer {key}"}

    @classmethod
    @asynccontextmanager
    async def of(cls, cluster: Cluster, key: str) -> AsyncIterator["World"]:
        limits = httpx.Limits(max_connections=200)
        async with (
            httpx.AsyncClient(timeout=60, limits=limits) as http,
            await NatsBus.connect(cluster.nats_url, name="test") as bus,
        ):
            yield cls(cluster, http, bus, key)

    # ------------------------------------------------------------ requests

    def ask(
        self, prompt: list[int], max_tokens: int, door: Door = "stream", deadline_s: float | None = None, url: str = ""
    ) -> Ask:
        ask = Ask(door)
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "stream": door != "whole"}
        headers = self.headers | {"x-request-id": ask.name}
        if deadline_s is not None:
            headers["x-deadline-ms"] = f"{max(1.0, 1000 * deadline_s):.0f}"
        run = self._over_nats if door == "nats" else self._over_http
        ask.task = asyncio.create_task(run(ask, body, headers, url or self.urls[0]))
        return ask

    async def _over_http(self, ask: Ask, body: dict[str, Any], headers: dict[str, str], url: str) -> None:
        async with self.http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            ask.status = response.status_code
            if ask.door == "whole" or ask.status != 200:
                ask.take(json.loads(await response.aread()))
                ask.complete = not ask.error
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ask.complete = True
                elif line:
                    ask.take(json.loads(line.removeprefix("data: ")))

    async def _over_nats(self, ask: Ask, body: dict[str, Any], headers: dict[str, str], url: str) -> None:
        subject = subjects.requests(self.cluster.name)
        async for message in self.bus.stream(subject, json.dumps(body).encode(), timeout_s=60, headers=headers):
            ask.take(json.loads(message))
        ask.complete = not ask.error

    async def running(self, url: str = "") -> dict[str, Any]:
        """By their own names."""
        response = await self.http.get(f"{url or self.urls[0]}/v1/requests", headers=self.headers)
        return {run["request_id"]: run for run in response.json()["data"]}

    async def stop(self, ask: Ask, way: Way, url: str = "") -> bool:
        """In this way; a deadline comes by itself. Whether it was ended by that: it may have been complete."""
        if way == "leave":
            await ask.leave()
            return True
        told = way == "deadline"
        async with asyncio.timeout(20.0):
            while not told and not ask.task.done():  # it may not have got there yet, or be about to end
                told = "cancelled" in await self._cancel(ask, way, url)
        await ask.ended()
        early = ask.error == ("deadline_exceeded" if way == "deadline" else "cancelled")
        assert early or not told or way == "deadline", f"cancelled, as was said, and yet: {ask.status} {ask.message}"
        return early

    async def _cancel(self, ask: Ask, way: Way, url: str) -> Any:
        if way == "delete":
            path = f"{url or self.urls[0]}/v1/requests/{ask.name}"
            return (await self.http.delete(path, headers=self.headers)).json()
        data = json.dumps({"id": ask.name}).encode()
        subject = subjects.cancel(self.cluster.name)
        return json.loads(await self.bus.request(subject, data, timeout_s=5, headers=self.headers))

    # ------------------------------------------------------------ what the cluster says

    async def phase(self, ask: Ask, role: str) -> str:
        """What the only worker of that role says of it; empty: the gateway does not know it, or not yet."""
        run = (await self.running()).get(ask.name)
        return "" if run is None else await self._said(role, run["id"])

    async def stage(self, ask: Ask) -> str:
        """What both workers say of it, e.g. `prefill, handoff`; empty as above."""
        if (run := (await self.running()).get(ask.name)) is None:
            return ""
        return ", ".join([await self._said(role, run["id"]) for role in ("prefill", "decode")])

    async def _said(self, role: str, request_id: str) -> str:
        request = StatusRequest(gateway="test", sequences=[(SequenceKey(request_id), 1_000_000)])
        answer = await self.bus.request(subjects.worker(role, f"{role}-0"), encode(request), timeout_s=5)
        return decode_as(StatusReply, answer).sequences[0].phase

    async def gauges(self, url: str) -> dict[str, float]:
        """Sums over labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.http.get(f"{url}/metrics")).text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    async def of_worker(self, worker: str) -> dict[str, float]:
        return await self.gauges(self.cluster.registry()[worker].http_url)

    async def held(self) -> dict[str, float]:
        """All that somebody has for any request: empty, if it is as if there had been none."""
        found: dict[str, float] = {}
        for worker, info in self.cluster.registry().items():
            if info.role == "gateway":
                continue
            said = await self.gauges(info.http_url)
            found |= {f"{worker} {name}": said[name] for name in _HELD[info.role]}
            if info.role != "kvstore":
                used = said["distserve_worker_total_blocks"] - said["distserve_worker_free_blocks"]
                found |= {f"{worker} used blocks": used, f"{worker} offered": said["distserve_store_held_blocks"]}
        for i, url in enumerate(self.urls):
            found[f"gateway {i} live"] = (await self.gauges(url))["distserve_gateway_live_sequences"]
            found[f"gateway {i} running"] = len(await self.running(url))
        return {name: value for name, value in found.items() if value}

    async def forgotten(self, ask: Ask) -> None:
        """Waits until the first gateway has nothing of it, for up to HELD_S."""
        deadline = time.monotonic() + HELD_S
        while ask.name in await self.running():
            assert time.monotonic() < deadline, f"after {HELD_S:g} s the gateway still has {ask.name}"

    async def nothing_held(self) -> tuple[float, dict[str, float]]:
        """Waits until then, for up to HELD_S. How long that took, seconds, and what was held last."""
        began, last = time.monotonic(), dict[str, float]()
        while left := await self.held():
            last = left
            if time.monotonic() - began > HELD_S:
                pytest.fail(f"{HELD_S:g} s after the last request was ended: {left}")
        return time.monotonic() - began, last
