"""While first tokens here are late, another server answers, and the client can tell by one header only."""

import asyncio
from typing import Any

import httpx
import msgspec
import openai
import pytest

from distserve.bus import subjects
from distserve_gateway import server
from distserve_gateway.fallback import Limits
from tests.integration.gateway.with_fallback import (
    BODIES,
    ROUTES,
    OwnServer,
    client_of,
    event,
    events_of,
    fallen_back,
    falling_back,
    head,
    open_breaker,
    over_http,
    says_bytes,
    streamed_text,
    text_of,
)
from tests.unit.gateway.keyed import bearer, key
from tests.unit.gateway.scripted import TOKENIZER, says, serving
from tests.waiting import until

TEXT = "The capital of France is Paris, and the rest of this answer is here too. 你好 🙂"
NUM_TOKENS = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1
DONE = b"data: [DONE]\n\n"
ALL_HERE = {"X-First-Token": "false"}
QUICK = Limits(first_byte_s=0.3, silence_s=0.3)


def without_names(answer: Any) -> Any:
    """All but what differs from one answer to the next."""
    return {name: value for name, value in answer.items() if name not in ("id", "created", "timings")}


# ------------------------------------------------------------ the client sees our answer


@pytest.mark.parametrize("route", ROUTES)
async def test_a_whole_answer_looks_as_if_it_were_made_here(route: str) -> None:
    body = BODIES[route] | {"max_tokens": 99, "return_token_ids": True}
    async with over_http(says(TEXT)) as (other, other_url), fallen_back(says(TEXT), other_url) as (cluster, url):
        async with client_of(url) as client:
            here = await client.post(route, json=body, headers=ALL_HERE)
            there = await client.post(route, json=body)
        assert (here.headers.get("x-served-by"), there.headers.get("x-served-by")) == (None, "fallback")
        assert without_names(there.json()) == without_names(here.json())
        assert text_of(there.json()) == TEXT
        assert there.json()["usage"]["completion_tokens"] == NUM_TOKENS
        assert len(cluster.workers["p0"].submitted) == 1
        assert len(other.workers["p0"].submitted) == 1
        assert there.json()["id"] not in (here.json()["id"], None)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_has_our_frames(route: str) -> None:
    body = BODIES[route] | {"max_tokens": 99, "stream": True, "stream_options": {"include_usage": True}}
    async with over_http(says(TEXT)) as (_, other_url), fallen_back(says(TEXT), other_url) as (_, url):
        async with client_of(url) as client:
            here = await client.post(route, json=body, headers=ALL_HERE)
            there = await client.post(route, json=body)
        assert (here.headers.get("x-served-by"), there.headers["x-served-by"]) == (None, "fallback")
        assert there.headers["content-type"] == here.headers["content-type"]
        ours, theirs = events_of(here.text), events_of(there.text)
        assert streamed_text(there.text) == TEXT
        assert len({e["id"] for e in theirs[:-1]}) == 1
        for at in (0, -2):  # the opening, and the usage
            assert without_names(theirs[at]) == without_names(ours[at])
        assert {frozenset(e) for e in theirs[:-1]} == {frozenset(e) for e in ours[:-1]}


async def test_usage_and_timings_come_only_if_asked_for() -> None:
    async with over_http(says(TEXT)) as (_, other_url), fallen_back(says(TEXT), other_url) as (_, url):
        async with client_of(url) as client:
            plain = events_of((await client.post(ROUTES[1], json={"prompt": "a", "stream": True})).text)
            assert all(event["choices"] and "usage" not in event for event in plain[:-1])
            body = {"prompt": "a", "max_tokens": 99, "timings": True}
            timings = (await client.post(ROUTES[1], json=body)).json()["timings"]
        assert timings["ttft_s"] > 0
        assert timings["prefill_s"] == 0, "nothing was prefilled here"


async def test_several_outputs_and_stop_strings() -> None:
    async with over_http(says(TEXT)) as (_, other_url), fallen_back(says(TEXT), other_url) as (_, url):
        async with client_of(url) as client:
            body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 99, "stop": [" Paris"]}
            answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert {choice["text"] for choice in answer["choices"]} == {"The capital of France is"}
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


async def test_echo_is_added_here_and_the_logprobs_of_a_prompt_are_computed_here() -> None:
    async with over_http(says(TEXT)) as (other, other_url), fallen_back(says(TEXT), other_url) as (cluster, url):
        async with client_of(url) as client:
            body = {"prompt": "Say: ", "max_tokens": 99, "echo": True}
            echo = await client.post("/v1/completions", json=body)
            scored = await client.post("/v1/completions", json=body | {"logprobs": 1})
        assert echo.headers["x-served-by"] == "fallback"
        assert echo.json()["choices"][0]["text"] == "Say: " + TEXT
        assert "x-served-by" not in scored.headers
        assert scored.json()["choices"][0]["logprobs"]["tokens"]
        assert len(other.workers["p0"].submitted) == len(cluster.workers["p0"].submitted) == 1


