"""Requests to the OpenAI routes of a gateway in process, and the events of their answers."""

import json
from typing import Any

import httpx

from tests.unit.gateway.scripted import Cluster

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


async def post(cluster: Cluster, path: str, body: Any, **options: Any) -> httpx.Response:
    async with cluster.client() as client:
        return await client.post(path, json=body, **options)


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [part if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]
