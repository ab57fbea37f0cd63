"""`distserve monitor` as a user has it: a process, on a terminal of its own or without one."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec
import pytest

from tests.cluster import free_port
from tests.status_server import StatusServer, busy_status, status_server

PATIENCE_S = 20.0
CLEAR, ALTERNATE, NORMAL, CURSOR = "\x1b[H", "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
# A process on a terminal that is its own: Ctrl-C and resizes come as signals.
_OWN = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'distserve.cli', *sys.argv[1:]])"
)


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_") and k not in ("COLUMNS", "LINES")}
    return clean | {"TERM": "xterm-256color"}


class OnTerminal:
    """`distserve monitor …` on a terminal of `width` and `height`."""

    def __init__(self, width: int, height: int, *args: str) -> None:
        self.master, self._slave = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self._slave)
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN, "monitor", *args],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            env=environment(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.master)
        os.close(self._slave)

    def resize(self, width: int, height: int) -> None:
        self.size = (width, height)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self, timeout_s: float) -> None:
        if select.select([self.master], [], [], timeout_s)[0]:
            self.seen += os.read(self.master, 65536).decode(errors="replace")

    def frame(self) -> list[str]:
        """The last whole picture, without its colours."""
        frames = self.seen.split(CLEAR)
        last = frames[-2] if len(frames) > 2 else ""
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", last).replace("\r", "").split("\n")

    def until(self, words: str) -> list[str]:
        """The first whole picture from now on that has these words."""
        self.seen = ""
        deadline = time.monotonic() + PATIENCE_S
        while not any(words in line for line in self.frame()):
            assert time.monotonic() < deadline, f"{words!r} is not in {self.frame()}"
            assert self.process.poll() is None, self.seen
            self.read(0.1)
        return self.frame()

    def end(self) -> int:
        """Its exit status, once it has ended by itself and the terminal is as it was."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self.read(0.05)
        self.read(0.2)
        assert termios.tcgetattr(self._slave) == self.before
        assert NORMAL in self.seen
        assert self.seen.rindex(CURSOR) > 0
        assert ALTERNATE not in self.seen[self.seen.rindex(NORMAL) :]
        return self.process.returncode


@pytest.fixture
def server() -> Iterator[StatusServer]:
    with status_server() as s:
        yield s


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_it_fits_the_terminal_and_q_leaves_it_as_it_was(server: StatusServer, width: int, height: int) -> None:
    with OnTerminal(width, height, "--url", server.url, "--interval", "200ms") as t:
        lines = t.until("TTFT")
        assert len(lines) == height
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert "DistServe 1.2.3  tiny  gateway-0" in text
        assert "q quits   every 200 ms" in lines[-1]
        assert ("E2E" in text) == (height == 40)
        num_asked = server.num_asked
        t.until("TTFT")
        assert server.num_asked > num_asked
        t.type("q")
        assert t.end() == 0


def test_ctrl_c_leaves_the_terminal_as_it_was(server: StatusServer) -> None:
    with OnTerminal(80, 24, "--url", server.url) as t:
        t.until("TTFT")
        t.type("\x03")
        assert t.end() == 0
        assert "Traceback" not in t.seen


def test_so_does_sigterm(server: StatusServer) -> None:
    with OnTerminal(80, 24, "--url", server.url) as t:
        t.until("TTFT")
        t.process.send_signal(signal.SIGTERM)
        assert t.end() == 128 + signal.SIGTERM
        assert "Traceback" not in t.seen


def test_a_terminal_that_grows_gets_more(server: StatusServer) -> None:
    with OnTerminal(80, 24, "--url", server.url, "--interval", "1m") as t:
        t.until("TTFT")
        t.resize(120, 40)
        assert len(t.until("E2E")) == 40


def test_a_server_that_goes_away_and_comes_back(server: StatusServer) -> None:
    with OnTerminal(80, 24, "--url", server.url, "--interval", "100ms") as t:
        t.until("TTFT")
        server.stop()
        gone = t.until("Connection refused")
        assert "The last picture, " in gone[0]
        assert any("TTFT" in line for line in gone)
        assert not [c for c in re.findall(r"\x1b\[([\d;]+)m[^\x1b\n]*TTFT", t.seen) if c != "2"], "grey"
        server.show(msgspec.structs.replace(busy_status(), model="another"))
        server.start()
        assert "another" in t.until("another")[0]
        t.type("Q")
        assert t.end() == 0


def test_a_server_that_was_never_there_is_waited_for() -> None:
    with OnTerminal(80, 24, "--url", f"http://127.0.0.1:{free_port()}", "--interval", "100ms") as t:
        t.until("Trying again.")
        t.type("q")
        assert t.end() == 0


