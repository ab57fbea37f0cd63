"""Asking a gateway: answers, refusals, silence; each within its deadline."""

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from typer import BadParameter

from distserve.errors import ConfigError, DistServeError, Forbidden, Unauthorized, Unavailable
from distserve.monitor.pace import Pace
from distserve.monitor.series import series
from distserve.monitor.source import Source
from distserve.monitor.watching import Watching
from tests.cluster import free_port, wait_until
from tests.status_server import StatusServer, busy_status, status_server


@pytest.fixture
def server() -> Iterator[StatusServer]:
    with status_server() as s:
        yield s


def test_a_status_comes_whole(server: StatusServer) -> None:
    status = busy_status()
    server.show(status)
    assert Source(server.url + "/").status() == status
    assert Source(server.url).metrics() == server.metrics


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h:port", "http://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        Source(url)


def test_a_key_is_sent_and_a_wrong_one_is_told_of(server: StatusServer) -> None:
    server.key = "sk-right"
    assert Source(server.url, "sk-right").status().model == "tiny"
    with pytest.raises(Unauthorized, match=r"no such key.*DISTSERVE_API_KEY"):
        Source(server.url).status()


@pytest.mark.parametrize("key", ["sk-hush\nX: y", "sk-hush…", "sk-hush\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(server: StatusServer, key: str) -> None:
    with pytest.raises(ConfigError, match="DISTSERVE_API_KEY") as caught:
        Source(server.url, key).status()
    assert "hush" not in caught.value.message + repr(caught.value.fields)
    assert server.num_asked == 0


def test_a_newline_behind_a_key_is_none_of_it(server: StatusServer) -> None:
    server.key = "sk-right"
    assert Source(server.url, "sk-right\r\n").status().model == "tiny"


@pytest.mark.parametrize("url", ["http://me:hush@h:port", "ftp://:hush@h"])
def test_a_password_in_a_wrong_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Source(url)
    assert "hush" not in caught.value.message + repr(caught.value.fields)


@pytest.mark.parametrize(
    ("code", "body", "error", "words"),
    [
        (403, b'{"error":{"message":"not for you"}}', Forbidden, "not for you"),
        (503, b"<html>", Unavailable, "503: no reason given"),
        (404, b'{"error":{"message":"not here"}}', Unavailable, "/status answers 404: not here"),
        (200, b'{"model": 3}', Unavailable, "not what this release understands"),
        (200, b"\xff", Unavailable, "not what this release understands"),
    ],
)
def test_other_answers_say_what_is_wrong(
    server: StatusServer, code: int, body: bytes, error: type[DistServeError], words: str
) -> None:
    server.code, server.body = code, body
    with pytest.raises(error, match=words):
        Source(server.url).status()


def test_a_newer_server_may_say_more(server: StatusServer) -> None:
    document = msgspec.json.decode(msgspec.json.encode(busy_status()))
    document["gateway"]["not_known_yet"] = [1, 2]
    server.body = msgspec.json.encode(document)
    assert Source(server.url).status().gateway.id == "gateway-0"


def test_nobody_there_is_told_at_once() -> None:
    with pytest.raises(Unavailable, match="Connection refused"):
        Source(f"http://127.0.0.1:{free_port()}").status()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n"])
def test_a_server_that_trickles_is_given_up_in_time(answer: bytes) -> None:
    """A byte now and then: no read of its own ever times out, be it in the headers or in the body."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                while not stop.wait(0.02):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
            Source(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3).status()
        assert time.monotonic() - began < 2.0
        stop.set()
        thread.join(5)


def test_watching_keeps_the_last_picture_while_the_server_is_away(server: StatusServer) -> None:
    server.show(busy_status(1))
    changes = threading.Semaphore(0)
    with Watching(Source(server.url, timeout_s=2.0), 0.02, changes.release) as watching:
        assert changes.acquire(timeout=5)
        wait_until(lambda: watching.view.status is not None, 5, "a first picture")
        server.stop()
        wait_until(lambda: "Connection refused" in watching.view.trouble, 5, "the server is missed")
        assert watching.view.status is not None
        taken_at = watching.view.taken_at
        server.show(busy_status(2))
        server.start()
        wait_until(lambda: not watching.view.trouble, 5, "the server is back")
        assert watching.view.taken_at > taken_at
        assert len(watching.view.status.services) == 6


def test_watching_does_not_wait_for_an_answer_when_it_ends(server: StatusServer) -> None:
    server.delay_s = 3.0
    began = time.monotonic()
    with Watching(Source(server.url), 0.1, lambda: None):
        wait_until(lambda: server.num_asked > 0, 5, "it was asked")
    assert time.monotonic() - began < 2.0


def test_a_pace_does_not_make_up_for_what_was_missed() -> None:
    began = time.monotonic()
    for i, _ in enumerate(Pace(0.1)):
        if i == 0:
            time.sleep(0.35)
        if i == 3:
            break
    assert 0.5 < time.monotonic() - began < 1.5  # the late one, then 0.1 s each but for the one at once


def test_a_recording_outlives_a_second_series_of_its_name(server: StatusServer) -> None:
    """A second worker joins, and leaves again."""
    one, two = (f'x{{role="decode",service="decode-{i}"}} {i}\n' for i in (1, 2))
    looks = iter((one + two, one, ""))
    server.metrics = one
    said: list[str] = []

    class Enough(Exception):
        pass

    def say(line: str) -> None:
        said.append(line.split()[1])
        try:
            server.metrics = next(looks)
        except StopIteration:
            raise Enough from None

    with pytest.raises(Enough):
        series(Source(server.url), 'x{role="decode"}', Pace(0.02), say)
    assert said == ["1", "nan", "1", "nan"]
    server.metrics = one + two
    with pytest.raises(BadParameter, match="is 2 series"):
        series(Source(server.url), 'x{role="decode"}', Pace(0.02), say)


def test_an_outage_is_told_of_once_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    pace = Pace(0.1)

    def away() -> int:
        raise Unavailable("gone")

    answers = [pace.tried(ask) for ask in (away, away, lambda: 1, lambda: 2, away)]
    assert answers == [None, None, 1, 2, None]
    assert capsys.readouterr().err.splitlines() == [
        "distserve: gone; trying again",
        "distserve: it answers again",
        "distserve: gone; trying again",
    ]
    with pytest.raises(Unavailable):
        Pace(0.1, once=True).tried(away)
