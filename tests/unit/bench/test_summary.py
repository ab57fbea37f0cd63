"""Figures of answers: what counts in a window, and what does not."""

import math
import random
from typing import Any

import pytest

from distserve.bench.answers import THROTTLED, Result
from distserve.bench.compare import ratios, slices
from distserve.bench.document import Side
from distserve.bench.drive import Limits
from distserve.bench.server import ServerInfo
from distserve.bench.summary import Window, arrivals, distribution, in_flight, summarise
from distserve.bench.text import cell, notes, requests_in_words
from distserve.bench.traffic import Traffic
from distserve.bench.warnings import server_warnings


def ok(due_s: float, *times_s: float, **more: Any) -> Result:
    """An answer with a token at each of these times."""
    fields: dict[str, Any] = {
        "index": 0,
        "due_s": due_s,
        "sent_s": due_s,
        "done_s": times_s[-1],
        "num_input_asked": 10,
        "num_output_asked": len(times_s),
        "num_input": 10,
        "num_output": len(times_s),
        "times_s": list(times_s),
        "counts": [1] * len(times_s),
    }
    return Result(**fields | more)


def failed(due_s: float, kind: str, **more: Any) -> Result:
    return Result(index=0, due_s=due_s, done_s=due_s + 1, kind=kind, num_input_asked=10, num_output_asked=4, **more)


def test_the_warm_up_is_left_out_but_its_tokens_within_the_window_count() -> None:
    results = [ok(-2.0, -1.0, 0.5, 1.0), ok(0.0, 1.0, 2.0), ok(8.0, 9.0, 12.0)]
    found = summarise(results, [(0.0, 10.0)], {}, is_open=False)
    assert (found.num_warm, found.num_requests, found.num_ok) == (1, 2, 2)
    assert found.output_tokens_per_s == pytest.approx(5 / 10)
    assert found.requests_per_s == pytest.approx(2 / 10)  # the last ended after the window
    assert found.input_tokens_per_s == pytest.approx(20 / 10)
    assert found.latencies["ttft"].num == 2
    assert found.latencies["ttft"].mean_s == pytest.approx(1.0)
    assert found.latencies["itl"].mean_s == pytest.approx((1 + 3) / 2)
    assert found.good_requests_per_s is None
    assert "ttft_from_sent" not in found.latencies


def test_goodput_counts_of_all_that_were_sent() -> None:
    results = [ok(0, 0.1, 0.2), ok(1, 1.4, 1.5), failed(2, THROTTLED, retry_after="1"), failed(3, "deadline")]
    found = summarise(results, [(0.0, 4.0)], {"ttft": 0.3}, is_open=True)
    assert found.good_share == 0.25
    assert found.good_requests_per_s == 0.25
    assert (found.num_throttled, found.num_retry_after) == (1, 1)
    assert {kind: f.num for kind, f in found.failures.items()} == {THROTTLED: 1, "deadline": 1}
    assert "1 throttled (1 with Retry-After)" in requests_in_words(found)


def test_goodput_is_a_part_of_the_requests_that_ended_in_the_window() -> None:
    """A good one of the warm-up that ended within it counts, one that ended behind it does not."""
    results = [ok(-0.1, 0.1), ok(0, 0.2), ok(3.9, 4.1), ok(3.9, 4.1)]
    found = summarise(results, [(0.0, 4.0)], {"ttft": 0.3}, is_open=True)
    assert found.good_requests_per_s == found.requests_per_s == 0.5
    assert found.good_share == 1.0


def test_lengths_are_compared_with_what_was_asked() -> None:
    results = [ok(0, 1, 2), ok(0, 1, 2, num_input=11), ok(0, 1, 2, num_output_asked=5), ok(0, 1, usage_told=False)]
    found = summarise(results, [(0.0, 2.0)], {}, is_open=False)
    assert (found.num_input_told, found.num_input_as_asked) == (4, 3)
    assert (found.num_output_told, found.num_output_as_asked) == (3, 2)


def test_events_that_do_not_say_how_many_tokens_they_bring_have_an_even_share() -> None:
    assert arrivals(ok(0, 1, 2, num_output=6, counted="events")) == [(1, 3.0), (2, 3.0)]


def test_in_flight_is_from_sending_to_the_end() -> None:
    assert in_flight([ok(0, 2.0), ok(1, 3.0)]) == [(0, 1), (1, 2), (2, 1), (3, 0)]
    assert in_flight([failed(0, "connection refused")]) == []  # never sent


def test_a_quantile_of_too_few_samples_says_how_many_it_needs() -> None:
    few = distribution([[float(i)] for i in range(99)])
    assert few.quantiles["p90"].value_s is None
    assert cell(few.quantiles["p90"]) == "n/a"
    assert few.quantiles["p90"].needs == 100
    summary = summarise([ok(0, 1.0, 2.0)] * 30, [(0.0, 2.0)], {}, is_open=False)
    assert "n/a: too few samples; needed are P90 100, P99 1,000, P99.9 10,000 (10 beyond the quantile)" in notes(
        summary
    )


