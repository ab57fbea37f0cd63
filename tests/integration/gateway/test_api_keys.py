"""API keys over real HTTP and NATS, with the official client, and at a gateway's start."""

import asyncio
import json
import logging
from pathlib import Path

import openai
import pytest

from distserve.api_keys import ApiKey, hashed, load_keys, new_key
from distserve.bus import subjects
from distserve.config import load_config
from distserve.errors import ConfigError
from distserve.key_commands import append, entry_of
from distserve.lifecycle import Shutdown
from distserve_gateway.chat_template import ChatTemplate
from distserve_gateway.main import options_of, serve
from distserve_gateway.tokenizing import ModelTokenizer
from tests.integration.gateway.real_cluster import serving_http
from tests.unit.gateway import vocabularies
from tests.unit.gateway.scripted import says
from tests.waiting import until

TEXT = "The capital of France is Paris."
USER = [{"role": "user", "content": "What is the capital of France?"}]


def client(url: str, key: str, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=max_retries, timeout=20)


async def test_the_official_client_with_a_key_made_for_it(nats_url: str, tmp_path: Path) -> None:
    file, key = tmp_path / "keys.yaml", new_key()
    append(file, entry_of("support", key))
    file.write_text(file.read_text() + "  priorities: [vip, normal]\n")
    async with serving_http(nats_url, says(TEXT), keys=load_keys(file)) as (cluster, url):
        async with client(url, key) as api:
            assert [model.id async for model in api.models.list()] == ["tiny"]
            answer = await api.chat.completions.create(
                model="tiny", messages=USER, extra_headers={"X-Priority": "vip"}, extra_body={"tpot_slo_ms": 500}
            )
            assert answer.choices[0].message.content == TEXT
            assert cluster.workers["p0"].submitted[-1].traffic_class == "decode"
            with pytest.raises(openai.PermissionDeniedError) as forbidden:
                await api.chat.completions.create(model="tiny", messages=USER, extra_body={"priority": "batch"})
            assert forbidden.value.code == "forbidden"
            with pytest.raises(openai.NotFoundError):
                await api.chat.completions.create(model="other", messages=USER)
        async with client(url, new_key()) as stranger:
            with pytest.raises(openai.AuthenticationError) as refused:
                await stranger.chat.completions.create(model="tiny", messages=USER)
            assert (refused.value.code, refused.value.type) == ("invalid_api_key", "authentication_error")


async def test_the_official_client_waits_as_it_is_told_and_tries_again(nats_url: str) -> None:
    key = new_key()
    limited = ApiKey(name="a", sha256=hashed(key), requests_per_minute=60, tokens_per_minute=50)
    async with serving_http(nats_url, says(TEXT), keys=(limited,)) as (cluster, url), client(url, key) as api:
        for _ in range(60):  # all that there is for the moment
            cluster.gateway.permits.open(limited).close(1)
        with pytest.raises(openai.RateLimitError) as refused:
            await api.completions.create(model="tiny", prompt="a", max_tokens=1)
        assert refused.value.code == "rate_limited"
        patient = api.with_options(max_retries=3)
        assert (await patient.completions.create(model="tiny", prompt="a", max_tokens=1)).choices[0].text
        with pytest.raises(openai.RateLimitError, match="must ask for outputs of at most"):
            await patient.completions.create(model="tiny", prompt="a", max_tokens=90)
        # Once; once before the wait; of the last once before its wait, and then, since none would help, once more.
        exposition = cluster.gateway.metrics.exposition().decode()
        [counted] = [line for line in exposition.splitlines() if 'outcome="rate_limited"' in line and "_total" in line]
        assert counted.endswith(" 4.0"), counted


@pytest.mark.parametrize("with_keys", [True, False])
async def test_a_gateway_says_at_its_start_who_may_ask(
    nats_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, with_keys: bool
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "keys.yaml"
    append(file, entry_of("a", new_key()))
    overrides: dict[str, object] = {"gateway.port": 0, "bus.url": nats_url, "model.name": "said-at-start"}
    overrides["slo.ttft_ms"] = 400
    config = load_config(None, {}, overrides | ({"gateway.keys_file": str(file)} if with_keys else {}))
    shutdown = Shutdown(5.0)
    options, template = options_of(config, tmp_path), ChatTemplate(vocabularies.CHATML)
    assert (options.slo.ttft_ms, len(options.keys)) == (400, int(with_keys))
    tokenizer = ModelTokenizer(vocabularies.byte_level())
    task = asyncio.create_task(serve(config, options, tokenizer, template, shutdown))
    await until(lambda: "serving said-at-start" in caplog.text or task.done())
    shutdown.request()
    await asyncio.wait_for(task, 10)
    opened = "no API keys: open to everybody who reaches this address"
    assert caplog.text.count(opened) == (0 if with_keys else 1)
    assert caplog.text.count(f"API keys: 1, of {file}") == (1 if with_keys else 0)


def test_a_bad_file_of_keys_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a}\n")
    for path, words in ((file, r"keys.yaml, entry 1 \('a'\): sha256 is missing"), (tmp_path / "x", "can't be read")):
        with pytest.raises(ConfigError, match=words):
            options_of(load_config(None, {}, {"gateway.keys_file": str(path)}), tmp_path)


async def test_the_door_on_a_real_nats_server_takes_the_key_from_a_header(nats_url: str) -> None:
    key = new_key()
    keys = (ApiKey(name="a", sha256=hashed(key)),)
    async with serving_http(nats_url, says(TEXT), keys=keys) as (cluster, _):
        bus = cluster.gateway_bus
        body = b'{"prompt": "a", "stream": false}'
        said = []
        for headers in ({}, {"Authorization": f"Bearer {key}"}):
            said += [
                json.loads(m) async for m in bus.stream(subjects.requests("tiny"), body, timeout_s=5, headers=headers)
            ]
        assert said[0]["error"]["code"] == "invalid_api_key"
        assert said[1]["choices"][0]["text"]
