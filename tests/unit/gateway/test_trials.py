"""Requests on their way to a first token, and what the breaker learns from them."""

import logging
from dataclasses import replace

import pytest

from distserve.errors import (
    BusTimeout,
    Cancelled,
    DeadlineExceeded,
    DistServeError,
    InvalidRequest,
    NoWorker,
    SloUnattainable,
)
from distserve_gateway.breaker import State
from distserve_gateway.trials import Trial, Trials
from tests.unit.gateway.test_breaker import POLICY, Clock

ONE = replace(POLICY, for_s=1, num_probes=1)


class Bench:
    """Trials by a clock of their own, and the states that were told."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.told: list[State] = []
        self.trials = Trials(ONE, self.clock, self.told.append)

    def begin(self, *, probe: bool = False) -> Trial:
        return self.trials.begin(self.clock.now, "normal", probe=probe)

    def second(self) -> None:
        self.clock.now += 1.0
        self.trials.second()

    def to_half_open(self) -> None:
        self.begin()
        self.second()
        self.clock.now += ONE.open_s
        assert self.trials.breaker.state == "half_open"

    def probe(self) -> Trial:
        assert self.trials.breaker.place("normal") == "probe"
        return self.begin(probe=True)


def test_a_late_first_token_opens_it_and_one_in_time_does_not(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for waited_s, state in ((0.2, "closed"), (0.4, "open")):
        trial = bench.begin()
        bench.clock.now += waited_s
        trial.first_token()
        trial.first_token()  # of another of its outputs
        trial.left()
        with caplog.at_level(logging.WARNING):
            bench.second()
        assert bench.trials.p99_s == pytest.approx(waited_s)
        assert bench.trials.breaker.state == state
    assert bench.told == ["open"]
    [line] = [record.getMessage() for record in caplog.records]
    assert "is open, was closed: the P99 of times to first token is 400 ms, over 300 ms for 1 s" in line


def test_a_request_that_still_waits_opens_it() -> None:
    bench = Bench()
    bench.begin()
    bench.second()
    assert bench.trials.breaker.state == "open"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (NoWorker("none"), "open"),
        (BusTimeout("nobody answers"), "open"),
        (SloUnattainable("late"), "closed"),
        (SloUnattainable("late", retry_after_s=1.0), "closed"),
        (SloUnattainable("all were full", retry_after_s=1.0, overdue=True), "open"),
        (SloUnattainable("a promise too short", retry_after_s=1.0, overdue=False), "closed"),
        (DeadlineExceeded("its client's"), "closed"),
        (InvalidRequest("bad"), "closed"),
        (Cancelled("gone"), "closed"),
    ],
)
def test_an_error_of_ours_before_the_first_token_is_a_late_one(error: Exception, state: State) -> None:
    bench = Bench()
    trial = bench.begin()
    trial.failed(error)  # type: ignore[arg-type]
    trial.left()
    bench.second()
    assert bench.trials.breaker.state == state


def test_a_failure_after_the_first_token_says_nothing() -> None:
    bench = Bench()
    trial = bench.begin()
    trial.first_token()
    trial.failed(NoWorker("lost"))
    bench.second()
    assert bench.trials.breaker.state == "closed"


def test_a_probe_in_time_closes_it_and_old_waits_are_forgotten() -> None:
    bench = Bench()
    bench.to_half_open()  # one request waits since then
    bench.probe().first_token()
    assert bench.told == ["open", "half_open", "closed"]
    bench.second()
    assert bench.trials.breaker.state == "closed", "what was late before it closed is known"


def test_a_probe_is_late_as_soon_as_it_has_waited_too_long() -> None:
    bench = Bench()
    bench.to_half_open()
    probe = bench.probe()
    bench.second()
    assert bench.trials.breaker.state == "open"
    bench.clock.now += ONE.open_s
    bench.trials.second()
    probe.first_token()  # of an older time
    assert bench.trials.breaker.state == "half_open"


def test_a_probe_whose_client_leaves_in_time_is_no_verdict() -> None:
    bench = Bench()
    bench.to_half_open()
    probe = bench.probe()
    bench.clock.now += 0.2
    probe.left()
    assert bench.trials.breaker.state == "half_open"
    bench.probe().first_token()
    assert bench.trials.breaker.state == "closed"


def test_a_probe_whose_client_leaves_since_it_waited_too_long_is_late() -> None:
    bench = Bench()
    bench.to_half_open()
    probe = bench.probe()
    bench.clock.now += 0.4
    probe.left()
    assert bench.trials.breaker.state == "open"


def test_a_probe_that_fails_is_late() -> None:
    bench = Bench()
    bench.to_half_open()
    bench.probe().failed(NoWorker("none"))
    assert bench.trials.breaker.state == "open"


@pytest.mark.parametrize("fields", [{}, {"overdue": True}])
def test_a_probe_that_is_refused_for_its_promise_is_late(fields: dict[str, bool]) -> None:
    """Else none under promised traffic would ever have a verdict."""
    bench = Bench()
    bench.to_half_open()
    probe = bench.probe()
    probe.failed(SloUnattainable("others wait before it", retry_after_s=1.0, **fields))
    probe.left()
    assert bench.trials.breaker.state == "open"


@pytest.mark.parametrize(
    "error",
    [
        SloUnattainable("an idle worker would be too slow"),
        SloUnattainable("a promise too short", retry_after_s=1.0, overdue=False),
        DeadlineExceeded("its client's"),
    ],
)
def test_a_probe_that_its_client_made_impossible_gives_its_place_to_another(error: DistServeError) -> None:
    bench = Bench()
    bench.to_half_open()
    probe = bench.probe()
    probe.failed(error)
    probe.left()
    assert bench.trials.breaker.state == "half_open"
    bench.probe().first_token()
    assert bench.trials.breaker.state == "closed"


def test_a_deadline_after_too_long_a_wait_makes_a_probe_late() -> None:
    bench = Bench()
    bench.to_half_open()
    probe = bench.probe()
    bench.clock.now += 0.4
    probe.failed(DeadlineExceeded("its client's"))
    probe.left()
    assert bench.trials.breaker.state == "open"
