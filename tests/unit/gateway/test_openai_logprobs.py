"""Logprobs and echo of the OpenAI routes."""

from tests.unit.gateway.posting import CHAT, COMPLETIONS, USER, events, post
from tests.unit.gateway.scripted import says, serving


async def test_chat_logprobs() -> None:
    async with serving(says("你 a")) as cluster:
        body = {"messages": USER, "logprobs": True, "top_logprobs": 2}
        whole = (await post(cluster, CHAT, body)).json()
        content = whole["choices"][0]["logprobs"]["content"]
        assert len(content) == whole["usage"]["completion_tokens"]
        assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "你 a"
        assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in content)
        *chunks, _ = events(await post(cluster, CHAT, body | {"stream": True}))
        streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert streamed == content


async def test_completion_logprobs_with_echo_cover_the_prompt() -> None:
    async with serving(says("is Paris")) as cluster:
        prompt = "The capital"
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 99}
        whole = (await post(cluster, COMPLETIONS, body)).json()
        choice = whole["choices"][0]
        lp = choice["logprobs"]
        assert choice["text"] == prompt + "is Paris"
        num = whole["usage"]["total_tokens"]
        assert all(len(lp[k]) == num for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
        assert lp["token_logprobs"][0] is None
        assert lp["top_logprobs"][0] is None
        assert set(lp["token_logprobs"][1:]) == {-0.5}
        assert "".join(lp["tokens"][:-1]) == choice["text"]
        for token, offset in list(zip(lp["tokens"], lp["text_offset"], strict=True))[:-1]:
            assert choice["text"][offset : offset + len(token)] == token
        *chunks, _ = events(await post(cluster, COMPLETIONS, body | {"stream": True}))
        assert chunks[0]["choices"][0]["text"] == prompt
        tokens = [t for c in chunks for t in c["choices"][0]["logprobs"]["tokens"]]
        assert tokens == lp["tokens"]


async def test_echo_alone_needs_no_worker_and_with_logprobs_scores_the_prompt() -> None:
    async with serving(says("never said")) as cluster:
        body = {"prompt": "The capital", "echo": True, "max_tokens": 0}
        whole = (await post(cluster, COMPLETIONS, body)).json()
        assert whole["choices"][0] == {"index": 0, "text": "The capital", "logprobs": None, "finish_reason": "length"}
        assert whole["usage"]["completion_tokens"] == 0
        assert cluster.workers["p0"].submitted == []
        scored = (await post(cluster, COMPLETIONS, body | {"logprobs": 0})).json()
        assert scored["choices"][0]["text"] == "The capital"
        assert len(scored["choices"][0]["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"]
        assert scored["usage"]["completion_tokens"] == 0
