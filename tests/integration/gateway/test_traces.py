"""A request's trace as a receiver gets it: the tree, its caller, attempts and their links, and how it ended."""

import asyncio
import json
import logging
from typing import Any

import httpx
import msgspec
import pytest

from distserve.bus import subjects
from distserve.errors import Overloaded
from distserve.telemetry import begin, current, finish, receive, trace_id_of
from tests.integration.gateway.traced import CHAT, SPAN_ID, TEXT, TRACE_ID, post, traced
from tests.integration.gateway.with_fallback import OwnServer, event, falling_back, head, open_breaker, says_bytes
from tests.unit.gateway.keyed import bearer, key
from tests.unit.gateway.scripted import TOKENIZER, says
from tests.waiting import until

NUM_TOKENS = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-03", "tracestate": "vendor=1"}


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_tree_of_a_chat(nats_url: str, streamed: bool) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        response = await post(found, "/v1/chat/completions", CHAT | {"stream": streamed, "temperature": 0.5})
        root = await found.root()
        assert root.names() == ("chat tiny", ["admission", "send prefill"])
        said = root.span.attributes
        assert (root.span.kind, root.span.parent_id, root.span.failed) == ("server", "", False)
        num_prompt_tokens = said["gen_ai.usage.input_tokens"]
        answer_id = json.loads(response.text.split("\n")[0].removeprefix("data: "))["id"]
        assert (
            said.items()
            >= {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "distserve",
                "gen_ai.request.model": "tiny",
                "gen_ai.request.max_tokens": 99,
                "gen_ai.request.temperature": 0.5,
                "gen_ai.request.top_p": 1.0,
                "gen_ai.response.model": "tiny",
                "gen_ai.response.id": answer_id,
                "gen_ai.response.finish_reasons": ["stop"],
                "gen_ai.usage.output_tokens": NUM_TOKENS,
                "http.request.method": "POST",
                "http.route": "/v1/chat/completions",
                "http.response.status_code": 200,
                "http.request.header.x-request-id": [response.headers["x-request-id"]],
                "distserve.request_id": answer_id,
                "distserve.priority": "normal",
                "distserve.slo_attained": "unpromised",
                "distserve.outcome": "ok",
            }.items()
        )
        assert 0 < said["gen_ai.server.time_to_first_token"] < root.span.end - root.span.start
        assert 0 < said["gen_ai.server.time_per_output_token"] < root.span.end - root.span.start
        assert root.one("admission").span.attributes == {"distserve.admission.tokens": num_prompt_tokens}
        send = root.one("send prefill").span
        assert (send.kind, send.links, send.failed) == ("client", [], False)
        assert send.attributes == {
            "messaging.system": "nats",
            "messaging.operation.type": "send",
            "messaging.destination.name": subjects.worker("prefill", "p0"),
            "distserve.request_id": answer_id,
            "distserve.output": 0,
            "distserve.attempt": 0,
            "distserve.route.kind": "pair",
            "distserve.route.reason": send.attributes["distserve.route.reason"],
            "distserve.route.prefill_worker": "p0",
            "distserve.route.decode_worker": "d0",
            "distserve.route.num_uncached_tokens": num_prompt_tokens,
        }
        assert "prefill" in send.attributes["distserve.route.reason"]
        assert root.span.resource["service.name"] == "distserve-gateway"
        assert not [v for span in found.receiver.spans() for v in span.attributes.values() if "secret" in str(v)]


async def test_it_is_a_part_of_its_callers_trace_and_the_workers_spans_of_it(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        response = await post(found, "/v1/completions", {"prompt": "a"}, headers=PARENT | {"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert not [name for name in response.headers if "trace" in name]
        finish(begin("process prefill", receive(found.headers[0]), kind="consumer"))  # as a worker does
        await found.wait_for(lambda r: r.named("process prefill"))
        root = await found.root(TRACE_ID)
        assert root.span.parent_id == SPAN_ID
        assert root.names() == ("text_completion tiny", ["admission", ("send prefill", ["process prefill"])])
        assert found.headers[0]["tracestate"] == "vendor=1"


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "00-nonsense")],
        [("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"), ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01")],
        [("tracestate", "vendor=1")],
    ],
)
async def test_a_caller_that_names_no_span_gets_a_trace_of_its_own(
    nats_url: str, headers: list[tuple[str, str]]
) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        assert (await post(found, "/generate", {"prompt": "a"}, headers=headers)).status_code == 200
        root = await found.root()
        assert root.names() == ("generate tiny", ["admission", "send prefill"])
        assert (root.span.parent_id, root.span.trace_id == TRACE_ID) == ("", False)


