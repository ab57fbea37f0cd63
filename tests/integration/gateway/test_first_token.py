"""X-First-Token: true draws the first token here and the rest at the fallback, and nobody can see the seam."""

import asyncio
from typing import Any

import msgspec
import pytest

from distserve.bus import subjects
from distserve.errors import InvalidRequest, Unavailable
from distserve_gateway import same_tokenizer
from distserve_gateway.admission import Admission
from distserve_gateway.fallback import Fallback, Limits
from distserve_gateway.same_tokenizer import SameTokenizer
from distserve_gateway.tokenizing import ModelTokenizer
from tests.integration.gateway.with_fallback import (
    BODIES,
    ROUTES,
    OwnServer,
    client_of,
    events_of,
    falling_back,
    goes_on,
    head,
    open_breaker,
    over_http,
    says_bytes,
    streamed_text,
    text_of,
)
from tests.unit.gateway import vocabularies
from tests.unit.gateway.keyed import bearer, key
from tests.unit.gateway.scripted import MODEL, TOKENIZER, Cluster, memory_cluster
from tests.unit.gateway.test_breaker import Clock
from tests.waiting import until

TEXT = "🙂 你好 The capital of France is Paris."  # the first token is a part of the first character
IDS = [*TOKENIZER.encode(TEXT, add_special_tokens=False), vocabularies.EOS_ID]
assert not TOKENIZER.decode(IDS[:1], skip_special_tokens=True).startswith("🙂")
BOTH, HERE = {"X-First-Token": "true"}, {"X-First-Token": "false"}
COMPLETIONS = "/v1/completions"


def names(answer: Any) -> Any:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def asked_for_answers(cluster: Cluster) -> list[Any]:
    """What the fallback's workers were asked for, but for the one token by which it shows that it gives ids."""
    return [request for request in cluster.workers["p0"].submitted if request.token_ids != PROBE]


PROBE = TOKENIZER.encode(same_tokenizer.PROBES[0], add_special_tokens=False)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_the_answer_is_the_one_that_is_made_all_here(route: str, streamed: bool) -> None:
    body = BODIES[route] | {"max_tokens": 99, "stream": streamed, "return_token_ids": True}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    async with over_http(goes_on(TEXT)) as (other, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (cluster, url), client_of(url) as client:
            here = await client.post(route, json=body, headers=HERE)
            both = await client.post(route, json=body, headers=BOTH)
            assert both.status_code == 200, both.text
            assert both.headers["x-served-by"] == "distserve, fallback"
            if streamed:
                assert streamed_text(both.text) == TEXT
                assert names(events_of(both.text)[-2]) == names(events_of(here.text)[-2]), "the usage"
            else:
                assert names(both.json()) == names(here.json())
        first, second = cluster.workers["p0"].submitted
        assert second.sampling.max_tokens == 1
        assert len(cluster.workers["d0"].submitted) == 1, "decode here had nothing to do with the second"
        [rest] = asked_for_answers(other)
        assert rest.token_ids == [*first.token_ids, IDS[0]]
        assert rest.sampling.max_tokens == first.sampling.max_tokens - 1


async def test_all_that_decides_about_tokens_goes_along() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "logit_bias": {"5": 2.0},
        "stop_token_ids": [99],
        "ignore_eos": True,
        "min_tokens": 4,
        "max_tokens": 9,
        "cache_salt": "secret",
    }
    async with over_http(goes_on(TEXT)) as (other, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (cluster, url), client_of(url) as client:
            for seed in ({}, {"seed": 3}, {"seed": 2**64 - 3}):
                answer = await client.post(COMPLETIONS, json={"prompt": "a"} | fields | seed, headers=BOTH)
                assert answer.status_code == 200, answer.text
        for first, rest in zip(cluster.workers["p0"].submitted, asked_for_answers(other), strict=True):
            wanted = msgspec.structs.replace(first.sampling, max_tokens=8, min_tokens=3)
            assert rest.sampling == wanted
            assert first.sampling.min_tokens == 1
            assert (first.cache_salt, len(rest.cache_salt)) == ("secret", 64)


@pytest.mark.parametrize("stop", ["🙂", "🙂 你", "好 The cap", "Paris."])
async def test_stop_strings_are_found_across_the_seam(stop: str) -> None:
    body = {"prompt": "a", "max_tokens": 99, "stop": stop}
    async with over_http(goes_on(TEXT)) as (other, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (_, url), client_of(url) as client:
            other.workers["d0"].gate_at = len(IDS) - 2  # past it, so that the stop string alone can end it
            here = (await client.post(COMPLETIONS, json=body, headers=HERE)).json()
            both = (await client.post(COMPLETIONS, json=body, headers=BOTH)).json()
        assert names(both) == names(here)
        assert both["choices"][0] | {"logprobs": None} == {
            "index": 0,
            "text": TEXT[: TEXT.index(stop)],
            "finish_reason": "stop",
            "logprobs": None,
        }


@pytest.mark.parametrize(
    ("fields", "finish_reason"),
    [({"max_tokens": 1}, "length"), ({"max_tokens": 9, "stop_token_ids": [IDS[0]]}, "stop")],
)
async def test_an_answer_of_one_token_needs_no_fallback(fields: dict[str, Any], finish_reason: str) -> None:
    async with over_http(goes_on(TEXT)) as (other, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (_, url), client_of(url) as client:
            both = (await client.post(COMPLETIONS, json={"prompt": "a"} | fields, headers=BOTH)).json()
        assert both["choices"][0]["finish_reason"] == finish_reason
        assert both["usage"]["completion_tokens"] == 1
        assert not asked_for_answers(other)


async def test_false_keeps_it_here_whatever_the_breaker_says() -> None:
    async with over_http(goes_on(TEXT)) as (other, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (cluster, url), client_of(url) as client:
            open_breaker(cluster)
            answer = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 99}, headers=HERE)
            assert (text_of(answer.json()), answer.headers.get("x-served-by")) == (TEXT, None)
            both = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 99}, headers=BOTH)
            assert both.headers["x-served-by"] == "distserve, fallback"
        assert len(asked_for_answers(other)) == 1


