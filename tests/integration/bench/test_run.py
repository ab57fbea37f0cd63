"""Whole measurements of scripted servers over real sockets."""

import asyncio
import itertools
from pathlib import Path

import pytest

from distserve.bench.document import Document
from tests.integration.bench.scripted import Asked, Reply, Scripted, measured, serving, streaming
from tests.waiting import until


async def test_a_closed_loop_keeps_so_many_in_flight_and_sends_what_was_asked() -> None:
    async with serving(Scripted(streaming(ttft_s=0.02, gap_s=0.005))) as server:
        document = await measured(server, concurrency=3, requests=12, warmup="3")
        summary = document.sides[0].summary
        assert (summary.num_ok, summary.num_requests, summary.num_warm) == (12, 12, 3)
        assert summary.max_in_flight == 3
        assert server.num_connections <= 4  # they are kept and used again
        assert len(server.answers) == 15
        assert all(a.num_output == 4 and a.body["ignore_eos"] and a.body["stream"] for a in server.answers)
        assert len({a.text for a in server.answers}) == 15
        assert (summary.input_mean, summary.num_input_as_asked) == (20, 12)
        assert (summary.output_mean, summary.num_output_as_asked) == (4, 12)


async def test_a_connection_of_its_own_for_each_request() -> None:
    async with serving(Scripted(streaming())) as server:
        await measured(server, concurrency=2, requests=6, fresh=True)
        assert server.num_connections == len(server.asked)


async def test_an_open_loop_waits_for_nobody() -> None:
    """Answers take 0.5 s, requests come every 0.05 s."""
    async with serving(Scripted(streaming(ttft_s=0.5))) as server:
        document = await measured(server, rate=20.0, constant=True, requests=20)
        assert document.is_open
        assert document.sides[0].summary.max_in_flight >= 9
        times = [a.at_s for a in server.answers]
        assert times[-1] - times[0] == pytest.approx(19 / 20, abs=0.15)


async def test_latency_counts_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    """The client's loop is held up for 0.3 s: what was due meanwhile is sent late, and the wait is told."""

    async with serving(Scripted(streaming(ttft_s=0.01))) as server:

        async def hold_up() -> None:
            await until(lambda: len(server.answers) >= 5)
            busy_until = asyncio.get_running_loop().time() + 0.3
            while asyncio.get_running_loop().time() < busy_until:
                pass

        held = asyncio.create_task(hold_up())
        document = await measured(server, rate=50.0, constant=True, requests=30)
        await held
    late = [r for r in document.results if (r.sent_s or 0) - r.due_s > 0.15]
    assert late
    assert all((r.ttft_s() or 0) > 0.15 for r in late)
    assert all((r.ttft_s() or 0) - (r.ttft_s(from_sent=True) or 0) > 0.14 for r in late)
    assert (document.client.use.send_late_p99_s or 0) > 0.1
    assert any("ms late" in warning for warning in document.warnings)


async def test_times_are_those_of_the_server() -> None:
    async with serving(Scripted(streaming(ttft_s=0.1, gap_s=0.03))) as server:
        document = await measured(server, concurrency=1, requests=20, output="3", slo="ttft=99ms,tpot=1s")
    summary = document.sides[0].summary
    for name, least_s in (("ttft", 0.1), ("itl", 0.03), ("tpot", 0.03), ("e2e", 0.16)):
        p50 = summary.latencies[name].quantiles["p50"].value_s
        assert p50 is not None
        assert least_s * 0.97 <= p50 < least_s + 0.06, name
    assert summary.latencies["ttft"].quantiles["p90"].value_s is None
    assert summary.latencies["ttft"].quantiles["p90"].needs == 100
    assert summary.good_share == 0  # none had its first token within 99 ms
    assert summary.output_tokens_per_s == pytest.approx(60 / summary.window_s, rel=0.02)


async def test_the_duration_bounds_what_is_sent_and_all_of_it_is_waited_for() -> None:
    async with serving(Scripted(streaming(ttft_s=0.05))) as server:
        document = await measured(server, rate=40.0, constant=True, duration="500ms", warmup="250ms")
    summary = document.sides[0].summary
    assert (summary.num_warm, summary.num_requests, summary.num_ok) == (10, 20, 20)
    assert summary.window_s == pytest.approx(0.5)


@pytest.mark.parametrize("load", [{"rate": 40.0, "constant": True}, {"concurrency": 2}])
async def test_what_ends_before_the_duration_ends_the_window(load: dict[str, float]) -> None:
    async with serving(Scripted(streaming(ttft_s=0.05))) as server:
        document = await measured(server, requests=4, duration="30s", **load)
    assert_window_ends_with_the_last_answer(document)


async def test_so_does_a_trace_that_is_shorter(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 20, "output_length": 2}\n'
    path.write_text("".join(line % (i * 50) for i in range(4)))
    async with serving(Scripted(streaming(ttft_s=0.05))) as server:
        document = await measured(server, trace=path, duration="30s", input="", output="")
    assert_window_ends_with_the_last_answer(document)


def assert_window_ends_with_the_last_answer(document: Document) -> None:
    [side] = document.sides
    [(_, end)] = side.windows
    assert end == max(r.done_s for r in document.results)
    assert side.summary.num_ok == 4
    assert side.summary.requests_per_s == pytest.approx(4 / end)


async def test_the_same_seed_sends_the_same_and_another_something_else() -> None:
    texts: list[list[str]] = []
    for seed in (4, 4, 5):
        async with serving(Scripted(streaming())) as server:
            await measured(server, concurrency=1, requests=8, seed=seed, input="uniform:min=5,max=40")
            texts.append([a.text for a in server.answers])
    assert texts[0] == texts[1]
    assert not set(texts[0]) & set(texts[2])


