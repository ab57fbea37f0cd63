"""The answers of the OpenAI routes, in process: the application over a memory bus and scripted workers."""

from typing import Any

import pytest

from distserve.errors import Overloaded
from distserve_gateway.gateway import GatewayOptions
from distserve_gateway.output import Output
from tests.unit.gateway.posting import CHAT, COMPLETIONS, USER, events, post
from tests.unit.gateway.scripted import MAX_MODEL_LEN, TOKENIZER, says, serving
from tests.waiting import until

TEXT = "The capital of France is Paris. 你好 🙂"


async def test_a_completion() -> None:
    async with serving(says(TEXT)) as cluster:
        response = await post(cluster, COMPLETIONS, {"model": "tiny", "prompt": "Once", "max_tokens": 100})
        assert response.status_code == 200, response.text
        body = response.json()
        num_tokens = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1
        num_prompt = len(TOKENIZER.encode("Once", add_special_tokens=True))
        assert body["object"] == "text_completion"
        assert body["model"] == "tiny"
        assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
        assert body["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert len(cluster.gateway.streams) == 0
        await until(lambda: len(cluster.workers["d0"].outbox) == 0, what="decode's end acknowledged")
        assert cluster.gateway.workers.in_flight == {}


async def test_a_streamed_completion_says_the_same() -> None:
    async with serving(says(TEXT)) as cluster:
        response = await post(
            cluster, COMPLETIONS, {"model": "tiny", "prompt": "Once", "max_tokens": 100, "stream": True}
        )
        *chunks, done = events(response)
        assert done == "data: [DONE]"
        assert "".join(c["choices"][0]["text"] for c in chunks) == TEXT
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert len({c["id"] for c in chunks}) == 1
        assert len(chunks) > 5
        assert not any("usage" in c for c in chunks)


async def test_a_streamed_chat_with_usage_and_timings() -> None:
    async with serving(says(TEXT)) as cluster:
        body = {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, *USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings": True,
            "traffic_class": "decode",
        }
        *chunks, last, done = events(await post(cluster, CHAT, body))
        assert done == "data: [DONE]"
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == TEXT
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert all(c["usage"] is None for c in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1
        timings = last["timings"]
        assert {k: timings[k] for k in timings if k not in ("ttft_s", "tpot_s", "total_s")} == {
            "queue_s": 0.1,
            "prefill_s": 0.2,
            "transfer_s": 0.3,
            "decode_s": 0.4,
            "kv_bytes": 512,
            "transport": "shm",
            "traffic_class": "decode",
        }
        assert 0 < timings["ttft_s"] <= timings["total_s"]
        prompt = TOKENIZER.decode(cluster.workers["p0"].submitted[0].token_ids, skip_special_tokens=False)
        assert prompt == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        )
        assert 1 in cluster.workers["p0"].submitted[0].token_ids  # <|im_start|> is one token


async def test_usage_comes_with_every_chunk_if_asked_for() -> None:
    async with serving(says(TEXT)) as cluster:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"messages": USER, "stream": True, "stream_options": options}
        *chunks, _ = events(await post(cluster, CHAT, body))
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1


