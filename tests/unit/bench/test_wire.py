"""An answer of HTTP/1.1, read as its bytes come."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.bench.sse import read_events
from distserve.bench.wire import BadAnswer, Reading, request

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = b'data: {"a":1}\n\n: still here\n\ndata: {"b":2}\r\n\r\nid: 7\ndata: {"c":\ndata: 3}\n\ndata: [DONE]\n\n'
WHOLE = CHUNKED + chunk(STREAM[:9]) + chunk(STREAM[9:40]) + chunk(STREAM[40:]) + b"0\r\nX-Trailer: 1\r\n\r\n"
EVENTS = [b'{"a":1}', b'{"b":2}', b'{"c":\n3}']


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=12).map(lambda cuts: sorted(set(cuts))))
def test_where_the_bytes_are_cut_does_not_matter(cuts: list[int]) -> None:
    reading = Reading()
    bounds = [0, *cuts, len(WHOLE)]
    done = [reading.feed(float(i), WHOLE[a:b]) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
    assert done == [False] * len(cuts) + [True]
    assert reading.content() == STREAM
    assert reading.keeps_open
    found = read_events(reading.body)
    assert [data for _, data in found.events] == EVENTS
    assert found.done
    assert [at for at, _ in found.events] == sorted(at for at, _ in found.events)


def test_an_event_has_the_time_of_the_piece_that_completed_it() -> None:
    body = [(0.1, b"data: 1\n"), (0.2, b"\nda"), (0.3, b"ta: 2\n\ndata: 3\n\n"), (0.4, b"data: half")]
    found = read_events(body)
    assert found.events == [(0.2, b"1"), (0.3, b"2"), (0.3, b"3")]
    assert (found.done, found.rest) == (False, b"data: half")


def test_what_comes_after_done_does_not_count() -> None:
    assert read_events([(0.1, b"data: 1\n\ndata: [DONE]\n\ndata: 2\n\n")]).events == [(0.1, b"1")]


def test_a_body_of_a_known_length_and_one_until_the_end() -> None:
    known = Reading()
    assert not known.feed(0.0, b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhel")
    assert known.feed(0.1, b"lo")
    assert (known.status, known.content(), known.keeps_open) == (404, b"hello", True)
    until = Reading()
    assert not until.feed(0.0, b"HTTP/1.1 200 OK\r\n\r\nhello")
    until.end()
    assert (until.content(), until.whole, until.keeps_open) == (b"hello", True, False)


def test_an_empty_body_is_whole_at_once_and_a_100_is_passed_over() -> None:
    assert Reading().feed(0.0, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert Reading().feed(0.0, b"HTTP/1.1 204 No Content\r\n\r\n")
    late = Reading()
    assert late.feed(0.0, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    assert late.status == 200


def test_a_connection_that_is_to_be_closed_is_not_kept() -> None:
    reading = Reading()
    assert reading.feed(0.0, b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n")
    assert not reading.keeps_open


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "closed without an answer"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (CHUNKED + chunk(b"data: 1\n\n"), "inside a chunk"),
        (CHUNKED + chunk(b"data: 1\n\n")[:-4], "inside a chunk"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "6 bytes before the body's end"),
    ],
)
def test_an_end_before_the_end_is_told(data: bytes, why: str) -> None:
    reading = Reading()
    reading.feed(0.0, data)
    with pytest.raises(BadAnswer, match=why):
        reading.end()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"220 mail ready\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 nonsense\r\n\r\n", "not HTTP"),
        (CHUNKED + b"zz\r\n", "no size of a chunk"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, "a head of more than"),
    ],
)
def test_what_is_not_http_is_told_at_once(data: bytes, why: str) -> None:
    with pytest.raises(BadAnswer, match=why):
        Reading().feed(0.0, data)


def test_the_bytes_of_a_request() -> None:
    assert request("POST", "/x", {"Host": "h"}, b"{}") == b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
    assert request("GET", "/x", {"Host": "h"}) == b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"
