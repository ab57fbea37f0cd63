"""A receiver that is down, slow or refuses: a word now and then, and the process ends in time all the same."""

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distserve.telemetry import begin, exporting, finish, setup_tracing
from tests.cluster import free_port, wait_until
from tests.otlp import Receiver


@pytest.fixture
def said() -> Iterator[list[logging.LogRecord]]:
    """Warnings, whoever says them."""

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    records: list[logging.LogRecord] = []
    kept = Kept(logging.WARNING)
    logging.getLogger().addHandler(kept)
    yield records
    logging.getLogger().removeHandler(kept)


def spans(num: int) -> None:
    for _ in range(num):
        finish(begin("s"))


def test_a_receiver_that_refuses_is_named_once_and_not_for_each_batch(said: list[logging.LogRecord]) -> None:
    with Receiver() as receiver:
        receiver.status = 400
        end = setup_tracing("x", receiver.url)
        for i in range(1, 5):
            spans(exporting.BATCH_SPANS)
            wait_until(lambda i=i: receiver.num_posts >= i, 10, "the next batch")  # type: ignore[misc]
        end()
    [warning] = [record for record in said if receiver.url in record.getMessage()]
    assert warning.name == "distserve.telemetry.exporting"
    assert (
        f"{exporting.BATCH_SPANS} spans or more are lost: {receiver.url} does not take them: " in warning.getMessage()
    )
    assert "400" in warning.getMessage()


def test_one_that_did_not_end_in_time_does_not_speak_for_the_next(
    said: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "END_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        end = setup_tracing("x", f"http://127.0.0.1:{silent.getsockname()[1]}")
        spans(exporting.BATCH_SPANS)
        end()
    monkeypatch.undo()
    test_a_receiver_that_refuses_is_named_once_and_not_for_each_batch(said)


def test_more_spans_than_it_takes_are_dropped_with_one_word(
    said: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "MAX_QUEUED", 1024)
    monkeypatch.setattr(exporting, "END_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        end = setup_tracing("x", url)
        spans(5000)
        end()
    assert [record.getMessage() for record in said if "Queue full" in record.getMessage()] == [
        f"1 spans or more are lost: {url} does not take them: Queue full, dropping Span."
    ]
    assert {record.name for record in said} == {"distserve.telemetry.exporting"}  # the SDK's words stay away


@pytest.mark.parametrize("listens", [True, False])
def test_the_end_does_not_wait_for_a_receiver_that_is_gone(listens: bool, said: list[logging.LogRecord]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if not listens:
            silent.close()
        end = setup_tracing("x", url)
        spans(10)
        began = time.monotonic()
        end()
        took_s = time.monotonic() - began
    assert took_s < exporting.END_S + 1.5
    assert 1 <= len([record for record in said if url in record.getMessage()]) <= 2
    assert {record.name for record in said} == {"distserve.telemetry.exporting"}  # the SDK's words stay away


def test_spans_arrive_once_the_receiver_is_there(said: list[logging.LogRecord]) -> None:
    with Receiver() as receiver:
        receiver.status = 503
        end = setup_tracing("x", receiver.url)
        spans(3)
        wait_until(lambda: receiver.num_posts > 0, 10, "the first try")
        receiver.status = 200
        assert len(receiver.wait_for(lambda r: r.spans())) == 3
        end()
    assert not [record for record in said if receiver.url in record.getMessage()]


def test_the_end_sends_what_is_there() -> None:
    with Receiver() as receiver:
        end = setup_tracing("x", receiver.url + "/")
        spans(700)
        end()
        assert len(receiver.spans()) == 700


def test_a_second_set_up_is_as_good_as_the_first() -> None:
    for _ in range(2):
        with Receiver() as receiver:
            end = setup_tracing("x", receiver.url)
            spans(1)
            end()
            assert len(receiver.spans()) == 1


def test_the_receiver_is_a_program_too(tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "spans.jsonl"
    command = [sys.executable, "-m", "tests.otlp", "--port", str(port), "--file", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == f"listening on http://127.0.0.1:{port}\n"
            end = setup_tracing("x", f"http://127.0.0.1:{port}")
            spans(2)
            end()
            found = [json.loads(line) for line in file.read_text().splitlines()]
        finally:
            program.terminate()
    assert [(span["name"], span["resource"]["service.instance.id"]) for span in found] == [("s", "x")] * 2


def test_a_password_in_the_endpoint_is_not_said(said: list[logging.LogRecord]) -> None:
    with Receiver() as receiver:
        receiver.status = 400
        url = receiver.url.replace("://", "://me:secret@")
        end = setup_tracing("x", url)
        spans(1)
        end()
        messages = [record.getMessage() for record in said if receiver.url in record.getMessage()]
    assert len(messages) == 1
    assert "secret" not in messages[0]
