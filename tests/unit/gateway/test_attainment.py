"""Whether a request got what it was promised."""

import pytest

from distserve.errors import (
    Cancelled,
    DeadlineExceeded,
    DistServeError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    RateLimited,
    Shed,
    SloUnattainable,
    WorkerLost,
)
from distserve_gateway.attainment import Attained, attained, is_failure, is_refusal
from distserve_gateway.calls import Terms

NOTHING, TTFT, TPOT, DEADLINE = Terms(), Terms(ttft_s=1.0), Terms(tpot_s=0.1), Terms(deadline_s=10.0)
ALL = Terms(ttft_s=1.0, tpot_s=0.1, deadline_s=10.0)


@pytest.mark.parametrize(
    ("terms", "ttft_s", "tpot_s", "e2e_s", "wanted"),
    [
        (NOTHING, 100.0, 100.0, 1000.0, "unpromised"),
        (TTFT, 1.0, 9.0, 99.0, "yes"),
        (TTFT, 1.001, 0.01, 1.1, "no"),
        (TTFT, None, None, 0.2, "yes"),  # no token was wanted: its end is what was waited for
        (TTFT, None, None, 1.2, "no"),
        (TPOT, 50.0, 0.1, 60.0, "yes"),
        (TPOT, 0.1, 0.1001, 1.0, "no"),
        (TPOT, 0.1, None, 0.1, "yes"),  # one token has no time between tokens
        (DEADLINE, 9.0, 3.0, 10.0, "yes"),
        (DEADLINE, 0.1, 0.01, 10.1, "no"),
        (ALL, 1.0, 0.1, 10.0, "yes"),
        (ALL, 1.1, 0.1, 10.0, "no"),
        (ALL, 1.0, 0.2, 10.0, "no"),
        (ALL, 1.0, 0.1, 11.0, "no"),
    ],
)
def test_a_whole_answer(
    terms: Terms, ttft_s: float | None, tpot_s: float | None, e2e_s: float, wanted: Attained
) -> None:
    assert attained(terms, complete=True, e2e_s=e2e_s, ttft_s=ttft_s, tpot_s=tpot_s) == wanted


@pytest.mark.parametrize(
    ("error", "ttft_s", "e2e_s", "wanted"),
    [
        (WorkerLost("gone"), 0.1, 0.5, "no"),  # it failed, however early
        (DistServeError("internal error"), 0.1, 0.5, "no"),
        (DeadlineExceeded("late"), 0.1, 10.0, "no"),
        (None, 0.1, 0.5, "unpromised"),  # the client left: nobody knows
        (Cancelled("by its client"), None, 0.5, "unpromised"),
        (InvalidRequest("a worker found fault with it"), None, 0.5, "unpromised"),
        (None, None, 1.5, "no"),  # it left after it had waited for too long
        (Cancelled("by its client"), 1.2, 1.5, "no"),
    ],
)
def test_an_answer_that_ended_early(
    error: DistServeError | None, ttft_s: float | None, e2e_s: float, wanted: Attained
) -> None:
    assert attained(ALL, complete=False, error=error, e2e_s=e2e_s, ttft_s=ttft_s, tpot_s=None) == wanted
    assert attained(NOTHING, complete=False, error=error, e2e_s=e2e_s, ttft_s=ttft_s, tpot_s=None) == "unpromised"


@pytest.mark.parametrize("error", [Overloaded(""), NoWorker(""), Shed(""), SloUnattainable(""), RateLimited("")])
def test_what_is_turned_away_is_refused(error: DistServeError) -> None:
    assert is_refusal(error)


@pytest.mark.parametrize("error", [None, InvalidRequest(""), Cancelled("")])
def test_what_its_client_did_is_neither_a_refusal_nor_a_failure(error: DistServeError | None) -> None:
    assert not is_refusal(error)
    assert not is_failure(error)


@pytest.mark.parametrize("error", [WorkerLost(""), DeadlineExceeded(""), DistServeError("")])
def test_what_went_wrong_here_is_a_failure(error: DistServeError) -> None:
    assert is_failure(error)
    assert not is_refusal(error)
