"""Options: what is wrong with one is said with its name, its value, and what would do."""

from pathlib import Path
from typing import Any

import pytest

from distserve.bench.client import parse_url
from distserve.bench.drive import Limits
from distserve.bench.errors import BadOption
from distserve.bench.options import HIDDEN, Raw, check
from distserve.bench.units import in_ms, parse_amount, parse_seconds, plain

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("given", "option", "expected"),
    [
        ({"url": "127.0.0.1:8000"}, "URL", "it is http://HOST:PORT"),
        ({"url": "http://h:99999"}, "URL", "it is http://HOST:PORT"),
        ({"url": "ftp://h"}, "URL", "it is http://HOST:PORT"),
        ({"compare": "h"}, "--compare", "it is http://HOST:PORT"),
        ({"rate": 0.0}, "--rate", "above 0"),
        ({"rate": float("nan")}, "--rate", "above 0"),
        ({"concurrency": 0}, "--concurrency", "1 to 100000"),
        ({"rate": 1.0, "concurrency": 1}, "--concurrency", "goes without --rate"),
        ({"constant": True}, "--constant", "goes with --rate"),
        ({"speed": 2.0}, "--speed", "goes with --trace"),
        ({"speed": 0.0}, "--speed", "above 0"),
        ({"requests": 0}, "--requests", "at least 1"),
        ({"duration": "60"}, "--duration", "a number with a unit"),
        ({"duration": "0s"}, "--duration", "above 0"),
        ({"warmup": "x"}, "--warmup", "a number of requests, e.g. 20, or a time"),
        ({"input": "many"}, "--input", "powerlaw:mean=512"),
        ({"output": "-1"}, "--output", "powerlaw:mean=512"),
        ({"endpoint": "embeddings"}, "--endpoint", "one of chat, completions"),
        ({"header": ["X-Y"]}, "--header", "'Name: value'"),
        ({"header": ["X: y\r\nZ: w"]}, "--header", "'Name: value'"),
        ({"url": "http://h/☃"}, "URL", "written %XX"),
        ({"url": "http://h/a b"}, "URL", "written %XX"),
        ({"body": ["temperature"]}, "--body", "name=value"),
        ({"promise": "tfft=3s"}, "--promise", "none of ttft, tpot, e2e"),
        ({"slo": "ttft=300"}, "--slo", "a number with a unit"),
        ({"deadline": "soon"}, "--deadline", "a number with a unit"),
        ({"compare": URL, "slices": 1}, "--slices", "at least 2"),
        ({"compare": URL, "requests": 3}, "--requests", "each of 6 slices"),
        ({"trace": Path("/no/such")}, "--trace", "can't be read"),
    ],
)
def test_a_bad_option(given: dict[str, Any], option: str, expected: str) -> None:
    with pytest.raises(BadOption) as caught:
        check(Raw(**{"url": URL} | given))
    assert caught.value.option == option
    assert str(caught.value.value) in str(caught.value)
    assert expected in caught.value.expected


def test_lengths_go_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    with pytest.raises(BadOption, match="goes without --trace"):
        check(Raw(URL, trace=path, input="5"))
    with pytest.raises(BadOption, match="the trace has only 1 requests"):
        check(Raw(URL, trace=path, compare=URL))
    assert check(Raw(URL, trace=path)).limits == Limits()


def test_what_is_sent_and_what_a_report_shows_of_it() -> None:
    raw = Raw(
        URL,
        api_key="sk-secret",
        header=["X-Token: hush", "X-Priority: vip"],
        body=["temperature=0.5", 'stop=["a"]', "user=me"],
        promise="ttft=300ms",
    )
    options = check(raw)
    assert options.headers == {"X-Token": "hush", "X-Priority": "vip", "Authorization": "Bearer sk-secret"}
    assert options.extra == {"temperature": 0.5, "stop": ["a"], "user": "me"}
    assert options.promise == {"ttft_slo_ms": 300}
    assert options.slo == {"ttft": 0.3}  # what is promised is what is judged
    assert "sk-secret" not in str(options.shown)
    assert "hush" not in str(options.shown)
    assert options.shown["api_key"] == HIDDEN


@pytest.mark.parametrize(
    "given",
    [
        {"api_key": "sk-hush\nX: y"},
        {"api_key": "sk-hush…"},
        {"header": ["Authorization: Bearer sk-hush…"]},
        {"header": ["Authorization: Bearer sk-hush\rX: y"]},
        {"header": ["Bearer sk-hush"]},
        {"url": "http://:sk-hush@h:80"},
        {"url": "http://me:sk-hush@h:80"},
        {"url": "http://me:sk-hush@h:port"},
        {"url": "http://me:sk-hush@h℀"},
        {"url": "me:sk-hush@h"},
        {"compare": "http://:sk-hush@h"},
    ],
)
def test_what_may_be_a_secret_is_refused_without_being_repeated(given: dict[str, Any]) -> None:
    with pytest.raises(BadOption) as caught:
        check(Raw(**{"url": URL} | given))
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(caught.value)


def test_a_header_wins_over_the_key_in_any_case_of_letters() -> None:
    options = check(Raw(URL, api_key="sk-…", header=["authorization: Bearer mine"]))
    assert options.headers == {"authorization": "Bearer mine"}
    assert check(Raw(URL, api_key="sk-x\n")).headers == {"Authorization": "Bearer sk-x"}


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, Limits(None, 30.0, 0, 5.0)),
        ({"duration": "12s"}, Limits(None, 12.0, 0, 2.0)),
        ({"requests": 50}, Limits(50, None, 4, 0.0)),
        ({"requests": 50, "concurrency": 16}, Limits(50, None, 16, 0.0)),
        ({"requests": 50, "warmup": "0"}, Limits(50, None, 0, 0.0)),
        ({"duration": "1m", "warmup": "7s", "deadline": "500ms"}, Limits(None, 60.0, 0, 7.0, 0.5)),
    ],
)
def test_how_much_is_measured(given: dict[str, Any], limits: Limits) -> None:
    assert check(Raw(URL, **given)).limits == limits


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix", "header"),
    [
        ("http://h:8000", "h", 8000, "", "h:8000"),
        ("http://h:8000/v1/", "h", 8000, "", "h:8000"),
        ("https://api.example.org/proxy/v1", "api.example.org", 443, "/proxy", "api.example.org"),
        ("http://[::1]:80", "::1", 80, "", "[::1]"),
    ],
)
def test_urls(url: str, host: str, port: int, prefix: str, header: str) -> None:
    found = parse_url("URL", url)
    assert (found.host, found.port, found.prefix, found.header) == (host, port, prefix, header)


def test_units() -> None:
    assert [parse_seconds("x", text) for text in ("300ms", "2s", "1.5m", "250us")] == pytest.approx(
        [0.3, 2, 90, 0.00025]
    )
    assert parse_amount("x", "20") == (20, 0.0)
    assert parse_amount("x", "5s") == (0, 5.0)
    assert [in_ms(s) for s in (0.0001234, 0.01234, 1.234, 0.0)] == ["0.123", "12.3", "1,234", "0"]
    assert plain(float("nan")) == "-"
