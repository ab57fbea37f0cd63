"""`distserve up` and `distserve demo` as a user runs them: one command, a whole cluster, a clean end."""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
READY_S = 120.0
SMALL = ("--set", "kv.num_blocks=512", "--set", "prefill.drain_s=2", "--set", "decode.drain_s=2")


class Command:
    """A `distserve` process. Its output is read as it comes; whatever it started is ended with it."""

    def __init__(self, *args: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_") or k == "DISTSERVE_CACHE"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distserve.cli", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._coming: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._coming.put(line.rstrip("\n"))
        self._coming.put(None)

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first line from here on that matches."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._coming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} within {timeout_s} s:\n" + "\n".join(self.lines)) from None
            assert line is not None, f"it ended without {pattern!r}:\n" + "\n".join(self.lines)
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match

    def end(self, timeout_s: float) -> int:
        """Its exit status; every line of its output is in `lines`."""
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        while not self._coming.empty():
            if (line := self._coming.get()) is not None:
                self.lines.append(line)
        return status

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, role: str) -> psutil.Process:
        return next(p for p in self.children() if f"distserve.cli {role} " in " ".join(p.cmdline()) + " ")


Start = Callable[..., Command]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Command] = []

    def run(*args: str) -> Command:
        started.append(Command(*args))
        return started[-1]

    yield run
    for command in started:
        left = command.children() if command.process.poll() is None else []
        for process in [command.process, *left]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        command.process.wait(10)


def post(url: str, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny-llama", "prompt": "One two three", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return post(url, body | fields)


def complete_eventually(url: str, timeout_s: float) -> dict[str, Any]:
    """As a client that honours 503 does it: the gateway may not have seen a new worker in the registry yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return complete(url)
        except urllib.error.HTTPError as e:
            if e.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def api(command: Command) -> str:
    return command.wait_for(r"API +(http://\S+/v1)$", READY_S)[1]


def gone(processes: list[psutil.Process], within_s: float = 10.0) -> list[psutil.Process]:
    """Those that are still there."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_up_answers_restarts_what_dies_and_stops_clean(start: Start, model: Path) -> None:
    up = start("up", "--model", str(model), "--port", "0", "--decode", "2", *SMALL)
    url = api(up)
    first = complete(url)
    assert first["usage"]["completion_tokens"] == 8
    assert len(up.children()) == 5  # gateway, prefill, two decode workers, nats-server

    up.child("prefill").kill()
    up.wait_for(r"prefill-0 died \(SIGKILL.*again in 0\.5 s", 20)
    up.wait_for(r"prefill-0 +\|.* ready$", READY_S)
    again = complete_eventually(url, 20)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]

    everything = up.children()
    up.process.send_signal(signal.SIGTERM)
    assert up.end(40) == 0, "\n".join(up.lines)
    assert gone(everything, 1) == []
    assert re.fullmatch(r"stopped: 5 processes and \d+ shared-memory segments are gone", up.lines[-1])


def test_colocated_workers_answer_without_prefill_workers(start: Start, model: Path) -> None:
    up = start("up", "--model", str(model), "--port", "0", "--colocated", *SMALL)
    assert complete(api(up))["usage"]["completion_tokens"] == 8
    assert len(up.children()) == 3
    up.process.send_signal(signal.SIGINT)
    assert up.end(40) == 0, "\n".join(up.lines)


def test_a_killed_supervisor_leaves_nobody_behind(start: Start, model: Path) -> None:
    up = start("up", "--model", str(model), "--port", "0", *SMALL)
    api(up)
    everything = up.children()
    assert len(everything) == 4
    up.process.kill()
    up.process.wait(10)
    assert gone(everything) == []


def test_a_second_interrupt_does_not_wait_for_answers(start: Start, model: Path) -> None:
    up = start("up", "--model", str(model), "--port", "0", "--set", "gateway.drain_s=600", *SMALL)
    url = api(up)
    everything = up.children()
    with urllib.request.urlopen(
        urllib.request.Request(
            f"{url}/completions",
            json.dumps(
                {"model": "tiny-llama", "prompt": "x", "max_tokens": 1900, "stream": True, "ignore_eos": True}
            ).encode(),
            {"content-type": "application/json"},
        ),
        timeout=60,
    ) as stream:
        assert stream.readline().startswith(b"data: ")
        up.process.send_signal(signal.SIGINT)
        up.wait_for("^stopping:", 20)
        up.process.send_signal(signal.SIGINT)
        assert up.end(20) == 130
    assert gone(everything) == []


def test_a_model_that_is_refused_ends_up_with_its_reason(start: Start, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    up = start("up", "--model", str(tmp_path), "--port", "0", *SMALL)
    assert up.end(READY_S) == 78
    said = "\n".join(up.lines)
    assert "mamba" in said.lower()
    assert "refused to start" in said
    assert "Traceback" not in said


@pytest.mark.smollm2
def test_the_demo_answers_three_questions_and_leaves_nothing(start: Start) -> None:
    demo = start("demo")
    assert demo.end(200) == 0, "\n".join(demo.lines)
    said = "\n".join(demo.lines)
    assert said.count("TTFT") == 3
    answer = demo.lines[demo.lines.index("> What is the capital of France?") + 1]
    assert "Paris" in answer
    assert re.search(r"KV by shm\)?", said)
    assert re.fullmatch(r"stopped: 4 processes and \d+ shared-memory segments are gone", demo.lines[-1])


def test_a_demo_that_fails_says_so(start: Start, model: Path) -> None:
    """No question fits in so short a context: the gateway refuses it, the demo ends with 1 and still cleans up."""
    demo = start("demo", "--model", str(model), "--set", "model.max_model_len=32", *SMALL)
    assert demo.end(READY_S) == 1, "\n".join(demo.lines)
    assert any("the limit of 'tiny-llama' is 32 tokens" in line for line in demo.lines), "\n".join(demo.lines)
    assert demo.lines[-1].startswith("stopped: 4 processes")
