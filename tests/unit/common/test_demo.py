"""The demo's client against a real HTTP server that streams: what it shows, and what it refuses to call an answer."""

import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from distserve.console import Console
from distserve.demo import QUESTIONS, Answer, ask, report, run_demo
from distserve.errors import DistServeError, MalformedMessage, NoWorker

Serve = Callable[[int, list[str]], tuple[str, int]]


def event(text: str = "", finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


USAGE = "data: " + json.dumps(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
        "timings": {
            "queue_s": 0.001,
            "prefill_s": 0.05,
            "transfer_s": 0.002,
            "decode_s": 0.1,
            "kv_bytes": 1536,
            "transport": "shm",
        },
    }
)
WHOLE = [event("Par"), ": a comment", event("is", None), event("", "stop"), USAGE, "data: [DONE]"]


@pytest.fixture
def bodies() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def serve(bodies: list[dict[str, Any]]) -> Iterator[Serve]:
    """Serve a status and lines at /v1/chat/completions."""
    answer: tuple[int, list[str]] = (200, [])

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(answer[0])
            self.end_headers()
            self.wfile.write(("\n\n".join(answer[1]) + "\n\n").encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def start(status: int, lines: list[str]) -> tuple[str, int]:
            nonlocal answer
            answer = (status, lines)
            return "127.0.0.1", server.server_port

        yield start
        server.shutdown()
        thread.join(10)


def quiet() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(stream=stream), stream


def test_an_answer_is_printed_and_measured(serve: Serve, bodies: list[dict[str, Any]]) -> None:
    console, stream = quiet()
    answer = ask(serve(200, WHOLE), "m", "Capital?", console)
    assert (answer.text, answer.finish_reason, answer.num_tokens) == ("Paris", "stop", 3)
    assert 0 < answer.first_token_s <= answer.total_s
    assert stream.getvalue() == "Paris\n"
    body = bodies[0]
    assert (body["model"], body["stream"], body["timings"], body["temperature"]) == ("m", True, True, 0)
    assert body["stream_options"] == {"include_usage": True}


def test_every_question_is_asked_and_reported(serve: Serve, bodies: list[dict[str, Any]]) -> None:
    console, stream = quiet()
    answers = run_demo(serve(200, WHOLE), "m", console)
    assert [b["messages"][0]["content"] for b in bodies] == list(QUESTIONS)
    assert len(answers) == 3
    assert "What is the capital of France?" in QUESTIONS
    assert stream.getvalue().count("TTFT") == 3
    assert "hand-over 2.0 ms (1.5 KiB of KV by shm)" in stream.getvalue()


@pytest.mark.parametrize(
    ("status", "lines", "error", "match"),
    [
        (503, ['{"error": {"message": "no prefill worker", "code": "no_worker"}}'], NoWorker, "no prefill.*503"),
        (502, ["<html>bad gateway</html>"], DistServeError, "HTTP 502: <html>"),
        (400, ['{"error": "text"}'], DistServeError, "HTTP 400"),
        (200, [event("Par"), 'data: {"error": {"message": "lost", "code": "worker_lost"}}'], DistServeError, "lost"),
        (200, [event("Par", "stop"), USAGE], MalformedMessage, r"without \[DONE\]"),
        (200, [event("", "stop"), USAGE, "data: [DONE]"], DistServeError, "after 0 characters"),
        (200, [event("Par"), USAGE, "data: [DONE]"], DistServeError, "finish_reason 'none'"),
        (200, [event("Par", "error"), "data: [DONE]"], DistServeError, "finish_reason 'error'"),
    ],
)
def test_anything_but_a_whole_answer_is_an_error(
    serve: Serve, status: int, lines: list[str], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ask(serve(status, lines), "m", "Capital?", quiet()[0])


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(DistServeError, match=r"127\.0\.0\.1:9 broke"):
        ask(("127.0.0.1", 9), "m", "Capital?", quiet()[0])


def test_the_report_shows_where_the_time_went() -> None:
    timings = {"queue_s": 0.0, "prefill_s": 0.3, "transfer_s": 0.001, "decode_s": 0.3}
    answer = Answer("x", "length", 0.31, 1.31, 11, timings)
    lines = report(answer)
    assert lines[0] == "TTFT 310 ms, TPOT 100.0 ms, 11 tokens in 1.31 s (length)"
    bar = lines[2].split("|")[1]
    assert bar == "#" * 30 + "+" + "-" * 30


def test_without_timings_the_report_is_one_line() -> None:
    assert len(report(Answer("x", "stop", 0.1, 0.2, 1))) == 1


def test_a_console_without_readers_says_so_once() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console, calls = Console(stream=Closed()), []
    console.on_closed = lambda: calls.append(1)
    console.say("a")
    console.emit("x", "b")
    assert calls == [1]


def test_services_lines_carry_their_names_aligned() -> None:
    console, stream = quiet()
    console.name_services(["gateway", "decode-0"])
    console.emit("gateway", "a")
    console.emit("decode-0", "b")
    console.emit("", "c")
    assert stream.getvalue() == "gateway  | a\ndecode-0 | b\ndistserve: c\n"


def test_colours_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    Console(["a"], stream=stream).emit("a", "b")
    assert stream.getvalue() == "\x1b[36ma |\x1b[0m b\n"
