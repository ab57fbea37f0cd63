"""Chunks in any order, doubled, with gaps: the sequence gets every token once, in order."""

import random

from hypothesis import given
from hypothesis import strategies as st

from distserve.errors import WorkerLost, to_wire
from distserve.messages import FinishReason, SamplingParams, SequenceKey, Timings, TokenChunk, TokenLogprob
from distserve_gateway.live import Gain, Inbox, LiveSequence

KEY = SequenceKey("r")


def sequence() -> LiveSequence:
    live = LiveSequence("r", 0, [1, 2, 3], SamplingParams(max_tokens=100), Inbox(), 1e9)
    live.place("p", "d")
    return live


async def gains(live: LiveSequence) -> list[Gain]:
    return await live.inbox.take()


def chunk(start: int, ids: list[int], finish: FinishReason | None = None, attempt: int = 0) -> TokenChunk:
    logprobs = [TokenLogprob(i, -float(i)) for i in ids]
    return TokenChunk(SequenceKey("r", 0, attempt), start, ids, finish, logprobs)


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=8), seed=st.integers(0, 2**32), doubles=st.integers(0, 5))
async def test_any_order_with_doubles_and_overlaps_gives_every_token_once(
    sizes: list[int], seed: int, doubles: int
) -> None:
    draw = random.Random(seed)
    total = sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = [
        chunk(start, list(range(start, start + size)), "stop" if start + size == total else None)
        for start, size in zip(starts, sizes, strict=True)
    ]
    for _ in range(doubles):  # a status reply overlaps what came and what is on its way
        start = draw.randrange(total)
        chunks.append(chunk(start, list(range(start, total)), "stop"))
    draw.shuffle(chunks)
    live = sequence()
    for c in chunks:
        live.accept(c, "d")
    got = await gains(live)
    assert [t for gain in got for t in gain.token_ids] == list(range(total))
    assert [lp.token_id for gain in got for lp in gain.logprobs or []] == list(range(total))
    assert [gain.finish_reason for gain in got if gain.finish_reason] == ["stop"]
    assert live.done
    assert live.token_ids == list(range(total))


async def test_token_0_comes_from_prefill_and_again_from_decode() -> None:
    live = sequence()
    assert not live.accept(chunk(0, [7]), "p")
    assert live.owner == "prefill"
    live.accept(chunk(0, [7]), "d")
    live.accept(chunk(1, [8]), "d")
    assert live.owner == "decode"
    assert live.owner_worker == "d"
    assert [gain.token_ids for gain in await gains(live)] == [[7], [8]]


async def test_an_older_attempt_is_void() -> None:
    live = sequence()
    live.attempt = 1
    live.accept(chunk(0, [7], attempt=0), "d")
    live.accept(chunk(0, [9], attempt=1), "d")
    assert live.token_ids == [9]


async def test_prefill_may_have_handed_over_to_another_decode_worker() -> None:
    live = sequence()
    live.accept(chunk(0, [7]), "p")
    live.accept(chunk(0, [7, 8]), "d-other")
    assert (live.owner, live.decode_worker) == ("decode", "d-other")


async def test_an_error_ends_the_sequence_even_behind_a_gap_but_not_if_it_is_old_news() -> None:
    error = to_wire(WorkerLost("gone", worker="d", role="decode"))
    live = sequence()
    live.accept(TokenChunk(KEY, 5, [], "error", error=error), "d")
    [gain] = await gains(live)
    assert isinstance(gain.error, WorkerLost)
    assert gain.error.worker == "d"
    live = sequence()
    live.accept(chunk(0, [1, 2, 3]), "d")
    assert not live.accept(TokenChunk(KEY, 1, [], "error", error=error), "p")  # decode has gone on since
    assert live.token_ids == [1, 2, 3]


async def test_the_end_may_come_alone_and_facts_of_doubles_are_kept() -> None:
    live = sequence()
    live.accept(chunk(0, [7]), "p")
    prompt_logprobs = [TokenLogprob(2, -1.0)]
    live.accept(TokenChunk(KEY, 0, [7], None, prompt_logprobs=prompt_logprobs, num_cached_tokens=16), "d")
    live.accept(TokenChunk(KEY, 1, [], "length", timings=Timings(decode_s=2.0, transport="shm")), "d")
    assert live.done
    assert live.prompt_logprobs == prompt_logprobs
    assert live.num_cached_tokens == 16
    assert live.timings == Timings(decode_s=2.0, transport="shm")
    assert [(g.token_ids, g.finish_reason) for g in await gains(live)] == [([7], None), ([], "length")]
