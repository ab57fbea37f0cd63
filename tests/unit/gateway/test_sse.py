"""Server-sent events, read however they are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve_gateway.sse import Events

DATA = st.binary(max_size=40).filter(lambda data: b"\n" not in data and not data.endswith(b"\r") and data != b"")
NOISE = st.sampled_from([b"", b": ping\n", b"event: x\n", b"id: 7\n", b"retry: 10\n", b": ping\n\n"])


@given(
    st.lists(st.tuples(NOISE, st.lists(DATA, min_size=1, max_size=3), st.sampled_from([b"\n", b"\r\n"]))),
    st.lists(st.integers(0, 400)),
)
def test_where_the_bytes_are_cut_makes_no_difference(
    sent: list[tuple[bytes, list[bytes], bytes]], cuts: list[int]
) -> None:
    stream = b"".join(noise + b"".join(b"data: " + line + end for line in lines) + end for noise, lines, end in sent)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    events = Events()
    got = [event for a, b in itertools.pairwise(edges) for event in events.feed(stream[a:b])]
    assert got == [b"\n".join(lines) for _, lines, _ in sent]


def test_a_line_ends_at_lf_only() -> None:
    text = "a\u2028b\x85c\x0bd\re".encode()
    assert Events().feed(b"data: " + text + b"\n\n") == [text]


def test_the_space_after_the_colon_may_lack() -> None:
    assert Events().feed(b"data:{}\n\ndata:  {}\n\n") == [b"{}", b" {}"]


@pytest.mark.parametrize("part", [b"data: aaaaaaaaaaaaaaaaaaaa", b"data: aaaaaaaaaaaaaaa\n"])
def test_an_event_without_end_is_refused(part: bytes) -> None:
    events = Events(max_bytes=1000)
    for _ in range(30):
        events.feed(part)
    with pytest.raises(ValueError, match="at most 1000"):
        events.feed(part * 30)