async def test_logprobs_are_those_of_the_fallback() -> None:
    async with over_http(says(TEXT)) as (_, other_url), fallen_back(says(TEXT), other_url) as (_, url):
        async with client_of(url) as client:
            for route, fields in ((ROUTES[0], {"logprobs": True, "top_logprobs": 2}), (ROUTES[1], {"logprobs": 2})):
                body = BODIES[route] | fields | {"max_tokens": 9}
                here = await client.post(route, json=body, headers=ALL_HERE)
                there = await client.post(route, json=body)
                assert there.headers["x-served-by"] == "fallback"
                assert there.json()["choices"] == here.json()["choices"]


async def test_the_openai_client_sees_no_difference() -> None:
    async with over_http(says(TEXT)) as (_, other_url), fallen_back(says(TEXT), other_url) as (_, url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as api:
            stream = await api.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                logprobs=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            whole = await api.completions.create(model="tiny", prompt="a", max_tokens=99)
        assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == TEXT
        assert {chunk.model for chunk in chunks} == {"tiny"}
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS
        assert whole.choices[0].text == TEXT


async def test_the_door_on_nats_falls_back_too() -> None:
    async with over_http(says(TEXT)) as (other, other_url), fallen_back(says(TEXT), other_url) as (cluster, _):
        bus = await cluster._stack.enter_async_context(await cluster._connect("asker"))
        data = msgspec.json.encode({"prompt": "a", "max_tokens": 99})
        said = [msgspec.json.decode(m) async for m in bus.stream(subjects.requests("tiny"), data, timeout_s=5)]
        assert "".join(map(text_of, said)) == TEXT
        assert [message["index"] for message in said] == list(range(len(said)))
        assert len(other.workers["p0"].submitted) == 1
        assert not cluster.workers["p0"].submitted


# ------------------------------------------------------------ what the fallback sees


async def test_the_clients_fields_go_as_they_came_but_for_our_own() -> None:
    own = OwnServer(says_bytes(head(), event("x", "stop"), DONE))
    async with own.serving() as there:
        config = falling_back(there + "/v1/", fallback_model="theirs", fallback_key="sk-1")
        async with over_http(says(TEXT), breaker=config) as (cluster, url), client_of(url) as client:
            open_breaker(cluster)
            body = {
                "model": "tiny",
                "prompt": "hello",
                "temperature": 0.25,
                "seed": 2**63 + 5,
                "stop": ["a", "b"],
                "logit_bias": {"7": -1.5},
                "user": "me",
                "vendor_field": {"deep": [1, None]},
            }
            ours = {
                "session_id": "s",
                "timings": True,
                "traffic_class": "background",
                "priority": "vip",
                "ttft_slo_ms": 5000,
                "tpot_slo_ms": 5000,
                "deadline_ms": 60_000,
                "echo": True,
            }
            answer = await client.post("/v1/completions", json=body | ours, headers={"authorization": "Bearer mine"})
            assert answer.status_code == 200, answer.text
    [asked] = own.asked
    assert (asked.method, asked.path) == ("POST", "/v1/completions")
    assert asked.headers["authorization"] == "Bearer sk-1"
    assert asked.headers["x-request-id"] == answer.json()["id"]
    assert asked.headers["x-first-token"] == "false"
    frame = {"model": "theirs", "stream": True, "stream_options": {"include_usage": True}}
    assert asked.body == body | frame
    assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == ("tiny", "hellox")


async def test_tenants_share_no_more_there_than_here() -> None:
    keys = key("a"), key("b")
    async with over_http(says(TEXT)) as (other, there), fallen_back(says(TEXT), there, keys=keys) as (_, url):
        async with client_of(url) as client:
            for name, salt in (
                ("a", {}),
                ("a", {}),
                ("b", {}),
                ("a", {"cache_salt": "@/x"}),
                ("b", {"cache_salt": "@/x"}),
            ):
                answer = await client.post("/v1/completions", json={"prompt": "a"} | salt, headers=bearer(name))
                assert answer.status_code == 200, answer.text
    salts = [request.cache_salt for request in other.workers["p0"].submitted]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert all(len(salt) == 64 and salt.isalnum() for salt in salts), "no server refuses these"


async def test_a_fallback_sends_nothing_on_in_its_turn() -> None:
    """Here it is the gateway itself, whose breaker is open: as two do that are each other's."""
    listener = server.bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(says(TEXT), breaker=falling_back(url)) as cluster, server.serving(cluster.app, listener):
        open_breaker(cluster)
        async with client_of(url) as client:
            answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 99})
        assert (text_of(answer.json()), answer.headers["x-served-by"]) == (TEXT, "fallback")
        assert len(cluster.workers["p0"].submitted) == 1