def test_nothing_at_all_is_no_division_by_zero() -> None:
    found = summarise([], [(0.0, 0.0)], {"ttft": 1.0}, is_open=True)
    assert (found.num_requests, found.output_tokens_per_s, found.good_share) == (0, 0, None)
    assert "no request was due" in server_warnings(side([], []))[0]


# ---------------------------------------------------------------- comparisons


def side(results: list[Result], windows: list[Window], name: str = "") -> Side:
    info = ServerInfo(url="http://h", endpoint="/v1", model="m", facts={}, dropped=[], lengths_by="x")
    return Side(name=name, server=info, windows=windows, summary=summarise(results, windows, {}, is_open=True))


def pairs(rng: random.Random, factor: float, num: int = 8, each: int = 12) -> list[tuple[list[Result], list[Result]]]:
    """Slices in which the machine is fast or slow for both."""
    found = []
    for i in range(num):
        slow = rng.uniform(1, 3)
        a = [ok(10.0 * i, 10.0 * i + slow * rng.uniform(0.9, 1.1), server="A") for _ in range(each)]
        b = [ok(10.0 * i, 10.0 * i + factor * slow * rng.uniform(0.9, 1.1), server="B") for _ in range(each)]
        found.append((a, b))
    return found


def test_a_ratio_is_found_through_moods_of_the_machine_that_hit_both() -> None:
    windows = [(10.0 * i, 10.0 * i + 9) for i in range(8)]
    inside = 0
    for seed in range(20):
        a, b = ([r for part in parts for r in part] for parts in zip(*pairs(random.Random(seed), 1.25), strict=True))
        found = ratios([side(a, windows, "A"), side(b, windows, "B")], a + b)
        ttft = next(r for r in found if r.figure == "ttft p50")
        assert ttft.ratio is not None
        assert ttft.low is not None
        assert ttft.high is not None
        inside += ttft.low <= 1.25 <= ttft.high
        assert ttft.ratio == pytest.approx(1.25, rel=0.25)
    assert inside >= 16


def test_too_few_pairs_have_no_interval() -> None:
    windows = [(10.0 * i, 10.0 * i + 9) for i in range(4)]
    a, b = ([r for part in parts for r in part] for parts in zip(*pairs(random.Random(1), 2.0, num=4), strict=True))
    found = {r.figure: r for r in ratios([side(a, windows, "A"), side(b, windows, "B")], a + b)}
    assert found["ttft p50"].ratio is not None
    assert found["ttft p50"].low is None
    assert found["ttft p90"].ratio is None  # 48 samples


def test_throughput_of_a_slice_is_over_the_time_until_its_last_answer() -> None:
    """Slices of 1 s, into which what was sent in them reaches beyond, also what failed in the end."""
    windows = [(10.0 * i, 10.0 * i + 1) for i in range(6)]
    a = [ok(begin, begin + 0.5, begin + 1.0, server="A") for begin, _ in windows]
    b = [ok(begin, begin + 1.0, begin + 2.0, server="B") for begin, _ in windows]
    lost = [failed(begin + 1.0, "deadline", server="B") for begin, _ in windows]  # ends 2 s after the beginning, too
    found = {r.figure: r for r in ratios([side(a, windows, "A"), side(b, windows, "B")], a + b + lost)}
    for figure, value in (("output tokens/s", 2.0), ("requests/s", 1.0)):
        assert found[figure].a == pytest.approx(value)
        assert found[figure].ratio == pytest.approx(0.5)
    later = [failed(begin + 0.9, "deadline", server="B") for begin, _ in windows]
    none = ratios([side(a, windows, "A"), side(later, windows, "B")], a + later)
    assert {r.figure: r for r in none}["requests/s"].b == 0
    lost = [failed(begin + 0.9, "deadline", server="A") for begin, _ in windows]
    found = {r.figure: r for r in ratios([side(a, windows, "A"), side(b, windows, "B")], a + b + lost)}
    assert found["requests/s"].a == pytest.approx(1 / 1.9)


def test_slices_share_out_what_is_measured() -> None:
    parts = list(slices(Traffic("poisson", rate_hz=2.0), Limits(10, 30.0, 5, 1.0), 4))
    assert [limits.num_requests for _, limits in parts] == [3, 3, 2, 2]
    assert all(math.isclose(limits.duration_s or 0, 7.5) for _, limits in parts)
    assert all(limits.warm_requests == limits.warm_s == 0 for _, limits in parts)
    assert len({next(traffic.asks()).at_s for traffic, _ in parts}) == 4
