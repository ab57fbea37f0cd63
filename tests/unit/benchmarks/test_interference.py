"""What counts of answers and long prompts that ran beside each other."""

import json
from typing import Any

import pytest

from benchmarks.all_rows import interference_rows
from benchmarks.interference_load import Asked, Mixed, Plan, taken, waiting
from benchmarks.interference_report import pays_from, report, table
from benchmarks.load_sse import Piece

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*times_s: float) -> list[Piece]:
    """A token at each of these times."""
    event = chunk(b"data: " + json.dumps({"choices": [{"token_ids": [7]}]}).encode() + b"\n\n")
    return [(0.0, HEAD), *((t, event) for t in times_s), (times_s[-1], chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")]


def test_only_what_came_in_the_window_counts() -> None:
    """Sent at 100 s: tokens at 109, 111, 114, 121; the window is 110 to 120."""
    steady = [Asked(100.0, stream(9.0, 11.0, 14.0, 21.0), 121.0)]
    long = [Asked(105.0, stream(1.0), 107.0), Asked(112.0, stream(3.0), 116.0), Asked(119.0, None, 150.0)]
    found = taken(steady, long, 110.0, 120.0)
    assert found.gaps_s == pytest.approx([2.0, 3.0])
    assert found.tokens_per_s == pytest.approx(0.2)
    assert found.long_ttfts_s == pytest.approx([3.0, 31.0])
    assert found.num_unanswered == 1
    assert found.queue == (0, 1)


def test_long_prompts_wait_from_their_sending_to_their_first_token() -> None:
    firsts = [(0.0, 4.0), (2.0, 8.0), (4.0, 12.0)]
    assert [waiting(firsts, t) for t in (1.0, 3.0, 5.0, 9.0, 13.0)] == [1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("queue", "num_unanswered", "grows"), [((1, 2), 0, False), ((1, 3), 0, True), ((0, 1), 1, True), ((3, 1), 0, False)]
)
def test_a_queue_that_grows_is_no_rate_that_is_sustained(
    queue: tuple[int, int], num_unanswered: int, grows: bool
) -> None:
    assert Mixed([0.1], 1.0, [1.0], num_unanswered, queue).grows is grows


def test_long_prompts_come_until_the_window_ends() -> None:
    assert Plan(every_s=8.0, warm_s=8.0, window_s=40.0).num_long == 6
    assert Plan(every_s=None).num_long == 0


def row(side: str, every_s: float | None, itl_ms: float, *, number: int = 1, grows: bool = False) -> dict[str, Any]:
    return {
        "side": side,
        "every_s": every_s,
        "round": number,
        "itl_p99_s": itl_ms / 1e3,
        "tokens_per_s": 100.0,
        "long_ttfts_s": [1.0, 3.0],
        "grows": grows,
        "other_cores": 0.0,
    }


def test_the_table_has_each_sides_ratio_made_within_rounds() -> None:
    rows = [row("apart", None, 20), row("apart", 2.0, 30), row("vllm", None, 30), row("vllm", 2.0, 90, grows=True)]
    rows += [row("apart", None, 10, number=2), row("apart", 2.0, 20, number=2)]
    text = table(rows, 2.0)
    assert "| apart | 15.0 (10.0 to 20.0) -> 25.0 (20.0 to 30.0) | 1.75 (1.50 to 2.00) |" in text
    assert "| vllm ! | 30.0 -> 90.0 | 3.00 | 100.0 -> 100.0 | 2.00 / 2.98 |" in text


def test_the_rate_that_all_sustain_is_the_highest_without_a_queue_that_grows() -> None:
    rows = [row(s, e, 50, grows=e == 2.0 and s == "apart") for s in ("apart", "colocated") for e in (8.0, 4.0, 2.0)]
    assert "every side sustains: one every 4 s" in report(rows)


def test_apart_pays_from_the_rate_on_from_which_it_stays_ahead() -> None:
    ours = {8.0: 50, 6.0: 40, 4.0: 55, 2.0: 60}
    theirs = {8.0: 40, 6.0: 60, 4.0: 70, 2.0: 90}
    rows = [row("apart", e, ms) for e, ms in ours.items()] + [row("colocated", e, ms) for e, ms in theirs.items()]
    assert pays_from(rows, "colocated") == 6.0
    rows += [row("vllm", e, 10) for e in ours]
    assert pays_from(rows, "vllm") is None


def test_each_rate_and_side_has_a_row_of_the_one_table() -> None:
    cells = [row("apart", None, 20), row("apart", 4.0, 30), row("apart", 2.0, 40, grows=True)]
    slow, fast = interference_rows({"cells": cells})
    assert slow == (
        "8 answers beside 2,048 tokens every 4 s, apart",
        "ITL P99 20 -> 30 ms, ratio 1.50, long TTFT P50 2.0 s",
    )
    assert fast.figure == "ITL P99 20 -> 40 ms, ratio 2.00, long TTFT P50 2.0 s !"