async def test_a_server_that_counts_no_tokens_and_answers_in_parts_of_bytes() -> None:
    """And one that says more, in other words, than this gateway knows."""
    stream = b": hello\n\n" + event("你好", None, system_fingerprint="x") + event("!", "eos_token") + DONE
    own = OwnServer(says_bytes(head(), *(bytes([byte]) for byte in stream)))
    async with own.serving() as there, fallen_back(says(TEXT), there) as (_, url), client_of(url) as client:
        answer = (await client.post("/v1/completions", json={"prompt": "a"})).json()
    assert answer["choices"][0]["text"] == "你好!"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2, "a chunk with text is one"
    assert "system_fingerprint" not in answer


# ------------------------------------------------------------ the fallback fails


BEFORE = {
    "an error": (says_bytes(head(500, "application/json"), b'{"error": {"message": "no!"}}'), "answered 500"),
    "what is wrong": (says_bytes(head(400, "application/json"), b'{"error": {"message": "no!"}}'), "answered 400: no!"),
    "not allowed": (says_bytes(head(401, "application/json"), b'{"error": {"message": "sk-1"}}'), "answered 401"),
    "no stream": (says_bytes(head(200, "application/json"), b"{}"), "must be text/event-stream"),
    "no HTTP": (says_bytes(b"SSH-2.0-x\r\n"), "broke off"),
    "nothing": (says_bytes(), "broke off"),
    "an empty stream": (says_bytes(head(), DONE), "ended its answer before it began"),
    "no JSON": (says_bytes(head(), b"data: {]\n\n"), "says what is no answer"),
    "an error event": (says_bytes(head(), b'data: {"error": {"message": "full"}}\n\n'), "with an error: full"),
    "another's choice": (says_bytes(head(), b'data: {"choices": [{"index": 3, "text": "x"}]}\n\n'), "gave choice 3"),
    "silence": (says_bytes(then_hangs=True), "gave nothing within 0.3 s"),
    "a head and silence": (says_bytes(head(), b": ping\n\n", then_hangs=True), "gave nothing within 0.3 s"),
}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("case", BEFORE)
async def test_a_failure_before_the_first_byte_is_a_503_that_names_the_fallback(
    case: str, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour, words = BEFORE[case]
    own = OwnServer(behaviour)
    async with own.serving() as there, fallen_back(says(TEXT), there, fallback_limits=QUICK) as (cluster, url):
        async with client_of(url) as client:
            answer = await client.post("/v1/completions", json={"prompt": "a", "stream": streamed})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "unavailable")
        assert f"the fallback server {there.removeprefix('http://')} " in error["message"]
        assert words in error["message"]
        assert "sk-1" not in error["message"] + caplog.text
        assert int(answer.headers["retry-after"]) >= 1
        assert len(own.asked) <= 1, "it is not tried again"
        assert not cluster.workers["p0"].submitted, "nor here"


