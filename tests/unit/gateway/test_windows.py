"""The gateway's last seconds and its last minute, by a clock of the test's own."""

import asyncio
import math
from dataclasses import replace

import pytest

from distserve.errors import DistServeError, Overloaded, WorkerLost
from distserve.messages import Priority, SamplingParams, Timings
from distserve.status import GatewayStatus, Second
from distserve_gateway.calls import Call, Prompt, Terms
from distserve_gateway.ended import Ended
from distserve_gateway.metrics import Metrics
from distserve_gateway.windows import HISTORY_S, WINDOW_S, Windows
from tests.waiting import until

BASE = GatewayStatus(id="gw", status="ok", breaker="closed", bus_reconnects=3)
UNIX_S = 1_000_000.25


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return UNIX_S + self.now_s - 50.0


def ended(
    *,
    ttft_s: float | None = 0.1,
    tpot_s: float = 0.01,
    e2e_s: float = 1.0,
    priority: Priority = "normal",
    promised_s: float | None = None,
    error: DistServeError | None = None,
    begun: bool = True,
) -> Ended:
    terms = Terms(priority=priority, ttft_s=promised_s)
    prompts = [Prompt([1, 2, 3], SamplingParams(max_tokens=9), 9)]
    call = Call("r", "chat", "tiny", 0, prompts, terms=terms)
    return Ended(
        call=call,
        outcome="ok" if error is None else error.code,
        error=error,
        begun=begun,
        e2e_s=e2e_s,
        ttft_s=ttft_s,
        tpots_s=[tpot_s],
        num_output_tokens=5,
        num_looked_up_tokens=3,
        num_cached_tokens=2,
        finish_reasons=["stop"] if error is None else [],
        timings=Timings(queue_s=0.2, prefill_s=0.3, transfer_s=0.0, decode_s=0.5),
    )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny", lambda: 4)


@pytest.fixture
def told() -> list[Second]:
    return []


@pytest.fixture
def windows(metrics: Metrics, told: list[Second]) -> Windows:
    clock = Clock()
    return Windows(metrics, told.append, clock, clock.wall)


def test_a_second_has_what_happened_in_it_and_exact_quantiles(
    metrics: Metrics, windows: Windows, told: list[Second]
) -> None:
    for ms in range(1, 101):
        metrics.started()
        metrics.first_token(ms / 1000)
    metrics.gap(0.06, 2)
    metrics.ended(ended())
    metrics.ended(ended(error=WorkerLost("gone", worker="d0")))
    windows.second(10.0)
    windows.second(11.0)
    first, second = told
    assert (first.ttft_p50_s, first.ttft_p90_s, first.ttft_p99_s, first.ttft_max_s) == (0.05, 0.09, 0.099, 0.1)
    assert first.itl_p50_s == pytest.approx(0.03, rel=0.05)
    assert (first.at_unix_s, first.num_started, first.num_ended, first.num_failed) == (10.0, 100, 2, 1)
    assert (first.num_first_tokens, first.num_tokens, first.num_live) == (100, 102, 4)
    assert second == Second(at_unix_s=11.0, num_live=4), "nothing of the first is in it"
    assert windows.history() == told


def test_the_last_minute_slides(metrics: Metrics, windows: Windows) -> None:
    for at in range(30):
        metrics.started()
        metrics.first_token(5.0, 3)
        metrics.ended(ended(e2e_s=9.0, promised_s=1.0, ttft_s=5.0))
        windows.second(at)
    figures = windows.figures(BASE)
    assert (figures.window_s, figures.requests_per_s, figures.tokens_per_s) == (30.0, 1.0, 3.0)
    assert (figures.good_requests_per_s, figures.failed_per_s) == (0.0, 0.0)
    for at in range(30, 30 + WINDOW_S):
        for _ in range(2):
            metrics.started()
            metrics.routed("pair")
            metrics.first_token(0.1)
            metrics.gap(0.02, 1)
            metrics.ended(ended(promised_s=1.0, priority="vip"))
        windows.second(at)
    figures = windows.figures(BASE)
    assert (figures.window_s, figures.requests_per_s, figures.good_requests_per_s) == (60.0, 2.0, 2.0)
    assert figures.tokens_per_s == 4.0
    assert figures.routes_per_s == {"pair": 2.0}
    assert (figures.ttft.count, figures.itl.count, figures.e2e.count) == (120, 120, 120)
    assert figures.ttft.p99 == pytest.approx(0.1, rel=0.05), "the slow ones are over a minute old"
    assert figures.e2e.p50 == pytest.approx(1.0, rel=0.05)
    assert figures.tpot.p90 == pytest.approx(0.01, rel=0.05)
    assert figures.decode.p50 == pytest.approx(0.5, rel=0.05)
    assert figures.transfer.count == 0, "of no time nothing is known"
    assert figures.transfer.p50 is None
    assert figures.classes["vip"].attainment == 1.0
    assert figures.classes["normal"].num_requests == 0
    assert (figures.id, figures.breaker, figures.bus_reconnects, figures.num_live) == ("gw", "closed", 3, 4)


