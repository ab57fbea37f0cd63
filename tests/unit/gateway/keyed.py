"""A gateway with API keys, scripted workers behind it, and requests with one of the keys."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from distserve.api_keys import ApiKey, hashed
from distserve.bus import subjects
from tests.unit.gateway.scripted import Cluster, Script, serving

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    GENERATE: {"prompt": "a"},
}


def secret(name: str) -> str:
    return f"ds-{name}-0123456789"


def key(name: str, **limits: Any) -> ApiKey:
    return ApiKey(name=name, sha256=hashed(secret(name)), **limits)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret(name)}"}


@asynccontextmanager
async def keyed(script: Script, *keys: ApiKey, **options: Any) -> AsyncIterator[Cluster]:
    async with serving(script, keys=keys, **options) as cluster:
        yield cluster


async def ask(
    cluster: Cluster, name: str, path: str = COMPLETIONS, *, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    """With the key of this name; without one if it is empty."""
    async with cluster.client() as client:
        both = (bearer(name) if name else {}) | (headers or {})
        return await client.post(path, json=BODIES[path] | fields, headers=both)


async def ask_on_nats(
    cluster: Cluster, name: str, *, headers: dict[str, str] | None = None, **fields: Any
) -> list[Any]:
    data = json.dumps(BODIES[COMPLETIONS] | {"stream": False} | fields).encode()
    both = (bearer(name) if name else {}) | (headers or {})
    bus = await cluster._connect("asker")
    async with bus:
        return [json.loads(m) async for m in bus.stream(subjects.requests("tiny"), data, timeout_s=5, headers=both)]


def error(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert found.keys() >= {"message", "type", "param", "code"}
    return found
