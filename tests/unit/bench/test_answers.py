"""What is made of one answer."""

import json
from typing import Any

import pytest

from distserve.bench.answers import THROTTLED, Result, error_text, result
from distserve.bench.client import Exchange
from distserve.bench.slo import is_good, parse_slo, promise_fields
from distserve.bench.traffic import Ask
from distserve.bench.wire import Reading

ASK = Ask(3, 0.0, 10, 4, "x")


def event(text: str | None = None, *, usage: int | None = None, chat: bool = True) -> dict[str, Any]:
    choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    found: dict[str, Any] = {"choices": [choice]}
    return found if usage is None else found | {"usage": {"prompt_tokens": 10, "completion_tokens": usage}}


def last(num: int, cached: int | None = None) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": num}
    return {
        "choices": [],
        "usage": usage | ({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}),
    }


def read(
    *events: tuple[float, dict[str, Any]], done: bool = True, error: tuple[str, str] | None = None, status: int = 200
) -> Result:
    reading = Reading()
    reading.status = status
    reading.body = [(at, b"data: " + json.dumps(e).encode() + b"\n\n") for at, e in events]
    if done:
        reading.body.append((99.0, b"data: [DONE]\n\n"))
    return result(ASK, Exchange(100.5, 109.0, reading, error), due_s=100.0, began_s=90.0)


def test_tokens_by_the_usage_of_each_event() -> None:
    found = read((101, event("")), (102, event("a", usage=1)), (104, event("bcd", usage=4)), (104, last(4, cached=8)))
    assert found.ok
    assert (found.counted, found.num_input, found.num_output, found.num_cached) == ("usage", 10, 4, 8)
    assert (found.times_s, found.counts) == ([12, 14], [1, 3])
    assert (found.due_s, found.sent_s) == (10, 10.5)
    assert (found.ttft_s(), found.ttft_s(from_sent=True)) == (2.0, 1.5)
    assert found.gaps_s() == pytest.approx([2 / 3] * 3)
    assert found.tpot_s == pytest.approx(2 / 3)
    assert found.e2e_s == 4.0


def test_a_token_whose_text_is_held_back_counts_when_it_came() -> None:
    found = read((101, event("", usage=1)), (102, event("ab", usage=2)), (103, last(2)))
    assert (found.times_s, found.counts) == ([11, 12], [1, 1])


def test_without_usage_in_events_each_is_a_token_and_the_end_says_how_many_there_were() -> None:
    found = read((101, event("a")), (102, event("bc")), (104, event("de")), (104, last(5)))
    assert (found.counted, found.usage_told, found.num_output) == ("events", True, 5)
    assert found.counts == [1, 1, 1]
    assert found.tpot_s == pytest.approx(3 / 4)
    assert found.gaps_s() == [1, 2]


@pytest.mark.parametrize("text", ["", "ef"])
def test_usage_with_the_last_event_alone_tells_of_all_before_and_adds_none(text: str) -> None:
    """Servers that send no chunk without choices put it into the one that ends the answer."""
    found = read((101, event("ab")), (102, event("cd")), (104, event(text, usage=6)))
    assert (found.counted, found.num_output, found.usage_told) == ("events", 6, True)
    assert found.counts == [1] * len(found.times_s) == [1, 1, 1][: 2 + bool(text)]


def test_without_any_usage_events_are_all_there_is() -> None:
    found = read((101, event("a", chat=False)), (102, event("b", chat=False)))
    assert (found.ok, found.usage_told, found.num_output, found.num_input) == (True, False, 2, None)


def test_a_null_usage_with_each_event_is_no_usage() -> None:
    found = read((101, event("a") | {"usage": None}), (102, event("b") | {"usage": None}), (103, last(2)))
    assert (found.counted, found.num_output) == ("events", 2)


def test_all_at_once_has_no_time_between_tokens() -> None:
    found = read((101, event("abcd", usage=4)), (101, last(4)))
    assert found.ok
    assert found.gaps_s() == []
    assert found.tpot_s is None


def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    said = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    called = {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}
    assert read((101, said), (102, called)).num_output == 2


@pytest.mark.parametrize(
    ("found", "kind", "detail"),
    [
        (
            read((101, event("a")), (102, {"error": {"message": "worker lost", "code": 502}})),
            "error event",
            "worker lost",
        ),
        (read((101, event("a")), (102, {"error": "gone"}), error=("cut off", "closed")), "error event", "gone"),
        (read((101, event("a")), done=False), "no [DONE]", "without it"),
        (
            read((101, event("a")), done=False, error=("deadline", "no whole answer within 1 s")),
            "deadline",
            "within 1 s",
        ),
        (read((101, event(""))), "no tokens", "held none"),
        (read(error=("connection refused", "nobody"), status=0), "connection refused", "nobody"),
    ],
)
def test_what_went_wrong_is_told_by_kind(found: Result, kind: str, detail: str) -> None:
    assert not found.ok
    assert found.kind == kind
    assert detail in found.detail
    assert not is_good(found, {})


def answered(status: int, body: bytes, **headers: str) -> Result:
    reading = Reading()
    reading.status, reading.headers, reading.body = status, headers, [(101.0, body)]
    return result(ASK, Exchange(100.0, 101.0, reading), due_s=100.0, began_s=90.0)


def test_a_refusal_is_one_kind_a_status_and_429_is_its_own() -> None:
    busy = answered(429, b'{"error":{"message":"too late"}}', **{"retry-after": "3"})
    assert (busy.kind, busy.detail, busy.retry_after, busy.status) == (THROTTLED, "too late", "3", 429)
    assert answered(503, b"overloaded").kind == "HTTP 503"


def test_an_answer_that_is_no_stream() -> None:
    assert answered(200, b'{"choices":[{"message":{"content":"hi"}}]}').kind == "no stream"
    assert answered(200, b"data: {not json}\n\ndata: [DONE]\n\n").kind == "bad event"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"a","code":1}}', "a"),
        (b'{"detail":"b"}', "b"),
        (b'{"object":"error","message":"c"}', "c"),
        (b'{"detail":[{"loc":["x"]}]}', "[{'loc': ['x']}]"),
        (b"<html>no</html>", "<html>no</html>"),
    ],
)
def test_texts_of_errors_in_their_usual_forms(body: bytes, text: str) -> None:
    assert error_text(body) == text


# ---------------------------------------------------------------- promises


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ("ttft=2s", True),
        ("ttft=1.9s", False),
        ("tpot=700ms", True),
        ("tpot=600ms", False),
        ("e2e=4s,ttft=2s", True),
        ("e2e=3s", False),
    ],
)
def test_goodput_is_what_keeps_to_all_of_it(slo: str, good: bool) -> None:
    found = read((102, event("a", usage=1)), (104, event("bcd", usage=4)), (104, last(4)))
    assert is_good(found, parse_slo("--slo", slo)) is good


def test_promises_are_sent_in_the_servers_words() -> None:
    fields = promise_fields(parse_slo("--promise", "ttft=300ms,tpot=50ms,e2e=2s"))
    assert fields == pytest.approx({"ttft_slo_ms": 300, "tpot_slo_ms": 50, "deadline_ms": 2000})
