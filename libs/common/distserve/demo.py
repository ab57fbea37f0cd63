"""`distserve demo`: three streamed chat answers from a real cluster, and where the time went."""

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distserve.console import Console
from distserve.errors import DeadlineExceeded, DistServeError, MalformedMessage, from_wire
from distserve.sizing import in_words

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue? Answer in two sentences.",
    "Name three planets of the solar system.",
)
MAX_TOKENS = 96
_GAP_S = 120.0  # the longest silence in a stream

# name, key in `timings`, and how its part of the bar is drawn
_PHASES = (
    ("queue", "queue_s", "."),
    ("prefill", "prefill_s", "#"),
    ("hand-over", "transfer_s", "+"),
    ("decode", "decode_s", "-"),
)
_BAR = 60


@dataclass(slots=True)
class Answer:
    """One streamed answer as the client saw it (seconds from sending the request), and the services' own timings."""

    text: str = ""
    finish_reason: str = ""
    first_token_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.total_s - self.first_token_s) / max(1, self.num_tokens - 1)


def ask(address: tuple[str, int], model: str, question: str, console: Console) -> Answer:
    """Stream one chat answer, printing it as it comes. Raises the error that the gateway sent, or what went wrong."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings": True,
    }
    answer = Answer()
    began = time.perf_counter()
    for event in _events(address, "/v1/chat/completions", body):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece and not answer.text:
                answer.first_token_s = time.perf_counter() - began
            answer.text += piece
            console.say(piece, end="")
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if usage := event.get("usage"):
            answer.num_tokens = usage["completion_tokens"]
            answer.timings = event.get("timings") or {}
    answer.total_s = time.perf_counter() - began
    console.say()
    if not answer.text or answer.finish_reason not in ("stop", "length"):
        ended = answer.finish_reason or "none"
        raise DistServeError(f"the answer ended with finish_reason {ended!r} after {len(answer.text)} characters")
    return answer


def run_demo(address: tuple[str, int], model: str, console: Console) -> list[Answer]:
    """Ask everything, one after the other, with a report after each answer. Blocks."""
    answers = []
    for question in QUESTIONS:
        console.say(console.bold(f"> {question}"))
        answers.append(ask(address, model, question, console))
        for line in report(answers[-1]):
            console.say(console.dim("  " + line))
        console.say()
    return answers


def report(answer: Answer) -> list[str]:
    """TTFT, TPOT and where the time went: figures and a bar."""
    lines = [
        f"TTFT {answer.first_token_s * 1e3:.0f} ms, TPOT {answer.tpot_s * 1e3:.1f} ms, "
        f"{answer.num_tokens} tokens in {answer.total_s:.2f} s ({answer.finish_reason})"
    ]
    spent = [(name, float(answer.timings.get(key, 0.0)), mark) for name, key, mark in _PHASES]
    total = sum(s for _, s, _ in spent)
    if total <= 0:
        return lines
    parts = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds, _ in spent]
    if kv_bytes := answer.timings.get("kv_bytes"):
        parts[2] += f" ({in_words(kv_bytes)} of KV by {answer.timings.get('transport') or 'an unnamed transport'})"
    # Anything that took time shows, however short.
    bar = "".join(mark * max(1, round(_BAR * s / total)) for _, s, mark in spent if s > 0)
    legend = "  ".join(f"{mark} {name}" for name, _, mark in _PHASES)
    return [*lines, ", ".join(parts), f"|{bar}|  {legend}"]


def _events(address: tuple[str, int], path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event until [DONE]."""
    connection = http.client.HTTPConnection(*address, timeout=_GAP_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response.status, response.read(65536))
        for line in response:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise _refusal(200, data)
            yield event
        raise MalformedMessage("the stream ended without [DONE]", expected="[DONE]")
    except TimeoutError as e:
        raise DeadlineExceeded(f"the stream was silent for {_GAP_S:g} s", timeout_s=_GAP_S) from e
    except (OSError, http.client.HTTPException) as e:
        raise DistServeError(f"the connection to {address[0]}:{address[1]} broke: {e or type(e).__name__}") from e
    finally:
        connection.close()


def _refusal(status: int, body: bytes) -> DistServeError:
    try:
        error = json.loads(body)["error"]
        return from_wire(str(error.get("code")), f"{error['message']} (HTTP {status})")
    except (ValueError, KeyError, TypeError, AttributeError):
        return DistServeError(f"HTTP {status}: {body[:500].decode(errors='replace')}")
