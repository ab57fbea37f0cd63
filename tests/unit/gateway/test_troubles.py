"""The last things that went wrong: everybody may read them, so nothing that repeats a prompt is in them."""

import pytest

from distserve.bus.base import RegistryEvent
from distserve.errors import (
    Cancelled,
    DistServeError,
    InvalidRequest,
    MalformedMessage,
    Overloaded,
    RateLimited,
    SloUnattainable,
    Unavailable,
    WorkerLost,
)
from distserve_gateway.troubles import MAX_SHOWN, MOST, Troubles


@pytest.mark.parametrize(
    ("error", "service", "message"),
    [
        (
            Unavailable("the fallback server f answered 400: 'a secret'", fallback="f"),
            "gw",
            "the fallback server f failed",
        ),
        (InvalidRequest("stop is 'a secret'", param="stop", value="a secret"), "gw", "invalid_request"),
        (MalformedMessage("'a secret' is no message"), "gw", "malformed_message"),
        (Cancelled("a secret"), "gw", "cancelled"),
        (RateLimited("API key 'a secret' may do no more"), "gw", "rate_limited"),
        (SloUnattainable("the first token would come after 3 s"), "gw", "the first token would come after 3 s"),
        (Overloaded("the queue is full", worker="p0"), "p0", "the queue is full"),
        (WorkerLost("decode worker 'd0' died", worker="d0"), "d0", "decode worker 'd0' died"),
        (DistServeError("internal error"), "gw", "internal error"),
        (None, "gw", "no reason given"),
    ],
)
def test_words_that_may_repeat_a_prompt_are_left_out(error: DistServeError | None, service: str, message: str) -> None:
    troubles = Troubles("gw")
    troubles.failed("r1", error)
    (trouble,) = troubles
    assert (trouble.service, trouble.message) == (service, f"r1: {message}")
    assert trouble.code == (error.code if error else "internal_error")


def test_the_last_ones_are_shown_and_not_whole_books() -> None:
    troubles = Troubles("gw", clock=lambda: 5.0)
    for i in range(MOST + 5):
        troubles.failed(f"r{i}", DistServeError("x" * 1000))
    shown = list(troubles)
    assert [t.message.split(":")[0] for t in shown] == [f"r{i}" for i in reversed(range(5, MOST + 5))]
    assert {len(t.message) for t in shown} == {MAX_SHOWN}
    assert {t.at_unix_s for t in shown} == {5.0}


def test_a_service_is_a_trouble_if_it_left_without_a_word() -> None:
    troubles = Troubles("gw")
    troubles.on_event(RegistryEvent("gone", "d0", None, "left"))
    troubles.on_event(RegistryEvent("gone", "d1", None, "expired"))
    assert [(t.service, t.code) for t in troubles] == [("d1", "worker_lost")]
