"""Limits of keys: requests a minute, tokens a minute, requests at once; what is counted, and always given back."""

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.types import Message

from distserve.errors import InvalidRequest, Overloaded, RateLimited
from distserve_gateway.permits import Permits
from tests.unit.gateway.keyed import BODIES, CHAT, COMPLETIONS, ask, ask_on_nats, bearer, error, key, keyed
from tests.unit.gateway.scripted import TOKENIZER, Cluster, says
from tests.waiting import until

TEXT = "one two three"
NUM_PROMPT = len(TOKENIZER.encode("a", add_special_tokens=True))
NUM_OUTPUT = len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def with_clock(cluster: Cluster) -> Clock:
    clock = Clock()
    cluster.gateway.permits._clock = clock
    return clock


def limited(response: httpx.Response, limit: str) -> float:
    """Checks a refusal; the milliseconds it tells to wait."""
    found = error(response, 429)
    assert (found["type"], found["code"], found["param"]) == ("rate_limit_error", "rate_limited", None)
    assert limit in found["message"]
    ms = int(response.headers["retry-after-ms"])
    assert found["retry_after_ms"] == ms
    assert int(response.headers["retry-after"]) == math.ceil(ms / 1000)
    return ms


# ---------------------------------------------------------------- requests a minute


async def test_requests_a_minute_and_the_wait_that_is_told_is_true() -> None:
    async with keyed(says(TEXT), key("a", requests_per_minute=2), key("b")) as cluster:
        clock = with_clock(cluster)
        assert [(await ask(cluster, "a", path)).status_code for path in list(BODIES)[:2]] == [200, 200]
        wait_ms = limited(await ask(cluster, "a"), "API key 'a' may make 2 requests a minute: the next in 30 s")
        assert wait_ms == 30_000
        assert (await ask(cluster, "b")).status_code == 200  # others' are not touched
        clock.now += wait_ms / 1000 - 0.01
        assert limited(await ask(cluster, "a"), "the next in 0.01 s") == 10
        clock.now += 0.01
        assert (await ask(cluster, "a")).status_code == 200
        assert limited(await ask(cluster, "a"), "the next in 30 s") == 30_000


async def test_both_doors_count_together_and_nats_says_when_to_come_again() -> None:
    async with keyed(says(TEXT), key("a", requests_per_minute=2)) as cluster:
        with_clock(cluster)
        assert "error" not in (await ask_on_nats(cluster, "a"))[0]
        assert (await ask(cluster, "a")).status_code == 200
        [refused] = await ask_on_nats(cluster, "a")
        over_http = await ask(cluster, "a")
        assert refused["error"] == over_http.json()["error"]
        assert refused["error"]["retry_after_ms"] == 30_000


async def test_what_is_refused_for_other_reasons_does_not_count() -> None:
    async with keyed(says(TEXT), key("a", requests_per_minute=1, tokens_per_minute=200)) as cluster:
        with_clock(cluster)
        refusals = [
            (await ask(cluster, "a", temperature=9)).status_code,
            (await ask(cluster, "a", priority="vip")).status_code,
            (await ask(cluster, "a", model="other")).status_code,
            (await ask(cluster, "a", prompt=[5] * 256)).status_code,
        ]
        for refusal in (Overloaded("busy"), InvalidRequest("not here")):
            cluster.workers["p0"].refusal = refusal
            refusals.append((await ask(cluster, "a")).status_code)
        cluster.workers["p0"].refusal = None
        assert refusals == [400, 403, 404, 400, 503, 400]
        assert cluster.gateway.permits.num_open("a") == 0
        assert (await ask(cluster, "a", max_tokens=200 - NUM_PROMPT)).status_code == 200  # all is there still
        assert (await ask(cluster, "a")).status_code == 429


@pytest.mark.parametrize("path", BODIES)
async def test_what_was_tokenised_to_be_refused_counts_as_a_request(path: str) -> None:
    long = "a " * 300
    async with keyed(says(TEXT), key("a", requests_per_minute=2, tokens_per_minute=10_000)) as cluster:
        clock = with_clock(cluster)
        field = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
        for _ in range(2):
            assert error(await ask(cluster, "a", path, **field), 400)["code"] == "context_length_exceeded"
        assert limited(await ask(cluster, "a", path, **field), "the next in 30 s") == 30_000
        assert cluster.gateway.permits.num_open("a") == 0
        clock.now += 60
        assert (await ask(cluster, "a", max_tokens=100)).status_code == 200  # none of its tokens count