def test_a_wrong_key_ends_it_with_a_clean_terminal(server: StatusServer) -> None:
    server.key = "sk-right"
    with OnTerminal(80, 24, "--url", server.url) as t:
        assert t.end() == 1
        assert "no such key" in t.seen[t.seen.rindex(NORMAL) :]


# ---------------------------------------------------------------- without a terminal


def monitor(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "distserve.cli", "monitor", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment() | {"COLUMNS": "100", "NO_COLOR": "1"} | env,
        check=False,
    )


def first_lines(num: int, *args: str) -> list[str]:
    """Of one that would go on; it is interrupted."""
    command = [sys.executable, "-m", "distserve.cli", "monitor", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as p:
        assert p.stdout is not None
        assert p.stderr is not None
        try:
            lines = [p.stdout.readline() for _ in range(num)]
            p.send_signal(signal.SIGINT)
            _, said = p.communicate(timeout=10)  # reads on: with a full pipe it could not end
            assert p.returncode == 130
            assert "Traceback" not in said
        finally:
            p.kill()
    return lines


def test_once_is_one_plain_picture(server: StatusServer) -> None:
    server.key = "sk-right"
    done = monitor("--url", server.url, "--once", DISTSERVE_API_KEY="sk-right")
    assert (done.returncode, done.stderr) == (0, "")
    assert "DistServe 1.2.3  tiny" in done.stdout
    assert "\x1b" not in done.stdout
    assert server.num_asked == 1


def test_without_a_terminal_pictures_follow_each_other(server: StatusServer) -> None:
    lines = first_lines(80, "--url", server.url, "--interval", "100ms")
    assert len([line for line in lines if line.startswith("DistServe 1.2.3")]) >= 2


def test_json_is_a_whole_status_a_line(server: StatusServer) -> None:
    document = msgspec.json.decode(msgspec.json.encode(busy_status())) | {"newer": True}
    server.body = msgspec.json.format(msgspec.json.encode(document), indent=2)
    lines = first_lines(2, "--url", server.url, "--json", "--interval", "100ms")
    assert [json.loads(line) for line in lines] == [document] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gateway.tokens_per_s", "412"),
        ("gateway.breaker", "closed"),
        ("gateway.classes.batch.attainment", "nan"),
        ("services.decode-1.num_running", "4"),
        ("flows.shm.prefill.bytes_per_s", "90000000"),
        ('distserve_worker_running_sequences{worker="decode-1"}', "4"),
        ("distserve_gateway_live_sequences", "7"),
    ],
)
def test_a_metric_is_a_line_of_time_and_value(server: StatusServer, name: str, value: str) -> None:
    done = monitor("--url", server.url, "--metric", name, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    at, found = done.stdout.split()
    assert found == value
    assert abs(float(at) - time.time()) < 60


def test_a_series_goes_on(server: StatusServer) -> None:
    lines = first_lines(3, "--url", server.url, "--metric", "distserve_gateway_live_sequences", "--interval", "100ms")
    times = [float(line.split()[0]) for line in lines]
    assert [line.split()[1] for line in lines] == ["7"] * 3
    assert 0.1 < times[2] - times[0] < 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gateway.ttft.p95", "gateway.ttft.p90"),
        ("distserve_worker_runing_sequences", "distserve_worker_running_sequences"),
        ('distserve_worker_running_sequences{worker="decode-9"}', 'worker="decode-1"'),
        ("distserve_worker_running_sequences", "is 2 series"),
        ("a{", "neither a name"),
    ],
)
def test_a_metric_that_is_not_one_is_refused_with_those_near(server: StatusServer, name: str, words: str) -> None:
    done = monitor("--url", server.url, "--metric", name, COLUMNS="400")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (("--interval", "soon"), 2, "500ms, 1s or 2m"),
        (("--json", "--metric", "warnings"), 2, "one of them"),
        (("--url", "nowhere"), 78, "http://HOST:PORT"),
        (("--once", "--url", "http://127.0.0.1:1"), 1, "Connection refused"),
    ],
)
def test_wrong_usage_says_what_would_do(args: tuple[str, ...], status: int, words: str) -> None:
    done = monitor(*args, COLUMNS="400")
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_whoever_reads_may_leave(server: StatusServer) -> None:
    command = f"{sys.executable} -m distserve.cli monitor --url {server.url} --json --interval 100ms | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


def test_the_command_stands_in_the_help() -> None:
    assert "--metric" in monitor("--help").stdout