async def test_the_door_on_nats_takes_the_header_too() -> None:
    async with over_http(goes_on(TEXT)) as (other, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (cluster, _):
            bus = await cluster._stack.enter_async_context(await cluster._connect("asker"))
            inbox: list[Any] = []

            async def take(delivery: Any) -> None:
                inbox.append(msgspec.json.decode(delivery.data) if delivery.data else None)

            async with await bus.subscribe("answers", take):
                data = msgspec.json.encode({"prompt": "a", "max_tokens": 99})
                await bus.publish(subjects.requests(MODEL), data, reply="answers", headers=BOTH)
                await until(lambda: bool(inbox) and inbox[-1] is None)
        assert "".join(map(text_of, inbox[:-1])) == TEXT
        assert len(asked_for_answers(other)) == 1


# ------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("fields", "value", "words"),
    [
        ({}, "yes", "'yes', must be 'true' or 'false'"),
        ({"n": 2}, "true", "with 1 prompts and n = 2"),
        ({"prompt": ["a", "b"]}, "true", "with 2 prompts and n = 1"),
        ({"logprobs": 0}, "true", "with logprobs"),
    ],
)
async def test_what_can_not_be_handed_on_is_refused_by_name(fields: dict[str, Any], value: str, words: str) -> None:
    async with over_http(goes_on(TEXT)) as (_, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (_, url), client_of(url) as client:
            body = {"prompt": "a"} | fields
            answer = await client.post(COMPLETIONS, json=body, headers={"X-First-Token": value})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", "X-First-Token")
    assert words in error["message"]


async def test_without_a_fallback_it_is_refused_by_name() -> None:
    async with over_http(goes_on(TEXT)) as (_, url), client_of(url) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=BOTH)
        assert answer.status_code == 400
        assert "no breaker.fallback_url" in answer.json()["error"]["message"]
        assert (await client.post(COMPLETIONS, json={"prompt": "a"}, headers=HERE)).status_code == 200


