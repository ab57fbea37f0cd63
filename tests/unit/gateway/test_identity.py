"""cache_salt, session_id and user: at every door, checked, on their way to the workers, and the secret one unseen."""

import json
import logging
from typing import Any

import pytest

from distserve.bus import subjects
from distserve.errors import Overloaded
from distserve.messages import SubmitRequest
from tests.unit.gateway.scripted import Cluster, memory_cluster, says, serving
from tests.waiting import until

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    GENERATE: {"prompt": "a"},
}


async def post(cluster: Cluster, path: str, fields: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    async with cluster.client() as client:
        response = await client.post(path, json=BODIES[path] | fields, headers=headers)
        return response.status_code, response.json()


def submitted(cluster: Cluster) -> SubmitRequest:
    return cluster.workers["p0"].submitted[-1]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "header", "conversation"),
    [
        ({}, None, ""),
        ({"user": "u"}, None, "u"),
        ({"user": ""}, None, ""),
        ({"user": None, "session_id": None, "cache_salt": None}, None, ""),
        ({"user": "u", "session_id": "s"}, "h", "s"),
        ({"user": "u"}, "h", "h"),
        ({"user": "u"}, "", "u"),
        ({"session_id": "ж" * 256}, None, "ж" * 256),
    ],
)
async def test_the_conversation_is_the_session_else_the_header_else_the_user(
    path: str, fields: dict[str, Any], header: str | None, conversation: str
) -> None:
    async with serving(says("x")) as cluster:
        headers = None if header is None else {"X-Session-Id": header}
        status, answer = await post(cluster, path, fields, headers)
        assert status == 200, answer
        assert submitted(cluster).conversation == conversation
        assert submitted(cluster).cache_salt == ""


@pytest.mark.parametrize("path", BODIES)
async def test_the_salt_travels_with_every_output(path: str) -> None:
    async with serving(says("x")) as cluster:
        several = {} if path == GENERATE else {"n": 2}
        status, _ = await post(cluster, path, {"cache_salt": "tenant 7"} | several)
        assert status == 200
        assert [r.cache_salt for r in cluster.workers["p0"].submitted] == ["tenant 7"] * several.get("n", 1)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("cache_salt", "", "has 0 characters, must have 1 to 256 printable characters"),
        ("cache_salt", "s" * 257, "has 257 characters, must have 1 to 256"),
        ("cache_salt", "s\n", "has an unprintable character at 1"),
        ("cache_salt", 5, "must be of type str"),
        ("session_id", "", "has 0 characters"),
        ("session_id", "x" * 257, "has 257 characters"),
        ("session_id", "a\tb", "has '\\t' at 1, must have 1 to 256 printable characters"),
        ("session_id", {"a": 1}, 'session_id is {"a":1}, must be of type str'),
        ("user", "x" * 257, "has 257 characters"),
        ("user", 7, "user is 7, must be of type str"),
    ],
)
async def test_a_bad_one_is_named_and_the_request_refused(path: str, field: str, value: Any, words: str) -> None:
    async with serving(says("x")) as cluster:
        status, answer = await post(cluster, path, {field: value})
        assert status == 400
        assert answer["error"]["param"] == field
        assert words in answer["error"]["message"]
        assert cluster.workers["p0"].submitted == []


async def test_a_bad_header_is_named() -> None:
    async with serving(says("x")) as cluster:
        status, answer = await post(cluster, CHAT, {}, {"X-Session-Id": "x" * 257})
        assert (status, answer["error"]["param"]) == (400, "x-session-id")
        assert (await post(cluster, CHAT, {"session_id": "s"}, {"X-Session-Id": "x" * 257}))[0] == 200


@pytest.mark.parametrize("body", [BODIES[COMPLETIONS], BODIES[CHAT]])
async def test_the_door_on_nats_takes_them_too(body: dict[str, Any]) -> None:
    async with serving(says("x")) as cluster:
        bus = await cluster._stack.enter_async_context(await cluster._connect("asker"))

        async def ask(fields: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
            data = json.dumps(body | {"stream": False} | fields).encode()
            subject = subjects.requests("tiny")
            return [json.loads(m) async for m in bus.stream(subject, data, timeout_s=5, headers=headers)]

        await ask({"cache_salt": "t", "session_id": "s"}, {"X-Session-Id": "h"})
        assert (submitted(cluster).cache_salt, submitted(cluster).conversation) == ("t", "s")
        await ask({"user": "u"}, {"X-Session-Id": "h"})
        assert submitted(cluster).conversation == "h"
        [refused] = await ask({"cache_salt": ""})
        assert refused["error"]["param"] == "cache_salt"


async def test_the_salt_stands_in_no_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cluster = memory_cluster()
    secret = "SECRET-7f3a"
    try:
        await cluster.start_gateway(submit_timeout_s=0.2)
        answers = [await post(cluster, CHAT, {"cache_salt": secret})]  # no worker
        await cluster.add("decode", "d0", says("x"))
        await cluster.add("prefill", "p0", says("x"))
        await cluster.see("p0", "d0")
        answers.append(await post(cluster, CHAT, {"cache_salt": secret}))
        cluster.workers["p0"].refusal = Overloaded("busy")
        answers.append(await post(cluster, CHAT, {"cache_salt": secret}))
        for bad in (secret * 100, secret + "\x00", [secret], {"a": secret}, int("7" * 20)):
            answers.append(await post(cluster, CHAT, {"cache_salt": bad}))
        assert [status for status, _ in answers] == [503, 200, 503, 400, 400, 400, 400, 400]
        assert secret not in json.dumps([answer for _, answer in answers])
        assert "77777" not in json.dumps([answer for _, answer in answers])
        assert secret not in caplog.text
        await until(lambda: len(cluster.gateway.streams) == 0)
        assert all(secret not in repr(a) for a in (cluster.gateway.pipeline, cluster.gateway.health()))
    finally:
        await cluster.close()


async def test_openapi_has_the_fields() -> None:
    async with serving(says("x")) as cluster, cluster.client() as client:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
        for body in ("ChatBody", "CompletionBody", "GenerateBody"):
            assert {"cache_salt", "session_id", "user"} <= schemas[body]["properties"].keys()
