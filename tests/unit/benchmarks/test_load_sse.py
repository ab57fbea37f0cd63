"""Streams of tokens, taken apart after they came."""

import json

import pytest

from benchmarks.load_sse import BadAnswer, Piece, events, tokens

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(*ids: int) -> bytes:
    choices = [{"index": 0, "text": "a" * len(ids), "token_ids": list(ids)}]
    return b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n"


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def test_each_event_has_the_time_at_which_it_was_complete() -> None:
    first, second = chunk(event(7)), chunk(event(8))
    pieces: list[Piece] = [(0.1, HEAD), (0.2, first), (0.3, second[:10]), (0.4, second[10:]), (0.5, END)]
    found = tokens(pieces)
    assert found.times_s == [0.2, 0.4]
    assert found.counts == [1, 1]


def test_where_the_bytes_were_cut_does_not_matter() -> None:
    raw = HEAD + chunk(event(7)) + chunk(event(8, 9)) + END
    for cut in range(1, len(raw)):
        found = tokens([(1.0, raw[:cut]), (2.0, raw[cut:])])
        assert found.counts == [1, 2], cut
        assert found.times_s == sorted(found.times_s)
    assert tokens([(float(i), raw[i : i + 1]) for i in range(len(raw))]).num_tokens == 3


def test_two_events_in_one_chunk_and_one_event_in_two_chunks() -> None:
    whole = event(7) + event(8)
    pieces = [(0.1, HEAD + chunk(whole[:20])), (0.2, chunk(whole[20:-1])), (0.3, chunk(whole[-1:]) + END)]
    assert tokens(pieces).times_s == [0.2, 0.3]


def test_events_without_tokens_do_not_count() -> None:
    empty = b'data: {"choices":[]}\n\n'
    nothing = b'data: {"choices":[{"index":0,"text":"","token_ids":null,"finish_reason":"length"}]}\n\n'
    found = tokens([(0.1, HEAD + chunk(event(7)) + chunk(nothing) + chunk(empty) + END)])
    assert found.counts == [1]
    assert found.times_s == [0.1]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy", "503"),
        (b"", "HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "not chunked"),
        (HEAD + chunk(event(7)) + b"0\r\n\r\n", r"without \[DONE\]"),
        (HEAD + chunk(event(7)), "inside a chunk"),
        (HEAD + chunk(event(7))[:-9], "inside a chunk"),
        (HEAD + chunk(b'data: {"error":{"message":"gone"}}\n\n') + END, "gone"),
        (HEAD + chunk(b'data: {"choices":[{"text":"a"}]}\n\n') + END, "return_token_ids"),
    ],
)
def test_a_broken_answer_says_what_is_wrong(raw: bytes, why: str) -> None:
    with pytest.raises(BadAnswer, match=why):
        tokens([(0.1, raw)])


def test_events_end_at_done() -> None:
    raw = HEAD + chunk(event(7)) + chunk(b"data: [DONE]\n\n") + chunk(event(8)) + b"0\r\n\r\n"
    assert len(events([(0.1, raw)])) == 1
