"""What is refused, with which status, and how it is said."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from distserve_gateway.admission import Admission
from distserve_gateway.tokenizing import ModelTokenizer
from tests.unit.gateway.scripted import MAX_MODEL_LEN, TOKENIZER, Cluster, memory_cluster, says, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"retry_after_ms"} == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return body["error"]  # type: ignore[no-any-return]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with serving(says("x"), max_concurrent=8, max_body_bytes=20_000) as cluster:
        yield cluster


async def post(cluster: Cluster, path: str, body: Any, **options: Any) -> httpx.Response:
    async with cluster.client() as client:
        return await client.post(path, json=body, **options)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", True, "true"),
        ("temperature", "1", '"1"'),
        ("temperature", -1, "between 0 and 2"),
        ("temperature", 2.01, "between 0 and 2"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0"),
        ("top_k", 1.5, "1.5"),
        ("top_k", -2, "-2"),
        ("min_p", 1.1, "between 0 and 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", 3, "between -2 and 2"),
        ("frequency_penalty", -2.5, "between -2 and 2"),
        ("n", 0, "between 1 and 128"),
        ("n", True, "true"),
        ("n", 9, "at most 8"),
        ("seed", 2**64, "18446744073709551616"),
        ("seed", "1", '"1"'),
        ("max_tokens", -1, "-1"),
        ("max_tokens", 0, "0"),
        ("max_tokens", "5", '"5"'),
        ("min_tokens", 17, "at most max_tokens"),
        ("logit_bias", {"x": 1}, "'x'"),
        ("logit_bias", {"100000": 1}, "100000"),
        ("logit_bias", {"-1": 1}, "-1"),
        ("logit_bias", {"5": 101}, "between -100 and 100"),
        ("logit_bias", {"5": "a"}, "float"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "at most 1024"),
        ("traffic_class", "urgent", "one of decode, prefill, background"),
        ("traffic_class", 48, "48"),
        ("stop", [""], "1 to 4096"),
        ("stop", ["a"] * 17, "at most 16"),
        ("stop", 5, "5"),
        ("stop_token_ids", [10**9], "1000000000"),
        ("stream", "yes", '"yes"'),
        ("stream_options", {"include_usage": True}, "stream"),
        ("ignore_eos", 1, "1"),
        ("logprobs", 21, "between 0 and 20"),
        ("logprobs", True, "true"),
        ("suffix", "end", "not supported"),
        ("best_of", 2, "not supported"),
        ("use_beam_search", True, "not supported"),
        ("response_format", {"type": "json_object"}, "not supported"),
        ("guided_json", {}, "not supported"),
        ("prompt_logprobs", 1, "not supported"),
        ("prompt", [], "at least one"),
        ("prompt", None, "missing"),
        ("prompt", "", "no tokens"),
        ("prompt", [[]], "no tokens"),
        ("prompt", ["a"] * 9, "at most 8"),
        ("prompt", [[5]] * 9, "at most 8"),
        ("prompt", ["a", 1], "mixes"),
        ("prompt", [1, "a"], "mixes"),
        ("prompt", [-1], "-1"),
        ("prompt", [True], "true"),
        ("prompt", [[5, 10**7]], "10000000"),
        ("prompt", {"a": 1}, "prompt"),
    ],
)
async def test_a_bad_field_is_named_with_its_value(cluster: Cluster, field: str, value: Any, words: str) -> None:
    found = error(await post(cluster, COMPLETIONS, {"prompt": "a", field: value}), 400)
    assert found["param"].split("[")[0].split(".")[0] in (field, "n")
    assert field in found["message"] or "prompt" in found["message"] or "outputs" in found["message"]
    assert words in found["message"]
    assert found["type"] == "invalid_request_error"
    assert cluster.workers["p0"].submitted == []


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", {"type": "function"}, "tool_choice"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format"),
        ("audio", {"voice": "x"}, "audio"),
        ("modalities", ["text", "audio"], "modalities"),
        ("functions", [{"name": "f"}], "functions"),
        ("reasoning_effort", "high", "reasoning_effort"),
        ("continue_final_message", True, "continue_final_message"),
        ("top_logprobs", 3, "top_logprobs"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("logprobs", 1, "logprobs"),
        ("messages", [], "messages"),
        ("messages", None, "messages"),
        ("messages", [{"content": "a"}], "messages[0]"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "wizard", "content": "a"}], "messages[0].role"),
        ("messages", [{"role": "tool", "content": "a"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ],
)
async def test_a_bad_chat_field_is_named(cluster: Cluster, field: str, value: Any, param: str) -> None:
    found = error(await post(cluster, CHAT, {"messages": USER, field: value}), 400)
    assert found["param"] == param


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True, "metadata": {"a": "b"}, "never_heard_of": 1},
        {"temperature": None, "stop": None, "seed": None, "stream_options": None, "n": None},
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"temperature": 1, "top_k": -1},
    ],
)
async def test_what_asks_for_nothing_is_fine(cluster: Cluster, harmless: dict[str, Any]) -> None:
    assert (await post(cluster, CHAT, {"messages": USER} | harmless)).status_code == 200


async def test_too_long_for_the_context_names_prompt_max_tokens_and_limit(cluster: Cluster) -> None:
    num = len(TOKENIZER.encode("word " * 50, add_special_tokens=False))
    for body, max_tokens in (({"prompt": "word " * 50, "max_tokens": 250}, 250), ({"prompt": [5] * 300}, 1)):
        found = error(await post(cluster, COMPLETIONS, body), 400)
        assert found["code"] == "context_length_exceeded"
        assert found["param"] == "prompt"
        num_prompt = num if isinstance(body["prompt"], str) else 300
        for number in (num_prompt, max_tokens, MAX_MODEL_LEN):
            assert str(number) in found["message"]
    found = error(await post(cluster, CHAT, {"messages": [{"role": "user", "content": "word " * 500}]}), 400)
    assert (found["code"], found["param"]) == ("context_length_exceeded", "messages")


async def test_a_prompt_that_leaves_room_for_one_token_is_taken(cluster: Cluster) -> None:
    response = await post(cluster, COMPLETIONS, {"prompt": [5] * (MAX_MODEL_LEN - 1)})
    assert response.status_code == 200
    assert cluster.workers["p0"].submitted[0].sampling.max_tokens == 1


async def test_an_unknown_model_is_404(cluster: Cluster) -> None:
    found = error(await post(cluster, CHAT, {"model": "gpt-9", "messages": USER}), 404)
    assert (found["code"], found["param"], found["type"]) == ("model_not_found", "model", "not_found_error")
    assert "gpt-9" in found["message"]
    assert "tiny" in found["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nonsense", b'{"prompt": "\xff"}', b'{"n":1}x', b"[" * 5000])
async def test_what_is_no_json_object_is_400(cluster: Cluster, body: bytes) -> None:
    async with cluster.client() as client:
        response = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert "JSON" in error(response, 400)["message"]


async def test_another_content_type_is_415(cluster: Cluster) -> None:
    async with cluster.client() as client:
        response = await client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
        assert error(response, 415)["code"] == "unsupported_media_type"
        charset = {"content-type": "application/json; charset=utf-8"}
        assert (await client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers=charset)).status_code == 200


async def test_a_body_over_the_limit_is_413_declared_or_not(cluster: Cluster) -> None:
    big = json.dumps({"prompt": "a" * 30_000}).encode()

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(big), 1000):
            yield big[i : i + 1000]

    async with cluster.client() as client:
        for content in (big, parts()):
            response = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
            found = error(response, 413)
            assert found["code"] == "body_too_large"
            assert "20000" in found["message"]


async def test_unknown_routes_and_methods_have_the_same_shape(cluster: Cluster) -> None:
    async with cluster.client() as client:
        assert error(await client.get("/v1/nothing"), 404)["code"] == "route_not_found"
        assert error(await client.get(COMPLETIONS), 405)["code"] == "method_not_allowed"


async def test_request_ids_go_in_and_out(cluster: Cluster) -> None:
    async with cluster.client() as client:
        kept = await client.get("/version", headers={"x-request-id": "abc-123"})
        assert kept.headers["x-request-id"] == "abc-123"
        for bad in (b"x" * 129, b"a b", b"caf\xe9", b""):
            response = await client.get("/version", headers=[(b"x-request-id", bad)])
            assert response.headers["x-request-id"].startswith("req-")
        ids = {(await client.get("/version")).headers["x-request-id"] for _ in range(3)}
        assert len(ids) == 3


async def test_no_worker_of_a_role_is_503_naming_it() -> None:
    cluster = memory_cluster()
    try:
        await cluster.start_gateway()
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
            response = await post(cluster, COMPLETIONS, body)
            found = error(response, 503)
            assert found["code"] == "no_worker"
            assert "decode worker" in found["message"]
            assert int(response.headers["retry-after"]) >= 1
            assert int(response.headers["retry-after-ms"]) >= 1000
            await cluster.add("prefill", "p0", says("x"))  # which has nobody to hand over to
            await cluster.see("p0")
        await cluster.add("decode", "d0", says("x"))
        await cluster.see("d0")
        assert (await post(cluster, COMPLETIONS, {"prompt": "a"})).status_code == 200
    finally:
        await cluster.close()


async def test_many_short_prompts_are_tokenised_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, threads = ModelTokenizer.encode, set()

    def watched(self: ModelTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        threads.add(threading.current_thread() is threading.main_thread())
        return encode(self, text, add_special_tokens=add_special_tokens)

    async with serving(says("x")) as cluster:
        monkeypatch.setattr(ModelTokenizer, "encode", watched)
        prompts = [f"prompt {i} " * 10 for i in range(60)]  # each short, together long
        response = await post(cluster, COMPLETIONS, {"prompt": prompts, "max_tokens": 1})
        assert len(response.json()["choices"]) == 60
        assert threads == {False}
        sent = {r.key.output_index: r.token_ids for r in cluster.workers["p0"].submitted}
        assert sent == {i: encode(TOKENIZER, p, add_special_tokens=True) for i, p in enumerate(prompts)}
        threads.clear()
        await post(cluster, COMPLETIONS, {"prompt": ["a", "b"]})
        assert threads == {True}  # a thread would cost more than it saves


async def test_tokenize_is_bounded_as_requests_on_their_way_in_are(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, entered, release = ModelTokenizer.encode_off_loop, asyncio.Event(), asyncio.Event()

    async def held(self: ModelTokenizer, texts: Any, *, add_special_tokens: bool) -> list[list[int]]:
        entered.set()
        await release.wait()
        return await encode(self, texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(ModelTokenizer, "encode_off_loop", held)
    async with serving(says("x"), max_concurrent=1) as cluster:
        first = asyncio.create_task(post(cluster, "/tokenize", {"prompt": "a"}))
        await asyncio.wait_for(entered.wait(), 10)
        for path in ("/tokenize", COMPLETIONS):
            response = await asyncio.wait_for(post(cluster, path, {"prompt": "a"}), 10)
            assert error(response, 503)["code"] == "overloaded"
        release.set()
        assert (await first).json()["count"] == 1
        assert (await post(cluster, "/tokenize", {"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("param", ["ttft_slo_ms", "temperature"])
async def test_a_number_that_is_none_is_said_to_be_out_of_range(cluster: Cluster, param: str) -> None:
    body = b'{"prompt": "a", "%b": 1e400}' % param.encode()
    async with cluster.client() as client:
        response = await client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    found = error(response, 400)
    assert (found["param"], found["message"]) == (param, f"{param} is out of range, must be a number below 1.8e308")


async def test_prompt_logprobs_that_no_message_could_carry_are_refused_with_what_would_do() -> None:
    cluster = memory_cluster(max_payload_bytes=20_000)
    try:
        await cluster.add("decode", "d0", says("x"))
        await cluster.add("prefill", "p0", says("x"))
        await cluster.start_gateway()
        await cluster.see("p0", "d0")
        body = {"prompt": [300] * 100, "echo": True, "max_tokens": 1}
        found = error(await post(cluster, COMPLETIONS, body | {"logprobs": 20}), 400)
        assert found["param"] == "logprobs"
        assert "logprobs of at most 6, or a prompt of at most 34 tokens" in found["message"]
        for fits in (body | {"logprobs": 6}, body | {"logprobs": 20, "prompt": [300] * 34}):
            assert (await post(cluster, COMPLETIONS, fits)).status_code == 200
        assert (await post(cluster, COMPLETIONS, body | {"echo": False, "logprobs": 20})).status_code == 200
    finally:
        await cluster.close()


async def test_a_fault_of_our_own_is_500_in_the_same_shape_with_its_id_and_logged_under_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Admission, num_new: int, num_live: int) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Admission, "check", broken)
    response = await post(cluster, COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": "mine-7"})
    assert error(response, 500)["code"] == "internal_error"
    assert response.headers["x-request-id"] == "mine-7"
    assert "secret" not in response.text
    [record] = [r for r in caplog.records if "mine-7" in r.getMessage()]
    assert record.exc_info is not None
    assert "secret detail" in caplog.text
    assert len(cluster.gateway.streams) == 0


async def test_a_template_that_refuses_is_400(cluster: Cluster) -> None:
    from distserve_gateway.chat_template import ChatTemplate

    cluster.gateway.pipeline.intake._template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    found = error(await post(cluster, CHAT, {"messages": USER}), 400)
    assert "roles must alternate" in found["message"]
    assert found["param"] == "messages"