async def test_outputs_at_once_are_sends_under_one_root(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        await post(found, "/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 99})
        root = await found.root()
        assert root.names() == ("text_completion tiny", ["admission", *["send prefill"] * 4])
        sends = [node.span for node in root.all("send prefill")]
        assert sorted(span.attributes["distserve.output"] for span in sends) == [0, 1, 2, 3]
        assert [span.links for span in sends] == [[]] * 4
        assert root.span.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4
        assert root.span.attributes["gen_ai.request.choice.count"] == 2


async def test_a_refused_attempt_has_its_error_and_the_next_is_linked_to_it(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        found.cluster.workers["p0"].refusal = Overloaded("the queue is full", retry_after_s=1.0)
        await found.cluster.add("prefill", "p1", says(TEXT))
        await found.cluster.see("p1")
        while not found.cluster.workers["p1"].submitted or not found.headers:  # p0 is asked first, some time
            assert (await post(found, "/v1/completions", {"prompt": "a"})).status_code == 200
        failed = (await found.wait_for(lambda r: [s for s in r.named("send prefill") if s.failed]))[0]
        root = await found.root(failed.trace_id)
        first, second = (node.span for node in root.all("send prefill"))
        assert (first.failed, first.attributes["error.type"]) == (True, "overloaded")
        assert (second.failed, second.links) == (False, [first.span_id])
        assert [s.attributes["distserve.attempt"] for s in (first, second)] == [0, 1]
        assert [s.attributes["distserve.route.prefill_worker"] for s in (first, second)] == ["p0", "p1"]
        assert (root.span.failed, root.span.attributes["distserve.outcome"]) == (False, "ok")


async def test_nats_takes_the_caller_from_headers_and_answers_as_ever(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        bus = found.cluster.gateway_bus
        body = msgspec.json.encode({"prompt": "a", "max_tokens": 99, "stream": False})
        [answer] = [m async for m in bus.stream(subjects.requests("tiny"), body, timeout_s=5, headers=PARENT)]
        assert set(msgspec.json.decode(answer)) == {"index", "id", "object", "created", "model", "choices", "usage"}
        root = await found.root(TRACE_ID)
        assert (root.span.parent_id, root.span.kind) == (SPAN_ID, "server")
        assert root.names() == ("text_completion tiny", ["admission", "send prefill"])
        assert (
            root.span.attributes.items()
            >= {
                "messaging.system": "nats",
                "messaging.operation.type": "process",
                "messaging.destination.name": subjects.requests("tiny"),
                "gen_ai.usage.output_tokens": NUM_TOKENS,
                "distserve.outcome": "ok",
            }.items()
        )
        assert "http.response.status_code" not in root.span.attributes


async def test_the_fallback_server_is_a_part_of_the_trace(nats_url: str) -> None:
    chunks = [event("hello", "stop"), b"data: [DONE]\n\n"]
    other = OwnServer(says_bytes(head(), *chunks))
    async with other.serving() as other_url:
        async with traced(nats_url, says(TEXT), breaker=falling_back(other_url)) as found:
            open_breaker(found.cluster)
            assert (await post(found, "/v1/completions", {"prompt": "a"})).status_code == 200
            root = await found.root()
            assert root.names() == ("text_completion tiny", ["admission", "fallback"])
            span = root.one("fallback").span
            assert (span.kind, span.failed) == ("client", False)
            assert span.attributes["distserve.fallback.reason"] == "breaker"
            assert other_url.endswith(span.attributes["server.address"])
            assert other.asked[0].headers["traceparent"] == f"00-{root.span.trace_id}-{span.span_id}-03"


async def test_a_fallback_server_that_fails_is_a_failed_span(nats_url: str) -> None:
    said = b'{"error": {"message": "a secret word is no prompt"}}'
    other = OwnServer(says_bytes(head(422, "application/json"), said))
    async with other.serving() as other_url:
        async with traced(nats_url, says(TEXT), breaker=falling_back(other_url)) as found:
            open_breaker(found.cluster)
            response = await post(found, "/v1/completions", {"prompt": "a"})
            assert (response.status_code, "a secret word" in response.text) == (503, True)
            root = await found.root()
            assert root.one("fallback").span.attributes["error.type"] == "unavailable"
            assert (root.span.failed, root.span.attributes["error.type"]) == (True, "unavailable")
            assert not [span for span in found.receiver.spans() if "secret" in span.message]


JSON = {"content-type": "application/json"}
NOBODY = {"authorization": "Bearer nobody"}


@pytest.mark.parametrize(
    ("request_", "headers", "status", "outcome", "names"),
    [
        ({"json": {"prompt": "a", "temperature": 9}}, {}, 400, "invalid_request", ["admission"]),
        ({"content": b"no json"}, JSON, 400, "invalid_request", ["admission"]),
        ({"json": {"prompt": "a", "model": "other"}}, {}, 404, "model_not_found", ["admission"]),
        ({"json": {"prompt": "a"}}, NOBODY, 401, "invalid_api_key", []),
        ({"content": b"x" * 9000}, JSON, 413, "body_too_large", []),
        ({"content": b"x"}, {"content-type": "text/plain"}, 415, "http_415", []),
    ],
)
async def test_a_request_that_is_not_let_in_ends_its_root_once(
    nats_url: str, request_: dict[str, Any], headers: dict[str, str], status: int, outcome: str, names: list[str]
) -> None:
    async with traced(nats_url, says(TEXT), keys=(key("k"),), max_body_bytes=8192) as found:
        headers = {"authorization": bearer("k")["Authorization"]} | headers
        async with httpx.AsyncClient(base_url=found.url, timeout=20) as client:
            response = await client.post("/v1/completions", headers=headers, **request_)
        assert response.status_code == status
        root = await found.root()
        assert [child.span.name for child in root.children] == names
        said = root.span.attributes
        assert (said["distserve.outcome"], said["http.response.status_code"]) == (outcome, status)
        assert not any(span.failed or span.message for span in found.receiver.spans())  # the client's own fault


async def test_a_client_that_leaves_ends_its_root_as_cancelled(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        found.cluster.workers["d0"].gate_at = 3
        request = asyncio.create_task(post(found, "/v1/chat/completions", CHAT | {"stream": True}))
        await until(lambda: len(found.cluster.workers["d0"].submitted) == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        root = await found.root()
        assert root.names() == ("chat tiny", ["admission", "send prefill"])
        assert root.span.attributes["distserve.outcome"] == "cancelled"
        assert not root.span.failed


async def test_what_is_no_request_for_tokens_makes_no_span(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        async with httpx.AsyncClient(base_url=found.url, timeout=20) as client:
            for path in ("/health", "/health/live", "/metrics", "/version", "/v1/models", "/v1/completions", "/none"):
                await client.get(path)
            await client.post("/tokenize", json={"prompt": "a"})
            await client.delete("/v1/requests/none")
        await post(found, "/v1/completions", {"prompt": "a"})
        await found.root()
        assert {span.name for span in found.receiver.spans()} == {"text_completion tiny", "admission", "send prefill"}


async def test_what_is_logged_for_it_is_logged_within_its_trace(nats_url: str) -> None:
    async with traced(nats_url, says(TEXT)) as found:
        trace_ids: list[str] = []

        class Within(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                trace_ids.append(trace_id_of(current()).hex())

        logger, within = logging.getLogger("distserve_gateway.dispatch"), Within()
        logger.setLevel(logging.DEBUG)
        logger.addHandler(within)
        try:
            await post(found, "/v1/completions", {"prompt": "a", "n": 2}, headers=PARENT)
        finally:
            logger.removeHandler(within)
            logger.setLevel(logging.NOTSET)
        assert trace_ids == [TRACE_ID] * 2