def test_classes_have_what_was_promised_kept_and_refused(metrics: Metrics, windows: Windows) -> None:
    metrics.ended(ended(promised_s=1.0))
    metrics.ended(ended(promised_s=0.05))
    metrics.ended(ended())
    metrics.ended(ended(error=Overloaded("busy"), begun=False, promised_s=1.0))
    metrics.refused("chat", Overloaded("busy"), "normal")
    windows.second(1.0)
    normal = windows.figures(BASE).classes["normal"]
    assert (normal.num_requests, normal.num_promised, normal.num_attained, normal.num_refused) == (5, 2, 1, 2)
    assert windows.figures(BASE).good_requests_per_s == 2.0


def test_of_several_outputs_the_slowest_is_held_against_the_promise() -> None:
    terms = Terms(tpot_s=0.1)
    two = replace(ended(), tpots_s=[0.01, 0.2], call=replace(ended().call, terms=terms))
    assert (two.attained, two.is_good) == ("no", False)
    assert (replace(two, tpots_s=[0.01, 0.1]).attained, replace(two, tpots_s=[]).attained) == ("yes", "yes")


def test_only_so_much_is_kept(metrics: Metrics, windows: Windows) -> None:
    for at in range(3 * HISTORY_S):
        metrics.ended(ended(error=WorkerLost(f"number {at}", worker="d0")))
        windows.second(at)
    history, troubles = windows.history(), windows.troubles()
    assert [second.at_unix_s for second in history] == [float(at) for at in range(2 * HISTORY_S, 3 * HISTORY_S)]
    assert [trouble.message for trouble in troubles] == [f"r: number {3 * HISTORY_S - 1 - i}" for i in range(20)]
    assert (troubles[0].service, troubles[0].code) == ("d0", "worker_lost")
    assert windows.figures(BASE).window_s == WINDOW_S


def test_prometheus_sees_the_last_full_second(metrics: Metrics, windows: Windows) -> None:
    def shown() -> dict[str, float]:
        (family,) = windows.families()
        return {sample.labels["quantile"]: sample.value for sample in family.samples if "quantile" in sample.labels}

    assert all(math.isnan(value) for value in shown().values())
    metrics.first_token(0.2)
    metrics.first_token(0.4)
    windows.second(1.0)
    assert shown() == {"0.5": 0.2, "0.9": 0.4, "0.99": 0.4, "1": 0.4}
    windows.second(2.0)
    assert all(math.isnan(value) for value in shown().values())


def test_seconds_that_the_event_loop_slept_through_are_told_all_the_same(metrics: Metrics, told: list[Second]) -> None:
    clock = Clock()
    windows = Windows(metrics, told.append, clock, clock.wall)
    metrics.started()
    assert windows.catch_up() == pytest.approx(0.75)
    clock.now_s = 50.75  # the first full second of the wall clock
    assert windows.catch_up() == pytest.approx(1.0)
    metrics.started()
    clock.now_s = 54.0  # instead of 51.75
    assert windows.catch_up() == pytest.approx(0.75), "on with full seconds"
    assert [second.at_unix_s - 1_000_000 for second in told] == [1.0, 2.0, 3.0, 4.0]
    assert [second.num_started for second in told] == [1, 1, 0, 0]


def test_a_wall_clock_that_is_set_is_followed(metrics: Metrics, told: list[Second]) -> None:
    clock, shift_s = Clock(), [0.0]
    windows = Windows(metrics, told.append, clock, lambda: clock.wall() + shift_s[0])
    shift_s[0] = 3600.5
    assert windows.catch_up() == pytest.approx(0.25)
    clock.now_s += 0.25
    windows.catch_up()
    assert [second.at_unix_s - 1_000_000 for second in told] == [3601.0]


async def test_it_runs_by_itself(metrics: Metrics, told: list[Second]) -> None:
    running = asyncio.create_task(Windows(metrics, told.append).run())
    try:
        await until(lambda: len(told) >= 2)
        assert told[1].at_unix_s - told[0].at_unix_s == 1.0
    finally:
        running.cancel()