async def test_tokens_that_are_there_later_cost_no_request_and_those_that_never_are_do() -> None:
    async with keyed(says(TEXT), key("a", requests_per_minute=2, tokens_per_minute=100)) as cluster:
        clock = with_clock(cluster)
        whole = 100 - NUM_PROMPT
        cluster.workers["d0"].gate_at = 2
        first = asyncio.create_task(ask(cluster, "a", max_tokens=whole))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        for _ in range(3):
            limited(await ask(cluster, "a", max_tokens=whole), "tokens a minute")
        cluster.workers["d0"].gate.set()
        assert (await first).status_code == 200
        assert error(await ask(cluster, "a", max_tokens=whole + 1), 429)["code"] == "rate_limited"
        assert limited(await ask(cluster, "a", max_tokens=1), "requests a minute") == 30_000
        clock.now += 30
        assert (await ask(cluster, "a", max_tokens=1)).status_code == 200


# ---------------------------------------------------------------- tokens a minute


async def test_tokens_are_charged_at_their_most_and_corrected_at_the_end() -> None:
    limit = 120
    async with keyed(says(TEXT), key("a", tokens_per_minute=limit)) as cluster:
        clock = with_clock(cluster)
        most = limit - NUM_PROMPT
        cluster.workers["d0"].gate_at = 2
        first = asyncio.create_task(ask(cluster, "a", max_tokens=most))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        said = f"the request {NUM_PROMPT + 1} tokens ({NUM_PROMPT} of prompt and up to 1 of output)"
        wait_ms = limited(await ask(cluster, "a", max_tokens=1), said)
        assert wait_ms == math.ceil((NUM_PROMPT + 1) * 60_000 / limit)
        cluster.workers["d0"].gate.set()
        assert (await first).json()["usage"]["total_tokens"] == NUM_PROMPT + NUM_OUTPUT
        left = limit - NUM_PROMPT - NUM_OUTPUT
        wait_ms = limited(await ask(cluster, "a", max_tokens=left - NUM_PROMPT + 1), "are there in")
        assert wait_ms == math.ceil(60_000 / limit)
        clock.now += wait_ms / 1000
        assert (await ask(cluster, "a", max_tokens=left - NUM_PROMPT + 1)).status_code == 200


