"""What a load asks, and what is made of the answers."""

import asyncio
import json
import random

import pytest

from benchmarks.load import Case, ask, draw_prompts, figures, measure, request
from benchmarks.load_sse import BadAnswer, Tokens

CASE = Case(streams=2, prompt=5, output=3, requests=4)


def test_figures_of_two_answers() -> None:
    answers = [Tokens([0.5, 1.0, 2.0], [1, 1, 1]), Tokens([0.3, 0.7], [1, 2])]
    found = figures(3.0, answers, 3)
    assert found.tokens_per_s == pytest.approx(2.0)
    assert found.ttfts_s == [0.5, 0.3]
    assert found.tpots_s == pytest.approx([0.75, 0.2])
    assert found.gaps_s == pytest.approx([0.5, 1.0, 0.4])


def test_tokens_that_came_with_the_first_are_not_counted_as_later_ones() -> None:
    assert figures(1.0, [Tokens([0.5, 0.9], [2, 1])], 3).tpots_s == pytest.approx([0.4])


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    found = figures(1.0, [Tokens([0.5], [1])], 1)
    assert found.tpots_s == []
    assert found.gaps_s == []


def test_an_answer_that_is_too_short_is_no_measurement() -> None:
    with pytest.raises(BadAnswer, match="2 tokens came instead of 3"):
        figures(1.0, [Tokens([0.5, 0.6], [1, 1])], 3)


@pytest.mark.parametrize("vocab_size", [384, 49152])
def test_prompts_differ_and_hold_no_special_tokens(vocab_size: int) -> None:
    prompts = draw_prompts(random.Random(1), CASE, vocab_size)
    assert [len(p) for p in prompts] == [5] * 4
    assert len({tuple(p) for p in prompts}) == 4
    assert all(32 <= token < vocab_size - 32 for p in prompts for token in p)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[dict[str, object]]) -> None:
    """One request's worth of a server that streams as many tokens as were asked for."""
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    body = json.loads(await reader.readexactly(length))
    seen.append(body)
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    parts = [b'data: {"choices":[{"token_ids":[%d]}]}\n\n' % i for i in range(body["max_tokens"])]
    for part in [*parts, b"data: [DONE]\n\n"]:
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


async def test_a_closed_loop_asks_everything_and_never_more_at_once_than_it_may() -> None:
    seen: list[dict[str, object]] = []
    now = most = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        await answer(reader, writer, seen)
        now -= 1

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        prompts = draw_prompts(random.Random(2), CASE, 1000)
        found = await asyncio.to_thread(measure, port, CASE, prompts)
    assert sorted(str(body["prompt"]) for body in seen) == sorted(map(str, prompts))
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in seen)
    assert len(found.ttfts_s) == CASE.requests
    assert most <= CASE.streams


async def test_a_server_that_never_answers_is_given_up() -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        asked.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TimeoutError):
            await ask(port, request([1, 2], 1), answer_s=0.05)
        await asyncio.wait_for(asked.wait(), 5)