async def test_another_tokenizer_is_found_by_what_it_does() -> None:
    other = memory_cluster()
    other_tokenizer = ModelTokenizer(vocabularies.unigram_fallback())
    try:
        await other.start_gateway()
        other.gateway.pipeline.intake._tokenizer = other_tokenizer
        from distserve_gateway import server

        listener = server.bind("127.0.0.1", 0)
        async with server.serving(other.app, listener):
            there = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (cluster, url):
                async with client_of(url) as client:
                    answer = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=BOTH)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "X-First-Token")
        assert "has another tokenizer: it has other ids for 'The quick brown fox" in error["message"]
        assert not cluster.workers["p0"].submitted
    finally:
        other_tokenizer.close()
        await other.close()


@pytest.mark.parametrize(
    ("behaviour", "status", "words"),
    [
        (says_bytes(head(404, "application/json"), b"{}"), 400, "has no /tokenize"),
        (says_bytes(head(200, "application/json"), b'{"tokens": "x"}'), 400, "another tokenizer"),
        (says_bytes(head(200, "application/json"), b"[]"), 400, "another tokenizer"),
        (says_bytes(head(500, "application/json"), b"{}"), 503, "answered 500"),
        (says_bytes(then_hangs=True), 503, "gave no answer within 0.3 s"),
    ],
)
async def test_a_server_that_can_not_show_its_tokenizer(behaviour: Any, status: int, words: str) -> None:
    own = OwnServer(behaviour)
    limits = Limits(question_s=0.3)
    async with own.serving() as there:
        breaker = falling_back(there)
        async with over_http(goes_on(TEXT), breaker=breaker, fallback_limits=limits) as (_, url):
            async with client_of(url) as client:
                for _ in range(2):
                    answer = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=BOTH)
                    assert answer.status_code == status
                    assert words in answer.json()["error"]["message"]
    assert len(own.asked) == 1, "what was found is kept, a failure also"


async def test_a_server_that_could_not_be_asked_is_asked_again_after_some_seconds() -> None:
    clock = Clock()
    own = OwnServer(says_bytes(head(500, "application/json"), b"{}"))
    async with own.serving() as there, Fallback(falling_back(there), MODEL, Admission(1)) as fallback:
        same = SameTokenizer(fallback, TOKENIZER, clock)
        for age_s in (0.0, 3.0):
            clock.now = 100.0 + age_s
            with pytest.raises(Unavailable, match="answered 500") as refused:
                await same.check()
            assert refused.value.retry_after_s == pytest.approx(same_tokenizer.FAILED_KEPT_S - age_s)
        assert len(own.asked) == 1
        own.behaviour = says_bytes(head(404, "application/json"), b"{}")
        clock.now = 100.0 + same_tokenizer.FAILED_KEPT_S
        for age_s in (0.0, same_tokenizer.KEPT_S - 1):
            clock.now += age_s
            with pytest.raises(InvalidRequest, match="has no /tokenize"):
                await same.check()
        assert len(own.asked) == 2


async def test_all_wait_for_one_finding_and_it_outlives_who_asked_for_it() -> None:
    own = OwnServer(says_bytes(then_hangs=True))
    async with own.serving() as there:
        breaker, limits = falling_back(there), Limits(question_s=1.0)
        async with over_http(goes_on(TEXT), breaker=breaker, fallback_limits=limits) as (cluster, url):
            async with client_of(url) as client:
                asking = [asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}, headers=BOTH))]
                await until(lambda: len(own.asked) == 1)
                asking += [
                    asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}, headers=BOTH)) for _ in range(4)
                ]
                await until(lambda: len(cluster.gateway.running) == 5)
                asking.pop(0).cancel()
                answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [503] * 4
    assert {answer.json()["error"]["message"].partition("gave")[2] for answer in answers} == {" no answer within 1 s"}
    assert len(own.asked) == 1


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"deadline_ms": 200}, 504, "deadline_exceeded"),
        ({"ttft_slo_ms": 200}, 429, "slo_unattainable"),
        ({}, 499, "cancelled"),
    ],
)
async def test_deadline_promise_and_delete_hold_while_the_fallback_is_asked(
    fields: dict[str, Any], status: int, code: str
) -> None:
    own = OwnServer(says_bytes(then_hangs=True))
    keys = (key("a", max_concurrent=1),)
    async with own.serving() as there:
        breaker, limits = falling_back(there), Limits(question_s=600.0)
        async with over_http(goes_on(TEXT), breaker=breaker, fallback_limits=limits, keys=keys) as (cluster, url):
            async with client_of(url) as client:
                headers = BOTH | bearer("a") | {"x-request-id": "mine"}
                asked = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"} | fields, headers=headers))
                await until(lambda: len(own.asked) == 1)
                if not fields:
                    assert (await client.delete("/v1/requests/mine", headers=bearer("a"))).status_code == 200
                answer = await asked
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
                assert len(cluster.gateway.running) == 0
                assert cluster.gateway.permits.num_open("a") == 0
                assert len(cluster.gateway.trials._lateness) == 0