async def test_a_prompt_counts_once_however_many_outputs_it_has() -> None:
    used = 2 * NUM_PROMPT + 4 * NUM_OUTPUT
    async with keyed(says(TEXT), key("a", tokens_per_minute=240)) as cluster:
        with_clock(cluster)
        asked = {"prompt": ["a", "a"], "n": 2, "max_tokens": (240 - 2 * NUM_PROMPT) // 4}
        assert (await ask(cluster, "a", **asked)).status_code == 200
        assert limited(await ask(cluster, "a", max_tokens=240 - used - NUM_PROMPT + 1), "are there in") > 0
        assert (await ask(cluster, "a", max_tokens=240 - used - NUM_PROMPT)).status_code == 200


async def test_more_than_a_minute_has_is_refused_with_what_would_do_and_no_time() -> None:
    async with keyed(says(TEXT), key("a", tokens_per_minute=100)) as cluster:
        response = await ask(cluster, "a", max_tokens=101 - NUM_PROMPT)
        found = error(response, 429)
        assert "more than API key 'a' may in a minute, 100: must ask for outputs of at most" in found["message"]
        assert f"of at most {100 - NUM_PROMPT} together (max_tokens)" in found["message"]
        assert "retry_after_ms" not in found
        assert not {"retry-after", "retry-after-ms"} & response.headers.keys()
        assert response.headers["x-should-retry"] == "false"
        long = error(await ask(cluster, "a", prompt=[70] * 100, max_tokens=1), 429)
        assert "must ask for at most 100 in all" in long["message"]
        assert (await ask(cluster, "a", max_tokens=100 - NUM_PROMPT)).status_code == 200


# ---------------------------------------------------------------- requests at once


async def test_so_many_requests_at_once_and_one_more_when_one_has_ended() -> None:
    async with keyed(says(TEXT), key("a", max_concurrent=2), key("b", max_concurrent=1)) as cluster:
        cluster.workers["d0"].gate_at = 2
        running = [asyncio.create_task(ask(cluster, "a", n=3)), asyncio.create_task(ask_on_nats(cluster, "a"))]
        await until(lambda: len(cluster.workers["d0"].submitted) == 4)
        assert limited(await ask(cluster, "a"), "has 2 requests under way, at most 2 may be at once") == 1000
        other = asyncio.create_task(ask(cluster, "b"))
        await until(lambda: len(cluster.workers["d0"].submitted) == 5)
        cluster.workers["d0"].gate.set()
        await asyncio.gather(*running, other)
        assert [cluster.gateway.permits.num_open(name) for name in "ab"] == [0, 0]
        assert (await ask(cluster, "a")).status_code == 200


async def leave(cluster: Cluster, name: str, fields: dict[str, Any], when: asyncio.Event) -> None:
    """A client that goes away."""
    body = json.dumps(BODIES[COMPLETIONS] | fields).encode()
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await when.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    headers = [(k.lower().encode(), v.encode()) for k, v in bearer(name).items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "raw_path": COMPLETIONS.encode(),
        "query_string": b"",
        "headers": headers,
        "client": ("client", 1),
        "server": ("gateway", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    await cluster.app(scope, receive, send)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_gives_its_permit_back(stream: bool) -> None:
    async with keyed(says(TEXT), key("a", max_concurrent=1, tokens_per_minute=120)) as cluster:
        with_clock(cluster)
        cluster.workers["d0"].gate_at = 2
        gone = asyncio.Event()
        fields = {"stream": stream, "max_tokens": 120 - NUM_PROMPT}
        leaving = asyncio.create_task(leave(cluster, "a", fields, gone))
        await until(lambda: [run.num_output_tokens for run in cluster.gateway.running.of("a")] == [2])
        assert cluster.gateway.permits.num_open("a") == 1
        gone.set()
        await asyncio.wait_for(leaving, 10)
        assert cluster.gateway.permits.num_open("a") == 0
        cluster.workers["d0"].gate.set()
        # What it had by then was used: prompt and two tokens.
        rest = 120 - NUM_PROMPT - 2
        assert (await ask(cluster, "a", max_tokens=rest - NUM_PROMPT + 3)).status_code == 429
        assert (await ask(cluster, "a", max_tokens=rest - NUM_PROMPT)).status_code == 200


async def test_a_broken_stream_and_a_cancelled_start_give_it_back() -> None:
    async with keyed(says(TEXT), key("a", max_concurrent=1), silence_s=0.1) as cluster:
        cluster.workers["d0"].gate_at = 2
        broken = asyncio.create_task(ask(cluster, "a", stream=True))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        await cluster.workers["d0"].die()
        assert '"code":"worker_lost"' in (await broken).text
        assert cluster.gateway.permits.num_open("a") == 0
        starting = asyncio.create_task(ask(cluster, "a"))  # no decode worker is left
        await until(lambda: cluster.gateway.permits.num_open("a") == 1 or starting.done())
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert cluster.gateway.permits.num_open("a") == 0


async def test_a_start_that_is_cancelled_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from distserve_gateway.dispatch import Dispatch

    entered = asyncio.Event()

    async def never(self: Dispatch, *rest: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    async with keyed(says(TEXT), key("a", max_concurrent=1, requests_per_minute=1)) as cluster:
        with_clock(cluster)
        with monkeypatch.context() as patch:
            patch.setattr(Dispatch, "submit", never)
            starting = asyncio.create_task(ask(cluster, "a"))
            await asyncio.wait_for(entered.wait(), 10)
            assert cluster.gateway.permits.num_open("a") == 1
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        assert cluster.gateway.permits.num_open("a") == 0
        assert (await ask(cluster, "a")).status_code == 200


# ---------------------------------------------------------------- the permit itself


def test_a_permit_closed_twice_is_given_back_once() -> None:
    one = key("a", max_concurrent=2, requests_per_minute=10, tokens_per_minute=100)
    permits = Permits([one], Clock())
    first, second = permits.open(one), permits.open(one)
    first.charge(10, 20)
    for _ in range(3):
        first.close(12)
    assert permits.num_open("a") == 1
    second.close()
    second.close(50)
    assert permits.num_open("a") == 0
    third = permits.open(one)
    third.charge(88, 0)
    with pytest.raises(RateLimited) as refused:
        permits.open(one).charge(1, 0)
    assert (refused.value.key, refused.value.limit) == ("a", "tokens_per_minute")
    assert refused.value.retry_after_s == pytest.approx(0.6)


def test_a_refused_opening_takes_nothing() -> None:
    one = key("a", max_concurrent=1, requests_per_minute=1)
    permits = Permits([one], clock := Clock())
    permit = permits.open(one)
    for _ in range(5):
        with pytest.raises(RateLimited, match="at once"):
            permits.open(one)
    permit.close()  # it never ran
    permit = permits.open(one)
    permit.close(1)
    for _ in range(5):
        with pytest.raises(RateLimited, match="a minute"):
            permits.open(one)
    clock.now += 60
    permits.open(one).close(1)
    assert permits.num_open("a") == 0
