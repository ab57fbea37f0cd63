"""The official client against the gateway: what it parses, streams, raises and retries."""

import asyncio

import openai
import pytest

from distserve.errors import Overloaded
from tests.integration.gateway.real_cluster import serving_http
from tests.unit.gateway.scripted import MAX_MODEL_LEN, TOKENIZER, says
from tests.waiting import until

TEXT = "The capital of France is Paris. 你好 🙂"
NUM_TOKENS = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1
USER = [{"role": "user", "content": "What is the capital of France?"}]


def client(url: str, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=max_retries, timeout=20)


async def test_chat_completion_and_models(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (_, url), client(url) as api:
        assert [model.id async for model in api.models.list()] == ["tiny"]
        assert (await api.models.retrieve("tiny")).owned_by == "distserve"
        answer = await api.chat.completions.create(model="tiny", messages=USER, n=2, temperature=0)
        assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2 * NUM_TOKENS
        assert answer._request_id


async def test_streams_with_usage(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (_, url), client(url) as api:
        stream = await api.chat.completions.create(
            model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == TEXT
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS
        completion = await api.completions.create(model="tiny", prompt="Q", max_tokens=99, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in completion]) == TEXT


async def test_logprobs_and_stop(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (_, url), client(url) as api:
        answer = await api.chat.completions.create(
            model="tiny", messages=USER, logprobs=True, top_logprobs=3, stop=["Paris"]
        )
        choice = answer.choices[0]
        assert choice.message.content == "The capital of France is "
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert answer.usage is not None
        assert len(choice.logprobs.content) == answer.usage.completion_tokens < NUM_TOKENS
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
        completion = await api.completions.create(model="tiny", prompt="Q", max_tokens=3, logprobs=2, echo=True)
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].finish_reason == "length"


async def test_errors_have_their_classes(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url), client(url) as api:
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="gpt-9", messages=USER)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="tiny", messages=USER, temperature=9)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as long:
            await api.completions.create(model="tiny", prompt="a", max_tokens=MAX_MODEL_LEN)
        assert long.value.code == "context_length_exceeded"
        cluster.workers["p0"].refusal = Overloaded("busy", retry_after_s=0.2)
        with pytest.raises(openai.InternalServerError) as busy:
            await api.completions.create(model="tiny", prompt="a")
        assert busy.value.status_code == 503


async def test_a_503_is_retried_after_the_time_it_names(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT), submit_timeout_s=0.2) as (cluster, url), client(url, 5) as api:
        worker = cluster.workers["p0"]
        worker.refusal = Overloaded("busy", retry_after_s=0.1)
        running = asyncio.create_task(api.completions.create(model="tiny", prompt="a", max_tokens=99))
        refused = 'distserve_gateway_requests_total{kind="completion",model="tiny",outcome="overloaded"} 2.0'
        await until(lambda: refused in cluster.gateway.metrics.exposition().decode(), what="two refusals")
        worker.refusal = None
        assert (await running).choices[0].text == TEXT


async def test_an_error_in_mid_stream_is_raised(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url), client(url) as api:
        cluster.workers["d0"].gate_at = 3
        stream = await api.chat.completions.create(model="tiny", messages=USER, stream=True)
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        await cluster.workers["d0"].die()
        with pytest.raises(openai.APIError) as lost:
            [chunk async for chunk in stream]
        assert lost.value.code == "worker_lost"


async def test_closing_a_stream_cancels_it(nats_url: str) -> None:
    async with serving_http(nats_url, says(TEXT)) as (cluster, url), client(url) as api:
        cluster.workers["d0"].gate_at = 3
        stream = await api.chat.completions.create(model="tiny", messages=USER, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: bool(cluster.workers["d0"].cancelled), timeout_s=2, what="decode told")