async def test_a_full_fallback_is_no_late_first_token_of_ours() -> None:
    async with over_http(goes_on(TEXT)) as (other, there):
        breaker = falling_back(there)
        async with over_http(goes_on(TEXT), breaker=breaker, max_concurrent=1) as (cluster, url):
            async with client_of(url) as client:
                other.workers["d0"].gate_at = 3
                ask = {"prompt": "a", "max_tokens": 99}
                running = asyncio.create_task(client.post(COMPLETIONS, json=ask, headers=BOTH))
                await until(lambda: len(other.workers["d0"].submitted) == 1)
                refused = await client.post(COMPLETIONS, json=ask, headers=BOTH)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
                cluster.gateway.trials.second()
                assert cluster.gateway.trials.breaker.state == "closed"
                other.workers["d0"].gate.set()
                assert text_of((await running).json()) == TEXT


async def test_a_server_that_gives_no_ids_is_refused() -> None:
    async def behaviour(writer: asyncio.StreamWriter) -> None:
        asked = own.asked[-1]
        if asked.path == "/tokenize":
            said = {"tokens": TOKENIZER.encode(asked.body["prompt"], add_special_tokens=False)}
        else:
            said = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}  # type: ignore[dict-item]
        writer.write(head(200, "application/json") + msgspec.json.encode(said))

    own = OwnServer(behaviour)
    async with own.serving() as there:
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (_, url), client_of(url) as client:
            answer = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=BOTH)
    assert answer.status_code == 400
    assert "return_token_ids" in answer.json()["error"]["message"]


# ------------------------------------------------------------ it ends early


async def test_a_fallback_that_fails_at_the_seam_is_an_error_event() -> None:
    async with over_http(goes_on(TEXT)) as (other, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (_, url), client_of(url) as client:
            ask = {"prompt": "a", "max_tokens": 99, "stream": True}
            assert streamed_text((await client.post(COMPLETIONS, json=ask, headers=BOTH)).text) == TEXT
            other.gateway._admission.draining = True
            answer = await client.post(COMPLETIONS, json=ask, headers=BOTH)
            whole = await client.post(COMPLETIONS, json=ask | {"stream": False}, headers=BOTH)
        assert answer.status_code == 200
        error = events_of(answer.text)[-1]["error"]
        assert error["code"] == "unavailable"
        assert "the fallback server" in error["message"]
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize("where", ["here", "there"])
async def test_a_client_that_leaves_ends_it_on_both_sides(where: str) -> None:
    async with over_http(goes_on(TEXT)) as (other, there):
        async with over_http(goes_on(TEXT), breaker=falling_back(there)) as (cluster, url), client_of(url) as client:
            ask = {"prompt": "a", "max_tokens": 99, "stream": True}
            await client.post(COMPLETIONS, json=ask, headers=BOTH)
            worker = cluster.workers["p0"] if where == "here" else other.workers["d0"]
            worker.gate_at = 0 if where == "here" else 3
            num_before = len(worker.submitted)
            request = asyncio.create_task(client.post(COMPLETIONS, json=ask, headers=BOTH))
            await until(lambda: len(worker.submitted) == num_before + 1)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await until(lambda: len(worker.cancelled) >= 1, timeout_s=2, what="told")
            await until(lambda: len(cluster.gateway.running) == 0)
            assert cluster.gateway.fallback is not None
            await until(lambda: cluster.gateway.fallback.num_outputs == 0)  # type: ignore[union-attr]
