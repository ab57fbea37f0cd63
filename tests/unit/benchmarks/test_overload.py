"""What counts of answers and refusals."""

import math
from typing import Any

import pytest

from benchmarks.all_rows import overload_rows
from benchmarks.load import request
from benchmarks.load_sse import BadAnswer, head
from benchmarks.overload_load import Answer, answer
from benchmarks.overload_report import judged, report
from tests.unit.benchmarks.test_interference import HEAD, stream

REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\ncontent-length: 2\r\n\r\n{}"


def test_a_refusal_is_known_by_its_status_and_says_when_to_come_again() -> None:
    assert answer([(0.004, REFUSED[:30]), (0.005, REFUSED[30:])], 0.006) == Answer(429, math.inf, 0.006, "2")
    assert answer([(0.004, REFUSED.replace(b"Retry-After: 2\r\n", b""))], 0.006).retry_after == ""


def test_an_answers_first_token_counts_and_one_that_breaks_off_is_told() -> None:
    assert answer(stream(0.25, 0.5), 0.6) == Answer(200, 0.25, 0.6, "")
    assert answer([(0.1, HEAD + b"0\r\n\r\n")], 0.2).broken.startswith("the stream ended without")
    assert answer(None, 30.0) == Answer(0, math.inf, 30.0, "")


def test_what_is_not_http_is_no_answer() -> None:
    with pytest.raises(BadAnswer, match="not HTTP"):
        head([(0.1, b"hello")])


def row(side: str, *answers: tuple[int, float, float, str]) -> dict[str, Any]:
    keys = ("status", "ttft_s", "done_s", "retry_after", "broken")
    return {
        "side": side,
        "round": 1,
        "plan": {"slo_s": 1.0, "window_s": 2.0, "rate_hz": 5.0, "prompt": 512, "output": 8},
        "answers": [dict(zip(keys, (*a, ""), strict=True)) for a in answers],
        "other_cores": 0.0,
    }


NO = (429, math.inf, 0.005, "1")
ROW = row("admission", (200, 0.5, 2.0, ""), (200, 1.5, 2.0, ""), NO, (429, math.inf, 0.015, ""), (503, 9.0, 0.1, ""))


def test_a_run_is_judged_by_what_was_accepted_and_what_came_in_time() -> None:
    found = judged(ROW)
    assert found.accepted == pytest.approx(0.4)
    assert found.in_time == 0.5
    assert found.refusal_p50_s == pytest.approx(0.010)
    assert found.with_retry_after == 0.5
    assert found.goodput_hz == 0.5
    assert found.others == 1


def test_a_request_without_an_answer_was_accepted_and_is_late() -> None:
    found = judged(row("fcfs", (0, math.inf, 50.0, ""), (200, 0.1, 0.2, "")))
    assert (found.accepted, found.in_time, found.others) == (1.0, 0.5, 0)


def test_the_report_sets_goodput_beside_that_of_fcfs() -> None:
    text = report([ROW, row("fcfs", (200, 0.5, 2.0, ""), *[(200, 5.0, 6.0, "")] * 4)])
    assert "| admission | 40.0 | 50.0 | 10.0 / 14.9 | 50.0 | 0.50 | 1 |" in text
    assert "| fcfs | 100.0 | 20.0 | - / - | - | 0.50 | 0 |" in text
    assert "Goodput, admission to fcfs: 1.00 times." in text
    assert "Other statuses: {503: 1}." in text


def test_each_side_has_a_row_of_the_one_table() -> None:
    [found] = overload_rows({"cells": [ROW]})
    assert found == ("overload, admission", "accepted 40 %, of these in time 50 %, 0.50/s")


def test_a_promise_is_asked_for_by_a_header() -> None:
    head_, _, body = request([1, 2], 8, {"X-TTFT-SLO-Ms": "250"}).partition(b"\r\n\r\n")
    assert b"\r\nX-TTFT-SLO-Ms: 250" in head_
    assert request([1, 2], 8).endswith(b"\r\n\r\n" + body)
    assert b"SLO" not in request([1, 2], 8)