async def test_a_server_that_is_not_there_is_a_503_too() -> None:
    async with OwnServer(says_bytes()).serving() as gone:
        pass
    async with fallen_back(says(TEXT), gone) as (_, url), client_of(url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert "can't be reached" in answer.json()["error"]["message"]


async def test_its_retry_after_is_passed_on() -> None:
    own = OwnServer(says_bytes(head(429, "application/json", "retry-after: 7"), b'{"error": "busy"}'))
    async with own.serving() as there, fallen_back(says(TEXT), there) as (_, url), client_of(url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


AFTER = {
    "cut": (says_bytes(head(), event("one ")), "broke off after 1 tokens"),
    "cut in an event": (says_bytes(head(), event("one "), b'data: {"choi'), "broke off after 1 tokens"),
    "silent": (says_bytes(head(), event("one "), then_hangs=True), "was silent for 0.3 s"),
    "an error": (says_bytes(head(), event("one "), b'data: {"error": "full"}\n\n'), "with an error: full"),
    "no JSON": (says_bytes(head(), event("one "), b"data: {]\n\n"), "says what is no answer"),
    "too short": (says_bytes(head(200, "text/event-stream", "content-length: 999"), event("one ")), "broke off"),
}


@pytest.mark.parametrize("case", AFTER)
async def test_a_failure_in_mid_stream_is_an_error_event(case: str) -> None:
    behaviour, words = AFTER[case]
    async with OwnServer(behaviour).serving() as there:
        async with fallen_back(says(TEXT), there, fallback_limits=QUICK) as (_, url), client_of(url) as client:
            answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
            whole = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 200
    *said, last = events_of(answer.text)
    assert "".join(map(text_of, said)) == "one "
    assert last["error"]["code"] == "unavailable"
    assert words in last["error"]["message"]
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize("end", [b"", DONE, b"data: {]\n\n"])
async def test_what_goes_wrong_after_the_last_text_is_no_matter(end: bytes) -> None:
    async with OwnServer(says_bytes(head(), event("one", "length"), end)).serving() as there:
        async with fallen_back(says(TEXT), there) as (_, url), client_of(url) as client:
            answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert streamed_text(answer.text) == "one"


async def test_a_server_that_never_says_done_holds_nobody_up() -> None:
    own = OwnServer(says_bytes(head(), event("one", "length"), then_hangs=True))
    async with own.serving() as there, fallen_back(says(TEXT), there) as (_, url), client_of(url) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert streamed_text(answer.text) == "one"
        async with asyncio.timeout(5):
            await own.left.wait()


# ------------------------------------------------------------ it ends early


@pytest.mark.parametrize("gate_at", [0, 3])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_ends_it_there_at_once(gate_at: int, streamed: bool) -> None:
    async with over_http(says(TEXT)) as (other, other_url), fallen_back(says(TEXT), other_url) as (cluster, url):
        worker = other.workers["d0" if gate_at else "p0"]
        worker.gate_at = gate_at
        async with client_of(url) as client:
            body = {"prompt": "a", "max_tokens": 99, "stream": streamed}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: len(worker.submitted) == 1)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await until(lambda: len(worker.cancelled) == 1, timeout_s=2, what="told there")
        assert cluster.gateway.fallback is not None
        await until(lambda: cluster.gateway.fallback.num_outputs == 0)  # type: ignore[union-attr]
        assert len(cluster.gateway.running) == 0


async def test_a_delete_and_a_deadline_end_it_there() -> None:
    async with over_http(says(TEXT)) as (other, other_url), fallen_back(says(TEXT), other_url) as (_, url):
        worker = other.workers["d0"]
        worker.gate_at = 3
        async with client_of(url) as client:
            body = {"prompt": "a", "max_tokens": 99, "stream": True}
            named = client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
            request = asyncio.create_task(named)
            await until(lambda: len(worker.submitted) == 1)
            await client.delete("/v1/requests/mine")
            assert "error" in events_of((await request).text)[-1]
            await until(lambda: len(worker.cancelled) == 1, timeout_s=2)
            late = await client.post("/v1/completions", json=body | {"deadline_ms": 300})
            assert events_of(late.text)[-1]["error"]["code"] == "deadline_exceeded"
            await until(lambda: len(worker.cancelled) == 2, timeout_s=2)


async def test_draining_lets_it_finish_and_takes_nothing_new() -> None:
    async with over_http(says(TEXT)) as (other, other_url), fallen_back(says(TEXT), other_url) as (cluster, url):
        worker = other.workers["d0"]
        worker.gate_at = 3
        async with client_of(url) as client:
            body = {"prompt": "a", "max_tokens": 99}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: len(worker.submitted) == 1)
            draining = asyncio.create_task(cluster.gateway.drain(10.0))
            await until(lambda: cluster.gateway._admission.draining)
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            worker.gate.set()
            assert text_of((await request).json()) == TEXT
            assert await draining is True


async def test_what_does_not_finish_while_draining_ends_with_an_error_event() -> None:
    async with over_http(says(TEXT)) as (other, other_url), fallen_back(says(TEXT), other_url) as (cluster, url):
        other.workers["d0"].gate_at = 3
        async with client_of(url) as client:
            body = {"prompt": "a", "max_tokens": 99, "stream": True}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: len(other.workers["d0"].submitted) == 1)
            assert await cluster.gateway.drain(0.1) is False
            assert events_of((await request).text)[-1]["error"]["code"] == "draining"


async def test_two_hundred_streams_at_once_are_complete() -> None:
    async with over_http(says(TEXT)) as (_, other_url), fallen_back(says(TEXT), other_url) as (cluster, url):
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            body = {"prompt": "a", "max_tokens": 99, "stream": True}
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(200)))
        assert {streamed_text(answer.text) for answer in answers} == {TEXT}
        assert not cluster.workers["p0"].submitted


async def test_no_more_run_there_than_may_run_here() -> None:
    async with over_http(says(TEXT)) as (other, other_url):
        async with fallen_back(says(TEXT), other_url, max_concurrent=2) as (_, url), client_of(url) as client:
            other.workers["d0"].gate_at = 3
            body = {"prompt": "a", "max_tokens": 99, "n": 2}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: len(other.workers["d0"].submitted) == 2)
            refused = await client.post("/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            other.workers["d0"].gate.set()
            assert (await request).status_code == 200
