"""The short cuts of the token path give what the long way gives."""

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.messages import FinishReason, SamplingParams, SequenceKey, TokenBatch, TokenChunk, TokenLogprob, encode
from distserve_gateway.live import Gain, Inbox, LiveSequence
from distserve_gateway.output import Output, Piece
from distserve_gateway.streams import Streams
from distserve_gateway.workers import Workers
from tests.unit.gateway.scripted import TOKENIZER


class _NoWatch:
    """A registry without entries."""

    snapshot: dict[str, object] = {}  # noqa: RUF012

    def on_event(self, callback: object) -> None: ...


def followed() -> tuple[Streams, LiveSequence]:
    streams = Streams(MemoryBus(MemoryHub()), "gw", Workers(_NoWatch(), "m"))  # type: ignore[arg-type]
    sequence = LiveSequence("r", 0, [1, 2], SamplingParams(max_tokens=100), Inbox(), 1e9)
    streams.add(sequence)
    sequence.place("p", "d")
    streams.placed(sequence, sequence.num_prompt_tokens)
    streams.accepted(sequence)
    return streams, sequence


def gained(sequence: LiveSequence) -> list[Gain]:
    gains, sequence.inbox._gains = sequence.inbox._gains, []
    return gains


def chunks_with_doubles_and_gaps(draw: random.Random, total: int) -> list[tuple[str, TokenChunk]]:
    """Token 0 from prefill; then decode's, mostly in order, some twice, some late, some of a void attempt."""
    key = SequenceKey("r")
    made = [("p", TokenChunk(key, 0, [0]))]
    for i in range(total):
        reason: FinishReason | None = "length" if i == total - 1 else None
        extra = {"num_cached_tokens": 2, "prompt_logprobs": [TokenLogprob(1, -1.0)]} if i == 0 else {}
        made.append(("d", TokenChunk(key, i, [i], reason, **extra)))  # type: ignore[arg-type]
    for _ in range(draw.randrange(3)):
        start = draw.randrange(total)
        made.insert(
            draw.randrange(1, len(made)), ("d", TokenChunk(key, start, list(range(start, min(start + 3, total)))))
        )
    if draw.random() < 0.3:
        made.insert(draw.randrange(len(made)), ("d", TokenChunk(SequenceKey("r", 0, 1), 0, [99])))
    for _ in range(draw.randrange(3)):
        i = draw.randrange(len(made) - 1)
        made[i], made[i + 1] = made[i + 1], made[i]
    return made


@given(seed=st.integers(0, 2**32), total=st.integers(2, 12))
@settings(deadline=None)
async def test_a_batch_gives_what_its_chunks_give_one_by_one(seed: int, total: int) -> None:
    chunks = chunks_with_doubles_and_gaps(random.Random(seed), total)
    quick, slow = followed(), followed()
    for serial, (worker, chunk) in enumerate(chunks, 1):
        batch = TokenBatch(worker=worker, serial=serial, chunks=[chunk])
        await quick[0]._on_batch(Delivery("s", encode(batch)))
        slow[0].receive(chunk, worker)
    assert gained(quick[1]) == gained(slow[1])
    for name in (
        "token_ids",
        "done",
        "owner",
        "decode_seen",
        "prompt_logprobs",
        "num_cached_tokens",
        "load_on",
        "waiting",
    ):
        assert getattr(quick[1], name) == getattr(slow[1], name), name
    assert quick[0].workers.in_flight == slow[0].workers.in_flight
    assert len(quick[0]) == len(slow[0])


async def test_the_usual_chunk_takes_the_short_way_and_counts_as_life() -> None:
    streams, sequence = followed()
    key = SequenceKey("r")
    for i in range(2):
        await streams._on_batch(
            Delivery("s", encode(TokenBatch(worker="d", serial=i + 1, chunks=[TokenChunk(key, i, [i])])))
        )
    sequence.strikes, sequence.soft_strikes, sequence.ask_at, sequence.last_heard = 1, 1, 0.0, 0.0
    assert sequence.steady == "d"
    streams.receive = None  # type: ignore[method-assign, assignment]  # the long way would fail now
    await streams._on_batch(Delivery("s", encode(TokenBatch(worker="d", serial=3, chunks=[TokenChunk(key, 2, [2])]))))
    assert sequence.token_ids == [0, 1, 2]
    assert (sequence.strikes, sequence.soft_strikes) == (0, 0)
    assert sequence.ask_at == sequence.last_heard + streams.silence_s > streams.silence_s


def test_a_withdrawn_attempt_has_no_short_way() -> None:
    _, sequence = followed()
    sequence.accept(TokenChunk(SequenceKey("r"), 0, [1]), "d")
    sequence.steady = "d"
    sequence.withdraw()
    assert not sequence.extend(TokenChunk(SequenceKey("r"), 1, [2]), "d")
    assert not sequence.extend(TokenChunk(SequenceKey("r", 0, 1), 1, [2]), "d")


def test_a_void_attempt_takes_it_neither() -> None:
    _, sequence = followed()
    sequence.withdraw()
    sequence.place("p", "d")
    sequence.steady = "d"
    assert not sequence.extend(TokenChunk(SequenceKey("r", 0, 0), 0, [1]), "d")
    assert sequence.extend(TokenChunk(SequenceKey("r", 0, 1), 0, [1]), "d")
    assert sequence.token_ids == [1]


STOP_ID = TOKENIZER.encode("The", add_special_tokens=False)[0]


def output() -> Output:
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens=True)
    return Output(0, detokenizer, None, frozenset({STOP_ID}), max_tokens=6)


def pieces(ids: Sequence[int], *, with_logprobs: bool) -> tuple[list[Piece | None], int]:
    """Token by token; logprobs, of which nothing is kept here, make every feed() go the long way."""
    made, out = [], output()
    for token_id in ids:
        piece = out.feed([token_id], [TokenLogprob(token_id, 0.0)] if with_logprobs else None, None)
        if piece is not None:
            piece.logprobs = []
        made.append(piece)
    return made, out.num_tokens


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1) | st.just(STOP_ID), max_size=9))
def test_one_plain_token_gives_what_any_feed_gives(ids: list[int]) -> None:
    """Past the limit too, where the long way cuts and ends."""
    assert pieces(ids, with_logprobs=False) == pieces(ids, with_logprobs=True)
