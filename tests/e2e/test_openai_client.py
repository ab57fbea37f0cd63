"""The official client, as its users write it, against a running cluster."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.cluster import Cluster, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0, timeout=60) as c:
        yield c


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nonesuch")


def test_completion_and_its_usage(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="One two three", max_tokens=12, temperature=0)
    assert (len(answer.choices), answer.choices[0].finish_reason) == (1, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    again = client.completions.create(model="tiny", prompt="One two three", max_tokens=12, temperature=0)
    assert again.choices[0].text == answer.choices[0].text


def test_a_list_of_prompts_gives_a_choice_for_each_in_order(client: OpenAI) -> None:
    prompts = ["One", "two three", "four five six"]
    together = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0, n=2, seed=1)
    assert [c.index for c in together.choices] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
        assert together.choices[2 * i].text == together.choices[2 * i + 1].text == alone.choices[0].text
    ids: Any = [[5, 6, 7], [8, 9]]
    assert len(client.completions.create(model="tiny", prompt=ids, max_tokens=2).choices) == 2


def test_echo_puts_the_prompt_first(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="One two", max_tokens=3, temperature=0, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith("One two")
    assert answer.usage is not None
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == answer.usage.prompt_tokens + 3
    assert choice.logprobs.token_logprobs[0] is None
    assert all(p is not None and p <= 0 for p in choice.logprobs.token_logprobs[1:])


def test_chat_stream_equals_chat_and_brings_usage_last(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=25, temperature=0)
    text, usage, reasons = "", None, []
    stream = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        max_tokens=25,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        assert usage is None, "nothing follows the usage"
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 25
    assert reasons == ["length"]


def test_n_streams_interleave_by_index(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 10, "seed": 7, "n": 3}
    whole = client.chat.completions.create(**options)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert len(set(texts)) == 3


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob  # greedy


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    free = client.completions.create(model="tiny", prompt="One two three", max_tokens=40, temperature=0).choices[0].text
    stop = free[10:13]
    cut = client.completions.create(model="tiny", prompt="One two three", max_tokens=40, temperature=0, stop=stop)
    assert cut.choices[0].text == free[: free.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None
    assert cut.usage.completion_tokens < 40
    streamed = "".join(
        c.choices[0].text
        for c in client.completions.create(
            model="tiny", prompt="One two three", max_tokens=40, temperature=0, stop=stop, stream=True
        )
        if c.choices
    )
    assert streamed == cut.choices[0].text


@pytest.mark.parametrize(
    ("error", "param", "options"),
    [
        (openai.BadRequestError, "temperature", {"temperature": -1}),
        (openai.BadRequestError, "temperature", {"extra_body": {"temperature": True}}),
        (openai.BadRequestError, "max_tokens", {"max_tokens": 0}),
        (openai.BadRequestError, "top_p", {"top_p": 1.5}),
        (openai.BadRequestError, "tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (openai.BadRequestError, "response_format", {"response_format": {"type": "json_object"}}),
        (openai.BadRequestError, "logit_bias", {"logit_bias": {"99999": 1}}),
        (openai.NotFoundError, "model", {"model": "nonesuch"}),
    ],
)
def test_errors_have_their_class_and_name_the_field(
    client: OpenAI, error: type[openai.APIStatusError], param: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": QUESTION, **options})
    body: Any = caught.value.body
    assert body["param"] == param
    assert param in body["message"]
    assert body["code"]


def test_suffix_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="a", suffix="b")


def test_context_overflow_names_prompt_output_and_limit(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[7] * 2000, max_tokens=100)
    assert caught.value.code == "context_length_exceeded"
    for number in ("2000", "100", "2048"):
        assert number in caught.value.message.replace(",", "")


def test_a_stream_that_is_closed_is_cancelled(client: OpenAI, cluster: Cluster) -> None:
    stream = client.completions.create(
        model="tiny", prompt="One", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    cluster.wait_until_idle(5.0)


def test_retries_on_503_reach_a_worker_that_comes_back(tiny_llama: Path, tmp_path: Path) -> None:
    """The client obeys Retry-After and its retry is served."""
    with Cluster(tiny_llama, tmp_path) as c, OpenAI(base_url=c.url + "/v1", api_key="none", max_retries=30) as client:
        c["decode-0"].terminate()
        with pytest.raises(openai.InternalServerError) as caught:
            client.with_options(max_retries=0).completions.create(model="tiny", prompt="x", max_tokens=1)
        assert caught.value.status_code == 503
        assert float(caught.value.response.headers["retry-after"]) > 0
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(client.completions.create(model="tiny", prompt="x", max_tokens=3))
        )
        asking.start()
        c.start("decode", "decode-1")
        asking.join(90)
        assert answers, "the retry was served"
        assert answers[0].usage.completion_tokens == 3


def test_request_ids_go_in_and_out(cluster: Cluster) -> None:
    with OpenAI(base_url=cluster.url + "/v1", api_key="none") as client:
        raw = client.completions.with_raw_response.create(
            model="tiny", prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-42"}
        )
        assert raw.headers["x-request-id"] == "mine-42"


def test_many_clients_at_once_get_their_own_answers(client: OpenAI) -> None:
    prompts = [f"Number {i} is" for i in range(12)]
    alone = [
        client.completions.create(model="tiny", prompt=p, max_tokens=15, temperature=0).choices[0].text for p in prompts
    ]
    got: dict[int, str] = {}

    def ask(i: int) -> None:
        answer = client.completions.create(model="tiny", prompt=prompts[i], max_tokens=15, temperature=0)
        got[i] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for t in threads:
        t.start()
    deadline = time.monotonic() + 60
    wait_until(lambda: len(got) == len(prompts), deadline - time.monotonic(), "all are answered")
    assert [got[i] for i in range(len(prompts))] == alone