async def test_length_ends_an_answer() -> None:
    async with serving(says(TEXT)) as cluster:
        body = (await post(cluster, CHAT, {"messages": USER, "max_completion_tokens": 2})).json()
        ids = TOKENIZER.encode(TEXT, add_special_tokens=False)[:2]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["message"]["content"] == TOKENIZER.decode(ids, skip_special_tokens=True)
        assert body["usage"]["completion_tokens"] == 2
        one = (await post(cluster, CHAT, {"messages": USER, "max_tokens": 1})).json()  # prefill's token alone
        assert one["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_split_over_tokens_ends_the_answer_and_the_sequence(stream: bool) -> None:
    text = "The capital of France is Paris."
    async with serving(says(text)) as cluster:
        cluster.workers["d0"].gate_at = 40
        stop = "France is"
        response = await post(cluster, COMPLETIONS, {"prompt": "a", "max_tokens": 99, "stop": stop, "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {})})  # fmt: skip
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        texts = [TOKENIZER.decode(ids[: i + 1], skip_special_tokens=True) for i in range(len(ids))]
        counted = next(i + 1 for i, t in enumerate(texts) if stop in t)
        if stream:
            *chunks, usage, _ = events(response)
            said = "".join(c["choices"][0]["text"] for c in chunks)
            reason, completion_tokens = chunks[-1]["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]
        else:
            choice = response.json()["choices"][0]
            said, reason = choice["text"], choice["finish_reason"]
            completion_tokens = response.json()["usage"]["completion_tokens"]
        assert said == "The capital of "
        assert reason == "stop"
        assert completion_tokens == counted < len(ids)
        assert len(cluster.gateway.streams) == 0


async def test_a_stop_string_cancels_what_would_go_on() -> None:
    async with serving(says("one two STOP " + "three " * 20, ends=False)) as cluster:
        cluster.workers["d0"].gate_at = 12  # the rest never comes
        response = await post(cluster, COMPLETIONS, {"prompt": "a", "max_tokens": 90, "stop": ["STOP"]})
        assert response.json()["choices"][0]["text"] == "one two "
        await until(lambda: bool(cluster.workers["d0"].cancelled), what="decode told to stop")


async def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    async with serving(says("well STO")) as cluster:
        body = (await post(cluster, COMPLETIONS, {"prompt": "a", "stop": ["STOP"]})).json()
        assert body["choices"][0]["text"] == "well STO"


async def test_special_tokens_are_written_on_wish() -> None:
    async with serving(lambda request: [*TOKENIZER.encode("a", add_special_tokens=False), 1, 2]) as cluster:
        body = {"prompt": "x", "skip_special_tokens": False}
        assert (await post(cluster, COMPLETIONS, body)).json()["choices"][0]["text"] == "a<|im_start|>"
        assert (await post(cluster, COMPLETIONS, {"prompt": "x"})).json()["choices"][0]["text"] == "a"


async def test_generate() -> None:
    async with serving(says("is Paris.")) as cluster:
        body = (await post(cluster, "/generate", {"prompt": "The capital", "max_tokens": 20})).json()
        assert body["text"] == "is Paris."
        assert body["finish_reason"] == "stop"
        *chunks, _ = events(await post(cluster, "/generate", {"prompt": "a", "max_tokens": 20, "stream": True}))
        assert "".join(c["text"] for c in chunks) == "is Paris."
        refused = await post(cluster, "/generate", {"prompt": "a", "n": 2})
        assert refused.status_code == 400


async def test_models_tokenize_and_detokenize() -> None:
    async with serving(says("x")) as cluster, cluster.client() as client:
        models = (await client.get("/v1/models")).json()
        assert models["data"][0]["id"] == "tiny"
        assert models["data"][0]["max_model_len"] == MAX_MODEL_LEN
        assert (await client.get("/v1/models/tiny")).json() == models["data"][0]
        missing = await client.get("/v1/models/other/model")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        ids = TOKENIZER.encode("The capital 你", add_special_tokens=True)
        tokenized = (
            await client.post("/tokenize", json={"prompt": "The capital 你", "return_token_strs": True})
        ).json()
        assert tokenized["tokens"] == ids
        assert tokenized["count"] == len(ids) == len(tokenized["token_strs"])
        assert tokenized["max_model_len"] == MAX_MODEL_LEN
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "The capital 你"}
        chat = (await client.post("/tokenize", json={"messages": USER})).json()
        assert chat["tokens"][0] == 1
        assert (await client.post("/tokenize", json={})).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [10**6]})).status_code == 400


async def test_a_busy_worker_is_passed_over_and_all_busy_is_503() -> None:
    async with serving(says("x")) as cluster:
        cluster.workers["p0"].refusal = Overloaded("256 sequences wait here", retry_after_s=3.0)
        response = await post(cluster, COMPLETIONS, {"prompt": "a"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "3000")
        await cluster.add("prefill", "p1", says("x"))
        await cluster.see("p1")
        assert (await post(cluster, COMPLETIONS, {"prompt": "a"})).status_code == 200
        assert len(cluster.workers["p1"].submitted) == 1
        assert cluster.gateway.workers.in_flight == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_past_the_gateways_limit_is_a_504_or_an_error_event(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(says(TEXT)) as cluster:
        cluster.workers["d0"].gate_at = 3
        monkeypatch.setattr(GatewayOptions, "answer_limit_s", 0.2)
        response = await post(cluster, COMPLETIONS, {"prompt": "a", "max_tokens": 99, "stream": stream})
        last = events(response)[-1] if stream else response.json()
        assert response.status_code == (200 if stream else 504)
        assert last["error"]["code"] == "deadline_exceeded"
        assert "0.2 s" in last["error"]["message"]
        assert len(cluster.gateway.streams) == 0


async def test_a_fault_of_our_own_in_mid_stream_is_an_error_event_and_logged_with_the_ids(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feed, num_fed = Output.feed, 0

    def breaks(self: Output, *args: Any) -> Any:
        nonlocal num_fed
        num_fed += 1
        if num_fed == 4:
            raise RuntimeError("secret detail")
        return feed(self, *args)

    monkeypatch.setattr(Output, "feed", breaks)
    async with serving(says(TEXT)) as cluster:
        body = {"prompt": "a", "max_tokens": 99, "stream": True}
        *chunks, last = events(await post(cluster, COMPLETIONS, body, headers={"x-request-id": "mine-9"}))
        assert 1 <= len(chunks) <= 3
        assert last == {
            "error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
        }
        [record] = [r for r in caplog.records if "mine-9" in r.getMessage()]
        assert chunks[0]["id"] in record.getMessage()
        assert record.exc_info is not None
        assert len(cluster.gateway.streams) == 0