async def test_a_trace_sends_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 2, "hash_ids": [7, %d]}\n'
    path.write_text("".join(line % (i * 1000, 1000 + i, i + 10) for i in range(4)))
    async with serving(Scripted(streaming(overhead=5), tokenize=5)) as server:
        document = await measured(server, trace=path, speed=20.0, input="", output="")
        words = [a.text.split() for a in server.answers]
        assert [len(w) + 5 for w in words] == [1000, 1001, 1002, 1003]
        for a, b in itertools.pairwise(words):
            assert a[:513] == b[:513]
            assert a[513:560] != b[513:560]
        assert document.sides[0].summary.num_input_as_asked == 4
        times = [a.at_s for a in server.answers]
        assert times[-1] - times[0] == pytest.approx(3 / 20, abs=0.1)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_both_endpoints_and_what_is_sent_beside(endpoint: str) -> None:
    async with serving(Scripted(streaming())) as server:
        await measured(
            server,
            endpoint=endpoint,
            concurrency=1,
            requests=2,
            api_key="sk-x",
            header=["X-Priority: vip"],
            body=["temperature=0.7", "top_k=3"],
            promise="ttft=250ms",
        )
        assert all(a.headers["authorization"] == "Bearer sk-x" for a in server.asked)
        assert all("ttft_slo_ms" not in a.body for a in server.asked if a not in server.answers)  # of the probe, too
        asked = server.answers[-1]
        assert asked.path == {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[endpoint]
        assert asked.headers["x-priority"] == "vip"
        assert (asked.body["temperature"], asked.body["top_k"], asked.body["ttft_slo_ms"]) == (0.7, 3, 250)


async def test_headers_of_the_users_win_in_any_case_of_letters() -> None:
    async with serving(Scripted(streaming())) as server:
        given = ["authorization: Bearer mine", "HOST: elsewhere", "content-type: application/json; charset=utf-8"]
        await measured(server, concurrency=1, requests=1, api_key="sk-environment", header=given)
        for asked in server.asked:
            assert asked.headers["authorization"] == "Bearer mine"
            assert asked.headers["host"] == "elsewhere"
            assert [name.lower() for name in asked.names].count("host") == 1
            assert [name.lower() for name in asked.names].count("content-type") == 1


# ---------------------------------------------------------------- how lengths are known


@pytest.mark.parametrize(("tokenize", "source"), [(7, "/tokenize"), (None, "usage.prompt_tokens")])
async def test_prompts_are_as_long_as_asked_by_either_way(tokenize: int | None, source: str) -> None:
    async with serving(Scripted(streaming(overhead=7), tokenize=tokenize)) as server:
        document = await measured(server, concurrency=1, requests=6, input="uniform:min=20,max=60")
    side = document.sides[0]
    assert source in side.server.lengths_by
    assert side.summary.num_input_as_asked == side.summary.num_input_told == 6


async def test_a_prompt_shorter_than_the_template_is_told() -> None:
    async with serving(Scripted(streaming(overhead=30), tokenize=30)) as server:
        document = await measured(server, concurrency=1, requests=4, input="10")
    assert any("4 of 4 prompts were not as long as asked" in w for w in document.warnings)


async def test_a_server_that_tells_no_usage_is_measured_by_events_and_says_so() -> None:
    async with serving(Scripted(no_usage, tokenize=None)) as server:
        document = await measured(server, concurrency=1, requests=4)
    side = document.sides[0]
    assert (side.summary.num_ok, side.summary.counted, side.summary.output_mean) == (4, {"events": 4}, 4)
    assert "not checked" in side.server.lengths_by
    assert any("tells no usage" in w for w in document.warnings)


async def no_usage(asked: Asked, reply: Reply) -> None:
    if asked.body.get("stream"):
        await streaming(usage="never")(asked, reply)
    else:
        await reply.document({"choices": []})


async def test_words_that_are_more_than_a_token_are_not_used() -> None:
    """A tokenizer that splits every word with an e in it."""

    def count(text: str) -> int:
        return sum(1 + ("e" in word) for word in text.split())

    async def script(asked: Asked, reply: Reply) -> None:
        usage = {"prompt_tokens": count(asked.text), "completion_tokens": asked.num_output}
        if not asked.body.get("stream"):
            await reply.document({"usage": usage})
            return
        await reply.begin()
        await reply.event({"choices": [{"delta": {"content": "a"}}], "usage": usage})
        await reply.done()

    async with serving(Scripted(script, tokenize=None)) as server:
        document = await measured(server, concurrency=1, requests=5, input="uniform:min=10,max=30")
        assert all("e" not in a.text for a in server.answers)
    assert document.sides[0].summary.num_input_as_asked == 5


async def test_where_no_word_is_one_token_lengths_are_right_on_average() -> None:
    """A tokenizer that takes two or three for every word."""

    def count(text: str) -> int:
        return 6 + sum(2 + ("e" in word) for word in text.split())

    async def script(asked: Asked, reply: Reply) -> None:
        usage = {"prompt_tokens": count(asked.text), "completion_tokens": asked.num_output}
        if not asked.body.get("stream"):
            await reply.document({"usage": usage})
            return
        await reply.begin()
        await reply.event({"choices": [{"delta": {"content": "a"}}], "usage": usage})
        await reply.done()

    async with serving(Scripted(script, tokenize=None)) as server:
        document = await measured(server, concurrency=1, requests=20, input="200")
    side = document.sides[0]
    assert "about: 2." in side.server.lengths_by
    assert side.summary.input_mean == pytest.approx(200, rel=0.03)
    assert any("prompts were not as long as asked" in w for w in document.warnings)
